"""Hydra, kept in one place: overrides -> composed configuration -> ``Config``, and the entry into ``hydra.main``.

Boundary: composes and launches; decides nothing about folders, exit codes or what may be set. Only ``cli`` and ``launch`` use it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.config import GROUPS, PATH_KEYS, Config
from specgen.errors import ConfigError
from specgen.overrides import read_value, shipped_options, unescape_composed
from specgen.reworded import explain
from specgen.schema import build

if TYPE_CHECKING:
    from omegaconf import DictConfig


@contextmanager
def composer() -> Iterator[Callable[[Sequence[str]], DictConfig]]:
    """``compose(overrides)``, Hydra's own part included, without any folder being made."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()

    def composed(overrides: Sequence[str]) -> DictConfig:
        with reworded():
            return compose("config", list(overrides), return_hydra_config=True)

    with initialize_config_module("specgen.conf", version_base="1.3", job_name="specgen"):
        yield composed


@contextmanager
def reworded() -> Iterator[None]:
    """Errors of Hydra and OmegaConf as a ConfigError of one line that names the key."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        yield
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value; set it: {error.full_key}=VALUE") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error)) from error


def to_config(cfg: DictConfig, overrides: Sequence[str]) -> Config:
    """A composed configuration as a ``Config``: resolved, typed, complete, ``~`` expanded, the escapes of texts in ``overrides`` resolved."""
    from omegaconf import OmegaConf, open_dict

    cfg = copy.copy(cfg)
    if "hydra" in cfg:
        with open_dict(cfg):
            del cfg["hydra"]
    with reworded():
        mapping: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    if "experiment" in mapping:
        raise ConfigError("the file of +experiment=NAME must begin with the line `# @package _global_` and hold a mapping of keys")
    unescape_composed(mapping, overrides)
    for key in PATH_KEYS:
        section, _, name = key.partition(".")
        value = mapping.get(section, {}).get(name)
        if isinstance(value, str) and value.startswith("~"):
            mapping[section][name] = os.path.expanduser(value)
    return build(mapping, complete=True)


def folder_asked_for(cfg: DictConfig, config: Config) -> str | None:
    """``output.dir``, or the ``hydra.run.dir`` that a configuration file sets; None for specgen's own choice."""
    from omegaconf import OmegaConf

    run: Any = OmegaConf.to_container(cfg.hydra.run, resolve=False)
    return str(run["dir"]) if config.output.dir is None and run["dir"] != "${output.dir}" else config.output.dir


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job, in the order in which Hydra's basic sweeper runs them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with reworded():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        return [list(job) for job in BasicSweeper.split_arguments(parsed, None)[0]]


def searchpath_of(config_dir: str | None, arguments: Sequence[str]) -> list[str]:
    """``--config-dir``, or the folders of ``hydra.searchpath``, as Hydra's search path. Raises ConfigError for a folder that is not there."""
    key = "hydra.searchpath"
    value = next((text.partition("=")[2] for text in arguments if text.lstrip("+").startswith(f"{key}=")), None)
    if config_dir is not None and value is not None:
        raise ConfigError(f"--config-dir and {key} say the same; give one")
    if value is None:
        return [] if config_dir is None else [_searched(f"--config-dir {config_dir}", config_dir)]
    folders = read_value(key, value)
    folders = [getattr(item, "text", item) for item in folders] if isinstance(folders, list) else [folders]
    if not all(isinstance(item, str) for item in folders):
        raise ConfigError(f"{key}={value}: must be a list of folders, such as [DIR]; --config-dir DIR gives one")
    return [item if item.startswith("pkg://") else _searched(f"{key}={value}", item.removeprefix("file://")) for item in folders]


def _searched(given: str, name: str) -> str:
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"{given}: no such folder" + ("" if given.endswith(name) else f" as {name}"))
    return f"file://{folder}"


def options(group: str, searchpath: Sequence[str]) -> list[str]:
    """The names of a group: those specgen ships first, then those of the user's folders."""
    names = list(shipped_options(group))
    if not names:
        names = sorted(item.name.removesuffix(".yaml") for item in (files("specgen.conf") / group).iterdir() if item.name.endswith(".yaml"))
    for root in searchpath:
        own = sorted(path.stem for path in Path(root.removeprefix("file://"), group).glob("*.yaml"))
        names += [name for name in own if name not in names and (name != "base" or group not in GROUPS)]
    return names


def enter_hydra(arguments: Sequence[str], task: Callable[[DictConfig], None]) -> int:
    """Enter ``hydra.main`` with ``arguments``. Its own error reports are reworded and its exits become the returned code."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()

    def specgen(cfg: DictConfig) -> None:
        task(cfg)

    saved, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["specgen", *arguments], "1"
    try:
        with reworded():
            hydra.main(config_path="pkg://specgen.conf", config_name="config", version_base="1.3")(specgen)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        sys.argv = saved
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return 0
