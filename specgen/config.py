"""The schema of the whole configuration, as dataclasses.

Boundary: plain data. Nothing here imports torch, Hydra or OmegaConf; ``cli.py`` turns a composed configuration into a ``Config``.
Each default equals the YAML under ``conf/`` (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
