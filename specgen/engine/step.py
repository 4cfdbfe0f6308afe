"""What a step does on the device: propose, verify, accept, commit, observe for decode rows; the forward and the first tokens of prompt chunks.

Boundary: tensors only. No data-dependent shape, no host read, nothing of batches or requests, so that a decode step can be captured in a graph
whole; what is launched when, and what becomes of the results, is ``engine.engine``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specgen.draft.base import AcceptedRows, Drafter, PrefillRows, StepRows
from specgen.draft.ring import StateRing
from specgen.draft.tree import IndexChecks, detect_oob, draft_depth
from specgen.engine.grammar import GrammarMasks, packed
from specgen.engine.law import MIN_TOKENS, LawState
from specgen.engine.memory import PageTable
from specgen.engine.prefill import StagedPrefill
from specgen.engine.rejection import draw_or_reject
from specgen.engine.rows import DeviceRows
from specgen.engine.sampling import adjust, draw, first_sampling, logprobs, step_sampling
from specgen.engine.simulate import Simulation, impose_path
from specgen.kernels import ops
from specgen.kernels.reference_step import Keep, kept_and_finish
from specgen.models.target import Target
from specgen.types import Draft, Layout

MOVES = frozenset({"sampled", MIN_TOKENS})  # features that look at a row's output length


@dataclass
class DeviceStep:
    """The tensor work of a step over one target, one drafter and the state of their rows.

    ``top``: how many log-probabilities of each token go to ``logprobs``, [max rows, S + 1, 1 + 2 * top] int32. ``features``: of the law, that any
    row so far uses (``sampling.features_of``). ``tap`` sees the logits of every draw (the lossless check; eager engines only).
    """

    target: Target
    drafter: Drafter
    rows: DeviceRows
    law: LawState
    pages: PageTable
    pool: Any
    ring: StateRing | None
    grammar: GrammarMasks | None
    checks: IndexChecks | None
    simulation: Simulation | None
    vocab_limit: int
    top: int | None
    logprobs: Tensor | None
    features: frozenset[str] = frozenset()
    tap: Callable[[Tensor], None] | None = None
    max_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_length = self.target.max_length
        self._depths = torch.arange(self.drafter.num_steps + 1, dtype=torch.int32, device=self.target.device)

    def close(self) -> None:
        """Drop KV and states."""
        self.pool = self.ring = None

    # -- decode rows ----------------------------------------------------------------------------------------------------------------------

    def step_rows(self, slots: Tensor, max_len: int) -> StepRows:
        """Rows of the step; a dead row becomes slot 0, so that what it writes goes to scratch."""
        slots, ints, keys, floats, table = ops.begin_step(slots, self.rows.ints, self.rows.floats, self.pages.device_table)
        return StepRows(
            slots=slots,
            length=ints[1],
            root=ints[2],
            block_table=table,
            max_len=max_len,
            page_size=self.pages.page_size,
            last_position=self.max_length - 1,
            sampling=step_sampling(self.rows, self.law, slots, ints, keys, floats, self.features, self.vocab_limit),
        )

    def decode(self, slots: Tensor, num_steps: int, max_len: int, result: Tensor) -> None:
        """Propose, verify, accept, commit, observe for ``slots`` [B] int64; results go to ``result`` [>= B, 6 + S + 1] int32."""
        self.target.tune(slots.shape[0] * self.drafter.nodes(num_steps))  # before the drafter, whose layers may have the same shapes
        rows = self.step_rows(slots, max_len)
        self.finish(rows, self.drafter.propose(rows, num_steps) if num_steps else None, result)

    def propose(self, slots: Tensor, num_steps: int, max_len: int) -> tuple[Draft | None, Tensor | None]:
        """The first part of a step under a grammar: the draft, and what the host reads of it."""
        draft = self.drafter.propose(self.step_rows(slots, max_len), num_steps)
        return draft, None if draft is None else packed(draft)

    def catch_up(self, slots: Tensor, max_len: int, steps: int) -> None:
        """Let the drafter follow the last ``steps`` steps of ``slots`` [B] int64, which drafted nothing."""
        if self.ring is not None:
            self.drafter.catch_up(self.step_rows(slots, max_len), self.ring, steps)

    def finish(self, rows: StepRows, draft: Draft | None, result: Tensor) -> None:
        """All of a step that follows the proposal."""
        hidden, logits, y = self._verify(rows, draft)
        keep = self.drafter.keep(rows, hidden, self.ring) if draft is None and self.ring is not None else None
        tokens, accepted, count, path = self._commit(rows, draft, y, result, keep)
        if self.checks is not None:
            self._check_step(rows, draft, tokens, accepted, path)
        self.law.count(rows.slots, tokens, count)
        if self.logprobs is not None and self.top is not None:
            self.logprobs[: tokens.shape[0], : tokens.shape[1]] = logprobs(logits, tokens, path, rows.sampling, self.top)
        if draft is None:
            return
        if path is not None:
            ops.compact_kv(self.pool.k, self.pool.v, rows.block_table, rows.length, path, accepted, rows.page_size)
        sampling = rows.sampling.moved(accepted + 1) if self.features & MOVES else rows.sampling
        self.drafter.observe(rows, AcceptedRows(tokens, path, accepted, count, hidden, draft.token_ids.shape[1] + 1, sampling))

    def _verify(self, rows: StepRows, draft: Draft | None) -> tuple[Any, Tensor, Tensor]:
        """The target over root and drafts: (hidden states of B x D nodes, their logits after steps 1 to 3 of f, y [B, D])."""
        tokens = rows.root[:, None] if draft is None else torch.cat([rows.root[:, None], draft.token_ids], 1)
        nodes = tokens.shape[1]
        depth = self._depths[:nodes] if draft is None or draft.depth is None else draft.depth
        where = {} if draft is None or draft.path is None else {"depth": draft.depth, "path": draft.path}
        layout = rows.place(nodes, **where)
        detect_oob(self.checks, "KV slots of the verify window", layout.slots, 0, self.pages.num_pages * self.pages.page_size)
        detect_oob(self.checks, "positions of the verify window", layout.positions, 0, self.max_length)
        hidden = self.target.forward(tokens.reshape(-1), layout, self.pool, self.drafter.aux_layers, self.drafter.prenorm)
        logits = self._tapped(self.target.logits(hidden.last))
        mask = None if self.grammar is None else self.grammar.device_masks(logits.shape[0])
        logits = adjust(logits, rows.sampling, depth, draft, mask)
        return hidden, logits, draw_or_reject(logits, rows.sampling, depth, draft)

    def _check_step(self, rows: StepRows, draft: Draft | None, tokens: Tensor, accepted: Tensor, path: Tensor | None) -> None:
        """Count every index of a step that lies outside its range (``engine.check_indices``); ``retire`` raises."""
        vocab, nodes = self.target.vocab_size, 1 if draft is None else draft.token_ids.shape[1] + 1
        detect_oob(self.checks, "root tokens", rows.root, 0, vocab)
        detect_oob(self.checks, "block table", rows.block_table, 0, self.pages.num_pages)
        detect_oob(self.checks, "lengths", rows.length, 0, self.max_length)
        detect_oob(self.checks, "committed tokens", tokens, 0, vocab)
        detect_oob(self.checks, "accepted lengths", accepted, 0, tokens.shape[1])
        detect_oob(self.checks, "accepted path", path, -1, nodes)
        if draft is not None:
            detect_oob(self.checks, "drafted tokens", draft.token_ids, 0, vocab)
            for name in ("parents", "path", "first_child", "next_sibling"):
                detect_oob(self.checks, f"draft {name}", getattr(draft, name), -1, nodes)

    def _tapped(self, logits: Tensor) -> Tensor:
        if self.tap is not None:
            self.tap(logits)
        return logits

    def _commit(
        self, rows: StepRows, draft: Draft | None, y: Tensor, result: Tensor, keep: Keep | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Accept, trim, advance the rows that go on and let the others die, on the device (``kernels.reference_step.finish_step``)."""
        common: dict[str, Any] = dict(max_length=self.max_length, result=result)
        if draft is None:
            return ops.finish_step(y, rows.slots, self.rows.ints, keep=keep, **common)
        imposed = None if self.simulation is None else self.simulation.lengths(rows.slots)
        if draft.path is None:
            return ops.finish_step(y, rows.slots, self.rows.ints, drafted=draft.token_ids, valid=draft.valid, imposed=imposed, **common)
        if imposed is not None:
            y = impose_path(draft, y, imposed)
        path, accepted, child = ops.tree_walk(draft.token_ids, draft.first_child, draft.next_sibling, y, draft.path.shape[2] - 1)
        if imposed is not None:
            accepted = torch.minimum(accepted, imposed)
        return ops.finish_step(y, rows.slots, self.rows.ints, walk=(path, accepted, child, draft_depth(draft)), **common)

    # -- prompt chunks --------------------------------------------------------------------------------------------------------------------

    def prefill(self, staged: StagedPrefill) -> tuple[Layout, Any]:
        """The target over packed prompt chunks: (their layout, hidden states of T tokens)."""
        layout = Layout(
            positions=staged.positions,
            slots=staged.slots,
            block_table=self.pages.device_table.index_select(0, staged.row_slots),
            length=staged.starts,
            q_len=staged.max_q,
            max_len=staged.max_len,
            cu_q=staged.cu_q,
        )
        return layout, self.target.forward(staged.ids, layout, self.pool, self.drafter.aux_layers, self.drafter.prenorm)

    def first_tokens(self, staged: StagedPrefill, hidden: Any, mask: Tensor | None) -> tuple[Tensor, StepRows, Tensor, Tensor | None]:
        """Sample the token after each prompt that ends here and bring its row to life: (next ids [T], rows [F], result [F, 2], log-probabilities)."""
        logits = self._tapped(self.target.logits(hidden.last.index_select(0, staged.final_last)))
        slots = staged.final_slots
        ints = self.rows.ints.index_select(0, slots)
        sampling = first_sampling(self.law, slots, ints, self.rows.floats.index_select(0, slots), self.features, self.vocab_limit)
        logits = adjust(logits, sampling, self._depths[:1], None, mask)
        sampled = draw(logits, sampling, self._depths[:1])
        # A resumed row samples nothing: its backup, the last token it had, is its root.
        root, count = ops.next_token_ids_padded(sampled, staged.discard, staged.backup, self.vocab_limit)
        fresh = ~staged.discard
        length = staged.final_lengths
        _, finish = kept_and_finish(sampled, torch.zeros_like(root), fresh, ints[:, 3], ints[:, 4], length - 1, self.max_length, ints[:, 9:])
        self.law.count(slots, sampled, fresh)
        first_logprobs = None if self.top is None else logprobs(logits, sampled, None, sampling, self.top)
        output_len = torch.where(fresh, 1, staged.output_lens)
        new = ints.clone()
        new[:, 0] = finish == 0
        new[:, 1] = length
        new[:, 2] = root
        new[:, 3] = output_len
        self.rows.ints.index_copy_(0, slots, new)
        next_ids = staged.next_ids.index_copy(0, staged.final_last, root)
        rows = StepRows(
            slots=slots,
            length=length,
            root=root,
            block_table=self.pages.device_table.index_select(0, slots),
            max_len=staged.max_len + 1,
            page_size=self.pages.page_size,
            last_position=self.max_length - 1,
            sampling=sampling.moved(output_len),
        )
        return next_ids, rows, torch.stack([root * (count > 0) - (count == 0).int(), finish], 1), first_logprobs

    def observe_prefill(self, staged: StagedPrefill, layout: Layout, hidden: Any, next_ids: Tensor, rows: StepRows | None) -> None:
        """Let the drafter see the chunks. next_ids [T]: the token after each; rows: of the prompts that end here, None where none does."""
        final_last = None if rows is None else staged.final_last
        self.drafter.prefill(PrefillRows(staged.ids, next_ids, layout, hidden, staged.row_slots, final_last, rows))
        if self.ring is not None and rows is not None:
            self.ring.prefilled(rows.slots, rows.length)
