"""A folder that another job works in is told from one that holds results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specgen import cli
from specgen.errors import ConfigError
from specgen.folders import refuse_results
from specgen.report.disk import LOCK_NAME, FolderLock, holder

IN_USE = f"is in use by another job (process {os.getpid()}); wait for it"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(folder: str) -> str | None:
    try:
        refuse_results(Path(folder))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("held", ["generations.jsonl", "attempts.jsonl", ".hydra", None])
def test_a_folder_is_in_use_while_its_job_holds_the_lock_whatever_it_has_written(held: str | None) -> None:
    with FolderLock(Path("o")):
        if held is not None:
            Path("o", held).touch()
        assert refusal("o") == f"output.dir=o {IN_USE}, or choose another folder"
    assert (refusal("o") is None) is (held is None)


def test_the_lock_file_of_a_job_that_died_is_no_use() -> None:
    Path("o").mkdir()
    Path("o", LOCK_NAME).write_text("12345\n")
    Path("o/generations.jsonl").touch()
    assert holder(Path("o")) is None
    assert refusal("o") == "output.dir=o holds results already (generations.jsonl); go on with resume=o, or choose another folder"
    with FolderLock(Path("o")):
        pass


def test_a_folder_whose_job_has_not_taken_the_lock_yet_is_not_said_to_hold_results() -> None:
    Path("lr=3/.hydra").mkdir(parents=True)
    assert refusal("lr=3") == (
        "output.dir=lr=3 belongs to another job, which is starting or ended before its first row; choose another folder, "
        "or once it has ended go on with \"resume='lr=3'\""
    )


def test_a_sweeps_folder_is_in_use_while_one_of_its_jobs_is() -> None:
    Path("s").mkdir()
    Path("s/multirun.yaml").touch()
    assert refusal("s") == "output.dir=s holds results already (multirun.yaml); choose another folder"
    with FolderLock(Path("s/1-b")):
        assert refusal("s") == f"output.dir=s {IN_USE}, or choose another folder"


def test_a_run_that_is_still_going_is_not_merged(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").mkdir()
    with FolderLock(Path("b")):
        assert cli.main(["merge=a,b", "output.dir=c"]) == 2
    assert capsys.readouterr().err == f"specgen: merge: b {IN_USE}\n"
    assert not Path("c").exists()
