"""Loading a target is strict: every tensor has its place, every refusal names the thing and the remedy."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, FalconConfig, LlamaConfig, LlamaForCausalLM, MambaConfig, MixtralConfig, MixtralForCausalLM, Qwen3NextConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specgen.config import ModelConfig
from specgen.errors import CapacityError, CheckpointError, ConfigError
from specgen.models import loader, weights
from specgen.models.loader import SIZES, load_target, read_tensors
from specgen.models.target import FusedTarget
from specgen.models.weights import TensorFiles, Upload, local_folder

SHAPE = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def save(folder: Path, **options: Any) -> Path:
    """A tiny random Llama in ``folder``."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, "max_position_embeddings": 64, "eos_token_id": 2, **options})).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def load(folder: Path, dtype: str = "float32", fuse: bool = True, **options: Any) -> Any:
    return load_target(ModelConfig(source="hf", path=str(folder), **options), "cpu", dtype, fuse=fuse)


def edit(folder: Path, change: dict[str, Any] | None = None, drop: tuple[str, ...] = (), name: str = "model.safetensors") -> None:
    tensors = {key: value for key, value in load_file(folder / name).items() if key not in drop}
    save_file({**tensors, **(change or {})}, folder / name, metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def equal_weights(a: FusedTarget, b: FusedTarget) -> bool:
    mine, other = a.views(), b.views()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


# ---- formats


def test_sharded_and_pickled_checkpoints_load_the_same_weights(folder: Path, tmp_path: Path) -> None:
    single = load(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="6KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert equal_weights(load(tmp_path / "sharded"), single)
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    assert equal_weights(load(pickled), single)


def test_every_tensor_stands_where_its_name_says(folder: Path) -> None:
    tensors, layer = load_file(folder / "model.safetensors"), load(folder).layers[1]
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([tensors[name] for name in names]))
    assert torch.equal(layer.gate_up, torch.cat([tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up")]))


def test_names_without_the_model_prefix_are_accepted(folder: Path) -> None:
    want = load(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert equal_weights(load(folder), want)


def test_staged_upload_writes_what_a_direct_copy_writes() -> None:
    source, view = torch.arange(1000, dtype=torch.float32).view(50, 20), torch.zeros(50, 20, dtype=torch.bfloat16)
    upload = Upload(torch.device("cpu"), chunk_bytes=96, staged=True)
    upload(view, source)
    upload(view[:1], source[:1])
    upload.wait()
    assert torch.equal(view, source.to(torch.bfloat16))


def test_dtype_auto_is_the_configs_else_the_tensors(folder: Path) -> None:
    edit_config(folder, dtype="bfloat16", torch_dtype=None)
    assert load(folder, "auto").dtype == torch.bfloat16
    edit_config(folder, dtype=None, torch_dtype=None)
    edit(folder, {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()})
    target = load(folder, "auto")
    assert target.dtype == target.embed_weight.dtype == torch.float16


# ---- strictness


def test_missing_tensors_are_listed(folder: Path) -> None:
    edit(folder, drop=("model.norm.weight", "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == (
        f"{folder}: the weights do not match config.json; missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight"
    )


@pytest.mark.parametrize("fuse", [True, False])
def test_unexpected_tensors_are_listed(folder: Path, fuse: bool) -> None:
    edit(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})
    with pytest.raises(CheckpointError) as error:
        load(folder, fuse=fuse)
    assert str(error.value) == f"{folder}: the weights do not match config.json; unexpected tensors: model.layers.0.self_attn.q_proj.bias"


def test_unfused_missing_tensors_are_listed(folder: Path) -> None:
    edit(folder, drop=("model.norm.weight",))
    with pytest.raises(CheckpointError) as error:
        load(folder, fuse=False)
    assert str(error.value) == f"{folder}: the weights do not match config.json; missing tensors: model.norm.weight"


@pytest.mark.parametrize("fuse", [True, False])
def test_mtp_layers_and_saved_rotary_buffers_are_known_extras(folder: Path, fuse: bool) -> None:
    extras = (
        "model.layers.2.eh_proj.weight",
        "mtp.fc.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    edit(folder, {name: torch.zeros(4) for name in extras})
    assert load(folder, fuse=fuse).num_layers == 2


def test_another_shape_is_named_with_both(folder: Path) -> None:
    edit(folder, {"lm_head.weight": torch.zeros(60, 16)})
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == f"{folder}: lm_head.weight has shape [60, 16], config.json says [61, 16]"


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder)
    path.unlink()
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == f"{folder}: no weights (model.safetensors or pytorch_model.bin, single or with an index)"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == f"{folder}: model.safetensors.index.json names files that are absent: model-1.safetensors, model-2.safetensors"


def test_a_pickle_that_holds_more_than_tensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a readable tensor file"):
        load(folder)


# ---- tied heads


def test_a_tied_head_absent_from_the_file_is_the_embedding(tmp_path: Path) -> None:
    target = load(save(tmp_path / "tied", tie_word_embeddings=True))
    assert target.lm_head_weight is target.embed_weight


def test_a_tied_config_with_another_head_in_the_file_uses_the_files_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path / "tied", tie_word_embeddings=True)
    edit(folder, {"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()})
    target = load(folder)
    assert target.lm_head_weight is target.embed_weight
    head = torch.randn(61, 16)
    edit(folder, {"lm_head.weight": head})
    with caplog.at_level(logging.WARNING):
        assert torch.equal(load(folder).lm_head_weight, head)
    assert "hold a different lm_head; the files' one is used" in caplog.text


# ---- ids and lengths


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert load(folder).eos_ids == (2,)
    edit_config(folder, eos_token_id=[2, 3, 2])
    assert load(folder).eos_ids == (2, 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load(folder).eos_ids == (7, 5)


def test_max_length_is_the_configs_and_never_more(folder: Path) -> None:
    assert load(folder).max_length == 64
    assert load(folder, max_length=20).max_length == 20
    with pytest.raises(ConfigError) as error:
        load(folder, max_length=65)
    assert str(error.value) == "model.max_length=65 is more than the model's 64 positions: set model.max_length to 64 or less"
    longer = load_target(ModelConfig(source="hf", path=str(folder), max_length=100), "cpu", "float32", extend=True)
    assert longer.max_length == 100


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [-4, 0])
def test_a_size_that_is_none_is_refused_by_name(folder: Path, name: str, size: int) -> None:
    edit_config(folder, **{name: size})
    with pytest.raises(CheckpointError, match=f"config.json: {name}={size} is no size"):
        load(folder)


def test_the_sizes_of_every_decoder_that_transformers_knows_are_taken() -> None:
    """Some configurations refuse to be asked for what differs between layers."""
    seen = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # one that has no defaults
            continue
        assert all(getattr(config, name, None) is None or getattr(config, name) > 0 for name in SIZES), kind
        seen += 1
    assert seen > 100


def test_scaled_rotary_positions_may_be_used_to_their_scaled_length(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = save(tmp_path / "yarn", rope_parameters=yarn)
    assert load(folder).max_length == 64
    assert load(folder, max_length=256).max_length == 256


# ---- random weights


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), MixtralConfig(**SHAPE, num_local_experts=2)], ids=["fused", "unfused"])
def test_dummy_weights_need_config_json_alone_and_are_the_same_every_time(tmp_path: Path, config: Any) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    assert first.fused == (config.model_type == "llama")
    assert torch.equal(first.lm_head_weight, second.lm_head_weight)
    assert first.lm_head_weight.std() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(first.embed(torch.arange(61, dtype=torch.int32)), second.embed_weight)


# ---- refusals


def refusal(config: Any, tmp_path: Path, **options: Any) -> str:
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, load_format="dummy", **options)
    return str(error.value).removeprefix(f"{tmp_path}: ")


def test_recurrent_state_is_refused(tmp_path: Path) -> None:
    mamba = MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1)
    assert refusal(mamba, tmp_path / "a") == "mamba keeps recurrent state, which cannot be rolled back after a rejected draft"
    hybrid = Qwen3NextConfig(**SHAPE)
    assert refusal(hybrid, tmp_path / "b") == "qwen3_next keeps recurrent state, which cannot be rolled back after a rejected draft"


def test_unknown_layer_types_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(CheckpointError, match=r"llama has layers of type chunked_attention, whose state cannot be paged or rolled back; only"):
        load(tmp_path)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    bart = BartConfig(vocab_size=61, d_model=16)
    assert refusal(bart, tmp_path) == "bart is an encoder-decoder; only decoder-only language models can run"


def test_multi_axis_rotary_positions_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]})
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert str(error.value) == f"{tmp_path}: llama uses multi-axis rotary positions (mrope_section); only text-only models can run"


def test_an_architecture_with_its_own_attention_table_is_refused(tmp_path: Path) -> None:
    falcon = FalconConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert refusal(falcon, tmp_path) == "falcon has its own table of attention functions, so it cannot run on a paged cache"


def test_weights_that_do_not_fit_are_refused_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_memory", lambda device: 1000)
    for fuse in (True, False):
        with pytest.raises(CapacityError, match=r"the weights take 0\.0 GiB and cpu has 0\.0 GiB free: use a smaller model\.dtype or device"):
            load(folder, fuse=fuse)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "nowhere")
    assert str(error.value) == f"{tmp_path / 'nowhere'}: no such folder"
    with pytest.raises(CheckpointError, match=r"no config\.json in the folder"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="has no revisions"):
        load(save(tmp_path / "m"), revision="main")


# ---- reading tensors, hub snapshots


def test_read_tensors_filters_converts_floats_and_keeps_the_rest(tmp_path: Path) -> None:
    tensors = {"a.w": torch.ones(2, dtype=torch.float32), "a.n": torch.tensor([1, 2]), "a.t": torch.tensor([True]), "b.w": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    got = read_tensors(tmp_path, prefix="a.", dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in got.items()} == {"a.w": torch.bfloat16, "a.n": torch.int64, "a.t": torch.bool}
    assert list(read_tensors(tmp_path, names=["b.w"])) == ["b.w"]
    with pytest.raises(CheckpointError, match=r"missing tensors c\.w"):
        read_tensors(tmp_path, names=["b.w", "c.w"])
    assert TensorFiles(tmp_path).shape("b.w") == (3,)


@pytest.mark.parametrize(
    ("listing", "fetched"),
    [
        ({"model.safetensors": "", "consolidated.safetensors": ""}, [["model.safetensors"]]),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "m2", "b": "m1"}}', "m1": "", "m2": ""}, [["m1", "m2"]]),
        ({"pytorch_model.bin": ""}, [["model.safetensors"], ["pytorch_model.bin"]]),
    ],
)
def test_a_hub_snapshot_is_of_one_commit_and_fetches_only_the_weights_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: dict[str, str], fetched: list[list[str]]
) -> None:
    import huggingface_hub

    calls: list[tuple[str | None, list[str]]] = []

    def snapshot(path: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((revision, allow_patterns))
        commit = tmp_path / "c0ffee"
        commit.mkdir(exist_ok=True)
        for name, text in listing.items():
            if name in allow_patterns or (name.endswith(".json") and "*.json" in allow_patterns):
                (commit / name).write_text(text)
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_folder("owner/name", "v1") == tmp_path / "c0ffee"
    assert calls[0] == ("v1", list(weights.SMALL_FILES))
    assert calls[1:] == [("c0ffee", wanted) for wanted in fetched]


def test_unfused_mixture_of_experts_loads_from_its_published_names(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2, max_position_embeddings=64)).eval()
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    assert (target.fused, target.unfused_reason) == (False, "no fused forward for model type 'mixtral'")
    assert torch.equal(target.lm_head_weight, model.lm_head.weight)
