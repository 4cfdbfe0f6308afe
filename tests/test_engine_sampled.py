"""Sampling: the law is the target's whatever the draft, seeds and keys decide the text, and the batch does not."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from specgen.types import SamplingParams
from tests.harness import Run, drive, engine_of, requests_of, run
from tests.oracles import endless_text
from tests.toys import DRAFT_LAW, TARGET_LAW

ROWS = 20_000
# Chi-square values that a true law exceeds once in 10,000 tests, by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 4: 23.51, 24: 58.61}


def chi_square(observed: Counter, law: dict) -> float:
    """Pearson's statistic of counts against probabilities; anything outside the law is infinite."""
    assert set(observed) <= set(law)
    total = sum(observed.values())
    return sum((observed[x] - total * p) ** 2 / (total * p) for x, p in law.items())


@cache
def many(draft: str | None, topk: int) -> Run:
    """20,000 rows of one prompt, three tokens each, T = 1."""
    sampling = SamplingParams(max_tokens=3, temperature=1.0, seed=5)
    nodes = 7 if topk > 1 else None
    return run(
        "stoch_target", draft, [[30]] * ROWS, sampling, steps=2, topk=topk, nodes=nodes, batch=ROWS, chunk=ROWS, max_length=8, page=4, pages=4 * ROWS
    )


@pytest.mark.parametrize(("draft", "topk"), [("draft_model:stoch_draft", 1), ("draft_model:stoch_draft", 4)], ids=["chain", "tree"])
def test_every_position_follows_the_targets_law_and_positions_are_independent(draft: str, topk: int) -> None:
    ids = many(draft, topk).ids
    for position in range(3):
        assert chi_square(Counter(row[position] for row in ids), TARGET_LAW) < CHI_SQUARE[4]
    pairs = {(a, b): p * q for a, p in TARGET_LAW.items() for b, q in TARGET_LAW.items()}
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert chi_square(Counter((row[first], row[second]) for row in ids), pairs) < CHI_SQUARE[24]


def test_twenty_thousand_sampled_rows_are_the_same_with_a_chain_a_tree_and_no_draft() -> None:
    plain = many(None, 1).ids
    assert many("draft_model:stoch_draft", 1).ids == plain
    assert many("draft_model:stoch_draft", 4).ids == plain


def test_coupled_noise_accepts_the_first_draft_as_often_as_two_coupled_laws_agree() -> None:
    """Two laws perturbed by the same Gumbel noise pick the same token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    agree = sum(1 / sum(max(TARGET_LAW[j] / TARGET_LAW[i], DRAFT_LAW[j] / DRAFT_LAW[i]) for j in TARGET_LAW) for i in TARGET_LAW)
    assert round(agree, 4) == 0.3196
    hits = sum(steps[0].accepted > 0 for steps in many("draft_model:stoch_draft", 1).steps)
    deviation = (ROWS * agree * (1 - agree)) ** 0.5
    assert abs(hits - ROWS * agree) < 4 * deviation
    tree = sum(steps[0].accepted > 0 for steps in many("draft_model:stoch_draft", 4).steps)
    assert tree > 2 * hits


def test_each_rows_temperature_and_filters_shape_its_own_law() -> None:
    laws = {
        SamplingParams(max_tokens=2, temperature=1.0, top_p=0.75, seed=1): {30: 2 / 3, 31: 1 / 3},
        SamplingParams(max_tokens=2, temperature=1.0, top_k=3, seed=1): {30: 4 / 7, 31: 2 / 7, 32: 1 / 7},
        SamplingParams(max_tokens=2, temperature=1.0, min_p=0.3, seed=1): {30: 2 / 3, 31: 1 / 3},
        SamplingParams(max_tokens=2, temperature=0.5, seed=1): {k: p * p / sum(x * x for x in TARGET_LAW.values()) for k, p in TARGET_LAW.items()},
        SamplingParams(max_tokens=2, seed=1): {30: 1.0},
    }
    each = 1200
    sampling = [params for params in laws for _ in range(each)]
    prompts = [[30]] * len(sampling)
    options = dict(batch=len(sampling), chunk=len(sampling), max_length=8, page=4, pages=4 * len(sampling))
    result = run("stoch_target", "draft_model:stoch_draft", prompts, sampling, steps=1, topk=2, **options)
    for number, law in enumerate(laws.values()):
        rows = result.ids[number * each : (number + 1) * each]
        for position in range(2):
            seen = Counter(row[position] for row in rows)
            if len(law) == 1:
                assert seen == {30: each}
            else:
                assert chi_square(seen, law) < CHI_SQUARE[len(law) - 1]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    def text(seed: int, **options: object) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=seed)
        return run("stoch_target", "draft_model:stoch_draft", [[30]] * 6, sampling, steps=2, **options).ids

    first = text(7)
    assert text(7) == first
    assert text(7, batch=1) == text(7, batch=4, overlap=1) == text(7, order=[3, 0, 5, 1, 4, 2]) == first
    other = text(8)
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_rows_own_seed_replaces_the_jobs() -> None:
    job = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    own = SamplingParams(max_tokens=16, temperature=1.0, seed=8)
    base = run("stoch_target", None, [[30]] * 3, job).ids
    mixed = run("stoch_target", None, [[30]] * 3, [job, own, job]).ids
    assert mixed[0] == base[0] and mixed[2] == base[2] and mixed[1] != base[1]
    assert mixed[1] == run("stoch_target", None, [[30]] * 3, own).ids[1]


@pytest.mark.parametrize("seed", [0, 7])
def test_rows_with_one_prompt_and_different_keys_write_different_texts(seed: int) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
    ids = run("stoch_target", "draft_model:stoch_draft", [[30]] * 16, sampling, batch=16).ids
    assert len(set(map(tuple, ids))) >= 12


def test_noise_is_keyed_by_key_and_sample_not_by_place() -> None:
    requests = requests_of([[30]] * 6, SamplingParams(max_tokens=16, temperature=1.0, seed=3))
    for request, (key, sample) in zip(requests, [("a", 0), ("a", 1), ("b", 0), (7, 0), ("7", 0), ("a", 0)], strict=True):
        request.prompt.key, request.sample = key, sample
    ids = drive(engine_of("stoch_target", "draft_model:stoch_draft", batch=2), requests).ids
    assert ids[0] == ids[5]
    assert len(set(map(tuple, ids))) == 5


def test_noise_runs_on_across_turns() -> None:
    """A later turn starts its noise where the earlier one ended: after the same context its text is the rest of the single turn's."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    whole = run("stoch_target", None, [[30]], sampling).ids[0]
    later = requests_of([[30, *whole[:5]]], SamplingParams(max_tokens=7, temperature=1.0, seed=3), noise_offset=5)
    assert drive(engine_of("stoch_target", "draft_model:stoch_draft"), later).ids == [whole[5:]]


@pytest.mark.parametrize("topk", [1, 3])
def test_greedy_rows_stay_greedy_beside_sampled_ones(topk: int) -> None:
    sampling = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=2.0, seed=9)] * 2
    result = run("target", "draft_model:draft_perfect", [[30]] * 4, sampling, topk=topk)
    assert result.ids[0] == result.ids[2] == endless_text([30], 12)
    assert result.ids[1] != result.ids[3] != result.ids[0]
