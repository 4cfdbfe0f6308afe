"""Matrix products of a decode step: few rows against a large weight, where the only cost is reading the weight once.

A streaming kernel for up to 128 rows (weight tiles in a deep pipeline, K split over programs, parts added in a fixed order by the last program to
arrive, never by float atomics), next to cuBLAS; which of them serves a shape is decided by measurement (``models/tune.py``), cuBLAS before that.
Deterministic mode: one tile shape, one K order and one instruction for every number of rows.
Boundary: kernels, launchers and the table of choices; the meaning of each argument is defined by ``reference.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .activation import gate, silu_mul
from .launch import COUNTERS, INTERPRETED, arrival_counters, last_to_arrive, pdl_options, pdl_wait, sm_count

MAX_ROWS = 128  # beyond, cuBLAS
_BUCKETS = (1, 4, 8, 16, 32, 64, 128)


@triton.jit
def _prefetch_rows(pointers, size):
    """Ask L2 for ``size`` bytes (a multiple of 16) from each pointer; nothing waits for them."""
    return tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(
    x_rows, w_rows, lo, hi, x_mask, w_mask,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum over lo <= k < hi of x[m, k] w[n, k], [BM, BN] ([BN, BM] with SWAP: the weight then is the left operand of the tensor core)."""
    acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    ko = tl.arange(0, BK)
    for k0 in range(lo, hi, BK):
        k = k0 + ko
        w_here = w_mask[:, None] if EVEN else w_mask[:, None] & (k < hi)[None, :]
        x_here = x_mask[:, None] if EVEN else x_mask[:, None] & (k < hi)[None, :]
        w = tl.load(w_rows[:, None] + k[None, :], mask=w_here, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows[:, None] + k[None, :], mask=x_here, other=0.0)
        left, right = (w, tl.trans(x)) if SWAP else (x, tl.trans(w))
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gated_product(
    x_rows, w_rows, up_rows, lo, hi, x_mask, w_mask,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_product`` of the same x with two blocks of weight rows, both streams in flight at once."""
    acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    ko = tl.arange(0, BK)
    for k0 in range(lo, hi, BK):
        k = k0 + ko
        w_here = w_mask[:, None] if EVEN else w_mask[:, None] & (k < hi)[None, :]
        x_here = x_mask[:, None] if EVEN else x_mask[:, None] & (k < hi)[None, :]
        w = tl.load(w_rows[:, None] + k[None, :], mask=w_here, other=0.0, eviction_policy="evict_first")
        v = tl.load(up_rows[:, None] + k[None, :], mask=w_here, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows[:, None] + k[None, :], mask=x_here, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
            up = tl.dot(v, tl.trans(x), up, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
            up = tl.dot(x, tl.trans(v), up, input_precision=PRECISION)
    return acc, up


@triton.jit
def _finish(
    acc, up, bias, residual, out, m, n, M, N, residual_stride,
    SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Round, add the bias and the residual (or gate), store. N is the number of output columns."""
    row = m[None, :] if SWAP else m[:, None]
    column = n[:, None] if SWAP else n[None, :]
    mask = (row < M) & (column < N)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)
    value = acc.to(dtype)
    if GATED:
        value = (gate(value.to(tl.float32), False) * up.to(dtype).to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        addend = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=mask, other=0.0)
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(dtype)
    tl.store(out + row.to(tl.int64) * N + column, value, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x, w, bias, residual, out, part, counters, M, N, K, x_stride, w_stride, residual_stride, share, prefetch_bytes,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHUNKED: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile (m, n) and K share ``split`` a program; N counts output columns (GATED: half the weight's rows)."""
    column_tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    row_tile = tl.program_id(1)
    m = row_tile * BM + tl.arange(0, BM)
    n = column_tile * BN + tl.arange(0, BN)
    w_rows = w + n.to(tl.int64) * w_stride
    lo = split * share
    hi = tl.minimum(lo + share, K)
    if PREFETCH:  # weights do not depend on the kernel before: ask for them while it drains
        _prefetch_rows(w + tl.minimum(n, N - 1).to(tl.int64) * w_stride + lo, prefetch_bytes)
    pdl_wait(PDL)
    x_rows = x + m.to(tl.int64) * x_stride
    if CHUNKED:
        # Deterministic, many rows: the same shares as the split form, one after the other, added in the same order.
        acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
        for begin in range(0, K, share):
            acc += _product(x_rows, w_rows, begin, tl.minimum(begin + share, K), m < M, n < N, BM, BN, BK, SWAP, EVEN, PRECISION)
    elif not GATED:
        acc = _product(x_rows, w_rows, lo, hi, m < M, n < N, BM, BN, BK, SWAP, EVEN, PRECISION)
    if GATED:
        up_rows = w_rows + tl.cast(N, tl.int64) * w_stride
        acc, up = _gated_product(x_rows, w_rows, up_rows, lo, hi, m < M, n < N, BM, BN, BK, SWAP, EVEN, PRECISION)
    else:
        up = acc
    if SPLIT > 1:
        rows: tl.constexpr = BN if SWAP else BM
        columns: tl.constexpr = BM if SWAP else BN
        tile = row_tile * (tl.num_programs(0) // SPLIT) + column_tile
        place = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
        here = part + tile.to(tl.int64) * (SPLIT * BM * BN)
        tl.store(here + split * (BM * BN) + place, acc)
        if last_to_arrive(counters + tile, SPLIT):
            acc = tl.load(here + place, cache_modifier=".cg")
            for s in tl.static_range(1, SPLIT):
                acc += tl.load(here + s * (BM * BN) + place, cache_modifier=".cg")
            _finish(acc, acc, bias, residual, out, m, n, M, N, residual_stride, SWAP, HAS_BIAS, HAS_RESIDUAL, False)
    else:
        _finish(acc, up, bias, residual, out, m, n, M, N, residual_stride, SWAP, HAS_BIAS, HAS_RESIDUAL, GATED)


@dataclass(frozen=True)
class LinearConfig:
    """Meta-parameters of the streaming kernel. ``swap``: the weight is the tensor core's left operand (needs block_n >= 64 to use wide instructions).

    ``split``: programs that share one tile's K. ``prefetch``: bytes of each weight row asked of L2 before the previous kernel has ended (0: none).
    """

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    swap: bool = False
    prefetch: int = 0


DETERMINISTIC = LinearConfig(block_n=128, block_k=64, split=0, num_warps=4, num_stages=4)
DETERMINISTIC_ROWS = 64
DETERMINISTIC_SHARE = 1024  # k in one partial sum
CANDIDATES = (
    LinearConfig(16, 256, 1, 4, 5),
    LinearConfig(32, 256, 1, 4, 4),
    LinearConfig(32, 256, 2, 4, 4),
    LinearConfig(32, 128, 1, 4, 6),
    LinearConfig(64, 128, 1, 4, 5, swap=True),
    LinearConfig(64, 128, 2, 4, 4, swap=True),
    LinearConfig(64, 128, 4, 4, 4, swap=True),
    LinearConfig(64, 256, 4, 4, 3, swap=True),
    LinearConfig(64, 128, 8, 4, 3, swap=True),
)


# What the in-layer tuning of ``models/tune.py`` tries against cuBLAS: best on an H200 over 1 to 32 tokens of an 8B's shapes, and over 128.
_FEW = (
    LinearConfig(64, 128, 1, 4, 5, swap=True),
    LinearConfig(64, 128, 4, 4, 4, swap=True),
    LinearConfig(64, 256, 2, 4, 3, swap=True),
)
_MANY = (
    LinearConfig(64, 64, 4, 4, 4, swap=True),
    LinearConfig(64, 64, 2, 4, 4, swap=True),
    LinearConfig(128, 64, 2, 8, 4, swap=True),
    LinearConfig(128, 64, 4, 8, 3, swap=True),
)


def step_candidates(tokens: int, gated: bool) -> tuple[LinearConfig, ...]:
    """Configurations worth timing for a product over ``tokens`` rows; a gated one cannot split K."""
    candidates = _FEW if tokens <= 64 else _MANY
    return tuple(c for c in candidates if not (gated and c.split > 1))


def stream_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, config: LinearConfig = CANDIDATES[0], gated: bool = False
) -> Tensor:
    """The streaming kernel with an explicit configuration. ``gated``: weight [2 I, K] = [gate | up], the result silu(gate) * up [T, I]."""
    tokens, depth = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    split = 1 if gated else config.split
    share = triton.cdiv(triton.cdiv(depth, config.block_k), split) * config.block_k
    rows = max(16, min(MAX_ROWS, triton.next_power_of_2(tokens)))
    return _launch(x, weight, bias, residual, config, rows, columns, triton.cdiv(depth, share), share, False, gated)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    config: LinearConfig,
    block_m: int,
    columns: int,
    split: int,
    share: int,
    chunked: bool,
    gated: bool,
) -> Tensor:
    tokens, depth = x.shape
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tiles = triton.cdiv(columns, config.block_n), triton.cdiv(tokens, block_m)
    if split > 1 and tiles[0] * tiles[1] > COUNTERS:
        raise ValueError(f"linear: {tiles[0] * tiles[1]} split tiles exceed the {COUNTERS} arrival counters")
    part = torch.empty(tiles[0] * tiles[1] * split * block_m * config.block_n, dtype=torch.float32, device=x.device) if split > 1 else out
    extra = pdl_options(x.device)
    even = depth % config.block_k == 0
    size = min(config.prefetch, share * x.element_size())
    fit = (config, block_m, x.dtype, gated)
    stages = _stages.get(fit, config.num_stages)
    while True:
        try:
            _linear_kernel[(tiles[0] * split, tiles[1])](
                x, weight, out if bias is None else bias, out if residual is None else residual, out, part,
                arrival_counters(x.device) if split > 1 else out, tokens, columns, depth, x.stride(0), weight.stride(0),
                0 if residual is None else residual.stride(0), share, size,
                BM=block_m, BN=config.block_n, BK=config.block_k, SPLIT=split, CHUNKED=chunked, SWAP=config.swap, EVEN=even, GATED=gated,
                HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
                PREFETCH=size > 0 and even and extra["PDL"], num_warps=config.num_warps, num_stages=stages, **extra,
            )  # fmt: skip
            break
        except triton.runtime.errors.OutOfResources:
            # More rows need more shared memory a stage: a shallower pipeline computes the same sums.
            if stages <= 2:
                raise
            stages -= 1
    _stages[fit] = stages
    return out


def deterministic_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same bits for a row whatever the number of rows: fixed tiles, and partial sums over fixed shares of K added in order."""
    tokens, depth = x.shape
    columns = weight.shape[0]
    shares = triton.cdiv(depth, DETERMINISTIC_SHARE)
    tiles = triton.cdiv(columns, DETERMINISTIC.block_n) * triton.cdiv(tokens, DETERMINISTIC_ROWS)
    split = shares > 1 and tiles <= 2 * sm_count(x.device)
    return _launch(
        x, weight, bias, residual, DETERMINISTIC, DETERMINISTIC_ROWS, columns, shares if split else 1, DETERMINISTIC_SHARE, not split, False
    )


_table: dict[str, LinearConfig | None] = {}
_stages: dict[Any, int] = {}  # pipeline depths that fit, once found


def _key(tokens: int, columns: int, depth: int, dtype: torch.dtype, gated: bool) -> str:
    bucket = bucket_of(tokens)
    return f"{columns}x{depth}{'g' if gated else ''}:{bucket}:{str(dtype).removeprefix('torch.')}"


def bucket_of(tokens: int) -> int:
    """The table's bucket that ``tokens`` <= MAX_ROWS falls into."""
    return next(b for b in _BUCKETS if tokens <= b)


def table_key(tokens: int, weight: Tensor, gated: bool) -> str:
    """The table's name for a weight [N, K] with that many tokens."""
    return _key(tokens, weight.shape[0], weight.shape[1], weight.dtype, gated)


def device_label(device: torch.device) -> str:
    """What a measured choice depends on besides the shape."""
    return f"{torch.cuda.get_device_name(device)} / triton {triton.__version__}"


def config_from(fields: dict[str, Any] | None) -> LinearConfig | None:
    """A configuration from its stored fields; None is cuBLAS."""
    return None if fields is None else LinearConfig(**fields)


def set_choices(choices: dict[str, LinearConfig | None]) -> None:
    """Enter choices by ``table_key``."""
    _table.update(choices)


def chosen(key: str) -> bool:
    """Whether there is a choice for a key."""
    return key in _table


def choice(key: str) -> LinearConfig | None:
    """The choice of a key; None is cuBLAS."""
    return _table.get(key)


def _choice(x: Tensor, weight: Tensor, gated: bool) -> LinearConfig | None:
    """The measured choice for a shape: a configuration of the streaming kernel, or None for cuBLAS."""
    tokens = x.shape[0]
    if not _table or not 0 < tokens <= MAX_ROWS or x.stride(1) != 1 or weight.stride(1) != 1:
        return None
    return _table.get(_key(tokens, weight.shape[0], weight.shape[1], x.dtype, gated))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """``reference.linear`` on the device: the measured choice, cuBLAS where there is none."""
    if deterministic:
        return deterministic_linear(x, weight, bias, residual)
    config = _choice(x, weight, False)
    if config is not None:
        return stream_linear(x, weight, bias, residual, config)
    out = F.linear(x, weight, bias)
    return out if residual is None else out + residual


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """``reference.linear_silu_mul`` on the device: one kernel where that was measured to be faster, else the product and then the gate."""
    config = None if deterministic else _choice(x, weight, True)
    if config is not None:
        return stream_linear(x, weight, bias, None, config, gated=True)
    return silu_mul(linear(x, weight, bias, deterministic=deterministic))


def _time_in_graph(calls: list[Any], repeats: int = 5) -> float:
    """Median device seconds of one call, all calls captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def time_linear(
    tokens: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, config: LinearConfig | None, gated: bool = False
) -> float:
    """Device seconds of one product in a graph over enough weights that none is found in cache. None: cuBLAS (gated: cuBLAS, then the gate)."""
    copies = max(2, min(16, (256 << 20) // (columns * depth * dtype.itemsize)))
    weights = [torch.randn(columns, depth, dtype=dtype, device=device) for _ in range(copies)]
    x = torch.randn(tokens, depth, dtype=dtype, device=device)

    def call(weight: Tensor) -> Any:
        if config is not None:
            return lambda: stream_linear(x, weight, config=config, gated=gated)
        return lambda: silu_mul(F.linear(x, weight)) if gated else F.linear(x, weight)

    return _time_in_graph([call(weight) for weight in weights])


def tune_linear(
    shapes: list[tuple[int, int] | tuple[int, int, bool]],
    dtype: torch.dtype,
    device: torch.device,
    cache_file: Path | None = None,
    rows: tuple[int, ...] = _BUCKETS,
    candidates: tuple[LinearConfig, ...] = CANDIDATES,
    margin: float = 0.02,
    prefetch: int = 0,
) -> dict[str, LinearConfig | None]:
    """Measure every candidate against cuBLAS for weights of (N, K) (or (N, K, gated)) and fill the table ``linear`` chooses from.

    Results are kept in ``cache_file`` (JSON by device name and triton version) and measured only once. A candidate must win by ``margin``.
    ``prefetch`` is set on the chosen configurations (its gain shows between kernels, not in a kernel's own time). Needs a GPU, no work in flight,
    and room for 256 MiB of weights (twice the weight where it is larger). Returns the table of these shapes.
    """
    if INTERPRETED or device.type != "cuda":
        return {}
    label = device_label(device)
    known: dict[str, Any] = json.loads(cache_file.read_text()) if cache_file is not None and cache_file.exists() else {}
    mine: dict[str, Any] = known.setdefault(label, {})
    filled: dict[str, LinearConfig | None] = {}
    for columns, depth, *rest in shapes:
        gated = bool(rest and rest[0])
        for tokens in rows:
            key = _key(tokens, columns, depth, dtype, gated)
            if key not in mine:
                best, best_time = None, time_linear(tokens, columns, depth, dtype, device, None, gated) * (1 - margin)
                for config in candidates:
                    if gated and config.split > 1:
                        continue
                    seconds = time_linear(tokens, columns, depth, dtype, device, config, gated)
                    if seconds < best_time:
                        best, best_time = config, seconds
                mine[key] = None if best is None else asdict(best)
            filled[key] = None if mine[key] is None else LinearConfig(**mine[key] | {"prefetch": prefetch})
    _table.update(filled)
    if cache_file is not None:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        partial = cache_file.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1, sort_keys=True))
        partial.replace(cache_file)
    return filled
