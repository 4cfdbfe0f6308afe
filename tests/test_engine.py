"""The engine as a whole: the draft, the batch and memory pressure change how fast a row comes, and nothing else."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest

from specgen.engine.scheduler import Scheduler
from specgen.types import Request, SamplingParams
from tests.harness import Run, drive, engine_of, requests_of, run, thinned
from tests.oracles import endless_text, follow, plain, tally_chain
from tests.toys import EOS, HALF, NEVER, SUCCESSOR, expected_rand

ROWS = expected_rand()
PROMPTS = [row["prompt_ids"] for row in ROWS]
GREEDY = [row["greedy_32"] for row in ROWS]
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
FILTERED = SamplingParams(max_tokens=24, temperature=0.8, seed=7, top_k=20, top_p=0.9, min_p=0.02)


@cache
def reference(sampling: SamplingParams) -> list[list[int]]:
    """Plain decoding, one row at a time."""
    return run("rand_target", None, PROMPTS, sampling, batch=1).ids


def _settings() -> list[tuple]:
    """Methods against every batch, overlap and order in turn: (draft, topk, steps, batch, overlap, order)."""
    drafts = [(None, 1, 1), ("ngram", 1, 2), ("ngram", 1, 5)]
    drafts += [("draft_model:rand_draft", k, s) for k, s in ((1, 1), (1, 4), (2, 3), (4, 2), (8, 1))]
    drafts += [(head, k, s) for head in ("eagle:eagle1_stirred", "eagle3:eagle3_stirred") for k, s in ((1, 3), (3, 2))]
    around = itertools.cycle([(8, 0, None), (3, 1, SHUFFLED), (8, 1, SHUFFLED), (2, 0, SHUFFLED)])
    return [(*draft, *next(around)) for draft in drafts for _ in range(2)]


@pytest.mark.parametrize(("draft", "topk", "steps", "batch", "overlap", "order"), thinned(_settings(), lambda number: number % 2 == number // 4 % 2))
@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED], ids=["T=0.8", "T=0.8 filtered"])
def test_sampled_text_does_not_depend_on_the_draft_the_batch_or_the_order(
    draft: str | None, topk: int, steps: int, batch: int, overlap: int, order: list[int] | None, sampling: SamplingParams
) -> None:
    if sampling is FILTERED and overlap:
        batch = 8
    result = run("rand_target", draft, PROMPTS, sampling, topk=topk, steps=steps, batch=batch, overlap=overlap, order=order, page=4)
    assert result.ids == reference(sampling)


@pytest.mark.parametrize(
    ("draft", "topk", "steps"), [("ngram", 1, 4), ("eagle:eagle1_stirred", 1, 3), ("eagle:eagle1_stirred", 4, 2), ("eagle3:eagle3_stirred", 2, 3)]
)
@pytest.mark.parametrize(("batch", "overlap", "order"), [(8, 1, None), (3, 0, SHUFFLED)])
def test_greedy_text_does_not_depend_on_the_draft_the_batch_or_the_order(
    draft: str, topk: int, steps: int, batch: int, overlap: int, order: list[int] | None
) -> None:
    result = run("rand_target", draft, PROMPTS, topk=topk, steps=steps, batch=batch, overlap=overlap, order=order, page=4)
    assert result.ids == GREEDY


def test_the_toys_are_sampled_widely_enough_to_notice() -> None:
    assert len({token for ids in reference(SAMPLED) for token in ids}) > 30
    assert reference(SAMPLED) != reference(FILTERED) != [g[:24] for g in GREEDY]


@pytest.mark.parametrize(
    ("topk", "steps", "sampling"), thinned([(1, 3, SAMPLED), (4, 2, SAMPLED), (1, 3, None), (4, 2, None)], lambda number: number in (1, 2))
)
def test_counts_do_not_depend_on_batch_overlap_page_or_order(topk: int, steps: int, sampling: SamplingParams | None) -> None:
    base = run("rand_target", "draft_model:rand_draft", PROMPTS, sampling, topk=topk, steps=steps)
    for options in (dict(batch=3, overlap=1, page=1), dict(batch=8, overlap=1, page=4, order=SHUFFLED), dict(batch=2, chunk=5)):
        other = run("rand_target", "draft_model:rand_draft", PROMPTS, sampling, topk=topk, steps=steps, **options)
        assert other.counts == base.counts and other.accepted == base.accepted
        assert [r.provenance for r in other.requests] == [r.provenance for r in base.requests]


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_rows_under_any_settings_is_what_plain_decoding_gives(seed: int) -> None:
    """Rows of all kinds together, a tight pool, odd pages and chunks: ids, finish and stop reasons, and text are those of a plain run."""
    draw = random.Random(seed)
    prompts = [draw.choice(PROMPTS)[: draw.randint(1, 40)] for _ in range(draw.randint(2, 8))]
    sampling = [
        SamplingParams(
            max_tokens=draw.randint(0, 20),
            temperature=draw.choice([0.0, 0.5, 1.2]),
            seed=draw.randint(0, 9),
            top_k=draw.choice([0, 5]),
            top_p=draw.choice([1.0, 0.8]),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(48), draw.choice([0, 2, 18]))),
            stop=draw.choice([(), ("w3",), ("1 w",)]),
        )
        for _ in prompts
    ]
    max_length = draw.choice([None, 48, 64])
    draft = draw.choice(["draft_model:rand_draft", "eagle:eagle1_stirred", "eagle3:eagle3_stirred", "ngram"])
    topk, steps = 1 if draft == "ngram" else draw.choice([1, 2, 3, 5]), draw.randint(1, 6)
    nodes = None if topk == 1 else draw.randint(2, min(40, 1 + topk + (steps - 1) * topk * topk))
    options = dict(topk=topk, steps=steps, nodes=nodes, page=draw.choice([1, 2, 3, 16]), overlap=draw.randint(0, 1), max_length=max_length, text=True)
    reserve = engine_of("rand_target", draft, **options).reserve
    most = max(-(-(len(p) + s.max_tokens + reserve) // options["page"]) for p, s in zip(prompts, sampling, strict=True))
    options |= dict(pages=most + 1 + draw.randint(0, most // 2), chunk=draw.choice([1, 5, 64, 2048]), batch=draw.randint(1, 8))

    plain_run = run("rand_target", None, prompts, sampling, max_length=max_length, text=True)
    result = run("rand_target", draft, prompts, sampling, order=draw.sample(range(len(prompts)), len(prompts)), **options)
    for ours, theirs in zip(result.requests, plain_run.requests, strict=True):
        assert ours.output_ids == theirs.output_ids
        assert (ours.finish_reason, ours.stop_reason, ours.error) == (theirs.finish_reason, theirs.stop_reason, theirs.error)
        assert result.engine.text.final(ours) == plain_run.engine.text.final(theirs)


@pytest.mark.parametrize(("draft", "topk"), [(None, 1), ("draft_model:rand_draft", 1), ("eagle:eagle1_stirred", 2)])
@pytest.mark.parametrize(("overlap", "pages"), thinned([(0, None), (1, None), (1, 35)], lambda number: number > 0))
def test_steps_kept_for_all_rows_at_once_and_row_by_row_are_the_same(
    draft: str | None, topk: int, overlap: int, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end one after the other, by their limit or by EOS, or are preempted; a long row list takes the first way while nobody ends."""
    sampling = [SamplingParams(max_tokens=4 + 5 * i, temperature=0.7 * (i % 2)) for i in range(len(PROMPTS))]
    appended, append = [0], Scheduler._append
    monkeypatch.setattr(Scheduler, "_append", lambda *args: appended.append(1) or append(*args))
    found = []
    for few in (0, 1000):
        monkeypatch.setattr("specgen.engine.scheduler.FEW", few)
        appended[:] = []
        result = run("rand_target", draft, PROMPTS, sampling, topk=topk, overlap=overlap, page=4, pages=pages, batch=6)
        found.append((result.ids, result.counts, result.accepted, [r.provenance for r in result.requests]))
        assert (len(appended) > 8) == (few == 0)
        assert pages is None or result.engine.scheduler.preemptions
    assert found[0] == found[1]


# -- counts -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "successor"), [("draft_perfect", SUCCESSOR), ("draft_half", HALF), ("draft_never", NEVER)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_counts_of_table_models_are_what_speculating_by_hand_gives(draft: str, successor: list[int], steps: int) -> None:
    prompts = [[10], [30], [40], [24], [5], [1, 33]]
    result = run("target", f"draft_model:{draft}", prompts, steps=steps, max_tokens=17, overlap=steps % 2)
    for prompt, request, accepted in zip(prompts, result.requests, result.accepted, strict=True):
        output, reason = plain(prompt, 17)
        tally = tally_chain(prompt, output, follow(successor), steps, endless_text(prompt, 30))
        assert (request.output_ids, request.finish_reason) == (output, reason)
        assert request.counts.as_dict() == tally.counts()
        assert accepted == tally.per_step


def test_counts_of_plain_decoding_are_steps_without_a_draft() -> None:
    result = run("target", None, [[30], [10]], max_tokens=9)
    expected = dict(prefill_sampled=1, verify_steps=0, proposed=[], reached=[], accepted=[], trimmed=0)
    assert result.counts == [expected | dict(steps_without_draft=n, committed=n) for n in (8, 4)]


def test_a_step_without_a_match_is_no_rejection() -> None:
    """Prompt lookup finds nothing until the 5-cycle has come round: those steps have no draft, the rest are accepted whole."""
    result = run("target", "ngram", [[30]], steps=2, max_tokens=16)
    # 31 from the prefill; 32 33 34 30 one by one; then 31 has been seen before, and every draft is right.
    assert result.accepted == [[0, 0, 0, 0, 2, 2, 2, 2]]
    assert result.counts[0]["steps_without_draft"] == 4 and result.counts[0]["verify_steps"] == 4
    assert result.counts[0]["proposed"] == result.counts[0]["accepted"] == [4, 4]
    assert result.ids == [endless_text([30], 16)]


def test_a_tree_counts_depths_not_nodes() -> None:
    result = run("target", "draft_model:draft_perfect", [[30]], topk=4, steps=3, max_tokens=21)
    assert result.counts == [
        dict(
            prefill_sampled=1,
            verify_steps=5,
            steps_without_draft=0,
            proposed=[5, 5, 5],
            reached=[5, 5, 5],
            accepted=[5, 5, 5],
            committed=20,
            trimmed=0,
        )
    ]


def test_provenance_says_which_tokens_were_drafted_and_at_what_depth() -> None:
    (row,) = run("target", "draft_model:draft_half", [[30]], steps=3, max_tokens=8).requests
    # Right after even tokens only: 31 | 32 from 31: wrong | 33 accepted, 34 not | 30 31 ...
    assert row.output_ids == [31, 32, 33, 34, 30, 31, 32, 33]
    assert row.provenance == [-1, 0, 1, 0, 1, 2, 0, 1]


def test_a_row_that_ends_at_its_first_token_has_no_steps() -> None:
    result = run("target", "draft_model:draft_perfect", [[5], [30]], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1)], overlap=1)
    assert result.ids == [[EOS], [31]] and result.finish == ["stop", "length"]
    empty = dict(prefill_sampled=1, verify_steps=0, steps_without_draft=0, proposed=[], reached=[], accepted=[], committed=0, trimmed=0)
    assert result.counts == [empty, empty] and result.steps == [[], []]


# -- memory pressure --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=32), SamplingParams(max_tokens=32, temperature=0.8, seed=7)], ids=["T=0", "T=0.8"])
@pytest.mark.parametrize(
    ("draft", "topk", "steps", "overlap", "pages"),
    [
        (None, 1, 1, 1, 40),
        pytest.param("draft_model:rand_draft", 1, 3, 0, 40, marks=pytest.mark.slow),
        ("draft_model:rand_draft", 1, 3, 1, 40),
        pytest.param("draft_model:rand_draft", 3, 2, 1, 44, marks=pytest.mark.slow),
        ("ngram", 1, 3, 1, 40),
        ("eagle:eagle1_stirred", 2, 2, 0, 44),
    ],
)
def test_preempted_rows_end_with_the_same_text_and_counts(
    draft: str | None, topk: int, steps: int, overlap: int, pages: int, sampling: SamplingParams
) -> None:
    roomy = run("rand_target", draft, PROMPTS, sampling, topk=topk, steps=steps, page=4, batch=8)
    tight = run("rand_target", draft, PROMPTS, sampling, topk=topk, steps=steps, page=4, batch=8, overlap=overlap, pages=pages)
    assert roomy.engine.scheduler.preemptions == 0 and tight.engine.scheduler.preemptions >= 2
    assert tight.ids == roomy.ids
    assert tight.counts == roomy.counts
    assert tight.accepted == roomy.accepted


@pytest.mark.parametrize("overlap", [0, 1])
def test_preempted_rows_of_a_head_that_is_often_right_keep_their_counts(overlap: int) -> None:
    prompts = [[30], [40, 41], [1, 31, 32], [24], [33]]
    options = dict(steps=3, page=2, max_tokens=30)
    roomy = run("target", "eagle:eagle1_stirred", prompts, **options)
    tight = run("target", "eagle:eagle1_stirred", prompts, **options, overlap=overlap, pages=44, chunk=9)
    assert tight.engine.scheduler.preemptions >= 2
    assert tight.ids == roomy.ids and tight.counts == roomy.counts


@pytest.mark.parametrize(("page", "pages", "chunk", "prompts"), [(3, 61, 2, (60, 100)), (16, 14, 2, (63, 110))])
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_only_decoding_row_may_be_preempted_while_another_is_being_prefilled(
    page: int, pages: int, chunk: int, prompts: tuple[int, ...], overlap: int
) -> None:
    """A long prompt's prefill takes more steps than the page that was left for the rows beside it lasts."""
    rows = [[5 + i] * n for i, n in enumerate(prompts)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    result = run("rand_target", None, rows, sampling, batch=4, page=page, pages=pages, chunk=chunk, overlap=overlap)
    assert result.engine.scheduler.preemptions and result.ids == run("rand_target", None, rows, sampling).ids


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pool_for_one_row_at_a_time_still_runs_all(overlap: int) -> None:
    result = run("target", "draft_model:draft_half", [[30]] * 5, page=1, pages=1 + 20 + 9, steps=3, overlap=overlap, max_tokens=19)
    assert result.ids == [endless_text([30], 19)] * 5


@pytest.mark.parametrize(
    ("draft", "topk", "sampling"),
    [("draft_model:rand_draft", 1, SAMPLED), ("draft_model:rand_draft", 2, SAMPLED), pytest.param(None, 1, SAMPLED, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_may_be_preempted_at_any_moment(draft: str | None, topk: int, sampling: SamplingParams, overlap: int) -> None:
    """Also while its first token, its last token, or a step that its slot's next owner must not be given is in flight."""
    short = SamplingParams(max_tokens=7, temperature=0.8, seed=7)
    calm = run("rand_target", draft, PROMPTS[:3], [sampling, short, sampling], topk=topk, steps=2)
    for moment in range(1, 12):
        engine = engine_of("rand_target", draft, topk=topk, steps=2, page=4, overlap=overlap, batch=3)
        requests = requests_of(PROMPTS[:3], [sampling, short, sampling])
        step, clock = engine.step, itertools.count(1)

        def stepped(engine=engine, step=step, clock=clock, moment=moment, requests=requests) -> list[Request]:
            if next(clock) in (moment, moment + 2):
                for request in (requests[1], requests[0]):
                    if request.status == "running":
                        engine.scheduler._preempt(request)
            return step()

        engine.step = stepped  # type: ignore[method-assign]
        result = drive(engine, requests)
        assert result.ids == calm.ids and result.counts == calm.counts, moment
        assert result.finish == calm.finish


# -- stops ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "topk", "steps"), [(None, 1, 1), ("draft_model:draft_perfect", 1, 12), ("draft_model:draft_perfect", 3, 4)])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [(("w31",), 1, ""), (("w33",), 3, "w31 w32 "), (("34 w3",), 5, "w31 w32 w33 w"), (("zz", "w30 w31 w32"), 7, "w31 w32 w33 w34 ")],
)
def test_a_stop_string_ends_a_row_at_its_token_wherever_it_lies_in_a_run(
    draft: str | None, topk: int, steps: int, overlap: int, stop: tuple[str, ...], kept: int, text: str
) -> None:
    sampling = SamplingParams(max_tokens=30, stop=stop)
    result = run("target", draft, [[30], [40]], sampling, topk=topk, steps=steps, overlap=overlap, text=True)
    row, other = result.requests
    assert row.output_ids == endless_text([30], kept) and row.finish_reason == "stop" and row.stop_reason == stop[-1]
    assert result.engine.text.final(row) == text
    assert other.output_ids == endless_text([40], 30) and other.finish_reason == "length"


def test_include_stop_shows_the_stop_string() -> None:
    sampling = SamplingParams(max_tokens=30, stop=("2 w33",), include_stop=True)
    result = run("target", "draft_model:draft_perfect", [[30]], sampling, steps=5, text=True)
    assert result.engine.text.final(result.requests[0]) == "w31 w32 w33"


def test_what_follows_a_stop_string_is_trimmed_and_counted() -> None:
    sampling = SamplingParams(max_tokens=30, stop=("w33",))
    (row,) = run("target", "draft_model:draft_perfect", [[30]], sampling, steps=4, text=True).requests
    assert row.output_ids == [31, 32, 33] and row.provenance == [-1, 1, 2]
    assert row.counts.as_dict() == dict(
        prefill_sampled=1, verify_steps=1, steps_without_draft=0, proposed=[1] * 4, reached=[1] * 4, accepted=[1] * 4, committed=5, trimmed=3
    )


@pytest.mark.parametrize("count", [1, 16, 17, 40])
@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_stop_lists_of_any_length_are_honoured(count: int, draft: str | None, overlap: int) -> None:
    """Up to 16 ids are applied on the device, longer lists on the host."""
    fillers = [i for i in range(48) if i not in (30, 31, 32, 33, 34, EOS)][: count - 1]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(*fillers, 34))
    result = run("target", draft, [[30], [33]], sampling, steps=5, overlap=overlap)
    assert result.ids == [[31, 32, 33, 34], [34]]
    assert result.finish == ["stop", "stop"] and [r.stop_reason for r in result.requests] == [34, 34]
    if draft is None:
        assert [c["trimmed"] for c in result.counts] == [0, 0]
    else:
        assert [c["trimmed"] for c in result.counts] == [3, 0]


def test_a_stop_string_and_a_long_stop_list_together_end_at_the_earlier() -> None:
    many = tuple(i for i in range(48) if i not in (30, 31, 32, 33))
    for stop, kept, reason in ((("w33",), 3, "w33"), (("w30",), 4, 34)):
        sampling = SamplingParams(max_tokens=30, stop=stop, stop_token_ids=many)
        (row,) = run("target", "draft_model:draft_perfect", [[30]], sampling, steps=6, text=True).requests
        assert (len(row.output_ids), row.stop_reason) == (kept, reason)


def test_ignore_eos_runs_on_to_the_limit() -> None:
    result = run("target", "draft_model:draft_perfect", [[10]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert result.ids == [[11, 12, 13, 14, 2, 20, 21, 22, 10]] and result.finish == ["length"]


def test_a_rows_own_stop_ids_join_the_models_eos() -> None:
    result = run("target", "draft_model:draft_perfect", [[10], [30]], SamplingParams(max_tokens=9, stop_token_ids=(33,)))
    assert result.ids == [[11, 12, 13, 14, 2], [31, 32, 33]] and result.finish == ["stop", "stop"]


def test_stop_strings_without_a_tokenizer_are_an_error_not_ignored() -> None:
    result = run("target", None, [[30], [30]], [SamplingParams(max_tokens=5, stop=("w31",)), SamplingParams(max_tokens=5)])
    assert result.finish == ["error", "length"]
    assert result.requests[0].error == {
        "type": "ConfigError",
        "message": "sampling.stop needs the model's tokenizer, and there is none: give sampling.stop_token_ids instead",
    }


# -- rows that do not run, and rows that are dropped ------------------------------------------------------------------------------------------


def test_zero_tokens_are_zero_tokens() -> None:
    result = run("target", "draft_model:draft_perfect", [[30], [30]], [SamplingParams(max_tokens=0), SamplingParams(max_tokens=3)])
    assert result.ids == [[], [31, 32, 33]] and result.finish == ["length", "length"]
    assert result.counts[0]["prefill_sampled"] == 0


@pytest.mark.parametrize("prompt", [[], [30] * 32, [30] * 40])
def test_a_prompt_that_leaves_no_room_is_an_error_and_the_others_run(prompt: list[int]) -> None:
    result = run("target_ctx32", "draft_model:draft_perfect", [prompt, [30]], max_tokens=4)
    assert result.finish == ["error", "length"] and result.ids == [[], endless_text([30], 4)]
    assert result.requests[0].error == {
        "type": "ContextError",
        "message": f"a prompt of {len(prompt)} tokens leaves no room to generate: 1 to 31 fit model.max_length",
    }


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_aborted_row_gives_back_its_pages_and_its_slot(overlap: int) -> None:
    engine = engine_of("target", "draft_model:draft_half", batch=2, page=2, overlap=overlap, chunk=4)
    rows = requests_of([[30], [40], [10], [1] * 9 + [30]], SamplingParams(max_tokens=30))
    for row in rows:
        engine.add(row)
    done: list[Request] = []
    for number in range(4):
        done += engine.step()
        if number == 2:
            engine.abort(rows[0])  # running, with a step in flight
            engine.abort(rows[2])  # still waiting
    frozen = list(rows[0].output_ids)
    while engine.has_work:
        done += engine.step()
    assert [r.finish_reason for r in rows] == ["error", "length", "error", "length"]
    assert rows[0].error == rows[2].error == {"type": "Aborted", "message": "the request was aborted"}
    assert rows[0].output_ids == frozen == endless_text([30], len(frozen)) and rows[2].output_ids == []
    assert rows[1].output_ids == endless_text([40], 30) and rows[3].output_ids == endless_text([30], 30)
    assert {id(r) for r in done} == {id(rows[1]), id(rows[3])}
    engine.pages.check()
    assert engine.pages.free_pages == engine.pages.num_pages - 1
    engine.abort(rows[1])
    assert rows[1].finish_reason == "length", "a finished row is left alone"


@pytest.mark.parametrize("law", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_tokens": 4}])
def test_an_engine_that_has_run_can_be_stepped_by_hand_and_the_other_way_round(law: dict[str, float]) -> None:
    sampling, found = SamplingParams(max_tokens=12, **law), []  # type: ignore[arg-type]
    for ways in ("run step run", "step run step"):
        engine = engine_of("rand_target", "draft_model:rand_draft")
        for way in ways.split():
            (row,) = requests_of([[5, 6, 7]], sampling)
            if way == "run":
                engine.run([row])
            else:
                engine.add(row)
                while engine.has_work:
                    engine.step()
            found.append(row.output_ids)
    assert all(ids == found[0] for ids in found)


def test_an_engine_can_be_used_again() -> None:
    engine = engine_of("target", "draft_model:draft_perfect", batch=2, overlap=1)
    for _ in range(2):
        result: Run = drive(engine, requests_of([[10], [30], [40]], SamplingParams(max_tokens=9)))
        assert result.ids == [plain(p, 9)[0] for p in ([10], [30], [40])]


def test_rows_come_back_as_soon_as_they_end() -> None:
    engine = engine_of("target", None, batch=4)
    rows = requests_of([[30]] * 3, [SamplingParams(max_tokens=n) for n in (6, 2, 4)])
    assert [r.sampling.max_tokens for r in engine.run(rows)] == [2, 4, 6]


def test_more_rows_than_slots_are_run_in_the_order_they_came() -> None:
    engine = engine_of("target", None, batch=1)
    rows = requests_of([[30], [40], [10]], SamplingParams(max_tokens=5))
    assert [r.prompt.id for r in engine.run(rows)] == [0, 1, 2]


@pytest.mark.parametrize(("prompt", "draft"), [(3, None), (60, None), (120, None), (3, "draft_model:draft_half")])
def test_short_prompts_are_prefilled_together_and_long_ones_at_once(prompt: int, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 48 rows three slots may stay empty for it, never while nothing runs, nor when no more prompts are to come."""
    lengths = [5 + 7 * (i * i % 11) for i in range(120)]
    monkeypatch.setattr("specgen.engine.scheduler.FULL_PREFILL", 100)
    engine = engine_of("target", draft, batch=48, chunk=100_000, overlap=1)
    plans: list[tuple[int, int, int, int]] = []
    plan = engine.scheduler.next_batch

    def planned(num_steps: int) -> Any:
        waiting, running = len(engine.scheduler.waiting), len(engine.scheduler.running)
        batch = plan(num_steps)
        plans.append((waiting, running, len(batch.chunks), len(engine.scheduler.waiting)))
        return batch

    engine.scheduler.next_batch = planned  # type: ignore[method-assign]
    result = drive(engine, requests_of([[30 + i % 5] * prompt for i in range(120)], [SamplingParams(max_tokens=n) for n in lengths]))
    for row, n in zip(result.requests, lengths, strict=True):
        assert row.output_ids == endless_text(list(row.prompt.token_ids), n)
    group = max(1, min(3, -(-100 // prompt)))
    beside = [(chunks, left) for _, running, chunks, left in plans if chunks and running]
    assert len(beside) > 10 and all(chunks >= group or not left for chunks, left in beside)
    held = [48 - running for waiting, running, chunks, _ in plans if waiting and running and not chunks]
    assert all(0 <= free < group for free in held) and (max(held) > 0) == (group > 1)


def test_short_prompts_are_held_back_for_a_bounded_number_of_steps() -> None:
    engine = engine_of("target", None, batch=64)
    for row in requests_of([[30 + i % 5] for i in range(62)], SamplingParams(max_tokens=200)):
        engine.add(row)
    for _ in range(3):
        engine.step()
    late = requests_of([[31], [32], [33]], SamplingParams(max_tokens=2))
    for row in late:
        engine.add(row)
    steps = 0
    while not all(row.output_ids for row in late[:2]) and steps < 100:
        engine.step()
        steps += 1
    assert [row.output_ids[0] for row in late[:2]] == [32, 33] and 60 < steps < 70


def test_an_index_out_of_range_is_named_when_indices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from specgen.draft.autoregressive import AutoregressiveDrafter

    real = AutoregressiveDrafter.propose

    def wrong(self, rows, num_steps):
        draft = real(self, rows, num_steps)
        draft.next_sibling = rows.length.new_full((1, 4), 4)
        return draft

    monkeypatch.setattr(AutoregressiveDrafter, "propose", wrong)
    with pytest.raises(IndexError, match=r"draft next_sibling: 4 outside \[-1, 4\)"):
        run("rand_target", "draft_model:rand_draft", [[1, 5]], steps=3, max_tokens=8)
