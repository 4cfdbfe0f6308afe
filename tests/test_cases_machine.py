"""What a machine may lack or run short of, on a CPU: a driver, Triton, memory, room for a graph, precision."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.engine import graphs
from specgen.engine.graphs import BUCKETS, StepGraphs, bucket_of, context_of
from specgen.engine.step import DeviceStep
from specgen.loading import resolve_device
from tests.harness import thinned
from tests.jobs import ROOT, log_of, rows_of, same, start, stats_of, toy, write_lines
from tests.test_cases_speculation import GREEDY, PROMPTS

# -- no driver, no Triton ---------------------------------------------------------------------------------------------------------------------

# Triton cannot be imported at all, as on a system it is not built for; every call must do without it.
NO_TRITON = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError(f"no module named {name!r} here")

sys.meta_path.insert(0, Absent())
from specgen import cli

for call in (["--help"], ["--cfg", "job"], ["model.device=cuda"], sys.argv[1:]):
    print("exit", cli.main(call))
assert "triton" not in sys.modules
from specgen.kernels import ops
"""


def test_a_machine_without_a_gpu_and_without_triton_does_all_but_cuda(tmp_path: Path) -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = [f"output.dir={tmp_path / 'o'}", "baseline=false", "data.limit=3", "sampling.max_tokens=12", "draft.topk=2", "sampling.temperature=0.7"]
    done = subprocess.run([sys.executable, "-c", NO_TRITON, *job], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("exit ")] == ["exit 0", "exit 0", "exit 2", "exit 0"]
    assert done.stderr == "specgen: model.device=cuda: no CUDA device is visible here; use model.device=cpu or model.device=auto\n"
    assert len(rows_of(tmp_path / "o")) == 3


def test_a_device_number_is_kept_and_no_number_is_the_first() -> None:
    assert [resolve_device(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu")] == [
        torch.device("cuda", 0),
        torch.device("cuda", 0),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]


# -- memory -----------------------------------------------------------------------------------------------------------------------------------


def test_a_job_that_runs_out_of_memory_once_has_every_row_of_a_smaller_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("w10", "w30", "w40", "w24", "w05")
    path = write_lines(tmp_path / "in.jsonl", [{"id": i, "prompt": words[i % 5]} for i in range(200)])
    common = [*toy("draft_half"), "data=jsonl", f"data.path={path}", "sampling.max_tokens=9", "sampling.temperature=0.7"]
    assert start(tmp_path / "small", *common, "engine.max_batch=16") == 0
    decode = DeviceStep.decode

    def limited(self: DeviceStep, slots: Any, *arguments: Any) -> None:
        if slots.shape[0] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        decode(self, slots, *arguments)

    monkeypatch.setattr(DeviceStep, "decode", limited)
    assert start(tmp_path / "big", *common, "engine.max_batch=64") == 0
    rows = rows_of(tmp_path / "big")
    assert list(rows) == [(i, 0) for i in range(200)] and same(rows) == same(rows_of(tmp_path / "small"))
    assert stats_of(tmp_path / "big")["attempts"][0]["batch_cuts"] == [32, 16]
    assert "going on with at most 16 rows at a time" in log_of(tmp_path / "big")


# -- graphs -----------------------------------------------------------------------------------------------------------------------------------


def test_every_batch_has_a_captured_size_that_holds_it_and_none_is_larger_than_the_engine() -> None:
    for most in (1, 3, 7, 24, 100, 256, 300, 1000):
        sizes = [bucket_of(rows, most) for rows in range(1, most + 1)]
        assert all(rows <= size <= most for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
        assert set(sizes) - {most} <= {*BUCKETS, *range(320, 1024, 64)}
    assert [bucket_of(rows, 256) for rows in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [context_of(length, 5000) for length in (1, 512, 513, 4096, 4097, 5000)] == [512, 512, 1024, 4096, 5000, 5000]


class FakeGraph:
    """A graph that replays what was run while it was captured."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")

    def pool(self) -> str:
        return "pool"


def faked(monkeypatch: pytest.MonkeyPatch, log: list[str], fails: set[int]) -> None:
    """CUDA's part of a capture, which fails at the captures named, counted from 0."""
    captures = iter(range(100))

    class Nothing:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> None:
            return None

        def __exit__(self, *arguments: Any) -> None:
            return None

        def wait_stream(self, other: Any) -> None:
            return None

    class Capture(Nothing):
        def __enter__(self) -> None:
            if next(captures) in fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    for name, stand_in in (("Stream", Nothing), ("stream", Nothing), ("current_stream", Nothing), ("graph", Capture)):
        monkeypatch.setattr(graphs.torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", lambda: FakeGraph(log))
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(graphs, "_side_stream", Nothing)
    monkeypatch.setattr(StepGraphs, "_abandon", Nothing)  # what torch is left with: on a device alone


def test_a_capture_that_fails_is_said_once_and_every_later_step_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    faked(monkeypatch, log, fails={1})
    found = StepGraphs(torch.device("cuda", 0))

    def step(key: str) -> None:
        found.run(key, lambda: log.append(f"step {key}"), lambda: log.append(f"warm-up {key}"))

    with caplog.at_level(logging.WARNING, logger="specgen"):
        for key in "aabbca":
            step(key)
    assert log == ["warm-up a", "step a", "replay", "replay", "warm-up b", "step b", "step b", "step c", "replay"]
    assert [record.message for record in caplog.records] == [
        "CUDA graph capture failed for b; decoding goes on without graphs: CUDA out of memory. Tried to allocate 2.00 GiB."
    ]
    assert found.off and len(found) == 1


# -- precision --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "draft"),
    thinned([("float32", None), ("float32", "rand_draft"), ("bfloat16", None), ("bfloat16", "rand_draft")], lambda number: number % 2 == 1),
)
def test_what_batch_and_draft_change_are_near_ties_in_bfloat16_and_nothing_in_float32(dtype: str, draft: str | None, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"token_ids": ids} for ids in PROMPTS])
    common = [*toy(draft, "rand_target"), "data=jsonl", f"data.path={path}", "sampling.max_tokens=32", f"model.dtype={dtype}", "verify_lossless=8"]
    found = []
    for batch in (1, 8):
        assert start(tmp_path / str(batch), *common, f"engine.max_batch={batch}") == 0
        found.append([row["token_ids"] for row in rows_of(tmp_path / str(batch)).values()])
        lossless = stats_of(tmp_path / str(batch))["lossless"]
        assert lossless["checked"] == 8 == lossless["equal"] + lossless["near_tie"]
        assert dtype == "bfloat16" or lossless["equal"] == 8
    if dtype == "float32":
        assert found == [GREEDY] * 2
