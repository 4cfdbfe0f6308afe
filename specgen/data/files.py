"""Bytes of local input files: opened by content, split into lines, fingerprinted.

Boundary: knows nothing of JSON, rows or tokenizers. Every fault of a whole file (missing, truncated, mislabelled) is a ``DataError`` naming it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specgen.errors import ConfigError, DataError

CHUNK = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PARQUET_MAGIC = b"PAR1"
UTF8_BOM = b"\xef\xbb\xbf"
FOREIGN_BOMS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\x00\x00\xfe\xff", "UTF-32"))

# What a file may be that is no text, by its first bytes; none of them can begin a line of JSON or a header.
FOREIGN: tuple[tuple[bytes | tuple[bytes, ...], str], ...] = (
    (b"PK\x03\x04", "a zip archive or a spreadsheet"),
    (tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"ARROW1\x00\x00", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"SQLite format 3\x00", "a database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\xd0\xcf\x11\xe0", "a spreadsheet"),
    (b"%PDF-", "a PDF document"),
)
HEAD = 16  # bytes that tell


def input_files(path: str | None, suffixes: tuple[str, ...], source: str) -> list[Path]:
    """The files behind ``data.path``: the file itself, or the files of a folder that end in one of ``suffixes``, by name.

    Raises ConfigError when no path is set, DataError when nothing is there.
    """
    if not path:
        raise ConfigError(f"data={source} needs data.path=FILE")
    root = Path(path).expanduser()
    if root.is_dir():
        names = sorted(p for p in root.iterdir() if p.is_file() and p.name.endswith(suffixes) and p.name[0] not in "._")
        if not names:
            raise DataError(f"{path}: the folder holds no file named *{', *'.join(suffixes)}; name a file with data.path")
        return names
    if not root.exists():
        raise DataError(f"{path}: no such file or folder; check data.path")
    return [root]


def below(path: str, suffixes: tuple[str, ...]) -> Path | None:
    """A file that ``input_files`` leaves out of the folder ``path`` because it lies deeper; None where there is none, or for a file."""
    root = Path(path).expanduser()
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        found = [name for name in sorted(names) if name.endswith(suffixes) and name[0] not in "._"]
        if found and Path(place) != root:
            return Path(place, found[0])
    return None


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error


def chunks(path: Path) -> Iterator[bytes]:
    """Decompressed bytes of one file. The compression is read from the first bytes; a name that promises another one is an error."""
    with _open(path) as file:
        head = file.peek(4)[:4]  # type: ignore[attr-defined]
        if head[:2] == GZIP_MAGIC:
            yield from _gzip_chunks(path, file)
        elif head == ZSTD_MAGIC:
            yield from _zstd_chunks(path, file)
        else:
            for suffix, kind in ((".gz", "gzip"), (".zst", "zstd")):
                if path.name.endswith(suffix) and head:
                    raise DataError(f"{path}: is named {suffix} but is not {kind}; rename it or compress it again")
            while chunk := file.read(CHUNK):
                yield chunk


def _gzip_chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except EOFError as error:
        raise DataError(f"{path}: the gzip archive is truncated; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip archive is damaged ({error}); copy or download it again") from error


def _zstd_chunks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except OSError as error:
        state = "truncated" if "runcated" in str(error) else f"damaged ({error})"
        raise DataError(f"{path}: the zstd archive is {state}; copy or download it again") from error


def lines(path: Path) -> Iterator[bytes]:
    """Lines of a file without their ``\\n``, split nowhere else (U+2028, U+0085 and bare ``\\r`` stay); a leading UTF-8 BOM is removed."""
    pending: list[bytes] = []
    for chunk in _without_bom(path):
        parts = chunk.split(b"\n")
        if len(parts) == 1:
            pending.append(chunk)
            continue
        pending.append(parts[0])
        yield b"".join(pending)
        yield from parts[1:-1]
        pending = [parts[-1]]
    if last := b"".join(pending):
        yield last


def _without_bom(path: Path) -> Iterator[bytes]:
    stream = chunks(path)
    head = b""
    for chunk in stream:
        head += chunk
        if len(head) >= HEAD:
            break
    if head[:4] == PARQUET_MAGIC:
        raise DataError(f"{path}: is a Parquet file; read it with data=parquet")
    for magic, name in FOREIGN:
        if head.startswith(magic):
            raise DataError(f"{path}: is {name}; unpack it or save it as JSON Lines, CSV or Parquet (.gz and .zst are read as they are)")
    for bom, name in FOREIGN_BOMS:
        if head.startswith(bom):
            raise DataError(f"{path}: is {name} text; save it as UTF-8")
    yield head.removeprefix(UTF8_BOM)
    yield from stream


def check_head(path: Path, source: str) -> None:
    """Refuse a file that ``data=source`` cannot read, by its first bytes; what cannot be read twice (a pipe) is left alone. Raises DataError."""
    if not path.is_file():
        return
    if source != "parquet":
        next(_without_bom(path), None)
        return
    with _open(path) as file:
        if file.read(4) != PARQUET_MAGIC:
            raise DataError(f"{path}: is not a Parquet file; use data=jsonl or data=csv for text, or name another file with data.path")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of the first and last MiB; ``rereadable`` is false for a pipe, which cannot be read twice."""
    if not path.is_file():
        return {"path": str(path), "rereadable": False}
    size = path.stat().st_size
    with _open(path) as file:
        first = hashlib.sha256(file.read(CHUNK)).hexdigest()
        file.seek(max(0, size - CHUNK), os.SEEK_SET)
        last = hashlib.sha256(file.read(CHUNK)).hexdigest()
    return {"path": str(path), "size": size, "sha256_first_mib": first, "sha256_last_mib": last, "rereadable": True}
