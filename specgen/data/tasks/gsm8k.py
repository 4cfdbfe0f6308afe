"""GSM8K: grade-school word problems with one number as the answer (Cobbe et al. 2021, "Training verifiers to solve math word problems").

Boundary: text in, number out. Layouts: the published ``question``/``answer``, and ``turns``/``reference``. The score is exact equality of numbers;
where math-verify is installed (the extra ``tasks``) it judges answers that are not plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from specgen.data.tasks.base import Task, references

# A number, not part of a word or of another number: sign or dollar (a blank after a minus makes it a dash), digits with optional groups of three
# (1,000 or the LaTeX 1{,}000), decimals, fraction bar; or a LaTeX fraction.
_SIGN = r"(?:-?\\?\$\s?)?-?"
_PLAIN = rf"{_SIGN}(?:(?:\d{{1,3}}(?:(?:,|\{{,\}})\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)"
_LATEX = r"-?\\[dt]?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}"
_NUMBER = re.compile(rf"(?<![A-Za-z0-9_])(?<!\d\.)(?:{_LATEX}|(?:{_PLAIN})(?:\s*/\s*\d+(?!\.?\d))?)")
_FRACTION = re.compile(r"frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)+", re.IGNORECASE)


def find_number(text: str, *, last: bool) -> str | None:
    """The first or last number written in ``text``, as it stands there. A hyphen that follows a letter or digit is no sign."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return found[-1 if last else 0].strip() if found else None


def to_fraction(text: str) -> Fraction | None:
    """An exact number from its spelling: ``$1,000.50``, ``-3/4``, ``\\frac{1}{2}``, ``12.`` ; None for anything else."""
    latex = _FRACTION.search(text)
    plain = re.sub(r"[\s$,{}\\]", "", text.replace("\u2212", "-")).rstrip(".")
    try:
        if latex:
            value = Fraction(int(latex.group(1)), int(latex.group(2)))
            return -value if plain.startswith("-") else value
        top, _, bottom = plain.partition("/")
        return Fraction(top) / Fraction(bottom or "1")
    except (ValueError, ZeroDivisionError):
        return None


def _boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}``, braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


class Gsm8k(Task):
    """Accuracy of the final number."""

    name = "gsm8k"
    metric = "accuracy"
    stop = ("\nQuestion:",)
    hub = MappingProxyType({"path": "openai/gsm8k", "name": "main", "split": "test"})
    judged_by = "answer or reference, with a number"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """``question`` becomes the raw prompt ``Question: ... Answer:``; rows that already have a prompt or turns are left as they are."""
        prepared = super().prepare(fields)
        if any(prepared.get(form) is not None for form in ("prompt", "messages", "turns", "token_ids")):
            return prepared
        question = prepared.get("question")
        if not isinstance(question, str):
            raise ValueError("field 'question' is missing or not text (task=gsm8k reads question/answer or turns/reference)")
        prepared["prompt"] = f"Question: {question}\nAnswer:"
        return prepared

    def extract(self, text: str) -> str | None:
        """The final number: after ``####``, else in the last ``\\boxed{}``, else after the last "answer is", else the last number of the text."""
        if "####" in text:
            return find_number(text.rsplit("####", 1)[1], last=False)
        boxed = _boxed(text)
        if boxed is not None:
            return find_number(boxed, last=True) or boxed
        parts = _ANSWER_IS.split(text)
        if len(parts) > 1 and (found := find_number(parts[-1], last=False)):
            return found
        return find_number(text, last=True)

    def score(self, row: Mapping[str, Any], meta: Mapping[str, Any]) -> float | None:
        """1 when the final number equals the reference's, else 0; None without a readable reference."""
        reference = meta.get("answer")
        text = str(reference) if isinstance(reference, (str, int, float)) else "\n".join(references(meta)[:1])
        gold = self.extract(text)
        wanted = to_fraction(gold) if gold else None
        if wanted is None:
            return None
        answer = self.extract(str(row.get("text") or ""))
        if answer is None:
            return 0.0
        return 1.0 if to_fraction(answer) == wanted or _verified(str(gold), answer) else 0.0


def _verified(gold: str, answer: str) -> bool:
    """math-verify's judgement of an answer that is not a plain number; False where it is not installed."""
    if to_fraction(answer) is not None:
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    return bool(verify(parse(gold), parse(f"${answer}$")))


TASK = Gsm8k
