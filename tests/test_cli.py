"""One job on the command line: answers, folders, exit codes, text as typed, resume and merge. The run itself is a stand-in."""

from __future__ import annotations

import csv
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import specgen
from specgen import cli, folders
from specgen.config import Config
from specgen.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent

ONE_PROCESS = (
    "specgen runs its jobs in one process and names their folders; of Hydra's keys it takes "
    "hydra.run.dir, hydra.sweep.dir, hydra.job.chdir, hydra.verbose, hydra.mode, hydra.searchpath"
)


class Stub:
    """Takes the place of ``specgen.run``: keeps what it was given, and does what ``act`` says."""

    def __init__(self, act: Callable[[Config, Path], int] | None = None) -> None:
        self.act = act or (lambda config, folder: 0)
        self.jobs: list[tuple[Config, Path, list[str], bool]] = []
        self.merged: tuple[list[Path], Path] | None = None

    @property
    def config(self) -> Config:
        return self.jobs[-1][0]

    def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
        self.jobs.append((config, folder, overrides, resume))
        (folder / "generations.jsonl").touch()
        return self.act(config, folder)

    def merge(self, dirs: list[Path], out: Path) -> int:
        self.merged = (dirs, out)
        return 0

    def write_sweep(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        with (folder / "sweep.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["folder", "overrides", "exit_code", "error"])
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in a folder of its own, so that ``outputs/`` is its own too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*argv: str, stub: Stub | None = None) -> tuple[int, Stub]:
    stub = stub or Stub()
    return cli.main(argv, runner=stub), stub


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a refused call, which must leave nothing behind."""
    before = sorted(Path().rglob("*"))
    code, stub = run(*argv)
    err = capsys.readouterr().err
    assert (code, stub.jobs) == (2, [])
    assert err.startswith("specgen: ") and err.count("\n") == 1, err
    assert sorted(Path().rglob("*")) == before
    return err.removeprefix("specgen: ").rstrip("\n")


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **path}, timeout=60, **options)


# Answers


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["--cfg", "job"], ["sampling.max_token=1"]])
def test_answers_do_not_import_torch_or_transformers(argv: list[str]) -> None:
    code = f"import sys; from specgen.cli import main; main({argv!r}); print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_checking_a_whole_job_does_not_import_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    code = (
        "import sys; from specgen import cli\n"
        "class R:\n"
        "  def run_job(self, *a, **k): print('torch' in sys.modules); return 0\n"
        "cli.main(['model=hf', 'model.path=model', 'draft=ngram', 'data=jsonl', 'data.path=in.jsonl'], runner=R())"
    )
    assert python("-c", code, cwd=tmp_path).stdout == "False\n"


def test_version_is_specgens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version")[0] == 0
    assert capsys.readouterr().out == f"specgen {specgen.__version__}\n"


def test_help_lists_every_key_with_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    from specgen.schema import KEYS, SELECTORS

    assert run("--help")[0] == 0
    out = capsys.readouterr().out
    lines = {line.split("=")[0].strip(): line.split(None, 1) for line in out[out.index("Keys (") :].splitlines() if line.startswith("  ")}
    assert set(lines) == set(KEYS) - set(SELECTORS)
    assert all(len(parts) == 2 for parts in lines.values())


def test_cfg_job_prints_the_effective_configuration_and_makes_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--cfg", "job", "draft=eagle3", 'sampling.stop=["\\n\\n"]', "model.revision=null")[0] == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["draft"]["method"] == "eagle3"
    assert shown["sampling"]["stop"] == ["\n\n"]
    assert list(tmp_path.iterdir()) == []


def test_python_m_answers_from_any_folder(tmp_path: Path) -> None:
    done = python("-m", "specgen", "--cfg", "job", "--package", "engine.page_size", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "16")


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --max-new-tokens" in refused(capsys, "--max-new-tokens", "5")


# Folders


def test_a_job_gets_a_dated_folder_with_its_configuration_and_log() -> None:
    def act(config: Config, folder: Path) -> int:
        logging.getLogger("specgen").info("hello")
        return 0

    code, stub = run("sampling.max_tokens=7", stub=Stub(act))
    config, folder, overrides, resume = stub.jobs[0]
    assert (code, overrides, resume, config.sampling.max_tokens) == (0, ["sampling.max_tokens=7"], False, 7)
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}", str(folder))
    stored = yaml.safe_load((folder / ".hydra/config.yaml").read_text())
    assert (stored["sampling"]["max_tokens"], stored["model"]["source"]) == (7, "embedded")
    assert yaml.safe_load((folder / ".hydra/overrides.yaml").read_text()) == ["sampling.max_tokens=7"]
    assert yaml.safe_load((folder / ".hydra/hydra.yaml").read_text())["hydra"]["job"]["name"] == "specgen"
    assert (folder / "specgen.log").read_text().endswith("INFO specgen: hello\n")


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    _, stub = run("data=jsonl", "data.path='~/in.jsonl'")
    assert stub.config.data.path == str(tmp_path / "in.jsonl")


def test_two_jobs_of_one_second_get_two_folders() -> None:
    places = {folders.claim(None)[0] for _ in range(50)}
    assert len(places) == 50 and all(place.is_dir() for place in places)


@pytest.mark.parametrize("key", ["output.dir", "hydra.run.dir"])
def test_a_folder_that_holds_results_is_refused_untouched(key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(f"{key}=o", "sampling.max_tokens=3")
    before = {path: path.read_bytes() for path in (tmp_path / "o").rglob("*") if path.is_file()}
    message = refused(capsys, f"{key}=o", "sampling.max_tokens=4")
    assert message == "output.dir=o holds results already (generations.jsonl); go on with resume=o, or choose another folder"
    assert {path: path.read_bytes() for path in (tmp_path / "o").rglob("*") if path.is_file()} == before


def test_output_dir_and_hydra_run_dir_must_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "output.dir=a", "hydra.run.dir=b") == "output.dir is given twice: output.dir=a and output.dir=b; keep one"


def test_a_job_refused_while_loading_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Refusing(Stub):
        def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
            (folder / "attempts.jsonl").write_text("{}\n")
            raise CheckpointError("the checkpoint\n  does not fit")

    code, _ = run("output.dir=a/b/c", stub=Refusing())
    assert (code, capsys.readouterr().err) == (2, "specgen: the checkpoint does not fit\n")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_a_full_disk_stops_before_it_begins_leaves_no_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["output.dir=a/b/c"], runner=Stub()) == 2
    assert capsys.readouterr().err == "specgen: output.dir=a/b/c cannot be written: No space left on device; choose another folder\n"
    assert not Path("a").exists()


def test_what_a_job_killed_at_its_start_left_is_removed_by_the_next() -> None:
    left = Path("o/.hydra-0badcafe")
    left.mkdir(parents=True)
    (left / "config.yaml").touch()
    assert cli.main(["output.dir=o"], runner=Stub()) == 0
    assert not left.exists() and Path("o/.hydra/config.yaml").stat().st_size > 0


@pytest.mark.parametrize("name", [".hydra-original", ".hydra-20261130", ".hydra-0badcaf", ".hydra-0BADCAFE"])
def test_a_folder_of_the_users_is_left_whatever_its_name(name: str) -> None:
    theirs = Path("o", name)
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    assert cli.main(["output.dir=o"], runner=Stub()) == 0
    assert (theirs / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_durable_is_named_and_left_free(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync_folder", refuses)
        assert cli.main(["output.dir=a/b"], runner=Stub()) == 2
    assert capsys.readouterr().err == "specgen: output.dir=a/b cannot be written: Invalid argument; choose another folder\n"
    assert not Path("a").exists() and cli.main(["output.dir=a/b"], runner=Stub()) == 0


def test_a_job_that_fails_after_its_first_row_keeps_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    def act(config: Config, folder: Path) -> int:
        raise CheckpointError("late")

    code, _ = run("output.dir=o", stub=Stub(act))
    assert (code, capsys.readouterr().err) == (2, "specgen: late\n")
    assert "ERROR specgen: late" in Path("o/specgen.log").read_text()


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_paths_are_relative_to_where_the_user_started(chdir: str, tmp_path: Path) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    seen = []
    code, stub = run(
        "data=jsonl",
        "data.path=in.jsonl",
        "output.dir=o",
        f"hydra.job.chdir={chdir}",
        stub=Stub(lambda c, f: seen.append(Path(c.data.path).exists()) or 0),
    )
    assert (code, seen, stub.jobs[0][1].resolve() if chdir == "true" else stub.jobs[0][1].absolute()) == (0, [True], tmp_path / "o")
    assert Path.cwd() == tmp_path
    assert Path("o/.hydra/config.yaml").exists()


# Exit codes


@pytest.mark.parametrize("code", [0, 3])
def test_the_runs_exit_code_is_the_commands(code: int) -> None:
    assert run(stub=Stub(lambda c, f: code))[0] == code


def test_a_defect_exits_1_with_its_traceback_on_stderr_and_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("output.dir=o", stub=Stub(lambda c, f: 1 // 0))
    err = capsys.readouterr().err
    assert code == 1 and "Traceback" in err and err.endswith("specgen: the error above is a defect of specgen, not of your call\n")
    assert "ZeroDivisionError" in Path("o/specgen.log").read_text()


def test_debug_shows_the_traceback_of_a_users_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_DEBUG", "1")
    assert run("nosuchkey=1")[0] == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_exit_130_and_143_and_say_how_to_go_on(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run("output.dir=o", stub=Stub(lambda c, f: signal.raise_signal(number) or 0))[0] == code
    assert capsys.readouterr().err == "specgen: interrupted; python -m specgen resume=o goes on\n"
    assert signal.getsignal(signal.SIGTERM) is before


# Text as typed


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("1e3", "1e3"),
        ("1234567", "1234567"),
        ("12e4567", "12e4567"),
        ("0012", "0012"),
        ("1.10", "1.10"),
        ("1_000", "1_000"),
        ("true", "true"),
        ("NULL", "NULL"),
        ("null", None),
        ("'null'", "null"),
        ("refs/pr/3", "refs/pr/3"),
        ("v1.0-beta", "v1.0-beta"),
        ("'a=b'", "a=b"),
        (r"a\=b", "a=b"),
        ("'it\\'s'", "it's"),
        ("inf", "inf"),
        ("-1", "-1"),
    ],
)
def test_text_arrives_as_typed(typed: str, value: str | None) -> None:
    code, stub = run("model=hf", "model.path=org/name", "draft=ngram", f"model.revision={typed}")
    assert (code, stub.config.model.revision) == (0, value)
    stored = yaml.safe_load((stub.jobs[0][1] / ".hydra/config.yaml").read_text())
    assert stored["model"]["revision"] == value


@pytest.mark.parametrize(
    ("typed", "stop"),
    [
        ("[a, b]", ["a", "b"]),
        ('["<|eot|>"]', ["<|eot|>"]),
        (r'["\n\n"]', ["\n\n"]),
        (r"'\n'", ["\n"]),
        (r"\n", ["\n"]),
        (r"\\n", ["\\n"]),
        (r"'\\n'", ["\\n"]),
        (r"'\t\u00e9\ud83d\ude00'", ["\té\U0001f600"]),
        (r"'\d'", ["\\d"]),
        ("END", ["END"]),
        ("1e3", ["1e3"]),
        ("[1e3, true, '1.10']", ["1e3", "true", "1.10"]),
        ("[]", []),
        ("null", []),
        ("'null'", ["null"]),
        (r"a\,b", ["a,b"]),
        ("'a,b'", ["a,b"]),
        ("['it\\'s', \"[x]\"]", ["it's", "[x]"]),
    ],
)
def test_stop_strings_arrive_with_their_escapes_resolved(typed: str, stop: list[str]) -> None:
    code, stub = run(f"sampling.stop={typed}")
    assert (code, stub.config.sampling.stop) == (0, stop)
    assert yaml.safe_load((stub.jobs[0][1] / ".hydra/config.yaml").read_text())["sampling"]["stop"] == stop


def test_a_stop_string_in_a_file_is_not_unescaped_again(tmp_path: Path) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text('# @package _global_\nsampling:\n  stop: ["\\n", "\\\\n"]\n')
    code, stub = run("--config-dir", "mine", "+experiment=x")
    assert (code, stub.config.sampling.stop) == (0, ["\n", "\\n"])


def test_the_overrides_that_are_stored_give_the_same_job_again() -> None:
    _, first = run(r'sampling.stop=["\n","1e3",\\n]', "model=hf", "model.path=org/name", "model.revision=1e3", "draft=ngram")
    again = yaml.safe_load((first.jobs[0][1] / ".hydra/overrides.yaml").read_text())
    _, second = run(*again)
    assert second.config == first.config


@pytest.mark.parametrize(
    ("argument", "paste"),
    [
        ("model.path=m/epoch=3", "\"model.path='m/epoch=3'\""),
        ("sampling.stop=<|eot|>", "\"sampling.stop='<|eot|>'\""),
        ("data.path=[v1](x)", "\"data.path='[v1](x)'\""),
        ("data.path=donn\u00e9es.jsonl", "\"data.path='donn\u00e9es.jsonl'\""),
        ("data.path=~x", "\"data.path='~x'\""),
        ("data.path=a$(b", "'data.path=\"a$(b\"'"),
        ("data.path=it's", '"data.path=\\"it\'s\\""'),
    ],
)
def test_values_the_grammar_refuses_come_back_in_the_form_to_paste(argument: str, paste: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, argument)
    key, _, text = argument.partition("=")
    assert message == f"{argument} holds characters that need quotes; paste {paste}"
    words = subprocess.run(["sh", "-c", f"printf %s {paste}"], capture_output=True, text=True, check=True).stdout
    from specgen.overrides import parse, plain_value

    value = plain_value(parse([words])[0])
    assert value == ([text] if key == "sampling.stop" else text)


def test_an_equals_sign_in_a_path_works_quoted_and_escaped(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m/epoch=3")
    for form in ("model.path='m/epoch=3'", r"model.path=m/epoch\=3"):
        code, stub = run("model=hf", form, "draft=ngram", "data=random")
        assert (code, stub.config.model.path) == (0, "m/epoch=3")


# Refusals


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("sampling.max_token=5", "unknown key sampling.max_token: did you mean sampling.max_tokens?"),
        ("+sampling.max_token=5", "unknown key sampling.max_token: did you mean sampling.max_tokens?"),
        ("++engine.page_sizes=5", "unknown key engine.page_sizes: did you mean engine.page_size?"),
        ("num_speculative_tokens=3", "unknown key num_speculative_tokens: did you mean draft.num_steps?"),
        ("sampling.max_new_tokens=3", "unknown key sampling.max_new_tokens: did you mean sampling.max_tokens?"),
        ("sampling.topk=3", "unknown key sampling.topk: did you mean sampling.top_k?"),
        ("draft.top_k=3", "unknown key draft.top_k: did you mean draft.topk?"),
        ("speculative_eagle_topk=3", "unknown key speculative_eagle_topk: did you mean draft.topk?"),
        ("temperature=1", "unknown key temperature: did you mean sampling.temperature?"),
        ("qqqqqq=1", "unknown key qqqqqq: python -m specgen --help lists all keys"),
        ("~sampling.top_p", "~sampling.top_p: a key cannot be removed; set it to the value you want"),
        ("~draft", "~draft: a key cannot be removed; set draft=none"),
        ("draft=null", "draft=null: a name is needed; use draft=none"),
        (
            "draft=eagel",
            "draft=eagel: no such choice; did you mean draft=eagle? The names are none, draft_model, eagle, eagle3, mtp, dflash, ngram",
        ),
        ("model=base", "model=base: no such choice; the names are embedded, hf"),
        ("model=/a/b", "model=/a/b: model is a name, not a path; use model=hf model.path=/a/b"),
        ("model=org/name@main", "model=org/name@main: model is a name, not a path; use model=hf model.path=org/name model.revision=main"),
        ("data=x.parquet", "data=x.parquet: data is a name, not a path; use data=parquet data.path=x.parquet"),
        ("draft=org/eagle3-head", "draft=org/eagle3-head: draft is a name, not a path; use draft=eagle3 draft.path=org/eagle3-head"),
        ("model.source=hf", "model.source is set by choosing the group: model=NAME"),
        ("sampling={a:1}", "sampling is a section, not a key; set its keys one by one: sampling.NAME=value"),
        ("data.path= in.jsonl", "data.path= has no value; write it right after the =, without a blank"),
        ("data.path=''", "data.path= has no value; write it right after the =, without a blank"),
        ("in.jsonl", "stray argument 'in.jsonl': settings are key=value, without blanks around the ="),
        ("draft.topk=2 draft.topk=3", "draft.topk is given twice: draft.topk=2 and draft.topk=3; keep one"),
        ("draft.topk=2,3", "draft.topk=2,3 has several values: add -m for a sweep"),
        ("data.path=a,b", "data.path=a,b has several values: add -m for a sweep, or quote the text: \"data.path='a,b'\""),
        (r"sampling.stop='\u12'", r"sampling.stop: \u in '\\u12' is not a character; write \u and four hexadecimal digits, or \\u for the text"),
        ("sampling.stop=['']", "sampling.stop='': holds an empty text"),
        ("output.dir=${nowhere.dir}", "output.dir refers to ${nowhere.dir}, and there is no such key: python -m specgen --help lists all keys"),
        ("resume=nowhere", "resume=nowhere is not a run folder: it has no .hydra/config.yaml"),
        ("merge=a output.dir=b", "merge= needs at least two run folders and a new one: merge=DIR,DIR output.dir=DIR"),
        ("merge=a,b output.dir=c", "merge: a is not a folder"),
        ("-m merge=a,b output.dir=c", "merge= joins the folders of finished jobs, and -m sweeps over jobs; leave out -m"),
        ("hydra/launcher=joblib", f"hydra/launcher cannot be set: {ONE_PROCESS}"),
        ("hydra.output_subdir=x", f"hydra.output_subdir cannot be set: {ONE_PROCESS}"),
        (f"output.dir={'x' * 300}", f"output.dir={'x' * 300} cannot be made: File name too long; choose another folder"),
        (
            f"model=hf draft=ngram model.path={'x/' * 2000}",
            f"model.path={'x/' * 2000}: no such folder, and not a hub id of the form ORGANISATION/NAME",
        ),
        ("merge=a,b engine.max_batch=3", "merge= takes output.dir= and nothing else; leave out engine.max_batch"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *argv.split(" ")) == message


def test_the_same_setting_twice_is_no_mistake() -> None:
    assert run("draft.topk=1", "+draft.topk=1")[1].jobs[0][2] == ["draft.topk=1"]


def test_the_sweep_over_every_drafter_has_all_that_there_are() -> None:
    conf = Path(__file__).parents[1] / "conf"
    swept = re.search(r"^ *draft: (\S+)$", (conf / "experiment" / "drafters.yaml").read_text(), re.M)
    assert swept is not None
    assert sorted(swept[1].split(",")) == sorted(path.stem for path in (conf / "draft").glob("*.yaml") if path.stem != "base")


def test_an_experiment_is_chosen_with_and_without_a_plus(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text("# @package _global_\ndefaults:\n  - override /draft: eagle3\nsampling:\n  max_tokens: 9\n")
    for form in ("experiment=x", "+experiment=x"):
        _, stub = run("--config-dir", "mine", form)
        assert (stub.config.draft.method, stub.config.sampling.max_tokens) == ("eagle3", 9)
    shipped = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "experiment").glob("*.yaml"))
    assert refused(capsys, "+experiment=y") == f"experiment=y: no such choice; the names are {', '.join(shipped)}"


def test_a_key_that_a_file_smuggles_in_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text("# @package _global_\nsampling:\n  max_new_tokens: 9\n")
    message = refused(capsys, "--config-dir", "mine", "+experiment=x")
    assert message == "unknown key sampling.max_new_tokens: did you mean sampling.max_tokens?"


def test_an_interpolation_names_both_keys(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text("# @package _global_\noutput:\n  dir: ${nowhere.dir}\n")
    message = refused(capsys, "--config-dir", "mine", "+experiment=x")
    assert message == "output.dir refers to ${nowhere.dir}, and there is no such key: python -m specgen --help lists all keys"


def test_a_users_own_group_file_is_found() -> None:
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/small.yaml").write_text("defaults:\n  - hf\npath: org/name\n")
    code, stub = run("--config-dir", "mine", "model=small", "draft=ngram")
    assert (code, stub.config.model.source, stub.config.model.path) == (0, "hf", "org/name")


# Resume and merge


def test_resume_goes_on_with_the_stored_configuration(tmp_path: Path) -> None:
    run("output.dir=o", "draft=eagle3", 'sampling.stop=["\\n"]', "sampling.max_tokens=5")
    stored = (tmp_path / "o/.hydra/config.yaml").read_bytes()
    code, stub = run("resume=o", "engine.max_batch=3", "sampling.max_tokens=5", "draft=eagle3", "resume_errors=true")
    config, folder, overrides, resume = stub.jobs[0]
    assert (code, folder, resume) == (0, Path("o"), True)
    assert overrides == ["resume=o", "engine.max_batch=3", "sampling.max_tokens=5", "draft=eagle3", "resume_errors=true"]
    assert (config.engine.max_batch, config.sampling.stop, config.resume, config.resume_errors) == (3, ["\n"], "o", True)
    assert (tmp_path / "o/.hydra/config.yaml").read_bytes() == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sampling.max_tokens=6", "sampling.max_tokens=6 cannot be changed on resume: the run was started with 5; leave it out, or start a new run"),
        ("draft=eagle3", "draft=eagle3 cannot be changed on resume: the run was started with eagle; leave it out, or start a new run"),
        ("output.dir=p", "output.dir=p: a resumed run stays in its folder o; leave it out"),
        ("experiment=steps", "experiment cannot be changed on resume: the run goes on under its own configuration; leave it out"),
        ("-m", "resume= goes on with one job; leave out -m"),
        ("hydra.job.chdir=true", "hydra.job.chdir has no meaning with resume=; leave it out"),
    ],
)
def test_resume_refuses_other_changes_by_name(change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("output.dir=o", "sampling.max_tokens=5")
    assert refused(capsys, "resume=o", change) == message


def test_resume_from_another_folder_finds_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    run("output.dir=o", "data=jsonl", "data.path=in.jsonl")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    code, stub = run("resume=../o")
    assert (code, stub.config.data.path) == (0, str(tmp_path / "in.jsonl"))


def test_resume_takes_a_relocated_path(tmp_path: Path) -> None:
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    run("output.dir=o", "data=jsonl", "data.path=in.jsonl")
    Path("in.jsonl").rename("moved.jsonl")
    code, stub = run("resume=o", "data.path=moved.jsonl")
    assert (code, stub.config.data.path) == (0, "moved.jsonl")


def test_merge_hands_over_the_folders() -> None:
    for name in ("a", "b"):
        run(f"output.dir={name}")
    code, stub = run("merge=a,b", "output.dir=c")
    assert (code, stub.merged) == (0, ([Path("a"), Path("b")], Path("c")))


def checkpoint(folder: Path, tokenizer: bool = True) -> Path:
    """A folder that passes as a checkpoint: config, tokenizer, one safetensors file of one number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    return folder
