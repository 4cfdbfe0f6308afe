"""Device time: marks are read when the device has passed them, nothing waits before it must, and the parts of a launch add up."""

from __future__ import annotations

import time

import pytest
import torch

from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.clock import DeviceClock, mark_of
from specgen.engine.engine import Engine
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Device:
    """A made-up device: ``now`` is the time its stream has reached; a mark is passed once ``done`` is at least the time it was made at."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.waits = 0

    def mark(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.done >= self.at

    def synchronize(self) -> None:
        self.device.waits += not self.query()
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, later: Mark) -> float:
        assert self.query() and later.query(), "a mark is read when it has been passed"
        return later.at - self.at


def launch(device: Device, clock: DeviceClock, decode_ms: float, prefill_ms: float) -> int:
    clock.begin()
    device.now += decode_ms
    if decode_ms and prefill_ms:
        clock.between()
    device.now += prefill_ms
    return clock.end(decode_ms > 0, prefill_ms > 0)


def test_the_parts_of_each_launch_are_summed_and_the_gaps_are_not() -> None:
    device = Device()
    clock = DeviceClock(3, device.mark)
    for decode_ms, prefill_ms in ((5, 0), (0, 7), (2, 11), (3, 0), (4, 0)):
        launch(device, clock, decode_ms, prefill_ms)
        device.now += 100
        device.done = device.now
        clock.collect()
    assert (clock.decode_s, clock.prefill_s, device.waits) == (0.014, 0.018, 0)


def test_a_launch_is_read_when_it_is_asked_for_and_the_later_ones_are_not_waited_for() -> None:
    device = Device()
    clock = DeviceClock(4, device.mark)
    numbers = [launch(device, clock, 10, 0) for _ in range(3)]
    device.done = 15
    assert clock.collect(numbers[0]) == clock.decode_s == 0.010
    assert clock.collect(numbers[0]) is None, "it was read before"
    device.done = 30
    assert clock.collect(numbers[2]) == 0.010
    assert clock.decode_s == 0.030 and device.waits == 0
    launch(device, clock, 10, 0)
    clock.collect()
    assert clock.decode_s == 0.040 and device.waits == 1


def test_a_mark_that_stands_at_the_end_already_is_taken_for_it() -> None:
    device = Device()
    clock, landed = DeviceClock(2, device.mark), [device.mark(), device.mark()]
    for place in range(4):
        clock.begin()
        device.now += 3
        landed[place % 2].record()
        device.now += 50
        clock.end(True, False, landed[place % 2])
    clock.collect()
    assert clock.decode_s == pytest.approx(0.012)


def test_a_caller_that_never_collects_waits_for_the_oldest_only() -> None:
    device = Device()
    clock = DeviceClock(2, device.mark)
    for _ in range(5):
        launch(device, clock, 1, 0)
    assert (clock.decode_s, device.waits) == (0.003, 3)
    clock.collect()
    assert clock.decode_s == 0.005


def test_a_launch_that_broke_off_or_is_left_out_counts_nothing() -> None:
    device = Device()
    clock = DeviceClock(2, device.mark)
    clock.begin()
    device.now += 50
    launch(device, clock, 3, 0)
    clock.collect()
    clock.begin()
    device.now += 70
    assert clock.collect(clock.end(False, False)) is None
    assert [clock.collect(launch(device, clock, *parts)) for parts in ((4, 0), (0, 5), (6, 7))] == [0.004, None, 0.006]
    assert (clock.decode_s, clock.prefill_s) == (pytest.approx(0.013), 0.012)


def test_on_a_cpu_a_mark_is_the_time_it_was_made() -> None:
    clock = DeviceClock(2, mark_of(torch.device("cpu")))
    clock.begin()
    time.sleep(0.02)
    clock.between()
    clock.end(True, True)
    clock.collect()
    assert 0.02 <= clock.decode_s < 0.2 and 0 <= clock.prefill_s < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_jobs_device_time_is_part_of_its_wall_time(device: str, overlap: str) -> None:
    model, draft = ModelConfig(dtype="float32", device=device), DraftConfig(method="eagle", num_steps=3)
    target = load_target(model, device, "float32")
    engine = Engine(target, load_drafter(draft, model, target), EngineConfig(max_batch=4, overlap=overlap, kv_memory_gb=0.05), draft)
    for _ in range(2):  # the second run compiles and captures nothing
        decode_s, prefill_s = engine.clock.decode_s, engine.clock.prefill_s
        begin = time.perf_counter()
        engine.run([Request(Prompt(i, i, [1, *range(40, 60 + i)], key=i), SamplingParams(max_tokens=48, ignore_eos=True)) for i in range(6)])
        engine.clock.collect()
        wall_s = time.perf_counter() - begin
    decode_s, prefill_s = engine.clock.decode_s - decode_s, engine.clock.prefill_s - prefill_s
    print(f"\n{device} overlap {overlap}: decode {decode_s:.4f} s, prefill {prefill_s:.4f} s of {wall_s:.4f} s")
    assert decode_s > 0 < prefill_s and 0.2 * wall_s < decode_s + prefill_s < wall_s
    engine.close()
