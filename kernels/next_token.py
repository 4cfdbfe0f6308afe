"""Next-token preparation as a Triton kernel, one program a request. Definition: ``reference_tree.next_token_ids_padded``.

Boundary: sampled ids to the next token and a count; knows nothing of requests. It runs eagerly, between the host and a step, so the host's time is
what it costs: the compiled kernel is kept by the launcher, which skips the compiler's argument analysis (nothing of this kernel depends on values).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, pdl_options, pdl_wait

ARGUMENTS = ("sampled", "discard", "backup", "next_ids", "counts", "row_stride", "width", "vocab")


@triton.jit(do_not_specialize=ARGUMENTS)
def _last_valid(sampled, discard, backup, next_ids, counts, row_stride, width, vocab, PDL: tl.constexpr, BLOCK: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    token = tl.load(sampled + row * row_stride + place, mask=place < width, other=-1)
    valid = (token >= 0) & (token < vocab) & (tl.load(discard + row) == 0)
    last = tl.max(tl.where(valid, place, -1), 0)
    tl.store(counts + row, tl.sum(valid.to(tl.int32), 0))
    chosen = tl.sum(tl.where(place == last, token, 0), 0)
    tl.store(next_ids + row, tl.where(last >= 0, chosen, tl.load(backup + row)))


_compiled: dict[Any, tuple[Any, bool, int]] = {}  # the kernel of a width on a device, with its constants


def next_token_ids_padded(sampled: Tensor, discard: Tensor, backup: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Launcher of ``reference_tree.next_token_ids_padded``; both results are lines of one tensor."""
    rows, width = sampled.shape
    device = sampled.device
    next_ids, counts = torch.empty((2, rows), dtype=torch.int32, device=device).unbind()
    if not rows:
        return next_ids, counts
    sampled = sampled if sampled.stride(1) == 1 else sampled.contiguous()
    discard, backup = discard.contiguous(), backup.contiguous()
    args = (sampled, discard, backup, next_ids, counts, sampled.stride(0), width, vocab)
    key = width, device, sampled.dtype, discard.dtype, backup.dtype
    found = _compiled.get(key)
    if found is None or device.index != torch.cuda.current_device():
        block, options = triton.next_power_of_2(max(width, 1)), pdl_options(device)
        kernel = _last_valid[(rows,)](*args, BLOCK=block, num_warps=1, **options)
        if not INTERPRETED:
            _compiled[key] = kernel, options["PDL"], block
    else:
        kernel, pdl, block = found
        kernel[(rows, 1, 1)](*args, pdl, block)
    return next_ids, counts
