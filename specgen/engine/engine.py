"""The engine: one step, launched on the device and retired on the host.

Boundary: joins target, drafter, scheduler and memory; knows nothing of files, datasets or reports. ``launch`` holds tensor work only: no
data-dependent
shape, no host read. ``step`` is the whole story; with ``overlap`` 1 the host retires step t-1 while step t runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from specgen.config import DraftConfig, EngineConfig
from specgen.draft.adaptive import AdaptiveController
from specgen.draft.base import AcceptedRows, Drafter, PrefillRows, StepRows
from specgen.draft.ring import StateRing
from specgen.draft.tree import IndexChecks, detect_oob, draft_depth
from specgen.engine.batch import Batch, Chunk
from specgen.engine.buffers import BufferRing
from specgen.engine.clock import DeviceClock, mark_of
from specgen.engine.endings import Endings
from specgen.engine.flight import InFlight, StepTimes, fetched, read
from specgen.engine.grammar import GrammarMasks, packed
from specgen.engine.graphs import StepGraphs, bucket_of, context_of
from specgen.engine.law import MIN_TOKENS, LawState
from specgen.engine.memory import PageTable
from specgen.engine.pacing import Pacing
from specgen.engine.plan import Working, depths_of, max_batch_of, overlap_of, plan_pages, reserve, reserve_of
from specgen.engine.prefill import PrefillBuffers, StagedPrefill
from specgen.engine.rejection import draw_or_reject
from specgen.engine.rows import DeviceRows
from specgen.engine.sampling import adjust, draw, features_of, first_sampling, logprobs, step_sampling
from specgen.engine.scheduler import Scheduler
from specgen.engine.simulate import Simulation, impose_path
from specgen.engine.text import OutputText
from specgen.errors import CapacityError, ConfigError
from specgen.grammar_text import Rules
from specgen.kernels import ops
from specgen.kernels.reference_step import RESULT_COLUMNS, Keep, kept_and_finish
from specgen.models.target import Target
from specgen.types import Draft, Layout, Request

MOVES = frozenset({"sampled", MIN_TOKENS})  # features that look at a row's output length
log = logging.getLogger("specgen")
T = TypeVar("T")


class Engine:
    """Continuous batching with speculative decoding over one target and one drafter on one device."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        engine: EngineConfig,
        draft: DraftConfig,
        *,
        tokenizer: Any | None = None,
        skip_special_tokens: bool = True,
        vocab_limit: int | None = None,
        logprobs: int | None = None,
        acceptance: str = "invariant",
        grammar: Rules | None = None,
        working: Working | None = None,
    ) -> None:
        """``working``: what the engine takes of the device beside the KV pool (``engine.rehearsal``), where that is known."""
        self.target, self.drafter, self.config, self.draft = target, drafter, engine, draft
        self.device = target.device
        self.overlap = overlap_of(engine, self.device, grammar is not None)
        assert grammar is None or self.overlap == 0, "the masks of a step follow from the tokens of the step before"
        self.num_steps, self.topk = drafter.num_steps, drafter.topk
        self.vocab_limit = min(vocab_limit or target.vocab_size, target.vocab_size)
        self.max_length = target.max_length
        self.features: frozenset[str] = frozenset()
        self._features_in_key, self._feature_key = self.features, tuple[str, ...]()  # of the graphs' keys, sorted when they change
        if logprobs is not None and logprobs > self.vocab_limit:
            raise ConfigError(f"sampling.logprobs={logprobs} is more than the {self.vocab_limit} ids the model can write")
        self.top = logprobs
        self.tap: Callable[[Tensor], None] | None = None  # sees the logits of every draw (the lossless check; eager engines only)
        target.make_deterministic(engine.deterministic)
        max_batch = max_batch_of(engine, self.device)
        depths = depths_of(drafter, draft)
        adaptive = len(depths) > 1
        self.reserve = reserve_of(drafter, draft, self.overlap)
        ring = (max_batch + 1, drafter.states_read * target.hidden_size, target.dtype)
        page, most_nodes = engine.page_size, max(drafter.nodes(s) for s in depths)
        other_bytes = working.total if working is not None else StateRing.size(*ring) if adaptive else 0
        other_bytes += GrammarMasks.size(grammar, max_batch, most_nodes) if grammar is not None else 0
        page_bytes = page * (target.kv_bytes_per_token + drafter.kv_bytes_per_token())
        most = max_batch * (-(-(self.max_length + self.reserve) // page)) + 1
        num_pages = plan_pages(engine, self.device, page_bytes, most, other_bytes)
        if num_pages - 1 < max_batch:
            max_batch = num_pages - 1  # every row holds a page at least
            ring = (max_batch + 1, *ring[1:])
            log.info("at most %d rows at a time: the KV pool has no page for more", max_batch)
        self.pages = PageTable(max_batch + 1, self.max_length + self.reserve, num_pages, page, self.device)
        self.rows = DeviceRows(max_batch + 1, self.device)
        self.law = LawState(max_batch + 1, target.vocab_size, self.max_length, self.device)
        self.pool: Any = target.make_pool(num_pages, page)
        drafter.rejection = acceptance == "rejection"
        drafter.bind(max_batch + 1, num_pages, page, max_batch)
        self.text = OutputText(tokenizer, skip_special_tokens)
        self.grammar = None if grammar is None else GrammarMasks(grammar, self.vocab_limit, max_batch, most_nodes, self.device)
        self.scheduler = Scheduler(
            self.pages,
            self.rows,
            Endings(self.text, self.grammar, target.eos_ids),
            max_batch=max_batch,
            reserve=self.reserve,
            prefill_tokens=engine.prefill_tokens,
            max_length=self.max_length,
            device=self.device,
            law=self.law,
            vocab_limit=self.vocab_limit,
            drafter=drafter,
        )
        self.max_batch = max_batch
        self.in_flight: deque[InFlight] = deque()
        self.awaited: InFlight | None = None  # the last step that ``retire`` was given
        self.borders = 0  # begins and ends of ``step``: odd inside one
        self.times = StepTimes()
        self.clock = DeviceClock(self.overlap + 2, mark_of(self.device))
        self.checks = IndexChecks(self.device) if engine.check_indices else None
        self.batch_cuts: list[int] = []  # row limits after each time the device ran out of memory
        # One buffer a launch that the clock may have to read: the copy's event is the end of most launches.
        shape: tuple[int, ...] = (max_batch, RESULT_COLUMNS + self.num_steps + 1)
        self._results = BufferRing(self.overlap + 2, *shape, dtype=torch.int32, device=self.device, timing=True)
        self._result = torch.zeros(max_batch, RESULT_COLUMNS + self.num_steps + 1, dtype=torch.int32, device=self.device)
        self._scratch_slots = torch.zeros(max_batch, dtype=torch.int64, device=self.device)
        use_graphs = self.device.type == "cuda" and engine.cuda_graphs != "off"
        self.graphs = StepGraphs(self.device, working.graph if working is not None else 0) if use_graphs else None
        self.ring = StateRing(*ring, self.max_length, self.device) if adaptive else None
        limit = self.max_length + self.reserve
        controller = AdaptiveController(self.num_steps)
        sizes = max_batch, limit, self._result.shape[1]
        self.pacing = Pacing(controller, drafter, self.graphs, *sizes, self.overlap) if adaptive else None
        mean = draft.simulate_acceptance_length
        self.simulation = Simulation(mean, max_batch + 1, self.device) if mean is not None and self.num_steps else None
        self._first_results = BufferRing(self.overlap + 2, max_batch, 2, dtype=torch.int32, device=self.device)
        self._first_logprobs = self._logprobs = self._logprob_ring = None
        if logprobs is not None:
            shape = (max_batch, self.num_steps + 1, 1 + 2 * logprobs)
            self._logprobs = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._logprob_ring = BufferRing(self.overlap + 2, *shape, dtype=torch.int32, device=self.device)
            self._first_logprobs = BufferRing(self.overlap + 2, max_batch, 1, shape[2], dtype=torch.int32, device=self.device)
        self._prefill = PrefillBuffers(engine.prefill_tokens, max_batch, self.device)
        self._depths = torch.arange(self.num_steps + 1, dtype=torch.int32, device=self.device)
        if working is not None:
            reserve(working.eager, self.device)

    # -- the public verbs -----------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot run at all comes back, ended, from the next ``step``."""
        self.scheduler.add(request)
        if request.done:
            return
        with torch.inference_mode(False):  # what is made here may be written to in a later step that is outside that mode
            sampling = request.sampling if self.grammar is None else self.grammar.on_device(request.sampling)
            self.law.require(sampling, self.scheduler.endings.stop_ids(request))
            self.features |= features_of(sampling) | self.law.features

    def step(self) -> list[Request]:
        """Launch one step and retire the one ``overlap`` before it; returns the requests that ended."""
        self.borders += 1
        try:
            return self._step()
        finally:
            self.borders += 1

    def _step(self) -> list[Request]:
        done = self.scheduler.take_finished_early()
        start, before = time.perf_counter(), self.scheduler.decoded_tokens
        batch = self.scheduler.next_batch(self.num_steps)
        if self.pacing is not None and batch.decode:
            self.pacing.plan(batch)
        launched = bool(batch.decode or batch.chunks)
        if launched:
            flight = self._try_launch(batch)
            if flight is None:
                return done + self._cut_batch(batch)
            self.in_flight.append(flight)
            self.times.steps += 1
        if self.in_flight and (len(self.in_flight) > self.overlap or not launched):
            flight = self.in_flight.popleft()
            done += self.retire(flight)
            if self.pacing is not None:
                self.pacing.retired(flight, self.in_flight[-1] if self.in_flight else None, start)
            if flight.batch.decode and not flight.batch.chunks and batch.decode and not batch.chunks:
                seconds = time.perf_counter() - start
                self.times.step_ms.append(1000 * seconds)
                self.times.decode_seconds += seconds
                self.times.decode_tokens += self.scheduler.decoded_tokens - before
        return done

    def _try_launch(self, batch: Batch) -> InFlight | None:
        """Launch a step; None when the device has no memory for it."""
        try:
            return self.launch(batch)
        except torch.OutOfMemoryError as error:
            log.warning("the device ran out of memory with %d rows: %s", len(batch.decode) + len(batch.chunks), str(error).splitlines()[0])
        return None

    def _cut_batch(self, batch: Batch) -> list[Request]:
        """After a launch that ran out of memory: retire what is in flight, give the memory back, and go on with half the rows."""
        done: list[Request] = []
        while self.in_flight:
            flight = self.in_flight.popleft()
            done += self.retire(flight)
            if self.pacing is not None:
                self.pacing.retired(flight, None, 0.0)
        if self.pacing is not None and batch.decode:
            self.pacing.undo(batch)
        limit = self.scheduler.cut()
        if limit == 0:
            raise CapacityError("the device has no memory for a step of one row: lower engine.prefill_tokens or engine.memory_fraction")
        self.batch_cuts.append(limit)
        if self.graphs is not None:
            self.graphs.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning("going on with at most %d rows at a time", limit)
        return done

    def launched(self) -> list[InFlight]:
        """The steps whose results the device may still owe, oldest first. For another thread (``engine.watch``)."""
        return [flight for flight in (self.awaited, *self.in_flight) if flight is not None]

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a step is in flight."""
        return self.scheduler.has_work or bool(self.in_flight)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[Request]:
        """Run requests to their end; returns them in completion order."""
        for request in requests:
            self.add(request)
        done: list[Request] = []
        while self.has_work:
            done += self.step()
        return done

    def adaptive_report(self) -> list[dict[str, Any]]:
        """What adaptive speculation chose and why (``AdaptiveController.report``); empty where num_steps is fixed."""
        return [] if self.pacing is None else self.pacing.report()

    def abort(self, request: Request) -> None:
        """Drop a request."""
        self.scheduler.abort(request)
        if self.grammar is not None:
            self.grammar.release(request)

    def close(self) -> None:
        """Give back KV and drafter state; the target stays loaded."""
        self.in_flight.clear()
        self.awaited = None
        if self.graphs is not None:
            self.graphs.close()
        self.drafter.close()
        self.pool = self.ring = None

    # -- launch: tensors only -------------------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> InFlight:
        """Enqueue a step: decode rows, then prompt chunks, then the copies of their results. In inference mode, which a loop of steps enters once."""
        if torch.is_inference_mode_enabled():
            return self._launch(batch)
        with torch.inference_mode():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> InFlight:
        flight, begun = InFlight(batch, [], None, None), time.perf_counter()
        self.clock.begin()
        captured = self._capture_seconds
        if batch.decode and batch.slots is not None:
            buffer = self._results.take()
            if batch.catch_up and self.ring is not None:
                self.drafter.catch_up(self._step_rows(batch.slots[: len(batch.decode)], batch.max_len), self.ring, batch.catch_up)
            self._launch_decode(batch)
            n = len(batch.decode)
            flight.decode_result = fetched(buffer, self._result, n)
            if self._logprobs is not None and self._logprob_ring is not None:
                flight.decode_logprobs = fetched(self._logprob_ring.take(), self._logprobs, n)
        if batch.chunks:
            if batch.decode:
                self.clock.between()
            self._launch_prefill(batch.chunks, flight)
        flight.capture_s = self._capture_seconds - captured
        timed = not flight.capture_s  # capturing is the host's work
        alone = flight.decode_result if flight.decode_logprobs is None and not batch.chunks else None
        landed = None if alone is None or self.device.type != "cuda" else alone.event  # the copy of the results is the launch's end
        flight.launches = self.clock.end(timed and bool(batch.decode), timed and bool(batch.chunks), landed)
        if flight.decode_result is None and flight.prefill_result is None and self.device.type == "cuda":
            flight.marker = torch.cuda.Event()
            flight.marker.record()
        flight.launch_s = time.perf_counter() - begun
        return flight

    @property
    def _capture_seconds(self) -> float:
        return 0.0 if self.graphs is None else self.graphs.capture_seconds

    def _launch_decode(self, batch: Batch) -> None:
        """The decode step of a batch: eager on the exact rows, or the graph of its bucket, padded with scratch rows."""
        steps = batch.num_steps
        if self.grammar is None:
            self._replayed(batch, (), lambda slots, max_len: self.decode(slots, steps, max_len, self._result))
            return
        # A grammar's masks depend on the draft, and the host makes them: two graphs, and one host read between them.
        draft, drafted = self._replayed(batch, ("propose",), lambda slots, max_len: self._propose(slots, steps, max_len)) if steps else (None, None)
        nodes = 1 if draft is None else draft.token_ids.shape[1] + 1
        self.grammar.decode_masks([request for _, request, _ in batch.decode], nodes, drafted)
        self._replayed(batch, ("finish",), lambda slots, max_len: self._finish(self._step_rows(slots, max_len), draft, self._result))

    def _replayed(self, batch: Batch, part: tuple[str, ...], step: Callable[[Tensor, int], T]) -> T:
        """``step`` (slots, key bound) of a batch, or of the ``part`` of a step: eager, or as a graph."""
        assert batch.slots is not None
        n = len(batch.decode)
        if self.graphs is None:
            return step(batch.slots[:n], batch.max_len)
        bucket, context = bucket_of(n, self.max_batch), context_of(batch.max_len, self.max_length + self.reserve)
        if self._features_in_key != self.features:
            self._features_in_key, self._feature_key = self.features, tuple(sorted(self.features))
        key = (bucket, batch.num_steps, self._feature_key, context, *part)
        found = self.graphs.replay(key)
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        slots, scratch = batch.slots[:bucket], self._scratch_slots[:bucket]
        return self.graphs.run(key, lambda: step(slots, context), lambda: step(scratch, context))

    def _step_rows(self, slots: Tensor, max_len: int) -> StepRows:
        """Rows of the step; a dead row becomes slot 0, so that what it writes goes to scratch."""
        slots, ints, keys, floats, table = ops.begin_step(slots, self.rows.ints, self.rows.floats, self.pages.device_table)
        return StepRows(
            slots=slots,
            length=ints[1],
            root=ints[2],
            block_table=table,
            max_len=max_len,
            page_size=self.config.page_size,
            last_position=self.max_length - 1,
            sampling=step_sampling(self.rows, self.law, slots, ints, keys, floats, self.features, self.vocab_limit),
        )

    def decode(self, slots: Tensor, num_steps: int, max_len: int, result: Tensor) -> None:
        """Propose, verify, accept, commit, observe for ``slots`` [B] int64; results go to ``result`` [>= B, 6 + S + 1] int32."""
        self.target.tune(slots.shape[0] * self.drafter.nodes(num_steps))  # before the drafter, whose layers may have the same shapes
        rows = self._step_rows(slots, max_len)
        self._finish(rows, self.drafter.propose(rows, num_steps) if num_steps else None, result)

    def _propose(self, slots: Tensor, num_steps: int, max_len: int) -> tuple[Draft | None, Tensor | None]:
        """The first part of a step under a grammar: the draft, and what the host reads of it."""
        draft = self.drafter.propose(self._step_rows(slots, max_len), num_steps)
        return draft, None if draft is None else packed(draft)

    def _finish(self, rows: StepRows, draft: Draft | None, result: Tensor) -> None:
        """All of a step that follows the proposal."""
        hidden, logits, y = self._verify(rows, draft)
        keep = self.drafter.keep(rows, hidden, self.ring) if draft is None and self.ring is not None else None
        tokens, accepted, count, path = self._commit(rows, draft, y, result, keep)
        if self.checks is not None:
            self._check_step(rows, draft, tokens, accepted, path)
        self.law.count(rows.slots, tokens, count)
        if self._logprobs is not None and self.top is not None:
            self._logprobs[: tokens.shape[0], : tokens.shape[1]] = logprobs(logits, tokens, path, rows.sampling, self.top)
        if draft is None:
            return
        if path is not None:
            ops.compact_kv(self.pool.k, self.pool.v, rows.block_table, rows.length, path, accepted, rows.page_size)
        sampling = rows.sampling.moved(accepted + 1) if self.features & MOVES else rows.sampling
        self.drafter.observe(rows, AcceptedRows(tokens, path, accepted, count, hidden, draft.token_ids.shape[1] + 1, sampling))

    def _verify(self, rows: StepRows, draft: Draft | None) -> tuple[Any, Tensor, Tensor]:
        """The target over root and drafts: (hidden states of B x D nodes, their logits after steps 1 to 3 of f, y [B, D])."""
        tokens = rows.root[:, None] if draft is None else torch.cat([rows.root[:, None], draft.token_ids], 1)
        nodes = tokens.shape[1]
        depth = self._depths[:nodes] if draft is None or draft.depth is None else draft.depth
        where = {} if draft is None or draft.path is None else {"depth": draft.depth, "path": draft.path}
        layout = rows.place(nodes, **where)
        detect_oob(self.checks, "KV slots of the verify window", layout.slots, 0, self.pages.num_pages * self.pages.page_size)
        detect_oob(self.checks, "positions of the verify window", layout.positions, 0, self.max_length)
        hidden = self.target.forward(tokens.reshape(-1), layout, self.pool, self.drafter.aux_layers, self.drafter.prenorm)
        logits = self._tapped(self.target.logits(hidden.last))
        mask = None if self.grammar is None else self.grammar.device_masks(logits.shape[0])
        logits = adjust(logits, rows.sampling, depth, draft, mask)
        return hidden, logits, draw_or_reject(logits, rows.sampling, depth, draft)

    def _check_step(self, rows: StepRows, draft: Draft | None, tokens: Tensor, accepted: Tensor, path: Tensor | None) -> None:
        """Count every index of a step that lies outside its range (``engine.check_indices``); ``retire`` raises."""
        vocab, nodes = self.target.vocab_size, 1 if draft is None else draft.token_ids.shape[1] + 1
        detect_oob(self.checks, "root tokens", rows.root, 0, vocab)
        detect_oob(self.checks, "block table", rows.block_table, 0, self.pages.num_pages)
        detect_oob(self.checks, "lengths", rows.length, 0, self.max_length)
        detect_oob(self.checks, "committed tokens", tokens, 0, vocab)
        detect_oob(self.checks, "accepted lengths", accepted, 0, tokens.shape[1])
        detect_oob(self.checks, "accepted path", path, -1, nodes)
        if draft is not None:
            detect_oob(self.checks, "drafted tokens", draft.token_ids, 0, vocab)
            for name in ("parents", "path", "first_child", "next_sibling"):
                detect_oob(self.checks, f"draft {name}", getattr(draft, name), -1, nodes)

    def _tapped(self, logits: Tensor) -> Tensor:
        if self.tap is not None:
            self.tap(logits)
        return logits

    def _commit(
        self, rows: StepRows, draft: Draft | None, y: Tensor, result: Tensor, keep: Keep | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Accept, trim, advance the rows that go on and let the others die, on the device (``kernels.reference_step.finish_step``)."""
        common: dict[str, Any] = dict(max_length=self.max_length, result=result)
        if draft is None:
            return ops.finish_step(y, rows.slots, self.rows.ints, keep=keep, **common)
        imposed = None if self.simulation is None else self.simulation.lengths(rows.slots)
        if draft.path is None:
            return ops.finish_step(y, rows.slots, self.rows.ints, drafted=draft.token_ids, valid=draft.valid, imposed=imposed, **common)
        if imposed is not None:
            y = impose_path(draft, y, imposed)
        path, accepted, child = ops.tree_walk(draft.token_ids, draft.first_child, draft.next_sibling, y, draft.path.shape[2] - 1)
        if imposed is not None:
            accepted = torch.minimum(accepted, imposed)
        return ops.finish_step(y, rows.slots, self.rows.ints, walk=(path, accepted, child, draft_depth(draft)), **common)

    # -- prefill --------------------------------------------------------------------------------------------------------------------------

    def _launch_prefill(self, chunks: list[Chunk], flight: InFlight) -> None:
        finals = [(i, c) for i, c in enumerate(chunks) if c.final]
        staged = self._prefill.stage(chunks, finals, self.pages)
        layout = Layout(
            positions=staged.positions,
            slots=staged.slots,
            block_table=self.pages.device_table.index_select(0, staged.row_slots),
            length=staged.starts,
            q_len=staged.max_q,
            max_len=staged.max_len,
            cu_q=staged.cu_q,
        )
        hidden = self.target.forward(staged.ids, layout, self.pool, self.drafter.aux_layers, self.drafter.prenorm)
        next_ids, rows = staged.next_ids, None
        if finals:
            mask = None if self.grammar is None else self.grammar.first_masks([c.request for _, c in finals])
            next_ids, rows, result, first_logprobs = self._first_tokens(staged, hidden, mask)
            flight.finals = [(c.request, c.epoch) for _, c in finals]
            flight.prefill_result = fetched(self._first_results.take(), result, len(finals))
            if first_logprobs is not None and self._first_logprobs is not None:
                flight.prefill_logprobs = fetched(self._first_logprobs.take(), first_logprobs, len(finals))
        self.drafter.prefill(PrefillRows(staged.ids, next_ids, layout, hidden, staged.row_slots, staged.final_last if finals else None, rows))
        if self.ring is not None and rows is not None:
            self.ring.prefilled(rows.slots, rows.length)

    def _first_tokens(self, staged: StagedPrefill, hidden: Any, mask: Tensor | None) -> tuple[Tensor, StepRows, Tensor, Tensor | None]:
        """Sample the token after each prompt that ends here and bring its row to life: (next ids [T], rows [F], result [F, 2], log-probabilities)."""
        logits = self._tapped(self.target.logits(hidden.last.index_select(0, staged.final_last)))
        slots = staged.final_slots
        ints = self.rows.ints.index_select(0, slots)
        sampling = first_sampling(self.law, slots, ints, self.rows.floats.index_select(0, slots), self.features, self.vocab_limit)
        logits = adjust(logits, sampling, self._depths[:1], None, mask)
        sampled = draw(logits, sampling, self._depths[:1])
        # A resumed row samples nothing: its backup, the last token it had, is its root.
        root, count = ops.next_token_ids_padded(sampled, staged.discard, staged.backup, self.vocab_limit)
        fresh = ~staged.discard
        length = staged.final_lengths
        _, finish = kept_and_finish(sampled, torch.zeros_like(root), fresh, ints[:, 3], ints[:, 4], length - 1, self.max_length, ints[:, 9:])
        self.law.count(slots, sampled, fresh)
        first_logprobs = None if self.top is None else logprobs(logits, sampled, None, sampling, self.top)
        output_len = torch.where(fresh, 1, staged.output_lens)
        new = ints.clone()
        new[:, 0] = finish == 0
        new[:, 1] = length
        new[:, 2] = root
        new[:, 3] = output_len
        self.rows.ints.index_copy_(0, slots, new)
        next_ids = staged.next_ids.index_copy(0, staged.final_last, root)
        rows = StepRows(
            slots=slots,
            length=length,
            root=root,
            block_table=self.pages.device_table.index_select(0, slots),
            max_len=staged.max_len + 1,
            page_size=self.config.page_size,
            last_position=self.max_length - 1,
            sampling=sampling.moved(output_len),
        )
        return next_ids, rows, torch.stack([root * (count > 0) - (count == 0).int(), finish], 1), first_logprobs

    # -- retire: the host -----------------------------------------------------------------------------------------------------------------

    def retire(self, flight: InFlight) -> list[Request]:
        """Read a step's results, one step late when overlapped, and settle its rows."""
        self.awaited = flight
        done: list[Request] = []
        if flight.decode_result is not None:
            n, before = len(flight.batch.decode), time.perf_counter()
            flight.decode_result.wait()
            flight.waited_s = time.perf_counter() - before
            result = flight.decode_result.np[:n, : RESULT_COLUMNS + flight.batch.num_steps + 1]
            done += self.scheduler.retire_decode(flight.batch.decode, result, read(flight.decode_logprobs, n))
        if flight.prefill_result is not None:
            n = len(flight.finals)
            flight.prefill_result.wait()
            done += self.scheduler.retire_prefill(flight.finals, flight.prefill_result.np[:n], read(flight.prefill_logprobs, n))
        if flight.decode_result is not None or flight.prefill_result is not None:
            flight.decode_s = self.clock.collect(flight.launches)
        if self.grammar is not None:
            for request in done:
                self.grammar.release(request)
        if self.checks is not None:
            self.checks.raise_if_any()  # waits for the device: the price of checking
        return done
