"""Where input rows come from: embedded, jsonl, csv, parquet, hub and random, each as a stream of ``Row``.

Boundary: knows nothing of prompts, templates or sampling.
A row that cannot be parsed is a ``Row`` with ``error``; a file that cannot be read is a DataError.
"""

from __future__ import annotations

import csv
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.config import DataConfig
from specgen.data import files
from specgen.errors import ConfigError, DataError
from specgen.hub import reason, unreachable

log = logging.getLogger("specgen.data")

EMBEDDED_PROMPTS = Path(__file__).resolve().parent.parent / "embedded" / "family" / "prompts.jsonl"
JSONL_SUFFIXES = tuple(stem + end for stem in (".jsonl", ".ndjson", ".json") for end in ("", ".gz", ".zst"))
CSV_SUFFIXES = tuple(stem + end for stem in (".csv", ".tsv") for end in ("", ".gz", ".zst"))
SUFFIXES_OF = {"jsonl": JSONL_SUFFIXES, "csv": CSV_SUFFIXES, "parquet": (".parquet",)}
COUNT_LIMIT_BYTES = 256 << 20
MAX_DEPTH = 100


@dataclass
class Row:
    """One input row before it is understood. ``where`` names file and line.

    ``error`` is set, and ``fields`` empty, for a row that cannot be parsed.
    ``kind``: ``json`` (values as written), ``columns`` (typed columns, where null stands for an absent key) or ``cells`` (CSV: text, empty is null).
    """

    index: int
    where: str
    fields: dict[str, Any]
    error: str | None = None
    kind: str = "json"


def read_rows(data: DataConfig, vocab_size: int) -> Iterator[Row]:
    """Every row of the input, in order, indices from 0, up to ``data.limit``; shards are taken later, since identity spans the whole input.

    Raises ConfigError for an unusable key, DataError for an unusable input, an input without a single row included.
    """
    readers: dict[str, Callable[[], Iterator[Row]]] = {
        "embedded": lambda: jsonl_rows([EMBEDDED_PROMPTS]),
        "jsonl": lambda: jsonl_rows(local_files(data)),
        "csv": lambda: csv_rows(local_files(data)),
        "parquet": lambda: parquet_rows(local_files(data)),
        "hub": lambda: hub_rows(data),
        "random": lambda: random_rows(data, vocab_size),
    }
    if data.source not in readers:
        raise ConfigError(f"data={data.source}: unknown source; one of {', '.join(readers)}")
    count = 0
    for row in readers[data.source]():
        yield row
        count += 1
        if data.limit is not None and count >= data.limit:
            return
    if not count:
        raise DataError(f"{data.path or 'data=' + data.source}: no rows")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice in one object")
    return fields


_decoder = json.JSONDecoder(object_pairs_hook=_object)


def parse_line(raw: bytes) -> dict[str, Any]:
    """One JSON object from one line; ValueError says what is wrong and where in the line. NaN and Infinity are read, as Python writes them."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line)") from error
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ValueError("not readable: an integer of more than 4300 digits") from error
    except RecursionError as error:
        raise ValueError("not readable: objects are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"the row is a JSON {_json_name(value)}, not an object")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        refuse_depth(value)
    return value


def refuse_depth(value: Any) -> None:
    """Raise ValueError when lists and objects stand in each other more than ``MAX_DEPTH`` levels deep, where Python's own stack would end."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item) if isinstance(inner, (dict, list))]
    raise ValueError(f"not readable: objects are nested more than {MAX_DEPTH} levels deep")


def _json_name(value: Any) -> str:
    names = {str: "string", list: "array", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


def jsonl_rows(paths: list[Path]) -> Iterator[Row]:
    """Rows of JSON Lines files, plain or compressed, parsed line by line. Blank lines are skipped and counted in the line numbers."""
    index = 0
    for path in paths:
        first = True
        for number, raw in enumerate(files.lines(path), 1):
            line = raw.strip(b" \t\r\n\v\f")
            if not line:
                continue
            if first:
                _refuse_document(path, line)
                first = False
            where = f"{path} line {number}"
            try:
                yield Row(index, where, parse_line(line))
            except ValueError as error:
                yield Row(index, where, {}, error=str(error))
            index += 1


def _refuse_document(path: Path, line: bytes) -> None:
    """A JSON document spread over lines would be one error a line: say it once instead."""
    if line[:1] == b"[" or line == b"{":
        kind = "array" if line[:1] == b"[" else "document"
        raise DataError(f"{path}: is one JSON {kind}, not JSON Lines; write one object a line (jq -c '.[]' does it for an array)")


def csv_rows(paths: list[Path]) -> Iterator[Row]:
    """Rows of CSV (``.tsv``: tab-separated) files with a header line. Cells are text; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)  # the module's default of 128 KiB a cell would refuse long prompts
    index = 0
    for path in paths:
        reader = csv.reader(_csv_text(path), strict=True, delimiter="\t" if ".tsv" in path.suffixes else ",")
        header = _csv_header(path, reader)
        while True:
            start = reader.line_num + 1
            try:
                cells = next(reader, None)
                fault = _csv_fault(cells, header) if cells else None
            except csv.Error as error:
                cells, fault = [""], f"not valid CSV: {error}"
            if cells is None:
                break
            if not cells:
                continue
            where = f"{path} line {start}"
            fields = {} if fault else {name: cell if cell != "" else None for name, cell in zip(header, cells, strict=True)}
            yield Row(index, where, fields, error=fault, kind="cells")
            index += 1


def _csv_text(path: Path) -> Iterator[str]:
    for raw in files.lines(path):
        # A line that is not UTF-8 must not end the stream: its bytes become lone surrogates, which _csv_fault reports.
        yield raw.decode("utf-8", "surrogateescape") + "\n"


def _csv_header(path: Path, reader: Any) -> list[str]:
    try:
        header: list[str] = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: the header is not valid CSV: {error}") from error
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path} line {reader.line_num}: the header names column {name!r} twice")
    return header


def _csv_fault(cells: list[str], header: list[str]) -> str | None:
    if len(cells) != len(header):
        return f"the row has {len(cells)} cells, the header {len(header)}"
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= c <= "\udcff" for c in cell):
            return f"column {name!r} is not valid UTF-8"
    return None


def parquet_rows(paths: list[Path]) -> Iterator[Row]:
    """Rows of Parquet files, read a small batch at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                for name in names:
                    if names.count(name) > 1:
                        raise DataError(f"{path}: column {name!r} appears twice")
                number = 0
                for batch in file.iter_batches(batch_size=256):
                    for fields in batch.to_pylist():
                        number += 1
                        yield Row(index, f"{path} row {number}", fields, kind="columns")
                        index += 1
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {_one_line(error)}") from error


def hub_rows(data: DataConfig) -> Iterator[Row]:
    """Rows of a Hugging Face dataset (hub id, or a local dataset folder), streamed."""
    rows, split = _open_dataset(data)
    where = f"{data.path} split {split}"
    number = 0
    try:
        for fields in rows:
            number += 1
            yield Row(number - 1, f"{where} row {number}", dict(fields), kind="columns")
    except DataError:
        raise
    except Exception as error:  # datasets wraps network, decoding and schema faults in many types
        raise DataError(f"{where} after row {number}: {_one_line(error)}") from error


def _open_dataset(data: DataConfig) -> tuple[Iterable[dict[str, Any]], str]:
    if not data.path:
        raise ConfigError("data=hub needs data.path=DATASET (a hub id or a dataset folder)")
    import datasets

    folder = Path(data.path).expanduser()
    saved = any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        if saved and not any(folder.glob("*.py")) and (list(folder.glob("*.arrow")) or (folder / "dataset_dict.json").exists()):
            found: Any = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(data.path, data.name, split=data.split, revision=data.revision, streaming=True)
    except Exception as error:  # many types: not found, gated, no network, ambiguous configuration name
        why = reason(error)
        known = why if not why.startswith(type(error).__name__) else f"{_one_line(error)} (see data.name, data.split, data.revision)"
        raise DataError(f"{data.path}: the dataset cannot be opened: {known}") from error
    split = data.split
    if isinstance(found, dict):
        names = list(found)
        if split is None and len(names) == 1:
            split = names[0]
        if split not in names:
            raise DataError(f"{data.path}: choose a split with data.split={names[0]} (there are {', '.join(names)})")
        found = found[split]
    if isinstance(found, datasets.IterableDataset) and hasattr(found, "decode"):
        found = found.decode(False)  # media columns stay bytes; nothing here looks at them
    return found, str(split or "train")


def check_dataset_folder(data: DataConfig) -> None:
    """Open the local dataset folder of ``data=hub``, which reads no row. Raises DataError for a folder that is none, or without such a split."""
    try:
        _open_dataset(data)
    except DataError as error:
        raise DataError(f"data.path={error}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def random_rows(data: DataConfig, vocab_size: int) -> Iterator[Row]:
    """``data.rows`` prompts of ``data.prompt_tokens`` ids, uniform over the vocabulary; a row depends on ``data.seed`` and its index alone."""
    for key, value in (("data.rows", data.rows), ("data.prompt_tokens", data.prompt_tokens)):
        if value < 1:
            raise ConfigError(f"{key}={value}: at least 1")
    for index in range(data.rows):
        ids = random.Random(f"{data.seed}:{index}").choices(range(vocab_size), k=data.prompt_tokens)
        yield Row(index, f"random row {index + 1}", {"token_ids": ids})


def local_files(data: DataConfig) -> list[Path]:
    """The local files behind the input; empty for hub and random."""
    if data.source == "embedded":
        return [EMBEDDED_PROMPTS]
    suffixes = SUFFIXES_OF.get(data.source)
    return files.input_files(data.path, suffixes, data.source) if suffixes else []


def parse_shard(shard: str | None) -> tuple[int, int]:
    """``i/N`` as (i, N); (0, 1) when unset. Raises ConfigError unless 0 <= i < N."""
    if shard is None:
        return 0, 1
    part, slash, whole = str(shard).partition("/")
    if not (slash and part.isdecimal() and whole.isdecimal() and int(part) < int(whole)):
        raise ConfigError(f"data.shard={shard}: write i/N with 0 <= i < N, for example data.shard=0/4")
    return int(part), int(whole)


def count_rows(data: DataConfig) -> int | None:
    """How many rows ``load_prompts`` will yield, when that is cheap to know (files up to 256 MiB are counted), else None.

    A truncated or mislabelled archive is found here already, as a DataError.
    """
    total: int | None = None
    if data.source == "random":
        total = data.rows
    elif data.source == "parquet":
        total = sum(_parquet_count(path) for path in local_files(data))
    elif data.source in ("embedded", "jsonl"):
        paths = local_files(data)
        if all(path.is_file() for path in paths) and sum(path.stat().st_size for path in paths) <= COUNT_LIMIT_BYTES:
            total = sum(1 for path in paths for raw in files.lines(path) if raw.strip(b" \t\r\n\v\f"))
    if total is None:
        return None
    part, whole = parse_shard(data.shard)
    return len(range(part, total if data.limit is None else min(total, data.limit), whole))


def _parquet_count(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {_one_line(error)}") from error


def input_fingerprint(data: DataConfig) -> dict[str, Any]:
    """What resume compares: local files by size and SHA-256 of the first and last MiB, a hub dataset by its commit, random rows by their three keys.

    ``rereadable`` is false when the input cannot be read again in the same order (a pipe, or a hub dataset whose commit could not be found).
    """
    if data.source == "random":
        return {"source": "random", "rows": data.rows, "prompt_tokens": data.prompt_tokens, "seed": data.seed, "rereadable": True}
    if data.source == "hub":
        return _hub_fingerprint(data)
    found = [files.fingerprint(path) for path in local_files(data)]
    if below := data.path and files.below(data.path, SUFFIXES_OF[data.source]):
        log.warning("%s: files in its sub-folders, such as %s, are not read; name a folder of theirs with data.path", data.path, below)
    return {"source": data.source, "files": found, "rereadable": all(entry["rereadable"] for entry in found)}


def _hub_fingerprint(data: DataConfig) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": "hub", "path": data.path, "name": data.name, "split": data.split}
    folder = Path(data.path or "").expanduser()
    if data.path and folder.is_dir():
        found = [files.fingerprint(path) for path in sorted(p for p in folder.rglob("*") if p.is_file())]
        return entry | {"files": found, "rereadable": True}
    if data.revision is not None and re.fullmatch(r"[0-9a-f]{40}", data.revision):
        return entry | {"revision": data.revision, "rereadable": True}
    try:
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(str(data.path), revision=data.revision).sha
    except Exception as error:
        if unreachable(error):  # rows are streamed, so nothing can be read either; the loader would ask six times
            raise DataError(f"{data.path}: the dataset cannot be opened: {reason(error)}") from error
        log.info("%s: its commit cannot be looked up: %s", data.path, reason(error))  # opening it says the rest
        commit = None
    return entry | {"revision": commit, "rereadable": commit is not None}
