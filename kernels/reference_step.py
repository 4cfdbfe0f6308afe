"""The bookkeeping of a decode step in plain torch: gathering rows, placing tokens in the KV window, and committing what was accepted. The executable
specification of ``kernels.step``.

Boundary: tensors in, tensors out; knows nothing of models, drafters or requests. No host reads and no data-dependent shapes.

A row's integers (one line of ``rows`` [R, 9 + E] int32): alive, length L, root, output_len, max_output, noise_start, top_k, key word 0, key word
1, then E
stop ids (-1 unused).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STOP_COLUMN = 9
RUNNING, STOP, LENGTH, CONTEXT, NON_FINITE = 0, 1, 2, 3, 4
# Columns of a step's result, before the committed tokens.
ALIVE, ACCEPTED, KEPT, FINISH, DRAFT_DEPTH, CHILD_AT_END, RESULT_COLUMNS = 0, 1, 2, 3, 4, 5, 6


def begin_step(slots: Tensor, rows: Tensor, floats: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Gather the rows of a step, a dead row becoming slot 0, so that whatever it writes goes to scratch.

    slots [B] int64; rows [R, 9 + E] int32; floats [R, 3] float32 (temperature, top_p, min_p); table [R, W] int32. Returns slots [B] int64,
    ints [5, B] int32 (alive, length, root, t = noise_start + output_len, top_k), keys [B, 2] int32, floats [3, B], block_table [B, W]: every line of
    them contiguous, for kernels that take plain vectors.
    """
    alive = rows[:, 0].index_select(0, slots) > 0
    slots = slots * alive
    line = rows.index_select(0, slots)
    ints = torch.stack([alive.to(torch.int32), line[:, 1], line[:, 2], line[:, 5] + line[:, 3], line[:, 6]])
    return slots, ints, line[:, 7:9].contiguous(), floats.index_select(0, slots).t().contiguous(), table.index_select(0, slots)


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
    """Where ``q_len`` tokens a row stand: (slots [B * q_len] int64, positions [B * q_len] int32, start [B] int32).

    start = length + start_add; token q has KV index start + slot_add + q and position start + position_add + q * position_step, or start +
    depth[b, q]
    (depth [B, q_len] int32), at most ``last_position``. count [B] int32: tokens q >= count[b] write to scratch. So do those before the row's
    beginning (an index below 0), at position 0. length [B] int32, table [B, W] int32.
    """
    q = torch.arange(q_len, device=length.device, dtype=torch.int32)
    start = (length + start_add).to(torch.int32)
    index = (start[:, None] + slot_add + q).long()
    page = table.gather(1, (index // page_size).clamp(0, table.shape[1] - 1)).long()
    slots = (page * page_size + index % page_size) * (index >= 0)
    if count is not None:
        slots = slots * (q < count[:, None])
    offset = (position_add + q * position_step) if depth is None else depth
    positions = (start[:, None] + offset).expand(-1, q_len).clamp(0, last_position)
    return slots.reshape(-1), positions.to(torch.int32).reshape(-1), start


def kept_and_finish(
    tokens: Tensor,
    accepted: Tensor,
    alive: Tensor,
    output_len: Tensor,
    max_output: Tensor,
    length: Tensor,
    max_length: int,
    stop_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Trim a committed run by stop ids, budget and context: kept [B] int32 (0 for dead rows) and finish [B] int32.

    tokens [B, W] int32 (-1 beyond accepted + 1, and -1 within it where logits were not finite); accepted, output_len (before this run), max_output,
    length (L: prompt + output - 1) [B] int32; alive [B] bool; stop_ids [B, E] int32, -1 where unused. finish: 0 running, 1 stop, 2 length, 3 context,
    4 non-finite logits. A stop id wins over a limit that falls on the same token.
    """
    width = tokens.shape[1]
    index = torch.arange(width, dtype=torch.int32, device=tokens.device)
    count = accepted + 1
    inside = index < count[:, None]
    never = 1 << 30  # beyond every limit
    is_stop = ((tokens[:, :, None] == stop_ids[:, None, :]) & (tokens >= 0)[:, :, None]).any(2) & inside
    stop_at = torch.where(is_stop, index, never).amin(1).to(torch.int32)
    bad_at = torch.where((tokens < 0) & inside, index, never).amin(1).to(torch.int32)
    budget = max_output - output_len
    context = max_length - 1 - length
    limit = torch.minimum(budget, context)
    stopped = (stop_at < limit) & (stop_at < bad_at)
    broken = (bad_at < limit) & ~stopped
    limited = (count >= limit) & ~stopped & ~broken
    kept = torch.minimum(count, limit)
    kept = torch.where(stopped, stop_at + 1, kept)
    kept = torch.where(broken, bad_at, kept)
    finish = torch.where(limited, torch.where(budget <= context, LENGTH, CONTEXT), RUNNING)
    finish = torch.where(stopped, STOP, finish)
    finish = torch.where(broken, NON_FINITE, finish)
    return torch.where(alive, kept, 0).to(torch.int32), torch.where(alive, finish, RUNNING).to(torch.int32)


class Keep(NamedTuple):
    """One token, and one state, of each row for rings by slot: entry (length + offset) modulo W of the row's line.

    length [B] int32, as from ``begin_step``; kept_tokens [R, W] int32; states [B, E] and kept [R, W, E], or neither.
    """

    length: Tensor
    kept_tokens: Tensor
    offset: int = 0
    states: Tensor | None = None
    kept: Tensor | None = None


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
    """Accept, commit and record one step: (tokens [B, S+1] int32, 0 beyond the run; accepted [B]; count [B]; path [B, S+1] or None for a chain),
    int32.

    y [B, D] int32: the law's token after each node. slots [B] int64 as from ``begin_step``. rows [R, 9 + E] int32, changed in place: length, root and
    output_len advance, alive falls. result [>= B, 6 + S + 1] int32, written. A chain: drafted [B, S] int32 and valid [B, S] bool or None. A tree:
    walk =
    (path [B, S+1], accepted [B], child_at_end [B], draft_depth [B]). Neither: a plain step. count = accepted + 1, 0 for a dead row: how many rows the
    drafter extends. imposed [B] int32: accepted lengths to impose on a chain (simulation): the run is then the draft's tokens and y after the last.
    A node at depth d stands at position L + d and exists only up to max_length - 1. keep: what a plain step leaves for a drafter that is not running.
    """
    batch = y.shape[0]
    line = rows.index_select(0, slots)
    alive, length = line[:, 0] > 0, line[:, 1]
    room = (max_length - 1) - length
    path = None
    if walk is not None:
        path, accepted, child, proposed = walk
        child, proposed = child.bool() & (accepted < room), torch.minimum(proposed, room)
        accepted = torch.minimum(accepted, room)
        width = path.shape[1]
        index = torch.arange(width, dtype=torch.int32, device=y.device)
        path = torch.where(index <= accepted[:, None], path, -1)
        run = y.gather(1, path.clamp(min=0).long())
    elif drafted is not None:
        width = drafted.shape[1] + 1
        index = torch.arange(width, dtype=torch.int32, device=y.device)
        exists = index[1:] <= room[:, None] if valid is None else valid & (index[1:] <= room[:, None])
        proposed = exists.sum(1).to(torch.int32)
        match = exists & (drafted == y[:, : width - 1])
        accepted = match.to(torch.int32).cumprod(1).sum(1).to(torch.int32)
        run = y[:, :width]
        if imposed is not None:
            accepted = torch.minimum(imposed, proposed)
            run = torch.where(index < accepted[:, None], torch.nn.functional.pad(drafted, (0, 1)), run)
        child = accepted < proposed
    else:
        width, index = 1, torch.zeros(1, dtype=torch.int32, device=y.device)
        accepted = proposed = torch.zeros_like(length)
        child, run = proposed > 0, y[:, :1]
    tokens = torch.where(index <= accepted[:, None], run, -1).to(torch.int32)
    kept, finish = kept_and_finish(tokens, accepted, alive, line[:, 3], line[:, 4], length, max_length, line[:, STOP_COLUMN:])
    going = alive & (finish == 0)
    count = (accepted + 1) * going
    new = line.clone()
    new[:, 0] = going
    new[:, 1] += count
    new[:, 2] = torch.where(going, tokens.gather(1, accepted.long()[:, None])[:, 0], line[:, 2])
    new[:, 3] += count
    rows.index_copy_(0, slots, new)
    for column, values in enumerate((alive, accepted, kept, finish, proposed, child)):
        result[:batch, column] = values
    result[:batch, RESULT_COLUMNS : RESULT_COLUMNS + width] = tokens
    if keep is not None:
        assert width == 1, "only a plain step keeps"
        at = ((keep.length + keep.offset) % keep.kept_tokens.shape[1]).long()
        keep.kept_tokens[slots, at] = tokens.clamp(min=0)[:, 0]
        if keep.states is not None and keep.kept is not None:
            keep.kept[slots, at] = keep.states
    return tokens.clamp(min=0), accepted.to(torch.int32), ((accepted + 1) * alive).to(torch.int32), path


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Lines of table [R, ...] by number: index [n] int32 or int64 -> [n, ...]."""
    return table.index_select(0, index)


def put_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows [n, ...] to the lines index [n] int64 of table [R, ...], in place. Only scratch lines may repeat; one of their values stays."""
    table.index_copy_(0, index, rows)


def closing_pair(root: Tensor, tokens: Tensor, accepted: Tensor) -> Tensor:
    """The last two tokens of each committed run, [B, 2] int32: the last accepted draft (the root where none was) and the token after it.

    root [B] int32; tokens [B, W] int32, the run; accepted [B] int32, the index in it of the last.
    """
    run = torch.cat([root[:, None], tokens], 1)
    return run.gather(1, (accepted[:, None] + torch.arange(2, device=root.device)).long())
