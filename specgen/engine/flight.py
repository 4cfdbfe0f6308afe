"""A launched step until it is retired: who was in it, the host buffers its results land in, and how long the host loop took.

Boundary: buffers and their events; what the results mean is ``engine.scheduler``'s to know.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specgen.engine.batch import Batch
from specgen.engine.buffers import CpuGpuBuffer
from specgen.types import Request


@dataclass
class InFlight:
    """A launched step: who was in it, and the host buffers its results land in. ``launch_s``: seconds that the host launched, ``capture_s`` of them
    spent on a graph capture. Known once it is retired: ``waited_s``, seconds that the host waited for it, and ``decode_s``, the device's for its
    decode part (``engine.clock``)."""

    batch: Batch
    finals: list[tuple[Request, int]]
    decode_result: CpuGpuBuffer | None
    prefill_result: CpuGpuBuffer | None
    decode_logprobs: CpuGpuBuffer | None = None
    prefill_logprobs: CpuGpuBuffer | None = None
    launches: int = 0  # that the engine's clock has read once it has read this one
    marker: torch.cuda.Event | None = None  # the end of a step without results, a prompt's middle
    launch_s: float = 0.0
    capture_s: float = 0.0
    waited_s: float = 0.0
    decode_s: float | None = None

    def landed(self) -> bool:
        """Whether everything launched for the step is done, asked without waiting."""
        buffers = (self.decode_result, self.prefill_result, self.decode_logprobs, self.prefill_logprobs)
        return all(buffer is None or buffer.landed() for buffer in buffers) and (self.marker is None or self.marker.query())


@dataclass
class StepTimes:
    """Wall time of the host loop. ``step_ms``: of each call in which only decode rows were launched and retired; their tokens and seconds beside
    it."""

    steps: int = 0
    step_ms: array[float] = field(default_factory=lambda: array("d"))  # 8 bytes a step, where a list would keep an object
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def fetched(buffer: CpuGpuBuffer, source: Tensor, n: int) -> CpuGpuBuffer:
    """Enqueue the copy of the first ``n`` lines of ``source`` to a result buffer."""
    if buffer.gpu is not buffer.cpu:
        buffer.fetch(source, n)
    else:
        buffer.np[:n] = source[:n].numpy()
    return buffer


def read(buffer: CpuGpuBuffer | None, n: int) -> np.ndarray | None:
    """The first ``n`` lines of a result buffer once they have landed."""
    if buffer is None:
        return None
    buffer.wait()
    return buffer.np[:n]
