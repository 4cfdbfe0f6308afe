"""On a CUDA device: the same tokens and counts as on the CPU, with CUDA graphs and without, and no synchronising call in the steady state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams
from tests.toys import expected_rand, toy_folder

pytestmark = pytest.mark.gpu
PAIRS = [
    ("rand_target", "rand_draft"),
    ("target", "draft_perfect"),
    ("target", "eagle1_lies_on_odd"),
    ("target", "eagle3_d2t"),
    ("rand_target", "ngram"),
    ("stoch_target", "stoch_draft"),
    ("target_mtp3", "mtp"),
]
METHODS = {
    "rand_draft": "draft_model",
    "draft_perfect": "draft_model",
    "draft_half": "draft_model",
    "eagle1_lies_on_odd": "eagle",
    "eagle3_d2t": "eagle3",
    "stoch_draft": "draft_model",
}


def generate(device: str, target: str, draft: str | None, prompts: list[list[int]], sampling: SamplingParams, **options: Any) -> list[Request]:
    """Run prompts on a toy pair; ``options``: topk, num_steps, and engine keys."""
    model = ModelConfig(source="hf", path=str(toy_folder() / target), dtype="float32", device=device)
    loaded = load_target(model, device, "float32")
    config = DraftConfig(method="none")
    if draft is not None:
        method = METHODS.get(draft, draft)
        path = None if draft in ("ngram", "mtp") else str(toy_folder() / draft)
        config = DraftConfig(method=method, path=path, topk=options.pop("topk", 1), num_steps=options.pop("num_steps", 3))
    engine = Engine(loaded, load_drafter(config, model, loaded), EngineConfig(**{"max_batch": 8, "page_size": 4, **options}), config)
    requests = [Request(Prompt(index=i, id=i, key=i, token_ids=ids), sampling) for i, ids in enumerate(prompts)]
    engine.run(requests)
    engine.pages.check()
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    engine.close()
    return requests


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("topk, num_steps", [(1, 1), (1, 3), (1, 5), (2, 2), (4, 3)])
def test_gpu_tokens_equal_the_float64_recompute(topk: int, num_steps: int, graphs: str) -> None:
    rows = expected_rand()
    prompts = [row["prompt_ids"] for row in rows]
    for overlap in ("0", "1"):
        got = generate(
            "cuda:0", "rand_target", "rand_draft", prompts, SamplingParams(max_tokens=32),
            topk=topk, num_steps=num_steps, overlap=overlap, cuda_graphs=graphs,
        )  # fmt: skip
        assert [r.output_ids for r in got] == [row["greedy_32"] for row in rows]
    plain = generate("cuda:0", "rand_target", None, prompts, SamplingParams(max_tokens=32), cuda_graphs=graphs)
    assert [r.output_ids for r in plain] == [row["greedy_32"] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("target, draft", PAIRS)
def test_gpu_counts_and_tokens_equal_the_cpu(target: str, draft: str, topk: int, temperature: float) -> None:
    if draft == "ngram":
        topk = 1
    prompts = [[1, 10], [30], [1, 40, 41], [24, 25, 9], [5, 6, 7, 8, 30, 31, 32, 33, 34, 30, 31]]
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    cpu = generate("cpu", target, draft, prompts, sampling, topk=topk, num_steps=3)
    gpu = generate("cuda:0", target, draft, prompts, sampling, topk=topk, num_steps=3)
    assert [r.output_ids for r in gpu] == [r.output_ids for r in cpu]
    assert [r.counts for r in gpu] == [r.counts for r in cpu]
    assert [r.finish_reason for r in gpu] == [r.finish_reason for r in cpu]


@pytest.mark.parametrize("target, draft, topk", [("target", "draft_perfect", 1), ("target_mtp3", "mtp", 1), ("target_mtp3", "mtp", 3)])
def test_steady_state_makes_no_synchronising_call(target: str, draft: str, topk: int) -> None:
    model = ModelConfig(source="hf", path=str(toy_folder() / target), dtype="float32", device="cuda:0")
    loaded = load_target(model, "cuda:0", "float32")
    path = None if draft == "mtp" else str(toy_folder() / draft)
    config = DraftConfig(method=METHODS.get(draft, draft), path=path, topk=topk, num_steps=3)
    engine = Engine(loaded, load_drafter(config, model, loaded), EngineConfig(max_batch=4, page_size=4), config)
    for i in range(4):
        engine.add(Request(Prompt(index=i, id=i, key=i, token_ids=[30 + i]), SamplingParams(max_tokens=200)))
    for _ in range(6):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_work:
        engine.step()
    engine.close()
