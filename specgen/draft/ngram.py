"""Prompt lookup: the tokens that followed the latest earlier occurrence of the text's last n-gram.

Boundary: reads tokens alone, keeps them per slot on the device; no network and no KV. Drafts are chains whose length differs by row: ``Draft.valid``
says which nodes exist (Saxena 2023, "Prompt lookup decoding"; n-grams of 3, 2, then 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgen.draft.base import AcceptedRows, Drafter, PrefillRows, StepRows
from specgen.draft.ring import StateRing
from specgen.errors import ConfigError
from specgen.kernels.reference_step import Keep
from specgen.models.target import Hidden
from specgen.types import Draft

LONGEST = 3


class NgramDrafter(Drafter):
    """State per slot: every token of the row, [R, max_length + num_steps + 1] int32; ``history[s, p]`` is the token at position p."""

    method = "ngram"

    def __init__(self, device: torch.device, num_steps: int, num_draft_tokens: int, max_length: int) -> None:
        if num_draft_tokens != num_steps + 1:
            raise ConfigError("draft=ngram proposes a chain: draft.topk must be 1")
        super().__init__(1, num_steps, num_draft_tokens)
        self.device, self.max_length = device, max_length

    def slots(self, num_steps: int) -> int:
        """No KV of its own."""
        return 0

    def bind(self, max_slots: int, num_pages: int, page_size: int, max_batch: int) -> None:
        # One spare column takes what masked writes put down.
        self.spare = self.max_length + self.num_steps + 1
        self.history = torch.full((max_slots, self.spare + 1), -1, dtype=torch.int32, device=self.device)
        self.steps = torch.arange(self.num_steps, device=self.device)
        self.columns = torch.arange(self.max_length, device=self.device)

    def _write(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """tokens at (slots, positions), all [n] or broadcast together."""
        slots, positions = torch.broadcast_tensors(slots, positions)
        flat = (slots * self.history.shape[1] + positions).reshape(-1)
        self.history.view(-1).index_copy_(0, flat, tokens.reshape(-1).to(torch.int32))

    def prefill(self, rows: PrefillRows) -> None:
        assert rows.layout.cu_q is not None and rows.row_slots is not None
        count = rows.ids.shape[0]
        row = torch.searchsorted(rows.layout.cu_q[1:], torch.arange(count, dtype=torch.int32, device=self.device), right=True)
        self._write(rows.row_slots.index_select(0, row), rows.layout.positions.long(), rows.ids)
        if rows.rows is not None:
            self._write(rows.rows.slots, rows.rows.length.long(), rows.rows.root)

    def share(self, source: int, target: int, length: int) -> None:
        self.history[target, :length] = self.history[source, :length]

    def observe(self, rows: StepRows, accepted: AcceptedRows) -> None:
        width = accepted.tokens.shape[1]
        offsets = torch.arange(1, width + 1, device=self.device)
        valid = offsets <= accepted.count[:, None]
        positions = torch.where(valid, rows.length.long()[:, None] + offsets, self.spare)
        self._write(rows.slots[:, None], positions, accepted.tokens)

    def keep(self, rows: StepRows, hidden: Hidden, ring: StateRing) -> Keep:
        # The whole text is here anyway, so there is nothing to catch up with.
        return Keep(rows.length, self.history, 1)

    def propose(self, rows: StepRows, num_steps: int) -> Draft:
        history = self.history.index_select(0, rows.slots)[:, : self.max_length]
        last = rows.length.long()[:, None]
        # A column stays matched while the n tokens ending at it equal the n ending at the root; longer matches win, then later ones.
        matched = self.columns < last
        best = torch.full_like(last, -1)
        for n in range(LONGEST):
            token = history.gather(1, (last - n).clamp(min=0))
            shifted = torch.nn.functional.pad(history, (n, 0), value=-2)[:, : self.max_length]
            matched = matched & (shifted == token) & (last - n >= 0)
            found = torch.where(matched, self.columns, -1).amax(1, keepdim=True)
            best = torch.where(found >= 0, found, best)
        at = best + 1 + self.steps[:num_steps]
        valid = (best >= 0) & (at <= last)
        tokens = history.gather(1, at.clamp(0, self.max_length - 1))
        return Draft(token_ids=torch.where(valid, tokens, 0).to(torch.int32), valid=valid)
