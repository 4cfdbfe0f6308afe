"""Imposed acceptance measures a real step: it launches everything a real one launches, and commits the draft's tokens, then the target's.

On a CUDA device what is launched are kernels and copies, by the profiler; on a CPU the torch operators that make something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Operators
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine import step as step_module
from specgen.engine.engine import Engine
from specgen.engine.simulate import Simulation, impose_path
from specgen.kernels import ops
from specgen.kernels.reference_step import RESULT_COLUMNS
from specgen.models.loader import load_target
from specgen.models.target import Target
from specgen.types import Prompt, Request, SamplingParams

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
CHAIN = {"topk": 1, "num_steps": 4}
TREE = {"topk": 4, "num_steps": 3, "num_draft_tokens": 37}  # the whole tree, so that first children lead down to its depth
SHAPES = [pytest.param(CHAIN, id="chain"), pytest.param(TREE, id="tree")]
ROWS = 6


@cache
def target_on(device: str) -> Target:
    return load_target(ModelConfig(dtype="float32", device=device), device, "float32")


def engine_on(device: str, shape: dict[str, int], mean: float | None, graphs: str = "off") -> Engine:
    model, draft = ModelConfig(dtype="float32", device=device), DraftConfig(method="eagle", simulate_acceptance_length=mean, **shape)
    target = target_on(device)
    config = EngineConfig(max_batch=ROWS, overlap="0", cuda_graphs=graphs, kv_memory_gb=0.05)
    return Engine(target, load_drafter(draft, model, target), config, draft)


def requests(max_tokens: int = 30) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [[1, *range(40 + 3 * i, 52 + 3 * i)] for i in range(ROWS)]
    return [Request(Prompt(index=i, id=i, key=i, token_ids=ids), params) for i, ids in enumerate(prompts)]


def launched(call: Callable[[], Any], device: str) -> Counter[str]:
    """What one call, in inference mode as the engine's own, launches, by name."""
    call = torch.inference_mode()(call)
    if device == "cpu":
        with Operators() as seen:
            call()
        return Counter(seen.made)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return Counter(event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def first_decode_step(engine: Engine, device: str) -> Counter[str]:
    """What the first decode step of the rows launches, after a run that compiled everything: both kinds of engine are then at the same lengths."""
    engine.run(requests())
    launched(lambda: torch.zeros(1, device=device), device)  # a profiler's first trace may begin late
    rows = requests()
    for request in rows:
        engine.add(request)
    engine.step()
    assert all(request.status == "running" and len(request.output_ids) == 1 for request in rows)
    found = launched(engine.step, device)
    assert all(len(request.output_ids) > 1 for request in rows)
    return found


class Recorder:
    """Keeps the arguments of a module's function while the block runs."""

    def __init__(self, module: Any, name: str) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        real = getattr(module, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            self.calls.append((arguments, options))
            return real(*arguments, **options)

        self._patch = patch.object(module, name, recorded)

    @property
    def last(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.calls[-1]

    def __enter__(self) -> Recorder:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_simulated_step_launches_all_that_a_real_one_does(device: str, shape: dict[str, int]) -> None:
    real = first_decode_step(engine_on(device, shape, None), device)
    assert sum(real.values()) > 50
    with Recorder(step_module, "impose_path") as paths, Recorder(ops, "finish_step") as finishes:
        simulated = first_decode_step(engine_on(device, shape, 3.0), device)
    assert real - simulated == Counter(), "a real step launches something that a simulated one leaves out"
    more = simulated - real
    print(f"\n{device} {shape}: {sum(real.values())} launches, {sum(more.values())} more when simulated: {dict(more)}")
    arguments, options = finishes.last
    assert (options.get("imposed") is not None) is (shape is CHAIN) and bool(paths.calls) is (shape is TREE)
    if shape is TREE:
        # The walk along first children, and a path no longer than asked for.
        imposed = paths.last[0][2]
        assert more == launched(lambda: impose_path(*paths.last[0]), device) + launched(lambda: torch.minimum(imposed, imposed), device)
    else:
        # The kernel that finishes a chain's step takes the length as an argument; the reference needs a few operators for it.
        finish = ops.finish_step
        imposing = launched(lambda: finish(*arguments, **options), device)
        assert more == imposing - launched(lambda: finish(*arguments, **{**options, "imposed": None}), device)
        assert device == "cpu" or more == Counter()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_committed_are_the_drafts_tokens_and_then_the_targets(device: str, shape: dict[str, int]) -> None:
    engine, steps = engine_on(device, shape, 3.0), 0
    commit = engine.device_step._commit

    def checked(rows: Any, draft: Any, y: torch.Tensor, result: torch.Tensor, *more: Any) -> Any:
        nonlocal steps
        found = commit(rows, draft, y, result, *more)
        node, want = torch.zeros(len(y), 1, dtype=torch.int64, device=y.device), []
        for _ in range(2):
            node = node + 1 if draft.first_child is None else draft.first_child.gather(1, node).long()
            want.append(draft.token_ids.gather(1, node - 1))
        want.append(y.gather(1, node))
        assert torch.equal(result[: len(y), RESULT_COLUMNS : RESULT_COLUMNS + 3], torch.cat(want, 1))
        steps += 1
        return found

    engine.device_step._commit = checked  # type: ignore[method-assign]
    engine.run(requests())
    assert steps == 10, "a token from the prefill and 29 more, 3 a step"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_two_drafts_are_accepted_in_every_step(device: str, shape: dict[str, int], graphs: str) -> None:
    engine, rows = engine_on(device, shape, 3.0, graphs), requests()
    engine.run(rows)
    if engine.graphs is not None:
        assert not engine.graphs.off and len(engine.graphs) > 0
    for request in rows:
        assert request.counts.verify_steps == 10 and request.counts.steps_without_draft == 0
        assert request.counts.accepted == [10, 10] + [0] * (shape["num_steps"] - 2)
        assert (request.counts.committed, request.counts.trimmed, len(request.output_ids)) == (30, 1, 30)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_mean_that_is_no_integer_alternates_row_by_row(device: str, graphs: str) -> None:
    engine, rows = engine_on(device, CHAIN, 2.25, graphs), requests(max_tokens=37)
    engine.run(rows)
    # 1.25 drafts a step: 1, 1, 1, 2 in turn, and so 9 tokens in 4 steps.
    assert [request.counts.accepted for request in rows] == [[16, 4, 0, 0]] * ROWS
    assert [request.counts.trimmed for request in rows] == [0] * ROWS
    engine.close()


def test_imposed_lengths_are_the_rows_own_and_start_anew_with_no_one() -> None:
    simulation = Simulation(2.5, 4, torch.device("cpu"))
    both, second = torch.tensor([1, 2]), torch.tensor([2])
    assert [simulation.lengths(slots).tolist() for slots in (both, second, both, both)] == [[1, 1], [2], [2, 1], [1, 2]]
