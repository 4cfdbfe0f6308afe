"""What a job's widest steps take of a CUDA device beside the KV pool, measured by running them before the pool is made.

Boundary: drives a short-lived engine over a pool just large enough, with made-up prompts; its rows are thrown away. Run where the memory setting
decides the pool's size, and only when the pool could fill the device: a small model's pool is bounded by its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from specgen.config import DraftConfig, EngineConfig
from specgen.draft.base import Drafter
from specgen.engine.engine import Engine
from specgen.engine.memory import ceil_to_page
from specgen.engine.plan import Working, device_budget, max_batch_of, overlap_of, reserve_of
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

SPARE = 1.1  # other buckets are cut differently, and features of single rows come on top of what was seen
LIBRARIES = 64 << 20  # workspaces that cuBLAS keeps for a stream and a graph pool, and what torch rounds its segments up to
log = logging.getLogger("specgen")


class Rehearsal(NamedTuple):
    """``rows`` prompts of ``length`` tokens, which fill a prefill step and then decode side by side; each writes ``max_tokens``, and together they
    need ``slots`` KV slots."""

    rows: int
    length: int
    max_tokens: int
    slots: int


def rehearsal_of(target: Target, drafter: Drafter, config: EngineConfig, draft: DraftConfig) -> Rehearsal:
    """The widest steps of a job."""
    rows = max_batch_of(config, target.device)
    length = max(1, min(config.prefill_tokens // rows, target.max_length // 2))
    prefills = -(-rows * length // config.prefill_tokens)  # the first rows still decode when the last have been prefilled
    max_tokens = 2 + (prefills - 1) * (drafter.num_steps + 1)
    most = length + max_tokens + reserve_of(drafter, draft, overlap_of(config, target.device, False))
    # Admission keeps a page free for each row that decodes; page 0 is scratch.
    return Rehearsal(rows, length, max_tokens, rows * (ceil_to_page(most, config.page_size) + config.page_size) + config.page_size)


def rehearse(engine: Engine, rehearsal: Rehearsal, params: SamplingParams) -> tuple[int, int]:
    """Run it: bytes of device tensors at the most beyond those that stay, in the first prefill step and after it. ``params``: of the job, whose
    features decide what a step computes."""
    params = replace(params, max_tokens=rehearsal.max_tokens, min_tokens=0, stop=(), n=1, ignore_eos=True)
    ids = [i % engine.vocab_limit for i in range(rehearsal.length)]
    for i in range(rehearsal.rows):
        engine.add(Request(Prompt(index=i, id=i, key=i, token_ids=ids), params))
    prefill = _peak(engine, lambda: engine.step())
    return prefill, _peak(engine, lambda: engine.run([]))


def _peak(engine: Engine, work: Callable[[], object]) -> int:
    on_device = engine.device.type == "cuda"
    if on_device:
        torch.cuda.reset_peak_memory_stats(engine.device)
    work()
    return torch.cuda.max_memory_allocated(engine.device) - torch.cuda.memory_allocated(engine.device) if on_device else 0


def measure(target: Target, drafter: Drafter, config: EngineConfig, draft: DraftConfig, params: SamplingParams, **options: Any) -> Working | None:
    """What the engine of a job takes of the device beside weights and KV pool, with a tenth to spare. None where it decides nothing: on a CPU, with
    ``engine.kv_memory_gb``, or when every row at full length takes less than half of what is there. ``params``: of the job; ``options``: of
    ``Engine``.

    The drafter is bound again by the engine that follows.
    """
    device = target.device
    if device.type != "cuda" or config.kv_memory_gb is not None:
        return None
    per_token = target.kv_bytes_per_token + drafter.kv_bytes_per_token()
    if 2 * max_batch_of(config, device) * target.max_length * per_token < device_budget(config, device):
        return None
    rehearsal = rehearsal_of(target, drafter, config, draft)
    pool = rehearsal.slots * per_token
    before = torch.cuda.memory_allocated(device)
    small = replace(config, kv_memory_gb=(pool + per_token) / 2**30, cuda_graphs="off")
    try:
        with closing(Engine(target, drafter, small, draft, **options)) as engine:
            prefill, decode = rehearse(engine, rehearsal, params)
            kept = torch.cuda.memory_allocated(device) - before - pool
    except torch.OutOfMemoryError:
        log.warning("the device has no memory to rehearse a step of %d rows; the KV pool is sized without that", rehearsal.rows)
        return None
    del engine
    torch.cuda.empty_cache()
    graph = 0 if config.cuda_graphs == "off" else decode
    kept, eager, graph = (int(SPARE * size) for size in (max(0, kept), max(prefill, decode), graph))
    return Working(LIBRARIES + kept, eager, graph)
