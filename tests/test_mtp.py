"""MTP with several modules: module k drafts the token k steps ahead, on states, KV and tokens of its own, however the engine came to that place."""

from __future__ import annotations

import itertools
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specgen.config import Config, DataConfig, DraftConfig, ModelConfig
from specgen.draft import mtp
from specgen.draft.autoregressive import AutoregressiveDrafter
from specgen.draft.modules import ModularDrafter
from specgen.errors import CheckpointError
from specgen.folders import logging_to
from specgen.kernels import ops
from specgen.types import SamplingParams, noise_key
from specgen.validate import validate
from tests.harness import drafter_of, drive, engine_of, requests_of, run, thinned
from tests.oracles import RecomputeModules, endless_text, tree_paths
from tests.test_adaptive import scripted
from tests.test_drafters import PROMPTS, recorded
from tests.test_rejection import run as run_rejection
from tests.test_sampling_n import samples
from tests.toys import model_config, mtp_row, toy_folder, write

STIRRED, RANDOM, QWEN = "target_mtp3_stirred", "rand_target_mtp3", "rand_target_mtp2_qwen"
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)


# -- which module drafts what -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "accepted"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_module_k_is_used_at_depth_k_and_the_last_one_again_beyond(steps: int, accepted: int, overlap: int) -> None:
    """Module k is right at depth k alone, so every step accepts as many drafts as there are modules, and none beyond."""
    result = run("target_mtp3", "mtp", [[30], [40, 41]], steps=steps, overlap=overlap, max_tokens=1 + 4 * (accepted + 1))
    assert result.ids == [endless_text([30], 1 + 4 * (accepted + 1)), endless_text([40, 41], 1 + 4 * (accepted + 1))]
    assert result.accepted == [[accepted] * 4] * 2
    assert result.counts[0]["proposed"] == [4] * steps and result.counts[0]["accepted"] == [4] * accepted + [0] * (steps - accepted)


def test_one_module_for_every_step_is_right_at_the_first_alone() -> None:
    """The same weights under a configuration of one module: what using module 0 everywhere would give above."""
    result = run("target_mtp3_says_1", "mtp", [[30]], steps=3, max_tokens=9)
    assert result.ids == [endless_text([30], 9)] and result.accepted == [[1] * 4]


@pytest.mark.parametrize(
    ("topk", "steps", "nodes", "page", "chunk"),
    thinned(
        [(1, 3, None, 4, 4), (3, 1, None, 16, 512), (1, 5, None, 16, 1), (4, 3, 13, 1, 512), (2, 5, None, 4, 3), (3, 2, None, 1, 2)],
        lambda number: number > 1,
    ),
)
@pytest.mark.parametrize(("target", "least"), [(STIRRED, 18), (RANDOM, 0), (QWEN, 0)])
def test_every_draft_equals_a_recomputation_of_every_module(
    target: str, least: int, topk: int, steps: int, nodes: int | None, page: int, chunk: int
) -> None:
    """Prompts of one token too, where a module's first positions do not exist."""
    engine = engine_of(target, "mtp", topk=topk, steps=steps, nodes=nodes, page=page, chunk=chunk, batch=3)
    seen = recorded(engine)
    result = drive(engine, requests_of(PROMPTS, GREEDY))
    oracle, width = RecomputeModules(target), engine.drafter.num_draft_tokens
    assert len(seen) >= len(PROMPTS) * 3
    for _, context, paths in seen:
        assert paths == tree_paths(oracle, context, topk, steps, width), context
    assert sum(sum(counts["accepted"]) for counts in result.counts) >= least  # extends after several accepted tokens were among them


@pytest.mark.parametrize(("topk", "steps"), [(1, 5), (3, 4)])
@pytest.mark.parametrize("target", [STIRRED, RANDOM])
def test_sampled_drafts_add_the_targets_own_noise_at_each_depth(target: str, topk: int, steps: int) -> None:
    temperature, seed = 0.8, 11
    engine = engine_of(target, "mtp", topk=topk, steps=steps, page=4, batch=3)
    seen = recorded(engine)
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True, temperature=temperature, seed=seed)))
    oracle = RecomputeModules(target)
    assert len(seen) >= 8
    for request, context, paths in seen:
        key = torch.from_numpy(np.array([noise_key(seed, request.prompt.key, 0)], np.uint32).view(np.int32))
        position = len(context) - len(request.prompt.token_ids)

        def noise(depth: int, key: torch.Tensor = key, position: int = position) -> np.ndarray:
            return ops.gumbel(key, torch.tensor([position + depth], dtype=torch.int32), 48)[0].double().numpy()

        assert paths == tree_paths(oracle, context, topk, steps, engine.drafter.num_draft_tokens, temperature, noise), context


# -- the text ---------------------------------------------------------------------------------------------------------------------------------


def _settings() -> list[tuple[Any, ...]]:
    """Every topk, num_steps and temperature (None: greedy and sampled rows together), with batch, overlap and prompt chunk taking turns."""
    around = itertools.cycle([(1, 0, 2048), (3, 1, 2), (3, 0, 3), (1, 1, 5), (3, 1, 2048)])
    kinds = itertools.cycle([(0.0, 0.8), (None, 0.8), (0.0, None)])
    return [(k, s, t, *next(around)) for k in (1, 4) for s in range(1, 6) for t in next(kinds)]


@cache
def plain(temperature: float | None) -> list[list[int]]:
    return run(STIRRED, None, PROMPTS, sampling_of(temperature), batch=1).ids


def sampling_of(temperature: float | None) -> list[SamplingParams]:
    each = [0.0, 0.8] * 2 if temperature is None else [temperature] * 4
    return [SamplingParams(max_tokens=16, temperature=t, seed=7, ignore_eos=True) for t in each]


@pytest.mark.parametrize(("topk", "steps", "temperature", "batch", "overlap", "chunk"), _settings())
def test_text_does_not_depend_on_the_modules(topk: int, steps: int, temperature: float | None, batch: int, overlap: int, chunk: int) -> None:
    options = dict(topk=topk, steps=steps, batch=batch, overlap=overlap, chunk=chunk, page=4)
    assert run(STIRRED, "mtp", PROMPTS, sampling_of(temperature), **options).ids == plain(temperature)


@pytest.mark.parametrize("topk", [1, 3])
def test_rejection_accepts_what_the_modules_draw(topk: int) -> None:
    """Rows without a temperature keep their text; those with one draw from the modules' own laws, at every depth."""
    greedy, warm = SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.4, seed=3)
    result = run_rejection("target_mtp3", "mtp", [[30], [40], [30], [10, 11]], [greedy, greedy, warm, warm], topk=topk, steps=4, batch=4)
    assert result.ids[:2] == [endless_text([30], 24), endless_text([40], 24)]
    assert all(sum(row["accepted"][:3]) >= 12 for row in result.counts)


def test_preempted_rows_draft_as_before() -> None:
    """A pool too small for every row: whoever comes back prefills all modules again."""
    calm = run(STIRRED, "mtp", PROMPTS, GREEDY, steps=4, page=4)
    tight = run(STIRRED, "mtp", PROMPTS, GREEDY, steps=4, page=4, pages=15)
    assert tight.engine.scheduler.preemptions >= 1
    assert tight.ids == calm.ids and tight.accepted == calm.accepted


# -- samples of one prompt --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "chunk"), [(1, 2048), (1, 2), (4, 3), (4, 9), (4, 2048)])
@pytest.mark.parametrize("length", [3, 9, 11])
def test_samples_that_share_pages_draft_as_if_they_had_not(page: int, chunk: int, length: int) -> None:
    """The modules' KV before a sampled token is the prompt's alone up to ``tail`` positions before its last; a shared page is written once."""
    prompt = [1, *range(4, 3 + length)]
    engine = engine_of(STIRRED, "mtp", steps=4, page=page, chunk=chunk, batch=3)
    shared = max(0, length - 1 - 2) // page
    seen, held, share = recorded(engine), [], engine.drafter.share

    def shares(source: int, target: int, length: int) -> None:
        assert length == shared * page
        pages = torch.from_numpy(engine.pages.table[target, :shared].copy()).long()
        slots = (pages[:, None] * page + torch.arange(page)).flatten()
        held.append((slots, engine.drafter.pool.k[:, slots].clone()))  # type: ignore[attr-defined]
        share(source, target, length)

    engine.drafter.share = shares  # type: ignore[method-assign]
    drive(engine, samples([prompt], SamplingParams(max_tokens=10, ignore_eos=True, n=3)))
    assert engine.scheduler.prefilled_tokens == 3 * length - 2 * shared * page
    oracle = RecomputeModules(STIRRED)
    assert len(seen) >= 6 and all(paths == tree_paths(oracle, context, 1, 4, 5) for _, context, paths in seen)
    assert len(held) == 2 * bool(shared)
    for slots, before in held:
        assert bool((before != 0).any(-1).all()), "every module's KV of the shared positions is there"
        assert torch.equal(engine.drafter.pool.k[:, slots], before), "and nobody writes it again"  # type: ignore[attr-defined]


# -- adaptive speculation ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=24, temperature=0.8, seed=7)], ids=["T=0", "T=0.8"])
def test_no_schedule_of_num_steps_changes_the_text(topk: int, overlap: int, sampling: SamplingParams) -> None:
    engine = engine_of(STIRRED, "mtp", topk=topk, steps=5, batch=3, page=1, overlap=overlap, chunk=3, adaptive=True)
    scripted(engine, [5, 1, 0, 0, 3, 0, 2, 4, 0, 0, 0, 5])
    assert drive(engine, requests_of(PROMPTS, sampling)).ids == run(STIRRED, None, PROMPTS, sampling).ids


@pytest.mark.parametrize("script", [[3, 1, 2, 5, 1, 1, 4], [0, 3], [0] * 6 + [5, 2], [4] + [0] * 30, [1, 0, 0, 5]], ids=str)
@pytest.mark.parametrize("target", [STIRRED, RANDOM])
def test_modules_draft_as_if_they_had_always_run(target: str, script: list[int]) -> None:
    """Every module's KV follows every step, also those that the step did not use, and those without any draft."""
    engine = engine_of(target, "mtp", steps=5, batch=3, page=4, chunk=4, adaptive=True)
    scripted(engine, script)
    seen = recorded(engine)
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True)))
    oracle = RecomputeModules(target)
    assert len(seen) >= 4
    for _, context, paths in seen:
        steps = max(len(path) for path in paths)
        assert paths == tree_paths(oracle, context, 1, steps, steps + 1), context


def test_a_tree_comes_back_after_an_absence() -> None:
    engine = engine_of(STIRRED, "mtp", topk=3, steps=4, batch=3, page=4, adaptive=True)
    scripted(engine, [4, 0, 0, 0])
    seen = recorded(engine)
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True)))
    oracle = RecomputeModules(STIRRED)
    assert len(seen) >= 12 and all(paths == tree_paths(oracle, context, 3, 4, 13) for _, context, paths in seen)


def test_what_is_older_than_the_ring_costs_acceptance_and_never_text() -> None:
    engine = engine_of(STIRRED, "mtp", steps=4, page=4, adaptive=True)
    scripted(engine, [0] * 70 + [4])
    catch_up = engine.drafter.catch_up

    def poisoned(*arguments: Any) -> None:
        engine.drafter.pool.k[:] = float("nan")  # type: ignore[attr-defined]
        catch_up(*arguments)

    engine.drafter.catch_up = poisoned  # type: ignore[method-assign]
    sampling = SamplingParams(max_tokens=90, ignore_eos=True)
    result = drive(engine, requests_of(PROMPTS, sampling))
    assert result.ids == run(STIRRED, None, PROMPTS, sampling).ids and all(r.counts.verify_steps for r in result.requests)


def test_a_wide_batch_catches_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.draft.ring.MAX_TOKENS", 16)
    engine = engine_of(RANDOM, "mtp", steps=4, batch=4, page=4, adaptive=True)
    scripted(engine, [0] * 13 + [4, 4])
    seen = recorded(engine)
    drive(engine, requests_of(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True)))
    oracle = RecomputeModules(RANDOM)
    assert len(seen) >= 8 and all(paths == tree_paths(oracle, context, 1, 4, 5) for _, context, paths in seen)


# -- sizes, warnings and what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "modules"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_the_modules_that_drafts_use_are_loaded_and_no_other(steps: int, modules: int) -> None:
    drafter, _ = drafter_of("target_mtp3", "mtp", topk=2, num_steps=steps)
    assert isinstance(drafter, AutoregressiveDrafter) and isinstance(drafter, ModularDrafter) == (modules > 1)
    assert drafter.kv_bytes_per_token() == modules * 2 * 32 * 4
    assert (drafter.tail, drafter.lead, drafter.slots(steps)) == (modules - 1, 0, 2 * steps)


@pytest.mark.parametrize(
    ("target", "steps", "said"),
    [
        ("target_mtp3", 3, []),
        ("target_mtp3", 4, ["draft.num_steps=4: {} has 3 MTP modules; the steps after them use the last one again"]),
        ("target_mtp", 1, []),
        ("target_mtp", 3, ["draft.num_steps=3: {} has 1 MTP module, which every step uses"]),
    ],
)
def test_more_steps_than_modules_are_warned_of_once(target: str, steps: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specgen"):
        run(target, "mtp", [[30], [10]], steps=steps)
    assert caplog.messages == [line.format(toy_folder() / target) for line in said]


def test_the_console_is_told_of_more_steps_than_modules_once_a_process_and_each_log_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mtp, "_told", set())
    said = [f"draft.num_steps={steps}: {toy_folder() / 'target_mtp'} has 1 MTP module, which every step uses" for steps in (3, 2)]
    for place, steps in (("a", 3), ("b", 3), ("c", 2)):
        (tmp_path / place).mkdir()
        with logging_to(tmp_path / place):
            drafter_of("target_mtp", "mtp", num_steps=steps)
    assert capsys.readouterr().err.splitlines() == [said[0]]
    logs = [(tmp_path / place / "specgen.log").read_text() for place in "abc"]
    assert [[log.count(line) for line in said] for log in logs] == [[1, 0], [1, 0], [0, 1]]


def check(model: str, steps: int) -> None:
    """Validation of a job as the command line does it, before torch."""
    draft = DraftConfig(method="mtp", num_steps=steps)
    data = DataConfig(source="random", rows=1, prompt_tokens=4)
    validate(Config(model=ModelConfig(source="hf", path=str(toy_folder() / model)), draft=draft, data=data))


def test_a_configuration_that_promises_more_modules_than_there_are_is_refused_where_they_are_used() -> None:
    check("target_mtp1_says_2", 1)
    expected = (
        r"target_mtp1_says_2: a draft=mtp checkpoint needs model\.layers\.9\.eh_proj\.weight, model\.layers\.9\.enorm\.weight, "
        r"model\.layers\.9\.hnorm\.weight, model\.layers\.9\.shared_head\.norm\.weight, which it does not hold"
    )
    with pytest.raises(CheckpointError, match=expected):
        check("target_mtp1_says_2", 2)
    with pytest.raises(CheckpointError, match=expected):
        drafter_of("target_mtp1_says_2", "mtp", num_steps=2)


def test_a_target_without_modules_is_refused_before_its_weights_are_read() -> None:
    with pytest.raises(CheckpointError, match=r"/target: config\.json has no num_nextn_predict_layers, so the checkpoint carries no MTP module"):
        check("target", 1)


def test_another_layout_is_refused_by_name(tmp_path: Any) -> None:
    tensors = {name.replace("model.layers.8.enorm", "model.mtp_block.0.enorm"): value for name, value in mtp_row(1).items()}
    write(tmp_path, "ernie", tensors, model_config(48, 8, num_nextn_predict_layers=1))
    with pytest.raises(CheckpointError, match=r"ernie: MTP modules in ERNIE's layout \(mtp_block\) are not supported; choose another draft"):
        check(str(tmp_path / "ernie"), 1)
