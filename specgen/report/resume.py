"""What an earlier start left in a run folder: repairs it, and says which rows need not be generated again.

Boundary: reads and mends generations; appends nothing and compares no configuration. Rows are keyed by (index, sample), never by id,
text or count: ids and prompts may repeat, and rows are written in completion order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.errors import DataError
from specgen.pasting import setting
from specgen.report import parquet
from specgen.report.disk import storage_error, sync_folder
from specgen.types import Prompt

ROWS_NAME = "generations.jsonl"
STATS_NAME = "stats.json"
Key = tuple[int, int]  # (index, sample)

# What the fields of a row are that anything reads after it was written, and which of them no row lacks.
KINDS: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "index": (int,),
    "sample": (int,),
    "prompt": (str,),
    "text": (str,),
    "token_ids": (list,),
    "finish_reason": (str,),
    "stop_reason": (str, int, type(None)),
    "error": (dict, type(None)),
    "prompt_tokens": (int,),
    "output_tokens": (int,),
    "counts": (dict,),
    "meta": (dict, type(None)),
    "turns": (list, type(None)),
}
COUNTED = ("index", "sample", "prompt_tokens", "output_tokens")
ALWAYS = KINDS.keys() - {"token_ids", "meta", "turns"}
KIND_NAMES = {str: "a text", int: "a whole number", list: "a list", dict: "an object", type(None): "null"}


def holds_results(folder: Path) -> bool:
    """True when ``folder`` holds the rows or statistics of a run, so that only a resume may write there."""
    return (folder / ROWS_NAME).exists() or (folder / parquet.PARTS_NAME).exists() or (folder / STATS_NAME).exists()


def rows_format(folder: Path) -> str | None:
    """``jsonl`` or ``parquet``, whichever ``folder`` holds; None when it holds no rows. Raises DataError for both."""
    lines, parts = (folder / ROWS_NAME).exists(), bool(parquet.parts(folder))
    if lines and parts:
        raise DataError(f"{folder} holds both {ROWS_NAME} and {parquet.PARTS_NAME}/; move one of them away")
    return "jsonl" if lines else "parquet" if parts else None


@dataclass(frozen=True, slots=True)
class Stored:
    """What is remembered of a finished row: enough to tell whether the input row is still the same."""

    id: str | int
    is_error: bool
    prompt_digest: bytes | None  # of the prompt's text; None for an error row and for a row of several turns
    first_turn_tokens: int | None  # of a row of several turns, whose stored prompt is that of the last one


@dataclass
class Finished:
    """The rows an earlier start finished.

    ``rows`` are kept and not generated again; ``superseded`` are error rows to be retried, whose lines ``drop_superseded`` removes.
    ``repaired`` says what was mended, for the log.
    """

    rows: dict[Key, Stored] = field(default_factory=dict)
    superseded: set[Key] = field(default_factory=set)
    repaired: str | None = None

    @property
    def done(self) -> set[Key]:
        """The (index, sample) of every row that is not to be generated again."""
        return set(self.rows)

    @property
    def errors(self) -> set[Key]:
        """The kept rows that are errors."""
        return {key for key, stored in self.rows.items() if stored.is_error}

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def check(self, prompt: Prompt, sample: int) -> None:
        """Compare a row that is about to be skipped with the stored one. Raises DataError when the input has changed under the run.

        A row of several turns is compared by the token count of its first prompt, an error row by its id alone.
        """
        stored = self.rows[prompt.index, sample]
        remedy = "the input has changed since this run started: restore it, or start a new run"
        if type(stored.id) is not type(prompt.id) or stored.id != prompt.id:
            raise DataError(f"input row {prompt.index}: the finished row has id {stored.id!r}, the input now {prompt.id!r}; {remedy}")
        if stored.prompt_digest is not None and stored.prompt_digest != digest(prompt.text):
            raise DataError(f"input row {prompt.index} (id {prompt.id!r}): its prompt differs from the finished row's; {remedy}")
        if stored.first_turn_tokens is not None and stored.first_turn_tokens != len(prompt.token_ids):
            raise DataError(f"input row {prompt.index} (id {prompt.id!r}): its first turn differs from the finished row's; {remedy}")


def digest(text: str) -> bytes:
    """16 bytes that stand for a prompt's text, so that a long run's prompts need not be held."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def open_for_resume(folder: Path, *, resume_errors: bool = False) -> Finished:
    """Mend what a crash left in ``folder`` and return its finished rows. The caller holds the folder's lock.

    Of ``generations.jsonl`` a last line without LF is terminated when it is a whole row and cut off otherwise. Raises DataError for a
    damaged line elsewhere and for a row that stands twice.
    """
    finished = Finished()
    _remove_temporaries(folder)
    form = rows_format(folder)
    if form == "jsonl":
        finished.repaired = _mend_tail(folder / ROWS_NAME)
        located = ((f"{folder / ROWS_NAME} line {number}", row) for number, _, row in read_lines(folder / ROWS_NAME))
    else:
        located = ((str(path), row) for path in parquet.parts(folder) for row in parquet.read_part(path))
    for place, row in located:
        key, stored = _stored(row, place)
        if key in finished.rows or key in finished.superseded:
            raise DataError(f"{place}: row (index {key[0]}, sample {key[1]}) stands there for the second time; remove one of the two")
        if stored.is_error and resume_errors:
            finished.superseded.add(key)
        else:
            finished.rows[key] = stored
    return finished


def key_of(row: dict[str, Any], place: str) -> Key:
    """(index, sample) of a row that was read at ``place``. Raises DataError where something that every row has is missing or of another kind."""
    fault = _fault(row)
    if fault is not None:
        raise DataError(f"{place} is not a row that specgen wrote ({fault}); remove it and the row is redone on resume")
    return row["index"], row["sample"]


def _fault(row: dict[str, Any]) -> str | None:
    for name, kinds in KINDS.items():
        if name not in row and name in ALWAYS:
            return f"{name!r} is missing"
        if name in row and type(row[name]) not in kinds:
            return f"{name!r} is not {' or '.join(KIND_NAMES[kind] for kind in kinds)}"
    for name in COUNTED:
        if not 0 <= row[name] < 2**63:
            return f"{name!r} is out of range"
    if (row["finish_reason"] == "error") != (row["error"] is not None):
        return "'error' is there when finish_reason is error, and only then"
    turns = row.get("turns")
    if turns and not (isinstance(turns[0], dict) and type(turns[0].get("prompt_tokens")) is int):
        return "'turns' lacks the prompt_tokens of the first"
    return None


def _stored(row: dict[str, Any], place: str) -> tuple[Key, Stored]:
    key = key_of(row, place)
    is_error, turns = row["finish_reason"] == "error", row.get("turns")
    first = turns[0]["prompt_tokens"] if turns and not is_error else None
    return key, Stored(row["id"], is_error, None if is_error or turns else digest(row["prompt"]), first)


def read_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(1-based number, bytes with their LF, row) of each whole line. Lines end at LF alone.

    A last line without LF is yielded when it is whole and left out otherwise; any other damaged line is a DataError naming it.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            row = parse_row(line)
            if row is not None:
                yield number, line, row
            elif line.endswith(b"\n"):
                raise DataError(f"{path} line {number} is not a JSON object; remove the line and the row is redone on resume")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or None when it is cut off, half a character, or something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def torn_tail(path: Path) -> bytes:
    """The bytes after the last LF of a file: empty when every line is terminated."""
    tail = b""
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position and b"\n" not in tail:
            step = min(position, 1 << 16)
            position = file.seek(position - step)
            tail = file.read(step) + tail
    return tail[tail.rfind(b"\n") + 1 :]


def _mend_tail(path: Path) -> str | None:
    tail = torn_tail(path)
    if not tail:
        return None
    whole = parse_row(tail) is not None
    try:
        with open(path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if whole:
                file.write(b"\n")
            else:
                file.truncate(end - len(tail))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(path, error, "its torn last line could not be mended: free space and resume again") from error
    return f"{path.name}: {'a last line without line feed was kept' if whole else f'a torn last line of {len(tail)} bytes was removed'}"


def drop_superseded(folder: Path, superseded: set[Key]) -> None:
    """Remove the lines of error rows that are being retried, by an atomic rewrite; every other byte stays. Call before the first append."""
    if not superseded:
        return
    if rows_format(folder) == "parquet":
        parquet.drop_rows(folder, lambda row: (row["index"], row["sample"]) in superseded)
        return
    path = folder / ROWS_NAME
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            for _, line, row in read_lines(path):
                if (row["index"], row["sample"]) not in superseded:
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error, f"no finished row is lost: free space and go on with {setting('resume', folder)}") from error


def _remove_temporaries(folder: Path) -> None:
    for place in (folder, folder / parquet.PARTS_NAME):
        for path in place.glob(".*.tmp") if place.is_dir() else ():
            path.unlink()
