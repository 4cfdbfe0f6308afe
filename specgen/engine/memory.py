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
        self.refcount = np.zeros(num_pages, np.int32)
        self.allocated = np.zeros(rows, np.int64)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack; page 1 is handed out first
        self._num_free = num_pages - 1
        self._cuda = device.type == "cuda"
        self._updates = BufferRing(ring, 2, rows * max(1, self.width), dtype=torch.int64, device=device) if self._cuda else None
        self._dirty: list[int] = []
        self._want = np.zeros(rows, np.int64)
        self._owned = np.zeros(rows, np.int64)

    @property
    def free_pages(self) -> int:
        """Pages that no row holds."""
        return self._num_free

    def alloc_for_spec_decode(self, requests: Sequence[Request], slots: np.ndarray, committed: np.ndarray, reserve: int) -> bool:
        """Raise each row's capacity to max(allocated, ceil_to_page(committed + reserve)), all rows in one call.

        requests: n rows. slots [n] int32. committed [n] int64: committed lengths the host knows of. Returns False, having changed nothing, when the
        pool cannot serve the whole batch. Only after the table is written are the new lengths read, once, and each watermark raised.
        """
        n = len(slots)
        page = self.page_size
        want, owned = self._want[:n], self._owned[:n]
        np.add(committed, reserve + page - 1, out=want)
        np.floor_divide(want, page, out=want)
        np.take(self.allocated, slots, out=owned)
        np.floor_divide(owned, page, out=owned)
        np.maximum(want, owned, out=want)
        total = int(want.sum() - owned.sum())
        if total > self._num_free:
            return False
        if total:
            self._extend(slots, want, owned)
        np.multiply(want, page, out=want)
        self.allocated[slots] = want
        for request, length in zip(requests, want.tolist(), strict=True):
            request.kv_allocated_len = max(request.kv_allocated_len, length)
        return True

    def _extend(self, slots: np.ndarray, want: np.ndarray, owned: np.ndarray) -> None:
        for i in np.flatnonzero(want > owned):
            slot, first, last = int(slots[i]), int(owned[i]), int(want[i])
            for page_index in range(first, last):
                self._num_free -= 1
                page = int(self._free[self._num_free])
                self.refcount[page] = 1
                self._set(slot, page_index, page)

    def _set(self, slot: int, page_index: int, page: int) -> None:
        self.table[slot, page_index] = page
        if self._cuda:
            self._dirty.append(slot * self.width + page_index)

    def share(self, source: int, target: int, pages: int) -> None:
        """Let row ``target``, which owns nothing yet, hold the first ``pages`` pages of row ``source`` too; nobody writes them from then on."""
        assert self.allocated[target] == 0
        for page_index in range(pages):
            page = int(self.table[source, page_index])
            self.refcount[page] += 1
            self._set(target, page_index, page)
        self.allocated[target] = pages * self.page_size

    def release(self, slot: int) -> None:
        """Give back every page of a row, once, when its request ends or is preempted. The KV writers share one stream, so a freed page is safe for
        anything launched later; the device's row still names the pages, and no later step takes that slot before it is rewritten."""
        pages = int(self.allocated[slot]) // self.page_size
        for page_index in range(pages):
            page = int(self.table[slot, page_index])
            self.refcount[page] -= 1
            if self.refcount[page] == 0:
                self._free[self._num_free] = page
                self._num_free += 1
        self.table[slot, :pages] = 0
        self.allocated[slot] = 0

    def upload(self) -> None:
        """Send the entries written since the last call to the device, in stream order before the next launch."""
        if not self._dirty or self._updates is None:
            return
        buffer = self._updates.take()
        n = len(self._dirty)
        buffer.np[0, :n] = self._dirty
        buffer.np[1, :n] = self.table.reshape(-1)[buffer.np[0, :n]]
        where = buffer.gpu[0, :n].copy_(buffer.cpu[0, :n], non_blocking=True)
        value = buffer.gpu[1, :n].copy_(buffer.cpu[1, :n], non_blocking=True)
        buffer.mark()
        self.device_table.view(-1).index_copy_(0, where, value.int())
        self._dirty.clear()

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
