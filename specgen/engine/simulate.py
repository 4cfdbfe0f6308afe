"""Imposed acceptance, for speed measurements: every kernel of a step runs and its result is read, only the accepted length is decided here.

Boundary: decides lengths and, for a tree, the path; the tokens committed are the draft's along it, then the target's. Such a run's text means
nothing, and
its rows say ``simulated``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specgen.types import Draft


class Simulation:
    """A mean acceptance length, bonus token included, imposed row by row; a fraction alternates floor and ceiling by error accumulation."""

    def __init__(self, mean: float, max_slots: int, device: torch.device) -> None:
        self.accepted = mean - 1.0
        whole = self.accepted == math.floor(self.accepted)
        self._constant = torch.full((max_slots,), int(self.accepted), dtype=torch.int32, device=device) if whole else None
        self._error = torch.zeros(max_slots, dtype=torch.float64, device=device)

    def lengths(self, slots: Tensor) -> Tensor:
        """Accepted drafts to impose on the rows of ``slots`` [B] int64: [B] int32."""
        if self._constant is not None:
            return self._constant[: slots.shape[0]]
        owed = self._error.index_select(0, slots) + self.accepted
        taken = torch.floor(owed + 1e-9)
        self._error.index_copy_(0, slots, owed - taken)
        return taken.to(torch.int32)


def impose_path(draft: Draft, y: Tensor, imposed: Tensor) -> Tensor:
    """y [B, D] changed so that the walk follows first children for ``imposed`` [B] int32 nodes: at each node of that path, y is the child's token."""
    assert draft.first_child is not None and draft.path is not None
    y = y.clone()
    node = torch.zeros_like(imposed, dtype=torch.int64)[:, None]
    for depth in range(draft.path.shape[2] - 1):
        child = draft.first_child.gather(1, node).long()
        go = (child >= 0) & (depth < imposed[:, None])
        token = draft.token_ids.gather(1, (child - 1).clamp(min=0))
        y.scatter_(1, node, torch.where(go, token, y.gather(1, node)))
        node = torch.where(go, child, node)
    return y
