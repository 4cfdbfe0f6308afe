"""Device time of an engine's launches: marks before, between and after the decode part and the prefill part of each, read when they have passed.

Boundary: marks and sums. On a CUDA device a mark is an event in the stream; nothing here waits for one in the steady state, for a launch is read when
its results have been waited for. On a CPU the launch itself is the work, and a mark is the time. A span holds the device's work and whatever it
waited for inside the launch (a host that is slower than the device, a kernel being compiled); it does not hold what lies between launches, nor
launches in which a graph was captured, which are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class HostMark:
    """A mark on a CPU device: the time at which it was made."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Make the mark."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, later: HostMark) -> float:
        """Milliseconds to ``later``."""
        return 1000 * (later._at - self._at)


def mark_of(device: torch.device) -> Callable[[], Any]:
    """What makes a mark on this device."""
    return (lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else HostMark


class DeviceClock:
    """``decode_s`` and ``prefill_s``: seconds of the launches read so far. ``depth``: launches that may be unread, allocated once."""

    def __init__(self, depth: int, mark: Callable[[], Any]) -> None:
        self.decode_s = self.prefill_s = 0.0
        self._marks = [(mark(), mark(), mark()) for _ in range(depth)]
        self._lasts: list[Any] = [None] * depth
        self._decodes, self._prefills = [False] * depth, [False] * depth
        self._made = self._read = 0  # launches ended, and launches read

    def begin(self) -> None:
        """A launch begins. One that began before and did not end (it ran out of memory) is forgotten."""
        if self._made - self._read == len(self._marks):
            self._take()  # more launches than ever are in flight: a caller that never retires
        self._marks[self._made % len(self._marks)][0].record()

    def between(self) -> None:
        """The decode part has been launched and a prefill follows."""
        self._marks[self._made % len(self._marks)][1].record()

    def end(self, decode: bool, prefill: bool, landed: Any = None) -> int:
        """The launch is complete: which parts it had. With neither it is left out. ``landed``: a mark of the launch's end that was made already, and
        is not made again before the launch is read. Returns the launches to be read until this one is."""
        place = self._made % len(self._marks)
        self._decodes[place], self._prefills[place] = decode, prefill
        if decode or prefill:
            self._lasts[place] = landed
            if landed is None:
                self._lasts[place] = self._marks[place][2]
                self._lasts[place].record()
            self._made += 1
        return self._made

    def collect(self, launches: int | None = None) -> float | None:
        """Read the launches up to number ``launches`` (all when None), waiting for what the device has not finished. Returns the seconds of the last
        one's decode part; None where it had none, or nothing was left to read."""
        seconds = None
        while self._read < (self._made if launches is None else launches):
            seconds = self._take()
        return seconds

    def _take(self) -> float | None:
        """Read the oldest launch: the seconds of its decode part."""
        place = self._read % len(self._marks)
        first, middle, _ = self._marks[place]
        last = self._lasts[place]
        last.synchronize()
        decode, prefill, seconds = self._decodes[place], self._prefills[place], None
        if decode:
            seconds = first.elapsed_time(middle if prefill else last) / 1000
            self.decode_s += seconds
        if prefill:
            self.prefill_s += (middle if decode else first).elapsed_time(last) / 1000
        self._read += 1
        return seconds
