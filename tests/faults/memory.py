"""Peak memory of a job's parts against the number of rows.

    python -m tests.faults.memory --rows 2000000

Boundary: the model is left out (its memory does not depend on the rows, and its time does): prompts are read, tokenised and checked as in a job, each
is answered by a stand-in of eight tokens, and the rows are written, read back for the statistics, and opened for a resume. Each part runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.jobs import ROOT
from tests.toys import toy_folder

SMALL_ROWS = 2000
WORDS = " ".join(f"w{i:02d}" for i in range(4, 44))


def make_input(path: Path, rows: int, text: bool) -> None:
    """Rows of 41 tokens with an id and one more field, about 260 bytes each; as text, or as token ids, which need no tokenizer."""
    content = f'"prompt": "{WORDS}"' if text else f'"token_ids": {[1, *range(4, 44)]}'
    with path.open("w") as file:
        for i in range(rows):
            file.write(f'{{"id": "row-{i}", {content}, "source": "page {i % 1000} of a book"}}\n')


def stream(folder: Path, tokenizer: str | None) -> int:
    """Read every prompt and write its stand-in row; the number of rows."""
    from specgen.config import DataConfig, SamplingConfig
    from specgen.data.prompts import load_prompts
    from specgen.data.sources import count_rows
    from specgen.data.tokenizer import load_tokenizer
    from specgen.report.writer import RunWriter
    from specgen.types import Completion, Counts

    data = DataConfig(source="jsonl", path=str(folder / "in.jsonl"))
    total = count_rows(data)
    counts = Counts(1, 2, 0, [2, 2, 2], [2, 2, 1], [2, 2, 1], 7, 0)
    with RunWriter(folder / "run") as writer:
        for prompt in load_prompts(data, SamplingConfig(), tokenizer and load_tokenizer(tokenizer), max_length=4096, vocab_size=48):
            assert prompt.error is None and len(prompt.token_ids) == 41
            ids = prompt.token_ids[:8]
            writer.append(Completion(prompt.id, 0, prompt.index, prompt.text, "eight words", ids, "length", None, None, 41, 8, counts, prompt.meta))
        assert total is None or total == writer.rows
        return writer.rows


def statistics(folder: Path, tokenizer: str | None) -> int:
    """Compute the statistics of the written rows."""
    from specgen.report.stats import compute_stats, load_rows

    return int(compute_stats(load_rows(folder / "run"))["samples"])


def reopen(folder: Path, tokenizer: str | None) -> int:
    """What a resume holds of the finished rows."""
    from specgen.report.resume import open_for_resume

    return len(open_for_resume(folder / "run"))


PARTS: dict[str, Callable[[Path, str | None], int]] = {"stream": stream, "statistics": statistics, "reopen": reopen}


def measure(part: str, folder: Path, text: bool) -> tuple[int, float, float]:
    """(rows, peak resident MiB, seconds) of one part in a process of its own."""
    command = [sys.executable, "-m", "tests.faults.memory", "--part", part, "--folder", str(folder)]
    command += ["--tokenizer", str(toy_folder() / "target")] if text else []
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    out = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout
    rows, peak, seconds = json.loads(out.splitlines()[-1])
    return rows, peak, seconds


def growth(rows: int, parts: Sequence[str] = tuple(PARTS), text: bool = True) -> dict[str, tuple[float, float, float]]:
    """Per part, in order: peak MiB at 2,000 rows, at ``rows`` rows, and the seconds of the latter."""
    home = Path(tempfile.mkdtemp(prefix="memory-"))
    try:
        found: dict[str, list[float]] = {part: [] for part in parts}
        for count in (SMALL_ROWS, rows):
            folder = home / str(count)
            folder.mkdir()
            make_input(folder / "in.jsonl", count, text)
            for part in parts:
                done, peak, seconds = measure(part, folder, text)
                assert done == count, f"{part}: {done} rows instead of {count}"
                found[part] += [peak, seconds]
        return {part: (small, large, seconds) for part, (small, _, large, seconds) in found.items()}
    finally:
        shutil.rmtree(home)


def main() -> None:
    """The long form, or one part in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokenizer")
    options = parser.parse_args()
    if options.part:
        begun = time.monotonic()
        rows = PARTS[options.part](options.folder, options.tokenizer)
        print(json.dumps([rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.monotonic() - begun]))
        return
    for part, (small, large, seconds) in growth(options.rows).items():
        print(f"{part}: {small:.0f} MiB at {SMALL_ROWS:,} rows, {large:.0f} MiB at {options.rows:,} rows (+{large - small:.0f}), {seconds:.0f} s")


if __name__ == "__main__":
    main()
