"""Next tokens, padded: the last valid token of a row or its backup, by a plain loop, in torch and in the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.kernels import next_token as kernel
from specgen.kernels import reference_tree as reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def by_hand(sampled: list[list[int]], discard: list[bool], backup: list[int], vocab: int) -> tuple[list[int], list[int]]:
    next_ids, counts = [], []
    for row, dropped, spare in zip(sampled, discard, backup, strict=True):
        valid = [] if dropped else [x for x in row if 0 <= x < vocab]
        next_ids.append(valid[-1] if valid else spare)
        counts.append(len(valid))
    return next_ids, counts


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[bool], list[int], int]:
    batch, width, vocab = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 12))
    ids = st.integers(-3, vocab + 2)
    sampled = draw(st.lists(st.lists(ids, min_size=width, max_size=width), min_size=batch, max_size=batch))
    discard = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    backup = draw(st.lists(st.integers(0, vocab - 1), min_size=batch, max_size=batch))
    return sampled, discard, backup, vocab


def check(op: object, case: tuple[list[list[int]], list[bool], list[int], int], device: str = "cpu") -> None:
    sampled, discard, backup, vocab = case
    tensors = torch.tensor(sampled, dtype=torch.int32), torch.tensor(discard), torch.tensor(backup, dtype=torch.int32)
    next_ids, counts = op(*(x.to(device) for x in tensors), vocab)  # type: ignore[operator]
    assert (next_ids.tolist(), counts.tolist()) == by_hand(*case)
    assert next_ids.dtype == counts.dtype == torch.int32


@given(batches())
@settings(max_examples=200, deadline=None)
def test_reference_equals_a_plain_loop(case: tuple[list[list[int]], list[bool], list[int], int]) -> None:
    check(reference.next_token_ids_padded, case)


@given(batches())
@settings(max_examples=60, deadline=None)
def test_kernel_equals_a_plain_loop(case: tuple[list[list[int]], list[bool], list[int], int]) -> None:
    check(kernel.next_token_ids_padded, case)


@pytest.mark.gpu
def test_kernel_on_a_gpu_equals_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 4, 7, 64):
        sampled = torch.randint(-2, 103, (300, width), generator=generator).tolist()
        discard = (torch.rand(300, generator=generator) < 0.2).tolist()
        check(kernel.next_token_ids_padded, (sampled, discard, list(range(300)), 101), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_an_unfinished_prompt_takes_its_backup_and_counts_nothing(device: str) -> None:
    check(kernel.next_token_ids_padded, ([[5, 6, -1], [5, 6, -1]], [True, False], [77, 78], 100), device)


@pytest.mark.parametrize("device", DEVICES)
def test_negative_and_too_large_ids_are_not_tokens_wherever_they_stand(device: str) -> None:
    check(kernel.next_token_ids_padded, ([[-7, 3, 100, -1], [-1, -1, -1, -1], [100, 101, 5, 2]], [False] * 3, [1, 2, 3], 100), device)


def test_rows_of_a_wider_buffer_need_no_copy() -> None:
    wide = torch.tensor([[4, 9, -1, 99, 99], [8, -1, -1, 99, 99]], dtype=torch.int32)
    got = kernel.next_token_ids_padded(wide[:, :3], torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32), 50)
    assert [x.tolist() for x in got] == [[9, 8], [2, 1]]
