"""``resume=FOLDER`` and ``merge=DIR,DIR``: command lines about run folders that exist already.

Boundary: settles which configuration goes on and hands over to the runner; knows nothing of rows or of composition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specgen import folders
from specgen.config import PATH_KEYS, Config
from specgen.console import say
from specgen.errors import ConfigError, DataError
from specgen.grammar_text import KEY
from specgen.launch import Runner, guarded, with_absolute_paths
from specgen.overrides import split_elements
from specgen.pasting import setting
from specgen.report.disk import holder
from specgen.schema import SELECTORS, build, convert, shown
from specgen.validate import get, validate

# What may differ from the configuration a run was started with, besides paths and the grammar (whose fingerprints the run compares).
MAY_CHANGE = ("engine.", "output.fsync_seconds", "model.device", "resume_errors")


def resume(values: Mapping[str, Any], texts: Sequence[str], runner: Runner) -> int:
    """Go on with the run in ``values["resume"]`` under its own configuration, but for the keys that may change; the exit code.

    ``values``: dotted key -> value of every override, ``texts`` the overrides themselves.
    """
    folder = Path(str(values["resume"])).expanduser()
    config = resumed_config(folder, {key: value for key, value in values.items() if key != "resume"})
    validate(config, values)
    with folders.logging_to(folder) as log:
        try:
            code, error = guarded(lambda: runner.run_job(config, folder, list(texts), resume=True), log)
        except KeyboardInterrupt:
            say(f"interrupted; python -m specgen {setting('resume', folder)} goes on")
            raise
    if error is not None and code == 2:
        say(error)
    return code


def resumed_config(folder: Path, changes: Mapping[str, Any]) -> Config:
    """The stored configuration of ``folder`` with ``changes``. Raises DataError for no run folder, ConfigError for a key that may not change."""
    stored, _, started = folders.read_hydra_files(folder)
    config = build(stored)
    if started is not None and started != Path.cwd():
        config = with_absolute_paths(config, started)
    config.resume = str(folder)
    for key, value in changes.items():
        _change(config, key, value, folder)
    return config


def _change(config: Config, key: str, value: Any, folder: Path) -> None:
    if key == "output.dir":
        if Path(str(value)).resolve() != folder.resolve():
            raise ConfigError(f"output.dir={value}: a resumed run stays in its folder {folder}; leave it out")
        return
    full = next((selector for selector, group in SELECTORS.items() if group == key), key)
    if key == "experiment" or full.count(".") > 1:
        raise ConfigError(f"{key} cannot be changed on resume: the run goes on under its own configuration; leave it out")
    value, stored = convert(full, value), get(config, full)
    if value == stored:
        return
    if key not in (*PATH_KEYS, KEY) and not key.startswith(MAY_CHANGE):
        raise ConfigError(
            f"{key}={shown(value)} cannot be changed on resume: the run was started with {shown(stored)}; leave it out, or start a new run"
        )
    section, _, name = full.rpartition(".")
    setattr(getattr(config, section) if section else config, name, value)


def merge(arguments: Sequence[str], runner: Runner) -> int:
    """``merge=DIR,DIR output.dir=DIR``; the exit code."""
    given = dict(text.partition("=")[::2] for text in arguments)
    if extra := sorted(set(given) - {"merge", "output.dir"}):
        raise ConfigError(f"merge= takes output.dir= and nothing else; leave out {', '.join(extra)}")
    listed = given["merge"].removeprefix("[").removesuffix("]")
    dirs = [Path(part.strip("'\"")).expanduser() for part in split_elements(listed) if part]
    if len(dirs) < 2 or not given.get("output.dir"):
        raise ConfigError("merge= needs at least two run folders and a new one: merge=DIR,DIR output.dir=DIR")
    for folder in dirs:
        if not folder.is_dir():
            raise DataError(f"merge: {folder} is not a folder")
        if (process := holder(folder)) is not None:
            raise DataError(f"merge: {folder} is in use by another job (process {process}); wait for it")
    out = Path(given["output.dir"].strip("'\"")).expanduser()
    folders.refuse_results(out)
    return runner.merge(dirs, out)
