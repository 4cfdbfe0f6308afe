"""specgen from Python: ``generate`` for a list of prompts, ``Engine`` for a loop of one's own.

Boundary: settings are nested mappings with the command line's names, built and checked by the code that the command line uses. Nothing is written to
disk, no signal is taken over and torch's threads stay as the caller set them.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Any

from specgen.config import GROUPS, Config
from specgen.data.prompts import PromptReader
from specgen.data.sampling import ROW_KEYS, params_from_config, row_params
from specgen.errors import CapacityError, ConfigError, DataError, SpecgenError
from specgen.job import Job
from specgen.loading import Loaded, check_hub, check_sampling, load, make_engine, on_device, resolve_device, with_model_defaults
from specgen.schema import SELECTORS, build, shown
from specgen.types import Completion, Prompt
from specgen.validate import validate

__all__ = ["Engine", "generate"]

Settings = Mapping[str, Any]
# The keys of ``data`` that say how a row is read; the others say where rows come from, and here they are given.
ROW_READING = (
    "prompt_field",
    "id_field",
    "system_prompt",
    "as_chat",
    "chat_template",
    "chat_template_kwargs",
    "row_sampling",
    "row_sampling_field",
    "on_duplicate_id",
)


def generate(
    prompts: str | Settings | Iterable[Any],
    model: str | PathLike[str] | Settings = "embedded",
    draft: str | Settings = "eagle",
    sampling: Settings | None = None,
    engine: Settings | None = None,
    data: Settings | None = None,
    on_error: str = "raise",
) -> list[Completion]:
    """Completions of ``prompts``, in their order, the ``sampling.n`` samples of a prompt adjacent.

    A prompt is a text, a list of token ids, a list of chat messages (``{"role": ..., "content": ...}``), or a mapping like an input row:
    ``prompt``, ``messages``, ``turns`` or ``token_ids`` beside its own ``id``, ``max_tokens``, ``temperature``, ... ``model`` is ``"embedded"``, a
    folder or hub id, or a mapping of ``model.*`` keys; ``draft`` a method's name or a mapping with ``method``; ``data`` takes those of its keys that
    say how a row is read (``as_chat``, ``system_prompt``, ...). The target stays loaded for the next call with the same ``model``.

    ``on_error``: ``"raise"`` raises the first row's error, before anything runs where that is possible; ``"return"`` leaves it in its completion.
    Raises ConfigError, CheckpointError, DataError or CapacityError, as the command line would exit with.
    """
    if on_error not in ("raise", "return"):
        raise ConfigError(f"on_error={shown(on_error)}: must be raise or return")
    given = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    rows = [row_of(prompt, place) for place, prompt in enumerate(given)]
    config = config_of(model=model, draft=draft, sampling=sampling, engine=engine, data=data)
    if not rows:
        return []
    with on_device(resolve_device(config.model.device)):
        return _generate(config, rows, on_error)


def _generate(config: Config, rows: list[dict[str, Any]], on_error: str) -> list[Completion]:
    loaded = load(config.model, partial(check_sampling, config))
    read = list(reader(config, loaded).read(rows))
    if on_error == "raise":
        for prompt in read:
            _raise(prompt.error)
    found: dict[tuple[int, int], Completion] = {}
    with closing(completed(config, loaded, read)) as ended:
        for completion in ended:
            if on_error == "raise":
                _raise(completion.error)
            found[completion.index, completion.sample] = completion
    return [found[key] for key in sorted(found)]


def completed(config: Config, loaded: Loaded, prompts: Iterable[Prompt]) -> Generator[Completion]:
    """Completions of read prompts in the order in which they end, on an engine of their own."""
    with closing(make_engine(config, loaded)) as engine:
        yield from Job(engine, config, loaded.tokenizer, params_from_config(config.sampling)).run(iter(prompts))


class Engine:
    """Continuous batching under the caller's own loop::

        with specgen.Engine({"draft": {"method": "eagle", "topk": 4}}) as engine:
            first = engine.add("def add(a, b):", {"max_tokens": 64})
            while engine.has_work:
                for completion in engine.step():
                    ...

    ``config``: nested mappings ``model``, ``draft``, ``sampling``, ``engine``, ``data``, as ``generate`` takes them. Raises as ``generate`` does.
    """

    def __init__(self, config: Settings | None = None) -> None:
        given = dict(config or {})
        allowed = ("model", "draft", "sampling", "engine", "data")
        if unknown := sorted(set(given) - set(allowed)):
            raise ConfigError(f"{unknown[0]}: Engine takes {', '.join(allowed)}")
        if "on_duplicate_id" in (given.get("data") or {}):
            raise ConfigError("data.on_duplicate_id: an Engine only minds ids that are running; leave it out")
        self._config = config_of(**given)
        self._device = resolve_device(self._config.model.device)
        with on_device(self._device):
            self._loaded = load(self._config.model, partial(check_sampling, self._config))
            self._inner = make_engine(self._config, self._loaded)
        self._job_params = params_from_config(self._config.sampling, self._loaded.vocab_size)
        self._job = Job(self._inner, self._config, self._loaded.tokenizer, self._job_params)
        self._reader = reader(self._config, self._loaded, remember_ids=False)
        self._ids: dict[str | int, int] = {}  # id -> index, of what is unfinished
        self._left: dict[int, int] = {}  # index -> samples that have not come back
        self._closed = False

    def add(self, prompt: Any, sampling: Settings | None = None) -> str | int:
        """Queue a prompt, in any form that ``generate`` takes; returns its id: the row's own, or the number of earlier calls.

        ``sampling`` overrides the engine's values for this prompt. Its completions carry the id, which may come again once they have ended.
        Raises DataError or ConfigError for a prompt or value that cannot run.
        """
        self._refuse_closed()
        row = row_of(prompt, self._reader.index)
        overrides = dict(sampling or {})
        if unknown := sorted(set(overrides) - set(ROW_KEYS)):
            raise ConfigError(f"sampling.{unknown[0]}: add() takes {', '.join(ROW_KEYS)}")
        (read,) = self._reader.read([row])
        _raise(read.error)
        if read.id in self._ids:
            raise DataError(f"id {read.id!r} is still running; give the prompt another id, or none")
        try:
            params = read.sampling = row_params(read.sampling, overrides, self._loaded.vocab_size)
        except ValueError as error:
            raise ConfigError(f"sampling.{error}") from error
        with on_device(self._device):
            for sample in range(params.n):
                self._job.submit(read, sample)
        self._ids[read.id], self._left[read.index] = read.index, params.n
        return read.id

    def step(self) -> list[Completion]:
        """One step of every running row; returns the completions that ended (an error is in the completion, as with ``on_error="return"``)."""
        self._refuse_closed()
        if self._inner.has_work:
            with on_device(self._device):
                self._job.step()
        ended = [completion for completion in self._job.drain() if completion.index in self._left]
        for completion in ended:
            self._left[completion.index] -= 1
            if not self._left[completion.index]:
                del self._left[completion.index], self._ids[completion.id]
        return ended

    @property
    def has_work(self) -> bool:
        """True while a prompt is unfinished."""
        return not self._closed and self._inner.has_work

    def abort(self, id: str | int) -> bool:
        """Drop what is unfinished of a prompt: it never comes back from ``step``. Returns False for an id that is not running."""
        index = self._ids.pop(id, None)
        if index is None:
            return False
        del self._left[index]
        self._job.abort(index)
        return True

    def close(self) -> None:
        """Give back KV and drafter; the target stays loaded. May be called twice."""
        if not self._closed:
            self._closed = True
            self._inner.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError("the engine is closed; make a new one")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def row_of(prompt: Any, place: int) -> dict[str, Any]:
    """A prompt as the fields of an input row. Raises DataError for what is none."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        fields = {str(name): _plain(value) for name, value in prompt.items()}
        return fields | ({"messages": copy.deepcopy(fields["messages"])} if "messages" in fields else {})
    items = _plain(prompt)
    if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items):
        return {"messages": [copy.deepcopy(dict(item)) for item in items]}
    if isinstance(items, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return {"token_ids": items}
    raise DataError(f"prompt {place}: must be a text, token ids, chat messages or a row with one of these, got {type(prompt).__name__}")


def _plain(value: Any) -> Any:
    """Tuples, arrays and tensors as lists."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def config_of(
    model: str | PathLike[str] | Settings = "embedded",
    draft: str | Settings = "eagle",
    sampling: Settings | None = None,
    engine: Settings | None = None,
    data: Settings | None = None,
) -> Config:
    """The checked configuration of a call. Raises ConfigError naming the key, and as ``validate`` does."""
    sections: dict[str, dict[str, Any]] = {
        "model": _model_section(model),
        "draft": _section("draft", {"method": draft} if isinstance(draft, str) else draft),
        "sampling": _section("sampling", sampling),
        "engine": _section("engine", engine),
        "data": _section("data", data),
    }
    if "method" not in sections["draft"]:
        raise ConfigError(f"draft: method is missing; one of {', '.join(GROUPS['draft'][1])}")
    for name in sections["data"]:
        if name not in ROW_READING:
            raise ConfigError(f"data.{name}: rows are given in Python; of data.* only {', '.join(ROW_READING)} apply")
    if "stuck_after_s" in sections["engine"]:
        raise ConfigError("engine.stuck_after_s: ends a job of the command line, and a Python process is not specgen's to end; leave it out")
    config = build(sections)
    given = [f"{section}.{name}" for section, values in sections.items() for name in values if f"{section}.{name}" not in SELECTORS]
    # Rows in memory have no file to look at: for the checks they are like random ones.
    validate(replace(config, data=replace(config.data, source="random")), given)
    check_hub(config)
    return with_model_defaults(config, given)


def _section(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)}: must be a mapping of keys")
    return dict(value)


def _model_section(model: Any) -> dict[str, Any]:
    if isinstance(model, (str, PathLike)):
        name = fspath(model)
        return {"source": "embedded"} if name == "embedded" else {"source": "hf", "path": name}
    section = _section("model", model)
    if isinstance(section.get("path"), PathLike):
        section["path"] = fspath(section["path"])
    return section if "source" in section else section | {"source": "hf" if section.get("path") else "embedded"}


def reader(config: Config, loaded: Loaded, remember_ids: bool = True) -> PromptReader:
    """Reads rows given in memory for a loaded target."""
    target, tokenizer = loaded.target, loaded.tokenizer
    return PromptReader(
        config.data, config.sampling, tokenizer, max_length=target.max_length, vocab_size=loaded.vocab_size, remember_ids=remember_ids
    )


def _raise(error: Mapping[str, str] | None) -> None:
    if error is not None:
        kinds: dict[str, type[SpecgenError]] = {"CapacityError": CapacityError, "ConfigError": ConfigError}
        raise kinds.get(error["type"], DataError)(error["message"])
