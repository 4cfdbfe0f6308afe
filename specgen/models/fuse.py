"""Which targets run on our own forward, and with which layers.

Boundary: reads a transformers config and returns a ``Plan`` or the reason why there is none. It loads nothing and runs nothing. Anything a plan
cannot express exactly must be a reason: the model then runs unfused, on transformers' own forward, and the log says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from specgen.models.decoder import ACTIVATIONS, LayerSpec
from specgen.models.rope import rope_parameters

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Plan:
    """The fused model: a spec a layer, which rotary parameters each layer uses (None = the only ones), and what surrounds the layers.

    ``embed_scale`` multiplies embeddings (None = 1); ``logit_softcap`` is c in c * tanh(logits / c), 0 = none.
    """

    layers: tuple[LayerSpec, ...]
    rope_types: tuple[str | None, ...]
    embed_scale: float | None = None
    logit_softcap: float = 0.0


class NotFusable(Exception):
    """A reason, in words, why a config has no plan."""


def plan_for(config: PretrainedConfig) -> Plan:
    """The plan of a config. Raises NotFusable with the reason."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotFusable(f"no fused forward for model type {config.model_type!r}")
    if getattr(config, "quantization_config", None) is not None:
        raise NotFusable("the checkpoint is quantized")
    if rope_parameters(config)["partial_rotary_factor"] != 1.0:
        raise NotFusable("rotary positions on a part of the head")
    return family(config)


def _spec(config: PretrainedConfig, **options: Any) -> LayerSpec:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation = options.pop("activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise NotFusable(f"activation {activation!r}")
    if heads % config.num_key_value_heads:
        raise NotFusable(f"{heads} heads over {config.num_key_value_heads} key-value heads")
    return LayerSpec(
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        eps=config.rms_norm_eps,
        activation=activation,
        **{"scale": head_dim**-0.5, **options},
    )


def _repeat(config: PretrainedConfig, spec: LayerSpec) -> Plan:
    return Plan((spec,) * config.num_hidden_layers, (None,) * config.num_hidden_layers)


def _by_layer_type(config: PretrainedConfig, **options: Any) -> tuple[LayerSpec, ...]:
    """One spec a layer; ``sliding_window`` applies to the layers of type sliding_attention."""
    kinds = config.layer_types
    if set(kinds) - set(LAYER_TYPES):
        raise NotFusable(f"layer types {sorted(set(kinds) - set(LAYER_TYPES))}")
    windows = [(config.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in kinds]
    specs = {window: _spec(config, window=window, **options) for window in set(windows)}
    return tuple(specs[window] for window in windows)


def _llama(config: PretrainedConfig) -> Plan:
    bias = bool(config.attention_bias)
    return _repeat(config, _spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.mlp_bias)))


def _mistral(config: PretrainedConfig) -> Plan:
    return _repeat(config, _spec(config, window=config.sliding_window or 0))


def _qwen2(config: PretrainedConfig) -> Plan:
    return Plan(_by_layer_type(config, qkv_bias=True), (None,) * config.num_hidden_layers)


def _qwen3(config: PretrainedConfig) -> Plan:
    bias = bool(config.attention_bias)
    return Plan(_by_layer_type(config, qk_norm=True, qkv_bias=bias, o_bias=bias), (None,) * config.num_hidden_layers)


def _gemma3(config: PretrainedConfig) -> Plan:
    if config.use_bidirectional_attention:
        raise NotFusable("bidirectional attention")
    if config.attn_logit_softcapping:
        raise NotFusable("attn_logit_softcapping set on a family that does not use it")
    bias = bool(config.attention_bias)
    layers = _by_layer_type(
        config,
        activation=config.hidden_activation,
        scale=config.query_pre_attn_scalar**-0.5,
        qk_norm=True,
        plus_one=True,
        sandwich=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    return Plan(layers, tuple(config.layer_types), embed_scale=config.hidden_size**0.5, logit_softcap=config.final_logit_softcapping or 0.0)


FAMILIES: dict[str, Callable[[PretrainedConfig], Plan]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}
