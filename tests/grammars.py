"""The embedded family under a grammar: engines, runs, and the documents that the tests ask for.

Boundary: builds and runs; asserts nothing but what is true of every run.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.grammar_text import Rules, rules_of
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

KINDS = ["def", "class"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "k": {"enum": KINDS},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "t": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 1},
    },
    "required": ["k", "n", "t"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DOCUMENT = "json:" + json.dumps(SCHEMA)
PROMPTS = [json.loads(line)["prompt"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()]
EOS = (2, 6)


def is_document(text: str) -> bool:
    """Whether a text is JSON of ``SCHEMA``."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or sorted(found) != ["k", "n", "t"] or not isinstance(found["t"], list):
        return False
    tags = all(isinstance(tag, str) and len(tag) <= 3 for tag in found["t"]) and len(found["t"]) <= 1
    return tags and found["k"] in KINDS and type(found["n"]) is int and 0 <= found["n"] <= 99


@cache
def tokenizer() -> Any:
    """The family's tokenizer."""
    return load_tokenizer(str(FAMILY / "target"))


@cache
def target_on(device: str) -> Target:
    """The family's target in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return load_target(ModelConfig(source="embedded", dtype="float32", device=device), device, "float32")


@cache
def rules(grammar: str) -> Rules:
    """A grammar over the family's tokenizer."""
    return rules_of(grammar, tokenizer())


def text_of(request: Request) -> str:
    """The text a row wrote, without the id that ended it."""
    return tokenizer().decode(request.output_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def engine_of(
    grammar: str | None,
    method: str = "none",
    topk: int = 1,
    steps: int = 4,
    *,
    device: str = "cpu",
    adaptive: bool = False,
    acceptance: str = "invariant",
    logprobs: int | None = None,
    pages: int | None = None,
    nodes: int | None = None,
    **engine: Any,
) -> Engine:
    """An engine over the family. ``pages``: size of the KV pool, page 0 included; ``engine``: its keys."""
    model = ModelConfig(source="embedded", dtype="float32", device=device)
    draft = DraftConfig(method=method, topk=topk, num_steps=0 if method == "none" else steps, num_draft_tokens=nodes, adaptive=adaptive)
    target = target_on(device)
    drafter = load_drafter(draft, model, target, tokenizer())
    config = EngineConfig(**{"max_batch": 64, "check_indices": device == "cpu", **engine})
    if pages is not None:
        config.kv_memory_gb = (pages + 0.5) * config.page_size * (target.kv_bytes_per_token + drafter.kv_bytes_per_token()) / 2**30
    return Engine(
        target,
        drafter,
        config,
        draft,
        tokenizer=tokenizer(),
        vocab_limit=len(tokenizer()),
        logprobs=logprobs,
        acceptance=acceptance,
        grammar=None if grammar is None else rules(grammar),
    )


def requests_of(count: int, sampling: SamplingParams | list[SamplingParams]) -> list[Request]:
    """``count`` requests, keyed by their index, over the family's prompts in turn."""
    each = [sampling] * count if isinstance(sampling, SamplingParams) else sampling
    ids = [tokenizer()(PROMPTS[i % len(PROMPTS)])["input_ids"][:24] for i in range(count)]
    return [Request(Prompt(i, i, ids[i], key=i), each[i]) for i in range(count)]


def run(
    grammar: str | None,
    count: int,
    sampling: SamplingParams | list[SamplingParams],
    method: str = "none",
    topk: int = 1,
    steps: int = 3,
    **options: Any,
) -> list[Request]:
    """``count`` finished requests, in input order."""
    engine, requests = engine_of(grammar, method, topk, steps, **options), requests_of(count, sampling)
    drive(engine, requests)
    return requests


def drive(engine: Engine, requests: list[Request]) -> None:
    """Run requests to their end; pages, counts and matchers are as after any run."""
    done = engine.run(requests)
    assert sorted(map(id, done)) == sorted(map(id, requests))
    engine.pages.check()
    assert engine.pages.free_pages == engine.pages.num_pages - 1
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    for request in requests:
        request.counts.check(len(request.output_ids))
        assert request.grammar is None
    engine.close()


def written(requests: list[Request]) -> list[tuple[list[int], str | None, str | int | None]]:
    """What must not depend on the draft or the batch."""
    return [(r.output_ids, r.finish_reason, r.stop_reason) for r in requests]
