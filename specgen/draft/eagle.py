"""EAGLE-1/2 and EAGLE-3 heads.

Boundary: the network only; the draft loop, the KV and the candidates are ``autoregressive.py``.

EAGLE (Li et al. 2024): the pair (emb(x[t+1]), h[t]), h the target's state after its final norm, joined by ``fc`` and run through one decoder layer
that has
no input norm; the output stands for h[t+1]: the target's own head reads it, un-normed, and it is fed back.
EAGLE-3 (Li et al. 2025): h[t] is ``fc`` over three of the target's layer states (once; self-fed states skip it); the layer's attention reads
cat[norm(emb), norm(h)] and its stream starts from the un-normed h; a head over a reduced vocabulary reads norm(out), and out before that norm is
fed back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specgen.draft.checkpoints import aux_layers, check_kind, check_width, need, read_config
from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.models.attention import KvPool, kv_bytes_per_token
from specgen.models.decoder import DecoderLayer, LayerSpec, Tail, build_layer, run_layer
from specgen.models.loader import read_tensors
from specgen.models.rope import config_rope_table
from specgen.models.target import Hidden, Target
from specgen.models.tune import LayerTuner
from specgen.types import Layout


def head_config(config: dict[str, Any]) -> LlamaConfig:
    """A head's configuration as transformers' Llama reads it. A missing ``rope_theta`` is 10000, never the target's: heads are trained with their
    own."""
    known = dict(config)
    known.setdefault("rms_norm_eps", 1e-6)
    for name in ("architectures", "model_type", "auto_map", "torch_dtype", "dtype"):
        known.pop(name, None)
    return LlamaConfig(**known)


def layer_spec(config: LlamaConfig, **options: Any) -> LayerSpec:
    """The shape of a Llama decoder layer of this config."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    bias = bool(config.attention_bias)
    return LayerSpec(
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=head_dim**-0.5,
        activation=config.hidden_act,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.mlp_bias),
        **options,
    )


def random_tensors(config: LlamaConfig, target: Target, extra: dict[str, tuple[int, ...]], prefix: str, attn_inputs: int) -> dict[str, Tensor]:
    """Random weights of a head's shape (``draft.load_format=dummy``, for speed measurements): one decoder layer and ``extra`` tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q_rows, kv_rows = config.num_attention_heads * head_dim, (config.num_key_value_heads or config.num_attention_heads) * head_dim
    shapes = {
        "self_attn.q_proj.weight": (q_rows, attn_inputs * hidden),
        "self_attn.k_proj.weight": (kv_rows, attn_inputs * hidden),
        "self_attn.v_proj.weight": (kv_rows, attn_inputs * hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    generator = torch.Generator(device=target.device).manual_seed(0)
    found = {}
    for name, shape in {**{prefix + key: value for key, value in shapes.items()}, **extra}.items():
        if len(shape) == 1:
            found[name] = torch.ones(shape, device=target.device, dtype=target.dtype)
        else:
            found[name] = torch.randn(shape, device=target.device, dtype=target.dtype, generator=generator) * 0.02
    return found


def _eagle3_shapes(config: LlamaConfig, raw: dict[str, Any], target: Target, folder: Path) -> dict[str, tuple[int, ...]]:
    hidden, count = config.hidden_size, len(aux_layers(raw, target.num_layers, folder))
    return {
        "fc.weight": (hidden, count * target.hidden_size),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (int(raw.get("draft_vocab_size") or target.vocab_size), hidden),
    }


class LayeredHead:
    """What heads made of decoder layers have in common: their own KV layers, embeddings borrowed from the target or brought along."""

    lead = 0
    prenorm = False
    aux_layers: tuple[int, ...] = ()
    id_map: Tensor | None = None

    def __init__(self, target: Target, layers: list[DecoderLayer]) -> None:
        self.target = target
        self.device, self.feed_dtype = target.device, target.dtype
        self.layers = layers
        self.feed_size = target.hidden_size
        self.own_embed: Tensor | None = None
        self.tuner = LayerTuner()

    @property
    def table(self) -> Tensor:
        """The embeddings [V, E] the head reads, unscaled: its own where the checkpoint has some that differ, else the target's."""
        return self.target.embed_weight if self.own_embed is None else self.own_embed

    def adopt_embedding(self, tensors: dict[str, Tensor], name: str = "embed_tokens.weight") -> None:
        """Use the checkpoint's embedding unless it is the target's own."""
        own = tensors.get(name)
        if own is None or (own.shape == self.target.embed_weight.shape and torch.equal(own, self.target.embed_weight)):
            return
        self.own_embed = own

    def make_pool(self, num_pages: int, page_size: int) -> KvPool:
        """KV for the head's layers."""
        return KvPool.allocate([layer.spec.kv_shape for layer in self.layers], num_pages, page_size, self.feed_dtype, self.device)

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV a token takes over the head's layers."""
        return kv_bytes_per_token([layer.spec.kv_shape for layer in self.layers], self.feed_dtype)


class EagleHead(LayeredHead):
    """EAGLE-1/2."""

    method = "eagle"

    def __init__(self, folder: Path, target: Target, dummy: bool = False) -> None:
        check_kind("eagle", folder)
        raw = read_config(folder)
        config = head_config(raw)
        check_width(folder, config.hidden_size, target.hidden_size)
        if dummy:
            tensors = random_tensors(config, target, {"fc.weight": (config.hidden_size, 2 * config.hidden_size)}, "layers.0.", 1)
        else:
            tensors = read_tensors(folder, device=target.device, dtype=target.dtype)
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        need(tensors, ["fc.weight"], folder, "eagle")
        rope = config_rope_table(config, target.max_length, target.device)
        layers = []
        for index in range(config.num_hidden_layers):
            normed = f"layers.{index}.input_layernorm.weight" in tensors
            layers.append(build_layer(tensors, f"layers.{index}.", layer_spec(config, input_norm=normed), rope, target.device, target.dtype))
        super().__init__(target, layers)
        self.fc, self.fc_bias = tensors["fc.weight"], tensors.get("fc.bias")
        if raw.get("bias") is True and self.fc_bias is None:
            raise CheckpointError(f"{folder}: config.json says bias=true and the checkpoint has no fc.bias")
        self.adopt_embedding(tensors)
        self.lm_head = tensors.get("lm_head.weight")

    def features(self, hidden: Hidden) -> Tensor:
        return hidden.last

    def start(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, Tensor]:
        assert feed is not None
        pair, _ = ops.pair_input(ids, self.table, feed, None, None, 0.0)
        x = ops.linear(pair, self.fc, self.fc_bias)
        for index, layer in enumerate(self.layers):
            if layer.attn_norm is None:
                normed, residual = x, x.clone()
            else:
                normed, residual = ops.add_rms_norm(x, None, layer.attn_norm, layer.spec.eps)
            last = tail if index + 1 == len(self.layers) else None
            out, residual = run_layer(layer, normed, residual, layout, *pool.layer(index), pool.page_size, tail=last)
            x = out + residual
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        return self.target.logits(states) if self.lm_head is None else ops.linear(states, self.lm_head)


class Eagle3Head(LayeredHead):
    """EAGLE-3, in EAGLE's own, SpecForge's, ModelOpt's and speculators' layouts of one layer."""

    method = "eagle3"

    def __init__(self, folder: Path, target: Target, dummy: bool = False) -> None:
        check_kind("eagle3", folder)
        raw = read_config(folder)
        speculators = "transformer_layer_config" in raw
        config = head_config(raw["transformer_layer_config"] if speculators else raw)
        if dummy:
            tensors = random_tensors(config, target, _eagle3_shapes(config, raw, target, folder), "midlayer.", 2)
        else:
            tensors = read_tensors(folder, device=target.device, dtype=target.dtype)
        prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
        if config.num_hidden_layers != 1 or "layers.1.self_attn.q_proj.weight" in tensors:
            raise CheckpointError(f"{folder}: EAGLE-3 heads of more than one layer (P-EAGLE) are not supported")
        need(tensors, ["fc.weight", f"{prefix}hidden_norm.weight", f"{prefix}input_layernorm.weight", "norm.weight"], folder, "eagle3")
        self.aux_layers = aux_layers(raw, target.num_layers, folder)
        check_width(folder, tensors["fc.weight"].shape[1], len(self.aux_layers) * target.hidden_size)
        rope = config_rope_table(config, target.max_length, target.device)
        spec = layer_spec(config, attn_input_size=2 * config.hidden_size, input_norm=True)
        super().__init__(target, [build_layer(tensors, prefix, spec, rope, target.device, target.dtype)])
        self.feed_size = config.hidden_size
        self.fc = tensors["fc.weight"]
        self.hidden_norm, self.norm = tensors[f"{prefix}hidden_norm.weight"], tensors["norm.weight"]
        self.eps = config.rms_norm_eps
        self.norm_before_residual = bool(raw.get("norm_before_residual", speculators))
        self.feed_normed = bool(raw.get("norm_output", False)) and speculators
        self.fc_norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(self.aux_layers)) if f"fc_norm.{i}.weight" in tensors]
        self.adopt_embedding(tensors)
        if self.own_embed is None and target.embed_weight.shape[1] != config.hidden_size:
            raise CheckpointError(
                f"{folder}: no embed_tokens.weight, and the target's is {target.embed_weight.shape[1]} wide, not {config.hidden_size}"
            )
        self._read_head(folder, raw, tensors, dummy)

    def _read_head(self, folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], dummy: bool) -> None:
        vocab = self.target.vocab_size
        draft_vocab = int(raw.get("draft_vocab_size") or vocab)
        if "lm_head.weight" not in tensors:
            if draft_vocab != vocab:
                raise CheckpointError(
                    f"{folder}: lm_head.weight is missing, and with draft_vocab_size={draft_vocab} the target's ({vocab}) cannot stand in for it"
                )
            self.lm_head = None
        else:
            self.lm_head = tensors["lm_head.weight"]
            if self.lm_head.shape[0] != draft_vocab:
                raise CheckpointError(f"{folder}: lm_head.weight has {self.lm_head.shape[0]} rows, draft_vocab_size is {draft_vocab}")
        if draft_vocab != vocab and dummy:
            self.id_map = torch.arange(draft_vocab, dtype=torch.int32, device=self.device)
        elif draft_vocab != vocab:
            need(tensors, ["d2t"], folder, "eagle3")
            ids = torch.arange(draft_vocab, device=self.device) + tensors["d2t"].long()
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab:
                raise CheckpointError(f"{folder}: d2t maps to ids {low}..{high}, the target has {vocab}")
            self.id_map = ids.to(torch.int32)

    def features(self, hidden: Hidden) -> Tensor:
        assert hidden.aux is not None
        return hidden.aux

    def start(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), 1)
            features = torch.cat([ops.rms_norm(x.contiguous(), w, self.eps) for x, w in zip(parts, self.fc_norms, strict=True)], 1)
        return ops.linear(features, self.fc)

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, Tensor]:
        assert feed is not None
        layer = self.layers[0]
        if layout.cu_q is None:
            self.tuner.ensure(self.layers, ids.shape[0] if tail is None else tail.index.shape[0])
        assert layer.attn_norm is not None
        start = "normed" if self.norm_before_residual else "plain"
        x, residual = ops.pair_input(ids, self.table, feed, layer.attn_norm, self.hidden_norm, self.eps, residual=start)
        assert residual is not None
        out, residual = run_layer(layer, x, residual, layout, *pool.layer(0), pool.page_size, tail=tail)
        states, stream = ops.add_rms_norm(out, residual, self.norm, self.eps)
        return states, states if self.feed_normed else stream

    def logits(self, states: Tensor) -> Tensor:
        return self.target.logits(states) if self.lm_head is None else ops.linear(states, self.lm_head)
