"""The bookkeeping of a decode step as Triton kernels, one launch each. Definition: ``reference_step``.

Boundary: tensors in, tensors out; knows nothing of models, drafters or requests. These replace about a hundred small launches a step, which at a
batch of
one cost as much as the draft itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .reference_step import RESULT_COLUMNS, STOP_COLUMN, Keep


@triton.jit
def _begin(
    slots, rows, floats, table, out_slots, out_ints, out_keys, out_floats, out_table, batch, columns, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_wait(PDL)
    b = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + b)
    alive = tl.load(rows + slot * columns) > 0
    slot = tl.where(alive, slot, 0)
    w = part * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(table + slot * width + w, mask=w < width, other=0)
    tl.store(out_table + b.to(tl.int64) * width + w, pages, mask=w < width)
    if part == 0:
        line = rows + slot * columns
        tl.store(out_slots + b, slot)
        tl.store(out_ints + b, alive.to(tl.int32))
        tl.store(out_ints + batch + b, tl.load(line + 1))
        tl.store(out_ints + 2 * batch + b, tl.load(line + 2))
        tl.store(out_ints + 3 * batch + b, tl.load(line + 5) + tl.load(line + 3))
        tl.store(out_ints + 4 * batch + b, tl.load(line + 6))
        tl.store(out_keys + 2 * b, tl.load(line + 7))
        tl.store(out_keys + 2 * b + 1, tl.load(line + 8))
        for i in tl.static_range(3):
            tl.store(out_floats + i * batch + b, tl.load(floats + slot * 3 + i))


def begin_step(slots: Tensor, rows: Tensor, floats: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """See ``reference_step.begin_step``."""
    batch, width = slots.shape[0], table.shape[1]
    out_slots = torch.empty_like(slots)
    out_ints = torch.empty(5, batch, dtype=torch.int32, device=slots.device)
    out_keys = torch.empty(batch, 2, dtype=torch.int32, device=slots.device)
    out_floats = torch.empty(3, batch, dtype=torch.float32, device=slots.device)
    out_table = torch.empty(batch, width, dtype=torch.int32, device=slots.device)
    block = min(1024, triton.next_power_of_2(width))
    _begin[(batch, triton.cdiv(width, block))](
        slots, rows, floats, table, out_slots, out_ints, out_keys, out_floats, out_table, batch, rows.shape[1], width, BLOCK=block, num_warps=4,
        **pdl_options(slots.device),
    )  # fmt: skip
    return out_slots, out_ints, out_keys, out_floats, out_table


@triton.jit
def _window(
    length, table, width, depth, count, out_slots, out_positions, out_start, page_size, last_position, start_add, slot_add,
    position_add,
    position_step, Q: tl.constexpr, BLOCK: tl.constexpr, HAS_DEPTH: tl.constexpr, HAS_COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    b = tl.program_id(0)
    q = tl.arange(0, BLOCK)
    inside = q < Q
    start = tl.load(length + b) + start_add
    index = start + slot_add + q
    exists = inside & (index >= 0)
    page = tl.minimum(index // page_size, width - 1)
    slot = tl.load(table + b.to(tl.int64) * width + page, mask=exists, other=0).to(tl.int64) * page_size + index % page_size
    slot = tl.where(exists, slot, 0)
    if HAS_COUNT:
        slot = tl.where(q < tl.load(count + b), slot, 0)
    position = start + position_add + q * position_step
    if HAS_DEPTH:
        position = start + tl.load(depth + b * Q + q, mask=inside, other=0)
    tl.store(out_slots + b * Q + q, slot, mask=inside)
    tl.store(out_positions + b * Q + q, tl.maximum(tl.minimum(position, last_position), 0), mask=inside)
    tl.store(out_start + b, start)


def window(
    length: Tensor,
    table: Tensor,
    q_len: int,
    page_size: int,
    last_position: int,
    start_add: int = 0,
    slot_add: int = 0,
    position_add: int = 0,
    position_step: int = 1,
    depth: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference_step.window``."""
    batch = length.shape[0]
    slots = torch.empty(batch * q_len, dtype=torch.int64, device=length.device)
    positions = torch.empty(batch * q_len, dtype=torch.int32, device=length.device)
    start = torch.empty(batch, dtype=torch.int32, device=length.device)
    if depth is not None:
        depth = depth.expand(batch, q_len).contiguous()
    _window[(batch,)](
        length, table, table.shape[1], depth, count, slots, positions, start, page_size, last_position, start_add, slot_add,
        position_add, position_step, Q=q_len, BLOCK=triton.next_power_of_2(q_len), HAS_DEPTH=depth is not None, HAS_COUNT=count is not None,
        num_warps=1,
        **pdl_options(length.device),
    )  # fmt: skip
    return slots, positions, start


@triton.jit
def _finish(
    y, slots, rows, columns, max_length, result, result_columns, drafted, valid, path, walk_accepted, walk_child, walk_proposed, imposed, out_tokens,
    out_accepted, out_count, out_path, keep_length, kept_tokens, window, offset, states, state_stride, kept, state_width,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_IMPOSED: tl.constexpr, STOPS: tl.constexpr, TOKENS: tl.constexpr, KEEP: tl.constexpr, STATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # MODE 0: plain, 1: chain, 2: tree. KEEP: the token is kept too; STATES: and a state, so many elements a program: all but the first of a row's
    # programs do nothing else.
    pdl_wait(PDL)
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    if KEEP:
        entry = slot * window + (tl.load(keep_length + b) + offset) % window
        if STATES:
            s = tl.program_id(1) * STATES + tl.arange(0, STATES)
            state = tl.load(states + b.to(tl.int64) * state_stride + s, mask=s < state_width, other=0.0)
            tl.store(kept + entry * state_width + s, state, mask=s < state_width)
            if tl.program_id(1) > 0:
                return
    line = rows + slot * columns
    alive = tl.load(line)
    length = tl.load(line + 1)
    output_len = tl.load(line + 3)
    budget = tl.load(line + 4) - output_len
    room = max_length - 1 - length
    i = tl.arange(0, BLOCK)
    inside = i < W
    never = 1 << 30
    if MODE == 2:
        proposed = tl.minimum(tl.load(walk_proposed + b), room)
        deep = tl.load(walk_accepted + b)
        child = (tl.load(walk_child + b).to(tl.int32) != 0) & (deep < room)
        accepted = tl.minimum(deep, room)
        node = tl.load(path + b * W + i, mask=inside, other=-1)
        node = tl.where(i <= accepted, node, -1)
        tl.store(out_path + b * W + i, node, mask=inside)
        run = tl.load(y + b * D + tl.maximum(node, 0), mask=inside, other=-1)
    elif MODE == 1:
        run = tl.load(y + b * D + i, mask=inside, other=-1)
        exists = (i + 1 < W) & (i + 1 <= room)
        if HAS_VALID:
            exists = exists & (tl.load(valid + b * (W - 1) + i, mask=i + 1 < W, other=0).to(tl.int32) != 0)
        proposed = tl.sum(exists.to(tl.int32))
        token = tl.load(drafted + b * (W - 1) + i, mask=i + 1 < W, other=-2)
        miss = tl.where(exists & (token == run), never, i)
        accepted = tl.minimum(tl.min(miss), W - 1)
        if HAS_IMPOSED:
            accepted = tl.minimum(tl.load(imposed + b), proposed)
            run = tl.where(i < accepted, token, run)
        child = accepted < proposed
    else:
        run = tl.load(y + b * D + i, mask=inside, other=-1)
        accepted = 0
        proposed = 0
        child = accepted < proposed
    run = tl.where(i <= accepted, run, -1)
    tl.store(out_tokens + b * W + i, tl.maximum(run, 0), mask=inside)  # a padded row still needs a token that exists
    tl.store(result + b * result_columns + TOKENS + i, run, mask=inside)
    if KEEP:
        tl.store(kept_tokens + entry, tl.maximum(tl.max(tl.where(i == 0, run, 0)), 0))

    e = tl.arange(0, E)
    stops = tl.load(line + STOPS + e)
    live = inside & (i <= accepted)
    hit = tl.max(((run[:, None] == stops[None, :]) & (run >= 0)[:, None]).to(tl.int32), 1) > 0
    stop_at = tl.min(tl.where(hit & live, i, never))
    bad_at = tl.min(tl.where((run < 0) & live, i, never))
    count = accepted + 1
    limit = tl.minimum(budget, room)
    stopped = (stop_at < limit) & (stop_at < bad_at)
    broken = (bad_at < limit) & (stopped == 0)
    kept = tl.where(stopped, stop_at + 1, tl.where(broken, bad_at, tl.minimum(count, limit)))
    limited = tl.where(count >= limit, tl.where(budget <= room, 2, 3), 0)
    finish = tl.where(stopped, 1, tl.where(broken, 4, limited))
    is_alive = alive > 0
    kept = tl.where(is_alive, kept, 0)
    finish = tl.where(is_alive, finish, 0)

    out = result + b * result_columns
    tl.store(out, is_alive.to(tl.int32))
    tl.store(out + 1, accepted)
    tl.store(out + 2, kept)
    tl.store(out + 3, finish)
    tl.store(out + 4, proposed)
    tl.store(out + 5, child.to(tl.int32))
    tl.store(out_accepted + b, accepted)
    tl.store(out_count + b, tl.where(is_alive, count, 0))
    if is_alive:
        # Dead rows share slot 0, which nobody writes.
        if finish == 0:
            tl.store(line + 1, length + count)
            tl.store(line + 2, tl.sum(tl.where(i == accepted, run, 0)))
            tl.store(line + 3, output_len + count)
        else:
            tl.store(line, 0)


def finish_step(
    y: Tensor,
    slots: Tensor,
    rows: Tensor,
    max_length: int,
    result: Tensor,
    drafted: Tensor | None = None,
    valid: Tensor | None = None,
    walk: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    imposed: Tensor | None = None,
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See ``reference_step.finish_step``."""
    batch, nodes = y.shape
    mode = 2 if walk is not None else 1 if drafted is not None else 0
    walk_path = walk_accepted = walk_child = walk_proposed = path = None
    width = 1
    if walk is not None:
        walk_path, walk_accepted, walk_child, walk_proposed = walk
        width = walk_path.shape[1]
        path = torch.empty(batch, width, dtype=torch.int32, device=y.device)
    elif drafted is not None:
        width = drafted.shape[1] + 1
    tokens = torch.empty(batch, width, dtype=torch.int32, device=y.device)
    accepted = torch.empty(batch, dtype=torch.int32, device=y.device)
    count = torch.empty(batch, dtype=torch.int32, device=y.device)
    length, kept_tokens, offset, states, kept = (None, None, 0, None, None) if keep is None else keep
    assert (keep is None or width == 1) and (states is None or states.stride(1) == 1)
    state_width = 0 if states is None else states.shape[1]
    block = 0 if states is None else min(1024, triton.next_power_of_2(state_width))
    _finish[(batch, triton.cdiv(state_width, block) if block else 1)](
        y, slots, rows, rows.shape[1], max_length, result, result.shape[1], drafted, valid, walk_path, walk_accepted, walk_child, walk_proposed,
        imposed, tokens, accepted, count, path, length, kept_tokens, 0 if kept_tokens is None else kept_tokens.shape[1], offset, states,
        0 if states is None else states.stride(0), kept, state_width,
        D=nodes, W=width, BLOCK=triton.next_power_of_2(width), E=rows.shape[1] - STOP_COLUMN, MODE=mode, HAS_VALID=valid is not None,
        HAS_IMPOSED=imposed is not None, STOPS=STOP_COLUMN, TOKENS=RESULT_COLUMNS, KEEP=keep is not None, STATES=block, num_warps=1,
        **pdl_options(y.device),
    )  # fmt: skip
    return tokens, accepted, count, path
