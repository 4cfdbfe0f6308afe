"""RMS norm with the residual addition, and rotary embedding fused with per-head norms and the write of K and V into the pool.

Boundary: kernels and launchers only; rounding and argument meaning are those of ``reference.py`` (norms round where transformers rounds).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv import not_finite
from .launch import pdl_options, pdl_wait


@triton.jit
def _norm_kernel(
    x, residual, weight, normed, total, x_stride, residual_stride, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    mask = o < H
    scale = tl.load(weight + o, mask=mask, other=0.0)  # a parameter: no kernel before this one writes it
    pdl_wait(PDL)
    value = tl.load(x + row * x_stride + o, mask=mask, other=0.0)
    if ADD:
        addend = tl.load(residual + row * residual_stride + o, mask=mask, other=0.0)
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(value.dtype)
        tl.store(total + row * H + o, value, mask=mask)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    if PLUS_ONE:
        result = (wide * (1.0 + scale.to(tl.float32))).to(value.dtype)
    else:
        result = (wide.to(value.dtype).to(tl.float32) * scale.to(tl.float32)).to(value.dtype)
    tl.store(normed + row * H + o, result, mask=mask)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    tokens, hidden = x.shape
    normed = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _norm_kernel[(tokens,)](
            x, x if residual is None else residual, weight, normed, total, x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps,
            H=hidden, BLOCK=block, ADD=residual is not None, PLUS_ONE=plus_one, num_warps=min(16, max(1, block // 512)), **pdl_options(x.device),
        )  # fmt: skip
    return normed, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """``reference.rms_norm`` on the device; x [T, H] with contiguous rows."""
    return _norm(x, None, weight, eps, plus_one)[0]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool = False) -> tuple[Tensor, Tensor]:
    """``reference.add_rms_norm`` on the device, one kernel; with no residual the second result is x itself."""
    return _norm(x, residual, weight, eps, plus_one)


@triton.jit
def _rope_kernel(
    qkv, cos, sin, positions, slots, q_norm, k_norm, q_out, k_pool, v_pool, qkv_stride, k_stride_n, k_stride_h, v_stride_n, v_stride_h, eps,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    DP: tl.constexpr, HB: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HB heads of one kind (query, key or value) of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (H + HB - 1) // HB
    k_blocks: tl.constexpr = (HK + HB - 1) // HB
    lane = tl.arange(0, HB)
    pdl_wait(PDL)
    if block < q_blocks:
        head = block * HB + lane
        source = qkv + token * qkv_stride + head * D
        target = q_out + (token * H + head) * D
        fine = head < 0
        _turn(source, target, head < H, fine, cos, sin, tl.load(positions + token), q_norm, eps, D, HALF, HALF_PAD, REST, REST_PAD, Q_NORM, PLUS_ONE)
    elif block < q_blocks + k_blocks:
        head = (block - q_blocks) * HB + lane
        slot = tl.load(slots + token).to(tl.int64)
        source = qkv + token * qkv_stride + (H + head) * D
        target = k_pool + slot * k_stride_n + head * k_stride_h
        # A key whose value is not finite becomes NaN, and the value 0 (``reference.write_kv``).
        d = tl.arange(0, DP)
        mask = (head < HK)[:, None] & (d < D)[None, :]
        broken = not_finite(tl.load(qkv + token * qkv_stride + ((H + HK + head) * D)[:, None] + d[None, :], mask=mask, other=0.0))
        _turn(
            source, target, head < HK, broken, cos, sin, tl.load(positions + token), k_norm, eps, D, HALF, HALF_PAD, REST, REST_PAD, K_NORM, PLUS_ONE
        )
    else:
        head = (block - q_blocks - k_blocks) * HB + lane
        slot = tl.load(slots + token).to(tl.int64)
        d = tl.arange(0, DP)
        mask = (head < HK)[:, None] & (d < D)[None, :]
        value = tl.load(qkv + token * qkv_stride + ((H + HK + head) * D)[:, None] + d[None, :], mask=mask, other=0.0)
        value = tl.where(not_finite(value)[:, None], 0.0, value)
        tl.store(v_pool + slot * v_stride_n + (head * v_stride_h)[:, None] + d[None, :], value.to(v_pool.dtype.element_ty), mask=mask)


@triton.jit
def _turn(
    source, target, ok, broken, cos, sin, position, weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads whose rows start at ``source`` [HB] and store them at ``target`` [HB]; ``broken`` ones as NaN."""
    o = tl.arange(0, HALF_PAD)
    mask = ok[:, None] & (o < HALF)[None, :]
    first = tl.load(source[:, None] + o[None, :], mask=mask, other=0.0)
    second = tl.load(source[:, None] + HALF + o[None, :], mask=mask, other=0.0)
    c = tl.load(cos + position.to(tl.int64) * HALF + o, mask=o < HALF, other=0.0)[None, :]
    s = tl.load(sin + position.to(tl.int64) * HALF + o, mask=o < HALF, other=0.0)[None, :]
    square = tl.sum(first.to(tl.float32) * first.to(tl.float32) + second.to(tl.float32) * second.to(tl.float32), 1)
    if REST > 0:
        r = tl.arange(0, REST_PAD)
        rest_mask = ok[:, None] & (r < REST)[None, :]
        rest = tl.load(source[:, None] + 2 * HALF + r[None, :], mask=rest_mask, other=0.0)
        square += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    if NORM:
        factor = tl.rsqrt(square / D + eps)[:, None]
        first = _scale(first, factor, tl.load(weight + o, mask=o < HALF, other=0.0)[None, :], PLUS_ONE)
        second = _scale(second, factor, tl.load(weight + HALF + o, mask=o < HALF, other=0.0)[None, :], PLUS_ONE)
        if REST > 0:
            rest = _scale(rest, factor, tl.load(weight + 2 * HALF + r, mask=r < REST, other=0.0)[None, :], PLUS_ONE)
    a = tl.where(broken[:, None], float("nan"), first.to(tl.float32))
    b = tl.where(broken[:, None], float("nan"), second.to(tl.float32))
    tl.store(target[:, None] + o[None, :], (a * c - b * s).to(first.dtype).to(target.dtype.element_ty), mask=mask)
    tl.store(target[:, None] + HALF + o[None, :], (b * c + a * s).to(first.dtype).to(target.dtype.element_ty), mask=mask)
    if REST > 0:
        tl.store(target[:, None] + 2 * HALF + r[None, :], rest.to(target.dtype.element_ty), mask=rest_mask)


@triton.jit
def _scale(x, factor, weight, PLUS_ONE: tl.constexpr):
    """x * factor * weight with the roundings of the RMS norm."""
    wide = x.to(tl.float32) * factor
    if PLUS_ONE:
        return (wide * (1.0 + weight.to(tl.float32))).to(x.dtype)
    return (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> Tensor:
    """``reference.rope_write_kv`` on the device, one kernel."""
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half = cos.shape[1]
    rest = head_dim - 2 * half
    heads_block = min(8, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    blocks = triton.cdiv(num_heads, heads_block) + 2 * triton.cdiv(num_kv_heads, heads_block)
    _rope_kernel[(tokens, blocks)](
        qkv, cos, sin, positions, slots, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, q, k_pool, v_pool,
        qkv.stride(0), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1), eps,
        H=num_heads, HK=num_kv_heads, D=head_dim, HALF=half, HALF_PAD=triton.next_power_of_2(half), REST=rest,
        REST_PAD=triton.next_power_of_2(max(rest, 1)), DP=triton.next_power_of_2(head_dim), HB=heads_block, Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None, PLUS_ONE=plus_one, num_warps=2, **pdl_options(qkv.device),
    )  # fmt: skip
    return q
