"""``engine.deterministic`` in bfloat16: one hash over all outputs, whatever the drafter, topk, num_steps, batch size, row order and prefill chunk.

The law is a whole one: T = 1, top-p, penalties, bias, min_tokens, three samples a prompt. On a CPU a few of the settings.
"""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Request, SamplingParams
from tests.test_sampling_law import fingerprint, samples

CUDA = "cuda:0"
PROMPTS = {"cpu": 3, CUDA: 22}  # 66 rows on a GPU: a batch of 64 is full
LAW = SamplingParams(
    max_tokens=24,
    temperature=1.0,
    top_p=0.95,
    seed=5,
    n=3,
    repetition_penalty=1.15,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((40, 1.0),),
    min_tokens=5,
)
DRAFTERS = ("eagle", "eagle3", "mtp", "draft_model")
Setting = tuple[str, int, int, int, int]  # method, topk, num_steps, batch, prefill_tokens


def settings() -> list[Setting]:
    """Every drafter, topk and num_steps at a batch of 7, and batches of 1 and 64 for some; prefills whole and in chunks."""
    found: list[Setting] = [("none", 1, 0, batch, 2048) for batch in (7, 64)]
    for method in DRAFTERS:
        for topk in (1, 4):
            found += [(method, topk, steps, 7, 50 if steps == 3 else 2048) for steps in (1, 3, 5)]
    found += [(method, topk, 3, batch, 2048) for method, topk in (("eagle", 4), ("mtp", 1)) for batch in (1, 64)]
    return found


@cache
def target_on(device: str) -> Target:
    return load_target(ModelConfig(dtype="bfloat16", device=device), device, "bfloat16")


@cache
def prompts(device: str) -> list[list[int]]:
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    lines = (FAMILY / "prompts.jsonl").read_text().splitlines()[: PROMPTS[device]]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def outputs(device: str, setting: Setting, order: int | None) -> tuple[list[list[int]], list[Request]]:
    """Output ids of all rows, in input order. ``order``: the seed of the order in which they are queued, or None for their own."""
    method, topk, steps, batch, chunk = setting
    model, target, draft = ModelConfig(dtype="bfloat16", device=device), target_on(device), DraftConfig(method=method, topk=topk, num_steps=steps)
    config = EngineConfig(max_batch=batch, prefill_tokens=chunk, deterministic=True, kv_memory_gb=0.25)
    engine = Engine(target, load_drafter(draft, model, target), config, draft, vocab_limit=4096)
    rows = samples(prompts(device), LAW)
    engine.run(rows if order is None else random.Random(order).sample(rows, len(rows)))
    engine.pages.check()
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    engine.close()
    return [row.output_ids for row in rows], rows


@cache
def reference(device: str) -> str:
    """The hash of plain decoding, one row at a time."""
    texts, _ = outputs(device, ("none", 1, 0, 1, 2048), None)
    assert len({tuple(ids) for ids in texts}) > 0.9 * len(texts), "the samples of a prompt differ"
    return fingerprint(texts)


def check(device: str, number: int, setting: Setting) -> None:
    texts, rows = outputs(device, setting, number)
    assert fingerprint(texts) == reference(device), setting
    if setting[0] != "none":
        assert sum(sum(row.counts.accepted) for row in rows) > len(rows) / 2, "the drafts take part in the text"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", *DRAFTERS])
def test_one_hash_on_a_gpu(method: str) -> None:
    chosen = [(number, setting) for number, setting in enumerate(settings()) if setting[0] == method]
    assert len(chosen) == {"none": 2, "eagle": 8, "mtp": 8}.get(method, 6)
    for number, setting in chosen:
        check(CUDA, number, setting)


@pytest.mark.parametrize("setting", [("eagle", 4, 3, 7, 50), ("mtp", 1, 3, 5, 2048), ("draft_model", 1, 5, 2, 2048)])
def test_one_hash_on_a_cpu(setting: Setting) -> None:
    check("cpu", 3, setting)
