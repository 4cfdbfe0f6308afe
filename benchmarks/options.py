"""Command lines of the benchmarks: a parser that says a mistake in one line, and the kinds of values they take.

Boundary: text in, values out; which options there are is each benchmark's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """A parser whose help keeps the lines of ``description``; a mistake is one line, and exit code 2."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End the program with the message."""
        self.exit(2, f"{self.prog}: {message}\n")


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> list[int]:
    """Such integers separated by commas."""
    return [count(number) for number in text.split(",")]


def amount(text: str) -> float:
    """A number above 0 and below a day in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 (and below 86400)")
    return number


def device(text: str) -> str:
    """``cpu`` or a CUDA device that is here, with its number."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = torch.device("meta")
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda nor cuda:N")
    if (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"there is no {text} here; --device cpu --dtype float32 runs on the CPU")
    return f"cuda:{found.index or 0}"


def output(text: str) -> Path:
    """A file in a folder that is there."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that is there")
    return Path(text)
