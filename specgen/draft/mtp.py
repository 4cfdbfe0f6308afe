"""MTP: the multi-token-prediction module that ships inside the target's own checkpoint (DeepSeek-V3's names, dense layers; MiMo's).

Boundary: the network only; the draft loop is ``autoregressive.py``.

One module (DeepSeek-V3, section 2.2): eh_proj over cat[enorm(emb(x[t+1])), hnorm(h[t])], a whole decoder layer, then shared_head.norm and the
head. DeepSeek and
GLM pair with the target's state before the final norm and feed the layer's output back before shared_head.norm; MiMo concatenates [hidden, emb] and
feeds back after its final norm.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specgen.draft.checkpoints import need
from specgen.draft.eagle import LayeredHead
from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.models.attention import KvPool
from specgen.models.decoder import Tail, build_layer, input_norm, run_layer
from specgen.models.fuse import NotFusable, plan_for
from specgen.models.loader import read_tensors
from specgen.models.rope import config_rope_table
from specgen.models.target import Hidden, Target
from specgen.types import Layout


class MtpHead(LayeredHead):
    """The first MTP module of a checkpoint."""

    method = "mtp"

    def __init__(self, folder: Path, target: Target) -> None:
        config = target.config
        count = int(getattr(config, "num_nextn_predict_layers", 0) or 0)
        if count < 1:
            raise CheckpointError(
                f"{folder}: config.json has no num_nextn_predict_layers, so the checkpoint carries no MTP module; choose another draft"
            )
        deepseek, mimo = f"model.layers.{target.num_layers}.", "model.mtp_layers.0."
        tensors = read_tensors(folder, prefix=(deepseek, mimo), device=target.device, dtype=target.dtype)
        self.mimo = f"{mimo}input_proj.weight" in tensors
        prefix = mimo if self.mimo else deepseek
        names = (
            ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            if self.mimo
            else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        )
        need(tensors, [f"{prefix}{name}.weight" for name in names], folder, "mtp")
        try:
            plan = plan_for(config)
        except NotFusable as reason:
            raise CheckpointError(f"{folder}: its MTP module cannot run: {reason}") from None
        rope = config_rope_table(config, target.max_length, target.device, plan.rope_types[-1])
        super().__init__(target, [build_layer(tensors, prefix, plan.layers[-1], rope, target.device, target.dtype)])
        self.enorm, self.hnorm, self.proj, self.norm = (tensors[f"{prefix}{name}.weight"] for name in names)
        self.eps, self.plus_one = plan.layers[-1].eps, plan.layers[-1].plus_one
        self.prenorm = not self.mimo
        self.adopt_embedding(tensors, f"{prefix}embed_tokens.weight")
        self.lm_head = tensors.get(f"{prefix}shared_head.head.weight")

    def features(self, hidden: Hidden) -> Tensor:
        states = hidden.last if self.mimo else hidden.prenorm
        assert states is not None
        return states

    def start(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, Tensor]:
        assert feed is not None
        pair, _ = ops.pair_input(ids, self.table, feed, self.enorm, self.hnorm, self.eps, self.plus_one, feed_first=self.mimo)
        x = ops.linear(pair, self.proj)
        normed, residual = input_norm(self.layers[0], x, None)
        out, residual = run_layer(self.layers[0], normed, residual, layout, *pool.layer(0), pool.page_size, tail=tail)
        states, stream = ops.add_rms_norm(out, residual, self.norm, self.eps, self.plus_one)
        return states, states if self.mimo else stream

    def logits(self, states: Tensor) -> Tensor:
        return self.target.logits(states) if self.lm_head is None else ops.linear(states, self.lm_head)
