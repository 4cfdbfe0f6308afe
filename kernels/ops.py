"""The door: every op the engine may call, as a Triton kernel on CUDA and as its torch reference elsewhere.

Boundary: choice of implementation only. triton is imported at the first CUDA call, so a machine without a GPU or driver never needs it.
``SPECGEN_FORCE_TRITON=1`` together with ``TRITON_INTERPRET=1`` runs the kernels on the CPU (tests). Signatures and meaning: ``reference.py``.
Every op here may stand inside a CUDA graph: no host read of a device tensor, no synchronisation; outputs come from the allocator.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar

import torch

from . import reference, reference_rejection, reference_sampling, reference_step, reference_tree

F = TypeVar("F", bound=Callable[..., Any])


def use_triton(device: torch.device) -> bool:
    """Whether ops on this device run as Triton kernels."""
    if device.type == "cuda":
        return True
    return os.environ.get("SPECGEN_FORCE_TRITON") == "1" and os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _launcher(module: str, name: str) -> Callable[..., Any]:
    """The Triton launcher ``kernels/<module>.py:<name>``, imported on first use."""
    return getattr(import_module(f".{module}", __package__), name)


def door(definition: F, module: str, name: str | None = None) -> F:
    """An op: the launcher ``module.name`` where kernels run, else ``definition``. The first argument is a tensor and decides."""
    kernel = name or definition.__name__

    @wraps(definition)
    def op(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        device = first.device if isinstance(first, torch.Tensor) else first[0].device
        return _launcher(module, kernel)(*args, **kwargs) if use_triton(device) else definition(*args, **kwargs)

    return op  # type: ignore[return-value]


tree_attention = door(reference.tree_attention, "attention")
packed_attention = door(reference.packed_attention, "attention")
write_kv = door(reference.write_kv, "kv")
compact_kv = door(reference.compact_kv, "kv")
rms_norm = door(reference.rms_norm, "norm_rope")
add_rms_norm = door(reference.add_rms_norm, "norm_rope")
rope_write_kv = door(reference.rope_write_kv, "norm_rope")
pair_input = door(reference.pair_input, "draft_input")
silu_mul = door(reference.silu_mul, "activation")
gelu_tanh_mul = door(reference.gelu_tanh_mul, "activation")
embed = door(reference.embed, "activation")
argmax_rows = door(reference.argmax_rows, "activation")
linear = door(reference.linear, "linear")
linear_silu_mul = door(reference.linear_silu_mul, "linear")
slots_of = reference.slots_of

gumbel = door(reference_sampling.gumbel, "philox")
noise_words = door(reference_sampling.noise_words, "philox")
adjust_logits = door(reference_sampling.adjust_logits, "law")
commit_counts = reference_sampling.commit_counts
gumbel_argmax = door(reference_sampling.gumbel_argmax, "sampling")
draft_argmax = door(reference_sampling.draft_argmax, "sampling")
draft_topk = door(reference_sampling.draft_topk, "draft_topk")
coins_from_words = reference_rejection.coins_from_words
filtered_law = reference_rejection.filtered_law
draw_children = reference_rejection.draw_children
on_target_ids = reference_rejection.on_target_ids
judge_children = reference_rejection.judge_children
expand = door(reference_tree.expand, "tree")
select_ascending = door(reference_tree.select_ascending, "tree")
build_tree = door(reference_tree.build_tree, "tree")
tree_walk = door(reference_tree.tree_walk, "tree")
chain_walk = door(reference_tree.chain_walk, "tree")
path_tokens = reference_tree.path_tokens
next_token_ids_padded = door(reference_tree.next_token_ids_padded, "next_token")

begin_step = door(reference_step.begin_step, "step")
window = door(reference_step.window, "step")
finish_step = door(reference_step.finish_step, "step")
take_rows = door(reference_step.take_rows, "rows")
put_rows = door(reference_step.put_rows, "rows")
closing_pair = door(reference_step.closing_pair, "rows")
