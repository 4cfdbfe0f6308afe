"""The torch definition of every op of the transformer forward: the executable specification the Triton kernels are tested against.

Boundary: torch only. Runs on any device; on the CPU it is what the engine runs. Knows nothing of models, requests or pages beyond a block table.
Shapes: T tokens, B rows, H query heads, HK key/value heads, G = H // HK, Dk and Dv head sizes, W pages a row, N slots of a pool (slot = page *
page_size + offset; page 0 is scratch), P = longest path. Attention is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TREE_SLOTS = 256  # window slots a path may name (the kernel keeps a query's ancestors in four words)
DETERMINISTIC_ROWS = 16  # rows of one matmul in deterministic mode, whatever the number of tokens
_SCORE_ELEMENTS = 1 << 25  # score elements held at a time; rows are taken in groups below it


def slots_of(block_table: Tensor, index: Tensor, page_size: int) -> Tensor:
    """KV slot [B, n] int64 of table index [B, n] (or [n]) in each row's block table [B, W]; an index beyond the table is clamped to its last page."""
    index = index.long().expand(block_table.shape[0], -1)
    page = (index // page_size).clamp(0, block_table.shape[1] - 1)
    return block_table.long().gather(1, page) * page_size + index % page_size


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """q [B, Q, H, Dk], k [B, J, HK, Dk], v [B, J, HK, Dv], visible [B, Q, J] -> [B, Q, H, Dv] float32; a query that sees no key gives zeros."""
    rows, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    grouped = q.float().view(rows, queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(grouped * scale, k.float().permute(0, 2, 3, 1).unsqueeze(2))  # [B, HK, G, Q, J]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    sink = None
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1, 1, 1)
        top = torch.maximum(top, sink)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    # A slot nobody sees may hold anything, NaN included, and 0 * NaN is NaN.
    values = v.float().masked_fill(~visible.any(1)[:, :, None, None], 0.0)
    out = torch.matmul(weights, values.permute(0, 2, 1, 3).unsqueeze(2))
    out = torch.where(total > 0, out / total, torch.where(torch.isnan(total), total, 0.0))
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)


def _attend_fixed(
    q: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, visible: Tensor, chunk: int, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Batch-invariant attention: each query alone, keys by position in chunks of one fixed size, partial sums added in order of position.

    q [T, H, Dk]; slots and visible [T, J] (J a multiple of ``chunk``): the key at each position. Returns [T, H, Dv] float32.
    """
    tokens, heads, _ = q.shape
    kv_heads, value_dim = v_pool.shape[1], v_pool.shape[2]
    grouped = (q.float() * scale).view(tokens, kv_heads, heads // kv_heads, -1).flatten(0, 1)
    shape = (tokens * kv_heads, heads // kv_heads, 1)
    top = (
        torch.full(shape, float("-inf"), device=q.device)
        if sinks is None
        else sinks.float().view(1, kv_heads, -1).expand(tokens, -1, -1).reshape(shape)
    )
    total = torch.zeros(shape, device=q.device) if sinks is None else torch.ones(shape, device=q.device)
    acc = torch.zeros(*shape[:2], value_dim, device=q.device)
    for start in range(0, slots.shape[1], chunk):
        part, seen = slots[:, start : start + chunk], visible[:, start : start + chunk]
        k = k_pool[part].float().permute(0, 2, 3, 1).flatten(0, 1)
        v = v_pool[part].float().masked_fill(~seen[:, :, None, None], 0.0).transpose(1, 2).flatten(0, 1)
        scores = torch.bmm(grouped, k.contiguous())
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(tokens, kv_heads, -1, chunk).masked_fill(~seen[:, None, None], float("-inf")).view(tokens * kv_heads, -1, chunk)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(new_top == float("-inf"), 0.0, new_top)
        weights, keep = torch.exp(scores - safe), torch.exp(top - safe)
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights, v.contiguous())
        top = new_top
    out = torch.where(total > 0, acc / total, torch.where(torch.isnan(total), total, 0.0))
    return out.view(tokens, heads, value_dim)


def _host_max(values: Tensor, bound: int) -> int:
    """The largest of ``values`` where they already are on the host, else the host's bound: reading a device tensor would wait for the device."""
    return int(values.max()) if values.device.type == "cpu" and values.numel() else bound


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    q_len: int,
    path: Tensor | None,
    page_size: int,
    max_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fixed_split: int | None = None,
) -> Tensor:
    """Paged attention of a few queries a row over committed keys and an ancestor window: q [B * q_len, H, Dk] -> [B * q_len, H, Dv].

    k_pool [N, HK, Dk], v_pool [N, HK, Dv], block_table [B, W] int32, length [B] int32. Query i of row b sees keys j < length[b] and, with ``path``
    None, window slots length[b] .. length[b] + i (a chain); else window slots length[b] + path[b, i, p] for p = 0, 1, .. while >= 0, which stand at
    position length[b] + p (a tree; slots below ``MAX_TREE_SLOTS``). ``window`` w > 0: a key at position pk is seen from pq iff pq - pk < w, pq being
    length + i, or length + depth of i. ``softcap`` c: z = c * tanh(z / c) of the scaled score. ``sinks`` [H]: one more logit in each head's
    denominator. A query whose path is all -1 gives zeros. ``max_len``: host bound on the number of keys of any row, window included.
    ``fixed_split``: batch-invariant mode, keys in chunks of that many positions. Every slot of a row's window must hold finite values, seen or not.
    """
    rows = block_table.shape[0]
    window_slots = q_len if path is None else 1 + _host_max(path, max_len)
    if path is not None and path.device.type == "cpu" and window_slots > MAX_TREE_SLOTS:
        raise ValueError(f"tree_attention: a path names window slot {window_slots - 1}; slots reach to {MAX_TREE_SLOTS - 1}")
    index = torch.arange(max(1, min(max_len, window_slots + _host_max(length, max_len))), device=q.device)
    if path is None:
        depth = torch.arange(q_len, device=q.device).expand(rows, q_len)
        alive = torch.ones(rows, q_len, dtype=torch.bool, device=q.device)
    else:
        depth = (path >= 0).sum(-1) - 1
        alive = depth >= 0
    base = length.long()[:, None, None]
    query_position = base + depth[:, :, None]
    if fixed_split is not None:
        return _tree_fixed(
            q, k_pool, v_pool, block_table, length, path, query_position, alive, page_size, len(index), scale, window, softcap, sinks, fixed_split
        )
    visible = (index < base) if path is not None else (index <= query_position)
    if window > 0:
        visible = visible & (query_position - index < window)
    if path is not None:
        steps = torch.arange(path.shape[2], device=q.device)
        seen = path >= 0
        if window > 0:
            seen = seen & (depth[:, :, None] - steps < window)
        spare = len(index)  # one column more takes the writes of absent nodes
        visible = F.pad(visible.expand(rows, q_len, -1), (0, 1))
        visible = visible.scatter(2, torch.where(seen, base + path.long(), spare), True)[:, :, :spare]
    visible = visible & alive[:, :, None]
    slots = slots_of(block_table, index, page_size)
    out = _attend(q.view(rows, q_len, *q.shape[1:]), k_pool[slots], v_pool[slots], visible, scale, softcap, sinks)
    out = out.masked_fill(~alive[:, :, None, None], 0.0)
    return out.flatten(0, 1).to(q.dtype)


def _tree_fixed(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    path: Tensor | None,
    query_position: Tensor,
    alive: Tensor,
    page_size: int,
    width: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    chunk: int,
) -> Tensor:
    """The batch-invariant form: the key of a query at position j is the committed one for j < length, else its own ancestor at depth j - length."""
    rows, q_len = alive.shape
    position = torch.arange(-(-width // chunk) * chunk, device=q.device)
    base = length.long()[:, None, None]
    index = position.expand(rows, q_len, -1)
    if path is not None:
        ancestor = (position - base).clamp(0, path.shape[2] - 1).expand(rows, q_len, -1)
        index = torch.where(position < base, index, base + path.long().gather(2, ancestor).clamp(min=0))
    visible = (position <= query_position) & alive[:, :, None]
    if window > 0:
        visible = visible & (query_position - position < window)
    slots = slots_of(block_table, index.flatten(1), page_size).view(rows * q_len, -1)
    out = _attend_fixed(q, slots, k_pool, v_pool, visible.flatten(0, 1), chunk, scale, softcap, sinks)
    return out.masked_fill(~alive.flatten()[:, None, None], 0.0).to(q.dtype)


def packed_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    length: Tensor,
    cu_q: Tensor,
    max_q: int,
    page_size: int,
    max_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fixed_split: int | None = None,
) -> Tensor:
    """Causal paged attention of packed prefill chunks: q [T, H, Dk] -> [T, H, Dv].

    Row b owns tokens cu_q[b] .. cu_q[b + 1] - 1 (cu_q [B + 1] int32, at most ``max_q`` of them); token i stands at position length[b] + i - cu_q[b]
    and sees keys 0 .. its own position, all read from the pool. Other arguments as in ``tree_attention``. Tokens beyond cu_q[B] give zeros.
    """
    tokens, heads, _ = q.shape
    rows = block_table.shape[0]
    cu = cu_q.long()
    token = torch.arange(tokens, device=q.device)
    row = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    owned = row < rows
    row = row.clamp(max=rows - 1)
    place = (token - cu[row]).clamp(0, max_q - 1)
    width = max(1, min(max_len, _host_max(length.long() + cu.diff(), max_len)))
    if fixed_split is not None:
        position = torch.arange(-(-width // fixed_split) * fixed_split, device=q.device)
        query_position = (length.long()[row] + place)[:, None]
        visible = (position <= query_position) & owned[:, None]
        if window > 0:
            visible = visible & (query_position - position < window)
        slots = slots_of(block_table, position, page_size)[row]
        out = _attend_fixed(q, slots, k_pool, v_pool, visible, fixed_split, scale, softcap, sinks)
        return out.masked_fill(~owned[:, None, None], 0.0).to(q.dtype)
    index = torch.arange(width, device=q.device)
    offsets = torch.arange(max_q, device=q.device)
    out = torch.zeros(rows, max_q, heads, v_pool.shape[2], device=q.device)
    group = max(1, _SCORE_ELEMENTS // (max_q * heads * width))
    for start in range(0, rows, group):
        part = slice(start, start + group)
        source = (cu[:-1][part, None] + offsets).clamp(max=max(tokens - 1, 0))
        query_position = (length.long()[part, None] + offsets)[:, :, None]
        visible = index <= query_position
        if window > 0:
            visible = visible & (query_position - index < window)
        visible = visible & (offsets < cu.diff()[part, None])[:, :, None]
        slots = slots_of(block_table[part], index, page_size)
        out[part] = _attend(q[source], k_pool[slots], v_pool[slots], visible, scale, softcap, sinks)
    return out[row, place].masked_fill(~owned[:, None, None], 0.0).to(q.dtype)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write k [T, HK, Dk] and v [T, HK, Dv] into the pools at slots [T] int64, in place. Only scratch slots may repeat.

    A head whose v is not finite is stored as k = NaN and v = 0: whoever sees the key still gets NaN, but one that does not (a rejected draft's
    neighbour) is spared 0 * NaN.
    """
    broken = ~torch.isfinite(v).all(-1, keepdim=True)
    k, v = k.masked_fill(broken, float("nan")), v.masked_fill(broken, 0.0)
    k_pool.index_copy_(0, slots.long(), k.to(k_pool.dtype))
    v_pool.index_copy_(0, slots.long(), v.to(v_pool.dtype))


def compact_kv(
    k_pools: Tensor | list[Tensor],
    v_pools: Tensor | list[Tensor],
    block_table: Tensor,
    length: Tensor,
    path: Tensor,
    accepted: Tensor,
    page_size: int,
) -> None:
    """After tree acceptance, move the KV of window slot path[b, i] to window slot i for i = 1 .. accepted[b], in every layer, in place.

    Pools: one tensor [layers, N, HK, D] or a list of [N, HK, D]. path [B, S + 1] int32 (root first, -1 beyond), accepted [B] int32. All sources of a
    row are read before any is written: paths such as 0, 2, 3, 7 overlap.
    """
    steps = torch.arange(1, path.shape[1], device=path.device)
    moves = steps <= accepted[:, None]
    base = length.long()[:, None]
    source = slots_of(block_table, base + path[:, 1:].long().clamp(min=0), page_size)
    target = slots_of(block_table, base + steps, page_size)
    source, target = (torch.where(moves, slots, 0).flatten() for slots in (source, target))  # what does not move copies scratch onto itself
    for pool in (*k_pools, *v_pools):
        pool.index_copy_(0, target, pool[source])


def _normalise(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMS norm of the last dimension, float32 inside. Llama rounds before the weight; Gemma (``plus_one``) multiplies by 1 + weight in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype) if plus_one else weight * wide.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """RMS norm [T, H] -> [T, H], as transformers computes it (Llama; with ``plus_one`` Gemma)."""
    return _normalise(x, weight, eps, plus_one)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool = False) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both [T, H]: the sum is rounded to the dtype and the norm is that of the rounded sum. None adds nothing."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    return _normalise(total, weight, eps, plus_one), total


def pair_input(
    ids: Tensor,
    table: Tensor,
    feed: Tensor,
    embed_weight: Tensor | None,
    feed_weight: Tensor | None,
    eps: float,
    plus_one: bool = False,
    feed_first: bool = False,
    residual: str = "none",
) -> tuple[Tensor, Tensor | None]:
    """What a drafter's layer reads: (cat[embedding, feed] [T, 2E], stream [T, E] or None).

    ids [T] int32 (outside the table: a row of zeros), table [V, E], feed [T, E]. A half with a weight [E] is RMS-normed first, as ``rms_norm`` does.
    feed_first swaps the halves. residual: ``plain`` also returns a copy of feed, ``normed`` one of the normed feed, ``none`` nothing.
    """
    emb = embed(ids, table)
    emb = emb if embed_weight is None else _normalise(emb, embed_weight, eps, plus_one)
    normed = feed if feed_weight is None else _normalise(feed, feed_weight, eps, plus_one)
    stream = {"none": None, "plain": feed, "normed": normed}[residual]
    return torch.cat([normed, emb] if feed_first else [emb, normed], 1), None if stream is None else stream.clone()


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> Tensor:
    """Split qkv [T, (H + 2 HK) * D], norm heads (q_norm, k_norm [D] or None), rotate, write K and V to the pools; returns q [T, H, D].

    cos and sin [max position, R / 2] float32: the first R <= D channels of a head are rotated by halves (channel c pairs with c + R / 2), in float32
    rounded once. positions [T] int32, slots [T] int64.
    """
    tokens = qkv.shape[0]
    q, k, v = qkv.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm is not None:
        q = _normalise(q, q_norm, eps, plus_one)
    if k_norm is not None:
        k = _normalise(k, k_norm, eps, plus_one)
    half = cos.shape[1]
    angle_cos, angle_sin = cos[positions.long()][:, None], sin[positions.long()][:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat([first * angle_cos - second * angle_sin, second * angle_cos + first * angle_sin], -1).to(x.dtype)
        return torch.cat([turned, x[..., 2 * half :]], -1)

    write_kv(rotate(k), v, k_pool, v_pool, slots)
    return rotate(q).contiguous()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I] = [gate | up] -> [T, I]; float32 inside, rounded once."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate, tanh form) * up for gate_up [T, 2 I] -> [T, I]; float32 inside, rounded once."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """x [T, K] @ weight [N, K]^T (+ bias [N]) (+ residual [T, N]) -> [T, N]. ``deterministic``: a row's result does not depend on T."""
    if not deterministic:
        out = F.linear(x, weight, bias)
    else:
        tokens = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -tokens % DETERMINISTIC_ROWS))
        parts = [F.linear(part, weight, bias) for part in padded.split(DETERMINISTIC_ROWS)]
        out = torch.cat(parts)[:tokens] if parts else F.linear(x, weight, bias)
    return out if residual is None else out + residual


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """silu_mul(linear(x, weight, bias)): weight [2 I, K] = [gate | up], x [T, K] -> [T, I]."""
    return silu_mul(linear(x, weight, bias, deterministic=deterministic))


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [V, H] for ids [T] int32 -> [T, H]. An id outside the vocabulary (-1: no node) gives zeros."""
    known = (ids >= 0) & (ids < weight.shape[0])
    return F.embedding(torch.where(known, ids, 0).long(), weight).masked_fill(~known[:, None], 0.0)


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of the largest entry of each row of logits [N, V] -> [N] int32; ties go to the lowest index; NaN never wins (a row of NaN gives 0)."""
    clean = torch.where(torch.isnan(logits), float("-inf"), logits)
    return clean.argmax(-1).to(torch.int32)
