"""Sweeps: every job checked before the first one runs, all of them run, one exit code, folders that tell their setting. The run is a stand-in."""

from __future__ import annotations

import csv
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgen import cli
from specgen.config import Config
from specgen.errors import CheckpointError
from specgen.folders import job_names


class Stub:
    """Runs nothing; ``act`` decides how each job ends."""

    def __init__(self, act: Callable[[Config], int]) -> None:
        self.act = act
        self.jobs: list[tuple[Config, Path, list[str]]] = []

    def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
        self.jobs.append((config, folder, overrides))
        return self.act(config)

    def merge(self, dirs: list[Path], out: Path) -> int:
        raise AssertionError("no merge here")

    def write_sweep(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        with (folder / "sweep.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["folder", "overrides", "exit_code", "error"])
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*argv: str, act: Callable[[Config], int] = lambda config: 0) -> tuple[int, Stub]:
    stub = Stub(act)
    return cli.main(["-m", "output.dir=s", *argv], runner=stub), stub


def table() -> list[dict[str, str]]:
    with open("s/sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_combination_runs_in_order_in_a_folder_that_tells_it() -> None:
    code, stub = sweep("draft.num_steps=1,3", "draft=eagle,eagle3", "sampling.max_tokens=4")
    assert code == 0
    assert [(c.draft.num_steps, c.draft.method) for c, _, _ in stub.jobs] == [(1, "eagle"), (1, "eagle3"), (3, "eagle"), (3, "eagle3")]
    names = ["0-num_steps-1_draft-eagle", "1-num_steps-1_draft-eagle3", "2-num_steps-3_draft-eagle", "3-num_steps-3_draft-eagle3"]
    assert [str(folder) for _, folder, _ in stub.jobs] == [f"s/{name}" for name in names]
    assert [row["folder"] for row in table()] == names
    assert table()[1]["overrides"] == "output.dir=s draft.num_steps=1 draft=eagle3 sampling.max_tokens=4"
    assert yaml.safe_load(Path("s", names[3], ".hydra/config.yaml").read_text())["draft"]["num_steps"] == 3
    assert all((folder / "specgen.log").exists() for _, folder, _ in stub.jobs)
    assert {path.name for path in Path("s").iterdir()} == {*names, "multirun.yaml", "sweep.csv"}


def test_a_failing_job_does_not_stop_the_others_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    def act(config: Config) -> int:
        if config.draft.num_steps == 2:
            raise CheckpointError("the drafter does not fit")
        return 0

    code, stub = sweep("draft.num_steps=1,2,3", act=act)
    assert (code, len(stub.jobs)) == (2, 3)
    assert [(row["exit_code"], row["error"]) for row in table()] == [("0", ""), ("2", "the drafter does not fit"), ("0", "")]
    assert capsys.readouterr().err == "specgen: job 1-num_steps-2: exit 2: the drafter does not fit\n"
    assert "the drafter does not fit" in Path("s/1-num_steps-2/specgen.log").read_text()


@pytest.mark.parametrize(("codes", "code"), [((0, 0, 0), 0), ((0, 3, 0), 3), ((3, 2, 0), 2), ((2, 1, 3), 1)])
def test_the_exit_code_is_1_else_2_else_3_else_0(codes: tuple[int, ...], code: int) -> None:
    assert sweep("draft.num_steps=1,2,3", act=lambda config: codes[config.draft.num_steps - 1])[0] == code


def test_a_defect_in_one_job_is_its_own() -> None:
    code, stub = sweep("draft.num_steps=1,2", act=lambda config: 1 // (config.draft.num_steps - 1))
    assert (code, len(stub.jobs)) == (1, 2)
    assert [row["error"] for row in table()] == ["ZeroDivisionError: integer division or modulo by zero", ""]


def test_one_wrong_job_refuses_the_sweep_before_it_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, stub = sweep("engine.page_size=1,0,2")
    assert (code, stub.jobs, list(tmp_path.iterdir())) == (2, [], [])
    refusal = "engine.page_size=0: must be at least 1 and at most 1024"
    assert capsys.readouterr().err == f"specgen: job 1: {refusal} (1 of 3 jobs is refused; none was started)\n"


def test_draft_none_with_steps_is_refused_in_a_sweep_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("draft=none,eagle", "draft.num_steps=2")[0] == 2
    assert "job 0: draft.num_steps=2 has no meaning with draft=none" in capsys.readouterr().err


def test_text_is_swept_as_typed() -> None:
    _, stub = sweep("model=hf", "model.path=org/a,'org/b'", "draft=ngram", "model.revision=1e3,true", r"sampling.stop=[\n],[x\,y]")
    assert [(c.model.path, c.model.revision, c.sampling.stop[0]) for c, _, _ in stub.jobs] == [
        (path, revision, stop) for path in ("org/a", "org/b") for revision in ("1e3", "true") for stop in ("\n", "x,y")
    ]


def test_choice_and_range_make_sweeps() -> None:
    _, stub = sweep("draft.num_steps=range(1,4)", "model.dtype=choice(float32,bfloat16)")
    assert [(c.draft.num_steps, c.model.dtype) for c, _, _ in stub.jobs] == [(s, d) for s in (1, 2, 3) for d in ("float32", "bfloat16")]


def test_folder_names_are_flat_legal_and_short_whatever_the_values() -> None:
    long = "x" * 150 + "/" + "y" * 149
    texts = ["org/a", "org/b", "'a=b,c'", f"'{long}1'", f"'{long}2'", "'\u00e9\u00e8'", "..", "'CON '"]
    _, stub = sweep("data.prompt_field=" + ",".join(texts))
    names = [folder.name for _, folder, _ in stub.jobs]
    assert names[:3] == ["0-prompt_field-org-a", "1-prompt_field-org-b", "2-prompt_field-a-b-c"]
    assert all(re.fullmatch(r"\d-prompt_field-[A-Za-z0-9.+_-]{1,60}", name) for name in names) and len(set(names)) == len(texts)
    assert all(folder.parent == Path("s") for _, folder, _ in stub.jobs)


def test_many_swept_keys_still_give_short_different_names() -> None:
    jobs = [[f"data.chat_template_kwargs.key_number_{key}=value{(job + key) % 2}" for key in range(20)] for job in range(2)]
    names = job_names(jobs)
    assert all(len(name) <= 102 for name in names) and names[0][2:] != names[1][2:]


def test_a_sweep_of_one_job_has_a_folder_too() -> None:
    _, stub = sweep("draft.num_steps=2")
    assert [str(folder) for _, folder, _ in stub.jobs] == ["s/0-job"]


def test_a_folder_that_holds_a_sweep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sweep("draft.num_steps=1,2")
    code, stub = sweep("draft.num_steps=1,2")
    assert (code, stub.jobs) == (2, [])
    assert capsys.readouterr().err == "specgen: output.dir=s holds results already (sweep.csv); choose another folder\n"


def test_the_default_sweep_folder_is_dated() -> None:
    stub = Stub(lambda config: 0)
    assert cli.main(["-m", "draft.num_steps=1,2"], runner=stub) == 0
    assert all(re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}", str(folder.parent)) for _, folder, _ in stub.jobs)
    assert len({folder.parent for _, folder, _ in stub.jobs}) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_sweep_and_the_table_says_so(number: int, code: int) -> None:
    def act(config: Config) -> int:
        if config.draft.num_steps == 2:
            signal.raise_signal(number)
        return 0

    got, stub = sweep("draft.num_steps=1,2,3", act=act)
    assert (got, len(stub.jobs)) == (code, 2)
    assert [(row["exit_code"], row["error"]) for row in table()] == [("0", ""), (str(code), "interrupted"), ("", "not run")]


def test_a_job_that_ends_itself_after_a_signal_ends_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    code, stub = sweep("draft.num_steps=1,2", act=lambda config: 143)
    assert (code, len(stub.jobs)) == (143, 1)
    assert [(row["exit_code"], row["error"]) for row in table()] == [("143", "interrupted"), ("", "not run")]
    assert "specgen: job 0-num_steps-1: exit 143: interrupted\n" in capsys.readouterr().err


def test_output_dir_is_not_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "output.dir=a,b"], runner=Stub(lambda config: 0)) == 2
    assert capsys.readouterr().err == "specgen: output.dir=a,b: it is the sweep's one folder, in which each job has its own; give one\n"


def test_an_experiment_that_sweeps_needs_no_flag_and_yields_to_the_command_line() -> None:
    stub = Stub(lambda config: 0)
    assert cli.main(["+experiment=steps", "draft.num_steps=2"], runner=stub) == 0
    assert [(c.draft.method, c.draft.num_steps) for c, _, _ in stub.jobs] == [("eagle", 2), ("eagle3", 2)]


def test_working_inside_the_folder_is_the_same_sweep(tmp_path: Path) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    seen: list[bool] = []
    code, stub = sweep(
        "hydra.job.chdir=true",
        "draft.num_steps=1,2",
        "data=jsonl",
        "data.path=in.jsonl",
        act=lambda c: seen.append(Path(str(c.data.path)).exists()) or 0,
    )
    assert (code, seen, len(table())) == (0, [True, True], 2)
    assert [folder for _, folder, _ in stub.jobs] == [tmp_path / "s/0-num_steps-1", tmp_path / "s/1-num_steps-2"]
