"""The lossless check of a run: from its written rows and its prompts to turns that the engine can replay.

Boundary: draws rows and rebuilds their requests; ``engine.lossless`` replays and judges them. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

from specgen.config import Config, DataConfig
from specgen.data.prompts import next_turn
from specgen.data.tasks.base import Task
from specgen.engine.engine import Engine
from specgen.engine.lossless import Turn, check_rows, draw_rows
from specgen.job import without_draft
from specgen.loading import Loaded, make_engine, prompts_of
from specgen.types import Prompt, Request

Row = Mapping[str, Any]


def verify_lossless(
    config: Config,
    data: DataConfig,
    loaded: Loaded,
    task: Task | None,
    rows: Iterable[Row],
    *,
    nodes: int,
    batch: int,
    watched: Callable[[Engine], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """``stats.lossless``: ``config.verify_lossless`` of the finished ``rows``, drawn by the job's seed, replayed one at a time without a draft.

    nodes, batch: draft nodes and rows of the run's verify steps. ``watched`` is entered with the replaying engine. The run's own engine must be
    closed: the replay takes memory for one row.
    """
    found = {(row["index"], row["sample"]): row for row in rows if row["finish_reason"] != "error"}
    wanted = {key: found[key] for key in draw_rows(list(found), config.verify_lossless, config.sampling.seed)}
    plain = without_draft(config)
    plain = replace(plain, data=data, engine=replace(config.engine, max_batch=1, overlap="0", cuda_graphs="off"))
    turns = list(_turns(plain, data, loaded, task, wanted))
    with closing(make_engine(plain, loaded)) as engine, watched(engine):
        return check_rows(turns, engine, nodes=nodes, batch=batch)


def _turns(config: Config, data: DataConfig, loaded: Loaded, task: Task | None, wanted: Mapping[tuple[int, int], Row]) -> Iterator[list[Turn]]:
    """The wanted rows as turns, in input order."""
    left = set(wanted)
    for prompt in prompts_of(config, data, loaded, task) if left else ():
        for sample in sorted(sample for index, sample in left if index == prompt.index):
            left.discard((prompt.index, sample))
            yield turns_of(prompt, wanted[prompt.index, sample], config, loaded)
        if not left:
            return


def turns_of(prompt: Prompt, row: Row, config: Config, loaded: Loaded) -> list[Turn]:
    """One row's turns: each with the prompt it had in the run, its noise running on from the turn before."""
    sampling, sample = prompt.sampling, row["sample"]
    if row.get("turns") is None:
        return [Turn(Request(prompt, sampling, sample), tuple(row["token_ids"]), row["finish_reason"])]
    found: list[Turn] = []
    written = 0
    following: Prompt | None = prompt
    for turn in row["turns"]:
        assert following is not None and following.error is None, "a row's turns can be asked again"
        found.append(Turn(Request(following, sampling, sample, written), tuple(turn["token_ids"]), turn["finish_reason"]))
        written += len(turn["token_ids"])
        vocab, limit = loaded.target.vocab_size, loaded.target.max_length
        following = next_turn(following, turn["text"], loaded.tokenizer, config.data, max_length=limit, vocab_size=vocab)
    return found
