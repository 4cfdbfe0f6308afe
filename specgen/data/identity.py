"""Which ids have been seen: the memory behind the duplicate-id check.

Boundary: knows nothing of rows or files. Costs 36 to 72 bytes an id whatever its length, 108 while the table doubles, and nothing for inputs
without ids.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right


class SeenIds:
    """First index of every id, ids being strings or integers (``7`` is not ``"7"``).

    A hash table of 128-bit digests in flat arrays: for 10 million ids a collision, which would call two ids equal, has probability 1e-25.
    Rows without an id own their index as an integer id; they are kept as ranges, so that an all-anonymous input costs two integers.
    """

    def __init__(self) -> None:
        self._size = 1024
        self._used = 0
        self._clear()
        self._starts: list[int] = []  # ranges of rows without an id: starts[i] <= index < ends[i]
        self._ends: list[int] = []
        self._repeats: dict[int, int] = {}

    def _clear(self) -> None:
        self._high, self._low = array("Q", [0]) * self._size, array("Q", [0]) * self._size
        self._first = array("q", [-1]) * self._size  # -1: free

    @staticmethod
    def _digest(id: str | int) -> tuple[int, int]:
        raw = hashlib.blake2b(json.dumps(id).encode(), digest_size=16).digest()
        return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")

    def _slot(self, high: int, low: int) -> int:
        mask = self._size - 1
        slot = low & mask
        while self._first[slot] >= 0 and (self._high[slot] != high or self._low[slot] != low):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        high, low, first = self._high, self._low, self._first
        self._size *= 2
        self._clear()
        for h, w, index in zip(high, low, first, strict=True):
            if index >= 0:
                slot = self._slot(h, w)
                self._high[slot], self._low[slot], self._first[slot] = h, w, index

    def add(self, id: str | int, index: int) -> int | None:
        """Record an explicit id; returns the index of the first row that has it, or None when this is the first."""
        high, low = self._digest(id)
        slot = self._slot(high, low)
        if self._first[slot] >= 0:
            return self._first[slot]
        anonymous = isinstance(id, int) and self._is_anonymous(id)
        self._high[slot], self._low[slot], self._first[slot] = high, low, int(id) if anonymous else index
        self._used += 1
        if self._used * 3 > self._size * 2:
            self._grow()
        return int(id) if anonymous else None

    def add_anonymous(self, index: int) -> int | None:
        """Record a row without an id; returns the index of an earlier row whose explicit id is this very number, or None."""
        if self._used:
            first = self._first[self._slot(*self._digest(index))]
            if first >= 0:
                return first
        if self._ends and self._ends[-1] == index:
            self._ends[-1] += 1
        else:
            self._starts.append(index)
            self._ends.append(index + 1)
        return None

    def _is_anonymous(self, id: int) -> bool:
        place = bisect_right(self._starts, id) - 1
        return place >= 0 and id < self._ends[place]

    def repeat(self, first: int) -> int:
        """Occurrence number of one more row with the id first seen at row ``first``: 1 for the second row, 2 for the third."""
        self._repeats[first] = self._repeats.get(first, 0) + 1
        return self._repeats[first]
