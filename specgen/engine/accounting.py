"""What a retired step says of each of its rows, and how a row is cut or fails.

Boundary: integers of one step's result and the fields of a request; which rows take part is the scheduler's to know.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specgen.kernels.reference_step import ACCEPTED, ALIVE, CHILD_AT_END, DRAFT_DEPTH, FINISH, RESULT_COLUMNS
from specgen.types import Request, step_code

# A step's finish codes, by number (``kernels.reference_step``).
FINISH_NAMES = (None, "stop", "length", "context", "error")
DEAD = -1  # beside them: the row was not alive when the step began
FEW = 8  # rows that plain Python reads sooner than numpy does


def trim(request: Request, n: int) -> None:
    """Keep the first ``n`` output tokens."""
    request.counts.trimmed += len(request.output_ids) - n
    del request.output_ids[n:], request.logprobs[n:]


def fail(request: Request, kind: str, message: str) -> None:
    """End a request with an error row."""
    request.status, request.finish_reason = "finished", "error"
    request.error = {"type": kind, "message": message}


def steps_of(result: np.ndarray) -> Iterable[tuple[int, int, int, list[int]]]:
    """Of each row of a step's result: how it ended (a finish code, or DEAD), drafts accepted, ``step_code``, and the token columns."""
    if len(result) > FEW:
        accepted, ends = result[:, ACCEPTED], np.where(result[:, ALIVE] > 0, result[:, FINISH], DEAD)
        codes = step_code(accepted, result[:, DRAFT_DEPTH], result[:, CHILD_AT_END])
        return zip(ends.tolist(), accepted.tolist(), codes.tolist(), result[:, RESULT_COLUMNS:].tolist(), strict=True)
    return [
        (
            row[FINISH] if row[ALIVE] else DEAD,
            row[ACCEPTED],
            step_code(row[ACCEPTED], row[DRAFT_DEPTH], row[CHILD_AT_END]),
            row[RESULT_COLUMNS:],
        )
        for row in result.tolist()
    ]
