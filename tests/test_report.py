"""The table, the pages, the sweep, the environment and the merge."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specgen.config import Config
from specgen.errors import CheckpointError, ConfigError, DataError
from specgen.report import plots
from specgen.report.disk import write_json
from specgen.report.environment import config_hash, config_record, differences, environment, environment_record, git_revision, model_fingerprint
from specgen.report.html import write_report
from specgen.report.merge import merge_runs
from specgen.report.stats import build_stats, load_rows, load_stats, write_stats
from specgen.report.sweep import write_sweep
from specgen.report.table import progress_line, terminal_table
from specgen.report.writer import RunWriter
from specgen.types import Completion, Counts


def done(index: int, sample: int = 0, **fields: Any) -> Completion:
    counts = Counts(prefill_sampled=1, verify_steps=2, proposed=[2, 2], reached=[2, 1], accepted=[1, 1], committed=4)
    row: dict[str, Any] = {"id": index, "sample": sample, "index": index, "prompt": f"p{index}", "text": "t", "token_ids": [1] * 5}
    row |= {"finish_reason": "length", "stop_reason": None, "error": None, "prompt_tokens": 3, "output_tokens": 5, "counts": counts}
    return Completion(**{**row, **fields})


DRAFT = {"method": "eagle", "topk": 1, "num_steps": 2, "num_draft_tokens": 3}
INFO: dict[str, Any] = {
    "model": {"path": "some/target", "dtype": "float32", "device": "cpu"},
    "draft": DRAFT,
    "sampling": {"temperature": 0.0, "stop": ["</b>"]},
    "throughput": {"output_tokens_per_s": 300.0, "decode_tokens_per_s": 320.0, "wall_s": 2.5, "start_s": 1.0},
    "step": {"count": 12, "ms_p50": 7.0, "ms_p90": 8.0, "ms_p99": 9.0, "propose_ms": 1.0, "verify_ms": 5.0, "finish_ms": 0.5, "host_gap_ms": 0.25},
    "baseline": {"throughput": {"output_tokens_per_s": 120.0}, "step": {"count": 20, "ms_p50": 5.0}},
    "lossless": {"checked": 4, "equal": 3, "near_tie": 1, "different": 0, "worst_gap": 0.0125},
    "attempts": [{"attempt": 1, "wall_s": 1.0}, {"attempt": 2, "wall_s": 1.5}],
}


def make_run(folder: Path, *rows: Completion, info: dict[str, Any] | None = None, config: Config | None = None, **options: Any) -> dict[str, Any]:
    with RunWriter(folder, **options) as writer:
        for row in rows:
            writer.append(row)
    stats = build_stats(load_rows(folder), INFO if info is None else info)
    write_stats(folder, stats)
    if config is not None:
        write_json(folder / "environment.json", environment_record(config, {"target": {"weights": []}}))
    return stats


class Page(HTMLParser):
    """Fails on unbalanced tags; collects text, tags and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# --- the table


def test_a_table_of_many_depths_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    stats = make_run(tmp_path, done(0))
    depth = stats["acceptance"]["per_depth"][0]
    for count, last, more in ((32, "32", False), (40, "32", True)):
        stats["acceptance"]["per_depth"] = [depth | {"depth": d + 1} for d in range(count)]
        lines = terminal_table(stats).splitlines()
        rows = [line.split()[0] for line in lines if line.split() and line.split()[0].isdecimal() and len(line.split()) == 7]
        assert rows[-1] == last and ("  (8 more depths are in stats.json)" in lines) == more


def test_a_score_is_shown_whole(tmp_path: Path) -> None:
    score = {"task": "gsm8k", "metric": "accuracy", "value": 0.25, "ci95": [0.0, 0.75], "rows": 1200, "scored": 8, "errors": 2, "groups": {}}
    for more, told in (({}, ""), ({"not_scored": 1190, "failures": 0, "no_answer": 2}, ", not scored 1,190, no answer 2")):
        lines = terminal_table(make_run(tmp_path / str(len(more)), done(0), info={"score": score | more})).splitlines()
        assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("score")] == [
            f"gsm8k accuracy 0.250 [0.000, 0.750] (8 of 1,200 rows scored{told})"
        ]
    nothing = make_run(tmp_path / "none", done(0), info={"score": score | {"value": None, "ci95": None, "scored": 0}})
    assert "metric accuracy, value -, " in terminal_table(nothing)


def test_the_terminal_table_is_exactly_this(tmp_path: Path) -> None:
    stats = make_run(tmp_path, done(0, category="math"), done(1, category="chat"))
    assert terminal_table(stats) == (
        "model   some/target (float32, cpu)\n"
        "draft   eagle (topk 1, num_steps 2, num_draft_tokens 3)\n"
        "rows    2 requests, 2 samples, 0 errors\n"
        "tokens  6 prompt tokens, 10 output tokens\n"
        "\n"
        "acceptance\n"
        "  depth  proposed  reached  accepted   rate  per step  conditional\n"
        "      1         4        4         2  50.0%     50.0%        50.0%\n"
        "      2         4        2         2  50.0%     50.0%       100.0%\n"
        "  mean acceptance length  2.00 [2.00, 2.00] pooled, 2.00 [2.00, 2.00] by row (95% intervals)\n"
        "  draft acceptance rate   50.0% of draft steps, 50.0% of draft tokens\n"
        "\n"
        "groups\n"
        "  group  requests  errors  output tokens  acceptance length\n"
        "  chat          1       0              5  2.00 [2.00, 2.00]\n"
        "  math          1       0              5  2.00 [2.00, 2.00]\n"
        "\n"
        "throughput  300.0 tokens/s (320.0 in decode), 2.5 s\n"
        "step        7.00 / 8.00 / 9.00 ms (p50 / p90 / p99), 12 steps\n"
        "phases      propose 1.00, verify 5.00, finish 0.50, host gap 0.25 ms\n"
        "speed-up    2.50x against 120.0 tokens/s without a draft, same prompts\n"
        "lossless    3 equal, 1 near-tie, 0 different, of 4 replayed, worst gap 0.0125\n"
    )


def test_the_table_fits_a_terminal_and_says_when_acceptance_is_imposed(tmp_path: Path) -> None:
    info = {**INFO, "model": {"path": "a/" * 200, "dtype": "bfloat16"}, "score": {"accuracy": 0.5, "details": [1] * 100}}
    rows = [done(i, category="c" * 90, simulated=True) for i in range(3)]
    text = terminal_table(make_run(tmp_path, *rows, info=info))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "note    acceptance was imposed (simulated): the texts are not the model's" in text
    assert "score       accuracy 0.500" in text


def test_a_run_without_rows_has_a_table_without_figures() -> None:
    assert terminal_table(build_stats([], {})) == "rows    0 requests, 0 samples, 0 errors\ntokens  0 prompt tokens, 0 output tokens\n"


def test_the_progress_line_has_no_figure_before_there_is_one() -> None:
    assert progress_line(0, 0, 0.0, 0, 0) == "0 rows, - tok/s, acceptance length -"
    assert progress_line(1200, 6000, 4.0, 30, 20) == "1,200 rows, 1,500 tok/s, acceptance length 2.50"


# --- the pages


def test_the_report_is_one_page_that_fetches_nothing_and_escapes_everything(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>&amp;'
    info = {**INFO, "model": {"path": evil}, "draft": {**DRAFT, "method": evil}, "attempts": [{evil: 1}, {evil: evil}], "group_scores": {evil: evil}}
    make_run(tmp_path, done(0, id=evil, prompt=evil, text=evil, category=evil), done(1, category="<b>"), info=info)
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert page.fetched == [] and "http" not in text and "url(" not in text
    assert page.text.count(evil) >= 8
    assert page.tags.count("svg") == 5  # depths, histogram, groups, speed, phases


def test_the_report_shows_the_figures_of_stats_json(tmp_path: Path) -> None:
    make_run(tmp_path, done(0), done(1))
    text = Page(write_report(tmp_path).read_text()).text
    for figure in (
        "mean acceptance length [2.00, 2.00]",
        "2.50x",
        "7.00 ms",
        "3 / 4",
        "accepted / proposed, draft depth 1: 50%",
        "Starts of this run",
    ):
        assert figure in text
    assert "verify: 5.00 ms" in text and "share of steps, accepted drafts 0: 50%" in text


def test_a_run_without_rows_or_draft_still_has_a_report(tmp_path: Path) -> None:
    make_run(tmp_path, info={})
    assert "No step had a draft." in Page(write_report(tmp_path).read_text()).text


def test_axis_steps_are_round_and_enclose_the_values() -> None:
    assert plots.ticks(1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert plots.ticks(1440.0) == [0.0, 500.0, 1000.0, 1500.0]
    assert plots.ticks(0.0) == plots.ticks(1.0)
    assert plots.span_ticks(2.1, 3.9) == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert plots.span_ticks(3.0, 3.0) == [3.0, 4.0]


def test_a_missing_value_leaves_its_place_empty() -> None:
    chart = plots.bars("t", ["1", "2"], [plots.Series("a", [0.5, None])], lambda v: f"{v:.1f}", axis="depth")
    assert chart.count("<title>") == 1 and "a, depth 1: 0.5" in chart
    assert "no value" in plots.rows("t", ["x"], [None], str)
    assert "no values" in plots.lines("t", [plots.Series("a")], str, x_axis="n")


# --- the sweep


def test_a_sweep_lists_every_job_also_those_that_failed(tmp_path: Path) -> None:
    for topk, steps, speed in ((1, 2, 100.0), (1, 3, 150.0), (4, 2, 120.0)):
        draft = {**DRAFT, "topk": topk, "num_steps": steps, "num_draft_tokens": 1 + topk * steps}
        make_run(tmp_path / f"k{topk}s{steps}", done(0), info={**INFO, "draft": draft, "throughput": {"output_tokens_per_s": speed}})
    write_report(tmp_path / "k1s2")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "stats.json").write_text("{")
    jobs: list[dict[str, Any]] = [
        {"folder": tmp_path / "k1s2", "overrides": ["draft.topk=1", "data.path=a,b"], "exit_code": 0, "error": None},
        {"folder": "k1s3", "overrides": "draft.num_steps=3", "exit_code": 0, "error": None},
        {"folder": "k4s2", "overrides": [], "exit_code": 3, "error": None},
        {"folder": None, "overrides": ["draft.path=<x>"], "exit_code": 2, "error": "no folder <x>;\nremedy"},
        {"folder": "broken", "overrides": [], "exit_code": 1, "error": None},
    ]
    write_sweep(tmp_path, jobs)
    with open(tmp_path / "sweep.csv", newline="") as file:
        table = list(csv.DictReader(file))
    shown = [
        [job[name] for name in ("folder", "overrides", "exit_code", "topk", "num_steps", "acceptance_length", "output_tokens_per_s")] for job in table
    ]
    assert shown == [
        ["k1s2", "draft.topk=1 data.path=a,b", "0", "1", "2", "2.0", "100.0"],
        ["k1s3", "draft.num_steps=3", "0", "1", "3", "2.0", "150.0"],
        ["k4s2", "", "3", "4", "2", "2.0", "120.0"],
        ["", "draft.path=<x>", "2", "", "", "", ""],
        ["broken", "", "1", "", "", "", ""],
    ]
    assert table[3]["error"] == "no folder <x>;\nremedy" and "stats.json is not valid JSON" in table[4]["error"]
    page = Page((tmp_path / "sweep.html").read_text())
    assert "3 did not end with exit code 0." in page.text and "no folder <x>" in page.text
    assert page.fetched == ["k1s2/report.html"] and page.tags.count("svg") == 3
    assert "eagle topk 1, num_steps 3: 150" in page.text and "eagle topk 4, num_steps 2: 120" in page.text


def test_a_sweep_without_any_result_still_has_its_files(tmp_path: Path) -> None:
    rows = write_sweep(tmp_path / "new", [{"folder": None, "overrides": [], "exit_code": 2, "error": "e"}])
    assert rows[0]["acceptance_length"] is None
    assert Page((tmp_path / "new" / "sweep.html").read_text()).tags.count("svg") == 0


# --- the environment


def test_the_environment_imports_no_heavy_package() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from specgen.report.environment import environment\n"
        "facts = environment()\n"
        "assert not {'torch', 'transformers', 'datasets', 'triton', 'pyarrow'} & set(sys.modules), sys.modules\n"
        "assert facts['device'] is None and facts['packages']['transformers'] and facts['packages']['torch']\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent.parent)], check=True, timeout=120)


def test_the_environment_is_strict_json_and_knows_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    facts = environment("cpu")
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert git_revision(tmp_path) is None


def changed(**settings: Any) -> Config:
    config = Config()
    for key, value in settings.items():
        group, _, name = key.partition("__")
        setattr(getattr(config, group) if name else config, name or group, value)
    return config


def test_the_configuration_hash_follows_what_decides_the_rows_and_nothing_else() -> None:
    base = config_hash(Config())
    same = [changed(engine__page_size=64), changed(output__dir="x"), changed(data__shard="1/4"), changed(model__device="cuda"), changed(resume="x")]
    other = [
        changed(sampling__seed=1),
        changed(draft__topk=4),
        changed(output__format="parquet"),
        changed(sampling__stop=["a"]),
        changed(data__limit=3),
    ]
    assert {config_hash(config) for config in same} == {base}
    assert len({base, *(config_hash(config) for config in other)}) == 1 + len(other)
    assert config_hash(config_record(Config())) == base


def test_differences_name_the_key_and_both_values() -> None:
    new = changed(sampling__seed=1, engine__page_size=64, sampling__logit_bias={"5": 1.0})
    old = config_record(Config())
    assert differences(old, config_record(new)) == ["sampling.logit_bias: {} -> null", "sampling.logit_bias.5: null -> 1.0", "sampling.seed: 0 -> 1"]
    assert differences(old, config_record(new), ignore=("sampling",)) == ["engine.page_size: 16 -> 64"]


def safetensors(path: Path, data: bytes) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_fingerprint_moves_with_the_checkpoint_and_changes_with_its_content(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    for folder in (first, copy):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        safetensors(folder / "model.safetensors", bytes(100_000))
    assert model_fingerprint(first) == model_fingerprint(str(copy))
    assert model_fingerprint(first)["tokenizer"] is None and model_fingerprint(first)["weights"][0]["name"] == "model.safetensors"
    safetensors(copy / "model.safetensors", bytes(99_999) + b"\x01")  # same shape, one other weight at the end
    assert model_fingerprint(first)["weights"] != model_fingerprint(copy)["weights"]
    (copy / "config.json").write_text("{ }")
    assert model_fingerprint(first)["config"] != model_fingerprint(copy)["config"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        model_fingerprint(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off or not a safetensors file"):
        model_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((3).to_bytes(8, "little") + b"{x}")
    with pytest.raises(CheckpointError, match="has no valid safetensors header"):
        model_fingerprint(tmp_path)


# --- the merge


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_merged_shards_are_one_run_in_order(tmp_path: Path, form: str) -> None:
    rows = {(i, s): done(i, s, category="ab"[i % 2]) for i in range(7) for s in range(2)}
    whole = make_run(tmp_path / "whole", *rows.values(), format=form)
    shards = []
    for shard in range(3):
        mine = [row for (i, _), row in reversed(rows.items()) if i % 3 == shard]
        shards.append(tmp_path / f"shard{shard}")
        make_run(shards[-1], *mine, format=form, config=changed(data__shard=f"{shard}/3", output__format=form))
    merged = merge_runs([shards[2], shards[0], shards[1]], tmp_path / "out")
    assert (merged.rows, merged.missing_shards) == (14, [])
    assert list(load_rows(tmp_path / "out")) == list(load_rows(tmp_path / "whole"))
    if form == "jsonl":
        assert (tmp_path / "out" / "generations.jsonl").read_bytes() == (tmp_path / "whole" / "generations.jsonl").read_bytes()
    stats = load_stats(tmp_path / "out")
    for name in ("requests", "samples", "errors", "prompt_tokens", "output_tokens", "acceptance", "groups", "draft"):
        assert stats[name] == whole[name]
    assert (stats["throughput"], stats["baseline"], len(stats["attempts"])) == (None, None, 6)
    assert stats["lossless"] == {"checked": 12, "equal": 9, "near_tie": 3, "different": 0, "worst_gap": 0.0125}
    record = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert record["config"]["data"]["shard"] is None and len(record["merged"]) == 3 and record["shards"] == ["0/3", "1/3", "2/3"]
    assert stats["complete"] and stats["environment"]["merged"] == record["merged"]
    write_report(tmp_path / "out")


def test_a_merge_says_which_shards_are_missing_and_can_be_joined_with_them(tmp_path: Path) -> None:
    for shard in range(4):
        make_run(tmp_path / str(shard), done(shard), config=changed(data__shard=f"{shard}/4"))
    for out, dirs, missing in (("some", "03", ["1/4", "2/4"]), ("more", ["some", "2"], ["1/4"]), ("all", ["1", "more"], [])):
        merged = merge_runs([tmp_path / name for name in dirs], tmp_path / out)
        assert merged.missing_shards == missing and load_stats(tmp_path / out)["complete"] is (not missing)
        assert [row["index"] for row in load_rows(tmp_path / out)] == [i for i in range(4) if f"{i}/4" not in missing]


def test_a_merge_of_shards_of_several_numbers_knows_what_is_missing(tmp_path: Path) -> None:
    """Row k is in shard i/N where k mod N = i; also where one of the folders is a merge that was not whole."""
    shards = {"0/8": (0,), "4/8": (4,), "1/2": (1, 3, 5, 7), "2/4": (2, 6), "0/99991": (0,), "1/99989": (1,)}
    for shard, rows in shards.items():
        make_run(tmp_path / shard.replace("/", "of"), *map(done, rows), config=changed(data__shard=shard))
    steps = [
        ("some", ["0of8", "4of8"], [f"{i}/8" for i in (1, 2, 3, 5, 6, 7)]),
        ("more", ["some", "1of2"], ["2/8", "6/8"]),
        ("direct", ["1of2", "2of4"], ["0/4"]),
        ("whole", ["2of4", "more"], []),
    ]
    for out, dirs, missing in steps:
        merged = merge_runs([tmp_path / name for name in dirs], tmp_path / out)
        assert merged.missing_shards == missing and merged.stats["complete"] is (not missing)
    assert [row["index"] for row in load_rows(tmp_path / "whole")] == [*range(8)]
    with pytest.raises(ConfigError, match="these are shards of 99989, 99991: whether rows are missing cannot be told"):
        merge_runs([tmp_path / "0of99991", tmp_path / "1of99989"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_refuses_what_does_not_belong_together_and_writes_nothing(tmp_path: Path) -> None:
    config = Config()
    make_run(tmp_path / "a", done(0), done(1), config=config)
    make_run(tmp_path / "b", done(1), config=config)
    make_run(tmp_path / "c", done(2), config=changed(sampling__seed=1))
    make_run(tmp_path / "d", done(3), format="parquet", config=config)
    make_run(tmp_path / "e", done(4), done(5), config=config)
    with open(tmp_path / "e" / "generations.jsonl", "r+b") as file:
        file.truncate((tmp_path / "e" / "generations.jsonl").stat().st_size - 5)
    make_run(tmp_path / "f", done(6), config=config)
    make_run(tmp_path / "h", done(8))
    write_json(tmp_path / "h" / "environment.json", environment_record(config, {"target": {"weights": ["other"]}}))
    (tmp_path / "f" / "stats.json").unlink()
    make_run(tmp_path / "i", done(9), done(10), config=config)
    lines = (tmp_path / "i" / "generations.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "i" / "generations.jsonl").write_bytes(lines[0] + lines[1].replace(b'"index":10', b'"index":"10"'))
    cases: list[tuple[str, type[Exception], str]] = [
        ("b", DataError, r"row \(index 1, sample 0\) stands in .*a and .*b; merge shards that do not overlap"),
        ("c", ConfigError, r"are not shards of one job: sampling.seed: 0 -> 1"),
        ("d", DataError, "the runs differ in format: "),
        ("e", DataError, r"e holds 1 whole rows but its stats.json counts 2; finish it with resume="),
        ("h", ConfigError, r"are not shards of one job: their models in environment\.json differ"),
        ("f", DataError, "stats.json does not exist; the run has not ended"),
        ("i", DataError, r"i/generations\.jsonl line 2 is not a row that specgen wrote \('index' is not a whole number\); remove it"),
    ]
    for name, kind, message in cases:
        with pytest.raises(kind, match=message):
            merge_runs([tmp_path / "a", tmp_path / name], tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="needs at least two run folders"):
        merge_runs([tmp_path / "a"], tmp_path / "out")
    make_run(tmp_path / "g", done(7), config=config)
    with pytest.raises(DataError, match="already holds the results of a run"):
        merge_runs([tmp_path / "a", tmp_path / "g"], tmp_path / "b")
