"""Matchers of the grammar library walked down the drafts of a step, a mask at every node they reach.

Boundary: matchers, draft tokens and lines of a buffer; knows nothing of requests, devices or the step. ``engine.grammar`` makes the states and
finishes the masks.

No matcher ever goes back. One that is rolled back or reset can answer with the mask it computed last, for another text of the same length
(llguidance 1.9.1): what goes down a branch is a copy, a microsecond or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from specgen.engine.buffers import CpuGpuBuffer
from specgen.grammar_text import Rules

UNVISITED = np.int32(-1)  # in a line's last word, whose sign bit no mask of the library has set


@dataclass(frozen=True, eq=False)
class Ending:
    """The ids that end a row, as bits: ``held`` in ``words`` are cleared from every mask (the library's end token among them), ``bits`` in ``words``
    set where a text may end. ``hard`` [words]: what ``allowed_token_ids`` and ``banned_token_ids`` leave, or None."""

    ids: frozenset[int]
    words: np.ndarray
    held: np.ndarray
    bits: np.ndarray
    hard: np.ndarray | None


@dataclass(eq=False)
class State:
    """Where a row stands: its matcher has consumed the first ``followed`` of its output tokens, all but an id that ended it. ``origin``: the matcher
    it is a copy of, which stays at the start of a text."""

    origin: Any
    matcher: Any
    ending: Ending
    min_tokens: int
    followed: int = 0


class Walk:
    """One filling of ``nodes`` lines a row in a buffer: copies of each row's matcher go down the draft. The library computes the masks of different
    rows in parallel; copies of one matcher share a lock.

    A chain is walked by the library itself. In a tree every row visits its nodes depth first, all rows one node at a time: that is a call a round.
    ``failed``: rows of which some matcher ended in error.
    """

    def __init__(self, buffer: CpuGpuBuffer, nodes: int, draft: np.ndarray | None, vocab_limit: int) -> None:
        self.buffer, self.nodes, self.vocab_limit = buffer, nodes, vocab_limit
        total, words = buffer.cpu.shape
        self.where = buffer.cpu.data_ptr(), 4 * words, total
        self.tokens: list[list[int]] = []
        self.child: list[list[int]] | None = None
        self.depth = np.arange(nodes)[None]
        self.failed: set[int] = set()
        if draft is not None:
            self.tokens = draft[:, : nodes - 1].tolist()
            if draft.shape[1] > nodes - 1:
                self.child, self.sibling = (draft[:, nodes - 1 + i * nodes : nodes - 1 + (i + 1) * nodes].tolist() for i in (0, 1))
                self.depth = draft[:, nodes - 1 + 2 * nodes :]

    def depths(self, rows: int) -> np.ndarray:
        """Depth of each node, [rows, nodes]."""
        return np.broadcast_to(self.depth, (rows, self.nodes))

    def roots(self, threads: Any, states: list[State]) -> None:
        """The root of each row alone."""
        threads.unsafe_compute_mask_ptr([(state.matcher, row * self.nodes) for row, state in enumerate(states)], *self.where)
        self._note((row, state.matcher) for row, state in enumerate(states))

    def chains(self, threads: Any, states: list[State]) -> None:
        """The nodes of each row's chain, down to the first that the grammar refuses."""
        drafted, bare = [], []
        for row, state in enumerate(states):
            tokens = self._known(self.tokens[row])
            if tokens:
                drafted.append((state.matcher.deep_copy(), row * self.nodes, tokens))  # the library walks it down and back
            else:
                bare.append((state.matcher, row * self.nodes))
        if drafted:
            threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *self.where)
        if bare:
            threads.unsafe_compute_mask_ptr(bare, *self.where)
        self._note((line // self.nodes, matcher) for matcher, line, _ in drafted)
        self._note((line // self.nodes, matcher) for matcher, line in bare)

    def trees(self, threads: Any, states: list[State]) -> None:
        """The nodes of each row's tree whose path the grammar takes."""
        visits = [(row, self._visit(row, state.matcher, 0)) for row, state in enumerate(states)]
        while visits:
            stops = [(row, visit, next(visit, None)) for row, visit in visits]
            visits = [(row, visit) for row, visit, stop in stops if stop is not None]
            here = [(row, *stop) for row, _, stop in stops if stop is not None]
            if here:
                threads.unsafe_compute_mask_ptr([(matcher, row * self.nodes + node) for row, node, matcher in here], *self.where)
                self._note((row, matcher) for row, _, matcher in here)

    def _note(self, asked: Iterable[tuple[int, Any]]) -> None:
        """Remember the rows whose matchers could not answer."""
        self.failed.update(row for row, matcher in asked if matcher.is_error())

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens up to the first that is none: the library takes an id beyond its vocabulary for a fault of the caller's."""
        return list(takewhile(lambda token: 0 <= token < self.vocab_limit, tokens))

    def _visit(self, row: int, matcher: Any, node: int) -> Iterator[tuple[int, Any]]:
        """The nodes at and under ``node``, depth first, each with a matcher that stands there."""
        yield node, matcher
        assert self.child is not None
        child = self.child[row][node]
        while child >= 0:
            token = self.tokens[row][child - 1]
            if 0 <= token < self.vocab_limit:
                below = matcher.deep_copy()
                if below.try_consume_tokens([token]) == 1:
                    yield from self._visit(row, below, child)
            child = self.sibling[row][child]

    def again(self, row: int, output: Sequence[int], rules: Rules) -> None:
        """The nodes of a row whose matcher ended in error, each with a matcher of its own: only what is wrong at a node shows there."""
        lines = self.buffer.np[row * self.nodes : (row + 1) * self.nodes]
        lines[:, -1] = UNVISITED
        for node, path in self._paths(row):
            tokens = [*output, *self._known(path)]
            matcher = rules.matcher()
            if len(tokens) == len(output) + len(path) and (not tokens or matcher.try_consume_tokens(tokens) == len(tokens)):
                matcher.unsafe_compute_mask_ptr(lines[node].ctypes.data, self.where[1])

    def _paths(self, row: int) -> Iterator[tuple[int, list[int]]]:
        """Every node of a row's draft with the tokens on the way to it."""
        tokens = self.tokens[row] if self.tokens else []
        if self.child is None:
            yield from ((node, tokens[:node]) for node in range(len(tokens) + 1))
            return
        left = [(0, list[int]())]
        while left:
            node, path = left.pop()
            yield node, path
            child = self.child[row][node]
            while child >= 0:
                left.append((child, [*path, tokens[child - 1]]))
                child = self.sibling[row][child]
