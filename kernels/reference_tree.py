"""Draft trees and next-token preparation in plain torch: the executable specification of ``kernels.tree`` and ``kernels.next_token``.

Boundary: tensors in, tensors out; knows nothing of drafters, models or requests. No host reads and no data-dependent shapes.

Nodes of a request are numbered 0 (root) .. D-1; -1 means no node. Candidates are numbered as SGLang numbers them: depth 1 takes 0 .. K-1,
depth d >= 2 takes K + K^2 (d-2) + (parent's rank) K + (child's rank).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.kernels.reference_sampling import stable_topk


def select_ascending(scores: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest of float32 [B, M], ties to the smaller index, in ascending order: int64 [B, count]."""
    return stable_topk(scores, count)[1].sort(1).values


def expand(scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more depth of a top-k tree: (cumulative [B, K*K], kept scores [B, K], flat index of the kept children [B, K] int64).

    scores [B, K] float32: cumulative scores of the parents. logp [B, K, K] float32 <= 0: their children. Ties go to the smaller flat index.
    """
    cumulative = (scores[:, :, None] + logp).flatten(1)
    kept, index = stable_topk(cumulative, scores.shape[1])
    return cumulative, kept, index


def build_tree(parent_list: Tensor, index: Tensor, topk: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Selected candidates to a tree: (parents, path, depth, first_child, next_sibling, dropped), all int32.

    parent_list [B, K(S-1)+1] int64 (width 0 when S = 1): candidate number of the parent of each group of K candidates, -1 for the root.
    index [B, D-1] int64: the selected candidates, ascending. Returns parents [B, D-1] (0 = root, -1 = no node), path [B, D, S+1] (the ancestor at
    each depth, self last, -1 beyond), depth [B, D], first_child and next_sibling [B, D] (-1 = none, siblings in ascending order), dropped [B].
    A candidate whose chain of selected parents does not reach the root within S steps is dropped: it keeps its place, with parent -1, depth 0 and
    the root's path (so that whatever attends along it reads at least one key), and is nobody's child.
    """
    batch, drafted = index.shape
    nodes = drafted + 1
    group = torch.div(index, topk, rounding_mode="floor")
    rank = torch.arange(drafted, device=index.device)
    if parent_list.shape[1]:
        inside = (group > 0) & (group < parent_list.shape[1])
        wanted = torch.where(inside, parent_list.gather(1, group.clamp(0, parent_list.shape[1] - 1)), -1)
    else:
        wanted = torch.full_like(index, -1)
    earlier = rank[None, :] < rank[:, None]
    match = (index[:, None, :] == wanted[:, :, None]) & (wanted >= 0)[:, :, None] & earlier[None]
    found = torch.where(match, rank[None, None] + 1, nodes).amin(2) if drafted else group
    parent = torch.where((group == 0) & (index >= 0), 0, torch.where(found < nodes, found, -1))
    parent = torch.cat([torch.full((batch, 1), -1, dtype=torch.long, device=index.device), parent], 1)

    climb = [torch.arange(nodes, device=index.device).expand(batch, nodes)]
    depth = torch.where(climb[0] == 0, 0, -1)
    for step in range(1, num_steps + 1):
        below = climb[-1]
        climb.append(torch.where(below >= 0, parent.gather(1, below.clamp(min=0)), -1))
        depth = torch.where((climb[-1] == 0) & (depth < 0), step, depth)
    alive = depth >= 0
    dropped = (~alive).sum(1)
    depth = depth.clamp(min=0)
    lineage = torch.stack(climb, 2)  # lineage[.., s]: s steps up
    up = depth[:, :, None] - torch.arange(num_steps + 1, device=index.device)
    path = torch.where(up >= 0, lineage.gather(2, up.clamp(min=0)), -1)
    path[:, :, 0] = 0
    parent = torch.where(alive, parent, -1)

    numbers = torch.arange(nodes, device=index.device)
    child = (parent[:, None, :] == numbers[None, :, None]) & (numbers > 0)  # child[b, p, c]
    first_child = torch.where(child, numbers, nodes).amin(2)
    sibling = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None] & (numbers[None, :] > numbers[:, None])
    next_sibling = torch.where(sibling, numbers, nodes).amin(2)
    first_child = torch.where(first_child < nodes, first_child, -1)
    next_sibling = torch.where(next_sibling < nodes, next_sibling, -1)
    out = (parent[:, 1:].contiguous(), path, depth, first_child, next_sibling, dropped)
    parents, path, depth, first_child, next_sibling, dropped = (x.to(torch.int32) for x in out)
    return parents, path, depth, first_child, next_sibling, dropped


def tree_walk(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, y: Tensor, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Follow y from the root: (path [B, S+1] int32 with -1 beyond, accepted [B] int32, has_child_at_end [B] bool).

    tokens [B, D-1] int32; first_child, next_sibling [B, D] int32 with siblings in ascending node order; y [B, D] int32: the law's token after each
    node, negative where it has none. A child is accepted when its token equals y of its parent, the first of them in sibling order.
    """
    batch, nodes = y.shape
    numbers = torch.arange(nodes, device=y.device).expand(batch, nodes)
    # Who is whose child: the heads of the sibling lists by pointer doubling, then their parents.
    spare = torch.full((batch, nodes + 1), -1, dtype=torch.long, device=y.device)
    before = spare.scatter(1, torch.where(next_sibling > 0, next_sibling, nodes).long(), numbers)[:, :nodes]
    head = torch.where(before >= 0, before, numbers)
    for _ in range((nodes - 1).bit_length()):
        head = head.gather(1, head)
    parent = spare.scatter(1, torch.where(first_child > 0, first_child, nodes).long(), numbers)[:, :nodes].gather(1, head)

    drafted = torch.cat([torch.full_like(tokens[:, :1] if nodes > 1 else y[:, :1], -1), tokens], 1)
    node = torch.zeros(batch, 1, dtype=torch.long, device=y.device)
    path, alive = [node], torch.ones(batch, 1, dtype=torch.bool, device=y.device)
    for _ in range(num_steps):
        wanted = y.gather(1, node)
        fits = (parent == node) & (drafted == wanted) & (wanted >= 0) & alive
        found = torch.where(fits, numbers, nodes).amin(1, keepdim=True)
        alive = found < nodes
        node = torch.where(alive, found, node)
        path.append(torch.where(alive, found, -1))
    walked = torch.cat(path, 1)
    return walked.to(torch.int32), (walked >= 0).sum(1).to(torch.int32) - 1, first_child.gather(1, node)[:, 0] > 0


def chain_walk(tokens: Tensor, valid: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``tree_walk`` for a chain: tokens [B, S] int32, valid [B, S] bool (a prefix) or None, y [B, S+1] int32; the same three results."""
    steps = tokens.shape[1]
    fits = (tokens == y[:, :steps]) & (y[:, :steps] >= 0)
    if valid is not None:
        fits = fits & valid
    accepted = fits.to(torch.int32).cumprod(1).sum(1)
    number = torch.arange(steps + 1, device=y.device)
    path = torch.where(number <= accepted[:, None], number, -1).to(torch.int32)
    more = accepted < steps
    if valid is not None and steps:
        more = more & valid.gather(1, accepted.clamp(max=steps - 1)[:, None])[:, 0]
    return path, accepted.to(torch.int32), more


def path_tokens(tokens: Tensor, path: Tensor | None) -> Tensor:
    """Drafted tokens on the way to each node, itself included: int32 [B * D, S], -1 beyond.

    tokens [B, D-1] int32. path [B, D, S+1] int32, or None for a chain (S = D - 1), where node i has the first i tokens.
    """
    batch, drafted = tokens.shape
    if path is None:
        number = torch.arange(drafted, device=tokens.device)
        node = torch.arange(drafted + 1, device=tokens.device)
        return torch.where(number[None, None] < node[None, :, None], tokens[:, None, :], -1).reshape(batch * (drafted + 1), drafted)
    on = path[:, :, 1:]
    picked = tokens.gather(1, (on - 1).clamp(min=0).flatten(1).long()).view(on.shape)
    return torch.where(on > 0, picked, -1).reshape(batch * path.shape[1], on.shape[2])


def next_token_ids_padded(sampled: Tensor, discard: Tensor, backup: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The last valid token of each request and how many it has: (next [B] int32, count [B] int32).

    sampled [B, D] int32: valid where 0 <= id < vocab. discard [B] bool: the row's prompt is not finished; it takes backup [B] int32 and count 0.
    A row without a valid token takes its backup too.
    """
    valid = (sampled >= 0) & (sampled < vocab) & ~discard[:, None]
    place = torch.arange(sampled.shape[1], device=sampled.device)
    last = torch.where(valid, place, -1).amax(1)
    token = sampled.gather(1, last.clamp(min=0)[:, None])[:, 0]
    return torch.where(last >= 0, token, backup).to(torch.int32), valid.sum(1).to(torch.int32)
