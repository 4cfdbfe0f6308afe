"""Weight files are asked for while imports run: which files, when, and that nothing about them can fail a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specgen import readahead
from specgen.config import Config, DraftConfig, ModelConfig

MIB = 2**20


def job_of(tmp_path: Path, **model: str) -> Config:
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
    (tmp_path / "target" / "model-00001-of-00002.safetensors").write_bytes(bytes(3 * MIB))
    (tmp_path / "target" / "model-00002-of-00002.safetensors").write_bytes(bytes(MIB))
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(bytes(10))
    return Config(
        model=ModelConfig(source="hf", path=str(tmp_path / "target"), **model), draft=DraftConfig(method="eagle", path=str(tmp_path / "head"))
    )


def test_every_weight_file_of_target_and_drafter_is_asked_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "PIECE", 2 * MIB)
    asked: list[tuple[str, int, int]] = []

    def fadvise(number: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((Path(os.readlink(f"/proc/self/fd/{number}")).name, start, length))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    thread = readahead.read_ahead(job_of(tmp_path))
    assert thread is not None and thread.daemon
    thread.join()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert asked == [(first, 0, 2 * MIB), (first, 2 * MIB, 2 * MIB), (second, 0, 2 * MIB), ("pytorch_model.bin", 0, 2 * MIB)]


def test_nothing_is_asked_for_that_is_not_read_or_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.name for path in readahead.weight_files(job_of(tmp_path, load_format="dummy"))] == ["pytorch_model.bin"]
    assert readahead.weight_files(Config()) == [] and readahead.read_ahead(Config()) is None
    assert readahead.weight_files(Config(model=ModelConfig(source="hf", path="some/hub-id"))) == []
    job = Config(model=ModelConfig(source="hf", path=str(tmp_path / "target")))
    monkeypatch.setattr(readahead, "available_memory", lambda: 4 * MIB - 1)
    assert readahead.read_ahead(job) is None
    monkeypatch.setattr(readahead, "available_memory", lambda: 4 * MIB)
    assert readahead.read_ahead(job) is not None


def test_a_file_that_vanishes_fails_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    files = readahead.weight_files(job)
    files[0].unlink()
    readahead._ask(files)
    assert readahead.read_ahead(job) is not None
