"""From a configuration to a loaded target, a tokenizer and an engine, and to the prompts of the job.

Boundary: makes objects, runs nothing and writes no file. The last target stays loaded between the jobs of one process, so that a sweep over drafters
loads it once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specgen.checkpoint_files import check_model
from specgen.config import Config, DataConfig, ModelConfig, SamplingConfig
from specgen.data.prompts import load_prompts
from specgen.data.sampling import params_from_config
from specgen.data.tasks.base import Task
from specgen.data.tokenizer import has_tokenizer, load_tokenizer
from specgen.draft.load import FAMILY, load_drafter
from specgen.draft.mtp_layouts import check_modules
from specgen.engine.engine import Engine
from specgen.engine.rehearsal import measure
from specgen.errors import ConfigError
from specgen.grammar_text import rules_of
from specgen.models.generation import sampling_defaults
from specgen.models.loader import load_target, local_folder
from specgen.models.target import Target
from specgen.types import Prompt
from specgen.validate import check_draft_files, check_token_ids

log = logging.getLogger("specgen")


@dataclass
class Loaded:
    """A target with its tokenizer, and the configuration it was loaded for. ``load_s``: seconds its weights took, 0 when they were there already."""

    key: str
    target: Target
    tokenizer: Any | None
    load_s: float = 0.0

    @property
    def vocab_size(self) -> int:
        """Ids that may stand in a prompt: the model's, without those its tokenizer does not know."""
        return self.target.vocab_size if self.tokenizer is None else min(self.target.vocab_size, len(self.tokenizer))


_last: Loaded | None = None


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    return torch.device("cuda:0") if device.type == "cuda" and device.index is None else device


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one inside the block. Kernels, events and pinned memory belong to the current device, whatever device their
    tensors are on: without this a job on cuda:1 would take memory on cuda:0 and launch there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def target_path(model: ModelConfig) -> str:
    """The target's folder or hub id."""
    return str(FAMILY / "target") if model.source == "embedded" else str(model.path)


def load(model: ModelConfig, before_weights: Callable[[Any | None], None] = lambda tokenizer: None) -> Loaded:
    """The target and tokenizer of a job, kept for the next job of this process when its ``model.*`` is the same.

    ``before_weights`` is called with the tokenizer before any weight is read: what it refuses costs no loading.
    """
    global _last
    device = resolve_device(model.device)
    path = target_path(model)
    name = "embedded" if model.source == "embedded" else path
    folder = Path(path).expanduser()  # told from another by where it is, whatever the working directory was
    key = repr((asdict(model), str(folder.absolute()) if folder.is_dir() else path, str(device)))
    if _last is not None and _last.key == key:
        before_weights(_last.tokenizer)
        _last.load_s = 0.0
        log.info("target: %s is still loaded from the job before", name)
        return _last
    _last = None
    start = time.perf_counter()
    tokenizer = tokenizer_of(model)
    before_weights(tokenizer)
    dtype = model.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"  # a CPU multiplies float32 faster than bfloat16, and exactly enough that greedy text does not depend on the batch
    target = load_target(model, device, dtype)
    load_s = time.perf_counter() - start
    log.info("target loaded: %s on %s, %s, in %.1f s", name, device, str(target.dtype).removeprefix("torch."), load_s)
    log.info("a row ends at token ids %s", list(target.eos_ids))
    _last = Loaded(key, target, tokenizer, load_s)
    return _last


def tokenizer_of(model: ModelConfig) -> Any | None:
    """The target's tokenizer; None where it has none. Of a hub repository only small files are fetched."""
    folder = str(local_folder(target_path(model), model.revision, weights=False, code=model.trust_remote_code))
    return load_tokenizer(folder, trust_remote_code=model.trust_remote_code) if has_tokenizer(folder) else None


def check_hub(config: Config) -> None:
    """What ``validate`` checks of local checkpoints, for those of the hub: their small files are fetched and no weight. Raises as it does."""
    model, draft = config.model, config.draft
    if model.source == "hf" and not Path(str(model.path)).expanduser().is_dir():
        folder = local_folder(str(model.path), model.revision, weights=False, code=model.trust_remote_code)
        check_model(folder, weights=False, tokenizer=lambda: False)
        check_token_ids(config, folder)
        if draft.method == "mtp":
            check_modules(folder, draft.num_steps)
    if draft.path is not None and not Path(draft.path).expanduser().is_dir():
        check_draft_files(draft, local_folder(draft.path, weights=False), weights=False)


def check_sampling(config: Config, tokenizer: Any | None) -> None:
    """What the tokenizer is enough to refuse of ``sampling.*``: for ``load``'s ``before_weights``. Raises ConfigError."""
    if config.sampling.grammar is not None:
        rules_of(config.sampling.grammar, tokenizer)
    if tokenizer is not None:
        params_from_config(config.sampling, len(tokenizer))


def with_model_defaults(config: Config, given: Iterable[str]) -> Config:
    """``config`` with the checkpoint's own sampling values where ``sampling.from_model`` asks for them: for keys that are neither in ``given``
    (dotted names the user set) nor at another value than the default. Raises ConfigError for a value that cannot be honoured."""
    if not config.sampling.from_model:
        return config
    folder = local_folder(target_path(config.model), config.model.revision, weights=False)
    plain, given = SamplingConfig(), frozenset(given)
    own = {name for name, value in asdict(config.sampling).items() if value != getattr(plain, name) or f"sampling.{name}" in given}
    found = {name: value for name, value in sampling_defaults(folder).items() if name not in own}
    log.info("sampling: from the model %s", ", ".join(f"{name}={value}" for name, value in found.items()) or "nothing, for it names no value")
    sampling = replace(config.sampling, **found)
    params_from_config(sampling)
    return replace(config, sampling=sampling)


def make_engine(config: Config, loaded: Loaded) -> Engine:
    """Drafter and engine of a job over a loaded target. Raises ConfigError for parameters of the job with which no row can run."""
    target, tokenizer = loaded.target, loaded.tokenizer
    grammar = None if config.sampling.grammar is None else rules_of(config.sampling.grammar, tokenizer)
    drafter = load_drafter(config.draft, config.model, target, tokenizer)
    params = params_from_config(config.sampling, loaded.vocab_size)
    options: dict[str, Any] = {
        "vocab_limit": None if tokenizer is None else len(tokenizer),
        "logprobs": config.sampling.logprobs,
        "acceptance": config.sampling.acceptance,
    }
    working = measure(target, drafter, config.engine, config.draft, params, **options)
    engine = Engine(
        target,
        drafter,
        config.engine,
        config.draft,
        tokenizer=tokenizer,
        skip_special_tokens=config.output.skip_special_tokens,
        grammar=grammar,
        working=working,
        **options,
    )
    if (why := engine.scheduler.refusal(params)) is not None:
        engine.close()
        raise ConfigError(why)
    if grammar is not None:
        log.info("sampling.grammar: a decode step is two parts with one host read between them, and engine.overlap is 0")
    if drafter.rejection and drafter.method not in ("none", "ngram"):
        log.info("sampling.acceptance=rejection: text at a temperature depends on the drafter, draft.topk and draft.num_steps")
    tokens = (engine.pages.num_pages - 1) * engine.pages.page_size
    size = tokens * (target.kv_bytes_per_token + drafter.kv_bytes_per_token()) / 2**30
    if working is not None:
        sizes = [size / 2**30 for size in (working.kept, working.eager, 2 * working.graph)]
        log.info("beside weights and KV pool, measured: buffers %.3g GiB, the widest step %.3g GiB, graphs %.3g GiB", *sizes)
    log.info("KV pool: %s tokens (%.3g GiB) for at most %d rows at a time", f"{tokens:,}", size, engine.max_batch)
    return engine


def prompts_of(config: Config, data: DataConfig, loaded: Loaded, task: Task | None = None) -> Iterator[Prompt]:
    """The job's prompts, read from ``data``."""
    return load_prompts(data, config.sampling, loaded.tokenizer, max_length=loaded.target.max_length, vocab_size=loaded.vocab_size, task=task)


# -- CPU threads ------------------------------------------------------------------------------------------------------------------------------

CALIBRATION_S = 0.03
_SHAPE = (32, 384, 1152)  # rows, inner and outer size of one product: about what a step of a small model multiplies


def choose_threads(device: torch.device, speed: Callable[[int], float] | None = None) -> int:
    """Set torch's threads for a job on a CPU to the fastest of one, a few and all cores, tried on small products; returns the number.

    A second thread on a core that others keep busy makes every product wait for it. ``OMP_NUM_THREADS`` in the environment decides instead where it
    is set. ``speed``: products a second with that many threads (measured when None).
    """
    if device.type != "cpu":
        return torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS"):
        log.info("threads: %d, as OMP_NUM_THREADS says", torch.get_num_threads())
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    choices = sorted({1, min(4, cores), max(1, cores // 2), cores})
    found = _speeds(choices) if speed is None else {threads: speed(threads) for threads in choices}
    # Fewer threads win a near tie: they leave room for the tokenizer and for others.
    best = next(threads for threads in choices if found[threads] >= 0.95 * max(found.values()))
    torch.set_num_threads(best)
    log.info("threads: %d of %d cores, the fastest of %s on small products; OMP_NUM_THREADS overrides", best, cores, choices)
    return best


def _speeds(choices: list[int]) -> dict[int, float]:
    """Products a second for each number of threads, each tried in two turns, so that a moment's load does not decide."""
    left, right = torch.ones(_SHAPE[0], _SHAPE[1]), torch.ones(_SHAPE[1], _SHAPE[2])
    done, spent = dict.fromkeys(choices, 0), dict.fromkeys(choices, 0.0)
    turn_s = CALIBRATION_S / (2 * len(choices))
    for threads in [*choices, *reversed(choices)]:
        torch.set_num_threads(threads)
        left @ right  # wakes the threads
        start = now = time.perf_counter()
        while now - start < turn_s:
            left @ right
            done[threads] += 1
            now = time.perf_counter()
        spent[threads] += now - start
    return {threads: done[threads] / spent[threads] for threads in choices}
