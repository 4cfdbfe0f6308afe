"""The embedded family's text: the running Python's standard library, cut into documents, and the tokenizer trained on them.

Boundary: source files in, documents, token ids and a Hugging Face tokenizer folder out. Knows nothing of models or of torch.

A document is a whole function, a whole class (dedented) or a run of module-level statements. A file is held out as a whole, so that no
held-out document has a sibling in training, and a text that occurs in both parts is dropped from training.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, EOS = 0, 1, 2
END = SPECIAL_TOKENS.index("<|end|>")
LICENCE = "Trained on the source of the Python standard library, (c) Python Software Foundation, PSF License Agreement version 2."
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MIN_CHARS, MAX_CHARS = 40, 3000
_MODULE_RUN_CHARS = 1500


@dataclass(frozen=True)
class Document:
    """One text, the file it came from, and its kind: ``function``, ``class`` or ``module``."""

    text: str
    path: str
    kind: str
    held: bool


@dataclass
class Corpus:
    """Tokenised documents. ``train`` and ``held`` are [N] lists of int arrays ``<s> text </s>``; ``chat`` the same in the chat template.

    ``heads`` marks the rows of ``train`` (and ``held_heads`` of ``held``) that are whole functions: their beginnings serve as prompts.
    """

    tokenizer: Tokenizer
    train: list[np.ndarray]
    held: list[np.ndarray]
    chat: list[np.ndarray]
    heads: list[int]
    held_heads: list[int]
    sizes: dict[str, Any]


def is_held_out(path: str, percent: int = 5) -> bool:
    """Whether a file (path relative to the library's root) is held out: by the MD5 of its path, so that the split never depends on order."""
    return int(hashlib.md5(path.encode()).hexdigest(), 16) % 100 < percent


def cut(source: str) -> Iterator[tuple[str, str]]:
    """Yield (text, kind) for every function, class and module-level run of one source file; nothing for a file that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.end_lineno is not None:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield textwrap.dedent("".join(lines[first - 1 : node.end_lineno])), "class" if isinstance(node, ast.ClassDef) else "function"
    run: list[str] = []
    for statement in tree.body:
        plain = not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if plain and statement.end_lineno is not None:
            run += lines[statement.lineno - 1 : statement.end_lineno]
        if run and (not plain or sum(map(len, run)) > _MODULE_RUN_CHARS):
            yield "".join(run), "module"
            run = []
    if run:
        yield "".join(run), "module"


def read_documents(root: Path | None = None, limit_files: int | None = None) -> list[Document]:
    """Every distinct document of the library under ``root`` (default: the running Python's), in path order. ``limit_files`` takes a sample."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    if limit_files is not None:
        sample = random.Random(0).sample(paths, len(paths))
        sample.sort(key=lambda p: not is_held_out(p.relative_to(root).as_posix()))
        held = sum(is_held_out(p.relative_to(root).as_posix()) for p in sample)
        part = max(1, limit_files // 4)
        paths = sample[: min(part, held)] + sample[held : held + limit_files - part]
    found: dict[str, Document] = {}
    for path in sorted(paths, key=lambda p: not is_held_out(p.relative_to(root).as_posix())):  # held-out files first: they win a shared text
        name = path.relative_to(root).as_posix()
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        for text, kind in cut(source):
            text = text.strip()
            if MIN_CHARS <= len(text) <= MAX_CHARS and text not in found:
                found[text] = Document(text, name, kind, is_held_out(name))
    return sorted(found.values(), key=lambda d: (d.path, d.text))


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> Tokenizer:
    """A byte-level BPE whose plain encoding starts with ``<s>``; ids 0, 1, 2 are pad, begin and end, then the chat marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def chat_form(text: str) -> str | None:
    """A function as one chat exchange: its docstring's first line (or its name) asked for, the function answered. None without a function."""
    try:
        node = ast.parse(text).body[0]
    except (SyntaxError, ValueError, IndexError, RecursionError):
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
    ask = f"Write a Python function {node.name}." + (f" {summary}" if summary else "")
    return f"<|user|>{ask}<|end|><|assistant|>{text}<|end|>"


def build_corpus(root: Path | None = None, limit_files: int | None = None, vocab_size: int = 4096, seed: int = 0) -> Corpus:
    """Read, split, train the tokenizer on the training part alone, and encode. Every sixth training function is also given as a chat."""
    documents = read_documents(root, limit_files)
    random.Random(seed).shuffle(documents)
    train = [d for d in documents if not d.held]
    held = [d for d in documents if d.held]
    tokenizer = train_tokenizer([d.text for d in train], vocab_size)

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array([*e.ids, EOS], dtype=np.int32) for e in tokenizer.encode_batch(texts)]

    functions = [i for i, d in enumerate(train) if d.kind == "function"]
    chats = [c for i in functions[::6] if (c := chat_form(train[i].text)) is not None]
    corpus = Corpus(
        tokenizer=tokenizer,
        train=encode([d.text for d in train]),
        held=encode([d.text for d in held]),
        chat=encode(chats),
        heads=functions,
        held_heads=[i for i, d in enumerate(held) if d.kind == "function"],
        sizes={},
    )
    corpus.sizes = {
        "python": platform.python_version(),
        "files": len({d.path for d in documents}),
        "held_files": len({d.path for d in held}),
        "documents": {kind: sum(d.kind == kind for d in documents) for kind in ("function", "class", "module")},
        "train_documents": len(train),
        "held_documents": len(held),
        "chat_documents": len(chats),
        "train_tokens": int(sum(map(len, corpus.train)) + sum(map(len, corpus.chat))),
        "held_tokens": int(sum(map(len, corpus.held))),
        "characters": sum(len(d.text) for d in documents),
        "vocab_size": tokenizer.get_vocab_size(),
    }
    return corpus


def save_corpus(corpus: Corpus, folder: Path) -> None:
    """Write the corpus so that another machine trains on the same text: ``tokens.npz`` and ``tokenizer.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(corpus.tokenizer.to_str(pretty=False), encoding="utf-8")
    arrays: dict[str, Any] = {}
    for name in ("train", "held", "chat"):
        rows = getattr(corpus, name)
        arrays[name] = np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.uint16)
        arrays[name + "_lengths"] = np.array([len(r) for r in rows], dtype=np.int32)
    np.savez_compressed(
        folder / "tokens.npz", heads=np.array(corpus.heads), held_heads=np.array(corpus.held_heads), sizes=json.dumps(corpus.sizes), **arrays
    )


def load_corpus(folder: Path) -> Corpus:
    """What ``save_corpus`` wrote."""
    with np.load(folder / "tokens.npz") as data:
        rows = {}
        for name in ("train", "held", "chat"):
            rows[name] = np.split(data[name].astype(np.int32), np.cumsum(data[name + "_lengths"])[:-1]) if len(data[name + "_lengths"]) else []
        return Corpus(
            tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
            heads=data["heads"].tolist(),
            held_heads=data["held_heads"].tolist(),
            sizes=json.loads(str(data["sizes"])),
            **rows,
        )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` in Hugging Face form, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
