"""Next-token preparation as a Triton kernel, one program a request. Definition: ``reference_tree.next_token_ids_padded``.

Boundary: sampled ids to the next token and a count; knows nothing of requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait


@triton.jit
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


def next_token_ids_padded(sampled: Tensor, discard: Tensor, backup: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Launcher of ``reference_tree.next_token_ids_padded``."""
    rows, width = sampled.shape
    next_ids = torch.empty(rows, dtype=torch.int32, device=sampled.device)
    counts = torch.empty_like(next_ids)
    if rows:
        sampled = sampled if sampled.stride(1) == 1 else sampled.contiguous()
        block = triton.next_power_of_2(max(width, 1))
        flags, backup = discard.contiguous().view(torch.uint8), backup.contiguous()
        options = {"BLOCK": block, "num_warps": 1} | pdl_options(sampled.device)
        _last_valid[(rows,)](sampled, flags, backup, next_ids, counts, sampled.stride(0), width, vocab, **options)
    return next_ids, counts
