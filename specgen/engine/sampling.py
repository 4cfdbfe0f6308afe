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


def sampling_rows(ints: Tensor, floats: Tensor, features: frozenset[str], vocab_limit: int) -> SamplingRows:
    """The parameters of B rows from what ``ops.begin_step`` gathered: ints [B, 7] int32, floats [B, 3] float32."""
    return SamplingRows(floats[:, 0], ints[:, 4], floats[:, 1], floats[:, 2], ints[:, 5:7], ints[:, 3], features, vocab_limit)


def first_sampling(line: Tensor, floats: Tensor, features: frozenset[str], vocab_limit: int) -> SamplingRows:
    """The same from whole lines of ``DeviceRows.ints`` [F, .]: for prefills, whose rows are not alive yet."""
    return SamplingRows(floats[:, 0], line[:, 6], floats[:, 1], floats[:, 2], line[:, 7:9], line[:, 5] + line[:, 3], features, vocab_limit)


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
    batch = sampling.t.shape[0]
    nodes = logits.shape[0] // batch
    if "sampled" not in sampling.features:
        zero = sampling.temperature
        return ops.gumbel_argmax(
            logits, zero, sampling.top_k, sampling.top_p, sampling.min_p, sampling.keys, sampling.t, sampling.vocab_limit, features=sampling.features
        ).view(batch, nodes)

    def rep(x: Tensor) -> Tensor:
        return x if nodes == 1 else x.repeat_interleave(nodes, 0, output_size=batch * nodes)

    t = (sampling.t[:, None] + depth).expand(batch, nodes).reshape(-1)
    return ops.gumbel_argmax(
        logits,
        rep(sampling.temperature),
        rep(sampling.top_k),
        rep(sampling.top_p),
        rep(sampling.min_p),
        rep(sampling.keys),
        t.to(torch.int32),
        sampling.vocab_limit,
        features=sampling.features,
    ).view(batch, nodes)
