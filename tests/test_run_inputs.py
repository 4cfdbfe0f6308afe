"""Inputs as people have them, through whole jobs: what is read, what is written, what is refused. Toys give the exact answers."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specgen
from specgen import run
from tests.jobs import log_of, resume, rows_of, start, stats_of, toy, write_lines
from tests.toys import toy_folder

END, CYCLE = [11, 12, 13, 14, 2], [31, 32, 33, 34, 30]
THREE = [{"prompt": "w10"}, {"prompt": "w30"}, {"prompt": "w40"}]
ANSWERS = [END, CYCLE, [41, 42, 40, 41, 42]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job(path: str, *overrides: str, source: str = "jsonl", out: str = "o", draft: str | None = "draft_half", expect: int = 0) -> list[dict[str, Any]]:
    """The rows of a five-token job over ``path``, in input order."""
    assert start(out, *toy(draft), f"data={source}", f"data.path={path}", "sampling.max_tokens=5", *overrides) == expect
    return list(rows_of(out).values())


def ids(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["token_ids"] for row in rows]


# -- bytes ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_with", "end", "last"), [(b"\xef\xbb\xbf", b"\n", True), (b"", b"\r\n", True), (b"", b"\r\n", False), (b"\n \n", b"\n\n", True)]
)
def test_a_byte_order_mark_carriage_returns_and_blank_lines_change_nothing(start_with: bytes, end: bytes, last: bool) -> None:
    Path("in.jsonl").write_bytes(start_with + end.join(json.dumps(row).encode() for row in THREE) + (end if last else b""))
    rows = job("in.jsonl")
    assert ids(rows) == ANSWERS and [row["prompt"] for row in rows] == ["w10", "w30", "w40"]


def test_unicode_line_separators_are_characters_like_others() -> None:
    notes = ["a\u2028b", "a\u2029b", "a\u0085b\x0bc\x1cd"]
    rows = job(write_lines(Path("in.jsonl"), [row | {"note": note} for row, note in zip(THREE, notes, strict=True)]))
    assert [row["meta"]["note"] for row in rows] == notes
    assert Path("o/generations.jsonl").read_bytes().count(b"\n") == 3
    assert resume("o") == 0 and "resumed: 3 rows are finished" in log_of("o")


def test_a_bad_line_is_named_by_file_and_line_blank_lines_counted() -> None:
    rows = job(write_lines(Path("in.jsonl"), ['{"id":1,"prompt":"w10"}', "", "", '{"id":2,"prompt":"w1', '{"id":3,"prompt":"w30"}']), expect=3)
    assert [row["id"] for row in rows] == [1, 1, 3]
    assert rows[1]["error"]["message"].startswith("in.jsonl line 4: not valid JSON: Unterminated string")
    assert ids(rows) == [END, [], CYCLE] and stats_of("o")["errors"] == 1


def test_compressed_inputs_are_read_by_content_and_a_cut_off_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = [json.dumps(row).encode() + b"\n" for row in THREE]
    Path("two.jsonl.gz").write_bytes(gzip.compress(text[0]) + gzip.compress(text[1] + text[2]))
    with pa.CompressedOutputStream("in.jsonl.zst", "zstd") as file:
        file.write(b"".join(text))
    for number, path in enumerate(("two.jsonl.gz", "in.jsonl.zst")):
        assert ids(job(path, out=f"o{number}")) == ANSWERS
    whole = gzip.compress(b"".join(text) * 500)
    Path("cut.jsonl.gz").write_bytes(whole[: len(whole) - 20])
    Path("plain.jsonl.gz").write_bytes(b"".join(text))
    for path, message in (("cut.jsonl.gz", "the gzip archive is truncated"), ("plain.jsonl.gz", "is named .gz but is not gzip")):
        assert start("bad", *toy(None), "data=jsonl", f"data.path={path}") == 2
        assert message in capsys.readouterr().err.splitlines()[-1] and not Path("bad").exists()


# -- fields -----------------------------------------------------------------------------------------------------------------------------------


def test_a_missing_or_null_prompt_is_an_error_and_never_the_word_none() -> None:
    rows = job(write_lines(Path("in.jsonl"), [{"prompt": "w10"}, {"text": "w10"}, {"prompt": "w30"}, {"Prompt": "w10"}, {"prompt": None}]), expect=3)
    assert [row["error"] and row["error"]["message"].split(": ", 1)[1] for row in rows] == [
        None,
        "field 'prompt' is missing (and no messages, turns or token_ids); the row has 'text'",
        None,
        "field 'prompt' is missing (and no messages, turns or token_ids); the row has 'Prompt'",
        "field 'prompt' is null",
    ]
    assert [row["prompt"] for row in rows] == ["w10", "", "w30", "", ""]


def test_parquet_nulls_dictionaries_and_structs_are_read_as_they_were_meant() -> None:
    table = pa.table({"prompt": pa.array(["w10", None, "w30"]).dictionary_encode(), "score": [1.5, float("nan"), None]})
    pq.write_table(table, "in.parquet")
    rows = job("in.parquet", source="parquet", expect=3)
    assert [row["error"] and row["error"]["message"] for row in rows] == [None, "in.parquet row 2: field 'prompt' is null", None]
    assert [row["meta"]["score"] for row in rows] == [1.5, None, None]
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "empty.parquet")
    assert start("e", *toy(None), "data=parquet", "data.path=empty.parquet") == 2 and not Path("e").exists()


def test_a_field_that_is_null_at_first_and_text_later_is_carried_over() -> None:
    rows = job(write_lines(Path("in.jsonl"), [row | {"ref": ref} for row, ref in zip(THREE, [None, None, "w11"], strict=True)]))
    assert [row["meta"]["ref"] for row in rows] == [None, None, "w11"]


def test_numbers_that_json_lacks_become_null_everywhere() -> None:
    lines = ['{"prompt": "w10", "a": NaN, "b": [Infinity, {"c": -Infinity}]}', '{"prompt": "w30", "a": 1e999}']
    rows = job(write_lines(Path("in.jsonl"), lines), draft=None)
    assert [row["meta"] for row in rows] == [{"a": None, "b": [None, {"c": None}]}, {"a": None}]
    for name in ("generations.jsonl", "stats.json", "attempts.jsonl", "environment.json"):
        for line in Path("o", name).read_text().splitlines() if name.endswith("l") else [Path("o", name).read_text()]:
            json.loads(line, parse_constant=pytest.fail)
    assert "4 values of NaN or infinity in the input's other fields are written as null" in log_of("o")
    assert stats_of("o")["acceptance"]["draft_rate"] is None, "no draft: no rate"


def test_log_probabilities_of_minus_infinity_are_null_and_every_line_stays_strict_json() -> None:
    path = write_lines(Path("in.jsonl"), [{"prompt": "w10"}])
    allowed = "sampling.allowed_token_ids=[11,12,13,14,2]"
    (row,) = job(path, "sampling.logprobs=8", "sampling.min_tokens=5", allowed, draft="draft_perfect")
    for name in ("generations.jsonl", "stats.json"):
        json.loads(Path("o", name).read_text(), parse_constant=pytest.fail)
    assert [len(entry["top"]) for entry in row["logprobs"]] == [8] * 5
    last = row["logprobs"][4]
    assert last["id"] != 2 and 2 not in [token for token, value in last["top"] if value is not None], "the end is not allowed before min_tokens"
    assert sum(value is None for _, value in last["top"]) == 4, "four ids are left of eight"


def test_equal_prompts_are_all_answered_and_a_repeated_id_is_an_error_that_names_the_first() -> None:
    assert ids(job(write_lines(Path("a.jsonl"), [{"prompt": "w10"}] * 6), out="a")) == [END] * 6
    twice = write_lines(Path("b.jsonl"), [{"id": "x", "prompt": "w10"}, {"id": "x", "prompt": "w30"}, {"id": "y", "prompt": "w40"}])
    rows = job(twice, out="b", expect=3)
    assert ids(rows) == [END, [], ANSWERS[2]]
    assert "id 'x' repeats the id of row index 0" in rows[1]["error"]["message"]
    assert ids(job(twice, "data.on_duplicate_id=keep", out="c")) == ANSWERS


def test_per_row_limits_hold_and_wrong_ones_are_row_errors() -> None:
    limits = [{"max_tokens": 0}, {"max_tokens": 1}, {}, {"max_tokens": -1}, {"max_tokens": None}, {"max_tokens": "7"}]
    rows = job(write_lines(Path("in.jsonl"), [{"prompt": "w30"} | limit for limit in limits]), expect=3)
    assert [(row["output_tokens"], row["finish_reason"]) for row in rows] == [
        (0, "length"),
        (1, "length"),
        (5, "length"),
        (0, "error"),
        (5, "length"),
        (0, "error"),
    ]
    assert "max_tokens must be between 0 and" in rows[3]["error"]["message"] and "max_tokens must be an integer" in rows[5]["error"]["message"]


def test_short_rows_overtake_long_ones_and_every_row_comes_back_once() -> None:
    rows = [{"id": f"r{i}", "prompt": "w30" if i % 2 else "w10", "max_tokens": 40} for i in range(12)]
    found = job(write_lines(Path("in.jsonl"), rows), "engine.max_batch=4", draft="draft_perfect")
    assert [(row["id"], row["output_tokens"]) for row in found] == [(f"r{i}", 40 if i % 2 else 5) for i in range(12)]
    written = [json.loads(line)["index"] for line in Path("o/generations.jsonl").read_text().splitlines()]
    assert sorted(written) == list(range(12)) != written


@pytest.mark.parametrize("bos", [True, False])
def test_an_empty_prompt_runs_from_the_beginning_of_sequence_or_is_a_row_error(bos: bool) -> None:
    target = Path("target")
    shutil.copytree(toy_folder() / "target", target)
    if not bos:
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        tokenizer["post_processor"] = None
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = write_lines(Path("in.jsonl"), [{"prompt": text} for text in ("w10", "", "   ", "w30")])
    common = ["model=hf", f"model.path={target}", "draft=draft_model", f"draft.path={toy_folder() / 'draft_half'}", "sampling.max_tokens=5"]
    assert start("o", *common, "data=jsonl", f"data.path={path}", "output.prompt_token_ids=true") == (0 if bos else 3)
    rows = list(rows_of("o").values())
    assert [rows[0]["token_ids"], rows[3]["token_ids"]] == [END, CYCLE]
    if bos:
        (plain,) = specgen.generate([[1]], model=str(target), draft="none", sampling={"max_tokens": 5})
        assert [row["prompt_token_ids"] for row in rows] == [[1, 10], [1], [1], [1, 30]]
        assert [row["token_ids"] for row in rows[1:3]] == [plain.token_ids] * 2 and len(plain.token_ids) > 0
    else:
        message = "field 'prompt': the prompt is empty and the tokenizer adds no BOS token"
        assert [row["error"]["message"] for row in rows[1:3]] == [f"in.jsonl line {line}: {message}" for line in (2, 3)]


def test_a_stream_stopped_inside_a_read_block_goes_on_at_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows").mkdir()
    table = pa.table({"id": [f"r{i}" for i in range(5000)], "token_ids": [[1, 10 + i % 30] for i in range(5000)]})
    pq.write_table(table, "rows/train.parquet", row_group_size=1000)
    common = ["data=hub", "data.path=rows", "data.split=train", "sampling.max_tokens=1", "engine.max_batch=128"]
    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_stop", lambda self: self.writer.rows >= 200)
        assert start("o", *toy(None, check=False), *common) == 0
    assert 200 <= len(rows_of("o")) < 1000 and not stats_of("o")["complete"]
    assert resume("o") == 0 and stats_of("o")["complete"]
    assert [row["id"] for row in rows_of("o").values()] == [f"r{i}" for i in range(5000)]


# -- chat -------------------------------------------------------------------------------------------------------------------------------------


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def test_a_template_sees_the_keys_the_row_was_written_with() -> None:
    Path("t.jinja").write_text("{% for m in messages %}{{ m.keys() | sort | join(' ') }} {{ m.content }} {% endfor %}")
    rows = [chat({"role": "user", "content": "w10"}), chat({"role": "user", "content": "w30", "name": "x"})]
    shown = ["content role w10 ", "content name role w30 "]
    found = job(write_lines(Path("in.jsonl"), rows), "data.chat_template=t.jinja", out="a")
    assert [row["prompt"] for row in found] == shown
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")  # typed columns give every message every key
    found = job("in.parquet", "data.chat_template=t.jinja", source="parquet", out="b")
    assert [row["prompt"] for row in found] == shown
    assert stats_of("b")["chat"]["template"] == "file"


def test_a_template_that_refuses_a_row_costs_that_row_alone() -> None:
    rows = [chat({"role": "user", "content": word}) for word in ("w10", "w30", "w40")]
    rows[1]["messages"].insert(0, {"role": "system", "content": "w11"})
    found = job(write_lines(Path("in.jsonl"), rows), expect=3)
    assert ids(found) == [END, [], ANSWERS[2]]
    assert found[1]["error"]["message"] == "in.jsonl line 2: the chat template refused the row: System role not supported"


def test_a_prompt_has_one_beginning_of_sequence_however_it_is_written() -> None:
    rows = [{"prompt": "w10"}, chat({"role": "user", "content": "w10"}), {"prompt": "<s> w10"}, {"token_ids": [1, 10]}]
    found = job(write_lines(Path("in.jsonl"), rows), "output.prompt_token_ids=true")
    assert [row["prompt_token_ids"] for row in found] == [[1, 10]] * 4 and ids(found) == [END] * 4


# -- values on the command line ---------------------------------------------------------------------------------------------------------------


def test_paths_with_every_odd_character_are_found_when_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path("m, epoch=3 [v1](x)@~")
    shutil.copytree(toy_folder() / "target", odd / "target")
    path = write_lines(odd / "in=put.jsonl", [{"prompt": "w10"}])
    common = ["model=hf", "draft=none", "data=jsonl", "sampling.max_tokens=5"]
    assert start("o", *common, f"model.path='{odd / 'target'}'", f"data.path='{path}'") == 0
    assert ids(list(rows_of("o").values())) == [END]
    assert start("p", *common, f"model.path={odd / 'target'}", f"data.path='{path}'") == 2
    assert f"model.path='{odd / 'target'}'" in capsys.readouterr().err, "the refusal shows the form to paste"
    assert resume("o", "engine.max_batch=1") == 0


def test_stop_strings_are_what_was_meant_and_shown_in_the_stored_configuration() -> None:
    path = write_lines(Path("in.jsonl"), [{"prompt": "w30"}, {"prompt": "w24"}])
    rows = job(path, 'sampling.stop=["w33","w99"]', out="a")
    assert (rows[0]["text"], rows[0]["finish_reason"], rows[0]["stop_reason"], rows[0]["token_ids"]) == ("w31 w32 ", "stop", "w33", [31, 32, 33])
    rows = job(path, "sampling.stop='<|eot|>'", "output.skip_special_tokens=false", out="b")
    assert (rows[1]["text"], rows[1]["stop_reason"]) == ("w25 ", "<|eot|>")
    rows = job(path, "sampling.stop='<|eot|>'", "output.skip_special_tokens=true", out="d")
    assert (rows[1]["text"], rows[1]["stop_reason"], rows[1]["token_ids"]) == ("w25", "<|eot|>", [25, 3]), "found although the text leaves it out"
    rows = job(path, "sampling.stop='<|eot|>'", "sampling.stop_token_ids=[3]", "sampling.include_stop=true", out="e")
    assert (rows[1]["text"], rows[1]["stop_reason"], rows[1]["token_ids"]) == ("w25", 3, [25, 3])
    job(path, r'sampling.stop=["\n\n","w33"]', out="c")
    assert '- "\\n\\n"' in Path("c/.hydra/config.yaml").read_text() and stats_of("c")["sampling"]["stop"] == ["\n\n", "w33"]


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_paths_are_the_ones_that_were_typed(chdir: str) -> None:
    path = write_lines(Path("in.jsonl"), [{"prompt": "w10"}])
    assert start("deep/o", *toy(None), "data=jsonl", f"data.path=./{path}", f"hydra.job.chdir={chdir}", "sampling.max_tokens=5") == 0
    assert ids(list(rows_of("deep/o").values())) == [END] and resume("deep/o") == 0


# -- numbers that overflow --------------------------------------------------------------------------------------------------------------------


def test_half_precision_that_overflows_is_an_error_row_and_never_a_quiet_wrong_text() -> None:
    path = write_lines(Path("in.jsonl"), [{"prompt": "w30"}])
    for dtype, expect in (("float32", 0), ("bfloat16", 0), ("float16", 3)):
        target = [*toy(None, "target_fp16_overflow"), f"model.dtype={dtype}", "data=jsonl", f"data.path={path}", "sampling.max_tokens=5"]
        assert start(dtype, *target) == expect
        (row,) = rows_of(dtype).values()
        if expect == 0:
            assert row["token_ids"] == CYCLE
        else:
            assert row["error"]["type"] == "NonFiniteError" and row["token_ids"] == []
