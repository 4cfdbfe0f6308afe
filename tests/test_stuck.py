"""A device that does not answer: noticed in time, never by mistake; finished rows are kept, and a resume ends as if nothing had happened."""

from __future__ import annotations

import csv
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen import stuck
from specgen.config import EngineConfig
from specgen.engine.batch import Batch
from specgen.engine.buffers import CpuGpuBuffer
from specgen.engine.flight import InFlight
from specgen.engine.watch import Watch
from specgen.errors import ConfigError, DataError
from specgen.types import Prompt, Request, SamplingParams
from tests.jobs import ROOT, resume, rows_of, same, start, stats_of, toy, write_lines

# -- what is watched --------------------------------------------------------------------------------------------------------------------------


class Event:
    """An event that has fired, or not."""

    def __init__(self, fired: bool) -> None:
        self.fired = fired

    def query(self) -> bool:
        return self.fired


class Looked:
    """An engine as the watch sees it: how many borders of steps it has passed, and what it has launched."""

    device = torch.device("cpu")

    def __init__(self, *fired: bool) -> None:
        self.borders, self.events = 1, [Event(f) for f in fired]
        requests = [Request(Prompt(index=i, id=i, token_ids=[1]), SamplingParams()) for i in range(12)]
        self.flights = []
        for event in self.events:
            buffer = CpuGpuBuffer(1, dtype=torch.int32, device=self.device)
            buffer.event = event  # type: ignore[assignment]
            self.flights.append(InFlight(Batch(decode=tuple((1 + r.prompt.index, r, 0) for r in requests)), [], buffer, None))

    def launched(self) -> list[InFlight]:
        return self.flights


@pytest.fixture
def watched() -> Callable[..., tuple[Looked, Watch, list[Any]]]:
    def make(*fired: bool, seconds: float = 8.0) -> tuple[Looked, Watch, list[Any]]:
        engine, calls = Looked(*fired), []
        watch = Watch(engine, seconds, lambda what, confirm: calls.append((what, confirm)))  # type: ignore[arg-type]
        watch.look(1.0)  # sees where the engine is
        return engine, watch, calls

    return make


def test_results_that_do_not_come_are_reported_when_the_time_is_up_and_with_who_waits(watched: Any) -> None:
    engine, watch, calls = watched(True, False)
    for _ in range(7):
        watch.look(1.0)
    assert calls == []
    watch.look(1.0)
    (what, confirm) = calls[0]
    assert what == "decoding 12 rows (index 0, 1, 2, 3, 4, 5, 6, 7, ...)" and confirm()
    engine.events[1].fired = True
    assert not confirm(), "the results came between the look and the end"
    engine.events[1].fired, engine.borders = False, 2
    assert not confirm(), "the engine went on"


def test_time_counts_within_one_step_only(watched: Any) -> None:
    engine, watch, calls = watched(False)
    for _ in range(20):
        watch.look(7.0 if engine.borders == 1 else 1.0)
        engine.borders += 2
    assert calls == [], "every look saw another step"
    engine.borders = 100
    for _ in range(20):
        watch.look(1.0)
    assert calls == [], "an engine between steps waits for nobody"


def test_a_watch_that_overslept_forgets_what_it_counted(watched: Any) -> None:
    _, watch, calls = watched(False)
    for elapsed in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 600.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        watch.look(elapsed)
    assert calls == [], "the process was stopped for ten minutes"
    watch.look(1.0)
    assert len(calls) == 1


def test_a_long_step_that_the_device_owes_nothing_for_is_warned_of_once(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, watch, calls = watched(True)
    with caplog.at_level(logging.WARNING, logger="specgen"):
        for _ in range(40):
            watch.look(1.0)
        assert [r.message for r in caplog.records] == [
            "a step has been running for 8 s and nothing launched is overdue: this device computes while it launches"
        ]
        engine.borders = 3
        for _ in range(40):
            watch.look(1.0)
    assert calls == [] and len(caplog.records) == 2


def test_a_failed_device_is_left_to_the_engines_own_wait(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def query(self: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _, watch, calls = watched(False)
    monkeypatch.setattr(Event, "query", query)
    for _ in range(20):
        watch.look(1.0)
    assert calls == []


def test_a_job_that_turns_out_alive_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Writer:
        rows, free = 0, True

        def hold(self, seconds: float) -> bool:
            done.append("hold")
            return self.free

        def release(self) -> None:
            done.append("release")

        def close(self) -> None:
            raise DataError("out/generations.jsonl: the disk or quota is full; the 0 rows are complete")

    class Lock:
        def release(self) -> None:
            done.append("unlock")

    writer = Writer()
    monkeypatch.setattr(stuck, "_leave", done.append)
    end = stuck.ender(Path("out"), writer, Lock(), 120.0)
    end("decoding", lambda: False)
    assert done == ["hold", "release"]
    writer.free = False
    end("decoding", lambda: pytest.fail("the writer is at work: the job is alive"))
    assert done == ["hold", "release", "hold"]
    writer.free = True
    end("decoding 1 rows", lambda: True)
    assert done[3:5] == ["hold", "unlock"]
    assert done[5] == (
        "the device has not answered for 120 s (engine.stuck_after_s) while decoding 1 rows; "
        "out/generations.jsonl: the disk or quota is full; the 0 rows are complete; go on with `python -m specgen resume=out`"
    )


def test_no_thread_watches_where_it_is_off() -> None:
    watch = Watch(Looked(False), 0, lambda what, confirm: None)  # type: ignore[arg-type]
    with watch:
        assert not watch._thread.is_alive()
    with Watch(Looked(True), 5, lambda what, confirm: None) as watch:  # type: ignore[arg-type]
        assert watch._thread.is_alive()
    assert not watch._thread.is_alive()
    assert EngineConfig().stuck_after_s == 120


def test_a_python_process_is_never_ended() -> None:
    import specgen

    with pytest.raises(ConfigError, match=r"^engine.stuck_after_s: ends a job of the command line"):
        specgen.generate("def", engine={"stuck_after_s": 5})


# -- whole jobs -------------------------------------------------------------------------------------------------------------------------------

# The results of the eighth step never come: their event neither fires nor lets the thread that waits for it go.
HANGING = """
import sys, time
from specgen import cli
from specgen.engine.engine import Engine

class Never:
    def query(self):
        return False
    def synchronize(self):
        time.sleep(1000)

steps, retire = 0, Engine.retire
def hanging(self, flight):
    global steps
    steps += 1
    if steps == 8:
        flight.decode_result.event = Never()
    return retire(self, flight)

Engine.retire = hanging
sys.exit(cli.main(sys.argv[1:]))
"""


def hang(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HANGING, "engine.stuck_after_s=1", *overrides]
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=100)


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    words = ("w10", "w30", "w40", "w24", "w05", "w31")
    path = write_lines(tmp_path / "in.jsonl", [{"id": f"r{i}", "prompt": words[i % 6]} for i in range(40)])
    return [*toy("draft_half"), "data=jsonl", f"data.path={path}", "sampling.max_tokens=9", "engine.max_batch=4", "sampling.temperature=0.7"]


@pytest.mark.parametrize("overlap", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_finished_rows_are_kept_and_a_resume_ends_with_the_same_texts(job: list[str], overlap: str, tmp_path: Path) -> None:
    kind = {"0": "parquet", "1": "jsonl"}[overlap]
    common = [*job, f"output.format={kind}", f"engine.overlap={overlap}"]
    assert start(tmp_path / "whole", *common) == 0
    done = hang(f"output.dir={tmp_path / 'o'}", *common, cwd=tmp_path)
    kept = rows_of(tmp_path / "o")
    assert 0 < len(kept) < 40
    waiting = {
        "0": "decoding 3 rows (index 5, 6, 7), prefilling 1 row (index 8)",
        "1": "decoding 3 rows (index 3, 5, 6), prefilling 1 row (index 7)",
    }
    assert done.stderr == (
        f"specgen: the device has not answered for 1 s (engine.stuck_after_s) while {waiting[overlap]}; "
        f"{len(kept)} rows of this start are on the disk; go on with `python -m specgen resume={tmp_path / 'o'}`\n"
    )
    assert done.returncode == 2
    assert "(engine.stuck_after_s) while decoding" in (tmp_path / "o" / "specgen.log").read_text()
    assert not (tmp_path / "o" / ".lock").exists()
    assert resume(tmp_path / "o", "engine.stuck_after_s=0") == 0
    assert same(rows_of(tmp_path / "o")) == same(rows_of(tmp_path / "whole"))
    assert stats_of(tmp_path / "o")["samples"] == 40


def test_a_sweep_says_which_job_it_was_and_which_were_not_run(job: list[str], tmp_path: Path) -> None:
    done = hang("-m", f"output.dir={tmp_path / 's'}", *job, "sampling.seed=1,2", cwd=tmp_path)
    assert done.returncode == 2
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["exit_code"] for row in rows] == ["2", ""] and rows[1]["error"] == "not run"
    assert rows[0]["error"].startswith("the device has not answered for 1 s")
    lines = done.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [f"job {rows[0]['folder']}", f"job {rows[1]['folder']}"]


# A step of four decoding rows, whose graph was captured long before, waits on the device for half a minute; the first steps compile for longer than
# the limit.
SLEEPING = """
import sys, torch
from specgen import cli
from specgen.engine.engine import Engine

steps, launch = 0, Engine.launch
def sleeping(self, batch):
    global steps
    steps += len(batch.decode) == 4 and not batch.chunks
    if steps == 5:
        steps += 1
        torch.cuda._sleep(60_000_000_000)
    return launch(self, batch)

Engine.launch = sleeping
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.gpu
def test_a_sleeping_cuda_device_ends_the_job_and_compiling_does_not(tmp_path: Path) -> None:
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, "PYTHONPATH": places, "SPECGEN_CACHE": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    common = ["baseline=false", "sampling.max_tokens=16", "engine.max_batch=4", "model.device=cuda"]
    command = [sys.executable, "-c", SLEEPING, f"output.dir={tmp_path / 'o'}", "engine.stuck_after_s=2", *common]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2, done.stderr
    assert "the device has not answered for 2 s (engine.stuck_after_s) while decoding" in done.stderr.splitlines()[-1]
    kept = len(rows_of(tmp_path / "o"))
    assert f"; {kept} rows of this start are on the disk; " in done.stderr.splitlines()[-1]
    assert resume(tmp_path / "o") == 0
    assert len(rows_of(tmp_path / "o")) == 32
