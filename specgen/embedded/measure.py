"""What the engine makes of the embedded family on its own prompts: acceptance of every drafter and repetition of the text, for the model card.

``python -m specgen.embedded.measure`` reads the family's ``train_log.json``, measures, and writes the log's ``engine`` part and the card again.

Boundary: drives the engine as a job does, on a CPU in float32; trains nothing and opens no file outside the family's folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specgen.config import Config
from specgen.draft.load import FAMILY
from specgen.embedded import export
from specgen.loading import Loaded, load, make_engine, prompts_of
from specgen.types import Request

MAX_TOKENS = 128
NUM_STEPS = 4
TEMPERATURES = (0.0, 0.8)
SEEDS = range(5)
SHAPES = (("ngram", 1), ("dflash", 1), *((method, topk) for method in ("draft_model", "eagle", "eagle3", "mtp") for topk in (1, 4)))


def job(method: str, topk: int, temperature: float, seed: int = 0) -> Config:
    """The embedded model on the embedded prompts."""
    config = Config()
    config.model.device, config.model.dtype = "cpu", "float32"
    config.draft.method, config.draft.topk, config.draft.num_steps = method, topk, NUM_STEPS
    config.sampling.max_tokens, config.sampling.temperature, config.sampling.seed = MAX_TOKENS, temperature, seed
    return config


def run(config: Config, loaded: Loaded) -> list[Request]:
    """Every prompt of a job to its end."""
    engine = make_engine(config, loaded)
    requests = [Request(prompt, prompt.sampling) for prompt in prompts_of(config, config.data, loaded)]
    engine.run(requests)
    engine.close()
    return requests


def acceptance(requests: Iterable[Request]) -> dict[str, float]:
    """Pooled figures: ``mean_length`` over steps with a draft (docs/metrics.md), ``tokens_per_step`` over all decode steps."""
    counts = [request.counts for request in requests]
    accepted, verify = sum(sum(c.accepted) for c in counts), sum(c.verify_steps for c in counts)
    steps = verify + sum(c.steps_without_draft for c in counts)
    return {"mean_length": round(1 + accepted / verify, 4), "tokens_per_step": round(1 + accepted / steps, 4), "steps": steps}


def repeated_4grams(requests: Iterable[Request]) -> float:
    """Share of the rows' 4-grams that occurred earlier in the same row, over all rows together."""
    rows = [[tuple(r.output_ids[i : i + 4]) for i in range(len(r.output_ids) - 3)] for r in requests]
    return sum(len(grams) - len(set(grams)) for grams in rows) / sum(map(len, rows))


def measure() -> dict[str, Any]:
    """The log's ``engine`` part."""
    loaded = load(job("eagle", 1, 0.0).model)
    found: dict[str, Any] = {"num_steps": NUM_STEPS, "max_tokens": MAX_TOKENS, "dtype": "float32", "acceptance": {}, "repeated_4grams": {}}
    for temperature in TEMPERATURES:
        table: dict[str, dict[str, dict[str, float]]] = {}
        found["acceptance"][f"T{temperature:g}"] = table
        for method, topk in SHAPES:
            requests = run(job(method, topk, temperature), loaded)
            table.setdefault(method, {})[str(topk)] = acceptance(requests)
        shares = [repeated_4grams(run(job("eagle", 1, temperature, seed), loaded)) for seed in (SEEDS if temperature else SEEDS[:1])]
        found["repeated_4grams"][f"T{temperature:g}"] = round(sum(shares) / len(shares), 4)
        found["rows"] = len(requests)
    return found


def main(folder: Path = FAMILY) -> int:
    """Measure and write; the exit code."""
    path = folder / "train_log.json"
    log = json.loads(path.read_text(encoding="utf-8")) | {"engine": measure()}
    export.write_json(log, path)
    (folder / "README.md").write_text(export.render_card(log), encoding="utf-8")
    print(json.dumps(log["engine"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
