"""The figures of stats.json, against docs/metrics.md and against slow definitions."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import DataError
from specgen.report.attempts import step_figures, throughput_figures
from specgen.report.stats import build_stats, compute_stats, doubts, load_rows, load_stats, mean_length, write_stats

METRICS = Path(__file__).parent.parent / "docs" / "metrics.md"


def row(index: int, steps: list[tuple[int, int]], *, sample: int = 0, undrafted: int = 0, trimmed: int = 0, **fields: Any) -> dict[str, Any]:
    """A row from its verify steps, each (drafts offered, drafts accepted) on a chain."""
    deepest = max((offered for offered, _ in steps), default=0)
    counts: dict[str, Any] = {
        "prefill_sampled": 1,
        "verify_steps": len(steps),
        "steps_without_draft": undrafted,
        "proposed": [sum(offered >= d for offered, _ in steps) for d in range(1, deepest + 1)],
        "reached": [sum(accepted >= d - 1 and offered >= d for offered, accepted in steps) for d in range(1, deepest + 1)],
        "accepted": [sum(accepted >= d for _, accepted in steps) for d in range(1, deepest + 1)],
        "committed": sum(accepted + 1 for _, accepted in steps) + undrafted,
        "trimmed": trimmed,
    }
    written = 1 + counts["committed"] - trimmed
    return {
        "id": index,
        "sample": sample,
        "index": index,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "output_tokens": written,
        "counts": counts,
        **fields,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 4) if isinstance(value, float) else value


def test_the_worked_example_of_the_documentation_is_what_the_code_computes() -> None:
    blocks = dict(re.findall(r"```json (\w+)\n(.*?)```", METRICS.read_text(), re.DOTALL))
    rows, expected = json.loads(blocks["rows"]), json.loads(blocks["stats"])
    computed = compute_stats(rows)
    assert rounded({name: computed[name] for name in expected}) == expected
    assert computed["groups"] == {} and computed["simulated"] is False
    assert compute_stats(rows, draft_nodes=7)["acceptance"]["node_rate"] == 0.2


STEPS = st.lists(st.integers(1, 4).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, s))), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=5))
def test_sums_histogram_and_rates_follow_from_the_steps(rows: list[list[tuple[int, int]]]) -> None:
    computed = compute_stats([row(i, steps) for i, steps in enumerate(rows)], resamples=20)
    acceptance, steps = computed["acceptance"], [step for one in rows for step in one]
    assert acceptance["histogram"] == [sum(a == d for _, a in steps) for d in range(max((s for s, _ in steps), default=0) + 1)]
    assert acceptance["mean_length"]["pooled"] == (1 + sum(a for _, a in steps) / len(steps) if steps else None)
    assert acceptance["draft_rate"] == (sum(a for _, a in steps) / sum(s for s, _ in steps) if steps else None)
    per_row = [1 + sum(a for _, a in one) / len(one) for one in rows if one]
    macro = acceptance["mean_length"]["macro"]
    assert macro is None if not per_row else math.isclose(macro, sum(per_row) / len(per_row), rel_tol=1e-12)
    for depth in acceptance["per_depth"]:
        d = depth["depth"]
        reached = [a for s, a in steps if s >= d and a >= d - 1]
        assert depth["conditional"] == (sum(a >= d for a in reached) / len(reached) if reached else None)


def test_samples_of_one_input_row_are_one_row_of_the_macro_mean() -> None:
    rows = [row(0, [(2, 2)]), row(1, [(2, 0), (2, 0)]), row(0, [(2, 0), (2, 0), (2, 0)], sample=1)]
    computed = compute_stats(rows)
    assert (computed["requests"], computed["samples"]) == (2, 3)
    assert computed["acceptance"]["mean_length"]["macro"] == ((1 + 2 / 4) + 1) / 2


def test_the_bootstrap_over_distinct_rows_is_the_bootstrap_over_rows() -> None:
    rng = np.random.default_rng(1)
    steps = rng.integers(3, 6, size=200)
    accepted = rng.binomial(steps * 3, 0.5)
    figures = mean_length(accepted, steps)
    draws = rng.integers(0, 200, size=(20_000, 200))
    pooled, macro = 1 + accepted[draws].sum(1) / steps[draws].sum(1), 1 + (accepted / steps)[draws].mean(1)
    # 1,000 resamples know a 2.5% quantile to about 0.07 of the spread; 0.25 of it is well outside chance.
    for name, plain in (("pooled_ci95", pooled), ("macro_ci95", macro)):
        assert np.abs(np.array(figures[name]) - np.quantile(plain, [0.025, 0.975])).max() < 0.25 * plain.std()
    assert mean_length(accepted, steps) == figures


def test_an_interval_over_one_row_is_that_row_and_over_none_is_null() -> None:
    assert mean_length(np.array([3, 0]), np.array([2, 0])) == {"pooled": 2.5, "pooled_ci95": [2.5, 2.5], "macro": 2.5, "macro_ci95": [2.5, 2.5]}
    assert set(mean_length(np.array([0]), np.array([0])).values()) == {None}


def test_a_run_without_rows_or_drafts_has_nulls_and_no_division() -> None:
    for rows in ([], [row(0, [], undrafted=4), row(1, [])]):
        computed = compute_stats(rows)
        acceptance = computed["acceptance"]
        assert (computed["requests"], computed["samples"]) == (len(rows), len(rows))
        assert set(acceptance["mean_length"].values()) == {None}
        assert (acceptance["per_depth"], acceptance["draft_rate"], acceptance["node_rate"], acceptance["histogram"]) == ([], None, None, [0])


def test_a_missing_level_and_an_empty_group_are_reported_without_division() -> None:  # D28
    rows = [
        row(0, [(2, 1)], meta={"category": "easy"}),
        row(1, [(2, 2)], meta={}),
        row(2, [], meta={"category": "hard"}),
    ]
    scores = {"easy": {"correct": 1, "scored": 1}, "unseen": None}
    stats = build_stats(rows, {"group_scores": scores})
    assert list(stats["groups"]) == ["(none)", "easy", "hard", "unseen"]
    lengths = {name: group["acceptance"]["mean_length"]["pooled"] for name, group in stats["groups"].items()}
    assert lengths == {"(none)": 3.0, "easy": 2.0, "hard": None, "unseen": None}
    assert stats["groups"]["easy"]["score"] == {"correct": 1, "scored": 1} and "score" not in stats["groups"]["hard"]
    assert stats["groups"]["unseen"]["requests"] == 0


def test_groups_add_up_to_the_whole_and_a_written_category_wins_over_meta() -> None:
    rows = [row(i, [(3, i % 4)] * (i + 1), category="ab"[i % 2], meta={"category": "other"}) for i in range(6)]
    computed = compute_stats(rows)
    assert list(computed["groups"]) == ["a", "b"]
    for name in ("requests", "samples", "prompt_tokens", "output_tokens"):
        assert sum(group[name] for group in computed["groups"].values()) == computed[name]
    assert compute_stats(rows, group_of=lambda one: None)["groups"] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": 9}, "output_tokens is 9, but prefill_sampled + committed - trimmed is 4"),
        ({"counts": {"committed": 4}}, "committed is 4, but accepted drafts and steps make 3"),
        ({"counts": {"reached": [0, 1]}}, "depth 1: accepted 1, reached 0, proposed 1 and verify_steps 1 are not in rising order"),
        ({"counts": {"accepted": "x"}}, "a field is missing or has the wrong type"),
    ],
)
def test_a_row_that_contradicts_itself_is_an_error_naming_it(change: dict[str, Any], message: str) -> None:
    bad = row(5, [(2, 2)], sample=1, id="five")
    bad["counts"] = {**bad["counts"], "proposed": [1, 1], **change.get("counts", {})}
    bad |= {name: value for name, value in change.items() if name != "counts"}
    with pytest.raises(DataError) as caught:
        compute_stats([row(0, []), bad])
    assert "row (index 5, sample 1, id 'five'): " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "acceptance", "told"),
    [
        ({"topk": 1}, {"verify_steps": 64, "mean_length": {"pooled": 1.0}}, "no draft was accepted in 64 steps"),
        ({"topk": 1}, {"verify_steps": 63, "mean_length": {"pooled": 1.0}}, None),
        ({"topk": 1}, {"verify_steps": 6400, "mean_length": {"pooled": 1.0002}}, None),
        ({}, {"verify_steps": 0, "mean_length": {"pooled": None}}, None),
        (
            {"topk": 4, "simulate_acceptance_length": 5.0},
            {"verify_steps": 9, "mean_length": {"pooled": 4.83}},
            "=5 was imposed and 4.83 reached: a tree",
        ),
        ({"topk": 1, "simulate_acceptance_length": 3.5}, {"verify_steps": 9, "mean_length": {"pooled": 3.4}}, "not every step had so many drafts"),
        ({"topk": 4, "simulate_acceptance_length": 5.0}, {"verify_steps": 9, "mean_length": {"pooled": 4.96}}, None),
        ({"topk": 1, "simulate_acceptance_length": 1.0}, {"verify_steps": 900, "mean_length": {"pooled": 1.0}}, None),
    ],
)
def test_what_makes_a_runs_acceptance_doubtful_is_said(draft: dict[str, Any], acceptance: dict[str, Any], told: str | None) -> None:
    found = doubts({"draft": draft, "acceptance": acceptance})
    assert (told is None and not found) or (told is not None and len(found) == 1 and told in found[0])
    assert doubts({}) == []


@pytest.mark.parametrize(("steps", "reached", "told"), [(12, 3.42, False), (12, 3.16, True), (1200, 3.49, False), (1200, 3.46, True)])
def test_rows_that_end_before_a_length_has_alternated_are_not_doubted(steps: int, reached: float, told: bool) -> None:
    """Four rows: less than a token of each may be missing, and one part in a hundred."""
    acceptance = {"verify_steps": steps, "mean_length": {"pooled": reached}}
    assert bool(doubts({"draft": {"simulate_acceptance_length": 3.5}, "acceptance": acceptance, "samples": 4})) is told


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"method": "ngram"}, "the texts do not repeat themselves"),
        ({"method": "eagle", "load_format": "dummy"}, "draft.load_format=dummy gives random weights"),
        ({"method": "eagle", "load_format": "auto"}, "the drafter may belong to another target, or its weights be damaged"),
    ],
)
def test_why_no_draft_was_right_is_what_can_be_the_reason(draft: dict[str, Any], why: str) -> None:
    found = doubts({"draft": draft, "acceptance": {"verify_steps": 90, "mean_length": {"pooled": 1.0}}})
    assert found == [f"no draft was accepted in 90 steps: {why}"]


def test_stats_hold_every_contract_field_and_the_speed_up(tmp_path: Path) -> None:
    info = {
        "draft": {"method": "eagle", "topk": 2, "num_steps": 2, "num_draft_tokens": 5},
        "throughput": {"output_tokens_per_s": 300.0},
        "baseline": {"throughput": {"output_tokens_per_s": 120.0}},
        "attempts": [{"attempt": 1, "wall_s": float("inf")}],
    }
    stats = build_stats([row(0, [(2, 1), (2, 2)], simulated=True)], info)
    expected = "schema requests samples errors prompt_tokens output_tokens model draft sampling chat simulated acceptance throughput step baseline"
    assert list(stats) == [*expected.split(), "lossless", "groups", "score", "attempts", "environment", "complete"]
    assert (stats["schema"], stats["simulated"], stats["baseline"]["speedup"]) == (1, True, 2.5)
    assert stats["acceptance"]["node_rate"] == 3 / (2 * 4)
    write_stats(tmp_path, stats)
    read = load_stats(tmp_path)
    assert read["attempts"] == [{"attempt": 1, "wall_s": None}]
    assert {**read, "attempts": None} == {**stats, "attempts": None}
    with pytest.raises(TypeError, match="modle"):
        build_stats([], {"modle": {}})


def test_a_chain_counts_its_nodes_itself() -> None:
    cut = [row(0, [(3, 3), (1, 0)])]
    stats = build_stats(cut, {"draft": {"method": "eagle", "topk": 1, "num_steps": 3, "num_draft_tokens": 4}})
    assert stats["acceptance"]["node_rate"] == stats["acceptance"]["draft_rate"] == 3 / 4


def test_an_adaptive_tree_has_no_node_rate_for_its_nodes_vary() -> None:
    draft = {"method": "eagle", "topk": 2, "num_steps": 2, "num_draft_tokens": 5, "adaptive": True}
    acceptance = build_stats([row(0, [(2, 1)], category="a")], {"draft": draft})
    assert acceptance["acceptance"]["node_rate"] is None and acceptance["groups"]["a"]["acceptance"]["node_rate"] is None
    assert acceptance["acceptance"]["draft_rate"] == 0.5


def test_loading_names_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no generations.jsonl and no generations/: it is not the folder of a run"):
        load_rows(tmp_path)
    with pytest.raises(DataError, match=r"stats.json does not exist; the run has not ended"):
        load_stats(tmp_path)
    (tmp_path / "stats.json").write_text('{"schema": 99}')
    with pytest.raises(DataError, match="has schema 99, this version reads 1"):
        load_stats(tmp_path)


def test_reading_a_run_in_progress_leaves_out_the_row_being_written(tmp_path: Path) -> None:
    line = json.dumps(row(0, []))
    (tmp_path / "generations.jsonl").write_text(line + "\n" + line[:30])
    with pytest.warns(UserWarning, match="last line is cut off and was left out"):
        assert [one["index"] for one in load_rows(str(tmp_path))] == [0]


def test_times_are_ratios_and_linear_percentiles_and_null_without_time() -> None:
    given = {
        "wall_s": 4.0,
        "start_s": 7.0,
        "load_s": 5.0,
        "first_token_s": 0.5,
        "first_decode_s": 0.6,
        "device_prefill_s": 1.0,
        "device_decode_s": 2.5,
    }
    rates = {"output_tokens_per_s": 25.0, "decode_tokens_per_s": 30.0}
    assert throughput_figures(output_tokens=100, decode_tokens=90, decode_s=3.0, **given) == rates | given
    assert throughput_figures(output_tokens=0, wall_s=0.0, decode_tokens=0, decode_s=0.0, start_s=1.0)["output_tokens_per_s"] is None
    step = step_figures([1.0, 2.0, 3.0, 4.0, 5.0], {"verify_ms": 2.0})
    assert rounded(step) == {
        "count": 5,
        "ms_p50": 3.0,
        "ms_p90": 4.6,
        "ms_p99": 4.96,
        "propose_ms": None,
        "verify_ms": 2.0,
        "finish_ms": None,
        "host_gap_ms": None,
    }
    assert step_figures([])["ms_p50"] is None
    with pytest.raises(KeyError, match="draft_ms"):
        step_figures([], {"draft_ms": 1.0})
