"""The registry of micro-benchmarks: a name, what it measures, and a function that yields rows.

Boundary: knows no benchmark; ``__main__`` imports the modules that register themselves. A row is ``{name, params, naive_us, ours_us, ratio, ...}``:
medians in microseconds, ``ratio`` = naive / ours, then p99 and whatever else the benchmark counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.timing import Sample

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Where and how long. ``repeats``: timed calls of each micro-benchmark; ``steps``: engine steps of ``step_latency``."""

    device: torch.device
    repeats: int
    steps: int

    @property
    def cuda(self) -> bool:
        """True on a CUDA device."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark; ``summary`` is the first paragraph of its docstring."""

    name: str
    summary: str
    rows: Callable[[Settings], Iterator[Row]]


REGISTRY: dict[str, Benchmark] = {}


def benchmark(rows: Callable[[Settings], Iterator[Row]]) -> Callable[[Settings], Iterator[Row]]:
    """Register a function under its own name."""
    summary = " ".join((rows.__doc__ or "").split("\n\n")[0].split())
    assert rows.__name__ not in REGISTRY and summary, rows.__name__
    REGISTRY[rows.__name__] = Benchmark(rows.__name__, summary, rows)
    return rows


def row(name: str, params: dict[str, Any], naive: Sample, ours: Sample, **more: Any) -> Row:
    """One line of the result."""
    figures = {"naive_us": naive.us, "ours_us": ours.us, "ratio": naive.us / ours.us, "naive_p99_us": naive.p99_us, "ours_p99_us": ours.p99_us}
    return {"name": name, "params": params} | figures | more
