"""Rotary position tables: cos and sin of every position, built once on the device.

Boundary: reads rotary parameters, returns tables. It knows nothing of layers, caches or kernels. The frequency laws (linear, llama3, yarn,
longrope) are those of ``transformers``; the choice between a law's variants is made once from the longest length the job may reach, never from
the batch, because a row's text must not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specgen.errors import CheckpointError, ConfigError

# Rows beyond the context limit: drafts and padding may stand there for a step; they are computed and never kept.
SLACK = 1024
SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeTable(NamedTuple):
    """cos, sin [max_length + SLACK, R/2] fp32, R the rotated part of the head; the attention factor of yarn and longrope is multiplied in."""

    cos: Tensor
    sin: Tensor


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The flat rotary parameters of ``config`` (an HF config, or a mapping as read from config.json), with ``rope_type`` and ``rope_theta``.

    Reads today's ``rope_parameters`` (one entry a layer type where the model mixes them) and the older ``rope_theta`` / ``rope_scaling``.
    """

    def read(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    params = dict(read("rope_parameters") or read("rope_scaling") or {})
    if params and all(isinstance(value, Mapping) or value is None for value in params.values()):
        params = dict(params.get(layer_type or "full_attention") or {})
    params["rope_type"] = params.get("rope_type") or params.get("type") or "default"
    params.setdefault("rope_theta", read("rope_theta", 10000.0))
    params.setdefault("partial_rotary_factor", read("partial_rotary_factor", 1.0))
    if params["rope_type"] in ("yarn", "longrope", "llama3"):
        params.setdefault("original_max_position_embeddings", read("original_max_position_embeddings") or read("max_position_embeddings"))
    if params["rope_type"] == "longrope":
        # Kept as transformers computes it: the ratio of the two lengths unless the checkpoint names a factor.
        original = params["original_max_position_embeddings"]
        params.setdefault("factor", (read("max_position_embeddings") or original) / original)
    return params


def reachable_length(params: Mapping[str, Any], max_position: int) -> int:
    """The longest length these rotary parameters are made for: ``max_position``, or the scaled original length where that is more."""
    original = params.get("original_max_position_embeddings") or max_position
    stretch = {"linear": max_position, "yarn": original, "llama3": original, "longrope": original}.get(params["rope_type"])
    return max(max_position, int((params.get("factor") or 1.0) * stretch)) if stretch else max_position


def frequencies(params: Mapping[str, Any], head_dim: int, max_length: int, max_position: int) -> tuple[Tensor, float]:
    """Inverse frequencies [R/2] fp32 on the CPU, and the factor cos and sin are multiplied by.

    ``max_length`` picks longrope's long or short factors. Raises CheckpointError for an unknown law and ConfigError for dynamic scaling used beyond
    the trained length, which would rewrite past keys.
    """
    kind = params["rope_type"]
    if kind not in SUPPORTED:
        raise CheckpointError(f"rotary type {kind!r} is not supported (known: {', '.join(SUPPORTED)})")
    if "mrope_section" in params:
        raise CheckpointError("multi-axis rotary positions (mrope_section) are not supported: use a text-only checkpoint")
    if kind == "dynamic" and max_length > max_position:
        raise ConfigError(
            f"dynamic rotary scaling changes old keys beyond {max_position} positions (got {max_length}): "
            f"set model.max_length to {max_position} or less"
        )
    if kind in ("default", "dynamic"):
        rotated = int(head_dim * params.get("partial_rotary_factor", 1.0))
        return 1.0 / (params["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated)), 1.0
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=max_position, rope_parameters=dict(params)
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_length)
    return inv_freq, float(factor)


def rope_table(params: Mapping[str, Any], head_dim: int, max_length: int, max_position: int, device: torch.device | str) -> RopeTable:
    """Tables for positions 0 .. max_length + SLACK - 1. Raises as ``frequencies`` does."""
    inv_freq, factor = frequencies(params, head_dim, max_length, max_position)
    positions = torch.arange(max_length + SLACK, device=device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq.to(device=device, dtype=torch.float32)
    return RopeTable(angles.cos().mul_(factor), angles.sin().mul_(factor))


def config_rope_table(config: PretrainedConfig, max_length: int, device: torch.device | str, layer_type: str | None = None) -> RopeTable:
    """``rope_table`` of a model's own config; the head size is ``head_dim``, else hidden size / heads."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope_table(rope_parameters(config, layer_type), head_dim, max_length, config.max_position_embeddings, device)
