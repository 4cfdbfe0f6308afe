"""Host work of a step: next-token inputs, watermarks, page allocation, and a whole step's bookkeeping with the device stubbed out.

Boundary: the host's side alone; kernels are timed elsewhere and models are not run. The naive way is what one writes first: lists, arrays and tensors
made anew at every step, and numbers read one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.registry import Row, Settings, benchmark, row
from benchmarks.timing import Call, Sample, host_times, no_collection
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.batch import Batch
from specgen.engine.buffers import BufferRing
from specgen.engine.engine import Engine
from specgen.engine.memory import PageTable, ceil_to_page, raise_watermarks
from specgen.engine.scheduler import Scheduler
from specgen.kernels import ops, reference_tree
from specgen.kernels.reference_step import RESULT_COLUMNS
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams

VOCAB, WIDTH, PAGE, RESERVE = 128_256, 4, 16, 8
SLEEP_CYCLES = 400_000  # about 0.2 ms of an H200
STEP_TOKENS = 3  # committed by a row in each stubbed step


def requests_like(count: int, prompt_tokens: int = 128, max_tokens: int = 1 << 20) -> list[Request]:
    """Requests of random prompts, half of each prefilled."""
    ids = torch.randint(4, 4000, (count, prompt_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(Prompt(index=i, id=i, key=i, token_ids=line), params, prefill_pos=prompt_tokens // 2) for i, line in enumerate(ids)]


# -- next tokens ------------------------------------------------------------------------------------------------------------------------------


def compared(naive: Sample, ours: Sample) -> dict[str, float]:
    """Two medians and their ratio."""
    return {"naive_us": naive.us, "ours_us": ours.us, "ratio": naive.us / ours.us}


class NextTokens:
    """Inputs of one preparation, and the ways of making them. A backup is the prompt token at ``prefill_pos``."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.requests, self.count, self.device = requests_like(count), count, device
        self.sampled = torch.randint(-1, VOCAB, (count, WIDTH), dtype=torch.int32).to(device)
        self.discard = (torch.arange(count) % 4 == 3).to(device)
        self.ring = BufferRing(2, max(64, count), dtype=torch.int32, device=device)

    def naive_inputs(self) -> Tensor:
        return torch.tensor(np.array([r.prompt.token_ids[r.prefill_pos] for r in self.requests], np.int32)).to(self.device)

    def loop(self) -> Tensor:
        buffer = self.ring.take()
        memory = buffer.mem
        for i, request in enumerate(self.requests):
            memory[i] = request.prompt.token_ids[request.prefill_pos]
        return buffer.copy_to_gpu(self.count)

    def array_loop(self) -> Tensor:
        buffer = self.ring.take()
        array = buffer.np
        for i, request in enumerate(self.requests):
            array[i] = request.prompt.token_ids[request.prefill_pos]
        return buffer.copy_to_gpu(self.count)

    def fromiter(self) -> Tensor:
        buffer = self.ring.take()
        buffer.np[: self.count] = np.fromiter((r.prompt.token_ids[r.prefill_pos] for r in self.requests), np.int32, self.count)
        return buffer.copy_to_gpu(self.count)

    def slice_assignment(self) -> Tensor:
        buffer = self.ring.take()
        buffer.np[: self.count] = [r.prompt.token_ids[r.prefill_pos] for r in self.requests]
        return buffer.copy_to_gpu(self.count)

    def naive(self) -> tuple[Tensor, Tensor]:
        return reference_tree.next_token_ids_padded(self.sampled, self.discard, self.naive_inputs(), VOCAB)

    def ours(self) -> tuple[Tensor, Tensor]:
        return ops.next_token_ids_padded(self.sampled, self.discard, self.loop(), VOCAB)


@benchmark
def next_token_prep(settings: Settings) -> Iterator[Row]:
    """Next-token preparation, host time: a list, an array and a tensor sent to the device, then torch operators, against backup tokens written in
    place into a pinned buffer, one asynchronous copy and one kernel.

    ``inputs``: the same without what follows the copy (on a CPU device what follows is the same torch code on both sides). ``done``: until the device
    has finished. ``busy``: host time while earlier work, of 0.2 ms or so, still runs on the device, as it does in a step.
    ``alternatives_us``: ways of filling the pinned buffer, copy included; ours is ``loop``.
    """
    for count in (1, 4, 16, 64):
        case = NextTokens(count, settings.device)
        for theirs, ours in zip(case.naive(), case.ours(), strict=True):
            assert torch.equal(theirs, ours)
        calls: dict[str, Call] = {"naive": case.naive, "ours": case.ours}
        ways: dict[str, Call] = {
            "naive": case.naive_inputs,
            "loop": case.loop,
            "array_loop": case.array_loop,
            "fromiter": case.fromiter,
            "slice_assignment": case.slice_assignment,
        }
        whole = host_times(calls, settings.repeats, settings.device)
        done = host_times(calls, settings.repeats, settings.device, until_done=True)
        inputs = host_times(ways, settings.repeats, settings.device)
        naive = inputs.pop("naive")
        more = {}
        if settings.cuda:
            busy = host_times(calls, settings.repeats // 4, settings.device, load=lambda: torch.cuda._sleep(SLEEP_CYCLES))
            more["busy"] = compared(busy["naive"], busy["ours"])
        yield row(
            "next_token_prep",
            {"requests": count},
            whole["naive"],
            whole["ours"],
            inputs=compared(naive, inputs["loop"]),
            done=compared(done["naive"], done["ours"]),
            alternatives_us={name: sample.us for name, sample in inputs.items()},
            **more,
        )


# -- watermarks and pages ---------------------------------------------------------------------------------------------------------------------


def naive_watermarks(requests: Sequence[Request], lengths: Tensor) -> None:
    """Raise watermarks by reading a tensor one number at a time."""
    for i, request in enumerate(requests):
        request.kv_allocated_len = max(request.kv_allocated_len, int(lengths[i]))


@benchmark
def kv_watermark(settings: Settings) -> Iterator[Row]:
    """KV watermarks after an allocation: ``int(tensor[i])`` for each request, against one ``.tolist()`` and a strict ``zip``.

    Every call raises every watermark.
    """
    for count in (1, 4, 16, 64, 256):
        requests = requests_like(count, 4)
        lengths = np.full(count, 1000, np.int64)
        tensor = torch.from_numpy(lengths)

        def longer(lengths: np.ndarray = lengths) -> None:
            lengths += PAGE

        calls: dict[str, Call] = {
            "naive": lambda requests=requests, tensor=tensor: naive_watermarks(requests, tensor),
            "ours": lambda requests=requests, lengths=lengths: raise_watermarks(requests, lengths),
        }
        times = host_times(calls, settings.repeats, settings.device, before=longer)
        yield row("kv_watermark", {"requests": count}, times["naive"], times["ours"])


def naive_alloc(pages: PageTable, requests: Sequence[Request], slots: np.ndarray, committed: np.ndarray, reserve: int, ahead: bool = False) -> bool:
    """``PageTable.alloc_for_spec_decode`` row by row and page by page, with the new lengths in a tensor of their own; never ahead."""
    page = pages.page_size
    lengths = torch.tensor(np.array([ceil_to_page(int(c) + reserve, page) for c in committed]))
    need = [max(0, int(lengths[i]) - int(pages.allocated[s])) // page for i, s in enumerate(slots)]
    if sum(need) > pages.free_pages:
        return False
    for i, slot in enumerate(slots):
        for _ in range(need[i]):
            entry = int(slot) * pages.width + int(pages.allocated[slot]) // page
            pages._give(np.array([entry]), np.array([pages._free[pages._num_free - 1]]), 1)
            pages.allocated[slot] += page
    pages._raised = None
    naive_watermarks(requests, torch.tensor(np.array([pages.allocated[s] for s in slots])))
    return True


class Growing:
    """A page table whose rows all commit ``STEP_TOKENS`` more at every call, from lengths spread over a page; it starts again when it is full."""

    def __init__(self, count: int, tokens: int = 4096) -> None:
        self.count, self.tokens = count, tokens
        self.slots = np.arange(1, count + 1)
        self.start()

    def start(self) -> None:
        self.pages = PageTable(self.count + 1, self.tokens, self.count * self.tokens // PAGE + 1, PAGE, torch.device("cpu"))
        self.requests = requests_like(self.count, 4)
        self.committed = np.arange(self.count) % PAGE + 100
        assert self.pages.alloc_for_spec_decode(self.requests, self.slots, self.committed, RESERVE)

    def grow(self) -> None:
        self.committed += STEP_TOKENS
        if self.committed.max() + RESERVE > self.tokens:
            self.start()

    def naive(self) -> None:
        assert naive_alloc(self.pages, self.requests, self.slots, self.committed, RESERVE)

    def ours(self) -> None:
        assert self.pages.alloc_for_spec_decode(self.requests, self.slots, self.committed, RESERVE)


@benchmark
def kv_alloc(settings: Settings) -> Iterator[Row]:
    """Pages and watermarks of a whole batch for one decode step: row by row, against ``alloc_for_spec_decode``; with every row in its capacity, and
    with every row 3 tokens longer at each call."""
    for count in (1, 8, 64, 256):
        for grows in (False, True):
            mine, theirs = Growing(count), Growing(count)

            def longer(mine: Growing = mine, theirs: Growing = theirs) -> None:
                mine.grow()
                theirs.grow()

            calls: dict[str, Call] = {"naive": theirs.naive, "ours": mine.ours}
            times = host_times(calls, settings.repeats, torch.device("cpu"), before=longer if grows else None)
            mine.pages.check()
            theirs.pages.check()
            yield row("kv_alloc", {"requests": count, "grows": grows}, times["naive"], times["ours"])


# -- a whole step -----------------------------------------------------------------------------------------------------------------------------


def naive_plan(scheduler: Scheduler, batch: Batch) -> None:
    """``Scheduler._plan_decode`` with the rows listed, and slots and lengths made into tensors and sent, at every step."""
    slots = torch.tensor(np.array([r.slot for r in scheduler.running])).to(scheduler._device_slots.device)
    lengths = torch.tensor(np.array([int(scheduler._committed[r.slot]) for r in scheduler.running])).to(slots.device)
    scheduler._device_slots.zero_()
    scheduler._device_slots[: len(slots)].copy_(slots)
    batch.decode = tuple((r.slot, r, r.epoch) for r in scheduler.running)
    batch.slots = scheduler._device_slots
    batch.max_len = max(int(scheduler._committed[r.slot]) for r in scheduler.running) + scheduler.reserve
    scheduler._changed = False
    assert len(lengths) == len(slots)


@contextmanager
def naive_host(engine: Engine) -> Iterator[None]:
    """The engine with page allocation and planning done the naive way."""
    pages, scheduler = engine.pages, engine.scheduler
    scheduler._room = 0
    with ExitStack() as stack:
        stack.enter_context(patch.object(scheduler, "_room_left", lambda: 0))
        stack.enter_context(patch.object(pages, "alloc_for_spec_decode", lambda *args, **options: naive_alloc(pages, *args, **options)))
        stack.enter_context(patch.object(scheduler, "_plan_decode", lambda batch: naive_plan(scheduler, batch)))
        yield


def embedded_engine(batch: int, device: torch.device, **options: Any) -> Engine:
    """The embedded target with its EAGLE-3 drafter, three steps, acceptance imposed at 3 tokens a step."""
    model = ModelConfig(device=str(device))
    target = load_target(model, device)
    draft = DraftConfig(method="eagle3", num_steps=3, simulate_acceptance_length=float(STEP_TOKENS))
    return Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=batch, **options), draft)


def start(engine: Engine, requests: list[Request]) -> None:
    """Prefill all requests and take one decode step, so that every one is a decode row and nothing is in flight."""
    for request in requests:
        engine.add(request)
    while any(request.status != "running" or len(request.output_ids) < 2 for request in requests):
        assert not engine.step()
    drain(engine)


def drain(engine: Engine) -> None:
    """Retire what is in flight."""
    while engine.in_flight:
        engine.retire(engine.in_flight.popleft())


def stub_device(engine: Engine, count: int) -> None:
    """Every later step of ``count`` rows finds its result already there: 2 drafts accepted of 3, all 3 tokens kept, no row ends."""
    result = torch.zeros(count, RESULT_COLUMNS + engine.num_steps + 1, dtype=torch.int32, device=engine.device)
    result[:] = torch.tensor([1, 2, 3, 0, 3, 1, 11, 12, 13, -1], dtype=torch.int32)
    target = engine._result[:count]
    engine.device_step.decode = lambda *_, **__: target.copy_(result)  # type: ignore[method-assign,assignment]


def host_steps(engine: Engine, steps: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of ``next_batch`` and of ``retire`` in each step; the results of a step are there before it is retired."""
    planned, retired = [], []
    clock = time.perf_counter_ns
    for _ in range(steps):
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        a = clock()
        batch = engine.scheduler.next_batch(engine.num_steps)
        b = clock()
        flight = engine.launch(batch)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        c = clock()
        done = engine.retire(flight)
        d = clock()
        assert not done
        planned.append(b - a)
        retired.append(d - c)
    return planned, retired


@benchmark
def decode_host_time(settings: Settings) -> Iterator[Row]:
    """Host time of a steady decode step, planning and retiring, with the device stubbed: each row commits 3 tokens a step and takes pages as it
    grows. Naive: allocation row by row, slots and lengths as new tensors; retiring is the same code on both sides.
    """
    steps = max(10, min(250, settings.repeats))
    for count in (1, 8, 64, 256):
        found: dict[str, tuple[list[int], list[int]]] = {}
        for name in ("naive", "ours"):
            engine = embedded_engine(count, settings.device, cuda_graphs="off", overlap="0")
            start(engine, requests_like(count, 8))
            stub_device(engine, count)
            with no_collection(), ExitStack() as stack:
                if name == "naive":
                    stack.enter_context(naive_host(engine))
                host_steps(engine, 10)
                found[name] = host_steps(engine, steps)
            engine.pages.check()
            engine.close()
        totals = {name: Sample.of([a + b for a, b in zip(*times, strict=True)]) for name, times in found.items()}
        more = {f"{name}_{part}_us": Sample.of(times[i]).us for name, times in found.items() for i, part in enumerate(("plan", "retire"))}
        yield row("decode_host_time", {"batch": count}, totals["naive"], totals["ours"], **more)
