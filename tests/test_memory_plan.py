"""The KV pool's size: what a job's widest steps take is found by running them, and what the memory setting leaves beside that is the pool."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.engine.plan import plan_pages
from specgen.engine.rehearsal import measure, rehearsal_of, rehearse
from specgen.errors import CapacityError
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")
SHAPES = [("none", 1, 0, 8, 8192), ("eagle", 1, 3, 8, 300), ("eagle", 4, 3, 5, 64), ("draft_model", 1, 2, 12, 4), ("ngram", 1, 4, 3, 2)]


def parts_of(method: str, topk: int, steps: int, device: str = "cpu") -> tuple[Any, Any, DraftConfig]:
    model = ModelConfig(dtype="float32", device=device)
    target = load_target(model, device, "float32")
    draft = DraftConfig(method=method, topk=topk, num_steps=steps or 1) if method != "none" else DraftConfig(method="none")
    return target, load_drafter(draft, model, target), draft


@pytest.mark.parametrize("overlap", ["0", "1"])
@pytest.mark.parametrize(("method", "topk", "steps", "rows", "prefill_tokens"), SHAPES)
def test_a_rehearsal_fills_a_prefill_step_and_decodes_every_row_at_once(
    method: str, topk: int, steps: int, rows: int, prefill_tokens: int, overlap: str
) -> None:
    target, drafter, draft = parts_of(method, topk, steps)
    config = EngineConfig(max_batch=rows, prefill_tokens=prefill_tokens, page_size=16, overlap=overlap)
    plan = rehearsal_of(target, drafter, config, draft)
    assert plan.rows == rows and plan.length == max(1, min(prefill_tokens // rows, target.max_length // 2))
    per_token = target.kv_bytes_per_token + drafter.kv_bytes_per_token()
    config.kv_memory_gb = (plan.slots + 1) * per_token / GIB
    engine, seen, launch = Engine(target, drafter, config, draft), [], Engine.launch
    engine.launch = lambda batch: seen.append((len(batch.decode), sum(c.end - c.start for c in batch.chunks))) or launch(engine, batch)  # type: ignore[method-assign,func-returns-value]
    rehearse(engine, plan, SamplingParams(temperature=0.7, stop=("x",), min_tokens=90, max_tokens=99))
    assert engine.pages.num_pages == plan.slots // 16
    assert seen[0] == (0, min(rows * plan.length, prefill_tokens)) and max(decoding for decoding, _ in seen) == rows
    assert sum(tokens for _, tokens in seen) == rows * plan.length and engine.scheduler.preemptions == 0 and not engine.batch_cuts
    engine.pages.check()
    engine.close()


def test_what_steps_take_is_left_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    cuda, config = torch.device("cuda"), EngineConfig(memory_fraction=0.75)
    assert plan_pages(config, cuda, MIB, 10**9, 0) == 40 * 1024
    assert plan_pages(config, cuda, MIB, 10**9, 3 * GIB) == 37 * 1024
    assert plan_pages(config, cuda, MIB, 500, 3 * GIB) == 500
    with pytest.raises(
        CapacityError, match=r"holds no page of \d+ bytes: raise engine\.memory_fraction, or lower engine\.prefill_tokens or engine\.max_"
    ):
        plan_pages(config, cuda, MIB, 10**9, 40 * GIB)
    assert plan_pages(EngineConfig(kv_memory_gb=2.0), cuda, MIB, 10**9, 40 * GIB) == 2048
    assert plan_pages(config, CPU, MIB, 10**9, 40 * GIB) == 1024


def test_nothing_is_rehearsed_where_it_decides_nothing() -> None:
    target, drafter, draft = parts_of("eagle", 1, 3)
    assert measure(target, drafter, EngineConfig(), draft, SamplingParams()) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "topk", "params"), [("eagle", 4, SamplingParams()), ("draft_model", 1, SamplingParams(temperature=0.8, top_p=0.9))]
)
def test_a_job_stays_within_its_share_of_the_device(
    method: str, topk: int, params: SamplingParams, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own books, which other programs on the device do not disturb: weights apart, pool and steps fill the room given and no more."""
    target, drafter, draft = parts_of(method, topk, 4, "cuda:0")
    gc.collect()
    torch.cuda.empty_cache()
    room, total, before = GIB, 20 * GIB, torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room + total // 10 - (torch.cuda.memory_reserved() - before), total))
    config = EngineConfig(max_batch=256, memory_fraction=0.9)
    with caplog.at_level(logging.WARNING, logger="specgen"):
        working = measure(target, drafter, config, draft, params)
        assert working is not None and 32 * MIB < working.total < room // 2 and working.eager >= working.graph > 4 * MIB
        engine = Engine(target, drafter, config, draft, working=working)
        torch.cuda.reset_peak_memory_stats()
        many = replace(params, max_tokens=200, ignore_eos=True)
        rows = [Request(Prompt(index=i, id=i, key=i, token_ids=[1 + (i + j) % 2000 for j in range(40 + i % 300)]), many) for i in range(400)]
        engine.run(rows)
    pool = engine.pages.num_pages * config.page_size * (target.kv_bytes_per_token + drafter.kv_bytes_per_token())
    took = torch.cuda.max_memory_reserved() - before
    print(f"\n{method}: room {room / MIB:.0f} MiB, {[size // MIB for size in working]} measured, pool {pool / MIB:.0f}, took {took / MIB:.0f}")
    assert not caplog.records and not engine.batch_cuts and all(len(row.output_ids) == 200 for row in rows)
    assert 0.8 * room < took <= room
    engine.close()
