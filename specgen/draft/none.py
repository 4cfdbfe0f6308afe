"""Plain decoding: a draft of length zero, on the same engine.

Boundary: nothing to load, nothing to follow.
"""

from specgen.draft.base import Drafter


class NoDraft(Drafter):
    """Proposes nothing; every step commits the target's own next token."""

    method = "none"

    def __init__(self) -> None:
        super().__init__(topk=1, num_steps=0, num_draft_tokens=1)

    def slots(self, num_steps: int) -> int:
        """No KV of its own."""
        return 0
