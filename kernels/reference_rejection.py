"""Rejection sampling against drafts that were drawn at random: laws, the drawing of children, and their verdict, in plain torch.

Boundary: tensors in, tensors out; noise comes as arguments, drafters and trees are the caller's. No host reads and no data-dependent shapes, so
every function may stand inside a CUDA graph.

Sources: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding"; Chen et al., "Accelerating large language model
decoding with speculative sampling"; for several children Miao et al., "SpecInfer" (multi-step verification), here drawn without replacement.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .reference_sampling import ALL_FEATURES, FILTERS, kept_mask, stable_topk


def coins_from_words(words: Tensor) -> Tensor:
    """Uniform numbers, float32 in (0, 1), from 32-bit words held in int64: never 1, so that equal laws always accept."""
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def filtered_law(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    vocab_limit: int,
    features: Collection[str] = ALL_FEATURES,
) -> Tensor:
    """p [N, V] float32: the law f of each of N rows after its filters, summing to 1.

    logits [N, V] any float type, after ``adjust_logits``; ids at or above ``vocab_limit`` have p = 0. Parameters [N] as for ``gumbel_argmax``; a row
    of temperature 0 gets the law of temperature 1, which means nothing. NaN where the logits are not finite.
    """
    z = logits.float()
    if vocab_limit < z.shape[1]:
        z = z.masked_fill(torch.arange(z.shape[1], device=z.device) >= vocab_limit, float("-inf"))
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    # The largest first: at a tiny temperature z / T alone would overflow.
    shifted = (z - z.amax(1, keepdim=True)) / heat
    if FILTERS in features:
        shifted = shifted.masked_fill(~kept_mask(z / heat, top_k, top_p, min_p), float("-inf"))
    return shifted.softmax(1)


def draw_children(logits: Tensor, temperature: Tensor, noise: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """k children of each of N nodes and the law they come from: (columns [N, k] int64, q [N, Vd] float32).

    logits [N, Vd] any float type, hard masks applied; a NaN counts as -inf. temperature [N] float32. noise [N, Vd] float32: Gumbel noise, None when
    every T is 0. The order is that of drawing one after the other without replacement from q = softmax(logits / T) (Gumbel top-k); where T = 0 the k
    best, ties to the lowest column. A child past the support of q has q = 0.
    """
    z = logits.float().nan_to_num(float("-inf"), None, float("-inf"))
    top = z.amax(1, keepdim=True)
    z = torch.where(torch.isfinite(top), z, 0.0)  # nothing finite: any law will do, and it must be a law
    warm = (temperature > 0)[:, None]
    shifted = (z - z.amax(1, keepdim=True)) / torch.where(warm, temperature[:, None], 1.0)
    scores = z if noise is None else torch.where(warm, shifted + noise, z)
    columns = scores.argmax(1, keepdim=True) if k == 1 else stable_topk(scores, k)[1]
    return columns, shifted.softmax(1)


def on_target_ids(q: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """q [N, Vd] over draft ids as a law over the target's: [N, vocab]. ids [Vd]: the target id of each column, or None (Vd <= vocab)."""
    if ids is None:
        return q if q.shape[1] == vocab else torch.nn.functional.pad(q, (0, vocab - q.shape[1]))
    return torch.zeros(q.shape[0], vocab, dtype=q.dtype, device=q.device).index_add_(1, ids.long(), q)


def judge_children(p: Tensor, q: Tensor, children: Tensor, coins: Tensor, noise: Tensor) -> Tensor:
    """The token after each of N nodes, [N] int32, distributed as p whatever q is: an accepted child, else a draw from what is left of p.

    p, q [N, V] float32: the law f and the law the children were drawn from. children [N, K] int64: distinct tokens, in the order drawn without
    replacement. coins [N, K] float32 in (0, 1); noise [N, V] float32: Gumbel noise. All of them independent.
    Child i is accepted when coin * q(x) < p(x); else p <- max(p - q, 0) normalised, and q loses x and is normalised. A child with q(x) = 0 was not
    drawn and is passed over. Equal laws leave nothing of p: then p stays as it is.
    """
    taken = torch.full_like(children[:, :1], -1)
    for k in range(children.shape[1]):
        x = children[:, k : k + 1]
        p_sum, q_sum = p.sum(1, keepdim=True), q.sum(1, keepdim=True)
        q_x = q.gather(1, x)
        accepted = (coins[:, k : k + 1] * (q_x * p_sum) < p.gather(1, x) * q_sum) & (q_x > 0)
        taken = torch.where(accepted & (taken < 0), x, taken)
        left = (p / p_sum - q / q_sum).clamp(min=0)
        p = torch.where((q_x > 0) & (left.sum(1, keepdim=True) > 0), left, p)
        q = q.scatter(1, x, 0.0)
    drawn = (p.log() + noise).argmax(1, keepdim=True)
    return torch.where(taken >= 0, taken, drawn)[:, 0].to(torch.int32)
