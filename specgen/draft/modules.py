"""Drafting with several modules in a row, module k for the token k steps ahead (multi-token prediction).

Boundary: how the modules' states, KV and tokens move; what a module computes is its own file (``mtp.py``). With one module
``autoregressive.py`` alone does it.

Module k at position p joins the token x[p+k+1] with the state of module k - 1 at p (the target's for k = 0) and proposes x[p+k+2]; its KV of position
p is at index p of its own layer. With L committed tokens and the root x[L] known, module k is settled for p < L - k; the last k positions lack their
token. So step k runs module k over the positions L-k .. L-1 with the drafted tokens d[1] .. d[k], and its last one proposes d[k+1]. What a row keeps
is each module's state at its last settled position, module k's at L-1-k: the first that module k + 1 reads next. Settling a run of tokens (a prompt's
chunk, an accepted path, what a ring kept) takes the same tokens through every module, module k at positions k earlier, its states those of the module
before, one place later, behind the kept one. Positions below 0 do not exist; they write to scratch and see nothing.

Steps beyond the modules take the last one again, further along its own sequence: the state it gave one position before stands for the one it has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specgen.draft import tree
from specgen.draft.autoregressive import AutoregressiveDrafter
from specgen.draft.base import AcceptedRows, PrefillRows, SamplingRows, StepRows
from specgen.draft.mtp import MtpModule
from specgen.kernels import ops
from specgen.models.attention import KvPool
from specgen.types import Draft, Layout

if TYPE_CHECKING:
    from specgen.draft.ring import StateRing


class ModularDrafter(AutoregressiveDrafter):
    """Drafts with two modules or more. State per slot, beside the depth-1 candidates: of each module but the last its state at the last settled
    position (``feed``, [R, (n - 1) * E]), and from where on the row's own prefill has filled the modules' KV (``floor`` [R] int32)."""

    def __init__(self, modules: Sequence[MtpModule], topk: int, num_steps: int, num_draft_tokens: int) -> None:
        super().__init__(modules[0], topk, num_steps, num_draft_tokens)
        self.modules = list(modules)
        self.deepest = len(modules) - 1
        self.tail = self.deepest
        self.width = modules[0].feed_size

    def kv_bytes_per_token(self) -> int:
        return sum(module.kv_bytes_per_token() for module in self.modules)

    def _make_pool(self, num_pages: int, page_size: int) -> KvPool:
        shapes = [module.layers[0].spec.kv_shape for module in self.modules]
        return KvPool.allocate(shapes, num_pages, page_size, self.head.feed_dtype, self.head.device)

    def _feed_width(self) -> int:
        return self.deepest * self.width

    def bind(self, max_slots: int, num_pages: int, page_size: int, max_batch: int) -> None:
        super().bind(max_slots, num_pages, page_size, max_batch)
        self.floor = torch.zeros(max_slots, dtype=torch.int32, device=self.head.device)

    def _logits(self, states: Tensor, sampling: SamplingRows, depth: int) -> Tensor:
        return sampling.mask_draft(self.modules[min(depth, self.deepest)].logits(states), depth, None)

    # -- proposing ------------------------------------------------------------------------------------------------------------------------

    def _advance(self, rows: StepRows, run: list[Tensor], feed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``feed`` [B, n - 1, E]: what this step reads, in order of position, then what the row keeps for later; beyond the modules [B, 1, E]."""
        assert feed is not None
        step, batch, beyond = len(run), rows.size, len(run) > self.deepest
        length = 1 if beyond else step  # positions this step runs over
        ids = (run[-1] if beyond else torch.cat(run, 1)).reshape(-1)
        trail = feed.view(batch, -1, self.width)
        module = self.modules[min(step, self.deepest)]
        layout = rows.place(length, start_add=step - 1 - self.deepest if beyond else -step)
        states, out = module.forward(ids, trail[:, :length].reshape(batch * length, -1), layout, self.pool)
        return states.view(batch, length, -1)[:, -1].contiguous(), self._next_feed(trail, out.view(batch, length, -1), step)

    def _next_feed(self, trail: Tensor, out: Tensor, step: int) -> Tensor:
        """What the step after ``step`` reads, [N, ., E], from this step's trail and the module's states ``out`` [N, ., E]."""
        if step >= self.deepest:
            return out[:, -1:]
        return torch.cat([trail[:, step : step + 1], out, trail[:, step + 1 :]], 1)

    def _propose_tree(self, rows: StepRows, num_steps: int, tokens: Tensor, scores: Tensor, feed: Tensor | None) -> Draft:
        """Every kept node runs the positions of its own branch: the branch's tokens settle nothing, so its KV is its own."""
        assert feed is not None
        batch, topk, s = rows.size, self.topk, rows.sampling
        grown = tree.Growth(tokens, scores, topk)
        trail = feed.view(batch, 1, -1).expand(batch, topk, -1)  # [B, K, n - 1 states]
        branch, window = tokens[:, :, None], rows.length.new_empty(batch, topk, 0)
        for step in range(1, num_steps):
            if step <= self.deepest:
                length, ids, window = step, branch, self._own_windows(batch, step)
                layout = self._branch_layout(rows, step)
            else:
                length, ids = 1, branch[:, :, -1:]
                slot = step * topk + self.offsets[:topk] - topk
                window = torch.cat([window, slot[None, :, None].expand(batch, topk, 1)], 2)
                layout = self._node_layout(rows, step, window)
            nodes = batch * topk
            states_in = trail.reshape(nodes, -1, self.width)
            module = self.modules[min(step, self.deepest)]
            states, out = module.forward(ids.reshape(-1), states_in[:, :length].reshape(nodes * length, -1), layout, self.pool)
            trail = self._next_feed(states_in, out.view(nodes, length, -1), step).reshape(batch, topk, -1)
            child_tokens, child_logp = self._children(states.view(nodes, length, -1)[:, -1].contiguous(), s, step)
            index = grown.extend(child_tokens.view(batch, topk, topk), child_logp.view(batch, topk, topk))
            branch, window, trail = (x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2])) for x in (branch, window, trail))
            branch = torch.cat([branch, grown.tokens[:, :, None]], 2)
        return grown.build(self.nodes(num_steps))

    def _own_windows(self, batch: int, step: int) -> Tensor:
        """Window slots of each kept node's branch at ``step``, [B, K, step] int32: node v has v * step and on."""
        return self.offsets[: self.topk * step].view(1, self.topk, step).expand(batch, self.topk, step)

    def _short(self, rows: StepRows, step: int) -> tuple[StepRows, Tensor]:
        """The rows as of ``step`` positions before their length, and by how many of those each is short, [B, 1, 1] int32: they do not exist."""
        return replace(rows, length=(rows.length - step).clamp(min=0)), (step - rows.length).clamp(min=0)[:, None, None]

    def _branch_layout(self, rows: StepRows, step: int) -> Layout:
        """Every node's branch of ``step`` positions; query j of a branch sees its first j slots."""
        before, short = self._short(rows, step)
        place = self.offsets[:step]
        visible = place + short <= place[:, None]  # [B, query, ancestor]; the ancestors that do not exist are left out at the front
        path = torch.where(visible, place + short, -1)[:, None] + self.offsets[: self.topk, None, None] * step * visible[:, None]
        depth = (place - short[:, 0]).clamp(min=0).repeat(1, self.topk)
        return before.place(self.topk * step, depth=depth, path=path.reshape(rows.size, self.topk * step, step))

    def _node_layout(self, rows: StepRows, step: int, window: Tensor) -> Layout:
        """One query a node beyond the modules, after its branch's ``window`` [B, K, step] slots."""
        before, short = self._short(rows, self.deepest)
        place = self.offsets[:step] + short
        path = torch.where(place < step, window.gather(2, place.clamp(max=step - 1).expand_as(window).long()), -1)
        depth = (step - 1 - short[:, 0]).expand(-1, self.topk)
        return before.place(self.topk, slot_add=(step - 1) * self.topk, depth=depth, path=path)

    # -- following ------------------------------------------------------------------------------------------------------------------------

    def share(self, source: int, target: int, length: int) -> None:
        """Whoever shares has filled the modules' KV below ``length``: the row that takes it over begins there."""
        self.floor[target].fill_(length)

    def prefill(self, rows: PrefillRows) -> None:
        """Settle a chunk's tokens: module k at k positions before each."""
        layout, slots = rows.layout, rows.row_slots
        assert layout.cu_q is not None and self.feed is not None
        floor = torch.where(layout.length == 0, 0, ops.take_rows(self.floor, slots))
        ops.put_rows(self.floor, slots, floor)
        kept = ops.take_rows(self.feed, slots).view(slots.shape[0], self.deepest, -1)
        kept = torch.where((layout.length == floor)[:, None, None], 0, kept)  # of the slot's row before
        first, last = layout.cu_q[:-1].long(), layout.cu_q[1:].long() - 1
        owner = torch.searchsorted(last, torch.arange(rows.ids.shape[0], device=last.device))
        feed, final, settled = self.modules[0].features(rows.hidden), None, []
        for index, module in enumerate(self.modules):
            place = layout if index == 0 else _earlier(layout, owner, floor, index, self.pool.page_size)
            if index == self.deepest:
                module.write(rows.next_ids, feed, place, self.pool)
                break
            states, out = module.forward(rows.next_ids, feed, place, self.pool)
            final = states if final is None else final
            settled.append(ops.take_rows(out, last))
            feed = out.roll(1, 0).index_copy_(0, first, kept[:, index])
        ops.put_rows(self.feed, slots, torch.cat(settled, 1))
        if rows.rows is not None and rows.final_last is not None and final is not None:
            self._keep(rows.rows.slots, ops.take_rows(final, rows.final_last), None, rows.rows.sampling)

    def _extend_pairs(self, rows: StepRows, accepted: AcceptedRows) -> tuple[Tensor, Tensor | None]:
        """Settle the accepted path, S + 1 padded tokens a row."""
        batch, width = accepted.tokens.shape
        feed = self._path_feed(accepted)
        assert feed is not None
        last = accepted.accepted + self.row_starts[width][:batch]
        layouts = [rows.place(width, start_add=-index, count=accepted.count) for index in range(len(self.modules))]
        return self._settle(accepted.tokens.reshape(-1), feed, layouts, last, rows.slots, None)

    def catch_up(self, rows: StepRows, ring: StateRing, steps: int) -> None:
        for part in ring.replay(rows, steps, self.lead):
            assert part.states is not None and self.feed is not None
            layouts = [part.moved(index) for index in range(len(self.modules))]
            states, feed = self._settle(part.ids, self.head.start(part.states), layouts, part.tail.index, part.keep, part.begin)
            if part.last:
                self._keep(part.keep, states, feed, rows.sampling)
            else:
                ops.put_rows(self.feed, part.keep, feed)

    def _settle(self, ids: Tensor, feed: Tensor, layouts: list[Layout], last: Tensor, slots: Tensor, begin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run every module over B windows of C tokens: (states [B, H] of module 0 at the tokens ``last`` [B], each module's states there).

        begin [B] int32: the place in a row's window of the first token to settle, None: 0. The last module's states are never read.
        """
        assert self.feed is not None
        batch = slots.shape[0]
        kept = ops.take_rows(self.feed, slots).view(batch, self.deepest, -1)
        final, settled = None, []
        for index, module in enumerate(self.modules):
            if index == self.deepest:
                module.write(ids, feed, layouts[index], self.pool)
                break
            states, out = module.forward(ids, feed, layouts[index], self.pool)
            final = ops.take_rows(states, last) if final is None else final
            settled.append(ops.take_rows(out, last))
            window = out.view(batch, -1, self.width)
            window = torch.cat([kept[:, index : index + 1], window[:, :-1]], 1)
            if begin is not None:
                at = torch.arange(window.shape[1], device=begin.device)
                window = torch.where((at == begin[:, None])[:, :, None], kept[:, index : index + 1], window)
            feed = window.reshape(ids.shape[0], -1)
        assert final is not None
        return final, torch.cat(settled, 1)


def _earlier(layout: Layout, owner: Tensor, floor: Tensor, by: int, page_size: int) -> Layout:
    """The packed chunks of ``layout``, ``by`` positions earlier; what falls before a row's ``floor`` [P] int32 writes to scratch.

    owner [T] int64: the chunk each token belongs to.
    """
    positions = layout.positions - by
    index = positions.clamp(min=0).long()
    page = layout.block_table[owner, index // page_size].long()
    slots = (page * page_size + index % page_size) * (positions >= floor[owner])
    return replace(layout, positions=index.to(torch.int32), slots=slots, length=layout.length - by)
