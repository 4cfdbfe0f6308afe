"""How many tokens a step commits at each num_steps, learnt from steps that ran at one of them.

Boundary: plain numbers, as ``draft.adaptive``, which says what came of its steps and takes the expected tokens from here.

The steps of a run are no sample of its text. A row that is easy to draft passes its text in few steps, so that the steps that run are mostly those of
harder rows, the more so the longer the drafts are. Of steps that drafted 5 tokens, the acceptances promise too much of 7, which would pass the easy
rows in fewer steps still, and too little of 3. How much too much depends on how alike the steps of a row are: not at all where each is as good as
any other, and all of it where a row is always accepted as far as it was before. Between the two lies their correlation, which is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

HORIZON = 512  # row steps after which an observation counts 1/e
STEPS = 64  # ... but so many steps at least: all rows of a wide batch may be at their beginning
SOFT = 8  # row steps the past is worth when a probe begins
PAIRS = 8192  # pairs of steps of one num_steps from which on the older count less
UNLIKE = 64  # pairs of steps that are nothing alike, counted before any


class Acceptance:
    """Conditional acceptance by depth, with exponential forgetting. Depths no draft came to lately fade towards the rate of the depth before.

    A step comes to a depth when it accepted the depth before; one without a draft there (prompt lookup found nothing, a tree was cut) accepts none.

    Kept as sums in units that grow by e every ``HORIZON`` row steps (or ``STEPS`` steps): a new observation costs one addition a depth, and nothing
    old is touched.
    """

    def __init__(self, depths: int) -> None:
        self._came, self._accepted, self._unit = [0.0] * depths, [0.0] * depths, 1.0
        self._under = 0.0  # the num_steps in force, summed over the row steps
        self._steps = 0

    @property
    def came(self) -> list[float]:
        """Row steps that came to each depth, forgotten ones taken off: all to the first."""
        return [value / self._unit for value in self._came]

    @property
    def accepted(self) -> list[float]:
        """Of them, those whose draft was accepted."""
        return [value / self._unit for value in self._accepted]

    @property
    def under(self) -> float:
        """The num_steps in force, on average over the row steps."""
        return self._under / self._came[0] if self._came[0] else 0.0

    def add(self, steps: int, rows: int, accepted: Sequence[int], under: int) -> None:
        """Count ``rows`` row steps of ``steps`` steps; ``accepted``: those of them whose draft was accepted, by depth. Those told together fade
        against each other as if they had come one by one, in an order that nobody knows. ``under``: the num_steps in force, which decides what rows
        the steps are of."""
        told = min(rows / HORIZON, steps / STEPS)
        past = min(told, 100.0)
        unit = self._unit = self._unit * math.exp(past)
        weight = unit * -math.expm1(-past) / told
        self._steps += steps
        self._under += under * rows * weight
        came = rows
        for depth, number in enumerate(accepted):
            self._came[depth] += came * weight
            self._accepted[depth] += number * weight
            came = number
        if unit > 1e100:
            self._scale(1.0)

    def soften(self) -> None:
        """Let the past count no more than ``SOFT`` row steps, so that a few new ones can change it."""
        rows = self.came[0]
        if rows > SOFT:
            self._scale(SOFT / rows)

    def _scale(self, keep: float) -> None:
        factor = keep / self._unit
        self._came, self._accepted = [c * factor for c in self._came], [a * factor for a in self._accepted]
        self._under, self._unit = self._under * factor, 1.0

    @property
    def optimism(self) -> float:
        """By how much drafts may turn out to be accepted more often: (a + its standard error) / a of the first depth. The rows of a step are not
        independent, they may all be at their beginning: at first a step counts as one observation."""
        rows = self.came[0] + 1
        rate = (self.accepted[0] + 0.5) / rows
        return 1 + math.sqrt((1 - rate) / (rate * min(rows, self._steps + 1)))

    def _chances(self) -> list[float]:
        """The chance that a step accepts at least 0, 1, 2, ... drafts: the products of the rates. Each rate has the one before as its prior."""
        found, rate = [1.0], 0.5
        for came, accepted in zip(self.came, self.accepted, strict=True):
            rate = (accepted + rate) / (came + 1)
            found.append(found[-1] * rate)
        return found

    def expected(self, alike: float = 0.0) -> list[float]:
        """Tokens that a row commits in a step of each num_steps 0, 1, 2, ..., were it in force.

        ``alike``: the correlation of a row's steps. At 0 they are a sample of the text: 1 + the sum of the chances. At 1 a step says how far each
        step of its row is accepted, j drafts: at u in force a row is seen in proportion to 1 / (min(j, u) + 1) of its text, so that over the steps
        S gives E[min(j, u) + 1] / E[(min(j, u) + 1) / (min(j, S) + 1)]. Both are exact at S = u.
        """
        chances = self._chances()
        totals, total = [], 0.0
        for chance in chances:
            total += chance
            totals.append(total)
        if not alike or not self._came[0]:
            return totals
        under = self.under
        text = [(chance - beyond) * (min(j, under) + 1) for j, (chance, beyond) in enumerate(zip(chances, [*chances[1:], 0.0], strict=True))]
        left = whole = sum(text)  # of the text, that of steps which accept more than S drafts
        steps = 0.0  # that the rest of the text takes
        for s, tokens in enumerate(text):
            left -= tokens
            steps += tokens / (s + 1)
            totals[s] += alike * (whole / (steps + left / (s + 1)) - totals[s])
        return totals


class Likeness:
    """How alike the steps of a row are: the correlation of the accepted drafts of two steps, one after the other.

    Compared are steps of one num_steps with each other, for one accepts more than another. That of a few pairs is taken for less than it is.
    """

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # by num_steps: pairs, the sum of both, of both squared, of the products

    def add(self, num_steps: int, pairs: Sequence[int]) -> None:
        """Count pairs of one num_steps: how many, the sum of their accepted drafts, of the squares of those, of the products."""
        if not pairs or not pairs[0]:
            return
        sums = [a + b for a, b in zip(self._sums.get(num_steps, [0.0] * 4), pairs, strict=True)]
        self._sums[num_steps] = [each / 2 for each in sums] if sums[0] > PAIRS else sums

    @property
    def alike(self) -> float:
        """The correlation, 0 to 1."""
        shared = spread = number = 0.0
        for pairs, total, squares, products in self._sums.values():
            middle = total * total / (4 * pairs)
            shared, spread, number = shared + products - middle, spread + squares / 2 - middle, number + pairs
        return min(1.0, max(0.0, shared / spread)) * number / (number + UNLIKE) if spread > 0 else 0.0
