"""A job, on one page: load, generate, write, report.

Boundary: joins what the other modules do; the command line is ``cli.py``. The folder is locked from the first look at it to the last file written.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specgen import stuck
from specgen.config import Config, DataConfig
from specgen.console import tell
from specgen.data.chat import describe_chat
from specgen.data.prompts import check_first_row
from specgen.data.sampling import params_from_config
from specgen.data.sources import count_rows
from specgen.data.tasks.base import NO_GROUP, Task, load_task, score_run, score_text
from specgen.engine.engine import Engine
from specgen.engine.watch import OnStuck, Watch
from specgen.errors import ConfigError
from specgen.interrupts import Signals
from specgen.job import Job, without_draft
from specgen.loading import (
    Loaded,
    check_hub,
    check_sampling,
    choose_threads,
    load,
    make_engine,
    on_device,
    prompts_of,
    resolve_device,
    with_model_defaults,
)
from specgen.models.target import Target
from specgen.pasting import setting
from specgen.record import earlier_record, pinned, refuse_changes, run_record
from specgen.replay import verify_lossless
from specgen.report import stats as report_stats
from specgen.report.attempts import append_attempt, read_attempts, step_figures, throughput_figures
from specgen.report.disk import FolderLock, write_json
from specgen.report.environment import ENVIRONMENT_NAME
from specgen.report.html import write_report
from specgen.report.merge import MERGE_AGAIN, merge_runs
from specgen.report.stats import build_stats, doubts, load_rows, write_stats
from specgen.report.table import progress_line, terminal_table
from specgen.report.writer import RunWriter
from specgen.schema import build
from specgen.types import Prompt

log = logging.getLogger("specgen")
NO_BASELINE = (
    "baseline=true, but there is none: it is taken after the rows, by the start that wrote them, and that start was ended before it was whole. "
    "For a speed-up run the job again in a new folder"
)
_IMPORTED = time.perf_counter()
_jobs = 0  # started by this process


def run_job(config: Config, folder: Path, overrides: list[str] | None = None, resume: bool = False) -> int:
    """Run one job into ``folder``; returns the exit code (0 all rows done, 3 some are errors, 128 + n after signal n). User errors are raised as
    SpecgenError; whatever ends the run, every finished row is on the disk and the folder can be resumed."""
    started = _start_of_job()
    check_hub(config)
    config = with_model_defaults(config, _set_by_user(folder, overrides, resume))
    task = load_task(config.task)
    _check_task(config, task)
    device = resolve_device(config.model.device)
    with FolderLock(folder) as lock, Signals() as signals, on_device(device):
        earlier = earlier_record(folder) if resume else None
        data = pinned(config.data if task is None else task.data_config(config.data), earlier)
        choose_threads(device)
        record = run_record(config, data, device)
        if earlier is not None:
            refuse_changes(earlier, record, folder)
        data = pinned(data, record)
        with _writer(config, folder, lock, resume) as writer:
            attempt = append_attempt(folder, {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "overrides": overrides or []})
            loaded = load(config.model, lambda tokenizer: _before_weights(config, data, tokenizer, task, record["input"]["rereadable"]))
            record["dtype"] = str(loaded.target.dtype).removeprefix("torch.")
            if earlier is not None and earlier.get("dtype") not in (None, record["dtype"]):
                log.warning("the run was started in %s and goes on in %s: set model.dtype to keep one", earlier["dtype"], record["dtype"])
            write_json(folder / ENVIRONMENT_NAME, record)
            on_stuck = stuck.ender(folder, writer, lock, config.engine.stuck_after_s)
            run = _Run(config, data, task, loaded, writer, signals, on_stuck)
            figures = run.generate(started)
        append_attempt(folder, {"attempt": attempt, **figures})
        if config.verify_lossless and not run.incomplete and signals.caught is None:
            append_attempt(folder, {"attempt": attempt, "lossless": run.lossless(folder)})
        if run.wants_baseline():
            append_attempt(folder, {"attempt": attempt, "baseline": run.baseline()})
        stats = run.stats(folder, record)
        if run.misses_baseline(stats):
            log.warning(NO_BASELINE)
        remedy = f"finished rows are safe: free space and go on with {setting('resume', folder)}"
        write_stats(folder, stats, remedy)
        write_report(folder, remedy)
        tell(f"{terminal_table(stats)}\nwritten to {folder}")
        for doubt in doubts(stats):
            log.warning("%s", doubt)
        return run.verdict(stats, folder)


def _start_of_job() -> float:
    """When the job began, on ``perf_counter``'s clock: for the first job of a process when the process was started, as far as that can be told."""
    global _jobs
    _jobs += 1
    now = time.perf_counter()
    if _jobs > 1:
        return now
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED


def _set_by_user(folder: Path, overrides: list[str] | None, resume: bool) -> list[str]:
    """The dotted keys the run was started with: those of its first start when it is resumed."""
    if resume:
        overrides = next((entry.get("overrides") for entry in read_attempts(folder)), overrides)
    return [text.lstrip("+").partition("=")[0] for text in overrides or ()]


def _check_task(config: Config, task: Task | None) -> None:
    if task is None or task.metric is None:
        return
    if not config.output.meta:
        raise ConfigError(f"output.meta=false leaves nothing to score task={task.name} with; leave it out, or use task=none")
    if task.name == "humaneval" and not config.task.execute_code:
        log.warning("task=humaneval: answers are not scored unless task.execute_code=true runs them, each in a process of its own")


def _before_weights(config: Config, data: DataConfig, tokenizer: Any | None, task: Task | None, rereadable: bool) -> None:
    """What the tokenizer is enough to refuse."""
    check_sampling(config, tokenizer)
    check_first_row(data, config.sampling, tokenizer, task, rereadable)


def _writer(config: Config, folder: Path, lock: FolderLock, resume: bool) -> RunWriter:
    output = config.output
    writer = RunWriter(
        folder,
        format=output.format,
        fsync_seconds=output.fsync_seconds,
        token_ids=output.token_ids,
        prompt_token_ids=output.prompt_token_ids,
        provenance=output.provenance,
        meta=output.meta,
        resume=resume,
        resume_errors=config.resume_errors,
        lock=lock,
    )
    if resume:
        finished = writer.finished
        if finished.repaired:
            log.warning("repaired: %s", finished.repaired)
        log.info("resumed: %d rows are finished, %d of them errors; %d error rows are tried again", *_resumed(writer))
    return writer


def _resumed(writer: RunWriter) -> tuple[int, int, int]:
    return len(writer.finished), len(writer.finished.errors), len(writer.finished.superseded)


class _Run:
    """One start of a job: its rows, its timings, its statistics."""

    def __init__(
        self, config: Config, data: DataConfig, task: Task | None, loaded: Loaded, writer: RunWriter, signals: Signals, on_stuck: OnStuck
    ) -> None:
        self.config, self.data, self.task, self.loaded, self.writer, self.signals = config, data, task, loaded, writer, signals
        self._on_stuck = on_stuck
        self.stopped_by: str | None = None  # the row error that ended the run under data.on_error=stop
        self.incomplete = False  # rows of the input are missing
        self.num_steps = self.num_draft_tokens = self.max_batch = 0

    def generate(self, started: float) -> dict[str, Any]:
        """Generate and write every row that an earlier start did not; returns what the attempts file says of it. ``started``: of the job."""
        with closing(make_engine(self.config, self.loaded)) as engine, self._watched(engine):
            start_s = time.perf_counter() - started
            self.num_steps, self.num_draft_tokens, self.max_batch = engine.num_steps, engine.drafter.num_draft_tokens, engine.max_batch
            self.signals.arm()
            job = self._pass(engine)
            self.incomplete = job.stopped
            adaptive = {"adaptive": engine.adaptive_report()} if self.config.draft.adaptive else {}
            throughput, step = _figures(job, engine, start_s, self.loaded.load_s)
        for what, count in self.writer.notes.items():
            log.warning("%d %s", count, what)
        if job.totals.first_token_s is not None:
            log.info("first token after %.2f s, %.2f s after the start", job.totals.first_token_s, start_s + job.totals.first_token_s)
        cuts = {"batch_cuts": engine.batch_cuts} if engine.batch_cuts else {}  # row limits after each time the device ran out of memory
        return {"rows": job.totals.rows, "complete": not job.stopped, "throughput": throughput, "step": step, "start_s": start_s, **cuts, **adaptive}

    def _pass(self, engine: Engine) -> Job:
        config, writer = self.config, self.writer
        job = Job(engine, replace(config, data=self.data), self.loaded.tokenizer, params_from_config(config.sampling))
        total = count_rows(self.data)
        bar = tqdm(total=total and total * config.sampling.n, unit="row", file=sys.stderr, disable=None, initial=len(writer.finished))
        with closing(bar), torch.inference_mode():  # once, and not in every step
            for completion in job.run(prompts_of(config, self.data, self.loaded, self.task), self._skip, self._stop):
                writer.append(completion)
                totals = job.totals
                bar.update()
                seconds = time.perf_counter() - totals.started
                bar.set_postfix_str(progress_line(totals.rows, totals.output_tokens, seconds, totals.accepted, totals.verify_steps))
                if completion.error is not None:
                    log.warning("row %s is an error: %s", completion.index, completion.error["message"])
                    if config.data.on_error == "stop":
                        self.stopped_by = completion.error["message"]
        return job

    def _watched(self, engine: Engine) -> Watch:
        return Watch(engine, self.config.engine.stuck_after_s, self._on_stuck)

    def _skip(self, prompt: Prompt, sample: int) -> bool:
        if (prompt.index, sample) not in self.writer.finished:
            return False
        self.writer.finished.check(prompt, sample)
        return True

    def _stop(self) -> bool:
        self.writer.sync_if_due()
        return self.signals.caught is not None or self.stopped_by is not None

    def wants_baseline(self) -> bool:
        """``baseline`` as set, or, when null, whether everything is the embedded family's; never for a start that ended early or wrote no row."""
        config = self.config
        if config.draft.method == "none" or self.incomplete or self.signals.caught is not None or not self.writer.rows:
            return False
        if config.baseline is None:
            return config.model.source == "embedded" and self.data.source == "embedded" and config.draft.path is None and self.task is None
        return config.baseline

    def misses_baseline(self, stats: dict[str, Any]) -> bool:
        """Whether a baseline was asked for that the start which wrote the rows did not live to take."""
        return bool(self.config.baseline) and not self.incomplete and stats["throughput"] is not None and stats["baseline"] is None

    def baseline(self) -> dict[str, Any] | None:
        """The prompts of this start decoded plainly, in this process, with the same batch; nothing is written. None when a signal came meanwhile."""
        log.info("baseline: the same prompts without a draft")
        plain = replace(without_draft(self.config), data=self.data)
        finished = self.writer.finished
        with closing(make_engine(plain, self.loaded)) as engine, self._watched(engine):
            job = Job(engine, plain, self.loaded.tokenizer, params_from_config(plain.sampling))
            prompts = prompts_of(plain, self.data, self.loaded, self.task)
            for _ in job.run(prompts, lambda prompt, sample: (prompt.index, sample) in finished, lambda: self.signals.caught is not None):
                pass
            throughput, step = _figures(job, engine, 0.0)
        return None if job.stopped else {"throughput": throughput, "step": step}

    def lossless(self, folder: Path) -> dict[str, Any]:
        """Some finished rows replayed without a draft and compared; a row that differs by more than a tie makes the run exit with 1."""
        log.info("lossless check: %d rows again, one at a time, without a draft", self.config.verify_lossless)
        nodes, batch = self.num_draft_tokens, self.max_batch
        return verify_lossless(self.config, self.data, self.loaded, self.task, load_rows(folder), nodes=nodes, batch=batch, watched=self._watched)

    def stats(self, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
        """The whole of stats.json, from the rows on the disk; timings are those of the last start that wrote a row."""
        config = self.config
        attempts = read_attempts(folder)
        timed: dict[str, Any] = next((entry for entry in reversed(attempts) if entry.get("rows")), {})
        adaptive = {"adaptive": timed.get("adaptive", [])} if config.draft.adaptive else {}
        return build_stats(
            load_rows(folder),
            {
                "model": _model_info(config, self.loaded.target),
                "draft": {**asdict(config.draft), "num_draft_tokens": self.num_draft_tokens, "num_steps": self.num_steps, **adaptive},
                "sampling": asdict(params_from_config(config.sampling))
                | {name: getattr(config.sampling, name) for name in ("logit_bias", "logprobs", "from_model", "acceptance", "grammar")},
                "chat": describe_chat(self.data, self.loaded.tokenizer),
                **{name: timed.get(name) for name in ("throughput", "step", "baseline")},
                "lossless": next((entry["lossless"] for entry in reversed(attempts) if entry.get("lossless")), None),
                **scores(folder, self.task),
                "attempts": attempts,
                "environment": record,
                "complete": not self.incomplete,
            },
        )

    def verdict(self, stats: dict[str, Any], folder: Path) -> int:
        """The exit code, and what to do next where the run ended early."""
        go_on = f"go on with `python -m specgen {setting('resume', folder)}`"
        if self.signals.caught is not None:
            log.warning("interrupted: %s", go_on if self.incomplete else "every row was finished before")
            return 128 + self.signals.caught
        if self.stopped_by is not None:
            log.warning("stopped at the first row error (data.on_error=stop); %s", go_on)
            return 3
        if (stats["lossless"] or {}).get("different"):
            log.error("the lossless check failed: a text differs from what the target alone writes, and not by a near-tie")
            return 1
        return 3 if stats["errors"] else 0


def scores(folder: Path, task: Task | None) -> dict[str, Any]:
    """``score`` and ``group_scores`` of the rows in ``folder``, for ``build_stats``. Nothing that goes wrong here costs a row."""
    if task is None:
        return {}
    score = score_run(load_rows(folder), task)
    log.info("%s", score_text(score))
    groups = score.pop("groups")
    named = {report_stats.NO_GROUP if name == NO_GROUP else name: group for name, group in groups.items()}
    return {"score": score, "group_scores": {} if task.metric is None or set(groups) == {NO_GROUP} else named}


def _figures(job: Job, engine: Engine, start_s: float, load_s: float = 0.0) -> tuple[dict[str, Any], dict[str, Any]]:
    totals, times, clock = job.totals, engine.times, engine.clock
    clock.collect()
    throughput = throughput_figures(
        output_tokens=totals.output_tokens,
        wall_s=totals.ended - totals.started,
        decode_tokens=times.decode_tokens,
        decode_s=times.decode_seconds,
        start_s=start_s,
        load_s=load_s,
        first_token_s=totals.first_token_s,
        first_decode_s=totals.first_decode_s,
        device_prefill_s=clock.prefill_s,
        device_decode_s=clock.decode_s,
    )
    return throughput, step_figures(times.step_ms)


def _model_info(config: Config, target: Target) -> dict[str, Any]:
    return {
        **asdict(config.model),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_length": target.max_length,
        "fused": target.fused,
        "eos_token_ids": list(target.eos_ids),
    }


def merge(dirs: list[Path], out: Path) -> int:
    """Join the runs of shards into one folder, with its own statistics, score and report; returns the exit code."""

    def scorer(config: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        task = load_task(build(config).task)
        return lambda: scores(out, task)

    merged = merge_runs(dirs, out, scorer)
    write_report(out, MERGE_AGAIN)
    tell(f"{terminal_table(merged.stats)}\n{merged.rows} rows of {len(dirs)} runs joined in {out}")
    if merged.missing_shards:
        log.warning("not the whole input: shard %s is missing", ", ".join(merged.missing_shards))
        tell(f"not the whole input: shard {', '.join(merged.missing_shards)} is missing")
    return 3 if merged.stats["errors"] else 0
