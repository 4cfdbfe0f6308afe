"""The lossless check: finished rows replayed one at a time without a draft, and judged at the first token that differs.

Boundary: requests and ids in, verdicts out; which rows are drawn from a run, and their prompts, is the caller's. Floating point may break a tie
another way when a forward runs over other shapes: such a difference is a near-tie. Every other difference means that something besides the target
chose a token.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.engine.engine import Engine
from specgen.engine.law import LawState
from specgen.kernels import ops
from specgen.kernels.reference_sampling import gumbel, kept_mask
from specgen.models.target import Target
from specgen.types import Layout, Request, SamplingParams, noise_key

log = logging.getLogger("specgen")

EQUAL, NEAR_TIE, DIFFERENT = "equal", "near_tie", "different"
COMPARED_IDS = 64  # e is measured over so many of the best ids
LARGEST_E = {torch.bfloat16: 0.25, torch.float16: 1 / 32, torch.float32: 1e-3}
PAGE = 16
WINDOW_ROWS = 512  # nodes of one scoring forward, at most


@dataclass(frozen=True)
class Turn:
    """One finished turn of a row: the request as it was queued, without output, and what the run wrote."""

    request: Request
    output_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Verdict:
    """How a row compares with its replay. ``position``: output index of the first difference. ``gap``: between the two tokens' scores there, in
    logits (perturbed by the row's noise at a temperature); None where one text merely ends before the other. ``e``: the rounding allowed for."""

    kind: str
    position: int | None = None
    gap: float | None = None
    e: float | None = None
    border: bool = False  # a near-tie because a token crosses a border of the kept set


def draw_rows(keys: Sequence[tuple[int, int]], count: int, seed: int) -> list[tuple[int, int]]:
    """``count`` of the (index, sample) keys, drawn by ``seed``: the same ones in whatever order the rows ended; in ascending order."""

    def rank(key: tuple[int, int]) -> bytes:
        return hashlib.sha256(json.dumps([seed, *key]).encode()).digest()

    return sorted(sorted(keys, key=rank)[:count])


def check_rows(rows: Sequence[Sequence[Turn]], engine: Engine, *, nodes: int, batch: int) -> dict[str, float | int | None]:
    """Replay rows, each its turns in order, on a plain engine: {checked, equal, near_tie, different, worst_gap}.

    engine: no draft, one slot, overlap 0, no graphs. nodes, batch: draft nodes and rows of the run's verify steps, for e. A row's verdict is that of
    its first turn that is not equal. worst_gap: the largest gap of near-ties and differences in logits, None when there is none.
    """
    assert engine.max_batch == 1 and engine.overlap == 0 and engine.graphs is None and engine.num_steps == 0
    counts = {EQUAL: 0, NEAR_TIE: 0, DIFFERENT: 0}
    gaps: list[float] = []
    for row in rows:
        verdict = Verdict(EQUAL)
        for number, turn in enumerate(row):
            verdict = check_turn(turn, engine, nodes, batch)
            if verdict.kind != EQUAL:
                _tell(turn, number if len(row) > 1 else None, verdict)
                break
        counts[verdict.kind] += 1
        if verdict.gap is not None:
            gaps.append(verdict.gap)
    return {"checked": len(rows), **counts, "worst_gap": max(gaps, default=None)}


def check_turn(turn: Turn, engine: Engine, nodes: int, batch: int) -> Verdict:
    """Replay one turn and judge its first difference. With a deterministic engine any difference is ``different``."""
    replay = _fresh(turn.request)
    engine.run([replay])
    ours, theirs = tuple(replay.output_ids), turn.output_ids
    n = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if n == len(ours) == len(theirs):
        return Verdict(EQUAL) if replay.finish_reason == turn.finish_reason else Verdict(DIFFERENT, n)
    if n in (len(ours), len(theirs)):
        return Verdict(DIFFERENT, n)  # the same token ended one text and not the other
    zs = _scores_there(turn.request, theirs[:n], engine, nodes, batch)
    verdict = judge(zs, ours[n], theirs[n], turn.request, n, LARGEST_E[engine.target.dtype])
    return replace(verdict, kind=DIFFERENT, position=n) if engine.config.deterministic else replace(verdict, position=n)


def _fresh(request: Request, max_tokens: int | None = None) -> Request:
    sampling = request.sampling if max_tokens is None else replace(request.sampling, max_tokens=max_tokens)
    return Request(request.prompt, sampling, request.sample, request.noise_offset)


# -- the judgement ----------------------------------------------------------------------------------------------------------------------------


def judge(zs: Tensor, ours: int, theirs: int, request: Request, position: int, largest_e: float) -> Verdict:
    """Whether rounding explains that one run drew ``ours`` (the replay) and the other ``theirs`` at output ``position``.

    zs [R, V] float32: the logits there after steps 1 to 3 of f, as R forwards of other shapes compute them, the replay's first. e = 2 x the largest
    difference between any two of them over the best 64 ids, at most ``largest_e``. A near-tie: the gap of the two scores, perturbed at a temperature,
    is at most e / T (T = 0: e), or one of the two tokens crosses a border of the kept set when logits move by e.
    """
    s, z = request.sampling, zs[0]
    best = z.topk(min(COMPARED_IDS, z.shape[0])).indices
    spread = (zs[:, best].amax(0) - zs[:, best].amin(0)).nan_to_num(0.0)
    e = min(2 * float(spread.max()), largest_e)
    pair = z[[ours, theirs]].double()
    if s.temperature == 0:
        gap = abs(float(pair[0] - pair[1]))
        return Verdict(NEAR_TIE if gap <= e else DIFFERENT, gap=gap, e=e)
    keys = torch.tensor([noise_key(s.seed, request.prompt.key, request.sample)], dtype=torch.int64)
    noise = gumbel(keys, torch.tensor([request.noise_offset + position]), z.shape[0])[0, [ours, theirs]].double()
    perturbed = pair + s.temperature * noise
    gap = abs(float(perturbed[0] - perturbed[1]))
    if gap <= e:
        return Verdict(NEAR_TIE, gap=gap, e=e)
    crosses = any(_crosses_border(z, token, e, s) for token in (ours, theirs))
    return Verdict(NEAR_TIE if crosses else DIFFERENT, gap=gap, e=e, border=crosses)


def _crosses_border(z: Tensor, token: int, e: float, s: SamplingParams) -> bool:
    """Whether ``token`` is in the kept set of some logits within ``e`` of z [V] and not of others: it alone moved, or all others against it."""
    if not (s.top_k or s.top_p < 1 or s.min_p):
        return False
    alone = torch.zeros_like(z)
    alone[token] = e
    against = torch.where(z > z[token], e, -e)
    against[token] = -e
    moved = z + torch.stack([torch.zeros_like(z), alone, -alone, against, -against])
    n = moved.shape[0]
    top_k = torch.full((n,), s.top_k, dtype=torch.int32)
    kept = kept_mask(moved / s.temperature, top_k, torch.full((n,), s.top_p), torch.full((n,), s.min_p))[:, token]
    return bool(kept.any() and not kept.all())


def _tell(turn: Turn, number: int | None, verdict: Verdict) -> None:
    """One line for a row that is not equal."""
    prompt = turn.request.prompt
    where = f"row index {prompt.index}, sample {turn.request.sample}" + (f", turn {number + 1}" if number is not None else "")
    what = "one text ends before the other" if verdict.gap is None else f"gap {verdict.gap:.2g}, rounding {verdict.e:.2g}"
    why = ", at a border of the kept set" if verdict.border else ""
    level = logging.ERROR if verdict.kind == DIFFERENT else logging.INFO
    log.log(level, "lossless check: %s: %s at output token %s (%s%s)", where, verdict.kind.replace("_", "-"), verdict.position, what, why)


# -- the logits at a position -----------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _scores_there(request: Request, output: tuple[int, ...], engine: Engine, nodes: int, batch: int) -> Tensor:
    """Logits [R, V] after prompt and ``output``, steps 1 to 3 of f applied, on the CPU: the replay's own, and those of steps of other shapes."""
    ids = [*request.prompt.token_ids, *output]
    found = [_replayed_logits(request, len(output), engine)]
    for width, copies in dict.fromkeys([(1, 1), (nodes, 1), (nodes, max(1, min(batch, WINDOW_ROWS // nodes)))]):
        found.append(window_logits(engine.target, ids, width, copies, engine.config.page_size))
    stop_ids = engine.scheduler.endings.stop_ids(request)
    law = LawState(2, engine.target.vocab_size, engine.max_length, engine.device)
    law.require(request.sampling if engine.grammar is None else engine.grammar.on_device(request.sampling), stop_ids)
    mask = None if engine.grammar is None else engine.grammar.mask_after(request, output).expand(len(found), -1)
    law.admit([replace(_fresh(request), output_ids=list(output), slot=1)], [stop_ids])
    z = torch.stack(found).float()
    if law.features or mask is not None:
        rows = torch.ones(len(found), dtype=torch.int64, device=z.device)
        out_len = torch.full((len(found),), len(output), dtype=torch.int32, device=z.device)
        z = ops.adjust_logits(z, rows, law.tables, None, out_len, engine.vocab_limit, mask)
    return z[:, : engine.vocab_limit].cpu()


def _replayed_logits(request: Request, position: int, engine: Engine) -> Tensor:
    """The logits [V] that the replay itself drew output ``position`` from: of its call number ``position``, for it draws one token a call."""
    seen: list[Tensor] = []
    calls = 0

    def tap(logits: Tensor) -> None:
        nonlocal calls
        if calls == position:
            seen.append(logits[0].clone())
        calls += 1

    engine.device_step.tap = tap
    try:
        engine.run([_fresh(request, max_tokens=position + 1)])
    finally:
        engine.device_step.tap = None
    return seen[0]


def window_logits(target: Target, ids: list[int], width: int, copies: int, page: int) -> Tensor:
    """Logits [V] after ``ids``: of the last node of a chain of ``width``, in a step of ``copies`` equal rows, over the KV of one prefill."""
    width = min(width, len(ids))
    known, device = len(ids) - width, target.device
    pages = -(-len(ids) // page)
    pool = target.make_pool(pages + 1, page)
    tokens = torch.tensor(ids, dtype=torch.int32, device=device)
    positions = torch.arange(len(ids), dtype=torch.int32, device=device)
    slots = positions.long() + page  # the row owns pages 1, 2, ...
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]

    def length(value: int, rows: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    if known:
        cu_q = torch.tensor([0, known], dtype=torch.int32, device=device)
        target.forward(tokens[:known], Layout(positions[:known], slots[:known], table, length(0, 1), known, known, cu_q=cu_q), pool)
    layout = Layout(
        positions[known:].repeat(copies), slots[known:].repeat(copies), table.expand(copies, -1).contiguous(), length(known, copies), width, len(ids)
    )
    hidden = target.forward(tokens[known:].repeat(copies), layout, pool)
    return target.logits(hidden.last)[width - 1].clone()
