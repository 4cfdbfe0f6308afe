"""The command line's overrides, read before Hydra composes anything: keys checked, text kept as typed, refusals worded for the person who typed.

Boundary: uses Hydra's override grammar (to know what Hydra would read) and nothing else of Hydra; knows nothing of composition, folders or models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgen.config import CHOICES, GROUPS
from specgen.errors import ConfigError
from specgen.pasting import pasted, pasted_list, quoted, setting
from specgen.schema import KEYS, SECTIONS, SELECTORS, SETTABLE, dict_key_of, form_of, is_list, is_text, shown
from specgen.suggest import closest, unknown_key
from specgen.validate import SUFFIXES, data_source_for

TEXT_LISTS = frozenset(key for key in KEYS if is_list(key) and "str" in str(KEYS[key]))
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.job.chdir", "hydra.verbose", "hydra.mode", "hydra.searchpath")
HYDRA_PREFIXES = ("hydra.job.env_set.",)
HYDRA_CHOICES = {"hydra.job.chdir": ("true", "false"), "hydra.verbose": ("true", "false"), "hydra.mode": ("RUN", "MULTIRUN")}
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir")  # both mean output.dir
NULL_HINTS = {"draft": "draft=none", "task": "task=none", "model": "model=embedded", "data": "data=embedded"}


@dataclass(frozen=True)
class Override:
    """One ``key=value`` as typed. ``elements``: its one value, or the several of a sweep, each in a form Hydra reads rightly; none for a function."""

    key: str
    value: str
    elements: tuple[str, ...] = ()

    @property
    def swept(self) -> bool:
        """Whether the setting makes more than one job."""
        return len(self.elements) != 1

    @property
    def text(self) -> str:
        """The override to hand to Hydra, its text values quoted where Hydra would have read something else."""
        mapped = dict_key_of(f"{self.key}.")  # the mapping itself, or an entry of it: its keys are the user's, so they are added
        plus = "++" if mapped else "+" if self.key == "experiment" else ""
        return f"{plus}{self.key}={','.join(self.elements) if self.elements else self.value}"


def parse(arguments: Sequence[str], options: Callable[[str], Iterable[str]] | None = None) -> list[Override]:
    """Check and normalise the command line's overrides. ``options(group)`` lists a group's names (default: those specgen ships).

    Raises ConfigError for a stray argument, an unknown key, an empty value, text that Hydra's grammar refuses, and a key given twice.
    """
    found: dict[str, Override] = {}
    for argument in arguments:
        override = _split(argument)
        earlier = found.get(override.key)
        if earlier and earlier.value != override.value:
            raise ConfigError(f"{override.key} is given twice: {override.key}={earlier.value} and {override.key}={override.value}; keep one")
        found[override.key] = _normalised(override, options or shipped_options)
    return list(found.values())


def shipped_options(group: str) -> tuple[str, ...]:
    """The names specgen ships for a group."""
    return GROUPS[group][1] if group in GROUPS else ()


def _split(argument: str) -> Override:
    match = re.fullmatch(r"(~|\+{0,2})([^=]*?)(=.*)?", argument, re.DOTALL)
    assert match is not None
    prefix, key, value = match[1], match[2].strip(), match[3]
    if prefix == "~":
        hint = f"set {NULL_HINTS[key]}" if key in NULL_HINTS else "set it to the value you want"
        raise ConfigError(f"{argument}: a key cannot be removed; {hint}")
    if value is None:
        raise ConfigError(f"stray argument {argument!r}: settings are key=value, without blanks around the =")
    if key in FOLDER_KEYS:
        key = "output.dir"
    _check_key(key)
    value = value[1:].strip(" \t")
    if value in ("", "''", '""'):
        raise ConfigError(f"{key}= has no value; write it right after the =, without a blank")
    return Override(key, value)


def _check_key(key: str) -> None:
    if key in SELECTORS:
        raise ConfigError(f"{key} is set by choosing the group: {SELECTORS[key]}=NAME")
    if key in SETTABLE or key == "experiment" or dict_key_of(key) or key in HYDRA_KEYS or key.startswith(HYDRA_PREFIXES):
        return
    if key in SECTIONS:
        raise ConfigError(f"{key} is a section, not a key; set its keys one by one: {key}.NAME=value")
    if key.startswith("hydra"):
        taken = ", ".join(HYDRA_KEYS)
        raise ConfigError(f"{key} cannot be set: specgen runs its jobs in one process and names their folders; of Hydra's keys it takes {taken}")
    raise ConfigError(unknown_key(key, SETTABLE))


def _normalised(override: Override, options: Callable[[str], Iterable[str]]) -> Override:
    key, value = override.key, override.value
    if key in HYDRA_CHOICES and not {value, value.lower()} & set(HYDRA_CHOICES[key]):
        raise ConfigError(f"{key}={value}: must be one of {', '.join(HYDRA_CHOICES[key])}")
    parsed = read_value(key, value)
    if key in GROUPS or key == "experiment":
        elements = split_elements(value)
        for element in elements:
            _check_option(key, _unquoted(key, element), list(options(key)))
        return replace(override, elements=tuple(elements))
    if is_text(key) or key in TEXT_LISTS:
        elements = split_elements(_choices_inside(key, value, parsed))
        keep = _text_list if key in TEXT_LISTS else _text
        return replace(override, elements=tuple(keep(key, element, len(elements) > 1) for element in elements))
    if dict_key_of(f"{key}.") == key:
        for element in split_elements(value):
            _refuse_twice(key, element)
    return replace(override, elements=() if _is_sweep(parsed) else (value,))


def _refuse_twice(key: str, element: str) -> None:
    """Raise ConfigError for a mapping that names something twice, of which Hydra would keep the last."""
    parsed = read_value(key, element)
    if isinstance(parsed, dict) and len(split_elements(element[1:-1])) > max(len(parsed), 1):
        raise ConfigError(f"{key}={element}: a name stands in it twice; keep one")


def _choices_inside(key: str, value: str, parsed: Any) -> str:
    if _is_sweep(parsed):
        if match := re.fullmatch(r"choice\s*\((.*)\)", value, re.DOTALL):
            return match[1]
        if not getattr(parsed, "simple_form", False):
            raise ConfigError(f"{key}={value}: text is swept by a list of values, {key}=A,B")
    return value


def _is_sweep(parsed: Any) -> bool:
    from hydra.core.override_parser.types import Sweep

    return isinstance(parsed, Sweep)


def read_value(key: str, value: str) -> Any:
    """What Hydra's grammar reads in ``value``. Raises ConfigError with the form to paste when it reads nothing."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"k={value}")._value
    except HydraException as error:
        raise ConfigError(_unreadable(key, value)) from error


def _unreadable(key: str, value: str) -> str:
    """The line for a value that Hydra's grammar refuses. A form to paste is shown only where it means what was typed."""
    said = f"{key}={value} holds characters that need quotes"
    if key in CHOICES:
        return f"{key}={value}: must be one of {', '.join(CHOICES[key])}"
    if _bracketed(value) and (key in TEXT_LISTS or key == "hydra.searchpath"):
        items = _items_quoted(value)
        return f"{said}; " + (f"paste {pasted_list(key, items)}" if items else "put quotes around each text of the list")
    entry = dict_key_of(key)
    if is_text(key) or key in TEXT_LISTS or (key not in KEYS and (entry is None or "Any" in str(KEYS[entry]))):
        elements = split_elements(value)
        if len(elements) == 1:
            return f"{said}; paste {pasted(key, value)}"
        own = any(element[:1] in ("'", '"', "[") for element in elements)
        return f"{said}; " + ("put quotes around each of its values" if own else f"if that is one text, paste {pasted(key, value)}")
    names = "; names stand in it without quotes" if dict_key_of(f"{key}.") == key else ""
    return f"{key}={value} cannot be read: {'must be a number' if entry else form_of(key)}{names}"


def _bracketed(value: str) -> bool:
    return value.startswith("[") and value.endswith("]")


def _items_quoted(value: str) -> list[str] | None:
    """The items of a list of texts, each in quotes; None where it cannot be told which texts they are."""
    found = []
    for item in split_elements(value[1:-1].strip()):
        if item and not re.search(r"""['",\[\]]""", item):
            found.append(quoted(item))
        elif _is_quoted(item):
            found.append(item)
        else:
            return None
    return found


def _is_quoted(element: str) -> bool:
    """Whether an element is one quoted text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString
    from hydra.errors import HydraException

    try:
        return isinstance(OverridesParser.create().parse_override(f"k={element}")._value, QuotedString)
    except HydraException:
        return False


def split_elements(value: str) -> list[str]:
    """Split at the commas that stand outside quotes, brackets and escapes."""
    parts, depth, quote, start, i = [], 0, "", 0, 0
    while i < len(value):
        char = value[i]
        if char == "\\":
            i += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(value[start:i])
            start = i + 1
        i += 1
    return [part.strip(" \t") for part in (*parts, value[start:])]


def _text(key: str, element: str, swept: bool) -> str:
    """One text element in a form that Hydra reads as exactly what was typed. ``swept``: others stand beside it."""
    from hydra.core.override_parser.types import QuotedString

    parsed = read_value(key, element)
    if isinstance(parsed, (list, dict)):
        form = f"quote it: {quoted(element)}" if swept else f"paste {pasted(key, element)}"
        raise ConfigError(f"{key}={element}: takes one text; if that is the text, {form}")
    if (isinstance(parsed, QuotedString) and not parsed.text.strip()) or (isinstance(parsed, str) and not parsed.strip()):
        raise ConfigError(f"{key}={element} has no value; give one, or null")
    if isinstance(parsed, (str, QuotedString)) or element == "null":
        return element
    return quoted(element)


def _text_list(key: str, element: str, swept: bool) -> str:
    """A list of texts, or one bare text; quoted so that backslashes reach ``unescaped`` as they were typed. ``swept``: others stand beside it."""
    if element == "null":
        return element
    if not _bracketed(element):
        return _raw_quoted(key, element, alone=not swept)
    inner = element[1:-1].strip()
    items = split_elements(inner) if inner else []
    return "[" + ",".join(_raw_quoted(key, item) for item in items) + "]"


def _raw_quoted(key: str, element: str, alone: bool = False) -> str:
    """One text of a list. ``alone``: the whole value."""
    from hydra.core.override_parser.types import QuotedString

    parsed = read_value(key, element)
    text = parsed.text if isinstance(parsed, QuotedString) else element
    if text == "":
        raise ConfigError(f"{key}={element}: holds an empty text")
    if isinstance(parsed, (list, dict)):
        form = f"paste {pasted(key, element)}" if alone else f"quote it: {quoted(element)}"
        raise ConfigError(f"{key}={element}: a list of texts holds texts only; if that is the text, {form}")
    return quoted(text)


def unescaped(key: str, text: str) -> str:
    r"""Resolve the escapes \n \t \\ \uXXXX of a text typed on the command line; Hydra's own \, \= \( ... stand for the character."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "u":
            if len(code) != 5:
                raise ConfigError(f"{key}: {match[0]} in {text!r} is not a character; write \\u and four hexadecimal digits, or \\\\u for the text")
            return chr(int(code[1:], 16))
        return {"n": "\n", "t": "\t"}.get(code, code if code in "\\()[]{}:=, " else match[0])

    found = re.sub(r"\\(u[0-9A-Fa-f]{4}|.)", one, text, flags=re.DOTALL)
    try:  # a pair of surrogates is one character
        return found.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {text!r} holds half a surrogate pair; write both halves") from error


def unescape_composed(mapping: dict[str, Any], overrides: Iterable[str]) -> None:
    """In place: resolve the escapes of the text lists that ``overrides`` set on the command line (values from files are left alone)."""
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in TEXT_LISTS & given:
        section, _, name = key.partition(".")
        value = mapping[section][name]
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list):
            mapping[section][name] = [unescaped(key, item) if isinstance(item, str) else item for item in items]


def _unquoted(key: str, element: str) -> str:
    parsed = read_value(key, element)
    return str(getattr(parsed, "text", None) or element)


def _check_option(group: str, name: str, options: list[str]) -> None:
    if name in options:
        return
    if name == "null" and group in NULL_HINTS:
        raise ConfigError(f"{group}=null: a name is needed; use {NULL_HINTS[group]}")
    if group in GROUPS and _looks_like_path(name):
        raise ConfigError(f"{group}={name}: {group} is a name, not a path; use {_path_form(group, name)}")
    near = closest(name, options)
    meant = f"did you mean {group}={near}? The names are" if near else "the names are"
    raise ConfigError(f"{group}={name}: no such choice; {meant} {', '.join(options)}")


def _looks_like_path(name: str) -> bool:
    return any(c in name for c in "/\\@") or name.startswith((".", "~")) or os.path.exists(name) or Path(name).suffix in SUFFIXES


def _path_form(group: str, path: str) -> str:
    if group == "model":
        name, _, revision = path.partition("@")
        if revision and not os.path.exists(path):
            return f"model=hf {setting('model.path', name)} {setting('model.revision', revision)}"
        return f"model=hf {setting('model.path', path)}"
    if group == "draft":
        words = path.lower().replace("-", "").replace("_", "")
        method = next((m for m in ("eagle3", "eagle", "dflash") if m in words), "draft_model")
        return f"draft={method} {setting('draft.path', path)}"
    if group == "data":
        return f"data={data_source_for(path)} {setting('data.path', path)}"
    return f"task=NAME {setting('task.path', path)}, NAME being one of {', '.join(GROUPS['task'][1][1:])}"


def refuse_sweep(override: Override) -> None:
    """Raise ConfigError for several values where one job is run."""
    if override.swept:
        text = is_text(override.key) or override.key in TEXT_LISTS
        own = any(element[:1] in ("'", '"', "[", "{") for element in split_elements(override.value))  # typed as values, not as parts of a text
        quote = f", or quote the text: {pasted(override.key, override.value)}" if text and not own else ""
        raise ConfigError(f"{override.key}={override.value} has several values: add -m for a sweep{quote}")


def plain_value(override: Override) -> Any:
    """The Python value of a setting that is not a sweep, for ``resume``, which does not compose."""
    from hydra.core.override_parser.types import QuotedString

    def plain(value: Any) -> Any:
        if isinstance(value, QuotedString):
            return value.text
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {plain(name): plain(item) for name, item in value.items()}
        return value

    value = plain(read_value(override.key, override.elements[0]))
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{override.key}={shown(value)}: write the value itself here")
    if override.key in TEXT_LISTS and value is not None:
        return [unescaped(override.key, item) for item in ([value] if isinstance(value, str) else value)]
    return value
