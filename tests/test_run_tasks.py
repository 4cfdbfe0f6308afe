"""Evaluation tasks as jobs: published layouts in, scores and groups out; conversations of several turns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specgen import cli
from specgen.data.tasks.gsm8k import Gsm8k
from specgen.data.tasks.humaneval import run_python
from tests.jobs import log_of, resume, rows_of, same, start, stats_of, toy, write_lines

EMBEDDED = ("baseline=false", "sampling.max_tokens=24")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def task(name: str, rows: list[dict[str, Any]], out: str = "o", *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and stats of an embedded-family run of a task over ``rows``."""
    path = write_lines(Path(f"{out}.jsonl"), rows)
    assert start(out, f"task={name}", f"task.path={path}", *EMBEDDED, *overrides) == 0
    return list(rows_of(out).values()), stats_of(out)


# -- gsm8k ------------------------------------------------------------------------------------------------------------------------------------

# The model knows code, not sums; after an assignment it may well write a number, and any answer serves to see the score follow the reference.
QUESTIONS = ["x = 12; what is x?", "How many are 3 and 4?", "size = 100\nWhat is size", "n = 7\nn ="]


def test_gsm8k_scores_the_final_number_of_each_answer() -> None:
    """The references of the second run are made from the answers of the first: right for two rows, wrong for one, unreadable for one."""
    first, stats = task("gsm8k", [{"question": question, "answer": "#### -123456"} for question in QUESTIONS])
    assert [row["prompt"] for row in first] == [f"Question: {question}\nAnswer:" for question in QUESTIONS]
    assert all(row["sampling"]["stop"] == ["\nQuestion:"] for row in first)
    assert (stats["score"]["value"], stats["score"]["scored"], stats["groups"]) == (0.0, 4, {})
    numbers = [re.findall(r"\d+", row["text"]) for row in first]
    right = [f"so it is {found[-1]}\n#### {found[-1]}" if found else "#### 0" for found in numbers]
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, [right[0], right[1], "#### -123456", "no number"], strict=True)]
    second, stats = task("gsm8k", rows, "p")
    assert [row["text"] for row in second] == [row["text"] for row in first]
    expected = [float(bool(numbers[0])), float(bool(numbers[1])), 0.0]
    score = stats["score"]
    assert (score["metric"], score["rows"], score["scored"], score["not_scored"]) == ("accuracy", 4, 3, 1)
    assert score["value"] == sum(expected) / 3
    assert f"gsm8k accuracy {sum(expected) / 3:.3f}" in log_of("p")


@pytest.mark.parametrize(
    ("text", "answer", "worth"),
    [
        ("She has 3 + 4 = 7 left.\n#### 7", "3+4=7\n#### 7", 1.0),
        ("The answer is $1,000.", "#### 1000", 1.0),
        ("so \\boxed{\\frac{1}{2}}", "#### 0.5", 1.0),
        ("The answer is 12. Then 13.", "#### 13", 0.0),
        ("no idea", "#### 1", 0.0),
    ],
)
def test_gsm8k_answers_made_by_hand(text: str, answer: str, worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.engine.text.OutputText.final", lambda self, request: text)
    _, stats = task("gsm8k", [{"question": "q", "answer": answer}])
    assert stats["score"]["value"] == worth


def test_missing_references_groups_and_levels_are_counted_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that fails, a row without a reference and a row without a group: the rows are on the disk, and the rest is scored."""
    score = Gsm8k.score

    def fails_on_two(self: Gsm8k, row: Any, meta: Any) -> float | None:
        if row["index"] == 2:
            raise ZeroDivisionError("an empty bucket")
        return score(self, row, meta)

    monkeypatch.setattr(Gsm8k, "score", fails_on_two)
    monkeypatch.setattr("specgen.engine.text.OutputText.final", lambda self, request: "#### 5")
    rows = [
        {"question": "a", "answer": "#### 5", "category": "easy"},
        {"question": "b", "category": "easy"},
        {"question": "c", "answer": "#### 5", "category": "hard"},
        {"question": "d", "answer": "#### 6"},
    ]
    found, stats = task("gsm8k", rows)
    assert len(found) == 4
    total = {name: stats["score"][name] for name in ("value", "rows", "scored", "errors", "not_scored", "failures")}
    assert total == {"value": 0.5, "rows": 4, "scored": 2, "errors": 0, "not_scored": 2, "failures": 1}
    assert {name: group["score"]["value"] for name, group in stats["groups"].items()} == {"(none)": 0.0, "easy": 1.0, "hard": None}
    assert [stats["groups"][name]["requests"] for name in ("(none)", "easy", "hard")] == [1, 2, 1]


# -- humaneval --------------------------------------------------------------------------------------------------------------------------------


def problem(number: int, prompt: str, test: str, entry: str, **extra: Any) -> dict[str, Any]:
    return {"task_id": f"HumanEval/{number}", "prompt": prompt, "test": test, "entry_point": entry, "canonical_solution": ""} | extra


def test_humaneval_runs_the_tests_of_each_answer() -> None:
    rows = [
        problem(0, "def two():\n    return 2\n", "def check(f):\n    assert f() == 2\n", "two", max_tokens=0),
        problem(1, "def two():\n    return 2\n", "def check(f):\n    assert f() == 3\n", "two", max_tokens=0),
        problem(2, 'def add(a, b):\n    """Return the sum of a and b."""\n', "def check(f):\n    assert f(1, 2) == 3\n", "add", n=2, temperature=0.7),
    ]
    found, stats = task("humaneval", rows, "o", "task.execute_code=true")
    assert [row["id"] for row in found] == ["HumanEval/0", "HumanEval/1", "HumanEval/2", "HumanEval/2"]
    passed = [run_python(f"{rows[2]['prompt']}{row['text']}\n\n{rows[2]['test']}\ncheck(add)\n") for row in found[2:]]
    assert stats["score"]["value"] == pytest.approx((1 + 0 + sum(passed) / 2) / 3, abs=1e-12)
    assert (stats["score"]["metric"], stats["score"]["scored"]) == ("pass@1", 4)


@pytest.mark.parametrize(
    ("name", "row", "fields"),
    [
        (
            "gsm8k",
            {"question": "q"},
            "answer or reference, with a number",
        ),
        (
            "humaneval",
            {"prompt": "def f():"},
            "test and entry_point",
        ),
    ],
)
def test_rows_that_cannot_be_judged_at_all_are_said_to_be(name: str, row: dict[str, Any], fields: str) -> None:
    execute = ("task.execute_code=true",) if name == "humaneval" else ()
    _, stats = task(name, [row, row], "o", *execute)
    assert (stats["score"]["value"], stats["score"]["not_scored"]) == (None, 2)
    assert f"task {name}: no row could be scored: none carries what its answer is judged by ({fields})" in log_of("o")


def test_humaneval_without_leave_to_run_code_says_so_and_scores_nothing() -> None:
    _, stats = task("humaneval", [problem(0, "def two():\n", "def check(f):\n    assert f() == 2\n", "two")])
    assert (stats["score"]["value"], stats["score"]["scored"]) == (None, 0)
    assert "answers are not scored unless task.execute_code=true" in log_of("o") and "judged by" not in log_of("o")


# -- mt_bench, spec_bench ---------------------------------------------------------------------------------------------------------------------


def test_mt_bench_answers_its_turns_and_groups_by_category() -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a loop over range(3).", "Now a while loop."]},
        {"question_id": 121, "category": "coding", "turns": ["def add(a, b):", "Add a docstring."], "reference": ["x", ""]},
    ]
    found, stats = task("mt_bench", rows)
    assert [(row["id"], len(row["turns"]), row["meta"]["category"]) for row in found] == [(81, 2, "writing"), (121, 2, "coding")]
    assert [row["output_tokens"] for row in found] == [sum(len(turn["token_ids"]) for turn in row["turns"]) for row in found]
    assert {name: group["requests"] for name, group in stats["groups"].items()} == {"coding": 1, "writing": 1}
    assert (stats["score"]["metric"], stats["score"]["value"]) == (None, None)


def test_spec_bench_groups_by_subset_with_mt_bench_as_one() -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a loop.", "Another."]},
        {"question_id": 99, "category": "math", "turns": ["1 + 1?"]},
        {"question_id": 161, "category": "translation", "turns": ["Translate German to English: Haus"], "reference": []},
        {"question_id": 400, "category": "rag", "turns": ["Document [1]: import os"]},
    ]
    found, stats = task("spec_bench", rows, "o", "draft.topk=4")
    assert [len(row["turns"]) for row in found] == [2, 1, 1, 1]
    assert {name: group["requests"] for name, group in stats["groups"].items()} == {"mt_bench": 2, "rag": 1, "translation": 1}
    assert all(group["acceptance"]["mean_length"]["pooled"] >= 1 for group in stats["groups"].values())


def test_task_rows_may_come_from_the_input_and_are_resumed_and_merged_with_their_score() -> None:
    rows = [{"question": f"n = {i}; n?", "answer": f"#### {i}"} for i in range(6)]
    path = write_lines(Path("in.jsonl"), rows)
    common = ["task=gsm8k", "data=jsonl", f"data.path={path}", "sampling.max_tokens=8"]
    assert start("whole", *common, "baseline=false") == 0
    for i in (0, 1):
        assert start(f"s{i}", *common, f"data.shard={i}/2") == 0
    assert cli.main(["merge=s0,s1", "output.dir=m"]) == 0
    assert rows_of("m") == rows_of("whole") and stats_of("m")["score"] == stats_of("whole")["score"]
    whole = stats_of("whole")["score"]
    Path("whole/stats.json").unlink()
    assert resume("whole") == 0 and stats_of("whole")["score"] == whole


def test_tasks_are_refused_where_they_cannot_be_scored_or_read(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(Path("in.jsonl"), [{"question": "q", "answer": "#### 1"}])
    for overrides, message in (
        (["task=gsm8k", f"task.path={path}", "output.meta=false"], "output.meta=false leaves nothing to score task=gsm8k with"),
        (["task=spec_bench"], "task=spec_bench has no published dataset to fetch; set task.path=FILE"),
        (["task=gsm8k", "task.path=nowhere.jsonl"], "task.path=nowhere.jsonl: no such file or folder"),
        (
            ["task=gsm8k", f"task.path={path}", "data=jsonl", "data.path=other.jsonl"],
            f"data.path=other.jsonl and task.path={path} both name the input; leave one out",
        ),
        (["task=gsm8k", f"task.path={path}", "data=embedded"], f"data=embedded and task.path={path} both name the input; leave one out"),
        (["task=gsm8k", f"task.path={path}", "data=random"], f"data=random and task.path={path} both name the input; leave one out"),
    ):
        assert start("o", *overrides) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"specgen: {message}")
        assert not Path("o").exists()
    assert start("o", "task=mt_bench", f"task.path={path}", *EMBEDDED) == 3
    assert "field 'turns' is missing (task=mt_bench reads question_id, category, turns)" in rows_of("o")[0, 0]["error"]["message"]


# -- turns ------------------------------------------------------------------------------------------------------------------------------------


def test_turns_are_answered_one_after_another_in_one_conversation() -> None:
    path = write_lines(Path("in.jsonl"), [{"turns": ["w10", "w30", "w40"]}, {"turns": ["w40"], "id": "one"}])
    for out, draft in (("o", "draft_half"), ("plain", None)):
        assert start(out, *toy(draft), "data=jsonl", f"data.path={path}", "sampling.max_tokens=5") == 0
    first, single = rows_of("o").values()
    assert first["prompt"] == "<s>w10 w11 w12 w13 w14 w30 w31 w32 w33 w34 w30 w40 "
    assert [turn["token_ids"] for turn in first["turns"]] == [[11, 12, 13, 14, 2], [31, 32, 33, 34, 30], [41, 42, 40, 41, 42]]
    assert [turn["prompt_tokens"] for turn in first["turns"]] == [2, 7, 13] and first["prompt_tokens"] == 13
    assert [turn["finish_reason"] for turn in first["turns"]] == ["stop", "length", "length"]
    assert (first["text"], first["output_tokens"], first["counts"]["prefill_sampled"]) == ("w41 w42 w40 w41 w42", 15, 3)
    for name in ("verify_steps", "committed", "trimmed"):
        assert first["counts"][name] == sum(turn["counts"][name] for turn in first["turns"])
    assert len(single["turns"]) == 1 and single["turns"][0]["text"] == single["text"]
    assert same(rows_of("o")) == same(rows_of("plain"))


def test_a_turn_that_cannot_run_makes_the_row_an_error_and_keeps_the_turns_before_it() -> None:
    path = write_lines(Path("in.jsonl"), [{"turns": ["w30", "w10 " * 26, "w10"]}, {"turns": ["w10", "w10"]}])
    assert start("o", *toy(None, "target_ctx32"), "data=jsonl", f"data.path={path}", "sampling.max_tokens=4") == 3
    first, second = rows_of("o").values()
    assert first["error"] == {
        "type": "DataError",
        "message": "row index 0, turn 2: the prompt has 32 tokens and the context limit is 32: no room for an answer",
    }
    assert [turn["token_ids"] for turn in first["turns"]] == [[31, 32, 33, 34]] and first["output_tokens"] == 4
    assert second["error"] is None and len(second["turns"]) == 2


def test_noise_runs_on_across_turns() -> None:
    """Sampled turns draw at the positions after the turns before: a row's last turn equals a draw that starts there."""
    path = write_lines(Path("in.jsonl"), [{"id": "a", "turns": ["w10", "w10"]}, {"id": "b", "turns": ["w10", "w10"]}])
    common = ["data=jsonl", f"data.path={path}", "sampling.max_tokens=12", "sampling.temperature=1"]
    for out, draft in (("o", "stoch_draft"), ("plain", None)):
        assert start(out, *toy(draft, "stoch_target"), *common) == 0
    assert same(rows_of("o")) == same(rows_of("plain"))
    turns = [turn["token_ids"] for row in rows_of("o").values() for turn in row["turns"]]
    assert len({tuple(ids) for ids in turns}) == 4, "neither rows nor turns repeat each other's noise"
