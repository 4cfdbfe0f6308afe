"""Adaptive speculation inside the engine: asks the controller before each decode step, times the step, and reports what came of it.

Boundary: host bookkeeping between the engine and ``draft.adaptive``; no tensors but a retired step's numbers, already on the host. What a step's time
is: without overlap, that of the call. With overlap and graphs the host works on one step while the device runs another, and the longer of the two
decides. The device's time lies between its own marks (``engine.clock``), which no delay of the host makes shorter; the host's is the interval between
two retirements without what it waited for the device. With overlap and no graphs the launch is the step's work, and what else the host does adds to
it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from specgen.draft.adaptive import Choice, Outcome
from specgen.draft.base import Drafter
from specgen.engine.batch import Batch
from specgen.engine.flight import InFlight
from specgen.engine.graphs import StepGraphs, below, bucket_of, context_of
from specgen.kernels.reference_step import ACCEPTED, ALIVE

FEW = 8  # rows that a loop counts sooner than numpy does
UNTOLD_STEPS = 64  # so many are kept until they are told
TIMES = 16  # steps of a run that are timed until they are told: what the rest take is not worth a look at every step
HOST_TIMES = 8  # of the host are taken until they are told
PAIRED = 256  # rows of a run, or four steps where they have more, are compared with the step before until they are told
MANY, SPARSE = 32, 4  # of so many rows, the first four steps until they are told are kept and then one in four: the steps of a row are alike


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
    """One engine's choices. ``skipped``: steps launched without a draft since the drafter last ran. ``columns``: of a step's result.

    A choice holds for a run of steps, and what came of them is told together: with a small model a step is hardly longer than choosing and telling.
    """

    def __init__(
        self, controller: Controller, drafter: Drafter, graphs: StepGraphs | None, max_batch: int, limit: int, columns: int, overlap: int
    ) -> None:
        self.controller, self.drafter, self.graphs = controller, drafter, graphs
        self.max_batch, self.limit, self.overlap = max_batch, limit, overlap
        self.skipped = 0
        self._steps = drafter.num_steps  # the last S > 0
        self._last = 0.0  # when a step was last retired
        self._steady = False  # the step retired before was looked at, a decode step alone, and the next was launched by then
        self._run = Paced(Choice(0, 0, 0), 0)
        self._left = 0  # steps of the run that may still be launched
        self._decode: Any = None  # the rows of the last step, and their bucket and context
        self._key, self._shorter = (0, 0), 0  # ... and the longest row of the context below
        # Steps retired and not yet told, all of one choice.
        self._of = self._run.choice
        self._untold, self._times, self._hosts = 0, list[float](), list[float]()
        self._timed: Paced | None = None  # the run of which enough steps have been timed until they are told; ``_more``: steps of it since
        self._more = 0
        self._rows = np.zeros((UNTOLD_STEPS * max_batch, columns), np.int32)
        self._num_rows = 0
        # How many rows before each row lies the same one in the step before; 0 where that was not kept or had other rows.
        self._back = np.zeros(len(self._rows), np.int32)
        self._noted: Any = None  # the rows of the step kept last

    def pause(self) -> None:
        """The engine stood still for a while: the time until the next step is retired says nothing of the host."""
        self._steady = False

    def restart(self, controller: Controller) -> None:
        """Go on with another controller, which chooses the next step."""
        self._tell()
        self.controller, self._left = controller, 0

    def plan(self, batch: Batch) -> None:
        """Set the num_steps of a batch and what its drafter has to follow first."""
        run = self._run
        if batch.decode is self._decode and self._shorter < batch.max_len <= self._key[1] and self._left:
            self._left -= 1  # as the step before: nothing to decide
        else:
            run = self._planned(batch)
        batch.paced, batch.num_steps = run, run.choice.num_steps
        if not batch.num_steps:
            self.skipped += 1

    def _planned(self, batch: Batch) -> Paced:
        """The choice for a batch that is not the one before, or whose run is over."""
        self._decode = batch.decode
        self._key = bucket_of(len(batch.decode), self.max_batch), context_of(batch.max_len, self.limit)
        self._shorter = below(self._key[1])
        if self._left and self._key == self._run.choice[:2]:
            self._left -= 1
            return self._run
        self._tell()
        choice = self.controller.choose(*self._key)
        self._left, self._run = choice.more, Paced(choice, 0)
        if not choice.num_steps:
            return self._run
        if choice.num_steps != self._steps:
            self.drafter.use_steps(choice.num_steps)
            self._steps = choice.num_steps
        skipped, self.skipped, batch.catch_up = self.skipped, 0, self.skipped
        return Paced(choice, skipped) if skipped else self._run

    def undo(self, batch: Batch) -> None:
        """A batch that was planned has not been launched."""
        self.skipped += batch.catch_up if batch.num_steps else -1
        self._left = 0  # what the batch was to catch up with is planned with a choice

    def retired(self, flight: InFlight, newest: InFlight | None, start: float) -> None:
        """A step was retired while ``newest`` was the last one launched, None where nothing is in flight; the call of ``Engine.step`` began at
        ``start``."""
        batch = flight.batch
        known = self._timed is not None and batch.paced is self._timed and self._untold < UNTOLD_STEPS
        if known and not (batch.chunks or flight.capture_s):
            self._untold += 1
            self._more += 1
            self._steady = False
            self._note_rows(flight)
            return
        seconds, host = flight.decode_s, None
        if not self.overlap:
            seconds = time.perf_counter() - start if seconds is not None and not batch.chunks else None
        elif self.graphs is None or self.graphs.off:
            # What is launched kernel by kernel, or runs on a CPU, is the host's work too: the rest of its loop comes on top.
            host = self._host_time(flight, newest)
            seconds = None if host is None or seconds is None or newest is None else seconds + max(0.0, host - newest.launch_s)
            host = None
        elif len(self._hosts) < HOST_TIMES and not known:
            host = self._host_time(flight, newest)
        else:
            self._steady = False
        paced, landed = batch.paced, flight.decode_result
        if paced is None or landed is None:
            return
        if paced.catch_up or flight.capture_s:
            self._tell_alone(paced, landed.np[: len(batch.decode)], seconds, flight.capture_s)
            return
        if paced.choice is not self._of or self._untold == UNTOLD_STEPS:
            self._tell()
            self._of = paced.choice
        self._untold += 1
        if host is not None:
            self._hosts.append(host)
        if seconds is not None:
            self._times.append(seconds)
            if len(self._times) >= TIMES:
                self._timed = paced
        self._note_rows(flight)

    def _note_rows(self, flight: InFlight) -> None:
        """Keep what came of each row of a step until it is told: of many rows, of some steps, and of a step without a draft nothing. Tell of a run
        whose last step has been launched."""
        decode = flight.batch.decode
        if flight.batch.num_steps:
            if len(decode) < MANY or self._untold <= SPARSE or not self._untold % SPARSE:
                assert flight.decode_result is not None
                begin = self._num_rows
                self._num_rows = end = begin + len(decode)
                self._rows[begin:end] = flight.decode_result.np[: end - begin]
                self._back[begin:end] = end - begin if decode is self._noted else 0
                self._noted = decode
            else:
                self._noted = None
        if not self._left:
            self._tell()  # now, and not in the next call, which has to choose: a small model's step leaves the host time for one of them

    def _host_time(self, flight: InFlight, newest: InFlight | None) -> float | None:
        """What the host took since the last retirement, where it did nothing but launch and retire plain decode steps."""
        now = time.perf_counter()
        seconds, self._last = now - self._last - flight.waited_s, now
        steady, batch = self._steady, flight.batch
        if newest is None or batch.chunks or not batch.decode:
            self._steady = False
            return None
        latest = newest.batch
        self._steady = bool(latest.decode)
        return None if not steady or not latest.decode or latest.chunks or latest.catch_up or newest.capture_s else seconds

    def report(self) -> list[dict[str, Any]]:
        """The controller's, of every step retired so far."""
        self._tell()
        return self.controller.report()

    def _tell(self) -> None:
        """Tell the controller of the steps retired since the last time, all at once."""
        if not self._untold:
            return
        outcome = _outcome(self._rows[: self._num_rows], self._of.num_steps, self._back[: self._num_rows])
        outcome.times, outcome.hosts = self._times, self._hosts
        outcome.steps, outcome.timed, outcome.seconds = self._untold, len(self._times), sum(self._times)
        if self._more:  # those that were not looked at took as long as most of the others
            outcome.seconds += self._more * median(self._times)
            outcome.timed += self._more
        self._untold, self._times, self._hosts, self._num_rows, self._noted = 0, [], [], 0, None
        self._timed, self._more = None, 0
        self._told(self._of, outcome)

    def _tell_alone(self, paced: Paced, result: np.ndarray, seconds: float | None, capture_s: float) -> None:
        """Tell of a step whose time is not the plain cost of its S: its drafter caught up, or it captured, which is all that is known of its time."""
        self._tell()
        outcome = _outcome(result, paced.choice.num_steps)
        outcome.capture_s, outcome.caught_up = capture_s, paced.catch_up > 0
        if seconds is not None or capture_s:
            outcome.seconds, outcome.timed = capture_s if seconds is None else seconds, 1
        self._told(paced.choice, outcome)

    def _told(self, choice: Choice, outcome: Outcome) -> None:
        """Tell the controller. What that takes is not counted with the host's part of a step."""
        begun = time.perf_counter()
        self.controller.stepped(choice, outcome)
        self._last += time.perf_counter() - begun


def _outcome(rows: np.ndarray, num_steps: int, back: np.ndarray | None = None) -> Outcome:
    """What came of one step's rows, or of those of several: rows [n, columns] int32 that were alive on entry; none are counted at S = 0.

    ``back`` [n] int32: how many rows before each lies the same one, a step earlier; 0 for nowhere.
    """
    if not num_steps:
        return Outcome(1)
    stopped = [0] * (num_steps + 1)  # rows by accepted drafts
    if len(rows) <= FEW:
        for row in rows.tolist():
            stopped[row[ACCEPTED]] += row[ALIVE] > 0
    else:
        stopped = np.bincount(rows[:, ACCEPTED][rows[:, ALIVE] > 0], minlength=len(stopped)).tolist()
    accepted, beyond = [0] * num_steps, 0
    for depth in range(num_steps, 0, -1):
        beyond += stopped[depth]
        accepted[depth - 1] = beyond
    return Outcome(1, beyond + stopped[0], accepted, () if back is None else _pairs(rows, back))


def _pairs(rows: np.ndarray, back: np.ndarray) -> tuple[int, int, int, int]:
    """Of rows that were alive in two steps, one after the other: how many, the sum of the drafts accepted in both, of their squares, of the
    products."""
    if len(rows) <= FEW:
        kept, found = rows.tolist(), enumerate(back.tolist())
        pairs = [(kept[i - far], kept[i]) for i, far in found if far and kept[i][ALIVE] and kept[i - far][ALIVE]]
        some = [(before[ACCEPTED], after[ACCEPTED]) for before, after in pairs]
        return len(some), sum(a + b for a, b in some), sum(a * a + b * b for a, b in some), sum(a * b for a, b in some)
    most = max(PAIRED, 4 * int(back.max()))
    rows, back = rows[:most], back[:most]
    later = np.flatnonzero(back)
    accepted = np.where(rows[:, ALIVE] > 0, rows[:, ACCEPTED], -1)
    x, y = accepted[later - back[later]], accepted[later]
    both = np.minimum(x, y) >= 0
    x, y = x[both].astype(float), y[both].astype(float)
    return len(x), int(x.sum() + y.sum()), int(x @ x + y @ y), int(x @ y)
