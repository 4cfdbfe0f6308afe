"""The draft loop that EAGLE, EAGLE-3, MTP and draft models share: chains and top-k trees, prefill, and the extend after acceptance.

Boundary: what a drafter's network computes is a ``Head`` (one file a kind); how its tokens, KV and candidates move is here, once.

Positions. With L committed target tokens, an EAGLE or MTP head holds KV for pairs (emb(x[p+1]), h[p]), p < L, and its output at L-1 gives the depth-1
candidates (``lead`` 0). A draft model holds KV for x[0..L], root included (``lead`` 1). Either way a depth-d node is written at KV index
L + lead + (d-1) * topk + k, at position L + lead + d - 1, and depth-S nodes are not forwarded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from specgen.draft import tree
from specgen.draft.base import AcceptedRows, Drafter, PrefillRows, SamplingRows, StepRows
from specgen.draft.sampled import check_draft_tokens, comb, draw_drafts
from specgen.kernels import ops
from specgen.kernels.reference_step import Keep
from specgen.models.decoder import Tail
from specgen.types import Draft, Layout

if TYPE_CHECKING:
    from specgen.draft.ring import StateRing
    from specgen.models.attention import KvPool
    from specgen.models.target import Hidden


class Head(Protocol):
    """A drafter's network.

    ``lead``: 0 when it pairs a token with the state before it, 1 when it reads tokens alone. ``feed_size``: width of the state fed back, 0 for none.
    ``id_map``: [Vd] int32 target id of each draft id, or None when they are equal. ``aux_layers``, ``prenorm``: target states it reads.
    """

    method: str
    lead: int
    feed_size: int
    feed_dtype: torch.dtype
    device: torch.device
    id_map: Tensor | None
    aux_layers: tuple[int, ...]
    prenorm: bool

    def features(self, hidden: Hidden) -> Tensor | None:
        """The target's states as this head takes them, one row a token, before any gathering."""

    def start(self, features: Tensor) -> Tensor:
        """Project gathered target features [n, .] to what ``forward`` takes as its feed [n, feed_size]."""

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, Tensor | None]:
        """One pass over T tokens: (states for ``logits`` [T, H], states to feed back [T, feed_size] or None); with ``tail`` of one token a row."""

    def logits(self, states: Tensor) -> Tensor:
        """[n, H] -> [n, Vd]."""

    def make_pool(self, num_pages: int, page_size: int) -> KvPool:
        """The head's own KV layers."""

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV a token takes over the head's layers."""


class AutoregressiveDrafter(Drafter):
    """Drafts token by token with a ``Head``; state per slot: the depth-1 candidates, their scores, and the state to feed back."""

    def __init__(self, head: Head, topk: int, num_steps: int, num_draft_tokens: int) -> None:
        super().__init__(topk, num_steps, num_draft_tokens)
        self.head = head
        self.method = head.method
        self.lead = head.lead
        self.aux_layers = head.aux_layers
        self.prenorm = head.prenorm

    def kv_bytes_per_token(self) -> int:
        return self.head.kv_bytes_per_token()

    @property
    def states_read(self) -> int:
        return len(self.aux_layers) or int(self.head.feed_size > 0)

    def bind(self, max_slots: int, num_pages: int, page_size: int, max_batch: int) -> None:
        device = self.head.device
        self.pool: Any = self._make_pool(num_pages, page_size)
        self.tokens = torch.zeros(max_slots, self.topk, dtype=torch.int32, device=device)
        self.scores = torch.zeros(max_slots, self.topk, dtype=torch.float32, device=device)
        self.feed = torch.zeros(max_slots, self._feed_width(), dtype=self.head.feed_dtype, device=device) if self.head.feed_size else None
        self.max_batch = max_batch
        # Constants of every step: window numbers of the nodes kept at each depth, and where each row of an extend of that width begins.
        self.offsets = torch.arange(self.num_steps * self.topk, dtype=torch.int32, device=device)
        rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self.row_starts = {width: rows * width for width in range(2, self.num_steps + 2)}
        self.chain = tree.rebuild_topk1_chain_buffers(self.num_steps, max_batch, device) if self.topk == 1 and self.num_steps else None
        self.states: Tensor | None = None  # with ``rejection``: what depth 1 is drawn from, once the first prefill has shown its width
        self.max_slots = max_slots
        self.comb = comb(self.topk, self.num_steps, max_batch, device) if self.rejection and self.topk > 1 else None
        if self.rejection:
            check_draft_tokens(self.topk, self.num_steps, self.num_draft_tokens)

    def _make_pool(self, num_pages: int, page_size: int) -> KvPool:
        return self.head.make_pool(num_pages, page_size)

    def _feed_width(self) -> int:
        """Elements of state a row keeps to feed back."""
        return self.head.feed_size

    def close(self) -> None:
        self.pool = None
        self.feed = None
        self.states = None

    # -- proposing ------------------------------------------------------------------------------------------------------------------------

    def propose(self, rows: StepRows, num_steps: int) -> Draft | None:
        feed = None if self.feed is None else ops.take_rows(self.feed, rows.slots)
        if self.states is None:
            tokens, scores = ops.take_rows(self.tokens, rows.slots), ops.take_rows(self.scores, rows.slots) if self.topk > 1 else None
        else:
            states = ops.take_rows(self.states, rows.slots)
            if "sampled" in rows.sampling.features:
                return self._propose_sampled(rows, num_steps, states, feed)
            tokens, scores = self._candidates(states, rows.sampling)
        if scores is None:
            return self._propose_chain(rows, num_steps, tokens, feed)
        return self._propose_tree(rows, num_steps, tokens, scores, feed)

    def _propose_sampled(self, rows: StepRows, num_steps: int, states: Tensor, feed: Tensor | None) -> Draft:
        """Drafts drawn at random from the drafter's law: a chain, or a comb of which only the spine is forwarded."""
        drawn: list[Tensor] = []
        laws: list[Tensor] = []
        for depth in range(num_steps):
            if depth:
                states, feed = self._advance(rows, [tokens[:, :1] for tokens in drawn], feed)
            s = rows.sampling
            tokens, q = draw_drafts(self._logits(states, s, depth), s, s.t + depth, self.topk, self.head.id_map)
            drawn.append(tokens)
            laws.append(q)
        tokens, q = torch.cat(drawn, 1), torch.stack(laws, 1)
        return Draft(tokens, q=q, q_ids=self.head.id_map) if self.comb is None else self.comb.draft(tokens, q, self.head.id_map)

    def _propose_chain(self, rows: StepRows, num_steps: int, tokens: Tensor, feed: Tensor | None) -> Draft:
        """topk = 1: concatenation, top-k, sort and gather are the identity, so what is verified is constant but for the tokens."""
        assert self.chain is not None
        drafted, s = [tokens], rows.sampling
        for depth in range(1, num_steps):
            states, feed = self._advance(rows, drafted, feed)
            drafted.append(self._best(states, s, depth)[:, None])
        return self.chain.draft(drafted)

    def _advance(self, rows: StepRows, run: list[Tensor], feed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """After a chain of drafts, depth by depth [B, 1] int32 each: (the states that propose the next one [B, H], what to feed back after it).

        The newest node is its own query after the drafted keys before it, which are by now as good as committed ones.
        """
        return self.head.forward(run[-1].reshape(-1), feed, rows.place(1, start_add=self.lead + len(run) - 1), self.pool)

    def _propose_tree(self, rows: StepRows, num_steps: int, tokens: Tensor, scores: Tensor, feed: Tensor | None) -> Draft:
        batch, topk = rows.size, self.topk
        s = rows.sampling  # one line of parameters serves the topk nodes of its row
        grown = tree.Growth(tokens, scores, topk)
        feed = None if feed is None else feed[:, None].expand(batch, topk, -1).reshape(batch * topk, -1)
        path = self.offsets[None, :topk, None].expand(batch, topk, 1)
        for depth in range(1, num_steps):
            layout = rows.place(
                topk,
                start_add=self.lead,
                slot_add=(depth - 1) * topk,
                position_add=depth - 1,
                position_step=0,
                path=path.contiguous(),
            )
            states, feed = self.head.forward(grown.tokens.reshape(-1), feed, layout, self.pool)
            child_tokens, child_logp = self._children(states, s, depth)
            index = grown.extend(child_tokens.view(batch, topk, topk), child_logp.view(batch, topk, topk))
            kept = self.offsets[None, depth * topk : (depth + 1) * topk, None].expand(batch, topk, 1)
            path = torch.cat([path.gather(1, index[:, :, None].expand(-1, -1, path.shape[2])), kept], 2)
            if feed is not None:
                feed = feed.view(batch, topk, -1).gather(1, index[:, :, None].expand(-1, -1, feed.shape[-1])).reshape(batch * topk, -1)
        return grown.build(self.nodes(num_steps))

    def _best(self, states: Tensor, s: SamplingRows, depth: int) -> Tensor:
        """The best token after each state, [n] int32; ``depth`` moves the noise position."""
        t = s.t + depth if "sampled" in s.features and depth else s.t
        return ops.draft_argmax(self._logits(states, s, depth), s.temperature, s.keys, t, self.head.id_map, s.features)

    def _children(self, states: Tensor, s: SamplingRows, depth: int) -> tuple[Tensor, Tensor]:
        """The topk best tokens after each state and their log-probabilities."""
        t = s.t + depth if "sampled" in s.features and depth else s.t
        return ops.draft_topk(self._logits(states, s, depth), self.topk, s.temperature, s.keys, t, self.head.id_map, s.features)

    def _candidates(self, states: Tensor, s: SamplingRows) -> tuple[Tensor, Tensor | None]:
        """The root's children: tokens [n, K] int32, and for a tree their scores [n, K]."""
        return (self._best(states, s, 0)[:, None], None) if self.topk == 1 else self._children(states, s, 0)

    def _logits(self, states: Tensor, sampling: SamplingRows, depth: int) -> Tensor:
        return sampling.mask_draft(self.head.logits(states), depth, self.head.id_map)

    # -- following ------------------------------------------------------------------------------------------------------------------------

    def _keep(self, slots: Tensor, states: Tensor, feed: Tensor | None, sampling: SamplingRows) -> None:
        """Depth-1 candidates from one state a row; ``sampling.t`` is the position they would take.

        With ``rejection`` the state itself: what it proposes is drawn in ``propose``, where the law is needed as well.
        """
        if self.rejection:
            if self.states is None:
                self.states = torch.zeros(self.max_slots, states.shape[1], dtype=states.dtype, device=states.device)
            ops.put_rows(self.states, slots, states)
        else:
            tokens, scores = self._candidates(states, sampling)
            ops.put_rows(self.tokens, slots, tokens)
            if scores is not None:
                ops.put_rows(self.scores, slots, scores)
        if self.feed is not None and feed is not None:
            ops.put_rows(self.feed, slots, feed)

    def prefill(self, rows: PrefillRows) -> None:
        head = self.head
        features = head.features(rows.hidden)
        feed_in = None if features is None else head.start(features)
        states, feed = head.forward(rows.next_ids if head.lead == 0 else rows.ids, feed_in, rows.layout, self.pool)
        final = rows.rows
        if final is None or rows.final_last is None:
            return
        if head.lead == 1:
            # A draft model's KV runs one ahead: forward the root too.
            states, feed = head.forward(final.root, None, final.place(1), self.pool)
        else:
            states = ops.take_rows(states, rows.final_last)
            feed = None if feed is None else ops.take_rows(feed, rows.final_last)
        self._keep(final.slots, states, feed, final.sampling)

    def use_steps(self, num_steps: int) -> None:
        if self.chain is not None:
            self.chain = self.chain.for_steps(num_steps)

    def keep(self, rows: StepRows, hidden: Hidden, ring: StateRing) -> Keep:
        return ring.keep(rows, self.head.features(hidden))

    def catch_up(self, rows: StepRows, ring: StateRing, steps: int) -> None:
        for part in ring.replay(rows, steps, self.lead):
            feed_in = None if part.states is None else self.head.start(part.states)
            states, feed = self.head.forward(part.ids, feed_in, part.layout, self.pool, part.tail)
            if part.last:
                self._keep(part.keep, states, feed, rows.sampling)

    def observe(self, rows: StepRows, accepted: AcceptedRows) -> None:
        states, feed = self._extend_tokens(rows, accepted) if self.lead and self.topk == 1 else self._extend_pairs(rows, accepted)
        self._keep(rows.slots, states, feed, accepted.sampling)

    def _extend_pairs(self, rows: StepRows, accepted: AcceptedRows) -> tuple[Tensor, Tensor | None]:
        """Write the drafter's KV of the whole accepted path, S + 1 padded rows; only each row's last token goes on beyond its K and V."""
        batch, width = accepted.tokens.shape
        layout = rows.place(width, start_add=self.lead, count=accepted.count)
        last = accepted.accepted + self.row_starts[width][:batch]
        query = Layout(layout.positions, layout.slots, layout.block_table, layout.length + accepted.accepted, 1, layout.max_len)
        return self.head.forward(accepted.tokens.reshape(-1), self._path_feed(accepted), layout, self.pool, Tail(last, query))

    def _path_feed(self, accepted: AcceptedRows) -> Tensor | None:
        """The target's states along the accepted path as the head takes them, [B * (S + 1), feed_size]; None for a head that reads tokens alone."""
        batch, width = accepted.tokens.shape
        features = self.head.features(accepted.hidden)
        if features is None:
            return None
        features = features.view(batch, accepted.num_nodes, -1)
        if accepted.path is not None:
            features = features.gather(1, accepted.path.clamp(min=0).long()[:, :, None].expand(-1, -1, features.shape[-1]))
        return self.head.start(features[:, :width].reshape(batch * width, -1))

    def _extend_tokens(self, rows: StepRows, accepted: AcceptedRows) -> tuple[Tensor, Tensor | None]:
        """A draft model's chain: the KV of accepted drafts is what ``propose`` wrote, but for the deepest, which was never forwarded. So two
        tokens a row do:
        the last accepted draft (or the root) again, and the bonus token."""
        batch = rows.size
        ids = ops.closing_pair(rows.root, accepted.tokens, accepted.accepted)
        layout = replace(rows, length=rows.length + accepted.accepted).place(2)
        tail = Tail(self.row_starts[2][:batch] + 1, Layout(layout.positions, layout.slots, layout.block_table, layout.length + 1, 1, layout.max_len))
        return self.head.forward(ids.reshape(-1), None, layout, self.pool, tail)
