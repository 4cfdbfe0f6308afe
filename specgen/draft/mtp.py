"""MTP: the multi-token-prediction modules that ship inside the target's own checkpoint.

Boundary: the network of one module; their names are ``mtp_layouts.py``, the draft loop of one module is ``autoregressive.py``, of several
``modules.py``.

Module k (DeepSeek-V3, section 2.2, counted from 0): eh_proj over cat[enorm(emb(x[p+k+1])), hnorm(the state at p of module k - 1, or of the target)],
a whole decoder layer, then shared_head.norm and the head, which gives x[p+k+2]. DeepSeek and GLM take and pass on states before the final norm; MiMo
concatenates [state, embedding] and, like Qwen, takes and passes on states after it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from specgen.draft.checkpoints import need, read_config
from specgen.draft.eagle import LayeredHead
from specgen.draft.mtp_layouts import MtpLayout, layout_of, module_count
from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.models.attention import KvPool
from specgen.models.decoder import LayerSpec, Tail, build_layer, input_norm, project_qkv, run_layer
from specgen.models.fuse import NotFusable, plan_for
from specgen.models.loader import read_tensors
from specgen.models.rope import RopeTable, config_rope_table
from specgen.models.target import Hidden, Target
from specgen.models.weights import TensorFiles
from specgen.types import Layout

log = logging.getLogger("specgen")
_told: set[Path] = set()  # checkpoints whose few modules the console was told of


def load_modules(folder: Path, target: Target, num_steps: int) -> list[MtpModule]:
    """The modules that drafts of ``num_steps`` use, module k for step k: all of them, or the first ``num_steps``.

    Steps beyond the modules use the last one again, which the console is told once a process. Raises CheckpointError for a checkpoint without
    modules or without their tensors, and for a target whose layers do not run here.
    """
    count = module_count(read_config(folder), folder)
    layout = layout_of(TensorFiles(folder).names, target.num_layers, folder)
    if num_steps > count:
        has = "1 MTP module, which every step uses" if count == 1 else f"{count} MTP modules; the steps after them use the last one again"
        # Each job's log has it, the console once, for a sweep would repeat it with every job.
        log.warning("draft.num_steps=%d: %s has %s", num_steps, folder, has, extra={"file_only": folder in _told})
        _told.add(folder)
    try:
        plan = plan_for(target.config)
    except NotFusable as reason:
        raise CheckpointError(f"{folder}: its MTP module cannot run: {reason}") from None
    rope = config_rope_table(target.config, target.max_length, target.device, plan.rope_types[-1])
    return [MtpModule(folder, target, layout, index, plan.layers[-1], rope) for index in range(min(num_steps, count))]


class MtpModule(LayeredHead):
    """One MTP module. Its KV is layer ``index`` of the pool it is given."""

    method = "mtp"

    def __init__(self, folder: Path, target: Target, layout: MtpLayout, index: int, spec: LayerSpec, rope: RopeTable) -> None:
        wanted = layout.weights(index, target.num_layers)
        tensors = read_tensors(folder, prefix=layout.prefixes(index, target.num_layers), device=target.device, dtype=target.dtype)
        need(tensors, wanted, folder, "mtp")
        prefix = layout.named(layout.layer, index, target.num_layers)
        super().__init__(target, [build_layer(tensors, prefix, spec, rope, target.device, target.dtype)])
        self.index, self.layout = index, layout
        self.enorm, self.hnorm, self.proj, self.norm = (tensors[name] for name in wanted)
        self.eps, self.plus_one = spec.eps, spec.plus_one
        self.prenorm = not layout.normed
        if layout.embed is not None:
            self.adopt_embedding(tensors, layout.named(layout.embed, index, target.num_layers))
        self.lm_head = None if layout.head is None else self._own_head(tensors.get(layout.named(layout.head, index, target.num_layers)))

    def _own_head(self, head: Tensor | None) -> Tensor | None:
        """The checkpoint's head, unless it repeats the target's."""
        theirs = self.target.lm_head_weight
        return None if head is not None and head.shape == theirs.shape and torch.equal(head, theirs) else head

    def features(self, hidden: Hidden) -> Tensor:
        states = hidden.last if self.layout.normed else hidden.prenorm
        assert states is not None
        return states

    def start(self, features: Tensor) -> Tensor:
        return features

    def _input(self, ids: Tensor, feed: Tensor) -> tuple[Tensor, Tensor]:
        """ids [T] int32 and states [T, E] -> (the layer's attention input, its stream), both [T, E]."""
        first = self.layout.state_first
        pair, _ = ops.pair_input(ids, self.table, feed, self.enorm, self.hnorm, self.eps, self.plus_one, feed_first=first)
        return input_norm(self.layers[0], ops.linear(pair, self.proj), None)

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, Tensor]:
        assert feed is not None
        normed, residual = self._input(ids, feed)
        out, residual = run_layer(self.layers[0], normed, residual, layout, *pool.layer(self.index), pool.page_size, tail=tail)
        states, stream = ops.add_rms_norm(out, residual, self.norm, self.eps, self.plus_one)
        return states, states if self.layout.normed else stream

    def write(self, ids: Tensor, feed: Tensor, layout: Layout, pool: KvPool) -> None:
        """Only the K and V that ``forward`` writes."""
        project_qkv(self.layers[0], self._input(ids, feed)[0], layout, *pool.layer(self.index))

    def logits(self, states: Tensor) -> Tensor:
        return self.target.logits(states) if self.lm_head is None else ops.linear(states, self.lm_head)
