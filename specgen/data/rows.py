"""What a row holds: its form (prompt, messages, turns, token_ids), its id, its sampling overrides, and what is left over as meta.

Boundary: knows nothing of files, templates or tokenizers. A row that is not well formed raises ``RowFault``.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specgen.config import DataConfig
from specgen.data.sampling import JOB_KEYS, ROW_KEYS
from specgen.data.sources import Row

FORMS = ("prompt", "messages", "turns", "token_ids")


class RowFault(Exception):
    """Why one row cannot run. ``config`` marks a fault that the job's configuration causes: on the very first row it stops the job."""

    def __init__(self, message: str, *, config: bool = False):
        super().__init__(message)
        self.config = config


@dataclass
class Content:
    """One row, understood. ``form`` is one of FORMS; ``name`` the field it stood in; ``value`` its checked value."""

    form: str
    name: str
    value: Any
    also: tuple[str, ...] = ()  # other forms the row carries, not used
    tools: list[Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def row_id(row: Row, data: DataConfig) -> str | int | None:
    """The row's own id, or None where the row has none and ``data.id_field`` is unset. RowFault for anything but text or an integer."""
    name = data.id_field or "id"
    value = row.fields.get(name)
    if value is None:
        if data.id_field:
            raise RowFault(f"no id: field {name!r} (data.id_field) is {'null' if name in row.fields else 'missing'}")
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise RowFault(f"field {name!r}: an id is a string or an integer, got {_kind(value)}")
    if isinstance(value, str) and not encodable(value):
        raise RowFault(f"field {name!r}: the id holds a lone surrogate, which is not text")
    return value


def read_content(row: Row, data: DataConfig) -> Content:
    """Sort the row's fields into content, overrides and meta. RowFault names the field."""
    name, form, also = _find_form(row, data.prompt_field)
    value = _parsed(row, row.fields[name], form or "prompt")
    if form is None:
        form = _form_of(name, value)
    if row.kind == "columns" and form in ("messages", "turns", "token_ids"):
        value = _without_nulls(value)
    {"prompt": _check_prompt, "messages": _check_messages, "turns": _check_turns, "token_ids": _check_token_ids}[form](name, value)
    content = Content(form, name, value, also)
    taken = {name, data.id_field or "id"}
    if form in ("messages", "turns") or (form == "prompt" and data.as_chat):
        content.tools = _tools(row)
        taken.add("tools")
    content.overrides = _overrides(row, data)
    taken.update([data.row_sampling_field] if data.row_sampling_field else (ROW_KEYS if data.row_sampling else ()))
    content.meta = {key: item for key, item in row.fields.items() if key not in taken}
    return content


def _find_form(row: Row, prompt_field: str | None) -> tuple[str, str | None, tuple[str, ...]]:
    """(field, form, other forms present); form None when the value's type decides."""
    fields = row.fields
    if prompt_field:
        if fields.get(prompt_field) is None:
            state = "null" if prompt_field in fields else f"missing{_hint(row, prompt_field)}"
            raise RowFault(f"field {prompt_field!r} (data.prompt_field) is {state}")
        return prompt_field, prompt_field if prompt_field in FORMS else None, ()
    present = [form for form in FORMS if fields.get(form) is not None]
    if present:
        return present[0], present[0], tuple(present[1:])
    null = next((form for form in FORMS if form in fields), None)
    if null:
        raise RowFault(f"field {null!r} is null")
    raise RowFault(f"field 'prompt' is missing (and no messages, turns or token_ids){_hint(row, 'prompt')}")


def _hint(row: Row, wanted: str) -> str:
    near = next((name for name in row.fields if isinstance(name, str) and name.strip().lower() == wanted.lower()), None)
    if near:
        return f"; the row has {near!r}"
    names = ", ".join(repr(name) for name in list(row.fields)[:6])
    return f"; the row has {names or 'no fields'}"


def _parsed(row: Row, value: Any, form: str) -> Any:
    """CSV cells are text: the structured forms are JSON there."""
    if row.kind != "cells" or form == "prompt" or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowFault(f"column {form!r}: the cell is not valid JSON") from error


def _form_of(name: str, value: Any) -> str:
    if isinstance(value, str):
        return "prompt"
    if isinstance(value, list) and value:
        for form, kind in (("messages", dict), ("turns", str), ("token_ids", int)):
            if all(isinstance(item, kind) for item in value):
                return form
    raise RowFault(f"field {name!r} (data.prompt_field): expected text, messages, turns or token ids, got {_kind(value)}")


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "an integer", float: "a number", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def encodable(text: str) -> bool:
    """False for text with a lone surrogate, which no UTF-8 file and no tokenizer can hold."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_prompt(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RowFault(f"field {name!r}: a prompt is text, got {_kind(value)}")
    if not encodable(value):
        raise RowFault(f"field {name!r}: the text holds a lone surrogate, which is not text")


def _check_turns(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise RowFault(f"field {name!r}: turns are a non-empty list of texts, got {'an empty list' if value == [] else _kind(value)}")
    for place, turn in enumerate(value, 1):
        if not isinstance(turn, str) or not encodable(turn):
            raise RowFault(f"field {name!r}: turn {place} must be text, got {_kind(turn)}")


def _check_token_ids(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise RowFault(f"field {name!r}: token ids are a list of integers, got {_kind(value)}")
    if not value:
        raise RowFault(f"field {name!r}: the prompt is empty (no token id)")
    for place, token in enumerate(value, 1):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RowFault(f"field {name!r}: item {place} must be an integer, got {_kind(token)}")


def _check_messages(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise RowFault(f"field {name!r}: messages are a non-empty list, got {'an empty list' if value == [] else _kind(value)}")
    for place, message in enumerate(value, 1):
        where = f"field {name!r}: message {place}"
        if not isinstance(message, dict):
            raise RowFault(f"{where} must be an object, got {_kind(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RowFault(f"{where}: 'role' must be text, got {_kind(role) if 'role' in message else 'nothing'}")
        if message.get("content") is None:
            # A template would print None as text; only a message that is a tool call has nothing to say.
            if not message.get("tool_calls"):
                raise RowFault(f"{where}: 'content' is {'null' if 'content' in message else 'missing'}")
        else:
            message["content"] = _text_content(where, message["content"])


def _text_content(where: str, content: Any) -> str:
    """Message content as text; a list of text parts is joined by newlines, since templates for text models print a list as Python code."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(f"{where}: 'content' must be text, got {_kind(content)}")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowFault(f"{where}: 'content' holds a part of type {kind!r}; only text parts can be sent")
        parts.append(part["text"])
    return "\n".join(parts)


def _without_nulls(value: Any) -> Any:
    """Typed columns give every struct every key: drop the nulls that only pad, so that a template sees the keys the row was written with."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _tools(row: Row) -> list[Any] | None:
    value = row.fields.get("tools")
    if isinstance(value, str) and row.kind != "json":
        value = _parsed(Row(row.index, row.where, {}, kind="cells"), value, "tools")
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(f"field 'tools': tools are a list of objects, got {_kind(value)}")
    return _without_nulls(value) if row.kind == "columns" else value


def _overrides(row: Row, data: DataConfig) -> dict[str, Any]:
    if data.row_sampling_field:
        nested = row.fields.get(data.row_sampling_field)
        if isinstance(nested, str) and row.kind != "json":
            nested = _parsed(Row(row.index, row.where, {}, kind="cells"), nested, data.row_sampling_field)
        if nested is None:
            return {}
        if not isinstance(nested, dict):
            raise RowFault(f"field {data.row_sampling_field!r} (data.row_sampling_field) must be an object, got {_kind(nested)}")
        for name in nested:
            if name not in ROW_KEYS:
                reason = "is set per job, not per row" if name in JOB_KEYS else f"is not one of {', '.join(ROW_KEYS)}"
                raise RowFault(f"field {data.row_sampling_field!r}: {name!r} {reason}")
    elif data.row_sampling:
        nested = {name: row.fields[name] for name in ROW_KEYS if name in row.fields}
    else:
        return {}
    found = {name: _typed(row, name, value) for name, value in nested.items()}
    return {name: value for name, value in found.items() if value is not None}


def _typed(row: Row, name: str, value: Any) -> Any:
    """A sampling value with the type its source could not carry: CSV text is read as JSON, a float column with gaps holds integers and NaN."""
    if row.kind == "cells" and isinstance(value, str):
        try:
            return json.loads({"True": "true", "False": "false"}.get(value, value))
        except ValueError:
            return value
    if row.kind == "columns":
        if isinstance(value, float) and math.isnan(value):
            return None
        if isinstance(value, float) and value.is_integer() and name in ("max_tokens", "min_tokens", "top_k", "seed", "n"):
            return int(value)
        if isinstance(value, list) and name == "logit_bias":
            return value
        return _without_nulls(value)
    return value


class MetaCleaner:
    """Makes meta strict JSON: NaN and infinities become null, lone surrogates U+FFFD, column types text. Counts what it changed, for the log."""

    def __init__(self) -> None:
        self.nonfinite = 0
        self.surrogates = 0
        self.converted: set[str] = set()

    def clean(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """``meta`` with every value as JSON can hold it."""
        return {self._text(str(name)): self._value(value) for name, value in meta.items()}

    def _text(self, text: str) -> str:
        if encodable(text):
            return text
        self.surrogates += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            self.nonfinite += 1
            return None
        if isinstance(value, Mapping):
            return self.clean(value)
        if isinstance(value, (list, tuple)):
            return [self._value(item) for item in value]
        return self._foreign(value)

    def _foreign(self, value: Any) -> Any:
        """Types of Parquet and hub columns that JSON lacks."""
        self.converted.add(type(value).__name__)
        if isinstance(value, (bytes, bytearray)):
            return base64.b64encode(value).decode("ascii")
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if isinstance(value, (decimal.Decimal, uuid.UUID, datetime.timedelta)):
            return str(value)
        if hasattr(value, "tolist"):  # numpy scalars and arrays
            return self._value(value.tolist())
        return str(value)
