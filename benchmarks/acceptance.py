"""Acceptance at a temperature on the embedded family, by how drafts are made and accepted, on a CPU in float32.

``python -m benchmarks acceptance [--method eagle] [--temperature 1] [--only MODE,...] [--json FILE]``. Coupled: drafts perturbed by the
target's own noise, accepted when equal (the default). Greedy: the drafter's best tokens, accepted when equal; made here by drafting without noise.
Rejection: drafts drawn at random, accepted by coins. Boundary: drives the engine as a job does; measures no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.options import Parser
from specgen.embedded import measure
from specgen.kernels import ops
from specgen.loading import Loaded, load
from specgen.report.stats import mean_length
from specgen.types import Counts

MODES = ("coupled", "greedy", "rejection")


@contextmanager
def without_draft_noise() -> Iterator[None]:
    """Drafters propose their best tokens while the target still samples."""
    best, children = ops.draft_argmax, ops.draft_topk

    def greedy_best(logits: Any, temperature: Any, keys: Any, t: Any, ids: Any, features: Any) -> Any:
        return best(logits, temperature, keys, t, ids, frozenset())

    def greedy_children(logits: Any, k: int, temperature: Any, keys: Any, t: Any, ids: Any, features: Any) -> Any:
        return children(logits, k, temperature, keys, t, ids, frozenset())

    with patch.object(ops, "draft_argmax", greedy_best), patch.object(ops, "draft_topk", greedy_children):
        yield


def counts_of(mode: str, method: str, topk: int, temperature: float, seed: int, tokens: int, loaded: Loaded) -> list[Counts]:
    """The counts of every embedded prompt, in their order."""
    config = measure.job(method, topk, temperature, seed)
    config.sampling.max_tokens = tokens
    config.sampling.acceptance = "rejection" if mode == "rejection" else "invariant"
    if mode == "greedy":
        with without_draft_noise():
            return [r.counts for r in measure.run(config, loaded)]
    return [r.counts for r in measure.run(config, loaded)]


def figures(samples: list[list[Counts]]) -> dict[str, Any]:
    """Pooled mean acceptance length and acceptance rate of the first depth, with bootstrap 95% intervals over input rows.

    ``samples``: for each seed the counts of every row.
    """

    def rows(of: Any) -> Any:
        return np.array([[of(c) for c in counts] for counts in samples], dtype=np.int64).sum(0)

    length = mean_length(rows(lambda c: sum(c.accepted)), rows(lambda c: c.verify_steps))
    first = mean_length(rows(lambda c: sum(c.accepted[:1])), rows(lambda c: sum(c.proposed[:1])))
    return {
        "mean_length": length["pooled"],
        "mean_length_ci95": length["pooled_ci95"],
        "first": first["pooled"] - 1,
        "first_ci95": [bound - 1 for bound in first["pooled_ci95"]],
        "verify_steps": int(rows(lambda c: c.verify_steps).sum()),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print one line a shape and mode."""
    parser = Parser("python -m benchmarks acceptance", __doc__)
    parser.add_argument("--only", default=",".join(MODES), help="ways to measure, separated by commas")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--topk", default="1,4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    loaded = load(measure.job("none", 1, 0.0).model)
    found = []
    for topk in map(int, options.topk.split(",")):
        for mode in options.only.split(","):
            samples = [counts_of(mode, options.method, topk, options.temperature, seed, options.tokens, loaded) for seed in range(options.seeds)]
            found.append({"method": options.method, "topk": topk, "mode": mode, "rows": len(samples[0]), **figures(samples)})
            print(json.dumps(found[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
