"""Which matmul kernel serves a layer's weights when few tokens pass: measured in a layer, at the first step of each size, and remembered on disk.

Boundary: times chains of layers and fills the table that ``kernels.linear`` chooses from; changes no result beyond rounding. Timing one product
alone misleads: what
counts is how it follows and is followed by the small kernels between the products (on an H200 the best choice by itself made a layer slower).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgen.kernels import ops

if TYPE_CHECKING:
    from specgen.models.decoder import DecoderLayer

log = logging.getLogger("specgen")
SMALLEST = 1024  # narrower layers live in cache; cuBLAS serves them
WINS = 0.996  # of the best so far: what a candidate's time must be below
WORKING_SET = 1600 << 20  # bytes of weights a timed chain reads: far more than cache, and a few layers, so that one launch more or less is seen


def cache_file() -> Path:
    """Where choices are kept between runs: ``$SPECGEN_CACHE`` or the user's cache folder."""
    root = os.environ.get("SPECGEN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "specgen")
    return Path(root) / "linear.json"


class LayerTuner:
    """Tunes the products of one stack of equal layers, a bucket of token counts at a time."""

    def __init__(self) -> None:
        self._done: set[int] = set()

    def ensure(self, layers: Sequence[DecoderLayer], tokens: int) -> None:
        """Tune for ``tokens`` if that is still to be done and worth it. Waits for the device: a start-up cost, never within a captured step."""
        first = layers[0]
        if first.qkv.device.type != "cuda" or first.qkv.dtype == torch.float32 or first.spec.hidden_size < SMALLEST:
            return
        from specgen.kernels import linear

        if tokens > linear.MAX_ROWS:
            return
        bucket = linear.bucket_of(tokens)
        if bucket in self._done or torch.cuda.is_current_stream_capturing():
            return
        self._done.add(bucket)
        with torch.inference_mode():
            _tune(layers, bucket, linear)


def _tune(layers: Sequence[DecoderLayer], tokens: int, linear: Any) -> None:
    start = time.perf_counter()
    first = layers[0]
    products = {"o": first.o, "qkv": first.qkv, "down": first.down, "gate_up": first.gate_up}
    keys = {
        name: linear.table_key(tokens, weight, name == "gate_up" and first.spec.activation != "gelu_pytorch_tanh")
        for name, weight in products.items()
    }
    # A shape already chosen for stays: the target's layers come first, and a drafter's one layer must not choose for them.
    keys = {name: key for name, key in keys.items() if not linear.chosen(key)}
    if not keys:
        return
    stored = _read(linear.device_label(first.qkv.device))
    if all(key in stored for key in keys.values()):
        linear.set_choices({key: linear.config_from(stored[key]) for key in keys.values()})
        return
    chain = _chain(layers, tokens)
    linear.set_choices(dict.fromkeys(keys.values()))
    base = best = _capture(chain)
    for name, key in keys.items():
        for config in linear.step_candidates(tokens, name == "gate_up"):
            before = linear.choice(key)
            linear.set_choices({key: config})
            try:
                graph = _capture(chain)
            except Exception as error:  # registers or shared memory: no candidate on this device
                log.debug("no candidate for %s: %s", key, error)
                graph = None
            if graph is not None and _ratio(graph, best) < WINS:
                best = graph
            else:
                linear.set_choices({key: before})
    chosen = {key: None if (config := linear.choice(key)) is None else asdict(config) for key in keys.values()}
    _write(linear.device_label(first.qkv.device), chosen)
    log.info("matmuls for %d tokens: a layer takes %.2f of cuBLAS's time (tuned in %.1f s)", tokens, _ratio(best, base), time.perf_counter() - start)


def _chain(layers: Sequence[DecoderLayer], tokens: int) -> Callable[[], Tensor]:
    """A forward through enough layers, attention replaced by a copy of the queries."""
    first = layers[0]
    weight_bytes = sum(w.numel() * w.element_size() for w in (first.qkv, first.o, first.gate_up, first.down))
    used = layers[: max(1, -(-WORKING_SET // weight_bytes))]
    hidden, width = first.spec.hidden_size, first.qkv.shape[1]
    x0 = torch.randn(tokens, hidden, device=first.qkv.device, dtype=first.qkv.dtype)
    wide = torch.randn(tokens, width, device=first.qkv.device, dtype=first.qkv.dtype)
    norm = torch.ones(hidden, device=first.qkv.device, dtype=first.qkv.dtype)
    q_width = first.o.shape[1]

    def forward() -> Tensor:
        x, residual = x0, x0
        for layer in used:
            h, residual = ops.add_rms_norm(x, residual, norm, 1e-5)
            qkv = ops.linear(h if width == hidden else wide, layer.qkv, layer.qkv_bias)
            h, residual = ops.add_rms_norm(ops.linear(qkv[:, :q_width].contiguous(), layer.o, layer.o_bias), residual, norm, 1e-5)
            x = ops.linear(ops.linear_silu_mul(h, layer.gate_up, layer.gate_up_bias), layer.down, layer.down_bias)
        return x

    return forward


def _capture(chain: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of a chain that has run once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    return graph


def _ratio(graph: torch.cuda.CUDAGraph, other: torch.cuda.CUDAGraph, repeats: int = 21) -> float:
    """Median device time of a graph over that of another, replayed in turn, so that what the clocks do meets both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for played, spent in zip((graph, other), times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            played.replay()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end))
    return median(times[0][1:]) / median(times[1][1:])


def _read(label: str) -> dict[str, Any]:
    try:
        return dict(json.loads(cache_file().read_text()).get(label, {}))
    except (OSError, ValueError):
        return {}


def _write(label: str, chosen: dict[str, Any]) -> None:
    """Add choices to the cache file; a folder that cannot be written only means measuring again next time."""
    path = cache_file()
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    known.setdefault(label, {}).update(chosen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1, sort_keys=True))
        partial.replace(path)
    except OSError as error:
        log.info("matmul choices are not kept: %s", error)
