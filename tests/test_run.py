"""One job from its command line to its files: exact rows on toys, folder, log, exit codes, signals, threads."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen import cli, loading, run
from specgen.errors import DataError
from specgen.interrupts import Signals
from specgen.loading import choose_threads
from specgen.report.disk import FolderLock
from specgen.report.writer import RunWriter
from tests.jobs import SMALL, log_of, process, resume, rows_of, same, start, stats_of, toy, write_lines

CPU = torch.device("cpu")
CYCLE = [31, 32, 33, 34, 30]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(rows: list[Any], name: str = "in.jsonl") -> list[str]:
    return ["data=jsonl", f"data.path={write_lines(Path(name), rows)}"]


# -- rows -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["draft_perfect", "draft_half", None])
def test_rows_are_the_models_own_whatever_drafts(draft: str | None) -> None:
    data = lines([{"prompt": "w10"}, {"id": "x", "prompt": "w30", "note": 7}, {"token_ids": [1, 40], "max_tokens": 2}])
    assert start("o", *toy(draft), *data, "sampling.max_tokens=6") == 0
    first, second, third = rows_of("o").values()
    assert (first["id"], first["token_ids"], first["text"], first["finish_reason"], first["stop_reason"]) == (
        0,
        [11, 12, 13, 14, 2],
        "w11 w12 w13 w14",
        "stop",
        2,
    )
    assert (second["id"], second["token_ids"], second["finish_reason"], second["meta"]) == ("x", [*CYCLE, 31], "length", {"note": 7})
    assert (third["token_ids"], third["prompt"], third["sampling"]["max_tokens"]) == ([41, 42], "<s> w40", 2)
    stats = stats_of("o")
    assert [stats[name] for name in ("requests", "samples", "errors", "output_tokens", "complete")] == [3, 3, 0, 13, True]
    assert {path.name for path in Path("o").iterdir()} == {
        ".hydra",
        "attempts.jsonl",
        "environment.json",
        "generations.jsonl",
        "report.html",
        "specgen.log",
        "stats.json",
    }


def test_parquet_holds_the_rows_that_json_lines_hold() -> None:
    data = lines([{"prompt": "w10"}, {"id": "x", "prompt": "w30", "note": 7}, {"prompt": 3}])
    for form in ("jsonl", "parquet"):
        assert start(form, *toy(), *data, "sampling.max_tokens=6", f"output.format={form}") == 3
    assert rows_of("parquet") == rows_of("jsonl")


def test_a_million_samples_of_one_row_are_not_queued_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may ask for any ``n``: samples are made as slots come free."""
    data = lines([{"prompt": "w10", "n": 2_000_000}])
    longest = 0
    step = run.Engine.step

    def watched(engine: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(engine.scheduler.waiting))
        return step(engine)

    monkeypatch.setattr(run.Engine, "step", watched)
    monkeypatch.setattr(run._Run, "_stop", lambda self: self.writer.rows >= 40)
    assert start("o", *toy(None), *data, "engine.max_batch=4") == 0
    assert longest <= 8 and len(rows_of("o")) >= 40 and not stats_of("o")["complete"]


def test_long_prompts_are_read_two_prefills_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the next rows does not keep the device waiting: no more of them is tokenised than the next two prefills hold."""
    waiting = []
    step = run.Engine.step

    def watched(engine: Any) -> Any:
        waiting.append([request.prompt.index for request in engine.scheduler.waiting])
        return step(engine)

    monkeypatch.setattr(run.Engine, "step", watched)
    data = lines([{"token_ids": [1, *[10] * 99]}] * 40 + [{"prompt": "w30", "n": 12}] * 2)
    assert start("o", *toy(None), *data, "engine.prefill_tokens=200", "sampling.max_tokens=3") == 0
    assert waiting[0] == [0, 1, 2, 3] and max(map(len, waiting[:17])) <= 4
    assert max(found.count(40) for found in waiting) == 12, "the samples of a prompt share its prefill"
    assert len(rows_of("o")) == 64


def test_rows_that_end_at_once_do_not_run_ahead_of_the_engine() -> None:
    data = lines([{"prompt": "w10", "max_tokens": 0}] * 300 + [{"prompt": "w10"}])
    assert start("o", *toy(None), *data, "engine.max_batch=2") == 0
    found = list(rows_of("o").values())
    assert [len(row["token_ids"]) for row in found] == [0] * 300 + [5]
    assert {row["finish_reason"] for row in found[:-1]} == {"length"}


# -- errors -----------------------------------------------------------------------------------------------------------------------------------

MIXED = ['{"prompt": "w10"}', "{broken", '{"prompt": null}', '{"prompt": "w30", "temperature": -1}', '{"prompt": "w30"}']


def test_bad_rows_are_recorded_beside_the_good_ones() -> None:
    assert start("o", *toy(), *lines(MIXED), "sampling.max_tokens=4") == 3
    found = list(rows_of("o").values())
    assert [row["finish_reason"] for row in found] == ["length", "error", "error", "error", "length"]
    assert found[1]["error"] == {
        "type": "DataError",
        "message": "in.jsonl line 2: not valid JSON: Expecting property name enclosed in double quotes (column 2)",
    }
    assert [row["output_tokens"] for row in found] == [4, 0, 0, 0, 4]
    assert "row 2 is an error: in.jsonl line 3: field 'prompt' is null" in log_of("o")


def test_on_error_stop_ends_the_job_at_the_first_error_and_resume_goes_on_after_it() -> None:
    data = lines([*MIXED, *(['{"prompt": "w30"}'] * 40)])
    common = [*toy(), "sampling.max_tokens=4", "engine.max_batch=2"]
    assert start("o", *common, *data, "data.on_error=stop") == 3
    partial = rows_of("o")
    assert [key for key, row in partial.items() if row["error"]] == [(1, 0)] and len(partial) < 10
    assert not stats_of("o")["complete"] and "go on with `python -m specgen resume=o`" in log_of("o")
    for _ in range(3):  # each start ends at the next error
        code = resume("o")
    assert code == 3 and stats_of("o")["complete"]
    assert start("whole", *common, *data) == 3
    assert same(rows_of("o")) == same(rows_of("whole"))


def test_an_input_without_rows_is_refused_before_anything_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "\n  \n\n"):
        Path("in.jsonl").write_text(text)
        assert start("o", *toy(), "data=jsonl", "data.path=in.jsonl") == 2
        assert capsys.readouterr().err.splitlines()[-1] == "specgen: in.jsonl: no rows"
        assert not Path("o").exists()


def test_what_the_first_row_shows_is_refused_before_the_weights_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_target", lambda *_: pytest.fail("the weights were read"))
    monkeypatch.setattr(loading, "_last", None)
    assert start("o", *toy(), *lines([{"prompt": "w10"}]), "data.system_prompt=w11") == 2
    assert "data.system_prompt cannot be added to a raw prompt row" in capsys.readouterr().err


def test_a_fault_of_the_whole_input_keeps_the_rows_before_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read = run.prompts_of

    def breaks(*arguments: Any) -> Any:
        prompts = read(*arguments)
        yield next(prompts)
        yield next(prompts)
        raise DataError("in.jsonl: the gzip archive is truncated")

    with monkeypatch.context() as patch:
        patch.setattr(run, "prompts_of", breaks)
        assert start("o", *toy(), *lines([{"prompt": "w10"}] * 4)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "specgen: in.jsonl: the gzip archive is truncated"
    assert [row["token_ids"] for row in rows_of("o").values()] == [[11, 12, 13, 14, 2]] * 2
    assert resume("o") == 0 and len(rows_of("o")) == 4


# -- folder, log, figures ---------------------------------------------------------------------------------------------------------------------


def test_the_folder_is_locked_until_the_last_file_is_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def report(folder: Path, remedy: str) -> None:
        with pytest.raises(DataError, match="is in use by another job"):
            FolderLock(folder)
        tried.append(folder)

    monkeypatch.setattr(run, "write_report", report)
    assert start("o", *toy(), *lines([{"prompt": "w10"}])) == 0
    assert tried == [Path("o")] and not Path("o/.lock").exists()
    with FolderLock(Path("o")):
        assert resume("o") == 2
    assert "o is in use by another job (process" in capsys.readouterr().err


def test_a_second_run_into_a_folder_with_results_is_refused_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    data = lines([{"prompt": "w30"}])
    assert start("o", *toy(), *data, "sampling.max_tokens=3") == 0
    before = {path: path.read_bytes() for path in Path("o").rglob("*") if path.is_file()}
    assert cli.main([*toy(), *data, "hydra.run.dir=o", "sampling.max_tokens=5"]) == 2
    assert "holds results already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("o").rglob("*") if path.is_file()} == before


def test_waiting_rows_are_made_durable_while_no_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(RunWriter, "sync_if_due", lambda self: asked.append(self.rows))
    assert start("o", *toy(None), *lines([{"prompt": "w30"}]), "sampling.max_tokens=30") == 0
    assert asked.count(0) >= 29, "once a step of the one row that runs"


def test_what_the_writer_had_to_change_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunWriter.append

    def noting(self: RunWriter, completion: Any) -> None:
        self.notes["lone surrogates replaced by U+FFFD"] += 1
        append(self, completion)

    monkeypatch.setattr(RunWriter, "append", noting)
    assert start("o", *toy(), *lines([{"prompt": "w10"}] * 2)) == 0
    assert "WARNING specgen: 2 lone surrogates replaced by U+FFFD" in log_of("o")


def test_log_and_stats_tell_the_kv_pool_the_first_token_and_the_threads() -> None:
    assert start("o", *toy(), *lines([{"prompt": "w30"}] * 3), "engine.max_batch=2", "engine.page_size=16", "sampling.max_tokens=9") == 0
    log, stats = log_of("o"), stats_of("o")
    # 256 positions and a reserve of D + lead = 4 + 1 tokens are 17 pages a row.
    assert f"KV pool: {2 * 17 * 16} tokens" in log and "for at most 2 rows at a time" in log
    throughput = stats["throughput"]
    assert 0 < throughput["first_token_s"] < throughput["first_decode_s"] < throughput["wall_s"]
    assert throughput["load_s"] < throughput["start_s"]
    assert (throughput["load_s"] == 0) is ("is still loaded from the job before" in log)
    assert throughput["device_prefill_s"] > 0 < throughput["device_decode_s"]
    assert throughput["device_prefill_s"] + throughput["device_decode_s"] < throughput["wall_s"]
    assert "first token after" in log and "threads: 1, as OMP_NUM_THREADS says" in log
    assert stats["environment"]["threads"] == torch.get_num_threads()
    assert stats["attempts"][0]["rows"] == 3


def test_stats_give_the_sampling_as_it_is_set_and_doubt_a_drafter_that_never_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    """``resume=null`` and ``merge=null`` say the default."""
    many = [*lines([{"prompt": "w30"}] * 4), "sampling.max_tokens=24", "sampling.ignore_eos=true", "sampling.logit_bias={9: 1.5, 7: -2}"]
    assert start("o", *toy("draft_never"), *many, "resume=null", "merge=null") == 0
    assert stats_of("o")["sampling"]["logit_bias"] == {"7": -2.0, "9": 1.5}
    assert "no draft was accepted in 92 steps: the drafter may belong to another target" in log_of("o")
    capsys.readouterr()


def test_a_baseline_is_of_the_same_prompts_and_only_where_it_is_asked_for() -> None:
    data = lines([{"prompt": "w30"}] * 3)
    assert start("o", *toy(), *data, "baseline=true", "sampling.max_tokens=40") == 0
    baseline = stats_of("o")["baseline"]
    assert baseline["step"]["count"] > stats_of("o")["step"]["count"] > 0
    assert baseline["speedup"] == stats_of("o")["throughput"]["output_tokens_per_s"] / baseline["throughput"]["output_tokens_per_s"]
    assert start("p", *toy(), *data, "sampling.max_tokens=4") == 0 and stats_of("p")["baseline"] is None
    assert start("e", "data.limit=2", "sampling.max_tokens=4") == 0 and stats_of("e")["baseline"]["speedup"] > 0


def test_the_embedded_family_runs_with_no_settings_but_a_size() -> None:
    assert start("o", *SMALL) == 0 and start("plain", *SMALL, "draft=none") == 0
    assert same(rows_of("o")) == same(rows_of("plain"))
    assert stats_of("o")["acceptance"]["mean_length"]["pooled"] > 1


# -- signals ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.slow)])
def test_a_signal_ends_the_step_keeps_every_row_and_says_how_to_go_on(name: str, code: int, tmp_path: Path) -> None:
    rows = [{"prompt": "w30", "max_tokens": 40 + i % 20} for i in range(150)]
    data = ["data=jsonl", f"data.path={write_lines(tmp_path / 'in.jsonl', rows)}"]
    child = process(f"output.dir={tmp_path / 'o'}", *toy(None), *data, "engine.max_batch=2")
    written = tmp_path / "o" / "generations.jsonl"
    while child.poll() is None and not (written.exists() and written.stat().st_size):
        time.sleep(0.01)
    child.send_signal(getattr(signal, name))
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert f"interrupted: go on with `python -m specgen resume={tmp_path / 'o'}`" in err and "Traceback" not in err
    partial = rows_of("o")
    assert 0 < len(partial) < 150 and not stats_of("o")["complete"] and stats_of("o")["samples"] == len(partial)
    assert "rows    " in out
    if name == "SIGTERM":
        assert resume("o", "engine.max_batch=150") == 0
        found = rows_of("o")
        assert [len(row["token_ids"]) for row in found.values()] == [row["max_tokens"] for row in rows]
        assert {key: found[key] for key in partial} == partial, "finished rows stay as they were"


def test_a_signal_during_the_baseline_costs_the_baseline_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run.without_draft

    def interrupted(config: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(config)

    monkeypatch.setattr(run, "without_draft", interrupted)
    assert start("o", *toy(), *lines([{"prompt": "w30"}] * 9), "baseline=true", "sampling.max_tokens=9", "engine.max_batch=2") == 143
    assert stats_of("o")["complete"] and stats_of("o")["baseline"] is None and len(rows_of("o")) == 9
    assert "every row was finished before" in log_of("o")


def test_a_signal_while_the_model_loads_acts_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run, "load", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert start("o", *toy(), *lines([{"prompt": "w10"}])) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "specgen: interrupted; python -m specgen resume=o goes on"
    assert resume("o") == 0 and len(rows_of("o")) == 1


def test_a_second_signal_acts_at_once_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Signals() as signals:
        signals.arm()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.caught == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.arm()
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.caught is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- threads and devices ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({1: 100, 4: 390, 8: 700}, 8),
        ({1: 100, 4: 390, 8: 400}, 4),  # a near tie goes to fewer
        ({1: 100, 4: 50, 8: 20}, 1),  # a busy machine
    ],
)
def test_the_fastest_number_of_threads_is_taken(speeds: dict[int, int], chosen: int, four_cores: None) -> None:
    tried = []
    assert choose_threads(CPU, lambda threads: tried.append(threads) or speeds[threads]) == chosen
    assert torch.get_num_threads() == chosen and tried == [1, 4, 8]


def test_threads_are_measured_quickly_and_the_users_number_stands(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    begun = time.perf_counter()
    assert choose_threads(CPU) in (1, 2)
    assert time.perf_counter() - begun < 1
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert choose_threads(CPU, lambda _: pytest.fail("nothing is measured")) == 1


@pytest.mark.slow  # test_cases_machine has the same without triton
def test_a_machine_without_a_gpu_runs_on_its_cpu_and_refuses_cuda(tmp_path: Path) -> None:
    child = process(f"output.dir={tmp_path / 'o'}", *SMALL)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "embedded (float32, cpu)" in out and "0 active drivers" not in err
    refused = process("model.device=cuda", f"output.dir={tmp_path / 'p'}")
    assert (refused.communicate(timeout=60)[1], refused.returncode) == (
        "specgen: model.device=cuda: no CUDA device is visible here; use model.device=cpu or model.device=auto\n",
        2,
    )


# -- hub --------------------------------------------------------------------------------------------------------------------------------------


def test_a_hub_dataset_is_pinned_to_the_commit_of_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    head, asked = ["a" * 40], []

    class Api:
        def dataset_info(self, name: str, revision: str | None) -> Any:
            return type("Info", (), {"sha": head[0]})()

    def load_dataset(path: str, name: str | None, *, split: str, revision: str, streaming: bool) -> Any:
        asked.append(revision)
        return datasets.Dataset.from_list([{"prompt": "w30"}] * 30).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_stop", lambda self: self.writer.rows >= 4)
        assert start("o", *toy(), "data=hub", "data.path=some/rows", "data.split=train", "sampling.max_tokens=4", "engine.max_batch=2") == 0
    head[0] = "b" * 40  # the dataset moves on: the run stays where it was
    assert 4 <= len(rows_of("o")) < 30 and resume("o") == 0
    assert set(asked) == {"a" * 40} and len(rows_of("o")) == 30
    assert json.loads(Path("o/environment.json").read_text())["input"]["revision"] == "a" * 40
