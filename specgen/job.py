"""Drives an engine over a stream of prompts: samples, turns, completions.

Boundary: prompts in, completions out, in completion order. It opens no file and knows no configuration source; ``run.py`` writes what it yields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from specgen.config import Config
from specgen.data.prompts import next_turn
from specgen.engine.engine import Engine
from specgen.errors import SpecgenError
from specgen.types import Completion, Counts, Prompt, Request, SamplingParams

_END: Any = object()


@dataclass
class Turns:
    """The turns of one sample so far."""

    done: list[dict[str, Any]] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    output_tokens: int = 0


@dataclass
class Totals:
    """Running figures of one pass, for the progress bar and the statistics. ``first_token_s``, ``first_decode_s``: from the first prompt read to the
    first token and to the first decode step's tokens known to the host, in seconds."""

    rows: int = 0
    errors: int = 0
    output_tokens: int = 0
    accepted: int = 0
    verify_steps: int = 0
    started: float = 0.0
    ended: float = 0.0
    first_token_s: float | None = None
    first_decode_s: float | None = None


class Job:
    """One pass over the prompts with one engine."""

    def __init__(self, engine: Engine, config: Config, tokenizer: Any | None, job_params: SamplingParams) -> None:
        self.engine, self.config, self.tokenizer, self.job_params = engine, config, tokenizer, job_params
        self.totals = Totals()
        self.stopped = False  # ``stop`` ended the pass before its time
        self._turns: dict[int, Turns] = {}
        self._queue: list[Completion] = []

    def run(
        self,
        prompts: Iterator[Prompt],
        skip: Callable[[Prompt, int], bool] = lambda prompt, sample: False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Completion]:
        """Yield completions as they end.

        ``skip`` says which (prompt, sample) an earlier start finished. ``stop`` is asked after every step and every row read, and may do small work
        of its own there; once it is true, what is in flight is dropped. A fault of the whole input is raised after the rows before it have ended.
        """
        engine, fault = self.engine, None
        self.totals.started = self.totals.ended = time.perf_counter()
        samples: Iterator[tuple[Prompt, int] | None] | None = self._samples(prompts, skip)
        while samples is not None or engine.has_work:
            room, tokens = self._room()
            while samples is not None and room > 0 and tokens > 0:
                try:
                    item = next(samples, _END)  # type: ignore[arg-type]
                except SpecgenError as error:
                    item, fault = _END, error
                if item is _END:
                    samples = None
                    break
                if item is not None:
                    self.submit(*item)
                    room, tokens = room - 1, tokens - _prefill(*item)
                    yield from self.drain()
                if stop():
                    self.stopped = True
                    return
            if engine.has_work:
                self.step()
                yield from self.drain()
                if stop():
                    self.stopped = True
                    return
        if fault is not None:
            raise fault

    def _room(self) -> tuple[int, int]:
        """How many samples, and of how many prompt tokens, may be read before the next step.

        Tokens for two prefills, since reading on would only keep the device waiting; samples, because those that end at once (errors, max_tokens 0)
        take no slot. Decided by counts, never by the clock, so that the same job makes the same batches each time.
        """
        scheduler = self.engine.scheduler
        return scheduler.slots_wanted, 2 * scheduler.prefill_tokens - sum(_prefill(r.prompt, r.sample) for r in scheduler.waiting)

    @staticmethod
    def _samples(prompts: Iterator[Prompt], skip: Callable[[Prompt, int], bool]) -> Iterator[tuple[Prompt, int] | None]:
        """Every (prompt, sample) that is to run, one at a time, for a row may ask for millions; None for each that an earlier start finished."""
        for prompt in prompts:
            for sample in range(1 if prompt.error is not None else prompt.sampling.n):
                yield None if skip(prompt, sample) else (prompt, sample)

    def submit(self, prompt: Prompt, sample: int) -> Request | None:
        """Queue one sample of a prompt; None for a row that cannot run, whose error row is drained next."""
        if prompt.error is not None:
            self._queue.append(self._error_row(prompt, sample, prompt.error))
            return None
        request = Request(prompt=prompt, sampling=prompt.sampling, sample=sample)
        self.engine.add(request)
        return request

    def step(self) -> None:
        """One step of the engine; what ended is drained next."""
        done = self.engine.step()
        if self.totals.first_token_s is None and any(r.output_ids for r in chain(done, self.engine.scheduler.running)):
            self.totals.first_token_s = time.perf_counter() - self.totals.started
        if self.totals.first_decode_s is None and self.engine.scheduler.decoded_tokens:
            self.totals.first_decode_s = time.perf_counter() - self.totals.started
        for request in done:
            self._finish(request)

    def drain(self) -> Iterator[Completion]:
        """The rows that have ended since the last call, counted in ``totals``."""
        ended, self._queue = self._queue, []
        for completion in ended:
            totals, counts = self.totals, completion.counts
            totals.rows += 1
            totals.errors += completion.finish_reason == "error"
            totals.output_tokens += completion.output_tokens
            totals.accepted += sum(counts.accepted)
            totals.verify_steps += counts.verify_steps
            totals.ended = time.perf_counter()
            yield completion

    def abort(self, index: int) -> None:
        """Drop every unfinished sample of the prompt with this index."""
        scheduler = self.engine.scheduler
        for request in [r for r in chain(scheduler.waiting, scheduler.prefilling, scheduler.running) if r.prompt.index == index]:
            self.engine.abort(request)
            self._turns.pop(id(request), None)

    # -- one request's end ----------------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        """Turn a finished request into a row, or into the request of its next turn."""
        prompt = request.prompt
        if prompt.form != "turns":
            self._queue.append(self._row(request, None))
            return
        turns = self._turns.pop(id(request), None) or Turns()
        text = self.engine.text.final(request)
        if request.finish_reason != "error":
            turns.done.append(
                {
                    "prompt_tokens": len(prompt.token_ids),
                    "text": text,
                    "token_ids": list(request.output_ids),
                    "finish_reason": request.finish_reason,
                    "counts": request.counts,
                }
            )
        turns.counts.append(request.counts)
        turns.output_tokens += len(request.output_ids)
        following = None
        if request.finish_reason != "error":
            following = next_turn(
                prompt, text, self.tokenizer, self.config.data, max_length=self.engine.max_length, vocab_size=self.engine.target.vocab_size
            )
        if following is None:
            self._queue.append(self._row(request, turns))
        elif following.error is not None:
            completion = self._row(request, turns)
            completion.finish_reason, completion.stop_reason, completion.error = "error", None, following.error
            self._queue.append(completion)
        else:
            request = Request(prompt=following, sampling=request.sampling, sample=request.sample, noise_offset=turns.output_tokens)
            self._turns[id(request)] = turns
            self.engine.add(request)

    def _row(self, request: Request, turns: Turns | None) -> Completion:
        prompt = request.prompt
        counts = request.counts if turns is None else _sum(turns.counts)
        error = None
        if request.error is not None:
            error = {"type": request.error["type"], "message": f"row index {prompt.index}: {request.error['message']}"}
        output = self.config.output
        return Completion(
            id=prompt.id,
            sample=request.sample,
            index=prompt.index,
            prompt=prompt.text,
            text=self.engine.text.final(request),
            token_ids=list(request.output_ids),
            finish_reason=request.finish_reason or "error",
            stop_reason=request.stop_reason,
            error=error,
            prompt_tokens=len(prompt.token_ids),
            output_tokens=len(request.output_ids) if turns is None else turns.output_tokens,
            counts=counts,
            meta=prompt.meta,
            sampling=self._differing(request.sampling),
            simulated=self.config.draft.simulate_acceptance_length is not None,
            turns=None if turns is None else turns.done,
            provenance=[_origin(p) for p in request.provenance] if output.provenance else None,
            logprobs=request.logprobs if self.config.sampling.logprobs is not None else None,
            prompt_token_ids=list(prompt.token_ids) if output.prompt_token_ids else None,
            category=prompt.category,
        )

    def _error_row(self, prompt: Prompt, sample: int, error: dict[str, str]) -> Completion:
        return Completion(
            id=prompt.id,
            sample=sample,
            index=prompt.index,
            prompt=prompt.text,
            text="",
            token_ids=[],
            finish_reason="error",
            stop_reason=None,
            error=error,
            prompt_tokens=len(prompt.token_ids),
            output_tokens=0,
            counts=Counts(),
            meta=prompt.meta,
            category=prompt.category,
        )

    def _differing(self, params: SamplingParams) -> dict[str, Any] | None:
        if params == self.job_params:
            return None
        shown = asdict(params)
        shown["logit_bias"] = {str(token): value for token, value in params.logit_bias}
        return shown


def _prefill(prompt: Prompt, sample: int) -> int:
    """Prompt tokens a sample adds to the prefill; the further samples of a prompt share its pages."""
    return len(prompt.token_ids) if sample == 0 else 0


def _origin(code: int) -> dict[str, Any]:
    """A token's provenance: from the prefill, drafted at a depth, or the bonus token of a step."""
    if code < 0:
        return {"from": "prefill"}
    return {"from": "draft", "depth": code} if code else {"from": "bonus"}


def _sum(parts: list[Counts]) -> Counts:
    total = Counts()
    for part in parts:
        for name in ("prefill_sampled", "verify_steps", "steps_without_draft", "committed", "trimmed"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("proposed", "reached", "accepted"):
            ours, theirs = getattr(total, name), getattr(part, name)
            ours.extend([0] * (len(theirs) - len(ours)))
            for depth, value in enumerate(theirs):
                ours[depth] += value
    return total


def without_draft(config: Config) -> Config:
    """The same job decoded plainly."""
    return replace(config, draft=replace(config.draft, method="none", path=None, adaptive=False, simulate_acceptance_length=None))
