"""HumanEval: complete a Python function, judged by its unit tests (Chen et al. 2021, "Evaluating large language models trained on code").

Boundary: code is run only with ``task.execute_code=true``, each answer in a process of its own with limits on time, memory and file size. That guards
against accidents, not against malice: run it in a container. Layouts: ``task_id``/``prompt``/``test``/``entry_point``, and ``turns`` (no score).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specgen.data.tasks.base import Task

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 2 << 30
FILE_LIMIT_BYTES = 16 << 20

# Set the limits inside the child (a pre-exec hook is unsafe beside threads), run the program, and only then say that its end was reached:
# a program that calls exit(0) has not passed.
_RUNNER = """
import sys
path, token, memory, seconds, size = sys.argv[1:]
try:
    import resource
    for name, value in (("RLIMIT_AS", memory), ("RLIMIT_CPU", seconds), ("RLIMIT_FSIZE", size), ("RLIMIT_CORE", 0)):
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
except ImportError:
    pass
with open(path, encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
sys.stdout.write("\\n" + token)
sys.stdout.flush()
"""

_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def run_python(program: str, *, time_limit_s: float = TIME_LIMIT_S) -> bool:
    """True when ``program`` runs to its end within the limits."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="specgen-") as folder:
        path = Path(folder, "answer.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        limits = (str(MEMORY_LIMIT_BYTES), str(int(time_limit_s) + 1), str(FILE_LIMIT_BYTES))
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, str(path), token, *limits],
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # The answer may have left children of its own; they share the session.
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    return process.returncode == 0 and output.decode("utf-8", "replace").endswith(token)


class HumanEval(Task):
    """pass@1: the mean over samples of whether all tests of a problem pass."""

    name = "humaneval"
    metric = "pass@1"
    stop = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\n@", "\n```")
    hub = MappingProxyType({"path": "openai/openai_humaneval", "split": "test"})
    judged_by = "test and entry_point"

    @property
    def scoring(self) -> bool:
        """Only where answers may be run."""
        return self.config.execute_code

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The prompt is kept a second time as ``stub``: under a chat template the model sees more than the code to be completed."""
        prepared = super().prepare(fields)
        if isinstance(prepared.get("prompt"), str) and "entry_point" in prepared:
            prepared["stub"] = prepared["prompt"]
        return prepared

    def extract(self, text: str) -> str | None:
        """The last fenced code block that defines something, else the last block, else the text as it is."""
        blocks = _FENCE.findall(text)
        if blocks:
            return next((block for block in reversed(blocks) if "def " in block), blocks[-1])
        return text if text.strip() else None

    def program(self, row: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
        """Answer, tests and the call that runs them; None when the row lacks tests."""
        test, entry = meta.get("test"), meta.get("entry_point")
        if not isinstance(test, str) or not isinstance(entry, str):
            return None
        stub = meta.get("stub")
        stub = stub if isinstance(stub, str) else str(row.get("prompt") or "")
        answer = self.extract(str(row.get("text") or "")) or ""
        whole = re.search(rf"^def {re.escape(entry)}\b", answer, re.MULTILINE) is not None
        # A complete function may lean on the stub's imports and helpers, so the stub's lines above its own function come first.
        head = stub[: match.start()] if (match := re.search(rf"^def {re.escape(entry)}\b", stub, re.MULTILINE)) else ""
        code = f"{head}\n{answer}" if whole else stub + answer
        return f"{code}\n\n{test}\n\ncheck({entry})\n"

    def score(self, row: Mapping[str, Any], meta: Mapping[str, Any]) -> float | None:
        """1 when the tests pass; None without tests, or while running code is not allowed."""
        program = self.program(row, meta)
        if program is None or not self.config.execute_code:
            return None
        return float(run_python(program))


TASK = HumanEval
