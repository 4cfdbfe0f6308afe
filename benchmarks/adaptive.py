"""Adaptive speculation beside every fixed num_steps and beside no draft: decode tokens per second on the embedded family.

``python -m benchmarks adaptive [--only eagle,never] [--batches 1,8,64] [--tokens 192] [--repeats 3] [--json FILE] [--device cpu --dtype float32]``.
``never`` is an EAGLE head of random weights, whose drafts are wrong: there adaptive speculation should cost next to nothing over no draft.

One process. Each way has an engine of its own, and every engine runs the same rows in each repeat, the ways in turn, so that drift of the clock
reaches all alike. Compiling kernels and capturing graphs are left out: engines run the rows before, adaptive ones at every num_steps in turn, and a
repeat in which a graph was still captured is run again. Learning is not left out: an adaptive engine begins each repeat knowing nothing.

Boundary: drives the engine's public verbs; what a step costs is measured by the engine itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.timing import no_collection
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.adaptive import AdaptiveController, Choice, Outcome
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

DRAFTERS = {"eagle": "auto", "never": "dummy"}  # load_format of the family's EAGLE head
LEAST_ROWS = 64  # of a run, which otherwise is ``--waves`` batches' worth
PROMPT_TOKENS = 256  # at most, so that a run needs one context bucket
MOST_TRIES = 8  # of a run in which no graph may be captured
PER_TOKEN_BYTES = 8192  # of KV, more than the family takes in any dtype


class EveryDepth:
    """A controller that warms up: one step of each num_steps in turn."""

    def __init__(self, max_steps: int) -> None:
        self._steps = itertools.cycle([*range(max_steps + 1), max_steps, 0])

    def choose(self, bucket: int, context: int) -> Choice:
        """The next in turn."""
        return Choice(bucket, context, next(self._steps))

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """Nothing is learnt."""

    def report(self) -> list[dict[str, Any]]:
        """Nothing to tell."""
        return []


@dataclass
class Way:
    """One way of decoding: its engine and what its timed runs gave. ``choices``: of the last run, seconds by num_steps."""

    name: str
    engine: Engine
    speeds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    choices: dict[int, float] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)

    def run(self, rows: list[Request], controller: Any = None) -> bool:
        """Run rows to their end and keep the figures; False, keeping none, when a graph was captured meanwhile."""
        engine, times = self.engine, self.engine.times
        if engine.pacing is not None:
            engine.pacing.controller = controller or AdaptiveController(engine.num_steps)
        captured = engine.graphs.capture_seconds if engine.graphs else 0.0
        tokens, seconds = times.decode_tokens, times.decode_seconds
        engine.run(rows)
        if engine.graphs and engine.graphs.capture_seconds != captured:
            return False
        self.texts = [row.output_ids for row in rows]
        if controller is None:
            self.seconds.append(times.decode_seconds - seconds)
            self.speeds.append((times.decode_tokens - tokens) / self.seconds[-1])
            steps = sum(row.counts.verify_steps for row in rows)
            self.lengths.append(1 + sum(sum(row.counts.accepted) for row in rows) / steps if steps else 1.0)
            self.choices = {n: 0.0 for n in range(engine.num_steps + 1)} if engine.pacing else {}
            for choice in engine.adaptive_report():
                self.choices[choice["num_steps"]] += choice["seconds"]
        return True


def rows_of(count: int, tokens: int) -> list[Request]:
    """``count`` rows from the family's prompts, each time a little shorter, that generate exactly ``tokens`` tokens."""
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    rows = []
    for i in range(count):
        ids = prompts[i % len(prompts)]
        length = max(2, min(PROMPT_TOKENS, len(ids)) - 2 * (i // len(prompts)))
        rows.append(Request(Prompt(index=i, id=i, key=i, token_ids=ids[:length]), params))
    return rows


def ways_of(target: Target, model: ModelConfig, drafter: str, batch: int, tokens: int, max_steps: int) -> list[Way]:
    """An engine for no draft, for each fixed num_steps and for adaptive speculation."""
    memory = batch * (tokens + 512) * PER_TOKEN_BYTES / 2**30
    config = EngineConfig(max_batch=batch, kv_memory_gb=memory)
    drafts = {"none": DraftConfig(method="none")}
    head: dict[str, Any] = {"method": "eagle", "path": str(FAMILY / "eagle"), "load_format": DRAFTERS[drafter]}
    drafts |= {str(steps): DraftConfig(num_steps=steps, **head) for steps in range(1, max_steps + 1)}
    drafts["adaptive"] = DraftConfig(num_steps=max_steps, adaptive=True, **head)
    return [Way(name, Engine(target, load_drafter(draft, model, target), config, draft)) for name, draft in drafts.items()]


def run_without_captures(way: Way, rows: int, tokens: int, controller: Any = None) -> None:
    """Run the rows, again and again while graphs are still captured in the run."""
    for _ in range(MOST_TRIES):
        if way.run(rows_of(rows, tokens), controller):
            return
    raise SystemExit(f"benchmarks: {way.name}: graphs are still captured after {MOST_TRIES} runs; more --tokens or --waves leave fewer for later")


def measure(target: Target, model: ModelConfig, drafter: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One drafter and batch: the median decode tokens per second of each way, and adaptive's ratios, medians over the repeats."""
    rows = max(LEAST_ROWS, options.waves * batch) if options.rows is None else options.rows
    ways = ways_of(target, model, drafter, batch, options.tokens, options.max_steps)
    for way in ways:
        run_without_captures(way, rows, options.tokens, EveryDepth(way.engine.num_steps))
    order, shuffle = list(ways), random.Random(0)
    for _ in range(options.repeats):
        shuffle.shuffle(order)
        for way in order:
            with no_collection():
                run_without_captures(way, rows, options.tokens)
    by_name = {way.name: way for way in ways}
    if model.dtype == "float32":
        assert all(way.texts == ways[0].texts for way in ways), "the text is the same however it was drafted"
    found = summary(by_name, {"drafter": drafter, "batch": batch, "rows": rows, "tokens": options.tokens, "dtype": model.dtype})
    for way in ways:
        way.engine.close()
    return found


def summary(ways: dict[str, Way], params: dict[str, Any]) -> dict[str, Any]:
    """The figures of one drafter and batch."""
    adaptive, none = ways["adaptive"], ways["none"]
    best = max((way for name, way in ways.items() if name not in ("none", "adaptive")), key=lambda way: median(way.speeds))
    shares = {steps: seconds / max(sum(adaptive.choices.values()), 1e-9) for steps, seconds in adaptive.choices.items()}
    return params | {
        "tokens_per_s": {name: median(way.speeds) for name, way in ways.items()},
        "acceptance_length": {name: median(way.lengths) for name, way in ways.items()},
        "best_fixed": best.name,
        "adaptive_to_best_fixed": median(a / b for a, b in zip(adaptive.speeds, best.speeds, strict=True)),
        "adaptive_to_none": median(a / b for a, b in zip(adaptive.speeds, none.speeds, strict=True)),
        "adaptive_shares": {str(steps): share for steps, share in shares.items() if share},
        "adaptive_run_s": median(adaptive.seconds),
        "repeats": len(adaptive.speeds),
    }


def show(found: dict[str, Any]) -> None:
    """Print the figures of one drafter and batch."""
    print(f"drafter {found['drafter']}, batch {found['batch']}: {found['rows']} rows of {found['tokens']} tokens, {found['dtype']}")
    for name, speed in found["tokens_per_s"].items():
        print(f"  {name:>8} {speed:10.1f} tokens/s   acceptance length {found['acceptance_length'][name]:.2f}")
    shares = ", ".join(f"{steps}: {100 * share:.0f}%" for steps, share in found["adaptive_shares"].items())
    print(f"  adaptive / best fixed ({found['best_fixed']}) {found['adaptive_to_best_fixed']:.3f}   adaptive / none {found['adaptive_to_none']:.3f}")
    print(f"  adaptive spent its {found['adaptive_run_s']:.2f} s of decoding at num_steps {shares}", flush=True)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and return one entry a drafter and batch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adaptive", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DRAFTERS), help="drafters, separated by commas")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=192, help="tokens a row generates (192)")
    parser.add_argument("--waves", type=int, default=24, help=f"batches' worth of rows in a run (24), {LEAST_ROWS} rows at least")
    parser.add_argument("--rows", type=int, help="rows in a run, instead of --waves")
    parser.add_argument("--max-steps", type=int, default=6, help="the largest num_steps, also adaptive's (6)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    device = "cuda:0" if options.device == "cuda" else options.device
    model = ModelConfig(dtype=options.dtype, device=device)
    target = load_target(model, device, options.dtype)
    found = []
    for drafter in options.only.split(","):
        for batch in map(int, options.batches.split(",")):
            found.append(measure(target, model, drafter, batch, options))
            show(found[-1])
            if device != "cpu":
                torch.cuda.empty_cache()
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
