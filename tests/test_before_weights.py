"""What small files are enough to refuse costs no folder, and what the tokenizer is enough to refuse costs no weights."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

import specgen
from specgen import cli, loading
from specgen.checkpoint_files import vocab_size
from specgen.config import Config, ModelConfig
from specgen.errors import ConfigError
from tests.jobs import start, toy
from tests.test_cli import Stub
from tests.toys import toy_folder

TOO_LARGE: dict[str, tuple[Any, str]] = {
    "logit_bias": ({4095: 1.0, 4096: 1.0}, "holds token 4096"),
    "allowed_token_ids": ([5, 4096], "holds 4096"),
    "banned_token_ids": ([4096], "holds 4096"),
    "stop_token_ids": ([4096], "holds 4096"),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_last", None)
    monkeypatch.setattr(loading, "load_target", lambda *args: pytest.fail("weights were read"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses a job before its folder is made."""
    stub = Stub()
    assert cli.main(["output.dir=o", *arguments], runner=stub) == 2
    assert stub.jobs == [] and not Path("o").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("specgen: ")


# -- token ids --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["embedded", "random"])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_token_ids_beyond_the_models_vocabulary_are_refused_before_the_folder(name: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, said = TOO_LARGE[name]
    line = f"sampling.{name} {said}, outside the vocabulary of 4096; its ids are 0 to 4095"
    assert refused(capsys, f"data={data}", f"sampling.{name}={json.dumps(value).replace(chr(34), '')}") == line
    with pytest.raises(ConfigError) as caught:
        specgen.generate("def", sampling={name: value})
    assert str(caught.value) == line


def test_the_vocabulary_is_that_of_the_checkpoints_config(capsys: pytest.CaptureFixture[str]) -> None:
    line = "sampling.stop_token_ids holds 48, outside the vocabulary of 48; its ids are 0 to 47"
    assert refused(capsys, *toy(None), "data=random", "sampling.stop_token_ids=[48]") == line
    assert cli.main(["output.dir=o", *toy(None), "data=random", "sampling.stop_token_ids=[47]"], runner=Stub()) == 0
    for config, size in (({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 9}}, 9), ({}, None), ({"vocab_size": None}, None)):
        Path("config.json").write_text(json.dumps(config))
        assert vocab_size(Path()) == size


def test_ids_that_the_tokenizer_does_not_know_are_refused_before_a_weight_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(toy_folder() / "target", "padded")  # a vocabulary padded beyond the tokenizer's
    config = json.loads(Path("padded/config.json").read_text())
    Path("padded/config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    line = "sampling.banned_token_ids holds 48, outside the vocabulary of 48; its ids are 0 to 47"
    job = ("model=hf", "model.path=padded", "model.device=cpu", "draft=none", "data=random")
    assert start("o", *job, "sampling.banned_token_ids=[48]") == 2
    assert capsys.readouterr().err == f"specgen: {line}\n" and not Path("o").exists()
    for call in (
        lambda: specgen.generate("w10", model="padded", draft="none", sampling={"banned_token_ids": [48]}),
        lambda: specgen.Engine({"model": "padded", "draft": "none", "sampling": {"banned_token_ids": [48]}}),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == line


def test_a_hub_models_vocabulary_is_known_from_its_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "local_folder", lambda *args, **options: toy_folder() / "target")
    config = Config(model=ModelConfig(source="hf", path="org/name"))
    config.sampling.allowed_token_ids = [48]
    with pytest.raises(ConfigError, match=r"^sampling\.allowed_token_ids holds 48, outside the vocabulary of 48; its ids are 0 to 47$"):
        loading.check_hub(config)


# -- data.path --------------------------------------------------------------------------------------------------------------------------------


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("sheet.xml", "<a/>")
    return buffer.getvalue()


ROW = b'{"prompt": "def"}\n'
UNPACK = "; unpack it or save it as JSON Lines, CSV or Parquet (.gz and .zst are read as they are)"
FILES = {
    "rows.jsonl": ROW,
    "rows.csv": b"prompt\ndef\n",
    "rows.tsv.gz": gzip.compress(b"prompt\ndef\n"),
    "sheet.xlsx": zipped(),
    "rows.bz2": bz2.compress(ROW),
    "rows.txt": ROW,
    "table.bin.gz": gzip.compress(b"ARROW1\x00\x00" + bytes(40)),
    "folder/rows.bin": ROW,
}


@pytest.mark.parametrize(
    ("source", "path", "line"),
    [
        ("jsonl", "nowhere", "nowhere: no such file or folder; check data.path"),
        ("hub", "./nowhere", "data.path=./nowhere: no such folder, and not a hub id of the form ORGANISATION/NAME; check data.path"),
        ("hub", "a/b/c", "data.path=a/b/c: no such folder, and not a hub id of the form ORGANISATION/NAME; check data.path"),
        ("hub", "rows.csv", "data.path=rows.csv is a file, and data=hub reads a hub id or a dataset folder; use data=csv data.path=rows.csv"),
        ("hub", "rows.txt", "data.path=rows.txt is a file, and data=hub reads a hub id or a dataset folder; use data=jsonl data.path=rows.txt"),
        ("hub", "folder", "data.path=folder: the dataset cannot be opened: "),
        ("hub", "empty", "data.path=empty: the dataset cannot be opened: "),
        ("csv", "empty", "empty: the folder holds no file named *.csv, "),
        ("jsonl", "rows.csv", "data.path=rows.csv is no jsonl file by its name; use data=csv data.path=rows.csv, or rename it"),
        ("jsonl", "rows.tsv.gz", "data.path=rows.tsv.gz is no jsonl file by its name; use data=csv data.path=rows.tsv.gz, or rename it"),
        ("csv", "rows.jsonl", "data.path=rows.jsonl is no csv file by its name; use data=jsonl data.path=rows.jsonl, or rename it"),
        ("jsonl", "sheet.xlsx", f"data.path=sheet.xlsx: is a zip archive or a spreadsheet{UNPACK}"),
        ("csv", "rows.bz2", f"data.path=rows.bz2: is a bzip2 archive{UNPACK}"),
        ("jsonl", "table.bin.gz", f"data.path=table.bin.gz: is an Arrow file{UNPACK}"),
        (
            "parquet",
            "rows.txt",
            "data.path=rows.txt: is not a Parquet file; use data=jsonl or data=csv for text, or name another file with data.path",
        ),
    ],
)
def test_a_path_that_the_source_cannot_read_is_refused_before_the_folder(
    source: str, path: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files()
    said = refused(capsys, f"data={source}", f"data.path={path}")
    assert said.startswith(line) and (said == line or line.endswith((": ", ", ")))


@pytest.mark.parametrize(("source", "path"), [("jsonl", "rows.txt"), ("jsonl", "rows.jsonl"), ("csv", "rows.tsv.gz"), ("jsonl", "v1.csv.rows")])
def test_a_path_that_the_source_reads_by_its_content_is_taken(source: str, path: str) -> None:
    write_files()
    Path("v1.csv.rows").write_bytes(ROW)
    assert cli.main(["output.dir=o", f"data={source}", f"data.path={path}"], runner=Stub()) == 0


def write_files() -> None:
    Path("empty").mkdir()
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
