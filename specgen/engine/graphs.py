"""CUDA graphs of a whole decode step: capture once per shape, replay from then on.

Boundary: captures a callable and replays it; what the step computes is ``step.py``. A graph is keyed by (bucket, num_steps, features, context
bucket), with the part of the step where a grammar divides it, and captured when a job first needs it, after one eager run of the same shape over
scratch rows, which compiles kernels and touches no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from specgen.engine.plan import reserve

log = logging.getLogger("specgen")
T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
SMALLEST_CONTEXT = 512


@cache
def bucket_of(rows: int, max_batch: int) -> int:
    """The captured batch size that serves ``rows`` rows: the next of ``BUCKETS``, multiples of 64 beyond them, never above ``max_batch``."""
    for bucket in BUCKETS:
        if rows <= bucket:
            return min(bucket, max_batch)
    return min(-(-rows // 64) * 64, max_batch)


@cache
def context_of(max_len: int, limit: int) -> int:
    """The key bound a graph is captured for: the next power of two, at least 512, never above ``limit``. It sets split counts, not results."""
    context = SMALLEST_CONTEXT
    while context < max_len:
        context *= 2
    return min(context, limit)


def below(context: int) -> int:
    """The context bucket below one of ``context_of``, 0 below the smallest: rows longer than it have this one."""
    shorter, bound = 0, SMALLEST_CONTEXT
    while bound < context:
        shorter, bound = bound, 2 * bound
    return shorter


class StepGraphs:
    """The graphs of one engine, sharing one memory pool. ``off`` is set after a capture failed; the engine then runs eagerly."""

    def __init__(self, device: torch.device, step_bytes: int = 0) -> None:
        self.device = device
        self.step_bytes = step_bytes  # of the widest step's tensors, where known: set aside at the first capture
        self.off = False
        self.capture_seconds = 0.0
        self._pool: Any = None
        self._holder: torch.cuda.CUDAGraph | None = None  # an empty graph, for whose sake the pool keeps ``step_bytes``
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any]] = {}  # with what the captured step returned

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: Any) -> tuple[Any] | None:
        """Replay the graph of ``key`` and give its result, as ``run`` does; None, having done nothing, where there is none yet."""
        found = self._graphs.get(key)
        if found is None:
            return None
        found[0].replay()
        return found[1:]

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
        home = torch.cuda.current_stream(self.device)
        try:
            found = self._record(home, step, warm_up)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self.off = True
            log.warning("CUDA graph capture failed for %s; decoding goes on without graphs: %s", key, _first_cause(error))
            self._abandon(home)
            self.capture_seconds += time.perf_counter() - start
            return None
        self._graphs[key] = found
        seconds = time.perf_counter() - start
        self.capture_seconds += seconds
        log.info("captured a decode step for %s in %.2f s", key, seconds)
        return found

    def _record(self, home: Any, step: Callable[[], Any], warm_up: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Warm up and capture on the side stream; ``home`` is the stream that everything else runs on."""
        side = _side_stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._set_aside(side)
        side.wait_stream(home)
        with torch.cuda.stream(side):
            warm_up()
        home.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = step()
        return graph, result

    def _set_aside(self, side: Any) -> None:
        """Reserve the widest step's bytes for warming up and in the pool (``plan.reserve``)."""
        if not self.step_bytes:
            return
        with torch.cuda.stream(side):
            reserve(self.step_bytes, self.device)
        self._holder = torch.cuda.CUDAGraph()
        one = torch.zeros(1, device=self.device)
        with torch.cuda.graph(self._holder, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            reserve(self.step_bytes, self.device)
            one.zero_()  # a graph of nothing draws a warning

    def _abandon(self, home: Any) -> None:
        """Undo what a failed capture leaves behind.

        When the capture itself became invalid (a step that reads the device does that), torch puts neither the current stream back nor its allocator,
        which from then on refuses to give memory back to the device, nor, in versions before 2.13, its random numbers, which then refuse to be drawn:
        in this engine and in all of the process.
        """
        torch.cuda.set_stream(home)
        try:
            torch._C._cuda_endAllocateToPool(home.device_index, self._pool)
        except RuntimeError:
            return  # torch did end it: the capture was sound, the step failed for another reason
        torch._C._cuda_releasePool(home.device_index, self._pool)
        numbers = torch.cuda.default_generators[home.device_index]
        same = torch.Generator(numbers.device).manual_seed(numbers.initial_seed())
        same.set_offset(numbers.get_offset())
        numbers.graphsafe_set_state(same.graphsafe_get_state())

    def close(self) -> None:
        """Free every graph and their memory. What was set aside is not again: after it ran out, the plan no longer holds."""
        self._graphs.clear()
        self._holder = self._pool = None
        self.step_bytes = 0


@cache
def _side_stream(device: torch.device) -> Any:
    """The stream of warm-ups and captures: one a device for the whole process, because cuBLAS keeps a workspace of 32 MiB for every stream it saw."""
    return torch.cuda.Stream(device)


def _first_cause(error: BaseException) -> str:
    """The first line of the error that came first: what follows it only says that the capture broke off."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
