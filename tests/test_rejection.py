"""Rejection sampling: exact in law whatever the drafter, its acceptance what theory says, and nothing else of a run changed."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specgen.draft.sampled import check_draft_tokens, comb
from specgen.draft.tree import default_draft_tokens
from specgen.embedded import measure
from specgen.engine.engine import Engine
from specgen.errors import ConfigError
from specgen.kernels.reference_rejection import coins_from_words, draw_children, filtered_law, judge_children, on_target_ids
from specgen.kernels.reference_sampling import COIN, RESIDUAL, SAMPLED_DRAFT, gumbel, gumbel_argmax, noise_words
from specgen.kernels.reference_tree import build_tree
from specgen.loading import Loaded, load
from specgen.types import Request, SamplingParams
from tests import harness
from tests.harness import Run
from tests.oracles import endless_text
from tests.toys import DRAFT_LAW, TARGET_LAW

ROWS = 20_000
# Values that a true law exceeds once in 10,000 tests, by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 8: 31.83, 24: 58.61}
PAIR = "draft_model:stoch_draft"


def run(target: str, draft: str | None, prompts: Any, sampling: Any, **options: Any) -> Run:
    """``harness.run`` with ``sampling.acceptance=rejection``."""
    topk, steps = options.get("topk", 1), options.get("steps", 3)
    options.setdefault("nodes", 1 + topk * steps)
    with patch.object(harness, "Engine", partial(Engine, acceptance="rejection")):
        return harness.run(target, draft, prompts, sampling, **options)


def chi_square(observed: Counter, law: dict) -> float:
    """Pearson's statistic; anything outside the law is infinite."""
    if not set(observed) <= {x for x, p in law.items() if p > 0}:
        return float("inf")
    total = sum(observed.values())
    return sum((observed[x] - total * p) ** 2 / (total * p) for x, p in law.items() if p > 0)


def quantile(freedom: int) -> float:
    """The chi-square value exceeded once in 10,000 tests (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3


# -- the law, through the engine --------------------------------------------------------------------------------------------------------------

LAWS: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "plain": ({}, TARGET_LAW),
    "top_p": ({"top_p": 0.8}, {30: 4 / 7, 31: 2 / 7, 32: 1 / 7}),
    "top_k": ({"top_k": 2}, {30: 2 / 3, 31: 1 / 3}),
    "cold": ({"temperature": 0.5}, {x: p * p / sum(y * y for y in TARGET_LAW.values()) for x, p in TARGET_LAW.items()}),
    "all": (
        {"temperature": 0.5, "banned_token_ids": (30,), "top_k": 3, "top_p": 0.99, "min_p": 0.01},
        {31: 16 / 21, 32: 4 / 21, 33: 1 / 21},
    ),
}


@cache
def many(draft: str, topk: int, law: str = "plain", steps: int = 2) -> Run:
    """20,000 rows of one prompt, three tokens each."""
    sampling = SamplingParams(**{"max_tokens": 3, "temperature": 1.0, "seed": 5} | LAWS[law][0])
    options = dict(batch=ROWS, chunk=ROWS, max_length=8, page=4, pages=4 * ROWS)
    return run("stoch_target", draft, [[30]] * ROWS, sampling, steps=steps, topk=topk, **options)


OFTEN = (("chain", "top_p"), ("tree", "all"))  # the others with -m slow


@pytest.mark.parametrize(
    ("topk", "law"),
    [
        pytest.param(topk, law, id=f"{shape}-{law}", marks=[] if (shape, law) in OFTEN else pytest.mark.slow)
        for law in LAWS
        for shape, topk in (("chain", 1), ("tree", 3))
    ],
)
def test_every_position_follows_the_targets_law_and_positions_are_independent(topk: int, law: str) -> None:
    exact, ids = LAWS[law][1], many(PAIR, topk, law).ids
    for position in range(3):
        assert chi_square(Counter(row[position] for row in ids), exact) < quantile(len(exact) - 1)
    pairs = {(a, b): exact[a] * exact[b] for a, b in product(exact, exact)}
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert chi_square(Counter((row[first], row[second]) for row in ids), pairs) < quantile(len(pairs) - 1)


@pytest.mark.parametrize(
    ("draft", "topk", "steps"), [pytest.param("draft_model:draft_never", 1, 2, marks=pytest.mark.slow), ("draft_model:draft_never", 4, 1)]
)
def test_an_adversarial_draft_changes_no_law(draft: str, topk: int, steps: int) -> None:
    result = many(draft, topk, steps=steps)
    for position in range(3):
        assert chi_square(Counter(row[position] for row in result.ids), TARGET_LAW) < CHI_SQUARE[4]


def first_accepted(result: Run) -> int:
    return sum(steps[0].accepted > 0 for steps in result.steps)


def near(count: int, share: float) -> bool:
    """Whether ``count`` of ``ROWS`` is within four standard deviations of a share."""
    return abs(count - ROWS * share) < 4 * (ROWS * share * (1 - share)) ** 0.5


def test_the_first_draft_of_a_chain_is_accepted_as_often_as_the_laws_overlap() -> None:
    overlap = sum(min(TARGET_LAW[x], DRAFT_LAW[x]) for x in TARGET_LAW)
    assert overlap == 0.375
    assert near(first_accepted(many(PAIR, 1, "plain")), overlap)


def accepted_of_rounds(p: dict[int, float], q: dict[int, float], children: int) -> float:
    """The exact probability that one of some children, drawn without replacement, is accepted: every order of drawing summed up."""
    if children == 0 or not q:
        return 0.0
    total = 0.0
    left = {x: max(p[x] - q.get(x, 0.0), 0.0) for x in p}
    mass = sum(left.values())
    for x, q_x in q.items():
        accept = min(1.0, p[x] / q_x)
        rest = {y: value / (1 - q_x) for y, value in q.items() if y != x}
        total += q_x * (accept + (1 - accept) * (accepted_of_rounds({y: v / mass for y, v in left.items()}, rest, children - 1) if mass else 0.0))
    return total


def test_a_tree_is_accepted_as_often_as_its_rounds_say() -> None:
    three = accepted_of_rounds(TARGET_LAW, DRAFT_LAW, 3)
    assert accepted_of_rounds(TARGET_LAW, DRAFT_LAW, 1) == 0.375 < 0.7 < three
    assert near(first_accepted(many(PAIR, 3, "plain")), three)


@pytest.mark.parametrize("topk", [1, 3])
def test_equal_laws_accept_every_draft(topk: int) -> None:
    sampling = SamplingParams(max_tokens=31, temperature=1.0, seed=5)
    result = run("stoch_target", "draft_model:stoch_draft_same", [[30]] * 32, sampling, steps=4, topk=topk, batch=32)
    assert {tuple(row) for row in result.accepted} == {(4,) * 6}


# -- runs -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 3])
def test_the_same_seed_gives_the_same_text_whatever_stands_beside_a_row(topk: int) -> None:
    def text(seed: int, **options: Any) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=24, temperature=3.0, seed=seed)
        return run("rand_target", "draft_model:rand_draft", [[30 + i] for i in range(6)], sampling, topk=topk, steps=3, **options).ids

    first = text(7)
    assert text(7) == first
    assert text(7, batch=1) == text(7, batch=4, overlap=1) == text(7, order=[3, 0, 5, 1, 4, 2], batch=2, page=4) == first
    assert text(7, batch=6, page=4, pages=20, overlap=1) == first, "preempted rows too"
    assert all(a != b for a, b in zip(first, text(8), strict=True))


@pytest.mark.parametrize("draft", ["draft_model:rand_draft", "draft_model:draft_half", "eagle:eagle1_stirred", "eagle3:eagle3_stirred", "ngram"])
@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_greedy_rows_write_what_they_write_with_equality(draft: str, overlap: int) -> None:
    """Texts and, for chains, every step: alone and beside rows with a temperature."""
    target = "rand_target" if "rand" in draft else "target"
    greedy, warm = SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.5, seed=4)
    prompts = [[30], [40], [10, 31], [24]]
    for topk in (1,) if draft == "ngram" else (1, 3):
        plain = harness.run(target, draft, prompts, greedy, topk=topk, overlap=overlap)
        alone = run(target, draft, prompts, greedy, topk=topk, overlap=overlap)
        assert alone.ids == plain.ids
        mixed = run(target, draft, prompts * 2, [greedy] * 4 + [warm] * 4, topk=topk, overlap=overlap)
        assert mixed.ids[:4] == plain.ids
        if topk == 1:
            assert alone.steps == plain.steps == mixed.steps[:4]


def test_greedy_rows_follow_a_comb_of_the_best_children() -> None:
    sampling = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=2.0, seed=9)]
    result = run("target", "draft_model:draft_perfect", [[30]] * 2, sampling, topk=3)
    assert result.ids[0] == endless_text([30], 16)
    assert result.accepted[0] == [3, 3, 3, 3]


def test_rows_of_every_kind_share_a_batch() -> None:
    """Each row's law is its own: 1,000 rows of four kinds, interleaved."""
    kinds = [SamplingParams(**{"max_tokens": 2, "temperature": 1.0, "seed": 1} | LAWS[law][0]) for law in ("plain", "top_p", "cold", "all")]
    sampling = kinds * 1000
    options = dict(batch=4000, chunk=4000, max_length=8, page=4, pages=16_000)
    ids = run("stoch_target", PAIR, [[30]] * 4000, sampling, steps=1, topk=2, **options).ids
    for number, law in enumerate(("plain", "top_p", "cold", "all")):
        for position in range(2):
            assert chi_square(Counter(row[position] for row in ids[number::4]), LAWS[law][1]) < quantile(len(LAWS[law][1]) - 1)


def test_a_draft_vocabulary_of_its_own_is_judged_in_the_targets_ids() -> None:
    """EAGLE-3 over 26 ids; a target that is nearly certain, so that the draft of its successor is nearly always accepted."""
    sampling = SamplingParams(max_tokens=32, temperature=0.25, seed=3)
    result = run("target", "eagle3:eagle3_d2t", [[30]] * 16, sampling, steps=2, topk=1)
    assert result.ids == [endless_text([30], 32)] * 16
    assert sum(step.accepted > 0 for steps in result.steps for step in steps) == sum(map(len, result.steps))


@pytest.mark.parametrize("topk", [1, 2])
def test_the_context_ends_a_row_where_it_ends_it_otherwise(topk: int) -> None:
    sampling = SamplingParams(max_tokens=64, temperature=1.0, seed=2)
    result = run("stoch_target", PAIR, [[30]] * 12, sampling, topk=topk, steps=4, max_length=20)
    assert result.finish == ["context"] * 12
    assert {len(row) for row in result.ids} == {19}


# -- the arithmetic ---------------------------------------------------------------------------------------------------------------------------


def keys_of(n: int, seed: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (n, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.int64).to(torch.int32)


def tokens_of(p_logits: torch.Tensor, q_logits: torch.Tensor, n: int, k: int, ids: torch.Tensor | None = None, **law: float) -> torch.Tensor:
    """n tokens drawn by k children of ``q_logits`` [Vd] and rejection against f of ``p_logits`` [V]."""
    vocab, found = p_logits.shape[0], []
    for chunk in range(0, n, 2000):
        keys, t, ones = keys_of(2000, chunk), torch.zeros(2000, dtype=torch.int32), torch.ones(2000)
        noise = gumbel(keys, t, None if ids is not None else q_logits.shape[0], SAMPLED_DRAFT, ids)
        columns, q = draw_children(q_logits.expand(2000, -1), ones, noise, k)
        children = columns if ids is None else ids.long()[columns]
        parameters = ones, (ones * law.get("top_k", 0)).int(), ones * law.get("top_p", 1.0), ones * law.get("min_p", 0.0)
        p = filtered_law(p_logits.expand(2000, -1), *parameters, vocab)
        coins = coins_from_words(noise_words(keys, t, k, COIN))
        found.append(judge_children(p, on_target_ids(q, ids, vocab), children, coins, gumbel(keys, t, vocab, RESIDUAL)))
    return torch.cat(found)


def binned(tokens: torch.Tensor, p: torch.Tensor, bins: int) -> float:
    """Chi-square over ``bins`` bins of near equal mass."""
    order = p.argsort(descending=True)
    edge = (p[order].cumsum(0) * bins).long().clamp(max=bins - 1)
    of_token = torch.empty_like(edge)
    of_token[order] = edge
    expected = torch.zeros(bins).index_add_(0, of_token, p.float()) * len(tokens)
    seen = torch.bincount(of_token[tokens.long()], minlength=bins)
    assert float(p[tokens.long()].min()) > 0
    used = expected > 0
    return float(((seen - expected)[used] ** 2 / expected[used]).sum())


FILTERS = ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.95})


@pytest.mark.parametrize(
    ("vocab", "k", "law"),
    [
        *((16, k, law) for k in (1, 4) for law in FILTERS),
        *(pytest.param(16, 16, law, marks=pytest.mark.slow if law else []) for law in FILTERS),
        (4096, 4, {"top_p": 0.9}),
    ],
    ids=str,
)
def test_the_token_follows_p_whatever_q(vocab: int, k: int, law: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randn(2, vocab, generator=generator) * 1.5
    one = torch.ones(1)
    exact = filtered_law(logits[:1], one, (one * law.get("top_k", 0)).int(), one * law.get("top_p", 1.0), one * law.get("min_p", 0.0), vocab)[0]
    tokens = tokens_of(logits[0], logits[1], ROWS if vocab < 100 else 6000, k, **law)
    bins = 16
    assert binned(tokens, exact, bins) < quantile(bins - 1)


@pytest.mark.parametrize("k", [1, 3])
def test_the_token_follows_p_with_a_reduced_and_with_a_shorter_vocabulary(k: int) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([15, 3, 8, 0, 7], dtype=torch.int32)
    for tokens in (tokens_of(logits, torch.arange(5.0), ROWS, k, ids), tokens_of(logits, torch.arange(5.0), ROWS, k)):
        assert binned(tokens, logits.softmax(0), 16) < quantile(15)


def test_children_come_in_the_order_of_drawing_without_replacement() -> None:
    law = {0: 0.5, 1: 0.3, 2: 0.2}
    keys, t = keys_of(ROWS, 1), torch.zeros(ROWS, dtype=torch.int32)
    columns, q = draw_children(torch.tensor(list(law.values())).log().expand(ROWS, -1), torch.ones(ROWS), gumbel(keys, t, 3, SAMPLED_DRAFT), 2)
    pairs = {(a, b): law[a] * law[b] / (1 - law[a]) for a, b in product(law, law) if a != b}
    assert chi_square(Counter(map(tuple, columns.tolist())), pairs) < quantile(5)
    assert torch.allclose(q[0], torch.tensor([0.5, 0.3, 0.2]))


def test_a_rejected_draft_draws_from_the_residual() -> None:
    p, q = torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    noise = torch.tensor([[30.0, -30.0, 30.0]])  # in favour of what is not in the residual
    for child, coin, token in ((0, 0.49, 0), (0, 0.51, 1), (2, 1e-9, 1), (1, 0.999, 1)):
        assert judge_children(p, q, torch.tensor([[child]]), torch.tensor([[coin]]), noise).tolist() == [token]


def test_equal_laws_accept_whatever_the_coin_and_never_run_dry() -> None:
    p = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).softmax(1)
    last = coins_from_words(torch.full((64, 1), 2**32 - 1))
    assert float(last.max()) < 1
    for token in range(128):
        child = torch.full((64, 1), token)
        assert (judge_children(p, p.clone(), child, last, torch.zeros(64, 128)) == token).all()
    # A coin of 1 cannot be drawn; were it, nothing would be left of p, and p itself is drawn from.
    noise = torch.zeros(64, 128)
    noise[:, 7] = 100
    assert (judge_children(p, p.clone(), child, torch.ones(64, 1), noise) == 7).all()


def test_children_past_the_support_of_q_are_passed_over() -> None:
    """Two allowed ids and four children: the third and fourth were not drawn, and take nothing from p."""
    logits = torch.full((6,), float("-inf"))
    logits[2], logits[4] = 0.0, 1.0
    tokens = tokens_of(torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 0.0]), logits, ROWS, 4)
    assert binned(tokens, torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 0.0]).softmax(0), 6) < quantile(5)


def test_a_draft_without_finite_logits_is_a_law_all_the_same() -> None:
    for value in (float("nan"), float("-inf"), float("inf")):
        columns, q = draw_children(torch.full((3, 8), value), torch.tensor([0.0, 1.0, 0.5]), torch.zeros(3, 8), 2)
        assert torch.equal(q, torch.full((3, 8), 0.125))
        assert columns.tolist() == [[0, 1]] * 3


def test_the_law_is_the_one_the_sampler_draws_from() -> None:
    """Whatever the filters, a token has p > 0 exactly where the sampler may pick it."""
    logits = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)) * 2
    one = torch.ones(64)
    parameters = one * 0.7, (one * 9).int(), one * 0.9, one * 0.02
    p = filtered_law(logits, *parameters, 30)
    assert torch.allclose(p.sum(1), one) and (p[:, 30:] == 0).all()
    picked = torch.zeros_like(p, dtype=torch.bool)
    for t in range(400):
        y = gumbel_argmax(logits, *parameters, keys_of(64, 9), torch.full((64,), t, dtype=torch.int32), 30)
        picked[torch.arange(64), y.long()] = True
    assert not (picked & (p == 0)).any()
    assert (picked | (p < 0.05)).all()
    frozen = filtered_law(logits * 1e30, one * 1e-9, *parameters[1:], 30, {"sampled"})
    assert torch.equal(frozen.argmax(1), logits[:, :30].argmax(1)) and torch.equal(frozen.amax(1), one), "a tiny temperature does not overflow"


# -- combs ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topk", "steps"), [(2, 1), (2, 3), (4, 4), (3, 6)])
def test_a_comb_is_the_tree_of_its_parents(topk: int, steps: int) -> None:
    shape = comb(topk, steps, 3, torch.device("cpu"))
    # As candidates: every depth's group 0 hangs from the first kept node of the depth before.
    index = torch.tensor([[d * topk * topk + (topk if d else 0) - (topk * topk if d else 0) + k for d in range(steps) for k in range(topk)]])
    kept = [[-1, *range(topk)]] + [[topk + topk * topk * (d - 1) + k for k in range(topk)] for d in range(1, steps)]
    parent_list = torch.tensor([[x for group in kept[:-1] for x in group]]) if steps > 1 else torch.empty(1, 0, dtype=torch.long)
    expected = build_tree(parent_list, index, topk, steps)
    for ours, theirs in zip((shape.parents, shape.path, shape.depth, shape.first_child, shape.next_sibling), expected, strict=False):
        assert torch.equal(ours, theirs.expand_as(ours)) and ours.is_contiguous()
    assert int(expected[5]) == 0


def test_the_default_tree_is_a_comb_until_it_is_cut() -> None:
    assert default_draft_tokens(4, 4) == 17 == 1 + 4 * 4
    check_draft_tokens(4, 4, 17)
    with pytest.raises(ConfigError, match=r"^draft.num_draft_tokens=16: .* set it to 1 \+ draft.topk \* draft.num_steps = 17$"):
        check_draft_tokens(4, 4, 16)
    with pytest.raises(ConfigError, match=r"= 17$"):
        run("target", PAIR, [[30]], SamplingParams(), topk=4, steps=4, nodes=20)


# -- the embedded family ----------------------------------------------------------------------------------------------------------------------


@cache
def family() -> Loaded:
    return load(measure.job("none", 1, 0.0).model)


def family_rows(method: str, topk: int, *, batch: int = 12, overlap: str = "0", acceptance: str = "rejection") -> list[Request]:
    """Twelve rows of 24 tokens at temperature 1."""
    config = measure.job(method, topk, 1.0, 0)
    config.draft.num_steps, config.sampling.max_tokens = 3, 24
    config.sampling.acceptance, config.data.limit = acceptance, 12
    config.engine.max_batch, config.engine.overlap = batch, overlap
    return measure.run(config, family())


@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 4), ("dflash", 1), ("mtp", 1), ("draft_model", 4)])
def test_every_trained_drafter_samples_its_drafts(method: str, topk: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specgen"):
        rows = family_rows(method, topk)
    told = [r.getMessage() for r in caplog.records if "acceptance" in r.getMessage()]
    assert told == ["sampling.acceptance=rejection: text at a temperature depends on the drafter, draft.topk and draft.num_steps"]
    alone = family_rows(method, topk, batch=5, overlap="1")
    assert [r.output_ids for r in alone] == [r.output_ids for r in rows]
    accepted, steps = sum(sum(r.counts.accepted) for r in rows), sum(r.counts.verify_steps for r in rows)
    assert accepted / steps > 0.5
    assert [r.output_ids for r in rows] != [r.output_ids for r in family_rows(method, topk, acceptance="invariant")]


def test_prompt_lookup_draws_nothing_so_rejection_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A draft that is a function of the text has q(x) = 1: it is accepted with probability p(x) either way, and the invariant text stays."""
    with caplog.at_level(logging.INFO, "specgen"):
        rows = family_rows("ngram", 1)
    assert not [r for r in caplog.records if "acceptance" in r.getMessage()]
    assert [(r.output_ids, r.counts) for r in rows] == [(r.output_ids, r.counts) for r in family_rows("ngram", 1, acceptance="invariant")]
