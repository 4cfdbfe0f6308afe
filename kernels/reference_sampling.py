"""Noise, the law f and the sampler, in plain torch: the executable specification of ``kernels.philox`` and ``kernels.sampling``.

Boundary: tensors in, tensors out; knows nothing of requests, drafters or trees. Every function is free of host reads and of data-dependent
shapes, so it may also run inside a CUDA graph.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10); the Gumbel-max trick.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF

# Streams of noise: which purpose a counter serves.
TARGET, SAMPLED_DRAFT, COIN, RESIDUAL = 0, 1, 2, 3

# Probabilities are summed as integers of this unit: the sum then depends neither on the order nor on the split, and 2**18 of them fit a float64.
MASS_UNIT = 2.0**35

SAMPLED, FILTERS = "sampled", "filters"
ALL_FEATURES = frozenset({SAMPLED, FILTERS})


# -- noise ------------------------------------------------------------------------------------------------------------------------------------


def _mul_hi_lo(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit words held in int64; the product wraps, its 64 bits stay right."""
    product = a * constant
    return (product >> 32) & MASK32, product & MASK32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of noise for each counter. All tensors int64 holding 32-bit words, shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        hi0, lo0 = _mul_hi_lo(c0, MULTIPLIERS[0])
        hi1, lo1 = _mul_hi_lo(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def gumbel_from_words(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 in [-2.9, 22.9], from 32-bit words held in int64; finite for every word.

    u = (word + 1/2) / 2**32; E = -log(1 - u), by its series where 1 - u would lose the digits that matter; g = -log(E).
    """
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    series = u + u * u * 0.5 + u * u * u * (1.0 / 3.0)
    plain = -torch.log(1.0 - u.clamp(max=1.0 - 2.0**-24))
    return -torch.log(torch.where(u < 2.0**-6, series, plain))


def noise_words(keys: Tensor, t: Tensor, vocab: int | None, stream: int = TARGET, ids: Tensor | None = None) -> Tensor:
    """The 32-bit noise words of N rows, int64 [N, V]; arguments as for ``gumbel``."""
    k0, k1 = ((keys[:, i : i + 1].long() & MASK32) for i in (0, 1))
    position = t.long()[:, None] & MASK32
    zero = torch.zeros_like(position)
    if ids is None or (vocab is not None and ids.shape[0] * 4 > vocab):
        assert vocab is not None, "vocab or ids"
        blocks = torch.arange((vocab + 3) // 4, device=keys.device)
        words = philox((blocks[None], position, zero + stream, zero), (k0, k1))
        full = torch.stack(words, -1).flatten(1)
        return full[:, :vocab] if ids is None else full.index_select(1, ids.long())
    ids = ids.long()
    four = torch.stack(philox(((ids >> 2)[None], position, zero + stream, zero), (k0, k1)), -1)
    return four.gather(-1, (ids & 3)[None, :, None].expand(four.shape[0], -1, 1))[..., 0]


def gumbel(keys: Tensor, t: Tensor, vocab: int | None, stream: int = TARGET, ids: Tensor | None = None) -> Tensor:
    """Gumbel noise of N rows, float32 [N, V].

    keys [N, 2] int32: bit patterns of the Philox key. t [N] int32: output position. Token v takes word v % 4 of counter (v // 4, t, stream, 0).
    ``ids`` [V] holds the target id of each column, or None for 0 .. vocab - 1; beside ``ids``, ``vocab`` (above every id) only helps speed.
    """
    return gumbel_from_words(noise_words(keys, t, vocab, stream, ids))


# -- order ------------------------------------------------------------------------------------------------------------------------------------


def order_keys(scores: Tensor) -> Tensor:
    """Distinct int64 keys of float32 [..., V] that sort as (score, then lowest index first); NaN counts as -inf, -0 equals 0."""
    scores = torch.where(torch.isnan(scores), float("-inf"), scores) + 0.0
    bits = scores.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    index = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered << 32) | (MASK32 - index)


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 [..., V], largest first, ties to the lowest index: (values, indices int64). NaN counts as -inf."""
    index = MASK32 - (order_keys(scores).topk(k, -1).values & MASK32)
    values = scores.gather(-1, index)
    return torch.where(torch.isnan(values), float("-inf"), values), index


# -- the law f: logits ------------------------------------------------------------------------------------------------------------------------


@dataclass
class LawTables:
    """What changes logits before the draw, by slot. Each table has R rows, or one row that serves all; None where no row of the job needs it.

    repetition (1 = off), presence, frequency (0 = off) [R] float32, all given together with prompt_seen [R, V] bool and output_count
    [R, V] int32.
    bias [R, V] float32: the logit bias, with -inf at banned ids and at ids outside an allowed list.
    min_tokens [R] int32 with stop_ids [R, M] int32 (-1 fills): the ids that may not come before that many tokens.
    """

    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    prompt_seen: Tensor | None = None
    output_count: Tensor | None = None
    bias: Tensor | None = None
    min_tokens: Tensor | None = None
    stop_ids: Tensor | None = None


def _rows(table: Tensor, slots: Tensor) -> Tensor:
    return table if table.shape[0] == 1 else table.index_select(0, slots.long())


def _columns(table: Tensor, slots: Tensor, ids: Tensor | None, width: int) -> Tensor:
    rows = _rows(table, slots)
    return rows[:, :width] if ids is None else rows.index_select(1, ids.long())


def _penalise(z: Tensor, slots: Tensor, tables: LawTables, path_tokens: Tensor | None, ids: Tensor | None) -> Tensor:
    assert tables.repetition is not None and tables.presence is not None and tables.frequency is not None
    assert tables.prompt_seen is not None and tables.output_count is not None
    count = _rows(tables.output_count, slots).expand(z.shape[0], -1)
    if path_tokens is not None:
        at = path_tokens.clamp(min=0).long()
        count = count.scatter_add(1, at, (path_tokens >= 0).to(count.dtype))
    count = count[:, : z.shape[1]] if ids is None else count.index_select(1, ids.long())
    seen = _columns(tables.prompt_seen, slots, ids, z.shape[1]) | (count > 0)
    repetition, presence, frequency = (_rows(x, slots)[:, None] for x in (tables.repetition, tables.presence, tables.frequency))
    z = torch.where(seen, torch.where(z > 0, z / repetition, z * repetition), z)
    return z - frequency * count.to(z.dtype) - presence * (count > 0).to(z.dtype)


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    tables: LawTables,
    path_tokens: Tensor | None,
    out_len: Tensor | None,
    vocab_limit: int,
    mask_bits: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Steps 1 to 3 of the law f for N nodes: penalties, bias, masks. Returns float32 [N, V]; ``logits`` may be changed in place.

    logits [N, V] any float type. slots [N]: the table row of each node. path_tokens [N, P] int32 (-1 fills): the tokens up to and including the node
    that ``output_count`` does not hold yet. out_len [N] int32: output length at the node, for min_tokens. Ids at or above ``vocab_limit``
    become -inf.
    mask_bits [N, ceil(vocab / 32)] int32: a grammar's mask, bit v % 32 of word v // 32 set where v is allowed.
    ids [V]: the target id of each column (a reduced-vocabulary drafter), or None for the identity.
    """
    z = logits.float()
    width = z.shape[1]
    if tables.repetition is not None:
        z = _penalise(z, slots, tables, path_tokens, ids)
    if tables.bias is not None:
        z = z + _columns(tables.bias, slots, ids, width)
    column = torch.arange(width, device=z.device) if ids is None else ids.long()
    banned = (column >= vocab_limit)[None]
    if tables.min_tokens is not None:
        assert tables.stop_ids is not None and out_len is not None
        stop = _rows(tables.stop_ids, slots).expand(z.shape[0], -1)
        hit = torch.zeros(z.shape[0], max(vocab_limit, int(z.shape[1])) + 1, dtype=torch.bool, device=z.device)
        spare = hit.shape[1] - 1
        hit.scatter_(1, torch.where((stop < 0) | (stop > spare), spare, stop).long(), True)
        early = (out_len < _rows(tables.min_tokens, slots))[:, None]
        banned = banned | (early & hit.index_select(1, column.clamp(max=spare - 1)))
    if mask_bits is not None:
        word = mask_bits.index_select(1, (column >> 5).clamp(max=mask_bits.shape[1] - 1))
        banned = banned | (((word >> (column & 31).to(word.dtype)) & 1) == 0)
    return z.masked_fill(banned, float("-inf"))


def commit_counts(output_count: Tensor, slots: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Add the kept tokens of a step to ``output_count`` [R, V] int32 in place. slots [B]; tokens [B, W] int32; the first kept [B] of a row count."""
    counted = (torch.arange(tokens.shape[1], device=tokens.device)[None] < kept[:, None]) & (tokens >= 0)
    cell = slots.long()[:, None] * output_count.shape[1] + tokens.clamp(min=0)
    output_count.view(-1).scatter_add_(0, cell.view(-1), counted.to(output_count.dtype).view(-1))


# -- the law f: the draw ----------------------------------------------------------------------------------------------------------------------


def kept_mask(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of float32 scores [N, V] (logits / T) may be drawn: bool [N, V].

    top_k [N] int32 (0 = off): exactly k. Then top_p [N] (1 = off): the smallest set of those that reaches p of their mass. Then min_p [N] (0 = off):
    probability at least min_p of the largest. Each keeps a prefix of the order (score descending, id ascending), and never less than one id.
    """
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)[None]
    kept = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    ratio = torch.exp(ordered - ordered[:, :1])
    mass = torch.where(kept, torch.floor(ratio * MASS_UNIT + 0.5), 0.0).long()
    total = mass.sum(1, keepdim=True).double()
    before = (mass.cumsum(1) - mass).double()
    kept &= (before < top_p.double()[:, None] * total) | (top_p >= 1)[:, None]
    kept &= ratio >= min_p[:, None]
    return torch.zeros_like(kept).scatter(1, order, kept | (rank == 0))


def spread(x: Tensor, rows: int) -> Tensor:
    """Parameters of ``rows`` rows from x [rows / n, ...], each entry serving n rows in a row (the nodes of a request)."""
    return x if x.shape[0] == rows else x.repeat_interleave(rows // x.shape[0], 0, output_size=rows)


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
    """The token of each of N rows under the law f: y [N] int32, or -1 where the logits hold a NaN, +inf, or nothing finite.

    logits [N, V] any float type, after ``adjust_logits``; columns at or above ``vocab_limit`` are ignored. temperature, top_p, min_p [N] float32,
    top_k [N] int32. keys [N, 2], t [N] int32: noise. T = 0: argmax. Else argmax over the kept set of logits / T + g. Ties go to the lowest id.
    The parameters, keys included, may have N / n rows instead, each serving n rows in a row (the nodes of a request); so may t, by itself.
    ``features``: ``sampled`` when some T is above 0, ``filters`` when such a row uses top-k, top-p or min-p; without them that work is skipped.
    """
    z = logits[:, :vocab_limit].float()
    best = z.max(1)
    bad = ~torch.isfinite(best.values)  # a NaN and +inf win the maximum
    y = z.argmax(1)
    if SAMPLED in features:
        temperature, top_k, top_p, min_p, keys, t = (spread(x, z.shape[0]) for x in (temperature, top_k, top_p, min_p, keys, t))
        warm = temperature > 0
        scores = z / torch.where(warm, temperature, 1.0)[:, None]
        perturbed = scores + gumbel(keys, t, z.shape[1], stream)
        if FILTERS in features:
            perturbed = perturbed.masked_fill(~kept_mask(scores, top_k, top_p, min_p), float("-inf"))
        y = torch.where(warm, perturbed.argmax(1), y)
    return torch.where(bad, -1, y).to(torch.int32)


# -- drafts -----------------------------------------------------------------------------------------------------------------------------------


def _draft_scores(
    logits: Tensor, temperature: Tensor | None, keys: Tensor, t: Tensor, ids: Tensor | None, vocab: int | None, sampled: bool
) -> Tensor:
    """z / T + g (z where T = 0), float32; a NaN becomes -inf and +inf the largest float, for a draft only costs acceptance."""
    z = logits.float().nan_to_num(float("-inf"), None, float("-inf"))
    if temperature is None or not sampled:
        return z
    temperature, keys, t = (spread(x, z.shape[0]) for x in (temperature, keys, t))
    warm = (temperature > 0)[:, None]
    noise = gumbel(keys, t, logits.shape[1] if ids is None else vocab, TARGET, ids)
    return torch.where(warm, z / torch.where(warm, temperature[:, None], 1.0) + noise, z)


def draft_argmax(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor,
    t: Tensor,
    ids: Tensor | None = None,
    features: Collection[str] = ALL_FEATURES,
    vocab: int | None = None,
) -> Tensor:
    """The best draft token of each row, [N] int32 in target ids, always a real id; no softmax, no sort. Arguments as for ``draft_topk``."""
    scores = _draft_scores(logits, temperature, keys, t, ids, vocab, SAMPLED in features)
    best = scores.argmax(1)
    return (best if ids is None else ids.index_select(0, best)).to(torch.int32)


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
    """The k best draft tokens of each of N rows and their log-probabilities: (tokens [N, k] int32 in target ids, logp [N, k] float32 <= 0).

    logits [N, Vd]. Scores are z / T + g with the target's noise (Gumbel coupling: Daliri, Musco and Suresh), z alone where T = 0, ``temperature``
    [N] is None or ``sampled`` is not in ``features``; logp = log_softmax(scores). Best first, ties to the lowest draft id.
    keys [N, 2], t [N] int32; temperature and keys together, or t, may have N / n rows instead, each serving n rows in a row.
    ids [Vd]: the target id of each draft id (i + d2t[i]), or None. ``vocab`` (target size) only helps speed.
    """
    scores = _draft_scores(logits, temperature, keys, t, ids, vocab, SAMPLED in features)
    values, index = stable_topk(scores, k)
    top = values[:, :1].clamp(min=torch.finfo(torch.float32).min)
    logp = (values - top) - torch.log(torch.exp(scores - top).sum(1, keepdim=True))
    tokens = index if ids is None else ids.index_select(0, index.flatten()).view(index.shape)
    return tokens.to(torch.int32), torch.where(torch.isnan(logp), float("-inf"), logp)
