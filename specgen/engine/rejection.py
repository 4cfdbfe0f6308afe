"""Acceptance by coins (``sampling.acceptance=rejection``): the token after each node of a draft that was drawn at random.

Boundary: laws, noise and the order of nodes; the arithmetic is ``kernels.reference_rejection``. What comes out is a token y for every node, so that
accepting is what it always is, y equal to a child's token, and trimming, committing and counting know nothing of this file.

Every y follows the law f given the tokens on the way to its node, whatever the drafter's law: exact in distribution, but the text depends on the
drafter, its depth and its width. Noise: the row's key at the token's own position; stream 1 drew the drafts, word i of stream 2 is the coin of the
child drawn i-th, stream 3 draws from the residual, and where nothing was drafted stream 0 draws as everywhere. A position's noise decides nothing
before the token at that position is committed, so drafting it again after an earlier rejection uses the same words and stays exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.draft.base import SamplingRows
from specgen.engine.sampling import draw
from specgen.kernels import ops
from specgen.kernels.reference_sampling import COIN, RESIDUAL
from specgen.types import Draft


def draw_or_reject(logits: Tensor, sampling: SamplingRows, depth: Tensor, draft: Draft | None) -> Tensor:
    """y [B, D] int32 for adjusted logits [B * D, V], as ``sampling.draw``; nodes whose children were drawn from ``draft.q`` accept or reject them.

    Rows of temperature 0 keep their argmax, and nodes whose logits are not finite their -1.
    """
    y = draw(logits, sampling, depth)
    if draft is None or draft.q is None:
        return y
    batch, steps, _ = draft.q.shape
    topk = draft.token_ids.shape[1] // steps
    warm = sampling.temperature > 0
    nodes = logits.view(batch, -1, logits.shape[1])
    # Depth by depth: the laws of one depth are all that is held at a time.
    for level in range(steps):
        node = 0 if level == 0 else (level - 1) * topk + 1
        children = draft.token_ids[:, level * topk : (level + 1) * topk].long()
        token = _judged(nodes[:, node], draft.q[:, level], draft.q_ids, children, sampling, sampling.t + level)
        y[:, node] = torch.where(warm & (y[:, node] >= 0), token, y[:, node])
    return y


def _judged(logits: Tensor, q: Tensor, ids: Tensor | None, children: Tensor, s: SamplingRows, t: Tensor) -> Tensor:
    """The token after one node a row, [B] int32: logits [B, V], children [B, K] int64, t [B] int32 the noise position of the token."""
    vocab = logits.shape[1]
    p = ops.filtered_law(logits, s.temperature, s.top_k, s.top_p, s.min_p, s.vocab_limit, s.features)
    coins = ops.coins_from_words(ops.noise_words(s.keys, t, children.shape[1], COIN))
    return ops.judge_children(p, ops.on_target_ids(q, ids, vocab), children, coins, ops.gumbel(s.keys, t, vocab, RESIDUAL))
