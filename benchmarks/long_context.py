"""The verify step of an 8B model over long contexts, beside its floor: the same matmuls alone, and the KV bytes at the memory's speed.

``python -m benchmarks long_context [--rows 32] [--context 8192] [--nodes 4,1] [--json FILE]``. Device time of graph replays; the KV holds zeros,
which no kernel here treats differently. Boundary: the target's forward and head over a layout made by hand; no engine, no drafter.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_forward import graph_time
from benchmarks.options import Parser
from benchmarks.steps import SHAPES
from specgen.config import ModelConfig
from specgen.kernels import ops
from specgen.models.attention import KvPool
from specgen.models.loader import load_target
from specgen.models.target import FusedTarget
from specgen.types import Layout

PAGE = 16
HBM_BYTES_S = 4.2e12  # what an H200 reads in practice


def place(rows: int, context: int, nodes: int, device: torch.device) -> Layout:
    """``rows`` rows of ``context`` keys and ``nodes`` new tokens each, their pages scattered over the pool."""
    width = -(-(context + nodes) // PAGE)
    table = (torch.randperm(rows * width, device=device) + 1).to(torch.int32).view(rows, width)
    length = torch.full((rows,), context, dtype=torch.int32, device=device)
    slots, positions, start = ops.window(length, table, nodes, PAGE, context + nodes - 1)
    return Layout(positions, slots, table, start, nodes, context + nodes)


def verify(target: FusedTarget, ids: Tensor, layout: Layout, pool: KvPool) -> Tensor:
    """Logits of every node."""
    return target.logits(target.forward(ids, layout, pool).last)


def linears(target: FusedTarget, x: Tensor, q: Tensor) -> Tensor:
    """The matmuls of ``verify`` alone, on inputs of their widths: x [T, hidden], q [T, heads * head_dim]."""
    for layer in target.layers:
        ops.linear(x, layer.qkv)
        ops.linear(q, layer.o)
        ops.linear(ops.linear_silu_mul(x, layer.gate_up), layer.down)
    return ops.linear(x, target.lm_head_weight)


def measure(target: FusedTarget, rows: int, context: int, nodes: int) -> dict[str, Any]:
    """Milliseconds of the verify step, of its matmuls, and of reading its KV once at ``HBM_BYTES_S``; ``ratio``: verify over their sum."""
    device, tokens = target.device, rows * nodes
    layout = place(rows, context, nodes, device)
    pool = target.make_pool(layout.block_table.numel() + 1, PAGE)
    ids = torch.randint(0, 32000, (tokens,), dtype=torch.int32, device=device)
    x = torch.randn(tokens, target.hidden_size, device=device, dtype=target.dtype)
    q = torch.randn(tokens, target.layers[0].o.shape[1], device=device, dtype=target.dtype)
    whole = graph_time([partial(verify, target, ids, layout, pool)]) * 1e3
    products = graph_time([partial(linears, target, x, q)]) * 1e3
    reading = rows * context * target.kv_bytes_per_token / HBM_BYTES_S * 1e3
    floor = products + reading
    return {
        "rows": rows,
        "context": context,
        "nodes": nodes,
        "verify_ms": whole,
        "linears_ms": products,
        "kv_ms": reading,
        "ratio": whole / floor,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print one line a number of nodes."""
    parser = Parser("python -m benchmarks long_context", __doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--nodes", default="4,1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    most = options.context + 64
    model = ModelConfig(source="hf", path=str(SHAPES / "llama31_8b"), dtype="bfloat16", device="cuda", load_format="dummy", max_length=most)
    target = load_target(model, "cuda:0", torch.bfloat16)
    assert isinstance(target, FusedTarget)
    with torch.inference_mode():
        found = [measure(target, options.rows, options.context, int(nodes)) for nodes in options.nodes.split(",")]
    for row in found:
        print(" ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
