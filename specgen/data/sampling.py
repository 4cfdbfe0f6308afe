"""Sampling parameters: the job's configuration, and what one row overrides.

Boundary: knows nothing of files, tokenizers or devices. One table says what each key may be.
A fault of the job is a ConfigError, of a row a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specgen.config import SamplingConfig
from specgen.errors import ConfigError
from specgen.types import SamplingParams

INT32_MAX = 2**31 - 1
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-5, 1e30  # logits / T must stay finite in float32, and T itself

ROW_KEYS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "n",
)
JOB_KEYS = ("acceptance", "logprobs", "grammar", "include_stop", "allowed_token_ids", "banned_token_ids", "from_model")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, got {_shown(value)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"must be finite, got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _int_from(low: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = _integer(value)
        if not low <= number <= INT32_MAX:
            raise ValueError(f"must be between {low} and {INT32_MAX}, got {_shown(number)}")
        return number

    return check


def _temperature(value: Any) -> float:
    number = _number(value)
    if number != 0 and number < SMALLEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, got {number}")
    if number > LARGEST_TEMPERATURE:
        raise ValueError(f"must be at most {LARGEST_TEMPERATURE:g}, got {number}")
    return number


def _in_unit(zero: bool) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        number = _number(value)
        if not 0 <= number <= 1 or (number == 0 and not zero):
            raise ValueError(f"must be in {'[' if zero else '('}0, 1], got {number}")
        return number

    return check


def _top_k(value: Any) -> int:
    number = _integer(value)
    if not 0 <= number <= INT32_MAX:
        raise ValueError(f"must be 0 (off) or from 1 to {INT32_MAX}, got {number}")
    return number


def _positive(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise ValueError(f"must be above 0, got {number}")
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {_shown(value)}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"must be a string or a list of strings, got {_shown(value)}")
    if "" in strings:
        raise ValueError("holds an empty string, which would stop every row at once")
    return tuple(strings)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of token ids, got {_shown(value)}")
    ids = tuple(_integer(item) for item in value)
    if any(item < 0 for item in ids):
        raise ValueError(f"holds a negative token id: {min(ids)}")
    return ids


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = {int(token): _number(bias) for token, bias in pairs}
        if any(isinstance(token, (bool, float)) for token, _ in pairs) or any(token < 0 for token in found) or len(found) != len(pairs):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ValueError(f"must map token ids to finite numbers, got {_shown(value)}") from error
    return tuple(sorted(found.items()))


CHECKS: dict[str, Callable[[Any], Any]] = {
    "temperature": _temperature,
    "top_p": _in_unit(zero=False),
    "top_k": _top_k,
    "min_p": _in_unit(zero=True),
    "repetition_penalty": _positive,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _token_ids,
    "banned_token_ids": _token_ids,
    "max_tokens": _int_from(0),
    "min_tokens": _int_from(0),
    "stop": _stop,
    "include_stop": _flag,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "seed": _integer,
    "n": _int_from(1),
}


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = CHECKS[name](value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return found


def check_params(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Check what spans several keys, or the vocabulary. Raises ValueError naming the key."""
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}")
    if vocab_size is None:
        return
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        ids = getattr(params, name)
        if ids and max(ids) >= vocab_size:
            raise ValueError(f"{name} holds {max(ids)}, outside the vocabulary of {vocab_size}; its ids are 0 to {vocab_size - 1}")
    if params.logit_bias and params.logit_bias[-1][0] >= vocab_size:
        largest = params.logit_bias[-1][0]
        raise ValueError(f"logit_bias holds token {largest}, outside the vocabulary of {vocab_size}; its ids are 0 to {vocab_size - 1}")


def params_from_config(sampling: SamplingConfig, vocab_size: int | None = None) -> SamplingParams:
    """The job's own parameters. Raises ConfigError naming the key; ids are checked against ``vocab_size`` when it is given."""
    try:
        params = SamplingParams(**_checked({name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}))
        check_params(params, vocab_size)
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from error
    return params


def row_params(job: SamplingParams, overrides: Mapping[str, Any], vocab_size: int | None = None) -> SamplingParams:
    """The job's parameters with one row's non-null ``overrides``. Raises ValueError naming the key of a wrong type or range."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if not given:
        return job
    params = replace(job, **_checked(given))
    check_params(params, vocab_size)
    return params
