"""From the command to the first tokens, in fresh processes: with no compiled kernel and no matmul choice in the caches (cold), and with them (warm).

``python -m benchmarks startup [--only cold,warm] [--dir DIR] [--json FILE]`` writes a checkpoint of an 8B Llama's shape once: random bfloat16 weights
in local safetensors of 4 GiB, with config and tokenizer; it is kept, and used again, where ``--dir`` names a folder. Then it runs
``python -m specgen`` on a few text prompts, EAGLE-3 with num_steps 3, in one process after the other. Before the cold run the files' pages are
dropped from the system's cache, as far as it lets them go. ``--shape embedded --device cpu`` tries it out on a small model.

Boundary: runs the command and reads stats.json; the clock of a process starts when the system started it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import HEADS, head_folder, write_folder, write_weights
from benchmarks.options import Parser
from specgen.draft.load import FAMILY

RUNS = ("cold", "warm")
TOKENS = 64
CACHES = {"SPECGEN_CACHE": "specgen", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def checkpoint(folder: Path, shape: str, device: str) -> float:
    """Write the checkpoint unless it is there; returns its size in GiB."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        write_folder(shape, folder)
        write_weights(folder, device)
        if device != "cpu":
            torch.cuda.empty_cache()  # this process stays, beside those that are measured
    return float(json.loads(index.read_text())["metadata"]["total_size"]) / 2**30


def forget(folder: Path) -> None:
    """Drop the weights from the page cache, so that a run reads them from the disk."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command(folder: Path, data: Path, out: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    return [
        *(sys.executable, "-m", "specgen"),
        "model=hf",
        f"model.path={folder}",
        f"model.dtype={options.dtype}",
        f"model.device={options.device}",
        "model.max_length=1024",
        "draft=eagle3",
        f"draft.path={head_folder(options.shape)}",
        "draft.load_format=dummy",
        "draft.num_steps=3",
        "draft.simulate_acceptance_length=3",
        "baseline=false",
        "data=jsonl",
        f"data.path={data}",
        f"engine.max_batch={options.batch}",
        f"sampling.max_tokens={TOKENS}",
        "sampling.ignore_eos=true",
        f"output.dir={out}",
    ]


def start(name: str, folder: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the command once; seconds from the process's start to the first token, to the first decode step's tokens and to its end."""
    caches, out = work / "caches", work / f"run_{name}"
    if name == "cold":
        shutil.rmtree(caches, ignore_errors=True)
        forget(folder)
    data = work / "prompts.jsonl"
    lines = (FAMILY / "prompts.jsonl").read_text().splitlines()
    data.write_text("".join(lines[i % len(lines)].replace('"id": "', f'"id": "{i}-') + "\n" for i in range(options.prompts)))
    environment = {**os.environ, **{variable: str(caches / kind) for variable, kind in CACHES.items()}}
    began = time.perf_counter()
    subprocess.run(command(folder, data, out, options), check=True, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.DEVNULL)
    total_s = time.perf_counter() - began
    throughput = json.loads((out / "stats.json").read_text())["throughput"]
    return {
        "run": name,
        "start_s": throughput["start_s"],
        "load_s": throughput["load_s"],
        "to_first_token_s": throughput["start_s"] + throughput["first_token_s"],
        "to_first_decode_step_s": throughput["start_s"] + throughput["first_decode_s"],
        "total_s": total_s,
        "output_tokens": options.prompts * TOKENS,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and return one entry a run."""
    parser = Parser("python -m benchmarks startup", __doc__)
    parser.add_argument("--only", default=",".join(RUNS), help="runs, separated by commas; warm alone uses the caches as they are")
    parser.add_argument("--shape", default="llama31_8b", choices=list(HEADS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dir", type=Path, help="keep checkpoint, caches and runs here (otherwise they are removed)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if options.dir is None else options.dir
        folder = work / f"checkpoint_{options.shape}"
        size = checkpoint(folder, options.shape, options.device)
        print(f"{options.shape}: {size:.2f} GiB of weights, {options.prompts} prompts of {TOKENS} new tokens, batch {options.batch}", flush=True)
        for name in options.only.split(","):
            shutil.rmtree(work / f"run_{name}", ignore_errors=True)
            found.append(start(name, folder, work, options))
            shown = ", ".join(f"{key.removesuffix('_s').replace('_', ' ')} {value:.2f} s" for key, value in found[-1].items() if key.endswith("_s"))
            print(f"{name}: {shown}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
