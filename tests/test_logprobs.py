"""Log-probabilities: one entry a token, of the law before its filters, the same whatever drafted it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specgen.errors import ConfigError
from specgen.types import Request, SamplingParams
from tests.harness import drive, engine_of, requests_of
from tests.oracles import Recompute
from tests.toys import SUCCESSOR, TARGET_LAW, expected_rand, head_table

PROMPTS = [row["prompt_ids"] for row in expected_rand()][:4]
AFTER_30 = -0.028918326112721715  # ln p(31 | 30) of the table target
PERFECT = "draft_model:draft_perfect"
SHAPES = [(None, 1, 1), (PERFECT, 1, 3), (PERFECT, 1, 5), (PERFECT, 3, 2), ("eagle:eagle1_perfect", 2, 3), ("ngram", 1, 4)]


def rows_of(
    target: str, draft: str | None, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams], top: int, **options: object
) -> list[Request]:
    """Finished requests of a run with ``sampling.logprobs=top``; each has one entry a token, for that token."""
    requests = requests_of(prompts, sampling)
    rows = drive(engine_of(target, draft, logprobs=top, **options), requests).requests  # type: ignore[arg-type]
    for row in rows:
        assert [entry["id"] for entry in row.logprobs] == row.output_ids
        assert all(len(entry["top"]) == top for entry in row.logprobs)
    return rows


def values(row: Request) -> list[float]:
    """The chosen tokens' log-probabilities."""
    return [entry["logprob"] for entry in row.logprobs]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("draft", "topk", "steps"), SHAPES)
def test_greedy_values_are_the_models_at_every_drafted_position(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    (row,) = rows_of("target", draft, [[30]], SamplingParams(max_tokens=9), 3, topk=topk, steps=steps, overlap=overlap)
    assert values(row)[0] == pytest.approx(AFTER_30, abs=1e-6)
    table = head_table(SUCCESSOR).astype(np.float64)
    previous = 30
    for entry in row.logprobs:
        column = table[:, previous] - np.log(np.exp(table[:, previous]).sum())
        assert entry["logprob"] == pytest.approx(column[entry["id"]], abs=1e-6)
        best = np.argsort(-column, kind="stable")[:3]
        assert [token for token, _ in entry["top"]] == best.tolist()
        assert [value for _, value in entry["top"]] == pytest.approx(column[best].tolist(), abs=1e-5)
        previous = entry["id"]


@pytest.mark.parametrize(("draft", "topk", "steps"), [(None, 1, 1), ("draft_model:stoch_draft", 1, 2), ("draft_model:stoch_draft", 4, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_values_are_the_law_at_the_rows_temperature_before_filters(draft: str | None, topk: int, steps: int, temperature: float) -> None:
    sampling = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed, top_k=4, top_p=0.9) for seed in range(4)]
    total = sum(p ** (1 / temperature) for p in TARGET_LAW.values())
    law = {token: math.log(p ** (1 / temperature) / total) for token, p in TARGET_LAW.items()}
    for row in rows_of("stoch_target", draft, [[30]] * 4, sampling, 5, topk=topk, steps=steps):
        assert values(row) == pytest.approx([law[token] for token in row.output_ids], abs=1e-5)
        for entry in row.logprobs:
            assert [token for token, _ in entry["top"]] == list(TARGET_LAW), "equal values: the lower id first"
            assert [value for _, value in entry["top"]] == pytest.approx(list(law.values()), abs=1e-5)


def test_a_greedy_rows_values_are_undivided_beside_sampled_rows() -> None:
    sampling = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, temperature=2.0, seed=1)]
    greedy, _ = rows_of("stoch_target", "draft_model:stoch_draft", [[30]] * 2, sampling, 1, steps=2)
    assert values(greedy) == pytest.approx([math.log(0.5)] * 6, abs=1e-5)


@pytest.mark.parametrize(
    ("draft", "topk", "steps"), [("draft_model:rand_draft", 1, 4), ("draft_model:rand_draft", 3, 3), ("eagle:eagle1_stirred", 2, 2)]
)
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.8, seed=7, top_p=0.9, repetition_penalty=1.3, min_tokens=20)],
    ids=["T=0", "T=0.8 with penalties"],
)
def test_a_draft_changes_no_value(draft: str, topk: int, steps: int, sampling: SamplingParams) -> None:
    plain = rows_of("rand_target", None, PROMPTS, sampling, 4, batch=1)
    drafted = rows_of("rand_target", draft, PROMPTS, sampling, 4, topk=topk, steps=steps, batch=4, overlap=1, page=4)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.output_ids == theirs.output_ids
        assert values(ours) == pytest.approx(values(theirs), abs=1e-4)
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [token for token, _ in mine["top"]] == [token for token, _ in other["top"]]


def test_values_of_a_model_with_attention_equal_a_recompute_without_a_cache() -> None:
    (row,) = rows_of("rand_target", "draft_model:rand_draft", PROMPTS[:1], SamplingParams(max_tokens=8), 0, steps=3, topk=2)
    model, context = Recompute("rand_target"), list(PROMPTS[0])
    for entry in row.logprobs:
        z = model.logits(context)
        assert entry["logprob"] == pytest.approx(z[entry["id"]] - z.max() - math.log(np.exp(z - z.max()).sum()), abs=1e-4)
        assert entry["top"] == []
        context.append(entry["id"])


def test_masked_tokens_have_no_probability_and_the_rest_share_all_of_it() -> None:
    sampling = SamplingParams(max_tokens=4, allowed_token_ids=(31, 38))
    (row,) = rows_of("target", PERFECT, [[30]], sampling, 3, steps=2)
    first = row.logprobs[0]
    assert [token for token, _ in first["top"]] == [31, 38, 0] and first["top"][2][1] == -math.inf
    assert [value for _, value in first["top"][:2]] == pytest.approx([-math.log1p(math.exp(-4)), -4 - math.log1p(math.exp(-4))], abs=1e-6)


@pytest.mark.parametrize(("draft", "topk"), [(None, 1), (PERFECT, 1), (PERFECT, 3)])
def test_entries_are_cut_at_the_token_the_text_is_cut_at(draft: str | None, topk: int) -> None:
    sampling = [SamplingParams(max_tokens=20, stop=("w33",)), SamplingParams(max_tokens=20), SamplingParams(max_tokens=7)]
    rows = rows_of("target", draft, [[30], [10], [30]], sampling, 1, topk=topk, steps=5, text=True)
    assert [len(row.logprobs) for row in rows] == [3, 5, 7]


def test_preempted_rows_keep_their_entries() -> None:
    sampling = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    options = dict(steps=3, page=4, batch=8)
    roomy = rows_of("rand_target", "draft_model:rand_draft", PROMPTS * 2, sampling, 2, **options)
    tight = rows_of("rand_target", "draft_model:rand_draft", PROMPTS * 2, sampling, 2, overlap=1, pages=40, **options)
    for ours, theirs in zip(tight, roomy, strict=True):
        assert values(ours) == pytest.approx(values(theirs), abs=1e-4)


def test_entries_are_plain_json() -> None:
    (row,) = rows_of("target", None, [[30]], SamplingParams(max_tokens=2), 2)
    assert json.loads(json.dumps(row.logprobs)) == row.logprobs
    assert set(row.logprobs[0]) == {"id", "logprob", "top"}


def test_more_entries_than_the_vocabulary_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.logprobs=49 is more than the 48 ids the model can write"):
        engine_of("target", None, logprobs=49)
    engine_of("target", None, logprobs=48)
