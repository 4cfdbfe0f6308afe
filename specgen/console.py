"""What is said on stdout and stderr. Nothing that the other end refuses may cost a job: its files and its exit code are what counts.

Boundary: streams, text and the log's file. A closed stream, a reader that has gone, a full device and characters that an encoding lacks are met here.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from specgen.errors import DataError


def write(stream: TextIO | None, text: str) -> OSError | None:
    """Write ``text`` and flush. Characters that the stream cannot encode become backslash escapes.

    A stream that takes no more (its reader has gone, its disk is full) is closed to everything that follows: its descriptor is led to the null
    device, so that nobody fails on it later, at the interpreter's end neither. Returned is what is worth telling of it: a full disk, once, and not a
    reader that has gone, as ``head`` goes when it has enough.
    """
    if stream is None:  # the process was started with it closed
        return None
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream object was closed
        _give_up(stream)
        return error if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) else None
    return None


def _give_up(stream: IO[Any]) -> None:
    with suppress(OSError, ValueError):  # no descriptor: a stream that lives in memory
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def tell(text: str) -> None:
    """One text and a line end on stdout, which the files of a run hold too."""
    _warn(write(sys.stdout, f"{text}\n"))


def answer(text: str) -> None:
    """A text on stdout that is all there is. Raises DataError where a full disk takes it."""
    if (error := write(sys.stdout, text)) is not None:
        raise DataError(f"stdout cannot be written: {error.strerror}; make room there, or send it elsewhere") from error


def _warn(error: OSError | None) -> None:
    if error is not None:
        say(f"stdout cannot be written ({error.strerror}); what goes to files is not concerned")


def say(line: str) -> None:
    """One line on stderr, as specgen's."""
    write(sys.stderr, f"specgen: {line}\n")


def trace() -> None:
    """The traceback of the exception being handled, on stderr."""
    write(sys.stderr, traceback.format_exc())


class ConsoleHandler(logging.Handler):
    """Log records on ``sys.stdout`` or ``sys.stderr``, by ``write``."""

    def __init__(self, name: str) -> None:
        """``name``: "stdout" or "stderr", looked up when the handler is made."""
        super().__init__()
        self.stream: TextIO | None = getattr(sys, name)

    def emit(self, record: logging.LogRecord) -> None:
        """See ``write``."""
        try:
            error = write(self.stream, f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)
            return
        if self.stream is sys.stdout:
            _warn(error)


class FileHandler(logging.FileHandler):
    """Log records in a file, in UTF-8; a lone surrogate becomes an escape. Where the disk is full, that is said once and the job goes on without the
    records."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by ``emit`` for what it meets."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) or self.stream is None:
            super().handleError(record)
            return
        _give_up(self.stream)  # what it has buffered and what follows go to the null device
        say(f"{self.baseFilename} cannot be written ({error.strerror}); the job goes on without it")
