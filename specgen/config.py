"""The schema of the whole configuration, as dataclasses, and the tables that say what each key may hold.

Boundary: plain data. Nothing here imports torch, Hydra or OmegaConf; ``compose.py`` composes, ``schema.py`` builds, ``validate.py`` checks.
Each default equals the YAML under ``conf/`` (a test compares them).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The target. ``source`` is the group's name: ``embedded`` or ``hf``."""

    source: str = "embedded"
    path: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    load_format: str = "auto"
    max_length: int | None = None


@dataclass
class DraftConfig:
    """The drafter. ``method`` is the group's name."""

    method: str = "eagle"
    path: str | None = None
    topk: int = 1
    num_steps: int = 4
    num_draft_tokens: int | None = None
    adaptive: bool = False
    load_format: str = "auto"
    simulate_acceptance_length: float | None = None


@dataclass
class DataConfig:
    """The input rows. ``source`` is the group's name."""

    source: str = "embedded"
    path: str | None = None
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    prompt_field: str | None = None
    id_field: str | None = None
    limit: int | None = None
    shard: str | None = None
    system_prompt: str | None = None
    as_chat: bool = False
    chat_template: str = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    row_sampling: bool = True
    row_sampling_field: str | None = None
    on_error: str = "record"
    on_duplicate_id: str = "error"
    rows: int = 32
    prompt_tokens: int = 128
    seed: int = 0


@dataclass
class TaskConfig:
    """An evaluation task, or ``none``."""

    name: str = "none"
    path: str | None = None
    execute_code: bool = False


@dataclass
class SamplingConfig:
    """The job's sampling parameters; a row may override most of them (CONTRACT: per-row sampling)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    banned_token_ids: list[int] = field(default_factory=list)
    max_tokens: int = 256
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    grammar: str | None = None
    from_model: bool = False
    acceptance: str = "invariant"


@dataclass
class EngineConfig:
    """How the engine runs; never what it writes."""

    max_batch: int | None = None
    page_size: int = 16
    memory_fraction: float = 0.9
    kv_memory_gb: float | None = None
    prefill_tokens: int = 2048
    overlap: str = "auto"
    cuda_graphs: str = "auto"
    deterministic: bool = False
    check_indices: bool = False
    stuck_after_s: float = 120.0


@dataclass
class OutputConfig:
    """What is written and where."""

    dir: str | None = None
    format: str = "jsonl"
    provenance: bool = False
    token_ids: bool = True
    prompt_token_ids: bool = False
    meta: bool = True
    skip_special_tokens: bool = True
    fsync_seconds: float = 5.0


@dataclass
class Config:
    """One job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    baseline: bool | None = None
    verify_lossless: int = 0
    resume: str | None = None
    resume_errors: bool = False


@dataclass(frozen=True)
class Range:
    """The closed interval a number must lie in; ``above`` excludes the lower end."""

    low: float
    high: float = math.inf
    above: bool = False

    def complaint(self, value: float) -> str | None:
        """None when ``value`` fits, else what it must be, to follow "KEY=VALUE "."""
        if (self.low < value if self.above else self.low <= value) and value <= self.high:
            return None
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"must be {low}" if self.high == math.inf else f"must be {low} and at most {self.high:g}"


# The field of each group that holds the name chosen for it, and the names specgen ships.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model": ("source", ("embedded", "hf")),
    "draft": ("method", ("none", "draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram")),
    "data": ("source", ("embedded", "jsonl", "csv", "parquet", "hub", "random")),
    "task": ("name", ("none", "gsm8k", "humaneval", "mt_bench", "spec_bench")),
}

# Defaults that differ from the dataclass when a group's option is chosen.
GROUP_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {("draft", "none"): {"num_steps": 0}}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.source": GROUPS["model"][1],
    "model.dtype": ("auto", "bfloat16", "float16", "float32"),
    "model.load_format": ("auto", "dummy"),
    "draft.method": GROUPS["draft"][1],
    "draft.load_format": ("auto", "dummy"),
    "data.source": GROUPS["data"][1],
    "data.on_error": ("record", "stop"),
    "data.on_duplicate_id": ("error", "keep"),
    "task.name": GROUPS["task"][1],
    "sampling.acceptance": ("invariant", "rejection"),
    "engine.overlap": ("auto", "0", "1"),
    "engine.cuda_graphs": ("auto", "off"),
    "output.format": ("jsonl", "parquet"),
}

# Numbers outside sampling; those of sampling are checked where rows are, in ``data.sampling``.
RANGES: dict[str, Range] = {
    "model.max_length": Range(2),
    "draft.topk": Range(1, 1024),
    "draft.num_steps": Range(1, 1024),
    "draft.num_draft_tokens": Range(2, 1025),
    "draft.simulate_acceptance_length": Range(1),
    "data.limit": Range(1),
    "data.rows": Range(1),
    "data.prompt_tokens": Range(1),
    "data.seed": Range(0, 2**63 - 1),
    "sampling.logprobs": Range(0, 100),
    "engine.max_batch": Range(1),
    "engine.page_size": Range(1, 1024),
    "engine.memory_fraction": Range(0, 1, above=True),
    "engine.kv_memory_gb": Range(0, above=True),
    "engine.prefill_tokens": Range(1),
    "engine.stuck_after_s": Range(0),
    "output.fsync_seconds": Range(0),
    "verify_lossless": Range(0),
}


# Keys that may name a file or folder here.
PATH_KEYS = ("model.path", "draft.path", "data.path", "data.chat_template", "task.path")


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain mappings with the command line's names, as ``.hydra/config.yaml`` holds them."""
    return asdict(config)


def max_draft_tokens(topk: int, num_steps: int) -> int:
    """Nodes of the largest tree, root included: 1 + K + (S - 1) K^2, and the root alone for S = 0."""
    return 1 + topk + (num_steps - 1) * topk * topk if num_steps else 1


def num_draft_tokens(draft: DraftConfig) -> int:
    """D, the nodes verified for each row, root included: as set, else S + 1 for a chain and min(128, 1 + S K) for a tree; 1 without a draft."""
    if draft.method == "none":
        return 1
    if draft.num_draft_tokens is not None:
        return draft.num_draft_tokens
    return draft.num_steps + 1 if draft.topk == 1 else min(128, 1 + draft.num_steps * draft.topk)
