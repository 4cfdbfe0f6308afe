"""Rows to prompts: identity, form, template, token ids, sampling. The one entry of ``data`` that ``run`` needs.

Boundary: knows nothing of models, devices or output files. Whatever is wrong with one row becomes ``Prompt.error`` under that row's index and
never ends the stream; whatever is wrong with the whole input, or with the configuration, is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from specgen.config import DataConfig, SamplingConfig
from specgen.data.chat import Chat
from specgen.data.identity import SeenIds
from specgen.data.rows import Content, MetaCleaner, RowFault, read_content, row_id
from specgen.data.sampling import INT32_MAX, params_from_config, row_params
from specgen.data.sources import Row, parse_shard, read_rows, refuse_depth
from specgen.data.tokenizer import adds_eos, decode, encode
from specgen.errors import ConfigError
from specgen.types import Prompt, SamplingParams

log = logging.getLogger("specgen.data")


class RowTask(Protocol):
    """What ``load_prompts`` needs of a task: published rows in our fields, and the stop strings of its raw prompts."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Used for raw prompts where neither job nor row sets a stop string."""
        ...

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The row's fields in specgen's names; raises ValueError for a row that is not of the task's layout."""
        ...


def load_prompts(
    data: DataConfig,
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    max_length: int | None,
    vocab_size: int,
    task: RowTask | None = None,
) -> Generator[Prompt]:
    """Every prompt of the input, in order, streamed: memory grows with the number of ids only (``SeenIds``).

    A row that cannot run is yielded with ``error`` set, whatever ``data.on_error`` says: the caller stops where it should.
    ``tokenizer`` may be None when every row is token ids. ``max_length`` is the context limit: a prompt of that many tokens or more is a row error.
    Raises ConfigError (keys that cannot be honoured, at the latest on the first good row) and DataError (faults of the whole input).
    """
    if data.on_error not in ("record", "stop"):
        raise ConfigError(f"data.on_error={data.on_error}: record or stop")
    if data.on_duplicate_id not in ("error", "keep"):
        raise ConfigError(f"data.on_duplicate_id={data.on_duplicate_id}: error or keep")
    if data.limit is not None and data.limit < 1:
        raise ConfigError(f"data.limit={data.limit}: at least 1, or null for all rows")
    if data.row_sampling_field and not data.row_sampling:
        raise ConfigError("data.row_sampling_field is set and data.row_sampling=false; drop one of the two")
    shard, shards = parse_shard(data.shard)
    builder = _Builder(data, params_from_config(sampling, vocab_size), tokenizer, max_length, vocab_size, task)
    return _stream(builder, shard, shards)


class PromptReader:
    """Rows given in memory, read as those of a file are. ``index`` is the number of rows read.

    ``remember_ids`` false: an id may come again, and nothing grows with the number of rows.
    """

    def __init__(
        self, data: DataConfig, sampling: SamplingConfig, tokenizer: Any, *, max_length: int, vocab_size: int, remember_ids: bool = True
    ) -> None:
        self.index = 0
        self._remember = remember_ids
        self._builder = _Builder(data, params_from_config(sampling, vocab_size), tokenizer, max_length, vocab_size, None)

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Prompt]:
        """One Prompt a row, with ``error`` set where it cannot run. Raises ConfigError as ``load_prompts`` does."""
        for fields in rows:
            if not self._remember:
                self._builder.seen = SeenIds()
            row = Row(self.index, f"prompt {self.index}", fields)
            try:
                refuse_depth(fields)
            except ValueError as error:
                row = replace(row, fields={}, error=str(error))
            self.index += 1
            prompt = self._builder.build(row, mine=True)
            assert prompt is not None
            yield prompt


def check_first_row(data: DataConfig, sampling: SamplingConfig, tokenizer: Any, task: RowTask | None, rereadable: bool) -> None:
    """Read the first row as ``load_prompts`` will and forget it, so that an unusable input or key is raised before a model is loaded.

    Nothing is read where reading would use the input up (a pipe) or needs the model's vocabulary (random rows). ``rereadable``: as fingerprinted.
    """
    if data.source == "random" or not (rereadable or data.source == "hub"):
        return
    vocab_size = INT32_MAX if tokenizer is None else len(tokenizer)
    silenced, log.disabled = log.disabled, True  # the job says the same again
    try:
        with closing(load_prompts(data, sampling, tokenizer, max_length=None, vocab_size=vocab_size, task=task)) as prompts:
            next(prompts, None)
    finally:
        log.disabled = silenced
    if not rereadable:
        log.warning("%s: its commit could not be looked up, so the run cannot be resumed", data.path)


def _stream(builder: _Builder, shard: int, shards: int) -> Generator[Prompt]:
    try:
        for row in read_rows(builder.data, builder.vocab_size):
            prompt = builder.build(row, mine=row.index % shards == shard)
            if prompt is not None:
                yield prompt
    finally:
        builder.report()


class _Builder:
    """Turns one row after another into a Prompt, and keeps what spans rows: ids seen, counts for the log, what has been said already."""

    def __init__(self, data: DataConfig, job: SamplingParams, tokenizer: Any, max_length: int | None, vocab_size: int, task: RowTask | None) -> None:
        self.data = data
        self.job = job
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.task = task
        self.chat = Chat(data, tokenizer)
        self.seen = SeenIds()
        self.meta = MetaCleaner()
        self.said: set[Any] = set()
        self.good = 0
        self.bad = 0

    def build(self, row: Row, *, mine: bool) -> Prompt | None:
        """The row's Prompt; None for a row of another shard, whose id is remembered all the same."""
        prompt = Prompt(row.index, row.index, [], sampling=self.job, key=row.index)
        try:
            if row.error:
                raise RowFault(row.error)
            if self.task is not None:
                row.fields = _prepared(self.task, row.fields)
            repeats = self._identify(prompt, row)
            if not mine:
                return None
            content = self._read(prompt, row)
            if repeats:
                raise RowFault(repeats)
            self._fill(prompt, content)
            _check_ids(prompt.token_ids, self.vocab_size, self.max_length)
        except RowFault as fault:
            if not mine:
                return None
            if fault.config and not self.good:
                raise ConfigError(f"{row.where}: {fault}") from fault
            self.bad += 1
            return replace(prompt, token_ids=[], turns=[], error={"type": "DataError", "message": f"{row.where}: {fault}"})
        self._tell(content)
        self.good += 1
        return prompt

    def _identify(self, prompt: Prompt, row: Row) -> str | None:
        """Set id and key. Returns what is wrong with a repeated id, naming its first row, unless duplicates are kept."""
        own = row_id(row, self.data)
        if own is None:
            self._once("anonymous", "rows without an id: their index is their id, so results depend on the row's place in the input")
            first = self.seen.add_anonymous(row.index)
        else:
            self._once("id", "ids: field %r", self.data.id_field or "id")
            first = self.seen.add(own, row.index)
            prompt.id = prompt.key = own
        if first is None:
            return None
        if self.data.on_duplicate_id == "keep":
            prompt.key = [prompt.id, self.seen.repeat(first)]
            return None
        what = f"id {own!r} repeats" if own is not None else f"the row has no id, and its index {row.index} is"
        return f"{what} the id of row index {first}; make ids unique or set data.on_duplicate_id=keep"

    def _read(self, prompt: Prompt, row: Row) -> Content:
        """Set meta, category and sampling; the content is returned. A faulty row keeps its fields in meta."""
        left = {name: value for name, value in row.fields.items() if name != (self.data.id_field or "id")}
        content = None
        try:
            content = read_content(row, self.data)
            left = content.meta
            prompt.sampling = row_params(self.job, content.overrides, self.vocab_size)
        except ValueError as error:
            raise RowFault(str(error)) from error
        except RecursionError as error:
            raise RowFault("objects are nested too deeply") from error
        finally:
            prompt.meta = self.meta.clean(left)
            category = prompt.meta.get("category")
            prompt.category = category if isinstance(category, str) else None
            if content is not None:
                prompt.form = content.form
                prompt.text = content.value if content.form == "prompt" else ""
        if self.task is not None and self.task.stop and not prompt.sampling.stop and content.form == "prompt" and not self.data.as_chat:
            prompt.sampling = replace(prompt.sampling, stop=self.task.stop)
            self._once("task stop", "sampling: raw prompts stop at the task's strings, %s", list(self.task.stop))
        return content

    def _fill(self, prompt: Prompt, content: Content) -> None:
        """Set text, token ids and chat state from the row's content."""
        raw = content.form == "token_ids" or (content.form == "prompt" and not self.data.as_chat)
        if raw:
            self.chat.refuse_raw(content.form, first=not self.good)
        if content.form == "token_ids":
            prompt.token_ids = content.value
            _check_ids(prompt.token_ids, self.vocab_size, None)  # before decoding, which may not survive a foreign id
            prompt.text = decode(self.tokenizer, content.value, skip_special_tokens=False)
        elif raw:
            if self.tokenizer is None:
                raise RowFault(f"field {content.name!r} is text, but the model has no tokenizer; only token_ids rows can run", config=True)
            prompt.text = content.value
            prompt.token_ids = encode(self.tokenizer, content.value, special=True)
            if not prompt.token_ids:
                raise RowFault(f"field {content.name!r}: the prompt is empty and the tokenizer adds no BOS token")
        else:
            turns = content.value if content.form == "turns" else [content.value]
            messages = content.value if content.form == "messages" else [{"role": "user", "content": turns[0]}]
            prompt.messages = self.chat.first_messages(messages)
            prompt.turns = list(turns[1:]) if content.form == "turns" else []
            prompt.tools = content.tools
            _render(prompt, self.chat)

    def _tell(self, content: Content) -> None:
        """Say once a job how rows are read, and which of their columns override the job's sampling."""
        form, field = content.form, content.name
        chat = form in ("messages", "turns") or (form == "prompt" and self.data.as_chat)
        self._once(("form", form, field), "prompts: field %r as %s%s", field, form, ", through the chat template" if chat else "")
        for other in content.also:
            self._once(("also", form, other), "rows carry both %r and %r: %r is used; data.prompt_field=%s takes the other", form, other, form, other)
        if form == "prompt" and not chat and "eos" not in self.said and adds_eos(self.tokenizer):
            self._once("eos", "the tokenizer ends every prompt with its EOS token; most models then stop at once", level=logging.WARNING)
        self.said.add("eos")
        for name in content.overrides:
            self._once(("override", name), "sampling: rows override %s", name)

    def _once(self, topic: Any, message: str, *values: Any, level: int = logging.INFO) -> None:
        if topic not in self.said:
            self.said.add(topic)
            log.log(level, message, *values)

    def report(self) -> None:
        """Log what was counted: bad rows, and values of meta that JSON cannot hold."""
        for count, message in (
            (self.bad, "rows that cannot run, each written with its error: %d"),
            (self.meta.nonfinite, "%d values of NaN or infinity in the input's other fields are written as null"),
            (self.meta.surrogates, "%d texts with lone surrogates in the input's other fields are written with U+FFFD"),
        ):
            if count:
                log.warning(message, count)
        if self.meta.converted:
            log.info("values of type %s in the input's other fields are written as text", ", ".join(sorted(self.meta.converted)))


def _prepared(task: RowTask, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return task.prepare(fields)
    except ValueError as error:
        raise RowFault(str(error)) from error


def _render(prompt: Prompt, chat: Chat) -> None:
    """Set ``text`` and ``token_ids`` from ``messages``: the template writes the special tokens itself, so none is added."""
    assert prompt.messages is not None
    prompt.text = chat.render(prompt.messages, prompt.tools)
    prompt.token_ids = encode(chat.tokenizer, prompt.text, special=False)
    if not prompt.token_ids:
        raise RowFault("the chat template renders this row to nothing")


def _check_ids(ids: list[int], vocab_size: int, max_length: int | None) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RowFault(f"token id {wrong} is outside the model's vocabulary of {vocab_size}")
    if max_length is not None and len(ids) >= max_length:
        raise RowFault(f"the prompt has {len(ids)} tokens and the context limit is {max_length}: no room for an answer")


def next_turn(
    prompt: Prompt, answer_text: str, tokenizer: Any, data: DataConfig, *, max_length: int | None = None, vocab_size: int | None = None
) -> Prompt | None:
    """The Prompt of the next user turn of a ``turns`` row, with ``answer_text`` as the assistant's last message; None when no turn is left.

    Identity, sampling, meta and tools are the row's. A turn that cannot run (the template refuses, no room left) has ``error`` set.
    """
    if not prompt.turns:
        return None
    assert prompt.messages is not None
    messages = [*prompt.messages, {"role": "assistant", "content": answer_text}, {"role": "user", "content": prompt.turns[0]}]
    following = replace(prompt, token_ids=[], text="", messages=messages, turns=prompt.turns[1:], error=None)
    try:
        _render(following, Chat(data, tokenizer))
        _check_ids(following.token_ids, len(tokenizer) if vocab_size is None else vocab_size, max_length)
    except RowFault as fault:
        number = sum(message["role"] == "user" for message in messages)
        following.token_ids = []
        following.error = {"type": "DataError", "message": f"row index {prompt.index}, turn {number}: {fault}"}
    return following
