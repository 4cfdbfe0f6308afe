"""Draft trees as Triton kernels, one program a request. Definition: ``reference_tree``.

Boundary: scores, candidate numbers and tokens; knows nothing of drafters or models. Ties and order as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .sampling import LOWEST, key_index, key_score, order_bits, order_key

CHUNK = 32  # nodes compared with all others at a time


@triton.jit
def _expand(scores, logp, cumulative, kept, index, topk, PDL: tl.constexpr, BLOCK: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    width = topk * topk
    inside = place < width
    total = tl.load(scores + row * topk + place // topk, mask=inside, other=0.0) + tl.load(logp + row * width + place, mask=inside, other=0.0)
    tl.store(cumulative + row * width + place, total, mask=inside)
    key = tl.where(inside, order_key(tl.where(total != total, float("-inf"), total), place), LOWEST)
    for rank in range(topk):
        first = tl.max(key, 0)
        tl.store(kept + row * topk + rank, key_score(first))
        tl.store(index + row * topk + rank, key_index(first).to(tl.int64))
        key = tl.where(key == first, LOWEST, key)


def expand(scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of ``reference_tree.expand``."""
    batch, topk = scores.shape
    cumulative = torch.empty(batch, topk * topk, dtype=torch.float32, device=scores.device)
    kept = torch.empty_like(scores, memory_format=torch.contiguous_format)
    index = torch.empty(batch, topk, dtype=torch.int64, device=scores.device)
    if batch:
        block = triton.next_power_of_2(topk * topk)
        _expand[(batch,)](
            scores.contiguous(), logp.contiguous(), cumulative, kept, index, topk, BLOCK=block, num_warps=_warps(block), **pdl_options(scores.device)
        )  # fmt: skip
    return cumulative, kept, index


@triton.jit
def _select(scores, index, row_stride, width, count, BITS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    score = tl.load(scores + row * row_stride + place, mask=inside, other=0.0)
    bits = order_bits(tl.where(score != score, float("-inf"), score)).to(tl.int64) + 2147483648
    key = tl.where(inside, bits * BLOCK + (BLOCK - 1 - place), -1)
    # The count-th largest of distinct keys, bit by bit from the top.
    border = tl.full([], 0, tl.int64)
    one = tl.full([], 1, tl.int64)
    for bit in range(BITS):
        trial = border | (one << (BITS - 1 - bit))
        border = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= count, trial, border)
    chosen = (key >= border) & inside
    target = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + row * count + target, place.to(tl.int64), mask=chosen)


def select_ascending(scores: Tensor, count: int) -> Tensor:
    """Launcher of ``reference_tree.select_ascending``."""
    batch, width = scores.shape
    assert count <= width, "more candidates asked for than there are"
    index = torch.empty(batch, count, dtype=torch.int64, device=scores.device)
    if batch and count:
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        block = triton.next_power_of_2(width)
        bits = 32 + block.bit_length() - 1
        options = {"BITS": bits, "BLOCK": block, "num_warps": _warps(block)} | pdl_options(scores.device)
        _select[(batch,)](scores, index, scores.stride(0), width, count, **options)
    return index


@triton.jit
def _build(
    parent_list,
    index,
    parents,
    path,
    depth,
    first_child,
    next_sibling,
    dropped,
    list_width,
    topk,
    nodes,
    num_steps,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    drafted = nodes - 1
    node = tl.arange(0, BLOCK)
    real = (node > 0) & (node < nodes)
    own = tl.load(index + row * drafted + node - 1, mask=real, other=-1)
    group = tl.where(own >= 0, own // topk, -1)
    listed = real & (group > 0) & (group < list_width)
    wanted = tl.load(parent_list + row * list_width + group, mask=listed, other=-1)
    found = tl.full([BLOCK], BLOCK, tl.int32)
    for start in range(0, nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        candidate = tl.load(index + row * drafted + other - 1, mask=(other > 0) & (other < nodes), other=-1)
        match = (wanted[:, None] == candidate[None, :]) & (wanted >= 0)[:, None] & (candidate >= 0)[None, :] & (other[None, :] < node[:, None])
        found = tl.minimum(found, tl.min(tl.where(match, other[None, :], BLOCK), 1))
    parent = tl.where(real & (group == 0), 0, tl.where(real & (found < BLOCK), found, -1))

    level = tl.where(node == 0, 0, -1)
    climb = node
    for step in range(1, num_steps + 1):
        climb = tl.where(climb >= 0, tl.gather(parent, tl.maximum(climb, 0), 0), -1)
        level = tl.where((climb == 0) & (level < 0), step, level)
    alive = level >= 0
    parent = tl.where(alive, parent, -1)
    level = tl.maximum(level, 0)
    tl.store(dropped + row, tl.sum((real & (level == 0)).to(tl.int32), 0))
    tl.store(depth + row * nodes + node, level, mask=node < nodes)
    tl.store(parents + row * drafted + node - 1, parent, mask=real)

    climb = tl.where(alive, node, 0)
    for step in range(0, num_steps + 1):
        on = step <= level
        target = tl.where(on, level - step, step)
        tl.store(path + (row * nodes + node) * (num_steps + 1) + target, tl.where(on, climb, -1), mask=node < nodes)
        climb = tl.where(climb >= 0, tl.gather(parent, tl.maximum(climb, 0), 0), -1)

    child = tl.full([BLOCK], BLOCK, tl.int32)
    sibling = tl.full([BLOCK], BLOCK, tl.int32)
    for start in range(0, nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        above = tl.gather(parent, other, 0)
        child = tl.minimum(child, tl.min(tl.where((above[None, :] == node[:, None]), other[None, :], BLOCK), 1))
        beside = (above[None, :] == parent[:, None]) & (parent >= 0)[:, None] & (other[None, :] > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(beside, other[None, :], BLOCK), 1))
    tl.store(first_child + row * nodes + node, tl.where(child < BLOCK, child, -1), mask=node < nodes)
    tl.store(next_sibling + row * nodes + node, tl.where(sibling < BLOCK, sibling, -1), mask=node < nodes)


def build_tree(parent_list: Tensor, index: Tensor, topk: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launcher of ``reference_tree.build_tree``."""
    batch, drafted = index.shape
    nodes = drafted + 1
    device = index.device
    parents = torch.empty(batch, drafted, dtype=torch.int32, device=device)
    path = torch.empty(batch, nodes, num_steps + 1, dtype=torch.int32, device=device)
    depth, first_child, next_sibling = torch.empty(3, batch, nodes, dtype=torch.int32, device=device)
    dropped = torch.empty(batch, dtype=torch.int32, device=device)
    if batch:
        block = max(triton.next_power_of_2(nodes), CHUNK)
        _build[(batch,)](
            parent_list.contiguous(), index.contiguous(), parents, path, depth, first_child, next_sibling, dropped,
            parent_list.shape[1], topk, nodes, num_steps, BLOCK=block, CHUNK=CHUNK, num_warps=4 if block <= 128 else 8, **pdl_options(device),
        )  # fmt: skip
    return parents, path, depth, first_child, next_sibling, dropped


@triton.jit
def _walk_tree(tokens, first_child, next_sibling, y, path, accepted, more, nodes, num_steps, PDL: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tokens += row * (nodes - 1)
    first_child += row * nodes
    next_sibling += row * nodes
    path += row * (num_steps + 1)
    tl.store(path, 0)
    node = 0
    count = 0
    child = tl.load(first_child)
    for step in range(1, num_steps + 1):
        wanted = tl.load(y + row * nodes + node)
        # A fallen walk keeps scanning with nothing left to find.
        child = tl.where((wanted >= 0) & (count == step - 1), child, -1)
        scanning = child > 0
        while scanning:
            if tl.load(tokens + child - 1) == wanted:
                scanning = False
            else:
                child = tl.load(next_sibling + child)
                scanning = child > 0
        tl.store(path + step, tl.where(child > 0, child, -1))
        if child > 0:
            node = child
            count += 1
            child = tl.load(first_child + node)
    tl.store(accepted + row, count)
    tl.store(more + row, (tl.load(first_child + node) > 0).to(tl.uint8))


def tree_walk(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, y: Tensor, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of ``reference_tree.tree_walk``."""
    batch, nodes = y.shape
    path = torch.empty(batch, num_steps + 1, dtype=torch.int32, device=y.device)
    accepted = torch.empty(batch, dtype=torch.int32, device=y.device)
    more = torch.empty(batch, dtype=torch.bool, device=y.device)
    if batch:
        arrays = [x.contiguous() for x in (tokens, first_child, next_sibling, y)]
        _walk_tree[(batch,)](*arrays, path, accepted, more.view(torch.uint8), nodes, num_steps, num_warps=1, **pdl_options(y.device))
    return path, accepted, more


@triton.jit
def _walk_chain(tokens, valid, y, path, accepted, more, steps, VALID: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < steps
    token = tl.load(tokens + row * steps + place, mask=inside, other=-1)
    wanted = tl.load(y + row * (steps + 1) + place, mask=inside, other=-1)
    there = inside
    if VALID:
        there = inside & (tl.load(valid + row * steps + place, mask=inside, other=0) != 0)
    fits = there & (token == wanted) & (wanted >= 0)
    count = tl.min(tl.where(fits, BLOCK, place), 0)
    tl.store(path + row * (steps + 1) + place, tl.where(place <= count, place, -1), mask=place <= steps)
    tl.store(accepted + row, count)
    tl.store(more + row, tl.max((there & (place == count)).to(tl.int32), 0).to(tl.uint8))


def chain_walk(tokens: Tensor, valid: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of ``reference_tree.chain_walk``."""
    batch, steps = tokens.shape
    path = torch.empty(batch, steps + 1, dtype=torch.int32, device=y.device)
    accepted = torch.empty(batch, dtype=torch.int32, device=y.device)
    more = torch.empty(batch, dtype=torch.bool, device=y.device)
    if batch:
        there = valid.contiguous().view(torch.uint8) if valid is not None else None
        _walk_chain[(batch,)](
            tokens.contiguous(), there, y.contiguous(), path, accepted, more.view(torch.uint8), steps,
            VALID=there is not None, BLOCK=triton.next_power_of_2(steps + 1), num_warps=1, **pdl_options(y.device),
        )  # fmt: skip
    return path, accepted, more


def _warps(block: int) -> int:
    return 1 if block <= 128 else 4 if block <= 1024 else 8
