"""Acceptance and trimming equal a plain rendering of their rules, row by row, on random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.draft.tree import draft_depth
from specgen.kernels import reference_tree
from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END, DRAFT_DEPTH, FINISH, KEPT, RESULT_COLUMNS, finish_step, kept_and_finish
from specgen.types import Draft

MAX_LENGTH = 14
RUNNING, STOP, LENGTH, CONTEXT, NON_FINITE = range(5)


@dataclass
class Row:
    """A row before a step."""

    alive: bool
    length: int  # L: tokens whose KV is held; prompt + output - 1
    output_len: int
    max_output: int
    stops: list[int]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    output_len = draw(st.integers(1, 4))
    return Row(
        alive=draw(st.booleans()) or draw(st.booleans()),
        length=draw(st.integers(1, MAX_LENGTH - 2)),
        output_len=output_len,
        max_output=draw(st.integers(output_len + 1, 12)),
        stops=draw(st.lists(st.integers(0, 4), max_size=3, unique=True)),
    )


def trim(row: Row, run: list[int]) -> tuple[int, int]:
    """(kept, finish) of a committed run; -1 stands for logits that were not finite."""
    kept = 0
    for token in run:
        if token < 0:
            return kept, NON_FINITE
        kept += 1
        if token in row.stops:
            return kept, STOP
        if row.output_len + kept == row.max_output:
            return kept, LENGTH
        if row.length + 1 + kept == MAX_LENGTH:
            return kept, CONTEXT
    return kept, RUNNING


def packed(rows: list[Row]) -> torch.Tensor:
    """Rows as ``DeviceRows.ints``, slot 0 first."""
    table = torch.full((len(rows) + 1, 9 + 4), -1, dtype=torch.int32)
    table[0, :9] = 0
    for slot, row in enumerate(rows, 1):
        table[slot, :9] = torch.tensor([row.alive, row.length, 7, row.output_len, row.max_output, 0, 0, 11, 12])
        table[slot, 9 : 9 + len(row.stops)] = torch.tensor(row.stops, dtype=torch.int32)
    return table


def check_step(rows: list[Row], runs: list[list[int]], depths: list[int], children: list[bool], width: int, **step: Any) -> None:
    """``finish_step`` on rows must commit ``runs`` (accepted drafts and the bonus token), and leave the table as the rules say."""
    table, batch = packed(rows), len(rows)
    slots = torch.arange(1, batch + 1)
    slots = slots * (table[1:, 0] > 0)
    result = torch.full((batch, RESULT_COLUMNS + width), 99, dtype=torch.int32)
    tokens, accepted, count, _ = finish_step(slots=slots, rows=table, max_length=MAX_LENGTH, result=result, **step)
    for i, (row, run) in enumerate(zip(rows, runs, strict=True)):
        if not row.alive:
            assert result[i, [ALIVE, KEPT, FINISH]].tolist() == [0, 0, RUNNING] and count[i] == 0
            assert table[i + 1].tolist() == packed(rows)[i + 1].tolist()
            continue
        kept, finish = trim(row, run)
        absent = width - len(run)
        assert tokens[i].tolist() == [max(token, 0) for token in run] + [0] * absent, "what goes on to a drafter is a real id everywhere"
        assert (int(accepted[i]), int(count[i])) == (len(run) - 1, len(run))
        assert result[i].tolist() == [1, len(run) - 1, kept, finish, depths[i], int(children[i]), *run, *[-1] * absent]
        assert (result[i, ACCEPTED], result[i, DRAFT_DEPTH], result[i, CHILD_AT_END]) == (len(run) - 1, depths[i], children[i])
        if finish == RUNNING:
            assert table[i + 1, :5].tolist() == [1, row.length + len(run), run[-1], row.output_len + len(run), row.max_output]
        else:
            assert table[i + 1, :5].tolist() == [0, row.length, 7, row.output_len, row.max_output]
        assert table[i + 1, 5:].tolist() == packed(rows)[i + 1, 5:].tolist()
    assert not table[0, :9].any(), "scratch stays dead"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(rows(), st.lists(st.integers(-1, 6), min_size=1, max_size=6)), min_size=1, max_size=5))
def test_a_run_is_trimmed_at_the_first_stop_limit_or_broken_token(cases: list[tuple[Row, list[int]]]) -> None:
    table, width = packed([row for row, _ in cases])[1:], max(len(run) for _, run in cases)
    tokens = torch.tensor([run + [-1] * (width - len(run)) for _, run in cases], dtype=torch.int32)
    accepted = torch.tensor([len(run) - 1 for _, run in cases], dtype=torch.int32)
    kept, finish = kept_and_finish(tokens, accepted, table[:, 0] > 0, table[:, 3], table[:, 4], table[:, 1], MAX_LENGTH, table[:, 9:])
    assert kept.dtype == finish.dtype == torch.int32
    for i, (row, run) in enumerate(cases):
        assert (int(kept[i]), int(finish[i])) == (trim(row, run) if row.alive else (0, RUNNING))


def test_a_stop_id_wins_over_a_limit_on_the_same_token() -> None:
    row = Row(alive=True, length=MAX_LENGTH - 3, output_len=1, max_output=3, stops=[5])
    assert trim(row, [4, 5]) == (2, STOP) and trim(row, [4, 4]) == (2, LENGTH)
    check_step([row], [[4, 5]], [1], [False], 2, y=torch.tensor([[4, 5]]).int(), drafted=torch.tensor([[4]]).int())


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(rows(), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_a_chain_is_accepted_up_to_the_first_draft_that_differs(data: st.DataObject, batch: list[Row], steps: int, ragged: bool) -> None:
    y = [[data.draw(st.integers(-1, 4)) for _ in range(steps + 1)] for _ in batch]
    drafted = [[max(0, t) if data.draw(st.booleans()) else data.draw(st.integers(0, 4)) for t in row[:steps]] for row in y]
    exists = [data.draw(st.integers(0, steps)) if ragged else steps for _ in batch]
    runs, depths, children = [], [], []
    for row, law, draft, have in zip(batch, y, drafted, exists, strict=True):
        depth = min(have, MAX_LENGTH - 1 - row.length)
        hits = 0
        while hits < depth and draft[hits] == law[hits]:
            hits += 1
        runs.append(law[: hits + 1])
        depths.append(depth)
        children.append(hits < depth)
    valid = torch.tensor([[n < have for n in range(steps)] for have in exists]) if ragged else None
    check_step(batch, runs, depths, children, steps + 1, y=torch.tensor(y).int(), drafted=torch.tensor(drafted).int(), valid=valid)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(rows(), min_size=1, max_size=4))
def test_plain_steps_commit_one_token(data: st.DataObject, batch: list[Row]) -> None:
    y = [[data.draw(st.integers(-1, 4))] for _ in batch]
    check_step(batch, y, [0] * len(batch), [False] * len(batch), 1, y=torch.tensor(y).int())


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(parents, tokens) of a tree: node n + 1 hangs from parents[n] <= n; siblings have different tokens."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(1, 9))):
        parent = draw(st.integers(0, node))
        taken = {t for p, t in zip(parents, tokens, strict=True) if p == parent}
        free = [t for t in range(5) if t not in taken]
        parents.append(parent if free else 0)
        tokens.append(draw(st.sampled_from(free)) if free else 9 + node)
    return parents, tokens


def linked(parents: list[int]) -> tuple[list[list[int]], list[int], list[int]]:
    """(path to each node, first child, next sibling), root included."""
    nodes = len(parents) + 1
    path: list[list[int]] = [[0]]
    for node in range(1, nodes):
        path.append([*path[parents[node - 1]], node])
    of = {p: [n for n in range(1, nodes) if parents[n - 1] == p] for p in range(nodes)}
    first = [of[n][0] if of[n] else -1 for n in range(nodes)]
    after = [-1] * nodes
    for siblings in of.values():
        for a, b in pairwise(siblings):
            after[a] = b
    return path, first, after


@settings(max_examples=120, deadline=None)
@given(st.data(), st.lists(st.tuples(rows(), trees()), min_size=1, max_size=4))
def test_a_tree_is_walked_along_the_children_that_equal_the_law(data: st.DataObject, cases: list[tuple[Row, tuple[list[int], list[int]]]]) -> None:
    nodes = max(len(tokens) for _, (_, tokens) in cases) + 1
    built = []
    for _, (parents, tokens) in cases:
        more = nodes - 1 - len(tokens)  # rows of one step have equally many nodes: spare ones hang from the root with tokens nobody draws
        built.append((parents + [0] * more, tokens + list(range(20, 20 + more))))
    paths, firsts, afters = zip(*(linked(parents) for parents, _ in built), strict=True)
    width = max(len(p) for path in paths for p in path)
    y = [[data.draw(st.integers(-1, 4)) for _ in range(nodes)] for _ in cases]
    runs, depths, children, walked = [], [], [], []
    for (row, _), (parents, tokens), law, path in zip(cases, built, y, paths, strict=True):
        room = MAX_LENGTH - 1 - row.length
        node, run, way = 0, [law[0]], [0]
        while len(run) <= room:
            found = [n for n in range(1, nodes) if parents[n - 1] == node and tokens[n - 1] == law[node]]
            if not found:
                break
            node = found[0]
            run.append(law[node])
            way.append(node)
        runs.append(run)
        walked.append(way + [-1] * (width - len(way)))
        depths.append(min(room, max(len(p) - 1 for p in path)))
        children.append(node in parents and len(run) - 1 < room)
    padded = [[p + [-1] * (width - len(p)) for p in path] for path in paths]
    draft = Draft(
        torch.tensor([tokens for _, tokens in built]).int(),
        torch.tensor([parents for parents, _ in built]).int(),
        torch.tensor(padded).int(),
        torch.tensor([[len(p) - 1 for p in path] for path in paths]).int(),
        torch.tensor(firsts).int(),
        torch.tensor(afters).int(),
    )
    law = torch.tensor(y).int()
    path, accepted, child = reference_tree.tree_walk(draft.token_ids, draft.first_child, draft.next_sibling, law, width - 1)  # type: ignore[arg-type]
    walk = (path, accepted, child, draft_depth(draft))
    table = packed([row for row, _ in cases])
    slots = torch.arange(1, len(cases) + 1) * (table[1:, 0] > 0)
    result = torch.zeros(len(cases), RESULT_COLUMNS + width, dtype=torch.int32)
    *_, final = finish_step(law, slots, table, MAX_LENGTH, result, walk=walk)
    assert final is not None
    for i, (row, _) in enumerate(cases):
        if row.alive:
            assert final[i].tolist() == walked[i]
    check_step([row for row, _ in cases], runs, depths, children, width, y=law, walk=walk)
