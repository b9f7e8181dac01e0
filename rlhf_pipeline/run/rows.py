"""JSON lines on disk: whole lines, appended in one write; and one line per optimizer step.

The steps of `metrics.jsonl` and `ledger.jsonl` follow one another, so a step's line is found by bisecting the bytes of
the file, and the last one at its end. Each line ends with a CRC32C of its place in the file and of the rest of it: a
line that was cut or changed is detected when it is read, and lines that were removed or moved at the last line.
Imports no torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, overload

import google_crc32c

from rlhf_pipeline.errors import DataError
from trajectory_store.new_files import sync_path

Row = dict[str, Any]

_STEP: Final = re.compile(rb'\{"step": ?(\d+)[,}]')
_SEAL: Final = re.compile(rb',"crc32c":(\d+)\}\n\Z')
_CHUNK: Final = 1 << 13
_NEAR: Final = 8
"""The number of lines that are read one by one to reach the line of a step."""


class StepRows(Sequence[Row]):
    """The rows of a file with one JSON line per step, by place or by step.

    The object sees the rows that existed when it was made or last refreshed; only the writing process may call `append`
    and `drop_from`.

    >>> import tempfile
    >>> rows = StepRows(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> rows.append({"step": 1, "loss": 0.5}), rows.append({"step": 2, "loss": 0.25})
    (None, None)
    >>> len(rows), rows[-1], rows.of_step(1), rows.of_step(3), rows.last_step
    (2, {'step': 2, 'loss': 0.25}, {'step': 1, 'loss': 0.5}, None, 2)
    >>> rows.drop_from(2)
    >>> [row["step"] for row in rows]
    [1]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first = self.last_step = self._last_start = self._end = 0
        """The first step, the last step (0 if there are no rows), and the start and end of its line, in bytes."""
        self._last_line, self._size = b"", -1
        """The last line, and the bytes of the file, as of the last refresh."""
        self.is_torn = False
        """Whether a kill truncated the last line, which is then not among the rows."""
        self.is_moved = False
        """Whether the last line fails its checksum or has moved: the file was edited or damaged."""
        self.refresh()

    def refresh(self) -> int:
        """Read what is on disk now, and return the number of rows."""
        with _opened(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            if size == self._size and size:
                file.seek(self._last_start)
                if file.read() == self._last_line:  # no other line of this step is the same: it contains the time
                    return len(self)
            file.seek(0)
            first = file.readline()
            self._end, line = _last_line(file, size)
            self._last_line, self._size = line, size
            self._last_start = self._end - len(line)
            self._first, self.last_step, self.is_torn, self.is_moved = 0, 0, size > self._end, False
            if line:
                self._first, self.last_step = self._row(first, 0)["step"], self._row(line)["step"]
                self.is_moved = not _holds(line, self._last_start)
        return len(self)

    def __len__(self) -> int:
        return self.last_step - self._first + 1 if self._end else 0

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            chosen = range(*place.indices(len(self)))
            if chosen.step == 1 and chosen:
                return [self._row(line) for line in self._lines(self._first + chosen[0], chosen[-1] + 1)]
            return self._picked(chosen)
        at = place + len(self) if place < 0 else place
        if not 0 <= at < len(self):
            raise IndexError(place)
        return self._picked([at])[0]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows, oldest first, with one in memory at a time."""
        for place, line in enumerate(self._lines(self._first, len(self), check=False)):
            yield self._row(line, place)

    def of_step(self, step: int) -> Row | None:
        """Return the row of a step, or None."""
        place = self.place_of(step)
        return None if place is None else self[place]

    def required(self, step: int) -> Row:
        """Return the row of a step that must exist."""
        row = self.of_step(step)
        if row is None:
            raise DataError(f"{self.path} has no row for step {step}. Restore the file from a copy.")
        return row

    def place_of(self, step: int) -> int | None:
        """Return the position of a step's row, or None."""
        return step - self._first if self._end and self._first <= step <= self.last_step else None

    def checksum_of(self, step: int) -> int | None:
        """Return the checksum of a step's line, or None if there is no such line."""
        place = self.place_of(step)
        return None if place is None else google_crc32c.value(next(self._lines(step, place + 1)))

    def spread(self, most: int) -> list[Row]:
        """Return at most this many rows, spread evenly, including the first and the last."""
        if len(self) <= most:
            return list(self)
        return self._picked(round(i * (len(self) - 1) / (most - 1)) for i in range(most))

    def start_of(self, step: int) -> int:
        """Return where the first line of this step or of a later one starts, in bytes."""
        with _opened(self.path) as file:
            return self._start_of(step, file)

    def _start_of(self, step: int, file: BinaryIO) -> int:
        if not self._end or step > self.last_step:
            return self._end
        if step == self.last_step:
            return self._last_start
        low, before, bound, after, line_start, halves = 0, self._first, self._end, self.last_step, self._end, False
        while low < bound:  # the line starts at `found`, or in low..bound, and `low` is where a line starts
            # Lines are of about one length: the first guess is a few lines before, and those are read one by one.
            share = 0.5 if halves else min(max((step - before - _NEAR / 2) / max(after - before, 1), 0.0), 1.0)
            middle, halves = low + int((bound - low) * share), not halves
            file.seek(max(middle - 1, 0))
            start = middle + len(file.readline()) - 1 if middle else 0
            line = file.readline() if start < line_start else b""
            at = _step_of(line) if line else after
            if line and 0 <= step - at < _NEAR:
                for _ in range(step - at):
                    start += len(line)
                    line = file.readline()
                at = _step_of(line)
                if at == step:
                    return start
            if line and at < step:
                low, before = start + len(line), at + 1
            else:
                bound, after, line_start = middle, at, min(start, line_start)
        return line_start

    def problems(self) -> Iterator[str]:
        """Yield the problems: every line is read and compared with its checksum."""
        self.refresh()
        start, place, sealed = 0, 0, False
        with _opened(self.path) as file:
            while start < self._end:
                line = file.readline()
                sealed |= _SEAL.search(line) is not None
                if not _holds(line, start, sealed=sealed):
                    yield f"line {place + 1} fails its checksum: it was truncated, changed or moved"
                    return
                if _step_of(line) != place + 1:
                    yield (
                        f"line {place + 1} is step {_step_of(line)}, expected step {place + 1}: lines are missing, "
                        "repeated or moved"
                    )
                    return
                start, place = start + len(line), place + 1

    def recheck(self) -> None:
        """Compare the newest rows with their checksums; `problems` looks at all."""
        for _ in self._lines(max(self.last_step - _LOOK_BACK + 1, self._first), len(self)):
            pass

    def mend(self) -> None:
        """Cut off what a kill or a power loss left at the end."""
        if self.is_moved:
            raise DataError(f"{self.path}: the last line fails its checksum. {_RESTORE}")
        if self.is_torn:
            os.truncate(self.path, self._end)
            self.is_torn = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the row of the next step."""
        self._append(row)

    def _append(self, row: Mapping[str, Any]) -> bytes:
        self.mend()
        step = row["step"]
        if self._end and step != self.last_step + 1:
            raise DataError(f"{self.path}: step {step} does not follow step {self.last_step}.")
        content = line_of({"step": step, **row})[:-2]
        line = b'%b,"crc32c":%d}\n' % (content, _checksum(content, self._end))
        append_line(self.path, line)
        self._first, self.last_step = self._first if self._end else step, step
        self._last_start, self._end = self._end, self._end + len(line)
        return line

    def drop_from(self, step: int) -> None:
        """Remove the rows of a step and of all later ones."""
        self.mend()
        if self._end and step <= self.last_step:
            os.truncate(self.path, self.start_of(step))
            self.refresh()

    def sync(self) -> None:
        """Sync all rows to the disk, so that they survive a power loss."""
        sync_path(self.path)

    def _lines(self, step: int, until: int, *, check: bool = True) -> Iterator[bytes]:
        """Yield the lines from a step on, up to a place."""
        with _opened(self.path) as file:
            start = self._start_of(step, file) if step > self._first else 0
            file.seek(start)
            for place in range(step - self._first, until):
                line = file.readline()
                if check:
                    self._check(line, place, start)
                if not line:
                    return
                yield line
                start += len(line)

    def _picked(self, places: Iterable[int]) -> list[Row]:
        """Return the rows at some places, each looked for."""
        picked: list[Row] = []
        with _opened(self.path) as file:
            for place in places:
                start = self._start_of(self._first + place, file)
                file.seek(start)
                line = file.readline()
                self._check(line, place, start)
                picked.append(self._row(line))
        return picked

    def _check(self, line: bytes, place: int, start: int) -> None:
        if not (line and _step_of(line) == place + self._first and _holds(line, start)):
            raise DataError(f"{self.path}: line {place + 1} fails its checksum. {_RESTORE}")

    def _row(self, line: bytes, place: int | None = None) -> Row:
        wrong = "this line has no integer 'step'"
        try:
            row = json.loads(line.decode())
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                row.pop("crc32c", None)
                return row
        except ValueError as error:
            wrong = f"this line is not JSON ({error})"
        number = self.path.read_bytes().count(b"\n", 0, self._end) if place is None else place + 1
        raise DataError(f"{self.path}:{number}: {wrong}. {_RESTORE}")


class NewRows:
    """Follows the rows of a file while another process writes them.

    A resumed learner may replace rows. The replacements are new rows, too.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> rows, new = StepRows(path), NewRows(path)
    >>> rows.append({"step": 1}), new.read(), new.read()
    (None, [{'step': 1}], [])
    """

    def __init__(self, rows: StepRows | Path) -> None:
        self.rows = StepRows(rows) if isinstance(rows, Path) else rows
        self._returned: dict[int, int] = {}
        """Checksums of the newest lines that were returned, by step."""
        self._last = 0
        for _ in self._take(max(self.rows.last_step - _LOOK_BACK + 1, self.rows._first, 1)):
            pass

    def read(self) -> list[Row]:
        """Return the rows that have not been returned yet, oldest first."""
        before = self.rows._last_line
        self.rows.refresh()
        if self.rows.last_step == self._last and self.rows._last_line == before:
            return []
        unchanged = self._last
        while unchanged in self._returned and self.rows.checksum_of(unchanged) != self._returned[unchanged]:
            unchanged -= 1
        return [self.rows._row(line) for line in self._take(unchanged + 1)]

    def _take(self, step: int) -> Iterator[bytes]:
        last = self.rows.last_step
        for at, line in enumerate(self.rows._lines(step, len(self.rows)) if step <= last else (), step):
            self._returned[at] = google_crc32c.value(line)
            yield line
        self._last = last
        for old in [old for old in self._returned if not last - _LOOK_BACK < old <= last]:
            del self._returned[old]


_LOOK_BACK: Final = 4096
"""Rows whose replacement a follower notices (a resumed learner replaces at most those since a checkpoint), and that a
resume compares with their checksums."""

_RESTORE: Final = "The file was edited or damaged: restore it from a copy, or start a new run with --out OTHER_FOLDER."


def _checksum(content: bytes, start: int) -> int:
    return google_crc32c.extend(google_crc32c.value(start.to_bytes(8, "little")), content)


def _holds(line: bytes, start: int, *, sealed: bool = False) -> bool:
    """Return whether a line matches its checksum, and where; a line of another program has no checksum."""
    at = line.rfind(b',"crc32c":')
    seal = None if at < 0 else _SEAL.match(line, at)
    return not sealed if seal is None else int(seal[1]) == _checksum(line[:at], start)


def _step_of(line: bytes) -> int:
    match = _STEP.match(line)
    if match is not None:
        return int(match[1])
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1


def _last_line(file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Return the last whole line of a file, and where it ends."""
    start, tail = size, b""
    while start and tail.count(b"\n") < 2:
        start, length = max(start - max(_CHUNK, len(tail)), 0), start
        file.seek(start)
        tail = file.read(length - start) + tail
    whole = tail[: tail.rfind(b"\n") + 1]
    return start + len(whole), whole[whole.rfind(b"\n", 0, -1) + 1 :]


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading; a missing one reads as empty."""
    return path.open("rb") if path.exists() else open(os.devnull, "rb")


def _plain(value: object) -> object:
    """Return `value` with NaN and infinities as None: JSON cannot express them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def without_nulls(row: Mapping[str, object]) -> Row:
    """Return a row without the fields that would be `null` in its line: None, and numbers that are not finite.

    >>> without_nulls({"step": 1, "loss": 0.5, "kl_coef": None, "grad_norm": float("nan")})
    {'step': 1, 'loss': 0.5}
    """
    return {name: figure for name, figure in row.items() if _plain(figure) is not None}


def line_of(row: Mapping[str, object]) -> bytes:
    """Return a row as one line; non-finite numbers become `null`."""
    try:
        text = json.dumps(row, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):  # NaN, an infinity, or a mapping that is not a dict
        text = json.dumps(_plain(row), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append bytes with one `write`; if a full disk takes only some of them, none stay."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        if written != len(line):
            os.ftruncate(descriptor, start)
            raise OSError(errno.ENOSPC, f"no space left for a line of {len(line)} bytes", str(path))
    finally:
        os.close(descriptor)
