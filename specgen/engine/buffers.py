"""Host/device buffers: memory shared by NumPy and a pinned tensor, mirrored on the device, allocated once.

Boundary: this file knows nothing of requests or steps. All data that the host sends or reads per step goes through these buffers, so that the
decode path creates no list, array or tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

MAX_SLICES = 512  # views a buffer keeps


class CpuGpuBuffer:
    """A pinned CPU tensor, a NumPy view sharing its memory, and a device tensor of the same shape.

    ``cpu``, ``np`` and ``mem`` are one memory (``mem`` is its memoryview: the quickest way to write single numbers in a loop); ``gpu`` is the device
    side. On a CPU device all are one memory and copies do nothing.
    After ``copy_to_gpu`` the host must not rewrite the slice until it has landed: ``wait()`` (or ``BufferRing.take``) blocks on the event of the
    last copy.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, timing: bool = False) -> None:
        """``timing``: ``event`` can be asked for the time, too."""
        if dtype == torch.bfloat16:
            raise TypeError("CpuGpuBuffer: NumPy has no bfloat16; use float32")
        cuda = device.type == "cuda"
        self.cpu: Tensor = torch.zeros(shape, dtype=dtype, pin_memory=cuda)
        self.np: Any = self.cpu.numpy()
        self.mem = memoryview(cast(Any, self.np))
        self.gpu: Tensor = torch.zeros(shape, dtype=dtype, device=device) if cuda else self.cpu
        self.event = torch.cuda.Event(enable_timing=timing) if cuda else None  # of the last copy
        self._slices: dict[int, tuple[Tensor, Tensor]] = {}
        self._source: Tensor | None = None  # of the last ``fetch``, mostly the same one for ever, and its slices
        self._source_slices: dict[int, Tensor] = {}

    def _first(self, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` entries, (host, device). Kept for later calls while they are few: making the two views takes as long as the copy."""
        found = self._slices.get(n)
        if found is None:
            found = self.cpu[:n], self.gpu[:n]
            if len(self._slices) < MAX_SLICES:
                self._slices[n] = found
        return found

    def copy_to_gpu(self, n: int | None = None) -> Tensor:
        """Enqueue the copy of the first ``n`` entries (all when None) and return that device slice."""
        host, device = (self.cpu, self.gpu) if n is None else self._first(n)
        if self.event is not None:
            device.copy_(host, non_blocking=True)
            self.event.record()
        return device

    def copy_to_cpu(self, n: int | None = None) -> None:
        """Enqueue the copy of the first ``n`` device entries to the host; read ``np`` only after ``wait()``."""
        if self.event is not None:
            host, device = (self.cpu, self.gpu) if n is None else self._first(n)
            host.copy_(device, non_blocking=True)
            self.event.record()

    def fetch(self, source: Tensor, n: int) -> None:
        """Enqueue the copy of the first ``n`` entries of a device tensor of this shape to the host side."""
        if source is not self._source:
            self._source, self._source_slices = source, {}
        part = self._source_slices.get(n)
        if part is None:
            part = source[:n]
            if len(self._source_slices) < MAX_SLICES:
                self._source_slices[n] = part
        self._first(n)[0].copy_(part, non_blocking=True)
        self.mark()

    def mark(self) -> None:
        """Guard copies that the caller enqueued itself (slices of several rows), as ``copy_to_gpu`` guards its own."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Block until the last copy, in either direction, has landed."""
        if self.event is not None:
            self.event.synchronize()

    def landed(self) -> bool:
        """Whether the last copy has landed, asked without waiting."""
        return self.event is None or bool(self.event.query())


class BufferRing:
    """``depth`` buffers of one shape, used in turn, so that the host can fill one while copies of earlier ones are in flight."""

    def __init__(self, depth: int, *shape: int, dtype: torch.dtype, device: torch.device, timing: bool = False) -> None:
        self._buffers = [CpuGpuBuffer(*shape, dtype=dtype, device=device, timing=timing) for _ in range(depth)]
        self._next = 0

    def take(self) -> CpuGpuBuffer:
        """The next buffer, safe to rewrite."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer
