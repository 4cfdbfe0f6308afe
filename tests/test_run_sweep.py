"""Sweeps of real jobs: every combination in a folder of its own, one loading of the target, the rows of single runs, failures beside successes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from specgen import cli, loading
from specgen.config import DraftConfig
from specgen.errors import CheckpointError
from tests.harness import thinned
from tests.jobs import SMALL, log_of, rows_of, same, start, stats_of, toy, write_lines
from tests.toys import toy_folder

GRID = ["draft=eagle,mtp,draft_model", "draft.topk=1,4", "draft.num_steps=1,3"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*overrides: str) -> int:
    return cli.main(["-m", "output.dir=s", *overrides])


def table() -> list[dict[str, str]]:
    with open("s/sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_twelve_jobs_load_the_target_once_and_write_the_rows_of_single_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_last", None)
    assert sweep(*GRID, *SMALL) == 0
    jobs = table()
    assert len(jobs) == 12 and {job["exit_code"] for job in jobs} == {"0"}
    assert {(job["method"], job["topk"], job["num_steps"]) for job in jobs} == {
        (method, topk, steps) for method in ("eagle", "mtp", "draft_model") for topk in "14" for steps in "13"
    }
    logs = [log_of(Path("s", job["folder"])) for job in jobs]
    assert [log.count("target loaded:") for log in logs] == [1] + [0] * 11
    assert [log.count("is still loaded from the job before") for log in logs] == [0] + [1] * 11
    assert start("plain", *SMALL, "draft=none") == 0
    for job in jobs:
        assert same(rows_of(Path("s", job["folder"]))) == same(rows_of("plain"))
    for place in (2, 11):
        job = jobs[place]
        shape = [f"draft={job['method']}", f"draft.topk={job['topk']}", f"draft.num_steps={job['num_steps']}"]
        assert start(f"single{place}", *SMALL, *shape) == 0
        assert rows_of(f"single{place}") == rows_of(Path("s", job["folder"])), "counts and all"
        assert stats_of(f"single{place}")["acceptance"] == stats_of(Path("s", job["folder"]))["acceptance"]
    assert {path.name for path in Path("s").iterdir() if path.is_file()} == {"multirun.yaml", "sweep.csv", "sweep.html"}


@pytest.mark.parametrize(
    ("error", "code", "steps"),
    thinned([(RuntimeError("a defect"), 1, "1,2"), (CheckpointError("the head is damaged"), 2, "1,2,3,5")], lambda number: number == 1),
)
def test_a_job_that_fails_leaves_the_others(
    error: Exception, code: int, steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = loading.load_drafter

    def fails_once(draft: DraftConfig, *arguments: Any) -> Any:
        if (draft.topk, draft.num_steps) == (4, 1):
            raise error
        return load(draft, *arguments)

    monkeypatch.setattr(loading, "load_drafter", fails_once)
    data = write_lines(Path("in.jsonl"), [{"prompt": "w10"}, {"prompt": "w30"}])
    common = [option for option in toy() if not option.startswith("draft.num_steps")]
    assert sweep(*common, "data=jsonl", f"data.path={data}", "draft.topk=1,2,4", f"draft.num_steps={steps}", "sampling.max_tokens=6") == code
    jobs = table()
    failed = [job for job in jobs if job["exit_code"] != "0"]
    assert len(jobs) == 3 * len(steps.split(",")) and [job["exit_code"] for job in failed] == [str(code)]
    assert "draft.topk=4 draft.num_steps=1" in failed[0]["overrides"]
    assert str(error) in failed[0]["error"] and failed[0]["samples"] == ""
    for job in jobs:
        if job not in failed:
            assert len(rows_of(Path("s", job["folder"]))) == 2 and job["samples"] == "2"
    assert str(error) in log_of(Path("s", failed[0]["folder"]))
    assert f"specgen: job {failed[0]['folder']}: exit {code}: " in capsys.readouterr().err


def test_rows_that_are_errors_make_the_sweep_exit_three(capsys: pytest.CaptureFixture[str]) -> None:
    data = write_lines(Path("in.jsonl"), [{"prompt": "w10"}, {"prompt": None}])
    assert sweep(*toy(None), "data=jsonl", f"data.path={data}", "sampling.max_tokens=2,4") == 3
    assert [job["errors"] for job in table()] == ["1", "1"]


def test_a_checkpoint_that_does_not_fit_fails_its_own_job(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ",".join(str(toy_folder() / name) for name in ("draft_perfect", "draft_other_tokenizer", "draft_half"))
    data = write_lines(Path("in.jsonl"), [{"prompt": "w10"}])
    common = [option for option in toy() if not option.startswith("draft.path")]
    assert sweep(*common, "data=jsonl", f"data.path={data}", f"draft.path={paths}") == 2
    assert [job["exit_code"] for job in table()] == ["0", "2", "0"]
    assert all(len(Path("s", job["folder"]).name) <= 100 and "/" not in job["folder"] for job in table())
    assert "draft_other_tokenizer" in table()[1]["error"]
