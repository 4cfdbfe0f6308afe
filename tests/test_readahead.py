"""Weight files are read while imports run: which files, and that nothing about them can fail a job."""

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


def test_every_weight_file_of_target_and_drafter_is_read_whole_where_it_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "PIECE", 2 * MIB)
    read: list[tuple[str, int, int]] = []

    def preadv(number: int, buffers: list[bytearray], start: int, flags: int = 0) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        if flags:  # asked whether it is cached: the second file is, the others are not
            assert flags == os.RWF_NOWAIT
            if "model-00002" not in name:
                raise BlockingIOError
            return 1
        read.append((name, start, len(buffers[0])))
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    thread = readahead.read_ahead(job_of(tmp_path))
    assert thread is not None and thread.daemon
    thread.join()
    first = "model-00001-of-00002.safetensors"
    assert read == [(first, 0, 2 * MIB), (first, 2 * MIB, 2 * MIB), ("pytorch_model.bin", 0, 2 * MIB)]


def test_a_file_that_was_dropped_from_the_cache_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if readahead._cached(file.fileno(), 0, 4 * MIB):
            pytest.skip("this file system lets no page go")
        readahead._read([path])
        assert readahead._cached(file.fileno(), 0, 4 * MIB)


def test_nothing_is_read_that_the_job_does_not_read_or_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    readahead._read(files)
    assert readahead.read_ahead(job) is not None
