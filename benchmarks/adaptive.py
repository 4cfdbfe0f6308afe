"""Adaptive speculation beside every fixed num_steps and beside no draft: decode tokens per second on the embedded family.

``python -m benchmarks adaptive [--only eagle,never] [--batches 1,8,64] [--seconds 2] [--repeats 3] [--json FILE] [--device cpu --dtype float32]``.
``never`` is an EAGLE head of random weights, whose drafts are wrong: there adaptive speculation should cost next to nothing over no draft.

One process. Each way of decoding has an engine of its own and an endless supply of the same rows, and the ways take turns of a few milliseconds, in a
new random order each round, so that whatever slows the machine down for longer than that slows all of them. Compiling kernels and capturing graphs
are left out: the engines warm up before, adaptive ones at every num_steps in turn and after absences of every length, and a round in which a graph
was still captured does not count. Learning is not left out: an adaptive engine begins each repeat knowing nothing. Each repeat has new engines, made
in random order, so that one which is a little slower than another of its kind, wherever that comes from, counts in one repeat only.

Boundary: drives the engine's public verbs; what a step costs is measured by the engine itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.options import Parser, amount, count, counts, device, output
from benchmarks.timing import no_collection
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.draft.adaptive import AdaptiveController, Choice, Outcome
from specgen.draft.load import FAMILY, load_drafter
from specgen.draft.ring import WINDOW
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

DRAFTERS = {"eagle": "auto", "never": "dummy"}  # load_format of the family's EAGLE head
PROMPT_TOKENS = 256  # at most, so that a run needs one context bucket
PER_TOKEN_BYTES = 8192  # of KV, more than the family takes in any dtype
WARM_ROUNDS = 40  # at most, until one passes in which no graph is captured


class EveryDepth:
    """A controller that warms up: one step of each num_steps in turn, and returns to drafting after absences of every length, for what a drafter
    catches up in one go is padded to a power of two, up to the ring's window, and each such shape may have to compile something."""

    def __init__(self, max_steps: int) -> None:
        lengths = [1 << power for power in range(WINDOW.bit_length())]
        returns = [steps for length in lengths for steps in (*[0] * length, 1)]
        turn = [*range(max_steps + 1), max_steps, *returns]
        self._steps, self._left = itertools.cycle(turn), len(turn)

    @property
    def done(self) -> bool:
        """Whether everything has had its turn."""
        return self._left <= 0

    def choose(self, bucket: int, context: int) -> Choice:
        """The next in turn."""
        self._left -= 1
        return Choice(bucket, context, next(self._steps))

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """Nothing is learnt."""

    def report(self) -> list[dict[str, Any]]:
        """Nothing to tell."""
        return []


class Traced(AdaptiveController):
    """An adaptive controller that writes down what it was told and what it chose then, one entry a choice."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        self.trace: list[dict[str, Any]] = []
        self._told: list[tuple[int, list[float], bool]] = []  # num_steps, microseconds of the timed steps, whether the drafter caught up

    def choose(self, bucket: int, context: int) -> Choice:
        """As the controller, noting why."""
        choice = super().choose(bucket, context)
        entry = {"seconds": round(sum(spent.seconds for spent in self.spent.values()), 6), "bucket": bucket, "num_steps": choice.num_steps}
        costs = {str(steps): round(1e6 * cost, 1) for steps, cost in sorted(self.costs.known(choice.key).items())}
        tokens = [round(each, 3) for each in self.tokens]
        self.trace.append({**entry, "steps": 1 + choice.more, "costs_us": costs, "expected_tokens": tokens, "told": self._told})
        self._told = []
        return choice

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """As the controller, noting the times."""
        super().stepped(choice, outcome)
        times = outcome.times or [outcome.seconds] * outcome.timed
        self._told.append((choice.num_steps, [round(1e6 * time) for time in times], outcome.caught_up))


@dataclass
class Way:
    """One way of decoding: its engine, its supply of rows, and what its turns of the repeat that runs gave."""

    name: str
    engine: Engine
    rows: Iterator[Request]
    done: list[Request] = field(default_factory=list)
    before: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def begin(self, controller: Any) -> None:
        """Begin a repeat. ``before``: rows done by now."""
        self.tokens, self.seconds, self.before = 0, 0.0, len(self.done)
        if self.engine.pacing is not None:
            self.engine.pacing.restart(controller)

    @property
    def capture_s(self) -> float:
        """Seconds of graph captures so far."""
        return self.engine.graphs.capture_seconds if self.engine.graphs else 0.0

    def turn(self, seconds: float) -> tuple[int, float]:
        """Step for so long, but four steps at least; the tokens and seconds of the calls that only decode, without the first, whose step before ran
        long ago."""
        engine, times = self.engine, self.engine.times
        while len(engine.scheduler.waiting) < 2 * engine.max_batch + 2:
            engine.add(next(self.rows))
        if engine.pacing is not None:
            engine.pacing.pause()
        self.done += engine.step()
        tokens, spent, steps, end = times.decode_tokens, times.decode_seconds, times.steps, time.perf_counter() + seconds
        while time.perf_counter() < end or times.steps < steps + 4:
            self.done += engine.step()
        return times.decode_tokens - tokens, times.decode_seconds - spent


def rows_of(tokens: int) -> Iterator[Request]:
    """Rows without end from the family's prompts, each time a little shorter, that generate exactly ``tokens`` tokens."""
    tokenizer = load_tokenizer(str(FAMILY / "target"))
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in (FAMILY / "prompts.jsonl").read_text().splitlines()]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for i in itertools.count():
        ids = prompts[i % len(prompts)]
        length = max(2, min(PROMPT_TOKENS, len(ids)) - 2 * (i // len(prompts) % 16))
        yield Request(Prompt(index=i, id=i, key=i, token_ids=ids[:length]), params)


def ways_of(target: Target, model: ModelConfig, drafter: str, batch: int, tokens: int, fixed: list[int], max_steps: int) -> list[Way]:
    """An engine for no draft, for each ``fixed`` num_steps and, the last, for adaptive speculation of up to ``max_steps``; made in random order."""
    memory = batch * (tokens + 512) * PER_TOKEN_BYTES / 2**30
    config = EngineConfig(max_batch=batch, kv_memory_gb=memory)
    drafts = {"none": DraftConfig(method="none")}
    head: dict[str, Any] = {"method": "eagle", "path": str(FAMILY / "eagle"), "load_format": DRAFTERS[drafter]}
    drafts |= {str(steps): DraftConfig(num_steps=steps, **head) for steps in fixed}
    drafts["adaptive"] = DraftConfig(num_steps=max_steps, adaptive=True, **head)
    made = {
        name: Way(name, Engine(target, load_drafter(drafts[name], model, target), config, drafts[name]), rows_of(tokens))
        for name in random.sample([*drafts], len(drafts))
    }
    return [made[name] for name in drafts]


def round_of(ways: list[Way], seconds: float) -> bool:
    """A turn of every way, in random order; False, counting nothing, when one of them captured a graph."""
    before = [way.capture_s for way in ways]
    found = [(way, *way.turn(seconds)) for way in random.sample(ways, len(ways))]
    if before != [way.capture_s for way in ways]:
        return False
    for way, tokens, spent in found:
        way.tokens += tokens
        way.seconds += spent
    return True


@dataclass
class Repeat:
    """What one repeat gave: tokens a second and acceptance length by way, seconds of adaptive decoding by num_steps, rounds that did not count, and
    each adaptive choice where they are traced."""

    speeds: dict[str, float]
    lengths: dict[str, float]
    seconds: dict[int, float]
    dropped: int
    trace: list[dict[str, Any]]


def repeat(ways: list[Way], options: argparse.Namespace, same_text: bool) -> Repeat:
    """Warm new engines up, let them take turns, and close them."""
    every = EveryDepth(ways[-1].engine.num_steps)
    for way in ways:
        way.begin(every)
    while not every.done:
        ways[-1].turn(options.warm_seconds / 4)
    warm = sum(round_of(ways, options.warm_seconds / 4) for _ in range(4))
    for _ in range(WARM_ROUNDS):
        if warm:
            break
        warm += round_of(ways, options.warm_seconds / 4)
    controller = (Traced if options.trace else AdaptiveController)(ways[-1].engine.num_steps)
    for way in ways:
        way.begin(controller)
    dropped = 0
    while min(way.seconds for way in ways) < options.seconds:
        dropped += not round_of(ways, options.turn_ms / 1000)
    if same_text:
        texts = [{row.prompt.index: row.output_ids for row in way.done} for way in ways]
        common = set.intersection(*(set(text) for text in texts))
        if not common:
            print("python -m benchmarks adaptive: no row was ended by every way, so that texts cannot be compared: more --seconds", file=sys.stderr)
            raise SystemExit(2)
        assert all(text[i] == texts[0][i] for text in texts for i in common), "the text is the same however it was drafted"
    seconds: dict[int, float] = {}
    for choice in ways[-1].engine.adaptive_report():
        seconds[choice["num_steps"]] = seconds.get(choice["num_steps"], 0.0) + choice["seconds"]
    for way in ways:
        way.engine.close()
    speeds = {way.name: way.tokens / way.seconds for way in ways}
    return Repeat(speeds, {way.name: acceptance_length(way.done[way.before :]) for way in ways}, seconds, dropped, getattr(controller, "trace", []))


def measure(target: Target, model: ModelConfig, drafter: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One drafter and batch: decode tokens per second of each way, medians over the repeats, and adaptive's ratios in each of them."""
    fixed = options.fixed or [*range(1, options.max_steps + 1)]
    found = []
    for _ in range(options.repeats):
        ways = ways_of(target, model, drafter, batch, options.tokens, fixed, options.max_steps)
        found.append(repeat(ways, options, model.dtype == "float32"))
    middle = {name: median(each.speeds[name] for each in found) for name in found[0].speeds}
    best = max((name for name in middle if name not in ("none", "adaptive")), key=middle.__getitem__)
    to = {name: [each.speeds["adaptive"] / each.speeds[name] for each in found] for name in (best, "none")}
    shares = [{str(steps): seconds / (sum(each.seconds.values()) or 1.0) for steps, seconds in sorted(each.seconds.items())} for each in found]
    return {
        "drafter": drafter,
        "batch": batch,
        "tokens": options.tokens,
        "dtype": model.dtype,
        "seconds": options.seconds,
        "tokens_per_s": middle,
        "acceptance_length": {name: median(each.lengths[name] for each in found) for name in middle},
        "best_fixed": best,
        "adaptive_to_best_fixed": median(to[best]),
        "adaptive_to_none": median(to["none"]),
        "repeats": {
            "tokens_per_s": [each.speeds for each in found],
            "adaptive_to_best_fixed": to[best],
            "adaptive_to_none": to["none"],
            "adaptive_shares": shares,
        },
        "rounds_with_a_capture": sum(each.dropped for each in found),
        **({"trace": [each.trace for each in found]} if options.trace else {}),
    }


def acceptance_length(rows: list[Request]) -> float:
    """Tokens a step of the rows committed, over the steps that had a draft."""
    steps = sum(row.counts.verify_steps for row in rows)
    return 1 + sum(sum(row.counts.accepted) for row in rows) / steps if steps else 1.0


def show(found: dict[str, Any]) -> None:
    """Print the figures of one drafter and batch."""
    repeats = found["repeats"]
    print(f"drafter {found['drafter']}, batch {found['batch']}: rows of {found['tokens']} tokens, {found['dtype']}, {found['seconds']} s a way")
    for name, speed in found["tokens_per_s"].items():
        print(f"  {name:>8} {speed:10.1f} tokens/s   acceptance length {found['acceptance_length'][name]:.2f}")
    for name, title in (("adaptive_to_best_fixed", f"best fixed ({found['best_fixed']})"), ("adaptive_to_none", "none")):
        print(f"  adaptive / {title} {found[name]:.3f}   repeats {', '.join(f'{ratio:.3f}' for ratio in repeats[name])}")
    shares = [", ".join(f"{steps}: {100 * share:.0f}%" for steps, share in each.items() if share >= 0.005) for each in repeats["adaptive_shares"]]
    print(f"  adaptive decoded at num_steps {'; '.join(shares)}. Rounds with a capture: {found['rounds_with_a_capture']}", flush=True)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and return one entry a drafter and batch."""
    parser = Parser("python -m benchmarks adaptive", __doc__)
    parser.add_argument("--only", default=",".join(DRAFTERS), help="drafters, separated by commas")
    parser.add_argument("--batches", type=counts, default="1,8,64")
    parser.add_argument("--tokens", type=count, default=192, help="tokens a row generates (192)")
    parser.add_argument("--seconds", type=amount, default=2.0, help="of decoding, each way in each repeat (2)")
    parser.add_argument("--warm-seconds", type=amount, default=2.0, help="of each way before (2)")
    parser.add_argument("--turn-ms", type=amount, default=10.0, help="length of a turn (10)")
    parser.add_argument("--max-steps", type=count, default=6, help="the largest num_steps, also adaptive's (6)")
    parser.add_argument("--fixed", type=counts, help="the fixed num_steps to set beside it, separated by commas (all)")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--trace", action="store_true", help="each choice of the adaptive engine, and what it was told before, in the JSON file")
    parser.add_argument("--device", type=device, default="cuda:0")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.trace and options.json is None:
        parser.error("--trace writes to the JSON file: name one with --json FILE")
    if max(options.fixed or [1]) > options.max_steps:
        parser.error("--fixed: adaptive speculation does not draft more than --max-steps")
    unknown = [name for name in options.only.split(",") if name not in DRAFTERS]
    if unknown:
        parser.error(f"--only: no drafter {', '.join(unknown)}; there are {', '.join(DRAFTERS)}")
    model = ModelConfig(dtype=options.dtype, device=options.device)
    target = load_target(model, options.device, options.dtype)
    room = target.max_length - PROMPT_TOKENS
    if options.tokens > room:
        parser.error(f"--tokens: a prompt of the embedded family leaves room for {room}")
    found = []
    random.seed(0)
    for drafter in options.only.split(","):
        for batch in options.batches:
            with no_collection():
                found.append(measure(target, model, drafter, batch, options))
            show(found[-1])
            if options.device != "cpu":
                torch.cuda.empty_cache()
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
