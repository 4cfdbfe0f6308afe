"""The unfused target proves itself at load: what the registered attention cannot see is refused, and nothing depends on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PreTrainedModel

from specgen.config import ModelConfig
from specgen.errors import CheckpointError, ConfigError
from specgen.models import attention
from specgen.models.loader import load_target
from specgen.types import Layout

SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return load_target(ModelConfig(source="hf", path=str(folder), **options), "cpu", "float32", fuse=False)


def llama(folder: Path) -> Path:
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64)), folder)


def test_a_paged_forward_that_differs_from_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama(tmp_path)
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: -right(*args))
    with pytest.raises(CheckpointError, match=r"^LlamaForCausalLM: the paged forward differs from transformers' own by \d\.\d\d \(relative\)"):
        load(folder)


def test_a_sliding_window_kept_in_a_mask_is_refused_unless_no_row_reaches_it(tmp_path: Path) -> None:
    config = PhimoeConfig(**SHAPE, num_local_experts=2, sliding_window=8, max_position_embeddings=64)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, load_format="dummy")
    assert str(error.value) == (
        "PhimoeForCausalLM applies its sliding window in a mask only, which a paged cache cannot see: set model.max_length to 8 or less"
    )
    assert load(tmp_path, load_format="dummy", max_length=8).max_length == 8


def test_deterministic_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(llama(tmp_path)).make_deterministic()
    assert str(error.value) == (
        "engine.deterministic=true needs batch-invariant kernels, and LlamaForCausalLM runs on transformers' own forward "
        "(fusing is turned off): set engine.deterministic=false"
    )


def test_a_state_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    target = load(llama(tmp_path))
    one = torch.zeros(1, dtype=torch.int32)
    layout = Layout(one, one.long(), one[None], one, 1, 1)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no state 3"):
        target.forward(one, layout, target.make_pool(1, 1), aux_layers=(3,))


def longrope(short: list[float], long: list[float], folder: Path) -> tuple[PreTrainedModel, Path]:
    rope = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": short, "long_factor": long}
    config = Phi3Config(**SHAPE, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=0)
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()
    return model, save(model, folder)


@pytest.mark.parametrize(("max_length", "short"), [(16, [1.0, 1.5, 2.0, 3.0]), (64, [2.0, 3.0, 4.0, 6.0])], ids=["short", "long"])
def test_longrope_factors_follow_the_jobs_length_whatever_the_prompt(tmp_path: Path, max_length: int, short: list[float]) -> None:
    long = [2.0, 3.0, 4.0, 6.0]
    _, folder = longrope([1.0, 1.5, 2.0, 3.0], long, tmp_path / "model")
    # The reference sees a short prompt, so it always uses its short factors: here set to those the job must use.
    reference, _ = longrope(short, long, tmp_path / "reference")
    ids = torch.tensor([5, 9, 33, 7, 12, 60, 2], dtype=torch.int32)
    target = load(folder, max_length=max_length)
    place = torch.arange(7)
    layout = Layout(place.int(), place + 8, torch.tensor([[1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 7, 7)
    got = target.logits(target.forward(ids, layout, target.make_pool(2, 8)).last)
    with torch.no_grad():
        want = reference(ids[None].long()).logits[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
