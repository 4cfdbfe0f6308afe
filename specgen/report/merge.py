"""Joins the shards of a job into one run folder whose rows and statistics are those of the whole.

Boundary: reads finished run folders and writes a new one. Generates and scores nothing; times of separate runs are kept apart, not added.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import ConfigError, DataError
from specgen.pasting import setting
from specgen.report import parquet
from specgen.report.disk import FolderLock, read_json, storage_error, understood, write_json
from specgen.report.environment import ENVIRONMENT_NAME, differences
from specgen.report.resume import ROWS_NAME, Key, holds_results, key_of, read_lines, rows_format
from specgen.report.stats import STATS_NAME, build_stats, load_rows, load_stats, write_stats
from specgen.report.table import terminal_table

_PART_ROWS = 2048
MOST_SHARDS = 100_000  # of which it is looked which are missing


@dataclass(frozen=True)
class Merged:
    """What was joined: output rows, the merged statistics, and the shards i of i/N that were not among the folders."""

    rows: int
    stats: dict[str, Any]
    missing_shards: list[str]


# The configuration of the runs -> what gives ``score`` and ``group_scores`` of the joined rows once they are written.
Scores = Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]
MERGE_AGAIN = "the merge is incomplete: remove the folder and merge again"
DAMAGED = "bring it back, or make the run again"


def merge_runs(dirs: Sequence[Path], out: Path, scores: Scores = lambda config: dict) -> Merged:
    """Join finished runs of one configuration (``data.shard`` and keys that do not decide the rows apart) into ``out``, rows by (index, sample).

    Timings (``throughput``, ``step``, ``baseline``) are null in the merged stats: they belong to the single runs, whose starts are listed under
    ``attempts`` with their folder; ``complete`` is false where shards are missing. ``scores`` is given the configuration first, and asked once the
    joined rows are written. Raises ConfigError for runs of different configurations, DataError for a row that two runs hold, a run that has not
    ended, a damaged file, or an ``out`` that holds results; ``out`` is then left as it was.
    """
    if len(dirs) < 2:
        raise ConfigError("merge= needs at least two run folders, separated by commas")
    stats = [load_stats(folder) for folder in dirs]
    records = [read_json(folder / ENVIRONMENT_NAME, "only a whole run folder can be merged") for folder in dirs]
    for folder, record in zip(dirs, records, strict=True):
        with understood(folder / ENVIRONMENT_NAME, DAMAGED):
            _check_configurations(dirs[0], records[0], folder, record)
    with understood(dirs[0] / ENVIRONMENT_NAME, DAMAGED):
        shards, config = _shards(records), records[0].get("config") or {}
        missing = _missing(shards)
        joined = _joined(records[0], dirs) | {"shards": [f"{i}/{count}" for i, count in shards]}
        scored = scores(config)
    for folder, one in zip(dirs, stats, strict=True):
        with understood(folder / STATS_NAME, DAMAGED):
            terminal_table(build_stats((), _run_info([folder], [one])))
            int(one["samples"])
    form = _common_format(dirs)
    if holds_results(out):
        raise DataError(f"{out} already holds the results of a run; choose another output.dir")
    order = _order(dirs, form)
    for run, (folder, one, record) in enumerate(zip(dirs, stats, records, strict=True)):
        rows = sum(place[2] == run for place in order)
        if not one.get("complete", True) and "merged" not in record:
            raise DataError(f"{folder} was stopped before its input ended; finish it with {setting('resume', folder)} first")
        if rows != one["samples"]:
            raise DataError(
                f"{folder} holds {rows} whole rows but its stats.json counts {one['samples']}; finish it with {setting('resume', folder)} first"
            )
    with FolderLock(out):
        try:
            (_write_parts if form == "parquet" else _write_lines)(dirs, order, out)
        except OSError as error:
            raise storage_error(out, error, MERGE_AGAIN) from error
        write_json(out / ENVIRONMENT_NAME, joined, MERGE_AGAIN)
        merged = build_stats(load_rows(out), _run_info(dirs, stats) | {"complete": not missing} | scored())
        write_stats(out, merged, MERGE_AGAIN)
    return Merged(len(order), merged, missing)


def _check_configurations(first: Path, of_first: dict[str, Any], folder: Path, record: dict[str, Any]) -> None:
    if "config" in record and "config" in of_first:
        changed = differences(of_first["config"], record["config"])
        if changed:
            raise ConfigError(f"{first} and {folder} are not shards of one job: {'; '.join(changed)}")
    for name in ("config_hash", "models", "input"):
        if record.get(name) != of_first.get(name):
            raise ConfigError(f"{first} and {folder} are not shards of one job: their {name} in {ENVIRONMENT_NAME} differ")


def _common_format(dirs: Sequence[Path]) -> str:
    forms = {folder: rows_format(folder) for folder in dirs}
    held = {form for form in forms.values() if form is not None}
    if len(held) > 1:
        raise DataError(f"the runs differ in format: {', '.join(f'{folder} {form}' for folder, form in forms.items())}; merge runs of one format")
    return held.pop() if held else "jsonl"


# A row's place: (index, sample, run, file, offset). For JSON lines file is 0 and offset the line's first byte; for Parquet the part and its row.
Place = tuple[int, int, int, int, int]


def _order(dirs: Sequence[Path], form: str) -> list[Place]:
    """Every row's place, sorted by (index, sample). Raises DataError for a key that comes up twice."""
    places: list[Place] = []
    for run, folder in enumerate(dirs):
        if form == "parquet":
            for file, path in enumerate(parquet.parts(folder)):
                places += [(*key_of(row, str(path)), run, file, i) for i, row in enumerate(parquet.read_part(path))]
            continue
        offset = 0
        path = folder / ROWS_NAME
        for number, line, row in read_lines(path) if path.exists() else ():
            places.append((*key_of(row, f"{path} line {number}"), run, 0, offset))
            offset += len(line)
    places.sort()
    last: tuple[Key, int] | None = None
    for index, sample, run, _, _ in places:
        if last is not None and last[0] == (index, sample):
            both = f"{dirs[last[1]]} and {dirs[run]}"
            raise DataError(f"row (index {index}, sample {sample}) stands in {both}; merge shards that do not overlap")
        last = ((index, sample), run)
    return places


def _write_lines(dirs: Sequence[Path], order: Sequence[Place], out: Path) -> None:
    temporary = out / f".{ROWS_NAME}.tmp"
    files = [open(folder / ROWS_NAME, "rb") if (folder / ROWS_NAME).exists() else None for folder in dirs]  # noqa: SIM115
    try:
        with open(temporary, "wb") as target:
            for _, _, run, _, offset in order:
                file = files[run]
                assert file is not None
                file.seek(offset)
                target.write(file.readline().rstrip(b"\n") + b"\n")
            target.flush()
            os.fsync(target.fileno())
        temporary.rename(out / ROWS_NAME)
    finally:
        for file in files:
            if file is not None:
                file.close()


def _write_parts(dirs: Sequence[Path], order: Sequence[Place], out: Path) -> None:
    held = {(run, file): list(parquet.read_part(path)) for run, folder in enumerate(dirs) for file, path in enumerate(parquet.parts(folder))}
    (out / parquet.PARTS_NAME).mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(order), _PART_ROWS)):
        rows = [held[run, file][i] for _, _, run, file, i in order[start : start + _PART_ROWS]]
        parquet.write_part(out / parquet.PARTS_NAME / f"part-{number:05d}.parquet", rows)


def _run_info(dirs: Sequence[Path], stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shared = {name: stats[0].get(name) for name in ("model", "draft", "sampling", "chat", "environment")}
    shared["environment"] = _joined(shared["environment"] or {}, dirs)
    attempts = [{"run": str(folder), **entry} for folder, one in zip(dirs, stats, strict=True) for entry in one.get("attempts") or []]
    return {**shared, "attempts": attempts, "lossless": _lossless([one["lossless"] for one in stats if one.get("lossless")])}


def _lossless(checks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not checks:
        return None
    gaps = [check["worst_gap"] for check in checks if check.get("worst_gap") is not None]
    counts = {name: sum(check[name] for check in checks) for name in ("checked", "equal", "near_tie", "different")}
    return {**counts, "worst_gap": max(gaps, default=None)}


def _joined(record: dict[str, Any], dirs: Sequence[Path]) -> dict[str, Any]:
    """The record of one run as that of all: no shard, and what was joined."""
    config = record.get("config")
    if config and isinstance(config.get("data"), dict):
        record = {**record, "config": {**config, "data": {**config["data"], "shard": None}}}
    return {**record, "merged": [str(folder) for folder in dirs]}


def _shards(records: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """(i, N) of every shard that is there, those of runs that were joined before too; a run that is no shard is 0/1."""
    found: list[str] = []
    for record in records:
        data = (record.get("config") or {}).get("data") or {}
        found += record.get("shards") or [data.get("shard") or "0/1"]
    return sorted((int(i), int(count)) for i, count in (shard.split("/") for shard in found))


def _missing(shards: Sequence[tuple[int, int]]) -> list[str]:
    """``i/N`` of every shard that is not there: row k of the input is in the shards i/N with k mod N = i. Where they are of several N, shards of the
    least number that all of them divide."""
    count = math.lcm(*(each for _, each in shards))
    if count > MOST_SHARDS:
        kinds = ", ".join(str(each) for each in sorted({each for _, each in shards}))
        raise ConfigError(f"these are shards of {kinds}: whether rows are missing cannot be told; make shards of one number")
    there = {row for i, each in shards for row in range(i, count, each)}
    return [f"{i}/{count}" for i in range(count) if i not in there]
