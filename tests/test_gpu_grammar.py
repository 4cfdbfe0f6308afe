"""``sampling.grammar`` on a CUDA device in float32: the documents of the CPU, with CUDA graphs and without, and one host read a step."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from specgen.types import SamplingParams
from tests.grammars import DOCUMENT, drive, engine_of, is_document, requests_of, run, text_of, written

pytestmark = pytest.mark.gpu
METHODS = [
    ("none", 1),
    ("eagle", 1),
    ("eagle", 4),
    ("eagle3", 4),
    ("mtp", 1),
    ("mtp", 4),
    ("draft_model", 1),
    ("draft_model", 4),
    ("dflash", 1),
    ("ngram", 1),
]
ROWS = 48


def hot(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=48, temperature=temperature, seed=3)


@cache
def on_the_cpu(temperature: float) -> list:
    torch.set_num_threads(3)
    rows = run(DOCUMENT, ROWS, hot(temperature))
    assert all(is_document(text_of(row)) for row in rows)
    return written(rows)


@cache
def accepted_on_the_cpu(method: str, topk: int, temperature: float) -> list[list[int]]:
    torch.set_num_threads(3)
    return [row.counts.accepted for row in run(DOCUMENT, ROWS, hot(temperature), method, topk, 3, max_batch=32)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("method, topk", METHODS)
def test_the_gpu_writes_the_documents_of_the_cpu(method: str, topk: int, graphs: str, temperature: float) -> None:
    rows = run(DOCUMENT, ROWS, hot(temperature), method, topk, 3, device="cuda:0", cuda_graphs=graphs, max_batch=32)
    assert written(rows) == on_the_cpu(temperature)
    assert [row.counts.accepted for row in rows] == accepted_on_the_cpu(method, topk, temperature)
    assert method in ("none", "ngram") or sum(sum(row.counts.accepted) for row in rows) > 0  # prompt lookup finds little in such a text


def test_the_rows_own_masks_and_min_tokens_on_the_gpu() -> None:
    each = [hot(0.8), SamplingParams(max_tokens=24, temperature=0.8, seed=3, min_tokens=12, banned_token_ids=(23, 24), repetition_penalty=1.2)] * 8
    cpu = written(run("regex:[0-9]{1,20}", 16, each))
    for method, topk in (("none", 1), ("eagle", 1), ("mtp", 4)):
        assert written(run("regex:[0-9]{1,20}", 16, each, method, topk, 3, device="cuda:0")) == cpu


def test_adaptive_speculation_under_a_grammar_on_the_gpu() -> None:
    engine = engine_of(DOCUMENT, "eagle", 1, 3, device="cuda:0", adaptive=True, max_batch=16)
    requests = requests_of(ROWS, hot(0.8))
    drive(engine, requests)
    assert written(requests) == on_the_cpu(0.8)


@pytest.mark.parametrize("topk", [1, 4])
def test_the_steady_state_waits_for_nothing_but_the_draft(topk: int) -> None:
    """``set_sync_debug_mode`` calls every wait an error but that for an event, which is how the draft is read."""
    engine = engine_of("regex:[a-z ]{900}", "eagle", topk, 3, device="cuda:0", max_batch=4)
    for request in requests_of(4, SamplingParams(max_tokens=300, temperature=0.8, seed=1)):
        engine.add(request)
    for _ in range(8):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.graphs is not None and {key[4] for key in engine.graphs._graphs} == {"propose", "finish"}
    while engine.has_work:
        engine.step()
    engine.close()
