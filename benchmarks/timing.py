"""Clocks: host time of calls taken side by side, device time by graph replay, and what a call launches.

Boundary: times callables; knows nothing of what they do. The garbage collector is off inside timed regions, and on a CUDA device the queue is empty
when a timed call starts, so that a call's host time is its own.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sample:
    """Median and 99th percentile of many calls, in microseconds."""

    us: float
    p99_us: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Sample:
        """The sample of a list of durations."""
        ordered = sorted(nanoseconds)
        return cls(ordered[len(ordered) // 2] / 1e3, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] / 1e3)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now and not again before the end of the block."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def host_times(
    calls: dict[str, Call],
    repeats: int,
    device: torch.device,
    *,
    before: Call | None = None,
    load: Call | None = None,
    until_done: bool = False,
) -> dict[str, Sample]:
    """Host time of each call, all of them taken ``repeats`` times, each time in another order, after a tenth as many to warm up.

    ``before`` runs untimed ahead of each call. ``load`` gives the device work that is still running when the call starts. ``until_done`` includes
    the wait for what the call launched on the device.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    times: dict[str, list[int]] = {name: [] for name in calls}
    warm_up = max(3, repeats // 10)
    turns, order = list(calls.items()), random.Random(0)
    clock = time.perf_counter_ns
    with no_collection():
        for turn in range(warm_up + repeats):
            order.shuffle(turns)
            for name, call in turns:
                if before is not None:
                    before()
                if wait is not None:
                    wait()
                if load is not None:
                    load()
                start = clock()
                call()
                if until_done and wait is not None:
                    wait()
                end = clock()
                if turn >= warm_up:
                    times[name].append(end - start)
    return {name: Sample.of(spent) for name, spent in times.items()}


def device_times(calls: dict[str, Call], repeats: int, device: torch.device, inner: int = 16) -> dict[str, Sample]:
    """Device time of each call where there is a device (replays of a graph that holds it ``inner`` times), else its host time."""
    if device.type != "cuda":
        return host_times(calls, repeats, device)
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(inner):
                call()
    times: dict[str, list[int]] = {name: [] for name in calls}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with no_collection():
        for turn in range(3 + max(20, repeats // 20)):
            for name, graph in graphs.items():
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn >= 3:
                    times[name].append(int(start.elapsed_time(end) * 1e6 / inner))
    return {name: Sample.of(spent) for name, spent in times.items()}


class Operators(TorchDispatchMode):
    """Counts the torch operators dispatched inside the block: ``made`` those whose result is new memory, ``views`` the others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        self.views: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliased = any(a.alias_info is not None for a in func._schema.returns)
        (self.views if aliased else self.made).append(str(func))
        return result


def operators(call: Call) -> int:
    """Torch operators that compute something in one call; views and in-place results are not counted."""
    call()
    with Operators() as seen:
        call()
    return len(seen.made)


def kernels(call: Call, device: torch.device) -> int | None:
    """Kernels and copies that one call puts on the device, by the profiler; None where there is no device or the profiler sees none."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        call()
        torch.cuda.synchronize()
    found = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())
    return found or None
