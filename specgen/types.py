"""The nouns: what travels between the modules, and who fills each field.

Boundary: no behaviour beyond identities on integers. torch is imported for type names only, so that configuration can be checked without it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FINISH_REASONS = ("stop", "length", "context", "error")


@dataclass(frozen=True)
class SamplingParams:
    """Effective sampling parameters of one row (job's values overridden by the row's). ``top_k=0`` and ``top_p=1`` mean off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1


@dataclass
class Prompt:
    """One input row, ready for the model. Filled by ``data``.

    ``index`` is the 0-based place in the whole input (before limit and shard); ``id`` is the row's own id with its type, or ``index``.
    ``key`` is what noise is keyed by: the id, or the index where there is none, or [id, occurrence] for a kept duplicate.
    ``text`` is the exact text the model sees (for token-id rows, their decoding). ``turns`` holds the user turns still to be asked.
    ``error`` is set, and ``token_ids`` empty, for a row that cannot be run.
    """

    index: int
    id: str | int
    token_ids: list[int]
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    key: Any = None
    messages: list[dict[str, Any]] | None = None
    turns: list[str] = field(default_factory=list)
    tools: list[Any] | None = None
    category: str | None = None
    error: dict[str, str] | None = None
    form: str = "prompt"  # the input's form: prompt, messages, turns or token_ids


@dataclass
class Counts:
    """Raw integers of one row (docs/metrics.md). Lists are indexed by depth - 1. Filled by the scheduler at retire, before any trimming."""

    prefill_sampled: int = 0
    verify_steps: int = 0
    steps_without_draft: int = 0
    proposed: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: int = 0
    trimmed: int = 0

    def add(self, accepted: int, draft_depth: int, child_at_end: int, times: int = 1) -> None:
        """Count ``times`` equal steps: drafts accepted, depths that had a draft, and whether there was one more to try (docs/metrics.md)."""
        if draft_depth:
            self.verify_steps += times
            grow = draft_depth - len(self.proposed)
            if grow > 0:
                for column in (self.proposed, self.reached, self.accepted):
                    column.extend([0] * grow)
            for depth in range(draft_depth):
                self.proposed[depth] += times
            for depth in range(accepted):
                self.reached[depth] += times
                self.accepted[depth] += times
            if child_at_end:
                self.reached[accepted] += times
        else:
            self.steps_without_draft += times
        self.committed += (accepted + 1) * times

    def as_dict(self) -> dict[str, Any]:
        """The ``counts`` object of an output row."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def check(self, output_tokens: int) -> None:
        """Assert the two identities every row obeys; a failure is a defect of the engine."""
        assert self.committed == sum(self.accepted) + self.verify_steps + self.steps_without_draft, self
        assert output_tokens == self.prefill_sampled + self.committed - self.trimmed, (self, output_tokens)


def step_code(accepted: Any, draft_depth: Any, child_at_end: Any) -> Any:
    """What ``Counts.add`` takes of a step in one int32, elementwise."""
    return accepted << 16 | draft_depth << 1 | child_at_end


@dataclass(eq=False)
class Request:
    """One sample of one prompt inside the engine.

    Filled by the caller: ``prompt``, ``sample``, ``sampling``, ``noise_offset`` (output position the noise starts at, for later turns).
    Filled by the scheduler: the rest.
    """

    prompt: Prompt
    sampling: SamplingParams
    sample: int = 0
    noise_offset: int = 0
    output_ids: list[int] = field(default_factory=list)
    slot: int = 0
    status: str = "waiting"  # waiting, prefill, running, finished
    prefill_pos: int = 0  # prompt (and, after a preemption, output) tokens whose KV has been launched
    kv_allocated_len: int = 0  # monotone watermark of KV slots owned, in tokens
    stop_ids: tuple[int, ...] | None = None  # the ids that end it, once they were asked for
    epoch: int = 0  # raised by a preemption, so that a step still in flight for the earlier life is recognised
    steps: array[int] = field(default_factory=lambda: array("i"))  # one ``step_code`` a step
    counted: Counts = field(default_factory=Counts)  # of the first ``steps_counted`` steps; ``counts`` has them all
    steps_counted: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: dict[str, str] | None = None
    text: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    grammar: Any = None  # where the output stands in the job's grammar (``engine.grammar``)
    read: bool = True  # the host looks at every token of it, for endings that the device does not know

    @property
    def counts(self) -> Counts:
        """The row's raw integers so far."""
        if len(self.steps) > self.steps_counted:
            for code, times in Counter(self.steps[self.steps_counted :]).items():
                self.counted.add(code >> 16, code >> 1 & 32767, code & 1, times)
            self.steps_counted = len(self.steps)
        return self.counted

    @property
    def provenance(self) -> list[int]:
        """Where each output token comes from: -1 the prefill, d >= 1 drafted at depth d, 0 the bonus token of a step."""
        found = [-1] * self.counted.prefill_sampled
        for code in self.steps:
            found += range(1, (code >> 16) + 1)
            found.append(0)
        return found[: len(self.output_ids)]

    @property
    def done(self) -> bool:
        """True once the row has its finish reason."""
        return self.finish_reason is not None


@dataclass
class Completion:
    """One output row, in the contract's field order. Built by ``run`` from a finished request; written by ``report.writer``."""

    id: str | int
    sample: int
    index: int
    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    error: dict[str, str] | None
    prompt_tokens: int
    output_tokens: int
    counts: Counts
    meta: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] | None = None  # effective values, when any differs from the job's
    simulated: bool = False
    turns: list[dict[str, Any]] | None = None
    provenance: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    category: str | None = None  # for stats.groups; not a field of the row


@dataclass
class Layout:
    """Where the T tokens of one forward stand. Filled by the engine or a drafter; read by the attention function.

    positions [T] int32: RoPE position, causality and window. slots [T] int64: KV slot written by each token
    (page * page_size + offset; scratch is page 0).
    block_table [B, W] int32. length [B] int32: keys j < length[b] stand at table slot j and position j.
    Uniform (decode, draft, extend): T = B * q_len; query i of row b sees keys < length[b] and then, with ``path`` None, window slots
    length[b] .. length[b] + i (a chain), else window slots length[b] + path[b, i, p] for p = 0, 1, ... while >= 0, at position length[b] + p.
    path [B, q_len, P] int32.
    Packed (prefill): ``cu_q`` [B + 1] int32, row b owns tokens cu_q[b] .. cu_q[b+1] - 1, causal from position length[b]; ``q_len`` is
    the longest chunk.
    max_len: host bound on the number of keys of any row.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    length: Tensor
    q_len: int
    max_len: int
    path: Tensor | None = None
    cu_q: Tensor | None = None


@dataclass
class Draft:
    """What a drafter proposes for B rows.

    token_ids [B, D-1] int32. For a tree: parents [B, D-1] int32 in node numbering (0 = root, -1 = no node), path [B, D, S+1] int32 (ancestor at each
    depth, self last, -1 beyond), depth [B, D] int32, first_child and next_sibling [B, D] int32 (-1 = none). For a chain path, depth and children are
    None, parents are 0 .. D-2 [B, D-1] int64 or None, and ``valid`` [B, D-1] bool or None says which nodes exist (a prefix). ``q`` [B, S, Vd]
    float32: for rejection sampling, the law the children of the first node of each depth were drawn from, over target ids ``q_ids`` [Vd] int32
    (None: 0 .. Vd - 1); else None.
    """

    token_ids: Tensor
    parents: Tensor | None = None
    path: Tensor | None = None
    depth: Tensor | None = None
    first_child: Tensor | None = None
    next_sibling: Tensor | None = None
    valid: Tensor | None = None
    q: Tensor | None = None
    q_ids: Tensor | None = None


@dataclass
class Verdict:
    """What acceptance decided for B rows (device tensors, all int32).

    path [B, S+1]: accepted nodes, root first, -1 beyond. accepted [B]: accepted drafts a. tokens [B, S+1]: the committed tokens, y at each path node,
    -1 beyond a+1. kept [B]: tokens kept after EOS, budget and context (0 for a dead row). finish [B]: 0 running, 1 stop, 2 length,
    3 context, 4 non-finite logits.
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    kept: Tensor
    finish: Tensor


def noise_key(seed: int, key: Any, sample: int) -> tuple[int, int]:
    """The Philox key of a request: the first 64 bits of SHA-256 of the JSON text of [seed, key, sample], as two little-endian uint32 words."""
    text = json.dumps([seed, key, sample], ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
