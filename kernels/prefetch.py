"""Asks the L2 cache for bytes that a later kernel will read. CUDA only (compute capability 9.0 on); nothing to compute and nothing to define in
torch.

Boundary: one launcher; when it pays is ``models/prefetch.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LANES = 128


@triton.jit
def _prefetch_kernel(weight, chunk, total, LANES: tl.constexpr):
    """Each lane asks for ``chunk`` bytes; the requests are queued, and the kernel ends without waiting for them."""
    start = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64) * chunk
    size = tl.minimum(total - start, chunk).to(tl.int32)
    pointers = weight.to(tl.pointer_type(tl.uint8), bitcast=True) + tl.where(size > 0, start, 0)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, tl.where(size > 0, size, 16)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_l2(weight: Tensor, limit: int) -> None:
    """Ask for the first ``limit`` bytes of a contiguous tensor, in pieces of 16 KiB."""
    total = min(limit, weight.numel() * weight.element_size()) // 16 * 16
    chunk = 16384
    programs = triton.cdiv(total, chunk * LANES)
    _prefetch_kernel[(programs,)](weight, chunk, total, LANES=LANES, num_warps=4)
