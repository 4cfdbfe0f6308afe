"""Parquet output holds the same rows as JSON lines, part by part."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specgen.errors import DataError
from specgen.report.disk import REPLACED
from specgen.report.parquet import schema
from specgen.report.resume import open_for_resume
from specgen.report.stats import load_rows
from specgen.report.writer import RunWriter
from specgen.types import Completion, Counts


def done(index: int = 0, **fields: Any) -> Completion:
    counts = Counts(prefill_sampled=1, verify_steps=1, proposed=[1], reached=[1], accepted=[1], committed=2, trimmed=1)
    row: dict[str, Any] = {"id": f"r{index}", "sample": 0, "index": index, "prompt": f"p{index}", "text": "t", "token_ids": [1, 2]}
    row |= {"finish_reason": "length", "stop_reason": None, "error": None, "prompt_tokens": 1, "output_tokens": 2, "counts": counts}
    return Completion(**{**row, **fields})


def failed(index: int) -> Completion:
    error = {"type": "DataError", "message": "no prompt"}
    return done(index, text="", token_ids=[], finish_reason="error", error=error, prompt_tokens=0, output_tokens=0, counts=Counts())


def write(folder: Path, *rows: Completion, **options: Any) -> RunWriter:
    with RunWriter(folder, **{"format": "parquet", **options}) as writer:
        for row in rows:
            writer.append(row)
    return writer


VARIED = [
    done(0, id=7, stop_reason=2, meta={"n": [1, {"x": None}]}, sampling={"seed": 5}, simulated=True),
    done(1, id="7", stop_reason="\n", category="math", provenance=[-1, 1], logprobs=[-0.5], prompt_token_ids=[4, 5]),
    failed(2),
    done(3, turns=[{"prompt_tokens": 1, "text": "a\u2028b", "token_ids": [1], "finish_reason": "stop", "counts": Counts()}]),
]


def test_parquet_and_json_lines_give_the_same_rows(tmp_path: Path) -> None:
    options = {"provenance": True, "prompt_token_ids": True}
    write(tmp_path / "parquet", *VARIED, **options)
    write(tmp_path / "lines", *VARIED, format="jsonl", **options)
    plain = [
        {name: value for name, value in row.items() if not (name == "prompt_token_ids" and value is None)} for row in load_rows(tmp_path / "lines")
    ]
    assert list(load_rows(tmp_path / "parquet")) == plain


def test_every_part_has_the_one_schema_and_ids_keep_their_type(tmp_path: Path) -> None:
    write(tmp_path, *VARIED, rows_per_part=2, token_ids=False, meta=False)
    paths = sorted((tmp_path / "generations").iterdir())
    assert [path.name for path in paths] == ["part-00000.parquet", "part-00001.parquet"]
    assert all(pq.read_schema(path).equals(schema()) for path in paths)
    assert pq.read_table(paths[0])["id"].to_pylist() == ["7", '"7"']
    assert [row["id"] for row in load_rows(tmp_path)] == [7, "7", "r2", "r3"]
    assert all("token_ids" not in row and "meta" not in row for row in load_rows(tmp_path))


def test_rows_of_an_unfinished_part_are_redone_and_numbering_goes_on(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, format="parquet", rows_per_part=2)
    for i in range(3):
        writer.append(done(i))
    writer._unlock()  # a crash: row 2 waits in memory
    (tmp_path / "generations" / ".part-00001.parquet.tmp").write_bytes(b"PAR1 half")
    assert [row["index"] for row in load_rows(tmp_path)] == [0, 1]
    with RunWriter(tmp_path, format="parquet", resume=True) as writer:
        assert writer.finished.done == {(0, 0), (1, 0)}
        writer.append(done(2))
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert [row["index"] for row in load_rows(tmp_path)] == [0, 1, 2]


def test_a_part_is_written_when_its_first_row_is_old_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    writer = RunWriter(tmp_path, format="parquet", part_seconds=300.0)
    writer.append(done(0))
    clock[0] = 299.0
    writer.sync_if_due()
    assert list(load_rows(tmp_path)) == []
    clock[0] = 300.0
    writer.sync_if_due()
    assert [row["index"] for row in load_rows(tmp_path)] == [0]
    writer.close()


def test_retried_error_rows_leave_their_parts_before_the_first_append(tmp_path: Path) -> None:
    write(tmp_path, failed(0), done(1), failed(2), rows_per_part=2)
    with RunWriter(tmp_path, format="parquet", resume=True, resume_errors=True) as writer:
        assert (writer.finished.done, writer.finished.superseded) == ({(1, 0)}, {(0, 0), (2, 0)})
        assert len(list(load_rows(tmp_path))) == 3
        writer.append(done(2))
        assert [row["index"] for row in load_rows(tmp_path)] == [1]
    assert [(row["index"], row["finish_reason"]) for row in load_rows(tmp_path)] == [(1, "length"), (2, "length")]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, done(0))
    path = tmp_path / "generations" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"part-00000.parquet cannot be read .*; remove it and its rows are redone on resume"):
        open_for_resume(tmp_path)


def test_a_run_without_rows_can_be_read_and_resumed(tmp_path: Path) -> None:
    write(tmp_path)
    assert list(load_rows(tmp_path)) == []
    write(tmp_path, done(0), resume=True)
    assert [row["index"] for row in load_rows(tmp_path)] == [0]


def test_what_parquet_cannot_hold_is_replaced_and_counted(tmp_path: Path) -> None:
    writer = write(tmp_path, done(0, prompt="a\ud800b", id="x\ud800", meta={"score": float("nan")}))
    [row] = load_rows(tmp_path)
    assert (row["prompt"], row["id"], row["meta"]) == ("a\ufffdb", "x\ud800", {"score": None})
    assert writer.notes[REPLACED] == 1 and sum(writer.notes.values()) == 2
    assert json.loads(json.dumps(row, allow_nan=False)) == row
