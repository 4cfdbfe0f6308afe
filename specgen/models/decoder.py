"""One decoder layer, our own forward: merged QKV and gate-up matmuls, fused norms, RoPE with KV write, paged attention.

Boundary: a layer knows its weights, a ``Layout`` and its slice of a KV pool. It knows nothing of embeddings, heads, drafters or checkpoints on disk;
both the fused target and the drafters are built from it.

The residual stream is carried as (x, residual): its value is x + residual, and the next norm performs the addition. One layer is
``normed, residual = input_norm(layer, x, residual)`` then ``x, residual = run_layer(layer, normed, residual, ...)``; a drafter whose attention
input is something else (EAGLE: un-normed; EAGLE-3: [norm(embedding), norm(hidden)]) makes that input itself and calls ``run_layer`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.models.attention import KvShape, attend
from specgen.models.rope import RopeTable
from specgen.types import Layout

ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class LayerSpec:
    """Shape and options of one layer.

    ``attn_input_size`` is the width the QKV matmul reads (0 = hidden_size). ``window`` keys are visible, self included (0 = all). ``plus_one``:
    norms multiply by 1 + weight (Gemma). ``sandwich``: attention and MLP outputs are normed before they join the stream. ``input_norm`` False: the
    layer has no ``input_layernorm`` weight (EAGLE).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    scale: float
    attn_input_size: int = 0
    window: int = 0
    softcap: float = 0.0
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    plus_one: bool = False
    sandwich: bool = False
    input_norm: bool = True

    @property
    def kv_shape(self) -> KvShape:
        """Sizes of this layer's cache."""
        return KvShape(self.num_kv_heads, self.head_dim, self.head_dim)


@dataclass(eq=False)
class DecoderLayer:
    """Weights of one layer. qkv [(H + 2 HK) D, attn_input], o [hidden, H D], gate_up [2 I, hidden], down [hidden, I]; optional ones are None."""

    spec: LayerSpec
    rope: RopeTable
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_norm: Tensor
    attn_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None

    @classmethod
    def empty(cls, spec: LayerSpec, rope: RopeTable, device: torch.device | str, dtype: torch.dtype) -> DecoderLayer:
        """A layer whose weights are allocated and not yet filled."""

        def new(*shape: int, when: bool = True) -> Tensor | None:
            return torch.empty(*shape, device=device, dtype=dtype) if when else None

        hidden, inner = spec.hidden_size, spec.intermediate_size
        rows, width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.attn_input_size or hidden
        return cls(
            spec,
            rope,
            qkv=torch.empty(rows, width, device=device, dtype=dtype),
            o=torch.empty(hidden, spec.num_heads * spec.head_dim, device=device, dtype=dtype),
            gate_up=torch.empty(2 * inner, hidden, device=device, dtype=dtype),
            down=torch.empty(hidden, inner, device=device, dtype=dtype),
            mlp_norm=torch.empty(hidden, device=device, dtype=dtype),
            attn_norm=new(hidden, when=spec.input_norm),
            qkv_bias=new(rows, when=spec.qkv_bias),
            o_bias=new(hidden, when=spec.o_bias),
            gate_up_bias=new(2 * inner, when=spec.mlp_bias),
            down_bias=new(hidden, when=spec.mlp_bias),
            q_norm=new(spec.head_dim, when=spec.qk_norm),
            k_norm=new(spec.head_dim, when=spec.qk_norm),
            post_attn_norm=new(hidden, when=spec.sandwich),
            post_mlp_norm=new(hidden, when=spec.sandwich),
        )

    def views(self) -> dict[str, Tensor]:
        """Destination of each checkpoint tensor, by its published name within the layer; slices of the merged weights."""
        spec, inner = self.spec, self.spec.intermediate_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sandwich_names = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        post_attn, mlp_norm, post_mlp = sandwich_names if spec.sandwich else ("", "post_attention_layernorm", "")
        found: dict[str, Tensor | None] = {
            "self_attn.o_proj.weight": self.o,
            "self_attn.o_proj.bias": self.o_bias,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "mlp.down_proj.weight": self.down,
            "mlp.down_proj.bias": self.down_bias,
            "input_layernorm.weight": self.attn_norm,
            f"{mlp_norm}.weight": self.mlp_norm,
            f"{post_attn}.weight": self.post_attn_norm,
            f"{post_mlp}.weight": self.post_mlp_norm,
        }
        for suffix, qkv, gate_up in (("weight", self.qkv, self.gate_up), ("bias", self.qkv_bias, self.gate_up_bias)):
            if qkv is not None:
                found[f"self_attn.q_proj.{suffix}"] = qkv[:q_rows]
                found[f"self_attn.k_proj.{suffix}"] = qkv[q_rows : q_rows + kv_rows]
                found[f"self_attn.v_proj.{suffix}"] = qkv[q_rows + kv_rows :]
            if gate_up is not None:
                found[f"mlp.gate_proj.{suffix}"] = gate_up[:inner]
                found[f"mlp.up_proj.{suffix}"] = gate_up[inner:]
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass
class Tail:
    """One token a row of a uniform layout: ``index`` [B] int32 into its T tokens, and the layout of those tokens alone (one query a row)."""

    index: Tensor
    layout: Layout


def fill(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy ``tensors`` into ``views`` of the same names. Raises CheckpointError, naming ``where``, for a missing tensor or another shape."""
    missing = sorted(name for name in views if name not in tensors)
    if missing:
        raise CheckpointError(f"{where}: missing tensors {', '.join(missing)}")
    for name, view in views.items():
        if tuple(tensors[name].shape) != tuple(view.shape):
            raise CheckpointError(f"{where}: {name} has shape {list(tensors[name].shape)}, the configuration needs {list(view.shape)}")
        view.copy_(tensors[name])


def build_layer(
    tensors: Mapping[str, Tensor], prefix: str, spec: LayerSpec, rope: RopeTable, device: torch.device | str, dtype: torch.dtype
) -> DecoderLayer:
    """The layer whose tensors are named ``prefix + published name``, q/k/v and gate/up merged. Other tensors are left to the caller."""
    layer = DecoderLayer.empty(spec, rope, device, dtype)
    fill({prefix + name: view for name, view in layer.views().items()}, tensors, "checkpoint")
    return layer


def input_norm(layer: DecoderLayer, x_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
    """The layer's attention input and the stream it reads: (norm(x + residual), x + residual), both [T, E]."""
    assert layer.attn_norm is not None, "this layer has no input norm"
    return ops.add_rms_norm(x_TE, residual_TE, layer.attn_norm, layer.spec.eps, layer.spec.plus_one)


def project_qkv(
    layer: DecoderLayer,
    x_TE: Tensor,
    layout: Layout,
    k_pool: Tensor,
    v_pool: Tensor,
    deterministic: bool = False,
) -> Tensor:
    """QKV matmul, q/k norm, RoPE; K and V go to the pool at ``layout.slots``. x [T, attn_input] -> q [T, H, D]."""
    spec = layer.spec
    qkv = ops.linear(x_TE, layer.qkv, layer.qkv_bias, deterministic=deterministic)
    return ops.rope_write_kv(
        qkv,
        layer.rope.cos,
        layer.rope.sin,
        layout.positions,
        layout.slots,
        k_pool,
        v_pool,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        layer.q_norm,
        layer.k_norm,
        spec.eps,
        spec.plus_one,
    )


def finish_layer(layer: DecoderLayer, attn_THD: Tensor, residual_TE: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """Output projection, norms and MLP. attn [T, H, D], residual [T, E] -> (x, residual), the stream after the layer being their sum."""
    spec = layer.spec
    x = ops.linear(attn_THD.reshape(attn_THD.shape[0], -1), layer.o, layer.o_bias, deterministic=deterministic)
    if layer.post_attn_norm is not None:
        x = ops.rms_norm(x, layer.post_attn_norm, spec.eps, spec.plus_one)
    x, residual = ops.add_rms_norm(x, residual_TE, layer.mlp_norm, spec.eps, spec.plus_one)
    if spec.activation == "gelu_pytorch_tanh":
        x = ops.gelu_tanh_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias, deterministic=deterministic))
    else:
        x = ops.linear_silu_mul(x, layer.gate_up, layer.gate_up_bias, deterministic=deterministic)
    x = ops.linear(x, layer.down, layer.down_bias, deterministic=deterministic)
    if layer.post_mlp_norm is not None:
        x = ops.rms_norm(x, layer.post_mlp_norm, spec.eps, spec.plus_one)
    return x, residual


def run_layer(
    layer: DecoderLayer,
    x_TE: Tensor,
    residual_TE: Tensor,
    layout: Layout,
    k_pool: Tensor,
    v_pool: Tensor,
    page_size: int,
    deterministic: bool = False,
    tail: Tail | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer on an attention input that is already normed: x [T, attn_input], residual [T, E] -> (x, residual).

    ``residual`` may be overwritten. k_pool and v_pool [N, HK, D] are this layer's. ``deterministic``: batch-invariant kernels.
    ``tail``: every token writes its K and V, but only one a row goes on; the results are then [B, E].
    """
    spec = layer.spec
    q = project_qkv(layer, x_TE, layout, k_pool, v_pool, deterministic)
    if tail is not None:
        q, residual_TE, layout = ops.take_rows(q, tail.index), ops.take_rows(residual_TE, tail.index), tail.layout
    attn = attend(q, k_pool, v_pool, layout, page_size, spec.scale, spec.window, spec.softcap, deterministic=deterministic)
    return finish_layer(layer, attn, residual_TE, deterministic)
