"""Drafters propose what their network says, whatever path the engine took to get there: every draft equals a full recomputation without any cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.draft.ngram import NgramDrafter
from specgen.engine.engine import Engine
from specgen.errors import CheckpointError, ConfigError
from specgen.kernels import ops
from specgen.types import Draft, Request, SamplingParams, noise_key
from tests.harness import drafter_of, drive, engine_of, requests_of, target_of, tokenizer_of
from tests.oracles import Drafts, Recompute, RecomputeHead, tree_paths
from tests.toys import expected_rand

PROMPTS = [[1, 30], [10], [1, 7, 14, 21, 40], [24, 12, 33, 5, 41, 19, 8, 22, 31]]
HEADS = {
    "eagle": ("target", "eagle:eagle1_stirred", "eagle1_stirred"),
    "eagle3": ("target", "eagle3:eagle3_stirred", "eagle3_stirred"),
    "mtp": ("target_mtp_stirred", "mtp", "target_mtp_stirred"),
}


def oracle_of(kind: str) -> tuple[str, str, Drafts]:
    """(target, draft argument, oracle) of a drafter."""
    if kind == "draft_model":
        return "rand_target", "draft_model:rand_draft", Recompute("rand_draft")
    target, draft, head = HEADS[kind]
    return target, draft, RecomputeHead(kind, target, head)


def paths_of(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """The token paths a draft holds for one row."""
    tokens = [-1, *draft.token_ids[row].tolist()]
    if draft.path is None:
        return {tuple(tokens[1 : n + 1]) for n in range(1, len(tokens))}
    found = [tuple(tokens[node] for node in path[1:] if node >= 0) for path in draft.path[row].tolist()[1:]]
    assert len(set(found)) == len(found)
    return set(found)


def recorded(engine: Engine) -> list[tuple[Request, list[int], set[tuple[int, ...]]]]:
    """Every proposal of a run without overlap: (request, committed context, drafted paths)."""
    assert engine.overlap == 0
    seen: list[tuple[Request, list[int], set[tuple[int, ...]]]] = []
    launch, propose = engine.launch, engine.drafter.propose
    batch: Any = None

    def launched(planned: Any) -> Any:
        nonlocal batch
        batch = planned
        return launch(planned)

    def proposed(rows: Any, num_steps: int) -> Draft | None:
        draft = propose(rows, num_steps)
        assert draft is not None
        for row, (_, request, _) in enumerate(batch.decode):
            seen.append((request, request.prompt.token_ids + request.output_ids, paths_of(draft, row)))
        return draft

    engine.launch, engine.drafter.propose = launched, proposed  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "eagle3", "mtp"])
@pytest.mark.parametrize(
    ("topk", "steps", "nodes", "page", "chunk"), [(1, 3, None, 4, 4), (4, 3, 13, 1, 512), (2, 4, None, 4, 3), (3, 1, None, 16, 512)]
)
def test_every_draft_equals_a_recomputation_of_its_whole_context(kind: str, topk: int, steps: int, nodes: int | None, page: int, chunk: int) -> None:
    target, draft, oracle = oracle_of(kind)
    engine = engine_of(target, draft, topk=topk, steps=steps, nodes=nodes, page=page, chunk=chunk, batch=3)
    seen = recorded(engine)
    result = drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=14, ignore_eos=True)))
    assert len(seen) >= len(PROMPTS) * 3
    width = engine.drafter.num_draft_tokens
    for _, context, paths in seen:
        assert paths == tree_paths(oracle, context, topk, steps, width), context
    if kind != "draft_model":
        # What was drafted was also accepted: the extend after several accepted tokens was exercised.
        assert sum(sum(c["accepted"]) for c in result.counts) >= 8


@pytest.mark.parametrize(
    ("kind", "topk", "steps"), [("draft_model", 1, 3), ("draft_model", 3, 2), ("eagle", 2, 3), ("eagle3", 1, 2), ("eagle3", 3, 2)]
)
def test_sampled_drafts_add_the_targets_own_noise_at_each_depth(kind: str, topk: int, steps: int) -> None:
    temperature, seed = 0.8, 11
    target, draft, oracle = oracle_of(kind)
    engine = engine_of(target, draft, topk=topk, steps=steps, page=4, batch=3)
    seen = recorded(engine)
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=seed)))
    assert len(seen) >= 8
    for request, context, paths in seen:
        key = torch.from_numpy(np.array([noise_key(seed, request.prompt.key, 0)], np.uint32).view(np.int32))
        position = len(context) - len(request.prompt.token_ids)

        def noise(depth: int, key: torch.Tensor = key, position: int = position) -> np.ndarray:
            return ops.gumbel(key, torch.tensor([position + depth], dtype=torch.int32), 48)[0].double().numpy()

        assert paths == tree_paths(oracle, context, topk, steps, engine.drafter.num_draft_tokens, temperature, noise), context


# -- n-gram lookup ----------------------------------------------------------------------------------------------------------------------------


def looked_up(text: list[int], num_steps: int) -> list[int]:
    """Prompt lookup by hand: what followed the latest earlier occurrence of the last 3, else 2, else 1 tokens."""
    for n in (3, 2, 1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) >= n and text[end - n : end] == text[-n:]:
                return text[end : end + num_steps]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_lookup_drafts_are_the_continuation_of_the_latest_longest_match(texts: list[list[int]], num_steps: int) -> None:
    drafter = NgramDrafter(torch.device("cpu"), num_steps, num_steps + 1, max_length=32)
    drafter.bind(len(texts) + 1, 0, 16, len(texts))
    for slot, text in enumerate(texts, 1):
        drafter.history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        drafter.history[slot, len(text) : 30] = 2  # left by an earlier row; must not be read
    rows: Any = SimpleNamespace(
        slots=torch.arange(1, len(texts) + 1), length=torch.tensor([len(t) - 1 for t in texts], dtype=torch.int32), size=len(texts)
    )
    draft = drafter.propose(rows, num_steps)
    assert draft.valid is not None
    for row, text in enumerate(texts):
        want = looked_up(text, num_steps)
        assert draft.valid[row].tolist() == [i < len(want) for i in range(num_steps)]
        assert draft.token_ids[row, : len(want)].tolist() == want


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("target", ["target", "rand_target"])
def test_lookup_follows_prompt_chunks_and_accepted_runs(target: str, chunk: int) -> None:
    prompts = [[1, 30, 31, 32], [10], [40, 41, 42, 40, 7], expected_rand()[4]["prompt_ids"]]
    engine = engine_of(target, "ngram", steps=3, chunk=chunk, batch=3)
    seen: list[tuple[list[int], list[int]]] = []
    launch, propose = engine.launch, engine.drafter.propose
    current: list[Any] = [None]

    def launched(batch: Any) -> Any:
        current[0] = batch
        return launch(batch)

    def proposed(rows: Any, num_steps: int) -> Draft | None:
        draft = propose(rows, num_steps)
        assert draft is not None and draft.valid is not None
        for row, (_, request, _) in enumerate(current[0].decode):
            seen.append((request.prompt.token_ids + request.output_ids, draft.token_ids[row][draft.valid[row]].tolist()))
        return draft

    engine.launch, engine.drafter.propose = launched, proposed  # type: ignore[method-assign]
    drive(engine, requests_of(prompts, SamplingParams(max_tokens=20, ignore_eos=True)))
    assert len(seen) > 20
    assert all(drafted == looked_up(context, 3) for context, drafted in seen)


# -- what is refused --------------------------------------------------------------------------------------------------------------------------


def test_lookup_refuses_a_tree() -> None:
    with pytest.raises(ConfigError, match=r"draft=ngram proposes a chain: draft\.topk must be 1"):
        drafter_of("target", "ngram", topk=2, num_steps=2)


def test_num_draft_tokens_beyond_the_tree_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens=8 is out of range: topk=2, num_steps=2 give 2 to 7 nodes, root included"):
        drafter_of("target", "eagle:eagle1_perfect", topk=2, num_steps=2, num_draft_tokens=8)


def test_num_draft_tokens_that_does_not_fit_a_chain_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens=3 does not fit a chain: with draft\.topk=1 it is num_steps \+ 1 = 5"):
        drafter_of("target", "eagle:eagle1_perfect", topk=1, num_steps=4, num_draft_tokens=3)


def test_topk_beyond_the_draft_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft\.topk=27 .*26"):
        drafter_of("target", "eagle3:eagle3_d2t", topk=27, num_steps=2)


def test_mtp_needs_a_target_that_ships_a_module() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json has no num_nextn_predict_layers"):
        drafter_of("target", "mtp")


def test_a_tokenizer_that_agrees_is_accepted() -> None:
    drafter, _ = drafter_of("target", "draft_model:draft_perfect", tokenizer=tokenizer_of("target"))
    assert drafter.method == "draft_model" and drafter.lead == 1 and target_of("target").vocab_size == 48
