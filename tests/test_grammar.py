"""``sampling.grammar`` in the engine: every row is a text of the grammar, and the same one whatever drafted it and whoever stood beside it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specgen.draft.adaptive import Choice
from specgen.engine.lossless import Turn, check_turn
from specgen.types import Draft, Request, SamplingParams
from tests import grammars
from tests.grammars import DOCUMENT, EOS, drive, engine_of, is_document, requests_of, run, text_of, tokenizer, written
from tests.harness import thinned

HOT = SamplingParams(max_tokens=48, temperature=0.8, seed=3)
EXPRESSION = 'ebnf:start: term (" + " term)*\nterm: /[a-z]{1,4}/ | "(" start ")"\n'
METHODS = [("eagle", 1), ("eagle3", 1), ("mtp", 1), ("draft_model", 1), ("dflash", 1), ("ngram", 1)]
METHODS += [("eagle", 4), ("eagle3", 4), ("mtp", 4), ("draft_model", 4)]


def tree(topk: int) -> dict[str, Any]:
    """A small draft: a chain of two, or a tree of six nodes."""
    return {"steps": 2, "nodes": 6 if topk > 1 else None}


@cache
def plain(grammar: str, count: int, sampling: SamplingParams = HOT) -> list[Request]:
    return run(grammar, count, sampling)


# -- documents --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 4], ids=["chain", "tree"])
def test_two_hundred_rows_are_two_hundred_valid_documents_with_a_draft_and_without(topk: int) -> None:
    rows = plain(DOCUMENT, 200)
    assert sum(is_document(text_of(row)) for row in rows) == 200
    assert {(row.finish_reason, row.stop_reason) for row in rows} <= {("stop", token) for token in EOS}
    assert len({text_of(row) for row in rows}) > 20
    drafted = run(DOCUMENT, 200, HOT, "eagle", topk, check_indices=False, **tree(topk))
    assert written(drafted) == written(rows)
    assert sum(sum(row.counts.accepted) for row in drafted) > 0


@pytest.mark.parametrize(("method", "topk"), thinned(METHODS, lambda number: number % 2 == 0))
def test_every_drafter_writes_the_same_documents(method: str, topk: int) -> None:
    assert written(run(DOCUMENT, 10, HOT, method, topk, **tree(topk))) == written(plain(DOCUMENT, 200))[:10]


@pytest.mark.parametrize("batch", [1, 7])
def test_the_batch_changes_nothing_though_its_rows_stand_at_different_places(batch: int) -> None:
    count = 3 if batch == 1 else 14
    for method, topk in (("none", 1), ("eagle", 1), ("eagle", 4)):
        options = {} if method == "none" else tree(topk)
        assert written(run(DOCUMENT, count, HOT, method, topk, max_batch=batch, **options)) == written(plain(DOCUMENT, 200))[:count]


@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("mtp", 4)])
def test_greedy_rows_follow_the_grammar_too(method: str, topk: int) -> None:
    greedy = replace(HOT, temperature=0.0)
    rows = plain(DOCUMENT, 16, greedy)
    assert all(is_document(text_of(row)) for row in rows)
    assert written(run(DOCUMENT, 16, greedy, method, topk, **tree(topk))) == written(rows)


def test_rows_of_different_parameters_stand_in_one_batch() -> None:
    each = [
        HOT, replace(HOT, temperature=0.0), replace(HOT, max_tokens=5), replace(HOT, repetition_penalty=1.5),
        replace(HOT, top_k=3), replace(HOT, min_tokens=12), replace(HOT, banned_token_ids=(tokenizer().encode("0", add_special_tokens=False)[0],)),
    ] * 2  # fmt: skip
    rows = run(DOCUMENT, len(each), each)
    for method, topk in (("eagle", 1), ("draft_model", 4)):
        assert written(run(DOCUMENT, len(each), each, method, topk, max_batch=5, **tree(topk))) == written(rows)
    for row, params in zip(rows, each, strict=True):
        assert is_document(text_of(row)) or (params.max_tokens == 5 and row.finish_reason == "length" and len(row.output_ids) == 5)
    assert written(rows[:1]) == written(plain(DOCUMENT, 200)[:1])
    assert all(json.loads(text_of(rows[at]))["n"] not in (0, 10) or "0" not in text_of(rows[at]) for at in (6, 13))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (r"regex:[0-9]{4}-(0[1-9]|1[0-2])", r"\d{4}-(0[1-9]|1[0-2])"),
        ('ebnf:root ::= "yes" | "no" | num\nnum ::= [1-9] [0-9]? "%"\n', r"yes|no|[1-9]\d?%"),
        (r'json:{"enum": ["a", "bc", 7]}', r'"a"|"bc"|7'),
    ],
    ids=["regex", "gbnf", "enum"],
)
def test_expressions_of_every_form_are_followed(grammar: str, pattern: str) -> None:
    rows = plain(grammar, 12)
    assert all(re.fullmatch(pattern, text_of(row)) and row.finish_reason == "stop" for row in rows)
    for method, topk in (("eagle", 1), ("eagle", 4)):
        assert written(run(grammar, 12, HOT, method, topk, **tree(topk))) == written(rows)


def test_a_recursive_grammar_is_followed_and_max_tokens_cuts_a_text_where_it_is() -> None:
    rows = plain(EXPRESSION, 24, replace(HOT, max_tokens=16))
    ended = [row for row in rows if row.finish_reason == "stop"]
    assert 0 < len(ended) < 24 and all(len(row.output_ids) == 16 for row in rows if row.finish_reason == "length")
    for row in ended:
        text = text_of(row)
        assert re.fullmatch(r"[a-z+() ]+", text) and text.count("(") == text.count(")")
    for method, topk in (("eagle", 1), ("mtp", 4)):
        assert written(run(EXPRESSION, 24, replace(HOT, max_tokens=16), method, topk, **tree(topk))) == written(rows)


# -- the life of a row ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "topk"), [("none", 1), ("eagle", 1), ("eagle", 4)])
def test_a_preempted_row_goes_on_where_it_stood(method: str, topk: int) -> None:
    options = {} if method == "none" else tree(topk)
    engine = engine_of(DOCUMENT, method, topk, max_batch=8, page_size=4, pages=8 * 9, **{"steps": 2, **options})
    requests = requests_of(20, HOT)
    drive(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert written(requests) == written(plain(DOCUMENT, 200))[:20]


def test_a_matcher_serves_one_row_after_another() -> None:
    engine = engine_of(DOCUMENT, "eagle", max_batch=4, steps=2)
    requests = requests_of(20, HOT)
    drive(engine, requests)
    assert engine.grammar is not None and len(engine.grammar._free) <= 4
    assert written(requests) == written(plain(DOCUMENT, 200))[:20]


def test_an_aborted_row_leaves_the_others_alone() -> None:
    engine = engine_of(DOCUMENT, "eagle", max_batch=8, steps=2)
    requests = requests_of(8, HOT)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.abort(requests[2])
    while engine.has_work:
        engine.step()
    assert requests[2].grammar is None and requests[2].finish_reason == "error"
    rest = [n for n in range(8) if n != 2]
    assert written([requests[n] for n in rest]) == [written(plain(DOCUMENT, 200))[n] for n in rest]


def test_samples_of_one_prompt_each_write_a_document() -> None:
    def samples(method: str, topk: int = 1, **options: Any) -> list[Request]:
        engine = engine_of(DOCUMENT, method, topk, page_size=4, **options)
        (first,) = requests_of(1, replace(HOT, n=8))
        requests = [Request(first.prompt, first.sampling, sample) for sample in range(8)]
        drive(engine, requests)
        return requests

    rows = samples("none")
    assert all(is_document(text_of(row)) for row in rows) and len({text_of(row) for row in rows}) > 2
    assert written(samples("eagle", 4, **tree(4))) == written(rows)


# -- ends -------------------------------------------------------------------------------------------------------------------------------------


def test_a_rows_own_stop_ids_end_it_where_the_text_is_complete_and_nowhere_else() -> None:
    digit = tokenizer().encode("7", add_special_tokens=False)[0]
    params = replace(HOT, stop_token_ids=(digit,))
    rows = run("regex:[0-9]{3}", 12, params)
    for row in rows:
        text = tokenizer().decode([token for token in row.output_ids[:-1]])
        assert re.fullmatch(r"\d{3}", text) and row.stop_reason == row.output_ids[-1] in (*EOS, digit)
        assert digit not in row.output_ids[:-1]
    assert written(run("regex:[0-9]{3}", 12, params, "eagle", 4, **tree(4))) == written(rows)


def test_more_stop_ids_than_the_device_knows_change_nothing() -> None:
    params = replace(HOT, stop_token_ids=tuple(range(4000, 4030)), min_tokens=40)
    rows = run(DOCUMENT, 12, params)
    assert all(is_document(tokenizer().decode(row.output_ids[:-1])) and row.output_ids[-1] in (*EOS, *range(4000, 4030)) for row in rows)
    assert written(run(DOCUMENT, 12, params, "eagle", 4, **tree(4))) == written(rows)


def test_a_stop_string_cuts_a_document_without_an_error() -> None:
    rows = run(DOCUMENT, 8, replace(HOT, stop=(',"t"',)), "eagle", **tree(1))
    assert {(row.finish_reason, row.stop_reason) for row in rows} == {("stop", ',"t"')}


@pytest.mark.parametrize(("method", "topk"), [("none", 1), ("eagle", 1), ("draft_model", 4)])
def test_min_tokens_waits_while_another_id_is_left_and_yields_where_none_is(method: str, topk: int) -> None:
    options = {} if method == "none" else tree(topk)
    longer = run("regex:[0-9]{1,40}", 8, replace(HOT, min_tokens=9), method, topk, **options)
    assert all(len(row.output_ids) >= 9 and row.finish_reason == "stop" for row in longer)
    assert min(len(row.output_ids) for row in run("regex:[0-9]{1,40}", 8, HOT)) < 9
    short = run("regex:(yes|no)", 8, replace(HOT, min_tokens=9), method, topk, **options)
    assert {text_of(row) for row in short} <= {"yes", "no"} and {row.finish_reason for row in short} == {"stop"}


def ids_with(text: str) -> tuple[int, ...]:
    return tuple(token for token in range(len(tokenizer())) if text in tokenizer().decode([token]))


@pytest.mark.parametrize(("method", "topk"), [("none", 1), ("eagle", 1), ("eagle", 4)])
def test_a_row_with_no_token_left_is_an_error_that_keeps_what_it_wrote(method: str, topk: int) -> None:
    each = [replace(HOT, banned_token_ids=ids_with("b")), HOT] * 3
    rows = run("regex:a[0-9]b", 6, each, method, topk, **({} if method == "none" else tree(topk)))
    for row in rows[::2]:
        assert re.fullmatch(r"a\d", tokenizer().decode(row.output_ids)) and row.finish_reason == "error" and row.stop_reason is None
        assert row.error == {
            "type": "GrammarError",
            "message": f"sampling.grammar has no token at output position {len(row.output_ids)}: "
            "neither it, nor the vocabulary, nor the row's other masks allow one",
        }
    assert all(re.fullmatch(r"a\db", text_of(row)) and row.finish_reason == "stop" for row in rows[1::2])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"ignore_eos": True},
            "sampling.ignore_eos=true has no meaning with sampling.grammar, which ends a row where its text is complete; leave one out",
        ),
        (
            {"banned_token_ids": EOS},
            "sampling.grammar needs an id that ends a row, and sampling.allowed_token_ids or banned_token_ids forbid all of [2, 6]",
        ),
    ],
)
def test_rows_that_could_never_end_are_refused(params: dict[str, Any], message: str) -> None:
    rows = run(DOCUMENT, 2, [replace(HOT, **params), HOT])
    assert rows[0].error == {"type": "ConfigError", "message": message} and rows[0].output_ids == []
    assert is_document(text_of(rows[1]))


# -- beside other features --------------------------------------------------------------------------------------------------------------------


class Script:
    """A controller that walks through a list of depths."""

    def __init__(self, depths: list[int]) -> None:
        self.depths, self.at = depths, 0

    def choose(self, bucket: int, context: int) -> Choice:
        self.at += 1
        return Choice(bucket, context, self.depths[self.at % len(self.depths)])

    def stepped(self, choice: Choice, outcome: Any) -> None:
        pass

    def report(self) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize("topk", [1, 4])
def test_num_steps_may_change_from_step_to_step(topk: int) -> None:
    engine = engine_of(DOCUMENT, "eagle", topk, 3, adaptive=True, nodes=9 if topk > 1 else None)
    assert engine.pacing is not None
    engine.pacing.controller = Script([3, 1, 0, 2, 0, 0])  # type: ignore[assignment]
    requests = requests_of(12, HOT)
    drive(engine, requests)
    assert written(requests) == written(plain(DOCUMENT, 200))[:12]


def test_log_probabilities_are_those_of_what_the_grammar_leaves() -> None:
    for method, topk in (("none", 1), ("eagle", 4)):
        rows = run("regex:(yes|no)", 4, HOT, method, topk, **{"logprobs": 3, **({} if method == "none" else tree(topk))})
        for row in rows:
            assert [entry["id"] for entry in row.logprobs] == row.output_ids
            for entry in row.logprobs:
                allowed = [value for _, value in entry["top"] if value > -math.inf]
                assert entry["logprob"] > -math.inf and sum(map(math.exp, allowed)) <= 1 + 1e-5
            final = row.logprobs[-1]
            assert sorted(token for token, value in final["top"] if value > -math.inf) == sorted(EOS)
            assert sum(math.exp(value) for token, value in final["top"] if value > -math.inf) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_rejection_keeps_the_law_that_the_grammar_leaves(topk: int) -> None:
    """The invariant draw follows the law exactly; texts of both are compared as two samples of one law."""
    grammar, count = "regex:[a-d]{2}", 400
    hot = replace(HOT, temperature=1.0, max_tokens=4)

    def counted(acceptance: str, seed: int, method: str, **options: Any) -> Counter[str]:
        engine = engine_of(grammar, method, topk if method != "none" else 1, acceptance=acceptance, max_batch=250, page_size=4, **options)
        (first,) = requests_of(1, replace(hot, seed=seed, n=count))
        first.prompt.token_ids = first.prompt.token_ids[:3]
        requests = [Request(first.prompt, first.sampling, sample) for sample in range(count)]
        drive(engine, requests)
        texts = Counter(map(text_of, requests))
        assert all(re.fullmatch("[a-d]{2}", text) for text in texts)
        assert (sum(sum(request.counts.accepted) for request in requests) > 0) == (method != "none")
        return texts

    law, drawn = counted("invariant", 1, "none"), counted("rejection", 2, "draft_model", steps=2, check_indices=False)
    common = [text for text in law if law[text] + drawn[text] >= 20]
    rest = [sum(c[text] for text in {*law, *drawn} - set(common)) for c in (law, drawn)]
    pairs = [(law[text], drawn[text]) for text in common] + ([(rest[0], rest[1])] if min(rest) else [])
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    free = len(pairs) - 1
    assert free >= 4
    # The value a true law exceeds once in 10,000 tests (Wilson and Hilferty's approximation of the chi-square quantile).
    assert statistic < free * (1 - 2 / (9 * free) + 3.719 * math.sqrt(2 / (9 * free))) ** 3


def test_the_lossless_check_replays_under_the_grammar() -> None:
    engine = engine_of(DOCUMENT, max_batch=1, overlap="0", cuda_graphs="off")
    rows = run(DOCUMENT, 4, HOT, "eagle", **tree(1))
    for row in rows:
        turn = Turn(Request(row.prompt, row.sampling), tuple(row.output_ids), str(row.finish_reason))
        assert check_turn(turn, engine, 3, 8).kind == "equal"
    # Runs that took another id: a legal one is judged by its gap, an illegal one is no near-tie of anything.
    ids = rows[0].output_ids
    at = next(n for n, token in enumerate(ids) if tokenizer().decode([token]).isdigit())
    legal, illegal = (next(t for t in tokenizer().convert_tokens_to_ids(tokens) if t not in ids) for tokens in (["7", "8"], ["x", "q"]))
    for other, finite in ((legal, True), (illegal, False)):
        turn = Turn(Request(rows[0].prompt, rows[0].sampling), (*ids[:at], other, *ids[at + 1 :]), "stop")
        verdict = check_turn(turn, engine, 3, 8)
        assert verdict.kind == "different" and verdict.position == at and verdict.gap is not None and math.isfinite(verdict.gap) == finite


def test_without_a_grammar_nothing_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)  # importing it would fail
    engine = engine_of(None, "eagle")
    assert engine.grammar is None
    requests = requests_of(2, SamplingParams(max_tokens=8))
    drive(engine, requests)
    assert [len(request.output_ids) for request in requests] == [8, 8]


class Replays:
    """What ``StepGraphs`` does, without a device: a captured step runs again over the tensors it had then, and its results land in the tensors
    that were made then."""

    off = False
    capture_seconds = 0.0

    def __init__(self) -> None:
        self.captured: dict[Any, tuple[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self.captured)

    def replay(self, key: Any) -> None:
        """Nothing to replay before ``run`` is called."""

    def run(self, key: Any, step: Any, warm_up: Any) -> Any:
        if key not in self.captured:
            warm_up()
            self.captured[key] = step, step()
        else:
            self.land(self.captured[key][0](), self.captured[key][1])
        return self.captured[key][1]

    def land(self, new: Any, kept: Any) -> None:
        if isinstance(new, torch.Tensor):
            kept.copy_(new)
        elif isinstance(new, Draft):
            self.land(tuple(vars(new).values()), tuple(vars(kept).values()))
        elif isinstance(new, tuple):
            for one, two in zip(new, kept, strict=True):
                self.land(one, two)
        else:
            assert new is kept is None

    def close(self) -> None:
        self.captured.clear()


@pytest.mark.parametrize(("method", "topk"), [("none", 1), ("eagle", 1), ("mtp", 4), ("ngram", 1)])
def test_a_replayed_step_reads_the_draft_and_the_masks_of_its_own_time(method: str, topk: int) -> None:
    engine = engine_of(DOCUMENT, method, max_batch=8, topk=topk, **{"steps": 2, "nodes": 6 if topk > 1 else None})
    graphs = Replays()
    engine.graphs = graphs  # type: ignore[assignment]
    requests = requests_of(12, HOT)
    engine.run(requests)
    parts = {key[4] for key in graphs.captured}
    assert parts == ({"finish"} if method == "none" else {"propose", "finish"})
    assert written(requests) == written(plain(DOCUMENT, 200))[:12]


def test_a_grammar_runs_the_host_and_the_device_in_turn() -> None:
    engine = engine_of(DOCUMENT, "eagle", steps=2, overlap="auto")
    assert engine.overlap == 0
    for request in requests_of(4, HOT):
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert not engine.in_flight
    assert grammars.rules(DOCUMENT).vocabulary.end == len(tokenizer())
