"""Draft trees: golden vectors by hand, brute force on random trees, malformed input, walks, and the topk = 1 chain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specgen.draft import tree
from specgen.errors import ConfigError
from specgen.kernels import reference_tree as reference
from specgen.kernels import tree as kernel
from specgen.kernels.reference_sampling import stable_topk
from specgen.types import Draft

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = [pytest.param((m, d), id=f"{n}-{d}", marks=g) for n, m, d, g in [
    ("reference", reference, "cpu", ()), ("kernel", kernel, "cpu", ()), ("kernel", kernel, "cuda", pytest.mark.gpu)]]  # fmt: skip


def grow(batch: int, topk: int, num_steps: int, seed: int, ties: bool = False, vocab: int = 12) -> tree.Growth:
    """A tree of random children; with ``ties`` the logits are rounded, so that scores tie."""
    g = torch.Generator().manual_seed(seed)

    def children(*shape: int) -> tuple[Tensor, Tensor]:
        logits = torch.randn(*shape, max(vocab, topk), generator=g)
        logp, index = stable_topk(torch.log_softmax(logits.round() if ties else logits, -1), topk)
        return index.to(torch.int32), logp

    growth = tree.Growth(*children(batch), topk)
    for _ in range(num_steps - 1):
        growth.extend(*children(batch, topk))
    return growth


def organize(growth: tree.Growth, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    return tree.organize_draft_results(growth.all_scores, growth.all_tokens, growth.parents, nodes)


# -- golden trees -----------------------------------------------------------------------------------------------------------------------------

# (topk, num_steps, parent_list, index, parents, depth, first_child, next_sibling, paths)
GOLDEN = {
    # Depth 1: candidates 0, 1. Depth 2: 2, 3 under 0 and 4, 5 under 1; kept 2 and 4. Depth 3: 6, 7 under 2 and 8, 9 under 4.
    "two branches of three": (
        2, 3, [-1, 0, 1, 2, 4], [0, 1, 2, 4, 6, 8],
        [0, 0, 1, 2, 3, 4], [0, 1, 1, 2, 2, 3, 3], [1, 3, 4, 5, 6, -1, -1], [-1, 2, -1, -1, -1, -1, -1],
        [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 2, 4, 6]],
    ),
    # Depth 1: candidates 0 .. 3, three of them chosen. Depth 2: 4 .. 7 under 0, 8 .. 11 under 1, 12 .. 15 under 2.
    "wide and shallow": (
        4, 2, [-1, 0, 1, 2, 3], [0, 1, 2, 4, 5, 9, 14],
        [0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 2, 2, 2, 2], [1, 4, 6, 7, -1, -1, -1, -1], [-1, 2, 3, -1, 5, -1, -1, -1],
        [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 3, 7]],
    ),
    "a chain of four": (
        1, 4, [-1, 0, 1, 2], [0, 1, 2, 3],
        [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, -1], [-1] * 5,
        [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]],
    ),
    "one step": (3, 1, [], [0, 2], [0, 0], [0, 1, 1], [1, -1, -1], [-1, 2, -1], [[0], [0, 1], [0, 2]]),
}  # fmt: skip


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trees(op: tuple[object, str], name: str) -> None:
    module, device = op
    topk, steps, parent_list, index, parents, depth, first_child, next_sibling, paths = GOLDEN[name]
    padded = [p + [-1] * (steps + 1 - len(p)) for p in paths]
    lists = torch.tensor([parent_list], dtype=torch.long).view(1, -1), torch.tensor([index])
    got = module.build_tree(*(x.to(device) for x in lists), topk, steps)  # type: ignore[attr-defined]
    assert [x[0].tolist() for x in got] == [parents, padded, depth, first_child, next_sibling, 0]
    assert all(x.dtype == torch.int32 for x in got)


# -- against brute force ----------------------------------------------------------------------------------------------------------------------


def parent_by_hand(parent_list: list[int], index: list[int], topk: int) -> list[int]:
    """Parent node of each selected candidate; -1 where it is not among the earlier ones."""
    node_of: dict[int, int] = {}
    parents = []
    for place, candidate in enumerate(index):
        group = candidate // topk
        if candidate < 0 or group >= max(1, len(parent_list)):
            parents.append(-1)
        elif group == 0:
            parents.append(0)
        else:
            parents.append(node_of.get(parent_list[group], -1) if parent_list[group] >= 0 else -1)
        node_of.setdefault(candidate, place + 1)
    return parents


def tree_by_hand(parent_list: list[int], index: list[int], topk: int, num_steps: int) -> tuple[list[int], list[list[int]], int]:
    """(parents, paths, dropped) by following parents one at a time."""
    raw = [-1, *parent_by_hand(parent_list, index, topk)]
    paths: list[list[int]] = []
    for node in range(len(raw)):
        walk = [node]
        while walk[-1] > 0:
            walk.append(raw[walk[-1]])
        good = walk[-1] == 0 and len(walk) <= num_steps + 1
        paths.append(walk[::-1] if good else [0])
    alive = [node == 0 or len(paths[node]) > 1 for node in range(len(raw))]
    return [raw[n] if alive[n] else -1 for n in range(1, len(raw))], paths, alive.count(False)


def check_tree(got: tuple[Tensor, ...], parent_list: Tensor, index: Tensor, topk: int, num_steps: int) -> None:
    parents, path, depth, first_child, next_sibling, dropped = (x.cpu() for x in got)
    for b in range(index.shape[0]):
        want, paths, lost = tree_by_hand(parent_list[b].tolist(), index[b].tolist(), topk, num_steps)
        assert parents[b].tolist() == want
        assert path[b].tolist() == [p + [-1] * (num_steps + 1 - len(p)) for p in paths]
        assert depth[b].tolist() == [len(p) - 1 for p in paths]
        assert int(dropped[b]) == lost
        children = [[c for c, p in enumerate(want, 1) if p == node] for node in range(len(paths))]
        assert first_child[b].tolist() == [c[0] if c else -1 for c in children]
        after = {c: n for group in children for c, n in pairwise(group)}
        assert next_sibling[b].tolist() == [after.get(node, -1) for node in range(len(paths))]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    topk, steps = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    most = tree.max_draft_tokens(topk, steps)
    nodes = draw(st.integers(2, min(most, 40)))
    return topk, steps, nodes, draw(st.integers(0, 10_000))


@given(shapes(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_selection_is_the_best_by_score_then_number_and_closed_under_parents(shape: tuple[int, int, int, int], ties: bool) -> None:
    topk, steps, nodes, seed = shape
    growth = grow(2, topk, steps, seed, ties)
    parent_list, index, tokens = organize(growth, nodes)
    assert parent_list.shape == (2, topk * (steps - 1) + 1 if steps > 1 else 0) and parent_list.dtype == index.dtype == torch.int64
    scores = torch.cat([s.flatten(1) for s in growth.all_scores], 1)
    flat = torch.cat([t.flatten(1) for t in growth.all_tokens], 1)
    for b in range(2):
        best = sorted(range(scores.shape[1]), key=lambda i: (-float(scores[b, i]), i))[: nodes - 1]
        assert index[b].tolist() == sorted(best)
        assert tokens[b].tolist() == flat[b, index[b]].tolist()
    got = reference.build_tree(parent_list, index, topk, steps)
    assert got[5].tolist() == [0, 0]
    check_tree(got, parent_list, index, topk, steps)


@given(shapes(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_kernels_grow_select_and_build_as_the_reference_does(shape: tuple[int, int, int, int], ties: bool) -> None:
    check_kernels(shape, ties, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 2, 4, 10])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_kernels_on_a_gpu_grow_select_and_build_as_the_reference_does(topk: int, steps: int) -> None:
    most = tree.max_draft_tokens(topk, steps)
    for nodes in {2, min(most, 17), min(most, 64), min(most, 300)}:
        check_kernels((topk, steps, nodes, nodes), True, "cuda", batch=33)


def check_kernels(shape: tuple[int, int, int, int], ties: bool, device: str, batch: int = 2) -> None:
    topk, steps, nodes, seed = shape
    growth = grow(batch, topk, steps, seed, ties)
    parent_list, index, _ = organize(growth, nodes)
    scores = torch.cat([s.flatten(1) for s in growth.all_scores], 1).to(device)
    assert kernel.select_ascending(scores, nodes - 1).tolist() == index.tolist()
    expected = reference.build_tree(parent_list, index, topk, steps)
    got = kernel.build_tree(parent_list.to(device), index.to(device), topk, steps)
    assert [x.tolist() for x in got] == [x.tolist() for x in expected]
    logp = -torch.rand(batch, topk, topk, generator=torch.Generator().manual_seed(seed))
    for ours, theirs in zip(kernel.expand(growth.scores.to(device), logp.to(device)), reference.expand(growth.scores, logp), strict=True):
        assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(6))
def test_malformed_candidates_are_dropped_and_counted_and_never_linked(op: tuple[object, str], seed: int) -> None:
    module, device = op
    topk, steps, nodes = 3, 4, 14
    g = torch.Generator().manual_seed(seed)
    parent_list = torch.randint(-2, 40, (4, topk * (steps - 1) + 1), generator=g)
    index = torch.randint(-3, 60, (4, nodes - 1), generator=g)
    index = index.sort(1).values if seed % 2 else index
    got = module.build_tree(parent_list.to(device), index.to(device), topk, steps)  # type: ignore[attr-defined]
    check_tree(got, parent_list, index, topk, steps)
    assert int(got[5].sum()) > 0


def test_dropped_nodes_are_added_to_the_counter() -> None:
    lost = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        tree.build_tree(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 5]]), torch.tensor([[7, 8]]), 2, 2, lost)
    assert int(lost) == 2  # candidate 5 hangs from candidate 1, which was not selected


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_ties_go_to_the_smaller_flat_index_and_a_nan_is_never_preferred(op: tuple[object, str]) -> None:
    module, device = op
    logp = torch.tensor([[[-1.0, -1.0, -2.0], [0.0, -1.0, float("nan")], [-1.0, -1.0, -1.0]]]).to(device)
    total, kept, flat = module.expand(torch.tensor([[0.0, -1.0, 0.0]]).to(device), logp)  # type: ignore[attr-defined]
    assert flat.tolist() == [[0, 1, 3]] and kept.tolist() == [[-1.0, -1.0, -1.0]]
    assert total[0, :5].tolist() == [-1.0, -1.0, -2.0, -1.0, -2.0]
    assert module.select_ascending(total, 8).tolist() == [[0, 1, 2, 3, 4, 6, 7, 8]]  # type: ignore[attr-defined]


def test_positions_depths_and_node_counts_of_a_built_draft() -> None:
    draft = grow(3, 4, 3, 0).build(10)
    assert draft.token_ids.shape == (3, 9) and draft.token_ids.dtype == torch.int32
    assert draft.path is not None and draft.path.shape == (3, 10, 4)
    assert draft.depth is not None and tree.draft_depth(draft).tolist() == draft.depth.max(1).values.tolist()
    chain = Draft(torch.zeros(2, 3, dtype=torch.int32))
    assert tree.draft_depth(chain).tolist() == [3, 3]
    chain.valid = torch.tensor([[True, False, False], [True, True, True]])
    assert tree.draft_depth(chain).tolist() == [1, 3]


@pytest.mark.parametrize(("topk", "steps", "default", "most"), [(1, 4, 5, 5), (4, 3, 13, 37), (8, 30, 128, 1865), (3, 1, 4, 4)])
def test_node_counts(topk: int, steps: int, default: int, most: int) -> None:
    assert (tree.default_draft_tokens(topk, steps), tree.max_draft_tokens(topk, steps)) == (default, most)
    tree.check_draft_tokens(topk, steps, default)
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens=2000"):
        tree.check_draft_tokens(topk, steps, 2000)


def test_more_nodes_than_candidates_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens=9 is more than the draft's 6 candidates and the root"):
        organize(grow(1, 2, 2, 0), 9)


# -- walking ----------------------------------------------------------------------------------------------------------------------------------


def walk_by_hand(tokens: list[int], parents: list[int], y: list[int], num_steps: int) -> tuple[list[int], int, bool]:
    path = [0]
    while True:
        children = [c for c, p in enumerate(parents, 1) if p == path[-1]]
        fitting = [c for c in children if tokens[c - 1] == y[path[-1]] >= 0]
        if not fitting or len(path) > num_steps:
            return path + [-1] * (num_steps + 1 - len(path)), len(path) - 1, bool(children)
        path.append(fitting[0])


def check_walk(op: Callable[..., tuple[Tensor, ...]], parents: list[list[int]], steps: int, seed: int, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(seed)
    batch, drafted = len(parents), len(parents[0])
    tokens = torch.randint(0, 3, (batch, drafted), generator=g).to(torch.int32)
    y = torch.randint(-1, 3, (batch, drafted + 1), generator=g).to(torch.int32)
    first = torch.full((batch, drafted + 1), -1, dtype=torch.int32)
    following = first.clone()
    for b, row in enumerate(parents):
        for node in range(drafted + 1):
            children = [c for c, p in enumerate(row, 1) if p == node]
            if children:
                first[b, node] = children[0]
            for c, after in pairwise(children):
                following[b, c] = after
    path, accepted, more = op(*(x.to(device) for x in (tokens, first, following, y)), steps)
    expected = [walk_by_hand(tokens[b].tolist(), parents[b], y[b].tolist(), steps) for b in range(batch)]
    assert [path.tolist(), accepted.tolist(), more.tolist()] == [[e[i] for e in expected] for i in range(3)]
    assert (path.dtype, accepted.dtype, more.dtype) == (torch.int32, torch.int32, torch.bool)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """Random parents (0 .. node - 1, or -1 = no node) of a few rows, their depth, and a seed."""
    drafted, batch = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rows, deepest = [], 1
    for _ in range(batch):
        depth, row = {0: 0}, []
        for node in range(1, drafted + 1):
            parent = draw(st.sampled_from([-1, *depth]))
            row.append(parent)
            if parent >= 0:
                depth[node] = depth[parent] + 1
        rows.append(row)
        deepest = max(deepest, *depth.values())
    return rows, deepest, draw(st.integers(0, 10_000))


@given(forests())
@settings(max_examples=150, deadline=None)
def test_walking_equals_a_plain_descent(case: tuple[list[list[int]], int, int]) -> None:
    check_walk(reference.tree_walk, *case)


@given(forests())
@settings(max_examples=40, deadline=None)
def test_the_walking_kernel_equals_a_plain_descent(case: tuple[list[list[int]], int, int]) -> None:
    check_walk(kernel.tree_walk, *case)


@pytest.mark.gpu
def test_the_walking_kernel_on_a_gpu_equals_a_plain_descent() -> None:
    for seed in range(20):
        draft = grow(40, 4, 5, seed).build(40)
        assert draft.parents is not None
        check_walk(kernel.tree_walk, draft.parents.tolist(), 5, seed, "cuda")


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_chain_is_walked_as_the_tree_it_is(op: tuple[object, str], masked: bool) -> None:
    module, device = op
    g = torch.Generator().manual_seed(int(masked))
    for steps in (1, 2, 5):
        tokens = torch.randint(0, 2, (50, steps), generator=g).to(torch.int32)
        y = torch.randint(-1, 2, (50, steps + 1), generator=g).to(torch.int32)
        valid = torch.arange(steps) < torch.randint(0, steps + 1, (50, 1), generator=g) if masked else None
        there = None if valid is None else valid.to(device)
        got = module.chain_walk(tokens.to(device), there, y.to(device))  # type: ignore[attr-defined]
        exists = torch.ones(50, steps, dtype=torch.bool) if valid is None else valid
        parents = torch.where(exists, torch.arange(steps), -1).tolist()
        expected = [walk_by_hand(tokens[b].tolist(), parents[b], y[b].tolist(), steps) for b in range(50)]
        assert [x.tolist() for x in got] == [[e[i] for e in expected] for i in range(3)]


def test_a_node_that_does_not_exist_is_never_accepted_even_when_its_token_fits() -> None:
    tokens, y = torch.tensor([[5, 5]], dtype=torch.int32), torch.full((1, 3), 5, dtype=torch.int32)
    none = torch.full((1, 3), -1, dtype=torch.int32)
    path, accepted, more = reference.tree_walk(tokens, none, none, y, 2)
    assert (path.tolist(), accepted.tolist(), more.tolist()) == ([[0, -1, -1]], [0], [False])


def test_path_tokens_lists_the_drafted_tokens_down_to_each_node() -> None:
    tokens = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    path = torch.tensor([[[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3]]], dtype=torch.int32)
    assert reference.path_tokens(tokens, path).tolist() == [[-1, -1], [7, -1], [8, -1], [7, 9]]
    assert reference.path_tokens(tokens, None).tolist() == [[-1] * 3, [7, -1, -1], [7, 8, -1], [7, 8, 9]]


# -- the chain --------------------------------------------------------------------------------------------------------------------------------

LIMIT = 80


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("batch", [1, 2, 3, 64, LIMIT, LIMIT + 1])
def test_the_fast_chain_equals_the_general_path(steps: int, batch: int) -> None:
    buffers = tree.rebuild_topk1_chain_buffers(steps, LIMIT, "cpu", steps + 1)
    growth = grow(batch, 1, steps, steps * 100 + batch)
    lists = growth.all_scores, growth.all_tokens, growth.parents
    general, fast = tree.organize_draft_results(*lists, steps + 1), buffers.results(growth.all_tokens)
    for ours, theirs in zip(fast, general, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
        assert torch.equal(ours, theirs)
    assert fast[0].shape == (batch, steps if steps > 1 else 0) and fast[0].dtype == torch.int64
    built, chained = tree.build_tree(*fast, 1, steps), tree.build_tree(*general, 1, steps)
    assert built.parents is not None and torch.equal(built.parents, chained.parents)
    assert built.parents.tolist() == [list(range(steps))] * batch


class Names(TorchDispatchMode):
    """Records which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_fast_chain_runs_two_slices_and_one_cat() -> None:
    buffers, growth = tree.rebuild_topk1_chain_buffers(5, LIMIT, "cpu"), grow(4, 1, 5, 0)
    with Names() as names:
        buffers.results(growth.all_tokens)
    assert names.seen == ["slice", "slice", "cat"]
    with Names() as general:
        organize(growth, 6)
    assert {"topk", "sort", "gather"} <= set(general.seen)


def test_a_chain_verifies_one_node_more_than_it_drafts() -> None:
    with pytest.raises(AssertionError, match="num_steps \\+ 1"):
        tree.rebuild_topk1_chain_buffers(4, 8, "cpu", 4)


# -- index checks -----------------------------------------------------------------------------------------------------------------------------


def test_indices_out_of_range_are_collected_and_raised_later_by_name() -> None:
    checks = tree.IndexChecks("cpu")
    tree.detect_oob(checks, "parent_list", torch.tensor([-1, 0, 3]), -1, 4)
    tree.detect_oob(checks, "empty", torch.empty(0, dtype=torch.long), 0, 1)
    tree.detect_oob(checks, "absent", None, 0, 1)
    tree.detect_oob(None, "off", torch.tensor([99]), 0, 1)
    checks.raise_if_any()
    for _ in range(2):
        tree.detect_oob(checks, "index", torch.tensor([[0, 4], [-1, 2]]), 0, 4)
    with pytest.raises(IndexError, match=r"index tensors out of range: index: 4 outside \[0, 4\)$"):
        checks.raise_if_any()
