"""What every launcher needs to know of the device: processor count, programmatic dependent launch, and the counters of one-kernel reductions.

Boundary: triton and torch only. With programmatic dependent launch (CUDA compute capability 9.0 on) a kernel starts while its predecessor drains and
waits inside, which hides most of the launch gap between the small kernels of a decode step; every kernel here waits before its first read of what
another kernel wrote. ``SPECGEN_PDL=0`` turns it off.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COUNTERS = 1 << 14

if INTERPRETED:

    @triton.jit
    def pdl_wait(PDL: tl.constexpr):
        """Nothing to wait for."""

else:
    from triton.language.extra import cuda as _cuda

    @triton.jit
    def pdl_wait(PDL: tl.constexpr):
        """Wait until the kernel before this one has finished and its writes are visible; let the next one start its prologue."""
        if PDL:
            _cuda.gdc_wait()
            _cuda.gdc_launch_dependents()


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of the device (a fixed stand-in where kernels are interpreted)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


_pdl_enabled = os.environ.get("SPECGEN_PDL", "1") == "1"


@cache
def _capable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the constexpr ``PDL`` and, where it is on, the launch attribute."""
    if _pdl_enabled and not INTERPRETED and _capable(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def set_pdl(enabled: bool) -> None:
    """Turn programmatic dependent launch on or off for later launches (benchmarks and tests)."""
    global _pdl_enabled
    _pdl_enabled = enabled


_counters: dict[torch.device, Tensor] = {}


def arrival_counters(device: torch.device) -> Tensor:
    """``COUNTERS`` zeroed int32 counters for kernels whose last program merges the others' parts.

    One set a device: such a kernel leaves them zero, and launches follow each other on one stream. The first use must stand outside a graph capture.
    """
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


@triton.jit
def last_to_arrive(counter, parts: tl.constexpr):
    """Whether this program is the last of ``parts`` to arrive at ``counter``; what all of them stored before is then visible. Resets the counter."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    last = arrived == parts - 1
    if last:
        tl.store(counter, 0)
    return last
