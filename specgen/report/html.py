"""``report.html``: one self-contained page a run, made from the files of its folder.

Boundary: reads stats.json and the first rows; loads nothing from elsewhere and needs no script. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from specgen.report import plots
from specgen.report.disk import UNTOUCHED, dumps, write_atomic
from specgen.report.stats import load_rows, load_stats
from specgen.report.table import MISSING, draft_name, interval, model_name, number, percent, score_text

REPORT_NAME = "report.html"
_SHOWN_ROWS, _SHOWN_CHARACTERS = 5, 1200

# Series colours keep their order and stay apart under the common colour-vision deficiencies, in both themes.
STYLE = """
:root { --bg: #ffffff; --fg: #1b1f24; --dim: #5d6670; --line: #dfe3e8; --card: #f6f8fa; --c0: #2a6fbb; --c1: #d9822b; --c2: #2e8b72; --c3: #a64d79;
  --c4: #7a6bb8; --c5: #8a7a2f; --c6: #4c9fc7; --c7: #b5534a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e6e9ec; --dim: #9aa4ae; --line: #333a41; --card: #1d2227; --c0: #5b9be0;
  --c1: #eba159; --c2: #54b89b; --c3: #d07ba4; --c4: #a397dd; --c5: #c0ae58; --c6: #7cc4e6; --c7: #e08379; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 24px; max-width: 1000px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; } p { margin: 4px 0 10px; } .dim { color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; } .tile { background: var(--card); border-radius: 8px; padding: 10px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; } .tile span { color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; } .bad { color: var(--c7); font-weight: 600; }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--line); text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } th.l, td.l { text-align: left; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--fg); } svg .tick { fill: var(--dim); }
svg .value { font-size: 11px; } .grid { stroke: var(--line); } .axis { stroke: var(--dim); } .whisker { stroke: var(--fg); stroke-width: 1.5; }
pre { background: var(--card); border-radius: 6px; padding: 8px 12px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px;
  margin: 6px 0; }
a { color: var(--c0); } details { margin: 8px 0; } summary { cursor: pointer; }
""" + "\n".join(f".c{i} {{ fill: var(--c{i}); }} .s{i} {{ stroke: var(--c{i}); fill: none; stroke-width: 2; }}" for i in range(plots.SERIES))


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document; ``body`` holds finished HTML, ``title`` is text."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}<style>{STYLE}</style></head><body>', *body, "</body></html>", ""])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """An HTML table of texts (escaped here) whose first ``left`` columns are flush left."""
    return html_table(header, [[escape(cell) for cell in row] for row in rows], left)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The same with cells that are finished HTML."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}{' class=l' if i < left else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)) + "</tr>"

    return "\n".join(
        ['<div class="wide"><table>', line("th", [escape(name) for name in header]), *(line("td", row) for row in rows), "</table></div>"]
    )


def write_report(folder: Path, remedy: str = UNTOUCHED) -> Path:
    """Write ``report.html`` from the files in ``folder`` and return its path. Raises DataError when ``stats.json`` is not there."""
    stats = load_stats(folder)
    sections = [_head(stats), _acceptance(stats), _groups(stats), _speed(stats), _attempts(stats), _samples(folder), _settings(stats)]
    path = folder / REPORT_NAME
    write_atomic(path, page(f"specgen: {draft_name(stats)}", [part for section in sections for part in section]), remedy)
    return path


def _head(stats: dict[str, Any]) -> list[str]:
    length, throughput, step = stats["acceptance"]["mean_length"], stats.get("throughput") or {}, stats.get("step") or {}
    tiles = [(number(length["pooled"]), f"mean acceptance length{interval(length['pooled_ci95'])}")]
    tiles.append((number(throughput.get("output_tokens_per_s"), 1), "output tokens/s"))
    if stats.get("baseline"):
        speedup = stats["baseline"].get("speedup")
        tiles.append((number(speedup) + ("x" if speedup is not None else ""), "speed-up against no draft"))
    tiles.append((f"{number(step.get('ms_p50'))} ms", "median step"))
    tiles.append((f"{stats['samples']:,}", f"samples of {stats['requests']:,} requests, {stats['errors']:,} errors"))
    if stats.get("lossless"):
        check = stats["lossless"]
        tiles.append((f"{check['equal']} / {check['checked']}", f"replayed rows equal; {check['near_tie']} near-tie, {check['different']} different"))
    cells = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles)
    lines = [f"<h1>{escape(draft_name(stats))}</h1>", f'<p class="dim">target {escape(model_name(stats))}</p>', f'<div class="tiles">{cells}</div>']
    if stats.get("simulated"):
        lines.insert(2, '<p class="bad">The acceptance was imposed (simulated): speeds are real, texts and acceptance are not the model\'s.</p>')
    return lines


def _acceptance(stats: dict[str, Any]) -> list[str]:
    acceptance = stats["acceptance"]
    depths = acceptance["per_depth"]
    if not depths:
        return ["<h2>Acceptance</h2>", '<p class="dim">No step had a draft.</p>']
    labels = [str(depth["depth"]) for depth in depths]
    rates = [plots.Series("accepted / proposed", [d["rate"] for d in depths]), plots.Series("conditional", [d["conditional"] for d in depths])]
    steps = sum(acceptance["histogram"])
    shares = [plots.Series("share of steps", [count / steps if steps else None for count in acceptance["histogram"]])]
    length = acceptance["mean_length"]
    body = [[str(d["depth"]), *(f"{d[name]:,}" for name in ("proposed", "reached", "accepted")), *_rates(d)] for d in depths]
    return [
        "<h2>Acceptance by depth</h2>",
        "<p>accepted / proposed: of the steps whose draft went this deep. Conditional: of the steps that reached this depth.</p>",
        plots.bars("Acceptance by depth", labels, rates, _percent, axis="draft depth", top=1.0),
        table(("depth", "proposed", "reached", "accepted", "rate", "per step", "conditional"), body),
        "<h2>Drafts accepted in a step</h2>",
        plots.bars("Drafts accepted in a step", [str(i) for i in range(len(acceptance["histogram"]))], shares, _percent, axis="accepted drafts"),
        f"<p>Mean acceptance length, the target's own token counted: {number(length['pooled'])}{interval(length['pooled_ci95'])} pooled over steps, "
        f"{number(length['macro'])}{interval(length['macro_ci95'])} averaged over rows (95% intervals over rows). "
        f"Draft acceptance rate {percent(acceptance['draft_rate'])} by depth, {percent(acceptance['node_rate'])} by token.</p>",
    ]


def _rates(depth: dict[str, Any]) -> list[str]:
    return [percent(depth[name]) for name in ("rate", "rate_per_step", "conditional")]


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _groups(stats: dict[str, Any]) -> list[str]:
    groups = stats.get("groups") or {}
    if not groups:
        return []
    lengths = [group["acceptance"]["mean_length"] for group in groups.values()]
    chart = plots.rows(
        "Acceptance length by group", list(groups), [one["pooled"] for one in lengths], lambda v: f"{v:.2f}", [one["pooled_ci95"] for one in lengths]
    )
    header = ["group", "requests", "samples", "errors", "output tokens", "acceptance length", "by row", "draft rate"]
    scored = any("score" in group for group in groups.values())
    body = []
    for (name, group), length in zip(groups.items(), lengths, strict=True):
        counts = [f"{group[key]:,}" for key in ("requests", "samples", "errors", "output_tokens")]
        pooled = f"{number(length['pooled'])}{interval(length['pooled_ci95'])}"
        rate = percent(group["acceptance"]["draft_rate"])
        body.append([name, *counts, pooled, number(length["macro"]), rate, *([score_text(group.get("score"))] if scored else [])])
    return ["<h2>Groups</h2>", chart, table([*header, *(["score"] if scored else [])], body)]


def _speed(stats: dict[str, Any]) -> list[str]:
    throughput, step, baseline = (stats.get(name) or {} for name in ("throughput", "step", "baseline"))
    if not throughput and not step:
        return []
    parts = ["<h2>Speed</h2>"]
    plain = baseline.get("throughput") or {}
    if plain:
        values = [throughput.get("output_tokens_per_s"), plain.get("output_tokens_per_s")]
        parts.append(plots.rows("Output tokens per second", [draft_name(stats), "no draft"], values, lambda v: f"{v:,.1f} tokens/s"))
    body = [_speed_row("this run", throughput, step)]
    if baseline:
        body.append(_speed_row("no draft", plain, baseline.get("step") or {}))
    parts.append(table(("", "tokens/s", "decode tokens/s", "wall s", "start s", "steps", "p50 ms", "p90 ms", "p99 ms"), body))
    phases = [(name.replace("_", " "), step.get(f"{name}_ms")) for name in ("propose", "verify", "finish", "host_gap")]
    known = [(name, value) for name, value in phases if value is not None]
    if known:
        parts += ["<p>Where a step's time goes (mean of the sampled steps):</p>", plots.stacked("Phases of a step", known, lambda v: f"{v:.2f} ms")]
    return parts


def _speed_row(name: str, throughput: dict[str, Any], step: dict[str, Any]) -> list[str]:
    speeds = [number(throughput.get(key), 1) for key in ("output_tokens_per_s", "decode_tokens_per_s", "wall_s", "start_s")]
    return [name, *speeds, f"{step['count']:,}" if "count" in step else MISSING, *(number(step.get(f"ms_p{p}")) for p in (50, 90, 99))]


def _attempts(stats: dict[str, Any]) -> list[str]:
    attempts = stats.get("attempts") or []
    if len(attempts) < 2:
        return []
    names = list(dict.fromkeys(name for entry in attempts for name, value in entry.items() if not isinstance(value, dict | list)))
    body = [[score_text(entry.get(name)) for name in names] for entry in attempts]
    return ["<h2>Starts of this run</h2>", table(names, body)]


def _samples(folder: Path) -> list[str]:
    parts = []
    for row in islice(load_rows(folder), _SHOWN_ROWS):
        counts = row["counts"]
        length = 1 + sum(counts["accepted"]) / counts["verify_steps"] if counts["verify_steps"] else None
        facts = f"{row['finish_reason']}, {row['output_tokens']} tokens, acceptance length {number(length)}"
        texts = [row["prompt"] or "", row["text"] or ""] if row["error"] is None else [row["prompt"] or "", f"{row['error']['message']}"]
        blocks = "".join(f"<pre>{escape(_clip(text))}</pre>" for text in texts)
        parts.append(f"<details><summary>id {escape(str(row['id']))}, sample {row['sample']}: {escape(facts)}</summary>{blocks}</details>")
    return ["<h2>First rows</h2>", *parts] if parts else []


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ... ({len(text):,} characters)"


def _settings(stats: dict[str, Any]) -> list[str]:
    parts = []
    for name in ("model", "draft", "sampling", "chat", "score", "environment"):
        value = stats.get(name)
        if isinstance(value, dict):
            body = [[key, entry if isinstance(entry, str) else dumps(entry)] for key, entry in value.items()]
            parts.append(f"<details><summary>{name}</summary>{table(('key', 'value'), body, left=2)}</details>")
    return ["<h2>Settings</h2>", *parts] if parts else []
