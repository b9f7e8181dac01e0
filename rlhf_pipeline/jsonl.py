"""JSON lines on disk: whole lines only, appended in one write, read back in spite of a torn tail."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.files import write_atomically

Row = dict[str, Any]


def _plain(value: object) -> object:
    """Return `value` with NaN and infinities as None: JSON has no words for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append one row as one line with one `write`, so a killed process leaves a whole line or a torn last one.

    Args:
        path: the file; made if absent.
        row: JSON-ready values. Non-finite numbers become `null`.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    line = json.dumps(_plain(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written != len(line):  # a full disk may take half a line: take it back
            os.ftruncate(descriptor, start)
            raise OSError(28, f"no space left for a line of {len(line)} bytes", str(path))
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; a torn last line (its writer was killed) is left out.

    Raises:
        DataError: a line other than the last is not JSON.
    """
    if not path.is_file():
        return []
    *lines, _torn_tail = path.read_bytes().split(b"\n")  # the tail is empty when the file ends with a newline
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(
                f"{path}:{number}: this line is not JSON ({error}). "
                "The file was edited or damaged; delete the line to go on without it."
            ) from error
    return rows


def last_row(path: Path) -> Row | None:
    """Return the last whole row, or None; reads the end of the file only.

    Raises:
        DataError: that line is not JSON.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), b""
        while tail.count(b"\n") < 2 and len(tail) < size:
            length = min(max(2 * len(tail), 65_536), size)
            file.seek(size - length)
            tail = file.read(length)
    *lines, _torn_tail = tail.split(b"\n")
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise DataError(
            f"{path}: its last line is not JSON ({error}). "
            "The file was edited or damaged; delete the line to go on without it."
        ) from error


def mend_tail(path: Path) -> None:
    """Take off a last line that a kill or a full disk cut short, so that the next row starts on a line of its own."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)


def keep_rows(path: Path, keep: Callable[[Row], bool]) -> list[Row]:
    """Drop rows for which `keep` is false, atomically, and return the dropped rows.

    The file is replaced by a new one in a single rename, so a kill leaves the old rows or the new ones.
    """
    rows = read_rows(path)
    kept = [row for row in rows if keep(row)]
    if path.is_file():
        write_atomically(path, b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in kept))
    return [row for row in rows if not keep(row)]
