"""The Drafter contract: what the engine asks of a drafter, and what it hands over.

Boundary: a drafter sees device tensors of the rows in a step and its own state, which is indexed by slot. It knows nothing of requests, budgets,
acceptance rules or the host. Every method runs between launch and retire: no host read, no data-dependent shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specgen.draft.tree import default_draft_tokens
from specgen.kernels import ops
from specgen.kernels.reference_sampling import LawTables, spread
from specgen.kernels.reference_step import Keep
from specgen.types import Draft, Layout

if TYPE_CHECKING:
    from specgen.draft.ring import StateRing
    from specgen.models.target import Hidden


@dataclass
class SamplingRows:
    """Sampling parameters of the rows in a step, and how noise is keyed (docs/architecture.md, "Noise").

    temperature, top_p, min_p [B] float32; top_k [B] int32; keys [B, 2] int32 (bit patterns of the Philox key); t [B] int32: the noise position of the
    token after the root. ``features`` names what any row needs: ``sampled`` (some temperature above 0), ``filters`` (top-k, top-p or min-p).
    vocab_limit: ids at or above it are never drawn. slots [B] int64: the rows' lines in the tables of the law. ``law``: those tables, or None where
    no row changes its logits; ``masks``: what a drafter applies of them, bias and hard masks. out_len [B] int32: output tokens up to and with the
    root, given when some row has ``min_tokens``.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    t: Tensor
    features: frozenset[str]
    vocab_limit: int
    slots: Tensor | None = None
    law: LawTables | None = None
    masks: LawTables | None = None
    out_len: Tensor | None = None

    def moved(self, by: Tensor) -> SamplingRows:
        """The same rows, ``by`` [B] int32 output tokens later."""
        return replace(self, t=self.t + by, out_len=None if self.out_len is None else self.out_len + by)

    def mask_draft(self, logits: Tensor, depth: int, id_map: Tensor | None) -> Tensor:
        """A drafter's logits [n, Vd] after the root's descendants at ``depth``, as the law's bias and hard masks leave them.

        Each of the B rows has n / B lines in a row. ``id_map`` [Vd]: target ids of the columns, or None. Ids that f never draws are cut off or
        masked, so that drafts are not spent on them. The lines may be changed in place.
        """
        if id_map is None and logits.shape[1] > self.vocab_limit:
            logits = logits[:, : self.vocab_limit]
        if self.masks is None:
            return logits
        assert self.slots is not None
        rows = logits.shape[0]
        out_len = None if self.out_len is None else spread(self.out_len, rows) + depth
        return ops.adjust_logits(logits, spread(self.slots, rows), self.masks, None, out_len, self.vocab_limit, ids=id_map)


@dataclass
class StepRows:
    """The B rows of one decode step, dead and padding rows turned to slot 0.

    slots [B] int64; length [B] int32: committed tokens L whose KV the target holds; root [B] int32: the last sampled token.
    block_table [B, W] int32. max_len: host bound on the keys of any row, windows included. last_position: max_length - 1, the highest legal position.
    """

    slots: Tensor
    length: Tensor
    root: Tensor
    block_table: Tensor
    max_len: int
    page_size: int
    last_position: int
    sampling: SamplingRows

    @property
    def size(self) -> int:
        """B, the number of rows."""
        return self.slots.shape[0]

    def place(self, q_len: int, *, path: Tensor | None = None, **where: Any) -> Layout:
        """The layout of ``q_len`` tokens a row; ``where`` as in ``kernels.reference_step.window`` (start_add, slot_add, position_add, ..., count)."""
        slots, positions, start = ops.window(self.length, self.block_table, q_len, self.page_size, self.last_position, **where)
        return Layout(positions, slots, self.block_table, start, q_len, self.max_len, path)


@dataclass
class PrefillRows:
    """The packed chunks of one prefill: T tokens, of which F rows end their prompt here.

    ids, next_ids [T] int32: the chunk's tokens and the token after each (at a row's last prompt position the first sampled token or, after a
    preemption,
    the known root). layout: packed. hidden: the target's states of the T tokens. row_slots [P] int64: slot of each chunk. final_last [F] int64:
    index in T of the last token of each final row.
    rows: the F final rows with their length, root and noise position as after the prefill; None when F is 0.
    """

    ids: Tensor
    next_ids: Tensor
    layout: Layout
    hidden: Hidden
    row_slots: Tensor
    final_last: Tensor | None = None
    rows: StepRows | None = None


@dataclass
class AcceptedRows:
    """What a step committed, for the drafter to follow.

    tokens [B, S+1] int32 (0 beyond), path [B, S+1] int32 node numbers (-1 beyond; None for a chain, where it is 0..S), accepted [B] int32,
    count [B] int32: accepted + 1, 0 for a dead row. hidden: the target's states of all B x num_nodes nodes. sampling: with t moved past the commit.
    """

    tokens: Tensor
    path: Tensor | None
    accepted: Tensor
    count: Tensor
    hidden: Hidden
    num_nodes: int
    sampling: SamplingRows


class Drafter:
    """Base of all drafters; also the drafter that proposes nothing.

    ``lead``: how far the drafter's committed KV runs ahead of the target's. ``aux_layers`` and ``prenorm``: the target states it reads. ``tail``: how
    many prompt positions before the last have drafter KV that depends on tokens sampled later (they are in no page shared between samples), and so
    by how many tokens of its prompt a row's drafter KV may be behind. ``rejection``: set before ``bind``; drafts of rows with a temperature are then
    drawn at random and bring their law (``Draft.q``). A drafter whose drafts are a function of the text has nothing to draw: for it equality with the
    law's own draw accepts with the same probability.
    """

    method = "none"
    lead = 0
    tail = 0
    aux_layers: tuple[int, ...] = ()
    prenorm = False
    rejection = False

    def __init__(self, topk: int, num_steps: int, num_draft_tokens: int) -> None:
        self.topk = topk
        self.num_steps = num_steps
        self.num_draft_tokens = num_draft_tokens

    def slots(self, num_steps: int) -> int:
        """The most KV slots one proposal of ``num_steps`` touches past the committed length."""
        return num_steps * self.topk

    def nodes(self, num_steps: int) -> int:
        """D, the nodes verified in a step of ``num_steps``, root included: as configured at the most steps, never more below."""
        if num_steps == self.num_steps:
            return self.num_draft_tokens
        return min(self.num_draft_tokens, default_draft_tokens(self.topk, num_steps)) if num_steps else 1

    @property
    def states_read(self) -> int:
        """How many of the target's states it reads of each token."""
        return len(self.aux_layers)

    def kv_bytes_per_token(self) -> int:
        """Bytes of drafter KV a token takes, over all its layers."""
        return 0

    def bind(self, max_slots: int, num_pages: int, page_size: int, max_batch: int) -> None:
        """Allocate state for ``max_slots`` rows (slot 0 included) and a KV pool of ``num_pages`` pages."""

    def prefill(self, rows: PrefillRows) -> None:
        """Follow a prefill chunk: write the drafter's KV, and for final rows keep the depth-1 candidates."""

    def share(self, source: int, target: int, length: int) -> None:
        """Row ``target`` takes over the first ``length`` prompt tokens of row ``source``, with the pages that hold their KV, and will prefill the
        rest. Copy what state per slot those tokens left."""

    def propose(self, rows: StepRows, num_steps: int) -> Draft | None:
        """Propose up to ``num_steps`` tokens after each root; None means a draft of length zero."""
        return None

    def observe(self, rows: StepRows, accepted: AcceptedRows) -> None:
        """Follow a committed step and keep the next depth-1 candidates. ``rows`` holds the lengths before the commit."""

    def use_steps(self, num_steps: int) -> None:
        """Steps of ``num_steps`` > 0 follow, at most what the drafter was made for (adaptive speculation)."""

    def keep(self, rows: StepRows, hidden: Hidden, ring: StateRing) -> Keep | None:
        """A step without a draft is about to commit: what ``catch_up`` will need of it, kept by the commit itself. hidden: of the roots."""
        return None

    def catch_up(self, rows: StepRows, ring: StateRing, steps: int) -> None:
        """Before the first draft after ``steps`` steps that were skipped: follow what they committed, as far back as the ring goes, and keep the
        depth-1 candidates. Rows that miss nothing stay as they are."""

    def close(self) -> None:
        """Drop device state."""
