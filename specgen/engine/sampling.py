"""The law f applied to the nodes of a step: which parameters each node has, the calls that draw its token, and log-probabilities.

Boundary: parameters, noise positions and what a node's logits become; the law itself is ``kernels.law`` and ``kernels.sampling``, and what a drawn
token means is ``kernels.step``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgen.draft.base import SamplingRows
from specgen.engine.law import MIN_TOKENS, PENALTIES, LawState, law_features
from specgen.engine.rows import DeviceRows
from specgen.kernels import ops
from specgen.kernels.reference_sampling import LawTables, spread
from specgen.types import Draft, SamplingParams


def features_of(params: SamplingParams) -> frozenset[str]:
    """What a row needs beyond argmax."""
    found = set(law_features(params))
    if params.temperature > 0:
        found.add("sampled")
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            found.add("filters")
    return frozenset(found)


def step_sampling(
    rows: DeviceRows, law: LawState, slots: Tensor, ints: Tensor, keys: Tensor, floats: Tensor, features: frozenset[str], vocab_limit: int
) -> SamplingRows:
    """Parameters of the rows of a decode step from what ``ops.begin_step`` gathered."""
    out_len = rows.output_len.index_select(0, slots) if MIN_TOKENS in features else None
    return SamplingRows(floats[0], ints[4], floats[1], floats[2], keys, ints[3], features, vocab_limit, slots, *_tables(law), out_len)


def first_sampling(law: LawState, slots: Tensor, line: Tensor, floats: Tensor, features: frozenset[str], vocab_limit: int) -> SamplingRows:
    """Parameters from whole lines of ``DeviceRows`` (ints [F, .], floats [F, 3]): for prefills, whose rows are not alive yet and have no output."""
    columns = floats.t().contiguous()
    top_k, keys, t = line[:, 6].contiguous(), line[:, 7:9].contiguous(), line[:, 5] + line[:, 3]
    out_len = line[:, 3].contiguous() if MIN_TOKENS in features else None
    return SamplingRows(columns[0], top_k, columns[1], columns[2], keys, t, features, vocab_limit, slots, *_tables(law), out_len)


def _tables(law: LawState) -> tuple[Any, Any]:
    return (law.tables, law.masks) if law.features else (None, None)


def adjust(logits: Tensor, sampling: SamplingRows, depth: Tensor, draft: Draft | None, mask: Tensor | None = None) -> Tensor:
    """Steps 1 to 3 of f for logits [B * D, V], the D nodes of each row in a row: penalties, bias, masks. As given when no row has any.

    depth [B, D] or [D] int32. Node n counts the committed output, root included (the tables hold it), and the drafted tokens down to and with n.
    mask [B * D, words] int32: a grammar's (``engine.grammar``).
    """
    if (sampling.law is None and mask is None) or sampling.slots is None:
        return logits
    batch, rows = sampling.t.shape[0], logits.shape[0]
    out_len = None if sampling.out_len is None else (sampling.out_len[:, None] + depth).reshape(-1)
    path = ops.path_tokens(draft.token_ids, draft.path) if draft is not None and PENALTIES in sampling.features else None
    slots = sampling.slots if rows == batch else sampling.slots[:, None].expand(batch, rows // batch).reshape(-1)
    return ops.adjust_logits(logits, slots, sampling.law or LawTables(), path, out_len, sampling.vocab_limit, mask)


def draw(logits: Tensor, sampling: SamplingRows, depth: Tensor) -> Tensor:
    """y [B, D] int32 for adjusted logits [B * D, V]: the token f picks after each node. depth [B, D] or [D] int32 is the node's depth.

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


# -- log-probabilities ------------------------------------------------------------------------------------------------------------------------


def logprobs(logits: Tensor, tokens: Tensor, path: Tensor | None, sampling: SamplingRows, top: int) -> Tensor:
    """Log-probabilities of a committed run, [B, W, 1 + 2 * top] int32: float32 bit patterns of the run's tokens' and of the best ``top`` ids', then
    these ids.

    logits [B * D, V] after ``adjust``; tokens [B, W] int32 (-1 beyond the run, whose values mean nothing); path [B, W] int32 node numbers, None for a
    chain, whose first W nodes they are. log_softmax of logits / T (as they are where T = 0), before the filters; best first, ties to the lowest id.
    """
    batch, width = tokens.shape
    nodes = logits.shape[0] // batch
    if path is not None or width != nodes:
        node = torch.arange(width, device=logits.device).expand(batch, width) if path is None else path.clamp(min=0).long()
        logits = logits.index_select(0, (node + torch.arange(batch, device=logits.device)[:, None] * nodes).reshape(-1))
    z = logits[:, : sampling.vocab_limit].float()
    if "sampled" in sampling.features:
        heat = spread(torch.where(sampling.temperature > 0, sampling.temperature, 1.0), z.shape[0])
        z = z / heat[:, None]
    ids, best = ops.draft_topk(z, max(top, 1), None, sampling.keys, sampling.t)
    peak = z.gather(1, ids[:, :1].long())
    chosen = z.gather(1, tokens.reshape(-1, 1).clamp(min=0).long()) - peak + best[:, :1]
    values = torch.cat([chosen, best[:, :top]], 1).view(torch.int32)
    return torch.cat([values, ids[:, :top]], 1).view(batch, width, 1 + 2 * top)


def logprob_entries(packed: np.ndarray, tokens: list[int]) -> list[dict[str, Any]]:
    """The ``logprobs`` entries of a run: one a token, from the first lines of packed [W, 1 + 2 * top] int32."""
    top = (packed.shape[1] - 1) // 2
    values = packed[: len(tokens), : 1 + top].view(np.float32).tolist()
    ids = packed[: len(tokens), 1 + top :].tolist()
    return [
        {"id": token, "logprob": line[0], "top": [list(pair) for pair in zip(best, line[1:], strict=True)]}
        for token, line, best in zip(tokens, values, ids, strict=True)
    ]
