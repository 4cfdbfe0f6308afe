"""The tables of the law f by slot: penalties, bias and masks, allocated when the first row that needs them is queued.

Boundary: turns a request's sampling parameters into lines of ``kernels.reference_sampling.LawTables`` and keeps them right from admission on; how
they change logits is ``kernels.law``. A row without a feature has neutral values in its tables, so a job may mix rows freely.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specgen.engine.buffers import BufferRing
from specgen.kernels import ops
from specgen.kernels.reference_sampling import LawTables
from specgen.types import Request, SamplingParams

PENALTIES, BIAS, MIN_TOKENS = "penalties", "bias", "min_tokens"
FEWEST_STOPS = 16
# Beyond these a float32 logit could overflow, or a factor vanish.
LARGEST, SMALLEST = 1e30, 1e-30


def law_features(params: SamplingParams) -> frozenset[str]:
    """Which tables a row needs."""
    found = set()
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        found.add(PENALTIES)
    if params.logit_bias or params.allowed_token_ids or params.banned_token_ids:
        found.add(BIAS)
    if params.min_tokens > 0:
        found.add(MIN_TOKENS)
    return frozenset(found)


def complaint(params: SamplingParams, stop_ids: tuple[int, ...], vocab_limit: int, vocab_size: int) -> str | None:
    """Why a row's law cannot be applied, or None: a value float32 cannot carry, an id outside the vocabulary, or no token left to sample."""
    for name, value in (("presence_penalty", params.presence_penalty), ("frequency_penalty", params.frequency_penalty)):
        if abs(value) > LARGEST:
            return f"sampling.{name}={value:g} is too large: at most {LARGEST:g} in size"
    if not SMALLEST <= params.repetition_penalty <= LARGEST:
        return f"sampling.repetition_penalty={params.repetition_penalty:g} must be between {SMALLEST:g} and {LARGEST:g}"
    for token, value in params.logit_bias:
        if abs(value) > LARGEST:
            instead = "allowed_token_ids" if value > 0 else "banned_token_ids"
            return f"sampling.logit_bias of token {token} is {value:g}: at most {LARGEST:g} in size; see sampling.{instead}"
    ids = [token for token, _ in params.logit_bias]
    for name, listed in (("logit_bias", ids), ("allowed_token_ids", params.allowed_token_ids), ("banned_token_ids", params.banned_token_ids)):
        if listed and max(listed) >= vocab_size:
            return f"sampling.{name} holds {max(listed)}, outside the model's vocabulary of {vocab_size}"
    blocked = set(params.banned_token_ids) | (set(stop_ids) if params.min_tokens else set())
    if not any(token < vocab_limit and token not in blocked for token in params.allowed_token_ids or range(vocab_limit)):
        less = "sampling.banned_token_ids and, before sampling.min_tokens, the ids that end a row"
        return f"no token is left to sample: {'sampling.allowed_token_ids' if params.allowed_token_ids else 'the vocabulary'} less {less}, is empty"
    return None


class LawState:
    """The law's tables for ``max_slots`` rows (slot 0, scratch, stays neutral) over ``vocab_size`` ids.

    ``features`` names the tables allocated so far, and the width of the stop lists: captured steps hold the tables' addresses, so a step captured for
    other features is never replayed.
    """

    def __init__(self, max_slots: int, vocab_size: int, max_length: int, device: torch.device) -> None:
        self.max_slots, self.vocab_size, self.max_length, self.device = max_slots, vocab_size, max_length, device
        self.tables = LawTables()
        self.features: frozenset[str] = frozenset()
        self._biased: set[int] = set()
        self._last_bias: tuple[tuple[object, ...], Tensor] | None = None
        self._slots = BufferRing(3, max_slots, dtype=torch.int64, device=device)

    @property
    def masks(self) -> LawTables | None:
        """What drafters apply of the law, or None: bias and hard masks, no penalties."""
        x = self.tables
        return LawTables(bias=x.bias, min_tokens=x.min_tokens, stop_ids=x.stop_ids) if x.bias is not None or x.min_tokens is not None else None

    # -- allocation -----------------------------------------------------------------------------------------------------------------------

    def require(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
        """Make room for a row, before it is admitted. Rows already running keep neutral values in a new table."""
        wanted, x, rows = law_features(params), self.tables, self.max_slots
        if PENALTIES in wanted and x.repetition is None:
            x.repetition = torch.ones(rows, device=self.device)
            x.presence, x.frequency = torch.zeros(2, rows, device=self.device)
            x.prompt_seen = torch.zeros(rows, self.vocab_size, dtype=torch.bool, device=self.device)
            x.output_count = torch.zeros(rows, self.vocab_size, dtype=torch.int32, device=self.device)
            self._penalties = BufferRing(3, 3, rows, dtype=torch.float32, device=self.device)
            self._history = BufferRing(3, self.max_length + 1, dtype=torch.int32, device=self.device)
        if BIAS in wanted and x.bias is None:
            x.bias = torch.zeros(rows, self.vocab_size, device=self.device)
            self._bias = BufferRing(2, self.vocab_size, dtype=torch.float32, device=self.device)
        if MIN_TOKENS in wanted:
            self._widen_stops(len(stop_ids))
        self.features |= wanted

    def _widen_stops(self, count: int) -> None:
        x = self.tables
        width = FEWEST_STOPS if x.stop_ids is None else x.stop_ids.shape[1]
        while width < count:
            width *= 2
        if x.min_tokens is None:
            x.min_tokens = torch.zeros(self.max_slots, dtype=torch.int32, device=self.device)
        if x.stop_ids is not None and x.stop_ids.shape[1] == width:
            return
        wider = torch.full((self.max_slots, width), -1, dtype=torch.int32, device=self.device)
        if x.stop_ids is not None:
            wider[:, : x.stop_ids.shape[1]] = x.stop_ids
        x.stop_ids = wider
        self._stops = BufferRing(3, self.max_slots, width + 1, dtype=torch.int32, device=self.device)
        self.features |= {f"stop ids {width}"}

    # -- admission ------------------------------------------------------------------------------------------------------------------------

    def admit(self, requests: list[Request], stop_ids: list[tuple[int, ...]]) -> None:
        """Write the tables' lines of newly admitted requests, in stream order before anything launched for them.

        A resumed request brings its output along: its counts are built again from it.
        """
        if not self.features:
            return
        n = len(requests)
        slots = self._slots.take()
        slots.np[:n] = [r.slot for r in requests]
        where = slots.copy_to_gpu(n)
        if self.tables.repetition is not None:
            self._admit_penalties(requests, where)
        if self.tables.bias is not None:
            for request in requests:
                self._admit_bias(request)
        if self.tables.min_tokens is not None:
            self._admit_min_tokens(requests, stop_ids, where)

    def _admit_penalties(self, requests: list[Request], where: Tensor) -> None:
        x, n = self.tables, len(requests)
        assert x.repetition is not None and x.presence is not None and x.frequency is not None
        values = self._penalties.take()
        for i, s in enumerate(r.sampling for r in requests):
            values.np[:, i] = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
        device = values.copy_to_gpu()
        for table, line in zip((x.repetition, x.presence, x.frequency), device, strict=True):
            table.index_copy_(0, where, line[:n])
        for request in requests:
            if PENALTIES in law_features(request.sampling):
                self._admit_history(request)

    def _admit_history(self, request: Request) -> None:
        seen, count = self.tables.prompt_seen, self.tables.output_count
        assert seen is not None and count is not None
        prompt, output = request.prompt.token_ids, request.output_ids
        buffer, known = self._history.take(), len(prompt)
        buffer.np[:known] = prompt
        buffer.np[known : known + len(output)] = output
        ids = buffer.copy_to_gpu(known + len(output)).long()
        seen[request.slot].zero_().index_fill_(0, ids[:known], True)
        count[request.slot].zero_().scatter_add_(0, ids[known:], torch.ones_like(ids[known:], dtype=torch.int32))

    def _admit_bias(self, request: Request) -> None:
        table, slot, s = self.tables.bias, request.slot, request.sampling
        assert table is not None
        if BIAS not in law_features(s):
            if slot in self._biased:
                table[slot].zero_()
                self._biased.discard(slot)
            return
        self._biased.add(slot)
        key = (s.logit_bias, s.allowed_token_ids, s.banned_token_ids)
        if self._last_bias is not None and self._last_bias[0] == key:
            table[slot].copy_(self._last_bias[1])
            return
        buffer = self._bias.take()
        line = buffer.np
        if s.allowed_token_ids:
            line[:] = -np.inf
            line[list(s.allowed_token_ids)] = 0
        else:
            line[:] = 0
        for token, value in s.logit_bias:
            line[token] += value
        line[list(s.banned_token_ids)] = -np.inf
        table[slot].copy_(buffer.copy_to_gpu())
        self._last_bias = key, table[slot].clone()

    def _admit_min_tokens(self, requests: list[Request], stop_ids: list[tuple[int, ...]], where: Tensor) -> None:
        x, n = self.tables, len(requests)
        assert x.min_tokens is not None and x.stop_ids is not None
        lines = self._stops.take()
        lines.np[:n] = -1
        for i, (request, stops) in enumerate(zip(requests, stop_ids, strict=True)):
            lines.np[i, 0] = request.sampling.min_tokens
            if request.sampling.min_tokens > 0:
                lines.np[i, 1 : len(stops) + 1] = stops
        device = lines.copy_to_gpu(n)
        x.min_tokens.index_copy_(0, where, device[:, 0])
        x.stop_ids.index_copy_(0, where, device[:, 1:])

    # -- the step -------------------------------------------------------------------------------------------------------------------------

    def count(self, slots: Tensor, tokens: Tensor, kept: Tensor) -> None:
        """Count the tokens of a run as output: the first kept [B] of tokens [B, W] (-1 fills) of each row. Tensors only."""
        if self.tables.output_count is not None:
            ops.commit_counts(self.tables.output_count, slots, tokens, kept)
