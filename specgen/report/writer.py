"""Writes a job's rows in completion order, so that a kill at any byte costs at most the row being written.

Boundary: takes Completions and puts them on the disk. Knows nothing of how they were made, and computes no statistic.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from specgen.errors import DataError
from specgen.pasting import setting
from specgen.report.disk import FolderLock, dumps, storage_error, sync_folder
from specgen.report.parquet import ParquetParts
from specgen.report.resume import ROWS_NAME, Finished, drop_superseded, holds_results, open_for_resume, rows_format
from specgen.report.stats import counts_fault
from specgen.types import Completion, Counts

__all__ = ["RunWriter", "holds_results", "open_for_resume", "row_of"]


def row_of(
    completion: Completion, *, token_ids: bool = True, prompt_token_ids: bool = False, provenance: bool = False, meta: bool = True
) -> dict[str, Any]:
    """One output row as a dict, its fields in the order they are written.

    ``category`` is added when there is one that ``meta`` does not already show, so that groups can be told from the file alone.
    """
    row: dict[str, Any] = {name: getattr(completion, name) for name in ("id", "sample", "index", "prompt", "text")}
    if token_ids:
        row["token_ids"] = completion.token_ids
    for name in ("finish_reason", "stop_reason", "error", "prompt_tokens", "output_tokens"):
        row[name] = getattr(completion, name)
    row["counts"] = completion.counts.as_dict()
    if completion.simulated:
        row["simulated"] = True
    if completion.sampling is not None:
        row["sampling"] = completion.sampling
    if meta:
        row["meta"] = completion.meta
    if completion.category is not None and not (meta and completion.meta.get("category") == completion.category):
        row["category"] = completion.category
    if completion.turns is not None:
        row["turns"] = [_turn(turn, token_ids) for turn in completion.turns]
    if provenance and completion.provenance is not None:
        row["provenance"] = completion.provenance
    if completion.logprobs is not None:
        row["logprobs"] = _zeros_null(completion.logprobs)
    if prompt_token_ids:
        row["prompt_token_ids"] = completion.prompt_token_ids
    return row


def _zeros_null(logprobs: Any) -> Any:
    """A copy with null for each logarithm of a probability of 0: the law's own value, which is written so by intent and not counted as a fault."""
    if isinstance(logprobs, float):
        return None if logprobs == -math.inf else logprobs
    if isinstance(logprobs, dict):
        return {name: _zeros_null(value) for name, value in logprobs.items()}
    return [_zeros_null(value) for value in logprobs] if isinstance(logprobs, list | tuple) else logprobs


def _turn(turn: dict[str, Any], token_ids: bool) -> dict[str, Any]:
    kept = {name: value for name, value in turn.items() if token_ids or name != "token_ids"}
    if isinstance(kept.get("counts"), Counts):
        kept["counts"] = kept["counts"].as_dict()
    return kept


class RunWriter:
    """Appends the rows of one start of a job to its folder, under the folder's exclusive lock.

    A new run refuses a folder that holds results. With ``resume`` the folder is mended first and ``finished`` says which rows to skip;
    with ``resume_errors`` its error rows are to be retried, and their lines go just before the first append, so that a start that
    appends nothing changes nothing. ``lock`` hands in a lock the caller took earlier; the writer then leaves its release to the caller.

    ``rows`` counts the rows appended by this writer; ``notes`` counts what could not be written as it was (non-finite numbers, ...).
    Raises DataError, one line, when the folder is in use or holds results, or when the disk refuses; then everything already
    written stands and ends with a whole line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        format: str = "jsonl",
        fsync_seconds: float = 5.0,
        token_ids: bool = True,
        prompt_token_ids: bool = False,
        provenance: bool = False,
        meta: bool = True,
        resume: bool = False,
        resume_errors: bool = False,
        lock: FolderLock | None = None,
        rows_per_part: int = 2048,
        part_seconds: float = 300.0,
    ) -> None:
        self.folder, self.rows, self.notes = folder, 0, Counter[str]()
        self.finished = Finished()
        self._fields = {"token_ids": token_ids, "prompt_token_ids": prompt_token_ids, "provenance": provenance, "meta": meta}
        self._format, self._fsync_seconds = format, fsync_seconds
        self._part_limits: dict[str, Any] = {"rows_per_part": rows_per_part, "part_seconds": part_seconds}
        self._sink: _Lines | ParquetParts | None = None
        self._closed = False
        self._guard = threading.RLock()  # another thread closes the writer when this one is blocked for good
        if resume and not folder.is_dir():
            raise DataError(f"{folder} does not exist; resume= takes the folder of an earlier run")
        self._owned_lock = FolderLock(folder) if lock is None else None
        try:
            if resume:
                self._resume(resume_errors)
            elif holds_results(folder):
                raise DataError(f"{folder} already holds the results of a run; choose another output.dir or go on with {setting('resume', folder)}")
        except BaseException:
            self._unlock()
            raise

    def _resume(self, resume_errors: bool) -> None:
        held = rows_format(self.folder)
        if held is not None and held != self._format:
            raise DataError(f"{self.folder} holds {held} rows; output.format={self._format} cannot go on with it")
        self.finished = open_for_resume(self.folder, resume_errors=resume_errors)

    def append(self, completion: Completion) -> None:
        """Write one row. Its counts are checked first: a row that contradicts itself is a defect and never reaches the file."""
        fault = counts_fault(completion.counts.as_dict(), completion.output_tokens)
        if fault is not None:
            raise AssertionError(f"row (index {completion.index}, sample {completion.sample}): {fault}")
        if (completion.index, completion.sample) in self.finished:
            raise AssertionError(f"row (index {completion.index}, sample {completion.sample}) was finished by an earlier start")
        with self._guard:
            row, sink = row_of(completion, **self._fields), self._ready()
            if isinstance(sink, _Lines):
                sink.append(dumps(row, self.notes).encode() + b"\n")
            else:
                sink.append(row, self.notes)
            self.rows += 1

    def _ready(self) -> _Lines | ParquetParts:
        if self._sink is None:
            drop_superseded(self.folder, self.finished.superseded)
            self._sink = _Lines(self.folder, self._fsync_seconds) if self._format == "jsonl" else ParquetParts(self.folder, **self._part_limits)
        return self._sink

    def sync_if_due(self) -> None:
        """To be called now and then while no row ends: makes waiting rows durable when ``fsync_seconds`` (a part: ``part_seconds``) have passed."""
        with self._guard:
            if isinstance(self._sink, _Lines):
                self._sink.sync_if_due()
            elif self._sink is not None:
                self._sink.sync_if_due(self.notes)

    def hold(self, seconds: float) -> bool:
        """Keep every other thread from writing until ``release``; False when one is at it and does not end within ``seconds``."""
        return self._guard.acquire(timeout=seconds)

    def release(self) -> None:
        """Let the other threads write again."""
        self._guard.release()

    def close(self, leave_empty: bool = True) -> None:
        """Make every row durable and release the folder (a lock handed in stays with the caller). May be called twice.

        A run that appended nothing still leaves an empty ``generations.jsonl`` or ``generations/``, so that its folder can be read and resumed,
        unless ``leave_empty`` is false (a job that failed before its first row leaves no results behind).
        """
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                if self._sink is None and leave_empty and rows_format(self.folder) is None:
                    self._ready()
                if isinstance(self._sink, _Lines):
                    self._sink.close()
                elif self._sink is not None:
                    self._sink.close(self.notes)
            finally:
                self._unlock()

    def _unlock(self) -> None:
        if self._owned_lock is not None:
            self._owned_lock.release()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(leave_empty=error is None)


class _Lines:
    """``generations.jsonl``, open for appending. Each line goes to the kernel at once; the disk is forced at most every ``fsync_seconds``."""

    def __init__(self, folder: Path, fsync_seconds: float) -> None:
        self._folder, self._path, self._fsync_seconds = folder, folder / ROWS_NAME, fsync_seconds
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sync_folder(folder)
        self._size = os.fstat(self._descriptor).st_size
        self._synced_at, self._dirty, self._rows = time.monotonic(), False, 0
        self._failure: DataError | None = None

    def append(self, line: bytes) -> None:
        """Append one terminated line, whole or not at all."""
        if self._failure is not None:
            raise self._failure
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:  # an interrupt between two partial writes must not leave half a line either
            os.ftruncate(self._descriptor, self._size)
            if isinstance(error, OSError):
                raise self._fail(error) from error
            raise
        self._size += len(line)
        self._rows += 1
        self._dirty = True
        self.sync_if_due()

    def sync_if_due(self) -> None:
        if self._dirty and time.monotonic() - self._synced_at >= self._fsync_seconds:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._fail(error) from error
        self._synced_at, self._dirty = time.monotonic(), False

    def _fail(self, error: OSError) -> DataError:
        outcome = f"the {self._rows} rows this start wrote are complete: free space and go on with {setting('resume', self._folder)}"
        self._failure = storage_error(self._path, error, outcome)
        return self._failure

    def close(self, leave_empty: bool = True) -> None:
        try:
            if self._dirty and self._failure is None:
                self._sync()
        finally:
            os.close(self._descriptor)
