"""DFlash: a block of mask tokens denoised in one pass (Chen et al., z-lab's published layout).

Boundary: network, state and draft of this one method; acceptance and the target's side are the engine's. Drafts are chains.

Context keys and values are projected from the target's states, fc over several layers and a norm, straight into every draft layer's cache at their
true
positions; the root is not among them. A proposal embeds [root, mask, ..., mask] with the target's table at positions L .. L + b - 1 and runs the
layers once, every
query seeing the context and the whole block; slot j predicts the token at its own position L + j. The block's own K and V are overwritten when the
context of those positions arrives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specgen.draft.base import AcceptedRows, Drafter, PrefillRows, StepRows
from specgen.draft.checkpoints import block_size, check_kind, check_steps, check_width, need, read_config
from specgen.draft.eagle import head_config, layer_spec
from specgen.draft.ring import StateRing
from specgen.draft.sampled import draw_drafts
from specgen.draft.tree import rebuild_topk1_chain_buffers
from specgen.errors import CheckpointError, ConfigError
from specgen.kernels import ops
from specgen.kernels.reference_step import Keep
from specgen.models.attention import KvPool, kv_bytes_per_token
from specgen.models.decoder import build_layer, input_norm, project_qkv, run_layer
from specgen.models.loader import read_tensors
from specgen.models.rope import config_rope_table
from specgen.models.target import Hidden, Target
from specgen.types import Draft, Layout


def block_settings(raw: dict[str, Any], folder: Path, num_layers: int) -> tuple[int, int, tuple[int, ...]]:
    """(block size, mask token id, auxiliary layers as "state after i layers") of a config; ``target_layer_ids`` are indices of layer outputs."""
    inner = raw.get("dflash_config") or {}
    block, mask, ids = block_size(raw), inner.get("mask_token_id"), inner.get("target_layer_ids")
    if block is None or mask is None or not ids:
        raise CheckpointError(f"{folder}: a DFlash config.json needs block_size and dflash_config with mask_token_id and target_layer_ids")
    layers = tuple(i + 1 for i in ids)
    if any(not 0 <= i <= num_layers for i in layers):
        raise CheckpointError(f"{folder}: target_layer_ids {list(ids)} do not exist in a target of {num_layers} layers")
    return block, int(mask), layers


class DFlashDrafter(Drafter):
    """Proposes ``num_steps`` <= block size - 1 tokens in one pass; its only state is the context KV."""

    method = "dflash"

    def __init__(self, folder: Path, target: Target, num_steps: int, num_draft_tokens: int) -> None:
        if num_draft_tokens != num_steps + 1:
            raise ConfigError("draft=dflash proposes a chain: draft.topk must be 1")
        super().__init__(1, num_steps, num_draft_tokens)
        check_kind("dflash", folder)
        raw = read_config(folder)
        self.block, self.mask_id, self.aux_layers = block_settings(raw, folder, target.num_layers)
        check_steps(num_steps, folder)
        if set(raw.get("layer_types") or ()) - {"full_attention"} or raw.get("use_sliding_window"):
            raise CheckpointError(f"{folder}: DFlash heads with sliding-window layers are not supported")
        config: LlamaConfig = head_config({k: v for k, v in raw.items() if k not in ("layer_types", "sliding_window", "dflash_config")})
        check_width(folder, config.hidden_size, target.hidden_size)
        tensors = read_tensors(folder, device=target.device, dtype=target.dtype)
        need(tensors, ["fc.weight", "hidden_norm.weight", "norm.weight"], folder, "dflash")
        if any(name.startswith("candidate_selector.") for name in tensors):
            raise CheckpointError(f"{folder}: DFlash2 checkpoints (candidate_selector) are not supported")
        rope = config_rope_table(config, target.max_length, target.device)
        spec = layer_spec(config, input_norm=True, qk_norm="layers.0.self_attn.q_norm.weight" in tensors)
        self.layers = [build_layer(tensors, f"layers.{i}.", spec, rope, target.device, target.dtype) for i in range(config.num_hidden_layers)]
        self.target, self.eps = target, config.rms_norm_eps
        self.fc, self.hidden_norm, self.norm = (tensors[f"{name}.weight"] for name in ("fc", "hidden_norm", "norm"))

    def slots(self, num_steps: int) -> int:
        """A proposal writes the whole block."""
        return self.block

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token([layer.spec.kv_shape for layer in self.layers], self.target.dtype)

    def bind(self, max_slots: int, num_pages: int, page_size: int, max_batch: int) -> None:
        device = self.target.device
        shapes = [layer.spec.kv_shape for layer in self.layers]
        self.pool: Any = KvPool.allocate(shapes, num_pages, page_size, self.target.dtype, device)
        self.masks = torch.full((max_batch, self.block - 1), self.mask_id, dtype=torch.int32, device=device)
        # Every query of a block sees all of it.
        self.path = torch.arange(self.block, dtype=torch.int32, device=device).repeat(max_batch, self.block, 1)
        self.depths = torch.arange(self.num_steps, dtype=torch.int32, device=device)
        self.block_rows = torch.arange(max_batch, device=device)[:, None] * self.block + 1 + torch.arange(self.num_steps, device=device)
        self.chain = rebuild_topk1_chain_buffers(self.num_steps, max_batch, device, self.num_draft_tokens)

    def close(self) -> None:
        self.pool = None

    def use_steps(self, num_steps: int) -> None:
        self.chain = self.chain.for_steps(num_steps)

    def _write_context(self, features: Tensor, layout: Layout) -> None:
        """K and V of target states [T, n * E] into every layer's cache."""
        source = ops.rms_norm(ops.linear(features, self.fc), self.hidden_norm, self.eps)
        for index, layer in enumerate(self.layers):
            project_qkv(layer, source, layout, *self.pool.layer(index))

    def prefill(self, rows: PrefillRows) -> None:
        self._write_context(_aux(rows.hidden), rows.layout)

    def propose(self, rows: StepRows, num_steps: int) -> Draft:
        batch = rows.size
        ids = torch.cat([rows.root[:, None], self.masks[:batch]], 1).reshape(-1)
        layout = rows.place(self.block, path=self.path[:batch])
        x, residual = self.target.embed(ids), None
        for index, layer in enumerate(self.layers):
            normed, stream = input_norm(layer, x, residual)
            keys, values = self.pool.layer(index)
            x, residual = run_layer(layer, normed, stream, layout, keys, values, self.pool.page_size)
        states = ops.add_rms_norm(x, residual, self.norm, self.eps)[0]
        picked = ops.take_rows(states, self.block_rows[:batch, :num_steps].reshape(-1))
        s = rows.sampling
        logits = s.mask_draft(self.target.logits(picked), 0, None)
        t = (s.t[:, None] + self.depths[:num_steps]).reshape(-1) if "sampled" in s.features else s.t
        if self.rejection and "sampled" in s.features:
            tokens, q = draw_drafts(logits, s, t, 1, None)
            return Draft(token_ids=tokens.view(batch, num_steps), q=q.view(batch, num_steps, -1))
        tokens = ops.draft_argmax(logits, s.temperature, s.keys, t, None, s.features)
        tokens = tokens.view(batch, num_steps)
        return self.chain.draft(tokens.split(1, 1), tokens)

    def keep(self, rows: StepRows, hidden: Hidden, ring: StateRing) -> Keep:
        return ring.keep(rows, _aux(hidden))

    def catch_up(self, rows: StepRows, ring: StateRing, steps: int) -> None:
        for part in ring.replay(rows, steps, self.lead):
            assert part.states is not None
            self._write_context(part.states, part.layout)

    def observe(self, rows: StepRows, accepted: AcceptedRows) -> None:
        batch, width = accepted.tokens.shape
        features = _aux(accepted.hidden).view(batch, accepted.num_nodes, -1)[:, :width].reshape(batch * width, -1)
        self._write_context(features, rows.place(width, count=accepted.count))


def _aux(hidden: Hidden) -> Tensor:
    assert hidden.aux is not None
    return hidden.aux
