"""Charts as inline SVG text: grouped bars, horizontal bars with intervals, stacked bars and lines.

Boundary: numbers and labels in, SVG out; every label is escaped here. Colours and fonts are classes that the page's style sheet
defines (``c0``, ``c1``, ... for series), so that a chart follows the page's light or dark theme. Knows nothing of statistics or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

SERIES = 8  # colours the style sheet defines

Value = float | None
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A named list of values (bars: one a label; lines: (x, y) points). ``colour`` fixes a line's colour; without it the place in the list does."""

    name: str
    values: Sequence[Value] = ()
    points: Sequence[tuple[float, float]] = ()
    colour: int | None = None


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "label") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, css: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect {place} rx="2" class="{css}"><title>{escape(title)}</title></rect>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" style="max-width:{width:.0f}px">'
    return "\n".join([head, *body, "</svg>"])


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        parts += [f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" class="c{i % SERIES}"/>', _text(x + 15, y, name)]
        x += 15 + 7 * len(name) + 18
    return parts


def ticks(top: float, count: int = 4) -> list[float]:
    """Round steps from 0 that reach at least ``top``."""
    return span_ticks(0.0, top if top > 0 else 1.0, count)


def span_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round steps (1, 2, 2.5 or 5 times a power of ten) that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def bars(title: str, labels: Sequence[str], series: Sequence[Series], form: Format, *, axis: str, top: float | None = None) -> str:
    """Grouped vertical bars, a value above each; a None leaves its place empty. ``axis`` names what the labels count."""
    width, height, left, base = max(340.0, 80 + len(labels) * (26.0 * len(series) + 22)), 240.0, 46.0, 192.0
    values = [value for one in series for value in one.values if value is not None]
    scale = ticks(top if top is not None else max(values, default=1.0))
    body = _legend([one.name for one in series], left, 14) if len(series) > 1 else []
    for tick in scale:
        y = base - (base - 34) * tick / scale[-1]
        body += [_line(left, y, width - 8, y, "grid"), _text(left - 6, y + 4, form(tick), "end", "tick")]
    slot = (width - 8 - left) / max(len(labels), 1)
    bar = min(44.0, (slot - 10) / max(len(series), 1))
    for i, label in enumerate(labels):
        start = left + slot * i + (slot - bar * len(series)) / 2
        for j, one in enumerate(series):
            value = one.values[i]
            if value is None:
                continue
            tall, x = (base - 34) * value / scale[-1], start + j * bar
            body.append(_rect(x + 1, base - tall, bar - 2, tall, f"c{j % SERIES}", f"{one.name}, {axis} {label}: {form(value)}"))
            body.append(_text(x + bar / 2, base - tall - 4, form(value), "middle", "value"))
        body.append(_text(left + slot * (i + 0.5), base + 16, label, "middle"))
    body += [_line(left, base, width - 8, base, "axis"), _text((left + width - 8) / 2, base + 36, axis, "middle", "tick")]
    return _svg(width, height, title, body)


def rows(title: str, labels: Sequence[str], values: Sequence[Value], form: Format, intervals: Sequence[Sequence[float] | None] | None = None) -> str:
    """Horizontal bars, one a row, from 0, with an optional whisker for each interval; the value stands at the right."""
    bounds = intervals if intervals is not None else [None] * len(labels)
    left = 24.0 + 6.6 * max((len(label) for label in labels), default=0)
    width, height = left + 420.0, 26.0 * len(labels) + 12
    top = max([*(v for v in values if v is not None), *(b[1] for b in bounds if b is not None)], default=1.0) or 1.0
    body = []
    for i, (label, value, bound) in enumerate(zip(labels, values, bounds, strict=True)):
        y = 8.0 + 26 * i
        body.append(_text(left - 8, y + 13, label, "end"))
        if value is None:
            body.append(_text(left, y + 13, "no value", "start", "tick"))
            continue
        body.append(_rect(left, y, 320 * value / top, 18, "c0", f"{label}: {form(value)}"))
        if bound is not None:
            low, high = (left + 320 * b / top for b in bound)
            body += [
                _line(low, y + 9, high, y + 9, "whisker"),
                _line(low, y + 5, low, y + 13, "whisker"),
                _line(high, y + 5, high, y + 13, "whisker"),
            ]
        body.append(_text(left + 320 * max(value, bound[1] if bound else 0) / top + 8, y + 13, form(value), "start", "value"))
    return _svg(width, height, title, body)


def stacked(title: str, parts: Sequence[tuple[str, float]], form: Format) -> str:
    """One horizontal bar cut into named parts, with a legend that gives each value."""
    total, x, body = sum(value for _, value in parts) or 1.0, 4.0, []
    for i, (name, value) in enumerate(parts):
        wide = 560 * value / total
        body.append(_rect(x, 6, wide - 2, 26, f"c{i % SERIES}", f"{name}: {form(value)}"))
        x += wide
    return _svg(620, 62, title, [*body, *_legend([f"{name} {form(value)}" for name, value in parts], 4, 54)])


def lines(title: str, series: Sequence[Series], form: Format, *, x_axis: str, zero: bool = True) -> str:
    """Lines with a dot at each (x, y) point and the series' names beside their last points; y starts at 0 unless ``zero`` is false."""
    points = [point for one in series for point in one.points]
    if not points:
        return _svg(560, 40, title, [_text(8, 24, "no values", "start", "tick")])
    left, right, high, low = 58.0, 440.0, 14.0, 224.0
    xs = sorted({x for x, _ in points})
    ys = span_ticks(0.0 if zero else min(y for _, y in points), max(y for _, y in points))
    wide = (xs[-1] - xs[0]) or 1.0
    place = [left + 14 + (right - left - 28) * (x - xs[0]) / wide if len(xs) > 1 else (left + right) / 2 for x in xs]
    at = dict(zip(xs, place, strict=True))

    def height(y: float) -> float:
        return low - (low - high) * (y - ys[0]) / ((ys[-1] - ys[0]) or 1.0)

    body = []
    for tick in ys:
        body += [_line(left, height(tick), right, height(tick), "grid"), _text(left - 6, height(tick) + 4, form(tick), "end", "tick")]
    body += [_text(at[x], low + 18, f"{x:g}", "middle") for x in xs]
    names = _spread([height(sorted(one.points)[-1][1]) if one.points else low for one in series], 15.0)
    for i, one in enumerate(series):
        hue = (i if one.colour is None else one.colour) % SERIES
        path = " ".join(f"{at[x]:.1f},{height(y):.1f}" for x, y in sorted(one.points))
        body.append(f'<polyline points="{path}" class="s{hue}"/>')
        for x, y in sorted(one.points):
            dot = f'<circle cx="{at[x]:.1f}" cy="{height(y):.1f}" r="4" class="c{hue}">'
            body.append(f"{dot}<title>{escape(f'{one.name}, {x_axis} {x:g}: {form(y)}')}</title></circle>")
        if one.points:
            key_y = names[i]
            body.append(f'<rect x="{right + 10:.1f}" y="{key_y - 5:.1f}" width="10" height="10" rx="2" class="c{hue}"/>')
            body.append(_text(right + 25, key_y + 4, one.name))
    body += [_line(left, low, right, low, "axis"), _text((left + right) / 2, low + 36, x_axis, "middle", "tick")]
    return _svg(right + 40 + 7.2 * max(len(one.name) for one in series), max(low + 44, max(names) + 12), title, body)


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """The places, pushed down where they would be nearer than ``gap``, in their own order."""
    moved, last = list(places), -math.inf
    for i in sorted(range(len(places)), key=lambda i: places[i]):
        moved[i] = last = max(places[i], last + gap)
    return moved
