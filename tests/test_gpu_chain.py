"""On a CUDA device: a chain's step runs no top-k, sort, gather, scatter or indexing kernel. A profiler's trace of eager steps says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.profile_step import kernel_events
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams
from tests.toys import toy_folder

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
INDEXING = re.compile(r"topk|sort|gather|scatter|index_?put|index_?select|index_?copy|embedding", re.IGNORECASE)
STEPS = 4
PARTS = ("propose", "decode")  # of the drafter, and of the device step: all of it
# A traced part runs at least as many kernels: a forward of a drafter's layer takes about ten.
LEAST = {"propose": 12, "decode": 60}


def model_of(target: str) -> ModelConfig:
    if target == "embedded":
        return ModelConfig(source="embedded", dtype="float32", device=DEVICE)
    return ModelConfig(source="hf", path=str(toy_folder() / target), dtype="float32", device=DEVICE)


@cache
def target_on_device(target: str) -> Any:
    return load_target(model_of(target), DEVICE, "float32")


def kernels_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``call`` returns, and the names of the kernels it ran."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        result = call()
        torch.cuda.synchronize()
    names = [event.name for event in kernel_events(trace)]
    return result, [name for name in names if not name.startswith(("Memcpy", "Memset"))]


def traced_step(target: str, method: str, topk: int, temperature: float, part: str) -> list[str]:
    """Kernels of one steady step of four rows, without graphs: of its proposal, or of the whole."""
    loaded, draft = target_on_device(target), DraftConfig(method=method, topk=topk, num_steps=STEPS)
    config = EngineConfig(max_batch=4, overlap="0", cuda_graphs="off", check_indices=False, kv_memory_gb=0.25)
    engine = Engine(loaded, load_drafter(draft, model_of(target), loaded), config, draft)
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, temperature=temperature, seed=3)
    for i in range(4):
        engine.add(Request(Prompt(index=i, id=i, key=i, token_ids=[5 + i, 30, 31 + i]), sampling))
    for _ in range(5):  # the prefill, and steps in which kernels are compiled and chosen
        engine.step()
    kernels_of(lambda: torch.zeros(8, device=DEVICE) + 1)  # a profiler's own start is not the step's
    owner: Any = engine.drafter if part == "propose" else engine.device_step
    inner, names = getattr(owner, part), []

    def traced(*args: Any, **kwargs: Any) -> Any:
        result, seen = kernels_of(lambda: inner(*args, **kwargs))
        names.append(seen)
        return result

    setattr(owner, part, traced)
    engine.step()
    engine.close()
    assert len(names) == 1, "one step was traced"
    return names[0]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "target, method",
    [("embedded", "eagle"), ("embedded", "eagle3"), ("embedded", "mtp"), ("embedded", "draft_model"), ("embedded", "dflash"), ("target_mtp3", "mtp")],
)
def test_a_chain_takes_no_indexing_kernel(target: str, method: str, temperature: float, part: str) -> None:
    names = traced_step(target, method, 1, temperature, part)
    assert [name for name in names if INDEXING.search(name)] == []
    assert len(names) >= LEAST[part], names
    assert "_scan" in names, "the drafts are drawn among what was traced"


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_trees_trace_is_recognised(method: str) -> None:
    """The same check on topk = 4, which does gather: it can fail."""
    assert [name for name in traced_step("embedded", method, 4, 0.0, "propose") if INDEXING.search(name)] != []


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: torch.topk(x, 3),
        lambda x, i: torch.sort(x),
        lambda x, i: x.gather(1, i),
        lambda x, i: x.scatter(1, i, 0.0),
        lambda x, i: x.index_select(0, i[0]),
    ],
    ids=["topk", "sort", "gather", "scatter", "index_select"],
)
def test_the_kernels_in_question_are_recognised_by_name(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    x, i = torch.randn(64, 512, device=DEVICE), torch.tensor([[3, 1]], device=DEVICE)
    call(x, i)
    _, names = kernels_of(lambda: call(x, i))
    assert [name for name in names if INDEXING.search(name)] != [], names
