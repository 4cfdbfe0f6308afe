"""The step's bookkeeping kernels equal their torch definition, value for value, on random rows: dead rows, stops, budgets, context ends, trees."""

from __future__ import annotations

import pytest
import torch

from specgen.kernels import reference_step as reference

STOPS = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_rows(generator: torch.Generator, count: int) -> torch.Tensor:
    """count rows as ``DeviceRows.ints``; row 0 is scratch."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    rows = torch.full((count, 9 + STOPS), -1, dtype=torch.int32)
    rows[:, 0] = draw(0, 2, count)
    rows[:, 1] = draw(0, 20, count)
    rows[:, 2] = draw(0, 9, count)
    rows[:, 3] = draw(1, 5, count)
    rows[:, 4] = draw(5, 12, count)
    rows[:, 5:9] = draw(-9, 9, count, 4)
    rows[:, 9] = 3
    rows[:, 11] = draw(-1, 5, count)
    rows[0] = 0
    rows[0, 9:] = -1
    return rows


def kernels(device: str):
    if device == "cpu":
        pytest.importorskip("triton")
    from specgen.kernels import step

    return step


def assert_same(name: str, ours, theirs) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if b is None:
            assert a is None, (name, index)
        else:
            assert a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()), (name, index, a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(12))
def test_step_kernels_equal_their_reference(seed: int, device: str) -> None:
    step = kernels(device)
    g = torch.Generator().manual_seed(seed)
    batch, steps = int(torch.randint(1, 6, (), generator=g)), int(torch.randint(0, 6, (), generator=g))
    rows, floats = random_rows(g, 8), torch.rand(8, 3, generator=g)
    table = torch.randint(0, 30, (8, 9), generator=g).int()
    slots = torch.randperm(8, generator=g)[:batch]
    rows, floats, table, slots = (x.to(device) for x in (rows, floats, table, slots))

    gathered = reference.begin_step(slots, rows, floats, table)
    assert_same("begin_step", step.begin_step(slots, rows, floats, table), gathered)
    slots, ints, _, _, block_table = gathered
    length = ints[1]

    count = torch.randint(0, steps + 2, (batch,), generator=g).int().to(device)
    depth = torch.randint(0, 4, (batch, steps + 1), generator=g).int().to(device)
    node = {"start_add": 1, "slot_add": 4, "position_add": 1, "position_step": 0}
    for where in ({}, {"start_add": 1, "count": count}, {"depth": depth}, node, {"start_add": -5, "count": count}, {"start_add": -23}):
        arguments = (length, block_table, steps + 1, 4, 22)
        assert_same(f"window {where}", step.window(*arguments, **where), reference.window(*arguments, **where))

    y = torch.randint(-1, 5, (batch, steps + 1), generator=g).int()
    noise = torch.randint(0, 5, (batch, steps), generator=g).int()
    drafted = torch.where(torch.rand(batch, steps, generator=g) < 0.7, y[:, :steps].clamp(min=0), noise).to(device)
    y = y.to(device)
    cases: list[dict] = [{}]
    if steps:
        valid = (torch.rand(batch, steps, generator=g).cumprod(1) > 0.05).to(device)
        imposed = torch.randint(0, steps + 1, (batch,), generator=g).int().to(device)
        accepted = torch.randint(0, steps + 1, (batch,), generator=g).int().to(device)
        path = torch.arange(steps + 1, dtype=torch.int32, device=device).repeat(batch, 1)
        walk = (torch.where(path <= accepted[:, None], path, -1), accepted, accepted > 1, torch.full_like(accepted, steps))
        cases = [{"drafted": drafted}, {"drafted": drafted, "valid": valid}, {"drafted": drafted, "imposed": imposed}, {"walk": walk}]
    for case in cases:
        for max_length in (22, 40):
            ours, theirs = rows.clone(), rows.clone()
            results = [torch.zeros(batch, 6 + steps + 1, dtype=torch.int32, device=device) for _ in range(2)]
            plain_y = y if case else y[:, :1].contiguous()
            out = step.finish_step(plain_y, slots, ours, max_length, results[0], **case)
            expected = reference.finish_step(plain_y, slots, theirs, max_length, results[1], **case)
            assert_same(f"finish_step {list(case)}", out, expected)
            assert_same("rows and result", (ours, results[0]), (theirs, results[1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "offset"), [(0, 1), (24, 0), (1500, 0)])
def test_a_plain_step_keeps_its_token_and_state(width: int, offset: int, device: str) -> None:
    """Of every row in its own line, at its length modulo the window; a token that is not finite as 0, a dead row's on the scratch line."""
    kernels(device)
    from specgen.kernels import step

    g = torch.Generator().manual_seed(1)
    slots, length = torch.tensor([3, 1, 0, 4]), torch.tensor([5, 70, 0, 63], dtype=torch.int32)
    y = torch.tensor([[7], [8], [2], [-1]], dtype=torch.int32)
    rows = torch.zeros(5, 9 + 4, dtype=torch.int32)
    rows[:, 9:] = -1
    rows[slots, 0], rows[slots, 1], rows[:, 4] = torch.tensor([1, 1, 0, 1], dtype=torch.int32), length, 99
    states = torch.randn(4, 2 * max(width, 1), generator=g)[:, :width].to(device) if width else None
    found = []
    for finish in (step.finish_step, reference.finish_step):
        kept_tokens, kept = torch.full((5, 64), -5, dtype=torch.int32, device=device), torch.zeros(5, 64, width, device=device)
        keep = reference.Keep(length.to(device), kept_tokens, offset, states, kept if width else None)
        result, table = torch.zeros(4, 7, dtype=torch.int32, device=device), rows.clone().to(device)
        out = finish(y.to(device), slots.to(device), table, 100, result, keep=keep)
        found.append((*out[:3], result, table, kept_tokens, kept))
    assert_same("a step that keeps", *found)
    kept_tokens, kept = found[0][5].cpu(), found[0][6].cpu()
    assert [int(kept_tokens[s, (n + offset) % 64]) for s, n in zip(slots.tolist(), length.tolist(), strict=True)] == [7, 8, 2, 0]
    assert int((kept_tokens != -5).sum()) == 4 and (states is None or torch.equal(kept[1, (70 + offset) % 64], states[1].cpu()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norms", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("residual, feed_first, plus_one", [("none", False, False), ("plain", False, False), ("normed", True, True)])
def test_pair_input_equals_its_reference(norms: tuple[bool, bool], residual: str, feed_first: bool, plus_one: bool, device: str) -> None:
    kernels(device)
    from specgen.kernels import draft_input
    from specgen.kernels.reference import pair_input

    g = torch.Generator().manual_seed(3)
    table, feed = torch.randn(11, 24, generator=g), torch.randn(5, 24, generator=g)
    weights = [torch.randn(24, generator=g).to(device) if on else None for on in norms]
    ids = torch.tensor([0, 10, -1, 11, 4], dtype=torch.int32)
    arguments = (ids.to(device), table.to(device), feed.to(device), *weights, 1e-5, plus_one, feed_first, residual)
    ours, theirs = draft_input.pair_input(*arguments), pair_input(*arguments)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert (ours[1] is None) == (theirs[1] is None) == (residual == "none")
    if theirs[1] is not None:
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_that_is_not_finite_is_stored_as_zero_under_a_key_of_nan(device: str) -> None:
    kernels(device)
    from specgen.kernels import kv, norm_rope
    from specgen.kernels import reference as plain

    g = torch.Generator().manual_seed(5)
    tokens, heads, kv_heads, dim = 3, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=g)
    qkv[1, (heads + kv_heads) * dim + 3] = float("nan")  # token 1, KV head 0
    qkv[2, -1] = float("inf")  # token 2, KV head 1
    cos, sin = torch.rand(8, dim // 2, generator=g), torch.rand(8, dim // 2, generator=g)
    positions, slots = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([4, 5, 6])
    qkv, cos, sin, positions, slots = (x.to(device) for x in (qkv, cos, sin, positions, slots))
    pools = [[torch.zeros(8, kv_heads, dim, device=device) for _ in range(2)] for _ in range(4)]
    norm_rope.rope_write_kv(qkv, cos, sin, positions, slots, *pools[0], heads, kv_heads, dim)
    plain.rope_write_kv(qkv, cos, sin, positions, slots, *pools[1], heads, kv_heads, dim)
    k, v = qkv.view(tokens, -1, dim)[:, heads : heads + kv_heads], qkv.view(tokens, -1, dim)[:, heads + kv_heads :]
    kv.write_kv(k, v, *pools[2], slots)
    plain.write_kv(k, v, *pools[3], slots)
    for ours, theirs in ((pools[0], pools[1]), (pools[2], pools[3])):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.isnan(ours[0][5, 0]).all() and torch.isnan(ours[0][6, 1]).all()
        assert (ours[1][5, 0] == 0).all() and (ours[1][6, 1] == 0).all() and torch.isfinite(ours[1]).all()
