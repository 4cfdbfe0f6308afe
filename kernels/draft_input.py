"""The input of a drafter's layer in one kernel: the token's embedding and the state before it, each normed, side by side. Definition:
``reference.pair_input``.

Boundary: kernel and launcher; which drafter joins what is decided by the drafter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .norm_rope import _scale


@triton.jit
def _pair_kernel(
    ids, table, feed, feed_stride, embed_weight, feed_weight, out, residual, vocab, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, EMBED_NORM: tl.constexpr, FEED_NORM: tl.constexpr, FEED_FIRST: tl.constexpr, RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One half of one token a program: 0 the embedding, 1 the fed-back state."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    o = tl.arange(0, BLOCK)
    mask = o < E
    pdl_wait(PDL)
    if half == 0:
        index = tl.load(ids + token).to(tl.int64)
        value = tl.load(table + index * E + o, mask=mask & (index >= 0) & (index < vocab), other=0.0)
        if EMBED_NORM:
            wide = value.to(tl.float32)
            value = _scale(value, tl.rsqrt(tl.sum(wide * wide, 0) / E + eps), tl.load(embed_weight + o, mask=mask, other=0.0), PLUS_ONE)
        tl.store(out + token * 2 * E + (E if FEED_FIRST else 0) + o, value, mask=mask)
    else:
        value = tl.load(feed + token * feed_stride + o, mask=mask, other=0.0)
        if RESIDUAL == 1:
            tl.store(residual + token * E + o, value, mask=mask)
        if FEED_NORM:
            wide = value.to(tl.float32)
            value = _scale(value, tl.rsqrt(tl.sum(wide * wide, 0) / E + eps), tl.load(feed_weight + o, mask=mask, other=0.0), PLUS_ONE)
        if RESIDUAL == 2:
            tl.store(residual + token * E + o, value, mask=mask)
        tl.store(out + token * 2 * E + (0 if FEED_FIRST else E) + o, value, mask=mask)


def pair_input(
    ids: Tensor,
    table: Tensor,
    feed: Tensor,
    embed_weight: Tensor | None,
    feed_weight: Tensor | None,
    eps: float,
    plus_one: bool = False,
    feed_first: bool = False,
    residual: str = "none",
) -> tuple[Tensor, Tensor | None]:
    """See ``reference.pair_input``."""
    tokens, width = feed.shape
    out = torch.empty(tokens, 2 * width, dtype=feed.dtype, device=feed.device)
    stream = None if residual == "none" else torch.empty(tokens, width, dtype=feed.dtype, device=feed.device)
    if tokens:
        block = triton.next_power_of_2(width)
        _pair_kernel[(tokens, 2)](
            ids, table, feed, feed.stride(0), embed_weight, feed_weight, out, stream, table.shape[0], eps, E=width, BLOCK=block,
            EMBED_NORM=embed_weight is not None, FEED_NORM=feed_weight is not None, FEED_FIRST=feed_first,
            RESIDUAL={"none": 0, "plain": 1, "normed": 2}[residual], PLUS_ONE=plus_one, num_warps=min(16, max(1, block // 512)),
            **pdl_options(feed.device),
        )  # fmt: skip
    return out, stream
