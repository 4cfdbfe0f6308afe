"""The k best draft tokens with their log-probabilities, as two Triton kernels. Definition: ``reference_sampling.draft_topk``.

Boundary: draft logits to tokens. Each program of ``_share`` keeps the k best keys of one tile and its share of the normaliser;
``_merge`` joins a row's shares in a fixed order.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .philox import row_noise
from .reference_sampling import ALL_FEATURES, SAMPLED
from .sampling import LOWEST, clean_draft, key_index, key_score, noise_of_tile, order_key, row_parameters

TILE = 4096


@triton.jit
def _share(
    logits,
    row_stride,
    temperature,
    keys,
    t,
    ids,
    best,
    peaks,
    sums,
    width,
    k,
    share_rows,
    share_t,
    heat_step,
    key_step,
    t_step,
    SAMPLED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    start = share * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    score = clean_draft(tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32))
    if SAMPLED:
        owner = row // share_rows
        heat = tl.load(temperature + owner * heat_step)
        if heat > 0:
            k0, k1, position = row_noise(keys + owner * key_step, t + row // share_t * t_step)
            score = tl.div_rn(score, heat) + noise_of_tile(ids, start, column, inside, k0, k1, position, 0, HAS_IDS, BLOCK)
    score = tl.where(inside, score, float("-inf"))
    out = row * tl.num_programs(1) + share
    peak = tl.maximum(tl.max(score, 0), -3.4028234663852886e38)
    tl.store(peaks + out, peak)
    tl.store(sums + out, tl.sum(tl.exp(score - peak), 0))
    key = tl.where(inside, order_key(score, column), LOWEST)
    for place in range(k):
        first = tl.max(key, 0)
        tl.store(best + out * k + place, first)
        key = tl.where(key == first, LOWEST, key)


@triton.jit
def _merge(
    best,
    peaks,
    sums,
    ids,
    tokens,
    logp,
    shares,
    k,
    SHARES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    peak = tl.load(peaks + row * shares + share, mask=share < shares, other=-3.4028234663852886e38)
    part = tl.load(sums + row * shares + share, mask=share < shares, other=0.0)
    top = tl.max(peak, 0)
    normaliser = tl.log(tl.sum(part * tl.exp(peak - top), 0))
    candidate = tl.arange(0, CANDIDATES)
    key = tl.load(best + row * shares * k + candidate, mask=candidate < shares * k, other=LOWEST)
    for place in range(k):
        first = tl.max(key, 0)
        key = tl.where(key == first, LOWEST, key)
        token = key_index(first)
        if HAS_IDS:
            token = tl.load(ids + token).to(tl.int32)
        value = key_score(first) - top
        tl.store(tokens + row * k + place, token)
        tl.store(logp + row * k + place, tl.where(value == float("-inf"), value, value - normaliser))


def draft_topk(
    logits: Tensor,
    k: int,
    temperature: Tensor | None,
    keys: Tensor,
    t: Tensor,
    ids: Tensor | None = None,
    features: Collection[str] = ALL_FEATURES,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``reference_sampling.draft_topk``."""
    rows, width = logits.shape
    assert 0 < k <= width, "k is 1 .. the draft vocabulary"
    device = logits.device
    tokens = torch.empty(rows, k, dtype=torch.int32, device=device)
    logp = torch.empty(rows, k, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, logp
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    heat, noise_keys, noise_t, steps = row_parameters(rows, temperature if SAMPLED in features else None, keys, t)
    shares = triton.cdiv(width, TILE)
    best = torch.empty(rows, shares, k, dtype=torch.int64, device=device)
    peaks, sums = torch.empty(2, rows, shares, dtype=torch.float32, device=device)
    flags = {"HAS_IDS": ids is not None} | pdl_options(device)
    _share[(rows, shares)](
        logits, logits.stride(0), heat, noise_keys, noise_t, ids, best, peaks, sums, width, k, *steps,
        SAMPLED=heat is not None, BLOCK=TILE, num_warps=8, **flags,
    )  # fmt: skip
    candidates = triton.next_power_of_2(shares * k)
    _merge[(rows,)](
        best, peaks, sums, ids, tokens, logp, shares, k,
        SHARES=triton.next_power_of_2(shares), CANDIDATES=candidates, num_warps=1 if candidates <= 128 else 4, **flags,
    )  # fmt: skip
    return tokens, logp
