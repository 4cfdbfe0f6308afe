"""Steady decode steps create nothing on the host that grows with the rows or with the steps, and the allocator's short cuts change no result.

The device is stubbed: every step finds its result in a tensor made beforehand. Retiring is left out, for its outputs grow by their nature; the
lengths it would set are raised in place instead. One list a step is allowed: the lengths of a batch in which a row took a page.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.host import drain, naive_host, start
from benchmarks.timing import Operators
from specgen.engine.buffers import BufferRing
from specgen.engine.engine import Engine
from specgen.engine.memory import AHEAD, PageTable
from specgen.kernels.reference_step import RESULT_COLUMNS
from specgen.types import Prompt, Request, SamplingParams
from tests.harness import engine_of, requests_of

CPU = torch.device("cpu")
PAGE, STEPS, WARM_UP = 4, 3, 16
FACTORIES = ("tensor", "as_tensor", "from_numpy", "empty", "zeros", "ones", "full", "arange", "stack", "cat")


def steady_engine(rows: int, overlap: int = 0) -> Engine:
    """An engine of ``rows`` decode rows with prompts of unequal length, whose later steps commit one token a row without any model."""
    engine = engine_of("rand_target", "draft_model:rand_draft", steps=STEPS, batch=rows, page=PAGE, overlap=overlap)
    start(engine, requests_of([[30 + i % 4] * (2 + i % PAGE) for i in range(rows)], SamplingParams(max_tokens=1000, ignore_eos=True)))
    result = torch.zeros(rows, RESULT_COLUMNS + STEPS + 1, dtype=torch.int32)
    result[:] = torch.tensor([1, 0, 1, 0, STEPS, 1, 31, -1, -1, -1], dtype=torch.int32)
    target = engine._result[:rows]
    engine.device_step.decode = lambda *_: target.copy_(result)  # type: ignore[method-assign,assignment]
    return engine


def step(engine: Engine) -> None:
    """Plan and launch one step, and advance every row by a token."""
    engine.launch(engine.scheduler.next_batch(STEPS))
    engine.scheduler._committed += 1


@dataclass
class Traced:
    """What some steps left behind, and what each held at its most, in bytes; which of them handed out pages."""

    left: int
    peaks: array[int]
    grew: array[int]

    def most(self, grew: bool) -> int:
        """The largest peak among the steps that handed out pages, or among the others."""
        return max(peak for peak, pages in zip(self.peaks, self.grew, strict=True) if bool(pages) == grew)

    def least(self) -> int:
        """The smallest peak of the steps that handed out no page: what every step makes, whatever the interpreter did beside it."""
        return min(peak for peak, pages in zip(self.peaks, self.grew, strict=True) if not pages)


def settled() -> int:
    """Bytes in use once the interpreter's lists of free objects, which a collection empties, are left out; there is no cycle to collect."""
    assert gc.collect() == 0
    return tracemalloc.get_traced_memory()[0]


def traced(engine: Engine, steps: int) -> Traced:
    """Memory of ``steps`` steps after a few to warm up."""
    peaks, grew = array("q", [0]) * steps, array("q", [0]) * steps
    gc.collect()
    gc.freeze()  # what other tests keep is not looked at in each of the collections below
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(WARM_UP):
            step(engine)
        first = settled()
        for i in range(steps):
            free = engine.pages.free_pages
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            step(engine)
            peaks[i] = tracemalloc.get_traced_memory()[1] - before
            grew[i] = free - engine.pages.free_pages
        last = settled()
    finally:
        tracemalloc.stop()
        gc.enable()
    engine.pages.check()
    return Traced(last - first, peaks, grew)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Calls of torch's factory functions by name."""
    calls: dict[str, int] = dict.fromkeys(FACTORIES, 0)
    patches = []
    for name in FACTORIES:
        inner = getattr(torch, name)

        def call(*args: object, name: str = name, inner: object = inner, **kwargs: object) -> object:
            calls[name] += 1
            return inner(*args, **kwargs)  # type: ignore[operator]

        patches.append(patch.object(torch, name, call))
    for each in patches:
        each.start()
    try:
        yield calls
    finally:
        for each in patches:
            each.stop()


# -- memory -----------------------------------------------------------------------------------------------------------------------------------


def lengths_list(rows: int) -> int:
    """Bytes of a list of as many lengths, each an integer object of its own."""
    return 56 + 8 * rows + 32 * rows


@pytest.mark.parametrize("overlap", [0, 1])
def test_steps_leave_nothing_behind_however_many_there_are(overlap: int) -> None:
    # What the interpreter frees or caches meanwhile is not the steps': a leak would be in every measure of a length.
    left = dict.fromkeys((100, 200), 1 << 60)
    for _ in range(3):
        left = {steps: min(least, traced(steady_engine(4, overlap), steps).left) for steps, least in left.items()}
        if left[200] - left[100] < 16 * 100 and left[100] < 8192:
            break
    assert left[200] - left[100] < 16 * 100, "less than the smallest object a step"
    assert left[100] < 8192, "what the interpreter and NumPy keep for reuse"


def test_a_step_that_takes_no_page_holds_the_same_for_16_rows_as_for_4() -> None:
    few, many = traced(steady_engine(4), 100), traced(steady_engine(16), 100)
    assert many.most(grew=False) - few.most(grew=False) < 12 * 8, "less than a pointer for each of the other rows"


def test_a_step_that_takes_pages_holds_the_list_of_lengths_and_no_more() -> None:
    """Pages come many at a time while half the pool is free, then one at a time."""
    few, many = traced(steady_engine(4), 100), traced(steady_engine(16), 100)
    assert {4, 4 * AHEAD} <= {pages for pages in few.grew if pages} and {16, 16 * AHEAD} <= {pages for pages in many.grew if pages}
    assert sum(many.grew) == 4 * sum(few.grew) and abs(sum(many.grew) - 16 * 100 // PAGE) <= 16 * AHEAD
    assert many.most(grew=True) - few.most(grew=True) <= lengths_list(16) - lengths_list(4)


def test_allocating_holds_the_same_for_256_rows_as_for_4_and_the_list_where_rows_grow() -> None:
    peaks: dict[int, dict[bool, int]] = {}
    for rows in (4, 256):
        table, requests = PageTable(rows + 1, 2048, rows * 200, 16, CPU), [request() for _ in range(rows)]
        slots, committed = np.arange(1, rows + 1), np.arange(rows) % 16 + 300
        most = peaks[rows] = {False: 0, True: 0}
        tracemalloc.start()
        for i in range(120):
            committed += i % 2
            free, (before, _) = table.free_pages, tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert table.alloc_for_spec_decode(requests, slots, committed, 8)
            held, grew = tracemalloc.get_traced_memory()[1] - before, table.free_pages < free
            if i >= WARM_UP:
                most[grew] = max(most[grew], held)
        tracemalloc.stop()
    assert peaks[256][False] - peaks[4][False] < 252, "less than a byte a row"
    assert peaks[256][True] - peaks[4][True] <= lengths_list(256) - lengths_list(4)


def test_the_measure_sees_what_naive_bookkeeping_makes() -> None:
    held = {}
    for rows in (16, 32):
        engine = steady_engine(rows)
        with naive_host(engine):
            held[rows] = traced(engine, 40).least()
    assert held[32] - held[16] >= 16 * 32, "an integer object or more for each of the other rows"


# -- tensors ----------------------------------------------------------------------------------------------------------------------------------


def planned(engine: Engine, steps: int, *, launch: bool) -> tuple[Operators, dict[str, int]]:
    """Torch operators and factory calls of planning ``steps`` steps, with launching them or without."""
    for _ in range(WARM_UP):
        step(engine)
    with counted() as factories, Operators() as operators:
        for _ in range(steps):
            batch = engine.scheduler.next_batch(STEPS)
            if launch:
                engine.launch(batch)
            engine.scheduler._committed += 1
    return operators, factories


def test_planning_100_steps_touches_no_tensor() -> None:
    operators, factories = planned(steady_engine(16), 100, launch=False)
    assert operators.made == operators.views == []
    assert set(factories.values()) == {0}


def test_launching_makes_no_tensor_but_a_fixed_number_of_views() -> None:
    views = {}
    for rows, steps in ((4, 100), (16, 100), (16, 200)):
        operators, factories = planned(steady_engine(rows), steps, launch=True)
        assert operators.made == [] and set(factories.values()) == {0}
        views[rows, steps] = len(operators.views)
    assert views[4, 100] == views[16, 100] == views[16, 200] / 2
    assert views[4, 100] <= 8 * 100


def test_the_counts_see_what_naive_bookkeeping_makes() -> None:
    engine = steady_engine(4)
    with naive_host(engine):
        operators, factories = planned(engine, 10, launch=False)
    assert factories["tensor"] >= 20 and len(operators.made) + len(operators.views) >= 100


def test_a_stubbed_step_still_counts_its_tokens() -> None:
    engine = steady_engine(4)
    rows = list(engine.scheduler.running)
    before = [len(r.output_ids) for r in rows]
    for _ in range(5):
        engine.step()
    drain(engine)
    assert [len(r.output_ids) - n for r, n in zip(rows, before, strict=True)] == [5] * 4
    assert all(r.output_ids[-5:] == [31] * 5 for r in rows)


# -- the allocator's short cuts ---------------------------------------------------------------------------------------------------------------


def request() -> Request:
    return Request(Prompt(index=0, id=0, token_ids=[1]), SamplingParams())


def test_a_batch_with_room_raises_the_watermark_of_a_request_it_has_not_seen() -> None:
    table = PageTable(3, 40, 20, PAGE, CPU)
    first, second = request(), request()
    slots, lengths = np.array([1, 2]), np.array([6, 3])
    assert table.alloc_for_spec_decode([first, second], slots, lengths, 2)
    stranger = request()
    assert table.alloc_for_spec_decode([first, stranger], slots, lengths, 1)
    assert (first.kv_allocated_len, stranger.kv_allocated_len) == (8, 8)


def test_a_request_that_comes_back_to_shared_pages_gets_its_watermark() -> None:
    table = PageTable(3, 40, 20, PAGE, CPU)
    source, row = request(), request()
    assert table.alloc_for_spec_decode([source], np.array([1]), np.array([16]), 0)
    assert table.alloc_for_spec_decode([row], np.array([2]), np.array([9]), 0)
    table.release(2)
    row.kv_allocated_len = 0
    table.share(1, 2, 3)
    assert table.alloc_for_spec_decode([row], np.array([2]), np.array([9]), 0)
    assert row.kv_allocated_len == 12
    table.check()


def test_unequal_numbers_are_a_defect_also_where_every_row_has_room() -> None:
    table = PageTable(3, 40, 20, PAGE, CPU)
    rows = [request(), request()]
    assert table.alloc_for_spec_decode(rows, np.array([1, 2]), np.array([5, 5]), 0)
    with pytest.raises(ValueError, match="zip"):
        table.alloc_for_spec_decode(rows, np.array([1]), np.array([5]), 0)


def test_no_rows_need_nothing() -> None:
    table = PageTable(3, 40, 20, PAGE, CPU)
    assert table.alloc_for_spec_decode([], np.array([], np.int64), np.array([], np.int64), 5)
    assert table.free_pages == 19


def test_a_row_longer_than_the_table_is_wide_is_a_defect() -> None:
    table = PageTable(3, 8, 20, PAGE, CPU)
    with pytest.raises(AssertionError, match="a row longer than the block table is wide"):
        table.alloc_for_spec_decode([request()], np.array([1]), np.array([9]), 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_device_holds_what_the_table_holds_after_every_upload(seed: int) -> None:
    """The device's table is stood in for by one of its own, so that only what is uploaded reaches it."""
    draw = random.Random(seed)
    page, rows = draw.choice([1, 2, 4]), 6
    table = PageTable(rows + 1, 24, 60, page, CPU)
    entries = table.table.size
    table._written = np.zeros(entries, np.int64)
    table._updates = BufferRing(2, entries + (entries + 1) // 2, dtype=torch.int64, device=CPU)
    table.device_table = torch.zeros_like(torch.from_numpy(table.table))
    live: dict[int, tuple[Request, int]] = {}
    for _ in range(60):
        free = [s for s in range(1, rows + 1) if s not in live]
        if free and draw.random() < 0.4:
            slot = draw.choice(free)
            row, length = request(), draw.randint(1, 9)
            if live and draw.random() < 0.4:
                source = draw.choice(sorted(live))
                table.share(source, slot, draw.randint(0, live[source][1] // page))
            if table.alloc_for_spec_decode([row], np.array([slot]), np.array([length]), 2):
                live[slot] = row, length
            else:
                table.release(slot)
        if live and draw.random() < 0.2:
            slot = draw.choice(sorted(live))
            table.release(slot)
            del live[slot]
        slots = sorted(live)
        longer = [min(live[s][1] + draw.randint(0, 3), 20) for s in slots]
        if table.alloc_for_spec_decode([live[s][0] for s in slots], np.array(slots, np.int64), np.array(longer, np.int64), 3):
            live = {s: (live[s][0], n) for s, n in zip(slots, longer, strict=True)}
        table.upload()
        table.check()
        for slot in slots:
            owned = int(table.allocated[slot]) // page
            assert table.device_table[slot, :owned].tolist() == table.table[slot, :owned].tolist()
        assert not table.device_table[0].any()
