"""The short form of ``python -m tests.faults.memory``: what a job holds does not grow with its rows beyond a few bytes each."""

from __future__ import annotations

from tests.faults.memory import growth


def test_reading_and_writing_hold_little_for_a_row() -> None:
    """Two million rows within 200 MB of a small run are 100 bytes a row; the bound leaves room for the allocator's own steps."""
    small, large, _ = growth(20_000, ["stream"], text=False)["stream"]
    assert large - small < 12
