"""Pages: conserved, reference-counted, allocated for a whole batch or not at all, with watermarks that never fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specgen.draft.base import StepRows
from specgen.engine.memory import AHEAD, PageTable, ceil_to_page, spec_reserve
from specgen.errors import CapacityError
from specgen.types import Layout, Prompt, Request, SamplingParams
from tests.harness import drive, engine_of, requests_of, run
from tests.oracles import endless_text
from tests.toys import expected_rand

CPU = torch.device("cpu")


def request() -> Request:
    return Request(Prompt(index=0, id=0, token_ids=[1]), SamplingParams())


def table_of(rows: int = 4, tokens: int = 40, pages: int = 12, page: int = 4) -> PageTable:
    return PageTable(rows, tokens, pages, page, CPU)


def alloc(table: PageTable, slots: list[int], lengths: list[int], reserve: int = 0) -> tuple[bool, list[Request]]:
    requests = [request() for _ in slots]
    return table.alloc_for_spec_decode(requests, np.array(slots), np.array(lengths), reserve), requests


class Pages(RuleBasedStateMachine):
    """Rows come, grow, share prefixes, are preempted and end, in any order; a plain model says what each must hold."""

    @initialize(pages=st.one_of(st.integers(2, 14), st.sampled_from([60, 130])), page=st.sampled_from([1, 2, 4]))
    def start(self, pages: int, page: int) -> None:
        self.rows, self.page, self.max_tokens = 5, page, 24
        self.table = PageTable(self.rows + 1, self.max_tokens, pages, page, CPU)
        self.length: dict[int, int] = {}
        self.request: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.watermark: dict[int, int] = {}

    def snapshot(self) -> tuple[Any, ...]:
        t = self.table
        marks = [(r.kv_allocated_len, r.slot) for r in self.request.values()]
        return t.table.tolist(), t.refcount.tolist(), t.allocated.tolist(), t.free_pages, marks

    def grow(self, slots: list[int], lengths: list[int], reserve: int, ahead: bool = False) -> bool:
        before = self.snapshot()
        had, free = self.table.allocated.copy(), self.table.free_pages
        want = {s: max(int(self.table.allocated[s]), ceil_to_page(n + reserve, self.page)) for s, n in zip(slots, lengths, strict=True)}
        need = sum(want[s] - int(self.table.allocated[s]) for s in slots) // self.page
        fits = need <= self.table.free_pages
        requests = [self.request[s] for s in slots]
        done = self.table.alloc_for_spec_decode(requests, np.array(slots, np.int64), np.array(lengths, np.int64), reserve, ahead)
        assert done == fits
        if not done:
            assert self.snapshot() == before
            return False
        if ahead and need:
            assert self.table.slack == min(int(self.table.allocated[s]) - n - reserve for s, n in zip(slots, lengths, strict=True))
        if ahead and any(self.table.allocated[s] > want[s] for s in slots):
            assert need and self.table.free_pages >= len(slots), "what is given ahead leaves a page for every row"
            many = 2 * (free - need - AHEAD * len(slots)) >= self.table.num_pages
            assert not many or 2 * self.table.free_pages >= self.table.num_pages
            pages, border = (AHEAD, AHEAD // 2) if many else (1, 1)
            for slot, length in zip(slots, lengths, strict=True):
                given = int(self.table.allocated[slot])
                room = int(had[slot]) - length - reserve
                most = min(int(had[slot]) + pages * self.page, self.table.width * self.page)
                assert given == (max(want[slot], most) if room < border * self.page else want[slot])
                want[slot] = given
        for slot in slots:
            assert self.table.allocated[slot] == want[slot]
            assert self.request[slot].kv_allocated_len == max(self.watermark[slot], want[slot])
            self.watermark[slot] = self.request[slot].kv_allocated_len
        return True

    @precondition(lambda self: len(self.request) < self.rows)
    @rule(length=st.integers(1, 20), reserve=st.integers(0, 4))
    def admit(self, length: int, reserve: int) -> None:
        slot = min(set(range(1, self.rows + 1)) - set(self.request))
        self.request[slot] = self.waiting.pop() if self.waiting else request()
        self.watermark[slot] = self.request[slot].kv_allocated_len
        if self.grow([slot], [length], reserve):
            self.length[slot] = length
        else:
            del self.request[slot], self.watermark[slot]

    @precondition(lambda self: self.request)
    @rule(data=st.data(), reserve=st.integers(0, 6), ahead=st.booleans())
    def decode(self, data: st.DataObject, reserve: int, ahead: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.request)), min_size=1, unique=True))
        lengths = [min(self.length[s] + data.draw(st.integers(0, 5)), self.max_tokens - reserve) for s in slots]
        if self.grow(slots, lengths, reserve, ahead):
            self.length.update(zip(slots, lengths, strict=True))

    @precondition(lambda self: self.request and len(self.request) < self.rows)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.request)))
        target = min(set(range(1, self.rows + 1)) - set(self.request))
        pages = data.draw(st.integers(0, int(self.table.allocated[source]) // self.page))
        free = self.table.free_pages
        self.table.share(source, target, pages)
        assert self.table.free_pages == free, "sharing takes no page"
        assert self.table.table[target, :pages].tolist() == self.table.table[source, :pages].tolist()
        self.request[target], self.length[target], self.watermark[target] = request(), pages * self.page, 0

    @precondition(lambda self: self.request)
    @rule(data=st.data(), preempted=st.booleans())
    def end(self, data: st.DataObject, preempted: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.request)))
        alone = sum(int(self.table.refcount[p]) == 1 for p in self.table.table[slot, : int(self.table.allocated[slot]) // self.page])
        free = self.table.free_pages
        self.table.release(slot)
        assert self.table.free_pages == free + alone, "a page comes back when its last row lets go"
        assert self.table.allocated[slot] == 0 and not self.table.table[slot].any()
        ended = self.request.pop(slot)
        del self.length[slot], self.watermark[slot]
        if preempted:
            ended.kv_allocated_len = 0
            self.waiting.append(ended)

    @rule(reserve=st.integers(0, 3))
    def a_batch_with_one_row_too_large_changes_nothing(self, reserve: int) -> None:
        slots = sorted(self.request)
        if slots:
            lengths = [self.length[s] for s in slots[:-1]] + [(self.table.num_pages + 1) * self.page]
            before = self.snapshot()
            assert not self.table.alloc_for_spec_decode([self.request[s] for s in slots], np.array(slots), np.array(lengths), reserve)
            assert self.snapshot() == before

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "table"):
            self.table.check()
            assert not self.table.table[0].any(), "slot 0 owns nothing"
            held = {int(p) for s in self.request for p in self.table.table[s, : int(self.table.allocated[s]) // self.page]}
            assert len(held) + self.table.free_pages + 1 == self.table.num_pages


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_capacity_is_rounded_up_to_whole_pages_and_the_watermark_with_it() -> None:
    table = table_of()
    done, (a, b) = alloc(table, [1, 2], [5, 9], reserve=3)
    assert done and table.allocated[1:3].tolist() == [8, 12]
    assert (a.kv_allocated_len, b.kv_allocated_len) == (8, 12)
    assert table.table[1, :3].tolist() == [1, 2, 0] and table.table[2, :4].tolist() == [3, 4, 5, 0]
    assert table.free_pages == 11 - 5


def test_watermarks_never_fall_though_a_batch_asks_for_less() -> None:
    table = table_of()
    row = request()
    assert table.alloc_for_spec_decode([row], np.array([1]), np.array([17]), 3)
    assert table.alloc_for_spec_decode([row], np.array([1]), np.array([2]), 0)
    assert row.kv_allocated_len == 20 and table.allocated[1] == 20


def test_one_row_too_many_leaves_every_row_as_it_was() -> None:
    table = table_of(pages=6)
    assert alloc(table, [1], [8])[0]
    before = table.table.copy(), table.refcount.copy(), table.allocated.copy(), table.free_pages
    done, requests = alloc(table, [1, 2, 3], [9, 4, 8])
    assert not done and [r.kv_allocated_len for r in requests] == [0, 0, 0]
    assert (table.table == before[0]).all() and (table.refcount == before[1]).all() and (table.allocated == before[2]).all()
    assert table.free_pages == before[3]


def test_requests_and_lengths_of_unequal_number_are_a_defect() -> None:
    with pytest.raises(ValueError, match="zip"):
        table_of().alloc_for_spec_decode([request()], np.array([1, 2]), np.array([4, 4]), 0)


def test_a_shared_page_is_freed_by_its_last_row_only() -> None:
    table = table_of()
    alloc(table, [1], [12])
    table.share(1, 2, 2)
    assert table.refcount[1:4].tolist() == [2, 2, 1]
    assert alloc(table, [2], [12])[0]
    assert table.table[2, :3].tolist() == [1, 2, 4], "new pages are its own"
    table.release(1)
    assert table.free_pages == 11 - 3 and table.refcount[1:5].tolist() == [1, 1, 0, 1]
    table.release(2)
    assert table.free_pages == 11
    table.check()


def test_sharing_into_a_row_that_owns_pages_is_a_defect() -> None:
    table = table_of()
    alloc(table, [1, 2], [8, 4])
    with pytest.raises(AssertionError):
        table.share(1, 2, 1)


@given(tokens=st.integers(0, 5000), page=st.integers(1, 300))
def test_ceil_to_page_is_the_least_multiple_that_holds_the_tokens(tokens: int, page: int) -> None:
    rounded = ceil_to_page(tokens, page)
    assert rounded % page == 0 and rounded - page < tokens <= rounded


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "slots", "lead", "overlap", "reserve"),
    [
        ([3], 1, [4], [3], 1, 0, 5),  # a draft model's chain: D = 4 nodes, and one ahead
        ([3], 1, [4], [3], 1, 1, 9),
        ([5], 4, [21], [20], 0, 0, 21),  # a tree: D above S x K
        ([5], 4, [9], [20], 0, 1, 40),  # few nodes verified: the drafter's S x K slots decide
        ([4], 1, [5], [16], 0, 0, 16),  # a block drafter touches its whole block
        ([0], 1, [1], [0], 0, 1, 2),  # plain decoding
        ([1, 3, 8], 2, [3, 7, 17], [2, 6, 16], 0, 1, 34),  # every S the job may use
    ],
)
def test_the_reserve_covers_every_step_the_host_does_not_know_of(
    steps: list[int], topk: int, nodes: list[int], slots: list[int], lead: int, overlap: int, reserve: int
) -> None:
    assert spec_reserve(steps, topk, nodes, slots, lead, overlap) == reserve


# -- the engine's use of pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "topk", "steps", "nodes"),
    [
        ("draft_model:rand_draft", 1, 5, None),
        ("draft_model:rand_draft", 4, 3, 5),
        ("draft_model:rand_draft", 2, 3, None),
        ("eagle:eagle1_perfect", 3, 2, None),
        (None, 1, 1, None),
    ],
)
@pytest.mark.parametrize("overlap", [0, 1])
def test_live_rows_write_only_pages_of_their_own(
    draft: str | None, topk: int, steps: int, nodes: int | None, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("rand_target", draft, topk=topk, steps=steps, nodes=nodes, page=2, overlap=overlap, batch=4)
    place, written = StepRows.place, []

    def placed(rows: StepRows, q_len: int, **where: Any) -> Layout:
        layout = place(rows, q_len, **where)
        count = where.get("count")
        pages = (layout.slots // rows.page_size).view(-1, q_len)
        for row, slot in enumerate(rows.slots.tolist()):
            wanted = q_len if count is None else int(count[row])
            own = set(engine.pages.table[slot, : int(engine.pages.allocated[slot]) // rows.page_size].tolist())
            if slot:
                assert set(pages[row, :wanted].tolist()) <= own
                assert (engine.pages.refcount[pages[row, :wanted].numpy()] == 1).all()
                written.append(wanted)
            assert not pages[row, wanted if slot else 0 :].any(), "what is masked or dead goes to scratch"
        return layout

    monkeypatch.setattr(StepRows, "place", placed)
    rows = expected_rand()[:6]
    result = drive(engine, requests_of([r["prompt_ids"] for r in rows], SamplingParams(max_tokens=20)))
    assert result.ids == [r["greedy_32"][:20] for r in rows]
    assert len(written) > 100


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("pages", [23, None])
@pytest.mark.parametrize(("draft", "topk"), [("draft_model:draft_perfect", 1), ("draft_model:draft_never", 2)])
def test_a_row_holds_no_more_than_its_length_and_the_reserve(draft: str, topk: int, pages: int | None, overlap: int) -> None:
    """And where half of the pool is free, ``AHEAD`` pages: of 23 that is never so."""
    engine = engine_of("target", draft, topk=topk, steps=4, page=4, overlap=overlap, pages=pages)
    ahead = 0 if pages else 4 * AHEAD
    (row,) = requests_of([[30]], SamplingParams(max_tokens=60))
    engine.add(row)
    mark = 0
    while engine.has_work:
        engine.step()
        if row.slot:
            assert mark <= row.kv_allocated_len <= ceil_to_page(1 + len(row.output_ids) + engine.reserve, 4) + ahead
            assert row.kv_allocated_len == engine.pages.allocated[row.slot]
            mark = row.kv_allocated_len
    assert mark >= 60 and row.output_ids == endless_text([30], 60)


def test_a_pool_that_holds_no_page_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"the KV pool's budget of \d\S* GiB holds no page of \d+ bytes: raise engine\.kv_memory_gb"):
        engine_of("target", pages=1)


def test_the_pool_is_never_larger_than_every_slot_at_full_length() -> None:
    engine = engine_of("target_ctx32", "draft_model:draft_perfect", batch=3, page=16)
    assert engine.pages.num_pages == 3 * -(-(32 + engine.reserve) // 16) + 1


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_that_can_never_fit_is_an_error_and_the_others_run(overlap: int) -> None:
    prompts = [[30], [30] * 40, [40]]
    result = run("target", "draft_model:draft_perfect", prompts, page=4, pages=9, overlap=overlap, max_tokens=12)
    assert result.finish == ["length", "error", "length"]
    assert result.ids == [endless_text([30], 12), [], endless_text([40], 12)]
    slots = 52 + result.engine.reserve
    assert result.requests[1].error == {
        "type": "CapacityError",
        "message": f"the row may need {slots} KV slots and the pool holds 32: raise engine.kv_memory_gb",
    }
