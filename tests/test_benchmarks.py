"""The benchmarks run, name and write what they promise, and the naive ways they are measured against give the same results."""

from __future__ import annotations

import gc
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import checkpoints, host, latency, timing, trees
from benchmarks.__main__ import COMMANDS, main
from benchmarks.adaptive import EveryDepth
from benchmarks.registry import REGISTRY, Settings
from benchmarks.timing import Sample
from specgen.config import ModelConfig
from specgen.data.tokenizer import load_tokenizer
from specgen.models.loader import load_target
from specgen.types import SamplingParams
from tests.harness import drive, engine_of, requests_of

CPU = torch.device("cpu")
NAMES = ["next_token_prep", "kv_watermark", "kv_alloc", "decode_host_time", "step_latency", "topk1_chain", "tree_build", "tree_walk"]
SHORT = Settings(CPU, repeats=3, steps=5)


# -- the runner -------------------------------------------------------------------------------------------------------------------------------


def test_every_benchmark_is_registered_once_and_says_what_it_measures() -> None:
    assert sorted(REGISTRY) == sorted(NAMES)
    assert all(entry.name == name and len(entry.summary) > 40 for name, entry in REGISTRY.items())


def test_list_names_every_benchmark_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == []
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*REGISTRY, *COMMANDS]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SystemExit, match=r"no benchmark named kv_watermarks; there are .*kv_watermark,"):
        main(["--only", "kv_watermark,kv_watermarks"])
    with pytest.raises(SystemExit, match="no benchmark named ','"):
        main(["--only", ","])


def test_the_rows_printed_are_the_rows_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    rows = main(["--device", "cpu", "--only", "topk1_chain,kv_watermark", "--repeats", "3", "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    assert [r["name"] for r in rows] == ["kv_watermark"] * 5 + ["topk1_chain"] * 6
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(rows)
    for text, found in zip(printed, rows, strict=True):
        assert text.startswith(found["name"]) and f"{found['ratio']:.2f}x" in text
        assert {"name", "params", "naive_us", "ours_us", "ratio", "naive_p99_us", "ours_p99_us"} <= set(found)
        assert found["ratio"] == found["naive_us"] / found["ours_us"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_line_of_its_own_is_reached_through_the_runner(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name} [-h] [--")


def test_the_guide_shows_the_name_of_every_benchmark() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "performance.md").read_text()
    assert [name for name in [*NAMES, *COMMANDS] if not re.search(rf"`{name}`", guide)] == []


# -- the clocks -------------------------------------------------------------------------------------------------------------------------------


def test_a_sample_is_the_median_and_the_99th_percentile_in_microseconds() -> None:
    assert Sample.of([1000 * n for n in range(200, 0, -1)]) == Sample(101.0, 199.0)
    assert Sample.of([5000]) == Sample(5.0, 5.0)


def test_calls_are_taken_side_by_side_with_what_comes_before_them_and_no_collection() -> None:
    seen: list[str] = []
    calls = {name: (lambda name=name: seen.append(f"{name}{gc.isenabled()}")) for name in "ab"}
    assert gc.isenabled()
    times = timing.host_times(calls, 4, CPU, before=lambda: seen.append("|"))
    rounds = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    assert len(rounds) == 7, "three to warm up and four timed"
    assert all(sorted(each) == ["aFalse", "bFalse", "|", "|"] and each[0] == each[2] == "|" for each in rounds)
    assert {each[1] for each in rounds} == {"aFalse", "bFalse"}, "neither is always first"
    assert set(times) == {"a", "b"} and gc.isenabled()


def test_operators_count_what_makes_memory_and_not_views() -> None:
    x = torch.zeros(4, 4)
    assert timing.operators(lambda: x[1:].t().contiguous()) == 1, "the copy and not the views"
    assert timing.operators(lambda: torch.cat([x, x + 1])) == 2
    assert timing.operators(lambda: x.add_(1)) == 0


# -- what each measures -----------------------------------------------------------------------------------------------------------------------


def test_next_token_preparation_gives_the_same_tokens_however_the_backups_are_written() -> None:
    case = host.NextTokens(16, CPU)
    backups = [r.prompt.token_ids[r.prefill_pos] for r in case.requests]
    for way in (case.naive_inputs, case.loop, case.array_loop, case.fromiter, case.slice_assignment):
        assert way().tolist() == backups
    assert [x.tolist() for x in case.naive()] == [x.tolist() for x in case.ours()]
    rows = list(host.next_token_prep(SHORT))
    assert [r["params"] for r in rows] == [{"requests": n} for n in (1, 4, 16, 64)]
    assert set(rows[0]["alternatives_us"]) == {"loop", "array_loop", "fromiter", "slice_assignment"}


def test_one_read_of_the_lengths_is_at_least_eight_times_as_fast_as_one_a_request() -> None:
    ratios = {r["params"]["requests"]: r["ratio"] for r in host.kv_watermark(Settings(CPU, repeats=100, steps=1))}
    assert ratios[64] >= 8


def test_naive_allocation_hands_out_the_same_pages() -> None:
    mine, theirs = host.Growing(5, tokens=208), host.Growing(5, tokens=208)
    for _ in range(30):
        mine.grow()
        theirs.grow()
        mine.ours()
        theirs.naive()
        assert np.array_equal(mine.pages.table, theirs.pages.table) and np.array_equal(mine.pages.allocated, theirs.pages.allocated)
        assert [r.kv_allocated_len for r in mine.requests] == [r.kv_allocated_len for r in theirs.requests]
    mine.pages.check()
    theirs.pages.check()


def test_naive_allocation_fails_as_a_whole_too() -> None:
    case = host.Growing(2, tokens=160)
    case.pages._num_free = 1
    before = case.pages.allocated.tolist()
    assert not host.naive_alloc(case.pages, case.requests, case.slots, case.committed + 40, host.RESERVE)
    assert case.pages.allocated.tolist() == before


@pytest.mark.parametrize("overlap", [0, 1])
def test_naive_bookkeeping_gives_the_same_text(overlap: int) -> None:
    prompts = [[30], [10, 11], [40, 41, 42], [7] * 9]
    results = []
    for naive in (False, True):
        engine = engine_of("rand_target", "draft_model:rand_draft", page=4, overlap=overlap)
        requests = requests_of(prompts, SamplingParams(max_tokens=20))
        if naive:
            with host.naive_host(engine):
                results.append(drive(engine, requests))
        else:
            results.append(drive(engine, requests))
    assert results[0].ids == results[1].ids and results[0].counts == results[1].counts


def test_host_time_of_a_step_names_its_parts() -> None:
    first = next(host.decode_host_time(SHORT))
    assert first["params"] == {"batch": 1}
    assert {f"{who}_{part}_us" for who in ("naive", "ours") for part in ("plan", "retire")} <= set(first)


def test_a_chain_is_one_operator_where_the_general_way_takes_many() -> None:
    for found in trees.topk1_chain(SHORT):
        assert found["ours_operators"] == 1 and found["naive_operators"] > 5


def test_trees_are_built_and_walked_at_two_shapes_and_three_batches() -> None:
    for rows in (trees.tree_build(SHORT), trees.tree_walk(SHORT)):
        found = [(r["params"]["topk"], r["params"]["num_steps"], r["params"]["nodes"], r["params"]["batch"]) for r in rows]
        assert found == [(topk, steps, nodes, b) for topk, steps, nodes in ((4, 4, 16), (8, 5, 41)) for b in (1, 8, 64)]


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_rewinding_puts_a_job_back_where_it_was(overlap: str) -> None:
    engine = host.embedded_engine(2, CPU, overlap=overlap)
    requests = host.requests_like(2, 16)
    host.start(engine, requests)
    state = latency.Rewinder(engine, requests)
    runs = []
    for _ in range(3):
        latency.block(engine, 4)
        host.drain(engine)
        runs.append([list(r.output_ids) for r in requests])
        state.rewind()
        assert [len(r.output_ids) for r in requests] == state.outputs
        assert torch.equal(engine.rows.ints, state.ints)
    assert all(len(ids) == n + host.STEP_TOKENS * (4 + engine.overlap) for ids, n in zip(runs[0], state.outputs, strict=True))
    assert {len(r.provenance) for r in requests} == set(state.outputs)


def test_step_latency_takes_the_steps_it_was_asked_for() -> None:
    (found,) = latency.step_latency(SHORT)
    assert found["name"] == "step_latency"
    assert found["params"] == {
        "batch": 8, "steps": 5, "overlap": 0, "graphs": False, "model": "embedded", "drafter": "eagle3", "num_steps": 3,
    }  # fmt: skip


def test_adaptive_is_set_beside_every_fixed_num_steps_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "adaptive.json"
    size = ["--batches", "2", "--tokens", "12", "--max-steps", "2", "--repeats", "2", "--seconds", "0.1", "--warm-seconds", "0.05"]
    main(["adaptive", "--device", "cpu", "--dtype", "float32", *size, "--trace", "--json", str(file)])
    eagle, never = json.loads(file.read_text())
    for found in (eagle, never):
        assert list(found["tokens_per_s"]) == ["none", "1", "2", "adaptive"] and all(speed > 0 for speed in found["tokens_per_s"].values())
        assert (found["batch"], found["tokens"], found["seconds"], found["rounds_with_a_capture"]) == (2, 12, 0.1, 0)
        assert found["best_fixed"] in ("1", "2") and found["adaptive_to_best_fixed"] > 0 < found["adaptive_to_none"]
        repeats = found["repeats"]
        for name in ("adaptive_to_best_fixed", "adaptive_to_none"):
            assert len(repeats[name]) == 2 and min(repeats[name]) <= found[name] <= max(repeats[name])
        assert [each["adaptive"] / each["none"] for each in repeats["tokens_per_s"]] == repeats["adaptive_to_none"]
        assert [sum(shares.values()) for shares in repeats["adaptive_shares"]] == pytest.approx([1, 1])
        for trace, shares in zip(found["trace"], repeats["adaptive_shares"], strict=True):
            assert trace[0]["num_steps"] == 2 and {entry["num_steps"] for entry in trace} >= {int(steps) for steps in shares}
            assert trace[0]["told"] == [] and all(time > 0 for entry in trace for _, times, _ in entry["told"] for time in times)
    assert eagle["acceptance_length"]["none"] == 1 and eagle["acceptance_length"]["2"] > 1.3
    assert never["acceptance_length"]["2"] < 1.05, "random weights guess nothing"
    assert "adaptive / best fixed (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--trace"], "--json FILE"),
        (["--only", "eagle,egle"], "no drafter egle"),
        (["--fixed", "7"], "--max-steps"),
        *(
            ([name, "0"], name)
            for name in ("--repeats", "--batches", "--tokens", "--seconds", "--warm-seconds", "--turn-ms", "--max-steps", "--fixed")
        ),
        *(([name, "a"], name) for name in ("--batches", "--seconds", "--fixed")),
        (["--seconds", "nan"], "--seconds"),
        (["--batches", "1,-8"], "'-8' is not a whole number"),
        (["--tokens", "769"], "leaves room for 768"),  # the rows would end at the model's length
        *((["--device", name], name) for name in ("gpu", "meta", "cuda:99")),
        *((["--dtype", name], name) for name in ("floof", "int8")),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (
            ["--only", "never", "--batches", "1", "--tokens", "700", "--seconds", "0.01", "--warm-seconds", "0.01", "--dtype", "float32"],
            "more --seconds",
        ),
    ],
)
def test_a_mistake_in_the_adaptive_benchmark_is_one_line(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["adaptive", "--device", "cpu", *options])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_whole_job_is_timed_on_the_device_and_by_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    size = ["--shape", "embedded", "--device", "cpu", "--dtype", "float32", "--prompts", "3", "--warm-up", "1", "--batch", "2"]
    main(["job", *size, "--only", "eagle3", "--dir", str(tmp_path / "work"), "--json", str(file)])
    (found,) = json.loads(file.read_text())
    rows = [json.loads(line) for line in (tmp_path / "work" / "job_eagle3" / "generations.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in (tmp_path / "work" / "job.jsonl").read_text().splitlines()]
    assert {row["index"]: (row["prompt_tokens"], row["output_tokens"]) for row in rows} == {
        i: (len(row["token_ids"]), row["max_tokens"]) for i, row in enumerate(asked)
    }
    assert all(32 <= len(row["token_ids"]) <= 448 and 16 <= row["max_tokens"] <= 512 for row in asked)
    assert found["output_tokens"] == sum(row["max_tokens"] for row in asked) and all(row["simulated"] and row["text"] for row in rows)
    assert 0 < found["device_s"] == found["device_prefill_s"] + found["device_decode_s"] < found["wall_s"]
    assert found["device_share"] == found["device_s"] / found["wall_s"] == found["device_share_without_captures"] and found["captures"] == 0
    assert re.search(r"eagle3: 3 rows, .* = \d+\.\d% of the wall time", capsys.readouterr().out, re.S)


def test_a_checkpoint_of_a_shape_has_every_id_and_loads_from_its_shards(tmp_path: Path) -> None:
    assert checkpoints.write_folder("embedded", tmp_path) == 4096
    size = checkpoints.write_weights(tmp_path, "cpu", shard_bytes=1 << 20)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    target = load_target(ModelConfig(source="hf", path=str(tmp_path)), CPU, "float32")
    assert size == 2 * sum(view.numel() for view in target.views().values())
    assert target.embed_weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert checkpoints.write_folder("llama31_8b", tmp_path / "large") == 128256
    tokenizer = load_tokenizer(str(tmp_path / "large"))
    assert len(tokenizer) == 128256 and tokenizer.decode([300, 4096, 128255]) == "en w4096 w128255"


def test_start_up_is_timed_from_the_process_to_its_first_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--shape", "embedded", "--device", "cpu", "--dtype", "float32", "--prompts", "2", "--batch", "2"]
    main(["startup", *size, "--only", "cold", "--dir", str(tmp_path), "--json", str(tmp_path / "startup.json")])
    (found,) = json.loads((tmp_path / "startup.json").read_text())
    assert 0 < found["load_s"] < found["start_s"] < found["to_first_token_s"] < found["to_first_decode_step_s"] < found["total_s"] + 1
    assert json.loads((tmp_path / "run_cold" / "stats.json").read_text())["output_tokens"] == found["output_tokens"] == 128
    assert "cold: start " in capsys.readouterr().out


def test_adaptive_engines_warm_up_at_every_num_steps_and_after_every_absence_that_is_its_own_shape() -> None:
    every = EveryDepth(3)
    chosen = []
    while not every.done:
        chosen.append(every.choose(8, 512).num_steps)
    assert {0, 1, 2, 3} == set(chosen) and every.choose(8, 512).num_steps == chosen[0] == 0
    absences = {len(list(group)) for steps, group in itertools.groupby(chosen[1:]) if steps == 0}
    assert absences == {1, 2, 4, 8, 16, 32, 64}
