"""What one step launches: its prompt chunks and its decode rows.

Boundary: the nouns of the scheduler's plan, which launching, pacing and retiring read; no decision is made here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specgen.types import Request


def tokens_known(request: Request) -> int:
    """Tokens a request has to prefill: its prompt, and after a preemption its output but the last token, which is the root."""
    return len(request.prompt.token_ids) + max(0, len(request.output_ids) - 1)


@dataclass
class Chunk:
    """Part of a prompt: tokens [start, end) of ``ids``. ``final``: the prompt ends here. ``resumed``: after a preemption, nothing is sampled."""

    request: Request
    ids: list[int]
    start: int
    end: int
    epoch: int

    @property
    def final(self) -> bool:
        return self.end == self.known

    @property
    def resumed(self) -> bool:
        return len(self.request.output_ids) > 0

    @property
    def known(self) -> int:
        """``tokens_known`` of its request."""
        return tokens_known(self.request)


@dataclass
class Batch:
    """What one step launches. ``decode``: (slot, request, epoch) of each decode row, reused while the rows stay the same. ``slots``: device [n]
    int64. ``catch_up``: steps without a draft that the drafter has to follow first; ``paced`` belongs to ``pacing``."""

    decode: tuple[tuple[int, Request, int], ...] = ()
    slots: torch.Tensor | None = None
    num_steps: int = 0
    max_len: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    catch_up: int = 0
    paced: Any = None
