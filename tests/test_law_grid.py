"""Every sampling parameter against its exact law: 20,000 rows through the engine, drafted by a chain and by a tree whose drafter prefers what the
target does not, in both acceptance modes, over 16 and over 4,096 tokens.

The law is written out here once more, in float64, from the documentation alone. A quick part always runs; ``-m slow`` runs the whole grid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specgen.config import DraftConfig, EngineConfig
from specgen.draft.autoregressive import AutoregressiveDrafter
from specgen.draft.base import Drafter
from specgen.draft.draft_model import DraftModelHead
from specgen.draft.none import NoDraft
from specgen.engine.engine import Engine
from specgen.models.attention import KvPool, KvShape
from specgen.models.target import Hidden, Placement, Target
from specgen.types import Layout, SamplingParams
from tests.harness import requests_of

ROWS, PROMPT, LEAST = 20_000, [3], 8.0  # LEAST: expected draws of a cell, or it is joined with others
TOKENS = {16: 3, 4096: 2}
BATCH = {16: ROWS, 4096: 2000}
STEPS = {16: 2, 4096: 1}


class TableTarget(Target):
    """A target whose logits are a line of a table, chosen by the last token: its law can be written down."""

    fused = True

    def __init__(self, table: Tensor) -> None:
        config = SimpleNamespace(vocab_size=table.shape[1], hidden_size=1, num_hidden_layers=1)
        super().__init__(cast(Any, config), Placement(table.device, torch.float32, 8))
        self.table, self.kv_spec = table, (KvShape(1, 1, 1),)

    @property
    def embed_weight(self) -> Tensor:
        raise NotImplementedError

    @property
    def lm_head_weight(self) -> Tensor:
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, layout: Layout, pool: KvPool, aux_layers: tuple[int, ...] = (), prenorm: bool = False) -> Hidden:
        return Hidden(ids[:, None].float())

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long() % self.table.shape[0]]

    def make_deterministic(self, on: bool = True) -> None:
        pass


@cache
def table_of(vocab: int) -> Tensor:
    """Eight laws over ``vocab`` tokens, peaked enough that a few dozen hold most of each."""
    return torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * (1.2 if vocab == 16 else 2.2)


# -- the law, written out ---------------------------------------------------------------------------------------------------------------------


def law(z: np.ndarray, s: SamplingParams, output: list[int]) -> np.ndarray:
    """The probability of each token after the prompt and ``output``."""
    z = z.astype(np.float64)
    for token in {*PROMPT, *output}:
        z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    for token, count in Counter(output).items():
        z[token] -= s.frequency_penalty * count + s.presence_penalty
    for token, bias in s.logit_bias:
        z[token] += bias
    refused = set(s.banned_token_ids) | (set(s.stop_token_ids) if len(output) < s.min_tokens else set())
    refused |= set(range(len(z))) - set(s.allowed_token_ids) if s.allowed_token_ids else set()
    z[list(refused)] = -np.inf
    z = z / s.temperature
    order = np.lexsort((np.arange(len(z)), -z))
    p = np.exp(z[order] - z[order[0]])
    kept = np.ones(len(p), bool)
    if s.top_k:
        kept[s.top_k :] = False
    share = np.where(kept, p, 0) / p[kept].sum()
    kept &= share.cumsum() - share < s.top_p if s.top_p < 1 else True
    kept &= p >= s.min_p
    found = np.zeros(len(p))
    found[order] = np.where(kept, p, 0) / p[kept].sum()
    return found


def exact(vocab: int, s: SamplingParams) -> list[np.ndarray]:
    """The laws of the first token and of the second, and over 16 tokens of the third."""
    table = table_of(vocab).numpy()

    def after(output: list[int]) -> np.ndarray:
        return law(table[(output or PROMPT)[-1] % len(table)], s, output)

    first = after([])
    pairs = {int(a): first[a] * after([int(a)]) for a in np.flatnonzero(first)}
    laws = [first, sum(pairs.values())]
    if vocab == 16:
        laws.append(sum(p * after([a, int(b)]) for a, joint in pairs.items() for b, p in enumerate(joint) if p > 0))
    return laws


def p_value(tokens: np.ndarray, p: np.ndarray) -> float:
    """Of the chi-square of draws against a law; 0 for a draw that the law excludes. Unlikely tokens are counted together."""
    seen = np.bincount(tokens, minlength=len(p)).astype(float)
    expected = p * len(tokens)
    if seen[p == 0].any():
        return 0.0
    order = np.argsort(-expected)
    cells = np.minimum(np.arange(len(p)), int((expected >= LEAST).sum()))  # the last cell is what is left
    seen, expected = (np.bincount(cells, x[order]) for x in (seen, expected))
    if expected[-1] < LEAST and len(expected) > 1:
        seen[-2], expected[-2] = seen[-2] + seen[-1], expected[-2] + expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(expected) - 1)) if len(expected) > 1 else 1.0


# -- the engine -------------------------------------------------------------------------------------------------------------------------------

ALONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": ((3, 1.5), (7, -2.0), (11, 4.0))},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 3, 5, 8, 9, 13)},
    "banned_token_ids": {"banned_token_ids": (2, 5, 14)},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (1, 4, 12)},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": ((6, 1.0),), "top_p": 0.95},
    "masks": {
        "temperature": 1.3,
        "allowed_token_ids": tuple(range(12)),
        "banned_token_ids": (7,),
        "min_tokens": 3,
        "stop_token_ids": (2,),
        "top_k": 6,
    },
}


@dataclass(frozen=True)
class Way:
    """How the rows are drafted: ``against`` the target's preferences (negated logits), or near them."""

    topk: int
    acceptance: str
    against: bool = True

    def drafter(self, table: Tensor) -> Drafter:
        noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(1)).to(table.device) * 0.5
        head = DraftModelHead(TableTarget(-table if self.against else table + noise), table.shape[1])
        steps = STEPS[table.shape[1]]
        nodes = 1 + self.topk * steps if self.acceptance == "rejection" or self.topk == 1 or steps == 1 else 7
        return AutoregressiveDrafter(cast(Any, head), self.topk, steps, nodes)


def drawn(vocab: int, s: SamplingParams, way: Way | None, device: str = "cpu") -> tuple[np.ndarray, int]:
    """Output ids [ROWS, TOKENS of the vocabulary] and accepted drafts."""
    table, batch = table_of(vocab).to(device), BATCH[vocab]
    drafter = NoDraft() if way is None else way.drafter(table)
    config = EngineConfig(max_batch=batch, page_size=4, prefill_tokens=batch, kv_memory_gb=0.05, overlap="0")
    draft = DraftConfig(method=drafter.method, topk=drafter.topk, num_steps=drafter.num_steps)
    engine = Engine(TableTarget(table), drafter, config, draft, acceptance="invariant" if way is None else way.acceptance)
    requests = requests_of([PROMPT] * ROWS, s)
    engine.run(requests)
    assert engine.max_batch == batch
    engine.pages.check()
    engine.close()
    return np.array([r.output_ids for r in requests]), sum(sum(r.counts.accepted) for r in requests)


def params(values: dict[str, Any], vocab: int = 16) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS[vocab], "temperature": 1.0, "seed": 5} | values)


def check(vocab: int, values: dict[str, Any], way: Way, device: str = "cpu") -> None:
    s = params(values, vocab)
    ids, accepted = drawn(vocab, s, way, device)
    assert ids.shape == (ROWS, TOKENS[vocab])
    for position, exact_law in enumerate(exact(vocab, s)):
        assert p_value(ids[:, position], exact_law) > 1e-4, position
    assert accepted > 0 or way.against
    if way.acceptance == "invariant" and vocab == 16:  # what is equal there is equal here, and these rows take long
        assert np.array_equal(ids, drawn(vocab, s, None)[0])


CASES = ALONE | TOGETHER
WAYS = [Way(topk, acceptance) for topk in (1, 3) for acceptance in ("invariant", "rejection")]
QUICK = [("min_p", WAYS[3]), ("frequency_penalty", WAYS[1]), ("penalties", Way(1, "rejection", False))]


def named(value: Any) -> str | None:
    return f"{'chain' if value.topk == 1 else 'tree'}-{value.acceptance}-{'against' if value.against else 'near'}" if isinstance(value, Way) else None


@pytest.mark.parametrize("name, way", QUICK, ids=named)
def test_a_parameter_follows_its_law(name: str, way: Way) -> None:
    check(16, CASES[name], way)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, Way(1, "rejection", False), Way(3, "rejection", False)], ids=named)
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_follows_its_law(name: str, way: Way) -> None:
    check(16, CASES[name], way)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_follows_its_law_over_4096_tokens(name: str, way: Way, device: str) -> None:
    check(4096, CASES[name], way, device)


def test_the_check_tells_a_neighbouring_law_apart() -> None:
    ids, _ = drawn(16, params({"top_p": 0.7}), Way(1, "rejection", False))
    assert p_value(ids[:, 1], exact(16, params({"top_p": 0.7}))[1]) > 1e-4
    for other in ({"top_p": 0.72, "temperature": 1.05}, {"top_p": 0.6}, {"top_p": 0.7, "logit_bias": ((3, 0.2),)}):
        assert p_value(ids[:, 1], exact(16, params(other))[1]) < 1e-4, other
