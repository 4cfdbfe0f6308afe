"""Next-token preparation as a Triton kernel, one program a request. Definition: ``reference_tree.next_token_ids_padded``.

Boundary: sampled ids to the next token and a count; knows nothing of requests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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


@cache
def _options(width: int, device: torch.device) -> dict[str, Any]:
    """Constant arguments of the launches of one shape: made once, since the host's time is what this op costs."""
    return {"BLOCK": triton.next_power_of_2(max(width, 1)), "num_warps": 1} | pdl_options(device)


def next_token_ids_padded(sampled: Tensor, discard: Tensor, backup: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Launcher of ``reference_tree.next_token_ids_padded``; both results are lines of one tensor."""
    rows, width = sampled.shape
    next_ids, counts = torch.empty((2, rows), dtype=torch.int32, device=sampled.device).unbind()
    if rows:
        sampled = sampled if sampled.stride(1) == 1 else sampled.contiguous()
        args = (sampled, discard.contiguous(), backup.contiguous(), next_ids, counts, sampled.stride(0), width, vocab)
        _last_valid[(rows,)](*args, **_options(width, sampled.device))
    return next_ids, counts
