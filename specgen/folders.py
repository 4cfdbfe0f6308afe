"""Run folders: their names, who may use them, and the ``.hydra`` files and log in them.

Boundary: knows paths and plain data; nothing of Hydra, rows or models.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from specgen.console import ConsoleHandler, FileHandler
from specgen.errors import ConfigError, DataError
from specgen.pasting import setting
from specgen.report.disk import holder, sync_folder

ROWS = ("generations.jsonl", "generations", "stats.json")
RESULTS = (*ROWS, "attempts.jsonl", ".hydra", "sweep.csv", "multirun.yaml")
SMALL_FILES = (".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml", "specgen.log", "attempts.jsonl", "environment.json")
PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
NOT_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf")  # words that YAML readers take for something else
NAME_LENGTH = 100


def claim(chosen: str | None, root: str = "outputs") -> tuple[Path, list[Path]]:
    """The job's (or sweep's) folder, made here, and the folders made for it, outermost first.

    ``chosen`` None makes ``outputs/<date>/<time>-<6 random characters>``, never an existing one. Raises ConfigError for a folder that holds results.
    """
    if chosen is not None:
        folder = Path(chosen).expanduser()
        refuse_results(folder)
        return folder, make(folder)
    now = datetime.now()
    while True:
        folder = Path(root) / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{secrets.token_hex(3)}"
        made = make(folder)
        if folder in made:
            return folder, made


def refuse_results(folder: Path) -> None:
    """Raise ConfigError when ``folder`` is in use by another job, holds results already, or is no folder."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"output.dir={folder} is a file; choose a folder")
    held = next((name for name in RESULTS if os.path.exists(folder / name)), None)
    sweep = held in ("sweep.csv", "multirun.yaml")
    users = (holder(path) for path in (folder, *(folder.glob("*/") if sweep else ())))
    if (process := next(filter(None, users), None)) is not None:
        raise ConfigError(f"output.dir={folder} is in use by another job (process {process}); wait for it, or choose another folder")
    if held is None:
        return
    go_on = f"go on with {setting('resume', folder)}"
    if held == ".hydra":  # the lock is taken a few seconds later
        raise ConfigError(
            f"output.dir={folder} belongs to another job, which is starting or ended before its first row; "
            f"choose another folder, or once it has ended {go_on}"
        )
    remedy = "choose another folder" if sweep else f"{go_on}, or choose another folder"
    raise ConfigError(f"output.dir={folder} holds results already ({held}); {remedy}")


def make(folder: Path) -> list[Path]:
    """Make ``folder`` with its parents and return those that were not there, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    made = []
    for path in reversed(missing):
        try:
            path.mkdir()
            made.append(path)
        except FileExistsError:
            pass  # another job made it meanwhile
        except OSError as error:
            raise ConfigError(f"output.dir={folder} cannot be made: {error.strerror}; choose another folder") from error
    return made


def unmake(folder: Path, made: Sequence[Path]) -> None:
    """Take back what a job left that was refused before it wrote a row: its own small files, and the folders ``made`` for it."""
    if any((folder / name).exists() for name in ROWS):
        return
    for name in SMALL_FILES:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        (folder / ".hydra").rmdir()
    unmake_empty(made)


def unmake_empty(made: Sequence[Path]) -> None:
    """Take back those of the folders ``made`` that nobody has written to."""
    for path in reversed(made):
        with suppress(OSError):  # not empty: it holds what others wrote
            path.rmdir()


def job_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A sub-folder name for each job of a sweep: its number and what differs, flat, legal on every file system and at most 100 characters."""
    values = [dict(text.lstrip("+").partition("=")[::2] for text in job) for job in jobs]
    swept = [key for key in values[0] if len({job.get(key) for job in values}) > 1] if values else []
    width = len(str(max(len(jobs) - 1, 0)))
    return [f"{number:0{width}d}-{_slug(job, swept)}" for number, job in enumerate(values)]


def _slug(job: Mapping[str, str], swept: Sequence[str]) -> str:
    if not swept:
        return "job"
    text = "_".join(f"{key.rpartition('.')[2] if key.count('.') else key}-{_legal(job[key])}" for key in swept)
    if len(text) <= NAME_LENGTH - 10:
        return text
    digest = hashlib.sha256("\0".join(f"{key}={job[key]}" for key in swept).encode()).hexdigest()[:8]
    return f"{text[: NAME_LENGTH - 20]}-{digest}"


def _legal(value: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9.+-]+", "-", value).strip("-. ") or "x"
    if len(plain) <= 40:
        return plain
    return f"{plain[:12]}--{plain[-20:]}-{hashlib.sha256(value.encode()).hexdigest()[:6]}".rstrip(".")


class _Dumper(yaml.SafeDumper):
    """YAML in which text stays text for every reader: anything but a plain word is quoted."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    word = PLAIN_WORD.fullmatch(text) and text.lower() not in NOT_TEXT
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if word else '"')


_Dumper.add_representer(str, _text_node)


def dump_yaml(value: Any) -> str:
    """``value`` as YAML, keys in their own order, texts unmistakable."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def write_hydra_files(folder: Path, config: Mapping[str, Any], overrides: Sequence[str], hydra: str) -> None:
    """``.hydra/config.yaml`` (effective values), ``overrides.yaml`` and ``hydra.yaml``: durable, and all of them or none, whenever the job is killed.

    Raises ConfigError when another job has the folder.
    """
    texts = {"config.yaml": dump_yaml(dict(config)), "overrides.yaml": dump_yaml(list(overrides)), "hydra.yaml": hydra}
    temporary, ours = folder / f".hydra-{secrets.token_hex(4)}", False
    try:
        temporary.mkdir(parents=True)
        for name, text in texts.items():
            with open(temporary / name, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(folder / ".hydra")
        ours = True
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(folder / ".hydra" if ours else temporary, ignore_errors=True)
        if not ours and (error.errno in (errno.EEXIST, errno.ENOTEMPTY) or (folder / ".hydra").exists()):
            raise ConfigError(f"output.dir={folder} has been taken by another job meanwhile; choose another folder") from error
        raise ConfigError(f"output.dir={folder} cannot be written: {error.strerror}; choose another folder") from error
    with suppress(OSError):
        _remove_left(folder, texts)


def _remove_left(folder: Path, names: Container[str]) -> None:
    """Remove what a job killed in ``write_hydra_files`` left, or one that comes too late: folders of that name with nothing but those files."""
    for left in folder.glob(".hydra-*"):
        if not re.fullmatch(r"\.hydra-[0-9a-f]{8}", left.name) or not left.is_dir() or left.is_symlink():
            continue
        if all(path.name in names and path.is_file() for path in left.iterdir()):
            shutil.rmtree(left, ignore_errors=True)


def read_hydra_files(folder: Path) -> tuple[dict[str, Any], list[str], Path | None]:
    """A run folder's configuration, overrides and the folder it was started in. Raises DataError when it is no run folder."""
    if not (folder / ".hydra" / "config.yaml").is_file():
        if (folder / "multirun.yaml").is_file():
            raise DataError(f"resume={folder} is a sweep's folder; resume one of the job folders in it")
        raise DataError(f"resume={folder} is not a run folder: it has no .hydra/config.yaml")
    try:
        config = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")) or []
        hydra = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"resume={folder}: its .hydra files cannot be read ({str(error).splitlines()[0]})") from error
    for name, value, kind in (("config", config, dict), ("overrides", overrides, list), ("hydra", hydra, dict)):
        if not isinstance(value, kind):
            raise DataError(f"resume={folder}: its .hydra/{name}.yaml is damaged; bring it back, or start a new run")
    started = hydra
    for name in ("hydra", "runtime", "cwd"):
        started = started.get(name) if isinstance(started, dict) else None
    return config, [str(text) for text in overrides], Path(started) if isinstance(started, str) and started else None


@contextmanager
def logging_to(folder: Path | None, verbose: bool = False) -> Iterator[logging.Logger]:
    """The ``specgen`` logger on the console and, with ``folder``, in its ``specgen.log``, for the time of one job.

    News goes to stdout and warnings to stderr, so that what a mistake in the call prints on stderr is its one line.
    """
    logger = logging.getLogger("specgen")
    news, warnings = ConsoleHandler("stdout"), ConsoleHandler("stderr")
    news.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [news, warnings]
    for console in handlers:
        console.setFormatter(logging.Formatter("%(message)s"))
        console.addFilter(lambda record: not getattr(record, "file_only", False))
    if folder is not None:
        try:
            file = FileHandler(folder / "specgen.log")
        except OSError as error:
            raise DataError(f"{folder / 'specgen.log'} cannot be written: {error.strerror}; free the folder or choose another") from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    level = logger.level
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
