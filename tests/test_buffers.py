"""Host and device buffers: one memory on a CPU device, slices that copy what was asked, rings that hand out each buffer in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specgen.engine.buffers import BufferRing, CpuGpuBuffer

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_on_a_cpu_device_all_sides_are_one_memory() -> None:
    buffer = CpuGpuBuffer(4, 3, dtype=torch.int32, device=CPU)
    assert buffer.gpu is buffer.cpu
    buffer.np[1, 2] = 7
    assert buffer.cpu[1, 2] == 7 and buffer.gpu[1, 2] == 7
    buffer.gpu[0, 0] = -3
    assert buffer.np[0, 0] == -3
    assert buffer.np.dtype == np.int32 and buffer.np.shape == (4, 3)


def test_buffers_start_at_zero() -> None:
    assert not CpuGpuBuffer(5, dtype=torch.int64, device=CPU).np.any()


def test_copy_to_gpu_returns_the_slice_it_sent() -> None:
    buffer = CpuGpuBuffer(4, 2, dtype=torch.float32, device=CPU)
    buffer.np[:] = np.arange(8).reshape(4, 2)
    part = buffer.copy_to_gpu(2)
    assert part.tolist() == [[0, 1], [2, 3]] and part.data_ptr() == buffer.gpu.data_ptr()
    assert buffer.copy_to_gpu() is buffer.gpu
    assert buffer.copy_to_gpu(0).shape == (0, 2)


def test_waiting_on_a_cpu_device_returns_at_once() -> None:
    buffer = CpuGpuBuffer(2, dtype=torch.int32, device=CPU)
    buffer.copy_to_cpu(1)
    buffer.copy_to_cpu()
    buffer.mark()
    buffer.wait()
    assert buffer.np.tolist() == [0, 0]


def test_fetch_brings_the_first_entries_of_a_device_tensor() -> None:
    buffer = CpuGpuBuffer(3, dtype=torch.int32, device=CPU)
    buffer.fetch(torch.tensor([5, 6, 7], dtype=torch.int32), 2)
    buffer.wait()
    assert buffer.np.tolist() == [5, 6, 0]


def test_bfloat16_is_refused_because_numpy_has_none() -> None:
    with pytest.raises(TypeError, match="NumPy has no bfloat16; use float32"):
        CpuGpuBuffer(2, dtype=torch.bfloat16, device=CPU)


def test_a_ring_hands_out_its_buffers_in_turn() -> None:
    ring = BufferRing(3, 2, dtype=torch.int32, device=CPU)
    taken = [ring.take() for _ in range(7)]
    assert taken[0] is taken[3] is taken[6] and taken[1] is taken[4] and taken[2] is taken[5]
    assert len({id(buffer) for buffer in taken}) == 3


def test_filling_one_buffer_of_a_ring_leaves_the_others() -> None:
    ring = BufferRing(2, 2, dtype=torch.int32, device=CPU)
    first, second = ring.take(), ring.take()
    first.np[:] = 9
    assert second.np.tolist() == [0, 0]


@pytest.mark.gpu
def test_on_cuda_the_host_side_is_pinned_and_a_slice_copy_moves_that_slice_only() -> None:
    buffer = CpuGpuBuffer(4, dtype=torch.int32, device=CUDA)
    assert buffer.cpu.is_pinned() and buffer.gpu.is_cuda
    buffer.np[:] = [1, 2, 3, 4]
    assert buffer.copy_to_gpu(2).tolist() == [1, 2]
    assert buffer.gpu.tolist() == [1, 2, 0, 0]
    buffer.gpu.fill_(8)
    buffer.copy_to_cpu(3)
    buffer.wait()
    assert buffer.np.tolist() == [8, 8, 8, 4]


@pytest.mark.gpu
def test_a_ring_does_not_hand_out_a_buffer_whose_copy_has_not_landed() -> None:
    ring = BufferRing(2, 1, dtype=torch.int64, device=CUDA)
    results = []
    for value in range(64):
        buffer = ring.take()
        buffer.np[0] = value
        torch.cuda._sleep(1_000_000)
        results.append(buffer.copy_to_gpu(1).clone())
    assert [int(r) for r in results] == list(range(64))
