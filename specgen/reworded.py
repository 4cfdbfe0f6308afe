"""What Hydra, OmegaConf and YAML say when a configuration cannot be composed, as one line that names the key and the remedy.

Boundary: reads the errors' texts and attributes; imports neither library, composes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from specgen.schema import KEYS, SETTABLE, dict_key_of, form_of, shown
from specgen.suggest import suggest_key


def explain(error: BaseException) -> str:
    """The line for an error of composition."""
    links = list(_chain(error))
    text = "\n".join(str(link) for link in links)
    key = next((str(found) for link in links if (found := getattr(link, "full_key", None))), None)
    key = key or _first(r"full_key: (\S+)", text)
    mark = next((found for link in links if (found := getattr(link, "problem_mark", None)) is not None), None)
    if mark is not None:
        problem = next(found for link in links if (found := getattr(link, "problem", None)))
        return f"{mark.name} line {mark.line + 1}: not valid YAML: {problem}"
    file = _first(r"^In '([^']+)'", text)
    place = f"{file}.yaml: " if file not in (None, "config") else ""
    for pattern, line in LINES:
        if match := re.search(pattern, text, re.DOTALL):
            return place + line(key or "a value", match)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{key}: {first}" if key and key not in first.split() else first


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return None if match is None else match[1]


def _missing_key(key: str, match: re.Match[str]) -> str:
    near = suggest_key(match[1], SETTABLE)
    hint = f"did you mean ${{{near}}}?" if near in KEYS and near != key else "python -m specgen --help lists all keys"
    return f"{key} refers to ${{{match[1]}}}, and there is no such key: {hint}"


def _environment(key: str, match: re.Match[str]) -> str:
    return f"{key} refers to the environment variable {match[1]}, which is not set; set it, or give a default: ${{oc.env:{match[1]},VALUE}}"


def _resolver(key: str, match: re.Match[str]) -> str:
    return f"{key} refers to ${{{match[1]}:...}}, which is unknown; ${{oc.env:NAME}} is an environment variable, ${{KEY}} another key"


def _unreadable(key: str, match: re.Match[str]) -> str:
    return f"{key}: the ${{...}} in it cannot be read; write ${{KEY}} or ${{oc.env:NAME}}, and \\${{ where the text itself holds it"


def _structure(key: str, match: re.Match[str]) -> str:
    typed = re.search(r"Error merging override \+*[^=]+=(.*)", match.string)
    if key in KEYS:
        return f"{key}={shown(typed[1])}: {form_of(key)}" if typed else f"{key} {form_of(key)}"
    mappings = [name for name in KEYS if dict_key_of(f"{name}.") is not None]
    return f"a list stands where a mapping belongs, or the other way round; mappings are {', '.join(mappings)} and the sections"


def _type(key: str, match: re.Match[str]) -> str:
    wanted = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}.get(match[2], f"a {match[2]}")
    return f"{key}={match[1]}: must be {wanted}"


def _option(key: str, match: re.Match[str]) -> str:
    names = [name for name in re.findall(r"^\t(\S+)$", match[3], re.MULTILINE) if name != "base"]
    return f"{match[1]}={match[2]}: no such choice" + (f"; the names are {', '.join(names)}" if names else "")


Line = Callable[[str, Any], str]
# The first that fits. Texts of omegaconf 2.3 and hydra 1.3.
LINES: tuple[tuple[str, Line], ...] = (
    (r"Interpolation key '(.+?)' not found", _missing_key),
    (r"Environment variable '(.+?)' not found", _environment),
    (r"Unsupported interpolation type (\S+)", _resolver),
    (r"Recursive interpolation", lambda key, match: f"{key} refers to itself; write a value"),
    (r"GrammarParseError|no viable alternative at input|mismatched input|token recognition error|missing BRACE_CLOSE", _unreadable),
    (r"raised while resolving interpolation: (.*?)(?:\n|$)", lambda key, match: f"{key}: what it refers to cannot be worked out: {match[1]}"),
    (r"Cannot merge (?:DictConfig|ListConfig)", _structure),
    (r"Value '(.*?)' (?:of type '\S+' )?(?:is not a valid|could not be converted to) (\w+)", _type),
    (r"Invalid value '(.*?)', expected one of \[(.*?)\]", lambda key, match: f"{key}={match[1]}: must be one of {match[2]}"),
    (r"Could not find '([^'/]+)/([^']+)'(.*)", _option),
)
