"""The part of lm-evaluation-harness (0.4.13) that its models touch, for machines without it: base class, registry, requests, cache hook.

Boundary: nothing of tasks or scores. With the harness installed it is not used.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class CacheHook:
    """Keeps nothing."""

    def __init__(self, cachinglm: Any = None) -> None:
        self.dbdict = None

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Called for each answer."""


class LM:
    """The base class."""

    def __init__(self) -> None:
        self._rank, self._world_size, self._device = 0, 1, None
        self.cache_hook = CacheHook()

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LM:
        """How the command line makes a model."""
        return cls(**arg_dict, **{name: value for name, value in (additional_config or {}).items() if value is not None})

    @property
    def device(self) -> Any:
        """As set by the model."""
        return self._device

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """From now on answers go there too."""
        self.cache_hook = cache_hook


@dataclass
class Instance:
    """A request."""

    request_type: str
    doc: dict[str, Any]
    arguments: tuple[Any, ...]
    idx: int
    metadata: tuple[str | None, int | None, int | None] = field(default_factory=lambda: (None, None, None))

    def __post_init__(self) -> None:
        self.task_name, self.doc_id, self.repeats = self.metadata

    @property
    def args(self) -> tuple[Any, ...]:
        """What the model is asked."""
        return self.arguments


MODELS: dict[str, type[LM]] = {}


def register_model(*names: str) -> Any:
    """The decorator."""

    def decorate(cls: type[LM]) -> type[LM]:
        assert issubclass(cls, LM)
        MODELS.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def get_model(name: str) -> type[LM]:
    """The class of ``--model NAME``."""
    return MODELS[name]


def install() -> bool:
    """Put the double in the harness's place where that is missing; returns whether the harness is there."""
    if "lm_eval" in sys.modules or find_spec("lm_eval") is not None:
        return not hasattr(sys.modules.get("lm_eval"), "double")
    contents = {
        "lm_eval": {"double": True},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM, "CacheHook": CacheHook},
        "lm_eval.api.instance": {"Instance": Instance},
        "lm_eval.api.registry": {"register_model": register_model, "get_model": get_model},
    }
    for name, names in contents.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(names)
    return False
