"""The sampler and the draft argmax as Triton kernels. Definition: ``reference_sampling``; draft_topk stands in ``draft_topk.py``.

Boundary: logits to tokens; knows nothing of requests or trees.

How. ``_scan``: several programs a row each read a share of the vocabulary once and keep the best logit and the best perturbed logit. ``_finish``: one
program a row merges them. Best means the largest int64 key (score's bits above, complement of the id below), so merging is exact in any order, and a
tie goes to the lowest id. A batch in which some row has a filter (top-k, top-p, min-p) goes through ``filters.py`` instead.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait, sm_count
from .philox import row_noise, words_of_ids, words_of_tile, words_to_gumbel
from .reference_sampling import ALL_FEATURES, FILTERS, SAMPLED, TARGET

TILE = 2048  # tokens a program reads at a time
PROGRAMS = 8  # programs a scan aims at, for each multiprocessor
LOWEST: tl.constexpr = tl.constexpr(-(2**63))
SPOILT: tl.constexpr = tl.constexpr(2**63 - 1)  # key of a row that holds a NaN or +inf: above every other
NOTHING: tl.constexpr = tl.constexpr(-2139095041)  # the ordered bits of -inf


@triton.jit
def order_bits(x):
    """float32 to int32 bits that sort alike; -0 equals 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_key(x, index):
    """int64 keys that sort as (x, then lowest index first)."""
    return (order_bits(x).to(tl.int64) << 32) | (4294967295 - index.to(tl.int64))


@triton.jit
def key_index(key):
    """The index in a key."""
    return (4294967295 - (key & 4294967295)).to(tl.int32)


@triton.jit
def key_score(key):
    """The float32 in a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sound(logit_key):
    """Whether the row with this best logit holds neither NaN nor +inf, and something finite."""
    return (logit_key != SPOILT) & ((logit_key >> 32) != NOTHING)


@triton.jit
def clean_draft(z):
    """A draft's logits: NaN counts as -inf and +inf as the largest float."""
    z = tl.where(z != z, float("-inf"), z)
    return tl.minimum(z, 3.4028234663852886e38)


@triton.jit
def noise_of_tile(ids, start, column, inside, k0, k1, position, stream, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Gumbel noise of columns start .. start + BLOCK - 1, by their target ids."""
    if HAS_IDS:
        words = words_of_ids(tl.load(ids + column, mask=inside, other=0).to(tl.int32), k0, k1, position, stream)
    else:
        words = words_of_tile(start, k0, k1, position, stream, BLOCK)
    return words_to_gumbel(words)


@triton.jit
def _scan(
    logits,
    row_stride,
    temperature,
    keys,
    t,
    ids,
    best_logit,
    best_score,
    width,
    stream,
    tiles,
    share_rows,
    share_t,
    heat_step,
    key_step,
    t_step,
    SAMPLED: tl.constexpr,
    DRAFT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    first = share * tiles * BLOCK
    logits += row * row_stride
    z_best = tl.full([BLOCK], float("-inf"), tl.float32)
    z_at = first + lane
    s_best = z_best
    s_at = z_at
    spoilt = tl.zeros([BLOCK], tl.int32)
    warm = False
    if SAMPLED:
        owner = row // share_rows
        heat = tl.load(temperature + owner * heat_step)
        warm = heat > 0
        k0, k1, position = row_noise(keys + owner * key_step, t + row // share_t * t_step)
    for tile in range(tiles):
        start = first + tile * BLOCK
        column = start + lane
        inside = column < width
        z = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        if DRAFT:
            z = clean_draft(z)
        else:
            spoilt = spoilt | tl.where(z < float("inf"), 0, 1)
        better = z > z_best
        z_best = tl.where(better, z, z_best)
        z_at = tl.where(better, column, z_at)
        if SAMPLED:  # noqa: SIM102 (a constexpr guards names that exist only then)
            if warm:
                noise = noise_of_tile(ids, start, column, inside, k0, k1, position, stream, HAS_IDS, BLOCK)
                score = tl.div_rn(z, heat) + noise
                better = score > s_best
                s_best = tl.where(better, score, s_best)
                s_at = tl.where(better, column, s_at)
    out = row * tl.num_programs(1) + share
    key = tl.max(tl.where(z_at < width, order_key(z_best, z_at), LOWEST), 0)
    if not DRAFT:
        key = tl.where(tl.max(spoilt, 0) > 0, SPOILT, key)
    tl.store(best_logit + out, key)
    if SAMPLED:
        if warm:
            key = tl.max(tl.where(s_at < width, order_key(s_best, s_at), LOWEST), 0)
        tl.store(best_score + out, key)


@triton.jit
def _finish(
    best_logit,
    best_score,
    ids,
    y,
    shares,
    SHARES: tl.constexpr,
    SAMPLED: tl.constexpr,
    DRAFT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    logit_key = tl.max(tl.load(best_logit + row * shares + share, mask=share < shares, other=LOWEST), 0)
    key = logit_key
    if SAMPLED:
        key = tl.max(tl.load(best_score + row * shares + share, mask=share < shares, other=LOWEST), 0)
    token = key_index(key)
    if HAS_IDS:
        token = tl.load(ids + token).to(tl.int32)
    if not DRAFT:
        token = tl.where(sound(logit_key), token, -1)
    tl.store(y + row, token)


def shares_of(rows: int, width: int, tile: int, programs: int) -> tuple[int, int]:
    """How many programs read a row, and how many tiles each of them reads."""
    tiles = triton.cdiv(width, tile)
    shares = max(1, min(tiles, triton.cdiv(programs, rows)))
    each = triton.cdiv(tiles, shares)
    return triton.cdiv(tiles, each), each


def row_parameters(
    rows: int, temperature: Tensor | None, keys: Tensor, t: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[int, int, int, int, int]]:
    """Temperature, keys and t as kernels take them, all None for a greedy job, and (rows an entry serves, rows a t serves, three strides)."""
    if temperature is None:
        return None, None, None, (1, 1, 0, 0, 0)
    assert keys.stride(1) == 1, "the two words of a key stand side by side"
    return temperature, keys, t, (rows // temperature.shape[0], rows // t.shape[0], temperature.stride(0), keys.stride(0), t.stride(0))


def _argmax(logits: Tensor, temperature: Tensor | None, keys: Tensor, t: Tensor, ids: Tensor | None, width: int, stream: int, draft: bool) -> Tensor:
    rows = logits.shape[0]
    y = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return y
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    sampled = temperature is not None
    shares, each = shares_of(rows, width, TILE, PROGRAMS * sm_count(logits.device))
    best = torch.empty(2 if sampled else 1, rows, shares, dtype=torch.int64, device=logits.device)
    heat, noise_keys, noise_t, steps = row_parameters(rows, temperature, keys, t)
    flags = {"SAMPLED": sampled, "DRAFT": draft, "HAS_IDS": ids is not None} | pdl_options(logits.device)
    _scan[(rows, shares)](
        logits, logits.stride(0), heat, noise_keys, noise_t, ids, best[0], best[-1], width, stream, each, *steps, BLOCK=TILE, num_warps=8, **flags
    )
    _finish[(rows,)](best[0], best[-1], ids, y, shares, SHARES=triton.next_power_of_2(shares), num_warps=1, **flags)
    return y


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    t: Tensor,
    vocab_limit: int,
    stream: int = TARGET,
    features: Collection[str] = ALL_FEATURES,
) -> Tensor:
    """Launcher of ``reference_sampling.gumbel_argmax``."""
    width = min(vocab_limit, logits.shape[1])
    if SAMPLED in features and FILTERS in features:
        from .filters import filtered_argmax

        return filtered_argmax(logits, temperature, top_k, top_p, min_p, keys, t, width, stream)
    return _argmax(logits, temperature if SAMPLED in features else None, keys, t, None, width, stream, draft=False)


def draft_argmax(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor,
    t: Tensor,
    ids: Tensor | None = None,
    features: Collection[str] = ALL_FEATURES,
    vocab: int | None = None,
) -> Tensor:
    """Launcher of ``reference_sampling.draft_argmax``."""
    heat = temperature if SAMPLED in features else None
    return _argmax(logits, heat, keys, t, ids, logits.shape[1], TARGET, draft=True)
