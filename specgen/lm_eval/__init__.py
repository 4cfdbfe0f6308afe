"""specgen as a model of lm-evaluation-harness: ``python -m specgen.lm_eval`` is its command line with the model ``specgen`` in it.

Boundary: translates the harness's arguments and requests and gives texts back; tasks, prompts and scores are the harness's. The package ``lm_eval``
is imported with ``SpecgenLM``, not before.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SpecgenLM"]


def __getattr__(name: str) -> Any:
    if name == "SpecgenLM":
        from specgen.lm_eval.model import SpecgenLM

        return SpecgenLM
    raise AttributeError(f"module 'specgen.lm_eval' has no attribute {name!r}")
