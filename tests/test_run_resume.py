"""Going on with a run: after any kill, with what may change and what may not; shards and their union."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgen import cli, run
from tests.jobs import SMALL, log_of, resume, rows_of, same, start, stats_of, toy, write_lines
from tests.toys import toy_folder

TEXTS = ["w10", "w30", "w40", "w24", "w05", "w31", "w41", "w11"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(rows: list[Any], name: str = "in.jsonl") -> list[str]:
    return ["data=jsonl", f"data.path={write_lines(Path(name), rows)}"]


def rows(count: int = 24) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": TEXTS[i % 8], "max_tokens": 3 + i % 9} for i in range(count)]


def cut(out: str, keep: int, tail: bytes = b"") -> None:
    """The folder as a kill leaves it: ``keep`` whole rows, then ``tail``, and nothing that is written at the end."""
    path = Path(out, "generations.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]) + tail)
    Path(out, "stats.json").unlink()
    Path(out, "report.html").unlink()


# -- after a kill -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "mended"),
    [
        (b"", None),
        (b'{"id":"r9","sample":0,"inde', "a torn last line of 27 bytes was removed"),
        (b'{"id":"r9","text":"\xc3', "a torn last line of 20 bytes was removed"),
        (b"\x00\x00\x00", "a torn last line of 3 bytes was removed"),
    ],
)
def test_a_killed_run_ends_with_the_rows_of_one_that_was_not(tail: bytes, mended: str | None) -> None:
    assert start("o", *toy(), *lines(rows())) == 0
    whole = rows_of("o")
    cut("o", 7, tail)
    kept = Path("o/generations.jsonl").read_bytes()[: -len(tail) or None]
    assert resume("o") == 0
    assert rows_of("o") == whole and Path("o/generations.jsonl").read_bytes().startswith(kept)
    assert [entry["rows"] for entry in stats_of("o")["attempts"]] == [24, 17]
    assert (f"repaired: generations.jsonl: {mended}" in log_of("o")) == (mended is not None)
    assert "resumed: 7 rows are finished, 0 of them errors; 0 error rows are tried again" in log_of("o")


def test_a_whole_last_line_without_line_feed_is_kept_and_not_redone() -> None:
    assert start("o", *toy(), *lines(rows())) == 0
    path = Path("o/generations.jsonl")
    cut("o", 5)
    path.write_bytes(path.read_bytes()[:-1])
    assert resume("o") == 0
    assert [entry["rows"] for entry in stats_of("o")["attempts"]] == [24, 19] and len(rows_of("o")) == 24


def test_a_run_killed_before_its_first_row_starts_over() -> None:
    assert start("o", *toy(), *lines(rows())) == 0
    whole = rows_of("o")
    for names in (("generations.jsonl",), ("generations.jsonl", "environment.json"), ("generations.jsonl", "environment.json", "attempts.jsonl")):
        for name in (*names, "stats.json", "report.html"):
            Path("o", name).unlink(missing_ok=True)
        assert resume("o") == 0 and rows_of("o") == whole


def test_resuming_a_finished_run_changes_no_row_and_keeps_its_figures() -> None:
    assert start("o", *toy(), *lines(rows()), "baseline=true", "draft.adaptive=true") == 0
    before, kept = stats_of("o"), Path("o/generations.jsonl").read_bytes()
    assert resume("o") == 0
    after = stats_of("o")
    assert Path("o/generations.jsonl").read_bytes() == kept
    assert [after[name] for name in ("throughput", "step", "baseline", "acceptance")] == [
        before[name] for name in ("throughput", "step", "baseline", "acceptance")
    ]
    assert after["draft"] == before["draft"] and sum(entry["steps"] for entry in after["draft"]["adaptive"]) > 0
    assert [entry["rows"] for entry in after["attempts"]] == [24, 0]


@pytest.mark.parametrize("ended", [KeyboardInterrupt, OSError])
def test_a_baseline_that_was_asked_for_and_is_missing_is_said_to_be(ended: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the baseline's time: all rows are there, and the start beside which it counts is over."""

    def dies(self: Any) -> None:
        raise ended

    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "baseline", dies)
        assert start("o", *toy(), *lines(rows()), "baseline=true") in (1, 130)
    assert not Path("o/stats.json").exists() and run.NO_BASELINE not in log_of("o")
    assert resume("o") == 0
    assert stats_of("o")["baseline"] is None and len(rows_of("o")) == 24
    assert log_of("o").count(run.NO_BASELINE) == 1


def test_damaged_lines_about_a_start_count_as_torn_ones() -> None:
    assert start("o", *toy(), *lines(rows(2))) == 0
    kept, path = rows_of("o"), Path("o/attempts.jsonl")
    wrong = [{"overrides": 3}, {"overrides": [1]}, {"throughput": 3}, {"step": "text"}, {"baseline": [1]}, {"lossless": 7}]
    path.write_text("".join(json.dumps({"attempt": 1, **fields}) + "\n" for fields in wrong) + path.read_text())
    assert resume("o") == 0 and rows_of("o") == kept and [entry["attempt"] for entry in stats_of("o")["attempts"]] == [1, 2]


def test_a_configuration_that_no_job_can_have_merges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for shard in range(2):
        assert start(f"m{shard}", *toy(), *lines(rows(4)), f"data.shard={shard}/2") == 0
        path = Path(f"m{shard}/environment.json")
        record = json.loads(path.read_text())
        record["config"]["engine"] = 3
        path.write_text(json.dumps(record))
    capsys.readouterr()
    assert cli.main(["merge=m0,m1", "output.dir=m"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not Path("m").exists()


def test_a_merge_that_a_full_disk_stops_says_to_merge_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(2):
        assert start(f"m{shard}", *toy(), *lines(rows(4)), f"data.shard={shard}/2") == 0
    replace = os.replace

    for name in ("environment.json", "stats.json", "report.html"):

        def full(source: Any, target: Any, name: str = name) -> None:
            if Path(target).name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(source, target)

        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            assert cli.main(["merge=m0,m1", f"output.dir=m-{name}"]) == 2
        assert "the disk or quota is full; the merge is incomplete: remove the folder and merge again" in capsys.readouterr().err


def test_an_empty_shard_misses_no_baseline() -> None:
    assert start("o", *toy(), *lines(rows(1)), "baseline=true", "data.shard=1/2") == 0
    assert stats_of("o")["samples"] == 0 and run.NO_BASELINE not in log_of("o")


def test_a_baseline_that_is_there_or_was_not_asked_for_is_not_missed() -> None:
    assert start("with", *toy(), *lines(rows(4)), "baseline=true") == 0 and resume("with") == 0
    assert start("without", *toy(), *lines(rows(4))) == 0 and resume("without") == 0
    assert run.NO_BASELINE not in log_of("with") + log_of("without")


DAMAGED_FILES = {
    **{f".hydra/{name}.yaml": ["", "- a\n", "text\n", "a: b\n"] for name in ("config", "overrides", "hydra")},
    "environment.json": [
        *("", "[]", "[1]", "7", "null", "{"),
        *('{"config":3}', '{"models":{"target":3}}', '{"input":"x"}', '{"input":{"files":3}}', '{"input":3}'),
    ],
}
HARMLESS = (".hydra/overrides.yaml", ""), (".hydra/overrides.yaml", "- a\n"), (".hydra/hydra.yaml", ""), (".hydra/hydra.yaml", "a: b\n")


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_a_damaged_file_of_a_run_folder_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("o", *toy(), *lines(rows(2))) == 0
    for content in DAMAGED_FILES[name]:
        (Path("o") / name).write_text(content)
        capsys.readouterr()
        code, err = resume("o"), capsys.readouterr().err
        if (name, content) in HARMLESS:
            assert code == 0 and not err, content
        else:
            assert code == 2 and len(err.splitlines()) == 1 and err.startswith("specgen: "), (content, err)


def test_a_damaged_file_of_a_shard_is_one_line_and_merges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for shard in range(2):
        assert start(f"m{shard}", *toy(), *lines(rows(4)), f"data.shard={shard}/2") == 0
    for name in ("stats.json", "environment.json"):
        whole = Path("m0", name).read_text()
        for content in ("", "[1]", "null", '"text"', "{", "{}", '{"config":3,"schema":1}', '{"schema":1,"draft":{"topk":"text"}}'):
            Path("m0", name).write_text(content)
            capsys.readouterr()
            assert cli.main(["merge=m0,m1", "output.dir=m"]) == 2, content
            err = capsys.readouterr().err
            assert len(err.splitlines()) == 1 and "m0" in err and name in err and not Path("m").exists(), (content, err)
        Path("m0", name).write_text(whole)
    assert cli.main(["merge=m0,m1", "output.dir=m"]) == 0


@pytest.mark.parametrize("name", ["stats.json", "report.html"])
def test_a_disk_that_is_full_at_the_end_says_that_the_rows_are_safe(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert start("o", *toy(), *lines(rows(4))) == 2
    expected = f"specgen: o/{name}: the disk or quota is full; finished rows are safe: free space and go on with resume=o"
    assert capsys.readouterr().err.splitlines() == [expected]
    assert resume("o") == 0 and stats_of("o")["samples"] == 4 and Path("o/report.html").exists()


def test_a_disk_without_room_for_the_lock_is_one_line_and_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert start("a/o", *SMALL) == 2
    assert capsys.readouterr().err == "specgen: a/o: the disk or quota is full; make room there, or choose another folder\n"
    assert not Path("a").exists()


def test_turns_rows_are_resumed_whole() -> None:
    data = lines([{"turns": ["w10", "w30", "w40"]}, {"turns": ["w30"]}, {"turns": ["w40", "w10"]}])
    assert start("o", *toy(), *data, "sampling.max_tokens=4") == 0
    whole = rows_of("o")
    cut("o", 1)
    assert resume("o") == 0 and rows_of("o") == whole


def test_parquet_parts_are_resumed() -> None:
    data = lines(rows())
    assert start("whole", *toy(), *data, "output.format=parquet") == 0
    shutil.copytree("whole", "o")
    (part,) = Path("o/generations").iterdir()
    part.rename(part.with_name(".part-00000.parquet.tmp"))  # a part that was being written
    assert resume("o") == 0 and rows_of("o") == rows_of("whole")
    assert [path.name for path in Path("o/generations").iterdir()] == ["part-00000.parquet"]


def test_error_rows_stay_unless_they_are_to_be_tried_again() -> None:
    bad = [{"prompt": "w10", "max_tokens": 9}, {"prompt": "w30", "max_tokens": 250}, {"prompt": 3}]
    small = "engine.kv_memory_gb=0.0004"  # a pool that cannot hold the second row
    assert start("o", *toy(None), *lines(bad), small) == 3
    first = rows_of("o")
    assert [row["error"] and row["error"]["type"] for row in first.values()] == [None, "CapacityError", "DataError"]
    assert resume("o", "engine.kv_memory_gb=1") == 3 and rows_of("o") == first, "error rows are kept"
    assert resume("o", "engine.kv_memory_gb=1", "resume_errors=true") == 3
    found = list(rows_of("o").values())
    assert [row["error"] and row["error"]["type"] for row in found] == [None, None, "DataError"]
    assert (found[1]["output_tokens"], found[1]["finish_reason"]) == (250, "length")
    assert "resumed: 1 rows are finished, 0 of them errors; 2 error rows are tried again" in log_of("o")


@pytest.mark.parametrize("fault", ["disk", "defect"])
def test_a_full_disk_or_a_defect_keeps_the_rows_before_it(fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write, step, steps = os.write, run.Engine.step, []

    def full(descriptor: int, data: Any) -> int:
        if bytes(data).startswith(b'{"id":"r') and len(steps) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def breaks(engine: Any) -> Any:
        steps.append(1)
        if fault == "defect" and len(steps) > 5:
            raise RuntimeError("an index is out of range")
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(run.Engine, "step", breaks)
        if fault == "disk":
            patch.setattr(os, "write", full)
        code = start("o", *toy(), *lines(rows()), "engine.max_batch=4")
    err = capsys.readouterr().err
    kept = rows_of("o")
    assert 0 < len(kept) < 24 and not Path("o/.lock").exists()
    if fault == "disk":
        assert code == 2 and err.splitlines()[-1] == (
            f"specgen: o/generations.jsonl: the disk or quota is full; the {len(kept)} rows this start wrote are complete: "
            "free space and go on with resume=o"
        )
    else:
        assert code == 1 and err.splitlines()[-1] == "specgen: the error above is a defect of specgen, not of your call"
        assert "RuntimeError: an index is out of range" in log_of("o")
    assert resume("o") == 0
    found = rows_of("o")
    assert len(found) == 24 and {key: found[key] for key in kept} == kept


def test_a_run_that_goes_on_in_another_type_says_so() -> None:
    assert start("o", *toy(), *lines(rows(3))) == 0
    record = json.loads(Path("o/environment.json").read_text()) | {"dtype": "bfloat16"}
    Path("o/environment.json").write_text(json.dumps(record))
    assert resume("o") == 0
    assert "the run was started in bfloat16 and goes on in float32: set model.dtype to keep one" in log_of("o")


# -- what may change --------------------------------------------------------------------------------------------------------------------------


def test_the_engine_and_where_files_stand_may_change() -> None:
    shutil.copytree(toy_folder() / "draft_perfect", "draft")
    assert start("o", *toy(str(Path("draft").absolute())), *lines(rows())) == 0
    whole = rows_of("o")
    cut("o", 9)
    Path("draft").rename("moved")
    Path("in.jsonl").rename("elsewhere.jsonl")
    code = resume("o", "draft.path=moved", "data.path=elsewhere.jsonl", "engine.max_batch=3", "engine.page_size=8", "output.fsync_seconds=0")
    assert code == 0 and same(rows_of("o")) == same(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sampling.max_tokens=9", "sampling.max_tokens=9 cannot be changed on resume: the run was started with 256"),
        ("draft=none", "draft=none cannot be changed on resume: the run was started with draft_model"),
        ("data.limit=3", "data.limit=3 cannot be changed on resume: the run was started with null"),
        ("data.chat_template=none", "data.chat_template: the template has changed since this run was started"),
    ],
)
def test_what_may_not_change_is_refused_by_name(change: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("o", *toy(), *lines(rows(3))) == 0
    kept = Path("o/generations.jsonl").read_bytes()
    assert resume("o", change) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(f"specgen: {message}"), err
    assert Path("o/generations.jsonl").read_bytes() == kept and not Path("o/.lock").exists()


def refused(out: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert resume(out, *overrides) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("specgen: ")


def test_a_changed_input_checkpoint_template_or_stored_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path.cwd()
    shutil.copytree(toy_folder() / "target", "model")
    shutil.copytree(toy_folder() / "draft_perfect", "draft")
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    chat = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    assert start("o", *toy(str(here / "draft"), str(here / "model")), *lines(chat), "data.chat_template=chat.jinja") == 0
    cut("o", 4)

    def with_changed(path: str, text: str | bytes) -> str:
        kept = Path(path).read_bytes()
        Path(path).write_bytes(text.encode() if isinstance(text, str) else text)
        try:
            return refused("o", capsys)
        finally:
            Path(path).write_bytes(kept)

    remedy = "has changed since this run was started; restore it, or start a new run instead of resume=o"
    assert with_changed("in.jsonl", Path("in.jsonl").read_text().replace("w41", "w42")).endswith(f"in.jsonl: the file {remedy}")
    assert with_changed("chat.jinja", "{{ messages[0].content }}") == f"data.chat_template: the template {remedy}"
    weights = bytearray(Path("draft/model.safetensors").read_bytes())
    weights[-3] ^= 1
    assert with_changed("draft/model.safetensors", bytes(weights)).startswith("the draft model's weights changed since this run was started")
    config = json.loads(Path("model/config.json").read_text()) | {"rms_norm_eps": 1e-5}
    assert with_changed("model/config.json", json.dumps(config)).startswith("the target model's config changed")
    stored = yaml.safe_load(Path("o/.hydra/config.yaml").read_text())
    stored["sampling"]["seed"] = 5
    changed = with_changed("o/.hydra/config.yaml", yaml.safe_dump(stored))
    assert changed.startswith("the configuration has changed since this run was started (sampling.seed: 0 -> 5)")
    assert resume("o") == 0 and len(rows_of("o")) == 8


def test_a_change_that_the_fingerprint_misses_is_found_at_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    """The middle of a large file is not hashed; a finished row's prompt is compared with the input's."""
    filler = "x" * (2 << 20)
    data = [{"prompt": "w10", "note": filler}, {"id": "b", "prompt": "w30"}, {"prompt": "w10", "note": filler}, {"prompt": "w40"}]
    assert start("o", *toy(None), *lines(data), "output.meta=false", "sampling.max_tokens=4") == 0
    kept = Path("o/generations.jsonl").read_bytes()
    text = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(text.replace("w30", "w31"))
    assert refused("o", capsys).startswith("input row 1 (id 'b'): its prompt differs from the finished row's")
    Path("in.jsonl").write_text(text.replace('"id": "b"', '"id": "c"'))
    assert refused("o", capsys).startswith("input row 1: the finished row has id 'b', the input now 'c'")
    assert Path("o/generations.jsonl").read_bytes() == kept


def test_an_input_that_cannot_be_read_again_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("o", *toy(), *lines(rows(3))) == 0
    record = json.loads(Path("o/environment.json").read_text())
    record["input"]["rereadable"] = False
    Path("o/environment.json").write_text(json.dumps(record))
    assert refused("o", capsys).startswith("the input cannot be read again in the same order")
    Path("o/environment.json").unlink()
    assert refused("o", capsys).startswith("o holds rows but no environment.json")


# -- shards -----------------------------------------------------------------------------------------------------------------------------------


def test_three_shards_merged_are_one_run_at_temperature_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Noise is keyed by the row, so that neither worker nor batch decides a token."""
    common = ["data.limit=8", "sampling.max_tokens=10", "sampling.temperature=1", "sampling.n=2", "baseline=false"]
    assert start("whole", *common) == 0
    for i, batch in enumerate((1, 4, 32)):
        assert start(f"s{i}", *common, f"data.shard={i}/3", f"engine.max_batch={batch}") == 0
    assert [sorted({index for index, _ in rows_of(f"s{i}")}) for i in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert cli.main(["merge=s0,s1,s2", "output.dir=m"]) == 0
    assert rows_of("m") == rows_of("whole")
    assert [row["index"] for row in map(json.loads, Path("m/generations.jsonl").read_text().splitlines())] == [i // 2 for i in range(16)]
    merged, whole = stats_of("m"), stats_of("whole")
    names = ("requests", "samples", "errors", "prompt_tokens", "output_tokens", "acceptance", "groups", "sampling", "draft", "score")
    assert [merged[name] for name in names] == [whole[name] for name in names]
    assert "16 rows of 3 runs joined in m" in capsys.readouterr().out and Path("m/report.html").exists()
    assert cli.main(["merge=s0,s2", "output.dir=part"]) == 0
    assert "not the whole input: shard 1/3 is missing" in capsys.readouterr().out


def test_a_shard_that_was_stopped_is_not_merged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("a", *SMALL, "data.shard=0/2") == 0
    with monkeypatch.context() as patch:
        patch.setattr(run._Run, "_stop", lambda self: True)
        assert start("b", *SMALL, "data.shard=1/2") == 0
    assert cli.main(["merge=a,b", "output.dir=m"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "specgen: b was stopped before its input ended; finish it with resume=b first"
    assert not Path("m").exists()
    assert resume("b") == 0 and cli.main(["merge=a,b", "output.dir=m"]) == 0 and len(rows_of("m")) == 3
