"""From nested mappings to a ``Config``: every key known, every value of its type, nothing missing.

Boundary: pure Python over the dataclasses of ``config``; knows nothing of Hydra, ranges or files. The command line and the Python API share it.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from specgen.config import CHOICES, GROUP_DEFAULTS, GROUPS, Config
from specgen.errors import ConfigError
from specgen.suggest import closest, unknown_key

_HINTS: dict[str, Any] = typing.get_type_hints(Config)
SECTIONS: dict[str, Any] = {name: hint for name, hint in _HINTS.items() if is_dataclass(hint)}


def _leaves() -> dict[str, Any]:
    leaves = {name: hint for name, hint in _HINTS.items() if name not in SECTIONS}
    for section, cls in SECTIONS.items():
        leaves |= {f"{section}.{name}": hint for name, hint in typing.get_type_hints(cls).items()}
    return leaves


KEYS: dict[str, Any] = _leaves()  # dotted key -> type
SELECTORS: dict[str, str] = {f"{group}.{selector}": group for group, (selector, _) in GROUPS.items()}
SETTABLE: tuple[str, ...] = (*GROUPS, *(key for key in KEYS if key not in SELECTORS))


def _plain(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], True
    return hint, False


def is_text(key: str) -> bool:
    """Whether the key holds one text."""
    return key in KEYS and _plain(KEYS[key])[0] is str


def is_list(key: str) -> bool:
    """Whether the key holds a list."""
    return key in KEYS and typing.get_origin(_plain(KEYS[key])[0]) is list


def dict_key_of(key: str) -> str | None:
    """``sampling.logit_bias`` for ``sampling.logit_bias.50``: the mapping-valued key that ``key`` reaches into, else None."""
    head = ".".join(key.split(".")[:2])
    return head if head != key and head in KEYS and typing.get_origin(KEYS[head]) is dict else None


def form_of(key: str) -> str:
    """What a key's value must be, as an error line says it."""
    kind, _ = _plain(KEYS[key])
    if typing.get_origin(kind) is dict:
        return f"must be a mapping, such as {'{50: -3.5}' if typing.get_args(kind)[1] is float else '{name: value}'}"
    if typing.get_origin(kind) is list:
        return "must be a list of whole numbers, such as [5,7]" if typing.get_args(kind)[0] is int else 'must be a list of texts, such as ["a","b"]'
    return _scalar_form(kind)


def _scalar_form(kind: Any) -> str:
    forms = {bool: "true or false", int: "a whole number", float: "a number", str: "one text, not a list or mapping"}
    return f"must be {forms[kind]}"


def shown(value: Any) -> str:
    """A value for an error line, as the command line writes it, cut when it is long."""
    text = _shown(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_shown(name)}:{_shown(item)}' for name, item in value.items())}}}"
    return str(value)


def build(mapping: Mapping[str, Any], *, complete: bool = False) -> Config:
    """A ``Config`` from nested mappings with the command line's names; what is not given takes its default.

    ``complete``: the mapping comes from a composition, where a missing key means that something removed it. Raises ConfigError naming the key.
    """
    _refuse_unknown(mapping, _HINTS, "")
    values: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        given = mapping.get(section, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section}={shown(given)}: must be a mapping of keys")
        if complete and section not in mapping:
            raise ConfigError(f"{section} is missing from the configuration; a file of your own must leave every section in it")
        _refuse_unknown(given, typing.get_type_hints(cls), section)
        values[section] = cls(**_section(section, cls, given, complete))
    for name in _HINTS:
        if name not in SECTIONS and name in mapping:
            values[name] = convert(name, mapping[name])
        elif name not in SECTIONS and complete:
            raise ConfigError(f"{name} is missing from the configuration; set it: {name}=VALUE")
    return Config(**values)


def _section(section: str, cls: type, given: Mapping[str, Any], complete: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if section in GROUPS:
        selector = GROUPS[section][0]
        found |= GROUP_DEFAULTS.get((section, str(given.get(selector, getattr(cls(), selector)))), {})
    for item in fields(cls):
        key = f"{section}.{item.name}"
        if item.name in given:
            found[item.name] = convert(key, given[item.name])
        elif complete:
            instead = "; a file of your own for the group begins with `defaults: [base]`" if section in GROUPS else f"; set it: {key}=VALUE"
            raise ConfigError(f"{key} is missing from the configuration{instead}")
    return found


def _refuse_unknown(given: Mapping[str, Any], known: Mapping[str, Any], section: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(unknown_key(f"{section}.{name}" if section else str(name), SETTABLE))


def convert(key: str, value: Any) -> Any:
    """``value`` as the type of ``key``. Raises ConfigError naming both."""
    kind, optional = _plain(KEYS[key])
    if value is None and optional:
        return None
    if key in CHOICES:
        return _choice(key, value)
    if typing.get_origin(kind) is list:
        return _list(key, value, typing.get_args(kind)[0])
    if typing.get_origin(kind) is dict:
        return _mapping(key, value, typing.get_args(kind)[1])
    if value is None:
        raise ConfigError(f"{key}=null: a value is needed")
    return _scalar(key, value, kind)


def _scalar(key: str, value: Any, kind: Any) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        return float(value)
    if kind is str and isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{key}= has no value; give one, or null")
        return value
    if kind is str and not isinstance(value, (list, dict)):
        raise ConfigError(f"{key}={shown(value)}: must be text; write it in quotes in the file")  # as it stands there, which is not known here
    text = ", not a text" if isinstance(value, str) and _reads_as_value(value) else ""
    raise ConfigError(f"{key}={shown(value)}: {_scalar_form(kind)}{text}")


def _reads_as_value(text: str) -> bool:
    """Whether a text reads like a number, or like true or false."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _choice(key: str, value: Any) -> str:
    allowed = CHOICES[key]
    text = "off" if value is False and "off" in allowed else shown(value)  # YAML 1.1 reads a bare off as false
    if text in allowed:
        return text
    near = closest(text, allowed)
    name = SELECTORS.get(key, key)
    raise ConfigError(f"{name}={text}: must be one of {', '.join(allowed)}" + (f"; did you mean {near}?" if near else ""))


def _list(key: str, value: Any, kind: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        raise ConfigError(f"{key}={shown(value)}: {form_of(key)}")
    items = [value] if not isinstance(value, (list, tuple)) else list(value)
    for item in items:
        if kind is str and isinstance(item, (list, dict)):
            raise ConfigError(f"{key}={shown(value)}: {form_of(key)}")
        if kind is str and not isinstance(item, str):
            raise ConfigError(f"{key}={shown(value)}: {shown(item)} must be text; write it in quotes")
        if kind is str and item == "":
            raise ConfigError(f"{key}={shown(value)}: holds an empty text")
        if kind is int and (isinstance(item, bool) or not isinstance(item, int)):
            raise ConfigError(f"{key}={shown(value)}: {form_of(key)}")
    return items


def _mapping(key: str, value: Any, kind: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={shown(value)}: {form_of(key)}")
    found: dict[str, Any] = {}
    for name, item in value.items():
        if str(name) in found:
            raise ConfigError(f"{key}={shown(value)}: {name} stands in it twice, as a number and as text; keep one")
        if kind is float:
            found[str(name)] = _scalar(f"{key}.{name}", item, float)
            if isinstance(name, bool) or not str(name).isdecimal():
                raise ConfigError(f"{key}: {name} is not a token id")
        else:
            found[str(name)] = item
    return found
