"""JSON lines on disk: whole lines only, appended in one write, read back in spite of a torn tail."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError

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
    append_line(path, line_of(row))


def line_of(row: Mapping[str, object]) -> bytes:
    """Return a row as one line; non-finite numbers become `null`."""
    return json.dumps(_plain(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append bytes with one `write`; where a full disk takes only some of them, none stay.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, start)
            raise OSError(errno.ENOSPC, f"no space left for a line of {len(line)} bytes", str(path))
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; a torn last line (its writer was killed) is left out.

    Raises:
        DataError: a line other than the last is not JSON.
    """
    return list(each_row(path))


def each_row(path: Path) -> Iterator[Row]:
    """Yield all whole rows, with one of them in memory at a time; a torn last line is left out.

    Raises:
        DataError: a line other than the last is not JSON.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: this line is not JSON ({error}). The file was edited or damaged; restore it "
                    "from a copy."
                ) from error
