"""``SpecgenLM``: lm-evaluation-harness's generation requests, run as one batch on one engine.

Boundary: the one file that imports the package ``lm_eval``; importing it puts ``specgen`` among the harness's models. Arguments are translated in
``arguments.py``; prompts come from the harness as texts, its chat template applied by this model's ``apply_chat_template``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

from tqdm import tqdm

from specgen import __version__
from specgen.api import completed, reader
from specgen.data.chat import Chat, describe_chat
from specgen.data.rows import RowFault
from specgen.data.sampling import params_from_config, row_params
from specgen.errors import ConfigError, DataError
from specgen.lm_eval.arguments import config_from, row_sampling
from specgen.loading import check_sampling, load, on_device, resolve_device, target_path, tokenizer_of
from specgen.types import Completion

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness cannot be imported ({error}): pip install 'lm-eval>=0.4.9'") from error

log = logging.getLogger("specgen")


@register_model("specgen")
class SpecgenLM(LM):
    """A target with a drafter, as ``--model specgen``. ``arguments`` are ``--model_args``: keys of the command line, dotted or by their last name.

    Weights are read when the first requests come. Answers are those of ``specgen.generate`` on the same prompts with the same ids
    (``TASK:DOCUMENT:REQUEST``) and sampling. Raises ConfigError or CheckpointError as the command line would.
    """

    def __init__(self, batch_size: str | int = 1, max_batch_size: int | None = None, device: str | None = None, **arguments: Any) -> None:
        super().__init__()
        self.config = config_from(arguments, batch_size=batch_size, max_batch_size=max_batch_size, device=device)
        self._device = resolve_device(self.config.model.device)
        self._path, model = target_path(self.config.model), self.config.model
        self.tokenizer: Any = tokenizer_of(model)
        if self.tokenizer is None:
            raise ConfigError(f"model.path={self._path}: the harness sends texts, and there is no tokenizer; copy tokenizer.json there")
        self._chat = Chat(self.config.data, self.tokenizer)
        self._job = params_from_config(self.config.sampling, len(self.tokenizer))
        self._max_length = model.max_length
        self._answers = self._output_tokens = self._accepted = self._verify_steps = 0

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> SpecgenLM:
        """From ``--model_args`` and the harness's own flags, which it passes on whether they were given or not."""
        arguments, flags = dict(arg_dict), {name: value for name, value in (additional_config or {}).items() if value is not None}
        for name in ("batch_size", "max_batch_size"):
            if name in arguments:
                raise ConfigError(f"model_args {name}: give it as --{name}, or engine.max_batch")
        if "device" in arguments:
            arguments["model.device"] = arguments.pop("device")
        return cls(**arguments, **flags)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> SpecgenLM:
        """The same from ``"key=value,key=value"``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- requests -------------------------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each ``(prompt, generation arguments)``, in their order.

        Raises ConfigError for an argument that is not supported and DataError for a prompt that cannot run, both before anything is generated.
        """
        if not requests:
            return []
        with on_device(resolve_device(self.config.model.device)):
            return self._generate(requests, disable_tqdm)

    def _generate(self, requests: Sequence[Any], disable_tqdm: bool) -> list[str]:
        rows = [self._row(request) for request in requests]
        loaded = load(self.config.model, partial(check_sampling, self.config))
        self._max_length = loaded.target.max_length
        # The template is in the texts already; to the reader its settings would be meant for rows that have none.
        config = replace(self.config, data=replace(self.config.data, chat_template="auto", chat_template_kwargs={}))
        prompts = list(reader(config, loaded).read(rows))
        for prompt in prompts:
            self._refuse(prompt.error, requests[prompt.index])
        texts: list[str | None] = [None] * len(requests)
        with closing(completed(config, loaded, prompts)) as ended:
            for completion in tqdm(ended, total=len(requests), desc="specgen", disable=disable_tqdm):
                request = requests[completion.index]
                self._refuse(completion.error, request)
                texts[completion.index] = completion.text
                self.cache_hook.add_partial("generate_until", request.args, completion.text)
                self._count(completion)
        log.info("acceptance: %s", json.dumps(self.get_model_info()["specgen"]["acceptance"]))
        return [text for text in texts if text is not None]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refused: ConfigError."""
        _refuse_scoring("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Refused: ConfigError."""
        _refuse_scoring("loglikelihood_rolling", requests)

    def _row(self, request: Any) -> dict[str, Any]:
        """A request as the fields of an input row."""
        try:
            sampling = row_sampling(request.args[1], self._job)
            row_params(self._job, sampling, len(self.tokenizer))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"task {request.task_name}: {error}") from error
        named = {} if request.task_name is None else {"id": f"{request.task_name}:{request.doc_id}:{request.idx}"}
        return {"prompt": request.args[0], **named, **sampling}

    @staticmethod
    def _refuse(error: dict[str, str] | None, request: Any) -> None:
        if error is not None:
            raise DataError(f"task {request.task_name}, document {request.doc_id}: {error['message']}")

    # -- chat -----------------------------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The messages as the text the model sees; a last assistant message is left open, to be continued. Raises DataError, ConfigError."""
        if add_generation_prompt == (chat_history[-1]["role"] == "assistant"):
            raise DataError(f"add_generation_prompt={add_generation_prompt} does not fit a last message of role {chat_history[-1]['role']}")
        try:
            return self._chat.render(chat_history, None)
        except RowFault as fault:
            raise (ConfigError if fault.config else DataError)(f"--apply_chat_template: {fault}") from fault

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the template that ``apply_chat_template`` uses, for the harness's records; None when none is applied."""
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ConfigError(f"--apply_chat_template {chat_template}: templates have no names here; give its file as data.chat_template=FILE")
        found = self._chat.file_template or self.tokenizer.chat_template
        return None if found is None else str(found)

    @property
    def tokenizer_name(self) -> str:
        """What the harness keys its cache of built requests by: the model, and the template where it is not the tokenizer's own."""
        name = self._path.replace("/", "__")
        chat = describe_chat(self.config.data, self.tokenizer)
        own = {key: chat[key] for key in ("sha256", "kwargs")} if chat["template"] == "file" or chat["kwargs"] else None
        return name if own is None else f"{name}__{hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]}"

    # -- what the harness records ---------------------------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        """The most tokens of prompt and answer together; None until the model is loaded where ``model.max_length`` leaves it open."""
        return self._max_length

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id."""
        return None if self.tokenizer.eos_token_id is None else int(self.tokenizer.eos_token_id)

    def get_model_info(self) -> dict[str, Any]:
        """What goes into ``config`` of the harness's results: version, effective configuration and acceptance of the answers so far."""
        steps = self._verify_steps
        acceptance = {
            "requests": self._answers,
            "output_tokens": self._output_tokens,
            "mean_acceptance_length": 1 + self._accepted / steps if steps else None,
        }
        sections = {name: asdict(getattr(self.config, name)) for name in ("model", "draft", "sampling", "engine")}
        return {"specgen": {"version": __version__, **sections, "acceptance": acceptance}}

    def _count(self, completion: Completion) -> None:
        self._answers += 1
        self._output_tokens += completion.output_tokens
        self._accepted += sum(completion.counts.accepted)
        self._verify_steps += completion.counts.verify_steps


def _refuse_scoring(kind: str, requests: Sequence[Any]) -> NoReturn:
    tasks = ", ".join(dict.fromkeys(str(request.task_name) for request in requests))
    raise ConfigError(f"task {tasks} asks for {kind}, and --model specgen answers generate_until alone: choose the task's generation variant")
