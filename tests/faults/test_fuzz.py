"""The short form of ``python -m tests.faults.fuzz``."""

from __future__ import annotations

import pytest

from tests.faults.fuzz import fuzz


@pytest.mark.parametrize(("name", "examples"), [("rows", 300), ("settings", 300), ("overrides", 40)])
def test_any_input_is_run_or_refused_in_one_line(name: str, examples: int) -> None:
    fuzz(name, examples, number=1)
