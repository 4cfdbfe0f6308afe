"""How MTP modules are named in checkpoints, and whether a folder holds those that a job needs.

Boundary: names, ``config.json`` and safetensors headers; needs neither torch nor the target, so that it is asked before any weight is read. What a
module computes is ``mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.draft.checkpoints import need, read_config, tensor_shapes
from specgen.errors import CheckpointError

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class MtpLayout:
    """One family's names; ``{i}`` is the module, counted from 0, ``{at}`` its place after the model's layers.

    layer: prefix of the decoder layer's tensors. embed_norm, state_norm, proj, norm: of the embedding, of the state, the projection of both, and
    before the head. embed, head: a module's own, where it may have them. state_first: the projection reads cat[state, embedding], else
    cat[embedding, state]. normed: the module pairs with the target's state after its final norm and passes its own on after ``norm``, else both
    before.
    """

    layer: str
    embed_norm: str
    state_norm: str
    proj: str
    norm: str
    embed: str | None = None
    head: str | None = None
    state_first: bool = False
    normed: bool = True

    def named(self, name: str, module: int, num_layers: int) -> str:
        """The full name of a tensor (or the prefix) of one module."""
        return name.format(i=module, at=num_layers + module)

    def weights(self, module: int, num_layers: int) -> list[str]:
        """The tensors beside the decoder layer's that a module must have: the two norms, the projection, the norm before the head."""
        return [self.named(name, module, num_layers) for name in (self.embed_norm, self.state_norm, self.proj, self.norm)]

    def prefixes(self, module: int, num_layers: int) -> tuple[str, ...]:
        """What the names of every tensor of a module start with."""
        return (self.named(self.layer, module, num_layers), *self.weights(module, num_layers))


_DEEPSEEK = "model.layers.{at}."
_MIMO = "model.mtp_layers.{i}."
DEEPSEEK = MtpLayout(
    layer=_DEEPSEEK,
    embed_norm=f"{_DEEPSEEK}enorm.weight",
    state_norm=f"{_DEEPSEEK}hnorm.weight",
    proj=f"{_DEEPSEEK}eh_proj.weight",
    norm=f"{_DEEPSEEK}shared_head.norm.weight",
    embed=f"{_DEEPSEEK}embed_tokens.weight",
    head=f"{_DEEPSEEK}shared_head.head.weight",
    normed=False,
)
MIMO = MtpLayout(
    layer=_MIMO,
    embed_norm=f"{_MIMO}token_layernorm.weight",
    state_norm=f"{_MIMO}hidden_layernorm.weight",
    proj=f"{_MIMO}input_proj.weight",
    norm=f"{_MIMO}final_layernorm.weight",
    state_first=True,
)
QWEN = MtpLayout(  # one projection and one set of norms, a decoder layer a module
    layer="mtp.layers.{i}.",
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    proj="mtp.fc.weight",
    norm="mtp.norm.weight",
)


def module_count(config: dict[str, Any], folder: Path) -> int:
    """How many modules ``config.json`` says there are. Raises CheckpointError for none."""
    count = next((value for key in COUNT_KEYS if (value := config.get(key))), 0)
    if not isinstance(count, int) or count < 1:
        raise CheckpointError(f"{folder}: config.json has no num_nextn_predict_layers, so the checkpoint carries no MTP module; choose another draft")
    return count


def layout_of(names: Iterable[str], num_layers: int, folder: Path) -> MtpLayout:
    """The layout of a checkpoint's tensor names: DeepSeek's when none of the others is there. Raises CheckpointError for one that is not read."""
    names = set(names)
    if any(".mtp_block." in name or name.startswith("mtp_block.") for name in names):
        raise CheckpointError(f"{folder}: MTP modules in ERNIE's layout (mtp_block) are not supported; choose another draft")
    return next((layout for layout in (MIMO, QWEN) if layout.named(layout.proj, 0, num_layers) in names), DEEPSEEK)


def check_modules(folder: Path, num_steps: int) -> int:
    """The number of modules of a target's folder. Raises CheckpointError when there is none, or when one that ``num_steps`` uses lacks a tensor."""
    config = read_config(folder)
    count = module_count(config, folder)
    shapes, num_layers = tensor_shapes(folder), config.get("num_hidden_layers")
    if shapes is not None and isinstance(num_layers, int):
        layout = layout_of(shapes, num_layers, folder)
        need(shapes, [name for module in range(min(num_steps, count)) for name in layout.weights(module, num_layers)], folder, "mtp")
    return count
