"""Chat rows to text: which template, what it is given, what it refuses.

Boundary: knows nothing of files, ids or sampling. A template's own error becomes a RowFault that quotes it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from specgen.config import DataConfig
from specgen.data.rows import RowFault, encodable
from specgen.errors import ConfigError

RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)


class Chat:
    """The template of a job. ``file_template`` is the text of ``data.chat_template`` when that is a file, else None (the tokenizer's own)."""

    def __init__(self, data: DataConfig, tokenizer: Any):
        self.data = data
        self.tokenizer = tokenizer
        self.file_template: str | None = None
        for name in data.chat_template_kwargs:
            if name in RESERVED:
                raise ConfigError(f"data.chat_template_kwargs.{name}: is set by specgen itself; take it out")
        if data.chat_template not in ("auto", "none"):
            try:
                self.file_template = Path(data.chat_template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"data.chat_template={data.chat_template}: auto, none, or a readable template file") from error

    def first_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` with ``data.system_prompt`` in front. RowFault when the row brings a system message of its own."""
        if self.data.system_prompt is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            raise RowFault("the row has a system message of its own and data.system_prompt is set; drop one of the two")
        return [{"role": "system", "content": self.data.system_prompt}, *messages]

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """The text the model sees; a last assistant message is left open, to be continued. RowFault when the template refuses."""
        self._require_template()
        import jinja2

        last = messages[-1]
        continued = last["role"] == "assistant"
        if continued and not isinstance(last.get("content"), str):
            raise RowFault("the last message is an assistant message without content: nothing to continue")
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.file_template,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **self.data.chat_template_kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise RowFault(f"the chat template is not valid: {error.message} (its line {error.lineno})", config=True) from error
        except Exception as error:  # the template is a program of the model's author: it may raise anything
            raise RowFault(f"the chat template refused the row: {' '.join(str(error).split())[:300] or type(error).__name__}") from error
        if not encodable(text):
            raise RowFault("the messages hold a lone surrogate, which is not text")
        return text

    def _require_template(self) -> None:
        if self.data.chat_template == "none":
            raise RowFault("a chat row, but data.chat_template=none; use data.chat_template=auto or a file", config=True)
        if self.tokenizer is None:
            raise RowFault("a chat row, but the model has no tokenizer; only token_ids rows can run", config=True)
        if self.file_template is None and not self.tokenizer.chat_template:
            raise RowFault("a chat row, but the tokenizer has no chat template; give one with data.chat_template=FILE", config=True)

    def refuse_raw(self, form: str, *, first: bool) -> None:
        """Chat settings cannot be honoured on a raw row. RowFault for a system prompt; the others count when the job starts with a raw row."""
        data = self.data
        remedy = "; set data.as_chat=true or drop it" if form == "prompt" else "; drop it"
        if data.system_prompt is not None:
            raise RowFault(f"data.system_prompt cannot be added to a raw {form} row{remedy}", config=True)
        if first and (data.chat_template_kwargs or self.file_template is not None):
            name = "chat_template_kwargs" if data.chat_template_kwargs else "chat_template"
            raise RowFault(f"data.{name} has no effect on a raw {form} row{remedy}", config=True)


def describe_chat(data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """The template choice, for ``chat`` in stats.json: where the template is from, its SHA-256 and what it is given."""
    chat = Chat(data, tokenizer)
    template = chat.file_template
    source = "file" if template is not None else "none"
    if source == "none" and data.chat_template == "auto" and tokenizer is not None and tokenizer.chat_template:
        source, template = "tokenizer", tokenizer.chat_template
    return {
        "template": source,
        "file": data.chat_template if source == "file" else None,
        "sha256": hashlib.sha256(str(template).encode()).hexdigest() if template is not None else None,
        "as_chat": data.as_chat,
        "system_prompt": data.system_prompt,
        "kwargs": dict(data.chat_template_kwargs),
    }
