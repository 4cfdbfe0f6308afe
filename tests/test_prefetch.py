"""Weight prefetch changes nothing but when weights are asked for: each matmul's, once, right after the matmul before it."""

from __future__ import annotations

import pytest
import torch

from specgen.models import target as target_module
from specgen.models.target import FusedTarget
from specgen.types import Layout
from tests.harness import target_of


class Recorder:
    """Stands in for the side stream."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.Tensor]] = []
        self.joined = 0

    def start(self, name: str, weight: torch.Tensor) -> None:
        self.asked.append((name, weight))

    def join(self, device: torch.device) -> None:
        self.joined += 1


def test_each_weight_is_asked_for_once_in_the_order_of_use_and_the_states_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("rand_target")
    assert isinstance(target, FusedTarget)
    ids = torch.tensor([1, 5, 9], dtype=torch.int32)
    table = torch.arange(1, 5, dtype=torch.int32)[None]
    layout = Layout(torch.arange(3, dtype=torch.int32), torch.arange(4, 7), table, torch.zeros(1, dtype=torch.int32), 3, 8)
    plain = target.forward(ids, layout, target.make_pool(8, 4))
    recorder = Recorder()
    monkeypatch.setattr(target_module, "active", lambda prefetch, tokens: recorder)
    ahead = target.forward(ids, layout, target.make_pool(8, 4))
    assert torch.equal(plain.last, ahead.last)
    expected: list[tuple[str, torch.Tensor]] = []
    for index, layer in enumerate(target.layers):
        expected += [("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down)]
        last = index + 1 == target.num_layers
        expected.append(("head", target.lm_head_weight) if last else ("qkv", target.layers[index + 1].qkv))
    assert [name for name, _ in recorder.asked] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(recorder.asked, expected, strict=True))
    assert recorder.joined == 1
