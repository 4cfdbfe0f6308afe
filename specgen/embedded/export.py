"""The family on disk: every model in the published checkpoint layout of its kind, in bfloat16, and the model card.

Boundary: trained modules and a log in, files out. Knows nothing of training or evaluation.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from specgen.embedded.corpus import BOS, END, EOS, LICENCE, PAD, save_tokenizer
from specgen.embedded.heads import DFlashHead, Eagle3Head, EagleHead, HeadShape, MtpHead
from specgen.embedded.target import AUX_LAYERS


def save_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write ``model.safetensors``: floating-point tensors in bfloat16, the others as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    out = {name: (t.bfloat16() if t.is_floating_point() else t).detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(out, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def write_json(value: Any, path: Path) -> None:
    """Write indented JSON with a final newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def llama_dict(model: LlamaForCausalLM, **extra: Any) -> dict[str, Any]:
    """config.json of a Llama model: the keys of every transformers generation, nothing else."""
    c = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        **extra,
    }


def save_llama(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, mtp: MtpHead | None = None) -> None:
    """A Hugging Face folder; with ``mtp``, the module's tensors stand in the same file at layer index N and the config says so."""
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    extra: dict[str, Any] = {}
    if mtp is not None:
        tensors |= mtp.published(f"model.layers.{model.config.num_hidden_layers}.")
        extra["num_nextn_predict_layers"] = 1
    save_weights(tensors, folder)
    write_json(llama_dict(model, **extra), folder / "config.json")
    write_json({"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD}, folder / "generation_config.json")
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def save_head(head: EagleHead | Eagle3Head | DFlashHead, target: LlamaForCausalLM, folder: Path) -> None:
    """A drafter's folder: config.json and model.safetensors. Embeddings, and the output matrix where the layout allows, stay the target's."""
    config = llama_dict(target, num_hidden_layers=1, intermediate_size=head.shape.intermediate, tie_word_embeddings=False)
    if isinstance(head, Eagle3Head):
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": int(head.d2t.shape[0]),
            "target_hidden_size": target.config.hidden_size,
            # Inside eagle_config the ids name the layer whose output is taken.
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in AUX_LAYERS], "use_aux_hidden_state": True},
        }
    elif isinstance(head, EagleHead):
        config["bias"] = False
    else:
        for key in ("mlp_bias", "pad_token_id"):
            config.pop(key)
        config |= {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": len(head.layers),
            "layer_types": ["full_attention"] * len(head.layers),
            "block_size": head.block_size,
            "num_target_layers": target.config.num_hidden_layers,
            "dflash_config": {"mask_token_id": head.mask_token_id, "target_layer_ids": [i - 1 for i in AUX_LAYERS]},
        }
    save_weights(head.published(), folder)
    write_json(config, folder / "config.json")


def shape_of(target: LlamaForCausalLM, intermediate: int) -> HeadShape:
    """Head sizes that follow a target."""
    c = target.config
    return HeadShape(c.hidden_size, c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads, intermediate, 10000.0, c.rms_norm_eps)


def write_tar(folder: Path, tar: Path) -> None:
    """Pack the family's folder, its name kept, replacing ``tar`` atomically."""
    tar.parent.mkdir(parents=True, exist_ok=True)
    partial = tar.with_suffix(".partial")
    with tarfile.open(partial, "w") as archive:
        archive.add(folder, arcname=folder.name)
    partial.replace(tar)


def folder_bytes(folder: Path) -> dict[str, int]:
    """Size of each file below ``folder``, and ``total``."""
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    return sizes | {"total": sum(sizes.values())}


def count_parameters(module: torch.nn.Module) -> int:
    """Distinct parameters of a module."""
    return sum(p.numel() for p in module.parameters())


_CARD = """---
license: psf-2.0
language: code
---
# The embedded family

A small language model of Python source and drafters for it, so that specgen has something real to run and to test on without a network.
It continues Python functions; it is not useful for anything else.

- Data: {licence} {files} files of Python {python}, {train_documents} documents ({train_tokens} tokens); {held_files} files held out whole.
- Made by: `{command}` on {device}, in {minutes} minutes (torch {torch}, transformers {transformers}); the whole log is `train_log.json`.
- Tokenizer: byte-level BPE of {vocab_size}; `<s>` before raw prompts; a chat template with `<|user|>`, `<|assistant|>`, `<|end|>`.

| model | folder | parameters | layout |
|---|---|---|---|
{models}

Weights are bfloat16. Drafters read the target's embeddings, and its output matrix where their layout allows.

## Acceptance

By the engine, on the {engine_rows} embedded prompts (`prompts.jsonl`), at most {engine_tokens} tokens each, {engine_dtype} on a CPU,
num_steps {engine_steps}. Tokens per decode step, the bonus token included; steps without a draft count, so that prompt lookup, which often
has none, compares.
`python -m specgen.embedded.measure` writes this table.

| | T = 0, topk 1 | T = 0, topk 4 | T = 0.8, topk 1 | T = 0.8, topk 4 |
|---|---|---|---|---|
{engine_table}

Offline, on {rows} held-out function heads, num_steps 4, topk 1: mean acceptance length, 1 + accepted / steps, over steps whose whole window
exists. These are files the target never saw, but of the library it was trained on; the prompts above are written by hand, and harder.

| | T = 0 | T = 0.8, coupled |
|---|---|---|
{acceptance}

## The target's training

Held-out loss, nats a token, after the same steps on the same batches by our loop (dropout {dropout}) and by transformers' Trainer
(AdamW, cosine schedule, no dropout). Ours ends at {held_loss}; the Trainer's best is {reference_loss}, after which it overfits.

| step | ours | Trainer |
|---|---|---|
{curves}

## Text

Repeated 4-grams (share of a text's 4-grams that occurred earlier in it), {engine_tokens} tokens over the embedded
prompts: {repeat_0} at T = 0, {repeat_8} at T = 0.8 (all rows together; at T = 0.8 the mean over seeds 0 to 4).

## Limits

- It has seen the standard library alone: it knows its idioms, repeats them, and loops at T = 0. The code it writes is rarely correct.
- Chat is a form it has seen ({chat_documents} exchanges made from docstrings), not an ability.
- Acceptance was measured in float32; a run in bfloat16 differs by near-ties.
- The text it was trained on is under the PSF licence; long verbatim runs of it can come out.
"""

MISSING = "not measured"
_NAMES = {"ngram": "prompt lookup", "draft_model": "draft model", "eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash"}


def _offline_table(held: dict[str, Any]) -> str:
    """Mean acceptance length of each drafter on held-out heads, a line each."""

    def cell(key: str, name: str) -> str:
        found = held.get(key, {}).get("drafters", {})
        return f"{found[name]['mean_length']:.2f}" if name in found else MISSING

    return "\n".join(f"| {label} | {cell('T0', n)} | {cell('T0.8', n)} |" for n, label in _NAMES.items() if cell("T0", n) != MISSING)


def _engine_table(found: dict[str, Any]) -> str:
    """Tokens per step of each drafter as the engine runs it, a line each."""

    def cell(key: str, name: str, topk: str) -> str:
        entry = found.get(key, {}).get(name, {}).get(topk)
        return "" if entry is None else f"{entry['tokens_per_step']:.2f}"

    columns = [(key, topk) for key in ("T0", "T0.8") for topk in ("1", "4")]
    measured = [name for name in _NAMES if name in found.get("T0", {})]
    lines = ["| " + " | ".join([_NAMES[name], *(cell(key, name, topk) for key, topk in columns)]) + " |" for name in measured]
    return "\n".join(lines) or f"| {MISSING} | | | | |"


def _curves(ours: list[list[Any]], theirs: list[list[Any]]) -> str:
    """Held-out losses by step, a line each; a curve's entry is [step, training loss, held-out loss]."""
    columns = [{step: held for step, _, held in curve if held is not None} for curve in (ours, theirs)]
    steps = sorted(set().union(*columns))
    cells = [[f"{column[step]:.4f}" if step in column else "" for column in columns] for step in steps]
    return "\n".join(f"| {step} | {left} | {right} |" for step, (left, right) in zip(steps, cells, strict=True)) or f"| {MISSING} | | |"


def render_card(log: dict[str, Any]) -> str:
    """The model card, every figure from the training log; an absent figure reads ``not measured``."""
    held, engine = log.get("evaluation", {}).get("held_out_heads", {}), log.get("engine", {})
    target, reference = log.get("target", {}), log.get("reference", {})
    repeated = {key: f"{100 * share:.0f}%" for key, share in engine.get("repeated_4grams", {}).items()}
    return _CARD.format(
        licence=LICENCE,
        models="\n".join(f"| {m['name']} | `{m['folder']}` | {m['parameters']:,} | {m['layout']} |" for m in log.get("models", [])),
        acceptance=_offline_table(held),
        rows=held.get("T0", {}).get("rows", MISSING),
        engine_table=_engine_table(engine.get("acceptance", {})),
        engine_rows=engine.get("rows", 32),
        engine_tokens=engine.get("max_tokens", 128),
        engine_dtype=engine.get("dtype", "float32"),
        engine_steps=engine.get("num_steps", 4),
        curves=_curves(target.get("curve", []), reference.get("curve", [])),
        dropout=log.get("dropout", MISSING),
        held_loss=target.get("held_out_loss", MISSING),
        reference_loss=reference.get("held_out_loss", MISSING),
        repeat_0=repeated.get("T0", MISSING),
        repeat_8=repeated.get("T0.8", MISSING),
        minutes=round(log.get("seconds", 0) / 60, 1),
        command=log["command"],
        device=log["device"],
        python=log["corpus"]["python"],
        torch=log["torch"],
        transformers=log["transformers"],
        **{k: log["corpus"][k] for k in ("files", "held_files", "train_documents", "train_tokens", "vocab_size", "chat_documents")},
    )
