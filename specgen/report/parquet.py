"""Generations as Parquet parts: one fixed schema, a part visible only when it is complete.

Boundary: rows are the dicts that ``writer.row_of`` builds; nothing here knows of a Completion, of resuming or of statistics.
pyarrow is imported on first use.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import DataError
from specgen.pasting import setting
from specgen.report.disk import REPLACED, dumps, storage_error, sync_folder

if TYPE_CHECKING:
    import pyarrow as pa

PARTS_NAME = "generations"
_PART = re.compile(r"part-(\d{5,})\.parquet")
_AS_JSON = ("id", "stop_reason", "sampling", "meta", "turns", "provenance", "logprobs")
# Fields of a JSON line that are absent, rather than null, when they do not apply.
_OPTIONAL = ("token_ids", "simulated", "sampling", "meta", "category", "turns", "provenance", "logprobs", "prompt_token_ids")


def schema() -> pa.Schema:
    """The schema of every part, in the field order of a JSON line. ``id`` and ``stop_reason`` hold JSON text, which keeps ``7`` from ``"7"``."""
    import pyarrow as pa

    numbers, tokens, text = pa.list_(pa.int64()), pa.list_(pa.int32()), pa.string()
    singles = [(name, pa.int64()) for name in ("prefill_sampled", "verify_steps", "steps_without_draft")]
    depths = [(name, numbers) for name in ("proposed", "reached", "accepted")]
    counts = pa.struct([*singles, *depths, ("committed", pa.int64()), ("trimmed", pa.int64())])
    return pa.schema(
        [
            pa.field("id", text, nullable=False),
            pa.field("sample", pa.int64(), nullable=False),
            pa.field("index", pa.int64(), nullable=False),
            ("prompt", text),
            ("text", text),
            ("token_ids", tokens),
            ("finish_reason", text),
            ("stop_reason", text),
            ("error", pa.struct([("type", text), ("message", text)])),
            ("prompt_tokens", pa.int64()),
            ("output_tokens", pa.int64()),
            ("counts", counts),
            ("simulated", pa.bool_()),
            ("sampling", text),
            ("meta", text),
            ("category", text),
            ("turns", text),
            ("provenance", text),
            ("logprobs", text),
            ("prompt_token_ids", tokens),
        ]
    )


def to_record(row: dict[str, Any], notes: Counter[str]) -> dict[str, Any]:
    """A JSON line's row as a Parquet record: the open-ended fields as JSON text, lone surrogates replaced (and counted)."""
    record = dict(row)
    for name in _AS_JSON:
        if record.get(name) is not None:
            record[name] = dumps(record[name], notes)
    for name in ("prompt", "text", "category"):
        record[name] = _valid(record.get(name), notes)
    if record["error"] is not None:
        record["error"] = {name: _valid(record["error"].get(name), notes) for name in ("type", "message")}
    record["simulated"] = bool(row.get("simulated", False))
    return record


def _valid(text: str | None, notes: Counter[str]) -> str | None:
    if text is None:
        return None
    repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if repaired != text:
        notes[REPLACED] += sum(a != b for a, b in zip(text, repaired, strict=False))
    return repaired


def from_record(record: dict[str, Any]) -> dict[str, Any]:
    """The JSON line's row of a Parquet record: the inverse of ``to_record``."""
    row = dict(record)
    for name in _AS_JSON:
        if row.get(name) is not None:
            row[name] = json.loads(row[name])
    for name in _OPTIONAL:
        if row.get(name) is None or (name == "simulated" and not row[name]):
            row.pop(name, None)
    return row


def parts(run_dir: Path) -> list[Path]:
    """The complete parts of a run, in the order they were written."""
    folder = run_dir / PARTS_NAME
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _PART.fullmatch(path.name))] if folder.is_dir() else []
    return [path for _, path in sorted(found)]


def read_part(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one part. Raises DataError naming the file when it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    yield from_record(record)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read ({reason}); remove it and its rows are redone on resume") from error


def write_part(path: Path, rows: list[dict[str, Any]], notes: Counter[str] | None = None) -> None:
    """Write one part and only then give it its name. Raises OSError, leaving nothing, when the disk refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept = Counter[str]() if notes is None else notes
    table = pa.Table.from_pylist([to_record(row, kept) for row in rows], schema=schema())
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def drop_rows(run_dir: Path, drop: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite, part by part and atomically, the parts that hold rows for which ``drop`` is true; a part left empty is removed."""
    for path in parts(run_dir):
        rows = list(read_part(path))
        keep = [row for row in rows if not drop(row)]
        if len(keep) == len(rows):
            continue
        try:
            if keep:
                write_part(path, keep)
            else:
                path.unlink()
                sync_folder(path.parent)
        except OSError as error:
            raise storage_error(path, error, f"no finished row is lost: free space and go on with {setting('resume', run_dir)}") from error


class ParquetParts:
    """Collects rows and writes a part when it holds ``rows_per_part`` rows or its first row is ``part_seconds`` old.

    Rows of a part that was not written when the job died are redone on resume; ``close`` writes the last part, however short.
    """

    def __init__(self, run_dir: Path, *, rows_per_part: int = 2048, part_seconds: float = 300.0) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / PARTS_NAME
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows_per_part, self._part_seconds = rows_per_part, part_seconds
        existing = parts(run_dir)
        self._next = int(_PART.fullmatch(existing[-1].name)[1]) + 1 if existing else 0  # type: ignore[index]
        self._pending: list[dict[str, Any]] = []
        self._since = 0.0
        self.rows = 0  # rows in complete parts written by this object

    def append(self, row: dict[str, Any], notes: Counter[str]) -> None:
        """Add one row; may write a part."""
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(row)
        if len(self._pending) >= self._rows_per_part:
            self.flush(notes)
        else:
            self.sync_if_due(notes)

    def sync_if_due(self, notes: Counter[str]) -> None:
        """Write the pending part when it is old enough."""
        if self._pending and time.monotonic() - self._since >= self._part_seconds:
            self.flush(notes)

    def flush(self, notes: Counter[str]) -> None:
        """Write the pending rows as a part. Raises DataError when the disk refuses."""
        if not self._pending:
            return
        path = self._folder / f"part-{self._next:05d}.parquet"
        try:
            write_part(path, self._pending, notes)
        except OSError as error:
            waiting, self._pending = len(self._pending), []
            outcome = (
                f"{self.rows} rows of this start are complete, {waiting} will be redone: free space and go on with {setting('resume', self._run_dir)}"
            )
            raise storage_error(path, error, outcome) from error
        self._next += 1
        self.rows += len(self._pending)
        self._pending = []

    def close(self, notes: Counter[str]) -> None:
        """Write what is pending."""
        self.flush(notes)
