"""generations.jsonl: content, strictness, durability, resume."""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.errors import DataError
from specgen.report.attempts import append_attempt, read_attempts
from specgen.report.disk import AS_TEXT, NONFINITE, FolderLock
from specgen.report.resume import ALWAYS, COUNTED, KINDS, open_for_resume
from specgen.report.stats import load_rows
from specgen.report.writer import RunWriter, holds_results, row_of
from specgen.types import Completion, Counts, Prompt

NAME = "generations.jsonl"


def done(index: int = 0, **fields: Any) -> Completion:
    base: dict[str, Any] = {
        "id": f"r{index}",
        "sample": 0,
        "index": index,
        "prompt": f"p{index}",
        "text": "t",
        "token_ids": [1, 2],
        "finish_reason": "length",
        "stop_reason": None,
        "error": None,
        "prompt_tokens": 1,
        "output_tokens": 2,
        "counts": Counts(prefill_sampled=1, verify_steps=1, proposed=[1], reached=[1], accepted=[1], committed=2, trimmed=1),
    }
    return Completion(**{**base, **fields})


def failed(index: int = 0, **fields: Any) -> Completion:
    error = {"type": "DataError", "message": "no prompt"}
    empty: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "error", "error": error, "prompt_tokens": 0, "output_tokens": 0}
    return done(index, **{**empty, "counts": Counts(), **fields})


def strict(text: str | bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write(folder: Path, *rows: Completion, **options: Any) -> RunWriter:
    with RunWriter(folder, **options) as writer:
        for row in rows:
            writer.append(row)
    return writer


def lines_of(folder: Path) -> list[bytes]:
    data = (folder / NAME).read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return data.split(b"\n")[:-1]


# --- content


def test_a_row_holds_exactly_the_contract_fields_in_order(tmp_path: Path) -> None:
    write(tmp_path, done(3, id=7, meta={"level": "easy"}))
    assert lines_of(tmp_path) == [
        b'{"id":7,"sample":0,"index":3,"prompt":"p3","text":"t","token_ids":[1,2],"finish_reason":"length","stop_reason":null,"error":null,'
        b'"prompt_tokens":1,"output_tokens":2,"counts":{"prefill_sampled":1,"verify_steps":1,"steps_without_draft":0,"proposed":[1],'
        b'"reached":[1],"accepted":[1],"committed":2,"trimmed":1},"meta":{"level":"easy"}}'
    ]


def test_fields_on_request_come_last_and_only_on_request() -> None:
    row = done(sampling={"seed": 5}, simulated=True, provenance=[-1, 1], logprobs=[-0.5, -0.1], prompt_token_ids=[9], category="math")
    full = list(row_of(row, provenance=True, prompt_token_ids=True))
    assert full[full.index("counts") :] == ["counts", "simulated", "sampling", "meta", "category", "provenance", "logprobs", "prompt_token_ids"]
    assert not {"provenance", "prompt_token_ids"} & set(row_of(row))
    assert "token_ids" not in row_of(row, token_ids=False) and "meta" not in row_of(row, meta=False)
    assert not {"simulated", "sampling", "turns", "logprobs", "category"} & set(row_of(done()))


def test_a_category_that_meta_already_shows_is_not_written_twice() -> None:
    row = done(category="math", meta={"category": "math"})
    assert "category" not in row_of(row)
    assert row_of(row, meta=False)["category"] == "math"


def test_turns_are_written_with_their_counts_and_follow_the_token_id_option() -> None:
    turn = {"prompt_tokens": 1, "text": "t", "token_ids": [1, 2], "finish_reason": "stop", "counts": Counts(prefill_sampled=1)}
    assert row_of(done(turns=[turn]))["turns"] == [{**turn, "counts": Counts(prefill_sampled=1).as_dict()}]
    assert "token_ids" not in row_of(done(turns=[turn]), token_ids=False)["turns"][0]


def test_line_separators_inside_strings_do_not_split_rows(tmp_path: Path) -> None:  # D05
    texts = ["w10\u2028w11", "w30\u0085w31\u2029w32", "w40\x0b\x0c\x1c\r\n"]
    write(tmp_path, *(done(i, prompt=text, text=text) for i, text in enumerate(texts)))
    assert len(lines_of(tmp_path)) == 3
    assert "\u2028".encode() in lines_of(tmp_path)[0]  # as it is, not escaped
    assert [row["prompt"] for row in load_rows(tmp_path)] == texts
    assert open_for_resume(tmp_path).done == {(0, 0), (1, 0), (2, 0)}


def test_non_finite_numbers_become_null_and_are_counted(tmp_path: Path) -> None:  # D24
    nan, inf = float("nan"), float("inf")
    meta = {"score": nan, "deep": [{"x": -inf}, 1.5], "array": np.array([1.0, np.nan]), "scalar": np.float32("inf")}
    writer = write(tmp_path, done(0, meta=meta))
    (first,) = (strict(line) for line in lines_of(tmp_path))
    assert first["meta"] == {"score": None, "deep": [{"x": None}, 1.5], "array": [1.0, None], "scalar": None}
    assert writer.notes == {NONFINITE: 4}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_logarithm_of_a_probability_of_zero_is_null_and_no_fault(tmp_path: Path, format: str) -> None:
    nan, inf = float("nan"), float("inf")
    sound = [{"id": 2, "logprob": -0.5, "top": [[2, -0.5], [3, -inf]]}, {"id": 4, "logprob": -inf, "top": []}]
    broken = [{"id": 2, "logprob": nan, "top": [[2, inf]]}]
    writer = write(tmp_path, done(0, logprobs=sound), done(1, logprobs=broken), format=format)
    first, second = (row["logprobs"] for row in load_rows(tmp_path))
    assert first == [{"id": 2, "logprob": -0.5, "top": [[2, -0.5], [3, None]]}, {"id": 4, "logprob": None, "top": []}]
    assert second == [{"id": 2, "logprob": None, "top": [[2, None]]}]
    assert dict(writer.notes) == {NONFINITE: 2}, "what is no logarithm of a probability is counted"
    assert sound[0]["top"] == [[2, -0.5], [3, -inf]], "the caller's own entries stay"


def test_values_without_a_json_form_are_written_as_text_and_counted(tmp_path: Path) -> None:
    meta = {"day": datetime.date(2026, 1, 2), "raw": b"\x00\x01", "count": np.int64(3), "pair": (1, 2), 5: "five", (1, 2): "tuple"}
    writer = write(tmp_path, done(meta=meta))
    assert strict(lines_of(tmp_path)[0])["meta"] == {"day": "2026-01-02", "raw": "AAE=", "count": 3, "pair": [1, 2], "5": "five", "(1, 2)": "tuple"}
    assert writer.notes == {AS_TEXT: 3}


def test_a_lone_surrogate_survives_the_file(tmp_path: Path) -> None:
    write(tmp_path, done(prompt="a\ud800b"))
    assert [row["prompt"] for row in load_rows(tmp_path)] == ["a\ud800b"]


def test_equal_prompts_and_equal_ids_are_rows_of_their_own(tmp_path: Path) -> None:  # D19
    rows = [done(i, id=1, prompt="w10", text=f"answer {i}") for i in range(6)]
    write(tmp_path, *rows[:2])
    writer = RunWriter(tmp_path, resume=True)
    assert writer.finished.done == {(0, 0), (1, 0)}
    for row in rows[2:]:
        writer.append(row)
    writer.close()
    assert [row["text"] for row in load_rows(tmp_path)] == [f"answer {i}" for i in range(6)]


def test_rows_whose_counts_contradict_themselves_never_reach_the_file(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        with pytest.raises(AssertionError, match=r"row \(index 4, sample 0\): output_tokens is 3, but prefill_sampled \+ committed - trimmed is 2"):
            writer.append(done(4, output_tokens=3))
        writer.append(done(5))
    assert [row["index"] for row in load_rows(tmp_path)] == [5]


# --- resume


def test_a_cut_at_any_byte_loses_at_most_the_row_being_written(tmp_path: Path) -> None:  # D17
    whole = tmp_path / "whole"
    rows = [done(i, text="w11 \u00e9\U0001f600 w12") for i in range(3)]
    write(whole, *rows)
    data = (whole / NAME).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / NAME).write_bytes(data[:cut])
        finished = open_for_resume(folder)
        kept = sum(end - 1 <= cut for end in ends)  # a whole line without its LF is a row
        assert finished.done == {(i, 0) for i in range(kept)}, cut
        assert (folder / NAME).read_bytes() == data[: ends[kept - 1] if kept else 0], cut
        assert (finished.repaired is None) == (cut in (0, *ends)), cut


def test_a_resumed_torn_file_ends_with_every_row_once(tmp_path: Path) -> None:  # D17
    rows = [done(i) for i in range(4)]
    write(tmp_path, *rows)
    data = (tmp_path / NAME).read_bytes()
    half = len(data) * 5 // 8
    (tmp_path / NAME).write_bytes(data[:half])
    with RunWriter(tmp_path, resume=True) as writer:
        assert writer.finished.done == {(0, 0), (1, 0)}
        assert writer.finished.repaired is not None and "torn last line" in writer.finished.repaired
        for row in rows:
            if (row.index, row.sample) not in writer.finished:
                writer.append(row)
    assert (tmp_path / NAME).read_bytes() == data


def test_half_a_character_and_trailing_zero_bytes_are_cut_off(tmp_path: Path) -> None:  # D17
    write(tmp_path, done(0))
    data = (tmp_path / NAME).read_bytes()
    for tail in (b'{"id": "r1", "text": "\xf0\x9f', b"\x00" * 70_000, b"12"):
        (tmp_path / NAME).write_bytes(data + tail)
        assert open_for_resume(tmp_path).done == {(0, 0)}
        assert (tmp_path / NAME).read_bytes() == data


def test_resume_is_keyed_by_index_and_sample_whatever_the_order(tmp_path: Path) -> None:  # D20
    order = [(1, 0), (3, 1), (0, 1), (3, 0)]
    write(tmp_path, *(done(index, sample=sample) for index, sample in order))
    assert open_for_resume(tmp_path).done == set(order)
    assert [(row["index"], row["sample"]) for row in load_rows(tmp_path)] == order


def test_damage_before_the_last_line_is_named_not_dropped(tmp_path: Path) -> None:
    write(tmp_path, done(0), done(1), done(2))
    lines = lines_of(tmp_path)
    (tmp_path / NAME).write_bytes(b"\n".join([lines[0], lines[1][:20], lines[2], b""]))
    with pytest.raises(DataError, match=r"generations.jsonl line 2 is not a JSON object; remove the line"):
        open_for_resume(tmp_path)
    (tmp_path / NAME).write_bytes(b"\n".join([lines[0], lines[1], lines[0], b""]))
    with pytest.raises(DataError, match=r"line 3: row \(index 0, sample 0\) stands there for the second time"):
        open_for_resume(tmp_path)
    (tmp_path / NAME).write_bytes(b'{"id": 1}\n')
    with pytest.raises(DataError, match="line 1 is not a row that specgen wrote"):
        open_for_resume(tmp_path)


WRONG = [None, 5, -1, 1.5, True, "x", [], ["x"], {}, {"a": 1}, 10**30]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_row_whose_field_is_missing_or_of_another_kind_is_named_before_anything_is_done(name: str, tmp_path: Path) -> None:
    """What is taken is of the kind that is written there."""
    write(tmp_path, done(0), done(1))
    first, second, *_ = lines_of(tmp_path)
    taken = []
    for value in WRONG:
        (tmp_path / NAME).write_bytes(json.dumps({**json.loads(first), name: value}).encode() + b"\n" + second + b"\n")
        try:
            assert len(open_for_resume(tmp_path)) == 2
            taken.append(value)
        except DataError as error:
            assert re.search(rf"line 1 is not a row that specgen wrote \('{name}'.*\); remove it and the row is redone", str(error))
    assert all(type(value) in KINDS[name] for value in taken)
    assert name not in COUNTED or taken == [5]
    (tmp_path / NAME).write_bytes(json.dumps({key: value for key, value in json.loads(first).items() if key != name}).encode() + b"\n")
    if name in ALWAYS:
        with pytest.raises(DataError, match=f"line 1 is not a row that specgen wrote \\('{name}' is missing\\)"):
            open_for_resume(tmp_path)
    else:
        assert len(open_for_resume(tmp_path)) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(index=0, id="7", token_ids=[1], text="p0"), "has id 7, the input now '7'"),
        (Prompt(index=0, id=7, token_ids=[1], text="other"), "its prompt differs"),
    ],
)
def test_a_changed_input_is_refused_by_row(tmp_path: Path, prompt: Prompt, message: str) -> None:
    write(tmp_path, done(0, id=7))
    finished = open_for_resume(tmp_path)
    finished.check(Prompt(index=0, id=7, token_ids=[1], text="p0"), 0)
    with pytest.raises(DataError, match=message):
        finished.check(prompt, 0)


def test_rows_of_turns_are_compared_by_their_first_prompt_and_errors_by_id(tmp_path: Path) -> None:
    turns = [{"prompt_tokens": 3, "text": "a"}, {"prompt_tokens": 9, "text": "b"}]
    write(tmp_path, done(0, prompt="all of both turns", turns=turns), failed(1))
    finished = open_for_resume(tmp_path)
    finished.check(Prompt(index=0, id="r0", token_ids=[1, 2, 3], text="the first turn"), 0)
    finished.check(Prompt(index=1, id="r1", token_ids=[], text="whatever"), 0)
    with pytest.raises(DataError, match="its first turn differs"):
        finished.check(Prompt(index=0, id="r0", token_ids=[1, 2], text="the first turn"), 0)


def test_error_rows_are_kept_unless_they_are_retried(tmp_path: Path) -> None:
    write(tmp_path, failed(0), done(1), failed(2))
    before = (tmp_path / NAME).read_bytes()
    finished = open_for_resume(tmp_path)
    assert (finished.done, finished.errors, finished.superseded) == ({(0, 0), (1, 0), (2, 0)}, {(0, 0), (2, 0)}, set())
    with RunWriter(tmp_path, resume=True, resume_errors=True) as writer:
        assert (writer.finished.done, writer.finished.superseded) == ({(1, 0)}, {(0, 0), (2, 0)})
    assert (tmp_path / NAME).read_bytes() == before  # a start that appends nothing changes nothing
    kept = before.split(b"\n")[1] + b"\n"
    with RunWriter(tmp_path, resume=True, resume_errors=True) as writer:
        writer.append(done(2))
        writer.append(failed(0))
    data = (tmp_path / NAME).read_bytes()
    assert data.startswith(kept)
    assert [(row["index"], row["finish_reason"]) for row in load_rows(tmp_path)] == [(1, "length"), (2, "length"), (0, "error")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]


def test_resume_of_a_folder_without_rows_starts_from_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    assert (tmp_path / NAME).read_bytes() == b""
    (tmp_path / f".{NAME}.tmp").write_bytes(b"left by a crash")
    write(tmp_path, done(0), resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]
    with pytest.raises(DataError, match="missing does not exist; resume= takes the folder of an earlier run"):
        RunWriter(tmp_path / "missing", resume=True)
    assert not (tmp_path / "missing").exists()


def test_a_finished_row_is_not_appended_again(tmp_path: Path) -> None:
    write(tmp_path, done(0))
    with RunWriter(tmp_path, resume=True) as writer, pytest.raises(AssertionError, match=r"\(index 0, sample 0\) was finished by an earlier start"):
        writer.append(done(0))


# --- the folder and the disk


def test_a_folder_with_results_is_refused_and_left_alone(tmp_path: Path) -> None:
    write(tmp_path, done(0))
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(DataError, match=r"already holds the results of a run; choose another output\.dir or go on with resume="):
        RunWriter(tmp_path)
    assert (tmp_path / NAME).read_bytes() == before and holds_results(tmp_path) and not holds_results(tmp_path / "new")
    with pytest.raises(DataError, match=r"holds jsonl rows; output\.format=parquet cannot go on with it"):
        RunWriter(tmp_path, format="parquet", resume=True)
    FolderLock(tmp_path).release()  # the refused starts hold nothing


def test_one_job_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with (
        RunWriter(tmp_path / "run"),
        pytest.raises(DataError, match=rf"run is in use by another job \(process {os.getpid()}\); wait for it or choose another output.dir"),
    ):
        RunWriter(tmp_path / "run", resume=True)
    write(tmp_path / "run", done(0), resume=True)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_lock_taken_earlier_is_used_and_stays_with_its_owner(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        write(tmp_path, done(0), lock=lock)
        with pytest.raises(DataError, match="in use"):
            FolderLock(tmp_path)


def test_a_killed_job_leaves_its_rows_and_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_writer import RunWriter, done\n"
        "writer = RunWriter(Path(sys.argv[1]))\n"
        "writer.append(done(0)); writer.append(done(1)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(here), str(here.parent)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    with RunWriter(tmp_path, resume=True) as writer:
        assert writer.finished.done == {(0, 0), (1, 0)}


def test_a_full_disk_is_one_clear_error_and_leaves_whole_rows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.append(done(0))
    size = (tmp_path / NAME).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))  # the kernel then takes 100 bytes of the next row
    try:
        for _ in range(2):
            with pytest.raises(DataError, match=r"full; the 1 rows this start wrote are complete: free space and go on with resume=") as caught:
                writer.append(done(1, text="x" * 500))
            assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert (tmp_path / NAME).stat().st_size == size
    assert open_for_resume(tmp_path).done == {(0, 0)}


def test_the_disk_is_forced_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: list[float] = [0.0]
    forced: list[float] = []
    monkeypatch.setattr("specgen.report.writer.time.monotonic", lambda: clock[0])
    real = os.fsync

    def fsync(descriptor: int) -> None:
        forced.append(clock[0])
        real(descriptor)

    monkeypatch.setattr("specgen.report.writer.os.fsync", fsync)
    writer = RunWriter(tmp_path, fsync_seconds=5.0)
    writer.append(done(0))
    forced.clear()
    for second in range(1, 12):
        clock[0] = float(second)
        writer.append(done(second))
    assert forced == [5.0, 10.0]
    clock[0] = 16.0
    writer.sync_if_due()
    writer.sync_if_due()
    writer.close()
    assert forced == [5.0, 10.0, 16.0]


def test_a_job_that_fails_before_its_first_row_leaves_no_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model"), RunWriter(tmp_path):
        raise ValueError("no model")
    assert list(tmp_path.iterdir()) == []


# --- attempts


def test_attempts_are_numbered_merged_and_survive_a_torn_line(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == []
    first = append_attempt(tmp_path, {"started": "a", "rows": None})
    assert (first, append_attempt(tmp_path, {"started": "b"})) == (1, 2)
    append_attempt(tmp_path, {"attempt": first, "rows": 3, "wall_s": float("nan")})
    with open(tmp_path / "attempts.jsonl", "ab") as file:
        file.write(b'{"attempt": 2, "rows"')
    assert append_attempt(tmp_path, {"started": "c"}) == 3
    assert read_attempts(tmp_path) == [
        {"attempt": 1, "started": "a", "rows": 3, "wall_s": None},
        {"attempt": 2, "started": "b"},
        {"attempt": 3, "started": "c"},
    ]
