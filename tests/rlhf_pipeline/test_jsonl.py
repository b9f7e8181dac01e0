from __future__ import annotations

import math

import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.files import write_atomically
from rlhf_pipeline.jsonl import append_row, keep_rows, last_row, read_rows


def test_rows_come_back_in_order_and_nan_becomes_null(tmp_path):
    """Rows are read back as written, except that JSON has no NaN."""
    path = tmp_path / "rows.jsonl"
    append_row(path, {"step": 1, "loss": 0.5})
    append_row(path, {"step": 2, "loss": math.nan, "nested": [math.inf, {"x": 1}]})
    assert read_rows(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "nested": [None, {"x": 1}]}]


def test_a_torn_last_line_is_left_out(tmp_path):
    """A line whose writer was killed half-way does not hide the whole lines before it."""
    path = tmp_path / "rows.jsonl"
    append_row(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert read_rows(path) == [{"step": 1}]


def test_damage_before_the_last_line_is_named(tmp_path):
    """A line in the middle that is not JSON is an error with its number, not a silent gap."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step" 2}\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: this line is not JSON"):
        read_rows(path)


def test_keep_rows_drops_the_tail_and_returns_it(tmp_path):
    """Rewinding to a step keeps its rows, drops later ones and the torn tail."""
    path = tmp_path / "rows.jsonl"
    for step in range(1, 5):
        append_row(path, {"step": step})
    with path.open("ab") as file:
        file.write(b'{"st')
    assert keep_rows(path, lambda row: row["step"] <= 2) == [{"step": 3}, {"step": 4}]
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'
    append_row(path, {"step": 3})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_missing_file_has_no_rows(tmp_path):
    """A run that was killed before its first step has no file yet."""
    assert read_rows(tmp_path / "none.jsonl") == []
    assert keep_rows(tmp_path / "none.jsonl", lambda row: False) == []
    assert not (tmp_path / "none.jsonl").exists()


def test_atomic_write_leaves_no_temporary(tmp_path):
    """The new content replaces the old under the same name and nothing else is left."""
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_the_last_row_is_read_from_the_end(tmp_path):
    """Also where it is longer than what is read first, and where a torn line follows."""
    path = tmp_path / "rows.jsonl"
    assert last_row(path) is None
    append_row(path, {"step": 1})
    assert last_row(path) == {"step": 1}
    long = {"step": 2, "row_ids": list(range(40_000))}
    append_row(path, long)
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert last_row(path) == long
    path.write_bytes(b'{"step": 3')
    assert last_row(path) is None
    path.write_bytes(b"[\n")
    with pytest.raises(DataError, match="its last line is not JSON"):
        last_row(path)
