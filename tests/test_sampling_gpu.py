"""The whole law on a CUDA device: the same tokens as on the CPU, inside CUDA graphs, and no synchronising call in the steady state."""

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
PROMPTS = [row["prompt_ids"] for row in expected_rand()]
LAW = SamplingParams(
    max_tokens=24,
    temperature=0.9,
    seed=11,
    n=2,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias=((5, 1.5),),
    banned_token_ids=(17,),
    min_tokens=6,
    stop_token_ids=tuple(range(20, 40)),
)


def engine_on(device: str, method: str, topk: int, steps: int, logprobs: int | None = 3, **options: Any) -> Engine:
    """An engine over the random toy pair in float32."""
    model = ModelConfig(source="hf", path=str(toy_folder() / "rand_target"), dtype="float32", device=device)
    target = load_target(model, device, "float32")
    path = str(toy_folder() / "rand_draft") if method == "draft_model" else None
    draft = DraftConfig(method=method, path=path, topk=topk, num_steps=steps)
    config = EngineConfig(**{"max_batch": 16, "page_size": 4, "kv_memory_gb": 0.05, **options})
    return Engine(target, load_drafter(draft, model, target), config, draft, logprobs=logprobs)


def rows(sampling: SamplingParams = LAW) -> list[Request]:
    """Two samples of each toy prompt; every third row greedy and plain."""
    found = []
    for i, ids in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=24, n=2) if i % 3 == 2 else sampling
        prompt = Prompt(index=i, id=i, key=i, token_ids=ids, sampling=params)
        found += [Request(prompt, params, sample=sample) for sample in range(2)]
    return found


def finished(engine: Engine) -> list[Request]:
    """The toy rows, run to their end."""
    requests = rows()
    engine.run(requests)
    engine.pages.check()
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    engine.close()
    return requests


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(("method", "topk", "steps"), [("none", 1, 0), ("draft_model", 1, 3), ("draft_model", 3, 2), ("ngram", 1, 3)])
def test_gpu_text_and_logprobs_under_the_whole_law_equal_the_cpus(method: str, topk: int, steps: int, graphs: str) -> None:
    cpu, gpu = finished(engine_on("cpu", method, topk, steps)), finished(engine_on("cuda:0", method, topk, steps, cuda_graphs=graphs))
    assert [r.output_ids for r in gpu] == [r.output_ids for r in cpu]
    assert [r.counts for r in gpu] == [r.counts for r in cpu] and [r.finish_reason for r in gpu] == [r.finish_reason for r in cpu]
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert [e["logprob"] for e in ours.logprobs] == pytest.approx([e["logprob"] for e in theirs.logprobs], abs=2e-3)
        assert [e["id"] for e in ours.logprobs] == ours.output_ids


def test_the_steady_state_under_the_whole_law_makes_no_synchronising_call() -> None:
    engine = engine_on("cuda:0", "draft_model", 2, 3)
    params = SamplingParams(max_tokens=150, temperature=0.9, seed=1, ignore_eos=True, frequency_penalty=0.2, logit_bias=((5, 1.0),), min_tokens=140)
    for i, ids in enumerate(PROMPTS):
        engine.add(Request(Prompt(index=i, id=i, key=i, token_ids=ids[:8]), params))
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


def test_a_row_that_widens_the_tables_while_graphs_replay_is_right() -> None:
    texts = []
    for device in ("cpu", "cuda:0"):
        engine = engine_on(device, "draft_model", 1, 3, logprobs=None)
        plain = [Request(Prompt(index=i, id=i, key=i, token_ids=ids), SamplingParams(max_tokens=40)) for i, ids in enumerate(PROMPTS[:4])]
        late = [
            SamplingParams(max_tokens=20, presence_penalty=1.0),
            SamplingParams(max_tokens=20, min_tokens=9),
            SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=tuple(range(4, 40))),
            SamplingParams(max_tokens=20, banned_token_ids=(0, 19)),
        ]
        others = [Request(Prompt(index=9 + i, id=9 + i, key=9 + i, token_ids=PROMPTS[i]), params) for i, params in enumerate(late)]
        for request in plain:
            engine.add(request)
        for request in others:
            for _ in range(2):
                engine.step()
            engine.add(request)
        while engine.has_work:
            engine.step()
        engine.close()
        texts.append([r.output_ids for r in plain + others])
    assert texts[0] == texts[1]
