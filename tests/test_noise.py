"""Noise: Philox equals its published vectors, counters mean what they say, Gumbel values are finite, exact enough and the same on every device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from specgen.kernels import ops
from specgen.kernels import reference_sampling as reference

WORDS32 = 2**32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v]) for v in values)


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31, (count, 2), generator=generator).to(torch.int32)
    return keys, torch.randint(0, 5000, (count,), generator=generator).to(torch.int32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_equals_the_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    got = reference.philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(w) for w in got) == expected


def test_a_token_takes_word_v_mod_4_of_its_block_position_and_stream() -> None:
    keys = torch.tensor([[-1, 7]], dtype=torch.int32)  # the bit pattern of 0xFFFFFFFF
    got = reference.noise_words(keys, torch.tensor([9], dtype=torch.int32), 11, stream=2)
    for v in range(11):
        expected = reference.philox(words(v // 4, 9, 2, 0), words(0xFFFFFFFF, 7))[v % 4]  # type: ignore[arg-type]
        assert int(got[0, v]) == int(expected)


def test_streams_positions_keys_and_tokens_are_all_distinct() -> None:
    keys, _ = rows(3)
    seen = [reference.noise_words(keys, torch.full((3,), t, dtype=torch.int32), 40, stream) for t in (0, 1) for stream in range(4)]
    every = torch.stack(seen).flatten()
    assert every.unique().numel() == every.numel()


def test_noise_by_ids_is_the_noise_of_those_target_ids() -> None:
    keys, t = rows(4)
    full = reference.gumbel(keys, t, 1000)
    few, many = torch.tensor([999, 0, 3, 512]), torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:700]
    for ids in (few, many):
        assert torch.equal(reference.gumbel(keys, t, None, ids=ids.to(torch.int32)), full[:, ids])
        assert torch.equal(reference.gumbel(keys, t, 1000, ids=ids.to(torch.int32)), full[:, ids])


def test_gumbel_is_finite_bounded_and_falls_with_the_word() -> None:
    edge = torch.tensor([0, 1, 2, 2**25, 2**26 - 1, 2**26, 2**26 + 1, 2**31, WORDS32 - 129, WORDS32 - 128, WORDS32 - 2, WORDS32 - 1])
    g = reference.gumbel_from_words(edge)
    assert bool(torch.isfinite(g).all())
    assert float(g.min()) >= -2.9 and float(g.max()) <= 22.9
    assert bool((g[1:] <= g[:-1]).all())


def test_gumbel_equals_double_precision_to_1e_5() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** (torch.rand(200_000, generator=generator, dtype=torch.float64) * 32)
    word = torch.cat([sizes.long().clamp(max=WORDS32 - 1), torch.randint(0, WORDS32, (200_000,), generator=generator)])
    u = np.minimum((word.numpy().astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-u))
    assert np.abs(reference.gumbel_from_words(word).numpy() - expected).max() <= 1e-5


def test_rare_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    # One token holds 98% and 400 others share 2%: the upper tail of the noise decides.
    vocab, draws = 401, 40_000
    logits = torch.full((1, vocab), float(np.log(0.02 / 400)))
    logits[0, 0] = float(np.log(0.98))
    keys = torch.tensor([[11, 22]], dtype=torch.int32).expand(draws, 2)
    drawn = (logits + reference.gumbel(keys, torch.arange(draws, dtype=torch.int32), vocab)).argmax(1)
    rare = int((drawn > 0).sum())
    assert abs(rare - 0.02 * draws) < 4 * (draws * 0.02 * 0.98) ** 0.5
    counts = torch.bincount(drawn, minlength=vocab)[1:].double()
    assert float(((counts - 2) ** 2 / 2).sum()) < 400 + 5 * (2 * 400) ** 0.5  # chi-square with 400 degrees of freedom


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 3, 37, 1024, 2051])
def test_kernel_words_equal_the_reference_bit_for_bit(device: str, vocab: int) -> None:
    from specgen.kernels import philox

    keys, t = rows(3, vocab)
    t[0] = -1
    for stream in range(4):
        got = philox.noise_words(keys.to(device), t.to(device), vocab, stream)
        assert torch.equal(got.cpu(), reference.noise_words(keys, t, vocab, stream))
    g = philox.gumbel(keys.to(device), t.to(device), vocab)
    assert float((g.cpu() - reference.gumbel(keys, t, vocab)).abs().max()) <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_words_by_ids_equal_the_reference(device: str) -> None:
    from specgen.kernels import philox

    keys, t = rows(3)
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(2))[:1333].to(torch.int32)
    got = philox.noise_words(keys.to(device), t.to(device), None, 1, ids.to(device))
    assert torch.equal(got.cpu(), reference.noise_words(keys, t, None, 1, ids))


def test_the_door_gives_the_kernel_only_where_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    from specgen.kernels import philox

    keys, t = rows(2)
    calls: list[str] = []
    plain = philox._noise
    monkeypatch.setattr(philox, "_noise", lambda *a: calls.append("kernel") or plain(*a))
    expected = ops.gumbel(keys, t, 50)
    assert calls == []
    monkeypatch.setenv("SPECGEN_FORCE_TRITON", "1")
    assert float((ops.gumbel(keys, t, 50) - expected).abs().max()) <= 1e-5
    assert calls == ["kernel"]


LAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": torch.zeros_like,
    "slope": lambda v: v * (-24.0 / 128_256),
    "one token": lambda v: torch.where(v == 77_777, 30.0, 0.0),
}
Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(logits: torch.Tensor, keys: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The sampler at T = 1 without filters."""
    ones = torch.ones(logits.shape[0], device=logits.device)
    return ops.gumbel_argmax(logits, ones, t * 0, ones, ones * 0, keys, t, logits.shape[1], features={"sampled"})


def plain_float32(logits: torch.Tensor, keys: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The usual form, -log(-log(u)) with u = x / 2^32 in float32, which rounds to 1 for the 128 largest words."""
    u = ops.noise_words(keys, t, logits.shape[1]).to(torch.int64).remainder(WORDS32).float() / WORDS32
    return (logits - torch.log(-torch.log(u))).argmax(1)


def misfit(draw: Draw, logits: torch.Tensor, draws: int, bins: int = 128, rows_at_once: int = 1024) -> tuple[float, int]:
    """Draws of one law in bins of nearly equal probability: (p of the chi-square, draws of tokens less likely than 1e-11)."""
    device, vocab = logits.device, logits.shape[0]
    law = torch.softmax(logits.double(), 0)
    which = ((law.cumsum(0) - law / 2) * bins).long().clamp(0, bins - 1)
    observed, rare = torch.zeros(bins, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
    keys, t = (part.to(device) for part in rows(rows_at_once, seed=3))
    many = logits.expand(rows_at_once, vocab).contiguous()
    steps = draws // rows_at_once
    for step in range(steps):
        y = draw(many, keys, t + step).long()
        observed += torch.bincount(which[y], minlength=bins)
        rare += (law[y] < 1e-11).sum()
    expected = torch.zeros(bins, dtype=torch.float64, device=device).index_add_(0, which, law) * (steps * rows_at_once)
    kept = expected > 5
    assert int(observed.sum()) == steps * rows_at_once
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    return float(stats.chi2.sf(statistic, max(int(kept.sum()) - 1, 1))), int(rare)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAWS)
def test_two_million_draws_over_128256_tokens_follow_the_law_and_no_rare_token_is_in_excess(name: str) -> None:
    p, rare = misfit(ours, LAWS[name](torch.arange(128_256, dtype=torch.float32, device="cuda")), 2_000_000)
    print(f"\n{name}: p {p:.4f}, rare tokens {rare}")
    assert p > 1e-4
    assert rare <= 2  # "one token": all others together have probability 1.2e-8, 0.02 draws of two million


@pytest.mark.gpu
def test_the_same_count_finds_the_rare_tokens_of_plain_float32_noise() -> None:
    v = torch.arange(128_256, dtype=torch.float32, device="cuda")
    p, _ = misfit(plain_float32, LAWS["slope"](v), 400_000)
    _, of_one = misfit(plain_float32, LAWS["one token"](v), 50_000)
    print(f"\nplain float32: p {p:.2g}, rare tokens {of_one} of 50,000")
    assert p < 1e-9
    assert 100 < of_one < 300  # 128 / 2^32 a word, 128,256 words a draw: 0.38%, 191 of 50,000
