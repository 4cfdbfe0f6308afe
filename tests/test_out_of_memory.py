"""A device that runs out of memory costs time, never a row: the batch is halved until a step fits, and every text and count stays what it was."""

from __future__ import annotations

import logging

import pytest
import torch

from specgen.errors import CapacityError
from specgen.types import SamplingParams
from tests.harness import drive, engine_of, requests_of

PROMPTS = [[1, 30 + i % 5, 10 + i % 7] for i in range(60)]


def limited(engine, fits: int, after: bool) -> None:
    """Let ``decode`` fail for more rows than ``fits``: before it does anything, or (``after``) when the device has already committed."""
    real = engine.device_step.decode

    def decode(slots, *arguments):
        if slots.shape[0] > fits and not after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        real(slots, *arguments)
        if slots.shape[0] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.device_step.decode = decode


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_rows_and_counts_survive_a_batch_that_does_not_fit(overlap: int, after: bool, temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=5, repetition_penalty=1.2, ignore_eos=True)
    options = {"steps": 3, "page": 4, "overlap": overlap}
    small = drive(engine_of("rand_target", "draft_model:rand_draft", batch=16, **options), requests_of(PROMPTS, sampling))
    engine = engine_of("rand_target", "draft_model:rand_draft", batch=60, **options)
    limited(engine, 16, after)
    with caplog.at_level(logging.WARNING, logger="specgen"):
        big = drive(engine, requests_of(PROMPTS, sampling))
    assert big.ids == small.ids
    assert big.finish == small.finish
    assert [c["committed"] - c["trimmed"] + c["prefill_sampled"] for c in big.counts] == [len(ids) for ids in big.ids]
    assert engine.batch_cuts == [30, 15]
    assert "ran out of memory with 60 rows" in caplog.text and "at most 15 rows at a time" in caplog.text
    engine.pages.check()


def test_a_step_of_one_row_that_does_not_fit_is_an_error_with_the_keys_to_lower() -> None:
    engine = engine_of("rand_target", None, batch=4)
    limited(engine, 0, False)
    with pytest.raises(CapacityError, match=r"engine\.memory_fraction"):
        drive(engine, requests_of(PROMPTS[:4], SamplingParams(max_tokens=4)))


def test_a_batch_larger_than_the_pool_has_pages_is_what_the_pool_can_hold() -> None:
    engine = engine_of("rand_target", None, batch=100_000_000, page=256, pages=40)
    assert engine.max_batch == engine.pages.num_pages - 1 == 39
    assert drive(engine, requests_of(PROMPTS[:4], SamplingParams(max_tokens=4))).finish == ["length"] * 4
