"""The short form of ``python -m tests.faults.kill``: no kill costs a row."""

from __future__ import annotations

from tests.faults.kill import campaign


def test_killed_and_torn_runs_end_with_the_rows_of_an_uninterrupted_one() -> None:
    """Three kills of a 400-row job at random moments, each followed by a torn or an untouched last line."""
    result = campaign(kills=3, rows=400, seed=7, real_share=0.0, parquet_share=0.0)
    assert result.kills == 3 and result.runs >= 1
    assert result.rows_checked >= 400 * result.runs
