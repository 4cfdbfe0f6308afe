"""Drafts drawn at random from the drafter's own law, for ``sampling.acceptance=rejection``: the draw, and the shape of their trees.

Boundary: logits in, tokens and laws out; which network made the logits is the drafter's, and acceptance is ``engine.rejection``.

Trees are combs. Rejection sampling is exact only when a tree's shape does not depend on what was drawn, so nothing is pruned by score: at every depth
the spine's node has K children, drawn without replacement, and the child drawn first carries the spine on. Nodes are numbered by depth and, within a
depth, in the order drawn: children of the spine's node at depth d are d K + 1 .. (d + 1) K, and D = 1 + S K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.draft.base import SamplingRows
from specgen.errors import ConfigError
from specgen.kernels import ops
from specgen.kernels.reference_sampling import SAMPLED_DRAFT, spread
from specgen.types import Draft


def draw_drafts(logits: Tensor, s: SamplingRows, t: Tensor, k: int, id_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """k drafts after each of N nodes and their law: (tokens [N, k] int32 in target ids, q [N, Vd] float32).

    logits [N, Vd] as ``SamplingRows.mask_draft`` leaves them; t [N] int32: the noise position of the drafts. The B rows of ``s`` serve N / B nodes
    each, in a row.
    """
    rows = logits.shape[0]
    noise = ops.gumbel(spread(s.keys, rows), t, logits.shape[1] if id_map is None else None, SAMPLED_DRAFT, id_map)
    columns, q = ops.draw_children(logits, spread(s.temperature, rows), noise, k)
    tokens = columns if id_map is None else id_map.index_select(0, columns.flatten()).view(columns.shape)
    return tokens.to(torch.int32), q


def check_draft_tokens(topk: int, num_steps: int, num_draft_tokens: int) -> None:
    """Raise ConfigError unless a comb of this shape has that many nodes."""
    if num_steps and num_draft_tokens != 1 + topk * num_steps:
        raise ConfigError(
            f"draft.num_draft_tokens={num_draft_tokens}: with sampling.acceptance=rejection every drafted token is verified; "
            f"set it to 1 + draft.topk * draft.num_steps = {1 + topk * num_steps}"
        )


@dataclass(frozen=True)
class Comb:
    """The shape of a comb of K children and S depths for ``max_batch`` rows; the fields are those of ``Draft``."""

    parents: Tensor
    path: Tensor
    depth: Tensor
    first_child: Tensor
    next_sibling: Tensor

    def draft(self, tokens: Tensor, q: Tensor, ids: Tensor | None) -> Draft:
        """The draft of tokens [B, S K], depth by depth in the order drawn, from laws q [B, S, Vd]."""
        n = tokens.shape[0]
        return Draft(tokens, self.parents[:n], self.path[:n], self.depth[:n], self.first_child[:n], self.next_sibling[:n], q=q, q_ids=ids)


def comb(topk: int, num_steps: int, max_batch: int, device: torch.device) -> Comb:
    """Made once, on the host."""
    nodes = 1 + topk * num_steps
    parent, path, depth = [-1] * nodes, [[0] + [-1] * num_steps for _ in range(nodes)], [0] * nodes
    first, sibling = [-1] * nodes, [-1] * nodes
    for node in range(1, nodes):
        level, rank = divmod(node - 1, topk)
        parent[node] = above = max(0, (level - 1) * topk + 1)
        depth[node] = level + 1
        path[node] = [*path[above][: level + 1], node] + [-1] * (num_steps - level - 1)
        if rank == 0:
            first[above] = node
        if rank + 1 < topk:
            sibling[node] = node + 1

    def rows(values: list[int] | list[list[int]]) -> Tensor:
        one = torch.tensor(values, dtype=torch.int32)
        return one[None].repeat(max_batch, *[1] * one.dim()).to(device)

    return Comb(rows(parent[1:]), rows(path), rows(depth), rows(first), rows(sibling))
