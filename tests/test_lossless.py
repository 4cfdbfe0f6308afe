"""The lossless check: equal rows are equal, ties are near-ties, and a wrong acceptance rule is found out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specgen.engine.engine import Engine
from specgen.engine.lossless import DIFFERENT, EQUAL, NEAR_TIE, Turn, Verdict, check_rows, check_turn, draw_rows, judge, window_logits
from specgen.types import Prompt, Request, SamplingParams
from tests.harness import Run, drive, engine_of, requests_of, target_of
from tests.oracles import Recompute
from tests.toys import expected_rand

PROMPTS = [row["prompt_ids"] for row in expected_rand()]
LAW = SamplingParams(
    max_tokens=24, temperature=0.9, seed=3, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((7, 1.0),), min_tokens=8
)
LONG = SamplingParams(max_tokens=190, temperature=1.0, seed=1, ignore_eos=True)


def replay_engine(target: str, **options: Any) -> Engine:
    """An engine that replays rows on a toy target."""
    return engine_of(target, None, batch=1, overlap=0, **options)


def turns(result: Run) -> list[list[Turn]]:
    """The finished rows of a run, each of one turn."""
    return [[Turn(Request(r.prompt, r.sampling, r.sample, r.noise_offset), tuple(r.output_ids), str(r.finish_reason))] for r in result.requests]


def wrong_once_in(every: int, engine: Engine) -> list[int]:
    """Break an engine's acceptance: of every so many drafted tokens one that the target rejects, a first child, is accepted. Returns their count."""
    commit, drafted, broken = engine.device_step._commit, 0, [0]

    def corrupted(rows: Any, draft: Any, y: torch.Tensor, *more: Any) -> Any:
        nonlocal drafted
        drafted += draft.token_ids.numel()
        if drafted // every > broken[0]:
            for row in (draft.token_ids[:, 0] != y[:, 0]).nonzero()[:1, 0].tolist():
                y = y.clone()
                y[row, 0] = draft.token_ids[row, 0]
                broken[0] += 1
        return commit(rows, draft, y, *more)

    engine.device_step._commit = corrupted  # type: ignore[method-assign]
    return broken


# -- whole rows -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "topk", "steps"), [("draft_model:rand_draft", 1, 3), ("draft_model:rand_draft", 3, 2), ("ngram", 1, 4)])
@pytest.mark.parametrize("sampling", [LAW, SamplingParams(max_tokens=24)], ids=["law", "greedy"])
def test_rows_of_a_sound_engine_are_equal_to_their_replay(draft: str, topk: int, steps: int, sampling: SamplingParams) -> None:
    result = drive(engine_of("rand_target", draft, topk=topk, steps=steps, page=4), requests_of(PROMPTS, sampling, noise_offset=5))
    found = check_rows(turns(result), replay_engine("rand_target"), nodes=result.engine.drafter.num_draft_tokens, batch=8)
    assert found == {"checked": 8, "equal": 8, "near_tie": 0, "different": 0, "worst_gap": None}


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_draft_in_a_thousand_wrongly_accepted_is_found(topk: int) -> None:
    engine = engine_of("rand_target", "draft_model:rand_draft", topk=topk, steps=3, page=4)
    broken = wrong_once_in(1000, engine)
    result = drive_broken(engine, requests_of(PROMPTS, LONG))
    assert 1 <= broken[0] <= 8
    found = check_rows(turns(result), replay_engine("rand_target"), nodes=4, batch=8)
    assert found["different"] >= 1 and found["checked"] == 8 and found["near_tie"] == 0
    assert found["worst_gap"] > 1e-3  # type: ignore[operator]


def drive_broken(engine: Engine, requests: list[Request]) -> Run:
    """Run requests without the checks of ``drive``."""
    engine.run(requests)
    return Run(engine, requests, [[] for _ in requests])


def test_the_same_rows_without_the_fault_are_equal() -> None:
    result = drive(engine_of("rand_target", "draft_model:rand_draft", steps=3, page=4), requests_of(PROMPTS[:3], LONG))
    assert check_rows(turns(result), replay_engine("rand_target"), nodes=4, batch=8)["equal"] == 3


# -- one turn ---------------------------------------------------------------------------------------------------------------------------------


def turn_of(output: list[int], finish: str = "length", **options: Any) -> Turn:
    """A turn of the table target after [30], as if a run had written ``output``."""
    sampling = SamplingParams(max_tokens=4, **options)
    return Turn(Request(Prompt(index=0, id=0, key=0, token_ids=[30]), sampling), tuple(output), finish)


@pytest.mark.parametrize(
    ("bias", "kind"), [(4.0, NEAR_TIE), (4.0 - 2**-20, DIFFERENT), (3.0, DIFFERENT)], ids=["a tie", "more than the rounding", "not even close"]
)
def test_a_difference_is_a_near_tie_only_within_the_measured_rounding(bias: float, kind: str) -> None:
    """Token 31 has logit 8 after 30 and token 38 has 4: a bias brings them together. The toy's forwards round alike, so only a tie is excused."""
    turn = turn_of([38, 30, 31, 32], logit_bias=((38, bias),))
    verdict = check_turn(turn, replay_engine("target"), nodes=4, batch=8)
    assert verdict.kind == kind and verdict.position == 0 and verdict.e == 0.0
    assert verdict.gap == pytest.approx(4.0 - bias, abs=1e-7)


def test_in_deterministic_mode_every_difference_is_different() -> None:
    turn = turn_of([38, 30, 31, 32], logit_bias=((38, 4.0),))
    assert check_turn(turn, replay_engine("target", deterministic=True), nodes=4, batch=8).kind == DIFFERENT


def test_a_text_that_ends_elsewhere_is_different() -> None:
    engine = replay_engine("target")
    assert check_turn(turn_of([31, 32, 33, 34]), engine, 4, 8) == Verdict(EQUAL)
    assert check_turn(turn_of([31, 32, 33]), engine, 4, 8) == Verdict(DIFFERENT, 3)
    assert check_turn(turn_of([31, 32, 33, 34, 30]), engine, 4, 8) == Verdict(DIFFERENT, 4)
    assert check_turn(turn_of([31, 32, 33, 34], "stop"), engine, 4, 8) == Verdict(DIFFERENT, 4)


def test_a_row_is_judged_at_its_first_turn_that_differs() -> None:
    row = [turn_of([31, 32, 33, 34]), turn_of([38, 30, 31, 32], logit_bias=((38, 4.0),)), turn_of([9, 9, 9, 9])]
    assert check_rows([row, row[:1]], replay_engine("target"), nodes=4, batch=2) == {
        "checked": 2,
        "equal": 1,
        "near_tie": 1,
        "different": 0,
        "worst_gap": 0.0,
    }


def test_the_first_difference_is_judged_with_the_counts_of_what_stands_before_it() -> None:
    # After [40] with presence 5: 41 42 40 4 ...; at the fourth token the penalised 41 has 3, 4 has 4. The run is said to have written 41.
    sampling = SamplingParams(max_tokens=6, presence_penalty=5.0)
    turn = Turn(Request(Prompt(index=0, id=0, key=0, token_ids=[40]), sampling), (41, 42, 40, 41, 42, 40), "length")
    assert check_turn(turn, replay_engine("target"), 4, 8) == Verdict(DIFFERENT, 3, gap=1.0, e=0.0)


# -- the rule ---------------------------------------------------------------------------------------------------------------------------------


def request(**options: Any) -> Request:
    return Request(Prompt(index=0, id=0, key=0, token_ids=[1]), SamplingParams(**options))


def zs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_e_is_twice_the_largest_difference_and_capped() -> None:
    runs = zs([1.0, 0.875, 0.0], [1.0625, 0.875, 0.0], [1.0, 0.8125, 0.03125])
    assert judge(runs, 0, 1, request(), 0, 1.0) == Verdict(NEAR_TIE, gap=0.125, e=0.125)
    assert judge(runs, 0, 1, request(), 0, 0.0625) == Verdict(DIFFERENT, gap=0.125, e=0.0625)
    assert judge(runs, 0, 2, request(), 0, 1.0) == Verdict(DIFFERENT, gap=1.0, e=0.125)


def test_e_looks_at_the_best_64_ids_only() -> None:
    first, second = torch.arange(100.0).flip(0) / 8, torch.arange(100.0).flip(0) / 8
    second[64:] += 1
    assert judge(torch.stack([first, second]), 0, 1, request(), 0, 9.0).e == 0.0
    second[63] += 0.25
    assert judge(torch.stack([first, second]), 0, 1, request(), 0, 9.0).e == 0.5


def test_masked_ids_do_not_count_and_are_never_a_tie() -> None:
    runs = zs([1.0, -math.inf, 0.5], [1.0, -math.inf, 0.5])
    verdict = judge(runs, 0, 1, request(), 0, 1.0)
    assert verdict.kind == DIFFERENT and verdict.e == 0.0 and verdict.gap == math.inf


def test_at_a_temperature_the_gap_is_that_of_the_perturbed_scores() -> None:
    warm = request(temperature=2.0, seed=4)
    plain = judge(zs([1.0, 1.0], [1.0, 1.0]), 0, 1, warm, 3, 1.0)
    assert plain.kind == DIFFERENT and plain.gap is not None and plain.gap > 0.01
    # Shift one logit by that gap: the perturbed scores meet, or stand twice as far apart.
    shifted = [judge(zs([1.0, z], [1.0, z + 0.001]), 0, 1, warm, 3, 1.0) for z in (1.0 + plain.gap, 1.0 - plain.gap)]
    assert sorted(v.kind for v in shifted) == [DIFFERENT, NEAR_TIE]
    assert sorted(v.gap for v in shifted if v.gap is not None) == pytest.approx([0.0, 2 * plain.gap], abs=1e-5)
    assert judge(zs([1.0, 1.0], [1.0, 1.0]), 0, 1, warm, 4, 1.0).gap != plain.gap, "the noise of the position"


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.7501}, {"min_p": 0.5}], ids=["top-k", "top-p", "min-p"])
def test_a_token_at_a_border_of_the_kept_set_is_a_near_tie(filters: dict) -> None:
    near, far = ([math.log(p) for p in law] for law in ((0.5, 0.2501, 0.2499), (0.8, 0.15, 0.05)))

    def verdict(z: list[float], seed: int) -> Verdict:
        return judge(zs(z, [z[0] + 0.01, *z[1:]]), 0, 2, request(temperature=1.0, seed=seed, **filters), 0, 1.0)

    # A seed whose noise puts the two far apart, so that only the border can explain the difference.
    seed = next(seed for seed in range(50) if (verdict(near, seed).gap or 0) > 0.5 and (verdict(far, seed).gap or 0) > 0.5)
    assert (verdict(near, seed).kind, verdict(near, seed).border) == (NEAR_TIE, True)
    assert (verdict(far, seed).kind, verdict(far, seed).border) == (DIFFERENT, False)


# -- the logits at a position -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "copies"), [(1, 1), (4, 1), (4, 3), (100, 2)])
def test_window_logits_are_the_models(width: int, copies: int) -> None:
    ids = [*PROMPTS[1], 7, 30]
    expected = torch.from_numpy(Recompute("rand_target").logits(ids))
    got = window_logits(target_of("rand_target"), ids, width, copies, 16)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-4)


# -- which rows -------------------------------------------------------------------------------------------------------------------------------


def test_rows_are_drawn_by_seed_whatever_the_order_they_ended_in() -> None:
    keys = [(index, sample) for index in range(20) for sample in range(2)]
    drawn = draw_rows(keys, 6, 0)
    assert drawn == draw_rows(list(reversed(keys)), 6, 0) and len(set(drawn)) == 6 and drawn == sorted(drawn)
    assert draw_rows(keys, 6, 1) != drawn and draw_rows(keys, 100, 0) == keys
    assert set(draw_rows(keys, 6, 0)) < set(draw_rows(keys, 7, 0))
