"""The samples of one prompt share its full pages: less is prefilled, and nothing that is written changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from specgen.engine.engine import Engine
from specgen.types import Prompt, Request, SamplingParams
from tests.harness import Run, drive, engine_of
from tests.toys import expected_rand

PROMPTS = [row["prompt_ids"] for row in expected_rand()]
LAW = SamplingParams(max_tokens=16, temperature=1.0, seed=4, top_p=0.95, n=3, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=4)
DRAFTS = [
    (None, 1, 1),
    ("draft_model:rand_draft", 1, 3),
    ("draft_model:rand_draft", 3, 2),
    ("eagle:eagle1_stirred", 2, 3),
    ("eagle3:eagle3_stirred", 1, 3),
    ("ngram", 1, 4),
]


def samples(prompts: Sequence[Sequence[int]], sampling: SamplingParams, together: bool = True) -> list[Request]:
    """``sampling.n`` requests of each prompt; apart, each has a prompt object of its own and shares nothing."""
    found = []
    for i, ids in enumerate(prompts):
        prompt = Prompt(index=i, id=i, key=i, token_ids=list(ids), sampling=sampling)
        for sample in range(sampling.n):
            mine = prompt if together else Prompt(index=i, id=i, key=i, token_ids=list(ids), sampling=sampling)
            found.append(Request(mine, sampling, sample=sample))
    return found


def prefilled(lengths: Sequence[int], n: int, page: int) -> int:
    """Prompt tokens run when every sample but the first of its prompt takes over the full pages before the last token."""
    return sum(n * length - (n - 1) * ((length - 1) // page * page) for length in lengths)


@cache
def apart_of(draft: str | None, topk: int, steps: int) -> Run:
    """Samples that share nothing."""
    return drive(engine_of("rand_target", draft, topk=topk, steps=steps, page=4, batch=24), samples(PROMPTS, LAW, together=False))


@pytest.mark.parametrize(("draft", "topk", "steps"), DRAFTS)
@pytest.mark.parametrize(("page", "overlap", "chunk"), [(4, 0, 2048), pytest.param(1, 1, 2048, marks=pytest.mark.slow), (4, 1, 7), (16, 1, 2048)])
def test_samples_share_full_pages_and_write_the_same_text(draft: str | None, topk: int, steps: int, page: int, overlap: int, chunk: int) -> None:
    apart, options = apart_of(draft, topk, steps), dict(topk=topk, steps=steps, page=page, batch=24, overlap=overlap, chunk=chunk)
    shared = drive(engine_of("rand_target", draft, **options), samples(PROMPTS, LAW))  # type: ignore[arg-type]
    assert shared.ids == apart.ids and shared.counts == apart.counts and shared.accepted == apart.accepted
    lengths = [len(p) for p in PROMPTS]
    assert apart.engine.scheduler.prefilled_tokens == 3 * sum(lengths)
    assert shared.engine.scheduler.prefilled_tokens == prefilled(lengths, 3, page)


def test_a_shared_page_is_held_once_and_the_page_of_the_last_token_is_each_samples_own() -> None:
    engine = engine_of("target", "draft_model:draft_half", page=4, batch=4)
    rows = samples([[1] * 12 + [30]], SamplingParams(max_tokens=9, temperature=1.0, n=4))
    for row in rows:
        engine.add(row)
    engine.step()
    assert [r.status for r in rows] == ["running"] + ["waiting"] * 3, "the others wait for the first one's prefill"
    engine.step()
    assert {r.status for r in rows} == {"running"}
    table, refcount = engine.pages.table, engine.pages.refcount
    pages = [table[r.slot, :4].tolist() for r in rows]
    assert all(p[:3] == pages[0][:3] for p in pages) and len({p[3] for p in pages}) == 4
    assert refcount[pages[0][:3]].tolist() == [4, 4, 4] and refcount[[p[3] for p in pages]].tolist() == [1] * 4
    engine.pages.check()
    while engine.has_work:
        engine.step()
    assert engine.pages.free_pages == engine.pages.num_pages - 1


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_page_of_the_last_prompt_token_is_never_shared(length: int, shared: int) -> None:
    result = drive(engine_of("target", None, page=4), samples([[30] * length], SamplingParams(max_tokens=3, n=2)))
    assert result.engine.scheduler.prefilled_tokens == 2 * length - 4 * shared
    assert result.ids == [[31, 32, 33]] * 2


def test_other_prompts_do_not_wait_for_a_siblings_prefill() -> None:
    engine = engine_of("target", None, page=4, batch=4, chunk=64)
    rows = samples([[1] * 8 + [30], [1] * 8 + [40]], SamplingParams(max_tokens=4, n=2))
    for row in rows:
        engine.add(row)
    engine.step()
    assert [r.status for r in rows] == ["running", "waiting", "running", "waiting"]
    assert [r.prompt.index for r in engine.scheduler.waiting] == [0, 1], "those passed over keep their places"
    while engine.has_work:
        engine.step()
    assert [r.output_ids for r in rows] == [[31, 32, 33, 34]] * 2 + [[41, 42, 40, 41]] * 2


@pytest.mark.parametrize(("draft", "topk", "steps"), DRAFTS)
@pytest.mark.parametrize("overlap", [0, 1])
def test_shared_pages_survive_preemption(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    options = dict(topk=topk, steps=steps, page=4, batch=9)
    calm = drive(engine_of("rand_target", draft, **options), samples(PROMPTS[:3], LAW))  # type: ignore[arg-type]
    pages = 34 if draft is None else 42
    tight = drive(engine_of("rand_target", draft, **options, overlap=overlap, pages=pages), samples(PROMPTS[:3], LAW))  # type: ignore[arg-type]
    assert calm.engine.scheduler.preemptions == 0 and tight.engine.scheduler.preemptions >= 1
    assert tight.ids == calm.ids and tight.counts == calm.counts


def test_a_sample_may_be_preempted_or_aborted_at_any_moment() -> None:
    def made() -> tuple[Engine, list[Request]]:
        return engine_of("rand_target", "draft_model:rand_draft", steps=2, page=4, batch=3, overlap=1, chunk=9), samples(PROMPTS[:2], LAW)

    calm = drive(*made()).ids
    for moment in range(1, 14):
        for victim in {moment % 3, (moment + 1) % 3}:
            engine, rows = made()
            for row in rows:
                engine.add(row)
            for number in range(10_000):  # with an end, so that a hang fails
                if not engine.has_work:
                    break
                if number == moment and rows[victim].status == "running":
                    engine.scheduler._preempt(rows[victim])
                if number == moment + 1:
                    engine.abort(rows[0])
                engine.step()
                engine.pages.check()
            assert [r.output_ids for r in rows[1:]] == calm[1:], (moment, victim)
            assert rows[0].output_ids == calm[0][: len(rows[0].output_ids)]
            assert engine.pages.free_pages == engine.pages.num_pages - 1


def test_fewer_slots_than_samples_still_share_with_whoever_runs() -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=2, n=7)
    prompt = [[1] * 20 + [30]]
    result = drive(engine_of("stoch_target", "draft_model:stoch_draft", page=4, batch=3, steps=2), samples(prompt, sampling))
    alone = drive(engine_of("stoch_target", None, page=4, batch=1), samples(prompt, sampling, together=False))
    assert result.ids == alone.ids and len({tuple(ids) for ids in result.ids}) == 7
    assert result.engine.scheduler.prefilled_tokens <= 2 * 21 + 5 * 1 + 20
