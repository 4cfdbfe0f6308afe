"""Draft trees: growing them by top-k, choosing which candidates to verify, and the topk = 1 chain.

Boundary: scores, tokens and indices only; knows nothing of drafters, KV or acceptance. Runs between launch and retire: no host read.

Candidates are numbered as in ``kernels.reference_tree``. A child never outranks its parent and ties go to the smaller number, so what is selected is
closed under parents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.config import max_draft_tokens
from specgen.errors import ConfigError
from specgen.kernels import ops
from specgen.types import Draft

MAX_DEFAULT_NODES = 128


def default_draft_tokens(topk: int, num_steps: int) -> int:
    """Nodes verified per request, root included, when ``draft.num_draft_tokens`` is not set."""
    return num_steps + 1 if topk == 1 else min(MAX_DEFAULT_NODES, 1 + topk * num_steps)


def check_draft_tokens(topk: int, num_steps: int, num_draft_tokens: int) -> None:
    """Raise ConfigError unless a draft of this shape has that many nodes."""
    most = max_draft_tokens(topk, num_steps)
    if topk == 1 and num_draft_tokens != num_steps + 1:
        raise ConfigError(f"draft.num_draft_tokens={num_draft_tokens} does not fit a chain: with draft.topk=1 it is num_steps + 1 = {num_steps + 1}")
    if not 1 < num_draft_tokens <= most and num_steps:
        raise ConfigError(
            f"draft.num_draft_tokens={num_draft_tokens} is out of range: topk={topk}, num_steps={num_steps} give 2 to {most} nodes, root included"
        )


# -- growing ----------------------------------------------------------------------------------------------------------------------------------


class Growth:
    """A tree being grown, depth by depth.

    ``tokens`` and ``scores`` [B, K] are the kept nodes of the newest depth, best first. ``all_tokens``, ``all_scores``, ``parents`` are what
    ``organize_draft_results`` takes.
    """

    def __init__(self, tokens: Tensor, scores: Tensor, topk: int) -> None:
        """tokens [B, K] int32 and scores [B, K] float32 of depth 1, best first."""
        batch = tokens.shape[0]
        self.topk = topk
        self.tokens = tokens
        self.scores = scores
        self.all_tokens = [tokens]
        self.all_scores = [scores]
        self.parents = [torch.arange(-1, topk, device=tokens.device).expand(batch, -1)]

    def extend(self, child_tokens: Tensor, child_logp: Tensor) -> Tensor:
        """Add a depth from the K children [B, K, K] of each kept node; returns which kept node each new kept node hangs from, [B, K] int64."""
        topk, depth = self.topk, len(self.parents)
        cumulative, self.scores, flat = ops.expand(self.scores, child_logp)
        tokens = child_tokens.flatten(1)
        self.tokens = tokens.gather(1, flat)
        self.all_tokens.append(tokens)
        self.all_scores.append(cumulative)
        self.parents.append(flat + (topk * topk * (depth - 1) + topk))
        return torch.div(flat, topk, rounding_mode="floor")

    def build(self, num_draft_tokens: int, dropped: Tensor | None = None) -> Draft:
        """The draft of the best ``num_draft_tokens`` - 1 candidates."""
        parent_list, index, tokens = organize_draft_results(self.all_scores, self.all_tokens, self.parents, num_draft_tokens)
        return build_tree(parent_list, index, tokens, self.topk, len(self.parents), dropped)


def organize_draft_results(scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor], num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the candidates to verify: (parent_list int64 [B, K(S-1)+1] or of width 0 for S = 1, index int64 [B, D-1] ascending, tokens [B, D-1]).

    scores: per depth [B, K] (or [B, 1, K]), then [B, K, K] or [B, K*K] float32, cumulative. tokens: alike. parents: [B, K+1] = -1 .. K-1, then per
    depth
    [B, K] the candidate numbers of the kept nodes. Ties go to the smaller number. Raises ConfigError when there are fewer candidates than D - 1.
    """
    flat_scores = torch.cat([s.flatten(1) for s in scores], 1)
    flat_tokens = torch.cat([t.flatten(1) for t in tokens], 1)
    wanted = num_draft_tokens - 1
    if wanted > flat_scores.shape[1]:
        raise ConfigError(f"draft.num_draft_tokens={num_draft_tokens} is more than the draft's {flat_scores.shape[1]} candidates and the root")
    index = ops.select_ascending(flat_scores, wanted)
    if len(parents) > 1:
        parent_list = torch.cat(parents[:-1], 1)
    else:
        parent_list = torch.empty(flat_scores.shape[0], 0, dtype=torch.long, device=flat_scores.device)
    return parent_list, index, flat_tokens.gather(1, index)


def build_tree(parent_list: Tensor, index: Tensor, tokens: Tensor, topk: int, num_steps: int, dropped: Tensor | None = None) -> Draft:
    """Selected candidates to a ``Draft``; tokens [B, D-1]. Node n stands at position L + depth[n].

    Malformed input loses its unreachable nodes (parent -1); their number is added to the one-element int32 tensor ``dropped``, when there is one.
    """
    parents, path, depth, first_child, next_sibling, lost = ops.build_tree(parent_list, index, topk, num_steps)
    if dropped is not None:
        dropped += lost.sum()
    return Draft(tokens.to(torch.int32), parents, path, depth, first_child, next_sibling)


def draft_depth(draft: Draft) -> Tensor:
    """How many depths of each row's draft have a node, [B] int32: what ``Counts.proposed`` counts."""
    if draft.depth is not None:
        return draft.depth.amax(1)
    if draft.valid is not None:
        return draft.valid.sum(1).to(torch.int32)
    batch, steps = draft.token_ids.shape
    return torch.full((batch,), steps, dtype=torch.int32, device=draft.token_ids.device)


# -- the topk = 1 chain -----------------------------------------------------------------------------------------------------------------------


class ChainBuffers:
    """What ``organize_draft_results`` would return for a chain, made once: for topk = 1 its cat, top-k, sort and gather are the identity.

    parents int64 [max_batch, S] (or width 0 for S = 1) in candidate numbering and index int64 [max_batch, S], both contiguous, so that a slice of
    rows is too. In node numbering node i + 1 of a chain hangs from node i, so that ``index`` is also its ``Draft.parents``.
    """

    def __init__(self, num_steps: int, max_batch: int, device: torch.device | str, num_draft_tokens: int | None = None) -> None:
        assert num_draft_tokens in (None, num_steps + 1), "a chain verifies num_steps + 1 nodes"
        self.num_steps = num_steps
        self.max_batch = max_batch
        width = num_steps if num_steps > 1 else 0
        self.parents = torch.arange(-1, width - 1, device=device).repeat(max_batch, 1)
        self.index = torch.arange(num_steps, device=device).repeat(max_batch, 1)
        self._made = {num_steps: self}

    def for_steps(self, num_steps: int) -> ChainBuffers:
        """The constants for another S, rebuilt where it was not met before: the others stay, for captured steps hold slices of them."""
        if num_steps not in self._made:
            self._made[num_steps] = rebuild_topk1_chain_buffers(num_steps, self.max_batch, self.index.device)
            self._made[num_steps]._made = self._made
        return self._made[num_steps]

    def fits(self, tokens: Sequence[Tensor]) -> bool:
        """Whether the constants serve a chain of these tokens."""
        return tokens[0].shape[0] <= self.max_batch and len(tokens) == self.num_steps

    def results(self, tokens: Sequence[Tensor], joined: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``organize_draft_results`` of a chain of S tokens [B, 1] each: slices and one cat while the batch fits, the general path beyond it.

        ``joined`` [B, S]: the tokens where they are side by side already; they are not copied then.
        """
        if not self.fits(tokens):
            return organize_draft_results(*chain_candidates(tokens), len(tokens) + 1)
        batch = tokens[0].shape[0]
        return self.parents[:batch], self.index[:batch], torch.cat(list(tokens), 1) if joined is None else joined

    def draft(self, tokens: Sequence[Tensor], joined: Tensor | None = None) -> Draft:
        """The draft of a chain of S tokens [B, 1] int32 each; beyond the constants a tree of one branch, verified as any tree is."""
        parents, index, chain = self.results(tokens, joined)
        return Draft(chain, parents=index) if self.fits(tokens) else build_tree(parents, index, chain, 1, len(tokens))


def chain_candidates(tokens: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A chain of S tokens [B, 1] as ``organize_draft_results`` takes it: (scores, tokens, parents). Its candidates are all chosen, in order, whatever
    their scores: these are equal."""
    batch, device = tokens[0].shape[0], tokens[0].device
    scores = [torch.zeros(batch, 1, device=device)] * len(tokens)
    parents = [torch.arange(-1, 1, device=device).expand(batch, -1)]
    return scores, list(tokens), parents + [torch.full((batch, 1), depth, device=device) for depth in range(1, len(tokens))]


def rebuild_topk1_chain_buffers(num_steps: int, max_batch: int, device: torch.device | str, num_draft_tokens: int | None = None) -> ChainBuffers:
    """The chain's constants for this S; called at start and when adaptive speculation changes S (``ChainBuffers.for_steps``)."""
    return ChainBuffers(num_steps, max_batch, device, num_draft_tokens)


# -- checking indices -------------------------------------------------------------------------------------------------------------------------


class IndexChecks:
    """Counts of out-of-range indices, kept on the device and read by the host when it likes (``engine.check_indices``)."""

    def __init__(self, device: torch.device | str, capacity: int = 64) -> None:
        self.counts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.ranges: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, tensor: Tensor, low: int, high: int) -> None:
        """Count elements outside [low, high) under ``name``."""
        slot, *_ = self.ranges.setdefault(name, (len(self.ranges), low, high))
        assert slot < self.counts.shape[0], "more index checks than IndexChecks has room for"
        self.counts[slot] += ((tensor < low) | (tensor >= high)).sum()

    def raise_if_any(self) -> None:
        """Read the counts (a host wait) and raise IndexError naming every tensor that was out of range: a defect of specgen, not of the user."""
        counts = self.counts.tolist()
        wrong = [f"{name}: {counts[slot]} outside [{low}, {high})" for name, (slot, low, high) in self.ranges.items() if counts[slot]]
        if wrong:
            raise IndexError("index tensors out of range: " + "; ".join(wrong))


def detect_oob(checks: IndexChecks | None, name: str, tensor: Tensor | None, low: int, high: int) -> None:
    """Note elements of an index tensor outside [low, high), without waiting; nothing where checks are off or there is no tensor."""
    if checks is not None and tensor is not None and tensor.numel():
        checks.add(name, tensor, low, high)
