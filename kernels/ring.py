"""Keeping a step's token and state for a drafter that is not running, in one launch. Definition: ``reference_step.keep_step``.

Boundary: tensors in, tensors out. It is all that a step without a draft costs beyond plain decoding, so it must stay one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait


@triton.jit
def _keep(
    slots, length, tokens, token_stride, kept_tokens, window, offset, states, state_stride, kept, E,
    HAS_STATES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    b = tl.program_id(0)
    part = tl.program_id(1)
    entry = tl.load(slots + b) * window + (tl.load(length + b) + offset) % window
    if part == 0:
        tl.store(kept_tokens + entry, tl.load(tokens + b.to(tl.int64) * token_stride))
    if HAS_STATES:
        e = part * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(states + b.to(tl.int64) * state_stride + e, mask=e < E, other=0.0)
        tl.store(kept + entry * E + e, values, mask=e < E)


def keep_step(
    slots: Tensor, length: Tensor, tokens: Tensor, kept_tokens: Tensor, offset: int = 0, states: Tensor | None = None, kept: Tensor | None = None
) -> None:
    """See ``reference_step.keep_step``."""
    width = 0 if states is None else states.shape[1]
    assert states is None or states.stride(1) == 1
    block = min(1024, triton.next_power_of_2(max(1, width)))
    _keep[(slots.shape[0], max(1, triton.cdiv(width, block)))](
        slots, length, tokens, tokens.stride(0), kept_tokens, kept_tokens.shape[1], offset, states, 0 if states is None else states.stride(0), kept,
        width, HAS_STATES=states is not None, BLOCK=block, num_warps=4, **pdl_options(slots.device),
    )  # fmt: skip
