"""Lines of a table by number, read and written, and a draft model's closing pair, one launch each. Definition: ``reference_step``.

Boundary: tensors in, tensors out; what the lines are is the caller's. They stand where torch would run its general indexing kernels, several launches
and index checks each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait


@triton.jit
def _take_rows(table, index, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(index + i).to(tl.int64)
    tl.store(out + i * width + e, tl.load(table + line * width + e, mask=e < width, other=0), mask=e < width)


@triton.jit
def _put_rows(table, index, rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(index + i).to(tl.int64)
    tl.store(table + line * width + e, tl.load(rows + i * width + e, mask=e < width, other=0), mask=e < width)


def _grid(rows: Tensor) -> tuple[tuple[int, int], int, int]:
    """(grid, elements of a line, elements a program copies) for the lines of ``rows`` [n, ...]."""
    width = rows.numel() // rows.shape[0]
    block = min(1024, triton.next_power_of_2(width))
    return (rows.shape[0], triton.cdiv(width, block)), width, block


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """See ``reference_step.take_rows``."""
    assert table.is_contiguous()
    out = torch.empty(index.shape[0], *table.shape[1:], dtype=table.dtype, device=table.device)
    if out.numel():
        grid, width, block = _grid(out)
        _take_rows[grid](table, index.contiguous(), out, width, BLOCK=block, num_warps=4, **pdl_options(table.device))
    return out


def put_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """See ``reference_step.put_rows``."""
    assert table.is_contiguous() and table.shape[1:] == rows.shape[1:] and table.dtype == rows.dtype
    if rows.numel():
        grid, width, block = _grid(rows)
        _put_rows[grid](table, index.contiguous(), rows.contiguous(), width, BLOCK=block, num_warps=4, **pdl_options(table.device))


@triton.jit
def _closing_pair(root, tokens, accepted, out, token_stride, PDL: tl.constexpr):
    pdl_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(accepted + b)
    before = tl.load(tokens + b * token_stride + tl.maximum(last - 1, 0))
    tl.store(out + 2 * b, tl.where(last > 0, before, tl.load(root + b)))
    tl.store(out + 2 * b + 1, tl.load(tokens + b * token_stride + last))


def closing_pair(root: Tensor, tokens: Tensor, accepted: Tensor) -> Tensor:
    """See ``reference_step.closing_pair``."""
    out = torch.empty(root.shape[0], 2, dtype=torch.int32, device=root.device)
    if root.shape[0]:
        _closing_pair[(root.shape[0],)](root, tokens, accepted, out, tokens.stride(0), num_warps=1, **pdl_options(root.device))
    return out
