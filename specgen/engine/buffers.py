"""Host/device buffers: memory shared by NumPy and a pinned tensor, mirrored on the device, allocated once.

Boundary: this file knows nothing of requests or steps. All data that the host sends or reads per step goes through these buffers, so that the
decode path creates no list, array or tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CpuGpuBuffer:
    """A pinned CPU tensor, a NumPy view sharing its memory, and a device tensor of the same shape.

    ``cpu`` and ``np`` are one memory; ``gpu`` is the device side. On a CPU device all three are one tensor and copies do nothing.
    After ``copy_to_gpu`` the host must not rewrite the slice until it has landed: ``wait()`` (or ``writable()``) blocks on the event of the last
    copy.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        if dtype == torch.bfloat16:
            raise TypeError("CpuGpuBuffer: NumPy has no bfloat16; use float32")
        cuda = device.type == "cuda"
        self.cpu: Tensor = torch.zeros(shape, dtype=dtype, pin_memory=cuda)
        self.np: Any = self.cpu.numpy()
        self.gpu: Tensor = torch.zeros(shape, dtype=dtype, device=device) if cuda else self.cpu
        self._event = torch.cuda.Event() if cuda else None

    def copy_to_gpu(self, n: int | None = None) -> Tensor:
        """Enqueue the copy of the first ``n`` entries (all when None) and return that device slice."""
        if self._event is None:
            return self.gpu if n is None else self.gpu[:n]
        if n is None:
            self.gpu.copy_(self.cpu, non_blocking=True)
        else:
            self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        self._event.record()
        return self.gpu if n is None else self.gpu[:n]

    def copy_to_cpu(self, n: int | None = None) -> None:
        """Enqueue the copy of the first ``n`` device entries to the host; read ``np`` only after ``wait()``."""
        if self._event is None:
            return
        if n is None:
            self.cpu.copy_(self.gpu, non_blocking=True)
        else:
            self.cpu[:n].copy_(self.gpu[:n], non_blocking=True)
        self._event.record()

    def fetch(self, source: Tensor, n: int) -> None:
        """Enqueue the copy of the first ``n`` entries of a device tensor of this shape to the host side."""
        self.cpu[:n].copy_(source[:n], non_blocking=True)
        self.mark()

    def mark(self) -> None:
        """Guard copies that the caller enqueued itself (slices of several rows), as ``copy_to_gpu`` guards its own."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block until the last copy, in either direction, has landed."""
        if self._event is not None:
            self._event.synchronize()


class BufferRing:
    """``depth`` buffers of one shape, used in turn, so that the host can fill one while copies of earlier ones are in flight."""

    def __init__(self, depth: int, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [CpuGpuBuffer(*shape, dtype=dtype, device=device) for _ in range(depth)]
        self._next = 0

    def take(self) -> CpuGpuBuffer:
        """The next buffer, safe to rewrite."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer
