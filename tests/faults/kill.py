"""Kills jobs at random moments, tears what they left, goes on with them, and compares every row with an uninterrupted run.

    python -m tests.faults.kill --kills 200

Boundary: real jobs in processes of their own, on a toy model; a kill is SIGKILL. After a kill the last line may be cut at any byte, or followed by
bytes that never were a row, as a power failure leaves it. At the end of each run the (index, sample), ids, tokens, texts, errors and meta must be
those of the uninterrupted run, once each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.jobs import ROOT, rows_of, same, stats_of, toy, write_lines

WORDS = ("w10", "w30", "w40", "w24", "w05", "w31", "w41", "w12")


def make_input(path: Path, rows: int, seed: int) -> str:
    """Short rows of every kind: texts, token ids, two samples, two turns, and about one in fifty that cannot run."""
    draw = random.Random(seed)
    lines: list[Any] = []
    for i in range(rows):
        word, kind = draw.choice(WORDS), draw.random()
        row: dict[str, Any] = {"id": f"r{i}", "max_tokens": draw.randint(1, 5), "note": "\u2028" * draw.randint(0, 2)}
        if kind < 0.6:
            lines.append(row | {"prompt": word})
        elif kind < 0.85:
            lines.append(row | {"token_ids": [1, int(word[1:])]})
        elif kind < 0.92:
            lines.append(row | {"prompt": word, "n": 2, "temperature": 1.0})
        elif kind < 0.98:
            lines.append(row | {"turns": [word, draw.choice(WORDS)]})
        else:
            lines.append("{broken" if kind < 0.99 else row | {"prompt": None})
    return write_lines(path, lines)


class Jobs:
    """Starts jobs and kills them: in forks of a prepared process, or (``real``) as ``python -m specgen``."""

    def __init__(self, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._environment = environment
        command = [sys.executable, "-m", "tests.faults.zygote"]
        self._zygote = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._line() == "ready"

    def _line(self, timeout: float | None = None) -> str | None:
        """A line of the prepared process; None when none came in time. It writes whole lines, at most one of which waits."""
        assert self._zygote.stdout is not None
        if timeout is not None and not select.select([self._zygote.stdout], [], [], timeout)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._zygote.stdout.fileno(), 1)
            assert byte, "the prepared process has ended"
            line += byte
        return line.decode().strip()

    def run(self, arguments: list[str], kill_after: float | None = None, real: bool = False) -> int:
        """The exit status; -9 when the job was still running after ``kill_after`` seconds and was killed."""
        if real:
            with self._log.open("ab") as log:
                command = [sys.executable, "-m", "specgen", *arguments]
                child = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
            try:
                return child.wait(kill_after)
            except subprocess.TimeoutExpired:
                child.kill()
                return child.wait()
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps([str(self._log), *arguments]).encode() + b"\n")
        self._zygote.stdin.flush()
        child_id = int(self._line() or 0)
        status = self._line(kill_after)
        if status is None:
            os.kill(child_id, signal.SIGKILL)
            status = self._line()
        return int(status or 0)

    def close(self) -> None:
        """End the prepared process."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        assert self._zygote.stdout is not None
        self._zygote.stdout.close()


@dataclass
class Result:
    """What was done. ``moments``: kills by what the job was doing; ``torn``: tails made by kind."""

    kills: int = 0
    runs: int = 0
    rows_checked: int = 0
    moments: Counter[str] = field(default_factory=Counter)
    torn: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        moments = ", ".join(f"{count} {name}" for name, count in sorted(self.moments.items()))
        torn = ", ".join(f"{count} {name}" for name, count in sorted(self.torn.items()))
        return (
            f"{self.kills} kills in {self.runs} runs ({moments}; tails: {torn}): {self.rows_checked} rows compared, none lost, doubled or changed, "
            f"{self.seconds:.0f} s"
        )


def tear(folder: Path, draw: random.Random) -> str:
    """Leave the last line as a power failure may; returns what was done."""
    path = folder / "generations.jsonl"
    data = path.read_bytes() if path.exists() else b""
    kind = draw.random()
    if not data or kind < 0.4:
        return "left as killed"
    last = len(data) - (data.rstrip(b"\n").rfind(b"\n") + 1)
    if kind < 0.9:
        path.write_bytes(data[: len(data) - draw.randint(1, last)])
        return "cut"
    path.write_bytes(data + draw.choice([b"\x00" * 40, b'{"id":"r1","samp', b"\xff\xfe", data[-last : -last // 2]]))
    return "garbage added"


def moment(folder: Path, total: int) -> str:
    """What a killed job was doing, judged from its folder."""
    path = folder / "generations.jsonl"
    parts = folder / "generations"
    if not path.exists() and not parts.exists():
        return "before the first row"
    if parts.exists():
        return "generating (parquet)"
    return "generating" if path.read_bytes().count(b"\n") < total else "reporting"


def campaign(
    kills: int, rows: int = 5000, seed: int = 0, longest: float | None = None, real_share: float = 0.1, parquet_share: float = 0.25, say: Any = None
) -> Result:
    """Run until ``kills`` jobs have been killed. ``longest``: upper bound of a start's time before the kill, in seconds (None: what a run takes).

    Raises AssertionError at the first row that is lost, doubled or changed, naming the folder, which is kept.
    """
    draw, result, begun = random.Random(seed), Result(), time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="kills-"))
    jobs = Jobs(home / "log")
    common = [*toy(check=False), "data=jsonl", f"data.path={make_input(home / 'in.jsonl', rows, seed)}", "engine.max_batch=64"]
    try:
        timed = time.monotonic()
        status = jobs.run([f"output.dir={home / 'whole'}", *common])
        longest = longest or time.monotonic() - timed
        assert status == 3, f"the uninterrupted run ended with {status}; see {home / 'log'}"
        expected = same(rows_of(home / "whole"))
        while result.kills < kills:
            folder = home / f"run{result.runs}"
            form = "parquet" if draw.random() < parquet_share else "jsonl"
            killed_before = result.kills
            fresh = [f"output.dir={folder}", *common, f"output.format={form}", f"output.fsync_seconds={draw.choice([0, 5])}"]
            arguments, status = fresh, -9
            while status == -9 and result.kills < kills:
                delay = draw.uniform(0, longest)
                real = draw.random() < real_share
                status = jobs.run(arguments, delay + 2.0 * real, real)
                if status == -9:
                    result.kills += 1
                    result.moments[moment(folder, len(expected))] += 1
                    result.torn[tear(folder, draw)] += form == "jsonl"
                    resumable = (folder / ".hydra").exists()
                    if not resumable:  # killed before the job was accepted: there is nothing to go on with
                        shutil.rmtree(folder, ignore_errors=True)
                    arguments = [f"resume={folder}"] if resumable else fresh
            if status == -9:
                status = jobs.run(arguments)
            assert status == 3, f"{folder}: ended with {status}; see {home / 'log'}"
            found = same(rows_of(folder))
            assert found.keys() == expected.keys(), f"{folder}: {len(found)} rows instead of {len(expected)}"
            changed = [key for key in expected if found[key] != expected[key]]
            assert not changed, f"{folder}: row {changed[0]} is {found[changed[0]]} and should be {expected[changed[0]]}"
            stats = stats_of(folder)
            assert (stats["samples"], stats["complete"]) == (len(expected), True), folder
            result.runs += 1
            result.rows_checked += len(found)
            shutil.rmtree(folder)
            if say is not None:
                say(f"run {result.runs}: {result.kills - killed_before} kills, {len(found)} rows equal; {result.kills} of {kills} kills")
    finally:
        jobs.close()
    result.seconds = time.monotonic() - begun
    shutil.rmtree(home)
    return result


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(campaign(options.kills, options.rows, options.seed, say=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
