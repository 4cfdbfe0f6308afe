"""The house rules: imports go down only, packages are listed, names that say nothing are not used."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "specgen").rglob("*.py"), *(ROOT / "kernels").glob("*.py"), *(ROOT / "conf").rglob("*.py")])

# A module may import modules of its own group and of lower ones. The first are open to everybody.
LEVELS = [
    {"specgen", "specgen.types", "specgen.errors", "specgen.config", "specgen.hub", "specgen.pasting", "specgen.console"},
    {"specgen.suggest", "specgen.schema", "specgen.reworded", "specgen.checkpoint_files", "specgen.grammar_text", "specgen.conf"}
    | {"specgen.readahead"},
    {"specgen.kernels"},
    {"specgen.models"},
    {"specgen.draft"},
    {"specgen.engine"},
    {"specgen.validate", "specgen.job"},
    {"specgen.loading", "specgen.interrupts", "specgen.stuck"},
    {"specgen.record", "specgen.replay"},
    {"specgen.run", "specgen.folders", "specgen.overrides", "specgen.usage", "specgen.embedded"},
    {"specgen.compose", "specgen.launch", "specgen.resuming", "specgen.api"},
    {"specgen.cli", "specgen.lm_eval"},
    {"specgen.__main__"},
]
APART = ("specgen.data", "specgen.report")  # import the first three only, and are imported from validate, job upwards
LEVEL_OF = {name: number for number, names in enumerate(LEVELS) for name in names}


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("kernels", "conf"):
        parts.insert(0, "specgen")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in a file, inside functions too; type-checking imports are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path).split(".") if path.stem == "__init__" else module_name(path).split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def group_of(name: str) -> str:
    """``specgen.models`` for ``specgen.models.loader.load``; ``specgen`` for its own names."""
    parts = name.split(".")
    group = ".".join(parts[:2])
    return group if group in LEVEL_OF or group in APART else "specgen"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    own = group_of(module_name(path))
    for name in imports(path):
        if not name.startswith("specgen"):
            continue
        other = group_of(name)
        if other == own or other in LEVELS[0]:
            continue
        assert own not in APART, f"{own} imports {name}; it may import types, errors and config only"
        if other in APART:
            assert LEVEL_OF[own] >= LEVEL_OF["specgen.validate"], f"{own} imports {name}, which is read by the run, not below it"
        else:
            assert LEVEL_OF[other] <= LEVEL_OF[own], f"{own} imports {name}, which stands above it"


def test_every_module_has_its_place() -> None:
    known = {*LEVEL_OF, *APART}
    assert {".".join(module_name(path).split(".")[:2]) for path in SOURCES} <= known


def test_kernels_import_torch_and_triton_only() -> None:
    for path in (ROOT / "kernels").glob("*.py"):
        foreign = {name.split(".")[0] for name in imports(path)} - {"torch", "triton", "__future__"}
        standard = {name for name in foreign if name in __import__("sys").stdlib_module_names}
        assert foreign - standard <= {"specgen"}, path
        assert all(name.startswith("specgen.kernels") for name in imports(path) if name.startswith("specgen")), path


def test_only_the_command_line_knows_hydra() -> None:
    users = {module_name(path) for path in SOURCES if any(name.split(".")[0] in ("hydra", "omegaconf") for name in imports(path))}
    assert users <= {"specgen.cli", "specgen.compose", "specgen.launch", "specgen.overrides"}


def test_every_subpackage_is_in_pyproject() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {module_name(path) for path in (ROOT / "specgen").rglob("__init__.py")} | {"specgen.kernels", "specgen.conf"}
    assert listed == found


def test_every_file_that_configures_or_ships_is_package_data() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in data["specgen.conf"] for path in (ROOT / "conf").glob(pattern)}
    assert shipped == set((ROOT / "conf").rglob("*.yaml"))


def test_no_file_is_called_utils_and_two_folders_have_no_init() -> None:
    assert [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "common", "misc")] == []
    assert [path for folder in ("kernels", "tests", "benchmarks") for path in (ROOT / folder).rglob("__init__.py")] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
