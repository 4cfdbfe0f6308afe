"""The drafters as trainable modules: EAGLE, EAGLE-3, DeepSeek-style MTP and DFlash, with their published tensor names.

Boundary: modules and the self-fed chain on whole sequences (no KV pool, no engine). Knows nothing of corpora, optimisers or files; a module's
``published`` method names its tensors as its checkpoint layout does. Shapes: B rows, T positions, H hidden size, V target vocabulary,
A anchors, b block size.

A *pair* at index p is (embedding of x[p+1], state at p), stands at RoPE position p, and predicts x[p+2]. At step 0 the state is the target's; at
step k it is the drafter's own output at p-1 of step k-1. A pair of step k belongs to the chain whose last committed pair is p-k: it attends to
step-0 pairs j <= p-k and to its own chain's pairs (step i at p-k+i, 1 <= i <= k), exactly what a drafter with a KV cache sees (EAGLE-3,
"training-time test", Li et al. 2025), for every chain of a row in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadShape:
    """Sizes shared by the heads; H, attention heads and KV heads follow the target."""

    hidden: int = 192
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 448
    rope_theta: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.heads


@dataclass
class TargetStates:
    """What a drafter may read of the target on x [B, T]: ``logits`` [B, T, V]; ``pre_norm`` and ``post_norm`` [B, T, H], the last state before and
    after the final norm; ``aux`` [B, T, 3H], the states after the chosen layers side by side."""

    logits: Tensor
    pre_norm: Tensor
    post_norm: Tensor
    aux: Tensor


class RMSNorm(nn.Module):
    """Llama's RMS norm: statistics in float32, weight in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply RoPE in Llama's half-split form to x [B, heads, T, d] at positions [T] or [B, T]."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[..., None] * inverse
    angle = angle if angle.dim() == 2 else angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def shift_right(x: Tensor, by: int, dim: int) -> Tensor:
    """x moved ``by`` places towards higher indices along ``dim``, zeros entering."""
    if by == 0:
        return x
    n = x.shape[dim]
    zeros = torch.zeros_like(x.narrow(dim, 0, min(by, n)))
    return torch.cat([zeros, x.narrow(dim, 0, max(0, n - by))], dim)


@dataclass
class ChainCache:
    """K and V [B, heads, T, d] of each step so far, heads repeated; step 0 first."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than H (EAGLE-3 feeds 2H); optional per-head q and k norms (DFlash)."""

    def __init__(self, shape: HeadShape, width: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.shape = shape
        d = shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * d, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.heads * d, shape.hidden, bias=False)
        self.q_norm: nn.Module = RMSNorm(d, shape.eps) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(d, shape.eps) if qk_norm else nn.Identity()

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, T, width] -> rotated queries [B, heads, T, d]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.shape.heads, -1))).transpose(1, 2)
        return rotate(q, positions, self.shape.rope_theta)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, width] -> rotated keys and values [B, heads, T, d], KV heads repeated."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.shape.kv_heads, -1))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.shape.kv_heads, -1)).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        return rotate(k, positions, self.shape.rope_theta).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def forward(self, x: Tensor, cache: ChainCache) -> Tensor:
        """One step of the self-fed chain (module docstring): appends this step's K and V to ``cache`` and returns [B, T, H]."""
        step, length = len(cache.keys), x.shape[1]
        positions = torch.arange(length, device=x.device)
        q = self.query(x, positions)
        k, v = self.key_value(x, positions)
        cache.keys.append(k)
        cache.values.append(v)
        out = _chain_attention(q, cache, step, positions) if step else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _chain_attention(q: Tensor, cache: ChainCache, step: int, positions: Tensor) -> Tensor:
    """Attention of step ``step`` >= 1: committed pairs j <= p - step of step 0, then one pair of each step 1..step on the diagonal."""
    scale = q.shape[-1] ** -0.5
    committed = (q @ cache.keys[0].transpose(-1, -2)) * scale
    committed = committed.masked_fill(positions[None, :] > positions[:, None] - step, float("-inf"))
    columns = []
    for i in range(1, step + 1):
        own = (q * shift_right(cache.keys[i], step - i, 2)).sum(-1, keepdim=True) * scale
        columns.append(own.masked_fill((positions < step - i)[:, None], float("-inf")))
    weights = torch.cat([committed, *columns], -1).float().softmax(-1).to(q.dtype)
    length = positions.shape[0]
    out = weights[..., :length] @ cache.values[0]
    for i in range(1, step + 1):
        out = out + weights[..., length + i - 1, None] * shift_right(cache.values[i], step - i, 2)
    return out


class Head(nn.Module):
    """A drafter fed with pairs. Subclasses say how a pair is mixed, which target state opens the chain and how logits are read."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    def first_state(self, states: TargetStates) -> Tensor:
        """The state [B, T, H] of step 0."""
        raise NotImplementedError

    def mix(self, embedded: Tensor, state: Tensor, cache: ChainCache) -> Tensor:
        """One pass over pairs: [B, T, H] each -> out [B, T, H], which is also the state fed onward."""
        raise NotImplementedError

    def logits(self, out: Tensor, head_VH: Tensor) -> Tensor:
        """Logits [B, T, V] (EAGLE-3: [B, T, Vd]); ``head_VH`` is the target's output matrix."""
        raise NotImplementedError

    def chain(self, embedded: Tensor, states: TargetStates, steps: int) -> list[Tensor]:
        """Outputs of ``steps`` self-fed steps. ``embedded`` [B, T, H] holds the embedding of x[p+1] at index p. Rows p < k of step k mean nothing."""
        cache = ChainCache()
        state, outs = self.first_state(states), []
        for _ in range(steps):
            outs.append(self.mix(embedded, state, cache))
            state = shift_right(outs[-1], 1, 1)
        return outs

    def published(self) -> dict[str, Tensor]:
        """State dict with the names of the published layout."""
        return dict(self.state_dict())


class Layer(nn.Module):
    """A Llama decoder layer; without its input norm (EAGLE-1), or with a wide attention input given by the caller (EAGLE-3)."""

    def __init__(self, shape: HeadShape, input_norm: bool = True, qk_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden, qk_norm)
        self.mlp = MLP(shape)
        self.input_layernorm: nn.Module = RMSNorm(shape.hidden, shape.eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cache: ChainCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(Head):
    """EAGLE-1 (Li et al. 2024): fc over [embedding, post-final-norm state], one layer without an input norm, the target's output matrix unnormed."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, input_norm=False)])

    def first_state(self, states: TargetStates) -> Tensor:
        return states.post_norm

    def mix(self, embedded: Tensor, state: Tensor, cache: ChainCache) -> Tensor:
        return self.layers[0](self.fc(torch.cat([embedded, state.to(embedded.dtype)], -1)), cache)

    def logits(self, out: Tensor, head_VH: Tensor) -> Tensor:
        return F.linear(out, head_VH)


class MtpHead(Head):
    """DeepSeek-V3's multi-token prediction module (2024, section 2.2): eh_proj over [enorm(embedding), hnorm(state)], one whole layer, then
    shared_head.norm and the target's output matrix.

    The state is the target's hidden state BEFORE the final norm, and onward the module's own output before shared_head.norm. The embedding at
    position 0 is not zeroed; an implementation that zeroes it changes the pair at index 0 alone, which costs nothing but a trace of acceptance.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.enorm = RMSNorm(shape.hidden, shape.eps)
        self.hnorm = RMSNorm(shape.hidden, shape.eps)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer = Layer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def first_state(self, states: TargetStates) -> Tensor:
        return states.pre_norm

    def mix(self, embedded: Tensor, state: Tensor, cache: ChainCache) -> Tensor:
        return self.layer(self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state.to(embedded.dtype))], -1)), cache)

    def logits(self, out: Tensor, head_VH: Tensor) -> Tensor:
        return F.linear(self.norm(out), head_VH)

    def published(self, prefix: str = "model.layers.6.") -> dict[str, Tensor]:
        """Names inside the target's own checkpoint, at layer index N (= number of target layers)."""
        names = {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("layer.")
            names[prefix + ("shared_head.norm.weight" if name == "norm.weight" else name)] = tensor
        return names


class _MidLayer(nn.Module):
    """EAGLE-3's layer: attention over cat[input_layernorm(embedding), hidden_norm(state)], residual = the un-normed state."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, embedded: Tensor, state: Tensor, cache: ChainCache) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        state = state + self.self_attn(x, cache)
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3Head(Head):
    """EAGLE-3 (Li et al. 2025): fc over three target states, one wide layer, its own norm and reduced output matrix.

    ``target_ids`` [Vd] int64, ascending: the target token of each draft token; stored as the offset ``d2t`` (target = i + d2t[i]) and the mask
    ``t2d`` [V].
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape, target_ids: Tensor, vocab_size: int) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(target_ids), bias=False)
        self.register_buffer("d2t", target_ids - torch.arange(len(target_ids), device=target_ids.device))
        mask = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids.device)
        mask[target_ids] = True
        self.register_buffer("t2d", mask)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64 target token ids of the draft vocabulary."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def first_state(self, states: TargetStates) -> Tensor:
        return self.fc(states.aux)

    def mix(self, embedded: Tensor, state: Tensor, cache: ChainCache) -> Tensor:
        return self.midlayer(embedded, state.to(embedded.dtype), cache)

    def logits(self, out: Tensor, head_VH: Tensor) -> Tensor:
        return self.lm_head(self.norm(out))


class DFlashHead(nn.Module):
    """DFlash (z-lab layout): a block [anchor, mask x (b-1)] denoised in one pass, bidirectional inside the block, over context K and V projected
    from three target states. Slot j >= 1 of a block anchored at a predicts x[a+j]; the context is every position before a."""

    def __init__(self, shape: HeadShape, layers: int = 1, block_size: int = 5, mask_token_id: int = 0) -> None:
        super().__init__()
        self.shape, self.block_size, self.mask_token_id = shape, block_size, mask_token_id
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([Layer(shape, qk_norm=True) for _ in range(layers)])
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, aux: Tensor, anchors: Tensor, tokens: Tensor, embedding_VH: Tensor) -> Tensor:
        """aux [B, T, 3H], anchors [B, A] int64 indices into tokens [B, T] -> normed outputs [B, A, b, H]."""
        rows, count = anchors.shape
        b, length = self.block_size, tokens.shape[1]
        ids = torch.full((rows, count, b), self.mask_token_id, device=tokens.device, dtype=torch.long)
        ids[..., 0] = tokens.gather(1, anchors)
        x = F.embedding(ids.flatten(1), embedding_VH)
        positions = (anchors[..., None] + torch.arange(b, device=tokens.device)).flatten(1)
        owner = torch.arange(count, device=tokens.device).repeat_interleave(b)
        context = torch.arange(length, device=tokens.device) < anchors.repeat_interleave(b, 1)[..., None]
        block = (owner[:, None] == owner[None, :]).expand(rows, -1, -1)
        mask = torch.cat([context, block], -1)[:, None]
        source = self.hidden_norm(self.fc(aux))
        for module in self.layers:
            layer: Any = module
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            k0, v0 = attention.key_value(source, torch.arange(length, device=tokens.device))
            k1, v1 = attention.key_value(h, positions)
            q, k, v = attention.query(h, positions), torch.cat([k0, k1], 2), torch.cat([v0, v1], 2)
            out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (count, b))

    def published(self) -> dict[str, Tensor]:
        """State dict with the names of the published layout."""
        return dict(self.state_dict())


def init_weights(module: nn.Module, std: float = 0.02) -> None:
    """Normal initialisation of every matrix, as transformers does for Llama."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=std)


@torch.no_grad()
def round_to_bf16(module: nn.Module) -> None:
    """Replace every floating-point weight by its bfloat16 value, in place and in the same type: what is measured is then what is saved."""
    for p in module.parameters():
        p.copy_(p.bfloat16())
