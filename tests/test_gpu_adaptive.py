"""Adaptive speculation on a CUDA device, the embedded family in float32: captured steps of every num_steps, drafters that were away, and no wait."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams
from tests.jobs import rows_of, same, start, stats_of
from tests.test_adaptive import a_script, scripted

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
ROWS, BATCH, MOST = 24, 8, 4
METHODS = [("eagle", 1), ("eagle", 4), ("eagle3", 1), ("mtp", 1), ("draft_model", 1), ("ngram", 1)]
Texts = list[list[int]]


@cache
def target_on(device: str) -> Target:
    return load_target(ModelConfig(dtype="float32", device=device), device, "float32")


def engine_on(device: str, method: str, topk: int, **options: Any) -> Engine:
    target, model = target_on(device), ModelConfig(dtype="float32", device=device)
    draft = DraftConfig(method="none") if method == "none" else DraftConfig(method=method, topk=topk, num_steps=MOST, adaptive=True)
    return Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=BATCH, kv_memory_gb=0.1, **options), draft, vocab_limit=4096)


def requests(**sampling: Any) -> list[Request]:
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    lines = (FAMILY / "prompts.jsonl").read_text().splitlines()[:ROWS]
    params = SamplingParams(**{"max_tokens": 48, "seed": 7, **sampling})
    return [Request(Prompt(i, i, tokenizer(json.loads(line)["prompt"])["input_ids"], key=i), params) for i, line in enumerate(lines)]


def finish(engine: Engine, rows: list[Request]) -> Texts:
    engine.run(rows)
    engine.pages.check()
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    engine.close()
    return [row.output_ids for row in rows]


@cache
def plain(device: str, temperature: float) -> Texts:
    return finish(engine_on(device, "none", 1), requests(temperature=temperature))


@pytest.mark.parametrize(("method", "topk", "temperature"), [("eagle", 1, 0.0), *((method, topk, 0.8) for method, topk in METHODS)])
def test_what_is_chosen_changes_no_token(method: str, topk: int, temperature: float) -> None:
    engine = engine_on(DEVICE, method, topk)
    texts = finish(engine, requests(temperature=temperature))
    assert texts == plain(DEVICE, temperature)
    report = engine.adaptive_report()
    assert {row["bucket"] for row in report} <= {1, 2, 4, 8} and sum(row["steps"] for row in report) > 20
    print(f"\n{method} topk {topk} T {temperature}: " + ", ".join(f"{r['bucket']}x{r['num_steps']}: {r['steps']}" for r in report))


@pytest.mark.parametrize(("method", "topk", "overlap"), [("eagle", 1, "0"), *((method, topk, "1") for method, topk in METHODS)])
def test_no_schedule_of_num_steps_changes_a_token(method: str, topk: int, overlap: str) -> None:
    engine = engine_on(DEVICE, method, topk, overlap=overlap)
    scripted(engine, a_script(topk, MOST))
    rows = requests(temperature=0.8)
    assert finish(engine, rows) == plain(DEVICE, 0.8)
    assert sum(row.counts.steps_without_draft for row in rows) > ROWS < sum(row.counts.verify_steps for row in rows)
    if method != "ngram":
        assert sum(sum(row.counts.accepted) for row in rows) > ROWS, "a drafter that comes back still drafts well"


def test_steps_of_every_num_steps_and_the_way_back_make_no_synchronising_call() -> None:
    engine = engine_on(DEVICE, "eagle", 1)
    script = scripted(engine, [4, 0, 1, 2, 0, 0, 3, 0, 4])
    for row in requests(max_tokens=300, ignore_eos=True)[:BATCH]:
        engine.add(row)
    for _ in range(30):
        engine.step()
    captured = len(engine.graphs._graphs) if engine.graphs is not None else 0
    assert {steps for _, steps, *_ in engine.graphs._graphs} == {0, 1, 2, 3, 4} if engine.graphs is not None else True
    told = len(script.told)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(27):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(script.told) - told == 27 and (engine.graphs is None or len(engine.graphs) == captured)
    while engine.has_work:
        engine.step()
    engine.close()


def test_stats_name_the_time_at_each_num_steps(tmp_path: Path) -> None:
    job = ("model.dtype=float32", f"model.device={DEVICE}", "baseline=false", "sampling.max_tokens=160", "sampling.ignore_eos=true")
    assert start(tmp_path / "plain", *job, "draft=none") == 0
    assert start(tmp_path / "adaptive", *job, "draft.adaptive=true", "engine.max_batch=8") == 0
    assert same(rows_of(tmp_path / "adaptive")) == same(rows_of(tmp_path / "plain"))
    stats = stats_of(tmp_path / "adaptive")
    chosen = stats["draft"]["adaptive"]
    assert all(row.keys() == {"bucket", "num_steps", "seconds", "steps", "cost_ms", "expected_tokens"} for row in chosen)
    assert all(row["seconds"] > 0 < row["cost_ms"] for row in chosen if row["steps"] >= 50)
    assert sum(row["cost_ms"] is not None for row in chosen) > 1, "two at least were timed"
    assert 0 < sum(row["seconds"] for row in chosen) < stats["throughput"]["wall_s"]
    assert 8 in {row["bucket"] for row in chosen}
