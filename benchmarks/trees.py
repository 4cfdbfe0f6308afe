"""Draft trees and chains: choosing what to verify, building the tree, walking it.

Boundary: calls ops and ``draft.tree`` on random candidates; no engine, no model. The naive way of building and walking is the torch definition, which
is also what runs on a CPU device: there the two are one code and ``same_code`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.registry import Row, Settings, benchmark, row
from benchmarks.timing import Call, device_times, host_times, kernels, operators
from specgen.draft import tree as trees
from specgen.kernels import ops, reference_tree

VOCAB = 128_256
BATCHES = (1, 8, 64)
SHAPES = ((4, 4, 16), (8, 5, 41))  # topk, num_steps, num_draft_tokens


@benchmark
def topk1_chain(settings: Settings) -> Iterator[Row]:
    """What to verify of a chain (topk = 1): ``organize_draft_results``, as a step takes it when its batch is beyond the constants, against the
    constants and one cat, as it takes them otherwise. Host time; with it the device time, the operators and the kernels of a call."""
    device = settings.device
    for steps in (3, 5):
        for batch in BATCHES:
            tokens = [torch.randint(0, VOCAB, (batch, 1), dtype=torch.int32).to(device) for _ in range(steps)]
            general = trees.chain_candidates(tokens)
            chain = trees.rebuild_topk1_chain_buffers(steps, 256, device)
            calls: dict[str, Call] = {
                "naive": partial(trees.organize_draft_results, *general, steps + 1),
                "ours": partial(chain.results, tokens),
            }
            assert all(torch.equal(a, b) for a, b in zip(calls["naive"](), calls["ours"](), strict=True))
            host = host_times(calls, settings.repeats, device)
            more = {f"{name}_operators": operators(call) for name, call in calls.items()}
            if settings.cuda:
                more |= {f"{name}_gpu_us": sample.us for name, sample in device_times(calls, settings.repeats, device).items()}
                more |= {f"{name}_kernels": kernels(call, device) for name, call in calls.items()}
            yield row("topk1_chain", {"num_steps": steps, "batch": batch}, host["naive"], host["ours"], **more)


def candidates(batch: int, topk: int, steps: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A grown tree's (parent_list, index, tokens)."""
    generator = torch.Generator().manual_seed(batch)
    growth: trees.Growth | None = None
    for _ in range(steps):
        logp = -torch.rand(batch, topk, topk, generator=generator).to(device)
        tokens = torch.randint(0, VOCAB, (batch, topk, topk), dtype=torch.int32, generator=generator).to(device)
        if growth is None:
            growth = trees.Growth(tokens[:, 0], logp[:, 0].sort(1, descending=True).values, topk)
        else:
            growth.extend(tokens, logp)
    assert growth is not None
    return trees.organize_draft_results(growth.all_scores, growth.all_tokens, growth.parents, nodes)


def compared(settings: Settings, name: str, params: dict[str, int], naive: Call, ours: Call) -> Row:
    """A row whose figures are device times on a CUDA device, with the host times beside them."""
    calls = {"naive": naive, "ours": ours}
    times = device_times(calls, settings.repeats, settings.device)
    more: dict[str, object] = {"same_code": not ops.use_triton(settings.device), "operators": operators(naive)}
    if settings.cuda:
        host = host_times(calls, settings.repeats, settings.device)
        more |= {f"{who}_host_us": sample.us for who, sample in host.items()}
    return row(name, params, times["naive"], times["ours"], **more)


@benchmark
def tree_build(settings: Settings) -> Iterator[Row]:
    """Selected candidates to a tree (parents, paths, depths, children, siblings): the torch definition against the op. On CUDA, device time."""
    for topk, steps, nodes in SHAPES:
        for batch in BATCHES:
            parent_list, index, _ = candidates(batch, topk, steps, nodes, settings.device)
            naive: Call = partial(reference_tree.build_tree, parent_list, index, topk, steps)
            ours: Call = partial(ops.build_tree, parent_list, index, topk, steps)
            assert all(torch.equal(a, b) for a, b in zip(naive(), ours(), strict=True))
            yield compared(settings, "tree_build", {"batch": batch, "topk": topk, "num_steps": steps, "nodes": nodes}, naive, ours)


@benchmark
def tree_walk(settings: Settings) -> Iterator[Row]:
    """The accepted path of a verified tree: the torch definition against the op. On CUDA, device time."""
    for topk, steps, nodes in SHAPES:
        for batch in BATCHES:
            draft = trees.build_tree(*candidates(batch, topk, steps, nodes, settings.device), topk, steps)
            assert draft.first_child is not None and draft.next_sibling is not None
            # The law's tokens are those of the first children, so that most walks go deep.
            child = draft.first_child.long()
            y = torch.where(child > 0, draft.token_ids.gather(1, (child - 1).clamp(min=0)), 7)
            args = (draft.token_ids, draft.first_child, draft.next_sibling, y, steps)
            naive: Call = partial(reference_tree.tree_walk, *args)
            ours: Call = partial(ops.tree_walk, *args)
            assert all(torch.equal(a, b) for a, b in zip(naive(), ours(), strict=True))
            yield compared(settings, "tree_walk", {"batch": batch, "topk": topk, "num_steps": steps, "nodes": nodes}, naive, ours)
