"""Device time of the forward kernels at the sizes of an 8B model: attention, matrix products, small kernels, and a whole decoder layer.

``python -m benchmarks.kernels_forward [--only attention,linear,small,layer] [--sweep] [--batches 1,64] [--shapes qkv,o] [--rows 1,8] [--json FILE]``.
Every figure is the median of graph replays over enough distinct memory that nothing is found in cache. ``--sweep`` tries every configuration and
prints the best; edit the lists below to widen it. Boundary: calls the launchers directly; no engine, no checkpoint.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.options import Parser
from specgen.kernels import activation, attention, launch, linear, norm_rope
from specgen.kernels.attention import AttentionConfig
from specgen.kernels.linear import LinearConfig

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, HIDDEN, INNER, PAGE = 32, 8, 128, 4096, 14336, 16
ATTENTION = [(b, q, 384) for b, q in itertools.product((1, 8, 32, 64, 128, 256), (1, 4, 6, 16))] + [(32, 1, 8192), (32, 4, 8192), (1, 4, 8192)]
SWEEP_ATTENTION = [  # block_m 0: the default of the shape
    AttentionConfig(block_n, 0, warps, stages, splits)
    for block_n, warps, stages, splits in itertools.product((32, 64, 128), (2, 4), (2, 3), (1, 2, 4, 8, 16))
] + [AttentionConfig(64, 0, 4, 3, splits, fused=False) for splits in (2, 4, 8)]
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "draft_head": (32000, 4096),
    "eagle3_fc": (4096, 12288),
    "eagle3_qkv": (6144, 8192),
}
ROWS = (1, 4, 8, 16, 32, 64)
SWEEP_LINEAR = [
    LinearConfig(block_n, block_k, split, 4, stages, block_n >= 64)
    for block_n, block_k, split, stages in itertools.product((16, 32, 64, 128), (128, 256), (1, 2, 4, 8), (3, 4, 6))
    if 40 <= block_n * block_k * 2 * (stages - 1) / 1024 <= 100
]
PREFETCHES = (0, 512, 1024, 2048)
SMALL_TOKENS = (1, 4, 32, 128, 256, 1024)


def graph_time(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Median device seconds of one call, all captured in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[1:])[repeats // 2]


def copies_for(size: int) -> int:
    """How many distinct copies of ``size`` bytes make a pass that does not fit in cache."""
    return max(2, min(64, (256 << 20) // size))


class AttentionProblem:
    """Uniform rows of ``length`` committed keys, shuffled pages, several layers' pools."""

    def __init__(self, batch: int, q_len: int, length: int, tree: bool = False) -> None:
        width = -(-(length + q_len) // PAGE)
        self.bytes = batch * (length + q_len) * KV_HEADS * DIM * 2 * 2
        slots = (batch * width + 1) * PAGE
        self.k = [torch.randn(slots, KV_HEADS, DIM, device="cuda", dtype=BF16) for _ in range(copies_for(self.bytes))]
        self.v = [torch.randn_like(k) for k in self.k]
        self.q = torch.randn(batch * q_len, HEADS, DIM, device="cuda", dtype=BF16)
        self.table = (torch.randperm(batch * width, device="cuda") + 1).view(batch, width).int()
        self.length = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.q_len, self.max_len = q_len, length + q_len
        self.path = None
        if tree:  # every node below the root is the root's child
            self.path = torch.full((batch, q_len, 5), -1, dtype=torch.int32, device="cuda")
            self.path[:, :, 0] = 0
            self.path[:, 1:, 1] = torch.arange(1, q_len, device="cuda", dtype=torch.int32)

    def default(self) -> AttentionConfig:
        rows = self.q_len * HEADS // KV_HEADS
        return attention.default_config(rows, HEADS // KV_HEADS, 4 * DIM, False)

    def seconds(self, config: AttentionConfig | None, fixed_split: int | None = None) -> float:
        def call(k: Tensor, v: Tensor) -> Callable[[], Tensor]:
            return lambda: attention.tree_attention(
                self.q, k, v, self.table, self.length, self.q_len, self.path, PAGE, self.max_len, DIM**-0.5, fixed_split=fixed_split, config=config
            )

        return graph_time([call(k, v) for k, v in zip(self.k, self.v, strict=True)])


def attention_rows(batches: set[int] | None, sweep: bool) -> Iterator[dict[str, Any]]:
    """Attention by (batch, queries a row, length): default configuration, tree form, and with ``sweep`` the five best configurations."""
    for batch, q_len, length in ATTENTION:
        if batches is not None and batch not in batches:
            continue
        problem = AttentionProblem(batch, q_len, length)
        seconds = problem.seconds(None)
        row: dict[str, Any] = {"what": "attention", "batch": batch, "q_len": q_len, "length": length}
        row |= {"us": seconds * 1e6, "tb_s": problem.bytes / seconds / 1e12, "floor_us": problem.bytes / 4.2e6}
        if q_len > 1:
            row["tree_us"] = AttentionProblem(batch, q_len, length, tree=True).seconds(None) * 1e6
        if q_len in (1, 4):
            row["fixed_us"] = problem.seconds(None, fixed_split=256) * 1e6
        if sweep:
            row["best"] = best_attention(problem)
        yield row


def best_attention(problem: AttentionProblem, keep: int = 5) -> list[tuple[float, str]]:
    default, found = problem.default(), []
    for config in SWEEP_ATTENTION:
        if (config.splits or 1) * config.block_n > 2 * problem.max_len:
            continue
        try:
            config = replace(config, block_m=default.block_m)
            found.append((problem.seconds(config) * 1e6, str(config)))
        except Exception as error:  # shared memory or registers: not a candidate
            print("skipped", config, type(error).__name__, flush=True)
    return sorted(found)[:keep]


def linear_rows(shapes: list[str] | None, rows_wanted: tuple[int, ...], sweep: bool) -> Iterator[dict[str, Any]]:
    """Matrix products by (shape, rows): cuBLAS, and the best of the candidates (with ``sweep``: of the whole list)."""
    device = torch.device("cuda")
    for (name, (columns, depth)), rows in itertools.product(SHAPES.items(), rows_wanted):
        if shapes is not None and name not in shapes:
            continue
        size = columns * depth * 2
        variants = [("plain", False)] + ([("gated", True)] if name == "gate_up" else [])
        for label, gated in variants:
            base = linear.time_linear(rows, columns, depth, BF16, device, None, gated)
            found = []
            for config in SWEEP_LINEAR if sweep else linear.CANDIDATES:
                if gated and config.split > 1:
                    continue
                try:
                    found.append((linear.time_linear(rows, columns, depth, BF16, device, config, gated), str(config)))
                except Exception as error:
                    print("skipped", config, type(error).__name__, flush=True)
            found.sort()
            row: dict[str, Any] = {"what": f"linear {label}", "shape": name, "rows": rows, "floor_us": size / 4.2e6, "cublas_us": base * 1e6}
            row |= {"cublas_tb_s": size / base / 1e12, "best_us": found[0][0] * 1e6, "best_tb_s": size / found[0][0] / 1e12}
            yield row | {"best": [(seconds * 1e6, config) for seconds, config in found[:4]]}


def small_rows() -> Iterator[dict[str, Any]]:
    """Norm, RoPE with the KV write, gate and argmax by number of tokens."""
    for tokens in SMALL_TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
        residual, weight = torch.randn_like(x), torch.ones(HIDDEN, device="cuda", dtype=BF16)
        gate_up = torch.randn(tokens, 2 * INNER, device="cuda", dtype=BF16)
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=BF16)
        cos = torch.randn(4096, DIM // 2, device="cuda")
        positions, slots = torch.arange(tokens, device="cuda", dtype=torch.int32), torch.arange(tokens, device="cuda")
        pool = torch.zeros(2, tokens, KV_HEADS, DIM, device="cuda", dtype=BF16)
        logits = torch.randn(min(tokens, 256), 128256, device="cuda", dtype=BF16)
        calls: dict[str, Callable[[], Any]] = {
            "add_rms_norm": partial(norm_rope.add_rms_norm, x, residual, weight, 1e-5),
            "rope_write_kv": partial(norm_rope.rope_write_kv, qkv, cos, cos, positions, slots, pool[0], pool[1], HEADS, KV_HEADS, DIM),
            "silu_mul": partial(activation.silu_mul, gate_up),
            "argmax_rows": partial(activation.argmax_rows, logits),
        }
        for name, call in calls.items():
            yield {"what": name, "tokens": tokens, "us": graph_time([call] * 20) * 1e6}


class Layers:
    """Eight decoder layers of an 8B model with their own weights and KV."""

    def __init__(self, batch: int, q_len: int, length: int, count: int = 8) -> None:
        self.problem = AttentionProblem(batch, q_len, length)
        tokens = batch * q_len
        shapes = (SHAPES["qkv"], SHAPES["o"], SHAPES["gate_up"], SHAPES["down"])
        self.weights = [[torch.randn(*shape, device="cuda", dtype=BF16) * 0.02 for shape in shapes] for _ in range(count)]
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=BF16)
        self.x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
        self.cos = torch.randn(length + q_len + 1, DIM // 2, device="cuda")
        self.positions = torch.full((tokens,), length, dtype=torch.int32, device="cuda")
        self.slots = torch.arange(tokens, device="cuda")

    def forward(self, product: Callable[[Tensor, Tensor], Tensor], gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        problem, x, residual = self.problem, self.x, self.x
        for index, (qkv, o, gate_up, down) in enumerate(self.weights):
            k, v = problem.k[index % len(problem.k)], problem.v[index % len(problem.v)]
            h, residual = norm_rope.add_rms_norm(x, residual, self.norm, 1e-5)
            q = norm_rope.rope_write_kv(product(h, qkv), self.cos, self.cos, self.positions, self.slots, k, v, HEADS, KV_HEADS, DIM)
            a = attention.tree_attention(q, k, v, problem.table, problem.length, problem.q_len, None, PAGE, problem.max_len, DIM**-0.5)
            h, residual = norm_rope.add_rms_norm(product(a.flatten(1), o), residual, self.norm, 1e-5)
            x = product(gated(h, gate_up), down)
        return x

    def microseconds(self, product: Callable[[Tensor, Tensor], Tensor], gated: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Device time of one layer."""
        return graph_time([lambda: self.forward(product, gated)]) * 1e6 / len(self.weights)


def _gated_by_cublas(x: Tensor, weight: Tensor) -> Tensor:
    return activation.silu_mul(F.linear(x, weight))


def layer_rows(batches: set[int] | None) -> Iterator[dict[str, Any]]:
    """One layer's time (32 of them make the model): cuBLAS or the tuned table, programmatic launch on or off, weight prefetch by its size."""
    device = torch.device("cuda")
    cache_file = Path(tempfile.mkdtemp()) / "linear.json"
    shapes = [SHAPES["qkv"], SHAPES["o"], SHAPES["gate_up"], SHAPES["down"], (*SHAPES["gate_up"], True)]
    for batch, q_len in ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (64, 1), (64, 4)):
        if batches is not None and batch not in batches:
            continue
        layers = Layers(batch, q_len, 384)
        row: dict[str, Any] = {"what": "layer", "batch": batch, "q_len": q_len}
        for pdl in (False, True):
            launch.set_pdl(pdl)
            row[f"cublas_{'pdl' if pdl else 'no_pdl'}_us"] = layers.microseconds(F.linear, _gated_by_cublas)
        tokens = batch * q_len
        if tokens <= linear.MAX_ROWS:
            bucket = next(b for b in ROWS if tokens <= b)
            for prefetch in PREFETCHES:
                table = linear.tune_linear(shapes, BF16, device, cache_file, rows=(bucket,), prefetch=prefetch)
                row[f"tuned_prefetch{prefetch}_us"] = layers.microseconds(linear.linear, linear.linear_silu_mul)
            row["table"] = {key: str(c) for key, c in table.items()}
        yield row


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, print one line a figure, and write them all to ``--json``."""
    parser = Parser("python -m benchmarks kernels_forward", __doc__)
    parser.add_argument("--only", default="attention,linear,small,layer")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batches", default=None)
    parser.add_argument("--shapes", default=None)
    parser.add_argument("--rows", default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    batches = None if options.batches is None else {int(b) for b in options.batches.split(",")}
    shapes = None if options.shapes is None else options.shapes.split(",")
    rows_wanted = ROWS if options.rows is None else tuple(int(r) for r in options.rows.split(","))
    parts = {
        "attention": lambda: attention_rows(batches, options.sweep),
        "linear": lambda: linear_rows(shapes, rows_wanted, options.sweep),
        "small": small_rows,
        "layer": lambda: layer_rows(batches),
    }
    rows = []
    with torch.inference_mode():
        for part in options.only.split(","):
            for row in parts[part]():
                rows.append(row)
                print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
