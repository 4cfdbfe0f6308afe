"""``sweep.csv`` and ``sweep.html``: the jobs of a sweep side by side.

Boundary: takes what the command line knows of each job and reads the rest from the jobs' folders. Runs nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specgen.errors import DataError
from specgen.report import plots
from specgen.report.disk import write_atomic
from specgen.report.html import REPORT_NAME, html_table, page
from specgen.report.resume import STATS_NAME
from specgen.report.stats import load_stats
from specgen.report.table import number

CSV_NAME, HTML_NAME = "sweep.csv", "sweep.html"
GIVEN = ("folder", "overrides", "exit_code", "error")
FIGURES = (
    "method",
    "topk",
    "num_steps",
    "num_draft_tokens",
    "requests",
    "samples",
    "errors",
    "output_tokens",
    "acceptance_length",
    "acceptance_length_lo",
    "acceptance_length_hi",
    "acceptance_length_macro",
    "draft_rate",
    "output_tokens_per_s",
    "decode_tokens_per_s",
    "step_ms_p50",
    "speedup",
    "lossless_different",
    "simulated",
)


def write_sweep(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write both files and return their rows, one a job in the order given.

    rows: ``folder`` (the job's, absolute or relative to the sweep's), ``overrides`` (a string or a list of them), ``exit_code``, ``error`` (None or
    a message). A job without a readable stats.json has empty figures and, if it reported no error itself, says why.
    """
    jobs = [_job(folder, row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[*GIVEN, *FIGURES], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in job.items()} for job in jobs)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CSV_NAME, text.getvalue())
    write_atomic(folder / HTML_NAME, _page(folder, jobs))
    return jobs


def _job(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    place = Path(row["folder"]) if row.get("folder") else None
    overrides = row.get("overrides") or ""
    job: dict[str, Any] = {
        "folder": _relative(folder, place),
        "overrides": overrides if isinstance(overrides, str) else " ".join(overrides),
        "exit_code": row.get("exit_code"),
        "error": row.get("error"),
        **dict.fromkeys(FIGURES),
    }
    if place is not None and (folder / place / STATS_NAME).exists():
        try:
            job |= figures(load_stats(folder / place))
        except DataError as error:
            job["error"] = job["error"] or str(error)
    return job


def _relative(folder: Path, place: Path | None) -> str | None:
    if place is None:
        return None
    return str(place.relative_to(folder)) if place.is_relative_to(folder) else str(place)


def figures(stats: dict[str, Any]) -> dict[str, Any]:
    """The key figures of one job, under the names of ``FIGURES``."""
    draft, throughput, step = (stats.get(name) or {} for name in ("draft", "throughput", "step"))
    length = stats["acceptance"]["mean_length"]
    low, high = length["pooled_ci95"] or (None, None)
    return {
        **{name: draft.get(name) for name in ("method", "topk", "num_steps", "num_draft_tokens")},
        **{name: stats[name] for name in ("requests", "samples", "errors", "output_tokens")},
        "acceptance_length": length["pooled"],
        "acceptance_length_lo": low,
        "acceptance_length_hi": high,
        "acceptance_length_macro": length["macro"],
        "draft_rate": stats["acceptance"]["draft_rate"],
        "output_tokens_per_s": throughput.get("output_tokens_per_s"),
        "decode_tokens_per_s": throughput.get("decode_tokens_per_s"),
        "step_ms_p50": step.get("ms_p50"),
        "speedup": (stats.get("baseline") or {}).get("speedup"),
        "lossless_different": (stats.get("lossless") or {}).get("different"),
        "simulated": stats.get("simulated"),
    }


def _page(folder: Path, jobs: Sequence[dict[str, Any]]) -> str:
    failed = [job for job in jobs if job["exit_code"] not in (0, None)]
    body = [f"<h1>Sweep of {len(jobs)} jobs</h1>"]
    body.append(f'<p class="bad">{len(failed)} did not end with exit code 0.</p>' if failed else '<p class="dim">All ended with exit code 0.</p>')
    body += [f"<p>{escape(job['folder'] or job['overrides'])}: {escape(job['error'])}</p>" for job in jobs if job["error"]]
    charts: list[tuple[str, str, Callable[[float], str]]] = [
        ("Mean acceptance length", "acceptance_length", lambda v: f"{v:g}" if v == round(v, 1) else f"{v:.2f}"),
        ("Output tokens per second", "output_tokens_per_s", lambda v: f"{v:,.0f}"),
        ("Speed-up against no draft", "speedup", lambda v: f"{v:.2f}x"),
    ]
    for title, name, form in charts:
        series = _series(jobs, name)
        if series:
            body += [f"<h2>{title}</h2>", plots.lines(title, series, form, x_axis="num_steps")]
    return page(f"Sweep of {len(jobs)} jobs", [*body, "<h2>Jobs</h2>", _table(folder, jobs)])


def _series(jobs: Sequence[dict[str, Any]], name: str) -> list[plots.Series]:
    """One line a (method, topk); of jobs that share a num_steps the mean. Jobs without a draft stand at num_steps 0."""
    groups: dict[str, dict[float, list[float]]] = {}
    colours: dict[str, int] = {}
    for job in jobs:
        value, steps = job[name], 0 if job["method"] == "none" else job["num_steps"]
        label = str(job["method"]) if job["method"] == "none" or job["topk"] is None else f"{job['method']} topk {job['topk']}"
        if job["method"] is not None:
            colours.setdefault(label, len(colours))  # a method keeps its colour in every chart, also where it has no value
        if value is not None and steps is not None:
            groups.setdefault(label, {}).setdefault(float(steps), []).append(value)
    points = {label: [(x, sum(ys) / len(ys)) for x, ys in places.items()] for label, places in groups.items()}
    return [plots.Series(label, points=line, colour=colours[label]) for label, line in points.items()]


def _table(folder: Path, jobs: Sequence[dict[str, Any]]) -> str:
    header = ["job", "overrides", "method", "topk", "steps", "acceptance length", "tokens/s", "speed-up", "exit code"]
    best = {name: max((job[name] for job in jobs if job[name] is not None), default=None) for name in ("output_tokens_per_s", "speedup")}

    def figure(job: dict[str, Any], name: str, digits: int) -> str:
        text = number(job[name], digits)
        return f"<b>{text}</b>" if job[name] is not None and len(jobs) > 1 and job[name] == best.get(name) else text

    body = []
    for i, job in enumerate(jobs):
        shape = [escape("-" if job[name] is None else str(job[name])) for name in ("method", "topk", "num_steps")]
        speeds = [figure(job, "acceptance_length", 2), figure(job, "output_tokens_per_s", 1), figure(job, "speedup", 2)]
        code = "-" if job["exit_code"] is None else str(job["exit_code"])
        outcome = code if code in ("0", "-") else f'<span class="bad">{code}</span>'
        body.append([_link(folder, job["folder"], i), escape(job["overrides"]), *shape, *speeds, outcome])
    return html_table(header, body, left=2)


def _link(folder: Path, place: str | None, i: int) -> str:
    name = escape(place or f"job {i}")
    if place and (folder / place / REPORT_NAME).exists():
        return f'<a href="{escape(quote(f"{place}/{REPORT_NAME}"))}">{name}</a>'
    return name
