"""The target as the training program sees it: its shape, its inner states, its own text.

Boundary: transformers' Llama and whole sequences. Knows nothing of drafters or optimisers.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specgen.embedded.corpus import BOS, END, EOS, PAD
from specgen.embedded.heads import TargetStates

AUX_LAYERS = (1, 3, 5)  # id i is the state after i layers


def llama_config(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, max_length: int = 1024, **extra: Any
) -> LlamaConfig:
    """A tied Llama configuration with this family's token ids."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        tie_word_embeddings=True,
        max_position_embeddings=max_length,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **extra,
    )


def target_states(target: LlamaForCausalLM, tokens: Tensor, aux_layers: Sequence[int] = AUX_LAYERS) -> TargetStates:
    """Run the target on tokens [B, T] (right-padded rows need no mask under causal attention) and read the states drafters use."""
    seen: dict[int, Tensor] = {}
    handles = []
    for i in aux_layers:
        handles.append(
            target.model.layers[i - 1].register_forward_hook(lambda _m, _a, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out))
        )
    handles.append(target.model.norm.register_forward_pre_hook(lambda _m, args: seen.__setitem__(-1, args[0])))
    try:
        post = target.model(tokens, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return TargetStates(target.lm_head(post), seen[-1], post, torch.cat([seen[i] for i in aux_layers], -1))


def pick(logits: Tensor, temperature: float, noise: Tensor | None = None) -> Tensor:
    """argmax of logits [..., V], or of logits / temperature + Gumbel noise (drawn here when not given)."""
    if temperature == 0:
        return logits.argmax(-1)
    if noise is None:
        noise = -torch.empty_like(logits).exponential_().log()
    return (logits / temperature + noise).argmax(-1)


@torch.no_grad()
def generate_rows(target: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Continue equally long prompts [B, P] -> [B, P + new_tokens]; the first half of the rows greedily, the second at ``temperature``.

    What follows an end token is ``PAD``.
    """
    keyword = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
    cache, half = DynamicCache(config=target.config), (prompts.shape[0] + 1) // 2
    rows, current = [prompts], prompts
    done = torch.zeros(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    for _ in range(new_tokens):
        z = target(current, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits[:, -1].float()
        token = torch.where(done, PAD, torch.cat([pick(z[:half], 0.0), pick(z[half:], temperature)]))
        done = done | (token == EOS) | (token == END)
        rows.append(token[:, None])
        current = token[:, None]
    return torch.cat(rows, 1)


@torch.no_grad()
def on_policy_rows(
    target: LlamaForCausalLM, heads: list[np.ndarray], per_batch: int, width: int, lengths: Sequence[int], seed: int
) -> list[np.ndarray]:
    """The target's own text: from the first ``lengths[i]`` tokens of training functions, up to ``width`` tokens in all, half at T = 0, half at
    T = 0.8."""
    device = target.device
    model: Any = copy.deepcopy(target).bfloat16() if device.type == "cuda" else target
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    for length in lengths:
        fitting = [i for i, r in enumerate(heads) if len(r) > length + 4]
        chosen = rng.choice(fitting, size=min(per_batch, len(fitting)), replace=False)
        prompts = torch.from_numpy(np.stack([heads[i][:length] for i in chosen]).astype(np.int64)).to(device)
        text = generate_rows(model, prompts, width - length, 0.8).cpu().numpy()
        ends = np.where((text == PAD).any(1), (text == PAD).argmax(1), width)
        rows += [row[:n] for row, n in zip(text.astype(np.int32), ends.tolist(), strict=True) if n > length + 1]
    return rows


@torch.no_grad()
def generate_ragged(
    target: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int, temperature: float, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Continue prompts of any lengths by whole recomputation: no cache, no padding on the left, so the states are those of a plain forward.

    noise [B, L, V] by absolute position, L = longest prompt + new_tokens, or None at T = 0. Returns tokens [B, L] (``PAD`` beyond each row's end) and
    ends [B] (number of tokens of each row, prompt included).
    """
    device = target.device
    starts = torch.tensor([len(p) for p in prompts], device=device)
    total = int(starts.max()) + new_tokens
    tokens = torch.full((len(prompts), total), PAD, dtype=torch.long, device=device)
    for i, p in enumerate(prompts):
        tokens[i, : len(p)] = torch.tensor(p, device=device)
    at, row = starts.clone(), torch.arange(len(prompts), device=device)
    done = torch.zeros_like(at, dtype=torch.bool)
    for step in range(new_tokens):
        seen = min(total, math.ceil((int(max(map(len, prompts))) + step) / 32) * 32)
        hidden = target.model(tokens[:, :seen], use_cache=False).last_hidden_state
        z = target.lm_head(hidden[row, at - 1]).float()
        token = pick(z, temperature, None if noise is None else noise[row, at])
        tokens[row, at] = torch.where(done, tokens[row, at], token)
        at = torch.where(done, at, at + 1)
        done = done | (token == EOS) | (token == END) | (at >= starts + new_tokens)
    return tokens, at
