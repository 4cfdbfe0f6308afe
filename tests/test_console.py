"""What is said on stdout and stderr: nothing that the other end refuses costs a job its rows, its statistics or its exit code."""

from __future__ import annotations

import csv
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr
from pathlib import Path
from typing import IO

import pytest

from specgen import cli, folders, run
from specgen.console import write
from tests.jobs import SMALL, log_of, rows_of, start, stats_of, write_lines


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def without_reader() -> IO[str]:
    """The stream of `... | head` once head has gone; by line, as stderr is."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1, encoding="utf-8")


def full() -> IO[str]:
    return open("/dev/full", "w", encoding="utf-8")


def closed() -> IO[str]:
    stream = io.StringIO()
    stream.close()
    return stream


@contextmanager
def streams(**instead: IO[str] | None) -> Iterator[None]:
    """The process's streams replaced; a real one is flushed and closed afterwards, as the interpreter does at its end."""
    before = {name: getattr(sys, name) for name in instead}
    for name, stream in instead.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)
    for stream in instead.values():
        if stream is not None:
            stream.close()


def outcome(stdout: IO[str] | None, *argv: str) -> tuple[int, str]:
    """A command line with this stdout: its exit code, and what it said on stderr."""
    with streams(stdout=stdout), redirect_stderr(io.StringIO()) as err:
        code = cli.main(argv)
    return code, err.getvalue()


STREAMS: list[tuple[Callable[[], IO[str] | None], list[str]]] = [
    (without_reader, []),
    (full, ["specgen: stdout cannot be written (No space left on device); what goes to files is not concerned"]),
    (closed, []),
    (lambda: None, []),
]


@pytest.mark.parametrize(("opened", "said"), STREAMS, ids=["pipe", "full", "closed", "none"])
def test_a_stdout_that_takes_nothing_changes_neither_files_nor_exit_code(opened: Callable[[], IO[str] | None], said: list[str]) -> None:
    code, err = outcome(opened(), "output.dir=o", *SMALL)
    assert code == 0 and len(rows_of("o")) == 3 and stats_of("o")["complete"] and Path("o/report.html").exists()
    assert err.splitlines() == said
    assert "Logging error" not in log_of("o") and "a defect" not in log_of("o")


ANSWERS = ["--help", "--version", "--cfg job", "--cfg hydra", "--hydra-help", "--info", "-sc install=bash"]


@pytest.mark.parametrize("argv", ANSWERS)
def test_an_answer_that_a_full_disk_takes_is_no_success_and_no_defect(argv: str) -> None:
    line = "specgen: stdout cannot be written: No space left on device; make room there, or send it elsewhere\n"
    assert outcome(full(), *argv.split()) == (2, line)


@pytest.mark.parametrize("argv", ANSWERS)
def test_an_answer_whose_reader_has_seen_enough_is_a_success(argv: str) -> None:
    assert outcome(without_reader(), *argv.split()) == (0, "")


def test_a_merge_does_not_fail_for_want_of_a_reader() -> None:
    for shard in range(2):
        assert start(f"m{shard}", *SMALL, f"data.shard={shard}/2") == 0
    with streams(stdout=without_reader()):
        assert cli.main(["merge=m0,m1", "output.dir=m"]) == 0
    assert len(rows_of("m")) == 3


def test_a_log_whose_disk_is_full_costs_no_job() -> None:
    Path("o").mkdir()
    Path("o/specgen.log").symlink_to("/dev/full")
    code, err = outcome(io.StringIO(), "output.dir=o", *SMALL)
    assert code == 0 and len(rows_of("o")) == 3
    said = err.splitlines()
    assert len(said) == 1 and said[0].endswith("o/specgen.log cannot be written (No space left on device); the job goes on without it")


def test_the_jobs_of_a_sweep_do_not_fail_for_want_of_a_reader() -> None:
    with streams(stdout=without_reader()):
        assert cli.main(["-m", "output.dir=s", "draft=eagle,none", *SMALL]) == 0
    with open("s/sweep.csv", encoding="utf-8") as file:
        assert [(row["exit_code"], row["error"]) for row in csv.DictReader(file)] == [("0", ""), ("0", "")]


def test_a_stderr_that_takes_nothing_hides_no_defect_behind_a_good_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(engine: object) -> None:
        raise RuntimeError("an index is out of range")

    monkeypatch.setattr(run.Engine, "step", breaks)
    with streams(stderr=without_reader()):
        assert start("o", *SMALL) == 1
    with streams(stderr=without_reader()):
        assert start("o", *SMALL) == 2, "the folder holds results"
    assert "RuntimeError: an index is out of range" in log_of("o")


def test_a_record_that_cannot_be_written_as_it_stands_raises_nothing_into_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone surrogate, which UTF-8 has no form for, and arguments that do not fit: the job that logs them goes on."""
    monkeypatch.setattr(logging.getLogger("specgen"), "propagate", False)  # pytest's own handler raises
    with redirect_stderr(io.StringIO()) as err, folders.logging_to(Path()) as log:
        log.warning("row %s is an error", "a\ud800b")
        log.warning("%d rows", "two")
        log.warning("last")
    said = Path("specgen.log").read_text(encoding="utf-8")
    assert r"row a\ud800b is an error" in said and said.rstrip().endswith("last")
    assert err.getvalue().splitlines()[0].endswith("b is an error") and err.getvalue().splitlines()[-1] == "last"


def test_a_folder_that_cannot_be_looked_into_is_no_reason_to_refuse_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("o/.hydra-0badcafe").mkdir(parents=True)

    def refuses(path: Path) -> Iterator[Path]:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuses)
        folders.write_hydra_files(Path("o"), {}, [], "")
    assert Path("o/.hydra/config.yaml").exists() and Path("o/.hydra-0badcafe").exists()


def test_characters_that_stdout_cannot_show_are_written_as_escapes() -> None:
    path = write_lines(Path("in.jsonl"), [{"prompt": "x", "category": "中文"}, {"prompt": "y", "category": "é"}])
    shown = io.BytesIO()
    with streams(stdout=io.TextIOWrapper(shown, encoding="latin-1", write_through=True)):
        assert start("o", "data=jsonl", f"data.path={path}", "sampling.max_tokens=4") == 0
        text = shown.getvalue().decode("latin-1")
    assert r"\u4e2d\u6587" in text and "é" in text and "written to o\n" in text


def test_a_stream_that_was_given_up_takes_what_follows_in_silence() -> None:
    stream = full()
    with streams(stderr=io.StringIO()), closing(stream):
        write(stream, "one\n")
        write(stream, "two\n")
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev
