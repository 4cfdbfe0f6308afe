"""A watch over an engine's steps: results that do not come are noticed, although the thread that waits for them is blocked.

Boundary: looks at the engine from a thread of its own and says what it sees; what then happens to a job is ``on_stuck``'s matter. The engine pays one
number a step for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.engine.engine import Engine
    from specgen.engine.flight import InFlight

log = logging.getLogger("specgen")
OnStuck = Callable[[str, Callable[[], bool]], None]
MOST_NAMED = 8  # rows of each kind that a message names


class Watch:
    """Looks at ``engine`` about once a second for the time of a ``with`` block; ``seconds`` 0 looks never.

    Time counts while the engine's thread is inside one and the same ``step``. When it reaches ``seconds`` and a launched step's results have not
    landed, ``on_stuck(what is waiting, confirm)`` is called, on the watch's thread; ``confirm()`` looks once more. A step that takes as long for
    another reason (kernels compile, graphs are captured, a CPU computes) is warned of, once. A watch that overslept was stopped with its process, or
    starved with it: what it counted so far is forgotten.
    """

    def __init__(self, engine: Engine, seconds: float, on_stuck: OnStuck) -> None:
        self._engine, self._seconds, self._on_stuck = engine, seconds, on_stuck
        self.interval = min(1.0, seconds / 8)
        self._tick = 0  # the engine's count of step borders at the last look; odd is inside a step
        self._waited, self._warned = 0.0, False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specgen-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._end.wait(self.interval):
            now = time.monotonic()
            self.look(now - before)
            before = time.monotonic()

    def look(self, elapsed: float) -> None:
        """One look, ``elapsed`` seconds after the one before."""
        tick = self._engine.borders
        if tick != self._tick or tick % 2 == 0 or elapsed > 2 * self.interval + 2:
            self._warned = self._warned and tick == self._tick
            self._tick, self._waited = tick, 0.0
            return
        self._waited += elapsed
        if self._waited < self._seconds:
            return
        if (what := self._overdue()) is not None:
            self._waited = 0.0
            self._on_stuck(what, lambda: self._engine.borders == tick and self._overdue() is not None)
        elif not self._warned:
            self._warned = True
            log.warning("a step has been running for %.0f s and nothing launched is overdue: %s", self._waited, self._running())

    def _overdue(self) -> str | None:
        """What is waited for, when the device owes the results of a launched step."""
        try:
            return next((describe(flight) for flight in self._engine.launched() if not flight.landed()), None)
        except RuntimeError:  # the engine moved on while it was looked at, or the device has failed, which the engine's own wait raises
            return None

    def _running(self) -> str:
        return "the first steps of a size compile and capture" if self._engine.device.type == "cuda" else "this device computes while it launches"


def describe(flight: InFlight) -> str:
    """Who is in a launched step: "decoding 12 rows (index 3, 7, ...), prefilling 2 rows (index 5, 9)"."""
    parts = []
    for doing, requests in (("decoding", [r for _, r, _ in flight.batch.decode]), ("prefilling", [c.request for c in flight.batch.chunks])):
        if requests:
            named = ", ".join(str(request.prompt.index) for request in requests[:MOST_NAMED]) + (", ..." if len(requests) > MOST_NAMED else "")
            parts.append(f"{doing} {len(requests)} row{'s' if len(requests) > 1 else ''} (index {named})")
    return ", ".join(parts)
