"""Every form that a message says to paste means, pasted into a shell, what the user had typed."""

from __future__ import annotations

import random
import re
import shlex
import subprocess
from typing import Any

import pytest
from hydra.core.override_parser.types import Quote, QuotedString

from specgen.errors import ConfigError
from specgen.overrides import parse, plain_value, refuse_sweep, unescaped
from specgen.pasting import pasted, quoted, setting
from specgen.schema import KEYS, is_text
from specgen.validate import check_values
from tests.test_docs import composed

PIECES = ["a", "b1", "+1", "((", ")", "[", "]", "{", "}", "=", ":", "~", "$", "!", "`", "%", "\\", "\\n", "'", '"', " ", "\u00e9", "0.5", "null"]
FORM = re.compile(r"(?:paste|quote the text:) (.*)$")


def text_of(pieces: list[str], rng: random.Random) -> str:
    """A text of a few pieces, without ${, which refers to something in quotes and out of them."""
    return "".join(rng.choices(pieces, k=rng.randint(1, 5))).strip().replace("${", "$")


def refusal(argument: str) -> str | None:
    """The line that refuses ``argument``, or None."""
    try:
        for override in parse([argument]):
            refuse_sweep(override)
    except ConfigError as error:
        return str(error)
    return None


def read_back(form: str) -> Any:
    """The value of a form to paste, read as a shell and the command line read it."""
    (word,) = shlex.split(form)
    (override,) = parse([word])
    refuse_sweep(override)
    return plain_value(override)


def raw_stop(text: str) -> str | None:
    try:
        return unescaped("sampling.stop", text)
    except ConfigError:
        return None


def test_a_form_for_a_text_is_that_text() -> None:
    rng, shown = random.Random(1), 0
    for _ in range(1500):
        text = text_of([*PIECES, ","], rng)
        said = refusal(f"model.path={text}")
        form = said and FORM.search(said)
        if form:
            assert read_back(form[1]) == text, said
            shown += 1
    assert shown > 500


def test_a_form_for_a_list_of_texts_has_those_texts() -> None:
    rng, shown = random.Random(2), 0
    for _ in range(1500):
        items = [text for _ in range(rng.randint(2, 3)) if (text := text_of([p for p in PIECES if p not in "'\""], rng))]
        wanted = [raw_stop(item) for item in items]
        said = refusal(f"sampling.stop=[{','.join(items)}]")
        form = said and FORM.search(said)
        if form and None not in wanted:
            assert read_back(form[1]) == wanted, said
            shown += 1
    assert shown > 200


@pytest.mark.parametrize("key", sorted(key for key in KEYS if not is_text(key) and key != "sampling.stop"))
@pytest.mark.parametrize("value", ["(", "[1,(]", "{5: 1, '5': 2}", "=1", "1=2"])
def test_no_form_is_shown_for_a_key_that_takes_no_text(key: str, value: str) -> None:
    said = refusal(f"{key}={value}")
    assert said is not None and said.startswith(f"{key}={value} cannot be read: must be ")
    assert not FORM.search(said) and "quotes:" not in said


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("sampling.stop=[+1,((]", "holds characters that need quotes; paste \"sampling.stop=['+1','((']\""),
        ("sampling.stop=['a, b',(]", "holds characters that need quotes; paste \"sampling.stop=['a, b','(']\""),
        ("sampling.stop=[((,+1]", "holds characters that need quotes; put quotes around each text of the list"),
        ("sampling.stop=[a],[b=]", "holds characters that need quotes; put quotes around each text of the list"),
        ("sampling.stop=[x](y)[z]", "holds characters that need quotes; put quotes around each text of the list"),
        ("sampling.stop='a','b'", "has several values: add -m for a sweep"),
        ("model.path=a=b,c", "holds characters that need quotes; if that is one text, paste \"model.path='a=b,c'\""),
        ("model.path='a=b',c=d", "holds characters that need quotes; put quotes around each of its values"),
        ("sampling.logit_bias={5: 1, '5': 2}", "cannot be read: must be a mapping, such as {50: -3.5}; names stand in it without quotes"),
        ("sampling.logit_bias.5=(", "cannot be read: must be a number"),
        ("data.chat_template_kwargs.x=(", "holds characters that need quotes; paste \"data.chat_template_kwargs.x='('\""),
    ],
)
def test_a_form_is_shown_where_it_can_be_told_what_was_meant(argument: str, line: str) -> None:
    assert refusal(argument) == f"{argument} {line}"


def test_a_mapping_that_names_something_twice_is_refused() -> None:
    assert refusal("sampling.logit_bias={5: 1, 5: 2}") == "sampling.logit_bias={5: 1, 5: 2}: a name stands in it twice; keep one"
    assert refusal("sampling.logit_bias={5: 1, 6: 2}") is None and refusal("sampling.logit_bias={}") is None


def test_quoting_is_that_of_hydra() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = text_of([*PIECES, "\\'", "\\\\", '\\"'], rng)
        assert quoted(text) == QuotedString(text=text, quote=Quote.single).with_quotes()


def test_a_shell_reads_what_was_quoted_for_it() -> None:
    rng = random.Random(4)
    texts = [text for _ in range(200) if (text := text_of(PIECES, rng))]
    forms = [form for text in texts for form in (pasted("model.path", text), setting("model.path", text))]
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {' '.join(forms)}"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [shlex.split(form)[0] for form in forms]
    assert [plain_value(parse([word])[0]) for word in words] == [text for text in texts for _ in range(2)]


@pytest.mark.parametrize("path", ["runs/3", "runs/epoch=3", "my model", "it's", "[v1](x)"])
def test_a_replacement_that_a_refusal_proposes_sets_the_same_path(path: str) -> None:
    def proposed(*arguments: str) -> dict[str, Any]:
        with pytest.raises(ConfigError) as caught:
            check_values(composed(parse(arguments)))
        return {o.key: plain_value(o) for o in parse(shlex.split(str(caught.value).partition("; use ")[2]))}

    assert proposed(f"model.path={quoted(path)}") == {"model": "hf", "model.path": path}
    assert proposed(f"data.path={quoted(path)}") == {"data": "hub", "data.path": path}
    assert proposed(f"model={quoted(path + '/x')}") == {"model": "hf", "model.path": path + "/x"}
    assert setting("resume", "outputs/lr=3") == "\"resume='outputs/lr=3'\"" and setting("resume", "outputs/3") == "resume=outputs/3"
