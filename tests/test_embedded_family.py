"""The embedded family as the engine runs it: its drafters are worth their names, no drafter changes a token, and it agrees with transformers.

The quick grid of drafters touches every method, topk and depth once; ``-m slow`` runs the whole product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specgen.draft.load import FAMILY
from specgen.embedded import export, measure
from specgen.loading import Loaded, load, make_engine, prompts_of
from specgen.types import Layout, Request

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
BATCHES, OVERLAPS, STEPS, TOPKS = (1, 3, 32), ("0", "1"), (1, 3, 5), (1, 4)


@cache
def loaded() -> Loaded:
    torch.set_num_threads(1)
    return load(measure.job("none", 1, 0.0).model)


def config_of(
    method: str, topk: int, temperature: float, *, steps: int = 4, tokens: int = 96, batch: int = 32, overlap: str = "0", seed: int = 0
) -> Any:
    config = measure.job(method, topk, temperature, seed)
    config.draft.num_steps, config.sampling.max_tokens = steps, tokens
    config.engine.max_batch, config.engine.overlap = batch, overlap
    return config


@cache
def tokens_per_step(method: str, topk: int, temperature: float = 0.0) -> float:
    return measure.acceptance(measure.run(config_of(method, topk, temperature), loaded()))["tokens_per_step"]


# -- what the drafters are worth --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "least"), [("eagle", 2.4), ("eagle3", 2.4), ("mtp", 2.4), ("draft_model", 2.2)])
def test_a_trained_drafter_is_worth_more_than_prompt_lookup(method: str, least: float) -> None:
    assert tokens_per_step(method, 1) > least
    assert tokens_per_step(method, 1) >= tokens_per_step("ngram", 1) + 0.4


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_accepts_more_than_a_chain(method: str) -> None:
    assert tokens_per_step(method, 4) > tokens_per_step(method, 1)


@pytest.mark.parametrize("method", [pytest.param(name, marks=[] if name in ("eagle", "draft_model") else pytest.mark.slow) for name in METHODS])
def test_coupled_drafts_are_accepted_at_a_temperature(method: str) -> None:
    assert tokens_per_step(method, 1, 0.8) > 1.7


@pytest.mark.parametrize("method", METHODS)
def test_weights_without_training_are_worth_nothing(method: str) -> None:
    config = config_of(method, 1, 0.0, tokens=24)
    if method != "mtp":
        config.draft.load_format = "dummy"
        requests = measure.run(config, loaded())
    else:  # its weights stand in the target's file: shuffle them in place
        engine = make_engine(config, loaded())
        generator = torch.Generator().manual_seed(0)
        for weight in (engine.drafter.head.proj, *engine.drafter.head.layers[0].views().values()):
            if weight.dim() == 2:
                weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(weight))
        requests = [Request(prompt, prompt.sampling) for prompt in prompts_of(config, config.data, loaded())]
        engine.run(requests)
    assert measure.acceptance(requests)["tokens_per_step"] < 1.1


# -- what no drafter changes ------------------------------------------------------------------------------------------------------------------


def rows_of(batch: int) -> int:
    """Prompts of an invariance run: more than the batch, so that slots are taken twice, and few, so that it is quick."""
    return {1: 2, 3: 7, 32: 12}[batch]


def output_ids(config: Any, rows: int) -> list[list[int]]:
    config.data.limit = rows
    return [request.output_ids for request in measure.run(config, loaded())]


@cache
def plain_ids(temperature: float) -> list[list[int]]:
    """The rows decoded without a draft, one at a time."""
    return output_ids(config_of("none", 1, temperature, steps=0, tokens=28, batch=1, seed=7), 12)


def assert_same_tokens(method: str, topk: int, steps: int, batch: int, overlap: str, temperature: float) -> None:
    config = config_of(method, topk, temperature, steps=steps, tokens=28, batch=batch, overlap=overlap, seed=7)
    rows = rows_of(batch)
    assert output_ids(config, rows) == plain_ids(temperature)[:rows]


def quick_grid() -> Iterator[tuple[str, int, int, int, str, float]]:
    """Every method, topk and depth, with batch, overlap and temperature taken in turn."""
    rest = list(product(BATCHES, OVERLAPS, (0.0, 0.8)))
    for number, (method, topk, steps) in enumerate(product(METHODS, TOPKS, STEPS)):
        yield method, topk, steps, *rest[5 * number % len(rest)]


@pytest.mark.parametrize(("method", "topk", "steps", "batch", "overlap", "temperature"), list(quick_grid()))
def test_no_drafter_changes_a_token(method: str, topk: int, steps: int, batch: int, overlap: str, temperature: float) -> None:
    assert_same_tokens(method, topk, steps, batch, overlap, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("method", "steps", "batch", "overlap"), [("dflash", 1, 32, "0"), ("dflash", 4, 3, "1"), ("ngram", 3, 3, "0"), ("ngram", 5, 32, "1")]
)
def test_no_chain_drafter_changes_a_token(method: str, steps: int, batch: int, overlap: str, temperature: float) -> None:
    assert_same_tokens(method, 1, steps, batch, overlap, temperature)


def test_the_quick_grid_holds_every_value_with_every_method() -> None:
    for place, values in ((1, TOPKS), (2, STEPS), (3, BATCHES), (4, OVERLAPS), (5, (0.0, 0.8))):
        assert {(entry[0], entry[place]) for entry in quick_grid()} == set(product(METHODS, values))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("method", "topk", "steps"), list(product(METHODS, TOPKS, STEPS)))
def test_no_drafter_changes_a_token_in_the_whole_grid(method: str, topk: int, steps: int, batch: int, overlap: str, temperature: float) -> None:
    assert_same_tokens(method, topk, steps, batch, overlap, temperature)


# -- what transformers says -------------------------------------------------------------------------------------------------------------------


@cache
def reference() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32).eval()


def test_greedy_ids_equal_those_of_transformers() -> None:
    config = config_of("none", 1, 0.0, steps=0, tokens=64)
    config.data.limit = 16
    requests = measure.run(config, loaded())
    assert len(requests) == 16
    for request in requests:
        ids = torch.tensor([request.prompt.token_ids])
        with torch.inference_mode():
            out = reference().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert request.output_ids == out[0, ids.shape[1] :].tolist(), request.prompt.id


def test_prefill_logits_equal_those_of_transformers() -> None:
    target, config = loaded().target, measure.job("none", 1, 0.0)
    ids = torch.tensor(next(iter(prompts_of(config, config.data, loaded()))).token_ids, dtype=torch.int32)
    count = ids.shape[0]
    places = torch.arange(count)
    table = torch.arange(1, count // 16 + 2, dtype=torch.int32)[None]
    layout = Layout(
        positions=places.int(), slots=places + 16, block_table=table, length=torch.zeros(1, dtype=torch.int32), q_len=count, max_len=count,
        cu_q=torch.tensor([0, count], dtype=torch.int32),
    )  # fmt: skip
    with torch.inference_mode():
        ours = target.logits(target.forward(ids, layout, target.make_pool(count // 16 + 2, 16)).last)
        theirs = reference()(ids[None].long()).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# -- what is shipped --------------------------------------------------------------------------------------------------------------------------


def test_the_family_is_small() -> None:
    assert sum(path.stat().st_size for path in FAMILY.rglob("*") if path.is_file()) < 12_000_000


def test_the_card_is_what_the_log_says() -> None:
    log = json.loads((FAMILY / "train_log.json").read_text(encoding="utf-8"))
    card = (FAMILY / "README.md").read_text(encoding="utf-8")
    assert card == export.render_card(log)
    assert "not measured" not in card
    assert all((FAMILY / model["folder"] / "model.safetensors").is_file() for model in log["models"])


def test_the_eagle3_head_reads_the_states_it_was_trained_on() -> None:
    config = json.loads((FAMILY / "eagle3" / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert make_engine(config_of("eagle3", 1, 0.0), loaded()).drafter.aux_layers == (1, 3, 5)


def test_target_and_draft_model_share_one_tokenizer() -> None:
    target, draft = (AutoTokenizer.from_pretrained(FAMILY / name) for name in ("target", "draft_model"))
    assert target.get_vocab() == draft.get_vocab() and len(target) == 4096
