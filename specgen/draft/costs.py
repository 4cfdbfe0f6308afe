"""What a decode step costs at each num_steps, learnt while a job runs on a machine that is not always equally fast.

Boundary: plain numbers, as ``draft.adaptive``, which says what it runs and takes the costs from here.

Only a few steps are ever timed of a num_steps S that is not in force, and long ago as often as not. Whatever slows the machine down for a while
(another process, the clock of a hot GPU) slows every S, so the time of one S now does not compare with the time of another then. What is kept of an S
is therefore its ratio to the pace of the steps around it, and the S in force tells the pace.

Where the host works beside the device, a step takes the longer of the two. The host takes the longer, the more tokens the step commits.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

RECENT = 17  # times of the S in force that the pace is taken from
FIRST = 9  # times of an S that came into force that go into its ratio
PRIOR = 8  # times that what was known of a ratio counts beside new ones
ENOUGH = 3  # times from which anything is taken at all
HOSTS = 32  # times of the host that are kept; an eighth of them, the longest, count as the longest of the rest
HOST_TOKENS = 250  # tokens that the host takes as long to account for (append, find ends, give pages, begin other rows) as for the rest of a step
Key = tuple[int, int]


@dataclass
class Pace:
    """One (bucket, context): ``seconds`` of a step of ratio 1 at present, 0 until known, and the ratio of each S.

    ``told_by``: the S in force. Its times tell the pace, but the ``FIRST`` ones (``held`` of them so far), which go into its ratio to the pace that
    the S before it told. ``times``: what the pace is taken from. ``samples``: what the ratios are taken from.
    """

    told_by: int
    held: int = FIRST
    seconds: float = 0.0
    ratios: dict[int, float] = field(default_factory=dict)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    samples: dict[int, list[float]] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)

    def add(self, num_steps: int, seconds: Sequence[float], in_force: bool) -> None:
        """Note times of steps of one S, in seconds."""
        if in_force and num_steps != self.told_by:
            self.told_by, self.held = num_steps, 0 if self.seconds else FIRST
            self.times.clear()
        if num_steps == self.told_by and self.held >= FIRST:
            self.times.extend(seconds)
            if len(self.times) >= ENOUGH:
                self.seconds = quartile(self.times) / self.ratios.setdefault(num_steps, 1.0)
        elif self.seconds:
            mine = num_steps == self.told_by
            samples = self.samples.get(num_steps, [])
            if not samples and num_steps in self.ratios:
                samples = [self.ratios[num_steps]] * PRIOR
            if not mine or not self.held:
                samples = samples[-PRIOR:]
            samples = self.samples[num_steps] = samples + [time / self.seconds for time in seconds]
            self.held += len(seconds) * mine
            if len(samples) >= ENOUGH:
                self.ratios[num_steps] = quartile(samples)

    def costs(self) -> dict[int, float]:
        """Seconds of a step of each S that has been timed."""
        return {num_steps: ratio * self.seconds for num_steps, ratio in self.ratios.items()}


class Host:
    """What the host takes for a step of one bucket beside the device, from its last ``HOSTS`` times: seconds of a step that commits no token, in
    order."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=HOSTS)
        self._sorted: list[float] = []
        self._sums = [0.0]  # of the longest 0, 1, 2, ... of them

    def add(self, seconds: Sequence[float], tokens: float) -> None:
        """Note times of steps of so many tokens."""
        share = _share(tokens)
        self._last.extend([each / share for each in seconds])
        known, longest = sorted(self._last), len(self._last) // 8
        self._sorted = known[: len(known) - longest] + [known[-1 - longest]] * longest
        self._sums = [0.0, *itertools.accumulate(reversed(self._sorted))]

    def beside(self, seconds: float, tokens: float) -> float:
        """Seconds of a step that takes the device so long and commits so many tokens: the mean of the longer of the two."""
        known, share = self._sorted, _share(tokens)
        shorter = bisect(known, seconds / share)
        return (shorter * seconds + share * self._sums[len(known) - shorter]) / len(known)


def _share(tokens: float) -> float:
    """How much longer the host takes for a step of so many tokens than for one of none."""
    return 1 + tokens / HOST_TOKENS


class Costs:
    """Seconds of a step by (bucket, context) and S: lower quartiles of the last few times, after the first, which may have compiled something: what
    disturbs a step mostly makes it longer, and a few steps are all that is known of an S at first."""

    def __init__(self) -> None:
        self._paces: dict[Key, Pace] = {}
        self._hosts: dict[int, Host] = {}

    def add_hosts(self, bucket: int, seconds: Sequence[float], tokens: float) -> None:
        """Note what the host took for steps of a bucket in which a row commits so many tokens, where it works beside the device."""
        if seconds:
            self._hosts.setdefault(bucket, Host()).add(seconds, bucket * tokens)

    def beside(self, bucket: int, seconds: float, tokens: float) -> float:
        """Seconds of a step of a bucket that takes the device so long, and in which a row commits so many tokens: the same where the host does not
        work beside it."""
        host = self._hosts.get(bucket)
        return seconds if host is None else host.beside(seconds, bucket * tokens)

    def add(self, key: Key, num_steps: int, seconds: Sequence[float], in_force: bool) -> None:
        """Note the times of timed steps. The first step ever only warms up, and so may others: what is not a plain cost is not among ``seconds``.
        ``in_force``: S is what its place decodes with, not a try."""
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(num_steps)
        if num_steps not in pace.warm:
            pace.warm.add(num_steps)
            seconds = seconds[1:]
        if seconds:
            pace.add(num_steps, seconds, in_force)

    def timed(self, key: Key) -> Collection[int]:
        """The S that have been timed often enough in a key."""
        pace = self._paces.get(key)
        return pace.ratios if pace is not None else ()

    def known(self, key: Key) -> dict[int, float]:
        """The measured times of a key, the host's apart."""
        pace = self._paces.get(key)
        return pace.costs() if pace is not None else {}

    @property
    def shaped(self) -> bool:
        """Whether two S have been measured somewhere, so that the others can be estimated."""
        return any(len(pace.ratios) > 1 for pace in self._paces.values())

    def ever(self, num_steps: int) -> bool:
        """Whether this S has been measured anywhere."""
        return any(num_steps in pace.ratios for pace in self._paces.values())

    def cost(self, key: Key, num_steps: int, tokens: Sequence[float]) -> float:
        """Measured or estimated seconds; with nothing measured in this key, those of the nearest one, or where there is none, a shape. ``tokens``:
        what a row commits in a step of each S up to ``num_steps``."""
        pace = self._paces.get(key)
        if pace is not None and num_steps in pace.ratios:
            return self.beside(key[0], pace.ratios[num_steps] * pace.seconds, tokens[num_steps])
        return self.all_costs(key, tokens[: num_steps + 1])[num_steps]

    def all_costs(self, key: Key, tokens: Sequence[float]) -> list[float]:
        """``cost`` of every S that ``tokens`` has."""
        known = self.known(key)
        if len(known) > 1:
            there = _on_lines(known, len(tokens))
        else:
            shape = self._nearest_shape(key)
            there = _on_lines(shape, len(tokens))
            if not known and not self.shaped:
                return there
            for timed, seconds in known.items():
                scale = seconds / _on_lines(shape, timed + 1)[timed]
                there = [scale * each for each in there]
        return [self.beside(key[0], seconds, each) for seconds, each in zip(there, tokens, strict=True)]

    def _nearest_shape(self, key: Key) -> dict[int, float]:
        others = [(other, pace) for other, pace in self._paces.items() if len(pace.ratios) > 1]
        if not others:
            return {0: 1.0, 10: 2.0}
        distance = lambda other: sum(abs(math.log(a / b)) for a, b in zip(other, key, strict=True))  # noqa: E731
        return min(others, key=lambda pair: distance(pair[0]))[1].costs()


def quartile(times: Iterable[float]) -> float:
    """The lower quartile, an element of ``times``."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


def _on_lines(known: dict[int, float], count: int) -> list[float]:
    """The values at 0 .. ``count`` - 1 of the lines through two neighbouring known points or, beyond them, the two nearest; none falls with S, nor
    below a quarter of the smallest S's known."""
    points, found, after = sorted(known), [], 1
    for steps in range(count):
        if steps in known:
            found.append(known[steps])
            continue
        while after < len(points) - 1 and points[after] < steps:
            after += 1
        low, high = points[after - 1], points[after]
        slope = max(0.0, (known[high] - known[low]) / (high - low))
        found.append(max(known[low] + slope * (steps - low), 0.25 * known[low]))
    return found
