"""specgen: offline batch generation with speculative decoding, and acceptance statistics that can be trusted.

Boundary: the public API and the version. Everything heavy is imported on first use, so that ``import specgen`` loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "SpecgenError", "__version__", "generate", "load_rows", "load_stats"]

# In a checkout the folder `kernels` stands beside the package; installed, it is inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():
    __path__.append(str(_here.parent))

_LAZY = {
    "generate": "specgen.api",
    "Engine": "specgen.api",
    "SpecgenError": "specgen.errors",
    "load_rows": "specgen.report.stats",
    "load_stats": "specgen.report.stats",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'specgen' has no attribute {name!r}")
