"""KV memory on the host: reference-counted pages, the block table, and the allocation of a whole batch in one call.

Boundary: this file knows slots, pages and lengths, never tokens or models. One block table serves every model of a job: page p of a row is page p in
the target's pool and in the drafter's. Page 0 and slot 0 are scratch: they own nothing and are never handed out.
Invariant: free + distinct owned + scratch (1) = total; refcount(page) = number of rows whose table holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specgen.engine.buffers import BufferRing, CpuGpuBuffer
from specgen.types import Request

AHEAD = 8  # pages that a row is given at once while the pool is half empty


def ceil_to_page(tokens: int, page_size: int) -> int:
    """The least multiple of ``page_size`` that holds ``tokens``."""
    return -(-tokens // page_size) * page_size


def spec_reserve(num_steps: Sequence[int], topk: int, draft_tokens: Sequence[int], drafter_slots: Sequence[int], lead: int, overlap: int) -> int:
    """KV slots to hold beyond the committed length the host knows of.

    The host may be ``overlap`` steps behind, and each of those steps, like the one being launched, touches at most
    max(D, S x K, drafter slots) slots past its own length; ``lead`` is how far the drafter's committed KV runs ahead.
    """
    worst = max(max(d, s * topk, extra) for s, d, extra in zip(num_steps, draft_tokens, drafter_slots, strict=True))
    return (overlap + 1) * worst + lead


def raise_watermarks(requests: Sequence[Request], lengths: np.ndarray) -> None:
    """Raise each request's ``kv_allocated_len`` to its entry of ``lengths`` [n]: one read of them all, never lower than before."""
    for request, length in zip(requests, lengths.tolist(), strict=True):
        if length > request.kv_allocated_len:
            request.kv_allocated_len = length


class PageTable:
    """The pages of ``rows`` slots (slot 0 included), host truth in ``table`` and its device copy.

    table [rows, width] int32, page ids, 0 beyond a row's pages. allocated [rows] int64: capacity of each row in tokens, a multiple of the page size.
    """

    def __init__(self, rows: int, max_tokens: int, num_pages: int, page_size: int, device: torch.device, ring: int = 3) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.width = -(-max_tokens // page_size)
        self._mirror = CpuGpuBuffer(rows, self.width, dtype=torch.int32, device=device)
        self.table = self._mirror.np
        self.device_table = self._mirror.gpu
        self._flat = self.table.reshape(-1)
        self.refcount = np.zeros(num_pages, np.int32)
        self.allocated = np.zeros(rows, np.int64)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int64)  # a stack; page 1 is handed out first
        self._num_free = num_pages - 1
        self._raised: list[Request] | None = None  # whose watermarks stand at their rows' capacity
        self.slack = 0  # tokens that every row of the last allocation may grow by before another is needed, where that is known
        # Scratch of one allocation, so that a decode step creates no array.
        self._have, self._want, self._grows, self._index, self._pages = np.zeros((5, rows), np.int64)
        self._page_ids = np.zeros(rows * AHEAD, np.int32)
        self._wheres, self._many_pages, self._ons = np.zeros((3, rows, AHEAD), np.int64)
        self._nth = np.tile(np.arange(AHEAD), (rows, 1))
        self._short = np.zeros(rows, np.bool_)
        # Table entries written since the last upload, and the ring they travel in: n indices, then n values of half the size.
        entries = rows * max(1, self.width)
        self._written = np.zeros(entries if device.type == "cuda" else 0, np.int64)
        self._num_written = 0
        self._updates = BufferRing(ring, entries + (entries + 1) // 2, dtype=torch.int64, device=device) if len(self._written) else None

    @property
    def free_pages(self) -> int:
        """Pages that no row holds."""
        return self._num_free

    def alloc_for_spec_decode(self, requests: Sequence[Request], slots: np.ndarray, committed: np.ndarray, reserve: int, ahead: bool = False) -> bool:
        """Raise each row's capacity to max(allocated, ceil_to_page(committed + reserve)), all rows in one call.

        requests: n rows. slots [n] int64. committed [n] int64: committed lengths the host knows of. Returns False, having changed nothing, when the
        pool cannot serve the whole batch. Only after the table is written are the new lengths read, once, and each watermark raised. A batch that
        was the last to be raised, and whose rows still have room, is left as it is. ``ahead``: once a row needs a page, every row with room for less
        than a page is given one too, as long as as many pages stay free as there are rows; so a decoding batch is looked at once a page, and not
        whenever the next of its rows comes to a border. While half the pool stays free all the same, it is ``AHEAD`` pages for every row with room
        for less than half as many: a small model's step is shorter than such a look.
        """
        n = len(slots)
        have, want = self._have[:n], self._want[:n]
        self.allocated.take(slots, 0, have, "clip")
        np.subtract(have, committed, out=want)
        if n and len(requests) == n and self._raised == requests:
            self.slack = int(np.minimum.reduce(want)) - reserve
            if self.slack >= 0:
                return True  # every row has room, and its watermark says so already
        self.slack = 0
        page = self.page_size
        np.add(committed, reserve + page - 1, out=want)
        np.floor_divide(want, page, out=want)
        np.multiply(want, page, out=want)
        np.maximum(want, have, out=want)
        held = int(np.add.reduce(have))
        total = (int(np.add.reduce(want)) - held) // page
        if total > self._num_free:
            return False
        if total:
            if ahead and total + 2 * n <= self._num_free:
                many = 2 * (self._num_free - total - AHEAD * n) >= self.num_pages
                total = self._look_ahead(have, want, committed, reserve, AHEAD if many else 1, held)
            self._extend(slots, have, want, total)
            self.allocated[slots] = want
        raise_watermarks(requests, want)
        if self._raised != requests:
            self._raised = list(requests)
        if ahead and n:
            np.subtract(want, committed, out=have)
            self.slack = int(np.minimum.reduce(have)) - reserve
        return True

    def _look_ahead(self, have: np.ndarray, want: np.ndarray, committed: np.ndarray, reserve: int, pages: int, held: int) -> int:
        """Give ``pages`` to the rows with room for less than half as many, or less than one: raise ``want`` to that, and return the pages wanted by
        all. ``held``: the sum of ``have``."""
        n, page = len(have), self.page_size
        more, short = self._grows[:n], self._short[:n]
        np.subtract(have, committed, out=more)
        np.less(more, reserve + max(1, pages // 2) * page, out=short)
        np.multiply(short, pages * page, out=more)
        np.add(more, have, out=more)
        np.minimum(more, self.width * page, out=more)
        np.maximum(want, more, out=want)
        return (int(np.add.reduce(want)) - held) // page

    def _extend(self, slots: np.ndarray, have: np.ndarray, want: np.ndarray, total: int) -> None:
        """Hand out ``total`` pages, row by row: capacities [n] in tokens go from ``have`` to ``want``."""
        n, page = len(slots), self.page_size
        assert np.maximum.reduce(want) <= self.width * page, "a row longer than the block table is wide"
        grows, index = self._grows[:n], self._index[:n]
        np.subtract(want, have, out=grows)
        np.floor_divide(grows, page, out=grows)
        np.floor_divide(have, page, out=have)
        np.multiply(slots, self.width, out=index)
        np.add(index, have, out=index)
        most = np.maximum.reduce(grows)
        if most == 1:
            self._extend_by_one(grows, index, total)
        elif most == AHEAD and np.count_nonzero(grows) * AHEAD == total:
            self._extend_by_many(grows, index, total)
        else:
            first = np.cumsum(grows) - grows
            where = np.repeat(index - first, grows) + np.arange(total)
            self._give(where, self._free[self._num_free - total : self._num_free][::-1], total)

    def _extend_by_one(self, grows: np.ndarray, index: np.ndarray, total: int) -> None:
        """A decode step's growth, in scratch arrays: the rows that stay as they are write 0 to entry 0, which is scratch and holds it already."""
        n = len(grows)
        pages = self._pages[:n]
        np.multiply(index, grows, out=index)
        place = self._have[:n]
        np.cumsum(grows, out=place)
        np.subtract(self._num_free, place, out=place)
        self._free.take(place, 0, pages, "clip")
        np.multiply(pages, grows, out=pages)
        self._give(index, pages, total)
        self.refcount[0] = 0

    def _extend_by_many(self, grows: np.ndarray, index: np.ndarray, total: int) -> None:
        """``_extend_by_one`` for rows that grow by ``AHEAD`` pages."""
        n = len(grows)
        where, pages, nth, place = self._wheres[:n], self._many_pages[:n], self._nth[:n], self._have[:n]
        np.cumsum(grows, out=place)
        np.subtract(self._num_free, place, out=place)
        np.copyto(where, place[:, None])  # arithmetic on unequal shapes makes hidden arrays
        np.add(where, nth, out=where)
        self._free.take(where, 0, pages, "clip")
        np.copyto(where, index[:, None])
        np.add(where, nth, out=where)
        np.floor_divide(grows, AHEAD, out=grows)
        on = self._ons[:n]
        np.copyto(on, grows[:, None])
        np.multiply(where, on, out=where)
        np.multiply(pages, on, out=pages)
        self._give(where.reshape(-1), pages.reshape(-1), total)
        self.refcount[0] = 0

    def _give(self, where: np.ndarray, pages: np.ndarray, total: int) -> None:
        """Write ``pages`` to the table entries ``where`` and take ``total`` of them off the stack."""
        ids = self._page_ids[: len(pages)] if len(pages) <= len(self._page_ids) else np.empty(len(pages), np.int32)
        np.copyto(ids, pages, casting="unsafe")
        self._flat[where] = ids
        self.refcount[pages] = 1
        self._num_free -= total
        self._note(where)

    def _note(self, where: np.ndarray) -> None:
        """Remember entries to upload."""
        if self._updates is None:
            return
        if self._num_written + len(where) > len(self._written):
            self.upload()
        self._written[self._num_written : self._num_written + len(where)] = where
        self._num_written += len(where)

    def share(self, source: int, target: int, pages: int) -> None:
        """Let row ``target``, which owns nothing yet, hold the first ``pages`` pages of row ``source`` too; nobody writes them from then on."""
        assert self.allocated[target] == 0
        held = self.table[source, :pages]
        self.refcount[held] += 1
        self.table[target, :pages] = held
        self._note(np.arange(target * self.width, target * self.width + pages))
        self.allocated[target] = pages * self.page_size
        self._raised = None

    def release(self, slot: int) -> None:
        """Give back every page of a row, once, when its request ends or is preempted. The KV writers share one stream, so a freed page is safe for
        anything launched later; the device's row still names the pages, and no later step takes that slot before it is rewritten."""
        held = self.table[slot, : int(self.allocated[slot]) // self.page_size]
        self.refcount[held] -= 1
        freed = held[self.refcount[held] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
        held[:] = 0
        self.allocated[slot] = 0
        self._raised = None

    def upload(self) -> None:
        """Send the entries written since the last call to the device, in stream order before the next launch: one copy and one scatter."""
        n = self._num_written
        if not n or self._updates is None:
            return
        buffer = self._updates.take()
        half = (n + 1) // 2
        buffer.np[:n] = self._written[:n]
        self._flat.take(buffer.np[:n], 0, buffer.np[n : n + half].view(np.int32)[:n], "clip")
        sent = buffer.copy_to_gpu(n + half)
        self.device_table.view(-1).index_copy_(0, sent[:n], sent[n:].view(torch.int32)[:n])
        self._num_written = 0

    def check(self) -> None:
        """Assert the invariants of this module's docstring (tests)."""
        rows = self.table.shape[0]
        held = np.zeros(self.num_pages, np.int64)
        for slot in range(rows):
            pages = self.table[slot, : int(self.allocated[slot]) // self.page_size]
            assert (pages > 0).all() and len(set(pages.tolist())) == len(pages), slot
            held[pages] += 1
        assert (held == self.refcount).all()
        free = self._free[: self._num_free]
        assert len(set(free.tolist())) == self._num_free and 0 not in free and (self.refcount[free] == 0).all()
        assert self._num_free + int((held > 0).sum()) + 1 == self.num_pages
