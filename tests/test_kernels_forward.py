"""Properties of the forward ops: references against dense float64 computation, kernels against references.

Without a GPU the kernels run in Triton's interpreter (float32 and float16; it multiplies bfloat16 wrongly), with one the same tests run compiled.
"""

from __future__ import annotations

import os
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

KERNELS = SimpleNamespace(
    tree_attention=attention.tree_attention, packed_attention=attention.packed_attention, linear=linear.linear, rms_norm=norm_rope.rms_norm
)
BOTH = [pytest.param(reference, id="reference"), pytest.param(KERNELS, id="kernels")]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def assert_close(name: str, expected: Tensor, got: Tensor, ratio: float) -> None:
    """The root mean square difference is at most ``ratio`` of the root mean square of ``expected``, and nothing is NaN."""
    assert expected.shape == got.shape, (name, expected.shape, got.shape)
    expected, got = expected.double().cpu(), got.double().cpu()
    assert bool(torch.isfinite(got).all()), f"{name}: not finite"
    error = (expected - got).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt().clamp_min(1e-12)
    assert float(error) <= ratio, f"{name}: relative error {float(error):.2e} above {ratio:.0e}"


class Paged:
    """Rows of random KV in a paged pool with shuffled pages; page 0 is scratch and belongs to no row."""

    def __init__(
        self, lengths: list[int], spare: int, kv_heads: int, key_dim: int, value_dim: int, page: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows, self.page = len(lengths), page
        width = max(1, -(-(max(lengths) + spare) // page)) + 1
        self.table = (torch.randperm(rows * width, generator=generator) + 1).view(rows, width).int().to(DEVICE)
        slots = (rows * width + 1) * page
        self.k = torch.randn(slots, kv_heads, key_dim, generator=generator).to(DEVICE, dtype)
        self.v = torch.randn(slots, kv_heads, value_dim, generator=generator).to(DEVICE, dtype)
        self.length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
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
    return path


def dense_attention(
    q: Tensor, cache: Paged, row: int, keys: list[tuple[int, int]], position: int, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """One query [H, Dk] of a row over (table index, position) keys, head by head in float64: the definition, with nothing shared with the reference."""
    keys = [(index, at) for index, at in keys if window == 0 or position - at < window]
    out = torch.zeros(q.shape[0], cache.v.shape[2], dtype=torch.float64)
    if not keys:
        return out
    slots = [cache.slot(row, index) for index, _ in keys]
    group = q.shape[0] // cache.k.shape[1]
    for head in range(q.shape[0]):
        scores = cache.k[slots, head // group].double() @ q[head].double() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().view(1)])
        weights = scores.softmax(0)[: len(slots)]
        out[head] = weights @ cache.v[slots, head // group].double()
    return out


def dense_tree(q: Tensor, cache: Paged, q_len: int, path: Tensor | None, scale: float, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    out = []
    for row, length in enumerate(cache.length.tolist()):
        for i in range(q_len):
            if path is None:
                extra = [(length + n, length + n) for n in range(i + 1)]
            else:
                extra = [(length + n, length + p) for p, n in enumerate(path[row, i].tolist()) if n >= 0]
            keys = [(j, j) for j in range(length)] + extra if extra else []
            out.append(dense_attention(q[row * q_len + i], cache, row, keys, extra[-1][1] if extra else 0, scale, window, softcap, sinks))
    return torch.stack(out)


ATTENTION_CASES = [
    # lengths, q_len, kv_heads, group, key_dim, value_dim, page, window, softcap, sinks, tree
    pytest.param([7], 1, 2, 1, 16, 16, 1, 0, 0.0, False, False, id="one-query"),
    pytest.param([0, 5, 33], 3, 2, 3, 32, 32, 4, 0, 0.0, False, False, id="chain-G3-unequal"),
    pytest.param([40, 1, 17], 5, 1, 4, 16, 64, 16, 0, 0.0, True, False, id="chain-sinks-Dv64"),
    pytest.param([40, 3, 70], 5, 2, 4, 16, 16, 16, 6, 30.0, False, False, id="chain-window6-softcap"),
    pytest.param([2, 9, 80], 3, 1, 1, 128, 128, 16, 2, 0.0, True, False, id="chain-D128-window2-sinks"),
    pytest.param([0, 5, 33], 5, 2, 3, 32, 32, 4, 0, 0.0, False, True, id="tree-G3"),
    pytest.param([61, 3, 20], 13, 2, 4, 64, 64, 16, 0, 20.0, True, True, id="tree13-softcap-sinks"),
    pytest.param([61, 3, 20], 13, 1, 4, 16, 16, 1, 3, 0.0, False, True, id="tree13-window3"),
    pytest.param([35], 40, 1, 4, 16, 16, 16, 0, 0.0, False, True, id="tree40-many-row-tiles"),
]


def attention_case(lengths: list[int], q_len: int, kv_heads: int, group: int, key_dim: int, value_dim: int, page: int, with_sinks: bool, tree: bool, dtype: torch.dtype):
    cache = Paged(lengths, q_len, kv_heads, key_dim, value_dim, page, dtype)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(lengths) * q_len, kv_heads * group, key_dim, generator=generator).to(dtype)
    sinks = torch.randn(kv_heads * group, generator=generator) if with_sinks else None
    path = random_paths(len(lengths), q_len, 4, seed=2, dead=0.2) if tree else None
    return cache, q, sinks, path


@pytest.mark.parametrize("fixed_split", [None, 16])
@pytest.mark.parametrize(("lengths", "q_len", "kv_heads", "group", "key_dim", "value_dim", "page", "window", "softcap", "with_sinks", "tree"), ATTENTION_CASES)
def test_reference_tree_attention_equals_dense(
    lengths, q_len, kv_heads, group, key_dim, value_dim, page, window, softcap, with_sinks, tree, fixed_split
) -> None:
    cache, q, sinks, path = attention_case(lengths, q_len, kv_heads, group, key_dim, value_dim, page, with_sinks, tree, torch.float32)
    scale = key_dim**-0.5
    expected = dense_tree(q, cache, q_len, path, scale, window, softcap, sinks)
    got = reference.tree_attention(
        q, cache.k, cache.v, cache.table, cache.length, q_len, path, page, cache.max_len, scale, window, softcap, sinks, fixed_split=fixed_split
    )
    assert_close("tree_attention", expected, got, 1e-6)


PACKED_CASES = [
    # lengths, chunks, kv_heads, group, dim, page, window, softcap, sinks
    pytest.param([0], [7], 2, 3, 16, 4, 0, 0.0, False, id="first-chunk"),
    pytest.param([0, 30, 5], [19, 1, 70], 2, 4, 32, 16, 0, 0.0, False, id="three-rows"),
    pytest.param([8, 0, 3], [5, 40, 1], 1, 1, 64, 1, 7, 25.0, True, id="window7-softcap-sinks"),
]


def packed_case(lengths: list[int], chunks: list[int], kv_heads: int, group: int, dim: int, page: int, with_sinks: bool, dtype: torch.dtype):
    cache = Paged(lengths, max(chunks), kv_heads, dim, dim, page, dtype)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(sum(chunks), kv_heads * group, dim, generator=generator).to(dtype)
    sinks = torch.randn(kv_heads * group, generator=generator) if with_sinks else None
    cu = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    return cache, q, sinks, cu


@pytest.mark.parametrize("fixed_split", [None, 16])
@pytest.mark.parametrize(("lengths", "chunks", "kv_heads", "group", "dim", "page", "window", "softcap", "with_sinks"), PACKED_CASES)
def test_reference_packed_attention_equals_dense(lengths, chunks, kv_heads, group, dim, page, window, softcap, with_sinks, fixed_split) -> None:
    cache, q, sinks, cu = packed_case(lengths, chunks, kv_heads, group, dim, page, with_sinks, torch.float32)
    expected = []
    for row, (length, count) in enumerate(zip(lengths, chunks, strict=True)):
        for i in range(count):
            keys = [(j, j) for j in range(length + i + 1)]
            expected.append(dense_attention(q[int(cu[row]) + i], cache, row, keys, length + i, dim**-0.5, window, softcap, sinks))
    got = reference.packed_attention(
        q, cache.k, cache.v, cache.table, cache.length, cu, max(chunks), page, cache.max_len, dim**-0.5, window, softcap, sinks, fixed_split=fixed_split
    )
    assert_close("packed_attention", torch.stack(expected), got, 1e-6)


def chain_path_in_tree(length_of_chain: int, nodes: int) -> Tensor:
    """A tree of ``nodes`` that contains the chain 0, 2, 4, .. as one branch among siblings hanging off the root."""
    path = torch.full((1, nodes, length_of_chain), -1, dtype=torch.int32)
    branch = [0]
    path[0, 0, 0] = 0
    for node in range(1, nodes):
        if node % 2 == 0 and len(branch) < length_of_chain:
            branch.append(node)
            path[0, node, : len(branch)] = torch.tensor(branch, dtype=torch.int32)
        else:
            path[0, node, :2] = torch.tensor([0, node], dtype=torch.int32)
    return path


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("length", [0, 15, 30, 97])
def test_fixed_split_is_bitwise_equal_for_one_query_a_chain_a_tree_a_batch_and_a_prefill(length, with_sinks) -> None:
    """The same token over the same keys gives the same bits however it is batched, drafted or chunked."""
    dim, kv_heads, heads, page, steps = 32, 2, 6, 16, 5
    nodes = 2 * steps
    cache = Paged([length, 40, 3], nodes, kv_heads, dim, dim, page, torch.float32)
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(nodes, heads, dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    other = torch.randn(3 * steps, heads, dim, generator=generator)
    common = {"scale": dim**-0.5, "sinks": sinks, "fixed_split": 32}
    first = cache.table[:1]

    def alone(step: int, bound: int) -> Tensor:
        return ops.tree_attention(queries[step : step + 1], cache.k, cache.v, first, cache.length[:1] + step, 1, None, page, bound, **common)

    expected = torch.cat([alone(step, 128) for step in range(steps)])
    assert torch.equal(expected, torch.cat([alone(step, 160) for step in range(steps)]))
    batch = torch.cat([queries[:steps], other[: 2 * steps]])
    chain = ops.tree_attention(batch, cache.k, cache.v, cache.table, cache.length, steps, None, page, 128, **common)
    assert torch.equal(expected, chain[:steps])
    cu = torch.tensor([0, steps], dtype=torch.int32)
    packed = ops.packed_attention(queries[:steps], cache.k, cache.v, first, cache.length[:1], cu, steps, page, 128, **common)
    assert torch.equal(expected, packed)
    # The tree holds the chain's keys at other slots: node 2 i of the window is the chain's step i.
    tree = chain_path_in_tree(steps, nodes)
    k_pool, v_pool = cache.k.clone(), cache.v.clone()
    q_tree = torch.zeros_like(queries)
    for step in range(steps):
        k_pool[cache.slot(0, length + 2 * step)] = cache.k[cache.slot(0, length + step)]
        v_pool[cache.slot(0, length + 2 * step)] = cache.v[cache.slot(0, length + step)]
        q_tree[2 * step] = queries[step]
    got = ops.tree_attention(q_tree, k_pool, v_pool, first, cache.length[:1], nodes, tree, page, 128, **common)
    assert torch.equal(expected, got[0 : 2 * steps : 2])


def test_deterministic_linear_gives_each_row_the_same_bits_for_every_number_of_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 96, generator=generator), torch.randn(72, 96, generator=generator)
    expected = torch.cat([ops.linear(x[i : i + 1], weight, deterministic=True) for i in range(40)])
    for tokens in (2, 15, 16, 17, 40):
        assert torch.equal(expected[:tokens], ops.linear(x[:tokens], weight, deterministic=True))
