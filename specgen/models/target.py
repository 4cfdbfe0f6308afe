"""The target: token ids and a layout in, hidden states out; hidden states in, logits out.

Boundary: weights are already loaded (``loader.py``); it knows nothing of requests, sampling, drafters or pages beyond the pool it is handed. Two
implementations share the interface: ``FusedTarget`` (our layers, the families of ``fuse.py``) and ``HfTarget`` (any architecture of transformers
whose attention goes through the registered function). No forward reads a tensor on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specgen.kernels import ops
from specgen.models.attention import KvPool, KvShape, kv_bytes_per_token
from specgen.models.decoder import DecoderLayer, input_norm, run_layer
from specgen.models.fuse import Plan
from specgen.models.rope import RopeTable, config_rope_table
from specgen.models.tune import LayerTuner
from specgen.types import Layout


@dataclass
class Hidden:
    """States of one forward, model dtype: last [T, E] after the final norm, prenorm [T, E] before it, aux [T, n * E] in the order asked."""

    last: Tensor
    prenorm: Tensor | None = None
    aux: Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs. ``max_length`` bounds prompt + output; ``eos_ids`` end a row (possibly none)."""

    device: torch.device
    dtype: torch.dtype
    max_length: int
    eos_ids: tuple[int, ...] = ()


class Target(ABC):
    """A loaded causal language model on one device.

    ``fused`` tells which implementation it is, ``unfused_reason`` why it is not. Auxiliary id i is the residual stream after i layers (the input of
    layer i); i = num_layers is the state before the final norm.
    """

    fused: bool
    unfused_reason: str | None = None
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int
    eos_ids: tuple[int, ...]
    kv_spec: tuple[KvShape, ...]

    def __init__(self, config: PretrainedConfig, place: Placement) -> None:
        self.config, self.device, self.dtype, self.max_length, self.eos_ids = config, place.device, place.dtype, place.max_length, place.eos_ids
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, config.hidden_size, config.num_hidden_layers

    @property
    @abstractmethod
    def embed_weight(self) -> Tensor:
        """[V, E], unscaled."""

    @property
    @abstractmethod
    def lm_head_weight(self) -> Tensor:
        """[V, E]; the same tensor as ``embed_weight`` when tied."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] int32 -> the model's input embeddings [T, E], scaled as the model scales them."""

    @abstractmethod
    def forward(self, ids: Tensor, layout: Layout, pool: KvPool, aux_layers: tuple[int, ...] = (), prenorm: bool = False) -> Hidden:
        """Run T tokens, writing their K/V to ``pool`` at ``layout.slots``. ids [T] int32."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] after the final norm -> logits [n, V] in the model's dtype, the model's own capping and scaling included."""

    @abstractmethod
    def make_deterministic(self, on: bool = True) -> None:
        """From now on a row's result is the same bits whatever stands beside it and however its prompt is chunked (``on`` False: need not be);
        ConfigError if that cannot be."""

    def tune(self, tokens: int) -> None:  # noqa: B027 - most have nothing to tune
        """Choose kernels for decode forwards over ``tokens`` tokens, if that is still to be done: at start-up, never in a captured step."""

    def make_pool(self, num_pages: int, page_size: int) -> KvPool:
        """A zeroed pool for this model's layers; page 0 is scratch."""
        return KvPool.allocate(self.kv_spec, num_pages, page_size, self.dtype, self.device)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V one token takes over all layers."""
        return kv_bytes_per_token(self.kv_spec, self.dtype)


class FusedTarget(Target):
    """Our own forward over the checkpoint's weights, for the families of ``fuse.py``. Batch-invariant when the kernels are."""

    fused = True
    deterministic = False

    def __init__(self, config: PretrainedConfig, plan: Plan, place: Placement) -> None:
        """Allocates every weight, unfilled (device meta: for sizes and names only). A tied head is the embedding itself."""
        super().__init__(config, place)
        self.plan, device, dtype = plan, place.device, place.dtype
        self.kv_spec = tuple(spec.kv_shape for spec in plan.layers)
        self.ropes: dict[str | None, RopeTable] = {
            kind: config_rope_table(config, place.max_length, device, kind) for kind in dict.fromkeys(plan.rope_types)
        }
        self._embed = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self._head = self._embed if config.tie_word_embeddings else torch.empty_like(self._embed)
        self.norm = torch.empty(config.hidden_size, device=device, dtype=dtype)
        self.layers = [DecoderLayer.empty(spec, self.ropes[kind], device, dtype) for spec, kind in zip(plan.layers, plan.rope_types, strict=True)]
        self._tuner = LayerTuner()
        # The scale is rounded to the model's dtype, as the checkpoint was trained.
        self._scale = None if plan.embed_scale is None else float(torch.tensor(plan.embed_scale, dtype=dtype))

    def views(self) -> dict[str, Tensor]:
        """Destination of every checkpoint tensor by its published name; a tied head has none of its own."""
        found = {"model.embed_tokens.weight": self._embed, "model.norm.weight": self.norm}
        if self._head is not self._embed:
            found["lm_head.weight"] = self._head
        for index, layer in enumerate(self.layers):
            found.update({f"model.layers.{index}.{name}": view for name, view in layer.views().items()})
        return found

    def untie(self, head: Tensor) -> None:
        """Use a head of its own in a model whose config says tied (the checkpoint holds both and they differ)."""
        self._head = head

    @property
    def embed_weight(self) -> Tensor:
        return self._embed

    @property
    def lm_head_weight(self) -> Tensor:
        return self._head

    def embed(self, ids: Tensor) -> Tensor:
        x = ops.embed(ids, self._embed)
        return x if self._scale is None else x * self._scale

    def make_deterministic(self, on: bool = True) -> None:
        self.deterministic = on

    def tune(self, tokens: int) -> None:
        if not self.deterministic:
            self._tuner.ensure(self.layers, tokens)

    def forward(self, ids: Tensor, layout: Layout, pool: KvPool, aux_layers: tuple[int, ...] = (), prenorm: bool = False) -> Hidden:
        if layout.cu_q is None:
            self.tune(ids.shape[0])
        streams: dict[int, Tensor] = {}  # each norm makes a new stream, so one kept here stays as it is

        x, residual = self.embed(ids), None
        for index, layer in enumerate(self.layers):
            normed, stream = input_norm(layer, x, residual)
            if index in aux_layers:
                streams[index] = stream
            x, residual = run_layer(layer, normed, stream, layout, *pool.layer(index), pool.page_size, self.deterministic)
        first = self.plan.layers[0]
        last, stream = ops.add_rms_norm(x, residual, self.norm, first.eps, first.plus_one)
        streams[self.num_layers] = stream
        aux = torch.cat([streams[index] for index in aux_layers], 1) if aux_layers else None
        return Hidden(last, stream if prenorm else None, aux)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = ops.linear(hidden, self._head, deterministic=self.deterministic)
        cap = self.plan.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
