"""The sampler for rows with top-k, top-p or min-p as Triton kernels: no sort of the vocabulary, two reads of it. Definition: ``reference_sampling``.

Boundary: logits to tokens for batches in which some row has a filter; knows nothing of requests or trees.

How. The kept set is a prefix of the order (score, lowest id first), and nearly always a short one. ``_survey`` reads the logits once: the best logit,
and the best of each of about a thousand groups of neighbours. ``_plan``: the k-th best of those is a bound that k tokens reach, and few more; without
top-k, 256 tokens are asked for. ``_collect`` reads the logits again and gathers every token at or above the bound, with the mass of all where
top-p needs it. ``_decide`` sorts what was gathered, an exact prefix of the order, cuts it by the law, and draws the noise of the kept alone. Where
the prefix was too short to hold the cut (a flat law with top-p alone, a huge top-k), the row is searched: the winner of the noise is drawn when it is
kept; if not, so is nothing behind it, and the best of what stands before it is the next to ask.
Rows without a filter, or with min-p alone, need no order: ``_collect`` draws their noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait, sm_count
from .philox import row_noise, words_of_ids, words_of_tile, words_to_gumbel
from .sampling import LOWEST, PROGRAMS, SPOILT, TILE, key_index, key_score, order_bits, order_key, row_parameters, shares_of, sound

UNIT: tl.constexpr = tl.constexpr(2.0**35)
GROUPS = 1024  # groups of neighbouring tokens whose maxima bound the k-th score, at most
PREFIX: tl.constexpr = tl.constexpr(256)  # tokens asked for where top-k does not say
CAPACITY = 1024  # tokens a row may gather
GREEDY: tl.constexpr = tl.constexpr(0)  # modes of a row: the best logit (or nothing sound),
NOISE: tl.constexpr = tl.constexpr(1)  # noise over all that min-p keeps,
GATHER: tl.constexpr = tl.constexpr(2)  # the prefix above the bound,
GATHER_MASS: tl.constexpr = tl.constexpr(3)  # and the mass of all


@triton.jit
def _weight(ratio):
    """The fixed-point mass of a probability relative to the largest."""
    return tl.floor(ratio * UNIT + 0.5).to(tl.int64)


@triton.jit
def _survey(
    logits, row_stride, best_logit, maxima, width, tiles, groups, PDL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """One share of one row: the key of its best logit, and the maximum of each group of GROUP neighbours."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    lines: tl.constexpr = BLOCK // GROUP
    line = tl.arange(0, lines)
    place = line[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits += row * row_stride
    first = share * tiles * BLOCK
    z_best = tl.full([lines, GROUP], float("-inf"), tl.float32)
    z_at = first + place
    spoilt = tl.zeros([lines, GROUP], tl.int32)
    for tile in range(tiles):
        start = first + tile * BLOCK
        column = start + place
        z = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        spoilt = spoilt | tl.where(z < float("inf"), 0, 1)
        group = start // GROUP + line
        tl.store(maxima + row * groups + group, tl.max(z, 1), mask=group < groups)
        better = z > z_best
        z_best = tl.where(better, z, z_best)
        z_at = tl.where(better, column, z_at)
    key = tl.max(tl.max(tl.where(z_at < width, order_key(z_best, z_at), LOWEST), 1), 0)
    tl.store(best_logit + row * tl.num_programs(1) + share, tl.where(tl.max(tl.max(spoilt, 1), 0) > 0, SPOILT, key))


@triton.jit
def _plan(
    best_logit, maxima, temperature, top_k, top_p, min_p, first, mode, bound, count, mass, width, shares, groups, share_rows,
    heat_step, k_step, p_step, min_step, SHARES: tl.constexpr, GROUPS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its best logit's key, its mode, the score that what is gathered must reach, and zeroed counters."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    owner = row // share_rows
    share = tl.arange(0, SHARES)
    key = tl.max(tl.load(best_logit + row * shares + share, mask=share < shares, other=LOWEST), 0)
    heat = tl.load(temperature + owner * heat_step)
    k = tl.load(top_k + owner * k_step).to(tl.int32)
    p = tl.load(top_p + owner * p_step)
    limited = (k > 0) & (k < width)
    tl.store(first + row, key)
    tl.store(count + row, 0)
    tl.store(mass + row, tl.full([], 0, tl.int64))
    if (heat > 0) & sound(key):
        if limited | (p < 1):
            wanted = tl.where(limited, k, PREFIX)
            group = tl.arange(0, GROUPS_PAD)
            best = order_bits(tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf")))
            best = tl.where(group < groups, best, -2147483648)
            low = tl.full([], -2147483648, tl.int64)
            high = tl.full([], 2147483647, tl.int64)
            for _ in range(32):  # the largest value that ``wanted`` maxima reach
                middle = (low + high + 1) >> 1
                enough = tl.sum((best.to(tl.int64) >= middle).to(tl.int32), 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            reached = tl.where(low == -2147483648, float("-inf"), key_score(low << 32))
            tl.store(bound + row, tl.div_rn(reached, heat))
            tl.store(mode + row, tl.where(limited | (p >= 1), GATHER, GATHER_MASS))
        else:
            tl.store(mode + row, NOISE)
    else:
        tl.store(mode + row, GREEDY)


@triton.jit
def _collect(
    logits, row_stride, first, mode, bound, count, mass, gathered, best_score, temperature, min_p, keys, t, width, stream, tiles,
    share_rows, share_t, heat_step, min_step, key_step, t_step, PDL: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One share of one row: gather the tokens at or above the bound, or draw noise over all that min-p keeps."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    owner = row // share_rows
    way = tl.load(mode + row)
    lane = tl.arange(0, BLOCK)
    start = share * tiles * BLOCK
    logits += row * row_stride
    heat = tl.load(temperature + owner * heat_step)
    top = tl.div_rn(key_score(tl.load(first + row)), heat)
    if way >= GATHER:
        least = tl.load(bound + row)
        total = tl.zeros([BLOCK], tl.int64)
        for tile in range(tiles):
            column = start + tile * BLOCK + lane
            inside = column < width
            score = tl.div_rn(tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32), heat)
            if way == GATHER_MASS:
                total += tl.where(inside, _weight(tl.exp(score - top)), 0)
            found = (inside & (score >= least)).to(tl.int32)
            n = tl.sum(found, 0)
            if n > 0:
                place = tl.atomic_add(count + row, n, sem="relaxed") + tl.cumsum(found, 0) - found
                tl.store(gathered + row * CAPACITY + place, order_key(score, column), mask=(found > 0) & (place < CAPACITY))
        if way == GATHER_MASS:
            tl.atomic_add(mass + row, tl.sum(total, 0), sem="relaxed")
    elif way == NOISE:
        floor = tl.load(min_p + owner * min_step)
        k0, k1, position = row_noise(keys + owner * key_step, t + row // share_t * t_step)
        key = _noisy(logits, start, tiles, heat, top, floor, k0, k1, position, stream, width, BLOCK)
        tl.store(best_score + row * tl.num_programs(1) + share, key)


@triton.jit
def _noisy(logits, start, tiles, heat, top, floor, k0, k1, position, stream, width, BLOCK: tl.constexpr):
    """Key of the best perturbed score among the tokens of some tiles that min-p keeps."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = start + lane
    some = tl.zeros([BLOCK], tl.int32)
    for tile in range(tiles):
        column = start + tile * BLOCK + lane
        inside = column < width
        score = tl.div_rn(tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32), heat)
        kept = inside & (tl.exp(score - top) >= floor)
        if tl.max(kept.to(tl.int32), 0) > 0:
            noise = words_to_gumbel(words_of_tile(start + tile * BLOCK, k0, k1, position, stream, BLOCK))
            better = kept & (score + noise > best)
            best = tl.where(better, score + noise, best)
            best_at = tl.where(better, column, best_at)
            some = some | better.to(tl.int32)
    return tl.max(tl.where(some > 0, order_key(best, best_at), LOWEST), 0)


@triton.jit
def _cut(gathered, n, top, k, p, floor, all_mass, width, k0, k1, position, stream, SIZE: tl.constexpr):
    """Cut a prefix of the order of ``n`` <= SIZE tokens by the law and draw among the kept: (whether it holds the cut, the key of the winner)."""
    rank = tl.arange(0, SIZE)
    key = tl.sort(tl.load(gathered + rank, mask=rank < n, other=LOWEST), descending=True)
    here = rank < n
    score = key_score(key)
    ratio = tl.where(here, tl.exp(score - top), 0.0)
    limited = (k > 0) & (k < width)
    inside = here & (rank < tl.where(limited, k, SIZE))
    mass = tl.where(inside, _weight(ratio), 0)
    summed = tl.sum(mass, 0)
    total = tl.where(limited, summed, all_mass)
    target = tl.where(p < 1, p.to(tl.float64) * total.to(tl.float64), float("inf"))
    before = tl.cumsum(mass, 0) - mass
    kept = inside & (before.to(tl.float64) < target) & (ratio >= floor)
    kept = kept | (rank == 0)
    # Nothing behind the prefix can be kept: top-k or top-p ended inside it, or its last token fails min-p, or there is nothing behind it.
    least = tl.min(tl.where(here, ratio, 1.0), 0)
    holds = (n >= width) | (least < floor) | (limited & (n >= k)) | ((limited == 0) & (p < 1) & (summed.to(tl.float64) >= target))
    # What the top-p cut of a top-k needs is the mass of all k.
    holds = holds & ((limited == 0) | (p >= 1) | (n >= k))
    token = key_index(key)
    noise = words_to_gumbel(words_of_ids(token, k0, k1, position, stream))
    return holds, tl.max(tl.where(kept, order_key(score + noise, token), LOWEST), 0)


@triton.jit
def _decide(
    logits, row_stride, first, mode, count, mass, gathered, best_score, temperature, top_k, top_p, min_p, keys, t, y, width, stream, shares,
    share_rows, share_t, heat_step, k_step, p_step, min_step, key_step, t_step,
    SHARES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One row: its token, or -1 where its logits are not sound."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    owner = row // share_rows
    logit_key = tl.load(first + row)
    way = tl.load(mode + row)
    token = tl.where(sound(logit_key), key_index(logit_key), -1)
    if way == NOISE:
        share = tl.arange(0, SHARES)
        token = key_index(tl.max(tl.load(best_score + row * shares + share, mask=share < shares, other=LOWEST), 0))
    elif way >= GATHER:
        heat = tl.load(temperature + owner * heat_step)
        k = tl.load(top_k + owner * k_step).to(tl.int32)
        p = tl.load(top_p + owner * p_step)
        floor = tl.load(min_p + owner * min_step)
        k0, k1, position = row_noise(keys + owner * key_step, t + row // share_t * t_step)
        top = tl.div_rn(key_score(logit_key), heat)
        n = tl.load(count + row)
        all_mass = tl.load(mass + row)
        gathered += row * CAPACITY
        holds = n < 0
        winner = logit_key
        few: tl.constexpr = CAPACITY if CAPACITY < 256 else 256
        if n <= few:
            holds, winner = _cut(gathered, n, top, k, p, floor, all_mass, width, k0, k1, position, stream, few)
        elif n <= CAPACITY:
            holds, winner = _cut(gathered, n, top, k, p, floor, all_mass, width, k0, k1, position, stream, CAPACITY)
        if holds:
            token = key_index(winner)
        else:
            logits += row * row_stride
            winner = _noisy(logits, 0, tl.cdiv(width, BLOCK), heat, top, floor, k0, k1, position, stream, width, BLOCK)
            token = _search(logits, key_index(winner), top, heat, k, p, floor, k0, k1, position, stream, width, BLOCK)
    tl.store(y + row, token)


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
        mass += tl.where(above, _weight(tl.exp(score - top)), 0)
    border = key_score((prefix - 2147483648) << 32)
    return tl.sum(mass, 0) + left.to(tl.int64) * _weight(tl.exp(border - top))


@triton.jit
def _search(logits, token, top, heat, k, p, floor, k0, k1, position, stream, width, BLOCK: tl.constexpr):
    """The winner of the noise inside the kept set, from ``token``, the winner over all that min-p keeps."""
    lane = tl.arange(0, BLOCK)
    top_k_mass = tl.full([], -1, tl.int64)
    searching = 1
    while searching == 1:
        own = tl.div_rn(tl.load(logits + token).to(tl.float32), heat)
        own_key = order_key(own, token)
        own_ratio = tl.exp(own - top)
        own_mass = _weight(own_ratio)
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
            mass = _weight(ratio)
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


def filtered_argmax(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor, t: Tensor, width: int, stream: int
) -> Tensor:
    """``reference_sampling.gumbel_argmax`` with filters over the first ``width`` columns: y [N] int32. Arguments as there."""
    rows, device = logits.shape[0], logits.device
    y = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return y
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    group = triton.next_power_of_2(triton.cdiv(width, GROUPS))
    tile = max(TILE, group)
    groups = triton.cdiv(width, group)
    shares, each = shares_of(rows, width, tile, PROGRAMS * sm_count(device))
    best, scores = torch.empty(2, rows, shares, dtype=torch.int64, device=device).unbind()
    first, mass = torch.empty(2, rows, dtype=torch.int64, device=device).unbind()
    mode, count = torch.empty(2, rows, dtype=torch.int32, device=device).unbind()
    bound = torch.empty(rows, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=device)
    gathered = torch.empty(rows, CAPACITY, dtype=torch.int64, device=device)
    heat, noise_keys, noise_t, (owners, places, heat_step, key_step, t_step) = row_parameters(rows, temperature, keys, t)
    k_step, p_step, min_step = top_k.stride(0), top_p.stride(0), min_p.stride(0)
    stride, extra, pad = logits.stride(0), pdl_options(device), triton.next_power_of_2(shares)
    _survey[(rows, shares)](logits, stride, best, maxima, width, each, groups, BLOCK=tile, GROUP=group, num_warps=8, **extra)
    _plan[(rows,)](
        best, maxima, heat, top_k, top_p, min_p, first, mode, bound, count, mass, width, shares, groups, owners, heat_step, k_step, p_step, min_step,
        SHARES=pad, GROUPS_PAD=triton.next_power_of_2(groups), num_warps=1, **extra,
    )  # fmt: skip
    _collect[(rows, shares)](
        logits, stride, first, mode, bound, count, mass, gathered, scores, heat, min_p, noise_keys, noise_t, width, stream, each,
        owners, places, heat_step, min_step, key_step, t_step, BLOCK=tile, CAPACITY=CAPACITY, num_warps=8, **extra,
    )  # fmt: skip
    _decide[(rows,)](
        logits, stride, first, mode, count, mass, gathered, scores, heat, top_k, top_p, min_p, noise_keys, noise_t, y, width, stream, shares,
        owners, places, heat_step, k_step, p_step, min_step, key_step, t_step,
        SHARES=pad, BLOCK=tile, CAPACITY=CAPACITY, num_warps=8, **extra,
    )  # fmt: skip
    return y
