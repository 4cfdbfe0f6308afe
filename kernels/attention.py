"""Paged attention: a few queries a row over long contexts (decode, draft trees, verification), and causal prefill chunks.

One kernel serves both. A program holds QT tokens x G query heads of one KV head as the rows of a tile, so K and V are read once for the whole
group, and walks the keys in tiles of BN with an online softmax in base 2 (Flash-Decoding: Dao et al. 2023, split over keys, then merged).
Batch-invariant mode (``fixed_split``): one token a tile, keys in order of position in chunks of a fixed length, merged in order; nothing then depends
on batch, tree or chunk.
Boundary: kernels and launchers only; the meaning of each argument is defined by ``reference.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import COUNTERS, arrival_counters, last_to_arrive, pdl_options, pdl_wait, sm_count

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _soft_cap(z, cap):
    """cap * tanh(z / cap), by the exponential: saturates without overflow."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * z / cap)))


@triton.jit
def _merge(top, total, acc, part_top, part_total, part_acc):
    """Join two partial softmaxes (row maximum in base 2, sum, weighted values); an empty one (maximum -inf) changes nothing."""
    new_top = tl.maximum(top, part_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - safe)
    join = tl.exp2(part_top - safe)
    return new_top, total * keep + part_total * join, acc * keep[:, None] + part_acc * join[:, None]


@triton.jit
def _with_sink(top, total, acc, sinks, heads, ok):
    """Add one more logit a head to the denominator."""
    sink = tl.load(sinks + heads, mask=ok, other=0.0).to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink)
    keep = tl.exp2(top - new_top)
    return total * keep + tl.exp2(sink - new_top), acc * keep[:, None]


@triton.jit
def _ancestor_words(nodes, base: tl.constexpr):
    """Bit n - base of each row is set when node n is among its ``nodes`` [BM, P] (-1: none), for 64 nodes from ``base``."""
    place = nodes - base
    inside = (place >= 0) & (place < 64)
    bit = tl.full(nodes.shape, 1, tl.int64) << tl.where(inside, place, 0).to(tl.int64)
    return tl.sum(tl.where(inside, bit, 0), 1)


@triton.jit
def _ancestor_mask(words0, words1, words2, words3, place, WORDS: tl.constexpr):
    """[BM, BN]: whether window place [BN] (negative: none) is an ancestor of each row."""
    word = tl.broadcast_to(words0[:, None], [words0.shape[0], place.shape[0]])
    if WORDS > 1:
        word = tl.where((place < 64)[None, :], word, words1[:, None])
    if WORDS > 2:
        word = tl.where((place < 128)[None, :], word, words2[:, None])
        word = tl.where((place < 192)[None, :], word, words3[:, None])
    bit = (word >> (place & 63).to(tl.int64)[None, :]) & 1
    return (bit != 0) & ((place >= 0) & (place < WORDS * 64))[None, :]


@triton.jit
def _attention_kernel(
    q,
    k_pool,
    v_pool,
    block_table,
    length,
    path,
    cu_q,
    sinks,
    out,
    part_acc,
    part_top,
    part_total,
    counters,
    scale,
    softcap,
    window,
    q_len,
    tiles_per_row,
    q_stride_t,
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    table_stride,
    HK: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    QT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    FUSED: tl.constexpr,
    FIXED: tl.constexpr,
    PATH_LEN: tl.constexpr,
    PATH_PAD: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    hk = pid % HK
    split = (pid // HK) % SPLITS
    tile = pid // (HK * SPLITS)
    if PACKED:  # late tiles of a chunk see the most keys: start them first
        tile = tl.num_programs(0) // (HK * SPLITS) - 1 - tile
    row = tile // tiles_per_row
    first = (tile % tiles_per_row) * QT
    lane = tl.arange(0, BM)
    token = first + lane // G
    head = hk * G + lane % G
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    pdl_wait(PDL)
    committed = tl.load(length + row)
    if PACKED:
        start = tl.load(cu_q + row)
        count = tl.load(cu_q + row + 1) - start
    else:
        start = row * q_len
        count = q_len
    ok = (lane < QT * G) & (token < count)
    q_rows = (start + token).to(tl.int64) * q_stride_t + head * q_stride_h
    q_tile = tl.load(q + q_rows[:, None] + dk[None, :], mask=ok[:, None] & (dk < DK)[None, :], other=0.0)

    words0 = tl.zeros([BM], tl.int64)
    words1 = words0
    words2 = words0
    words3 = words0
    path_row = path
    if PATH_LEN > 0:
        # A tree: the keys of the window are the ancestors of each query.
        step = tl.arange(0, PATH_PAD)
        inside = ok[:, None] & (step < PATH_LEN)[None, :]
        nodes = tl.load(path + (row * q_len + token)[:, None] * PATH_LEN + step[None, :], mask=inside, other=-1)
        depth = tl.sum((nodes >= 0).to(tl.int32), 1) - 1
        alive = depth >= 0
        query_at = committed + depth
        path_row = path + (row * q_len + first) * PATH_LEN
        if FIXED > 0:
            stop = tl.max(tl.where(ok, query_at, -1), 0) + 1
        else:
            stop = committed + tl.max(tl.max(nodes, 1), 0) + 1
            if HAS_WINDOW:
                nodes = tl.where(depth[:, None] - step[None, :] < window, nodes, -1)
            words0 = _ancestor_words(nodes, 0)
            if WORDS > 1:
                words1 = _ancestor_words(nodes, 64)
            if WORDS > 2:
                words2 = _ancestor_words(nodes, 128)
                words3 = _ancestor_words(nodes, 192)
    else:
        query_at = committed + token
        alive = ok
        stop = tl.where(first < count, committed + tl.minimum(first + QT, count), 0)

    begin = 0
    if HAS_WINDOW:
        earliest = committed if PATH_LEN > 0 else committed + first
        begin = tl.maximum(earliest - window + 1, 0) // BN * BN
    if FIXED > 0:
        chunk_from = 0 if SPLITS == 1 else split
        chunk_to = tl.cdiv(stop, FIXED) if SPLITS == 1 else split + 1
    else:
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), SPLITS), BN) * BN
        chunk_from = 0
        chunk_to = 1

    k_base = k_pool + hk * k_stride_h + dk
    v_base = v_pool + hk * v_stride_h + dv
    table = block_table + row * table_stride
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    if FIXED == 0:
        lo = begin + split * share
        hi = tl.minimum(lo + share, stop)
        top, total, acc = _walk(
            q_tile, k_base, v_base, table, path_row, lo, hi, committed, query_at, words0, words1, words2, words3, scale, softcap, window,
            k_stride_n, v_stride_n, dk, dv,
            DK, DV, DKP, DVP, BM, BN, PAGE, FIXED, PATH_LEN, WORDS, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    else:
        for chunk in range(chunk_from, chunk_to):
            lo = tl.maximum(chunk * FIXED, begin)
            hi = tl.minimum(chunk * FIXED + FIXED, stop)
            part = _walk(
                q_tile, k_base, v_base, table, path_row, lo, hi, committed, query_at, words0, words1, words2, words3, scale, softcap, window,
                k_stride_n, v_stride_n, dk, dv,
                DK, DV, DKP, DVP, BM, BN, PAGE, FIXED, PATH_LEN, WORDS, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
            top, total, acc = _merge(top, total, acc, part[0], part[1], part[2])

    out_rows = ((start + token).to(tl.int64) * (HK * G) + head) * DV
    out_mask = ok[:, None] & (dv < DV)[None, :]
    if SPLITS > 1:
        group = tile * HK + hk
        place = (group * SPLITS + split) * BM + lane
        tl.store(part_top + place, tl.where(alive, top, float("-inf")))
        tl.store(part_total + place, tl.where(alive, total, 0.0))
        tl.store(part_acc + place.to(tl.int64)[:, None] * DVP + dv[None, :], acc)
        if FUSED:  # noqa: SIM102 - decided when the kernel is compiled
            # The program that arrives last merges all parts, in order of position, and leaves the counter at zero for the next launch.
            if last_to_arrive(counters + group, SPLITS):
                m, t, a = _merge_parts(part_acc, part_top, part_total, group, lane, dv, BM, DVP, SPLITS)
                if HAS_SINKS:
                    t, a = _with_sink(m, t, a, sinks, head, ok)
                dead = tl.where((t == t)[:, None], 0.0, t[:, None])
                a = tl.where((alive & (t > 0))[:, None], a / tl.where(t > 0, t, 1.0)[:, None], dead)
                tl.store(out + out_rows[:, None] + dv[None, :], a.to(out.dtype.element_ty), mask=out_mask)
    else:
        if HAS_SINKS:
            total, acc = _with_sink(top, total, acc, sinks, head, ok)
        dead = tl.where((total == total)[:, None], 0.0, total[:, None])
        acc = tl.where((alive & (total > 0))[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], dead)
        tl.store(out + out_rows[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _merge_parts(part_acc, part_top, part_total, group, lane, dv, BM: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr):
    """All parts of one tile, read past L1 (other programs wrote them) and merged in order."""
    place = group * SPLITS * BM + lane
    top = tl.full([BM], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(part_top + place + s * BM, cache_modifier=".cg"))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    for s in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(part_top + place + s * BM, cache_modifier=".cg") - safe)
        total += weight * tl.load(part_total + place + s * BM, cache_modifier=".cg")
        acc += weight[:, None] * tl.load(part_acc + (place + s * BM).to(tl.int64)[:, None] * DVP + dv[None, :], cache_modifier=".cg")
    return top, total, acc


@triton.jit
def _slots(n, hi, committed, table, path_row, PAGE: tl.constexpr, FIXED: tl.constexpr, PATH_LEN: tl.constexpr):
    """Pool slot [BN] int32 of keys n of one row (beyond ``hi``: scratch). In fixed mode a window key is the query's own ancestor at that position."""
    valid = n < hi
    index = n
    if FIXED > 0 and PATH_LEN > 0:
        own = tl.load(path_row + tl.maximum(n - committed, 0), mask=valid & (n >= committed), other=0)
        index = tl.where(n < committed, n, committed + own)
    page = tl.load(table + index // PAGE, mask=valid, other=0)
    return page * PAGE + index % PAGE


@triton.jit
def _walk(
    q_tile, k_base, v_base, table, path_row, lo, hi, committed, query_at, words0, words1, words2, words3, scale, softcap, window,
    k_stride_n, v_stride_n, dk, dv,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    FIXED: tl.constexpr, PATH_LEN: tl.constexpr, WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys lo .. hi - 1 of one row. Returns (maximum in base 2, sum, weighted values) of the tile's queries."""
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DVP], tl.float32)
    lane = tl.arange(0, BN)
    # Slots are carried from the tile before: were the table read in the same iteration, the compiler would give it a pipeline stage and a copy group
    # of its own, and every wait for it would also wait for the K and V in flight.
    slot = _slots(lo + lane, hi, committed, table, path_row, PAGE, FIXED, PATH_LEN)
    for n0 in range(lo, hi, BN):
        n = n0 + lane
        valid = n < hi
        k_mask = valid[:, None] if DK == DKP else valid[:, None] & (dk < DK)[None, :]
        v_mask = valid[:, None] if DV == DVP else valid[:, None] & (dv < DV)[None, :]
        k = tl.load(k_base[None, :] + (slot.to(tl.int64) * k_stride_n)[:, None], mask=k_mask, other=0.0)
        v = tl.load(v_base[None, :] + (slot.to(tl.int64) * v_stride_n)[:, None], mask=v_mask, other=0.0)
        z = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            z = _soft_cap(z, softcap)
        z = z * LOG2E
        if FIXED > 0:
            seen = tl.broadcast_to(valid[None, :], [BM, BN])
        elif PATH_LEN > 0:
            seen = (valid & (n < committed))[None, :] | _ancestor_mask(words0, words1, words2, words3, n - committed, WORDS)
        else:
            seen = n[None, :] <= query_at[:, None]
            seen = seen & valid[None, :]
        if HAS_WINDOW:
            if PATH_LEN > 0 and FIXED == 0:
                seen = seen & ((query_at[:, None] - n[None, :] < window) | (n >= committed)[None, :])
            else:
                seen = seen & (query_at[:, None] - n[None, :] < window)
        z = tl.where(seen, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(z - safe[:, None])
        keep = tl.exp2(top - safe)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
        slot = _slots(n + BN, hi, committed, table, path_row, PAGE, FIXED, PATH_LEN)
    return top, total, acc


@triton.jit
def _merge_kernel(
    part_acc, part_top, part_total, path, cu_q, sinks, out, q_len, tiles_per_row,
    HK: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, QT: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, FIXED: tl.constexpr, HAS_SINKS: tl.constexpr, PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query head a program: merge its parts. In fixed mode strictly in order of position, so empty parts leave every bit alone."""
    pid = tl.program_id(0)
    lane = pid % (QT * G)
    group = pid // (QT * G)
    hk = group % HK
    tile = group // HK
    row = tile // tiles_per_row
    token = (tile % tiles_per_row) * QT + lane // G
    head = hk * G + lane % G
    dv = tl.arange(0, DVP)
    pdl_wait(PDL)
    if PACKED:
        start = tl.load(cu_q + row)
        count = tl.load(cu_q + row + 1) - start
    else:
        start = row * q_len
        count = q_len
    place = group * SPLITS * BM + lane
    if FIXED > 0:
        one = tl.arange(0, 1)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, DVP], tl.float32)
        for s in range(SPLITS):
            at = place + s * BM
            part_t = tl.load(part_top + at + one)
            part_s = tl.load(part_total + at + one)
            part_a = tl.load(part_acc + (at + one).to(tl.int64)[:, None] * DVP + dv[None, :])
            top, total, acc = _merge(top, total, acc, part_t, part_s, part_a)
        if HAS_SINKS:
            total, acc = _with_sink(top, total, acc, sinks, head + one, one >= 0)
        top1 = tl.max(top, 0)
        total1 = tl.max(total, 0)
        result = tl.sum(acc, 0)
    else:
        s = tl.arange(0, SPLITS_PAD)
        at = place + s * BM
        tops = tl.load(part_top + at, mask=s < SPLITS, other=float("-inf"))
        totals = tl.load(part_total + at, mask=s < SPLITS, other=0.0)
        parts = tl.load(part_acc + at.to(tl.int64)[:, None] * DVP + dv[None, :], mask=(s < SPLITS)[:, None], other=0.0)
        top1 = tl.max(tops, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            best = tl.maximum(top1, sink)
        else:
            best = top1
        safe = tl.where(best == float("-inf"), 0.0, best)
        weight = tl.exp2(tops - safe)
        total1 = tl.sum(weight * totals, 0)
        if HAS_SINKS:
            total1 += tl.exp2(sink - safe)
        result = tl.sum(parts * weight[:, None], 0)
    dead = tl.where(total1 == total1, 0.0, total1)
    result = tl.where((total1 > 0) & (top1 > float("-inf")), result / tl.where(total1 > 0, total1, 1.0), dead)
    tl.store(out + ((start + token).to(tl.int64) * (HK * G) + head) * DV + dv, result.to(out.dtype.element_ty), mask=(dv < DV) & (token < count))


@dataclass(frozen=True)
class AttentionConfig:
    """Meta-parameters of one launch: key tile, query rows of a tile, warps, pipeline stages, key splits (None: by the device), one-kernel merge."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    splits: int | None = None
    fused: bool = True


@cache
def default_config(rows: int, group: int, head_bytes: int, prefill: bool) -> AttentionConfig:
    """The configuration for ``rows`` = tokens x group query rows of a KV head. ``head_bytes``: bytes of one key and one value of one KV head."""
    block_m = min(128 if prefill else 64, max(16, triton.next_power_of_2(rows)))
    block_m = max(block_m, triton.next_power_of_2(group))
    block_n = 64 if head_bytes <= 512 else 32
    stages = max(1, min(3, 160 * 1024 // (block_n * head_bytes)))
    if block_m == 64:  # two programs a processor rather than a deeper pipeline in one
        stages = min(stages, 2)
    return AttentionConfig(block_n, block_m, 8 if block_m >= 128 else 4, stages)


@cache
def decode_config(default: AttentionConfig, groups: int, max_len: int) -> AttentionConfig:
    """``default`` adjusted to how many programs a decode launch has before splitting, as measured on an H200 (head size 128, bf16, 384 keys).

    Few programs want long tiles (latency); about as many as fit want small footprints, so that all are resident at once; many want the smallest. Long
    contexts keep the deep pipeline, which reads at bandwidth whatever the batch.
    """
    if max_len > 2048:
        return default
    narrow = default.block_m <= 16
    if groups <= 16:
        return replace(default, block_n=64, num_stages=2 if narrow else 3)
    if groups <= 128 or not narrow:
        return replace(default, block_n=32, num_stages=3)
    if groups <= 384:
        return replace(default, block_n=32, num_warps=2, num_stages=3)
    if groups <= 768:
        return replace(default, block_n=64, num_stages=2)
    return replace(default, block_n=32, num_warps=2, num_stages=2)


def choose_splits(programs: int, max_len: int, block_n: int, processors: int) -> int:
    """Key splits so that ``programs`` fill the device about twice, each with at least one tile of keys; a power of two up to 16."""
    room = max(1, 2 * processors // max(programs, 1))
    room = min(room, max(1, -(-max_len // block_n)), 16)
    return 1 << (room.bit_length() - 1)


def _launch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    path: Tensor | None,
    cu_q: Tensor | None,
    q_len: int,
    page_size: int,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    fixed_split: int | None,
    config: AttentionConfig | None,
) -> Tensor:
    tokens, heads, key_dim = q.shape
    kv_heads, value_dim = v_pool.shape[1:]
    group = heads // kv_heads
    rows = block_table.shape[0]
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    key_pad, value_pad = (max(16, triton.next_power_of_2(d)) for d in (key_dim, value_dim))
    head_bytes = (key_pad + value_pad) * k_pool.element_size()
    packed = cu_q is not None
    config = config or default_config(group if fixed_split else q_len * group, group, head_bytes, packed)
    tuned = not packed and fixed_split is None and head_bytes <= 512 and config.splits is None
    if tuned:
        config = decode_config(config, rows * triton.cdiv(q_len, max(1, config.block_m // group)) * kv_heads, max_len)
    block_n, block_m = config.block_n, config.block_m
    if fixed_split is not None and fixed_split % block_n:
        raise ValueError(f"fixed_split {fixed_split} is not a multiple of the key tile {block_n}")
    tile_tokens = 1 if fixed_split is not None else block_m // group
    tiles_per_row = triton.cdiv(q_len, tile_tokens)
    groups = rows * tiles_per_row * kv_heads
    if packed:
        splits = 1
    elif fixed_split is not None:
        # With tiles enough to fill the device one program walks all chunks of its row: the same sums in the same order, without parts in memory.
        splits = triton.cdiv(max_len, fixed_split) if groups < 2 * sm_count(q.device) else 1
    else:
        splits = config.splits or choose_splits(groups, max_len, block_n, sm_count(q.device))
    fused = config.fused and 1 < splits <= 16 and fixed_split is None and groups <= COUNTERS
    part_acc = part_top = part_total = counters = out
    if splits > 1:
        part_acc = torch.empty(groups * splits * block_m, value_pad, dtype=torch.float32, device=q.device)
        part_top, part_total = torch.empty(2, groups * splits * block_m, dtype=torch.float32, device=q.device)
        counters = arrival_counters(q.device) if fused else out
    path_len = 0 if path is None else path.shape[2]
    path_words = 0 if path is None else (1 if q_len * path_len <= 64 else 2 if q_len * path_len <= 128 else 4)
    path = path if path is None else path.contiguous()
    extra = pdl_options(q.device)
    fusion = {"enable_fp_fusion": False} if fixed_split is not None else {}
    _attention_kernel[(groups * splits,)](
        q, k_pool, v_pool, block_table, length, length if path is None else path, length if cu_q is None else cu_q, out if sinks is None else sinks,
        out, part_acc, part_top, part_total, counters, scale, softcap or 1.0, window, q_len, tiles_per_row,
        q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1), block_table.stride(0),
        HK=kv_heads, G=group, DK=key_dim, DV=value_dim, DKP=key_pad, DVP=value_pad, QT=tile_tokens, BM=block_m, BN=block_n, PAGE=page_size,
        SPLITS=splits, FUSED=fused, FIXED=fixed_split or 0, PATH_LEN=path_len, PATH_PAD=triton.next_power_of_2(max(path_len, 1)), WORDS=path_words,
        HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, PACKED=packed,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=config.num_warps, num_stages=config.num_stages, **extra, **fusion,
    )  # fmt: skip
    if splits > 1 and not fused:
        _merge_kernel[(groups * tile_tokens * group,)](
            part_acc, part_top, part_total, length, length if cu_q is None else cu_q, out if sinks is None else sinks, out, q_len, tiles_per_row,
            HK=kv_heads, G=group, DV=value_dim, DVP=value_pad, QT=tile_tokens, BM=block_m, SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits),
            FIXED=fixed_split or 0, HAS_SINKS=sinks is not None, PACKED=packed, num_warps=2, **extra, **fusion,
        )  # fmt: skip
    return out


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    q_len: int,
    path: Tensor | None,
    page_size: int,
    max_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fixed_split: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """``reference.tree_attention`` on the device. ``config`` overrides the meta-parameters (benchmarks)."""
    return _launch(q, k_pool, v_pool, block_table, length, path, None, q_len, page_size, max_len, scale, window, softcap, sinks, fixed_split, config)


def packed_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    cu_q: Tensor,
    max_q: int,
    page_size: int,
    max_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fixed_split: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """``reference.packed_attention`` on the device."""
    return _launch(q, k_pool, v_pool, block_table, length, None, cu_q, max_q, page_size, max_len, scale, window, softcap, sinks, fixed_split, config)
