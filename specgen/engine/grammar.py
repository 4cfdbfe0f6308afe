"""Masks of ``sampling.grammar``: which ids may follow each node of a step, and where each row's output stands in the grammar.

Boundary: between requests and the grammar library (llguidance); everything but ``packed`` is the host's. How a mask changes logits is
``kernels.law``, the grammar's own text is ``grammar_text``, the way through a draft is ``grammar_walk``.

A row's matcher has consumed its output, and nothing else: copies of it are walked down a draft. Ids that end a row are this file's business, not
the library's: the library knows one id for "the text may end here", which no model has, and where it allows that id the row's own are allowed. So
they are allowed where the text is complete and nowhere else.

- A node whose path the grammar refuses is not visited. Its mask is left over from an earlier step: never empty, and never used.
- ``min_tokens`` holds back the ids that end a row only while another id is left: a text that cannot go on ends.
- Where no id is left (the vocabulary has no token for what must follow, or other masks forbid it, or the grammar went past the library's limits) the
  ids that end the row are allowed after all; ``follow`` then finds the row ended in the middle, and it becomes an error row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgen.engine.buffers import CpuGpuBuffer
from specgen.engine.grammar_walk import UNVISITED, Ending, State, Walk
from specgen.grammar_text import KEY, Rules, library, limit_passed
from specgen.types import Draft, Request, SamplingParams

MOST_THREADS = 32


def _bits(ids: Sequence[int], words: int) -> np.ndarray:
    """A mask [words] int32 with the bits of ``ids`` set."""
    flags = np.zeros(words * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _usable(params: SamplingParams, stop_ids: Sequence[int], vocab_limit: int) -> list[int]:
    """The ids that can end a row under its other masks."""
    allowed, banned = params.allowed_token_ids, params.banned_token_ids
    return [token for token in stop_ids if token < vocab_limit and token not in banned and (not allowed or token in allowed)]


class GrammarMasks:
    """The masks of an engine's steps. A mask is [ceil(V / 32)] int32, bit v % 32 of word v // 32 set where id v may follow."""

    def __init__(self, rules: Rules, vocab_limit: int, max_batch: int, nodes: int, device: torch.device) -> None:
        """``nodes``: the most nodes verified for a row, root included."""
        self.rules, self.vocab_limit, self.max_batch, self.device = rules, vocab_limit, max_batch, device
        self._threads = library().LLExecutor(min(MOST_THREADS, _cores()))
        self._end_bit = np.int32(1 << (rules.vocabulary.end % 32))
        # Matchers at the start of a text, which rows that ended leave behind: making one costs a thousand tokens' worth of walking, copying it next
        # to nothing. A row has one of its own, since the copies of one share a lock.
        self._free: list[Any] = []
        self._endings: dict[Any, Ending] = {}
        self._packed: dict[int, CpuGpuBuffer] = {}
        words = rules.vocabulary.words
        self._nodes = CpuGpuBuffer(max_batch * nodes, words, dtype=torch.int32, device=device)
        self._firsts = CpuGpuBuffer(max_batch, words, dtype=torch.int32, device=device)
        for buffer in (self._nodes, self._firsts):
            buffer.np[:] = -1
            buffer.copy_to_gpu()

    @staticmethod
    def size(rules: Rules, max_batch: int, nodes: int) -> int:
        """Bytes on the device."""
        return 4 * rules.vocabulary.words * max_batch * (nodes + 1)

    # -- requests -------------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def on_device(params: SamplingParams) -> SamplingParams:
        """What the tables of the law hold of a row's parameters: all but ``min_tokens``, which is in the masks."""
        return replace(params, min_tokens=0) if params.min_tokens else params

    def complaint(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> str | None:
        """Why a row cannot run under a grammar, or None."""
        if params.ignore_eos:
            return f"sampling.ignore_eos=true has no meaning with {KEY}, which ends a row where its text is complete; leave one out"
        if not stop_ids:
            return f"{KEY} needs an id that ends a row, and the model names none: give sampling.stop_token_ids"
        if not _usable(params, stop_ids, self.vocab_limit):
            return f"{KEY} needs an id that ends a row, and sampling.allowed_token_ids or banned_token_ids forbid all of {list(stop_ids)}"
        return None

    def _state(self, request: Request) -> State:
        """Where a request stands, which is after the whole of its output."""
        state: State | None = request.grammar
        if state is None:
            origin = self._free.pop() if self._free else self.rules.matcher()
            state = request.grammar = State(origin, origin.deep_copy(), self._ending(request), request.sampling.min_tokens)
        return state

    def _ending(self, request: Request) -> Ending:
        params, stop_ids = request.sampling, request.stop_ids
        assert stop_ids is not None, "the scheduler asked for them when the request was queued"
        key = stop_ids, params.allowed_token_ids, params.banned_token_ids
        found = self._endings.get(key)
        if found is None:
            if len(self._endings) > 4 * self.max_batch:
                self._endings.clear()
            found = self._endings[key] = self._new_ending(params, stop_ids)
        return found

    def _new_ending(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> Ending:
        vocabulary = self.rules.vocabulary
        words = vocabulary.words
        known = [token for token in stop_ids if token < 32 * words]
        held, bits = _bits([*known, vocabulary.end], words), _bits(_usable(params, stop_ids, self.vocab_limit), words)
        at = np.flatnonzero(held)
        hard = None
        if params.allowed_token_ids or params.banned_token_ids:
            hard = _bits([t for t in params.allowed_token_ids or range(self.vocab_limit) if t < self.vocab_limit], words)
            hard &= ~_bits([t for t in params.banned_token_ids if t < self.vocab_limit], words)
        return Ending(frozenset(stop_ids), at, held[at], bits[at], hard)

    def follow(self, request: Request) -> tuple[int, str] | None:
        """Take in the output tokens that are new. None, or (the output tokens that count, why the row ends there with an error)."""
        state, output = self._state(request), request.output_ids
        if state.matcher.is_error():  # a mask was past the library's limits: another matcher says where
            state.origin = self.rules.matcher()
            state.matcher, state.followed = state.origin.deep_copy(), 0
        new = output[state.followed :]
        ended = bool(new) and new[-1] in state.ending.ids
        text = new[:-1] if ended else new
        state.followed += self._consume(state.matcher, text)
        if state.followed == len(output) - ended and (not ended or state.matcher.is_accepting()):
            return None
        state.matcher.compute_bitmask()  # only to hear what the library says of the place
        said = limit_passed(state.matcher)
        why = f": {said[:200]}" if said else ": neither it, nor the vocabulary, nor the row's other masks allow one"
        return state.followed, f"{KEY} has no token at output position {state.followed}{why}"

    def _consume(self, matcher: Any, tokens: Sequence[int]) -> int:
        """How many of the tokens the matcher takes."""
        known = list(takewhile(lambda token: 0 <= token < self.vocab_limit, tokens))
        return int(matcher.try_consume_tokens(known)) if known else 0

    def release(self, request: Request) -> None:
        """The request has ended: the matcher that its own was copied from serves another."""
        state: State | None = request.grammar
        request.grammar = None
        if state is not None and not state.matcher.is_error():
            self._free.append(state.origin)

    # -- masks ----------------------------------------------------------------------------------------------------------------------------

    def first_masks(self, requests: Sequence[Request]) -> Tensor:
        """Masks [n, words] on the device: of the token after each prompt that ends in a prefill."""
        return self._fill(self._firsts, requests, 1, None)

    def decode_masks(self, requests: Sequence[Request], nodes: int, draft: Tensor | None) -> Tensor:
        """Masks [n * nodes, words] on the device: of the nodes of a decode step. draft: ``packed`` of its n rows or more, on the device; None without
        one. Waits for the device."""
        return self._fill(self._nodes, requests, nodes, None if draft is None else self._read(draft, len(requests)))

    def mask_after(self, request: Request, output: Sequence[int]) -> Tensor:
        """The mask [1, words] after ``output``, on the device, for the lossless check."""
        one = replace(request, output_ids=list(output), grammar=None)
        self.follow(one)
        mask = self.first_masks([one]).clone()
        self.release(one)
        return mask

    def device_masks(self, lines: int) -> Tensor:
        """Where ``decode_masks`` puts the first ``lines`` masks: one memory for the engine's life, so that captured steps may read it."""
        return self._nodes.gpu[:lines]

    def _read(self, draft: Tensor, n: int) -> np.ndarray:
        if draft.device.type == "cpu":
            return np.asarray(draft[:n].numpy())
        width = draft.shape[1]
        buffer = self._packed.get(width)
        if buffer is None:
            buffer = self._packed[width] = CpuGpuBuffer(self.max_batch, width, dtype=torch.int32, device=self.device)
        buffer.fetch(draft, n)
        buffer.wait()
        return np.asarray(buffer.np[:n])

    def _fill(self, buffer: CpuGpuBuffer, requests: Sequence[Request], nodes: int, packed_draft: np.ndarray | None) -> Tensor:
        states = [self._state(request) for request in requests]
        lines = buffer.np[: len(states) * nodes]
        lines[:, -1] = UNVISITED
        walk = Walk(buffer, nodes, packed_draft, self.vocab_limit)
        if packed_draft is None:
            walk.roots(self._threads, states)
        elif walk.child is None:
            walk.chains(self._threads, states)
        else:
            walk.trees(self._threads, states)
        for row in walk.failed:
            walk.again(row, requests[row].output_ids, self.rules)
        early = None
        if any(s.min_tokens > len(r.output_ids) for s, r in zip(states, requests, strict=True)):
            need = np.array([s.min_tokens - len(r.output_ids) for s, r in zip(states, requests, strict=True)])
            early = (walk.depths(len(states)) < need[:, None]).reshape(-1)
        start = 0
        for ending, group in groupby(states, key=lambda state: state.ending):
            stop = start + nodes * len(list(group))
            _seal(lines[start:stop], ending, self._end_bit, None if early is None else early[start:stop])
            start = stop
        return buffer.copy_to_gpu(len(lines))


def packed(draft: Draft) -> Tensor:
    """What the host reads of a draft, [B, W] int32: its tokens (-1 where there is no node), and for a tree first children, next siblings and depths.
    Tensors only."""
    tokens = draft.token_ids if draft.valid is None else torch.where(draft.valid, draft.token_ids, -1)
    if draft.first_child is None:
        return tokens
    assert draft.next_sibling is not None and draft.depth is not None
    return torch.cat([tokens, draft.first_child, draft.next_sibling, draft.depth], 1)


def _seal(lines: np.ndarray, ending: Ending, end_bit: np.int32, early: np.ndarray | None) -> None:
    """Put a row's own ending ids in the place of the library's one, in masks [n, words]; early [n]: before ``min_tokens``. Lines not visited stay."""
    fresh = lines[:, -1] >= 0
    ends = fresh & ((lines[:, -1] & end_bit) != 0)
    at = np.flatnonzero(fresh)
    lines[np.ix_(at, ending.words)] &= ~ending.held
    if ending.hard is not None:
        lines[at] &= ending.hard
        ends[at] |= ~lines[at].any(1)
    if early is not None:
        held_back = np.flatnonzero(ends & early)
        ends[held_back] = ~lines[held_back].any(1)
    lines[np.ix_(np.flatnonzero(ends), ending.words)] |= ending.bits


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
