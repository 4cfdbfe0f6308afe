"""Acceptance and token statistics of a run, from its rows alone (docs/metrics.md holds every formula).

Boundary: rows in, numbers out, in one pass; what the rows cannot tell (model, timings, scores) is handed in by the caller. Plots nothing.
"""

from __future__ import annotations

import copy
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specgen.errors import DataError
from specgen.pasting import setting
from specgen.report import parquet
from specgen.report.attempts import append_attempt, read_attempts
from specgen.report.disk import UNTOUCHED, read_json, write_json
from specgen.report.resume import ROWS_NAME, STATS_NAME, parse_row, read_lines, rows_format, torn_tail

__all__ = ["append_attempt", "build_stats", "compute_stats", "load_rows", "load_stats", "read_attempts", "write_stats"]

SCHEMA = 1
RESAMPLES = 1000
UNLIKELY = 64  # steps after which a drafter that never was right is doubted
NO_GROUP = "(none)"  # rows without a category, in a run where others have one

Ints = npt.NDArray[np.int64]


def load_rows(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a run, JSON lines or Parquet, in the order they were written, each as the dict of CONTRACT 3.

    A last line that is still being written, or was cut off by a crash, is left out with a warning. Raises DataError when the folder holds
    no run, and while iterating for a damaged file.
    """
    folder = Path(run_dir)
    form = rows_format(folder)
    if form == "jsonl":
        return _lines(folder / ROWS_NAME)
    if form == "parquet" or (folder / parquet.PARTS_NAME).is_dir():
        return (row for path in parquet.parts(folder) for row in parquet.read_part(path))
    raise DataError(f"{folder} holds no {ROWS_NAME} and no {parquet.PARTS_NAME}/: it is not the folder of a run")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for _, _, row in read_lines(path):
        yield row
    tail = torn_tail(path)
    if tail and parse_row(tail) is None:
        warnings.warn(f"{path}: its last line is cut off and was left out; {setting('resume', path.parent)} mends it", stacklevel=2)


def load_stats(run_dir: str | Path) -> dict[str, Any]:
    """The ``stats.json`` of a run. Raises DataError when it is missing or was written by a newer schema."""
    path = Path(run_dir) / STATS_NAME
    stats = read_json(path, f"the run has not ended, or {run_dir} is not the folder of a run")
    if stats.get("schema") != SCHEMA:
        raise DataError(f"{path} has schema {stats.get('schema')!r}, this version reads {SCHEMA}; read it with the version that wrote it")
    return stats


def write_stats(folder: Path, stats: dict[str, Any], remedy: str = UNTOUCHED) -> None:
    """Atomically write ``stats.json``."""
    write_json(folder / STATS_NAME, stats, remedy)


def counts_fault(counts: dict[str, Any], output_tokens: int) -> str | None:
    """What contradicts itself in a row's counts, or None.

    The two identities of CONTRACT 3, and accepted[d] <= reached[d] <= proposed[d] <= verify_steps, which the definitions imply.
    """
    accepted, reached, proposed = counts["accepted"], counts["reached"], counts["proposed"]
    steps = counts["verify_steps"]
    committed = sum(accepted) + steps + counts["steps_without_draft"]
    if counts["committed"] != committed:
        return f"committed is {counts['committed']}, but accepted drafts and steps make {committed}"
    written = counts["prefill_sampled"] + counts["committed"] - counts["trimmed"]
    if output_tokens != written:
        return f"output_tokens is {output_tokens}, but prefill_sampled + committed - trimmed is {written}"
    for depth, (a, r, p) in enumerate(zip_longest(accepted, reached, proposed, fillvalue=0), 1):
        if not 0 <= a <= r <= p <= steps:
            return f"depth {depth}: accepted {a}, reached {r}, proposed {p} and verify_steps {steps} are not in rising order"
    return None


def row_group(row: dict[str, Any]) -> str | None:
    """The category of a row: its own field, else the input's field of that name, else None."""
    category = row.get("category", (row.get("meta") or {}).get("category"))
    return None if category is None else str(category)


class Tally:
    """Running sums over rows: five integers and three lists by depth, and three small integers a row for the intervals."""

    def __init__(self) -> None:
        self.samples = self.errors = self.prompt_tokens = self.output_tokens = 0
        self.verify_steps = self.steps_without_draft = self.trimmed = 0
        self.by_depth: dict[str, list[int]] = {"proposed": [], "reached": [], "accepted": []}
        self._index, self._accepted, self._steps = array("q"), array("q"), array("q")

    def add(self, row: dict[str, Any]) -> None:
        """Count one row. Raises DataError naming it when its counts contradict themselves."""
        try:
            counts = row["counts"]
            fault = counts_fault(counts, row["output_tokens"])
            if fault is None:
                self._add(row, counts)
        except (KeyError, TypeError) as error:
            fault = f"a field is missing or has the wrong type ({error})"
        if fault is not None:
            where = f"(index {row.get('index')}, sample {row.get('sample')}, id {row.get('id')!r})"
            raise DataError(f"row {where}: {fault}; the file was edited or damaged: remove that row and resume the run")

    def _add(self, row: dict[str, Any], counts: dict[str, Any]) -> None:
        self._index.append(row["index"])
        self._accepted.append(sum(counts["accepted"]))
        self._steps.append(counts["verify_steps"])
        self.samples += 1
        self.errors += row["finish_reason"] == "error"
        self.prompt_tokens += row["prompt_tokens"]
        self.output_tokens += row["output_tokens"]
        self.verify_steps += counts["verify_steps"]
        self.steps_without_draft += counts["steps_without_draft"]
        self.trimmed += counts["trimmed"]
        for name, sums in self.by_depth.items():
            sums.extend([0] * (len(counts[name]) - len(sums)))
            for depth, value in enumerate(counts[name]):
                sums[depth] += value

    def per_input_row(self) -> tuple[Ints, Ints, Ints]:
        """(index, accepted, verify_steps), one entry an input row, its samples added up; each int64 [R]."""
        index = np.asarray(self._index, dtype=np.int64)
        if not len(index):
            return index, index, index
        order = np.argsort(index, kind="stable")
        index = index[order]
        first = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
        accepted, steps = (np.add.reduceat(np.asarray(values, dtype=np.int64)[order], first) for values in (self._accepted, self._steps))
        return index[first], accepted, steps

    def figures(self, draft_nodes: int | None, seed: int, resamples: int) -> dict[str, Any]:
        """Counts and acceptance, under the names of stats.json."""
        index, accepted, steps = self.per_input_row()
        depths = max(len(sums) for sums in self.by_depth.values())
        for sums in self.by_depth.values():
            sums.extend([0] * (depths - len(sums)))
        acceptance = {
            "mean_length": mean_length(accepted, steps, seed=seed, resamples=resamples),
            "per_depth": [self._depth(d) for d in range(depths)],
            "draft_rate": _ratio(sum(self.by_depth["accepted"]), sum(self.by_depth["proposed"])),
            "node_rate": _ratio(sum(self.by_depth["accepted"]), self._nodes(draft_nodes)),
            "histogram": self._histogram(),
            "verify_steps": self.verify_steps,
            "steps_without_draft": self.steps_without_draft,
            "trimmed": self.trimmed,
        }
        return {
            "requests": len(index),
            "samples": self.samples,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "acceptance": acceptance,
        }

    def _depth(self, d: int) -> dict[str, Any]:
        proposed, reached, accepted = (self.by_depth[name][d] for name in ("proposed", "reached", "accepted"))
        return {
            "depth": d + 1,
            "proposed": proposed,
            "reached": reached,
            "accepted": accepted,
            "rate": _ratio(accepted, proposed),
            "rate_per_step": _ratio(accepted, self.verify_steps),
            "conditional": _ratio(accepted, reached),
        }

    def _histogram(self) -> list[int]:
        """[d]: the verify steps that accepted exactly d drafts."""
        at_least = [self.verify_steps, *self.by_depth["accepted"], 0]
        return [here - deeper for here, deeper in pairwise(at_least)]

    def _nodes(self, draft_nodes: int | None) -> int:
        # A chain has one node a depth, so its nodes are counted exactly; a tree's are D - 1 a verify step.
        return sum(self.by_depth["proposed"]) if draft_nodes is None else self.verify_steps * draft_nodes


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def mean_length(accepted: Ints, steps: Ints, *, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Pooled and macro mean acceptance length with bootstrap 95% intervals over input rows.

    accepted, steps [R] int64: accepted drafts and verify steps of each input row. Rows without a verify step say nothing about
    acceptance and are left out; without any other row every entry is None.
    """
    drafted = steps > 0
    accepted, steps = accepted[drafted], steps[drafted]
    if not len(steps):
        return {"pooled": None, "pooled_ci95": None, "macro": None, "macro_ci95": None}
    pooled, macro = _bootstrap(accepted, steps, seed, resamples)
    return {
        "pooled": float(1 + accepted.sum() / steps.sum()),
        "pooled_ci95": [float(bound) for bound in np.quantile(pooled, [0.025, 0.975])],
        "macro": float(1 + (accepted / steps).mean()),
        "macro_ci95": [float(bound) for bound in np.quantile(macro, [0.025, 0.975])],
    }


def _bootstrap(accepted: Ints, steps: Ints, seed: int, resamples: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """``resamples`` values of the pooled and of the macro mean, R rows drawn with replacement each time.

    Equal rows are drawn together: the number of times each distinct pair comes up is multinomial, which costs the number of distinct
    pairs instead of the number of rows. Memory is bounded by drawing in chunks.
    """
    base = steps.max() + 1  # one number a pair sorts in half the memory
    codes, times = np.unique(accepted * base + steps, return_counts=True)
    pairs = np.stack([codes // base, codes % base], axis=1)
    rows = int(times.sum())
    ratio = pairs[:, 0] / pairs[:, 1]
    rng = np.random.default_rng(seed)
    pooled, macro = np.empty(resamples), np.empty(resamples)
    chunk = max(1, min(resamples, 4_000_000 // len(pairs)))
    for start in range(0, resamples, chunk):
        drawn = rng.multinomial(rows, times / rows, size=min(chunk, resamples - start))
        stop = start + len(drawn)
        pooled[start:stop] = 1 + (drawn @ pairs[:, 0]) / (drawn @ pairs[:, 1])
        macro[start:stop] = 1 + (drawn @ ratio) / rows
    return pooled, macro


def compute_stats(
    rows: Iterable[dict[str, Any]],
    *,
    draft_nodes: int | None = None,
    group_of: Callable[[dict[str, Any]], str | None] = row_group,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Everything in stats.json that the rows alone tell, in one pass; memory grows by three integers a row (six with groups).

    draft_nodes: D - 1 of a tree draft; None for chains and for no draft, whose nodes the rows count themselves. ``groups`` is empty when no
    row has a category; otherwise rows without one stand under ``(none)``. Raises DataError naming the first row whose counts do not add up.
    """
    total, groups, ungrouped, simulated = Tally(), dict[str, Tally](), Tally(), False
    for row in rows:
        name = group_of(row)
        if name is not None and not groups:
            ungrouped = copy.deepcopy(total)  # until now no row had a group: what is known of those rows is known of all
        total.add(row)
        simulated = simulated or bool(row.get("simulated", False))
        if name is not None:
            groups.setdefault(name, Tally()).add(row)
        elif groups:
            ungrouped.add(row)
    if groups and ungrouped.samples:
        groups[NO_GROUP] = ungrouped
    return {
        **total.figures(draft_nodes, seed, resamples),
        "simulated": simulated,
        "groups": {name: tally.figures(draft_nodes, seed, resamples) for name, tally in sorted(groups.items())},
    }


def build_stats(rows: Iterable[dict[str, Any]], run_info: dict[str, Any]) -> dict[str, Any]:
    """The whole of stats.json: what the rows tell, and from ``run_info`` what they cannot.

    run_info keys, each optional: model, draft, sampling, chat, throughput, step, baseline, lossless, score, attempts, environment (null, or an
    empty list for attempts, when absent), ``complete`` (true when absent; false: the run was stopped before its input ended), and
    ``group_scores`` {group: score}, which adds ``score`` to the groups, also to those without rows.
    A baseline without ``speedup`` gets it from the two throughputs. Raises TypeError for an
    unknown key, which is a defect of the caller.
    """
    known = {"model", "draft", "sampling", "chat", "throughput", "step", "baseline", "lossless", "score", "attempts", "environment"}
    known |= {"group_scores", "complete"}
    if unknown := sorted(set(run_info) - known):
        raise TypeError(f"run_info has unknown keys {unknown}")
    draft = run_info.get("draft") or {}
    is_tree = (draft.get("topk") or 1) > 1 and draft.get("num_draft_tokens") is not None
    computed = compute_stats(rows, draft_nodes=draft["num_draft_tokens"] - 1 if is_tree else None)
    acceptance, groups, simulated = computed.pop("acceptance"), computed.pop("groups"), computed.pop("simulated")
    for name, score in (run_info.get("group_scores") or {}).items():
        groups.setdefault(name, Tally().figures(None, 0, 1))["score"] = score
    if is_tree and draft.get("adaptive"):  # the size of its tree varies: its nodes are not known from D
        for figures in (acceptance, *(group["acceptance"] for group in groups.values())):
            figures["node_rate"] = None
    throughput = run_info.get("throughput")
    return {
        "schema": SCHEMA,
        **computed,
        **{name: run_info.get(name) for name in ("model", "draft", "sampling", "chat")},
        "simulated": simulated,
        "acceptance": acceptance,
        "throughput": throughput,
        "step": run_info.get("step"),
        "baseline": _with_speedup(run_info.get("baseline"), throughput),
        "lossless": run_info.get("lossless"),
        "groups": groups,
        "score": run_info.get("score"),
        "attempts": run_info.get("attempts") or [],
        "environment": run_info.get("environment"),
        "complete": run_info.get("complete", True),
    }


def doubts(stats: dict[str, Any]) -> list[str]:
    """What of a run's acceptance a person should know though nothing failed: no draft was ever right, or less was accepted than was imposed.

    A length that is no whole number begins at the floor, so that a row may end with less than one token missing.
    """
    draft, acceptance = stats.get("draft") or {}, stats.get("acceptance") or {}
    steps, imposed = acceptance.get("verify_steps") or 0, draft.get("simulate_acceptance_length")
    reached = (acceptance.get("mean_length") or {}).get("pooled")
    if reached is None:
        return []
    if imposed is not None:
        if (imposed - reached) * steps <= max(stats.get("samples") or 0, 0.01 * imposed * steps):
            return []
        tree = (draft.get("topk") or 1) > 1
        why = "a tree's first children do not always go so deep" if tree else "not every step had so many drafts"
        return [f"draft.simulate_acceptance_length={imposed:g} was imposed and {reached:.2f} reached: {why}"]
    if steps < UNLIKELY or reached > 1:
        return []
    why = "the drafter may belong to another target, or its weights be damaged"
    if draft.get("method") == "ngram":
        why = "the texts do not repeat themselves"
    elif draft.get("load_format") == "dummy":
        why = "draft.load_format=dummy gives random weights"
    return [f"no draft was accepted in {steps:,} steps: {why}"]


def _with_speedup(baseline: dict[str, Any] | None, throughput: dict[str, Any] | None) -> dict[str, Any] | None:
    if baseline is None or baseline.get("speedup") is not None:
        return baseline
    ours = (throughput or {}).get("output_tokens_per_s")
    theirs = (baseline.get("throughput") or {}).get("output_tokens_per_s")
    return {**baseline, "speedup": ours / theirs if ours is not None and theirs else None}
