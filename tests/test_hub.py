"""The hub's failures are one short reason, and what its client says about them stays off the console."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import specgen
from specgen.config import Config, DraftConfig
from specgen.errors import ConfigError
from specgen.hub import OFFLINE, REASONS, reason, unreachable
from specgen.loading import check_hub
from specgen.models.weights import SMALL_FILES
from specgen.validate import FAMILY
from tests.jobs import ROOT


def error_of(*names: str, text: str = "said so") -> Exception:
    """An error whose class has these ancestors, its own name first."""
    kind: type[Exception] = Exception
    for name in reversed(names):
        kind = type(name, (kind,), {})
    return kind(text)


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_has_its_own_words(name: str) -> None:
    assert reason(error_of(name, "HfHubHTTPError")) == REASONS[name]
    assert not unreachable(error_of(name))


def test_the_most_special_class_speaks() -> None:
    assert reason(error_of("GatedRepoError", "RepositoryNotFoundError")) == REASONS["GatedRepoError"]


@pytest.mark.parametrize("names", [("ConnectError", "NetworkError", "TransportError"), ("ConnectionError", "OSError"), ("ReadTimeout", "Timeout")])
def test_no_answer_is_found_behind_what_was_raised(names: tuple[str, ...]) -> None:
    outer = error_of("LocalEntryNotFoundError", "FileNotFoundError", text="an error happened while trying to locate the files")
    outer.__cause__ = error_of(*names, text="[Errno -2] Name or service not known")
    assert unreachable(outer)
    expected = "the hub cannot be reached (Name or service not known) and it is not in the local cache: check the network, or give what is local"
    assert reason(outer) == expected


def test_offline_mode_is_not_a_network_that_is_down() -> None:
    for error in (error_of("OfflineModeIsEnabled", "ConnectionError"), ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)")):
        assert reason(error) == OFFLINE and not unreachable(error)


def test_anything_else_is_quoted_with_its_kind() -> None:
    assert reason(ValueError("two\nlines")) == "ValueError: two lines" and reason(KeyError()) == "KeyError: KeyError"


def test_a_hub_drafter_is_checked_by_its_small_files_before_any_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, tuple[str, ...]]] = []

    def snapshot(name: str, revision: str | None = None, allow_patterns: tuple[str, ...] = ()) -> str:
        asked.append((name, tuple(allow_patterns)))
        (tmp_path / "config.json").write_text((FAMILY / "dflash" / "config.json").read_text())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    given = {"method": "dflash", "path": "org/head"}
    with pytest.raises(ConfigError) as error:
        specgen.generate("def", draft=given | {"num_steps": 5})
    assert str(error.value) == f"draft.num_steps=5: {tmp_path} drafts blocks of 5, so at most 4 tokens a step"
    assert asked == [("org/head", SMALL_FILES)]
    check_hub(Config(draft=DraftConfig(**given, num_steps=4)))


NOWHERE = """
import sys
from specgen import cli

for call in (["model=hf", "model.path=org/name", "draft=none"], ["data=hub", "data.path=org/name"], ["draft=eagle", "draft.path=org/name"]):
    print(cli.main(call), file=sys.stderr)
"""


def test_without_a_network_a_job_says_one_line_on_stderr(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    settings = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | nowhere | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", NOWHERE], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=100)
    why = "the hub cannot be reached (Connection refused) and it is not in the local cache: check the network, or give what is local"
    assert done.stderr.splitlines() == [
        f"specgen: org/name: no such folder here, and {why}",
        "2",
        f"specgen: org/name: the dataset cannot be opened: {why}",
        "2",
        f"specgen: org/name: no such folder here, and {why}",
        "2",
    ]
