"""What is said on stdout and stderr. Nothing that the other end refuses may cost a job: its files and its exit code are what counts.

Boundary: streams and text only. A closed stream, a reader that has gone, a full device and characters that an encoding lacks are met here.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO


def write(stream: TextIO | None, text: str) -> None:
    """Write ``text`` and flush. Characters that the stream cannot encode become backslash escapes.

    A stream that takes no more (its reader has gone, its disk is full) is closed to everything that follows: its descriptor is led to the null
    device, so that nobody fails on it later, at the interpreter's end neither. A full disk is named on stderr, once; a reader that has gone, as
    ``head`` does when it has enough, is nothing to tell.
    """
    if stream is None:  # the process was started with it closed
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream object was closed
        _give_up(stream)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and stream is sys.stdout:
            write(sys.stderr, f"specgen: stdout cannot be written ({error.strerror}); the job goes on, and its files and log hold all of it\n")


def _give_up(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # no descriptor: a stream that lives in memory
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def tell(text: str) -> None:
    """One text and a line end on stdout."""
    write(sys.stdout, f"{text}\n")


def say(line: str) -> None:
    """One line on stderr, as specgen's."""
    write(sys.stderr, f"specgen: {line}\n")


class ConsoleHandler(logging.Handler):
    """Log records on ``sys.stdout`` or ``sys.stderr``, by ``write``."""

    def __init__(self, name: str) -> None:
        """``name``: "stdout" or "stderr", looked up when the handler is made."""
        super().__init__()
        self.stream: TextIO | None = getattr(sys, name)

    def emit(self, record: logging.LogRecord) -> None:
        """See ``write``."""
        write(self.stream, f"{self.format(record)}\n")
