"""The law f: penalties, masks, the kept set and the draw, against a plain float64 rendering; every kernel against its reference."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor

from specgen.kernels import draft_topk as topk_kernel
from specgen.kernels import filters
from specgen.kernels import law as law_kernel
from specgen.kernels import reference_sampling as reference
from specgen.kernels import sampling as kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY, SAMPLED, FILTERS = frozenset[str](), frozenset({"sampled"}), frozenset({"sampled", "filters"})


@dataclass
class Rows:
    """N rows of logits with everything the draw needs."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    t: Tensor

    def to(self, device: str) -> Rows:
        return Rows(*(getattr(self, f.name).to(device) for f in fields(self)))

    def args(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))


def random_rows(count: int, vocab: int, seed: int, ties: bool) -> Rows:
    g = torch.Generator().manual_seed(seed)

    def some(share: float) -> Tensor:
        return torch.rand(count, generator=g) < share

    logits = torch.randn(count, vocab, generator=g) * 3
    logits = logits.round() if ties else logits
    logits[torch.rand(count, vocab, generator=g) < 0.1] = float("-inf")
    logits[:, int(torch.randint(vocab, (1,), generator=g))] = 1.0
    temperature = torch.where(some(0.2), 0.0, torch.rand(count, generator=g) * 2 + 0.05)
    top_k = torch.where(some(0.3), 0, torch.randint(1, vocab + 2, (count,), generator=g)).to(torch.int32)
    top_p = torch.where(some(0.3), 1.0, torch.rand(count, generator=g).clamp(min=1e-3))
    min_p = torch.where(some(0.5), 0.0, torch.rand(count, generator=g) * 0.5)
    keys = torch.randint(-(2**31), 2**31, (count, 2), generator=g).to(torch.int32)
    return Rows(logits, temperature, top_k, top_p, min_p, keys, torch.randint(0, 999, (count,), generator=g).to(torch.int32))


def kept_by_hand(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The kept ids of one row: sort by (score descending, id ascending), then cut three times."""
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    if top_k > 0:
        order = order[:top_k]
    probability = np.exp(scores[order].astype(np.float64) - float(scores[order[0]]))
    probability /= probability.sum()
    kept, reached = [], 0.0
    for v, share in zip(order, probability, strict=True):
        if top_p < 1 and kept and reached >= top_p:
            break
        kept.append(v)
        reached += share
    return [v for v, share in zip(kept, probability, strict=False) if share >= min_p * probability[0]]


def draw_by_hand(rows: Rows, i: int, noise: np.ndarray) -> int:
    z = rows.logits[i].numpy()
    if float(rows.temperature[i]) == 0:
        return int(np.argmax(z))
    scores = z / rows.temperature[i].numpy()
    kept = kept_by_hand(scores, int(rows.top_k[i]), float(rows.top_p[i]), float(rows.min_p[i]))
    return max(kept, key=lambda v: (float(scores[v]) + float(noise[v]), -v))


# -- the draw ---------------------------------------------------------------------------------------------------------------------------------


def test_ten_thousand_small_cases_equal_a_plain_float64_rendering() -> None:
    cases = 0
    for seed in range(40):
        rows = random_rows(250, 1 + seed, seed, ties=seed % 2 == 0)
        noise = reference.gumbel(rows.keys, rows.t, 1 + seed).numpy()
        expected = [draw_by_hand(rows, i, noise[i]) for i in range(250)]
        assert reference.gumbel_argmax(*rows.args(), 1 + seed).tolist() == expected, f"seed {seed}"
        cases += 250
    assert cases == 10_000


def kept_ids(scores: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    mask = reference.kept_mask(torch.tensor([scores]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return mask[0].nonzero().flatten().tolist()


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids() -> None:
    assert kept_ids([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3) == [0, 1, 3]
    assert kept_ids([0.0, -0.0, 0.0], top_k=2) == [0, 1]
    assert kept_ids([1.0, 2.0], top_k=9) == [0, 1]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert kept_ids([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept_ids([0.0] * 4, top_p=0.5000001) == [0, 1, 2]
    assert kept_ids([0.0, 5.0, 0.0], top_p=1e-9) == [1]


def test_top_p_is_taken_of_what_top_k_left_and_min_p_of_the_largest() -> None:
    # Of ten equal ids top-k leaves four, and half of their mass is two.
    assert kept_ids([0.0] * 10, top_k=4, top_p=0.5) == [0, 1]
    log = [float(x) for x in np.log([0.5, 0.3, 0.15, 0.05])]
    assert kept_ids(log, min_p=0.25) == [0, 1, 2]
    assert kept_ids(log, min_p=1.0) == [0]


def test_a_row_without_a_sound_logit_draws_minus_one_and_harms_no_other() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [0.0, -inf, 1.0]])
    rows = Rows(logits, torch.zeros(4), *(random_rows(4, 3, 0, False).args()[2:]))
    for warmth in (0.0, 1.0):
        rows.temperature = torch.full((4,), warmth)
        for features in (GREEDY, SAMPLED, FILTERS):
            y = reference.gumbel_argmax(*rows.args(), 3, 0, features).tolist()
            assert y[:3] == [-1, -1, -1] and y[3] in (0, 2)
    assert reference.gumbel_argmax(*rows.args(), 1).tolist()[:2] == [0, 0]  # what lies above the limit is not looked at


def test_features_only_skip_work() -> None:
    rows = random_rows(64, 33, 5, ties=True)
    rows.top_k.zero_()
    rows.top_p.fill_(1)
    rows.min_p.zero_()
    assert torch.equal(reference.gumbel_argmax(*rows.args(), 33, 0, SAMPLED), reference.gumbel_argmax(*rows.args(), 33, 0, FILTERS))
    rows.temperature.zero_()
    assert torch.equal(reference.gumbel_argmax(*rows.args(), 33, 0, GREEDY), reference.gumbel_argmax(*rows.args(), 33, 0, FILTERS))


def test_draws_follow_the_softmax_of_the_kept_set() -> None:
    draws, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -3.0])
    ones = torch.ones(draws)
    keys = torch.tensor([[3, 4]], dtype=torch.int32).expand(draws, 2)
    t = torch.arange(draws, dtype=torch.int32)
    y = reference.gumbel_argmax(logits.expand(draws, 6), ones * 0.7, (ones * 4).to(torch.int32), ones, ones * 0, keys, t, 6)
    law = torch.softmax(logits[:4] / 0.7, 0).double()
    counts = torch.bincount(y, minlength=6).double()
    assert counts[4:].sum() == 0
    assert float(((counts[:4] - draws * law) ** 2 / (draws * law)).sum()) < 16.3  # chi-square, 3 degrees of freedom, one in a thousand


def small_tiles(monkeypatch: pytest.MonkeyPatch, tile: int = 32, processors: int | None = None) -> None:
    """Tiles far below the width of a test's rows."""
    for module in (kernel, filters):
        monkeypatch.setattr(module, "TILE", tile)
        if processors is not None:
            monkeypatch.setattr(module, "sm_count", lambda _: processors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in (5, 6, 7, 8))])
def test_sampler_kernel_equals_the_reference(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = [1, 3, 15, 16, 37, 64, 100, 129, 250][seed]
    rows = random_rows(8 if device == "cpu" else 64, vocab, seed, ties=seed % 2 == 0)
    rows.logits[0, 0], rows.logits[1, -1], rows.logits[2] = float("nan"), float("inf"), float("-inf")
    limit = vocab if seed % 3 else max(1, vocab - 2)
    small_tiles(monkeypatch, processors=100 if seed % 2 else 1)  # a program for each tile, or several tiles for a program
    for features in (GREEDY, SAMPLED, FILTERS):
        expected = reference.gumbel_argmax(*rows.args(), limit, 0, features)
        got = kernel.gumbel_argmax(*rows.to(device).args(), limit, 0, features)
        assert got.tolist() == expected.tolist(), features


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups, capacity", [(8, 16), (16, 64), (64, 4)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_rows_are_cut_or_searched_with_the_same_result(device: str, groups: int, capacity: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds from groups of several tokens, and room for fewer tokens than some rows keep."""
    small_tiles(monkeypatch)
    monkeypatch.setattr(filters, "GROUPS", groups)
    monkeypatch.setattr(filters, "CAPACITY", capacity)
    rows = random_rows(10, 230, 40 + seed, ties=seed % 2 == 0)
    rows.temperature.clamp_(min=0.1)
    rows.min_p.mul_(torch.arange(10) % 3 == 0)
    expected = reference.gumbel_argmax(*rows.args(), 230)
    assert kernel.gumbel_argmax(*rows.to(device).args(), 230).tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_every_way_of_a_filtered_row_gives_the_token_of_the_law(device: str) -> None:
    """Over 2,500 tokens: top-k within the small sort, the large sort, and beyond what is gathered; top-p of peaked, flat and tied rows; min-p alone;
    no filter; greedy; all at once; a NaN."""
    vocab = 2500
    rows = random_rows(14, vocab, 9, ties=False)
    rows.temperature.fill_(0.8)
    rows.logits = torch.where(rows.logits.isinf(), -9.0, rows.logits)
    rows.logits[4] *= 0.01  # flat
    rows.logits[5] = 0.5  # all equal
    rows.logits[6] = (rows.logits[6] * 0.5).round()
    rows.logits[13, 7] = float("nan")
    rows.top_k = torch.tensor([50, 400, 2300, 0, 0, 0, 0, 0, 0, 40, 40, 1, 300, 5], dtype=torch.int32)
    rows.top_p = torch.tensor([1, 1, 1, 0.6, 0.9, 0.4, 0.95, 1, 1, 1, 0.95, 0.5, 0.7, 0.9])
    rows.min_p = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0.02, 0, 0, 0.01, 0, 0, 0])
    rows.temperature[9] = 0.0
    expected = reference.gumbel_argmax(*rows.args(), vocab).tolist()
    assert expected[13] == -1 and expected[9] == int(rows.logits[9].argmax())
    assert kernel.gumbel_argmax(*rows.to(device).args(), vocab).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_sampler_kernel_sums_the_mass_of_top_k_where_bounds_do_not_decide(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 16
    rows = random_rows(calls, 90, 77, ties=True)
    rows.logits = (torch.arange(90) % 7 * -0.1).expand(calls, 90).contiguous()  # nearly flat, full of ties at every border
    rows.temperature.fill_(1.3)
    rows.top_k.fill_(40)
    rows.top_p = torch.linspace(0.1, 0.95, calls)
    rows.min_p.zero_()
    small_tiles(monkeypatch)
    monkeypatch.setattr(filters, "CAPACITY", 16)  # less than top-k: the rows are searched
    expected = reference.gumbel_argmax(*rows.args(), 90)
    assert kernel.gumbel_argmax(*rows.to(device).args(), 90).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 8


@pytest.mark.parametrize("device", DEVICES)
def test_sampler_kernel_reads_half_precision_and_rows_of_a_wider_buffer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    rows = random_rows(6, 70, 3, ties=False)
    wide = torch.cat([rows.logits, torch.full((6, 9), 99.0)], 1).to(torch.float16)
    rows.logits = wide[:, :70]
    moved = rows.to(device)
    moved.logits = wide.to(device)[:, :70]
    assert kernel.gumbel_argmax(*moved.args(), 70).tolist() == reference.gumbel_argmax(*rows.args(), 70).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_one_entry_of_parameters_may_serve_the_nodes_of_a_request(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(topk_kernel, "TILE", 32)
    nodes, few = 3, random_rows(4, 50, 21, ties=True)
    logits = random_rows(4 * nodes, 50, 22, ties=True).logits
    whole = Rows(logits, *(x.repeat_interleave(nodes, 0) for x in few.args()[1:]))
    # Parameters as columns of one table, as the engine keeps them, and a t for each node.
    table = torch.stack([few.temperature, few.top_p, few.min_p], 1).to(device)
    ints = torch.cat([few.top_k[:, None], few.keys], 1).to(device)
    t = torch.arange(4 * nodes, dtype=torch.int32, device=device)
    shared = (table[:, 0], ints[:, 0], table[:, 1], table[:, 2], ints[:, 1:], t)
    whole.t = t.cpu()
    expected = reference.gumbel_argmax(*whole.args(), 50)
    assert reference.gumbel_argmax(logits, *(x.cpu() for x in shared), 50).tolist() == expected.tolist()
    assert kernel.gumbel_argmax(logits.to(device), *shared, 50).tolist() == expected.tolist()
    draft = (table[:, 0], ints[:, 1:], few.t.to(device))
    best = reference.draft_argmax(logits, whole.temperature, whole.keys, few.t.repeat_interleave(nodes))
    assert reference.draft_argmax(logits, *(x.cpu() for x in draft)).tolist() == best.tolist()
    assert kernel.draft_argmax(logits.to(device), *draft).tolist() == best.tolist()
    assert topk_kernel.draft_topk(logits.to(device), 2, *draft)[0][:, 0].tolist() == best.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_kernel_equals_the_reference_at_full_size(dtype: torch.dtype) -> None:
    rows = random_rows(64, 128_256, 1, ties=False)
    rows.logits = rows.logits.to(dtype)
    rows.top_k.clamp_(max=200)
    for features in (GREEDY, SAMPLED, FILTERS):
        expected = reference.gumbel_argmax(*rows.args(), 128_256, 0, features)
        got = kernel.gumbel_argmax(*rows.to("cuda").args(), 128_256, 0, features).cpu()
        if features == GREEDY:
            assert torch.equal(got, expected)
        else:  # a gap below the noise's tolerance may fall either way
            assert int((got != expected).sum()) <= 1


# -- drafts -----------------------------------------------------------------------------------------------------------------------------------


def test_a_draft_with_the_targets_logits_proposes_what_the_target_draws() -> None:
    rows = random_rows(200, 50, 9, ties=True)
    y = reference.gumbel_argmax(*rows.args(), 50, 0, SAMPLED)
    assert torch.equal(reference.draft_argmax(rows.logits, rows.temperature, rows.keys, rows.t), y)
    assert torch.equal(reference.draft_topk(rows.logits, 3, rows.temperature, rows.keys, rows.t)[0][:, 0], y)


def test_a_reduced_vocabulary_draft_uses_the_noise_of_its_target_ids() -> None:
    rows = random_rows(100, 60, 10, ties=False)
    ids = torch.arange(0, 60, 2, dtype=torch.int32) + 1
    full = torch.full_like(rows.logits, float("-inf"))
    full[:, ids] = rows.logits[:, ids]
    got = reference.draft_argmax(rows.logits[:, ids], rows.temperature, rows.keys, rows.t, ids)
    assert torch.equal(got, reference.draft_argmax(full, rows.temperature, rows.keys, rows.t))


def test_draft_topk_gives_log_softmax_of_the_perturbed_scores_best_first() -> None:
    rows = random_rows(50, 40, 11, ties=True)
    tokens, logp = reference.draft_topk(rows.logits, 5, rows.temperature, rows.keys, rows.t)
    noise = reference.gumbel(rows.keys, rows.t, 40).numpy()
    for i in range(50):
        heat = rows.temperature[i].numpy()
        scores = rows.logits[i].numpy() if heat == 0 else rows.logits[i].numpy() / heat + noise[i]
        order = sorted(range(40), key=lambda v: (-scores[v], v))[:5]
        normaliser = np.log(np.exp(scores.astype(np.float64) - float(scores.max())).sum()) + float(scores.max())
        assert tokens[i].tolist() == order
        np.testing.assert_allclose(logp[i].numpy(), scores[order].astype(np.float64) - normaliser, atol=1e-5)
    assert bool((logp <= 0).all())


def test_a_draft_from_broken_logits_is_still_a_real_id() -> None:
    broken = torch.tensor([[float("nan"), 1.0, float("inf")], [float("-inf")] * 3, [float("nan")] * 3])
    keys, t = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    assert reference.draft_argmax(broken, None, keys, t).tolist() == [2, 0, 0]
    tokens, logp = reference.draft_topk(broken, 2, None, keys, t)
    assert tokens.tolist() == [[2, 1], [0, 1], [0, 1]]
    assert not bool(torch.isnan(logp).any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "k"), [(4, 4), (37, 1), (64, 3), pytest.param(150, 7, marks=pytest.mark.slow)])
def test_draft_kernels_equal_the_reference(device: str, vocab: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(topk_kernel, "TILE", 32)
    rows = random_rows(12, vocab, vocab, ties=vocab % 2 == 0)
    rows.logits[0, 0], rows.logits[1, 1], rows.logits[2] = float("nan"), float("inf"), float("-inf")
    ids = (torch.arange(vocab) * 3 + 2).to(torch.int32)
    moved = rows.to(device)
    for heat in (None, rows.temperature):
        on = None if heat is None else heat.to(device)
        for mapped in (None, ids):
            there = None if mapped is None else mapped.to(device)
            expected = reference.draft_argmax(rows.logits, heat, rows.keys, rows.t, mapped)
            assert kernel.draft_argmax(moved.logits, on, moved.keys, moved.t, there).tolist() == expected.tolist()
            tokens, logp = reference.draft_topk(rows.logits, k, heat, rows.keys, rows.t, mapped)
            got, got_logp = topk_kernel.draft_topk(moved.logits, k, on, moved.keys, moved.t, there)
            assert got.tolist() == tokens.tolist()
            torch.testing.assert_close(got_logp.cpu(), logp, atol=2e-5, rtol=1e-5)
            assert bool((got_logp <= 0).all())


# -- penalties, bias, masks -------------------------------------------------------------------------------------------------------------------


def tables(slots: int, vocab: int, seed: int) -> reference.LawTables:
    g = torch.Generator().manual_seed(seed)
    bias = torch.randn(slots, vocab, generator=g)
    bias[torch.rand(slots, vocab, generator=g) < 0.1] = float("-inf")
    return reference.LawTables(
        repetition=torch.rand(slots, generator=g) + 0.5,
        presence=torch.randn(slots, generator=g),
        frequency=torch.randn(slots, generator=g),
        prompt_seen=torch.rand(slots, vocab, generator=g) < 0.3,
        output_count=torch.randint(0, 3, (slots, vocab), generator=g).to(torch.int32),
        bias=bias,
        min_tokens=torch.randint(0, 5, (slots,), generator=g).to(torch.int32),
        stop_ids=torch.randint(-1, vocab, (slots, 3), generator=g).to(torch.int32),
    )


def adjusted_by_hand(z: float, v: int, slot: int, law: reference.LawTables, path: list[int], length: int, limit: int) -> float:
    """One logit in float64, step by step."""
    count = int(law.output_count[slot, v]) + path.count(v)  # type: ignore[index]
    if count or bool(law.prompt_seen[slot, v]):  # type: ignore[index]
        z = z / float(law.repetition[slot]) if z > 0 else z * float(law.repetition[slot])  # type: ignore[index]
    z -= float(law.frequency[slot]) * count + float(law.presence[slot]) * (count > 0)  # type: ignore[index]
    z += float(law.bias[slot, v])  # type: ignore[index]
    stopped = length < int(law.min_tokens[slot]) and v in law.stop_ids[slot].tolist()  # type: ignore[index]
    return float("-inf") if stopped or v >= limit else z


@pytest.mark.parametrize("reduced", [False, True])
def test_every_adjusted_logit_equals_the_steps_done_by_hand(reduced: bool) -> None:
    vocab, nodes, slots = 41, 30, 4
    law = tables(slots, vocab, 0)
    g = torch.Generator().manual_seed(1)
    ids = torch.arange(0, vocab, 3) if reduced else torch.arange(vocab)
    logits = torch.randn(nodes, len(ids), generator=g)
    slot = torch.randint(0, slots, (nodes,), generator=g)
    path = torch.randint(-1, vocab, (nodes, 4), generator=g).to(torch.int32)
    length = torch.randint(0, 6, (nodes,), generator=g).to(torch.int32)
    got = reference.adjust_logits(logits.clone(), slot, law, path, length, vocab - 2, ids=ids.to(torch.int32) if reduced else None)
    expected = [
        [adjusted_by_hand(float(logits[n, i]), int(v), int(slot[n]), law, path[n].tolist(), int(length[n]), vocab - 2) for i, v in enumerate(ids)]
        for n in range(nodes)
    ]
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_a_token_drafted_twice_on_the_path_counts_twice_and_only_below_it() -> None:
    law = reference.LawTables(torch.ones(1), torch.zeros(1), torch.ones(1), torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.int32))
    path = torch.tensor([[-1, -1], [3, -1], [3, 3], [3, 1]], dtype=torch.int32)
    got = reference.adjust_logits(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long), law, path, None, 5)
    assert got.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, -1, 0], [0, 0, 0, -2, 0], [0, -1, 0, -1, 0]]


def test_a_grammar_mask_bans_the_ids_whose_bit_is_clear() -> None:
    bits = torch.tensor([[0b101, 0b10]], dtype=torch.int32)
    got = reference.adjust_logits(torch.zeros(1, 40), torch.zeros(1, dtype=torch.long), reference.LawTables(), None, None, 40, bits)
    assert (got[0] == 0).nonzero().flatten().tolist() == [0, 2, 33]


def test_min_tokens_bans_stop_ids_until_the_length_is_reached_and_ignores_ids_outside_the_vocabulary() -> None:
    law = reference.LawTables(min_tokens=torch.tensor([2]), stop_ids=torch.tensor([[1, -1, 700]], dtype=torch.int32))
    length = torch.tensor([0, 1, 2], dtype=torch.int32)
    got = reference.adjust_logits(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), law, None, length, 4)
    assert torch.isinf(got).tolist() == [[False, True, False, False], [False, True, False, False], [False] * 4]


def test_committed_tokens_are_counted_once_each_and_only_the_kept_ones() -> None:
    counts = torch.zeros(3, 6, dtype=torch.int32)
    tokens = torch.tensor([[4, 4, 2], [5, 1, -1]], dtype=torch.int32)
    reference.commit_counts(counts, torch.tensor([2, 0]), tokens, torch.tensor([2, 1], dtype=torch.int32))
    assert counts.tolist() == [[0, 0, 0, 0, 0, 1], [0] * 6, [0, 0, 0, 0, 2, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", ["all", "bias", "penalties", "min_tokens", "mask", "one row"])
def test_adjust_kernel_equals_the_reference(device: str, parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_kernel, "TILE", 32)
    vocab, nodes = 75, 9
    law = tables(1 if parts == "one row" else 4, vocab, 3)
    groups = {"bias": ["bias"], "min_tokens": ["min_tokens", "stop_ids"], "mask": []}
    groups["penalties"] = ["repetition", "presence", "frequency", "prompt_seen", "output_count"]
    if parts in groups:
        law = reference.LawTables(**{name: getattr(law, name) for name in groups[parts]})
    g = torch.Generator().manual_seed(4)
    slot = torch.randint(0, 4, (nodes,), generator=g)
    path = torch.randint(-1, vocab, (nodes, 3), generator=g).to(torch.int32)
    length = torch.randint(0, 6, (nodes,), generator=g).to(torch.int32)
    bits = torch.randint(-(2**31), 2**31, (nodes, 3), generator=g).to(torch.int32) if parts in ("all", "mask") else None
    there = reference.LawTables(**{f.name: None if getattr(law, f.name) is None else getattr(law, f.name).to(device) for f in fields(law)})
    for ids in (None, torch.arange(1, vocab, 2, dtype=torch.int32)):
        logits = torch.randn(nodes, vocab if ids is None else len(ids), generator=g)
        expected = reference.adjust_logits(logits.clone(), slot, law, path, length, vocab - 1, bits, ids)
        moved = [None if x is None else x.to(device) for x in (path, length, bits, ids)]
        got = law_kernel.adjust_logits(logits.clone().to(device), slot.to(device), there, moved[0], moved[1], vocab - 1, moved[2], moved[3])
        torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-6)
