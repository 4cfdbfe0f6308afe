"""An installed specgen: exactly the files that pyproject.toml lists, laid out as setuptools lays them out, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.jobs import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like ``site-packages`` with the package in it."""
    place = tmp_path_factory.mktemp("site-packages")
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)["tool"]["setuptools"]
    folders = settings["package-dir"]
    for package in settings["packages"]:
        known = max((name for name in folders if package == name or package.startswith(f"{name}.")), key=len)
        source = ROOT / folders[known] / Path(*package.removeprefix(known).lstrip(".").split("."))
        target = place / Path(*package.split("."))
        target.mkdir(parents=True, exist_ok=True)
        files = [*source.glob("*.py"), *(path for pattern in settings["package-data"].get(package, ()) for path in source.glob(pattern))]
        for path in files:
            if path.is_file():
                (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(source))
    return place


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--help"], "draft.num_steps"),
        (["--cfg", "job", "+experiment=steps"], "num_steps: 4"),
        (["baseline=false", "data.limit=2", "sampling.max_tokens=8", "draft=eagle3"], "rows    2 requests, 2 samples, 0 errors"),
    ],
    ids=["help", "configuration", "job"],
)
def test_an_installed_package_works_from_any_folder(arguments: list[str], says: str, installed: Path, tmp_path: Path) -> None:
    settings = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    where = "import specgen, specgen.kernels; print(specgen.__file__, *specgen.kernels.__path__)"
    run = {"cwd": tmp_path, "env": settings, "capture_output": True, "text": True, "timeout": 120}
    found = subprocess.run([sys.executable, "-c", where], **run).stdout.split()  # type: ignore[call-overload]
    assert found == [str(installed / "specgen" / "__init__.py"), str(installed / "specgen" / "kernels")]
    done = subprocess.run([sys.executable, "-m", "specgen", *arguments], **run)  # type: ignore[call-overload]
    assert done.returncode == 0 and done.stderr == "" and says in done.stdout
