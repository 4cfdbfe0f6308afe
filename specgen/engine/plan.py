"""How large a job's engine is: rows at a time, KV slots beyond a row's length, and pages of the KV pool, which are what the memory setting leaves and
never more than every row at full length can use.

Boundary: numbers. What a step takes beside the pool is measured by ``engine.rehearsal`` and comes in as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.config import DraftConfig, EngineConfig
from specgen.draft.base import Drafter
from specgen.engine.memory import spec_reserve
from specgen.errors import CapacityError

CPU_KV_BYTES = 1 << 30
DEFAULT_MAX_BATCH = {"cpu": 32, "cuda": 256}


def max_batch_of(engine: EngineConfig, device: torch.device) -> int:
    """The most rows at a time that a configuration asks for."""
    return engine.max_batch or DEFAULT_MAX_BATCH.get(device.type, 32)


def overlap_of(engine: EngineConfig, device: torch.device, grammar: bool) -> int:
    """How many steps the host may be behind."""
    return {"0": 0, "1": 1}.get(str(engine.overlap), int(device.type == "cuda" and not grammar))


def depths_of(drafter: Drafter, draft: DraftConfig) -> Sequence[int]:
    """Every num_steps a job may use."""
    return range(drafter.num_steps + 1) if draft.adaptive and drafter.num_steps > 0 else (drafter.num_steps,)


def reserve_of(drafter: Drafter, draft: DraftConfig, overlap: int) -> int:
    """KV slots a row needs beyond its length (``spec_reserve``)."""
    depths = depths_of(drafter, draft)
    return spec_reserve(depths, drafter.topk, [drafter.nodes(s) for s in depths], [drafter.slots(s) for s in depths], drafter.lead, overlap)


class Working(NamedTuple):
    """Bytes that an engine needs of a device beside weights and KV pool. kept: buffers and tables, for its life. eager: the tensors of its widest
    step. graph: those of its widest decode step where steps are captured, else 0; warming up and the graphs' pool take as much each."""

    kept: int
    eager: int
    graph: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.eager + 2 * self.graph


def reserve(size: int, device: torch.device) -> None:
    """Make torch hold a free block of ``size`` bytes for the current stream, or for the graph pool being captured into.

    Blocks of every smaller size are cut out of it. Without it batches that grow take a larger block each time and leave the smaller ones unused:
    two and a half times what the widest step needs.
    """
    if size:
        torch.empty(size, dtype=torch.uint8, device=device)


def device_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes of a CUDA device that ``engine.memory_fraction`` still leaves to this process, weights already there; below 0 when it is passed."""
    torch.cuda.empty_cache()  # what an earlier engine of this process gave back is torch's until now
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - config.memory_fraction) * total)


def plan_pages(config: EngineConfig, device: torch.device, page_bytes: int, most: int, other_bytes: int) -> int:
    """Pages of the pool, scratch included, at most ``most``. page_bytes: of target and drafter together. other_bytes: what else will be allocated
    on the device. Raises CapacityError when not even one row's page fits."""
    if config.kv_memory_gb is not None:
        budget = int(config.kv_memory_gb * 2**30)
    elif device.type == "cuda":
        budget = device_budget(config, device) - other_bytes
    else:
        budget = CPU_KV_BYTES
    pages = min(most, budget // page_bytes)
    if pages < 2:
        raise CapacityError(
            f"the KV pool's budget of {max(budget, 0) / 2**30:.3g} GiB holds no page of {page_bytes} bytes: {_remedy(config, device)}"
        )
    return int(pages)


def _remedy(config: EngineConfig, device: torch.device) -> str:
    if config.kv_memory_gb is not None or device.type != "cuda":
        return "raise engine.kv_memory_gb"
    return "raise engine.memory_fraction, or lower engine.prefill_tokens or engine.max_batch, whose tensors take the rest"
