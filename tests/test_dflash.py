"""DFlash on the embedded family: the text never depends on it, its blocks are accepted, and a checkpoint that does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.errors import SpecgenError
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams

MODEL = ModelConfig(source="embedded", dtype="float32", device="cpu")
PROMPTS = [json.loads(line)["prompt"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()][:8]


@pytest.fixture(scope="module")
def target():
    torch.set_num_threads(1)
    return load_target(MODEL, "cpu", "float32")


def generate(target, draft: DraftConfig, sampling: SamplingParams, **engine) -> list[Request]:
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    built = Engine(target, load_drafter(draft, MODEL, target), EngineConfig(**{"max_batch": 8, **engine}), draft, vocab_limit=len(tokenizer))
    requests = [Request(Prompt(i, i, tokenizer(text)["input_ids"], key=i), sampling) for i, text in enumerate(PROMPTS)]
    built.run(requests)
    built.pages.check()
    built.close()
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_steps, engine", [(1, {}), (4, {"page_size": 1}), (3, {"max_batch": 3, "overlap": "1", "prefill_tokens": 16})])
def test_text_does_not_depend_on_dflash(target, num_steps: int, engine: dict, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    plain = generate(target, DraftConfig(method="none"), sampling)
    drafted = generate(target, DraftConfig(method="dflash", num_steps=num_steps), sampling, **engine)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    for request in drafted:
        request.counts.check(len(request.output_ids))


def test_blocks_are_accepted_and_every_step_proposes_num_steps_depths(target) -> None:
    requests = generate(target, DraftConfig(method="dflash", num_steps=4), SamplingParams(max_tokens=48))
    accepted = sum(sum(r.counts.accepted) for r in requests)
    steps = sum(r.counts.verify_steps for r in requests)
    assert 1 + accepted / steps > 1.3  # a random head stays at 1.0
    assert all(r.counts.proposed == [r.counts.verify_steps] * 4 for r in requests)


@pytest.mark.parametrize(
    "change, draft, message",
    [
        ({}, {"num_steps": 5}, "drafts blocks of 5, so at most 4"),
        ({"dflash_config": {"mask_token_id": 0}}, {}, "needs block_size and dflash_config"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding-window"),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [9]}}, {}, "do not exist in a target of 6 layers"),
        ({"hidden_size": 96}, {}, "width 96"),
    ],
)
def test_a_dflash_checkpoint_that_does_not_fit_is_named(target, tmp_path: Path, change: dict, draft: dict, message: str) -> None:
    folder = tmp_path / "head"
    shutil.copytree(FAMILY / "dflash", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(SpecgenError, match=message):
        load_drafter(DraftConfig(method="dflash", path=str(folder), **{"num_steps": 4, **draft}), MODEL, target)
