"""Checkpoint folders of a given shape: config and tokenizer, and on request weights, random, in the published layout.

Boundary: writes folders that specgen's own loaders read; knows nothing of what is measured on them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specgen.config import ModelConfig
from specgen.draft.load import FAMILY
from specgen.models.fuse import plan_for
from specgen.models.loader import load_config
from specgen.models.target import FusedTarget, Placement

SHAPES = Path(__file__).parent / "shapes"
EMBEDDED = "embedded"
HEADS = {"llama31_8b": "llama31_8b_eagle3", EMBEDDED: str(FAMILY / "eagle3")}  # the EAGLE-3 head of a shape
SHARD_BYTES = 4 << 30


def head_folder(shape: str) -> str:
    """The folder of a shape's EAGLE-3 head: its config, and for the embedded one its weights."""
    return str(SHAPES / HEADS[shape])


def write_folder(shape: str, folder: Path) -> int:
    """The shape's config.json, with the embedded family's tokenizer widened to its vocabulary; returns the vocabulary's size.

    The further ids are words of a few letters, so that every id has a text, as in a real tokenizer.
    """
    source = FAMILY / "target" if shape == EMBEDDED else SHAPES / shape
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", folder / "config.json")
    shutil.copy(FAMILY / "target" / "tokenizer_config.json", folder / "tokenizer_config.json")
    size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    tokenizer = json.loads((FAMILY / "target" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"\u0120w{i}": i for i in range(len(vocab), size)})  # U+0120 stands for the blank in front
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return size


def write_weights(folder: Path, device: str, shard_bytes: int = SHARD_BYTES) -> int:
    """Random bfloat16 weights, made on ``device``, in shards of at most ``shard_bytes`` beside config.json; returns their bytes."""
    config, _ = load_config(ModelConfig(source="hf", path=str(folder), load_format="dummy"))
    meta = Placement(torch.device("meta"), torch.bfloat16, 16)
    views = FusedTarget(config, plan_for(config), meta).views()
    shards: list[list[str]] = [[]]
    held = 0
    for name, view in views.items():
        if held + 2 * view.numel() > shard_bytes and shards[-1]:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += 2 * view.numel()
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    generator = torch.Generator(device).manual_seed(0)
    for file, names in zip(files, shards, strict=True):
        save_file({name: _random(name, views[name].shape, generator) for name in names}, folder / file, metadata={"format": "pt"})
    total = sum(2 * view.numel() for view in views.values())
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=generator.device).normal_(0.0, 0.02, generator=generator).cpu()
