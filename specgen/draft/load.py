"""From the draft configuration to a drafter.

Boundary: picks the class and the folder; layouts are ``checkpoints.py``, networks one file each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specgen.config import DraftConfig, ModelConfig
from specgen.draft.autoregressive import AutoregressiveDrafter
from specgen.draft.base import Drafter
from specgen.draft.dflash import DFlashDrafter
from specgen.draft.draft_model import DraftModelHead, check_vocabulary
from specgen.draft.eagle import Eagle3Head, EagleHead
from specgen.draft.modules import ModularDrafter
from specgen.draft.mtp import load_modules
from specgen.draft.ngram import NgramDrafter
from specgen.draft.none import NoDraft
from specgen.draft.tree import check_draft_tokens, default_draft_tokens
from specgen.errors import ConfigError
from specgen.models.loader import load_target, local_folder
from specgen.models.target import Target

FAMILY = Path(__file__).resolve().parents[1] / "embedded" / "family"


def draft_folder(draft: DraftConfig, model: ModelConfig) -> Path:
    """The local folder of the drafter's weights; MTP reads the target's own."""
    if draft.method == "mtp":
        path = str(FAMILY / "target") if model.source == "embedded" else str(model.path)
        return local_folder(path, model.revision)
    if draft.path:
        return local_folder(draft.path, weights=draft.load_format != "dummy")
    if model.source == "embedded":
        return FAMILY / draft.method
    raise ConfigError(f"draft={draft.method} with model=hf needs a checkpoint: give draft.path=X, or draft=none")


def check_topk(topk: int, head: Any, target: Target) -> None:
    """Raise ConfigError when a head has fewer token ids than a node should have children."""
    model = head.model if isinstance(head, DraftModelHead) else target
    vocab = model.vocab_size if head.id_map is None else head.id_map.shape[0]
    if topk > vocab:
        raise ConfigError(f"draft.topk={topk} is more than the drafter's {vocab} token ids: choose a smaller draft.topk")


def load_drafter(draft: DraftConfig, model: ModelConfig, target: Target, tokenizer: Any | None = None) -> Drafter:
    """The drafter of a job on the target's device, without KV (``bind`` allocates it). Raises ConfigError or CheckpointError."""
    if draft.method == "none" or draft.num_steps == 0:
        return NoDraft()
    nodes = draft.num_draft_tokens or default_draft_tokens(draft.topk, draft.num_steps)
    check_draft_tokens(draft.topk, draft.num_steps, nodes)
    if draft.method == "ngram":
        return NgramDrafter(target.device, draft.num_steps, nodes, target.max_length)
    folder = draft_folder(draft, model)
    dummy = draft.load_format == "dummy"
    head: Any
    if draft.method == "draft_model":
        config = ModelConfig(source="hf", path=str(folder), dtype=model.dtype, max_length=target.max_length, load_format=draft.load_format)
        head = DraftModelHead(load_target(config, target.device, target.dtype, extend=True), target.vocab_size)
        if tokenizer is not None and not dummy and (folder / "tokenizer.json").exists():
            from transformers import AutoTokenizer

            check_vocabulary(tokenizer.get_vocab(), AutoTokenizer.from_pretrained(folder).get_vocab(), folder)
    elif draft.method == "eagle":
        head = EagleHead(folder, target, dummy)
    elif draft.method == "eagle3":
        head = Eagle3Head(folder, target, dummy)
    elif draft.method == "mtp":
        modules = load_modules(folder, target, draft.num_steps)
        if len(modules) > 1:
            check_topk(draft.topk, modules[0], target)
            return ModularDrafter(modules, draft.topk, draft.num_steps, nodes)
        head = modules[0]
    elif draft.method == "dflash":
        return DFlashDrafter(folder, target, draft.num_steps, nodes)
    else:
        raise ConfigError(f"draft={draft.method} is not supported in this version")
    check_topk(draft.topk, head, target)
    return AutoregressiveDrafter(head, draft.topk, draft.num_steps, nodes)
