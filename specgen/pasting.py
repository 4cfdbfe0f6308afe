"""Settings as a user can paste them into a shell: what they mean once the shell and Hydra's grammar have read them is the text itself.

Boundary: texts only; knows no key and imports nothing of Hydra, whose quoting it follows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

PLAIN = re.compile(r"[A-Za-z0-9_./@%+-]+")  # means itself to the shell and to Hydra


def setting(key: str, text: object) -> str:
    """The shell word that sets ``key`` to ``text``, in quotes only where it needs them."""
    text = str(text)
    return f"{key}={text}" if PLAIN.fullmatch(text) and text != "null" else pasted(key, text)


def pasted(key: str, text: str) -> str:
    """The shell word that sets ``key`` to ``text``: quoted once for Hydra and once for the shell."""
    if not re.search(r'["$`\\!]', text):
        return f'"{key}=\\"{text}\\""' if "'" in text else f'"{key}={quoted(text)}"'
    if not re.search(r"['\"\\]", text):
        return f"'{key}=\"{text}\"'"
    return shlex.quote(f"{key}={quoted(text)}")


def pasted_list(key: str, items: Iterable[str]) -> str:
    """The shell word that sets ``key`` to a list of ``items``, each ``quoted`` already."""
    word = f"{key}=[{','.join(items)}]"
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


def quoted(text: str) -> str:
    """``text`` as a quoted value of Hydra's grammar, in which backslashes before a quote are doubled and others stand for themselves."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"
