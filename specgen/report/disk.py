"""Durable files: strict JSON text, atomic replacement, and the lock of a run folder.

Boundary: bytes and paths only. Nothing here knows what a row, a statistic or a report is.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import errno
import fcntl
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from specgen.errors import DataError

NONFINITE = "non-finite numbers written as null"
AS_TEXT = "values without a JSON form written as text"
REPLACED = "lone surrogates replaced by U+FFFD"

LOCK_NAME = ".lock"
UNTOUCHED = "nothing was replaced; mend that and try again"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def dumps(value: Any, notes: Counter[str] | None = None) -> str:
    """Strict JSON on one line. NaN and infinities become null and are counted in ``notes``; so are values JSON has no form for.

    Non-ASCII characters stand as they are (U+2028 included: lines are split on LF alone). A text with a lone surrogate, which UTF-8
    cannot hold, is written in ASCII escapes instead, so that nothing is lost.
    """
    try:
        text = _encode(value, ensure_ascii=False)
    except (ValueError, TypeError):
        value = clean(value, Counter() if notes is None else notes)
        text = _encode(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _encode(value, ensure_ascii=True)
    return text


def _encode(value: Any, ensure_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"))


def clean(value: Any, notes: Counter[str]) -> Any:
    """A copy of ``value`` that JSON can hold, with every change counted in ``notes``."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        notes[NONFINITE] += 1
        return None
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _key(key, notes): clean(item, notes) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item, notes) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return clean(value.tolist(), notes)
    notes[AS_TEXT] += 1
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, decimal.Decimal | os.PathLike) else repr(value)


def _key(key: Any, notes: Counter[str]) -> str:
    if key is None or isinstance(key, bool | int):
        return json.dumps(key)
    notes[AS_TEXT] += 1
    return str(key)


def storage_error(path: Path, error: OSError, outcome: str) -> DataError:
    """The one-line error for a write that failed; ``outcome`` says what is safe and what to do."""
    reason = "the disk or quota is full" if error.errno in _FULL else (error.strerror or str(error))
    return DataError(f"{path}: {reason}; {outcome}")


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: str | bytes, remedy: str = UNTOUCHED) -> None:
    """Replace ``path`` in one step: a reader, or a restart after a crash, sees the old file or the new one, never a part.

    Raises DataError, with ``remedy``, when the disk refuses; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error, remedy) from error


def write_json(path: Path, value: Any, remedy: str = UNTOUCHED) -> None:
    """Atomically write ``value`` as indented strict JSON; non-finite numbers become null."""
    write_atomic(path, json.dumps(clean(value, Counter()), ensure_ascii=False, allow_nan=False, indent=2) + "\n", remedy)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError, with ``remedy``, when it is missing, not JSON or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {remedy}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it holds no JSON object; {remedy}")
    return value


@contextmanager
def understood(path: Path, remedy: str) -> Iterator[None]:
    """While the content of a file that specgen wrote is made sense of: what it lacks, or has in another form, is its damage. Raises DataError."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise DataError(f"{path} is damaged: it does not hold what was written there ({type(error).__name__}: {error}); {remedy}") from error


def holder(folder: Path) -> str | None:
    """The number of the process that holds ``folder``'s lock (``unknown`` where it has not said so yet); None where nobody does."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _said_by_holder(descriptor)
    except OSError:  # some network file systems have no locks
        return None
    finally:
        os.close(descriptor)
    return None


def _said_by_holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"


class FolderLock:
    """The exclusive lock of a run folder: held by one job at a time, released by the kernel when the job dies.

    Creates the folder. Raises DataError when another job holds it. Usable as a context manager; ``release`` may be called twice.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._acquire()
        except OSError as error:
            raise storage_error(folder, error, "make room there, or choose another folder") from error

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = _said_by_holder(descriptor)
                os.close(descriptor)
                raise DataError(f"{self.path.parent} is in use by another job (process {by}); wait for it or choose another output.dir") from None
            except OSError as error:  # some network file systems have no locks
                warnings.warn(f"{self.path.parent} cannot be locked ({error.strerror}): do not start a second job on it", stacklevel=4)
            if self._is_current(descriptor):
                try:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                except OSError:
                    self.path.unlink(missing_ok=True)
                    os.close(descriptor)
                    raise
                return descriptor
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        # The former holder may have removed the file between our open and our lock: then we hold a lock on nothing.
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the folder free and remove the lock file."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
