"""What steps of one num_steps say of the others: rows whose text is easy to draft pass it in fewer steps, and longer drafts make that more so."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from specgen.draft.acceptance import PAIRS, UNLIKE, Acceptance, Likeness
from specgen.draft.adaptive import BURST, AdaptiveController, Choice, Outcome
from specgen.engine.pacing import FEW, PAIRED, _outcome
from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END, RESULT_COLUMNS
from specgen.types import SamplingParams
from tests.harness import drive, engine_of, requests_of
from tests.test_adaptive import PROMPTS, Device, Script, memory_bound

MOST = 8


def by_depth(accepted: Sequence[int], num_steps: int) -> list[int]:
    """Of row steps that accepted so many drafts, those that accepted each depth."""
    return [sum(j > depth for j in accepted) for depth in range(num_steps)]


def seen(steps: dict[int, int], num_steps: int) -> Acceptance:
    """``steps[j]`` row steps that accepted j drafts each, at ``num_steps``; nothing forgotten, and priors that do not count."""
    found, rows = Acceptance(MOST), [j for j, number in steps.items() for _ in range(number)]
    found.add(1, 1000 * len(rows), [1000 * n for n in by_depth(rows, num_steps)], num_steps)
    return found


@pytest.mark.parametrize("under", [1, 3, 5, 8])
def test_rows_that_are_always_accepted_as_far_as_before_are_known_exactly(under: int) -> None:
    """A row that accepts j drafts at the most passes its 840 tokens in 840 / (min(j, S) + 1) steps; what lies beyond ``under`` is not seen."""
    lengths = [0, 0, 1, 2, 4, 6] if under == 8 else [0, 0, 1, min(2, under)]
    steps = {j: sum(840 // (length + 1) for length in lengths if length == j) for j in set(lengths)}
    told = seen(steps, under).expected(1.0)
    for s in range(under + 1):
        assert told[s] == pytest.approx(840 * len(lengths) / sum(840 / (min(length, s) + 1) for length in lengths), rel=2e-3)


def test_steps_that_are_a_sample_of_the_text_give_the_sum_of_the_chances() -> None:
    """One rate at all depths, and no step like another."""
    found = Acceptance(MOST)
    found.add(1, 10**9, [10**9 * 3 ** (d + 1) // 4 ** (d + 1) for d in range(5)], 5)
    for alike in (0.0, 1e-9):
        assert found.expected(alike)[:6] == pytest.approx([sum(0.75**d for d in range(s + 1)) for s in range(6)], rel=1e-6)
    assert Acceptance(2).expected(0.5) == [1.0, 1.5, 1.75]


@pytest.mark.parametrize("under", [1, 2, 5, 8])
def test_what_is_in_force_is_expected_to_commit_what_it_does(under: int) -> None:
    """However alike the steps are. Longer drafts commit less than the chances say, shorter ones more, by more the more alike; never less with S."""
    draw = random.Random(under)
    rows = [min(under, int(draw.choice([0.2, 6.0]) * draw.expovariate(1.0))) for _ in range(600)]
    found = seen({j: rows.count(j) for j in set(rows)}, under)
    before = found.expected()
    for alike in (0.2, 0.5, 1.0):
        told = found.expected(alike)
        assert told[0] == pytest.approx(1.0) and told[under] == pytest.approx(1 + sum(rows) / len(rows), rel=2e-3)
        assert all(a < b for a, b in itertools.pairwise(told))
        assert all(new > old for new, old in zip(told[1:under], before[1:under], strict=True))
        assert all(new < old for new, old in zip(told[under + 1 :], before[under + 1 :], strict=True))
        before = told


def test_the_num_steps_in_force_is_that_of_the_steps_which_are_remembered() -> None:
    found = Acceptance(2)
    assert found.under == 0.0
    found.add(640, 640 * 64, [0, 0], 1)
    assert found.under == pytest.approx(1.0)
    found.add(64, 64 * 64, [4096, 0], 5)  # one horizon
    assert found.under == pytest.approx(5 - 4 * math.exp(-1), rel=1e-3)
    before = found.under
    found.soften()
    assert found.under == pytest.approx(before) and found.came[0] == pytest.approx(8.0) and found.expected()[1] > 1.5


def test_a_step_without_a_draft_commits_one_token_and_counts() -> None:
    """Prompt lookup found nothing for half of the rows: the other half accepts both drafts of two."""
    found = Acceptance(2)
    found.add(1, 2 * 10**6, [10**6, 10**6], 2)
    assert found.expected() == pytest.approx([1.0, 1.5, 2.0], rel=1e-5)
    assert found.expected(1.0) == pytest.approx([1.0, 1.6, 2.0], rel=1e-5)


def test_what_is_remembered_stays_finite_however_long_a_job_is() -> None:
    found = Acceptance(3)
    for _ in range(2000):
        found.add(64, 64 * 64, [2048, 1024, 512], 3)
    assert found.came == pytest.approx([4096.0, 2048.0, 1024.0]) and found.under == pytest.approx(3.0)
    assert found.expected() == pytest.approx([1.0, 1.5, 1.75, 1.875], rel=1e-3)


# -- how alike ----------------------------------------------------------------------------------------------------------------------------------


def sums_of(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """What is told of pairs of steps: how many, the sum of both, of both squared, of the products."""
    return len(pairs), sum(a + b for a, b in pairs), sum(a * a + b * b for a, b in pairs), sum(a * b for a, b in pairs)


def pairs_of(steps: Sequence[int]) -> tuple[int, int, int, int]:
    """What is told of a row's successive steps."""
    return sums_of([*itertools.pairwise(steps)])


def test_the_steps_of_a_row_are_as_alike_as_they_correlate() -> None:
    draw = random.Random(1)
    for same in (0.0, 0.4, 1.0):
        likeness, steps = Likeness(), [0]
        for _ in range(6000):
            steps.append(steps[-1] if draw.random() < same else draw.randrange(4))
        for part in (steps[:3000], [5] * 10, steps[2999:]) if same < 1 else ([0] * 3001, [3] * 3001):
            likeness.add(3, pairs_of(part))
        assert likeness.alike == pytest.approx({0.0: 0.0, 0.4: 0.4, 1.0: 1.0}[same], abs=0.05)


def test_steps_of_different_num_steps_are_not_compared_and_few_pairs_say_little() -> None:
    likeness = Likeness()
    assert likeness.alike == 0.0
    likeness.add(0, ())
    likeness.add(4, (0, 0, 0, 0))
    likeness.add(1, pairs_of([1] * 101))
    likeness.add(5, pairs_of([5] * 101))
    assert likeness.alike == 0.0, "neither varies"
    for steps in ([1, 0] * 50 + [1], [5, 4] * 50 + [5]):
        likeness.add(max(steps), pairs_of(steps))
    assert likeness.alike == 0.0, "one is never as the one before"
    few = Likeness()
    few.add(3, pairs_of([0, 0, 3, 3, 0, 0, 3, 3, 3]))
    number, x, squares, products = pairs_of([0, 0, 3, 3, 0, 0, 3, 3, 3])
    plain = (products - x * x / (4 * number)) / (squares / 2 - x * x / (4 * number))
    assert (number, UNLIKE) == (8, 64) and few.alike == pytest.approx(plain / 9) and 0 < plain < 1


def test_pairs_of_long_ago_count_less() -> None:
    draw = random.Random(2)
    likeness = Likeness()
    for _ in range(20):
        likeness.add(3, pairs_of([3 * (i // 500 % 2) for i in range(PAIRS)]))
    assert likeness.alike > 0.98
    for _ in range(6):
        likeness.add(3, pairs_of([draw.randrange(4) for _ in range(PAIRS)]))
    assert likeness.alike < 0.1


# -- what the controller is told, and chooses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "steps"), [(1, 3), (1, FEW), (1, 40), (2, 4), (3, 3), (7, 9), (64, 12), (64, 40), (100, 5), (256, 8), (300, 2)])
def test_pairs_are_two_steps_of_a_row_that_lived_in_both(batch: int, steps: int) -> None:
    """Against a plain count, the rows changing now and then; of a long run the first rows, but four steps of them."""
    draw = random.Random(batch * steps)
    rows = np.zeros((batch * steps, RESULT_COLUMNS), np.int32)
    back = np.zeros(len(rows), np.int32)
    expected: list[tuple[int, int]] = []
    for step in range(steps):
        same = step > 0 and draw.random() < 0.8
        for row in range(batch):
            i = step * batch + row
            rows[i, ACCEPTED], rows[i, ALIVE], rows[i, CHILD_AT_END] = draw.randrange(4), draw.random() < 0.8, 1
            back[i] = batch * same
            if same and rows[i, ALIVE] and rows[i - batch, ALIVE] and i < max(PAIRED, 4 * batch):
                expected.append((int(rows[i - batch, ACCEPTED]), int(rows[i, ACCEPTED])))
    told = _outcome(rows, 3, back)
    assert tuple(told.pairs) == sums_of(expected)
    assert expected or batch * steps < 4
    alive = [int(row[ACCEPTED]) for row in rows if row[ALIVE]]
    assert (told.rows, list(told.accepted)) == (len(alive), by_depth(alive, 3))
    assert _outcome(rows, 3).pairs == () == _outcome(rows, 0, back).pairs


class Runs(Script):
    """Runs of six steps, each told at once."""

    def choose(self, bucket: int, context: int) -> Choice:
        return super().choose(bucket, context)._replace(more=5)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_engine_tells_of_the_pairs_of_its_rows(overlap: int) -> None:
    """As many as its rows have had steps one after the other, within runs whose rows stayed; and their sums. With overlap the last step of a run is
    retired when the next run is planned, and told apart."""
    engine = engine_of("rand_target", "draft_model:rand_draft", steps=3, batch=4, overlap=overlap, adaptive=True)
    assert engine.pacing is not None
    script = engine.pacing.controller = Runs([3, 2])
    steps: list[tuple[Choice, tuple[object, ...], list[list[int]]]] = []
    retired = engine.pacing.retired

    def watched(flight, newest, start):  # type: ignore[no-untyped-def]
        if flight.batch.paced is not None:
            steps.append((flight.batch.paced.choice, flight.batch.decode, flight.decode_result.np[: len(flight.batch.decode)].tolist()))
        retired(flight, newest, start)

    engine.pacing.retired = watched  # type: ignore[method-assign]
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=32)))
    engine.adaptive_report()
    pairs = [
        (before[ACCEPTED], after[ACCEPTED])
        for (choice, rows, first), (again, still, second), (after_that, *_) in zip(steps, steps[1:], [*steps[2:], (None,)], strict=False)
        if choice is again and rows is still and (not overlap or after_that in (again, None))
        for before, after in zip(first, second, strict=True)
        if before[ALIVE] and after[ALIVE]
    ]
    told = [sum(column) for column in zip(*(outcome.pairs for _, outcome in script.told if outcome.pairs), strict=True)]
    assert told == [*sums_of(pairs)] and len(pairs) > 60 and told[2] > 0


class Texts(Device):
    """Rows of 400 tokens that are easy or hard to draft, in the same share of the text however it is drafted: every depth of a row has one rate.
    ``passed``: tokens by rate, as many as a step commits on average."""

    def __init__(self, bucket: int, seed: int, cost: Callable[[int, int], float], most: int, kinds: Sequence[tuple[float, float]]) -> None:
        super().__init__(AdaptiveController(most), cost, [0.5] * most, seed=seed)
        self.kinds = kinds
        self.rows = [[self.random.randrange(1, 400), self._rate()] for _ in range(bucket)]
        self.passed: dict[float, float] = {}
        self.before: tuple[int, list[int]] | None = None

    def _rate(self) -> float:
        shares, rates = zip(*self.kinds, strict=True)
        return self.random.choices(rates, shares)[0]

    def outcome(self, choice: Choice) -> Outcome:
        outcome, steps, ended = super().outcome(choice), choice.num_steps, False
        accepted = []
        for row in self.rows:
            left, rate = row
            self.passed[rate] = self.passed.get(rate, 0.0) + tokens_of(rate, steps)
            accepted.append(next((depth for depth in range(steps) if self.random.random() >= rate), steps))
            row[0] = left - 1 - accepted[-1]
            if row[0] <= 0:
                row[:], ended = [400, self._rate()], True
        if steps:
            outcome.accepted = by_depth(accepted, steps)
            both = [*zip(self.before[1], accepted, strict=True)] if self.before and self.before[0] == steps else []
            outcome.pairs = sums_of(both)
        self.before = None if ended or not steps else (steps, accepted)
        return outcome

    def to_the_best(self) -> float:
        """How long the best fixed num_steps takes for the text that was passed, as a share of what it took."""
        rows = len(self.rows)
        fixed = [
            sum(tokens / tokens_of(rate, s) for rate, tokens in self.passed.items()) / rows * self.cost(rows, s) for s in range(len(self.rates) + 1)
        ]
        return min(fixed) / self.seconds


def tokens_of(rate: float, num_steps: int) -> float:
    """What a step commits on average where every depth is accepted at one rate."""
    return sum(rate**depth for depth in range(num_steps + 1))


def devices(bucket: int, most: int) -> Iterator[Texts]:
    cost = lambda bucket, steps: memory_bound(bucket, steps) + 0.0011 * steps  # noqa: E731
    for seed in range(6):
        yield Texts(bucket, seed, cost, most, [(0.1, 0.3), (0.9, 0.9)])


@pytest.mark.parametrize(("bucket", "steps", "bar"), [(8, 3000, 0.995), (64, 1500, 0.992)])
def test_where_rows_differ_the_choice_is_as_good_as_the_best_fixed_num_steps(bucket: int, steps: int, bar: float) -> None:
    """A tenth of the text is hard. Taken for a sample of it, the steps keep longer drafts in force than are best: 0.988 and 0.984."""
    found = []
    for device in devices(bucket, 8):
        device.run(steps, bucket)
        found.append(device.to_the_best())
    assert sum(found) / len(found) > bar


def test_looks_at_other_num_steps_take_few_steps_where_neighbours_are_as_good() -> None:
    """Each costs the host two more choices, which no model of the device shows."""
    for device in itertools.islice(devices(64, 8), 2):
        device.run(800, 64)
        chosen: list[Choice] = []
        choose = device.controller.choose

        def noted(bucket: int, context: int, chosen: list[Choice] = chosen, choose: Any = choose) -> Choice:
            chosen.append(choose(bucket, context))
            return chosen[-1]

        device.controller.choose = noted  # type: ignore[method-assign]
        device.run(4000, 64)
        looks = sum(choice.more == BURST - 1 for choice in chosen)
        assert 10 < looks < 0.04 * 4000 / BURST


def test_steps_count_under_the_num_steps_in_force_also_those_of_a_look() -> None:
    """And what the report expects is what the choice went by."""
    controller = AdaptiveController(6)
    home = controller.choose(8, 512)
    assert home.num_steps == 6
    for choice in (home, home._replace(num_steps=2), home._replace(num_steps=2)):
        steps = [0, 0, 1, 1, 2, 2, 0, 0, 2, 2, 1, 1] * 12
        controller.stepped(choice, Outcome(18, 144, by_depth(steps, choice.num_steps), pairs_of(steps), 0.018, 18, [0.001] * 18))
    assert controller.acceptance.under == pytest.approx(6.0)
    controller.stepped(Choice(4, 512, 1), Outcome(1000, 8000, [0], (), 1.0, 1000))
    assert controller.acceptance.under == pytest.approx(1.0, abs=0.01), "of a place that was never asked for, its own"
    controller.stepped(home, Outcome(18, 144, by_depth(steps, 6), pairs_of(steps), 0.018, 18, [0.001] * 18))
    assert 0.1 < controller.likeness.alike < 0.6
    told = {row["num_steps"]: row["expected_tokens"] for row in controller.report() if row["bucket"] == 8}
    assert told == {2: controller.tokens[2], 6: controller.tokens[6]} and controller.tokens[2] != controller.acceptance.expected()[2]


def test_the_controller_does_not_compare_steps_of_different_num_steps() -> None:
    controller = AdaptiveController(6)
    home = controller.choose(8, 512)
    for num_steps, accepted in ((1, [0, 1] * 40), (6, [5, 6] * 40)):
        outcome = Outcome(10, 80, by_depth(accepted, num_steps), pairs_of(accepted), 0.01, 10, [0.001] * 10)
        controller.stepped(home._replace(num_steps=num_steps), outcome)
    assert controller.likeness.alike == 0.0
