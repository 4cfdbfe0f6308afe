"""What a run is made of, so that a later start can tell whether it is still the same: configuration, checkpoints, input, chat template.

Boundary: ``environment.json`` is written and compared here; generates nothing. On resume everything but the keys that may change is compared before a
model is loaded, and what differs is named.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specgen.config import PATH_KEYS, Config, DataConfig
from specgen.data.sources import input_fingerprint
from specgen.draft.load import draft_folder
from specgen.errors import ConfigError, DataError
from specgen.grammar_text import KEY, fingerprint
from specgen.loading import target_path
from specgen.models.weights import local_folder
from specgen.pasting import setting
from specgen.report.disk import read_json, understood
from specgen.report.environment import ENVIRONMENT_NAME, NOT_HASHED, config_hash, config_record, differences, environment, model_fingerprint
from specgen.report.resume import rows_format

OWN_WEIGHTS = ("draft_model", "eagle", "eagle3", "dflash")  # drafters with a checkpoint of their own


def earlier_record(folder: Path) -> dict[str, Any] | None:
    """``environment.json`` of the run in ``folder``; None when it was stopped before it wrote one. Raises DataError when rows stand without it."""
    if not (folder / ENVIRONMENT_NAME).exists():
        if rows_format(folder) is not None:
            raise DataError(f"{folder} holds rows but no {ENVIRONMENT_NAME}: whether the input is the same cannot be told; start a new run")
        return None
    return read_json(folder / ENVIRONMENT_NAME, "start a new run")


def pinned(data: DataConfig, earlier: dict[str, Any] | None) -> DataConfig:
    """``data`` at the commit of the run's first start, for a hub dataset."""
    read = (earlier or {}).get("input")
    commit = read.get("revision") if isinstance(read, dict) else None  # another form is for ``refuse_changes`` to name
    return replace(data, revision=commit) if data.source == "hub" and commit else data


def run_record(config: Config, data: DataConfig, device: torch.device) -> dict[str, Any]:
    """``environment.json``: the process, the configuration with its hash, and fingerprints of everything that is read. A hub checkpoint is fetched.

    ``data`` is where rows come from, which a task may have decided.
    """
    read = input_fingerprint(data)  # first: a data set that is not there costs no download of a model
    return {
        **environment(device),
        "config": config_record(config),
        "config_hash": config_hash(config),
        "models": _models(config),
        "input": read,
        "chat_template": _template(data.chat_template),
        "grammar": fingerprint(config.sampling.grammar),
    }


def _models(config: Config) -> dict[str, Any]:
    model, draft = config.model, config.draft
    folder = local_folder(target_path(model), model.revision, weights=model.load_format == "auto", code=model.trust_remote_code)
    found = {"target": model_fingerprint(folder)}
    if draft.method in OWN_WEIGHTS:
        found["draft"] = model_fingerprint(draft_folder(draft, model))
    return found


def _template(name: str) -> str:
    """``auto``, ``none``, or what tells one template file from another."""
    return name if name in ("auto", "none") else hashlib.sha256(Path(name).expanduser().read_bytes()).hexdigest()


def refuse_changes(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError or DataError, naming it, when a resumed run would not be the one that was started.

    Paths may differ where the files behind them are the same.
    """
    remedy = f"restore it, or start a new run instead of {setting('resume', folder)}"
    with understood(folder / ENVIRONMENT_NAME, remedy):
        _refuse_changes(old, new, remedy)


def _refuse_changes(old: dict[str, Any], new: dict[str, Any], remedy: str) -> None:
    if changed := differences(old.get("config") or {}, new["config"], ignore=(*NOT_HASHED, *PATH_KEYS, KEY)):
        raise ConfigError(f"the configuration has changed since this run was started ({'; '.join(changed)}); {remedy}")
    for role, now in new["models"].items():
        before = (old.get("models") or {}).get(role)
        parts = [part for part in now if (before or {}).get(part) != now[part]]
        if parts:
            raise DataError(f"the {role} model's {' and '.join(parts)} changed since this run was started; {remedy}")
    if old.get("chat_template") != new["chat_template"]:
        raise DataError(f"data.chat_template: the template has changed since this run was started; {remedy}")
    if old.get("grammar") != new["grammar"]:
        raise DataError(f"{KEY}: the grammar has changed since this run was started; {remedy}")
    _refuse_changed_input(old.get("input") or {}, new["input"], remedy)


def _refuse_changed_input(old: dict[str, Any], new: dict[str, Any], remedy: str) -> None:
    if not (old.get("rereadable") and new.get("rereadable")):
        raise DataError("the input cannot be read again in the same order (a pipe, or a dataset without a commit), so the run cannot be resumed")
    before, now = (_without_paths(entry) for entry in (old, new))
    if before == now:
        return
    files, former = new.get("files") or [], old.get("files") or []
    changed = next((one["path"] for one, two in zip(files, former, strict=False) if _without_path(one) != _without_path(two)), None)
    what = f"{changed}: the file has changed" if changed else "the input's files have changed" if files else "the input has changed"
    raise DataError(f"{what} since this run was started; {remedy}")


def _without_paths(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key != "path" or not entry.get("files")}
    return kept | {"files": [_without_path(file) for file in entry.get("files") or []]}


def _without_path(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "path"}


def is_hub_input(data: DataConfig) -> bool:
    """Whether rows come from the hub rather than from files here."""
    return data.source == "hub" and not os.path.isdir(Path(data.path or "").expanduser())
