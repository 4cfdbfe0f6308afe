"""The end of a job whose device no longer answers: the thread that waits for it is blocked for good, so the watch's thread ends the process.

Boundary: saves what is finished and says how to go on; ``engine.watch`` decides that it is time. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from specgen.console import write
from specgen.errors import SpecgenError
from specgen.pasting import setting

log = logging.getLogger("specgen")
EXIT_CODE = 2
GUARD_S = 5.0  # a writer that holds its guard for longer is at work on a slow disk, and the job alive

# Called with the error line in place of printing it; returns the exit code. A sweep writes its table here.
last_word: Callable[[str], int] | None = None


class Writer(Protocol):
    """What is needed of ``report.writer.RunWriter``."""

    rows: int

    def hold(self, seconds: float) -> bool:
        """Keep every other thread from writing."""

    def release(self) -> None:
        """Let them write again."""

    def close(self) -> None:
        """Make every row durable."""


class Lock(Protocol):
    """What is needed of ``report.disk.FolderLock``."""

    def release(self) -> None:
        """Give the folder free."""


def ender(folder: Path, writer: Writer, lock: Lock, seconds: float) -> Callable[[str, Callable[[], bool]], None]:
    """``on_stuck`` of a job in ``folder``: returns without a trace when the job turns out to be alive, and else does not return.

    The guard is held from the last look at the device to the end of the process, so that a device that wakes up meanwhile changes no file.
    """

    def end(what: str, confirm: Callable[[], bool]) -> None:
        if not writer.hold(GUARD_S):
            return
        if not confirm():
            writer.release()
            return
        saved = f"{writer.rows} rows of this start are on the disk"
        try:
            writer.close()
        except SpecgenError as error:
            saved = str(error)
        lock.release()
        line = (
            f"the device has not answered for {seconds:g} s (engine.stuck_after_s) while {what}; {saved}; "
            f"go on with `python -m specgen {setting('resume', folder)}`"
        )
        log.error("%s", line, extra={"file_only": True})
        _leave(line)

    return end


def _leave(line: str) -> None:
    """The line on stderr, then the end of the process: nothing that waits for the blocked thread may run any more."""
    code = EXIT_CODE
    try:
        if last_word is not None:
            code = last_word(line)
        else:
            write(sys.stderr, f"{chr(10) if sys.stderr.isatty() else ''}specgen: {line}\n")  # on a terminal after the progress bar
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)
