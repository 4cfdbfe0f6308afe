"""The harness's words in specgen's: ``--model_args`` to a ``Config``, a request's generation arguments to a row's sampling.

Boundary: pure translation, without the package ``lm_eval``. What has no counterpart is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgen.api import config_of
from specgen.config import CHOICES, Config
from specgen.data.sampling import ROW_KEYS
from specgen.errors import ConfigError
from specgen.schema import KEYS, SELECTORS, is_text, shown
from specgen.suggest import unknown_key
from specgen.types import SamplingParams

# What a request decides for itself, or what would make its text another than the target's.
NOT_HERE = {
    "sampling.stop": "a task's `until` says where an answer ends",
    "sampling.include_stop": "a task's `until` is never part of an answer",
    "sampling.n": "a task's `repeats` says how often it is asked",
    "sampling.logprobs": "an answer is text alone",
    "engine.stuck_after_s": "it ends jobs of python -m specgen",
    "draft.simulate_acceptance_length": "simulated text is not the target's",
}
CHAT_KEYS = ("data.chat_template", "data.chat_template_kwargs")
SECTIONS = ("model", "draft", "engine", "sampling")
ARGUMENTS = (
    *(key for key in KEYS if key.split(".")[0] in SECTIONS and key not in SELECTORS and key not in NOT_HERE),
    *CHAT_KEYS,
)
# Names of the harness's other models, and `path`, which model and drafter share.
ALIASES = {"path": "model.path", "pretrained": "model.path", "max_gen_toks": "sampling.max_tokens"}
GROUP_KEYS = {"model": "model.source", "draft": "draft.method"}

HARNESS_BATCH, HARNESS_DEVICE = 1, "cuda:0"  # what it passes on when the user says nothing

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what tasks call the most tokens of an answer
OWN_KEYS = tuple(name for name in ROW_KEYS if name not in ("n", "stop", "max_tokens"))  # taken under specgen's own name


def key_of(name: str) -> str:
    """The dotted key that an argument's name means: itself, or the one key that ends in it. Raises ConfigError for any other name."""
    if name in ALIASES or name in GROUP_KEYS:
        return ALIASES.get(name) or GROUP_KEYS[name]
    if name in ARGUMENTS:
        return name
    ending = [key for key in ARGUMENTS if key.rpartition(".")[2] == name]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(f"model_args {name}: write {' or '.join(ending)}")
    refused = next((key for key in NOT_HERE if name in (key, key.rpartition(".")[2])), None)
    if refused is not None:
        raise ConfigError(f"model_args {name}: {NOT_HERE[refused]}; leave it out")
    if name in KEYS or name in SELECTORS.values():
        raise ConfigError(f"model_args {name}: rows, tasks and files are the harness's; keys of {', '.join(SECTIONS)} and {CHAT_KEYS[0]} apply")
    raise ConfigError(f"model_args: {unknown_key(name, [*ARGUMENTS, *GROUP_KEYS])}")


def config_from(
    arguments: Mapping[str, Any], *, batch_size: str | int = HARNESS_BATCH, max_batch_size: int | None = None, device: str | None = None
) -> Config:
    """The checked configuration that ``--model_args``, ``--batch_size`` and ``--device`` ask for, by the rules of the command line.

    The harness's own defaults, one row a batch and ``cuda:0``, cannot be told from a wish and leave the choice to the engine and to
    ``model.device``; ``engine.max_batch=1`` and ``model.device=cuda:0`` insist. Raises ConfigError or CheckpointError as the command line would.
    """
    given: dict[str, tuple[str, Any]] = {}  # key -> the name it was given by, its value
    named = [(name, value) for name, value in arguments.items()]
    named += [("--device", device)] if device not in (None, HARNESS_DEVICE) else []
    named += [(f"--{name}", size) for name, size in _batch_sizes(batch_size, max_batch_size)]
    flags = {"--device": "model.device", "--batch_size": "engine.max_batch", "--max_batch_size": "engine.max_batch"}
    for name, value in named:
        key = flags.get(name) or key_of(name)
        value = _plain(key, name, value)
        if key in given and given[key][1] != value:
            raise ConfigError(f"{given[key][0]}={shown(given[key][1])} and {name}={shown(value)} both set {SELECTORS.get(key, key)}; give one")
        given[key] = (name, value)
    sections: dict[str, dict[str, Any]] = {"model": {}, "draft": {"method": "eagle"}, "engine": {}, "sampling": {}, "data": {}}
    for key, (_, value) in given.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    # Equal requests are told apart by their occurrence, so that the repeats of a task are samples of their own.
    return config_of(**(sections | {"data": sections["data"] | {"on_duplicate_id": "keep"}}))


def _batch_sizes(batch_size: str | int, max_batch_size: int | None) -> list[tuple[str, int]]:
    text = str(batch_size)
    if not text.split(":")[0] == "auto" and not text.isdecimal():
        raise ConfigError(f"--batch_size={batch_size}: must be auto or a whole number")
    found = [("batch_size", int(text))] if text.isdecimal() and int(text) != HARNESS_BATCH else []
    return found + ([("max_batch_size", int(max_batch_size))] if max_batch_size is not None else [])


def _plain(key: str, name: str, value: Any) -> Any:
    """``null`` is None, as on the command line. Raises ConfigError for a text that the harness has read as a number."""
    if value == "null":
        return None
    if is_text(key) and key not in CHOICES and isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ConfigError(f"""model_args {name}={value}: the harness read a number where a text belongs; quote it: {name}='"..."'""")
    return value


def row_sampling(arguments: Mapping[str, Any], job: SamplingParams) -> dict[str, Any]:
    """The fields of a row that a request's generation arguments mean; what they leave out is the job's.

    ``do_sample`` decides between greedy and sampled as in the harness: false is greedy whatever the temperature, true without a temperature is the
    job's, or 1 where the job is greedy. Raises ConfigError naming an argument that cannot be honoured.
    """
    left = {name: value for name, value in arguments.items() if value is not None}
    found: dict[str, Any] = {}
    if (until := left.pop("until", None)) is not None:
        stops = [until] if isinstance(until, str) else until
        if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
            raise ConfigError(f"generation argument until={shown(until)}: must be a text or a list of texts")
        found["stop"] = [stop for stop in stops if stop]  # to the harness, too, an empty text ends nothing
    lengths = {name: left.pop(name) for name in LENGTH_NAMES if name in left}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"generation arguments {', '.join(f'{n}={shown(v)}' for n, v in lengths.items())} say the same thing; give one")
    if lengths:
        found["max_tokens"] = next(iter(lengths.values()))
    if left.pop("num_beams", 1) != 1:
        raise ConfigError(f"generation argument num_beams={shown(arguments['num_beams'])}: there is no beam search; leave it out")
    found |= _temperature(left, job)
    for name, value in left.items():
        if name not in OWN_KEYS:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *OWN_KEYS))
            raise ConfigError(f"generation argument {name}={shown(value)} is not supported; {known} are")
        found[name] = value
    return found


def _temperature(left: dict[str, Any], job: SamplingParams) -> dict[str, Any]:
    """Take ``do_sample`` and ``temperature`` out of ``left``."""
    sample, temperature = left.pop("do_sample", None), left.pop("temperature", None)
    if sample is not None and not isinstance(sample, bool):
        raise ConfigError(f"generation argument do_sample={shown(sample)}: must be true or false")
    if sample is False:
        return {"temperature": 0.0}
    if sample and temperature == 0:
        raise ConfigError("generation arguments do_sample=true and temperature=0 contradict; give do_sample=false, or a temperature")
    if sample and temperature is None:
        return {"temperature": job.temperature or 1.0}
    return {} if temperature is None else {"temperature": temperature}
