"""What an evaluation task is, and how a run's rows become one score.

Boundary: knows nothing of the engine, of files or of how rows were generated. A row that cannot be scored is counted, never fatal: the generations
are already on disk when this runs, and no score is worth losing them.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specgen.config import DataConfig, TaskConfig
from specgen.errors import ConfigError

log = logging.getLogger("specgen.data")

NAMES = ("gsm8k", "humaneval", "mt_bench", "spec_bench")
NO_GROUP = "n/a"


class Task:
    """One evaluation task. A subclass gives its layout (``prepare``), what it reads in an answer (``extract``) and what that is worth (``score``).

    ``metric``: name of the mean of the scores, None for a task that has groups but no score. ``stop``: stop strings of raw prompts, used where
    neither job nor row sets its own. ``hub``: the published dataset (``data.*`` keys), used where the user names no input.
    """

    name = ""
    metric: str | None = None
    stop: tuple[str, ...] = ()
    hub: Mapping[str, Any] = MappingProxyType({})
    judged_by = ""  # the fields of a row that ``score`` reads

    def __init__(self, config: TaskConfig):
        self.config = config

    @property
    def scoring(self) -> bool:
        """Whether answers are judged at all."""
        return self.metric is not None

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A published row in specgen's field names. Everything else of the row stays and becomes meta. Raises ValueError for a foreign layout."""
        prepared = dict(fields)
        for name in ("question_id", "task_id"):
            if prepared.get("id") is None and prepared.get(name) is not None:
                prepared["id"] = prepared.pop(name)
        return prepared

    def extract(self, text: str) -> str | None:
        """The answer inside a generated text, None when there is none."""
        return text.strip() or None

    def score(self, row: Mapping[str, Any], meta: Mapping[str, Any]) -> float | None:
        """What one output row is worth, in [0, 1]; None when it cannot be judged (no reference, an error row)."""
        return None

    def data_config(self, data: DataConfig) -> DataConfig:
        """Where the task's rows come from: ``task.path``, or the input the user named, else the published dataset."""
        if self.config.path:
            source = _source_of(self.config.path)
            return replace(data, source=source, path=self.config.path)
        if data.source != "embedded":
            return data
        if not self.hub:
            raise ConfigError(f"task={self.name} has no published dataset to fetch; set task.path=FILE")
        return replace(data, source="hub", **dict(self.hub))


def _source_of(path: str) -> str:
    name = Path(path).name
    for suffix, source in ((".parquet", "parquet"), (".csv", "csv"), (".tsv", "csv")):
        if suffix in name:
            return source
    return "hub" if Path(path).expanduser().is_dir() else "jsonl"


def load_task(config: TaskConfig) -> Task | None:
    """The task of a job; None for ``task=none``."""
    if config.name == "none":
        return None
    if config.name not in NAMES:
        raise ConfigError(f"task={config.name}: unknown task; one of none, {', '.join(NAMES)}")
    module = importlib.import_module(f"specgen.data.tasks.{config.name}")
    return module.TASK(config)


def references(meta: Mapping[str, Any]) -> list[str]:
    """The reference texts of a row in the ``turns`` layout (``reference``: a text or a list of them)."""
    found = meta.get("reference")
    items = found if isinstance(found, list) else [found]
    return [item for item in items if isinstance(item, str) and item]


def score_run(rows: Iterable[Mapping[str, Any]], task: Task, *, group_by: str = "category", resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """The score of a run's output rows, for ``score`` in stats.json.

    ``value`` is the mean over input rows of the mean over each row's samples, ``ci95`` its bootstrap interval over input rows (Efron's percentiles);
    both null when nothing could be scored. Rows without a score are counted: ``errors`` (error rows) and ``not_scored`` (no reference, or the scorer
    failed: ``failures``). ``no_answer``: scored rows in which no answer was found. ``groups``: the same per ``meta[group_by]``, ``n/a`` where a row
    has none.
    """
    tally = _Tally()
    groups: dict[str, _Tally] = {}
    for row in rows:
        meta = row.get("meta") or {}
        label = meta.get(group_by)
        group = groups.setdefault(NO_GROUP if label is None else str(label), _Tally())
        value, failed = _one_score(row, meta, task)
        no_answer = value is not None and task.extract(str(row.get("text") or "")) is None
        for each in (tally, group):
            each.add(row, value, failed, no_answer)
    result: dict[str, Any] = {"task": task.name, "metric": task.metric} | tally.summary()
    result["ci95"] = _interval(tally.means(), resamples, seed)
    result["groups"] = {name: groups[name].summary() for name in sorted(groups)}
    if task.metric is not None and tally.failures:
        log.warning("task %s: %d rows could not be scored; see score.failures", task.name, tally.failures)
    if task.scoring and not tally.scored and tally.rows > tally.errors + tally.failures:
        log.warning("task %s: no row could be scored: none carries what its answer is judged by (%s)", task.name, task.judged_by)
    return result


def _one_score(row: Mapping[str, Any], meta: Mapping[str, Any], task: Task) -> tuple[float | None, bool]:
    if row.get("error") is not None or task.metric is None:
        return None, False
    try:
        return task.score(row, meta), False
    except Exception as error:  # a reference of an unforeseen shape must not cost the other rows their score
        log.warning("task %s: row %r: %s", task.name, row.get("id"), " ".join(str(error).split())[:200])
        return None, True


class _Tally:
    """Counts of one group of rows, and the scores of each input row."""

    def __init__(self) -> None:
        self.rows = self.errors = self.failures = self.no_answer = self.scored = 0
        self.scores: dict[Any, list[float]] = {}

    def add(self, row: Mapping[str, Any], value: float | None, failed: bool, no_answer: bool) -> None:
        self.rows += 1
        self.errors += row.get("error") is not None
        self.failures += failed
        self.no_answer += no_answer
        if value is not None:
            self.scored += 1
            self.scores.setdefault(row.get("index"), []).append(value)

    def means(self) -> list[float]:
        """One mean an input row."""
        return [sum(values) / len(values) for values in self.scores.values()]

    def summary(self) -> dict[str, Any]:
        means = self.means()
        return {
            "value": sum(means) / len(means) if means else None,
            "rows": self.rows,
            "scored": self.scored,
            "errors": self.errors,
            "not_scored": self.rows - self.scored - self.errors,
            "failures": self.failures,
            "no_answer": self.no_answer,
        }


def _interval(means: list[float], resamples: int, seed: int) -> list[float] | None:
    if not means:
        return None
    draw = random.Random(seed)
    size = len(means)
    found = sorted(sum(draw.choices(means, k=size)) / size for _ in range(resamples))
    return [found[int(0.025 * resamples)], found[min(resamples - 1, int(0.975 * resamples))]]


def score_text(result: Mapping[str, Any]) -> str:
    """One line for the terminal: ``gsm8k accuracy 0.750 [0.500, 1.000] (4 of 5 rows scored)``; ``n/a`` where nothing was."""
    if result["metric"] is None:
        return f"{result['task']}: no score, {len(result['groups'])} groups"
    value = "n/a" if result["value"] is None else f"{result['value']:.3f} [{result['ci95'][0]:.3f}, {result['ci95'][1]:.3f}]"
    return f"{result['task']} {result['metric']} {value} ({result['scored']} of {result['rows']} rows scored)"
