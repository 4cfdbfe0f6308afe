"""Device time of sampling, drafting, trees and next-token preparation at the sizes of an 8B model, each beside a plain torch way of doing it.

``python -m benchmarks.kernels_sampling [--only argmax,sampled,draft,law,tree,next] [--batches 1,64,256] [--json FILE]``. Figures are medians of graph
replays; host loops, which cannot stand in a graph, are timed with a wait. Boundary: calls the launchers directly; no engine, no checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_forward import copies_for, graph_time
from benchmarks.options import Parser
from specgen.draft import tree as trees
from specgen.kernels import draft_topk, law, next_token, philox, reference_tree, sampling, tree
from specgen.kernels import reference_sampling as reference

VOCAB, DRAFT_VOCAB = 128_256, 32_000
Row = dict[str, Any]


def host_time(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of one call from launch to the end of its device work."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


class Parameters:
    """Sampling parameters of ``rows`` rows: T 0.6 and, on request, top-k 20, top-p 0.95, min-p 0.05."""

    def __init__(self, rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
        ones = torch.ones(rows, device="cuda")
        self.temperature, self.top_k, self.top_p, self.min_p = ones * 0.6, (ones * top_k).to(torch.int32), ones * top_p, ones * min_p
        self.keys = torch.randint(-(2**31), 2**31, (rows, 2), device="cuda").to(torch.int32)
        self.t = torch.arange(rows, dtype=torch.int32, device="cuda")

    def sampler(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.keys, self.t


def logits_like(rows: int, spread: float, dtype: torch.dtype) -> list[Tensor]:
    """Copies of random logits of that standard deviation, enough of them that none is found in cache."""
    copies = copies_for(rows * VOCAB * dtype.itemsize)
    return [(torch.randn(rows, VOCAB, device="cuda") * spread).to(dtype) for _ in range(min(copies, 16))]


def argmax(batches: list[int]) -> Iterator[Row]:
    """Greedy: one pass over the logits, as fast as memory allows."""
    for rows in batches:
        for dtype in (torch.float32, torch.bfloat16):
            many, p = logits_like(rows, 2.0, dtype), Parameters(rows)
            ours = graph_time([partial(sampling.gumbel_argmax, x, *p.sampler(), VOCAB, features=()) for x in many])
            plain = graph_time([partial(torch.argmax, x, 1) for x in many])
            size = many[0].numel() * dtype.itemsize
            yield {"case": f"argmax {rows} x {VOCAB} {dtype}", "us": ours * 1e6, "tb_s": size / ours / 1e12, "torch_us": plain * 1e6}


def softmax_sample(x: Tensor, p: Parameters) -> Tensor:
    """The usual unfiltered draw: softmax, then the exponential race."""
    probability = torch.softmax(x.float() / p.temperature[:, None], 1)
    return (probability / torch.empty_like(probability).exponential_()).argmax(1)


def softmax_topk(x: Tensor, k: int) -> Any:
    """The usual draft candidates: log-softmax, then top-k."""
    return torch.log_softmax(x.float(), 1).topk(k, 1)


def usual_filters(x: Tensor, p: Parameters) -> Tensor:
    """The usual filtered draw in torch: one sort of the whole vocabulary, top-k, top-p and min-p over it, then the exponential race."""
    z, order = torch.sort(x.float() / p.temperature[:, None], 1, descending=True)
    place = torch.arange(z.shape[1], device=z.device)
    z = z.masked_fill((p.top_k[:, None] > 0) & (place >= p.top_k[:, None]), -torch.inf)
    law = torch.softmax(z, 1)
    law = law.masked_fill((law.cumsum(1) - law >= p.top_p[:, None]) | (law < p.min_p[:, None] * law[:, :1]), 0.0)
    return order.gather(1, (law / torch.empty_like(law).exponential_()).argmax(1, keepdim=True))


def sampled(batches: list[int]) -> Iterator[Row]:
    """T > 0, unfiltered and filtered, on peaked and on flat logits; beside one read of the logits, the usual torch code, and the definition."""
    cases = {
        "no filter": (0, 1.0, 0.0),
        "top-p 0.95": (0, 0.95, 0.0),
        "top-k 20 top-p 0.95": (20, 0.95, 0.0),
        "min-p 0.05": (0, 1.0, 0.05),
        "top-k 50 top-p 0.95 min-p 0.02": (50, 0.95, 0.02),
    }
    for rows in batches:
        for name, spread in (("peaked", 4.0), ("flat", 0.5)):
            many = logits_like(rows, spread, torch.float32)
            read = graph_time([partial(torch.amax, x, 1) for x in many])
            for filters, values in cases.items():
                p = Parameters(rows, *values)
                features = {"sampled"} if filters == "no filter" else {"sampled", "filters"}
                ours = graph_time([partial(sampling.gumbel_argmax, x, *p.sampler(), VOCAB, features=features) for x in many])
                naive = softmax_sample if filters == "no filter" else usual_filters
                row = {"case": f"sample {rows} x {VOCAB} {name}, {filters}", "us": ours * 1e6, "read_us": read * 1e6, "reads": ours / read}
                row["read_tb_s"] = many[0].numel() * 4 / read / 1e12
                row["torch_us"] = host_time(partial(naive, many[0], p), 10) * 1e6
                row["torch_ratio"] = row["torch_us"] / row["us"]
                if filters != "no filter":
                    limit = min(rows, 64)
                    q = Parameters(limit, *values)
                    row[f"reference_{limit}_rows_us"] = host_time(partial(reference.gumbel_argmax, many[0][:limit], *q.sampler(), VOCAB), 3) * 1e6
                yield row


def draft(batches: list[int]) -> Iterator[Row]:
    """A draft step's choice over a reduced vocabulary: the chain's argmax and the tree's top-k."""
    ids = torch.arange(DRAFT_VOCAB, dtype=torch.int32, device="cuda") * 4
    for rows in batches:
        p = Parameters(rows)
        many = [torch.randn(rows, DRAFT_VOCAB, device="cuda").to(torch.bfloat16) for _ in range(8)]
        for heat, name in ((None, "greedy"), (p.temperature, "T 0.6")):
            chain = graph_time([partial(sampling.draft_argmax, x, heat, p.keys, p.t, ids) for x in many])
            yield {"case": f"draft argmax {rows} x {DRAFT_VOCAB} {name}", "us": chain * 1e6}
            for k in (4, 10):
                ours = graph_time([partial(draft_topk.draft_topk, x, k, heat, p.keys, p.t, ids) for x in many])
                plain = graph_time([partial(softmax_topk, x, k) for x in many])
                yield {"case": f"draft top-{k} {rows} x {DRAFT_VOCAB} {name}", "us": ours * 1e6, "torch_us": plain * 1e6}


def laws(batches: list[int]) -> Iterator[Row]:
    """Penalties and bias over full tables, and plain noise."""
    for rows in batches:
        ones = torch.ones(rows, device="cuda")
        table = reference.LawTables(
            ones * 1.1,
            ones * 0.1,
            ones * 0.1,
            torch.zeros(rows, VOCAB, dtype=torch.bool, device="cuda"),
            torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, VOCAB, device="cuda"),
        )
        x, slots = torch.randn(rows, VOCAB, device="cuda"), torch.arange(rows, device="cuda")
        path = torch.full((rows, 4), -1, dtype=torch.int32, device="cuda")
        ours = graph_time([partial(law.adjust_logits, x, slots, table, path, None, VOCAB)] * 4)
        plain = graph_time([partial(reference.adjust_logits, x, slots, table, path, None, VOCAB)] * 4)
        yield {"case": f"adjust {rows} x {VOCAB}", "us": ours * 1e6, "torch_us": plain * 1e6}
        p = Parameters(rows)
        yield {"case": f"noise {rows} x {VOCAB}", "us": graph_time([partial(philox.gumbel, p.keys, p.t, VOCAB)] * 4) * 1e6}


def draft_trees(batches: list[int]) -> Iterator[Row]:
    """One depth's expansion, the selection, the build and the walk of a tree, and a chain's walk."""
    for rows in batches:
        for topk, steps, nodes in ((4, 4, 16), (8, 5, 41), (10, 6, 61)):
            logp = -torch.rand(rows, topk, topk, device="cuda")
            tokens = torch.randint(0, VOCAB, (rows, topk, topk), dtype=torch.int32, device="cuda")
            growth = trees.Growth(tokens[:, 0], logp[:, 0].sort(1, descending=True).values, topk)
            for _ in range(steps - 1):
                growth.extend(tokens, logp)
            scores = torch.cat([s.flatten(1) for s in growth.all_scores], 1)
            parent_list, index, chosen = trees.organize_draft_results(growth.all_scores, growth.all_tokens, growth.parents, nodes)
            built = trees.build_tree(parent_list, index, chosen, topk, steps)
            assert built.first_child is not None and built.next_sibling is not None
            y = torch.randint(0, VOCAB, (rows, nodes), dtype=torch.int32, device="cuda")
            y[:, 0] = built.token_ids[:, 0]
            walk = (built.token_ids, built.first_child, built.next_sibling, y, steps)
            arguments: dict[str, tuple[Any, ...]] = {
                "expand": (growth.scores, logp),
                "select_ascending": (scores, nodes - 1),
                "build_tree": (parent_list, index, topk, steps),
                "tree_walk": walk,
            }
            for name, args in arguments.items():
                ours = graph_time([partial(getattr(tree, name), *args)] * 16)
                plain = graph_time([partial(getattr(reference_tree, name), *args)] * 16)
                yield {"case": f"{name} {rows} rows, topk {topk}, steps {steps}, nodes {nodes}", "us": ours * 1e6, "torch_us": plain * 1e6}
        chain = torch.randint(0, 2, (rows, 4), dtype=torch.int32, device="cuda")
        y = torch.randint(0, 2, (rows, 5), dtype=torch.int32, device="cuda")
        ours = graph_time([partial(tree.chain_walk, chain, None, y)] * 16)
        plain = graph_time([partial(reference_tree.chain_walk, chain, None, y)] * 16)
        yield {"case": f"chain_walk {rows} rows, steps 4", "us": ours * 1e6, "torch_us": plain * 1e6}


def naive_next(sampled: Tensor, discard: list[bool], backup: list[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Next tokens on the host: read the ids back, loop, send the result."""
    next_ids, counts = [], []
    for row, dropped, spare in zip(sampled.tolist(), discard, backup, strict=True):
        valid = [] if dropped else [x for x in row if 0 <= x < vocab]
        next_ids.append(valid[-1] if valid else spare)
        counts.append(len(valid))
    return torch.tensor(next_ids, dtype=torch.int32, device="cuda"), torch.tensor(counts, dtype=torch.int32, device="cuda")


def next_tokens(batches: list[int]) -> Iterator[Row]:
    """Next-token preparation: the kernel (in a graph, and launched), the torch definition, and the host loop with its wait."""
    for rows in batches:
        sampled = torch.randint(-1, VOCAB, (rows, 5), dtype=torch.int32, device="cuda")
        discard, backup = torch.zeros(rows, dtype=torch.bool, device="cuda"), torch.ones(rows, dtype=torch.int32, device="cuda")
        args = (sampled, discard, backup, VOCAB)
        yield {
            "case": f"next tokens {rows} x 5",
            "us": graph_time([partial(next_token.next_token_ids_padded, *args)] * 16) * 1e6,
            "launched_us": host_time(partial(next_token.next_token_ids_padded, *args)) * 1e6,
            "torch_us": graph_time([partial(reference_tree.next_token_ids_padded, *args)] * 16) * 1e6,
            "host_loop_us": host_time(partial(naive_next, sampled, discard.tolist(), backup.tolist(), VOCAB)) * 1e6,
        }


SECTIONS: dict[str, Callable[[list[int]], Iterator[Row]]] = {
    "argmax": argmax,
    "sampled": sampled,
    "draft": draft,
    "law": laws,
    "tree": draft_trees,
    "next": next_tokens,
}


def main(argv: list[str] | None = None) -> list[Row]:
    """Run the sections asked for, print a line a case, and return the rows."""
    parser = Parser("python -m benchmarks kernels_sampling", __doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for name in options.only.split(","):
        for row in SECTIONS[name]([int(b) for b in options.batches.split(",")]):
            rows.append(row)
            print(row["case"], *(f"{key}={value:.2f}" for key, value in row.items() if key != "case"), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
