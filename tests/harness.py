"""Drives the engine on toy checkpoints and keeps what tests ask about.

Boundary: CPU, float32, one thread. Every run ends with the invariants that hold for any run: pages, identities of the counts, provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.base import Drafter
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END, DRAFT_DEPTH, KEPT
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams
from tests.toys import toy_folder

torch.set_num_threads(1)


@cache
def target_of(name: str, max_length: int | None = None) -> Target:
    """A toy target, loaded once."""
    return load_target(model_config(name, max_length), "cpu", "float32")


@cache
def tokenizer_of(name: str) -> Any:
    """A toy's tokenizer, loaded once."""
    return load_tokenizer(str(toy_folder() / name))


def model_config(name: str, max_length: int | None = None) -> ModelConfig:
    """The configuration of a toy target."""
    return ModelConfig(source="hf", path=str(toy_folder() / name), dtype="float32", device="cpu", max_length=max_length)


@dataclass(frozen=True)
class Step:
    """One retired step of a row, as the scheduler counted it."""

    accepted: int
    kept: int
    draft_depth: int
    child_at_end: int


@dataclass
class Run:
    """A finished run: its requests in input order, and the steps each was counted."""

    engine: Engine
    requests: list[Request]
    steps: list[list[Step]]

    @property
    def ids(self) -> list[list[int]]:
        """Output ids of each row."""
        return [r.output_ids for r in self.requests]

    @property
    def counts(self) -> list[dict[str, Any]]:
        """Counts of each row."""
        return [r.counts.as_dict() for r in self.requests]

    @property
    def finish(self) -> list[str | None]:
        """Finish reason of each row."""
        return [r.finish_reason for r in self.requests]

    @property
    def accepted(self) -> list[list[int]]:
        """Accepted drafts of each step of each row."""
        return [[step.accepted for step in steps] for steps in self.steps]


def drafter_of(
    target: str, draft: str | None, *, max_length: int | None = None, tokenizer: Any = None, **options: Any
) -> tuple[Drafter, DraftConfig]:
    """A drafter for a toy target. ``draft``: ``METHOD`` or ``METHOD:TOY``; None for plain decoding."""
    method, _, toy = (draft or "none").partition(":")
    config = DraftConfig(method=method, path=str(toy_folder() / toy) if toy else None, **options)
    return load_drafter(config, model_config(target, max_length), target_of(target, max_length), tokenizer), config


def thinned(settings: Iterable[tuple[Any, ...]], quick: Callable[[int], bool]) -> list[Any]:
    """Settings of a grid for ``pytest.mark.parametrize``: those whose number is not ``quick`` run with ``-m slow``."""
    return [pytest.param(*each, marks=[] if quick(number) else pytest.mark.slow) for number, each in enumerate(settings)]


def engine_of(
    target: str,
    draft: str | None = None,
    *,
    topk: int = 1,
    steps: int = 3,
    nodes: int | None = None,
    batch: int = 8,
    page: int = 16,
    overlap: int = 0,
    chunk: int = 2048,
    pages: int | None = None,
    max_length: int | None = None,
    text: bool = False,
    vocab_limit: int | None = None,
    logprobs: int | None = None,
    deterministic: bool = False,
    adaptive: bool = False,
) -> Engine:
    """An engine over toys. ``pages``: size of the KV pool, page 0 included. ``text``: give the engine the target's tokenizer."""
    loaded = target_of(target, max_length)
    drafter, draft_config = drafter_of(target, draft, max_length=max_length, topk=topk, num_steps=steps, num_draft_tokens=nodes, adaptive=adaptive)
    per_page = page * (loaded.kv_bytes_per_token + drafter.kv_bytes_per_token())
    memory = None if pages is None else (pages + 0.5) * per_page / 2**30
    config = EngineConfig(max_batch=batch, page_size=page, overlap=str(overlap), prefill_tokens=chunk, kv_memory_gb=memory, check_indices=True)
    config.deterministic = deterministic
    return Engine(loaded, drafter, config, draft_config, tokenizer=tokenizer_of(target) if text else None, vocab_limit=vocab_limit, logprobs=logprobs)


def requests_of(prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], **common: Any) -> list[Request]:
    """One request a prompt, keyed by its index."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return [
        Request(Prompt(index=i, id=i, key=i, token_ids=list(ids)), params, **common)
        for i, (ids, params) in enumerate(zip(prompts, each, strict=True))
    ]


def run(
    target: str,
    draft: str | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    order: Sequence[int] | None = None,
    max_tokens: int = 32,
    **options: Any,
) -> Run:
    """Run prompts to their end. ``order``: the order in which they are queued; ``options``: of ``engine_of``."""
    requests = requests_of(prompts, SamplingParams(max_tokens=max_tokens) if sampling is None else sampling)
    return drive(engine_of(target, draft, **options), requests, order)


def drive(engine: Engine, requests: list[Request], order: Sequence[int] | None = None) -> Run:
    """Run requests on an engine and check what is true of every run."""
    steps: dict[int, list[Step]] = {id(r): [] for r in requests}
    retire = engine.scheduler.retire_decode

    def recorded(decode: tuple[tuple[int, Request, int], ...], result: Any, *more: Any) -> list[Request]:
        """What the device said of each row that the host still waits for, noted before the host accounts for it."""
        for (_, request, epoch), row in zip(decode, result.tolist(), strict=True):
            if not request.done and request.epoch == epoch and row[ALIVE]:
                steps[id(request)].append(Step(row[ACCEPTED], row[KEPT], row[DRAFT_DEPTH], row[CHILD_AT_END]))
        return retire(decode, result, *more)

    with patch.object(engine.scheduler, "retire_decode", recorded):
        done = engine.run(requests if order is None else [requests[i] for i in order])
    result = Run(engine, requests, [steps[id(r)] for r in requests])
    assert sorted(map(id, done)) == sorted(map(id, requests)), "every request comes back once"
    check_run(result)
    return result


def check_run(result: Run) -> None:
    """What holds of any finished run: no page is lost, and every row's integers obey their identities."""
    pages = result.engine.pages
    pages.check()
    assert pages.free_pages == pages.num_pages - 1, "every page is given back"
    assert not result.engine.in_flight and not result.engine.has_work
    for request, steps in zip(result.requests, result.steps, strict=True):
        counts = request.counts
        counts.check(len(request.output_ids))
        assert request.status == "finished" and request.slot == 0
        assert len(request.provenance) == len(request.output_ids)
        assert counts.verify_steps + counts.steps_without_draft == len(steps)
        assert counts.verify_steps == sum(step.draft_depth > 0 for step in steps)
        for depth, (proposed, reached, accepted) in enumerate(zip(counts.proposed, counts.reached, counts.accepted, strict=True), 1):
            assert proposed == sum(step.draft_depth >= depth for step in steps)
            assert reached == sum(step.accepted >= depth or (step.accepted == depth - 1 and step.child_at_end) for step in steps)
            assert accepted == sum(step.accepted >= depth for step in steps)
            assert accepted <= reached <= proposed
        if request.output_ids:
            rest = [mark for step in steps for mark in [*range(1, step.accepted + 1), 0][: step.kept]]
            assert request.provenance == ([-1, *rest])[: len(request.output_ids)]
