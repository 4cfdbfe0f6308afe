"""A job, on one page: load, generate, write, report.

Boundary: joins what the other modules do; the command line is ``cli.py``. The last target stays loaded between the jobs of one process, so that a
sweep over
drafters loads it once; drafter, KV pool and graphs are freed between jobs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specgen.config import Config, ModelConfig
from specgen.data.chat import describe_chat
from specgen.data.prompts import load_prompts
from specgen.data.sampling import params_from_config
from specgen.data.sources import count_rows, input_fingerprint
from specgen.data.tokenizer import has_tokenizer, load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.engine.engine import Engine
from specgen.job import Job, without_draft
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.report.attempts import append_attempt, read_attempts, step_figures, throughput_figures
from specgen.report.disk import write_json
from specgen.report.environment import config_hash, config_record, environment, model_fingerprint
from specgen.report.html import write_report
from specgen.report.stats import build_stats, load_rows, write_stats
from specgen.report.table import progress_line, terminal_table
from specgen.report.writer import RunWriter
from specgen.types import Prompt

log = logging.getLogger("specgen")
_STARTED = time.perf_counter()


@dataclass
class Loaded:
    """A target with its tokenizer, and the configuration it was loaded for."""

    key: str
    target: Target
    tokenizer: Any | None


_last: Loaded | None = None


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    return torch.device("cuda:0") if device.type == "cuda" and device.index is None else device


def load(model: ModelConfig) -> Loaded:
    """The target and tokenizer of a job, kept for the next job of this process when its ``model.*`` is the same."""
    global _last
    device = resolve_device(model.device)
    key = repr((asdict(model), str(device)))
    if _last is not None and _last.key == key:
        return _last
    _last = None
    start = time.perf_counter()
    path = str(FAMILY / "target") if model.source == "embedded" else str(model.path)
    dtype = model.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"  # a CPU multiplies float32 faster than bfloat16, and exactly enough that greedy text does not depend on the batch
    target = load_target(model, device, dtype)
    tokenizer = load_tokenizer(path, revision=model.revision, trust_remote_code=model.trust_remote_code) if has_tokenizer(path) else None
    log.info("target loaded: %s on %s, %s, in %.1f s", path, device, str(target.dtype).removeprefix("torch."), time.perf_counter() - start)
    log.info("a row ends at token ids %s", list(target.eos_ids))
    _last = Loaded(key, target, tokenizer)
    return _last


def make_engine(config: Config, loaded: Loaded) -> Engine:
    """Drafter and engine of a job over a loaded target."""
    target, tokenizer = loaded.target, loaded.tokenizer
    drafter = load_drafter(config.draft, config.model, target, tokenizer)
    return Engine(
        target,
        drafter,
        config.engine,
        config.draft,
        tokenizer=tokenizer,
        skip_special_tokens=config.output.skip_special_tokens,
        vocab_limit=None if tokenizer is None else len(tokenizer),
    )


def prompts_of(config: Config, loaded: Loaded) -> Iterator[Prompt]:
    """The job's prompts."""
    target = loaded.target
    vocab = target.vocab_size if loaded.tokenizer is None else min(target.vocab_size, len(loaded.tokenizer))
    return load_prompts(config.data, config.sampling, loaded.tokenizer, max_length=target.max_length, vocab_size=vocab)


def run_job(config: Config, folder: Path, overrides: list[str] | None = None, resume: bool = False) -> int:
    """Run one job into ``folder``; returns the exit code. User errors are raised as SpecgenError."""
    device = resolve_device(config.model.device)
    with _signals() as caught:
        writer = RunWriter(
            folder,
            format=config.output.format,
            fsync_seconds=config.output.fsync_seconds,
            token_ids=config.output.token_ids,
            prompt_token_ids=config.output.prompt_token_ids,
            provenance=config.output.provenance,
            meta=config.output.meta,
            resume=resume,
            resume_errors=config.resume_errors,
        )
        with writer:
            attempt = append_attempt(folder, {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "overrides": overrides or []})
            loaded = load(config.model)
            record = _record(config, loaded, device)
            write_json(folder / "environment.json", record)
            engine = make_engine(config, loaded)
            start_s = time.perf_counter() - _STARTED
            job = _generate(config, loaded, engine, writer, caught)
        throughput, step = _figures(job, engine, start_s)
        append_attempt(folder, {"attempt": attempt, "rows": job.totals.rows, "throughput": throughput, "step": step, "start_s": start_s})
        engine.close()
        baseline = None
        if wants_baseline(config) and not caught:
            baseline = _baseline(config, loaded, caught)
        stats = build_stats(
            load_rows(folder),
            {
                "model": _model_info(config, loaded.target),
                "draft": {**asdict(config.draft), "num_draft_tokens": engine.drafter.num_draft_tokens, "num_steps": engine.num_steps},
                "sampling": asdict(params_from_config(config.sampling)) | {"acceptance": config.sampling.acceptance},
                "chat": describe_chat(config.data, loaded.tokenizer),
                "throughput": throughput,
                "step": step,
                "baseline": baseline,
                "attempts": read_attempts(folder),
                "environment": record,
            },
        )
        write_stats(folder, stats)
        write_report(folder)
        print(terminal_table(stats))
        print(f"written to {folder}")
        if caught:
            log.warning("interrupted: go on with `python -m specgen resume=%s`", folder)
            return 128 + caught[0]
        return 3 if stats["errors"] else 0


def wants_baseline(config: Config) -> bool:
    """``baseline`` as set, or, when null, whether everything is the embedded family's."""
    if config.draft.method == "none":
        return False
    if config.baseline is None:
        return config.model.source == "embedded" and config.data.source == "embedded" and config.draft.path is None
    return config.baseline


def _generate(config: Config, loaded: Loaded, engine: Engine, writer: RunWriter, caught: list[int]) -> Job:
    job = Job(engine, config, loaded.tokenizer, params_from_config(config.sampling))
    finished = writer.finished

    def skip(prompt: Prompt, sample: int) -> bool:
        if (prompt.index, sample) not in finished:
            return False
        finished.check(prompt, sample)
        return True

    total = count_rows(config.data)
    bar = tqdm(total=total and total * config.sampling.n, unit="row", file=sys.stderr, disable=None, initial=len(finished))
    stopping: list[bool] = []
    for completion in job.run(prompts_of(config, loaded), skip, lambda: bool(caught or stopping)):
        writer.append(completion)
        totals = job.totals
        bar.update()
        bar.set_postfix_str(
            progress_line(totals.rows, totals.output_tokens, time.perf_counter() - totals.started, totals.accepted, totals.verify_steps)
        )
        if completion.error is not None:
            log.warning("row %s is an error: %s", completion.index, completion.error["message"])
            if config.data.on_error == "stop":
                stopping.append(True)
    bar.close()
    return job


def _baseline(config: Config, loaded: Loaded, caught: list[int]) -> dict[str, Any]:
    """The same prompts decoded plainly, in this process, with the same batch; nothing is written."""
    log.info("baseline: the same prompts without a draft")
    plain = without_draft(config)
    engine = make_engine(plain, loaded)
    job = Job(engine, plain, loaded.tokenizer, params_from_config(plain.sampling))
    for _ in job.run(prompts_of(plain, loaded), stop=lambda: bool(caught)):
        pass
    throughput, step = _figures(job, engine, 0.0)
    engine.close()
    return {"throughput": throughput, "step": step}


def _figures(job: Job, engine: Engine, start_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    totals, times = job.totals, engine.times
    throughput = throughput_figures(
        output_tokens=totals.output_tokens,
        wall_s=totals.ended - totals.started,
        decode_tokens=times.decode_tokens,
        decode_s=times.decode_seconds,
        start_s=start_s,
    )
    return throughput, step_figures(times.step_ms)


def _record(config: Config, loaded: Loaded, device: torch.device) -> dict[str, Any]:
    paths = {"target": str(FAMILY / "target") if config.model.source == "embedded" else config.model.path}
    if config.draft.path:
        paths["draft"] = config.draft.path
    fingerprints = {name: model_fingerprint(path) for name, path in paths.items() if path and os.path.isdir(path)}
    return {
        **environment(device),
        "config": config_record(config),
        "config_hash": config_hash(config),
        "models": fingerprints,
        "input": input_fingerprint(config.data),
    }


def _model_info(config: Config, target: Target) -> dict[str, Any]:
    return {
        **asdict(config.model),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_length": target.max_length,
        "fused": target.fused,
        "eos_token_ids": list(target.eos_ids),
    }


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Turn SIGINT and SIGTERM into a list the loop looks at after every step; a second one acts at once."""
    caught: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        if caught:
            signal.signal(number, previous.get(number, signal.SIG_DFL))
            raise KeyboardInterrupt
        caught.append(number)

    try:
        for name in (signal.SIGINT, signal.SIGTERM):
            previous[int(name)] = signal.signal(name, note)
    except ValueError:  # not the main thread: the caller's signals stay its own
        previous.clear()
    try:
        yield caught
    finally:
        restore: Callable[..., Any] = signal.signal
        for number, handler in previous.items():
            restore(number, handler)


def merge(dirs: list[Path], out: Path) -> int:
    """Join the runs of shards into one folder."""
    from specgen.report.merge import merge_runs

    merge_runs(dirs, out)
    return 0
