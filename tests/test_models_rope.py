"""Rotary tables equal those of transformers for every supported law, and never depend on a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specgen.errors import CheckpointError, ConfigError
from specgen.models.rope import SLACK, config_rope_table, reachable_length, rope_parameters, rope_table

LAWS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "attention_factor": 1.3},
}


def config(law: str, **options: Any) -> LlamaConfig:
    params = {"rope_type": law, "rope_theta": 300.0, **options}
    return LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=24, max_position_embeddings=256, rope_parameters=params)


@pytest.mark.parametrize("law", list(LAWS))
def test_tables_equal_transformers(law: str) -> None:
    cfg = config(law, **LAWS[law])
    cos, sin = LlamaRotaryEmbedding(cfg)(torch.zeros(1), torch.arange(256)[None])
    table = config_rope_table(cfg, 256, "cpu")
    assert table.cos.shape == table.sin.shape == (256 + SLACK, 12)
    torch.testing.assert_close(table.cos[:256], cos[0, :, :12], atol=1e-6, rtol=0)
    torch.testing.assert_close(table.sin[:256], sin[0, :, :12], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("max_length", "seen"), [(64, 10), (65, 65)])
def test_longrope_chooses_its_factors_by_the_jobs_length_not_the_batchs(max_length: int, seen: int) -> None:
    factors = {"long_factor": [4.0] * 12, "short_factor": [1.5] * 12, "original_max_position_embeddings": 64}
    cfg = config("longrope", **factors)
    # transformers decides by the largest position of the batch: `seen` is one on the same side of 64 as max_length.
    cos, _ = LlamaRotaryEmbedding(cfg)(torch.zeros(1), torch.arange(seen)[None])
    table = config_rope_table(cfg, max_length, "cpu")
    torch.testing.assert_close(table.cos[:seen], cos[0, :, :12], atol=1e-6, rtol=0)


def test_dynamic_scaling_is_plain_within_the_trained_length_and_refused_beyond() -> None:
    cfg = config("dynamic", factor=2.0)
    assert torch.equal(config_rope_table(cfg, 256, "cpu").cos, config_rope_table(config("default"), 256, "cpu").cos)
    with pytest.raises(ConfigError) as error:
        config_rope_table(cfg, 257, "cpu")
    assert str(error.value) == "dynamic rotary scaling changes old keys beyond 256 positions (got 257): set model.max_length to 256 or less"


def test_unknown_and_multi_axis_laws_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rotary type 'proportional' is not supported"):
        rope_table({"rope_type": "proportional", "rope_theta": 1.0}, 8, 16, 16, "cpu")
    with pytest.raises(CheckpointError, match="mrope_section"):
        rope_table({"rope_type": "default", "rope_theta": 1.0, "mrope_section": [1, 2]}, 8, 16, 16, "cpu")


def test_parameters_are_read_from_old_and_new_spellings() -> None:
    assert rope_parameters({"rope_theta": 7.0}) == {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 1.0}
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 8}
    assert rope_parameters(old)["rope_type"] == "linear"
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    mixed = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}}}
    assert rope_parameters(mixed, "sliding_attention")["rope_theta"] == 3.0
    assert rope_parameters(mixed)["rope_theta"] == 5.0


def test_part_of_the_head_may_be_rotated() -> None:
    table = rope_table({"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}, 16, 4, 4, "cpu")
    assert table.cos.shape == (4 + SLACK, 4)
    torch.testing.assert_close(table.cos[1], torch.cos(100.0 ** (-torch.arange(0, 8, 2) / 8.0)))


def test_reachable_length_is_the_scaled_original_length() -> None:
    assert reachable_length({"rope_type": "default"}, 100) == 100
    assert reachable_length({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 100) == 400
    assert reachable_length({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}, 100) == 100
    assert reachable_length({"rope_type": "linear", "factor": 2.0}, 100) == 200
