"""Decode step time of the 8B jobs: one process, random weights, imposed acceptance, wall clock over whole generations.

``python -m benchmarks.steps [--quick] [--json FILE] [--only NAME,...] [--batches 1,8,...]``. Prefill is timed apart: a figure is the median of
the engine's calls that only decode, host time included. Boundary: drives the engine as a job does; measures nothing inside it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import Parser
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.adaptive import Choice, Outcome
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

SHAPES = Path(__file__).parent / "shapes"
JOBS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "eagle3_s3": {"method": "eagle3", "num_steps": 3},
    "eagle3_s5": {"method": "eagle3", "num_steps": 5},
    "draft_1b_s3": {"method": "draft_model", "num_steps": 3},
    "eagle3_tree": {"method": "eagle3", "num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "eagle3_off": {"method": "eagle3", "num_steps": 3, "adaptive": True},  # the drafter is loaded and every step runs at num_steps 0
}
PATHS = {"eagle3": "llama31_8b_eagle3", "draft_model": "llama32_1b"}


class NoSteps:
    """A controller of adaptive speculation that never drafts."""

    def choose(self, bucket: int, context: int) -> Choice:
        """Num_steps 0."""
        return Choice(bucket, context, 0)

    def stepped(self, choice: Choice, outcome: Outcome) -> None:
        """Nothing to learn."""

    def report(self) -> list[dict[str, Any]]:
        """Nothing to say."""
        return []


def draft_config(job: dict[str, Any]) -> DraftConfig:
    """The draft configuration of a job."""
    if job["method"] == "none":
        return DraftConfig(method="none")
    imposed = None if job.get("adaptive") else 3.0
    return DraftConfig(**job, path=str(SHAPES / PATHS[job["method"]]), load_format="dummy", simulate_acceptance_length=imposed)


def build_engine(target: Target, model: ModelConfig, name: str, batch: int, deterministic: bool = False) -> Engine:
    """An engine for a job with KV for ``batch`` rows of 1,024 tokens."""
    draft = draft_config(JOBS[name])
    config = EngineConfig(max_batch=batch, kv_memory_gb=min(60.0, 0.25 * batch + 2), deterministic=deterministic)
    engine = Engine(target, load_drafter(draft, model, target), config, draft)
    if engine.pacing is not None:
        engine.pacing.controller = NoSteps()
    return engine


def random_requests(batch: int, tokens: int, prompt_tokens: int) -> list[Request]:
    """``batch`` prompts of uniform ids that generate exactly ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32000, (batch, prompt_tokens), generator=generator).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [Request(Prompt(index=i, id=i, key=i, token_ids=row), params) for i, row in enumerate(ids)]


def measure(target: Target, model: ModelConfig, name: str, batch: int, tokens: int, deterministic: bool = False) -> dict[str, Any]:
    """One job: median, p99 and mean of the decode calls in ms, decode tokens per second, prefill and capture seconds."""
    engine = build_engine(target, model, name, batch, deterministic)
    requests = random_requests(batch, tokens, prompt_tokens=128)
    start = time.perf_counter()
    engine.run(requests)
    seconds = time.perf_counter() - start
    calls = sorted(engine.times.step_ms[3:])
    figures = {
        "job": name,
        "batch": batch,
        "deterministic": deterministic,
        "ms": calls[len(calls) // 2],
        "ms_p99": calls[int(len(calls) * 0.99)],
        "ms_mean": sum(calls) / len(calls),
        "tokens_per_s": engine.times.decode_tokens / engine.times.decode_seconds,
        "calls": len(calls),
        "wall_s": seconds,
        "capture_s": engine.graphs.capture_seconds if engine.graphs else 0.0,
        "series_ms": [round(ms, 3) for ms in engine.times.step_ms],
    }
    engine.close()
    torch.cuda.empty_cache()
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Measure and print one line a job and batch."""
    parser = Parser("python -m benchmarks steps", __doc__)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--deterministic", action="store_true", help="engine.deterministic=true")
    parser.add_argument("--json", type=Path, help="write the figures here, with every step's time")
    options = parser.parse_args(arguments)
    model = ModelConfig(source="hf", path=str(SHAPES / "llama31_8b"), dtype="bfloat16", device="cuda", load_format="dummy", max_length=1024)
    target = load_target(model, "cuda:0", torch.bfloat16)
    found = []
    for name in options.only.split(","):
        for batch in map(int, options.batches.split(",")):
            if name == "eagle3_tree" and batch > 64:  # nobody drafts trees there
                continue
            figures = measure(target, model, name, batch, options.tokens, options.deterministic)
            found.append(figures)
            shown = {key: value for key, value in figures.items() if key != "series_ms"}
            print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in shown.items()}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
