"""Tasks: published rows become prompts, answers are found and judged, and a score never costs a run its rows."""

import importlib.util
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specgen.config import DataConfig, SamplingConfig, TaskConfig
from specgen.data.prompts import load_prompts
from specgen.data.tasks.base import Task, load_task, score_run, score_text
from specgen.data.tasks.gsm8k import to_fraction
from specgen.data.tasks.humaneval import run_python
from specgen.errors import ConfigError

GSM8K = load_task(TaskConfig(name="gsm8k"))
HUMANEVAL = load_task(TaskConfig(name="humaneval", execute_code=True))
ADD = {
    "task_id": "T/0",
    "prompt": 'import math\n\n\ndef add(a, b):\n    """Return a + b."""\n',
    "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0\n",
    "entry_point": "add",
}


@pytest.fixture
def load(tmp_path):
    """load(task, rows, **data keys) -> prompts."""

    def run(task, rows, sampling=None, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = Tokenizer(models.WordLevel({"<s>": 0, "w": 1}, unk_token="w"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}")
        data = DataConfig(source="jsonl", path=str(path), **keys)
        return list(load_prompts(data, sampling or SamplingConfig(), tokenizer, max_length=None, vocab_size=2, task=task))

    return run


# ---- layouts


def test_gsm8k_question_rows_are_raw_prompts_and_turns_rows_are_chat(load):
    rows = [
        {"question": "How many?", "answer": "3+4=7\n#### 7"},
        {"question_id": 80, "category": "math", "turns": ["How many?"], "reference": ["#### 7"]},
    ]
    raw, chat = load(GSM8K, rows)
    assert (raw.text, raw.sampling.stop) == ("Question: How many?\nAnswer:", ("\nQuestion:",))
    assert raw.meta == {"question": "How many?", "answer": "3+4=7\n#### 7"}
    assert (chat.id, chat.category, chat.text, chat.sampling.stop) == (80, "math", "How many? ", ())
    assert chat.meta == {"category": "math", "reference": ["#### 7"]}


def test_the_users_stop_strings_come_before_the_tasks(load):
    rows = [{"question": "a", "answer": "1"}, {"question": "a", "answer": "1", "stop": ["row"]}]
    assert [p.sampling.stop for p in load(GSM8K, rows, sampling=SamplingConfig(stop=["job"]))] == [("job",), ("row",)]


def test_a_foreign_row_is_a_row_error_naming_the_layout(load):
    assert (
        load(GSM8K, [{"q": "a"}])[0]
        .error["message"]
        .endswith("rows.jsonl line 1: field 'question' is missing or not text (task=gsm8k reads question/answer or turns/reference)")
    )
    assert (
        load(load_task(TaskConfig(name="mt_bench")), [{"text": "a"}])[0]
        .error["message"]
        .endswith("rows.jsonl line 1: field 'turns' is missing (task=mt_bench reads question_id, category, turns)")
    )


def test_humaneval_rows_keep_what_the_tests_need(load):
    prompt = load(HUMANEVAL, [ADD])[0]
    assert (prompt.id, prompt.text) == ("T/0", ADD["prompt"])
    assert prompt.meta == {"test": ADD["test"], "entry_point": "add", "stub": ADD["prompt"]}
    assert "\ndef " in prompt.sampling.stop


def test_mt_bench_rows_in_both_layouts(load):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"prompt_id": 82, "category": "math", "prompt": ["c", "d"], "reference": ["e"]},
    ]
    prompts = load(load_task(TaskConfig(name="mt_bench")), rows)
    assert [(p.id, p.text, p.turns, p.category) for p in prompts] == [(81, "a ", ["b"], "writing"), (82, "c ", ["d"], "math")]


def test_spec_bench_groups_mt_bench_as_one_subset(load):
    rows = [{"question_id": 81, "category": "writing", "turns": ["a"]}, {"question_id": 401, "category": "math_reasoning", "turns": ["b"]}]
    prompts = load(load_task(TaskConfig(name="spec_bench")), rows)
    assert [(p.category, p.meta.get("subcategory")) for p in prompts] == [("mt_bench", "writing"), ("math_reasoning", None)]


def test_where_a_tasks_rows_come_from(tmp_path):
    named = DataConfig(source="jsonl", path="mine.jsonl")
    assert GSM8K.data_config(named) == named
    hub = GSM8K.data_config(DataConfig(limit=5))
    assert (hub.source, hub.path, hub.name, hub.split, hub.limit) == ("hub", "openai/gsm8k", "main", "test", 5)
    local = load_task(TaskConfig(name="gsm8k", path="a/b.parquet")).data_config(DataConfig())
    assert (local.source, local.path) == ("parquet", "a/b.parquet")
    with pytest.raises(ConfigError, match=r"set task\.path=FILE"):
        load_task(TaskConfig(name="spec_bench")).data_config(DataConfig())
    assert load_task(TaskConfig()) is None
    with pytest.raises(ConfigError, match="task=gsm9k: unknown task"):
        load_task(TaskConfig(name="gsm9k"))


# ---- gsm8k


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3+4=7.\n#### 7", "7"),
        ("#### $1,234.50 in all", "$1,234.50"),
        ("first 5, then 12 apples.", "12"),
        ("The answer is -5. It took 3 steps.", "-5"),
        ("the answer is: **42** (of 50)", "42"),
        ("We get \\boxed{\\frac{3}{4}} of 9", "\\frac{3}{4}"),
        ("thus $\\boxed{1{,}000}$, as 7 said", "1{,}000"),
        ("costs \u22127 dollars", "-7"),
        ("between 10-12", "12"),
        ("- 5 apples", "5"),
        ("about .5", ".5"),
        ("version 3.14.15 of w11", "3.14"),
        ("well-4", "4"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_found(text, number):
    assert GSM8K.extract(text) == number


@pytest.mark.parametrize(
    ("a", "b"), [("$1,000.50", "1000.5"), ("18.0", "18"), ("-3/4", "-0.75"), ("\\frac{1}{2}", ".5"), ("1{,}000", "1e3"), ("12.", "12")]
)
def test_equal_numbers_are_equal_however_they_are_written(a, b):
    assert to_fraction(a) == to_fraction(b) is not None


def test_no_number_is_no_number():
    assert [to_fraction(text) for text in ("x", "", "1/0", "1.2.3")] == [None, None, None, None]


@pytest.mark.parametrize(
    ("text", "meta", "score"),
    [
        ("... #### 1,000", {"answer": "steps\n#### 1000"}, 1.0),
        ("The answer is 1000.00.", {"reference": ["#### 1,000"]}, 1.0),
        ("#### 999", {"answer": "#### 1000"}, 0.0),
        ("I do not know", {"answer": "#### 1000"}, 0.0),
        ("#### 7", {"answer": 7}, 1.0),
        ("#### 7", {"answer": None}, None),
        ("#### 7", {}, None),
        ("#### 7", {"answer": "w11 w12"}, None),
        ("#### 7", {"reference": []}, None),
    ],
)
def test_gsm8k_scores(text, meta, score):
    assert GSM8K.score({"text": text}, meta) == score


def test_an_answer_that_is_no_plain_number_is_left_to_math_verify():
    """Without math-verify such an answer is wrong, with it right: never an exception."""
    expected = 1.0 if importlib.util.find_spec("math_verify") else 0.0
    assert GSM8K.score({"text": "\\boxed{\\sqrt{x}}"}, {"answer": "#### 3"}) == 0.0
    assert GSM8K.extract("\\boxed{2^{y}}") == "2"
    assert GSM8K.score({"text": "\\boxed{\\pi - \\pi}"}, {"answer": "#### 0"}) == expected


# ---- humaneval


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("    return a + b\n", 1.0),
        ("    return a - b\n", 0.0),
        ("    return a +\n", 0.0),
        ("    exit(0)\n", 0.0),
        ("    raise SystemExit\n", 0.0),
        ("", 0.0),
        ("Here it is:\n```python\ndef add(a, b):\n    return int(math.fsum((a, b)))\n```\nDone.", 1.0),
        ("```python\ndef add(a, b):\n    return a + b\n```\nUse it:\n```python\nadd(1, 2)\n```", 1.0),
        ("```\n    return a + b\n```", 1.0),
    ],
)
def test_humaneval_runs_the_tests_against_the_answer(text, score):
    assert HUMANEVAL.score({"text": text, "prompt": "<chat>"}, ADD | {"stub": ADD["prompt"]}) == score


def test_code_is_not_run_unless_allowed():
    careful = load_task(TaskConfig(name="humaneval"))
    assert careful.score({"text": "    return a + b\n", "prompt": ADD["prompt"]}, ADD) is None
    assert HUMANEVAL.score({"text": "    return a + b\n"}, {"turns": ["no tests"]}) is None


def test_a_program_is_stopped_at_its_limits():
    assert run_python("x = 1\n") is True
    assert run_python("while True:\n    pass\n", time_limit_s=0.5) is False
    assert run_python("input()\n") is False


def test_a_program_cannot_take_all_memory():
    assert run_python("x = bytearray(3 << 30)\n") is False


# ---- the score of a run


def out(index, text, meta=None, sample=0, error=None):
    """An output row."""
    return {"id": index, "index": index, "sample": sample, "text": text, "meta": meta or {}, "error": error}


def test_a_run_is_scored_by_group_and_missing_references_are_not_applicable():
    rows = [
        out(0, "#### 7", {"answer": "#### 7", "level": "easy"}),
        out(1, "#### 5", {"answer": "#### 6"}),
        out(2, "#### 5", {"answer": None, "level": "hard"}),
        out(3, "", {"answer": "#### 1", "level": "easy"}, error={"type": "DataError", "message": "x"}),
        out(4, "none", {"answer": "#### 1", "level": "easy"}),
    ]
    result = score_run(rows, GSM8K, group_by="level")
    assert (result["task"], result["metric"], result["value"]) == ("gsm8k", "accuracy", 1 / 3)
    assert {key: result[key] for key in ("rows", "scored", "errors", "not_scored", "failures", "no_answer")} == {
        "rows": 5,
        "scored": 3,
        "errors": 1,
        "not_scored": 1,
        "failures": 0,
        "no_answer": 1,
    }
    assert {name: (g["value"], g["scored"], g["rows"]) for name, g in result["groups"].items()} == {
        "easy": (0.5, 2, 3),
        "hard": (None, 0, 1),
        "n/a": (0.0, 1, 1),
    }
    assert score_text(result) == f"gsm8k accuracy 0.333 [{result['ci95'][0]:.3f}, {result['ci95'][1]:.3f}] (3 of 5 rows scored)"


@pytest.mark.parametrize("rows", [[], [out(0, "#### 7", {"answer": None})], [out(0, "", error={"type": "a", "message": "b"})]])
def test_nothing_to_score_is_null_and_no_division(rows):
    result = score_run(rows, GSM8K)
    assert (result["value"], result["ci95"], result["scored"]) == (None, None, 0)
    assert score_text(result) == f"gsm8k accuracy n/a (0 of {len(rows)} rows scored)"
    json.dumps(result, allow_nan=False)


def test_samples_of_a_row_are_averaged_before_rows_are():
    rows = [out(0, "#### 7", {"answer": "7"}, sample=s) for s in range(3)] + [out(1, "#### 7", {"answer": "8"})]
    assert score_run(rows, GSM8K)["value"] == 0.5


def test_the_interval_is_of_input_rows_and_repeats_with_its_seed():
    right = [out(i, "#### 7", {"answer": "7"}) for i in range(50)]
    wrong = [out(i + 50, "#### 7", {"answer": "8"}) for i in range(50)]
    result = score_run(right + wrong, GSM8K)
    low, high = result["ci95"]
    assert 0.38 <= low <= 0.42 and 0.58 <= high <= 0.62  # 0.5 +- 1.96 * sqrt(0.25 / 100)
    assert score_run(right + wrong, GSM8K)["ci95"] == [low, high]
    assert score_run(right, GSM8K)["ci95"] == [1.0, 1.0]


def test_a_scorer_that_fails_on_one_row_does_not_cost_the_others(caplog):
    class Fragile(Task):
        name = "fragile"
        metric = "accuracy"

        def score(self, row, meta):
            return 1.0 / meta["n"]

    result = score_run([out(0, "a", {"n": 1}), out(1, "a", {"n": 0})], Fragile(TaskConfig()))
    assert (result["value"], result["scored"], result["failures"], result["not_scored"]) == (1.0, 1, 1, 1)
    assert "task fragile: row 1: float division by zero" in caplog.text


def test_a_task_without_a_score_has_groups():
    rows = [out(0, "a", {"category": "writing"}), out(1, "b", {"category": "math"}), out(2, "c", {"category": "math"})]
    result = score_run(rows, load_task(TaskConfig(name="mt_bench")))
    assert (result["metric"], result["value"], {name: g["rows"] for name, g in result["groups"].items()}) == (None, None, {"math": 2, "writing": 1})
    assert score_text(result) == "mt_bench: no score, 2 groups"
