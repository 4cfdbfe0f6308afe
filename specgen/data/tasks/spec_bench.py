"""Spec-Bench: 480 prompts over six subsets, the usual ground for speculative decoding (Xia et al. 2024, "Unlocking efficiency in LLM inference").

Boundary: groups, no score: what is read off it is acceptance and speed per subset. Its first subset is MT-Bench, whose categories are one group here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from specgen.data.tasks.mt_bench import CATEGORIES, MtBench


class SpecBench(MtBench):
    """Groups by subset: mt_bench, translation, summarization, qa, math_reasoning, rag."""

    name = "spec_bench"
    hub = MappingProxyType({})  # published as a file of its repository, not as a dataset

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The category becomes the subset; an MT-Bench category is kept as ``subcategory``."""
        prepared = super().prepare(fields)
        if prepared.get("category") in CATEGORIES:
            prepared["subcategory"] = prepared["category"]
            prepared["category"] = "mt_bench"
        return prepared


TASK = SpecBench
