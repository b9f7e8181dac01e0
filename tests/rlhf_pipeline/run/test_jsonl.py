from __future__ import annotations

import math

import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.jsonl import append_row, read_rows


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


def test_missing_file_has_no_rows(tmp_path):
    """A run that was killed before its first step has no file yet."""
    assert read_rows(tmp_path / "none.jsonl") == []
    assert not (tmp_path / "none.jsonl").exists()
