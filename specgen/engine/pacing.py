"""Adaptive speculation inside the engine: asks the controller before each decode step, times the step, and reports what came of it.

Boundary: host bookkeeping between the engine and ``draft.adaptive``; no tensors but a retired step's numbers, already on the host. What a step's time
is: with overlap the interval between two retirements, which in steady state is the device's time; without, the time of the call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specgen.draft.adaptive import Choice, Outcome
from specgen.draft.base import Drafter
from specgen.engine.batch import Batch
from specgen.engine.graphs import StepGraphs, bucket_of, context_of
from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END, RESULT_COLUMNS

FEW = 8  # rows that a loop counts sooner than numpy does
UNTOLD_STEPS = 32  # with a draft: so many are kept until they are told


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


class Pacing:
    """One engine's choices. ``skipped``: steps launched without a draft since the drafter last ran.

    A choice holds for a run of steps, and what came of them is told together: with a small model a step is hardly longer than choosing and telling.
    """

    def __init__(self, controller: Controller, drafter: Drafter, graphs: StepGraphs | None, max_batch: int, limit: int, overlap: int) -> None:
        self.controller, self.drafter, self.graphs = controller, drafter, graphs
        self.max_batch, self.limit, self.overlap = max_batch, limit, overlap
        self.skipped = 0
        self._steps = drafter.num_steps  # the last S > 0
        self._start = self._last = 0.0
        self._steady = False  # the step retired before was a decode step alone, and the next was launched by then
        self._captured = 0.0
        self._run = Paced(Choice(0, 0, 0), 0)
        self._left = 0  # steps of the run that may still be launched
        self._decode: Any = None  # the rows of the last step, and their bucket and context
        self._key = 0, 0
        # Steps retired and not yet told, all of one choice.
        self._of = self._run.choice
        self._untold, self._times = 0, list[float]()
        self._rows = np.zeros((UNTOLD_STEPS * max_batch, RESULT_COLUMNS), np.int32)
        self._num_rows = 0

    def begin(self, now: float) -> None:
        """A call of ``Engine.step`` began at ``now``."""
        self._start = now

    def pause(self) -> None:
        """The engine stood still for a while: the time until the next step is retired says nothing."""
        self._steady = False

    def restart(self, controller: Controller) -> None:
        """Go on with another controller, which chooses the next step."""
        self._tell()
        self.controller, self._left = controller, 0

    def plan(self, batch: Batch) -> None:
        """Set the num_steps of a batch and what its drafter has to follow first."""
        if batch.decode is not self._decode or batch.max_len > self._key[1]:
            self._decode = batch.decode
            self._key = bucket_of(len(batch.decode), self.max_batch), context_of(batch.max_len, self.limit)
        choice = self._run.choice
        if self._left and self._key == choice[:2]:
            self._left -= 1
            batch.paced = self._run
        else:
            self._tell()
            choice = self.controller.choose(*self._key)
            self._left, self._run = choice.more, Paced(choice, 0)
            batch.paced = Paced(choice, self.skipped) if choice.num_steps else self._run
        batch.num_steps, batch.catch_up = choice.num_steps, batch.paced.catch_up
        if not choice.num_steps:
            self.skipped += 1
            return
        self.skipped = 0
        if choice.num_steps != self._steps:
            self.drafter.use_steps(choice.num_steps)
            self._steps = choice.num_steps

    def retired(self, batch: Batch, result: np.ndarray | None, launched: Batch) -> None:
        """A step was retired while ``launched`` was the newest one. result [n, columns] int32, or None for a step without decode rows."""
        now = time.perf_counter()
        since, self._last = self._last, now
        steady, self._steady = self._steady, bool(batch.decode and launched.decode) and not batch.chunks
        paced, following = batch.paced, launched.paced
        capture_s = 0.0 if self.graphs is None else self.graphs.capture_seconds - self._captured
        self._captured += capture_s
        if paced is None or result is None:
            return
        if self.overlap:
            seconds = now - since if steady and not batch.chunks and not launched.chunks else None
        else:
            seconds = now - self._start if not batch.chunks else None
        launching = following is not None and following is not paced and following.catch_up > 0
        if capture_s or paced.catch_up or launching:
            self._tell_alone(paced, result, seconds, capture_s, following if following is not paced else None)
            return
        if paced.choice is not self._of or self._num_rows + len(result) > len(self._rows):
            self._tell()
            self._of = paced.choice
        self._untold += 1
        if seconds is not None:
            self._times.append(seconds)
        if paced.choice.num_steps:
            self._rows[self._num_rows : self._num_rows + len(result)] = result[:, :RESULT_COLUMNS]
            self._num_rows += len(result)

    def report(self) -> list[dict[str, Any]]:
        """The controller's, of every step retired so far."""
        self._tell()
        return self.controller.report()

    def _tell(self) -> None:
        """Tell the controller of the steps retired since the last time, all at once."""
        if not self._untold:
            return
        outcome = _outcome(self._rows[: self._num_rows], self._of.num_steps)
        outcome.steps, outcome.timed, outcome.seconds, outcome.times = self._untold, len(self._times), sum(self._times), self._times
        self._untold, self._times, self._num_rows = 0, [], 0
        self.controller.stepped(self._of, outcome)

    def _tell_alone(self, paced: Paced, result: np.ndarray, seconds: float | None, capture_s: float, following: Paced | None) -> None:
        """Tell of a step whose time is not the plain cost of its S: it captured, its drafter caught up, or the host spent part of it on a
        ``following`` step that does."""
        self._tell()
        outcome = _outcome(result, paced.choice.num_steps)
        outcome.capture_s, outcome.caught_up = capture_s, paced.catch_up > 0
        if seconds is not None:
            outcome.seconds, outcome.timed = seconds, 1
        if following is not None:
            outcome.caught_up |= following.catch_up > 0
            outcome.launching = following.choice.trial
        self.controller.stepped(paced.choice, outcome)


def _outcome(rows: np.ndarray, num_steps: int) -> Outcome:
    """One step's rows, reached and accepted by depth, or those of several: rows [n, columns] int32 that were alive on entry; none at S = 0."""
    if not num_steps:
        return Outcome(1)
    stopped = [0] * (2 * num_steps + 2)  # rows by accepted drafts, and by whether there was one more to try
    if len(rows) <= FEW:
        for row in rows.tolist():
            if row[ALIVE]:
                stopped[2 * row[ACCEPTED] + (row[CHILD_AT_END] > 0)] += 1
    else:
        places = (2 * rows[:, ACCEPTED] + (rows[:, CHILD_AT_END] > 0))[rows[:, ALIVE] > 0]
        stopped = np.bincount(places, minlength=len(stopped)).tolist()
    reached, accepted, beyond = [0] * num_steps, [0] * num_steps, 0
    for depth in range(num_steps, 0, -1):
        beyond += stopped[2 * depth] + stopped[2 * depth + 1]
        accepted[depth - 1] = beyond
        reached[depth - 1] = beyond + stopped[2 * depth - 1]
    return Outcome(1, beyond + stopped[0] + stopped[1], reached, accepted)
