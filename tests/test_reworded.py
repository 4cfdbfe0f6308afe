"""Every key of the schema, set to every kind of wrong value: one line of specgen's own that names the key and what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen.compose import composer, options, to_config
from specgen.config import CHOICES
from specgen.errors import ConfigError
from specgen.overrides import TEXT_LISTS, parse
from specgen.schema import KEYS, SELECTORS, convert, dict_key_of, form_of, is_text
from tests.test_cli import refused

SET = [key for key in KEYS if key not in SELECTORS]
FOREIGN = re.compile(
    r"DictConfig|ListConfig|Interpolation|omegaconf|OmegaConf|raised while|merging|full_key|object_type|Hydra|\bConfig\w*Error|KeyError"
)


@pytest.fixture(scope="module")
def line() -> Iterator[Callable[..., str]]:
    """The refusal of an override, as composition words it."""
    with composer() as compose:

        def refusal(text: str) -> str:
            with pytest.raises(ConfigError) as error:
                overrides = parse([text], lambda group: options(group, []))
                texts = [override.text for override in overrides]
                to_config(compose(texts), texts)
            message = str(error.value)
            assert "\n" not in message and not FOREIGN.search(message), message
            return message

        yield refusal


def form(key: str) -> str:
    """What the key takes, as a refusal ends."""
    return f"must be one of {', '.join(CHOICES[key])}" if key in CHOICES else form_of(key)


def typed(key: str, value: str, form: Callable[[str], str]) -> str:
    """The refusal of a list or mapping where the key takes neither or the other."""
    if key in TEXT_LISTS:
        return f"{key}={value}: a list of texts holds texts only; if that is the text, paste \"{key}='{value}'\""
    if is_text(key):
        return f"{key}={value}: takes one text; if that is the text, paste \"{key}='{value}'\""
    return f"{key}={value}: {form(key)}"


@pytest.mark.parametrize("key", SET)
def test_a_list_or_mapping_in_place_of_another_kind_is_refused_with_what_the_key_takes(key: str, line: Callable[..., str]) -> None:
    value = "{a:1}" if dict_key_of(f"{key}.") is None else "[1,2]"
    assert line(f"{key}={value}") == typed(key, value, form)


@pytest.mark.parametrize("key", SET)
def test_a_word_or_nothing_in_place_of_a_value_is_refused_with_what_the_key_takes(key: str) -> None:
    def refusal(value: Any) -> str:
        with pytest.raises(ConfigError) as error:
            convert(key, value)
        return str(error.value)

    wrong: Any = 3.5 if is_text(key) or key in TEXT_LISTS else "word"
    shown = str(wrong)
    if key in TEXT_LISTS:
        assert refusal(wrong) == f"{key}=3.5: 3.5 must be text; write it in quotes"
    elif is_text(key) and key not in CHOICES:
        assert refusal(wrong) == f"{key}=3.5: must be text; write it in quotes in the file"
    else:
        assert refusal(wrong) == f"{key}={shown}: {form(key)}"
    takes_null = any(kind in str(KEYS[key]) for kind in ("None", "list", "dict"))
    if takes_null:
        assert convert(key, None) in (None, [], {})
    else:
        assert refusal(None) == f"{key}=null: {form(key) if key in CHOICES else 'a value is needed'}"


@pytest.mark.parametrize("key", SET)
def test_an_environment_variable_that_is_not_set_is_named(key: str, line: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert line(f"{key}=${{oc.env:NOT_SET}}") == (
        f"{key} refers to the environment variable NOT_SET, which is not set; set it, or give a default: ${{oc.env:NOT_SET,VALUE}}"
    )


OF_EACH_KIND = ("baseline", "sampling.seed", "sampling.top_p", "model.path", "engine.overlap", "sampling.stop", "sampling.logit_bias")


@pytest.mark.parametrize("key", OF_EACH_KIND)
def test_what_a_value_refers_to_is_named_when_it_is_not_there(key: str, line: Callable[..., str]) -> None:
    assert line(f"{key}=${{xyzzy}}") == f"{key} refers to ${{xyzzy}}, and there is no such key: python -m specgen --help lists all keys"
    assert line(f"{key}=${{engine.pagesize}}") == (
        f"{key} refers to ${{engine.pagesize}}, and there is no such key: did you mean ${{engine.page_size}}?"
    )
    assert line(f"{key}=${{mine:3}}") == (
        f"{key} refers to ${{mine:...}}, which is unknown; ${{oc.env:NAME}} is an environment variable, ${{KEY}} another key"
    )
    assert line(f"{key}=${{{key}}}") == f"{key} refers to itself; write a value"
    assert line(f"{key}=???") == f"{key} has no value; set it: {key}=VALUE"


def test_what_an_entry_refers_to_is_named_too(line: Callable[..., str]) -> None:
    assert line("sampling.stop=[a,${xyzzy}]").startswith("sampling.stop[1] refers to ${xyzzy}, ")
    assert line("sampling.logit_bias={5: ${xyzzy}}").startswith("sampling.logit_bias.5 refers to ${xyzzy}, ")
    assert line("sampling.seed=${oc.decode:'[1'}").startswith("sampling.seed: the ${...} in it cannot be read; write ${KEY} or ${oc.env:NAME}, ")


FILES: dict[str, tuple[str, str]] = {
    "list": ("sampling:\n  logit_bias: [1]\n", "experiment/list.yaml: a list stands where a mapping belongs, or the other way round; mappings are "),
    "yaml": ("sampling:\n  stop: {a: 1\n", "mine/experiment/yaml.yaml line 4: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    "group": (
        "defaults:\n  - override /draft: egle\n",
        "draft=egle: no such choice; the names are dflash, draft_model, ",
    ),
    "number": ("sampling: 3\n", "sampling=3: must be a mapping of keys"),
    "env": ("sampling:\n  seed: ${oc.env:NOT_SET}\n", "sampling.seed refers to the environment variable NOT_SET, which is not set; "),
    "verbose": ("hydra:\n  verbose: [a]\n", "hydra.verbose: must be true or false"),
    "stop": ("sampling:\n  stop: [[a]]\n", 'sampling.stop=[[a]]: must be a list of texts, such as ["a","b"]'),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_users_is_refused_by_key_or_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text, expected = FILES[name]
    (tmp_path / "mine" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    for given in (["--config-dir", "mine"], ["hydra.searchpath=[mine]"]):
        message = refused(capsys, *given, f"+experiment={name}")
        assert message.removeprefix(f"{tmp_path}/").startswith(expected)


def test_a_file_without_its_header_or_its_base_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, text in (("experiment", "sampling:\n  seed: 3\n"), ("draft", "method: eagle\n")):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        (tmp_path / "mine" / folder / "own.yaml").write_text(text)
    expected = "the file of +experiment=NAME must begin with the line `# @package _global_` and hold a mapping of keys"
    assert refused(capsys, "--config-dir", "mine", "+experiment=own") == expected
    expected = "draft.path is missing from the configuration; a file of your own for the group begins with `defaults: [base]`"
    assert refused(capsys, "--config-dir", "mine", "draft=own") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hydra.verbose={a:1}", "hydra.verbose={a:1}: must be one of true, false"),
        ("hydra.job.chdir=abc", "hydra.job.chdir=abc: must be one of true, false"),
        ("hydra.mode=${nope}", "hydra.mode=${nope}: must be one of RUN, MULTIRUN"),
        ("hydra.searchpath=3", "hydra.searchpath=3: must be a list of folders, such as [DIR]; --config-dir DIR gives one"),
        ("hydra.searchpath=[nope]", "hydra.searchpath=[nope]: no such folder as nope"),
    ],
)
def test_hydras_own_keys_are_refused_in_the_same_way(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, text) == expected


def test_a_swept_value_is_refused_with_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "job 1: sampling.logit_bias=[1]: must be a mapping, such as {50: -3.5} (1 of 2 jobs is refused; none was started)"
    assert refused(capsys, "-m", "sampling.logit_bias={5: 1.0},[1]") == expected


def test_lists_and_mappings_are_shown_as_they_are_typed() -> None:
    from specgen.schema import shown

    values: dict[str, Any] = {"[a,5,null]": ["a", 5, None], "{a:[true]}": {"a": [True]}, "null": None, "true": True, "0.5": 0.5}
    assert [shown(value) for value in values.values()] == list(values)
    assert len(shown(list(range(100)))) == 80
