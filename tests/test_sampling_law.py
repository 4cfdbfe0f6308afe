"""Penalties, bias, masks and min_tokens inside the engine: exact at every drafted position, and the same text whatever the draft."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from functools import cache
from pathlib import Path

import pytest

import specgen
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams
from tests.harness import drive, engine_of, requests_of, run, thinned
from tests.oracles import plain
from tests.toys import EOS, expected_rand

PROMPTS = [row["prompt_ids"] for row in expected_rand()]
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
PERFECT = "draft_model:draft_perfect"
SHAPES = [(None, 1, 1)] + [(PERFECT, 1, steps) for steps in range(1, 6)] + [(PERFECT, 3, steps) for steps in range(1, 6)]

# Greedy text of the table target after [10] with min_tokens: the fifth token is the end, or its runner-up 9.
LONG = [11, 12, 13, 14, 9, 30, 31, 32, 33, 34, 30, 31, 32, 33, 34, 30]
MIN_TOKENS = {4: ([11, 12, 13, 14, 2], "stop"), 5: (LONG, "length"), 7: (LONG, "length")}
CYCLE = [41, 42, 40] * 4 + [41, 42]
# And after [40], 14 tokens, with a penalty.
PENALTIES = {
    ("frequency_penalty", 0.7): CYCLE,
    ("frequency_penalty", 1.3): [*CYCLE[:12], 4, 30],
    ("frequency_penalty", 2.3): [41, 42, 40, 41, 42, 40, 4, 30, 31, 32, 33, 34, 30, 31],
    ("presence_penalty", 2.0): CYCLE,
    ("presence_penalty", 5.0): [41, 42, 40, 4, 30, 31, 32, 33, 34, 37, 30, 38, 30, 31],
    ("repetition_penalty", 1.5): CYCLE,
    ("repetition_penalty", 3.0): [41, 42, 47, 30, 31, 32, 33, 34, 37, 30, 38, 30, 31, 39],
}


# -- exact texts ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("draft", "topk", "steps"), SHAPES)
def test_min_tokens_counts_tokens_not_steps(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    sampling = [SamplingParams(max_tokens=16, min_tokens=n) for n in MIN_TOKENS]
    result = run("target", draft, [[10]] * 3, sampling, topk=topk, steps=steps, overlap=overlap)
    assert list(zip(result.ids, result.finish, strict=True)) == list(MIN_TOKENS.values())


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("draft", "topk", "steps"), SHAPES)
def test_penalties_hold_at_every_drafted_position(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    sampling = [SamplingParams(max_tokens=14, **{name: value}) for name, value in PENALTIES]
    result = run("target", draft, [[40]] * len(sampling), sampling, topk=topk, steps=steps, overlap=overlap)
    assert result.ids == list(PENALTIES.values())


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_penalties_is_what_decoding_by_hand_gives(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(4, 48) for _ in range(draw.randint(1, 6))] for _ in range(6)]
    # Eighths: what the engine computes in float32 is then exact, ties included.
    laws = [
        dict(
            repetition=draw.choice([1.0, 0.5, 2.0]),
            frequency=draw.choice([0.0, 0.625, -0.25]),
            presence=draw.choice([0.0, 1.5, -0.75]),
            min_tokens=draw.choice([0, 0, 3, 9]),
        )
        for _ in prompts
    ]
    sampling = [
        SamplingParams(
            max_tokens=20,
            repetition_penalty=law["repetition"],
            frequency_penalty=law["frequency"],
            presence_penalty=law["presence"],
            min_tokens=int(law["min_tokens"]),
        )
        for law in laws
    ]
    expected = [plain(prompt, 20, **law) for prompt, law in zip(prompts, laws, strict=True)]  # type: ignore[arg-type]
    draft, topk, steps = draw.choice(
        [(PERFECT, 1, 4), (PERFECT, 3, 3), ("draft_model:draft_half", 2, 5), ("eagle:eagle1_stirred", 2, 3), ("ngram", 1, 4)]
    )
    result = run("target", draft, prompts, sampling, topk=topk, steps=steps, batch=draw.choice([1, 4, 6]), overlap=draw.randint(0, 1), page=4)
    assert list(zip(result.ids, result.finish, strict=True)) == expected


def test_repetition_looks_at_the_prompt_and_the_others_do_not() -> None:
    # After 10 comes 11, whose logit of 8 falls below the runner-up's 4 when 11 stands in the prompt.
    assert run("target", None, [[11, 10]], SamplingParams(max_tokens=1, repetition_penalty=4.0)).ids == [[18]]
    for name in ("presence_penalty", "frequency_penalty"):
        assert run("target", None, [[11, 10]], SamplingParams(max_tokens=1, **{name: 9.0})).ids == [[11]]


@pytest.mark.parametrize(("draft", "topk", "steps"), [(None, 1, 1), (PERFECT, 1, 4), (PERFECT, 2, 3), ("eagle3:eagle3_d2t", 1, 3)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_bias_allowed_and_banned_ids_shape_greedy_text(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    cases = {
        SamplingParams(max_tokens=8): [31, 32, 33, 34, 30, 31, 32, 33],
        SamplingParams(max_tokens=8, banned_token_ids=(31,)): [38, 30] * 4,
        SamplingParams(max_tokens=8, logit_bias=((31, -3.0),)): [31, 32, 33, 34, 30, 31, 32, 33],
        SamplingParams(max_tokens=8, logit_bias=((31, -5.0),)): [38, 30] * 4,
        SamplingParams(max_tokens=8, logit_bias=((47, 20.0),)): [47] * 8,
        SamplingParams(max_tokens=8, allowed_token_ids=(5, 6, 7)): [5] * 8,
        SamplingParams(max_tokens=8, allowed_token_ids=(31, 39, 46), banned_token_ids=(39,)): [31] + [31] * 7,
        SamplingParams(max_tokens=8, allowed_token_ids=(2, 31, 32), logit_bias=((32, 1.0),)): [31, 32, 32, 32, 32, 32, 32, 32],
    }
    # Twice as many rows as slots: tables of a slot are those of its present row.
    sampling = [*cases, *reversed(cases)]
    result = run("target", draft, [[30]] * len(sampling), sampling, topk=topk, steps=steps, batch=4, overlap=overlap)
    assert result.ids == [*cases.values(), *reversed(cases.values())]


@pytest.mark.parametrize(("draft", "topk"), [(PERFECT, 1), (PERFECT, 2), ("eagle:eagle1_perfect", 1), ("target_mtp", 1)])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_tokens=13, banned_token_ids=(31,)), SamplingParams(max_tokens=13, logit_bias=((31, -5.0),))],
    ids=["banned", "bias"],
)
def test_drafts_know_bias_and_masks(draft: str, topk: int, sampling: SamplingParams) -> None:
    """A draft that is always right stays so: it proposes what the target draws under the same bias and masks."""
    target, draft = ("target_mtp", "mtp") if draft == "target_mtp" else ("target", draft)
    result = run(target, draft, [[30]], sampling, topk=topk, steps=3)
    assert result.ids == [[38, 30] * 6 + [38]]
    assert result.accepted == [[3, 3, 3]]


def test_drafts_know_when_the_end_is_masked_by_min_tokens() -> None:
    result = run("target", PERFECT, [[10]], SamplingParams(max_tokens=13, min_tokens=13), steps=3)
    assert result.ids == [LONG[:13]] and result.accepted == [[3, 3, 3]]


@pytest.mark.parametrize("draft", [None, PERFECT])
@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_min_tokens_masks_stop_lists_of_any_length(draft: str | None, count: int) -> None:
    stops = tuple(dict.fromkeys([31, 30, *range(4, 48)]))[:count]
    kept = [token for token in range(48) if token not in (*stops, EOS)]
    # The row may not write a stop id before its fifth token; the logits beside the two best fall with the id.
    sampling = [SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=stops), SamplingParams(max_tokens=9, min_tokens=4)]
    result = run("target", draft, [[30], [10]], sampling, steps=4)
    ids = result.ids[0]
    assert len(ids) >= 4 and not set(ids[:4]) & set(stops) and set(ids[:4]) <= set(kept)
    stopped = next((n for n, token in enumerate(ids) if token in stops), None)
    assert stopped is None or stopped == len(ids) - 1 >= 4
    assert ids == run("target", None, [[30]], sampling[:1], batch=1).ids[0]
    assert result.ids[1] == [11, 12, 13, 14, 2]
    if count == 40:
        assert result.engine.law.tables.stop_ids is not None and result.engine.law.tables.stop_ids.shape[1] == 64


def test_ignored_eos_is_not_masked_by_min_tokens() -> None:
    result = run("target", PERFECT, [[10]], SamplingParams(max_tokens=8, min_tokens=8, ignore_eos=True))
    assert result.ids == [[11, 12, 13, 14, 2, 20, 21, 22]]


def test_a_stop_string_before_min_tokens_is_passed_over() -> None:
    sampling = [SamplingParams(max_tokens=20, min_tokens=n, stop=("w32",)) for n in (0, 2, 3, 7, 8)]
    result = run("target", PERFECT, [[30]] * 5, sampling, steps=4, text=True)
    assert list(map(len, result.ids)) == [2, 2, 7, 7, 12]


# -- tables -----------------------------------------------------------------------------------------------------------------------------------


def test_tables_exist_only_where_a_row_needs_them() -> None:
    engine = engine_of("target", PERFECT)
    drive(engine, requests_of([[30]], SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9)))
    assert engine.law.features == frozenset() and engine.device_step.features == {"sampled", "filters"}
    assert all(getattr(engine.law.tables, name) is None for name in ("repetition", "output_count", "bias", "min_tokens"))
    drive(engine, requests_of([[30]], SamplingParams(max_tokens=3, logit_bias=((31, -9.0),))))
    assert engine.device_step.features == {"sampled", "filters", "bias"} and engine.law.tables.repetition is None


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_that_needs_a_table_may_come_while_others_run(overlap: int) -> None:
    engine = engine_of("target", PERFECT, steps=2, overlap=overlap, batch=4)
    calm = [SamplingParams(max_tokens=30)] * 2
    late = [
        SamplingParams(max_tokens=14, presence_penalty=5.0),
        SamplingParams(max_tokens=8, banned_token_ids=(31,)),
        SamplingParams(max_tokens=16, min_tokens=5),
    ]
    first, second = requests_of([[30], [40]], calm), requests_of([[40], [30], [10]], late)
    for request in first:
        engine.add(request)
    for _ in range(3):
        engine.step()
    for request in second:
        engine.add(request)
        engine.step()
    while engine.has_work:
        engine.step()
    assert [r.output_ids for r in first] == [plain([30], 30)[0], plain([40], 30)[0]]
    assert [r.output_ids for r in second] == [PENALTIES["presence_penalty", 5.0], [38, 30] * 4, LONG]


def test_a_slot_used_again_starts_with_empty_counts() -> None:
    penal = SamplingParams(max_tokens=14, frequency_penalty=2.3)
    sampling = [penal, SamplingParams(max_tokens=14), penal, SamplingParams(max_tokens=14, repetition_penalty=3.0), penal]
    result = run("target", PERFECT, [[40]] * 5, sampling, batch=1, steps=3)
    own = PENALTIES["frequency_penalty", 2.3]
    assert result.ids == [own, CYCLE, own, PENALTIES["repetition_penalty", 3.0], own]


@pytest.mark.parametrize(
    ("draft", "topk", "steps"), [(None, 1, 1), ("draft_model:rand_draft", 1, 3), ("draft_model:rand_draft", 3, 2), ("ngram", 1, 3)]
)
@pytest.mark.parametrize("overlap", [0, 1])
def test_preempted_rows_build_their_counts_again(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    sampling = SamplingParams(
        max_tokens=32,
        temperature=0.8,
        seed=7,
        frequency_penalty=0.8,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        min_tokens=20,
        logit_bias=((7, 2.0),),
    )
    roomy = run("rand_target", draft, PROMPTS, sampling, topk=topk, steps=steps, page=4, batch=8)
    tight = run("rand_target", draft, PROMPTS, sampling, topk=topk, steps=steps, page=4, batch=8, overlap=overlap, pages=44)
    assert roomy.engine.scheduler.preemptions == 0 and tight.engine.scheduler.preemptions >= 2
    assert tight.ids == roomy.ids and tight.counts == roomy.counts and tight.accepted == roomy.accepted


def test_penalties_of_a_later_turn_count_its_own_output_alone() -> None:
    """What an earlier turn wrote is part of the prompt: repetition sees it, presence and frequency do not."""
    later = requests_of([[40, 41, 42]], SamplingParams(max_tokens=6, presence_penalty=5.0), noise_offset=2)
    assert drive(engine_of("target", PERFECT), later).ids == [[40, 41, 42, 47, 30, 31]]
    early = requests_of([[10]], SamplingParams(max_tokens=16, min_tokens=5), noise_offset=9)
    assert drive(engine_of("target", PERFECT), early).ids == [LONG]


# -- rows that cannot be served ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": (2,), "min_tokens": 3}, "no token is left to sample: sampling.allowed_token_ids less"),
        ({"allowed_token_ids": (7, 8), "banned_token_ids": (8, 7)}, "no token is left to sample: sampling.allowed_token_ids less"),
        ({"banned_token_ids": tuple(range(48))}, "no token is left to sample: the vocabulary less"),
        ({"logit_bias": ((48, 1.0),)}, "sampling.logit_bias holds 48, outside the model's vocabulary of 48"),
        ({"logit_bias": ((7, 1e39),)}, "sampling.logit_bias of token 7 is 1e+39"),
        ({"presence_penalty": -1e31}, "sampling.presence_penalty=-1e+31 is too large"),
        ({"repetition_penalty": 1e-40}, "sampling.repetition_penalty=1e-40 must be between"),
    ],
)
def test_a_law_that_cannot_be_applied_is_the_rows_error_and_the_others_run(options: dict, message: str) -> None:
    result = run("target", PERFECT, [[30], [30]], [SamplingParams(max_tokens=5, **options), SamplingParams(max_tokens=5)])
    assert result.finish == ["error", "length"]
    error = result.requests[0].error
    assert error is not None and error["type"] == "ConfigError" and error["message"].startswith(message)


# -- the draft changes nothing ----------------------------------------------------------------------------------------------------------------

LAW = SamplingParams(
    max_tokens=20,
    temperature=1.0,
    top_p=0.95,
    seed=11,
    n=3,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((5, 1.5), (9, -2.0)),
    banned_token_ids=(17, 30),
    stop_token_ids=(3,),
    min_tokens=6,
)


def fingerprint(outputs: list) -> str:
    """One hash of every output id of a run, rows in input order."""
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def samples(prompts: list[list[int]], sampling: SamplingParams) -> list[Request]:
    """``sampling.n`` requests of each prompt."""
    made = [Prompt(index=i, id=i, key=i, token_ids=list(ids), sampling=sampling) for i, ids in enumerate(prompts)]
    return [Request(prompt, sampling, sample=sample) for prompt in made for sample in range(sampling.n)]


@cache
def toy_reference() -> str:
    result = drive(engine_of("rand_target", None, batch=1), samples(PROMPTS, LAW))
    assert len({tuple(ids) for ids in result.ids}) >= 20 and {"stop", "length"} == set(result.finish)
    return fingerprint(result.ids)


def _toy_settings() -> list[tuple]:
    drafts = [("ngram", 1, 3)] + [("draft_model:rand_draft", k, s) for k, s in ((1, 1), (1, 4), (2, 3), (4, 2))]
    drafts += [(head, k, s) for head in ("eagle:eagle1_stirred", "eagle3:eagle3_stirred") for k, s in ((1, 3), (3, 2))]
    around = itertools.cycle([(24, 0, False), (5, 1, True), (24, 1, True), (1, 0, True)])
    return [(None, 1, 1, 7, 1, True), *((*draft, *next(around)) for draft in drafts for _ in range(2))]


@pytest.mark.parametrize(
    ("draft", "topk", "steps", "batch", "overlap", "shuffled"), thinned(_toy_settings(), lambda number: number % 2 == number // 4 % 2)
)
def test_the_whole_law_gives_one_text_on_the_toys(draft: str | None, topk: int, steps: int, batch: int, overlap: int, shuffled: bool) -> None:
    requests = samples(PROMPTS, LAW)
    order = random.Random(3).sample(range(len(requests)), len(requests)) if shuffled else None
    engine = engine_of("rand_target", draft, topk=topk, steps=steps, batch=batch, overlap=overlap, page=4)
    assert fingerprint(drive(engine, requests, order).ids) == toy_reference()


FAMILY = Path(specgen.__file__).parent / "embedded" / "family"
FAMILY_LAW = SamplingParams(
    max_tokens=16, temperature=1.0, top_p=0.95, seed=5, n=3, repetition_penalty=1.15, frequency_penalty=0.2, logit_bias=((40, 1.0),), min_tokens=5
)


def _family_run(method: str, topk: int, steps: int, batch: int, shuffled: bool) -> str:
    model = ModelConfig()
    target = _family_target()
    draft = DraftConfig(method=method, topk=topk, num_steps=steps)
    engine = Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=batch, overlap="1", kv_memory_gb=0.05), draft)
    requests = samples([[1, 40, 50, 60, 70], [1, 300, 301]], FAMILY_LAW)
    order = random.Random(1).sample(range(len(requests)), len(requests)) if shuffled else None
    return fingerprint(drive(engine, requests, order).ids)


@cache
def _family_target() -> Target:
    return load_target(ModelConfig(), "cpu", "float32")


@cache
def _family_reference() -> str:
    return _family_run("none", 1, 0, 1, False)


@pytest.mark.parametrize(
    ("method", "topk", "steps", "batch", "shuffled"),
    [
        ("none", 1, 0, 6, True),
        ("draft_model", 1, 3, 6, True),
        ("eagle", 1, 4, 4, False),
        ("eagle", 3, 2, 6, True),
        ("eagle3", 2, 3, 6, False),
        ("ngram", 1, 3, 2, True),
    ],
)
def test_the_whole_law_gives_one_text_on_the_embedded_family(method: str, topk: int, steps: int, batch: int, shuffled: bool) -> None:
    assert _family_run(method, topk, steps, batch, shuffled) == _family_reference()
