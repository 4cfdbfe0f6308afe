"""Steps 1 to 3 of the law f as one elementwise Triton kernel: penalties, bias and masks. Definition: ``reference_sampling.adjust_logits``.

Boundary: logits and the tables of ``LawTables``; knows nothing of requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .reference_sampling import LawTables

TILE = 1024


@triton.jit
def _adjust(
    logits,
    out,
    slots,
    repetition,
    presence,
    frequency,
    prompt_seen,
    output_count,
    path_tokens,
    bias,
    min_tokens,
    stop_ids,
    out_len,
    mask_bits,
    ids,
    logits_stride,
    out_stride,
    penalty_step,
    seen_stride,
    count_stride,
    path_width,
    bias_stride,
    bias_step,
    min_step,
    stop_width,
    words,
    width,
    vocab_limit,
    PENALTIES: tl.constexpr,
    PATH: tl.constexpr,
    BIAS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(logits + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    token = column
    if HAS_IDS:
        token = tl.load(ids + column, mask=inside, other=0).to(tl.int32)
    slot = tl.load(slots + row).to(tl.int64)
    if PENALTIES:
        at = slot * penalty_step  # a table of one row has step 0 and serves all
        count = tl.load(output_count + at * count_stride + token, mask=inside, other=0)
        if PATH:
            for place in range(path_width):
                count += (token == tl.load(path_tokens + row * path_width + place)).to(count.dtype)
        seen = (tl.load(prompt_seen + at * seen_stride + token, mask=inside, other=0) != 0) | (count > 0)
        rep = tl.load(repetition + at)
        z = tl.where(seen, tl.where(z > 0, tl.div_rn(z, rep), z * rep), z)
        z = z - tl.load(frequency + at) * count.to(tl.float32) - tl.load(presence + at) * (count > 0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + slot * bias_step * bias_stride + token, mask=inside, other=0.0)
    banned = token >= vocab_limit
    if MIN_TOKENS:
        at = slot * min_step
        if tl.load(out_len + row) < tl.load(min_tokens + at):
            for place in range(stop_width):
                banned = banned | (token == tl.load(stop_ids + at * stop_width + place))
    if MASK:
        word = tl.load(mask_bits + row * words + (token >> 5), mask=inside & ((token >> 5) < words), other=0)
        banned = banned | (((word >> (token & 31)) & 1) == 0)
    tl.store(out + row * out_stride + column, tl.where(banned, float("-inf"), z), mask=inside)


def _step(table: Tensor) -> int:
    return 0 if table.shape[0] == 1 else 1


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    tables: LawTables,
    path_tokens: Tensor | None,
    out_len: Tensor | None,
    vocab_limit: int,
    mask_bits: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Launcher of ``reference_sampling.adjust_logits``; float32 logits are changed in place."""
    rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = logits if logits.dtype == torch.float32 else torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    if rows == 0 or width == 0:
        return out
    x = tables
    penalties, biased, early = x.repetition is not None, x.bias is not None, x.min_tokens is not None
    seen = x.prompt_seen.view(torch.uint8) if x.prompt_seen is not None else None
    path = path_tokens.contiguous() if path_tokens is not None and path_tokens.shape[1] else None
    _adjust[(rows, triton.cdiv(width, TILE))](
        logits,
        out,
        slots.contiguous(),
        x.repetition,
        x.presence,
        x.frequency,
        seen,
        x.output_count,
        path,
        x.bias,
        x.min_tokens,
        x.stop_ids,
        out_len.contiguous() if out_len is not None else None,
        mask_bits.contiguous() if mask_bits is not None else None,
        ids,
        logits.stride(0),
        out.stride(0),
        _step(x.repetition) if x.repetition is not None else 0,
        seen.stride(0) if seen is not None else 0,
        x.output_count.stride(0) if x.output_count is not None else 0,
        path.shape[1] if path is not None else 0,
        x.bias.stride(0) if x.bias is not None else 0,
        _step(x.bias) if x.bias is not None else 0,
        _step(x.min_tokens) if x.min_tokens is not None else 0,
        x.stop_ids.shape[1] if x.stop_ids is not None else 0,
        mask_bits.shape[1] if mask_bits is not None else 0,
        width,
        vocab_limit,
        PENALTIES=penalties,
        PATH=penalties and path is not None,
        BIAS=biased,
        MIN_TOKENS=early,
        MASK=mask_bits is not None,
        HAS_IDS=ids is not None,
        BLOCK=TILE,
        num_warps=4,
        **pdl_options(logits.device),
    )
    return out
