"""Adaptive speculation inside the engine: asks the controller before each decode step, times the step, and reports what came of it.

Boundary: host bookkeeping between the engine and ``draft.adaptive``; no tensors but a retired step's numbers, already on the host. What a step's time
is: with overlap the interval between two retirements, which in steady state is the device's time; without, the time of the call.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specgen.draft.adaptive import Choice, Outcome, quartile
from specgen.draft.base import Drafter
from specgen.engine.batch import Batch
from specgen.engine.graphs import StepGraphs, bucket_of, context_of
from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END

FEW = 8  # rows that a loop counts sooner than numpy does


class Controller(Protocol):
    """Who decides: ``draft.adaptive.AdaptiveController``, or a script in tests."""

    def choose(self, bucket: int, context: int) -> Choice:
        """The next step's choice."""

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """What came of a step."""

    def report(self) -> list[dict[str, Any]]:
        """Choices and reasons, for stats.json."""


@dataclass
class Paced:
    """What ``Pacing`` remembers of a launched step. ``catch_up``: skipped steps its drafter follows first."""

    choice: Choice
    catch_up: int
    clean: bool  # nothing but decode rows
    plain: bool = False  # of a run of steps that are S = 0 whatever comes of them


class Pacing:
    """One engine's choices. ``skipped``: steps launched without a draft since the drafter last ran."""

    def __init__(self, controller: Controller, drafter: Drafter, graphs: StepGraphs | None, max_batch: int, limit: int, overlap: int) -> None:
        self.controller, self.drafter, self.graphs = controller, drafter, graphs
        self.max_batch, self.limit, self.overlap = max_batch, limit, overlap
        self.skipped = 0
        self._steps = drafter.num_steps  # the last S > 0
        self._start = self._last = 0.0
        self._steady = False  # the step retired before was a decode step alone, and the next was launched by then
        self._captured = 0.0
        # Plain steps that need no choice: a step of a small model is hardly longer than what choosing and noting it takes.
        self._plain = Paced(Choice(0, 0, 0), 0, True, True)
        self._plain_rows = self._plain_left = 0
        self._plain_steps, self._plain_s = 0, 0.0  # retired and not yet told, and their seconds
        self._plain_each: deque[float] = deque(maxlen=9)  # of the last ones

    def begin(self, now: float) -> None:
        """A call of ``Engine.step`` began at ``now``."""
        self._start = now

    def plan(self, batch: Batch) -> None:
        """Set the num_steps of a batch and what its drafter has to follow first."""
        if self._plain_left:
            if len(batch.decode) == self._plain_rows and batch.max_len <= self._plain.choice.context and not batch.chunks:
                self._plain_left -= 1
                self.skipped += 1
                batch.num_steps, batch.catch_up, batch.paced = 0, 0, self._plain
                return
            self._plain_left = 0
        choice = self.controller.choose(bucket_of(len(batch.decode), self.max_batch), context_of(batch.max_len, self.limit))
        batch.num_steps, batch.catch_up = choice.num_steps, 0
        if choice.num_steps == 0:
            self.skipped += 1
        else:
            batch.catch_up, self.skipped = self.skipped, 0
            if choice.num_steps != self._steps:
                self.drafter.use_steps(choice.num_steps)
                self._steps = choice.num_steps
        batch.paced = Paced(choice, batch.catch_up, not batch.chunks)
        if choice.ahead and self.overlap and batch.paced.clean:
            self._tell_plain()
            batch.paced.plain, self._plain = True, batch.paced
            self._plain_rows, self._plain_left = len(batch.decode), choice.ahead

    def retired(self, batch: Batch, result: np.ndarray | None, launched: Batch) -> None:
        """A step was retired while ``launched`` was the newest one. result [n, columns] int32, or None for a step without decode rows."""
        now = time.perf_counter()
        paced, ahead = batch.paced, launched.paced
        if (
            self._steady
            and paced is not None
            and ahead is not None
            and paced.plain
            and ahead.plain
            and paced.choice == ahead.choice
            and not self._new_capture_s()
        ):
            self._plain_steps += 1
            self._plain_s += now - self._last
            self._plain_each.append(now - self._last)
            self._last = now
            return
        self._tell_plain()
        capture_s = self._new_capture_s()
        self._captured += capture_s
        since, self._last = self._last, now
        steady, self._steady = self._steady, bool(batch.decode and launched.decode) and not batch.chunks
        if paced is None or result is None:
            return
        if self.overlap:
            seconds = now - since if steady and paced.clean and not launched.chunks else None
        else:
            seconds = now - self._start if paced.clean else None
        outcome = _outcome(result, paced.choice.num_steps)
        outcome.seconds, outcome.capture_s, outcome.caught_up = seconds, capture_s, paced.catch_up > 0
        if ahead is not None and ahead is not paced and (ahead.catch_up or capture_s):  # the host spent part of this time on the next step
            outcome.caught_up |= ahead.catch_up > 0
            outcome.ahead = ahead.choice.trial
        outcome.usable = not capture_s and not outcome.caught_up
        self.controller.stepped(paced.choice, outcome)

    def report(self) -> list[dict[str, Any]]:
        """The controller's, of every step retired so far."""
        self._tell_plain()
        return self.controller.report()

    def _tell_plain(self) -> None:
        """Tell the controller of the plain steps retired since the last time, all at once."""
        if self._plain_steps:
            steps, seconds = self._plain_steps, self._plain_s
            self._plain_steps, self._plain_s = 0, 0.0
            self.controller.stepped(self._plain.choice, Outcome(seconds, 0, steps=steps, each=quartile(self._plain_each)))

    def _new_capture_s(self) -> float:
        """Seconds of graph captures that no outcome has told of yet."""
        return 0.0 if self.graphs is None else self.graphs.capture_seconds - self._captured


def _outcome(result: np.ndarray, num_steps: int) -> Outcome:
    """Rows, reached and accepted by depth of a retired step: its rows that were alive on entry."""
    if not num_steps:
        return Outcome(None, int(np.count_nonzero(result[:, ALIVE])))
    stopped = [0] * (2 * num_steps + 2)  # rows by accepted drafts, and by whether there was one more to try
    if len(result) <= FEW:
        for row in result.tolist():
            if row[ALIVE]:
                stopped[2 * row[ACCEPTED] + (row[CHILD_AT_END] > 0)] += 1
    else:
        places = (2 * result[:, ACCEPTED] + (result[:, CHILD_AT_END] > 0))[result[:, ALIVE] > 0]
        stopped = np.bincount(places, minlength=len(stopped)).tolist()
    reached, accepted, beyond = [0] * num_steps, [0] * num_steps, 0
    for depth in range(num_steps, 0, -1):
        beyond += stopped[2 * depth] + stopped[2 * depth + 1]
        accepted[depth - 1] = beyond
        reached[depth - 1] = beyond + stopped[2 * depth - 1]
    return Outcome(None, beyond + stopped[0] + stopped[1], reached, accepted)
