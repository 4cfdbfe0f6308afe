"""Drafter checkpoints: reading published layouts, and refusing what does not fit, by name.

Boundary: files and shapes in, plain tensors and a config out. What the tensors compute is each drafter's own file. A head that is missing a tensor it
cannot borrow from the target, or whose shapes tell another method, is an error before any decoding: random or mismatched weights would run and
silently accept nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specgen.errors import CheckpointError, ConfigError


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a drafter's folder as a mapping. Raises CheckpointError naming the file."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; draft.path must be a folder with a drafter's config.json and weights") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return config


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of every safetensors tensor in a folder, from the headers alone; None when the folder has no safetensors file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with open(file, "rb") as handle:
                (size,) = struct.unpack("<Q", handle.read(8))
                header = json.loads(handle.read(size))
        except (OSError, ValueError, struct.error) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from None
        found.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return found


def kind_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Which method a head's tensors are for, by their shapes: ``eagle``, ``eagle3``, ``dflash``, ``draft_model``, or None when they do not tell."""
    names = set(shapes)
    fc = shapes.get("fc.weight")
    hidden = fc[0] if fc is not None else None  # fc's output, not config.json's word: a head of another width is told as that
    if any(name.startswith("midlayer.") for name in names) or "d2t" in names:
        return "eagle3"
    if "dflash_config" in config or "block_size" in config or config.get("speculators_model_type") == "dflash":
        return "dflash"
    if fc is not None and hidden:
        qkv = shapes.get("layers.0.self_attn.q_proj.weight")
        if qkv is not None and qkv[1] == 2 * hidden:
            return "eagle3"
        if fc[1] == 2 * hidden:
            return "eagle"
        if fc[1] > 2 * hidden:
            return "eagle3"
    if "model.embed_tokens.weight" in names:
        return "draft_model"
    return None


def check_kind(method: str, folder: Path) -> None:
    """Refuse a checkpoint whose tensors are another method's; needs neither torch nor the target."""
    config = read_config(folder)
    shapes = tensor_shapes(folder)
    if shapes is None:
        return
    kind = kind_of(config, shapes)
    if kind is not None and kind != method and not (kind == "draft_model" and method in ("mtp", "ngram")):
        fc = shapes.get("fc.weight")
        detail = f" (fc.weight is {fc[0]}x{fc[1]})" if fc else ""
        raise CheckpointError(f"{folder}: these weights are for draft={kind}{detail}, not draft={method}: use draft={kind}")


def check_steps(num_steps: int, folder: Path) -> None:
    """Refuse a draft longer than the block of a DFlash checkpoint, from its ``config.json`` alone."""
    block = block_size(read_config(folder))
    if block is not None and num_steps > block - 1:
        raise ConfigError(f"draft.num_steps={num_steps}: {folder} drafts blocks of {block}, so at most {block - 1} tokens a step")


def block_size(config: dict[str, Any]) -> int | None:
    """Tokens of a DFlash block, the root's included; None where the configuration does not say."""
    found = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    return None if found is None else int(found)


def need(tensors: dict[str, Any], names: Iterable[str], folder: Path, method: str) -> None:
    """Raise CheckpointError listing every name of ``names`` that the checkpoint lacks."""
    missing = sorted(name for name in names if name not in tensors)
    if missing:
        raise CheckpointError(f"{folder}: a draft={method} checkpoint needs {', '.join(missing)}, which it does not hold")


def check_width(folder: Path, ours: int, target: int) -> None:
    """A head reads the target's hidden states: their widths must agree."""
    if ours != target:
        raise CheckpointError(f"{folder}: the drafter reads hidden states of width {ours}, the target's are {target}: it belongs to another target")


def aux_layers(config: dict[str, Any], num_layers: int, folder: Path) -> tuple[int, ...]:
    """The EAGLE-3 auxiliary layers as "state after i layers".

    Three conventions are in use. speculators writes ``eagle_aux_hidden_state_layer_ids`` at the top level, already in this meaning. SpecForge and
    ModelOpt write
    it inside ``eagle_config`` as the index of the layer whose output is taken, one less. Without either, EAGLE's own default: 2, N//2, N-3.
    """
    name, within = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    if not isinstance(within, dict):
        raise CheckpointError(f"{folder}: config.json: eagle_config must be a mapping, not {within!r}")
    top, inner = config.get(name), within.get(name)
    given = top or inner or [2, num_layers // 2, num_layers - 3]
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        raise CheckpointError(f"{folder}: config.json: {name} must be a list of layer numbers, not {given!r}")
    layers = tuple(given) if top or not inner else tuple(layer + 1 for layer in given)
    if any(not 0 <= layer <= num_layers for layer in layers):
        raise CheckpointError(f"{folder}: its auxiliary layers {list(layers)} do not exist in a target of {num_layers} layers")
    return layers
