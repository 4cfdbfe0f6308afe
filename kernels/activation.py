"""Elementwise and row kernels: gated activations, embedding lookup, argmax of a row.

Boundary: kernels and launchers only; the meaning of each argument is defined by ``reference.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import COUNTERS, arrival_counters, last_to_arrive, pdl_options, pdl_wait


@triton.jit
def gate(x, GELU: tl.constexpr):
    """silu(x), or gelu(x) in its tanh form, in float32."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gated_kernel(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o < WIDTH
    pdl_wait(PDL)
    g = tl.load(gate_up + row * stride + o, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * stride + WIDTH + o, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + o, (gate(g, GELU) * u).to(out.dtype.element_ty), mask=mask)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        _gated_kernel[(tokens, triton.cdiv(width, block))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4, **pdl_options(gate_up.device)
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``reference.silu_mul`` on the device."""
    return _gated(gate_up, False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``reference.gelu_tanh_mul`` on the device."""
    return _gated(gate_up, True)


@triton.jit
def _embed_kernel(ids, weight, out, weight_stride, vocabulary, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    token = tl.load(ids + row)
    known = (token >= 0) & (token < vocabulary)
    value = tl.load(weight + token.to(tl.int64) * weight_stride + o, mask=(o < H) & known, other=0.0)
    tl.store(out + row * H + o, value, mask=o < H)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """``reference.embed`` on the device."""
    tokens, hidden = ids.shape[0], weight.shape[1]
    out = torch.empty(tokens, hidden, dtype=weight.dtype, device=weight.device)
    if tokens:
        block = min(2048, triton.next_power_of_2(hidden))
        _embed_kernel[(tokens, triton.cdiv(hidden, block))](
            ids, weight, out, weight.stride(0), weight.shape[0], H=hidden, BLOCK=block, num_warps=4, **pdl_options(ids.device)
        )
    return out


@triton.jit
def _argmax_kernel(
    logits, out, part_value, part_index, counters, stride, V,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of one row a program; the last program of a row merges. Ties go to the lowest index, NaN counts as -inf."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    o = part * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    x = tl.load(logits + row * stride + o, mask=o < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, 0)
    index = tl.min(tl.where((x == best) & (o < V), o, 2147483647), 0)
    if PARTS == 1:
        tl.store(out + row, index)
    else:
        tl.store(part_value + row * PARTS + part, best)
        tl.store(part_index + row * PARTS + part, index)
        if FUSED:  # noqa: SIM102 - decided when the kernel is compiled
            if last_to_arrive(counters + row, PARTS):
                _argmax_merge(out, part_value, part_index, row, PARTS, PARTS_PAD)


@triton.jit
def _argmax_merge(out, part_value, part_index, row, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    p = tl.arange(0, PARTS_PAD)
    values = tl.load(part_value + row * PARTS + p, mask=p < PARTS, other=float("-inf"), cache_modifier=".cg")
    indices = tl.load(part_index + row * PARTS + p, mask=p < PARTS, other=2147483647, cache_modifier=".cg")
    tl.store(out + row, tl.min(tl.where(values == tl.max(values, 0), indices, 2147483647), 0))


@triton.jit
def _argmax_merge_kernel(out, part_value, part_index, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    _argmax_merge(out, part_value, part_index, tl.program_id(0).to(tl.int64), PARTS, PARTS_PAD)


def argmax_rows(logits: Tensor) -> Tensor:
    """``reference.argmax_rows`` on the device, read once, in one kernel."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    block = min(8192, triton.next_power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, block)
    fused = parts > 1 and rows <= COUNTERS
    values = torch.empty(rows * parts, dtype=torch.float32, device=logits.device) if parts > 1 else out
    indices = torch.empty(rows * parts, dtype=torch.int32, device=logits.device) if parts > 1 else out
    counters = arrival_counters(logits.device) if fused else out
    pad = triton.next_power_of_2(parts)
    extra = pdl_options(logits.device)
    _argmax_kernel[(rows, parts)](
        logits,
        out,
        values,
        indices,
        counters,
        logits.stride(0),
        vocabulary,
        BLOCK=block,
        PARTS=parts,
        PARTS_PAD=pad,
        FUSED=fused,
        num_warps=8,
        **extra,
    )
    if parts > 1 and not fused:
        _argmax_merge_kernel[(rows,)](out, values, indices, PARTS=parts, PARTS_PAD=pad, num_warps=1, **extra)
    return out
