"""The law f applied to the nodes of a step: which parameters each node has, and the one call that draws its token.

Boundary: parameters and noise positions; the law itself is ``kernels.sampling``, and what a drawn token means is ``accept.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.draft.base import SamplingRows
from specgen.kernels import ops
from specgen.types import SamplingParams


def features_of(params: SamplingParams) -> frozenset[str]:
    """What a row needs beyond argmax."""
    found = set()
    if params.temperature > 0:
        found.add("sampled")
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            found.add("filters")
    return frozenset(found)


def first_sampling(line: Tensor, floats: Tensor, features: frozenset[str], vocab_limit: int) -> SamplingRows:
    """Parameters from whole lines of ``DeviceRows.ints`` [F, .]: for prefills, whose rows are not alive yet."""
    columns = floats.t().contiguous()
    return SamplingRows(
        columns[0], line[:, 6].contiguous(), columns[1], columns[2], line[:, 7:9].contiguous(), line[:, 5] + line[:, 3], features, vocab_limit
    )


def moved(sampling: SamplingRows, by: Tensor) -> SamplingRows:
    """The same rows, ``by`` [B] int32 output positions later."""
    return SamplingRows(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.keys,
        sampling.t + by,
        sampling.features,
        sampling.vocab_limit,
    )


def draw(logits: Tensor, sampling: SamplingRows, depth: Tensor) -> Tensor:
    """y [B, D] int32 for logits [B * D, V]: the token f picks after each node. depth [B, D] or [D] int32 is the node's depth.

    -1 where a node's logits are not finite.
    """
    # The sampler lets one line of parameters serve the D nodes of its row.
    batch = sampling.t.shape[0]
    nodes = logits.shape[0] // batch
    t = sampling.t if "sampled" not in sampling.features else (sampling.t[:, None] + depth).reshape(-1)
    return ops.gumbel_argmax(
        logits,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.keys,
        t,
        sampling.vocab_limit,
        features=sampling.features,
    ).view(batch, nodes)
