"""The end-of-run table and the progress line: plain text for a terminal of 100 columns.

Boundary: a stats dict in, text out. Computes nothing that is not in the dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH = 100
MISSING = "-"
MOST_DEPTHS = 32  # lines of the acceptance table


def number(value: float | None, digits: int = 2) -> str:
    """A figure with thousands separators and fixed decimals; ``-`` for a null."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A rate in percent with one decimal; ``-`` for a null."""
    return MISSING if value is None else f"{100 * value:.1f}%"


def interval(bounds: Sequence[float] | None) -> str:
    """`` [lo, hi]``, or nothing for a null."""
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def align(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> list[str]:
    """Lines of a table whose first ``left`` columns are flush left and whose others are flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, the middle left out."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def terminal_table(stats: dict[str, Any]) -> str:
    """What a person wants to see when a run ends: rows, acceptance by depth, speed, speed-up and the lossless check."""
    blocks = [_head(stats), _acceptance(stats), _groups(stats), _speed(stats)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _head(stats: dict[str, Any]) -> list[str]:
    counts = f"{stats['requests']:,} requests, {stats['samples']:,} samples, {stats['errors']:,} errors"
    tokens = f"{stats['prompt_tokens']:,} prompt tokens, {stats['output_tokens']:,} output tokens"
    lines = [("rows", counts), ("tokens", tokens)]
    if stats.get("model"):
        lines.insert(0, ("model", shorten(model_name(stats), 86)))
    if stats.get("draft"):
        lines.insert(len(lines) - 2, ("draft", draft_name(stats)))
    if stats.get("simulated"):
        lines.append(("note", "acceptance was imposed (simulated): the texts are not the model's"))
    return align(lines, left=2, indent="")


def model_name(stats: dict[str, Any]) -> str:
    """The target in a few words."""
    model = stats.get("model") or {}
    name = model.get("path") or model.get("source") or "?"
    extras = [str(model[key]) for key in ("dtype", "device") if model.get(key)]
    return " ".join([str(name), *([f"({', '.join(extras)})"] if extras else [])])


def draft_name(stats: dict[str, Any]) -> str:
    """The drafter and its shape in a few words."""
    draft = stats.get("draft") or {}
    shape = ", ".join(f"{key} {draft[key]}" for key in ("topk", "num_steps", "num_draft_tokens") if draft.get(key) is not None)
    method = str(draft.get("method", "?"))
    return method if method == "none" or not shape else f"{method} ({shape})"


def _acceptance(stats: dict[str, Any]) -> list[str]:
    acceptance = stats["acceptance"]
    if not acceptance["per_depth"]:
        return []
    header = ("depth", "proposed", "reached", "accepted", "rate", "per step", "conditional")
    rows = [header]
    shown = acceptance["per_depth"][:MOST_DEPTHS]
    for depth in shown:
        counts = [f"{depth[name]:,}" for name in ("proposed", "reached", "accepted")]
        rates = [percent(depth[name]) for name in ("rate", "rate_per_step", "conditional")]
        rows.append((str(depth["depth"]), *counts, *rates))  # type: ignore[arg-type]
    length = acceptance["mean_length"]
    pooled = f"{number(length['pooled'])}{interval(length['pooled_ci95'])}"
    macro = f"{number(length['macro'])}{interval(length['macro_ci95'])}"
    rates_line = f"{percent(acceptance['draft_rate'])} of draft steps, {percent(acceptance['node_rate'])} of draft tokens"
    summary = [("mean acceptance length", f"{pooled} pooled, {macro} by row (95% intervals)"), ("draft acceptance rate", rates_line)]
    left = len(acceptance["per_depth"]) - len(shown)
    more = [f"  ({left} more depths are in stats.json)"] if left else []
    return ["acceptance", *align(rows, left=0), *more, *align(summary, left=2)]


def _groups(stats: dict[str, Any]) -> list[str]:
    groups = stats.get("groups") or {}
    if not groups:
        return []
    scored = any("score" in group for group in groups.values())
    rows = [("group", "requests", "errors", "output tokens", "acceptance length", *(["score"] if scored else []))]
    for name, group in groups.items():
        length = group["acceptance"]["mean_length"]
        cells = [shorten(name, 30), f"{group['requests']:,}", f"{group['errors']:,}", f"{group['output_tokens']:,}"]
        cells.append(f"{number(length['pooled'])}{interval(length['pooled_ci95'])}")
        rows.append((*cells, *([score_text(group.get("score"))] if scored else [])))
    return ["groups", *align(rows)]


def score_text(score: Any) -> str:
    """A task's result on one line, whatever its shape."""
    if score is None:
        return MISSING
    if isinstance(score, float):
        return f"{score:.3f}"
    if isinstance(score, dict) and score.get("metric") is not None and isinstance(score.get("ci95"), list):
        low, high = score["ci95"]
        more = [f"{name.replace('_', ' ')} {score[name]:,}" for name in ("not_scored", "failures", "no_answer") if score.get(name)]
        counted = ", ".join([f"{score['scored']:,} of {score['rows']:,} rows scored", *more])
        return f"{score['task']} {score['metric']} {score['value']:.3f} [{low:.3f}, {high:.3f}] ({counted})"
    if isinstance(score, dict):
        return ", ".join(f"{name} {score_text(value)}" for name, value in score.items() if not isinstance(value, dict | list))
    return str(score)


def _speed(stats: dict[str, Any]) -> list[str]:
    throughput, step, baseline, lossless = (stats.get(name) or {} for name in ("throughput", "step", "baseline", "lossless"))
    lines = []
    if throughput:
        decode = number(throughput.get("decode_tokens_per_s"), 1)
        wall = number(throughput.get("wall_s"), 1)
        first = throughput.get("first_token_s")
        after = f", first token after {first:.2f} s" if first is not None else ""
        lines.append(("throughput", f"{number(throughput.get('output_tokens_per_s'), 1)} tokens/s ({decode} in decode), {wall} s{after}"))
    if step:
        times = " / ".join(number(step.get(f"ms_p{p}")) for p in (50, 90, 99))
        lines.append(("step", f"{times} ms (p50 / p90 / p99), {step.get('count', 0):,} steps"))
        phases = [(name, step.get(f"{name}_ms")) for name in ("propose", "verify", "finish", "host_gap")]
        if any(value is not None for _, value in phases):
            lines.append(("phases", ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in phases) + " ms"))
    if baseline:
        plain = number((baseline.get("throughput") or {}).get("output_tokens_per_s"), 1)
        speedup = baseline.get("speedup")
        lines.append(("speed-up", f"{number(speedup)}{'x' if speedup is not None else ''} against {plain} tokens/s without a draft, same prompts"))
    if lossless:
        gap = f", worst gap {lossless['worst_gap']:.3g}" if lossless.get("worst_gap") is not None else ""
        parts = ", ".join(f"{lossless[key]} {name}" for key, name in (("equal", "equal"), ("near_tie", "near-tie"), ("different", "different")))
        verdict = f"{parts}, of {lossless['checked']} replayed"
        lines.append(("lossless", verdict + gap))
    if stats.get("score") is not None:
        lines.append(("score", score_text(stats["score"])))
    return align(lines, left=2, indent="") if lines else []


def progress_line(rows: int, output_tokens: int, seconds: float, accepted: int, verify_steps: int) -> str:
    """The running figures behind a progress bar: rows done, tokens a second, and the acceptance length so far."""
    speed = number(output_tokens / seconds if seconds > 0 else None, 0)
    length = number(1 + accepted / verify_steps if verify_steps else None)
    return f"{rows:,} rows, {speed} tok/s, acceptance length {length}"
