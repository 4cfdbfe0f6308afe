"""Whole jobs as tests run them: the real command line, in this process, on toy checkpoints or the embedded family.

Boundary: builds argument lists and reads run folders; asserts nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specgen import cli
from specgen.report.stats import load_rows
from tests.toys import toy_folder

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("baseline=false", "data.limit=3", "sampling.max_tokens=12")  # an embedded job of a quarter of a second

Row = dict[str, Any]
Key = tuple[int, int]


def toy(draft: str | None = "draft_perfect", target: str = "target", check: bool = True) -> list[str]:
    """Overrides for a toy target, with a draft model of three steps or none. ``check``: every index tensor is checked."""
    found = ["model=hf", f"model.path={toy_folder() / target}", "model.device=cpu", f"engine.check_indices={str(check).lower()}"]
    if draft is None:
        return [*found, "draft=none"]
    return [*found, "draft=draft_model", f"draft.path={toy_folder() / draft}", "draft.num_steps=3"]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any] | str | bytes]) -> str:
    """A JSON Lines file; returns the overrides' value. Texts and bytes are lines as they stand."""
    with path.open("wb") as file:
        for row in rows:
            line = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)).encode()
            file.write(line + b"\n")
    return str(path)


def start(out: Path | str, *overrides: str) -> int:
    """Run one job into ``out``; the exit code."""
    return cli.main([f"output.dir={out}", *overrides])


def resume(out: Path | str, *overrides: str) -> int:
    """Go on with the job in ``out``; the exit code."""
    return cli.main([f"resume={out}", *overrides])


def rows_of(out: Path | str) -> dict[Key, Row]:
    """Rows by (index, sample), in input order. A row that stands twice is an AssertionError."""
    rows = list(load_rows(out))
    found = {(row["index"], row["sample"]): row for row in rows}
    assert len(found) == len(rows)
    return {key: found[key] for key in sorted(found)}


def same(rows: Mapping[Key, Row]) -> dict[Key, Row]:
    """What must not depend on drafter, batch or interruption: everything but the counts."""
    hidden = ("counts", "provenance", "turns")
    return {key: {name: value for name, value in row.items() if name not in hidden} for key, row in rows.items()}


def stats_of(out: Path | str) -> dict[str, Any]:
    """``stats.json``."""
    return json.loads((Path(out) / "stats.json").read_text())


def log_of(out: Path | str) -> str:
    """``specgen.log``."""
    return (Path(out) / "specgen.log").read_text()


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """``python -m specgen`` in a process of its own, from the checkout's root."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "specgen", *arguments], cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
