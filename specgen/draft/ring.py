"""What a drafter that is not running needs to be brought up to date later: each row's last tokens and target states, in a ring on the device.

Boundary: positions, tokens and states by slot; what a drafter makes of them is its own ``catch_up``. No host read, no data-dependent shape.

Entry p of a row, at p modulo ``WINDOW``, belongs to committed position p: the token after it, x[p+1], and the target's state at it, h[p]. That is the
pair an EAGLE or MTP head takes; a draft model takes the token alone, at position p + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.draft.base import StepRows
from specgen.kernels.reference_step import Keep
from specgen.models.decoder import Tail
from specgen.types import Layout

WINDOW = 64
MAX_TOKENS = 4096  # of one catching-up forward


@dataclass
class Replay:
    """One packed forward of B rows x C positions that catches up. Positions a row does not miss go to scratch.

    ids [B * C] int32: the token after each position. states [B * C, E] or None. tail: the last position a row misses here. keep [B] int64: the rows'
    slots, 0 for a row that misses none of these. last: this forward ends at the rows' last positions. begin [B] int32: the place in the window of the
    first position a row misses, 0 where it began before.
    """

    rows: StepRows
    ids: Tensor
    states: Tensor | None
    layout: Layout
    tail: Tail
    keep: Tensor
    last: bool
    begin: Tensor
    missing: Tensor
    cu_q: Tensor

    def moved(self, back: int) -> Layout:
        """The layout of the same tokens ``back`` positions earlier: those before a row's beginning go to scratch too."""
        return _packed(self.rows, self.missing, self.cu_q, -back)


def _packed(rows: StepRows, missing: Tensor, cu_q: Tensor, by: int) -> Layout:
    """Tokens at ``rows.length`` + ``by`` and on, as a packed chunk a row; those not ``missing`` [B, C] write to scratch."""
    placed = rows.place(missing.shape[1], start_add=by)
    return replace(placed, slots=placed.slots * missing.flatten(), cu_q=cu_q)


class StateRing:
    """Tokens [R, WINDOW] int32, states [R, WINDOW, width] (None for width 0) and, by slot, the length at which its prefill ended [R] int32."""

    def __init__(self, max_slots: int, width: int, dtype: torch.dtype, max_length: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_slots, WINDOW, dtype=torch.int32, device=device)
        self.states = torch.zeros(max_slots, WINDOW, width, dtype=dtype, device=device) if width else None
        self.begun = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self.max_length = max_length
        self.offsets = torch.arange(WINDOW, dtype=torch.int32, device=device)
        self.rows = torch.arange(max_slots + 1, dtype=torch.int32, device=device)

    @staticmethod
    def size(max_slots: int, width: int, dtype: torch.dtype) -> int:
        """Bytes it takes."""
        return max_slots * WINDOW * (4 + width * dtype.itemsize)

    def prefilled(self, slots: Tensor, length: Tensor) -> None:
        """Rows whose prompt has just run through the drafter too. slots [F] int64, length [F] int32."""
        self.begun.index_copy_(0, slots, length)

    def keep(self, rows: StepRows, states: Tensor | None) -> Keep:
        """One position a row, for the commit to keep with the token that follows. states [B, width]: the target's at the roots."""
        return Keep(rows.length, self.tokens, 0, states, self.states)

    def replay(self, rows: StepRows, steps: int, lead: int) -> Iterator[Replay]:
        """The forwards that bring the rows up to date after ``steps`` steps without the drafter, oldest positions first.

        A row misses the positions of those steps, or fewer if its prefill came later; what is older than the ring is left out. Row b's K and V of
        position p go to index p + ``lead``.
        """
        width = min(steps, WINDOW, self.max_length)
        size = 1
        while size < width and 2 * size * rows.size <= MAX_TOKENS:
            size *= 2
        size = min(size, self.max_length)
        first = rows.length - torch.minimum(rows.length - self.begun.index_select(0, rows.slots), torch.full_like(rows.length, width)).clamp(min=0)
        parts = -(-width // size)
        for part in range(parts):
            yield self._part(rows, first, size, (parts - 1 - part) * size, lead)

    def _part(self, rows: StepRows, first: Tensor, size: int, behind: int, lead: int) -> Replay:
        """The ``size`` positions that end ``behind`` before each row's last; windows start at 0 at the earliest and never pass the row's end."""
        batch = rows.size
        end = rows.length - behind
        start = (end - size).clamp(min=0)
        position = start[:, None] + self.offsets[:size]
        missing = (position >= first[:, None]) & (position < end[:, None])
        at = (position % WINDOW).long()
        ids = torch.where(missing, self.tokens[rows.slots[:, None], at], 0)
        states = None
        if self.states is not None:
            states = torch.where(missing[:, :, None], self.states[rows.slots[:, None], at], 0).flatten(0, 1)
        at_start, cu_q = replace(rows, length=start), self.rows[: batch + 1] * size
        layout = _packed(at_start, missing, cu_q, lead)
        last = (end - 1 - start).clamp(0, size - 1)
        query = Layout(layout.positions, layout.slots, layout.block_table, layout.length + last, 1, layout.max_len)
        tail, keep = Tail(last + self.rows[:batch] * size, query), torch.where(first < end, rows.slots, 0)
        return Replay(at_start, ids.flatten(), states, layout, tail, keep, behind == 0, (first - start).clamp(min=0), missing, cu_q)
