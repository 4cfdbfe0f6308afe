"""The host's side of a step: who runs, which prompt chunks go along, which pages they may write, and what a retired step means for each request.

Boundary: no tensor work beyond filling buffers and no model. Works from lengths that are ``overlap`` steps old; what the device decides in between
(acceptance, end of sequence) reaches it only through ``retire``.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch

from specgen.draft.base import Drafter
from specgen.engine.accounting import DEAD, FEW, fail, steps_of
from specgen.engine.batch import Batch, Chunk, tokens_known
from specgen.engine.buffers import BufferRing
from specgen.engine.endings import Endings
from specgen.engine.law import LawState, complaint
from specgen.engine.memory import PageTable, ceil_to_page
from specgen.engine.rows import DeviceRows
from specgen.engine.sampling import logprob_entries
from specgen.kernels.reference_step import ACCEPTED, CHILD_AT_END, DRAFT_DEPTH, FINISH, KEPT, NON_FINITE, RESULT_COLUMNS
from specgen.types import Prompt, Request, SamplingParams, step_code

SLOTS_A_SLOT = 16  # slots of which one may stay empty so that prompts are prefilled together
ROOM = 16  # tokens that rows may be thought to have grown by before their lengths are looked at again
MOST_HELD = 64  # steps that waiting requests are held back at the most
FULL_PREFILL = 256  # tokens from which on a prefill's time grows with them: on an H200 8 billion weights are read in the time of 150 tokens' products


class Scheduler:
    """Continuous batching with chunked prefill over a fixed set of slots."""

    def __init__(
        self,
        pages: PageTable,
        rows: DeviceRows,
        endings: Endings,
        *,
        max_batch: int,
        reserve: int,
        prefill_tokens: int,
        max_length: int,
        device: torch.device,
        law: LawState,
        vocab_limit: int,
        drafter: Drafter,
    ) -> None:
        self.pages, self.rows, self.endings, self.law, self.drafter = pages, rows, endings, law, drafter
        self.vocab_limit = vocab_limit
        self.max_batch, self.reserve, self.prefill_tokens, self.max_length = max_batch, reserve, prefill_tokens, max_length
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: list[Request] = []
        self.limit = max_batch  # rows that may hold slots at once; lowered when the device runs out of memory
        self.preemptions = 0
        self.prefilled_tokens = 0  # prompt tokens run through the models, over the engine's life
        self.decoded_tokens = 0  # tokens kept from decode steps, over the engine's life
        self._finished_early: list[Request] = []
        self._sound: SamplingParams | None = None  # the last parameters found sound
        self._free_slots = list(range(max_batch, 0, -1))
        self._committed = np.zeros(max_batch + 1, np.int64)
        self._committed_mem = memoryview(cast(Any, self._committed))  # the quickest way to write single numbers in a loop
        self._slot_array = np.zeros(max_batch, np.int64)
        self._committed_rows = np.zeros(max_batch, np.int64)
        self._counts = np.zeros(max_batch, np.int64)
        self._slot_ring = BufferRing(3, max_batch, dtype=torch.int64, device=device)
        # One device tensor for the engine's life: captured steps read it, and copies to it are ordered by the stream.
        self._device_slots = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._decode: tuple[tuple[int, Request, int], ...] = ()
        self._held = 0  # steps for which waiting requests have been held back
        self._reads = False  # whether one of them has to be read
        self._changed = True
        self._room = self._longest = 0  # tokens that every running row may grow by without a look at it, and a bound on the longest
        self._last = self._before = Batch()  # the last two planned

    # -- admission ------------------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot run at all is finished at once and comes back from the next ``step``."""
        prompt = len(request.prompt.token_ids)
        most = min(self.max_length, prompt + request.sampling.max_tokens)
        need = ceil_to_page(most + self.reserve, self.pages.page_size) // self.pages.page_size
        if request.sampling.max_tokens == 0:
            request.status, request.finish_reason = "finished", "length"
        elif prompt == 0 or prompt >= self.max_length:
            fail(request, "ContextError", f"a prompt of {prompt} tokens leaves no room to generate: 1 to {self.max_length - 1} fit model.max_length")
        elif request.sampling.stop and self.endings.text.tokenizer is None:
            fail(request, "ConfigError", "sampling.stop needs the model's tokenizer, and there is none: give sampling.stop_token_ids instead")
        elif (why := self._complaint(request)) is not None:
            fail(request, "ConfigError", why)
        elif need > self.pages.num_pages - 1:
            room = (self.pages.num_pages - 1) * self.pages.page_size
            fail(request, "CapacityError", f"the row may need {most + self.reserve} KV slots and the pool holds {room}: raise engine.kv_memory_gb")
        if request.done:
            self._finished_early.append(request)
        else:
            request.read = self.endings.on_host(request)
            self.waiting.append(request)

    def refusal(self, params: SamplingParams) -> str | None:
        """Why no row with these parameters can run, or None."""
        return self._complaint(Request(Prompt(index=0, id=0, key=0, token_ids=[]), params))

    def _complaint(self, request: Request) -> str | None:
        """Why a row's law cannot be applied. Most rows have the job's own parameters, the same object, which are looked at once."""
        if request.sampling is self._sound:
            return None
        stop_ids, grammar = self.endings.stop_ids(request), self.endings.grammar
        why = complaint(request.sampling, stop_ids, self.vocab_limit, self.law.vocab_size)
        if why is None and grammar is not None:
            why = grammar.complaint(request.sampling, stop_ids)
        if why is None:
            self._sound = request.sampling
        return why

    @property
    def has_work(self) -> bool:
        """True while anything is queued, in prefill or decoding."""
        return bool(self.waiting or self.prefilling or self.running or self._finished_early)

    @property
    def slots_wanted(self) -> int:
        """How many more requests could be queued usefully."""
        return max(0, 2 * self.max_batch - len(self.waiting))

    def take_finished_early(self) -> list[Request]:
        """Requests that ended without a step."""
        done, self._finished_early = self._finished_early, []
        return done

    def _worth_a_prefill(self) -> bool:
        """Whether waiting requests should be admitted now, or once more slots are free.

        A prefill of few tokens takes as long as one of ``FULL_PREFILL``: its weights are read once, and the host launches as much. So while others
        decode, short prompts wait until there are enough of them, or until one slot in ``SLOTS_A_SLOT`` is free, which costs less than it saves, but
        no longer than ``MOST_HELD`` steps.
        """
        free = min(len(self._free_slots), self.limit - len(self.running))
        worth = bool(self.prefilling) or not self.running or free >= max(1, self.limit // SLOTS_A_SLOT) or len(self.waiting) <= free
        worth = worth or self._held >= MOST_HELD or sum(map(tokens_known, islice(self.waiting, free))) >= FULL_PREFILL
        self._held = 0 if worth else self._held + 1
        return worth

    def _admit(self, budget: int) -> None:
        """Move waiting requests into free slots, in order; a sample whose prompt a sibling is still prefilling is passed over until that is done."""
        admitted: list[Request] = []
        passed: list[Request] = []
        while self.waiting and self._free_slots and budget > 0 and len(self.running) + len(self.prefilling) < self.limit:
            request = self.waiting[0]
            known, shared = tokens_known(request), self._shared_pages(request)
            sibling = self._sibling(request, shared) if shared else None
            if sibling is not None and sibling.prefill_pos < self._filled_at(shared):
                passed.append(self.waiting.popleft())
                continue
            if not self._place(request, known, sibling, shared if sibling is not None else 0):
                break
            self.waiting.popleft()
            self._committed[request.slot] = known
            self.prefilling.append(request)
            admitted.append(request)
            budget -= known - request.prefill_pos
        self.waiting.extendleft(reversed(passed))
        if admitted:
            stop_ids = [self.endings.stop_ids(r) for r in admitted]
            self.rows.admit(admitted, stop_ids)
            self.law.admit(admitted, stop_ids)

    def _place(self, request: Request, known: int, sibling: Request | None, shared: int) -> bool:
        """Give a request a slot and pages, the first ``shared`` of them its sibling's; False, having changed nothing, when there is no room."""
        slot, page = self._free_slots[-1], self.pages.page_size
        # Leave every decoding row room for a page, or the newcomer would be preempted at once.
        need = -(-(known + self.reserve) // page) - shared + len(self.running)
        if need > self.pages.free_pages and (self.running or self.prefilling):
            return False
        if sibling is not None:
            self.pages.share(sibling.slot, slot, shared)
        if not self.pages.alloc_for_spec_decode([request], np.array([slot]), np.array([known]), self.reserve):
            self.pages.release(slot)
            return False
        if sibling is not None:
            self.drafter.share(sibling.slot, slot, shared * page)
        self._free_slots.pop()
        request.slot, request.status, request.prefill_pos = slot, "prefill", shared * page
        return True

    def _shared_pages(self, request: Request) -> int:
        """How many pages the samples of this prompt have in common: the full ones before its last token, where a drafter's KV begins to depend on
        what was sampled."""
        if request.sampling.n == 1:
            return 0
        return max(0, len(request.prompt.token_ids) - 1 - self.drafter.tail) // self.pages.page_size

    def _filled_at(self, shared: int) -> int:
        """How many prompt tokens must have been launched before the first ``shared`` pages of a row hold all they will, the drafter's KV included."""
        return shared * self.pages.page_size + self.drafter.tail

    def _sibling(self, request: Request, shared: int) -> Request | None:
        """A sample of the same prompt that holds a slot: one whose shared pages have been launched, or else one still on its way there."""
        found = None
        for other in chain(self.running, self.prefilling):
            if other.prompt is request.prompt:
                if other.status == "running" or other.prefill_pos >= self._filled_at(shared):
                    return other
                found = other
        return found

    # -- one step's plan ------------------------------------------------------------------------------------------------------------------

    def next_batch(self, num_steps: int) -> Batch:
        """Plan one step: chunks under the token budget, decode rows, and pages for both."""
        batch = Batch(num_steps=num_steps)
        while self.running and not self._grow():
            # Rows that are still being prefilled have all their pages: the last decoding row may go, too, and waits for them.
            self._preempt(self.running[-1])
        budget = self.prefill_tokens
        if self.waiting and self._free_slots and self._worth_a_prefill():
            self._admit(budget - sum(tokens_known(r) - r.prefill_pos for r in self.prefilling))
        if self.prefilling:
            self._plan_chunks(batch, budget)
        if self.running:
            self._plan_decode(batch)
        if batch.chunks:
            # Rows whose prompt ends in this step decode from the next step on.
            for chunk in batch.chunks:
                if chunk.final:
                    self.prefilling.remove(chunk.request)
                    chunk.request.status = "running"
                    self.running.append(chunk.request)
                    self._changed = True
        self.pages.upload()
        self._before, self._last = self._last, batch
        return batch

    def _grow(self) -> bool:
        """Pages for the running rows; False when the pool has not enough. While the rows stay the same, room for several steps is not looked at in
        each: since the last call one step has been retired, one of the last two planned, and it committed num_steps + 1 tokens a row at the most."""
        most = 1 + max(self._last.num_steps, self._before.num_steps)
        if self._room >= most and not self._changed:
            self._room -= most
            self._longest += most
            return True
        n = len(self.running)
        if self._changed:
            for i, request in enumerate(self.running):
                self._slot_array[i] = request.slot
        slots = self._slot_array[:n]
        self._committed.take(slots, 0, self._committed_rows[:n], "clip")  # any other mode makes a hidden array
        done = self.pages.alloc_for_spec_decode(self.running, slots, self._committed_rows[:n], self.reserve, ahead=True)
        self._longest = int(np.maximum.reduce(self._committed_rows[:n]))
        self._room = self._room_left() if done else 0
        return done

    def _room_left(self) -> int:
        """Less than there is: the bound on the longest row grows by the most that a step can commit, and should stay near the truth."""
        return min(self.pages.slack, ROOM)

    def _plan_decode(self, batch: Batch) -> None:
        n = len(self.running)
        if self._changed:
            buffer = self._slot_ring.take()
            buffer.np[:n] = self._slot_array[:n]
            buffer.np[n:] = 0  # rows that pad a bucket are scratch
            self._device_slots.copy_(buffer.cpu, non_blocking=True)
            buffer.mark()
            self._decode = tuple((r.slot, r, r.epoch) for r in self.running)
            self._reads = any(r.read for r in self.running)
            self._changed = False
        batch.decode, batch.slots = self._decode, self._device_slots
        batch.max_len = min(self._longest, self.max_length) + self.reserve

    def _plan_chunks(self, batch: Batch, budget: int) -> None:
        for request in self.prefilling:
            if budget <= 0:
                break
            ids = request.prompt.token_ids if not request.output_ids else request.prompt.token_ids + request.output_ids
            chunk = Chunk(request, ids, request.prefill_pos, 0, request.epoch)
            chunk.end = min(chunk.known, chunk.start + budget)
            request.prefill_pos = chunk.end
            budget -= chunk.end - chunk.start
            self.prefilled_tokens += chunk.end - chunk.start
            batch.chunks.append(chunk)

    def _preempt(self, request: Request) -> None:
        """Give back a row's pages; it will prefill prompt + output[:-1] again and go on from its last token."""
        self.preemptions += 1
        (self.prefilling if request.status == "prefill" else self.running).remove(request)
        self._release(request)
        request.status, request.epoch = "waiting", request.epoch + 1
        self.waiting.appendleft(request)

    def cut(self) -> int:
        """Preempt every row and admit at most half as many from now on; returns the new limit, 0 when it was one row already.

        After a launch that broke off, the device may be ahead of what the host knows; beginning each row again from its known tokens is safe.
        """
        held = len(self.running) + len(self.prefilling)
        for request in [*reversed(self.running), *reversed(self.prefilling)]:
            self._preempt(request)
        self.limit = min(self.limit, held) // 2
        return self.limit

    def _release(self, request: Request) -> None:
        self.pages.release(request.slot)
        self._free_slots.append(request.slot)
        request.slot, request.kv_allocated_len = 0, 0
        self._changed = True

    # -- what a step meant ----------------------------------------------------------------------------------------------------------------

    def retire_prefill(self, finals: list[tuple[Request, int]], result: np.ndarray, logprobs: np.ndarray | None = None) -> list[Request]:
        """Take the sampled first tokens. result [F, 2] int32: token (-1: logits not finite), finish code. logprobs [F, 1, .], or None."""
        done = []
        for i, ((request, epoch), (token, finish)) in enumerate(zip(finals, result.tolist(), strict=True)):
            if request.done or request.epoch != epoch or request.output_ids:
                continue
            if finish != NON_FINITE:
                request.counts.prefill_sampled += 1
                request.output_ids.append(token)
                if logprobs is not None:
                    request.logprobs += logprob_entries(logprobs[i], [token])
            if self._settle(request, 0 if finish == NON_FINITE else 1, finish):
                done.append(request)
        return done

    def retire_decode(self, decode: tuple[tuple[int, Request, int], ...], result: np.ndarray, logprobs: np.ndarray | None = None) -> list[Request]:
        """Account one step for each of its rows. A row that ended or was preempted since the launch is dropped.

        Most rows go on, their endings known to the device: for them this is one pass of a few operations, and what the step was is counted later,
        with the row's other steps (``Request.counts``). result [n, 6 + S + 1] int32.
        """
        same = len(decode) > FEW and decode is self._decode and not self._changed
        if same and not (self._reads or logprobs is not None or result[:, FINISH].any()):
            self._append(decode, result)
            return []
        done, committed, total = [], self._committed_mem, 0
        for i, ((slot, request, epoch), (finish, accepted, code, tokens)) in enumerate(zip(decode, steps_of(result), strict=True)):
            if finish == DEAD or request.epoch != epoch or request.finish_reason is not None:
                continue
            count = kept = accepted + 1
            committed[slot] += count
            if finish:
                kept = int(result[i, KEPT])
            if count == 1 == kept:
                request.output_ids.append(tokens[0])
            else:
                request.output_ids += tokens[:kept]
            request.steps.append(code)
            total += kept
            if logprobs is not None:
                request.logprobs += logprob_entries(logprobs[i], tokens[:kept])
            if finish or request.read:
                request.counts.trimmed += count - kept
                if self._settle(request, kept, finish):
                    done.append(request)
        self.decoded_tokens += total
        return done

    def _append(self, decode: tuple[tuple[int, Request, int], ...], result: np.ndarray) -> None:
        """Account a step in which every row goes on: the rows in it are those that run now, and none has to be read."""
        n = len(decode)
        counts = self._counts[:n]
        np.add(result[:, ACCEPTED], 1, out=counts)
        self._committed[self._slot_array[:n]] += counts
        self.decoded_tokens += int(np.add.reduce(counts))
        codes = step_code(result[:, ACCEPTED], result[:, DRAFT_DEPTH], result[:, CHILD_AT_END]).tolist()
        if result.shape[1] == RESULT_COLUMNS + 1:
            for (_, request, _), code, token in zip(decode, codes, result[:, RESULT_COLUMNS].tolist(), strict=True):
                request.output_ids.append(token)
                request.steps.append(code)
        else:
            for (_, request, _), code, count, tokens in zip(decode, codes, counts.tolist(), result[:, RESULT_COLUMNS:].tolist(), strict=True):
                request.output_ids += tokens[:count]
                request.steps.append(code)

    def _settle(self, request: Request, new_tokens: int, finish: int) -> bool:
        """Apply a row's endings; release the row when it ended."""
        if not self.endings.apply(request, new_tokens, finish):
            return False
        request.status = "finished"
        self.running.remove(request)
        self._release(request)
        return True

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; steps in flight for it are ignored at retire."""
        if request.done:
            return
        if request.status == "waiting":
            self.waiting.remove(request)
        else:
            (self.prefilling if request.status == "prefill" else self.running).remove(request)
            self._release(request)
        request.status, request.finish_reason, request.epoch = "finished", "error", request.epoch + 1
        request.error = {"type": "Aborted", "message": "the request was aborted"}
