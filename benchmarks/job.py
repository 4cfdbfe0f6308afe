"""A whole job through the real command: rows read from a file, tokens detokenised, rows and statistics written; and how much of it the device worked.

``python -m benchmarks job [--only none,eagle3] [--prompts 2000] [--batch 64] [--json FILE]``: prompts of 32 to 1,024 random ids that generate 16 to
512 tokens each, the lengths uniform from a fixed seed, on the shape of an 8B Llama with random weights; EAGLE-3 with num_steps 3 at an imposed
acceptance of 3 tokens a step, and no draft. ``--shape embedded --device cpu`` tries it out on a small model.

A small job of the same kind runs before each, in the same process: it loads the weights, compiles kernels and chooses matmuls. The job that is
measured still captures its own graphs, within its wall time and outside its device time. Device time: events around every launch
(``stats.json``, ``throughput.device_prefill_s`` and ``device_decode_s``), not the host's clock.

Boundary: calls ``specgen.cli.main`` and reads stats.json and specgen.log.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import EMBEDDED, head_folder, write_folder
from benchmarks.options import Parser
from specgen import cli


@dataclass(frozen=True)
class Lengths:
    """The ranges, both ends included, of prompt and output tokens, and the context that holds them."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    context: int


LENGTHS = {"llama31_8b": Lengths((32, 1024), (16, 512), 2048), EMBEDDED: Lengths((32, 448), (16, 512), 1024)}
METHODS: dict[str, list[str]] = {
    "none": ["draft=none"],
    "eagle3": ["draft=eagle3", "draft.num_steps=3", "draft.simulate_acceptance_length=3"],
}


def write_prompts(path: Path, count: int, lengths: Lengths, vocab: int, seed: int = 0) -> tuple[int, int]:
    """``count`` rows of random ids with the number of tokens each generates; returns the sums of prompt and output tokens."""
    draw = random.Random(seed)
    prompt_tokens = output_tokens = 0
    with path.open("w") as file:
        for i in range(count):
            ids = [draw.randrange(vocab) for _ in range(draw.randint(*lengths.prompt))]
            tokens = draw.randint(*lengths.output)
            file.write(json.dumps({"id": i, "token_ids": ids, "max_tokens": tokens}) + "\n")
            prompt_tokens, output_tokens = prompt_tokens + len(ids), output_tokens + tokens
    return prompt_tokens, output_tokens


def overrides(method: str, folder: Path, data: Path, out: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a job."""
    found = [
        "model=hf",
        f"model.path={folder}",
        "model.load_format=dummy",
        f"model.dtype={options.dtype}",
        f"model.device={options.device}",
        f"model.max_length={LENGTHS[options.shape].context}",
        *METHODS[method],
        "data=jsonl",
        f"data.path={data}",
        "sampling.ignore_eos=true",
        f"engine.max_batch={options.batch}",
        f"output.dir={out}",
    ]
    if method != "none":
        found += [f"draft.path={head_folder(options.shape)}", "draft.load_format=dummy", "baseline=false"]
    return found


def run(arguments: list[str]) -> None:
    """One job of this process, its table not shown."""
    with redirect_stdout(io.StringIO()):
        code = cli.main(arguments)
    if code != 0:
        raise SystemExit(f"benchmarks: the job ended with exit code {code}: python -m specgen {' '.join(arguments)}")


def figures(out: Path, method: str) -> dict[str, Any]:
    """What a finished job says of itself. ``device_share``: device time / wall time, and the same without the seconds that graphs were captured."""
    stats = json.loads((out / "stats.json").read_text())
    throughput, step = stats["throughput"], stats["step"]
    captured = re.findall(r"captured a decode step for .* in ([\d.]+) s", (out / "specgen.log").read_text())
    capture_s = sum(map(float, captured))
    device_s = throughput["device_prefill_s"] + throughput["device_decode_s"]
    wall_s = throughput["wall_s"]
    names = ("wall_s", "device_prefill_s", "device_decode_s", "output_tokens_per_s", "decode_tokens_per_s", "first_token_s")
    return {
        "method": method,
        "rows": stats["samples"],
        "prompt_tokens": stats["prompt_tokens"],
        "output_tokens": stats["output_tokens"],
        **{name: throughput[name] for name in names},
        "device_s": device_s,
        "device_share": device_s / wall_s,
        "captures": len(captured),
        "capture_s": capture_s,
        "device_share_without_captures": device_s / (wall_s - capture_s),
        "step_ms_p50": step["ms_p50"],
        "step_ms_p99": step["ms_p99"],
    }


def show(found: dict[str, Any]) -> None:
    """Print a job's figures."""
    print(
        f"{found['method']}: {found['rows']} rows, {found['prompt_tokens']} + {found['output_tokens']} tokens in {found['wall_s']:.2f} s: "
        f"{found['output_tokens_per_s']:.0f} tokens/s\n"
        f"  device {found['device_s']:.2f} s (prefill {found['device_prefill_s']:.2f}, decode {found['device_decode_s']:.2f}) = "
        f"{100 * found['device_share']:.1f}% of the wall time; {100 * found['device_share_without_captures']:.1f}% without the "
        f"{found['capture_s']:.2f} s in which {found['captures']} graphs were captured\n"
        f"  decode calls p50 {found['step_ms_p50']:.2f} ms, p99 {found['step_ms_p99']:.2f} ms",
        flush=True,
    )


def measure(folder: Path, work: Path, method: str, vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """One method: the small job, then the job. Rows that are missing or of another length than asked for end the program."""
    lengths = LENGTHS[options.shape]
    for name, count, seed in (("first", options.warm_up, 1), ("job", options.prompts, 0)):
        data, out = work / f"{name}.jsonl", work / f"{name}_{method}"
        wanted = write_prompts(data, count, lengths, vocab, seed)
        run(overrides(method, folder, data, out, options))
    found = figures(out, method)
    assert (found["prompt_tokens"], found["output_tokens"]) == wanted and found["rows"] == options.prompts
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and return one entry a method."""
    parser = Parser("python -m benchmarks job", __doc__)
    parser.add_argument("--only", default=",".join(METHODS), help="methods, separated by commas")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=128, help="prompts of the small job before (128)")
    parser.add_argument("--shape", default="llama31_8b", choices=list(LENGTHS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dir", type=Path, help="keep the runs' folders here (a new folder; otherwise they are removed)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if options.dir is None else options.dir
        work.mkdir(parents=True, exist_ok=True)
        vocab = write_folder(options.shape, work / "model")
        for method in options.only.split(","):
            found.append(measure(work / "model", work, method, vocab, options))
            show(found[-1])
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
