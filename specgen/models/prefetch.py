"""Weight prefetch: while the small kernels between two matmuls leave the memory idle, L2 is asked for the weights of the next one.

Boundary: streams and weights; knows nothing of layers' maths. With few tokens a decode step is bound by reading weights, and a tenth of it is
norms, rotary
and attention that read almost nothing. The requests run on a side stream, forked after each matmul and joined at the end of the forward, inside a
CUDA graph only (an eager launch costs more than it gains).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

MAX_TOKENS = 64  # beyond, matmuls are bound by arithmetic
MEGABYTE = 1 << 20
# Megabytes asked for ahead of each matmul: what fits the gap before it.
AHEAD = {"o": 24, "gate_up": 12, "down": 8, "qkv": 12, "head": 12}


class WeightPrefetch:
    """The side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._forked = False
        setting = os.environ.get("SPECGEN_PREFETCH_MB")
        self._ahead = dict(zip(AHEAD, map(int, setting.split(",")), strict=True)) if setting else AHEAD

    def start(self, name: str, weight: Tensor | None) -> None:
        """Ask for the beginning of ``weight``, the operand of the matmul ``name``, from here on."""
        if weight is None or not self._ahead[name]:
            return
        from specgen.kernels.prefetch import prefetch_l2

        self._side.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(self._side):
            prefetch_l2(weight, self._ahead[name] * MEGABYTE)
        self._forked = True

    def join(self, device: torch.device) -> None:
        """Bring the side stream back before the forward ends."""
        if self._forked:
            torch.cuda.current_stream(device).wait_stream(self._side)
            self._forked = False


def active(prefetch: WeightPrefetch | None, tokens: int) -> WeightPrefetch | None:
    """The prefetch of a forward over ``tokens`` tokens, or None where it would not pay."""
    if prefetch is None or tokens > MAX_TOKENS or not torch.cuda.is_current_stream_capturing():
        return None
    return prefetch
