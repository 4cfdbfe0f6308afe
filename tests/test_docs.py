"""What the documentation says is what the code does: commands compose, keys and defaults agree, links lead somewhere, figures have a source."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import specgen
from specgen.compose import composer, options, to_config
from specgen.config import CHOICES, GROUPS, Config, to_dict
from specgen.draft.checkpoints import aux_layers
from specgen.engine.memory import spec_reserve
from specgen.errors import CheckpointError
from specgen.overrides import Override, parse
from specgen.schema import KEYS, SELECTORS, shown
from specgen.usage import keys
from specgen.validate import ANYTHING, UNSUPPORTED, check_values
from tests.jobs import SMALL, start

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), ROOT / "specgen" / "embedded" / "family" / "README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """The text under a heading, down to the next of the same level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands() -> Iterator[list[str]]:
    """The arguments of every `python -m specgen` in the pages and in the headers of the experiments."""
    lines = [line for page in PAGES for block in blocks(page.read_text(encoding="utf-8"), "sh") for line in block.splitlines()]
    lines += [line.lstrip("# ") for path in (ROOT / "conf" / "experiment").glob("*.yaml") for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line.split()[:3] == ["python", "-m", "specgen"]:
            yield shlex.split(line, comments=True)[3:]


def composed(overrides: list[Override]) -> Config:
    """The configuration of one job."""
    texts = [o.text for o in overrides]
    with composer() as compose:
        return to_config(compose(texts), texts)


# -- commands ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [a for a in commands() if not any(t.startswith(("merge=", "-m", "resume=")) for t in a)], ids=" ".join)
def test_every_documented_job_is_a_legal_one(arguments: list[str]) -> None:
    check_values(composed(parse(arguments, lambda group: options(group, []))), [text.lstrip("+").partition("=")[0] for text in arguments])


def test_documented_sweeps_and_resumes_are_read() -> None:
    others = [a for a in commands() if any(t.startswith(("-m", "resume=")) for t in a)]
    assert [a[0] for a in others] == ["-m", "resume=outputs/mine"]
    swept = parse(others[0][1:])
    assert {o.key: o.elements for o in swept if o.swept} == {"draft": ("eagle", "mtp"), "draft.topk": (), "draft.num_steps": ()}


def test_the_quoting_examples_mean_what_the_page_says() -> None:
    found: dict[str, list[Any]] = {}
    for line in blocks(section(README, "Examples"), "sh")[-1].splitlines():
        config = composed(parse(shlex.split(line, comments=True)[3:]))
        for key, value in (("model.path", config.model.path), ("data.path", config.data.path)):
            if value:
                found.setdefault(key, []).append(value)
        if config.sampling.stop:
            found.setdefault("stop", []).append(config.sampling.stop)
        if config.sampling.logit_bias:
            found.setdefault("logit_bias", []).append(config.sampling.logit_bias)
    assert found == {
        "model.path": ["runs/epoch=3"],
        "data.path": ["[v1](x).jsonl"],
        "stop": [["a", "b"], ["<|eot|>", "\n\n"], ["\n\n"]],
        "logit_bias": [{"50": -3.5}],
    }
    assert composed(parse(["model.path=runs/epoch\\=3", "model=hf"])).model.path == "runs/epoch=3"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(blocks(README, "python")[0], names)
    assert names["rows"][0].output_tokens == 32 and sum(names["rows"][0].counts.accepted) > 0
    assert names["rows"][0].text in capsys.readouterr().out


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (?:\w+=\S+ )?(\w+)", "\n".join(blocks(README, "sh")), re.MULTILINE))
    assert targets == {"run", "test"} and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


# -- keys -------------------------------------------------------------------------------------------------------------------------------------


def table_rows(text: str) -> dict[str, list[str]]:
    """First cell, without its backticks -> the other cells, of every table whose first cell is code."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) > 1:
            name = cells[0].removeprefix("| ").strip("` ")
            assert name not in rows, f"{name} stands in two tables"
            rows[name] = [cell.strip(" |") for cell in cells[1:]]
    return rows


def default_of(key: str) -> str:
    """A key's default as the YAML files write it."""
    value: Any = to_dict(Config())
    for name in key.split("."):
        value = value[name]
    return shown(value)


def test_the_reference_has_every_key_with_its_default_and_no_other() -> None:
    rows = table_rows(CONFIGURATION)
    assert rows.pop("merge")[0] == "`null`", "a command of its own, which no configuration holds"
    assert set(rows) == (set(KEYS) - set(SELECTORS)) | set(GROUPS)
    assert {key: cells[0] for key, cells in rows.items() if key not in GROUPS} == {key: f"`{default_of(key)}`" for key in rows if key not in GROUPS}


def test_the_reference_has_every_choice() -> None:
    rows = table_rows(CONFIGURATION)
    for group, (selector, names) in GROUPS.items():
        assert rows[group] == [" ".join(f"`{name}`" for name in names), f"`{default_of(f'{group}.{selector}')}`"]
    for key, names in CHOICES.items():
        if key not in SELECTORS:
            assert rows[key][1] == " ".join(f"`{name}`" for name in names)


def test_help_and_reference_list_the_same_keys() -> None:
    conf = ROOT / "conf"
    listed = {key for group in GROUPS for key, _, _ in keys((conf / group / "base.yaml").read_text(encoding="utf-8"), f"{group}.")}
    listed |= {key for key, _, _ in keys((conf / "config.yaml").read_text(encoding="utf-8"), "")}
    assert set(KEYS) - set(SELECTORS) == listed


def test_what_is_not_there_yet_is_what_is_refused() -> None:
    said = re.findall(r"^- `(.*)`$", section(README, "Not there yet"), re.MULTILINE)
    refused = [SELECTORS.get(key, key) + ("" if value is ANYTHING else f"={shown(value)}") for key, value in UNSUPPORTED]
    assert sorted(said) == sorted(refused)


# -- facts ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_source_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+[a-z_]+\.(?:py|yaml|md))`", page.read_text(encoding="utf-8")):
        assert any((base / name).exists() for base in (ROOT, ROOT / "specgen")), f"{page.name} names {name}"


def test_the_dependency_table_is_that_of_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = {re.split(r"[><=; ]", entry)[0] for entry in tomllib.load(file)["project"]["dependencies"]}
    table = section((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), "Dependencies")
    named = {name.strip() for line in table.splitlines() if re.match(r"\| [a-z]", line) for name in line.split("|")[1].split(",")} - {"package"}
    assert named == listed


def test_pinned_packages_are_those_that_are_installed_for() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = {re.split(r"[><=; ]", entry)[0] for entry in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    assert set(pins) == wanted | {"setuptools"}


def test_the_reserve_formula_is_the_code() -> None:
    # (overlap + 1) x max(D, S x K, slots(S)) + lead, for a tree of an EAGLE head, a chain of a draft model, and plain decoding
    assert spec_reserve([4], 4, [17], [16], 0, 1) == 2 * max(17, 16, 16)
    assert spec_reserve([4], 1, [5], [4], 1, 0) == 1 * max(5, 4, 4) + 1
    assert spec_reserve([0], 1, [1], [0], 0, 1) == 2


def test_the_table_of_auxiliary_layers_is_the_code() -> None:
    assert aux_layers({"eagle_aux_hidden_state_layer_ids": [2, 5]}, 12, Path("head")) == (2, 5)
    assert aux_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]}}, 12, Path("head")) == (3, 6)
    assert aux_layers({}, 12, Path("head")) == (2, 6, 9)


@pytest.mark.parametrize("given", ["abc", 5, [1, "2"], [1.0], [True], {"a": 1}, [2, 13], [-1]])
@pytest.mark.parametrize("inner", [False, True])
def test_auxiliary_layers_of_another_kind_are_refused_by_name(given: Any, inner: bool) -> None:
    named = {"eagle_aux_hidden_state_layer_ids": [-2] if inner and given == [-1] else given}
    with pytest.raises(
        CheckpointError, match=r"head: (config\.json: eagle_aux_hidden_state_layer_ids must be a list|its auxiliary layers .* do not exist)"
    ):
        aux_layers({"eagle_config": named} if inner else named, 12, Path("head"))


@pytest.mark.parametrize("given", [[1, 2], "abc", 5])
def test_an_eagle_config_that_is_no_mapping_is_refused_by_name(given: Any) -> None:
    with pytest.raises(CheckpointError, match=r"head: config\.json: eagle_config must be a mapping, not "):
        aux_layers({"eagle_config": given}, 12, Path("head"))


def test_the_picture_is_the_output_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    picture = ElementTree.parse(ROOT / "docs" / "images" / "run.svg")
    lines = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert lines[0] == "$ python -m specgen" and "model   embedded (float32, cpu)" in lines
    accepted = [int(line.split()[3].replace(",", "")) for line in lines if re.match(r" +\d ", line)]
    steps = int(next(line for line in lines if re.match(r" +1 ", line)).split()[1].replace(",", ""))
    length = next(line for line in lines if "mean acceptance length" in line)
    assert f"length  {1 + sum(accepted) / steps:.2f} " in length

    def shape(line: str) -> str:
        return " ".join(re.sub(r"[\d.,]+", "#", line).split())

    monkeypatch.chdir(tmp_path)
    assert start("o", *SMALL, "model.device=cpu") == 0
    # Threads depend on the environment, groups and intervals on how many rows there are.
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("threads:", "  ", "written to"))]
    assert any(line.startswith("throughput") and "first token after" in line for line in printed)
    assert {shape(line) for line in printed} <= {shape(line) for line in ["", *lines]}


def test_the_changelog_tells_of_this_version() -> None:
    assert f"\n## {specgen.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_speak_of_the_project_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/(?:work|tmp|root|opt|home)/|\b(?:TODO|FIXME|TBD)\b", text)
