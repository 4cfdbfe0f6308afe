"""A checkpoint folder read as files: config.json parses, the tokenizer is there, the safetensors headers are whole.

Boundary: bytes and JSON; imports no torch, transformers or safetensors, and reads no tensor data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specgen.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
MAX_HEADER_BYTES = 100 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return found


def check_model(folder: Path, *, weights: bool, tokenizer: Callable[[], bool]) -> None:
    """A target's folder. ``weights``: they will be loaded; ``tokenizer()``: text must be tokenised (asked only when no tokenizer file is there)."""
    _check_config(folder)
    if (folder / "tokenizer.json").exists():
        read_json(folder / "tokenizer.json")
    elif not any((folder / name).exists() for name in TOKENIZER_FILES) and tokenizer():
        raise CheckpointError(f"{folder} holds no tokenizer.json, and the rows are text; add the tokenizer's files, or give rows with token_ids")
    if weights:
        check_weights(folder)


def check_draft(folder: Path, *, weights: bool) -> None:
    """A drafter's folder."""
    _check_config(folder)
    if weights:
        check_weights(folder)


def vocab_size(folder: Path) -> int | None:
    """The number of token ids that a target's ``config.json`` gives its model; None where it does not say. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) and size > 0 else None


def _check_config(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds no config.json; give the folder of a Hugging Face checkpoint")
    read_json(folder / "config.json")


def check_weights(folder: Path) -> None:
    """Weights are there and their safetensors headers are whole: every shard of an index, no file cut off."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    for index in indexes:
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            if not (folder / name).exists():
                raise CheckpointError(f"{folder} lacks {name}, which {index.name} lists; download it again")
    for path in files:
        read_header(path)
    if not files and not any(folder.glob("*.bin")) and not any(folder.glob("*.pt")):
        raise CheckpointError(f"{folder} holds no weights (*.safetensors); load_format=dummy runs with random ones")


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> {dtype, shape, data_offsets}. Raises CheckpointError when header or file is incomplete."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is cut off or not a safetensors file; download it again")
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header; download it again") from error
    if size != 8 + length + end:
        raise CheckpointError(f"{path} is cut off: {size} bytes, its header tells {8 + length + end}; download it again")
    return dict(header)
