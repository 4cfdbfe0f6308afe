"""Writes into the paged KV pool: new tokens, and the compaction of an accepted tree path.

Boundary: kernels and launchers only; the meaning of each argument is defined by ``reference.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait


@triton.jit
def not_finite(v):
    """[rows, D] -> [rows]: whether a row holds a NaN or an infinity."""
    wide = v.to(tl.float32)
    return tl.max((wide - wide != 0.0).to(tl.int32), 1) > 0


@triton.jit
def _write_kernel(
    k, v, k_pool, v_pool, slots, k_stride_t, k_stride_h, v_stride_t, v_stride_h, kp_stride_n, kp_stride_h, vp_stride_n, vp_stride_h,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, HK: tl.constexpr, HKP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All KV heads of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HKP)[:, None]
    dk = tl.arange(0, DKP)[None, :]
    dv = tl.arange(0, DVP)[None, :]
    pdl_wait(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    k_mask = (head < HK) & (dk < DK)
    v_mask = (head < HK) & (dv < DV)
    new_k = tl.load(k + token * k_stride_t + head * k_stride_h + dk, mask=k_mask, other=0.0)
    new_v = tl.load(v + token * v_stride_t + head * v_stride_h + dv, mask=v_mask, other=0.0)
    broken = not_finite(new_v)[:, None]
    new_k = tl.where(broken, float("nan"), new_k)
    new_v = tl.where(broken, 0.0, new_v)
    tl.store(k_pool + slot * kp_stride_n + head * kp_stride_h + dk, new_k.to(k_pool.dtype.element_ty), mask=k_mask)
    tl.store(v_pool + slot * vp_stride_n + head * vp_stride_h + dv, new_v.to(v_pool.dtype.element_ty), mask=v_mask)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """``reference.write_kv`` on the device; the last dimension of k and v is contiguous."""
    tokens, kv_heads, key_dim = k.shape
    value_dim = v.shape[2]
    if tokens:
        _write_kernel[(tokens,)](
            k, v, k_pool, v_pool, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0),
            v_pool.stride(1), DK=key_dim, DV=value_dim, DKP=triton.next_power_of_2(key_dim), DVP=triton.next_power_of_2(value_dim), HK=kv_heads,
            HKP=triton.next_power_of_2(kv_heads), num_warps=4, **pdl_options(k.device),
        )  # fmt: skip


@triton.jit
def _compact_kernel(
    pool, block_table, length, path, accepted, stride_l, stride_n, stride_h, table_stride, table_width,
    D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (row, KV head, layer) a program. All sources are loaded before any target is stored: the barrier keeps warps from overtaking each other."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    step = tl.arange(0, STEPS_PAD)
    d = tl.arange(0, DP)
    pdl_wait(PDL)
    base = tl.load(length + row)
    moves = (step < STEPS) & (step < tl.load(accepted + row))
    node = tl.load(path + row * (STEPS + 1) + 1 + step, mask=moves, other=0)
    source = base + tl.maximum(node, 0)
    target = base + 1 + step
    table = block_table + row * table_stride
    source_page = tl.load(table + tl.minimum(source // PAGE, table_width - 1), mask=moves, other=0)
    target_page = tl.load(table + tl.minimum(target // PAGE, table_width - 1), mask=moves, other=0)
    source_slot = source_page.to(tl.int64) * PAGE + source % PAGE
    target_slot = target_page.to(tl.int64) * PAGE + target % PAGE
    here = pool + layer * stride_l + head * stride_h
    mask = moves[:, None] & (d < D)[None, :]
    moved = tl.load(here + (source_slot * stride_n)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(here + (target_slot * stride_n)[:, None] + d[None, :], moved, mask=mask)


def compact_kv(
    k_pools: Tensor | list[Tensor],
    v_pools: Tensor | list[Tensor],
    block_table: Tensor,
    length: Tensor,
    path: Tensor,
    accepted: Tensor,
    page_size: int,
) -> None:
    """``reference.compact_kv`` on the device: two launches for stacked pools [layers, N, HK, D], else two a layer."""
    rows, steps = path.shape[0], path.shape[1] - 1
    if rows == 0 or steps == 0:
        return
    path = path.contiguous()
    for pools in (k_pools, v_pools):
        for pool in [pools] if isinstance(pools, Tensor) else [layer[None] for layer in pools]:
            layers, _, kv_heads, dim = pool.shape
            _compact_kernel[(rows, kv_heads, layers)](
                pool, block_table, length, path, accepted, pool.stride(0), pool.stride(1), pool.stride(2), block_table.stride(0),
                block_table.shape[1], D=dim, DP=triton.next_power_of_2(dim), STEPS=steps, STEPS_PAD=triton.next_power_of_2(steps), PAGE=page_size,
                num_warps=1, **pdl_options(pool.device),
            )  # fmt: skip
