"""Reads a job's weight files into the page cache while the process is still importing torch and transformers, which takes seconds and little disk.

Boundary: local folders and the page cache; no torch, and nothing that can fail a job. Where the files are larger than the memory that is free,
nothing happens.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from specgen.config import Config

PIECE = 64 << 20  # read at a time: the interpreter is held by imports, and each return to it may wait for milliseconds
PROBES = 4  # bytes of a piece that are looked at to see whether it is cached already
SUFFIXES = (".safetensors", ".bin")


def weight_files(config: Config) -> list[Path]:
    """The files of target and drafter that are local and will be read, largest part of the job's start when they are not cached."""
    folders = [config.model.path] if config.model.source == "hf" and config.model.load_format != "dummy" else []
    folders += [config.draft.path] if config.draft.load_format != "dummy" else []
    found = [path for folder in folders if folder for path in sorted(Path(folder).expanduser().glob("*")) if path.suffix in SUFFIXES]
    return [path for path in found if path.is_file()]


def read_ahead(config: Config) -> threading.Thread | None:
    """Start reading, beside whatever follows; None where there is nothing to read."""
    files = weight_files(config)
    try:
        size = sum(path.stat().st_size for path in files)
    except OSError:
        return None
    if not files or not hasattr(os, "preadv") or size > (available_memory() or 0):
        return None
    thread = threading.Thread(target=_read, args=(files,), name="specgen-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    """Read every piece that is not cached, into a buffer that nobody looks at. Advice alone (posix_fadvise, readahead) is cut by the system to a few
    MiB a call."""
    try:
        buffer = bytearray(PIECE)
        for path in files:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for start in range(0, size, PIECE):
                    if not _cached(file.fileno(), start, min(PIECE, size - start)):
                        os.preadv(file.fileno(), [buffer], start)
    except OSError:
        return  # the load itself will say what is wrong with a file


def _cached(number: int, start: int, length: int) -> bool:
    """Whether a piece of a file seems to be in the page cache, by a few bytes of it."""
    byte = bytearray(1)
    try:
        return all(os.preadv(number, [byte], start + i * length // PROBES, os.RWF_NOWAIT) == 1 for i in range(PROBES))
    except OSError:
        return False  # not there, or a file system that cannot tell


def available_memory() -> int | None:
    """Bytes of main memory that the kernel calls available; None where it cannot be told."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    return int(found.group(1)) * 1024 if found else None
