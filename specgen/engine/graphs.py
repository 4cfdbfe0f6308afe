"""CUDA graphs of a whole decode step: capture once per shape, replay from then on.

Boundary: captures a callable and replays it; what the step computes is ``engine.py``. A graph is keyed by (bucket, num_steps, features, context
bucket) and
captured when a job first needs it, after one eager run of the same shape over scratch rows (which compiles kernels and touches no request).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

log = logging.getLogger("specgen")
T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
SMALLEST_CONTEXT = 512


def bucket_of(rows: int, max_batch: int) -> int:
    """The captured batch size that serves ``rows`` rows: the next of ``BUCKETS``, multiples of 64 beyond them, never above ``max_batch``."""
    for bucket in BUCKETS:
        if rows <= bucket:
            return min(bucket, max_batch)
    return min(-(-rows // 64) * 64, max_batch)


def context_of(max_len: int, limit: int) -> int:
    """The key bound a graph is captured for: the next power of two, at least 512, never above ``limit``. It sets split counts, not results."""
    context = SMALLEST_CONTEXT
    while context < max_len:
        context *= 2
    return min(context, limit)


class StepGraphs:
    """The graphs of one engine, sharing one memory pool. ``off`` is set after a capture failed; the engine then runs eagerly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.off = False
        self.capture_seconds = 0.0
        self._pool: Any = None
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any]] = {}  # with what the captured step returned

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Any, step: Callable[[], T], warm_up: Callable[[], object]) -> T:
        """Replay the graph of ``key``, capturing ``step`` first when there is none; returns what ``step`` returned when it was captured, tensors that
        every replay writes again. ``warm_up`` runs the same shape where it may write nothing."""
        found = self._graphs.get(key)
        if found is None and not self.off:
            found = self._capture(key, step, warm_up)
        if found is None:
            return step()
        graph, result = found
        graph.replay()
        return result  # type: ignore[no-any-return]

    def _capture(self, key: Any, step: Callable[[], Any], warm_up: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        start = time.perf_counter()
        try:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                warm_up()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step()
            if self._pool is None:
                self._pool = graph.pool()
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            self.off = True
            log.warning("CUDA graph capture failed for %s; decoding goes on without graphs: %s", key, str(error).splitlines()[0])
            return None
        self._graphs[key] = graph, result
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        log.info("captured a decode step for %s in %.2f s", key, seconds)
        return graph, result

    def close(self) -> None:
        """Free every graph and their memory."""
        self._graphs.clear()
        self._pool = None
