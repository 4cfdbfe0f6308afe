"""MT-Bench: 80 two-turn questions in eight categories (Zheng et al. 2023, "Judging LLM-as-a-judge with MT-Bench and Chatbot Arena").

Boundary: groups, no score; judging needs another model. Layouts: ``question_id``/``category``/``turns``, and ``prompt_id`` with a list as ``prompt``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from specgen.data.tasks.base import Task

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class MtBench(Task):
    """Groups by category."""

    name = "mt_bench"
    hub = MappingProxyType({"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"})

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The turns of the question, answered one after another."""
        prepared = super().prepare(fields)
        if prepared.get("id") is None and prepared.get("prompt_id") is not None:
            prepared["id"] = prepared.pop("prompt_id")
        if isinstance(prepared.get("prompt"), list):
            prepared["turns"] = prepared.pop("prompt")
        if prepared.get("turns") is None:
            raise ValueError(f"field 'turns' is missing (task={self.name} reads question_id, category, turns)")
        return prepared


TASK = MtBench
