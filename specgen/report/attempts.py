"""The starts of a run and their time: ``attempts.jsonl``, and the figures of throughput and step time.

Boundary: numbers that someone else measured. Nothing here holds a clock or reads a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from specgen.pasting import setting
from specgen.report.disk import dumps, storage_error
from specgen.report.resume import parse_row, rows_format, torn_tail

ATTEMPTS_NAME = "attempts.jsonl"
PHASES = ("propose_ms", "verify_ms", "finish_ms", "host_gap_ms")


def append_attempt(folder: Path, entry: dict[str, Any]) -> int:
    """Durably append what is known of a start and return its number.

    Without ``attempt`` the entry opens the next start (1, 2, ...); with it, it adds to that start, and a field given again replaces the
    earlier value. So a start that was killed still has its entry. Raises DataError when the disk refuses.
    """
    path = folder / ATTEMPTS_NAME
    number = entry.get("attempt") or 1 + max((known["attempt"] for known in read_attempts(folder)), default=0)
    line = dumps({"attempt": number, **entry}).encode() + b"\n"
    try:
        with open(path, "ab") as file:
            if file.tell() and torn_tail(path):
                line = b"\n" + line  # a torn line of a killed start stays by itself and is skipped by the reader
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = f"finished rows are safe: free space and go on with {setting('resume', folder)}"
        if rows_format(folder) is None:
            remedy = "no row is lost: make room there and start again"
        raise storage_error(path, error, remedy) from error
    return int(number)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """One dict a start, in order, everything appended for it merged. Empty when there is no file; torn lines are skipped."""
    path = folder / ATTEMPTS_NAME
    merged: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else ()
    except OSError as error:
        raise storage_error(path, error, "move it away: finished rows are safe without it") from error
    for line in lines:
        entry = parse_row(line)
        if entry is not None and _whole(entry):
            merged.setdefault(entry["attempt"], {}).update(entry)
    return [merged[number] for number in sorted(merged)]


def _whole(entry: dict[str, Any]) -> bool:
    """Whether an entry is of the form that ``append_attempt`` is given; a damaged line counts as a torn one."""
    overrides = entry.get("overrides", [])
    sections = (entry.get(name) for name in ("throughput", "step", "baseline", "lossless"))
    return (
        isinstance(entry.get("attempt"), int)
        and isinstance(overrides, list)
        and all(isinstance(text, str) for text in overrides)
        and all(section is None or isinstance(section, dict) for section in sections)
    )


def throughput_figures(
    *,
    output_tokens: int,
    wall_s: float,
    decode_tokens: int,
    decode_s: float,
    start_s: float,
    load_s: float | None = None,
    first_token_s: float | None = None,
    first_decode_s: float | None = None,
    device_prefill_s: float | None = None,
    device_decode_s: float | None = None,
) -> dict[str, float | None]:
    """The ``throughput`` object of stats.json.

    output_tokens over wall_s (first prompt submitted to last row ended) is with prefill; decode_tokens (committed and kept in decode steps) over
    decode_s (time in which decode steps ran) is without. start_s: from process start to the first prompt, in neither, and load_s the part of it that
    loaded the target; first_token_s, first_decode_s: from the first prompt to the first token of any row, and to the first decode step's.
    device_prefill_s, device_decode_s: device time of the launches, graph captures left out. Seconds.
    """
    return {
        "output_tokens_per_s": output_tokens / wall_s if wall_s else None,
        "decode_tokens_per_s": decode_tokens / decode_s if decode_s else None,
        "wall_s": wall_s,
        "start_s": start_s,
        "load_s": load_s,
        "first_token_s": first_token_s,
        "first_decode_s": first_decode_s,
        "device_prefill_s": device_prefill_s,
        "device_decode_s": device_decode_s,
    }


def step_figures(step_ms: Iterable[float], phases: dict[str, float | None] | None = None) -> dict[str, Any]:
    """The ``step`` object of stats.json from the time of each decode step in milliseconds, and the mean phase times where they were measured.

    Percentiles are linear between order statistics. Raises KeyError for a phase that has no place in stats.json.
    """
    times = np.fromiter(step_ms, dtype=np.float64)
    given = dict.fromkeys(PHASES) | (phases or {})
    if set(given) != set(PHASES):
        raise KeyError(f"unknown phases {sorted(set(given) - set(PHASES))}")
    percentiles = {f"ms_p{p}": float(np.percentile(times, p)) if len(times) else None for p in (50, 90, 99)}
    return {"count": len(times), **percentiles, **given}
