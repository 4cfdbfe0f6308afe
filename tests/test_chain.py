"""The topk = 1 chain: what a step takes from its constants is what the general way of choosing and verifying gives, and takes no indexing kernel."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft import tree
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.kernels import reference_step
from specgen.models.loader import load_target
from specgen.types import Draft, SamplingParams
from tests.harness import Run, drive, engine_of, requests_of, thinned
from tests.oracles import endless_text
from tests.test_tree import Names

PAIRS = [
    ("rand_target", "draft_model:rand_draft"),
    ("rand_target", "eagle:eagle1_stirred"),
    ("rand_target", "eagle3:eagle3_stirred"),
    ("target_mtp_stirred", "mtp"),
    ("target_mtp3_stirred", "mtp"),
    ("embedded", "dflash"),
]
MIXED = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.8, 0.0)]
PROMPTS = [[30], [10, 11, 12], [40, 41, 9, 7]]


@cache
def embedded() -> Any:
    return load_target(ModelConfig(source="embedded", dtype="float32", device="cpu"), "cpu", "float32")


def engine_for(target: str, draft: str, steps: int, *, batch: int = 8, topk: int = 1, adaptive: bool = False) -> Engine:
    if target != "embedded":
        return engine_of(target, draft, topk=topk, steps=steps, batch=batch, page=4, adaptive=adaptive)
    config = DraftConfig(method=draft, num_steps=steps)
    drafter = load_drafter(config, ModelConfig(source="embedded", dtype="float32", device="cpu"), embedded())
    return Engine(embedded(), drafter, EngineConfig(max_batch=batch, page_size=4, check_indices=True), config)


def drafts(engine: Engine) -> list[Draft]:
    """Every draft of a run, as it is handed to the engine."""
    found: list[Draft] = []
    propose = engine.drafter.propose

    def proposed(rows: Any, num_steps: int) -> Draft | None:
        draft = propose(rows, num_steps)
        assert draft is not None
        found.append(draft)
        return draft

    engine.drafter.propose = proposed  # type: ignore[method-assign]
    return found


def with_constants_for(engine: Engine, rows: int) -> Engine:
    """The engine with the chain's constants made for fewer rows than it runs: what does not fit takes the general way."""
    engine.drafter.chain = tree.rebuild_topk1_chain_buffers(engine.num_steps, rows, "cpu")  # type: ignore[attr-defined]
    return engine


def same(fast: Run, general: Run) -> bool:
    return (fast.ids, fast.counts, fast.steps) == (general.ids, general.counts, general.steps)


# -- the constants and the general way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_step_gives_the_same_drafts_acceptance_and_text_either_way(target: str, draft: str, steps: int) -> None:
    fast, general = engine_for(target, draft, steps), with_constants_for(engine_for(target, draft, steps), 0)
    taken, organised = drafts(fast), drafts(general)
    assert same(drive(fast, requests_of(PROMPTS, MIXED)), drive(general, requests_of(PROMPTS, MIXED)))
    assert len(taken) == len(organised) >= 3
    for ours, theirs in zip(taken, organised, strict=True):
        assert ours.path is None and theirs.path is not None and ours.parents is not None and theirs.parents is not None
        assert torch.equal(ours.token_ids, theirs.token_ids) and ours.token_ids.dtype == theirs.token_ids.dtype == torch.int32
        assert torch.equal(ours.parents, theirs.parents) and ours.parents.dtype == torch.int64
        assert ours.token_ids.is_contiguous() and ours.parents.is_contiguous()


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_every_depth_and_batch_accepts_a_perfect_draft_whole_either_way(steps: int, batch: int) -> None:
    prompts, sampling = [[30 + i % 5] for i in range(batch)], SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    runs = []
    for rows in (batch, batch - 1):  # the preallocated limit, and one above it
        engine = with_constants_for(engine_of("target", "draft_model:draft_perfect", steps=steps, batch=batch), rows)
        found = drafts(engine)
        runs.append(drive(engine, requests_of(prompts, sampling)))
        assert [draft.path is None for draft in found] == [rows == batch]
    assert same(*runs)
    assert runs[0].ids == [endless_text(prompt, steps + 2) for prompt in prompts] and runs[0].accepted == [[steps]] * batch


def test_a_job_that_drains_comes_back_under_the_limit() -> None:
    """Three rows are one more than the constants hold, two and one fit."""
    engine = with_constants_for(engine_of("target", "draft_model:draft_half", steps=3), 2)
    found = drafts(engine)
    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 12, 20)]
    result = drive(engine, requests_of([[30], [40], [24]], sampling))
    assert result.ids == [endless_text(prompt, n) for prompt, n in (([30], 4), ([40], 12), ([24], 20))]
    assert {(draft.token_ids.shape[0], draft.path is None) for draft in found} == {(3, False), (2, True), (1, True)}


def test_every_batch_of_an_engine_fits_its_constants() -> None:
    engine = engine_of("target", "draft_model:draft_half", steps=3, batch=5)
    assert engine.drafter.chain.max_batch == engine.max_batch == 5  # type: ignore[attr-defined]


def test_the_constants_of_a_num_steps_are_made_once_and_kept() -> None:
    """A captured step holds slices of them."""
    chain = tree.rebuild_topk1_chain_buffers(4, 3, "cpu")
    two = chain.for_steps(2)
    assert two.index.tolist() == [[0, 1]] * 3 and two.parents.tolist() == [[-1, 0]] * 3
    assert two.for_steps(4) is chain and chain.for_steps(2) is two and two.for_steps(1).parents.shape == (3, 0)


# -- what runs --------------------------------------------------------------------------------------------------------------------------------

INDEXING = re.compile(r"(arg)?sort|topk|gather|scatter|index|embedding|take|put|searchsorted|bincount")


@pytest.mark.parametrize(("target", "draft"), thinned(PAIRS[:5], lambda number: number % 2 == 0))
def test_a_whole_step_of_a_chain_runs_no_indexing_operator_of_torch(target: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose, verify, accept and observe, where kernels run: the rest is theirs. A tree's step shows that the check can fail."""
    pytest.importorskip("triton")
    assert os.environ.get("TRITON_INTERPRET") == "1"
    expected = drive(engine_for(target, draft, 2, batch=2), requests_of(PROMPTS[:2], MIXED[:2]))
    seen = {}
    for topk in (1, 2) if draft.startswith("eagle:") else (1,):
        engine, requests = engine_for(target, draft, 2, batch=2, topk=topk), requests_of(PROMPTS[:2], MIXED[:2])
        engine.device_step.checks = None
        for request in requests:
            engine.add(request)
        for _ in range(2):
            engine.step()
        with monkeypatch.context() as patch, Names() as operators:
            patch.setenv("SPECGEN_FORCE_TRITON", "1")
            engine.step()
        while engine.has_work:
            engine.step()
        assert [request.output_ids for request in requests] == expected.ids
        seen[topk] = set(operators.seen)
    found = {topk: sorted(filter(INDEXING.match, names)) for topk, names in seen.items()}
    assert found[1] == [] and {"linear", "cat"} <= seen[1]
    assert 2 not in seen or "gather" in found[2]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1500,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_lines_are_taken_and_put_as_in_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    pytest.importorskip("triton")
    from specgen.kernels import rows

    g = torch.Generator().manual_seed(len(shape))
    table = (torch.randn(9, *shape, generator=g) * 100).to(dtype).to(device)
    for index in (torch.tensor([3, 3, 0, 8], dtype=torch.int32), torch.tensor([2, 7, 5]), torch.tensor([], dtype=torch.int64)):
        taken = rows.take_rows(table, index.to(device))
        assert taken.dtype == dtype and torch.equal(taken, reference_step.take_rows(table, index.to(device)))
    index, new = torch.tensor([6, 1, 4], device=device), (torch.randn(3, *shape, generator=g) * 100).to(dtype).to(device)
    for lines in (new[:0], new):
        ours, theirs = table.clone(), table.clone()
        rows.put_rows(ours, index[: len(lines)], lines)
        reference_step.put_rows(theirs, index[: len(lines)], lines)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 6])
def test_the_closing_pair_is_the_last_draft_and_the_token_after_it(width: int, device: str) -> None:
    pytest.importorskip("triton")
    from specgen.kernels import rows

    tokens = torch.arange(10, 10 + 4 * width, dtype=torch.int32, device=device).view(4, width)
    root, accepted = torch.tensor([1, 2, 3, 4], device=device).int(), torch.tensor([0, width - 1, 0, width // 2], device=device).int()
    expected = [[([r, *line])[a], line[a]] for r, line, a in zip(root.tolist(), tokens.tolist(), accepted.tolist(), strict=True)]
    for found in (rows.closing_pair(root, tokens, accepted), reference_step.closing_pair(root, tokens, accepted)):
        assert found.tolist() == expected and found.dtype == torch.int32
    assert rows.closing_pair(root[:0], tokens[:0], accepted[:0]).shape == (0, 2)
