"""Attention over the paged KV pool: the pool itself, the dispatch to the kernels, and the function registered with transformers.

Boundary: it knows a pool and a ``Layout``; it knows nothing of models, requests or of who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.types import Layout

# The name must hold none of "flash", "sdpa", "flex_attention" (transformers treats those specially) and must not be registered as a mask function:
# then a model's forward builds no mask at all.
ATTENTION_NAME = "specgen_paged"

FIXED_SPLIT = 256  # key positions summed together in deterministic mode


class KvShape(NamedTuple):
    """Sizes of one layer's cache: KV heads, head size of K, head size of V."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass
class KvPool:
    """Keys and values of every layer of one model, in pages. Page 0 is scratch: padding and dead rows write there.

    k [layers, N, HK, Dk] and v [layers, N, HK, Dv] with N = num_pages * page_size when all layers agree, else lists of [N, HK, D] tensors.
    """

    k: Tensor | list[Tensor]
    v: Tensor | list[Tensor]
    page_size: int
    num_pages: int

    @classmethod
    def allocate(cls, spec: Sequence[KvShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str) -> KvPool:
        """An all-zero pool (a fresh page holds no NaN that a masked lane could multiply by 0)."""
        size = num_pages * page_size
        new = lambda *shape: torch.zeros(*shape, dtype=dtype, device=device)  # noqa: E731
        if len(set(spec)) == 1:
            layers, (heads, key_dim, value_dim) = len(spec), spec[0]
            return cls(new(layers, size, heads, key_dim), new(layers, size, heads, value_dim), page_size, num_pages)
        keys = [new(size, s.heads, s.key_dim) for s in spec]
        return cls(keys, [new(size, s.heads, s.value_dim) for s in spec], page_size, num_pages)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K [N, HK, Dk] and V [N, HK, Dv] of one layer (views)."""
        return self.k[index], self.v[index]


def kv_bytes_per_token(spec: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Bytes one token takes in a pool of these layers."""
    return sum(s.heads * (s.key_dim + s.value_dim) for s in spec) * dtype.itemsize


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    layout: Layout,
    page_size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention of q [T, H, Dk] over keys already in the pool, placed by ``layout`` -> [T, H, Dv]. ``window`` keys are seen, self included; 0 = all.

    ``deterministic``: keys are summed in chunks at fixed positions, so a query's result depends neither on the batch nor on the chunking of prefill.
    """
    common: dict[str, Any] = dict(page_size=page_size, max_len=layout.max_len, scale=scale, window=window, softcap=softcap, sinks=sinks)
    if deterministic:
        common["fixed_split"] = FIXED_SPLIT
    if layout.cu_q is not None:
        return ops.packed_attention(q, k_pool, v_pool, layout.block_table, layout.length, layout.cu_q, layout.q_len, **common)
    return ops.tree_attention(q, k_pool, v_pool, layout.block_table, layout.length, layout.q_len, layout.path, **common)


@dataclass
class AttentionContext:
    """What travels through transformers' forward to the registered function. ``pool`` None: a probe that only records each layer's
    shape and whether it was told of a sliding window."""

    layout: Layout | None = None
    pool: KvPool | None = None
    seen: dict[int, KvShape] = field(default_factory=dict)
    windowed: set[int] = field(default_factory=set)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    specgen_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: writes K/V to the pool, attends, returns [1, T, H, Dv].

    query [1, H, T, Dk], key and value [1, HK, T, D], after RoPE and un-repeated. Raises CheckpointError for a model that asks for something a paged
    causal cache cannot give (a mask of its own, bidirectional or cross attention), or that loses the context on the way.
    """
    name = type(module).__name__
    if specgen_context is None:
        raise CheckpointError(f"{name} does not pass keyword arguments to its attention, so this architecture cannot run on a paged cache")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise CheckpointError(f"{name} uses a mask of its own or bidirectional attention: only causal attention can be cached and speculated on")
    layer: int = module.layer_idx  # type: ignore[assignment]
    k, v = (x[0].transpose(0, 1).contiguous() for x in (key, value))
    if specgen_context.pool is None or specgen_context.layout is None:
        specgen_context.seen[layer] = KvShape(k.shape[1], k.shape[2], v.shape[2])
        if sliding_window:
            specgen_context.windowed.add(layer)
        return query.new_zeros(1, query.shape[2], query.shape[1], v.shape[2]), None
    k_pool, v_pool = specgen_context.pool.layer(layer)
    ops.write_kv(k, v, k_pool, v_pool, specgen_context.layout.slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1).contiguous()
    out = attend(q, k_pool, v_pool, specgen_context.layout, specgen_context.pool.page_size, scale, sliding_window or 0, softcap or 0.0, s_aux)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
