"""The sampler and the draft argmax as Triton kernels. Definition: ``reference_sampling``; draft_topk stands in ``draft_topk.py``.

Boundary: logits to tokens; knows nothing of requests or trees.

How. ``_scan``: several programs a row each read a share of the vocabulary once and keep the best logit and the best perturbed logit. ``_finish``: one
program a row merges them. Best means the largest int64 key (score's bits above, complement of the id below), so merging is exact in any order, and a
tie goes to the lowest id. The kept set is a prefix of the order (score, id): the winner of the noise is drawn when it is inside; when it is outside,
so is everything behind it, and the best of what stands before it is the next to ask. No sort; nearly always the first is inside.
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
UNIT: tl.constexpr = tl.constexpr(2.0**35)


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
def _mass_of_top_k(logits, heat, top, k, width, BLOCK: tl.constexpr):
    """The mass of exactly the k best: the k-th score by four digits of its bits, then one sum. Equal scores weigh the same, so ids do not matter."""
    lane = tl.arange(0, BLOCK)
    digits = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.int64)
    left = k
    for step in range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            z = tl.load(logits + start + lane, mask=inside, other=0.0).to(tl.float32)
            bits = order_bits(tl.div_rn(z, heat)).to(tl.int64) + 2147483648
            digit = ((bits >> shift) & 255).to(tl.int32)
            histogram += tl.histogram(digit, 256, mask=inside & ((bits >> (shift + 8)) == prefix))
        from_top = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
        digit = tl.max(tl.where(from_top >= left, digits, 0), 0)
        left -= tl.sum(tl.where(digits > digit, histogram, 0), 0)
        prefix = (prefix << 8) | digit
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        z = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(z, heat)
        above = inside & (order_bits(score).to(tl.int64) + 2147483648 > prefix)
        mass += tl.where(above, tl.floor(tl.exp(score - top) * UNIT + 0.5).to(tl.int64), 0)
    border = key_score((prefix - 2147483648) << 32)
    return tl.sum(mass, 0) + left.to(tl.int64) * tl.floor(tl.exp(border - top) * UNIT + 0.5).to(tl.int64)


@triton.jit
def _filtered(logits, token, z_top, heat, k, p, floor, k0, k1, position, stream, width, BLOCK: tl.constexpr):
    """The winner of the noise inside the kept set, from ``token``, the winner over everything."""
    lane = tl.arange(0, BLOCK)
    top = tl.div_rn(z_top, heat)
    top_k_mass = tl.full([], -1, tl.int64)
    searching = 1
    while searching == 1:
        own = tl.div_rn(tl.load(logits + token).to(tl.float32), heat)
        own_key = order_key(own, token)
        own_ratio = tl.exp(own - top)
        own_mass = tl.floor(own_ratio * UNIT + 0.5).to(tl.int64)
        count = tl.zeros([BLOCK], tl.int32)
        mass_before = tl.zeros([BLOCK], tl.int64)
        mass_all = tl.zeros([BLOCK], tl.int64)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = lane
        for start in range(0, width, BLOCK):
            column = start + lane
            inside = column < width
            z = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
            score = tl.div_rn(z, heat)
            ratio = tl.exp(score - top)
            mass = tl.floor(ratio * UNIT + 0.5).to(tl.int64)
            before = inside & (order_key(score, column) > own_key)
            count += before.to(tl.int32)
            mass_before += tl.where(before, mass, 0)
            mass_all += mass
            open_ = before & (ratio >= floor)
            if tl.max(open_.to(tl.int32), 0) > 0:
                noise = words_to_gumbel(words_of_tile(start, k0, k1, position, stream, BLOCK))
                perturbed = tl.where(open_, score + noise, float("-inf"))
                better = perturbed > best
                best = tl.where(better, perturbed, best)
                best_at = tl.where(better, column, best_at)
        n = tl.sum(count, 0)
        ahead = tl.sum(mass_before, 0)
        total = tl.sum(mass_all, 0)
        kept = (own_ratio >= floor) & ((k <= 0) | (n < k))
        if kept & (p < 1):
            share = p.to(tl.float64)
            if (k > 0) & (k < width):
                # The mass of the k best lies between these two; it is summed only when that does not decide.
                least = ahead + own_mass
                most = tl.minimum(total, ahead + (k - n).to(tl.int64) * own_mass)
                if ahead.to(tl.float64) < share * least.to(tl.float64):
                    kept = True
                elif ahead.to(tl.float64) >= share * most.to(tl.float64):
                    kept = False
                else:
                    if top_k_mass < 0:
                        top_k_mass = _mass_of_top_k(logits, heat, top, k, width, BLOCK)
                    kept = ahead.to(tl.float64) < share * top_k_mass.to(tl.float64)
            else:
                kept = ahead.to(tl.float64) < share * total.to(tl.float64)
        if kept | (n == 0):
            searching = 0
        else:
            token = key_index(tl.max(order_key(best, best_at), 0))
    return token


@triton.jit
def _finish(
    logits,
    row_stride,
    best_logit,
    best_score,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    t,
    ids,
    y,
    width,
    stream,
    shares,
    share_rows,
    share_t,
    heat_step,
    k_step,
    p_step,
    min_step,
    key_step,
    t_step,
    SHARES: tl.constexpr,
    SAMPLED: tl.constexpr,
    FILTERS: tl.constexpr,
    DRAFT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    logit_key = tl.max(tl.load(best_logit + row * shares + share, mask=share < shares, other=LOWEST), 0)
    key = logit_key
    if SAMPLED:
        key = tl.max(tl.load(best_score + row * shares + share, mask=share < shares, other=LOWEST), 0)
    token = key_index(key)
    sound = (logit_key != SPOILT) & ((logit_key >> 32) != NOTHING)
    if FILTERS:
        owner = row // share_rows
        heat = tl.load(temperature + owner * heat_step)
        k = tl.load(top_k + owner * k_step).to(tl.int32)
        p = tl.load(top_p + owner * p_step)
        floor = tl.load(min_p + owner * min_step)
        active = (heat > 0) & (((k > 0) & (k < width)) | (p < 1) | (floor > 0))
        # The best logit is always kept: only another winner has to be checked.
        if active & sound & (token != key_index(logit_key)):
            k0, k1, position = row_noise(keys + owner * key_step, t + row // share_t * t_step)
            token = _filtered(logits + row * row_stride, token, key_score(logit_key), heat, k, p, floor, k0, k1, position, stream, width, BLOCK)
    if HAS_IDS:
        token = tl.load(ids + token).to(tl.int32)
    if not DRAFT:
        token = tl.where(sound, token, -1)
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


def _argmax(
    logits: Tensor,
    temperature: Tensor | None,
    filters: tuple[Tensor, Tensor, Tensor] | None,
    keys: Tensor,
    t: Tensor,
    ids: Tensor | None,
    width: int,
    stream: int,
    draft: bool,
) -> Tensor:
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
    owners, places, heat_step, key_step, t_step = steps
    top_k, top_p, min_p = filters or (None, None, None)
    cut_steps = [x.stride(0) for x in filters] if filters else [0, 0, 0]
    flags = {"SAMPLED": sampled, "DRAFT": draft, "HAS_IDS": ids is not None, "BLOCK": TILE, "num_warps": 8} | pdl_options(logits.device)
    stride = logits.stride(0)
    _scan[(rows, shares)](logits, stride, heat, noise_keys, noise_t, ids, best[0], best[-1], width, stream, each, *steps, **flags)
    flags |= {"FILTERS": filters is not None, "SHARES": triton.next_power_of_2(shares), "num_warps": (16 if rows <= 128 else 8) if filters else 1}
    _finish[(rows,)](
        logits, stride, best[0], best[-1], heat, top_k, top_p, min_p, noise_keys, noise_t, ids, y, width, stream, shares,
        owners, places, heat_step, *cut_steps, key_step, t_step, **flags,
    )  # fmt: skip
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
    sampled = SAMPLED in features
    filters = (top_k, top_p, min_p) if sampled and FILTERS in features else None
    width = min(vocab_limit, logits.shape[1])
    return _argmax(logits, temperature if sampled else None, filters, keys, t, None, width, stream, draft=False)


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
    return _argmax(logits, heat, None, keys, t, ids, logits.shape[1], TARGET, draft=True)
