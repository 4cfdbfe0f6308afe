"""The exception tree: every error a user can cause, and nothing else.

Boundary: this file knows no other module. Each error is one line that names the thing and the remedy; ``cli.main`` prints it and exits
with code 2. An exception that is not a ``SpecgenError`` is a defect of specgen and exits with code 1.
"""

import re

_BREAK = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class SpecgenError(Exception):
    """Base of every error a user can cause and mend. Its text is one line, whatever it quotes."""

    def __str__(self) -> str:
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _BREAK.sub(" ", super().__str__()))


class ConfigError(SpecgenError):
    """A key, a value or a combination of keys that cannot be honoured."""


class CheckpointError(SpecgenError):
    """A checkpoint that is missing, incomplete, or does not fit the method or the target."""


class DataError(SpecgenError):
    """An input file or row that cannot be read, or a run folder that cannot be used."""


class CapacityError(SpecgenError):
    """Memory that does not suffice: weights, KV pages or one row's need."""
