"""Properties of the forward ops: references against dense float64 computation, kernels against references.

Without a GPU the kernels run in Triton's interpreter (float32 and float16; it multiplies bfloat16 wrongly); with one the same tests run compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from specgen.kernels import activation, attention, kv, linear, norm_rope, ops, reference  # noqa: E402
from specgen.kernels.attention import AttentionConfig  # noqa: E402
from specgen.kernels.linear import LinearConfig  # noqa: E402

KERNELS = SimpleNamespace(
    tree_attention=attention.tree_attention,
    packed_attention=attention.packed_attention,
    linear=linear.linear,
    rms_norm=norm_rope.rms_norm,
    add_rms_norm=norm_rope.add_rms_norm,
    argmax_rows=activation.argmax_rows,
    embed=activation.embed,
    compact_kv=kv.compact_kv,
)
BOTH = [pytest.param(reference, id="reference"), pytest.param(KERNELS, id="kernels")]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.float16, id="fp16")]


def assert_close(name: str, expected: Tensor, got: Tensor, ratio: float) -> None:
    """The root mean square difference is at most ``ratio`` of the root mean square of ``expected``, and nothing is NaN."""
    assert expected.shape == got.shape, (name, expected.shape, got.shape)
    expected, got = expected.double().cpu(), got.double().cpu()
    assert bool(torch.isfinite(got).all()), f"{name}: not finite"
    error = (expected - got).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-12)
    assert float(error) <= ratio, f"{name}: relative error {float(error):.2e} above {ratio:.0e}"


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values that are the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.int32, device=DEVICE)


class Paged:
    """Rows of random KV in a paged pool with shuffled pages; page 0 is scratch and belongs to no row."""

    def __init__(self, lengths: list[int], spare: int, kv_heads: int, key_dim: int, value_dim: int, page: int, dtype: torch.dtype) -> None:
        rows, self.page = len(lengths), page
        width = max(1, -(-(max(lengths) + spare) // page)) + 1
        pages = torch.randperm(rows * width, generator=torch.Generator().manual_seed(9)) + 1
        self.table = pages.view(rows, width).int().to(DEVICE)
        slots = (rows * width + 1) * page
        self.k = randn(slots, kv_heads, key_dim, seed=10, dtype=dtype)
        self.v = randn(slots, kv_heads, value_dim, seed=11, dtype=dtype)
        self.length = ints(lengths)
        self.max_len = max(lengths) + spare

    def slot(self, row: int, index: int) -> int:
        return int(self.table[row, index // self.page]) * self.page + index % self.page


def random_paths(rows: int, nodes: int, depth: int, seed: int, dead: float = 0.0) -> Tensor:
    """Ancestor paths [rows, nodes, depth + 1] int32 of random trees: node 0 is the root, a parent precedes its child, some nodes are absent."""
    generator = torch.Generator().manual_seed(seed)
    path = torch.full((rows, nodes, depth + 1), -1, dtype=torch.int32)
    for row in range(rows):
        alive, depths = [0], {0: 0}
        path[row, 0, 0] = 0
        for node in range(1, nodes):
            if float(torch.rand(1, generator=generator)) < dead:
                continue
            parents = [p for p in alive if depths[p] < depth]
            parent = parents[int(torch.randint(len(parents), (1,), generator=generator))]
            depths[node] = depths[parent] + 1
            path[row, node] = path[row, parent]
            path[row, node, depths[node]] = node
            alive.append(node)
    return path.to(DEVICE)


@dataclass(frozen=True)
class Case:
    """One attention problem. ``chunks`` is set for packed prefill, else each row has ``q_len`` queries."""

    lengths: list[int]
    q_len: int = 1
    kv_heads: int = 2
    group: int = 1
    key_dim: int = 16
    value_dim: int = 16
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    chunks: tuple[int, ...] = ()

    def build(self, dtype: torch.dtype) -> SimpleNamespace:
        """The tensors, and ``args``: everything after the queries, in the ops' order."""
        cache = Paged(self.lengths, max(self.chunks, default=self.q_len), self.kv_heads, self.key_dim, self.value_dim, self.page, dtype)
        tokens = sum(self.chunks) or len(self.lengths) * self.q_len
        q = randn(tokens, self.kv_heads * self.group, self.key_dim, seed=1, dtype=dtype)
        sinks = randn(self.kv_heads * self.group, seed=2) if self.sinks else None
        path = random_paths(len(self.lengths), self.q_len, 4, seed=3, dead=0.2) if self.tree else None
        cu = ints([sum(self.chunks[:i]) for i in range(len(self.chunks) + 1)])
        queries = (cu, max(self.chunks)) if self.chunks else (self.q_len, path)
        scale = self.key_dim**-0.5
        args = (cache.k, cache.v, cache.table, cache.length, *queries, self.page, cache.max_len, scale, self.window, self.softcap, sinks)
        return SimpleNamespace(cache=cache, q=q, sinks=sinks, path=path, args=args, scale=scale)

    def run(self, implementation: Any, problem: SimpleNamespace, **options: Any) -> Tensor:
        op = implementation.packed_attention if self.chunks else implementation.tree_attention
        return op(problem.q, *problem.args, **options)

    def dense(self, problem: SimpleNamespace) -> Tensor:
        """The definition, query by query and head by head in float64, sharing nothing with the reference."""
        out, token = [], 0
        for row, length in enumerate(self.lengths):
            for i in range(self.chunks[row] if self.chunks else self.q_len):
                if problem.path is None:
                    keys = [(j, j) for j in range(length + i + 1)]
                else:
                    nodes = [(length + n, length + p) for p, n in enumerate(problem.path[row, i].tolist()) if n >= 0]
                    keys = [(j, j) for j in range(length)] + nodes if nodes else []
                out.append(self._one(problem, problem.q[token].cpu().double(), row, keys))
                token += 1
        return torch.stack(out)

    def _one(self, problem: SimpleNamespace, q: Tensor, row: int, keys: list[tuple[int, int]]) -> Tensor:
        """One query [H, Dk] over (table index, position) keys, the last key being its own."""
        out = torch.zeros(self.kv_heads * self.group, self.value_dim, dtype=torch.float64)
        slots = [problem.cache.slot(row, index) for index, at in keys if self.window == 0 or keys[-1][1] - at < self.window]
        for head in range(len(out) if slots else 0):
            scores = problem.cache.k[slots, head // self.group].cpu().double() @ q[head] * problem.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.sinks:
                scores = torch.cat([scores, problem.sinks[head].cpu().double().view(1)])
            out[head] = scores.softmax(0)[: len(slots)] @ problem.cache.v[slots, head // self.group].cpu().double()
        return out


CASES = {
    "one-query": Case([7], page=1),
    "one-query-empty-row": Case([0, 20], kv_heads=1, group=4, page=4),
    "chain-G3-unequal": Case([0, 5, 33], q_len=3, group=3, key_dim=32, value_dim=32, page=4),
    "chain-sinks-Dv64": Case([40, 1, 17], q_len=5, kv_heads=1, group=4, value_dim=64, sinks=True),
    "chain-window6-softcap": Case([40, 3, 70], q_len=5, group=4, window=6, softcap=30.0),
    "chain-D128-window2-sinks": Case([2, 9, 80], q_len=3, kv_heads=1, key_dim=128, value_dim=128, window=2, sinks=True),
    "chain-D48": Case([12], q_len=2, key_dim=48, value_dim=24),
    "chain-from-before-the-beginning": Case([-2, 33, -1, -3], q_len=3, group=3, page=4, window=2),
    "tree-G3": Case([0, 5, 33], q_len=5, group=3, key_dim=32, value_dim=32, page=4, tree=True),
    "tree-softcap-sinks": Case([61, 3, 20], q_len=13, group=4, key_dim=64, value_dim=64, softcap=20.0, sinks=True, tree=True),
    "tree-window3": Case([61, 3, 20], q_len=13, kv_heads=1, group=4, page=1, window=3, tree=True),
    "tree-40-nodes": Case([35], q_len=40, kv_heads=1, group=4, tree=True),
    "packed-first-chunk": Case([0], chunks=(7,), group=3, page=4),
    "packed-from-before-the-beginning": Case([-3, 30, -2], chunks=(19, 4, 2), group=4, page=4),
    "packed-three-rows": Case([0, 30, 5], chunks=(19, 1, 70), group=4, key_dim=32, value_dim=32),
    "packed-window7-softcap-sinks": Case(
        [8, 0, 3], chunks=(5, 40, 1), kv_heads=1, key_dim=64, value_dim=64, page=1, window=7, softcap=25.0, sinks=True
    ),
}
CASE_PARAMETERS = [pytest.param(case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("fixed_split", [None, 16])
@pytest.mark.parametrize("case", CASE_PARAMETERS)
def test_reference_attention_equals_dense(case: Case, fixed_split: int | None) -> None:
    problem = case.build(torch.float32)
    assert_close("attention", case.dense(problem), case.run(reference, problem, fixed_split=fixed_split), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASE_PARAMETERS)
def test_attention_kernel_equals_reference(case: Case, dtype: torch.dtype) -> None:
    problem = case.build(dtype)
    assert_close("attention", case.run(reference, problem), case.run(KERNELS, problem), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(AttentionConfig(16, 16, 4, 2, splits=1), id="tile16"),
        pytest.param(AttentionConfig(32, 32, 4, 2, splits=2), id="tile32-2splits-one-kernel"),
        pytest.param(AttentionConfig(16, 16, 4, 2, splits=4, fused=False), id="4splits-two-kernels"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chain-G3-unequal", marks=pytest.mark.slow),
        "chain-window6-softcap",
        "chain-sinks-Dv64",
        pytest.param("tree-G3", marks=pytest.mark.slow),
        "tree-window3",
        "tree-40-nodes",
    ],
)
def test_attention_kernel_equals_reference_for_every_tile_and_split(name: str, config: AttentionConfig) -> None:
    case = CASES[name]
    problem = case.build(torch.float32)
    assert_close("attention", case.run(reference, problem), case.run(KERNELS, problem, config=config), TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["chain-window6-softcap", "tree-G3", "tree-window3", "packed-first-chunk", "packed-window7-softcap-sinks"])
def test_fixed_split_kernel_equals_reference(name: str) -> None:
    case = CASES[name]
    problem = case.build(torch.float32)
    assert_close("attention", case.run(reference, problem), case.run(KERNELS, problem, fixed_split=64), TOLERANCE[torch.float32])


def chain_inside_a_tree(steps: int, nodes: int) -> Tensor:
    """A tree of ``nodes`` that holds the chain 0, 2, 4, .. as one branch; every other node hangs off the root."""
    path = torch.full((1, nodes, steps), -1, dtype=torch.int32)
    branch = [0]
    path[0, 0, 0] = 0
    for node in range(1, nodes):
        if node % 2 == 0 and len(branch) < steps:
            branch.append(node)
            path[0, node, : len(branch)] = torch.tensor(branch, dtype=torch.int32)
        else:
            path[0, node, :2] = torch.tensor([0, node], dtype=torch.int32)
    return path.to(DEVICE)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (0, 62)), 97])
def test_fixed_split_gives_the_same_bits_alone_in_a_batch_in_a_chain_in_a_tree_and_in_a_prefill(
    implementation, length: int, with_sinks: bool
) -> None:
    dim, kv_heads, heads, page, steps = 32, 2, 6, 16, 3
    nodes = 2 * steps
    cache = Paged([length, 40, 3], nodes, kv_heads, dim, dim, page, torch.float32)
    queries, other = randn(nodes, heads, dim, seed=5), randn(2 * steps, heads, dim, seed=6)
    options = {"scale": dim**-0.5, "sinks": randn(heads, seed=7) if with_sinks else None, "fixed_split": 64}
    table, here = cache.table[:1], cache.length[:1]

    def attend(
        q: Tensor, table: Tensor, length: Tensor, q_len: int, path: Tensor | None, bound: int, k: Tensor = cache.k, v: Tensor = cache.v
    ) -> Tensor:
        return implementation.tree_attention(q, k, v, table, length, q_len, path, page, bound, **options)

    for bound in (128, 160):
        alone = torch.cat([attend(queries[step : step + 1], table, here + step, 1, None, bound) for step in range(steps)])
        if bound == 128:
            expected = alone
        assert torch.equal(expected, alone), "the bound on the length changed the bits"
    batch = attend(torch.cat([queries[:steps], other]), cache.table, cache.length, steps, None, 128)
    assert torch.equal(expected, batch[:steps]), "a batch of chains"
    cu = ints(0, steps)
    packed = implementation.packed_attention(queries[:steps], cache.k, cache.v, table, here, cu, steps, page, 128, **options)
    assert torch.equal(expected, packed), "a prefill"
    # In the tree the chain's keys stand at other slots: node 2 i of the window is its step i.
    k_pool, v_pool, q_tree = cache.k.clone(), cache.v.clone(), torch.zeros_like(queries)
    for step in range(steps):
        k_pool[cache.slot(0, length + 2 * step)] = cache.k[cache.slot(0, length + step)]
        v_pool[cache.slot(0, length + 2 * step)] = cache.v[cache.slot(0, length + step)]
        q_tree[2 * step] = queries[step]
    tree = attend(q_tree, table, here, nodes, chain_inside_a_tree(steps, nodes), 128, k_pool, v_pool)
    assert torch.equal(expected, tree[0::2]), "a tree"


@pytest.mark.parametrize("name", ["chain-sinks-Dv64", "tree-G3"])
def test_fixed_split_gives_the_same_bits_in_one_program_a_row_or_in_one_a_chunk(name: str, monkeypatch) -> None:
    case = CASES[name]
    problem = case.build(torch.float32)
    monkeypatch.setattr(attention, "sm_count", lambda device: 1 << 20)
    by_chunk = case.run(KERNELS, problem, fixed_split=64)
    monkeypatch.setattr(attention, "sm_count", lambda device: 0)
    assert torch.equal(by_chunk, case.run(KERNELS, problem, fixed_split=64))


def test_reference_refuses_a_path_beyond_the_slots_a_kernel_can_hold() -> None:
    cache = Paged([3], 300, 1, 16, 16, 16, torch.float32)
    path = torch.tensor([[[0, 256]]], dtype=torch.int32)
    with pytest.raises(ValueError, match="a path names window slot 256; slots reach to 255"):
        reference.tree_attention(
            torch.zeros(1, 1, 16), cache.k.cpu(), cache.v.cpu(), cache.table.cpu(), cache.length.cpu(), 1, path, 16, cache.max_len, 0.25
        )


@pytest.mark.parametrize("implementation", BOTH)
def test_a_node_without_a_path_attends_to_nothing_and_gives_zeros(implementation) -> None:
    cache = Paged([20, 0], 3, 1, 16, 16, 4, torch.float32)
    path = ints([[[0, -1], [-1, -1], [0, 2]], [[-1, -1], [-1, -1], [-1, -1]]])
    sinks = randn(4, seed=2)
    out = implementation.tree_attention(
        randn(6, 4, 16, seed=1), cache.k, cache.v, cache.table, cache.length, 3, path, 4, cache.max_len, 0.25, sinks=sinks
    )
    dead = [1, 3, 4, 5]
    assert torch.equal(out[dead], torch.zeros(4, 4, 16, device=DEVICE))
    assert bool((out[[0, 2]].abs().amax((1, 2)) > 0).all())


@pytest.mark.parametrize("implementation", BOTH)
def test_a_draft_window_may_be_wider_than_its_queries(implementation) -> None:
    """The second level of a draft tree: 3 queries whose ancestors stand among 6 window slots."""
    case = Case([21], q_len=3, group=2)
    problem = case.build(torch.float32)
    problem.cache.max_len = 27
    problem.path = ints([[[0, 3], [0, 4], [2, 5]]])
    cache = problem.cache
    out = implementation.tree_attention(problem.q, cache.k, cache.v, cache.table, cache.length, 3, problem.path, 16, 27, problem.scale)
    assert_close("attention", case.dense(problem), out, TOLERANCE[torch.float32])


@pytest.mark.parametrize("implementation", BOTH)
def test_nan_in_slots_nobody_sees_does_not_spread(implementation) -> None:
    case = Case([21, 3], q_len=2, group=2, page=4)
    problem = case.build(torch.float32)
    expected = case.run(implementation, problem)
    cache = problem.cache
    owned = [cache.slot(row, j) for row, length in enumerate(case.lengths) for j in range(length + case.q_len)]
    stale = torch.ones(len(cache.k), dtype=torch.bool, device=DEVICE)
    stale[owned] = False
    cache.k[stale], cache.v[stale] = float("nan"), float("nan")
    assert torch.equal(expected, case.run(implementation, problem))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "kv_heads", "key_dim", "value_dim"), [(1, 1, 16, 16), (5, 3, 24, 64)])
def test_write_kv_writes_the_named_slots_and_no_other(tokens: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    # K and V as the heads-first layout of transformers leaves them: not contiguous.
    k, v = (randn(kv_heads, tokens, d, seed=d, dtype=dtype).transpose(0, 1) for d in (key_dim, value_dim))
    slots = torch.arange(tokens, device=DEVICE) * 3 + 4
    expected_k, expected_v = (
        torch.zeros(40, kv_heads, key_dim, device=DEVICE, dtype=dtype),
        torch.zeros(40, kv_heads, value_dim, device=DEVICE, dtype=dtype),
    )
    for i, slot in enumerate(slots.tolist()):
        expected_k[slot], expected_v[slot] = k[i], v[i]
    for write in (reference.write_kv, kv.write_kv):
        k_pool, v_pool = torch.zeros_like(expected_k), torch.zeros_like(expected_v)
        write(k, v, k_pool, v_pool, slots)
        assert torch.equal(k_pool, expected_k) and torch.equal(v_pool, expected_v)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("implementation", BOTH)
def test_compact_kv_moves_an_overlapping_path_to_the_front_and_nothing_else(implementation, stacked: bool) -> None:
    cache = Paged([9, 0, 30, 6], 9, 2, 16, 32, 4, torch.float32)
    k_all, v_all = torch.stack([cache.k, cache.k + 1]), torch.stack([cache.v, cache.v + 1])
    path = ints([[0, 2, 3, 7, 8], [0, 1, 2, -1, -1], [0, 5, -1, -1, -1], [0, -1, -1, -1, -1]])
    accepted = ints(4, 2, 1, 0)
    expected_k, expected_v = k_all.clone(), v_all.clone()
    for row, length in enumerate([9, 0, 30, 6]):
        for i in range(1, int(accepted[row]) + 1):
            source, target = cache.slot(row, length + int(path[row, i])), cache.slot(row, length + i)
            expected_k[:, target], expected_v[:, target] = k_all[:, source], v_all[:, source]
    pools = (k_all, v_all) if stacked else (list(k_all), list(v_all))
    implementation.compact_kv(*pools, cache.table, cache.length, path, accepted, 4)
    assert torch.equal(k_all, expected_k) and torch.equal(v_all, expected_v)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (3, 100), (5, 576)])
def test_norm_kernels_equal_reference(tokens: int, hidden: int, dtype: torch.dtype, plus_one: bool) -> None:
    x, residual, weight = randn(tokens, hidden, seed=1, dtype=dtype), randn(tokens, hidden, seed=2, dtype=dtype), randn(hidden, seed=3, dtype=dtype)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5, plus_one)
    got, got_total = norm_rope.add_rms_norm(x, residual, weight, 1e-5, plus_one)
    assert torch.equal(total, got_total)
    assert_close("add_rms_norm", expected, got, TOLERANCE[dtype])
    first, same = norm_rope.add_rms_norm(x, None, weight, 1e-5, plus_one)
    assert torch.equal(same, x)
    assert torch.equal(first, norm_rope.rms_norm(x, weight, 1e-5, plus_one))
    assert_close("rms_norm", reference.rms_norm(x, weight, 1e-5, plus_one), first, TOLERANCE[dtype])


@pytest.mark.parametrize("plus_one", [False, True])
def test_reference_norm_equals_dense_and_gives_each_row_the_same_bits_in_any_batch(plus_one: bool) -> None:
    x, weight = randn(7, 96, seed=1), randn(96, seed=2)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + (1 if plus_one else 0))
    got = reference.rms_norm(x, weight, 1e-6, plus_one)
    assert_close("rms_norm", expected, got, 1e-6)
    assert torch.equal(got, torch.cat([reference.rms_norm(row[None], weight, 1e-6, plus_one) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "norms", "plus_one"),
    [
        pytest.param(4, 2, 16, 16, False, False, id="plain"),
        pytest.param(9, 3, 32, 32, True, False, id="head-norms"),
        pytest.param(3, 1, 64, 32, True, True, id="half-rotary-gemma-norms"),
        pytest.param(12, 12, 80, 20, False, False, id="quarter-rotary-D80"),
    ],
)
def test_rope_kernel_equals_reference(heads: int, kv_heads: int, dim: int, rotary: int, norms: bool, plus_one: bool, dtype: torch.dtype) -> None:
    tokens = 3
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, seed=1, dtype=dtype)
    angles = torch.arange(50, device=DEVICE)[:, None] / 100.0 ** (torch.arange(0, rotary, 2, device=DEVICE) / rotary)
    weights = [randn(dim, seed=s, dtype=dtype) if norms else None for s in (2, 3)]
    positions, slots = ints(0, 49, 7), torch.tensor([5, 2, 9], device=DEVICE)
    outputs = []
    for op in (reference.rope_write_kv, norm_rope.rope_write_kv):
        k_pool, v_pool = (torch.zeros(12, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
        q = op(qkv, angles.cos(), angles.sin(), positions, slots, k_pool, v_pool, heads, kv_heads, dim, *weights, 1e-6, plus_one)
        outputs.append((q, k_pool, v_pool))
    for name, expected, got in zip(("q", "k", "v"), *outputs, strict=True):
        assert_close(name, expected, got, TOLERANCE[dtype])
    assert torch.equal(outputs[0][2], outputs[1][2])


def test_reference_rope_turns_each_pair_by_its_angle_and_keeps_the_rest() -> None:
    """Channel c and c + R / 2 are one complex number multiplied by exp(i position theta_c); channels beyond R are untouched."""
    dim, rotary, position = 12, 8, 3
    qkv = randn(1, 3 * dim, seed=4)
    theta = torch.tensor([0.9, 0.5, 0.2, 0.05], device=DEVICE)
    angles = torch.arange(5, device=DEVICE)[:, None] * theta
    k_pool, v_pool = torch.zeros(2, 1, dim, device=DEVICE), torch.zeros(2, 1, dim, device=DEVICE)
    q = reference.rope_write_kv(qkv, angles.cos(), angles.sin(), ints([position]), torch.tensor([1], device=DEVICE), k_pool, v_pool, 1, 1, dim)
    for name, source, got in (("q", qkv[0, :dim], q[0, 0]), ("k", qkv[0, dim : 2 * dim], k_pool[1, 0])):
        turned = torch.complex(source[:4].double(), source[4:8].double()) * torch.exp(1j * position * theta.double())
        assert_close(name, torch.cat([turned.real, turned.imag, source[8:].double()]), got, 1e-6)
    assert torch.equal(v_pool[1, 0], qkv[0, 2 * dim :])
    assert torch.equal(k_pool[0], torch.zeros(1, dim, device=DEVICE))
    assert rotary == 2 * len(theta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 2500])
def test_gated_activations_equal_reference(width: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * width, seed=1, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    for name, function, dense in (
        ("silu_mul", "silu_mul", F.silu(gate) * up),
        ("gelu_tanh_mul", "gelu_tanh_mul", F.gelu(gate, approximate="tanh") * up),
    ):
        assert_close(name, dense, getattr(reference, function)(gate_up), TOLERANCE[dtype])
        assert_close(name, getattr(reference, function)(gate_up), getattr(activation, function)(gate_up), TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", BOTH)
def test_embed_copies_rows_and_gives_zeros_for_ids_outside_the_vocabulary(implementation) -> None:
    weight = randn(10, 100, seed=1)
    got = implementation.embed(ints(3, -1, 9, 10, 0), weight)
    zero = torch.zeros(100, device=DEVICE)
    assert torch.equal(got, torch.stack([weight[3], zero, weight[9], zero, weight[0]]))


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("vocabulary", [5, 300, 20000])
def test_argmax_gives_ties_to_the_lowest_id_and_never_takes_nan(implementation, vocabulary: int) -> None:
    logits = randn(6, vocabulary, seed=1)
    logits[1, [vocabulary - 1, 2]] = 50.0
    logits[2] = float("-inf")
    logits[3] = float("nan")
    logits[4, 1], logits[4, 3] = float("nan"), float("inf")
    logits[5] = -7.0
    expected = [int(logits[0].argmax()), 2, 0, 0, 3, 0]
    got = implementation.argmax_rows(logits)
    assert got.dtype == torch.int32
    assert got.tolist() == expected


STREAM_CONFIGS = [
    pytest.param(LinearConfig(16, 32, 1, 4, 2), id="plain"),
    pytest.param(LinearConfig(32, 32, 2, 4, 2), id="2-shares"),
    pytest.param(LinearConfig(32, 16, 5, 4, 2, swap=True), id="5-shares-swapped"),
]


@pytest.mark.parametrize("config", STREAM_CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns", "depth"), [(1, 48, 64), (3, 70, 100), (33, 40, 96)])
def test_streaming_linear_equals_reference(tokens: int, columns: int, depth: int, dtype: torch.dtype, config: LinearConfig) -> None:
    x, weight = randn(tokens, depth, seed=1, dtype=dtype), randn(columns, depth, seed=2, dtype=dtype)
    bias, residual = randn(columns, seed=3, dtype=dtype), randn(tokens, columns, seed=4, dtype=dtype)
    dense = x.double() @ weight.double().T
    assert_close("linear", dense, linear.stream_linear(x, weight, config=config), TOLERANCE[dtype])
    assert_close("linear", dense + bias + residual, linear.stream_linear(x, weight, bias, residual, config), TOLERANCE[dtype])
    assert_close("reference", dense + bias + residual, reference.linear(x, weight, bias, residual), TOLERANCE[dtype])


@pytest.mark.parametrize("swap", [False, True])
def test_gated_streaming_linear_equals_reference(swap: bool) -> None:
    x, weight, bias = randn(3, 100, seed=1), randn(2 * 40, 100, seed=2), randn(80, seed=3)
    got = linear.stream_linear(x, weight, bias, config=LinearConfig(16, 32, 1, 4, 2, swap=swap), gated=True)
    assert_close("linear_silu_mul", reference.linear_silu_mul(x, weight, bias), got, TOLERANCE[torch.float32])


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("depth", [96, 1100])
def test_deterministic_linear_gives_a_row_the_same_bits_for_every_number_of_tokens(implementation, depth: int) -> None:
    x, weight = randn(70, depth, seed=1), randn(40, depth, seed=2)
    expected = implementation.linear(x, weight, deterministic=True)
    assert_close("linear", x.double() @ weight.double().T, expected, TOLERANCE[torch.float32])
    for tokens in (1, 2, 15, 17, 64, 65):
        assert torch.equal(expected[:tokens], implementation.linear(x[:tokens], weight, deterministic=True)), tokens
    assert torch.equal(expected[69:], implementation.linear(x[69:], weight, deterministic=True))


def test_deterministic_linear_adds_the_same_shares_in_one_program_or_in_many(monkeypatch) -> None:
    """With many tiles the shares of K are summed in a loop, with few by the last of several programs: the bits agree."""
    x, weight = randn(5, 2500, seed=1), randn(40, 2500, seed=2)
    monkeypatch.setattr(linear, "sm_count", lambda device: 132)
    split = linear.linear(x, weight, deterministic=True)
    monkeypatch.setattr(linear, "sm_count", lambda device: 0)
    assert torch.equal(split, linear.linear(x, weight, deterministic=True))


def test_the_measured_table_decides_which_linear_runs(monkeypatch) -> None:
    x, weight = randn(3, 64, seed=1), randn(32, 64, seed=2)
    chosen = LinearConfig(16, 32, 2, 4, 2)
    monkeypatch.setattr(linear, "_table", {"32x64:4:float32": chosen})
    used = []
    real = linear.stream_linear
    monkeypatch.setattr(linear, "stream_linear", lambda *a, **k: used.append(a[4]) or real(*a, **k))
    assert_close("linear", F.linear(x, weight), linear.linear(x, weight), TOLERANCE[torch.float32])
    linear.linear(randn(5, 64, seed=1), weight)
    linear.linear(randn(65, 64, seed=1), weight)
    assert used == [chosen], "only 2 to 4 rows have an entry"


def test_the_door_opens_to_the_kernels_only_when_both_switches_are_set(monkeypatch) -> None:
    monkeypatch.delenv("SPECGEN_FORCE_TRITON", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not ops.use_triton(torch.device("cpu"))
    monkeypatch.setenv("SPECGEN_FORCE_TRITON", "1")
    assert ops.use_triton(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not ops.use_triton(torch.device("cpu"))
    assert ops.use_triton(torch.device("cuda"))


# On a GPU: bfloat16 at the sizes of an 8B model.

GPU_CASES = {
    "decode": Case([400, 3, 129, 0] * 8, kv_heads=8, group=4, key_dim=128, value_dim=128),
    "verify-4": Case([400, 3, 129, 511] * 16, q_len=4, kv_heads=8, group=4, key_dim=128, value_dim=128),
    "verify-6-one-row": Case([384], q_len=6, kv_heads=8, group=4, key_dim=128, value_dim=128),
    "verify-16": Case([384, 20], q_len=16, kv_heads=8, group=4, key_dim=128, value_dim=128),
    "deep": Case([8192, 5000], q_len=4, kv_heads=8, group=4, key_dim=128, value_dim=128),
    "tree-16": Case([400, 3, 129, 511], q_len=16, kv_heads=8, group=4, key_dim=128, value_dim=128, tree=True),
    "tree-60": Case([400, 3], q_len=60, kv_heads=8, group=4, key_dim=128, value_dim=128, tree=True),
    "gpt-oss": Case([700, 20], q_len=4, kv_heads=8, group=8, key_dim=64, value_dim=64, window=128, sinks=True),
    "gemma2": Case([700, 20], q_len=4, kv_heads=4, group=2, key_dim=256, value_dim=256, window=300, softcap=50.0),
    "prefill": Case([0, 300, 17], chunks=(700, 1, 513), kv_heads=8, group=4, key_dim=128, value_dim=128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_split", [None, 256])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in GPU_CASES.items()])
def test_gpu_attention_in_bfloat16_equals_reference(case: Case, fixed_split: int | None) -> None:
    problem = case.build(torch.bfloat16)
    expected = case.run(reference, problem)
    for _ in range(3):  # counters of the one-kernel merge must be back at zero
        assert_close("attention", expected, case.run(KERNELS, problem, fixed_split=fixed_split), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["verify-4", "verify-6-one-row", "tree-16"])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("fused", [True, False])
def test_gpu_attention_replays_in_a_graph_at_other_lengths(name: str, splits: int, fused: bool) -> None:
    case = GPU_CASES[name]
    problem = case.build(torch.bfloat16)
    config = AttentionConfig(64, 64 if case.tree else 32, 4, 2, splits, fused)
    case.run(KERNELS, problem, config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(KERNELS, problem, config=config)
    for shorter in (0, 1, 77, 383):
        problem.cache.length.sub_(shorter).clamp_(min=0)
        graph.replay()
        assert_close("attention", case.run(reference, problem), out, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 255, 700])
def test_gpu_fixed_split_in_bfloat16_gives_the_same_bits_in_decode_and_prefill(length: int) -> None:
    case = Case([length], chunks=(40,), kv_heads=8, group=4, key_dim=128, value_dim=128)
    problem = case.build(torch.bfloat16)
    cache = problem.cache
    prefill = case.run(KERNELS, problem, fixed_split=256)
    for start in (0, 4, 36):
        rows = problem.q[start : start + 4]
        chain = attention.tree_attention(
            rows, cache.k, cache.v, cache.table, cache.length + start, 4, None, 16, cache.max_len, problem.scale, fixed_split=256
        )
        assert torch.equal(prefill[start : start + 4], chain), start


@pytest.mark.gpu
@pytest.mark.parametrize("config", linear.CANDIDATES)
@pytest.mark.parametrize("tokens", [1, 8, 24, 64])
def test_gpu_streaming_linear_in_bfloat16_equals_reference(config: LinearConfig, tokens: int) -> None:
    x, weight = randn(tokens, 4096, seed=1, dtype=torch.bfloat16), randn(6144, 4096, seed=2, dtype=torch.bfloat16)
    for _ in range(2):
        assert_close("linear", x.double() @ weight.double().T, linear.stream_linear(x, weight, config=config), TOLERANCE[torch.bfloat16])
    if config.split == 1:
        got = linear.stream_linear(x, weight, config=config, gated=True)
        assert_close("linear_silu_mul", reference.linear_silu_mul(x, weight), got, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_gpu_deterministic_linear_in_bfloat16_gives_a_row_the_same_bits_for_every_number_of_tokens() -> None:
    x, weight = randn(2100, 4096, seed=1, dtype=torch.bfloat16), randn(1024, 4096, seed=2, dtype=torch.bfloat16)
    expected = linear.linear(x, weight, deterministic=True)
    assert_close("linear", x.double() @ weight.double().T, expected, TOLERANCE[torch.bfloat16])
    for tokens in (1, 4, 63, 64, 65, 300, 2048):
        assert torch.equal(expected[:tokens], linear.linear(x[:tokens], weight, deterministic=True)), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 300])
def test_gpu_small_kernels_in_bfloat16_equal_reference(tokens: int) -> None:
    bf16, ratio = torch.bfloat16, TOLERANCE[torch.bfloat16]
    x, residual, weight = randn(tokens, 4096, seed=1, dtype=bf16), randn(tokens, 4096, seed=2, dtype=bf16), randn(4096, seed=3, dtype=bf16)
    for expected, got in zip(reference.add_rms_norm(x, residual, weight, 1e-5), norm_rope.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert_close("add_rms_norm", expected, got, ratio)
    gate_up = randn(tokens, 2 * 14336, seed=4, dtype=bf16)
    assert_close("silu_mul", reference.silu_mul(gate_up), activation.silu_mul(gate_up), ratio)
    logits = randn(tokens, 128256, seed=5, dtype=bf16)
    for _ in range(2):
        assert torch.equal(reference.argmax_rows(logits), activation.argmax_rows(logits))
