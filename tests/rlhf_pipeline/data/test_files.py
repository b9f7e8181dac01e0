from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.data.files import SourceFile, field_of, find_sources
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError

ROWS = [{"question": f"q{i}", "answer": str(i), "extra": "é"} for i in range(130)]


def rows_of(*paths: Path) -> list[dict[str, Any]]:
    return [row for source in find_sources(paths) for _, row in source.rows()]


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith((".parquet", ".arrow", ".feather", "hf")):
        pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
        table = pa.Table.from_pylist(ROWS)
        if name.endswith(".parquet"):
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        elif name.endswith(".feather"):
            feather.write_feather(table, path)
        elif name.endswith(".arrow"):  # the stream that datasets writes
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        else:
            pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    elif name.endswith(".csv"):
        path.write_text("question,answer,extra\r\n" + "".join(f"q{i},{i},é\r\n" for i in range(130)), encoding="utf-8")
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    else:
        path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.feather", "hf"])
def test_every_container_gives_the_same_rows(tmp_path: Path, name: str):
    """JSON with a byte order mark, arrays, CSV, Parquet, Arrow in both forms, data sets; each file in gzip too."""
    path = write(tmp_path, name)
    assert rows_of(path) == ROWS
    if path.is_file():
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert rows_of(packed) == ROWS
        nameless = path.rename(tmp_path / "blob")
        if name.endswith((".parquet", ".arrow", ".feather")):
            assert rows_of(nameless) == ROWS


def test_a_folder_and_a_pattern_name_files_in_natural_order(tmp_path: Path):
    """Part 10 follows part 9, settings beside the rows are not rows, and no file is read twice."""
    for part in (10, 9):
        (tmp_path / f"part-{part}.jsonl").write_text(json.dumps({"n": part}) + "\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "part-9.jsonl")
    assert [row["n"] for row in rows_of(tmp_path)] == [9, 10]
    assert [row["n"] for row in rows_of(tmp_path / "part-*.jsonl", tmp_path)] == [9, 10]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.jsonl", b'{"q": 1}\nq: 2\n', DataError, r"a\.jsonl:2: this line is not JSON.*sed -n 2p /.*a.jsonl`"),
        ("a.jsonl", b'{"q": 1}\n[2]\n', DataError, r"a\.jsonl:2: expected a JSON object, got list"),
        ("a.json", b'[{"q": 1}, 2]', DataError, r"a\.json, row 1: expected a JSON object, got int"),
        ("a.json", b'[{"q": 1}, ', DataError, "begins like a JSON array but cannot be read"),
        ("a.jsonl", b"PK\x03\x04rest", DefinitionError, "is a zip file"),
        ("a.jsonl", b'{"a": "\x00"}', DefinitionError, "is binary"),
        ("a.csv", b"\xff\xfeq\x00", DefinitionError, "is text in UTF-16"),
        ("a.parquet", b'{"q": 1}\n', DefinitionError, "is not in Parquet format, according to its content"),
        ("a.parquet", b"PAR1junk", DataError, "cannot be read as parquet"),
        (
            "a.csv",
            b"a,b\n1,2\n1,2,3\n",
            DataError,
            r"a\.csv:3: this row does not have as many columns as the first line \(2\)",
        ),
        ("a.csv", b'a,b\n"1\n1",2\n\xff,2\n', DataError, "this line is not valid CSV in UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"q": 1}\n' * 99, mtime=0)[:-12], DataError, "is an incomplete gzip file"),
        ("a.txt", b"hello", DefinitionError, "neither the name nor the content"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, content: bytes, error: Any, message: str):
    """Wrong, torn and binary files are named with the row where there is one."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        rows_of(path)


def test_missing_paths_and_splits_are_named(tmp_path: Path):
    """A path that is not there names its neighbours; a saved set of splits names one of them."""
    (tmp_path / "near.jsonl").write_text("{}")
    with pytest.raises(MissingPathError, match=r"Its parent folder contains: \['near.jsonl'\]"):
        find_sources([tmp_path / "none.jsonl"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DefinitionError, match=r"several splits. Choose one: .*train"):
        find_sources([tmp_path])


def test_a_row_of_several_lines_is_named_by_its_first(tmp_path: Path):
    """A quoted field of CSV may hold line breaks."""
    path = tmp_path / "a.csv"
    path.write_text('q,a\n"one\ntwo",1\nthree,3\n')
    source = SourceFile(path, "csv")
    assert [(number, row["q"]) for number, row in source.rows()] == [(2, "one\ntwo"), (4, "three")]


def test_a_path_that_leads_nowhere_has_no_field():
    """An index out of range and a name inside of text are no fields."""
    for name in ("a.2", "b.c", "c"):
        with pytest.raises(KeyError):
            field_of({"a": [1], "b": "text"}, name)


def zst(data: bytes, frames: int = 1) -> bytes:
    """Return zstd of several frames, with a seek table at the end, as seekable writers leave it."""
    zstandard = pytest.importorskip("zstandard")
    size = -(-len(data) // frames)
    packed = b"".join(zstandard.compress(data[at : at + size]) for at in range(0, len(data), size))
    return packed + b"\x5e\x2a\x4d\x18" + (9).to_bytes(4, "little") + bytes(4) + b"\x00" + b"\xb1\xea\x92\x8f"


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.csv.zst", "b.jsonl"])
def test_zstd_is_read_like_the_plain_file(tmp_path: Path, name: str):
    """Frames and a seek table are decompressed, whatever the name; rows and places are unchanged."""
    plain = b"q,r\n1,2\n3,4\n" if ".csv" in name else b'{"q": 1, "r": 2}\n' * 5000
    (tmp_path / "plain").write_bytes(plain)
    (tmp_path / name).write_bytes(zst(plain, frames=3))
    (plain_source,) = find_sources([tmp_path / "plain"], "csv" if ".csv" in name else "jsonl")
    (source,) = find_sources([tmp_path / name])
    assert list(source.rows()) == list(plain_source.rows())


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_unfinished_frame_of_a_growing_file_is_not_an_error(tmp_path: Path, suffix: str):
    """A growing file gives the complete lines of its last frame; otherwise it is reported as incomplete."""
    plain = b"".join(b'{"q": %d}\n' % number for number in range(60_000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((gzip.compress(plain) if suffix == ".gz" else zst(plain))[:-20_000])
    (source,) = find_sources([path])
    rows = [row["q"] for _, row in source.rows(growing=True)]
    assert 0 < len(rows) < 60_000
    assert rows == list(range(len(rows)))
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix} is an incomplete"):
        list(source.rows())


def test_corrupted_zstd_is_reported(tmp_path: Path):
    """A changed byte is an error with the path, not other rows."""
    packed = bytearray(zst(b"".join(b'{"q": %d}\n' % number for number in range(9000))))
    packed[6] ^= 0xFF
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.jsonl\.zst is an? (corrupted|incomplete) zstd"):
        rows_of(tmp_path / "a.jsonl.zst")


def test_an_incomplete_csv_row_waits(tmp_path: Path):
    """A growing CSV file gives the rows that end with a line break, also where a quoted field is unfinished."""
    path = tmp_path / "a.csv"
    for text, rows in (("q,r\n1,2\n3,4", 1), ('q,r\n1,2\n"3\n', 1), ("q,r\n1,2\n3,4\n", 2), ("q,r\n1,2\n3", 1)):
        path.write_text(text)
        (source,) = find_sources([path])
        assert len(list(source.rows(growing=True))) == rows, text
