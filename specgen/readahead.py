"""Asks the system to read a job's weight files while the process is still importing torch and transformers, which takes seconds and no disk.

Boundary: local folders and the page cache; no torch, and nothing that can fail a job. Where the system cannot be asked, or the files are larger than
the memory that is free, nothing happens.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from specgen.config import Config

PIECE = 64 << 20  # asked for at a time
SUFFIXES = (".safetensors", ".bin")


def weight_files(config: Config) -> list[Path]:
    """The files of target and drafter that are local and will be read, largest part of the job's start when they are not cached."""
    folders = [config.model.path] if config.model.source == "hf" and config.model.load_format != "dummy" else []
    folders += [config.draft.path] if config.draft.load_format != "dummy" else []
    found = [path for folder in folders if folder for path in sorted(Path(folder).expanduser().glob("*")) if path.suffix in SUFFIXES]
    return [path for path in found if path.is_file()]


def read_ahead(config: Config) -> threading.Thread | None:
    """Start asking, beside whatever follows; None where there is nothing to ask for."""
    files = weight_files(config)
    try:
        size = sum(path.stat().st_size for path in files)
    except OSError:
        return None
    if not files or not hasattr(os, "posix_fadvise") or size > (available_memory() or 0):
        return None
    thread = threading.Thread(target=_ask, args=(files,), name="specgen-read-ahead", daemon=True)
    thread.start()
    return thread


def _ask(files: list[Path]) -> None:
    try:
        for path in files:
            with path.open("rb") as file:
                for start in range(0, os.fstat(file.fileno()).st_size, PIECE):
                    os.posix_fadvise(file.fileno(), start, PIECE, os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # the load itself will say what is wrong with a file


def available_memory() -> int | None:
    """Bytes of main memory that the kernel calls available; None where it cannot be told."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    return int(found.group(1)) * 1024 if found else None
