"""Sources: what is read from each kind of file, and what each kind of damage says. Rows only; no tokenizer."""

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specgen.config import DataConfig
from specgen.data import files
from specgen.data.identity import SeenIds
from specgen.data.sources import EMBEDDED_PROMPTS, count_rows, input_fingerprint, parse_shard, read_rows
from specgen.errors import ConfigError, DataError

ROWS = [{"id": i, "prompt": f"w{10 + i}"} for i in range(3)]
PLAIN = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(raw: bytes) -> bytes:
    """``raw`` as one zstd stream."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


def read(path, source="jsonl", **keys):
    """All rows of a file."""
    return list(read_rows(DataConfig(source=source, path=str(path), **keys), vocab_size=48))


def named(value):
    """Test ids of file names and messages; bytes are left out, for a gzip header holds the time and every worker must collect the same ids."""
    return value if isinstance(value, str) else "raw"


def written(tmp_path, name, raw):
    """A file with these bytes."""
    path = tmp_path / name
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("plain.jsonl", PLAIN),
        ("bom.jsonl", b"\xef\xbb\xbf" + PLAIN),
        ("crlf.jsonl", PLAIN.replace(b"\n", b"\r\n")),
        ("crlf_no_final_newline.jsonl", PLAIN.replace(b"\n", b"\r\n")[:-2]),
        ("blank_lines.jsonl", b"\n \n" + PLAIN.replace(b"\n", b"\n\r\n\t\n")),
        ("a.jsonl.gz", gzip.compress(PLAIN)),
        ("two_members.jsonl.gz", gzip.compress(PLAIN[:24]) + gzip.compress(PLAIN[24:])),
        ("a.jsonl.zst", zstd(PLAIN)),
        ("two_frames.jsonl.zst", zstd(PLAIN[:24]) + zstd(PLAIN[24:])),
        ("gzip_without_the_name.jsonl", gzip.compress(PLAIN)),
        ("zstd_without_the_name.jsonl", zstd(PLAIN)),
        ("bom_inside.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + PLAIN)),
    ],
    ids=named,
)
def test_every_wrapping_of_the_same_rows_reads_the_same(tmp_path, name, raw):
    path = written(tmp_path, name, raw)
    assert [row.fields for row in read(path)] == ROWS
    assert count_rows(DataConfig(source="jsonl", path=str(path))) == 3


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("cut.jsonl.gz", gzip.compress(PLAIN)[:-12], "the gzip archive is truncated; copy or download it again"),
        ("cut_in_trailer.jsonl.gz", gzip.compress(PLAIN)[:-4], "the gzip archive is truncated; copy or download it again"),
        ("cut_second_member.jsonl.gz", gzip.compress(PLAIN) + gzip.compress(PLAIN)[:-12], "the gzip archive is truncated; copy or download it again"),
        ("cut.jsonl.zst", zstd(PLAIN)[:-5], "the zstd archive is truncated; copy or download it again"),
        ("cut_second_frame.jsonl.zst", zstd(PLAIN) + zstd(PLAIN)[:-5], "the zstd archive is truncated; copy or download it again"),
        ("plain.jsonl.gz", PLAIN, "is named .gz but is not gzip; rename it or compress it again"),
        ("plain.jsonl.zst", PLAIN, "is named .zst but is not zstd; rename it or compress it again"),
        ("empty.jsonl", b"", "no rows"),
        ("empty.jsonl.gz", b"", "no rows"),
        ("blank.jsonl", b"\n  \n\r\n\t\n", "no rows"),
        ("only_bom.jsonl", b"\xef\xbb\xbf", "no rows"),
        ("utf16.jsonl", PLAIN.decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("array.jsonl", b'[{"prompt": "a"},\n{"prompt": "b"}]\n', "is one JSON array, not JSON Lines; write one object a line"),
        ("pretty.jsonl", b'{\n  "prompt": "a"\n}\n', "is one JSON document, not JSON Lines; write one object a line"),
    ],
    ids=named,
)
def test_a_fault_of_the_whole_file_is_one_error_that_names_it(tmp_path, name, raw, says):
    path = written(tmp_path, name, raw)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {says}")
    assert "\n" not in str(caught.value)


def test_a_damaged_gzip_says_damaged(tmp_path):
    raw = bytearray(gzip.compress(PLAIN))
    raw[-6] ^= 0xFF
    with pytest.raises(DataError, match="the gzip archive is damaged"):
        read(written(tmp_path, "bad.jsonl.gz", bytes(raw)))


def test_counting_finds_a_truncated_archive_before_any_row_is_used(tmp_path):
    path = written(tmp_path, "cut.jsonl.gz", gzip.compress(PLAIN)[:-12])
    with pytest.raises(DataError, match="truncated"):
        count_rows(DataConfig(source="jsonl", path=str(path)))


def test_missing_file_and_missing_key(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file or folder; check data\.path"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match=r"^data=jsonl needs data\.path=FILE$"):
        list(read_rows(DataConfig(source="jsonl"), 48))
    with pytest.raises(DataError, match="the folder holds no file named"):
        read(tmp_path)


def test_lines_split_at_newline_only(tmp_path):
    texts = ["w10\u2028w11", "w30\u0085w31\u2029w32", "a\x0bb\x0cc\x1cd"]
    raw = "".join(json.dumps({"prompt": t}, ensure_ascii=False) + "\n" for t in texts)
    assert [row.fields["prompt"] for row in read(written(tmp_path, "a.jsonl", raw.encode()))] == texts


def test_lines_longer_than_a_read_block_come_back_whole(tmp_path):
    rows = [{"prompt": "x" * 2_500_000}, {"prompt": "y"}, {"prompt": "z" * 1_048_576}]
    path = written(tmp_path, "long.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert [row.fields for row in read(path)] == rows


@pytest.mark.parametrize("block", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("wrap", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_lines_do_not_depend_on_where_read_blocks_end(tmp_path, monkeypatch, block, wrap):
    raw = b"\xef\xbb\xbfone\n\ntwo\r\n" + "x\u2028\u00e9\n".encode() + b"\nlast"
    monkeypatch.setattr(files, "CHUNK", block)
    assert list(files.lines(written(tmp_path, "a", wrap(raw)))) == [b"one", b"", b"two\r", "x\u2028\u00e9".encode(), b"", b"last"]


def test_null_in_early_rows_does_not_fix_the_type_of_later_ones(tmp_path):
    rows = [{"id": i, "prompt": "w10", "ref": None} for i in range(4)] + [{"id": 4, "prompt": "w10", "ref": "w11"}]
    path = written(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert [row.fields["ref"] for row in read(path)] == [None, None, None, None, "w11"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": 2, "prompt": ', "not valid JSON: Expecting value (column 20)"),
        (b'{"id": 2} {"id": 3}', "not valid JSON: Extra data (column 11)"),
        (b'{"prompt": "caf\xe9"}', "not valid UTF-8 (byte 0xe9 at byte 16 of the line)"),
        (b'"just text"', "the row is a JSON string, not an object"),
        (b"null", "the row is a JSON null, not an object"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' appears twice in one object"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not readable: an integer of more than 4300 digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not readable: objects are nested too deeply"),
    ],
)
def test_a_bad_line_is_an_error_of_that_row_with_file_and_line(tmp_path, line, says):
    path = written(tmp_path, "a.jsonl", b'\n{"id": 1, "prompt": "w10"}\n\n' + line + b'\n{"id": 3, "prompt": "w30"}\n')
    rows = read(path)
    assert [(row.index, row.error) for row in rows] == [(0, None), (1, says), (2, None)]
    assert rows[1].where == f"{path} line 4"
    assert rows[2].where == f"{path} line 5"


def test_reading_is_lazy(tmp_path):
    """The first row comes before the damage at the end is met: nothing is read ahead beyond a block."""
    raw = PLAIN * 60_000
    path = written(tmp_path, "big.jsonl.gz", gzip.compress(raw, 1)[:-12])
    stream = read_rows(DataConfig(source="jsonl", path=str(path)), 48)
    assert next(stream).fields == ROWS[0]
    with pytest.raises(DataError, match="truncated"):
        for _ in stream:
            pass


def test_a_folder_is_its_files_by_name_with_running_indices(tmp_path):
    written(tmp_path, "b.jsonl", PLAIN)
    written(tmp_path, "a.jsonl.gz", gzip.compress(PLAIN))
    written(tmp_path, "empty.jsonl", b"")
    written(tmp_path, "notes.txt", b"not a row")
    rows = read(tmp_path)
    assert [row.index for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.where.removeprefix(str(tmp_path)) for row in rows[2:4]] == ["/a.jsonl.gz line 3", "/b.jsonl line 1"]


def test_files_in_the_sub_folders_of_a_folder_are_said_to_be_left_out(tmp_path, caplog):
    for name in ("a.jsonl", "deep/b.jsonl", "deep/.c.jsonl", ".cache/d.jsonl", "deep/e.csv", "x/y/z.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    data = DataConfig(source="jsonl", path=str(tmp_path))
    assert len(list(read_rows(data, 10))) == 1 and len(input_fingerprint(data)["files"]) == 1
    left = f"{tmp_path}: files in its sub-folders, such as {tmp_path}/deep/b.jsonl, are not read; name a folder of theirs with data.path"
    assert [record.getMessage() for record in caplog.records] == [left]
    (tmp_path / "deep/b.jsonl").unlink()
    input_fingerprint(data)
    assert "x/y/z.jsonl" in caplog.records[1].getMessage()
    (tmp_path / "x/y/z.jsonl").unlink()
    input_fingerprint(data)
    input_fingerprint(DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl")))
    input_fingerprint(DataConfig())
    assert len(caplog.records) == 2


def test_parquet_gives_python_values_and_counts(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"id": ["a", "b"], "prompt": pa.array(["w10", None]).dictionary_encode(), "n": pa.array([1, None], pa.int64())})
    pq.write_table(table, path)
    rows = read(path, source="parquet")
    assert [row.fields for row in rows] == [{"id": "a", "prompt": "w10", "n": 1}, {"id": "b", "prompt": None, "n": None}]
    assert rows[1].where == f"{path} row 2"
    assert count_rows(DataConfig(source="parquet", path=str(path))) == 2


def test_parquet_faults(tmp_path):
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(DataError, match=r"empty\.parquet: no rows$"):
        read(empty, source="parquet")
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read as Parquet"):
        read(written(tmp_path, "a.jsonl", PLAIN), source="parquet")
    with pytest.raises(DataError, match=r"is a Parquet file; read it with data=parquet"):
        read(empty, source="jsonl")


def test_csv_cells_lines_and_faults(tmp_path):
    raw = b'id,prompt,ref\r\n007,"two\nlines",\r\n8,short\r\n\r\n9,"say ""hi""",x\r\n10,caf\xe9,x\r\n11,ok,\xc3\xa9\n'
    path = written(tmp_path, "a.csv", b"\xef\xbb\xbf" + raw)
    rows = read(path, source="csv")
    assert [row.fields for row in rows if not row.error] == [
        {"id": "007", "prompt": "two\nlines", "ref": None},
        {"id": "9", "prompt": 'say "hi"', "ref": "x"},
        {"id": "11", "prompt": "ok", "ref": "é"},
    ]
    assert [(row.where, row.error) for row in rows if row.error] == [
        (f"{path} line 4", "the row has 2 cells, the header 3"),
        (f"{path} line 7", "column 'prompt' is not valid UTF-8"),
    ]


def test_an_unclosed_csv_quote_is_an_error_of_its_row(tmp_path):
    path = written(tmp_path, "a.csv", b'id,prompt\n1,a\n2,"never closed\n')
    assert [row.error for row in read(path, source="csv")] == [None, "not valid CSV: unexpected end of data"]


def test_hub_reads_a_local_dataset_folder(tmp_path):
    import datasets

    rows = [{"id": 1, "prompt": "w10"}, {"id": 2, "prompt": "w30"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert [row.fields for row in read(tmp_path, source="hub")] == rows
    saved = tmp_path / "saved"
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}).save_to_disk(str(saved))
    assert [row.fields for row in read(saved, source="hub", split="test")] == rows[:1]
    with pytest.raises(DataError, match=r"choose a split with data\.split=dev \(there are dev, test\)"):
        read(saved, source="hub")


def test_random_rows_depend_on_seed_and_index_only():
    rows = read(None, source="random", rows=5, prompt_tokens=64, seed=3)
    again = read(None, source="random", rows=2, prompt_tokens=64, seed=3)
    other = read(None, source="random", rows=2, prompt_tokens=64, seed=4)
    assert [row.fields for row in rows[:2]] == [row.fields for row in again]
    assert rows[0].fields != other[0].fields
    ids = [token for row in rows for token in row.fields["token_ids"]]
    assert len(ids) == 320 and min(ids) >= 0 and max(ids) < 48 and len(set(ids)) == 48
    with pytest.raises(ConfigError, match=r"data\.rows=0: at least 1"):
        read(None, source="random", rows=0)


def test_the_embedded_prompts_are_32_distinct_texts():
    rows = read(None, source="embedded")
    assert len({row.fields["id"] for row in rows}) == len({row.fields["prompt"] for row in rows}) == 32
    assert sorted({row.fields["category"] for row in rows}) == ["class", "function", "prose"]
    assert [row.where for row in rows[:1]] == [f"{EMBEDDED_PROMPTS} line 1"]
    assert count_rows(DataConfig()) == 32


@pytest.mark.parametrize(
    ("limit", "shard", "count"), [(None, None, 32), (10, None, 10), (10, "0/4", 3), (10, "3/4", 2), (100, "1/2", 16), (1, "1/2", 0)]
)
def test_count_respects_limit_and_shard(limit, shard, count):
    assert count_rows(DataConfig(limit=limit, shard=shard)) == count


def test_shards_are_checked():
    assert (parse_shard(None), parse_shard("2/3")) == ((0, 1), (2, 3))
    for bad in ("3/3", "1", "-1/2", "a/b", "1/0", "0/"):
        with pytest.raises(ConfigError, match="write i/N with 0 <= i < N"):
            parse_shard(bad)


def test_fingerprint_changes_with_size_head_and_tail(tmp_path):
    raw = b"a" * 3_000_000
    prints = []
    for change in (raw, b"b" + raw[1:], raw[:-1] + b"b", raw + b"a"):
        path = written(tmp_path, "a.jsonl", change)
        prints.append(json.dumps(input_fingerprint(DataConfig(source="jsonl", path=str(path)))))
    assert len(set(prints)) == 4
    entry = input_fingerprint(DataConfig(source="jsonl", path=str(path)))
    assert entry["rereadable"] is True and entry["files"][0]["size"] == 3_000_001


def test_a_hub_dataset_without_a_known_commit_cannot_be_read_again(monkeypatch, caplog):
    import huggingface_hub

    def answer(self, *args, **keys):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    error = OSError("teapot")
    with caplog.at_level(logging.INFO, "specgen.data"):
        entry = input_fingerprint(DataConfig(source="hub", path="some/where"))
    assert (entry["revision"], entry["rereadable"]) == (None, False)
    assert "some/where: its commit cannot be looked up: OSError: teapot" in caplog.text
    error = ConnectionError("no route")
    with pytest.raises(DataError, match=r"^some/where: the dataset cannot be opened: the hub cannot be reached \(no route\)"):
        input_fingerprint(DataConfig(source="hub", path="some/where"))


def test_seen_ids_finds_every_repeat_and_nothing_else():
    seen = SeenIds()
    for index in range(5000):
        assert seen.add(index if index % 2 else f"{index - 1}", index) is None  # "1" and 1 are two ids
    assert [seen.add(index if index % 2 else f"{index - 1}", 9000 + index) for index in range(5000)] == list(range(5000))


def test_a_row_without_an_id_owns_its_index():
    seen = SeenIds()
    assert [seen.add_anonymous(0), seen.add_anonymous(1), seen.add(7, 2), seen.add(1, 3), seen.add("0", 4)] == [None, None, None, 1, None]
    assert [seen.add_anonymous(5), seen.add_anonymous(7)] == [None, 2]
    assert [seen.repeat(1), seen.repeat(1), seen.repeat(2)] == [1, 2, 1]
