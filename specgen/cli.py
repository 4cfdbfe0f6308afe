"""The command line: arguments -> checked jobs -> exit code.

Boundary: everything is composed and checked here before ``hydra.main`` is entered, because Hydra makes folders before it calls anyone. Composition is
``compose``, one job is ``launch``, the work itself is ``specgen.run``, imported when the first job starts; nothing below sees a DictConfig.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specgen import __version__, folders, resuming, stuck
from specgen.compose import composer, enter_hydra, folder_asked_for, options, reworded, searchpath_of, sweep_jobs, to_config
from specgen.config import to_dict
from specgen.console import answer, say, trace
from specgen.errors import ConfigError, SpecgenError
from specgen.launch import INTERRUPTED, TERMINATED, Outcome, Runner, Specgen, Terminated, debugging, defect, launch, one_line
from specgen.overrides import Override, parse, plain_value, refuse_sweep
from specgen.pasting import quoted
from specgen.validate import validate

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specgen.config import Config

FLAGS = (("--help", "-h"), ("--version",), ("--hydra-help",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc"))


def main(argv: Sequence[str] | None = None, *, runner: Runner | None = None) -> int:
    """Run the command line and return the exit code. An error of the user is one line on stderr (``SPECGEN_DEBUG=1`` adds the traceback)."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its retries are no news to the user; what fails is one line of ours
    with _terminable():
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv), runner or Specgen())
        except SpecgenError as error:
            if debugging():
                trace()
            say(one_line(error))
            return 2
        except Terminated:
            return TERMINATED
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            return defect()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises ``Terminated``, where signals can be handled."""

    def terminate(number: int, frame: Any) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; settings are key=value, and python -m specgen --help lists the flags")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="specgen", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flags in FLAGS:
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--info", "-i", const="all", nargs="?")
    return parser.parse_intermixed_args(argv)


def _dispatch(argv: list[str], runner: Runner) -> int:
    args = _arguments(argv)
    if args.help:
        from specgen.usage import help_text

        answer(help_text())
        return 0
    if args.version:
        answer(f"specgen {__version__}\n")
        return 0
    if args.hydra_help or args.shell_completion or args.info or args.cfg in ("hydra", "all"):
        with redirect_stdout(io.StringIO()) as shown:
            code = enter_hydra(argv, lambda cfg: None)
        answer(shown.getvalue())
        return code
    args.overrides = [text for text in args.overrides if text != "merge=null"]  # the default, said
    if any(text.startswith("merge=") for text in args.overrides):
        if args.multirun:
            raise ConfigError("merge= joins the folders of finished jobs, and -m sweeps over jobs; leave out -m")
        return resuming.merge(args.overrides, runner)
    path = searchpath_of(args.config_dir, args.overrides)
    overrides = [o for o in parse(args.overrides, lambda group: options(group, path)) if o.key != "hydra.searchpath"]
    if any(o.key == "resume" and plain_value(o) is not None for o in overrides) and not args.cfg:
        return _resume(overrides, args.multirun, runner)
    plan = Plan.read(overrides, args.multirun, path)
    if args.cfg:
        return plan.show(args.package)
    return plan.sweep(runner) if plan.multirun else plan.run(runner)


def _resume(overrides: list[Override], multirun: bool, runner: Runner) -> int:
    if multirun:
        raise ConfigError("resume= goes on with one job; leave out -m")
    for override in overrides:
        refuse_sweep(override)
        if override.key.startswith("hydra."):
            raise ConfigError(f"{override.key} has no meaning with resume=; leave it out")
    values = {o.key: plain_value(o) for o in overrides}
    return resuming.resume(values, [o.text for o in overrides], runner)


@dataclass
class Plan:
    """A command line that has been read: its overrides, and what they compose to (``base``: without those that are swept)."""

    overrides: list[Override]
    own: list[str]  # Hydra's overrides that --config-dir stands for
    base: DictConfig
    multirun: bool

    @classmethod
    def read(cls, overrides: list[Override], multirun: bool, path: list[str]) -> Plan:
        """Compose parsed overrides, with ``path`` as Hydra's search path. Raises ConfigError."""
        own = [f"hydra.searchpath=[{','.join(quoted(root) for root in path)}]"] if path else []
        with composer() as compose:
            base = compose([*own, *(o.text for o in overrides if not o.swept)])
        with reworded():
            mode, verbose = str(base.hydra.mode), base.hydra.verbose
        if not isinstance(verbose, bool):
            raise ConfigError("hydra.verbose: must be true or false")
        multirun = multirun or mode.endswith("MULTIRUN")
        if multirun:  # what a file says is swept, unless the command line says otherwise
            given = {o.key for o in overrides}
            filed = [f"{key}={value}" for key, value in (base.hydra.sweeper.get("params") or {}).items() if key not in given]
            overrides = [*parse(filed, lambda group: options(group, path)), *overrides]
        else:
            for override in overrides:
                refuse_sweep(override)
        return cls(overrides, own, base, multirun)

    @property
    def texts(self) -> list[str]:
        """The overrides as Hydra takes them."""
        return [o.text for o in self.overrides]

    def show(self, package: str | None) -> int:
        """``--cfg job``: print the effective configuration."""
        part: Any = to_dict(to_config(self.base, self.texts))
        for name in package.split(".") if package else []:
            if not isinstance(part, dict) or name not in part:
                raise ConfigError(f"--package {package}: no such part of the configuration")
            part = part[name]
        answer(folders.dump_yaml(part))
        return 0

    def run(self, runner: Runner) -> int:
        """One job."""
        config = to_config(self.base, self.texts)
        _validate(config, self.texts)
        folder, made = folders.claim(folder_asked_for(self.base, config))
        outcome = Outcome(folder, _of_job(self.texts), made)
        place = ["hydra.mode=RUN", f"hydra.run.dir={quoted(str(folder.absolute()))}"]
        enter_hydra([*self.own, *self.texts, *place], lambda cfg: launch(cfg, outcome, runner))
        if outcome.error is not None and outcome.exit_code == 2:
            say(outcome.error)
        return 1 if outcome.exit_code is None else outcome.exit_code

    def sweep(self, runner: Runner) -> int:
        """Every job of a sweep, after all of them have been checked."""
        for o in self.overrides:
            if o.swept and o.key == "output.dir":
                raise ConfigError(f"output.dir={o.value}: it is the sweep's one folder, in which each job has its own; give one")
        jobs = [[*self.own, *job] for job in sweep_jobs(self.texts)]
        _check_jobs(jobs)
        settings = [text for text in self.own + self.texts if not text.startswith("hydra.mode=")]
        folder, _ = folders.claim(folder_asked_for(self.base, to_config(self.base, [])))
        shown = [_of_job(job) for job in jobs]
        outcomes = [Outcome(folder / name, job) for name, job in zip(folders.job_names(shown), shown, strict=True)]

        def finish() -> int:
            for outcome in outcomes:
                if outcome.exit_code is None:
                    outcome.error = "not run"
            _list_failures(outcomes)
            runner.write_sweep(folder, [outcome.row(folder) for outcome in outcomes])
            codes = {1 if outcome.exit_code is None else outcome.exit_code for outcome in outcomes}
            return next((code for code in (1, 2, 3) if code in codes), 0)

        def stuck_job(error: str) -> int:
            running = next(outcome for outcome in outcomes if outcome.exit_code is None)
            running.exit_code, running.error = stuck.EXIT_CODE, error
            finish()
            return 1 if any(outcome.exit_code == 1 for outcome in outcomes) else stuck.EXIT_CODE

        stuck.last_word = stuck_job
        try:
            _run_all(settings, folder, outcomes, runner)
        finally:
            stuck.last_word = None
            code = finish()
        return code


def _run_all(settings: list[str], folder: Path, outcomes: list[Outcome], runner: Runner) -> None:
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    def one(cfg: DictConfig) -> None:
        outcome = outcomes[HydraConfig.get().job.num]
        launch(cfg, outcome, runner)
        if outcome.exit_code in (INTERRUPTED, TERMINATED):  # the job ended itself in good order; the sweep ends too
            outcome.error = outcome.error or "interrupted"
            raise Terminated if outcome.exit_code == TERMINATED else KeyboardInterrupt

    OmegaConf.register_new_resolver("specgen_job_folder", lambda number: outcomes[int(number)].folder.name, replace=True)
    place = [f"hydra.sweep.dir={quoted(str(folder.absolute()))}", "hydra.sweep.subdir='${specgen_job_folder:${hydra.job.num}}'"]
    enter_hydra(["-m", *settings, "hydra.mode=MULTIRUN", *place], one)


def _list_failures(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.exit_code is None:
            say(f"job {outcome.folder.name}: not run")
        elif outcome.exit_code != 0:
            say(f"job {outcome.folder.name}: exit {outcome.exit_code}: {outcome.error or 'some rows are errors'}")


def _check_jobs(jobs: list[list[str]]) -> None:
    """Compose and validate every job. Raises the first job's error, with its number, and how many there are."""
    wrong: list[tuple[int, SpecgenError]] = []
    with composer() as compose:
        for number, job in enumerate(jobs):
            try:
                _validate(to_config(compose(job), job), job)
            except SpecgenError as error:
                wrong.append((number, error))
    if wrong:
        number, first = wrong[0]
        count = f"{len(wrong)} of {len(jobs)} jobs are refused" if len(wrong) > 1 else f"1 of {len(jobs)} jobs is refused"
        raise type(first)(f"job {number}: {one_line(first)} ({count}; none was started)") from first


def _validate(config: Config, texts: Sequence[str]) -> None:
    if config.resume is not None:
        raise ConfigError(f"resume={config.resume}: give it on the command line, without -m and not in a file")
    validate(config, [text.lstrip("+").partition("=")[0] for text in texts])


def _of_job(texts: Sequence[str]) -> list[str]:
    """The overrides without Hydra's own."""
    return [text for text in texts if not text.startswith("hydra.")]
