"""The unfused target: a transformers model run through the registered attention function.

Boundary: takes a loaded ``PreTrainedModel`` of any architecture and makes it a ``Target``. It reads no checkpoint. The layers, the final norm and
the cache shape of each layer are found by probing, not by a table of families. What cannot be found is refused at once, with its name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgen.errors import CheckpointError, ConfigError
from specgen.models.attention import ATTENTION_NAME, AttentionContext, KvPool
from specgen.models.rope import frequencies, rope_parameters
from specgen.models.target import Hidden, Placement, Target
from specgen.types import Layout

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "embedding_norm", "layer_norm")

TOLERANCE = 0.1  # relative; bfloat16 forwards of deep models differ by 0.01 to 0.03


class HfTarget(Target):
    """transformers' forward; hooks on each layer's input and the final norm's input give the auxiliary states."""

    fused = False

    def __init__(self, model: PreTrainedModel, place: Placement, reason: str) -> None:
        """``model``: on the device, loaded with the registered attention. Raises CheckpointError when a layer has no pageable attention."""
        super().__init__(model.config, place)
        self.unfused_reason = reason
        self.model = model.eval().requires_grad_(False)
        self.base: Any = model.base_model
        if self.base is model:
            raise CheckpointError(f"{type(model).__name__} has no base model under its head")
        freeze_rotary(self.base, model.config, place.max_length)
        self._head_shell = _head_only(model)
        self._wanted: frozenset[int] = frozenset()
        self._states: dict[int, Tensor] = {}
        self._hook()
        self.kv_spec = self._probe()

    def _hook(self) -> None:
        layers = _layer_list(self.base, self.num_layers)
        final = _final_norm(self.base, layers)
        self.stops = self.num_layers + (final is not None)
        for index, module in enumerate([*layers, *([final] if final is not None else [])]):

            def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
                if index in self._wanted:
                    self._states[index] = (args[0] if args else kwargs["hidden_states"])[0]

            module.register_forward_pre_hook(record, with_kwargs=True)

    def _known(self, ids: Tensor) -> Tensor:
        # Absent draft nodes are -1; their states are never read, but an embedding lookup must not leave its table.
        return ids.clamp(0, self.embed_weight.shape[0] - 1)

    def _run(self, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        out = self.base(input_ids=ids[None].long(), position_ids=positions[None].long(), use_cache=False, specgen_context=context)
        return out.last_hidden_state[0]

    def _probe(self) -> tuple[Any, ...]:
        """Each layer's cache shape, from a forward of one token that attends to nothing."""
        context = AttentionContext()
        one = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._run(one, one, context)
        absent = [index for index in range(self.num_layers) if index not in context.seen]
        if absent:
            raise CheckpointError(
                f"{type(self.model).__name__}: layers {absent} keep no key-value cache that can be paged and rolled back; "
                "this architecture cannot run here"
            )
        window = getattr(self.config, "sliding_window", None)
        if window and window < self.max_length and not context.windowed:
            raise CheckpointError(
                f"{type(self.model).__name__} applies its sliding window in a mask only, which a paged cache cannot see: "
                f"set model.max_length to {window} or less"
            )
        return tuple(context.seen[index] for index in range(self.num_layers))

    def check(self) -> None:
        """Compare one packed forward with transformers' own attention. Raises CheckpointError when the architecture does not agree with it.

        A bias, a position scheme or a mask that never reaches the registered function shows here. The median over tokens is judged, so that a
        mixture-of-experts router that rounds another way for a token or two does not.
        """
        chunks = [9, 5]
        ids = (torch.arange(sum(chunks), device=self.device, dtype=torch.int32) * 37 + 11) % self.vocab_size
        positions = torch.cat([torch.arange(n, device=self.device, dtype=torch.int32) for n in chunks])
        table = torch.arange(1, 7, device=self.device, dtype=torch.int32).view(2, 3)
        slots = torch.cat(
            [table.repeat_interleave(4, 1)[row, :n].long() * 4 + torch.arange(n, device=self.device) % 4 for row, n in enumerate(chunks)]
        )
        cu_q = torch.tensor([0, 9, 14], device=self.device, dtype=torch.int32)
        layout = Layout(positions, slots, table, torch.zeros_like(table[:, 0]), 9, 9, cu_q=cu_q)
        got = self.forward(ids, layout, self.make_pool(7, 4)).last.float()
        self.model.set_attn_implementation("eager")
        try:
            parts = [self.base(input_ids=part[None].long(), use_cache=False).last_hidden_state[0] for part in ids.split(chunks)]
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        want = torch.cat(parts).float()
        # Tokens the checkpoint itself sends to NaN or infinity say nothing about the attention.
        sane = want.isfinite().all(-1)
        error = float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-6))[sane].median()) if sane.any() else 0.0
        if not error < TOLERANCE:
            raise CheckpointError(
                f"{type(self.model).__name__}: the paged forward differs from transformers' own by {error:.2f} (relative); "
                "this architecture cannot run here"
            )

    def make_deterministic(self, on: bool = True) -> None:
        if not on:
            return
        raise ConfigError(
            f"engine.deterministic=true needs batch-invariant kernels, and {type(self.model).__name__} runs on transformers' own forward "
            f"({self.unfused_reason}): set engine.deterministic=false"
        )

    @property
    def embed_weight(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(self._known(ids).long())

    def forward(self, ids: Tensor, layout: Layout, pool: KvPool, aux_layers: tuple[int, ...] = (), prenorm: bool = False) -> Hidden:
        self._wanted = frozenset(aux_layers) | ({self.num_layers} if prenorm else set())
        if max(self._wanted, default=0) >= self.stops:
            raise CheckpointError(f"{type(self.model).__name__} has no state {max(self._wanted)}: this drafter cannot be used with it")
        last = self._run(self._known(ids), layout.positions, AttentionContext(layout, pool))
        states, self._states, self._wanted = self._states, {}, frozenset()
        aux = torch.cat([states[index] for index in aux_layers], dim=-1) if aux_layers else None
        return Hidden(last, states[self.num_layers] if prenorm else None, aux)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head_shell(inputs_embeds=hidden[None], use_cache=False).logits[0]


class _States:
    """Stands for a base model's output: the states given, and None for anything else a head may ask for."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Tensor:
        return (self.last_hidden_state,)[index]


class _PassThrough(nn.Module):
    @property
    def decoder(self) -> _PassThrough:
        """Some heads call ``base.decoder`` rather than ``base``."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States(inputs_embeds)


def _head_only(model: PreTrainedModel) -> nn.Module:
    """The model with its base replaced by the identity on ``inputs_embeds``: its forward is then exactly head, scaling and capping."""
    shell = copy.copy(model)
    shell._modules = {**model._modules, model.base_model_prefix: _PassThrough()}
    return shell


def _layer_list(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and any("Attention" in type(m).__name__ for m in module[0].modules()):
            return module
    raise CheckpointError(f"{type(base).__name__}: no list of {count} decoder layers found")


def _final_norm(base: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    owner = next(module for module in base.modules() if any(child is layers for child in module.children()))
    for name in FINAL_NORMS:
        module = getattr(owner, name, None)
        if isinstance(module, nn.Module):
            return module
    return None


def freeze_rotary(base: nn.Module, config: Any, max_length: int) -> None:
    """Fix the frequencies of length-dependent rotary laws for ``max_length``.

    transformers re-chooses them at every forward from the batch's largest position, which reads the device and lets a row's text depend on its
    neighbours. Raises ConfigError for dynamic scaling beyond the trained length.
    """
    for module in base.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in ("dynamic", "longrope") or getattr(module, "inv_freq", None) is None:
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq, factor = frequencies(rope_parameters(config), head_dim, max_length, config.max_position_embeddings)
        module.inv_freq.copy_(inv_freq)  # type: ignore[operator, union-attr]
        module.attention_scaling = factor  # type: ignore[assignment]
        module.rope_type = "default"  # type: ignore[assignment]
