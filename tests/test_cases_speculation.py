"""Faults other engines were reported for, each as the property it broke. Tokens and counts are exact, from ``oracles.py``."""

from __future__ import annotations

import pytest
import torch

from specgen.draft.draft_model import check_vocabulary
from specgen.errors import CheckpointError
from specgen.types import SamplingParams
from tests.harness import Run, drafter_of, engine_of, run, tokenizer_of
from tests.oracles import Recompute, endless_text, follow, plain, tally_chain, tree_accepted
from tests.toys import EOT, HALF, NEVER, SUCCESSOR, expected_rand

ROWS = expected_rand()
PROMPTS = [row["prompt_ids"] for row in ROWS]
GREEDY = [row["greedy_32"] for row in ROWS]
MIXED = [[10], [30], [40], [24], [5]]


def tallied(prompt: list[int], output: list[int], successor: list[int] | None, steps: int) -> dict:
    """The counts a table model's row must have."""
    draft = None if successor is None else follow(successor)
    return tally_chain(prompt, output, draft, steps, endless_text(prompt, len(output) + steps + 2)).counts()


def all_but_last(result: Run) -> list[list[int]]:
    """Accepted drafts of every step but a row's last, whose drafts may pass the end."""
    return [steps[:-1] for steps in result.accepted]


# -- the same text, with and without a draft --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "overlap", "batch"), [(4, 0, 8), (16, 1, 8), (1, 1, 8)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_chains_write_the_greedy_text_and_accept_exactly_the_drafts_that_agree(steps: int, page: int, overlap: int, batch: int) -> None:
    result = run("rand_target", "draft_model:rand_draft", PROMPTS, steps=steps, page=page, overlap=overlap, batch=batch)
    assert result.ids == GREEDY
    assert all_but_last(result) == [row["accepted"][str(steps)][:-1] for row in ROWS]
    assert result.finish == ["length"] * 8


@pytest.mark.parametrize(("page", "overlap"), [(1, 0), (4, 1), (16, 0)])
@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow), 3, 5])
def test_trees_write_the_greedy_text_whatever_the_page_size(steps: int, topk: int, page: int, overlap: int) -> None:
    result = run("rand_target", "draft_model:rand_draft", PROMPTS, steps=steps, topk=topk, page=page, overlap=overlap)
    assert result.ids == GREEDY


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(2, 3, None), (4, 2, None), (3, 3, 5), (2, 3, 11)])
def test_trees_accept_exactly_what_trees_grown_without_a_cache_hold(topk: int, steps: int, nodes: int | None) -> None:
    result = run("rand_target", "draft_model:rand_draft", PROMPTS[:6], steps=steps, topk=topk, nodes=nodes, page=4)
    draft, width = Recompute("rand_draft"), result.engine.drafter.num_draft_tokens
    assert all_but_last(result) == [tree_accepted(draft, p, g, topk, steps, width) for p, g in zip(PROMPTS[:6], GREEDY, strict=False)]
    assert result.ids == GREEDY[:6]


@pytest.mark.parametrize(("draft", "topk", "steps"), [(None, 1, 1), ("draft_model:rand_draft", 1, 3), ("draft_model:rand_draft", 4, 2)])
@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rows_of_unequal_length_are_the_same_alone_and_together(draft: str | None, topk: int, steps: int, overlap: int) -> None:
    together = run("rand_target", draft, PROMPTS, steps=steps, topk=topk, overlap=overlap, batch=8, page=4)
    alone = run("rand_target", draft, PROMPTS, steps=steps, topk=topk, overlap=overlap, batch=1, page=4)
    assert together.ids == alone.ids == GREEDY
    assert together.counts == alone.counts


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rows_that_accept_different_numbers_of_tokens_do_not_disturb_each_other(batch: int) -> None:
    result = run("target", "draft_model:draft_half", MIXED, steps=3, batch=batch, max_tokens=16)
    expected = [plain(prompt, 16)[0] for prompt in MIXED]
    assert result.ids == expected
    assert result.ids[4] == [2]
    assert result.counts == [tallied(p, o, HALF, 3) for p, o in zip(MIXED, expected, strict=True)]


@pytest.mark.parametrize(
    ("target", "draft", "topk"),
    [
        ("rand_target", "draft_model:rand_draft", 1),
        ("rand_target", "draft_model:rand_draft", 2),
        ("rand_target", "eagle:eagle1_perfect", 1),
        ("target", "eagle:eagle1_stirred", 2),
        ("target", "eagle3:eagle3_stirred", 2),
    ],
)
def test_the_prefill_chunk_changes_neither_text_nor_acceptance(target: str, draft: str, topk: int) -> None:
    whole, *others = (run(target, draft, PROMPTS, topk=topk, chunk=chunk, page=4, max_tokens=16) for chunk in (512, 7, 16))
    assert whole.ids == ([g[:16] for g in GREEDY] if target == "rand_target" else [plain(p, 16)[0] for p in PROMPTS])
    for other in others:
        assert other.ids == whole.ids
        assert other.counts == whole.counts
        assert other.accepted == whole.accepted


@pytest.mark.parametrize(("steps", "overlap"), [(1, 1), (4, 0)])
def test_when_every_draft_is_rejected_each_step_gives_exactly_one_token(steps: int, overlap: int) -> None:
    result = run("target", "draft_model:draft_never", [[30]], steps=steps, overlap=overlap, max_tokens=200)
    assert result.ids == [endless_text([30], 200)] == [([31, 32, 33, 34, 30] * 40)]
    assert result.accepted == [[0] * 199]
    assert result.counts == [tallied([30], result.ids[0], NEVER, steps)]
    assert result.counts[0]["verify_steps"] == 199 and sum(result.counts[0]["accepted"]) == 0


# -- where a row ends -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["draft_model:draft_perfect", "eagle:eagle1_perfect"])
@pytest.mark.parametrize("steps", range(1, 9))
def test_nothing_follows_an_eos_inside_an_accepted_run(draft: str, steps: int) -> None:
    result = run("target", draft, [[1, 10]], steps=steps, max_tokens=16, overlap=steps % 2)
    assert result.ids == [[11, 12, 13, 14, 2]]
    assert result.finish == ["stop"] and result.requests[0].stop_reason == 2
    assert result.counts == [tallied([1, 10], result.ids[0], SUCCESSOR, steps)]


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect", "eagle:eagle1_perfect"])
def test_a_stop_string_at_the_front_of_an_accepted_run_ends_the_row_there(draft: str | None, topk: int) -> None:
    sampling = SamplingParams(max_tokens=40, stop=("w31",))
    result = run("target", draft, [[1, 30]], sampling, steps=12, topk=1 if draft is None else topk, text=True)
    assert result.ids == [[31]]
    assert result.finish == ["stop"] and result.requests[0].stop_reason == "w31"
    assert result.engine.text.final(result.requests[0]) == ""


@pytest.mark.parametrize("overlap", [0, 1])
def test_exactly_max_tokens_come_back_whatever_a_step_accepts(overlap: int) -> None:
    limits = range(1, 10)
    sampling = [SamplingParams(max_tokens=n) for n in limits]
    result = run("target", "draft_model:draft_perfect", [[30]] * 9, sampling, steps=4, overlap=overlap)
    assert result.ids == [endless_text([30], n) for n in limits]
    assert result.finish == ["length"] * 9
    assert result.counts == [tallied([30], output, SUCCESSOR, 4) for output in result.ids]


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_full_context_ends_a_row_though_drafts_look_past_it(topk: int, overlap: int) -> None:
    prompts = [[30] * 20, [30] * 31, [30] * 3]
    result = run("target_ctx32", "draft_model:draft_perfect", prompts, steps=5, topk=topk, overlap=overlap, max_tokens=100, page=4)
    assert result.ids == [plain(p, 100, max_length=32)[0] for p in prompts]
    assert [len(ids) for ids in result.ids] == [12, 1, 29]
    assert result.finish == ["context"] * 3
    if topk == 1:
        endless = endless_text([30], 40)
        tallies = [tally_chain(p, ids, follow(SUCCESSOR), 5, endless, max_length=32) for p, ids in zip(prompts, result.ids, strict=True)]
        assert result.counts == [tally.counts() for tally in tallies]
        assert result.counts[2]["proposed"] == [5, 5, 5, 5, 4]


@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect"])
def test_every_eos_id_of_a_list_ends_a_row(draft: str | None) -> None:
    several = run("target_eos_list", draft, [[1, 24]], max_tokens=9)
    assert several.ids == [[25, EOT]] and several.finish == ["stop"] and several.requests[0].stop_reason == EOT
    single = run("target", draft, [[1, 24]], max_tokens=9)
    assert single.ids == [[25, EOT, 26, 27, 24, 25, EOT, 26, 27]] and single.finish == ["length"]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_batch_whose_rows_all_end_in_one_step_makes_room_for_the_next(overlap: int) -> None:
    result = run("target", "draft_model:draft_perfect", [[1, 10]] * 9, steps=3, batch=4, overlap=overlap, max_tokens=16)
    assert result.ids == [[11, 12, 13, 14, 2]] * 9
    assert result.finish == ["stop"] * 9


@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect", "eagle:eagle1_perfect", "eagle3:eagle3_d2t", "mtp", "ngram"])
@pytest.mark.parametrize("topk", [1, 3])
def test_a_prompt_of_one_token_runs_with_every_method(draft: str | None, topk: int) -> None:
    topk = 1 if draft in (None, "ngram") else topk
    result = run("target_mtp" if draft == "mtp" else "target", draft, [[30]], steps=3, topk=topk, max_tokens=11)
    assert result.ids == [[31, 32, 33, 34, 30, 31, 32, 33, 34, 30, 31]]
    assert result.finish == ["length"]


# -- numbers that are not numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect", "eagle:eagle1_perfect"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_row_with_non_finite_logits_is_an_error_and_its_neighbours_are_not(draft: str | None, overlap: int) -> None:
    prompts = [[1, 10], [1, 45, 10], [1, 30], [1, 30, 45]]
    result = run("target_nan45", draft, prompts, overlap=overlap, max_tokens=12, page=4)
    assert [result.ids[0], result.ids[2]] == [plain([10], 12)[0], plain([30], 12)[0]]
    assert result.ids[1] == result.ids[3] == []
    assert result.finish == ["stop", "error", "length", "error"]
    for row in (1, 3):
        assert result.requests[row].error == {"type": "NonFiniteError", "message": "the target's logits at output position 0 are not finite"}
        assert result.counts[row]["prefill_sampled"] == 0


def test_pages_left_by_a_broken_row_do_not_spoil_the_next() -> None:
    prompts = [[1, 30, 45], [1, 45, 45, 45, 45, 45, 45], *[[1, 30]] * 4]
    result = run("target_nan45", "draft_model:draft_perfect", prompts, batch=1, max_tokens=12, page=1, pages=40)
    assert result.finish == ["error", "error", *["length"] * 4]
    assert result.ids[2:] == [endless_text([30], 12)] * 4


@pytest.mark.parametrize("topk", [1, 3])
def test_a_rejected_draft_whose_states_are_not_finite_does_not_end_the_row(topk: int) -> None:
    result = run("target_nan45", "draft_model:draft_to_nan", [[1, 30]], steps=3, topk=topk, max_tokens=12)
    assert result.finish == ["length"]
    assert result.ids == [endless_text([30], 12)]


@pytest.mark.parametrize("temperature", [0.0, 0.0001, 1.0])
def test_equal_laws_accept_every_draft(temperature: float) -> None:
    sampling = SamplingParams(max_tokens=25, temperature=temperature, seed=3)
    prompts = [[30]] * 6
    result = run("stoch_target", "draft_model:stoch_draft_same", prompts, sampling, steps=3)
    assert result.ids == run("stoch_target", None, prompts, sampling).ids
    assert result.accepted == [[3] * 6] * 6
    if temperature < 1:
        assert result.ids == [[30] * 25] * 6


# -- vocabularies and checkpoints -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft"),
    [("target_vocab64", "draft_model:draft_perfect"), ("target", "draft_model:draft_vocab64_trap")],
    ids=["target padded", "draft padded"],
)
@pytest.mark.parametrize("topk", [1, 2])
def test_padded_vocabularies_run_and_padding_is_never_written(target: str, draft: str, topk: int) -> None:
    """The drafts' padding is masked as the target's is, so the draft that prefers padding id 55 proposes the words under it, which are right."""
    result = run(target, draft, [[1, 10], [1, 30]], steps=3, topk=topk, vocab_limit=48, max_tokens=16)
    assert result.ids == [plain([10], 16)[0], plain([30], 16)[0]]
    assert all(token < 48 for ids in result.ids for token in ids)
    if topk == 1:
        assert result.counts[1] == tallied([1, 30], result.ids[1], SUCCESSOR, 3)
        assert result.counts[1]["accepted"] == [4, 4, 4]


def test_prompt_ids_beyond_the_draft_models_table_cost_acceptance_only() -> None:
    prompts = [[1, 50, 63, 30], [55]]
    result = run("target_vocab64", "draft_model:draft_perfect", prompts, max_tokens=8)
    assert result.ids == run("target_vocab64", None, prompts, max_tokens=8).ids
    assert result.ids[0] == endless_text([30], 8)


def test_a_draft_of_another_tokenizer_is_refused_with_the_first_id_that_differs() -> None:
    with pytest.raises(
        CheckpointError, match=r"draft_other_tokenizer: the draft model's vocabulary differs from the target's, first at id 4 \('w04' in the target\)"
    ):
        drafter_of("target", "draft_model:draft_other_tokenizer", tokenizer=tokenizer_of("target"))
    own = tokenizer_of("target").get_vocab()
    check_vocabulary(own, own | {"extra": 48}, "X")
    check_vocabulary(own | {"extra": 48}, own, "X")


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("eagle:eagle3_d2t", r"these weights are for draft=eagle3 \(fc\.weight is 64x192\), not draft=eagle: use draft=eagle3"),
        ("eagle3:eagle1_perfect", r"these weights are for draft=eagle \(fc\.weight is 64x128\), not draft=eagle3: use draft=eagle"),
        ("eagle:draft_perfect", r"these weights are for draft=draft_model, not draft=eagle: use draft=draft_model"),
        (
            "draft_model:eagle1_perfect",
            r"the weights do not match config\.json; missing tensors: lm_head\.weight, .*unexpected tensors: .*fc\.weight",
        ),
    ],
)
def test_weights_of_another_method_are_refused_and_the_right_method_named(draft: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        drafter_of("target", draft)


def test_a_reduced_head_without_lm_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, and with draft_vocab_size=26 the target's \(48\) cannot stand in for it"):
        drafter_of("target", "eagle3:eagle3_no_lm_head")


def test_a_head_without_lm_head_borrows_the_targets_and_a_head_with_one_keeps_it() -> None:
    borrowed = run("target", "eagle:eagle1_perfect", [[1, 30]], steps=1, max_tokens=21)
    assert borrowed.accepted == [[1] * 10]
    kept = run("target", "eagle3:eagle3_d2t", [[1, 30]], steps=1, max_tokens=21)
    assert kept.accepted == [[1] * 10]
    repeats = run("target", "eagle3:eagle3_d2t", [[1, 30]], steps=3, max_tokens=21)
    assert repeats.accepted == [[1] * 10]
    assert borrowed.ids == kept.ids == repeats.ids == [endless_text([30], 21)]


def test_a_head_that_lies_after_odd_tokens_is_accepted_after_even_ones_only() -> None:
    result = run("target", "eagle:eagle1_lies_on_odd", [[30]], steps=1, max_tokens=20)
    # Roots 32, 34, 30 are told right, 31 and 33 wrong: 31>, 32>33 34 (accepted 33), 34>30 31, 31>32, 32>33 34 ...
    honest = lambda context: SUCCESSOR[context[-1]] if context[-1] % 2 == 0 else -1  # noqa: E731
    assert result.counts == [tally_chain([30], result.ids[0], honest, 1, endless_text([30], 24)).counts()]
    assert result.ids == [endless_text([30], 20)]


def test_heads_times_head_dim_need_not_be_the_hidden_size() -> None:
    result = run("target_wide_heads", "draft_model:draft_perfect", [[1, 10], [1, 30]], max_tokens=16)
    assert result.ids == [plain([10], 16)[0], plain([30], 16)[0]]


@pytest.mark.parametrize("head", ["eagle1_hidden32", "eagle1_config_hidden32"])
def test_a_head_of_another_width_is_refused_with_both_sizes(head: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{head}: the drafter reads hidden states of width 32, the target's are 64: it belongs to another target"
    ):
        drafter_of("target", f"eagle:{head}")


@pytest.mark.parametrize("draft", [None, "draft_model:target_tied"])
def test_tied_embeddings_serve_as_the_head(draft: str | None) -> None:
    result = run("target_tied", draft, [[1, 10]], steps=2, max_tokens=6)
    assert result.ids == [[10] * 6]
    if draft is not None:
        assert result.accepted == [[2, 2]]


# -- text -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_character_split_over_tokens_comes_out_whole(steps: int) -> None:
    result = run("target_bytes", "draft_model:draft_perfect", [[34]], steps=steps, max_tokens=5, text=True)
    assert result.ids == [[30, 31, 32, 33, 34]]
    assert result.engine.text.final(result.requests[0]) == "\U0001f600w34"


def test_a_row_cut_inside_a_character_keeps_its_ids_and_shows_the_replacement_character() -> None:
    result = run("target_bytes", "draft_model:draft_perfect", [[34]], max_tokens=2, text=True)
    assert result.ids == [[30, 31]] and result.finish == ["length"]
    assert set(result.engine.text.final(result.requests[0])) == {"\ufffd"}


@pytest.mark.parametrize("draft", [None, "draft_model:draft_perfect"])
@pytest.mark.parametrize("stop", ["\U0001f600", "w34\U0001f600"])
def test_a_stop_string_with_a_split_character_is_found_at_its_last_byte(draft: str | None, stop: str) -> None:
    result = run("target_bytes", draft, [[34]], SamplingParams(max_tokens=30, stop=(stop,)), text=True)
    assert result.ids == [[30, 31, 32, 33] if stop == "\U0001f600" else [30, 31, 32, 33, 34, 30, 31, 32, 33]]
    assert result.requests[0].stop_reason == stop
    assert result.engine.text.final(result.requests[0]) == ("" if stop == "\U0001f600" else "\U0001f600")


def test_toys_run_in_float32_on_one_thread() -> None:
    assert engine_of("target").target.dtype == torch.float32 and torch.get_num_threads() == 1
