"""The runner: ``python -m benchmarks [--list] [--only NAME,...] [--json FILE] [--device cpu|cuda] [--repeats N] [--steps N]``.

Each benchmark times the naive way beside ours in one process and prints medians, p99 and their ratio. ``python -m benchmarks NAME ...`` with the name
of a benchmark of the kernels or of whole steps runs that one's own command line. Boundary: selects, runs and prints; benchmarks are in the modules.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import host, latency, trees
from benchmarks.options import Parser
from benchmarks.registry import REGISTRY, Row, Settings

MODULES = (host, trees, latency)  # they register themselves
COMMANDS = {
    "adaptive": "adaptive speculation beside every fixed num_steps and no draft, on the embedded family (CUDA or CPU)",
    "acceptance": "acceptance at a temperature on the embedded family: coupled, greedy and sampled drafts (CPU)",
    "job": "2,000 prompts through the real command on the 8B shape: tokens a second, and the device's share of the time (CUDA or CPU)",
    "kernels_forward": "attention, matrix products, small kernels and a decoder layer of an 8B model: device time (CUDA)",
    "kernels_sampling": "sampling, drafting, trees and next tokens at the sizes of an 8B model: device time beside plain torch (CUDA)",
    "long_context": "the verify step of an 8B model over long contexts beside its floor (CUDA)",
    "startup": "from the command to the first tokens, with caches cold and warm, on 16 GB of local weights (CUDA or CPU)",
    "steps": "decode step time of the 8B jobs by method and batch (CUDA)",
}


def selected(only: str | None) -> list[str]:
    """Names to run, in the registry's order; an unknown one ends the program."""
    if only is None:
        return list(REGISTRY)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in REGISTRY]
    if unknown or not wanted:
        raise SystemExit(f"benchmarks: no benchmark named {', '.join(unknown) or repr(only)}; there are {', '.join(REGISTRY)}")
    return [name for name in REGISTRY if name in wanted]


def line(found: Row) -> str:
    """A row as it is printed."""
    params = " ".join(f"{key}={value}" for key, value in found["params"].items())
    times = f"naive {found['naive_us']:9.2f} us (p99 {found['naive_p99_us']:.2f})  ours {found['ours_us']:9.2f} us (p99 {found['ours_p99_us']:.2f})"
    known = {"name", "params", "naive_us", "ours_us", "ratio", "naive_p99_us", "ours_p99_us"}
    more = " ".join(f"{key}={short(value)}" for key, value in found.items() if key not in known)
    return f"{found['name']:<17} {params:<44} {times}  {found['ratio']:6.2f}x  {more}".rstrip()


def short(value: Any) -> str:
    """A figure to two places, also inside a mapping."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(item)}" for key, item in value.items()) + "}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what the command line asks for and return its rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
        return []
    parser = Parser("python -m benchmarks", __doc__)
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument("--only", help="names to run, separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1000, help="timed calls of a micro-benchmark (1000)")
    parser.add_argument("--steps", type=int, help="steps of step_latency (2000 on CUDA, 256 on CPU)")
    options = parser.parse_args(arguments)
    if options.list:
        for entry in REGISTRY.values():
            print(f"{entry.name:<17} {entry.summary}")
        for name, summary in COMMANDS.items():
            print(f"{name:<17} {summary}; python -m benchmarks {name} --help")
        return []
    device = torch.device("cuda:0" if options.device == "cuda" else options.device)
    settings = Settings(device, options.repeats, options.steps or (2000 if device.type == "cuda" else 256))
    rows: list[Row] = []
    for name in selected(options.only):
        begin = time.perf_counter()
        for found in REGISTRY[name].rows(settings):
            rows.append(found)
            print(line(found), flush=True)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
