"""From a checkpoint to a ``Target``.

Boundary: folders, tensor files and configs in, a loaded model out. It runs no forward beyond the unfused target's checks, and knows nothing of
drafters: they read their own tensors with ``read_tensors``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specgen.config import ModelConfig
from specgen.errors import CapacityError, CheckpointError, ConfigError, SpecgenError
from specgen.models.attention import ATTENTION_NAME
from specgen.models.fuse import FAMILIES, LAYER_TYPES, NotFusable, Plan, plan_for
from specgen.models.hf_target import HfTarget
from specgen.models.rope import SUPPORTED, reachable_length, rope_parameters
from specgen.models.target import FusedTarget, Placement, Target
from specgen.models.weights import TensorFiles, local_folder, read_tensors
from specgen.readahead import available_memory

log = logging.getLogger(__name__)
__all__ = ["load_config", "load_target", "local_folder", "read_tensors"]

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded" / "family" / "target"
DUMMY_SEED = 0


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")  # the same in every layer, in every family that has them


def load_target(cfg: ModelConfig, device: torch.device | str, dtype: torch.dtype | str = "auto", fuse: bool = True, extend: bool = False) -> Target:
    """Load the target named by ``cfg`` onto ``device``.

    ``dtype``: a torch dtype, or a name as in ``model.dtype``; ``auto`` is the checkpoint's own. ``fuse`` False keeps transformers' forward.
    ``extend``: a ``max_length`` beyond the trained positions is allowed, with a warning (a draft model must follow its target: its guesses there are
    poor, the text is the same). Raises CheckpointError (missing folder, missing or unexpected tensors, an architecture that cannot run),
    CapacityError (weights do not fit) and ConfigError.
    """
    device = torch.device(device)
    config, folder = load_config(cfg)
    dummy = cfg.load_format == "dummy"
    files = None if dummy else TensorFiles(folder)
    refuse_unsupported(config, str(cfg.path or folder))
    chosen = dtype if isinstance(dtype, torch.dtype) else resolve_dtype(dtype, config, files, device)
    place = Placement(device, chosen, resolve_max_length(cfg.max_length, config, extend), read_eos_ids(folder, config))
    try:
        plan, reason = (plan_for(config), "") if fuse else (None, "fusing is turned off")
    except NotFusable as why:
        plan, reason = None, str(why)
    if plan is not None:
        return load_fused(config, plan, files, folder, place)
    log.info("%s runs unfused, on transformers' own forward: %s", folder, reason)
    return load_unfused(config, files, folder, place, reason, cfg.trust_remote_code)


def load_config(cfg: ModelConfig) -> tuple[PretrainedConfig, Path]:
    """The model's config and its local folder (a hub id is fetched, at ``cfg.revision``; small files only when the weights are random)."""
    if cfg.path is None and cfg.source != "embedded":
        raise ConfigError("model.path is not set: give a local folder or a hub id, model.path=X")
    path = str(EMBEDDED) if cfg.path is None else cfg.path
    folder = local_folder(path, cfg.revision, weights=cfg.load_format != "dummy", code=cfg.trust_remote_code)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json in the folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(f"{path}: the model brings code of its own: set model.trust_remote_code=true if you trust it") from error
        raise CheckpointError(f"{path}: config.json cannot be used: {' '.join(str(error).split())[:300]}") from error
    for name in SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise CheckpointError(f"{path}: config.json: {name}={size!r} is no size: it must be a whole number above 0")
    return config, folder


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Raise CheckpointError, with the reason, for architectures whose state cannot be rolled back or whose input is not text tokens alone."""
    if config.is_encoder_decoder:
        raise CheckpointError(f"{name}: {config.model_type} is an encoder-decoder; only decoder-only language models can run")
    text = config.get_text_config()
    odd_layers = sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYER_TYPES))
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False) or getattr(text, "mamba_d_state", None):
        raise CheckpointError(f"{name}: {config.model_type} keeps recurrent state, which cannot be rolled back after a rejected draft")
    if odd_layers:
        raise CheckpointError(
            f"{name}: {config.model_type} has layers of type {', '.join(odd_layers)}, whose state cannot be paged or rolled back; "
            f"only {' and '.join(LAYER_TYPES)} layers can run"
        )
    if "mrope_section" in rope_parameters(text):
        raise CheckpointError(f"{name}: {config.model_type} uses multi-axis rotary positions (mrope_section); only text-only models can run")
    if text is not config:
        raise CheckpointError(f"{name}: {config.model_type} is multimodal; use a text-only checkpoint of it")


def resolve_dtype(name: str, config: PretrainedConfig, files: TensorFiles | None, device: torch.device) -> torch.dtype:
    """The torch dtype of ``model.dtype``; ``auto``: the config's, else the first floating tensor's, else bfloat16 on CUDA, float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    found = getattr(config, "dtype", None)
    if found is None and files is not None:
        found = files.first_float_dtype()
    if isinstance(found, str):
        found = getattr(torch, found.removeprefix("torch."))
    return found or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def resolve_max_length(wanted: int | None, config: PretrainedConfig, extend: bool = False) -> int:
    """``model.max_length``, else the config's. Raises ConfigError for more than the positions the model was made for, unless ``extend``."""
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None:
        if wanted is None:
            raise ConfigError(f"{config.model_type} names no max_position_embeddings: set model.max_length")
        return wanted
    params = rope_parameters(config)
    reach = reachable_length(params, trained) if params["rope_type"] in SUPPORTED else trained
    if wanted is not None and wanted > reach and extend and config.model_type in FAMILIES:
        log.warning("%s was made for %d positions and may run to %d: drafts beyond are poor", config.model_type, reach, wanted)
    elif wanted is not None and wanted > reach:
        raise ConfigError(f"model.max_length={wanted} is more than the model's {reach} positions: set model.max_length to {reach} or less")
    return wanted or trained


def read_eos_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """The ids that end a row: generation_config.json's, else config.json's; one or a list; possibly none."""
    found: Any = None
    path = folder / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(int(i) for i in ids))


# ---- fused


def load_fused(config: PretrainedConfig, plan: Plan, files: TensorFiles | None, folder: Path, place: Placement) -> FusedTarget:
    """Allocate the fused target on the device and write each tensor of the files into its place, merged weights included; None = random weights."""
    views = FusedTarget(config, plan, replace(place, device=torch.device("meta"))).views()
    check_memory(sum(view.numel() for view in views.values()) * place.dtype.itemsize, place.device, folder)
    if files is None:
        target = FusedTarget(config, plan, place)
        fill_random(target.views(), config, plus_one=plan.layers[0].plus_one)
        return target
    names = check_names(files, views, config)
    target = FusedTarget(config, plan, place)
    files.copy_into({names[name]: view for name, view in target.views().items()})
    if "lm_head.weight" in names and "lm_head.weight" not in views:
        head = read_tensors(folder, names=[names["lm_head.weight"]], device=place.device, dtype=place.dtype)[names["lm_head.weight"]]
        if not torch.equal(head, target.embed_weight):
            log.warning("%s: the config ties lm_head to the embedding, but the files hold a different lm_head; the files' one is used", folder)
            target.untie(head)
    return target


def known_extra(name: str, num_layers: int) -> bool:
    """True for tensors a checkpoint may hold beyond the model: MTP layers, saved rotary buffers, attention mask constants."""
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    if layer and int(layer.group(1)) >= num_layers:
        return True
    return bool(re.match(r"(?:model\.)?mtp(?:_layers)?\.", name)) or name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias"))


def check_names(files: TensorFiles, views: Mapping[str, Tensor], config: PretrainedConfig) -> dict[str, str]:
    """Map each wanted name to the file's name. Raises CheckpointError listing missing, unexpected or misshapen tensors."""
    names = {name: name for name in files.names}
    if "model.embed_tokens.weight" not in names and "embed_tokens.weight" in names:
        # A checkpoint of the bare base model: its names lack the prefix.
        names = {(name if name.startswith("lm_head.") else f"model.{name}"): name for name in files.names}
    missing = sorted(set(views) - set(names))
    extra = sorted(n for n in set(names) - set(views) - {"lm_head.weight"} if not known_extra(n, config.num_hidden_layers))
    report_names(files.folder, missing, extra)
    for name, view in views.items():
        shape = files.shape(names[name])
        if shape is not None and tuple(shape) != tuple(view.shape):
            raise CheckpointError(f"{files.folder}: {name} has shape {list(shape)}, config.json says {list(view.shape)}")
    return {name: source for name, source in names.items() if name in views or name == "lm_head.weight"}


def report_names(folder: Path, missing: Iterable[str], extra: Iterable[str]) -> None:
    """Raise CheckpointError when a list is not empty, showing its first names."""

    def shown(names: list[str]) -> str:
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    parts = [f"{what} tensors: {shown(list(names))}" for what, names in (("missing", missing), ("unexpected", extra)) if names]
    if parts:
        raise CheckpointError(f"{folder}: the weights do not match config.json; {'; '.join(parts)}")


def fill_random(views: Mapping[str, Tensor], config: PretrainedConfig, plus_one: bool) -> None:
    """Random weights from a fixed seed, made on the device: norms are the identity, biases 0, matrices normal with the config's initializer range."""
    std = float(getattr(config, "initializer_range", None) or 0.02)
    generator: torch.Generator | None = None
    for name, view in views.items():
        if generator is None:
            generator = torch.Generator(view.device).manual_seed(DUMMY_SEED)
        if "norm" in name:
            view.fill_(0.0 if plus_one else 1.0)
        elif name.endswith(".bias"):
            view.zero_()
        else:
            view.normal_(0.0, std, generator=generator)


# ---- unfused


def load_unfused(
    config: PretrainedConfig, files: TensorFiles | None, folder: Path, place: Placement, reason: str, trust_remote_code: bool
) -> HfTarget:
    """transformers' model with the registered attention; None for ``files`` = random weights from a fixed seed."""
    options: dict[str, Any] = dict(dtype=place.dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            shape_only = AutoModelForCausalLM.from_config(config, **options)
        check_memory(sum(p.numel() * p.element_size() for p in shape_only.parameters()), place.device, folder)
        model = dummy_model(config, place, options) if files is None else transformers_model(config, folder, options)
        target = HfTarget(model.to(place.device), place, reason)
        target.check()
        return target
    except SpecgenError:
        raise
    except Exception as error:
        # Any architecture may come through here, remote code included: what it raises is about the checkpoint, not about us.
        if ATTENTION_NAME in str(error):
            raise CheckpointError(
                f"{folder}: {config.model_type} has its own table of attention functions, so it cannot run on a paged cache"
            ) from error
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: {config.model_type} cannot be loaded or run ({type(error).__name__}: {text})") from error


def dummy_model(config: PretrainedConfig, place: Placement, options: dict[str, Any]) -> Any:
    """The architecture's own initialisation from a fixed seed, made on the device."""
    with torch.random.fork_rng(devices=[place.device] if place.device.type == "cuda" else []), torch.device(place.device):
        torch.manual_seed(DUMMY_SEED)
        return AutoModelForCausalLM.from_config(config, **options)


def transformers_model(config: PretrainedConfig, folder: Path, options: dict[str, Any]) -> Any:
    """The checkpoint loaded by transformers, quietly. Raises CheckpointError for tensors missing, unexpected or of another shape."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, output_loading_info=True, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
    model, info = loaded
    wrong = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get("mismatched_keys") or ()]
    extra = sorted(name for name in info["unexpected_keys"] if not known_extra(name, config.num_hidden_layers))
    report_names(folder, sorted({*info["missing_keys"], *wrong}), extra)
    return model


def free_memory(device: torch.device) -> int | None:
    """Free bytes of the device; on a CPU what the kernel calls available; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def check_memory(needed: int, device: torch.device, folder: Path) -> None:
    """Raise CapacityError when weights of ``needed`` bytes are larger than the device's free memory."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise CapacityError(
            f"{folder}: the weights take {needed / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free: use a smaller model.dtype or device"
        )
