"""Staging of packed prompt chunks: what the host fills and sends for one prefill.

Boundary: buffers and their layout; which chunks go along is the scheduler's choice, what is computed on them is ``step.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specgen.engine.batch import Chunk
from specgen.engine.buffers import BufferRing
from specgen.engine.memory import PageTable


@dataclass
class StagedPrefill:
    """Device tensors of one packed prefill (see ``PrefillBuffers.stage``)."""

    ids: Tensor
    next_ids: Tensor
    positions: Tensor
    slots: Tensor
    starts: Tensor
    cu_q: Tensor
    row_slots: Tensor
    final_last: Tensor
    final_slots: Tensor
    final_lengths: Tensor
    output_lens: Tensor
    backup: Tensor
    discard: Tensor
    max_q: int
    max_len: int


class PrefillBuffers:
    """Host staging of packed prompt chunks: one int32 matrix by token, one by row, one by final row, each copied once."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        self._tokens = BufferRing(2, 3, max_tokens, dtype=torch.int32, device=device)
        self._slots = BufferRing(2, max_tokens, dtype=torch.int64, device=device)
        self._rows = BufferRing(2, 2, max_rows + 1, dtype=torch.int32, device=device)
        self._finals = BufferRing(2, 5, max_rows, dtype=torch.int32, device=device)
        self._index = BufferRing(2, 3, max_rows, dtype=torch.int64, device=device)

    def stage(self, chunks: list[Chunk], finals: list[tuple[int, Chunk]], pages: PageTable) -> StagedPrefill:
        """Fill and send. Rows of ``tokens``: ids, the id after each, positions. The id after a final row's last token is filled in on the device."""
        tokens, slots, rows = self._tokens.take(), self._slots.take(), self._rows.take()
        finals_buffer, index = self._finals.take(), self._index.take()
        at, max_q, max_len = 0, 0, 0
        rows.np[1, 0] = 0
        for i, chunk in enumerate(chunks):
            n = chunk.end - chunk.start
            span = slice(at, at + n)
            tokens.np[0, span] = chunk.ids[chunk.start : chunk.end]
            after = chunk.ids[chunk.start + 1 : chunk.end + 1]
            tokens.np[1, at : at + len(after)] = after
            if len(after) < n:
                tokens.np[1, at + n - 1] = 0
            positions = np.arange(chunk.start, chunk.end)
            tokens.np[2, span] = positions
            slot = chunk.request.slot
            slots.np[span] = pages.table[slot, positions // pages.page_size].astype(np.int64) * pages.page_size + positions % pages.page_size
            rows.np[0, i], rows.np[1, i + 1], index.np[0, i] = chunk.start, at + n, slot
            at, max_q, max_len = at + n, max(max_q, n), max(max_len, chunk.end)
        for f, (i, chunk) in enumerate(finals):
            output = chunk.request.output_ids
            index.np[1, f], index.np[2, f] = rows.np[1, i + 1] - 1, chunk.request.slot
            finals_buffer.np[0, f], finals_buffer.np[1, f] = chunk.known, len(output)
            finals_buffer.np[2, f] = output[-1] if output else 0
            finals_buffer.np[3, f] = bool(output)
        n, f = len(chunks), len(finals)
        device_tokens, device_rows, device_finals = tokens.copy_to_gpu(), rows.copy_to_gpu(), finals_buffer.copy_to_gpu()
        device_index = index.copy_to_gpu()
        return StagedPrefill(
            ids=device_tokens[0, :at],
            next_ids=device_tokens[1, :at],
            positions=device_tokens[2, :at],
            slots=slots.copy_to_gpu(at),
            starts=device_rows[0, :n],
            cu_q=device_rows[1, : n + 1],
            row_slots=device_index[0, :n],
            final_last=device_index[1, :f],
            final_slots=device_index[2, :f],
            final_lengths=device_finals[0, :f],
            output_lens=device_finals[1, :f],
            backup=device_finals[2, :f],
            discard=device_finals[3, :f] > 0,
            max_q=max_q,
            max_len=max_len,
        )
