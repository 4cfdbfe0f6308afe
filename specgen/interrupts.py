"""SIGINT and SIGTERM while rows are generated: noted, so that the step ends and every finished row is on the disk.

Boundary: signals only; what an interrupted run does next is ``run.py``'s matter.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Notes the first signal once ``arm`` was called; a second one acts at once, as before. Before ``arm`` nothing is changed.

    Used as a context manager, which gives the signals back at its end.
    """

    def __init__(self) -> None:
        self.caught: int | None = None
        self._previous: dict[int, Any] = {}

    def arm(self) -> None:
        """From now on the first signal is only noted; one that the process was started to ignore (``nohup``, ``&`` in a script) stays ignored.

        Outside the main thread, where Python has no signals, nothing happens.
        """
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[int(number)] = signal.signal(number, self._note)
        except ValueError:
            self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught = number
            return
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        raise KeyboardInterrupt

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
