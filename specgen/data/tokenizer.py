"""Tokenizers: loading one, text to ids and back.

Boundary: transformers is imported when a tokenizer is loaded, not before. Knows nothing of rows or templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen.errors import CheckpointError


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder or hub id. Raises CheckpointError when there is none or it cannot be built."""
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir() and not _has_tokenizer(folder):
        raise CheckpointError(
            f"{path}: no tokenizer files (tokenizer.json or tokenizer.model); only token_ids rows can run, or copy the tokenizer there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types: missing files, gated repositories, remote code refused
        why = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: the tokenizer, or config.json, which is read with it, cannot be loaded: {why}") from error
    if len(tokenizer) == 0:
        raise CheckpointError(f"{path}: the tokenizer has no vocabulary; its files are incomplete")
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "sentencepiece.bpe.model", "vocab.model")
    return any((folder / name).exists() for name in names) or any(folder.glob("*.tiktoken")) or any(folder.glob("*.py"))


def has_tokenizer(path: str) -> bool:
    """Whether a local folder holds tokenizer files; true for anything that is not a local folder."""
    folder = Path(path).expanduser()
    return not folder.is_dir() or _has_tokenizer(folder)


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of ``text``; ``special`` adds what the tokenizer adds by itself (BOS), never a second BOS before one the text already starts with."""
    ids = list(tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if special and bos is not None and ids[:2] == [bos, bos] and text.startswith(tokenizer.bos_token):
        return ids[1:]
    return ids


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS token before a text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and encode(tokenizer, "", special=True)[:1] == [bos]


def adds_eos(tokenizer: Any) -> bool:
    """Whether the tokenizer closes every text with EOS by itself (then a raw prompt ends before the model has spoken)."""
    eos = tokenizer.eos_token_id
    ids = encode(tokenizer, "", special=True)
    return eos is not None and ids[-1:] == [eos] and (len(ids) > 1 or eos != tokenizer.bos_token_id)


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of ``ids``, spaces left as the tokenizer's decoder makes them; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
