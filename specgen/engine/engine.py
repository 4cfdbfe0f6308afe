"""The engine: one step, launched on the device and retired on the host.

Boundary: joins target, drafter, scheduler and memory; knows nothing of files, datasets or reports. What is launched is tensor work only
(``engine.step``), read by the host when it is retired. ``step`` is the whole story; with ``overlap`` 1 the host retires step t-1 while step t runs.
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
from specgen.draft.base import Drafter
from specgen.draft.ring import StateRing
from specgen.draft.tree import IndexChecks
from specgen.engine.batch import Batch, Chunk
from specgen.engine.buffers import BufferRing
from specgen.engine.clock import DeviceClock, mark_of
from specgen.engine.endings import Endings
from specgen.engine.flight import InFlight, StepTimes, fetched, read
from specgen.engine.grammar import GrammarMasks
from specgen.engine.graphs import StepGraphs, bucket_of, context_of
from specgen.engine.law import LawState
from specgen.engine.memory import PageTable
from specgen.engine.pacing import Pacing
from specgen.engine.plan import Working, depths_of, max_batch_of, overlap_of, plan_pages, reserve, reserve_of
from specgen.engine.prefill import PrefillBuffers
from specgen.engine.rows import DeviceRows
from specgen.engine.sampling import features_of
from specgen.engine.scheduler import Scheduler
from specgen.engine.simulate import Simulation
from specgen.engine.step import DeviceStep
from specgen.engine.text import OutputText
from specgen.errors import CapacityError, ConfigError
from specgen.grammar_text import Rules
from specgen.kernels.reference_step import RESULT_COLUMNS
from specgen.models.target import Target
from specgen.types import Request

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
        self.target, self.drafter, self.config = target, drafter, engine
        self.device = target.device
        self.overlap = overlap_of(engine, self.device, grammar is not None)
        assert grammar is None or self.overlap == 0, "the masks of a step follow from the tokens of the step before"
        self.num_steps = drafter.num_steps
        self.vocab_limit = min(vocab_limit or target.vocab_size, target.vocab_size)
        self.max_length = target.max_length
        self._features_in_key, self._feature_key = frozenset[str](), tuple[str, ...]()  # of the graphs' keys, sorted when they change
        if logprobs is not None and logprobs > self.vocab_limit:
            raise ConfigError(f"sampling.logprobs={logprobs} is more than the {self.vocab_limit} ids the model can write")
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
        pool = target.make_pool(num_pages, page)
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
        self.batch_cuts: list[int] = []  # row limits after each time the device ran out of memory
        # One buffer a launch that the clock may have to read: the copy's event is the end of most launches.
        shape: tuple[int, ...] = (max_batch, RESULT_COLUMNS + self.num_steps + 1)
        self._results = BufferRing(self.overlap + 2, *shape, dtype=torch.int32, device=self.device, timing=True)
        self._result = torch.zeros(max_batch, RESULT_COLUMNS + self.num_steps + 1, dtype=torch.int32, device=self.device)
        self._scratch_slots = torch.zeros(max_batch, dtype=torch.int64, device=self.device)
        use_graphs = self.device.type == "cuda" and engine.cuda_graphs != "off"
        self.graphs = StepGraphs(self.device, working.graph if working is not None else 0) if use_graphs else None
        limit = self.max_length + self.reserve
        controller = AdaptiveController(self.num_steps)
        sizes = max_batch, limit, self._result.shape[1]
        self.pacing = Pacing(controller, drafter, self.graphs, *sizes, self.overlap) if adaptive else None
        self._first_results = BufferRing(self.overlap + 2, max_batch, 2, dtype=torch.int32, device=self.device)
        self._first_logprobs = self._logprobs = self._logprob_ring = None
        if logprobs is not None:
            shape = (max_batch, self.num_steps + 1, 1 + 2 * logprobs)
            self._logprobs = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._logprob_ring = BufferRing(self.overlap + 2, *shape, dtype=torch.int32, device=self.device)
            self._first_logprobs = BufferRing(self.overlap + 2, max_batch, 1, shape[2], dtype=torch.int32, device=self.device)
        self._prefill = PrefillBuffers(engine.prefill_tokens, max_batch, self.device)
        mean = draft.simulate_acceptance_length
        self.device_step = DeviceStep(
            target=target,
            drafter=drafter,
            rows=self.rows,
            law=self.law,
            pages=self.pages,
            pool=pool,
            ring=StateRing(*ring, self.max_length, self.device) if adaptive else None,
            grammar=self.grammar,
            checks=IndexChecks(self.device) if engine.check_indices else None,
            simulation=Simulation(mean, max_batch + 1, self.device) if mean is not None and self.num_steps else None,
            vocab_limit=self.vocab_limit,
            top=logprobs,
            logprobs=self._logprobs,
        )
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
            self.device_step.features |= features_of(sampling) | self.law.features

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
        self.device_step.close()

    # -- launch ---------------------------------------------------------------------------------------------------------------------------

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
            if batch.catch_up:
                self.device_step.catch_up(batch.slots[: len(batch.decode)], batch.max_len, batch.catch_up)
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
        steps, work = batch.num_steps, self.device_step
        if self.grammar is None:
            self._replayed(batch, (), lambda slots, max_len: work.decode(slots, steps, max_len, self._result))
            return
        # A grammar's masks depend on the draft, and the host makes them: two graphs, and one host read between them.
        draft, drafted = self._replayed(batch, ("propose",), lambda slots, max_len: work.propose(slots, steps, max_len)) if steps else (None, None)
        nodes = 1 if draft is None else draft.token_ids.shape[1] + 1
        self.grammar.decode_masks([request for _, request, _ in batch.decode], nodes, drafted)
        self._replayed(batch, ("finish",), lambda slots, max_len: work.finish(work.step_rows(slots, max_len), draft, self._result))

    def _replayed(self, batch: Batch, part: tuple[str, ...], step: Callable[[Tensor, int], T]) -> T:
        """``step`` (slots, key bound) of a batch, or of the ``part`` of a step: eager, or as a graph."""
        assert batch.slots is not None
        n = len(batch.decode)
        if self.graphs is None:
            return step(batch.slots[:n], batch.max_len)
        bucket, context = bucket_of(n, self.max_batch), context_of(batch.max_len, self.max_length + self.reserve)
        features = self.device_step.features
        if self._features_in_key != features:
            self._features_in_key, self._feature_key = features, tuple(sorted(features))
        key = (bucket, batch.num_steps, self._feature_key, context, *part)
        found = self.graphs.replay(key)
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        slots, scratch = batch.slots[:bucket], self._scratch_slots[:bucket]
        return self.graphs.run(key, lambda: step(slots, context), lambda: step(scratch, context))

    def _launch_prefill(self, chunks: list[Chunk], flight: InFlight) -> None:
        finals, work = [(i, c) for i, c in enumerate(chunks) if c.final], self.device_step
        staged = self._prefill.stage(chunks, finals, self.pages)
        layout, hidden = work.prefill(staged)
        next_ids, rows = staged.next_ids, None
        if finals:
            mask = None if self.grammar is None else self.grammar.first_masks([c.request for _, c in finals])
            next_ids, rows, result, first_logprobs = work.first_tokens(staged, hidden, mask)
            flight.finals = [(c.request, c.epoch) for _, c in finals]
            flight.prefill_result = fetched(self._first_results.take(), result, len(finals))
            if first_logprobs is not None and self._first_logprobs is not None:
                flight.prefill_logprobs = fetched(self._first_logprobs.take(), first_logprobs, len(finals))
        work.observe_prefill(staged, layout, hidden, next_ids, rows)

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
        checks = self.device_step.checks
        if checks is not None:
            checks.raise_if_any()  # waits for the device: the price of checking
        return done
