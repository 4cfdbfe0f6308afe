"""Acceptance, as pure functions on device tensors: how many drafts stand, what is committed, and where a row ends.

Boundary: no state, no model, no host read. Drafter-invariant acceptance: a draft child is accepted when it equals y, the token the target's own
law and
noise pick at its parent (docs/architecture.md, "Exactness"), so the committed text never depends on the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUNNING, STOP, LENGTH, CONTEXT, NON_FINITE = 0, 1, 2, 3, 4
FINISH_NAMES = (None, "stop", "length", "context", "error")


def committed_tokens(y: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """The tokens a step commits: y at each node of the accepted path; -1 beyond.

    y [B, D] int32; path [B, S+1] int32, root first; accepted [B] int32. Returns [B, S+1] int32. An accepted child's token is y at its parent, so
    these
    are the accepted drafts followed by the bonus token.
    """
    tokens = y.gather(1, path.clamp(min=0).long())
    depth = torch.arange(path.shape[1], dtype=torch.int32, device=y.device)
    return torch.where(depth <= accepted[:, None], tokens, -1)


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
    """Trim a committed run by stop ids, budget and context.

    tokens [B, W] int32 (-1 beyond accepted + 1, and -1 within it where logits were not finite); accepted, output_len (before this run), max_output,
    length (L: prompt + output - 1) [B] int32; alive [B] bool; stop_ids [B, E] int32, -1 where unused. Returns kept [B] int32 (0 for dead rows) and
    finish [B] int32: 0 running, 1 stop, 2 length, 3 context, 4 non-finite logits. A stop id wins over a limit that falls on the same token.
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
