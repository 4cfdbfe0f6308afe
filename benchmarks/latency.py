"""Latency of the engine's step at a fixed context, with the host's bookkeeping done naively and as the engine does it.

Boundary: drives the engine's public step; between blocks it writes the rows' state back, on the device and on the host, so that the context stays the
same however many steps are taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.host import drain, embedded_engine, naive_host, requests_like, start
from benchmarks.registry import Row, Settings, benchmark, row
from benchmarks.steps import JOBS, SHAPES, draft_config
from benchmarks.timing import Sample, no_collection
from specgen.config import EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Request

BATCH, PROMPT, BLOCK = 8, 128, 64


def large_engine(device: torch.device) -> Engine:
    """The 8B shape with random weights and an EAGLE-3 head of three steps, acceptance imposed at 3 tokens a step."""
    model = ModelConfig(source="hf", path=str(SHAPES / "llama31_8b"), dtype="bfloat16", device="cuda", load_format="dummy", max_length=1024)
    target = load_target(model, device, torch.bfloat16)
    draft = draft_config(JOBS["eagle3_s3"])
    return Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=BATCH, kv_memory_gb=4.0), draft)


class Rewinder:
    """The state of rows that are all decoding with nothing in flight, to go back to."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.engine, self.requests = engine, requests
        self.ints = engine.rows.ints.clone()
        self.committed = engine.scheduler._committed.copy()
        self.outputs = [len(r.output_ids) for r in requests]

    def rewind(self) -> None:
        """Put lengths, outputs and roots back; KV and pages beyond them stay and are written again."""
        drain(self.engine)
        assert all(r.status == "running" for r in self.requests)
        self.engine.rows.ints.copy_(self.ints)
        self.engine.scheduler._committed[:] = self.committed
        for request, kept in zip(self.requests, self.outputs, strict=True):
            del request.output_ids[kept:]
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()


def block(engine: Engine, steps: int) -> list[int]:
    """Nanoseconds of ``steps`` calls of ``Engine.step``, after those that fill the pipeline."""
    for _ in range(engine.overlap):
        engine.step()
    times, clock = [], time.perf_counter_ns
    for _ in range(steps):
        begin = clock()
        engine.step()
        times.append(clock() - begin)
    return times


@benchmark
def step_latency(settings: Settings) -> Iterator[Row]:
    """Time of ``Engine.step`` at batch 8 and a context held between 128 and 328 tokens, by naive bookkeeping and by ours, in blocks of at most 64
    steps taken in turn. On a CUDA device the 8B shape with EAGLE-3, num_steps 3 (random weights, 3 tokens a step imposed), else the embedded family.
    """
    engine = large_engine(settings.device) if settings.cuda else embedded_engine(BATCH, settings.device)
    requests = requests_like(BATCH, PROMPT)
    start(engine, requests)
    state = Rewinder(engine, requests)
    times: dict[str, list[int]] = {"naive": [], "ours": []}
    size = max(1, min(BLOCK, settings.steps // 8))
    with no_collection():
        block(engine, BLOCK)  # captures, compiles, takes the pages
        while len(times["ours"]) < settings.steps:
            for name, spent in times.items():
                state.rewind()
                with ExitStack() as stack:
                    if name == "naive":
                        stack.enter_context(naive_host(engine))
                    spent += block(engine, min(size, settings.steps - len(spent)))
    state.rewind()
    params: dict[str, Any] = {"batch": BATCH, "steps": settings.steps, "overlap": engine.overlap, "graphs": engine.graphs is not None}
    params |= {"model": "llama31_8b" if settings.cuda else "embedded", "drafter": "eagle3", "num_steps": engine.num_steps}
    engine.close()
    yield row("step_latency", params, Sample.of(times["naive"]), Sample.of(times["ours"]))
