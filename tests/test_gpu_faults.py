"""Faults of a device: no memory left, a capture that fails, numbers beyond the range of half precision, another device than the first.

Each costs time or ends a row with an error; none changes a text, and none is quiet.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams
from tests.jobs import ROOT, log_of, process, rows_of, same, start, write_lines
from tests.toys import expected_rand, toy_folder

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
EXPECTED = expected_rand()
MIB = 1 << 20


def requests_of(prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    return [Request(Prompt(index=i, id=i, key=i, token_ids=list(ids)), params) for i, ids in enumerate(prompts)]


def finish(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Run rows to their end: each comes back once and every page with it. Returns the output ids."""
    done = engine.run(requests)
    assert sorted(map(id, done)) == sorted(map(id, requests))
    engine.pages.check()
    assert engine.pages.free_pages == engine.pages.num_pages - 1
    return [request.output_ids for request in requests]


# -- no memory left ---------------------------------------------------------------------------------------------------------------------------

ROWS, AT_ONCE, FITS = 300, 256, 8
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


@contextmanager
def arena(limit: int) -> Iterator[None]:
    """Let this process hold at most ``limit`` bytes of device memory, cached blocks included: beyond, an allocation fails as on a full device."""
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(DEVICE).total_memory, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def large_engine(graphs: str, device: str = DEVICE) -> Engine:
    """The embedded target with trees of 64 nodes: a step of 256 rows takes 270 MB for its logits alone, one of 8 rows 8."""
    model = ModelConfig(dtype="float32", device=device)
    target = load_target(model, device, "float32")
    draft = DraftConfig(method="eagle", topk=4, num_steps=5, num_draft_tokens=64)
    config = EngineConfig(max_batch=AT_ONCE, prefill_tokens=512, kv_memory_gb=0.25, cuda_graphs=graphs)
    return Engine(target, load_drafter(draft, model, target), config, draft)


def many_rows() -> list[Request]:
    """300 rows whose texts no rounding changes: the two best logits of a position are never closer than 4e-4."""
    return requests_of([[1, *(7 + (53 * i + 7 * j) % 4000 for j in range(7))] for i in range(ROWS)], SHORT)


def run_within(graphs: str, rows: int = AT_ONCE, limit: int | None = None) -> tuple[list[list[int]], list[int], int, int]:
    """Run every row, ``rows`` at a time, under a memory limit: (texts, batch cuts, peak of bytes in use, peak of bytes held)."""
    gc.collect()
    torch.cuda.empty_cache()
    engine = large_engine(graphs)
    engine.scheduler.limit = rows
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with nullcontext() if limit is None else arena(limit):
        texts = finish(engine, many_rows())
    cuts, off = engine.batch_cuts, engine.graphs is not None and engine.graphs.off
    engine.close()
    assert off is (graphs == "auto" and limit is not None)
    return texts, cuts, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def test_a_device_without_memory_for_the_batch_costs_no_row_and_changes_no_text(caplog: pytest.LogCaptureFixture) -> None:
    wide, cuts, in_use, _ = run_within("off")
    assert cuts == []
    narrow, cuts, _, held = run_within("off", rows=FITS)
    assert cuts == [] and narrow == wide
    assert held + 64 * MIB < in_use, "8 rows take far less than 256"
    limit = (held + in_use) // 2  # 256 rows do not fit, 8 do
    for graphs in ("off", "auto"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="specgen"):
            texts, cuts, _, most = run_within(graphs, limit=limit)
        print(f"\ncuda_graphs={graphs}: {in_use / MIB:.0f} MiB wanted, {limit / MIB:.0f} given, {most / MIB:.0f} held; row limits {cuts}")
        assert texts == wide
        assert cuts and cuts == sorted(set(cuts), reverse=True) and FITS // 2 <= cuts[-1] <= AT_ONCE // 2
        assert most <= limit + 8 * MIB
        said = [record.getMessage() for record in caplog.records]
        assert sum("the device ran out of memory with" in line for line in said) == len(cuts)
        assert [line for line in said if line.startswith("going on with")] == [f"going on with at most {n} rows at a time" for n in cuts]
        assert sum("CUDA graph capture failed" in line for line in said) == (graphs == "auto")


def test_the_next_engine_of_a_process_finds_the_memory_that_the_last_one_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a baseline, a lossless check or a sweep's next job does. By torch's own books, which other programs on the device do not disturb."""
    model, draft, room = ModelConfig(dtype="float32", device=DEVICE), DraftConfig(method="eagle", num_steps=3), 256 * MIB
    target = load_target(model, DEVICE, "float32")

    def pages_of(config: EngineConfig) -> int:
        engine = Engine(target, load_drafter(draft, model, target), config, draft)
        finish(engine, requests_of([[1, 40 + i] for i in range(4)], SHORT))
        engine.close()
        return engine.pages.num_pages

    pages_of(EngineConfig(kv_memory_gb=0.1))  # kernels and workspaces stay with the process
    gc.collect()
    torch.cuda.empty_cache()
    total, before = 20 << 30, torch.cuda.memory_reserved(DEVICE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - torch.cuda.memory_reserved(device), total))
    pages = [pages_of(EngineConfig(memory_fraction=(before + room) / total)) for _ in range(3)]
    assert 16 * 3072 < room / pages[0] < 16 * 8192, "the room asked for is what bounds the pool"
    assert min(pages) > 0.75 * max(pages), pages


# -- captures ---------------------------------------------------------------------------------------------------------------------------------


def toy_engine(num_steps: int, max_batch: int = 8, **options: Any) -> Engine:
    """The random toy pair, whose greedy texts are known."""
    model = ModelConfig(source="hf", path=str(toy_folder() / "rand_target"), dtype="float32", device=DEVICE)
    target = load_target(model, DEVICE, "float32")
    draft = DraftConfig(method="draft_model", path=str(toy_folder() / "rand_draft"), num_steps=num_steps)
    config = EngineConfig(max_batch=max_batch, page_size=4, kv_memory_gb=0.05, **options)
    return Engine(target, load_drafter(draft, model, target), config, draft)


def reads_the_device(rows: Any) -> None:
    """Makes a capture invalid, as code that branches on data does."""
    int(rows.length.sum())


def finds_no_memory(rows: Any) -> None:
    """Breaks a capture off that is sound so far."""
    with arena(torch.cuda.memory_reserved()):
        torch.empty(1 << 30, device=DEVICE)


def failing_in_capture(engine: Engine, fault: Callable[[Any], None]) -> None:
    propose = engine.drafter.propose

    def proposed(rows: Any, num_steps: int) -> Any:
        if torch.cuda.is_current_stream_capturing():
            fault(rows)
        return propose(rows, num_steps)

    engine.drafter.propose = proposed  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", ["0", "1"])
@pytest.mark.parametrize(("fault", "reason"), [(reads_the_device, "capturing"), (finds_no_memory, "out of memory")])
def test_a_failed_capture_is_one_warning_and_the_job_goes_on_without_graphs(
    fault: Callable[[Any], None], reason: str, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, greedy = [row["prompt_ids"] for row in EXPECTED], [row["greedy_32"] for row in EXPECTED]
    home = torch.cuda.current_stream()
    torch.cuda.manual_seed(5)
    torch.rand(7, device=DEVICE)
    state = torch.cuda.get_rng_state(DEVICE)
    expected = torch.rand(3, device=DEVICE)
    torch.cuda.set_rng_state(state, DEVICE)
    engine = toy_engine(3, overlap=overlap)
    failing_in_capture(engine, fault)
    with caplog.at_level(logging.WARNING, logger="specgen"):
        assert finish(engine, requests_of(prompts, SamplingParams(max_tokens=32))) == greedy
    assert engine.graphs is not None and engine.graphs.off and len(engine.graphs) == 0
    engine.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("CUDA graph capture failed for (8, 3, (), ") and "decoding goes on without graphs: " in warning
    assert reason in warning
    # Nothing is left of it: not the side stream, not the state of torch's allocator and random numbers, and the next engine has its graphs.
    assert torch.cuda.current_stream() == home
    torch.cuda.empty_cache()
    assert torch.equal(torch.rand(3, device=DEVICE), expected)
    after = toy_engine(3, overlap=overlap)
    assert finish(after, requests_of(prompts, SamplingParams(max_tokens=32))) == greedy
    assert after.graphs is not None and not after.graphs.off and len(after.graphs) > 0
    after.close()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_every_batch_size_runs_whether_it_is_a_bucket_or_not(num_steps: int) -> None:
    engine = toy_engine(num_steps, max_batch=9)
    for rows in (*range(9, 0, -1), 7):
        chosen = [EXPECTED[i % len(EXPECTED)] for i in range(rows)]
        texts = finish(engine, requests_of([row["prompt_ids"] for row in chosen], SamplingParams(max_tokens=32)))
        assert texts == [row["greedy_32"] for row in chosen], rows
    assert engine.graphs is not None and not engine.graphs.off
    assert sorted(bucket for bucket, *_ in engine.graphs._graphs) == [1, 2, 4, 8, 9]
    engine.close()


# -- numbers ----------------------------------------------------------------------------------------------------------------------------------


def test_half_precision_that_overflows_is_an_error_row_and_never_a_quiet_wrong_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "w30"}])
    target = ["model=hf", f"model.path={toy_folder() / 'target_fp16_overflow'}", f"model.device={DEVICE}", "draft=none"]
    for dtype, expect in (("float32", 0), ("bfloat16", 0), ("float16", 3)):
        out = tmp_path / dtype
        assert start(out, *target, f"model.dtype={dtype}", "data=jsonl", f"data.path={path}", "sampling.max_tokens=8") == expect
        (row,) = rows_of(out).values()
        if expect == 0:
            assert row["token_ids"] == [31, 32, 33, 34, 30, 31, 32, 33] and row["error"] is None
        else:
            assert row["error"] == {
                "type": "NonFiniteError",
                "message": "row index 0: the target's logits at output position 0 are not finite",
            }
            assert row["token_ids"] == [] and row["finish_reason"] == "error"
            assert "row 0 is an error: " in log_of(out)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(("draft", "topk"), [("none", 1), ("draft_to_nan", 1), ("draft_to_nan", 2)])
def test_a_row_of_nan_ends_alone(draft: str, topk: int, graphs: str) -> None:
    """Token 45 makes every later logit of its row NaN. It stands in one prompt, and is a draft that the others' target rejects."""
    model = ModelConfig(source="hf", path=str(toy_folder() / "target_nan45"), dtype="float32", device=DEVICE)
    target = load_target(model, DEVICE, "float32")
    path = None if draft == "none" else str(toy_folder() / draft)
    config = DraftConfig(method="none" if draft == "none" else "draft_model", path=path, topk=topk, num_steps=3)
    options = EngineConfig(max_batch=4, page_size=4, kv_memory_gb=0.05, cuda_graphs=graphs)
    engine = Engine(target, load_drafter(config, model, target), options, config)
    requests = requests_of([[1, 30], [1, 45], [1, 40, 41]], SamplingParams(max_tokens=12))
    texts = finish(engine, requests)
    engine.close()
    assert texts == [[31, 32, 33, 34, 30, 31, 32, 33, 34, 30, 31, 32], [], [42, 40, 41] * 4]
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert requests[1].error == {"type": "NonFiniteError", "message": "the target's logits at output position 0 are not finite"}


# -- another device ---------------------------------------------------------------------------------------------------------------------------

JOB = ("model.dtype=float32", "draft.topk=4", "baseline=false", "data.limit=6", "sampling.max_tokens=24", "engine.kv_memory_gb=0.1")


def test_a_device_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    job = process(f"output.dir={tmp_path / 'o'}", *JOB, "model.device=cuda:1", CUDA_VISIBLE_DEVICES=first)
    _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (2, "specgen: model.device=cuda:1: the only CUDA device visible here is cuda:0\n")
    assert not (tmp_path / "o").exists()


CHILD = """
import sys, torch
from specgen import cli
code = cli.main(sys.argv[1:])
contexts = [torch._C._cuda_hasPrimaryContext(i) for i in range(2)]
print("END", code, torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1) > 0, *contexts)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_job_on_the_second_device_takes_nothing_of_the_first(graphs: str, tmp_path: Path) -> None:
    options = [*JOB, f"engine.cuda_graphs={graphs}"]
    assert start(tmp_path / "first", *options, "model.device=cuda:0") == 0
    arguments = [sys.executable, "-c", CHILD, f"output.dir={tmp_path / 'second'}", *options, "model.device=cuda:1"]
    child = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    # Nothing allocated on the first device, and no context there, which would take some hundred MiB.
    assert child.stdout.splitlines()[-1].split() == ["END", "0", "0", "True", "False", "True"]
    assert same(rows_of(tmp_path / "second")) == same(rows_of(tmp_path / "first"))
    captured = "captured a decode step" in log_of(tmp_path / "second")
    assert captured is (graphs == "auto") and "capture failed" not in log_of(tmp_path / "second")
