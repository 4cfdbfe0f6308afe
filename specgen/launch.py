"""One job from its composed configuration to its exit code: folder, ``.hydra`` files, log, the run itself, and how it ended.

Boundary: calls ``specgen.run`` and ``specgen.report`` through ``Runner``, imported when first used; reads no command line.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specgen import folders
from specgen.compose import to_config
from specgen.config import PATH_KEYS, Config, to_dict
from specgen.console import say, trace
from specgen.errors import SpecgenError
from specgen.grammar_text import under
from specgen.pasting import setting
from specgen.readahead import read_ahead

if TYPE_CHECKING:
    from omegaconf import DictConfig

INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, which interrupts as SIGINT does."""


class Runner(Protocol):
    """What the command line needs from the rest of specgen."""

    def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
        """Run a job, or go on with one; the exit code."""

    def merge(self, dirs: list[Path], out: Path) -> int:
        """Join run folders; the exit code."""

    def write_sweep(self, folder: Path, rows: list[dict[str, Any]]) -> object:
        """Write ``sweep.csv``: folder, overrides, exit_code and error of each job."""


class Specgen:
    """The real runner; each part is imported when it is first used."""

    def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
        """See ``specgen.run.run_job``."""
        if "torch" not in sys.modules:
            read_ahead(config)
        from specgen.run import run_job

        return run_job(config, folder, overrides, resume=resume)

    def merge(self, dirs: list[Path], out: Path) -> int:
        """See ``specgen.run.merge``."""
        from specgen.run import merge

        return merge(dirs, out)

    def write_sweep(self, folder: Path, rows: list[dict[str, Any]]) -> object:
        """See ``specgen.report.sweep.write_sweep``."""
        from specgen.report.sweep import write_sweep

        return write_sweep(folder, rows)


@dataclass
class Outcome:
    """How one job ended. ``exit_code`` None: it was never started. ``made``: folders to take back when the job is refused; None keeps them."""

    folder: Path
    overrides: list[str]
    made: list[Path] | None = None
    exit_code: int | None = None
    error: str | None = None

    def row(self, sweep: Path) -> dict[str, Any]:
        """The row of ``sweep.csv``."""
        folder = str(self.folder.relative_to(sweep))
        return {"folder": folder, "overrides": " ".join(self.overrides), "exit_code": self.exit_code, "error": self.error}


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def debugging() -> bool:
    """Whether tracebacks of the user's own errors are wanted."""
    return os.environ.get("SPECGEN_DEBUG") == "1"


def defect() -> int:
    """Report the exception being handled as a defect; the exit code."""
    trace()
    say("the error above is a defect of specgen, not of your call")
    return 1


def launch(cfg: DictConfig, outcome: Outcome, runner: Runner) -> None:
    """Hydra's task: run one job and record how it ended. Only an interrupt leaves it as an exception."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = HydraConfig.get()
    folder = outcome.folder
    try:
        config = to_config(cfg, outcome.overrides)
        if hydra.job.chdir:  # the job works inside its folder, but paths are as the user typed them
            config = with_absolute_paths(config, Path(hydra.runtime.cwd))
            folder = Path(hydra.runtime.output_dir)
        folders.write_hydra_files(folder, to_dict(config), outcome.overrides, OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra})))
    except SpecgenError as error:
        outcome.exit_code, outcome.error = 2, one_line(error)
        folders.unmake_empty(outcome.made or ())
        return
    try:
        with folders.logging_to(folder, verbose=bool(hydra.verbose)) as log:
            outcome.exit_code, outcome.error = guarded(lambda: runner.run_job(config, folder, outcome.overrides), log)
    except SpecgenError as error:
        outcome.exit_code, outcome.error = 2, one_line(error)
    except KeyboardInterrupt as interrupt:
        outcome.exit_code, outcome.error = TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED, "interrupted"
        say(f"interrupted; python -m specgen {setting('resume', outcome.folder)} goes on")
        raise
    if outcome.exit_code == 2 and outcome.made is not None:
        folders.unmake(outcome.folder.absolute() if not hydra.job.chdir else folder, outcome.made)


def guarded(work: Callable[[], int], log: logging.Logger) -> tuple[int, str | None]:
    """(exit code, error line) of ``work``. What went wrong is in the log; a defect's traceback is on stderr too."""
    try:
        return work(), None
    except SpecgenError as error:
        if debugging():
            trace()
        log.error("%s", one_line(error), exc_info=debugging(), extra={"file_only": True})
        return 2, one_line(error)
    except Exception as error:
        log.error("a defect of specgen", exc_info=True, extra={"file_only": True})
        return defect(), f"{type(error).__name__}: {one_line(error)}"


def with_absolute_paths(config: Config, start: Path) -> Config:
    """A copy in which the local paths that exist under ``start`` are absolute, for a job that works in another folder."""
    config = copy.deepcopy(config)
    for key in PATH_KEYS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None and os.path.exists(start / value):
            setattr(getattr(config, section), name, str(start / value))
    if config.sampling.grammar is not None:
        config.sampling.grammar = under(config.sampling.grammar, start)
    return config
