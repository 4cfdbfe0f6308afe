"""The embedded family on a CUDA device in float32: every drafter gives the tokens, and the counts, of the run on the CPU."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams

pytestmark = pytest.mark.gpu
METHODS = [(m, k) for m in ("eagle", "eagle3", "mtp", "draft_model") for k in (1, 4)] + [("dflash", 1), ("ngram", 1)]
PROMPTS = [json.loads(line)["prompt"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()]


@cache
def target_on(device: str):
    torch.set_num_threads(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_target(ModelConfig(source="embedded", dtype="float32", device=device), device, "float32")


@cache
def generate(device: str, method: str, topk: int, temperature: float) -> tuple[list[list[int]], list, float]:
    model = ModelConfig(source="embedded", dtype="float32", device=device)
    draft = DraftConfig(method=method, topk=topk, num_steps=0 if method == "none" else 4)
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    target = target_on(device)
    engine = Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=32), draft, vocab_limit=len(tokenizer))
    sampling = SamplingParams(max_tokens=48, temperature=temperature, seed=7)
    requests = [Request(Prompt(i, i, tokenizer(text)["input_ids"], key=i), sampling) for i, text in enumerate(PROMPTS)]
    engine.run(requests)
    engine.pages.check()
    engine.close()
    steps = sum(r.counts.verify_steps for r in requests)
    length = 1 + sum(sum(r.counts.accepted) for r in requests) / max(steps, 1)
    return [r.output_ids for r in requests], [r.counts for r in requests], length


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method, topk", METHODS)
def test_the_family_generates_the_same_tokens_on_the_gpu(method: str, topk: int, temperature: float) -> None:
    plain, _, _ = generate("cpu", "none", 1, temperature)
    tokens, counts, length = generate("cuda:0", method, topk, temperature)
    assert tokens == plain
    cpu_tokens, cpu_counts, cpu_length = generate("cpu", method, topk, temperature)
    assert tokens == cpu_tokens
    assert counts == cpu_counts
    print(f"\n{method} topk {topk} T {temperature}: 32 rows equal, acceptance length {length:.3f} (CPU {cpu_length:.3f})")
