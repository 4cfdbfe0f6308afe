"""How many tokens to draft, chosen while a job runs: measured step times, tracked acceptance, and probes that cost next to nothing.

Boundary: plain numbers. No torch, no clock, no engine: the engine says which batch it is about to run and, later, how long that took and what was
accepted. A step is known by its batch bucket, its context bucket and its num_steps S; S = 0 is plain decoding.

The choice maximises (1 + sum over d <= S of a_1 ... a_d) / cost(S), a_d being the conditional acceptance at depth d and the sum corrected for what
steps of another S than the one in force say of it (``draft.acceptance``). What has not been measured is estimated: costs by straight lines between
the known ones or by the shape known from the nearest other bucket, deep acceptances by the depth before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specgen.draft.acceptance import Acceptance, Likeness
from specgen.draft.costs import Costs, Key

PERIOD = 8  # decode steps between decisions at first and in a trial
CALM = 64  # ... once a place has kept its S for a few of them
PLAIN = 128  # ... at S = 0, which only a probe can end
FEW = 4  # decisions after which a place is calm
BURST = 4  # steps of a probe
PROBE_SHARE = 0.005  # of the time may be lost to probing from S = 0
TRIAL = 64  # steps after leaving S = 0 whose losses still count as the probe's
GAIN = 1.01  # how much better a choice must be to replace the current one
SURE_GAIN = 1.1  # ... when it has never been timed here
LATER, RARELY = 8, 32  # bursts that must have been earned for another look at a neighbour of the choice, and at the rest
SELDOM = 4  # ... at first at the rest
LOST = 0.25  # of a step in force is lost in each step of a look, at the least: it takes the host two more choices, and what they are told
PATIENCE = 100  # an exploration may cost one part in so many of the time spent in its bucket
FIRST_LOOK = 30  # ... and the first look at a draft from S = 0, where it may be better


class Choice(NamedTuple):
    """What a step was chosen to be. ``trial``: its losses are paid from the probing budget. ``more``: so many further steps are the same without
    asking again, as long as bucket and context stay."""

    bucket: int
    context: int
    num_steps: int
    trial: bool = False
    more: int = 0

    @property
    def key(self) -> Key:
        """Where costs are compared: (bucket, context)."""
        return self[:2]


@dataclass
class Outcome:
    """What came of one step, or of ``steps`` of one choice together. rows: live rows, summed over the steps that were looked at, which of many rows
    are not all; accepted: those of them whose draft was accepted, by depth; at S = 0 none are counted. ``pairs``: of two steps of a row, one after
    the other, how many there were, the sum of the drafts both accepted, of the squares of those, and of the products; empty where none were looked
    for.

    seconds: of the ``timed`` steps. ``times``: of some that are the plain cost of such a step, each. ``hosts``: what the host alone took for some,
    where it works beside the device. ``caught_up``: the drafter was brought up to date in it; ``capture_s``: seconds of it that went into a graph
    capture. Such steps come one at a time.
    """

    steps: int
    rows: int = 0
    accepted: Sequence[int] = ()
    pairs: Sequence[int] = ()
    seconds: float = 0.0
    timed: int = 0
    times: Sequence[float] = ()
    hosts: Sequence[float] = ()
    caught_up: bool = False
    capture_s: float = 0.0


class View(NamedTuple):
    """What is known of a place, by S: tokens a row is expected to commit in a step, seconds of one, their ratio, and which S have been timed here."""

    tokens: list[float]
    costs: list[float]
    rates: list[float]
    timed: Collection[int]


@dataclass
class Place:
    """Where a (bucket, context) stands. ``home``: the S in force; ``left``: steps to go until the next decision. ``looked``: ``seconds`` at the last
    try of an S that was not in force, ``rare``: bursts that its next one must have earned at the most. ``kept``: decisions since ``home`` changed.
    ``news``: something was learnt since the last decision at S = 0, where a step teaches nothing; ``first_look``: the draft has not been seen here
    and may be no loss."""

    home: int
    left: int
    seconds: float = 0.0
    looked: dict[int, float] = field(default_factory=dict)
    rare: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    news: bool = True
    first_look: bool = False


@dataclass
class Spent:
    """Steps and seconds of one (bucket, S), and the context bucket it last ran in."""

    steps: int = 0
    seconds: float = 0.0
    context: int = 0


@dataclass
class AdaptiveController:
    """Chooses S for each step, 0 to ``max_steps``."""

    max_steps: int
    costs: Costs = field(default_factory=Costs)
    places: dict[Key, Place] = field(default_factory=dict)
    spent: dict[tuple[int, int], Spent] = field(default_factory=dict)
    credit: float = 0.0  # seconds that probing may cost
    price: float = math.inf  # what the next probe is expected to cost
    trial_left: int = 0
    capture_s: float = 0.0  # of the last graph capture
    catch_ups: deque[float] | None = None  # seconds of the last ones; None until there was one, which may have compiled something

    def __post_init__(self) -> None:
        self.acceptance, self.likeness = Acceptance(self.max_steps), Likeness()

    @property
    def tokens(self) -> list[float]:
        """What a row is expected to commit in a step of each S."""
        return self.acceptance.expected(self.likeness.alike)

    @property
    def catch_up_s(self) -> float:
        """What catching up is expected to take."""
        return sorted(self.catch_ups)[len(self.catch_ups) // 2] if self.catch_ups else 0.0

    # -- before a step --------------------------------------------------------------------------------------------------------------------

    def choose(self, bucket: int, context: int) -> Choice:
        """The S of the next decode steps of a batch.

        Of what was chosen before, the last step may be untold, for the host is one step behind.
        """
        key = bucket, context
        place = self.places.get(key)
        if place is None:
            home = self.max_steps if not self.places else max(range(self.max_steps + 1), key=self._view(key).rates.__getitem__)
            place = self.places[key] = Place(home, left=PERIOD)
        if place.left <= 1:
            burst = 0
            if place.home or place.news or self._may_probe(place):
                place.news = False
                view = self._view(key)
                self._decide(place, view)
                burst, steps, trial = self._explore(place, view)
            calm = PERIOD if place.kept < FEW or self.trial_left else CALM
            if burst:
                # Decide once the last step of the burst is known, or, where it is not likely to change anything, with the next decision.
                place.left, place.news = burst + (2 if trial or calm < CALM else CALM), True
                return Choice(bucket, context, steps, trial, burst - 1)
            untimed = place.home == 0 and 0 not in self.costs.timed(key)
            place.left = calm if place.home or untimed else PLAIN
            place.news |= untimed  # its cost will be
        trial = place.home > 0 and self.trial_left > 0
        self.trial_left = max(0, self.trial_left - place.left * trial)
        return Choice(bucket, context, place.home, trial, place.left - 1)

    def _view(self, key: Key) -> View:
        tokens = self.tokens
        costs = self.costs.all_costs(key, tokens)
        return View(tokens, costs, [each / cost for each, cost in zip(tokens, costs, strict=True)], self.costs.timed(key))

    def _decide(self, place: Place, view: View) -> None:
        """Move to the best S when it is clearly better than the one in force."""
        place.kept += 1
        rates, costs = view.rates, view.costs
        best = max(range(self.max_steps + 1), key=rates.__getitem__)
        if best == 0 < place.home:
            # From S = 0 the way back is slow: it has to be better than the draft may turn out to be.
            maybe, drafts = self.acceptance.optimism, range(1, self.max_steps + 1)
            if max(1 / costs[s] + maybe * (rates[s] - 1 / costs[s]) for s in drafts) > rates[0]:
                best = max(drafts, key=rates.__getitem__)
        gain = rates[best] / rates[place.home]
        untimed = best not in view.timed
        if best == place.home or (best and gain < GAIN) or (untimed and gain < SURE_GAIN and place.seconds < PATIENCE * self.capture_s):
            return
        if place.home == 0:
            self.trial_left = TRIAL
        place.home, place.kept = best, 0

    def _explore(self, place: Place, view: View) -> tuple[int, int, bool]:
        """What to try that is not in force, as (steps of the burst, S, whether it is a trial), no steps for nothing: the best S > 0 from S = 0 when
        the budget allows; S = 0, or one step more where that was never timed, which may be better; what was timed in a few steps only, again."""
        if place.home == 0:
            return self._probe(place, view)
        tokens, costs, rates, timed = view
        now, more = costs[place.home], min(place.home + 1, self.max_steps)
        # What may be better: no draft, at nine tenths of its known cost or three quarters of the estimate; one step more, never timed, at no cost.
        wanted = [(0, LATER)] if (1.1 if 0 in timed else 1.33) * rates[0] > rates[place.home] else []
        if not self.costs.shaped:
            wanted = [(place.home // 2, 1)]  # a second point, from which the others' costs are estimated
        wanted += [(more, 1)] if more not in timed and tokens[more] > GAIN * tokens[place.home] else []
        # And what is known, lest the few steps it was timed in misled: soon at first, then the neighbours now and then and the others rarely.
        again = sorted((steps for steps in timed if 0 < steps != place.home), key=lambda steps: place.looked.get(steps, 0.0))
        wanted += [(steps, LATER if abs(steps - place.home) == 1 else RARELY) for steps in again]
        for steps, weight in wanted:
            # A cost that is out of proportion was measured in a bad moment: a step grows no faster than the tokens it drafts and verifies.
            there = min(costs[steps], now * max(1.0, (steps + 1) / (place.home + 1)))
            loss = max(LOST * now, there - now * tokens[steps] / tokens[place.home])
            rare = place.rare.get(steps, 1 if weight < RARELY else SELDOM)
            price = min(weight, rare) * BURST * loss + (0.0 if steps in timed else self.capture_s)
            price += 0.0 if steps else max(self.catch_up_s, now)  # on the way back
            if place.seconds - place.looked.get(steps, 0.0) > PATIENCE * price or not self.costs.shaped or (steps == 0 and not self.costs.ever(0)):
                place.looked[steps], place.rare[steps] = place.seconds, min(2 * rare, RARELY)
                return BURST, steps, False
        return 0, 0, False

    def _may_probe(self, place: Place) -> bool:
        """Whether there is time to draft from S = 0, as far as the last look at it tells."""
        return self.credit >= self.price or (place.first_look and place.seconds > FIRST_LOOK * self.price)

    def _probe(self, place: Place, view: View) -> tuple[int, int, bool]:
        """Draft for a few steps from S = 0: when the budget pays for the expected loss, and once early in each place where it may well be no loss."""
        tokens, costs, rates, timed = view
        plain, best = costs[0], max(range(1, self.max_steps + 1), key=rates.__getitem__)
        loss = BURST * max(costs[best] - tokens[best] * plain, 0.05 * plain)
        self.price = loss + max(self.catch_up_s, plain) + (0.0 if best in timed else self.capture_s)
        place.first_look = not any(timed) and 1.33 * rates[best] > rates[0]
        if not self._may_probe(place):
            return 0, 0, False
        self.acceptance.soften()
        return BURST, best, True

    # -- after a step ---------------------------------------------------------------------------------------------------------------------

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """Take in what came of a step, or of several of one choice."""
        spent = self.spent.get((choice.bucket, choice.num_steps))
        if spent is None:
            spent = self.spent[choice.bucket, choice.num_steps] = Spent()
        spent.steps += outcome.steps
        spent.context = choice.context
        place = self.places.get(choice.key)
        if place is not None:
            place.left -= outcome.steps
        if outcome.capture_s:
            self.capture_s = outcome.capture_s
        if choice.num_steps and outcome.rows:
            under = choice.num_steps if place is None else place.home
            self.acceptance.add(outcome.steps, outcome.rows, outcome.accepted, under)
            self.likeness.add(choice.num_steps, outcome.pairs)
        if not outcome.timed:
            return
        self.costs.add(choice.key, choice.num_steps, outcome.times, place is None or choice.num_steps == place.home)
        committed = 1 + sum(outcome.accepted) / (outcome.rows or 1)
        self.costs.add_hosts(choice.bucket, outcome.hosts, committed)
        seconds = outcome.timed * self.costs.beside(choice.bucket, outcome.seconds / outcome.timed, committed)
        spent.seconds += seconds
        if place is not None:
            place.seconds += seconds
        self._pay(choice, outcome, seconds, committed)

    def _pay(self, choice: Choice, outcome: Outcome, seconds: float, committed: float) -> None:
        """Keep the probing budget: it grows with the time, a trial's loss against plain decoding is taken off, and two probes' price is the most."""
        self.credit += PROBE_SHARE * seconds
        if choice.trial:
            self.credit -= seconds - outcome.timed * committed * self.costs.cost(choice.key, 0, [1.0])
        if outcome.caught_up and self.catch_ups is None:
            self.catch_ups = deque(maxlen=3)
        elif self.catch_ups is not None and outcome.caught_up and not outcome.capture_s:
            self.catch_ups.append(max(0.0, seconds - self.costs.cost(choice.key, choice.num_steps, self.tokens)))
        self.credit = min(self.credit, 2 * self.price)

    def report(self) -> list[dict[str, Any]]:
        """What was chosen and why: for each (bucket, S) its steps, the seconds they took, the cost of one, and the tokens a row is expected to commit
        in it. ``cost_ms`` is None where it was never measured."""
        rows, tokens = [], self.tokens
        for (bucket, steps), spent in sorted(self.spent.items()):
            key = bucket, spent.context
            cost = self.costs.cost(key, steps, tokens) if steps in self.costs.timed(key) else None
            rows.append(
                {
                    "bucket": bucket,
                    "num_steps": steps,
                    "seconds": spent.seconds,
                    "steps": spent.steps,
                    "cost_ms": None if cost is None else 1000 * cost,
                    "expected_tokens": tokens[steps],
                }
            )
        return rows
