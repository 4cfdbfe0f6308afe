"""One decoder layer as drafters use it: an attention input of its own width, no input norm, weights merged from per-name tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from specgen.errors import CheckpointError
from specgen.models.attention import KvPool, KvShape, kv_bytes_per_token
from specgen.models.decoder import LayerSpec, build_layer, input_norm, run_layer
from specgen.models.rope import RopeTable, rope_table
from specgen.types import Layout

WIDTH, HEADS, KV_HEADS, DIM, INNER = 24, 4, 2, 8, 40


def spec(**options: object) -> LayerSpec:
    return LayerSpec(WIDTH, HEADS, KV_HEADS, DIM, INNER, eps=1e-6, scale=DIM**-0.5, **options)  # type: ignore[arg-type]


def tensors(input_width: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    shapes = {
        "self_attn.q_proj.weight": (HEADS * DIM, input_width),
        "self_attn.k_proj.weight": (KV_HEADS * DIM, input_width),
        "self_attn.v_proj.weight": (KV_HEADS * DIM, input_width),
        "self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    return {f"midlayer.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def rope() -> RopeTable:
    return rope_table({"rope_type": "default", "rope_theta": 100.0}, DIM, 16, 16, "cpu")


def naive(t: dict[str, torch.Tensor], x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The layer written out over T tokens at positions 0 .. T-1; returns the stream after it."""
    w = {name.removeprefix("midlayer.").removesuffix(".weight"): value for name, value in t.items()}
    table = rope()

    def heads(name: str, rotate: bool) -> torch.Tensor:
        y = linear(x, w[f"self_attn.{name}_proj"]).view(len(x), -1, DIM)
        if rotate:
            cos, sin = table.cos[: len(x), None], table.sin[: len(x), None]
            a, b = y.chunk(2, -1)
            y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return y.transpose(0, 1).repeat_interleave(HEADS // y.shape[1], 0)

    out = scaled_dot_product_attention(heads("q", True), heads("k", True), heads("v", False), is_causal=True)
    stream = residual + linear(out.transpose(0, 1).reshape(len(x), -1), w["self_attn.o_proj"])
    normed = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6) * w["post_attention_layernorm"]
    return stream + linear(silu(linear(normed, w["mlp.gate_proj"])) * linear(normed, w["mlp.up_proj"]), w["mlp.down_proj"])


@pytest.mark.parametrize("input_width", [WIDTH, 2 * WIDTH])
def test_a_layer_takes_an_attention_input_of_any_width(input_width: int) -> None:
    t = tensors(input_width)
    shape = spec(attn_input_size=input_width, input_norm=False)
    layer = build_layer(t, "midlayer.", shape, rope(), "cpu", torch.float32)
    pool = KvPool.allocate([shape.kv_shape], num_pages=4, page_size=4, dtype=torch.float32, device="cpu")
    x, residual = torch.randn(6, input_width), torch.randn(6, WIDTH)
    want = naive(t, x, residual)
    place = torch.arange(6)
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    layout = Layout(place.int(), table[0, place // 4].long() * 4 + place % 4, table, torch.zeros(1, dtype=torch.int32), 6, 6)
    out, stream = run_layer(layer, x, residual.clone(), layout, *pool.layer(0), pool.page_size)
    torch.testing.assert_close(out + stream, want, atol=1e-5, rtol=0)


def test_the_stream_is_the_sum_and_the_norm_is_of_the_sum() -> None:
    t = {**tensors(WIDTH), "midlayer.input_layernorm.weight": torch.randn(WIDTH)}
    layer = build_layer(t, "midlayer.", spec(), rope(), "cpu", torch.float32)
    x, residual = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    total = x + residual
    normed, stream = input_norm(layer, x, residual)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * t["midlayer.input_layernorm.weight"])
    assert torch.equal(input_norm(layer, total, None)[0], normed)


def test_missing_and_misshapen_tensors_are_named() -> None:
    t = tensors(WIDTH)
    del t["midlayer.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError) as error:
        build_layer(t, "midlayer.", spec(input_norm=False), rope(), "cpu", torch.float32)
    assert str(error.value) == "checkpoint: missing tensors midlayer.mlp.up_proj.weight"
    t = tensors(2 * WIDTH)
    with pytest.raises(CheckpointError) as error:
        build_layer(t, "midlayer.", spec(input_norm=False), rope(), "cpu", torch.float32)
    assert str(error.value) == "checkpoint: midlayer.self_attn.q_proj.weight has shape [32, 48], the configuration needs [32, 24]"


def test_a_pool_of_unlike_layers_is_a_list() -> None:
    unlike = [KvShape(2, 8, 4), KvShape(1, 6, 6)]
    pool = KvPool.allocate(unlike, num_pages=3, page_size=2, dtype=torch.bfloat16, device="cpu")
    assert [tuple(pool.layer(i)[0].shape) for i in range(2)] == [(6, 2, 8), (6, 1, 6)]
    assert [tuple(pool.layer(i)[1].shape) for i in range(2)] == [(6, 2, 4), (6, 1, 6)]
    assert kv_bytes_per_token(unlike, torch.bfloat16) == 2 * (2 * 12 + 12)
    alike = KvPool.allocate([KvShape(2, 8, 4)] * 5, num_pages=3, page_size=2, dtype=torch.float32, device="cpu")
    assert isinstance(alike.k, torch.Tensor) and alike.k.shape == (5, 6, 2, 8)
