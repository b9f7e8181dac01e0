"""JSON lines on disk: whole lines, appended in one write; and one line per optimizer step with an index beside it.

`metrics.jsonl` and `ledger.jsonl` are plain JSON lines in the order of the steps. Each has an index of 24 bytes a row
(step, start, length, CRC32C of the line, CRC32C of these): the number of rows, any row and the last one are found in
constant time, and a line that was cut, changed or removed is detected. The index is written after the line; rows that
it lacks are found by reading the lines after its last one, so no reader loads more than it needs. A damaged entry
disables the index, but loses no row. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, overload

import google_crc32c

from rlhf_pipeline.errors import DataError, typed
from rlhf_pipeline.run.files import sync_path

Row = dict[str, Any]

_FIELDS: Final = struct.Struct("<IqII")
_ENTRY: Final = struct.Struct("<IqIII")
"""The fields, and their CRC32C."""
_CHUNK: Final = 1 << 20


class RowEntry(NamedTuple):
    """The index entry of one row."""

    step: int
    start: int
    """Of its line, in bytes from the start of the file."""
    length: int
    """Of its line, including the newline."""
    checksum: int
    """CRC32C of its line."""

    @property
    def end(self) -> int:
        """Where the next line starts."""
        return self.start + self.length


_BEFORE_ALL: Final = RowEntry(step=0, start=0, length=0, checksum=0)
"""Stands for the last row of a file without rows."""


class StepRows(Sequence[Row]):
    """The rows of a file with one JSON line per step, by place or by step.

    The object sees the rows that existed when it was made or last refreshed; only the writing process may call `append`
    and `drop_from`.

    Args:
        path: the file; it need not exist yet.

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
        self.index_path = path.with_suffix(".index")
        self._num_indexed = 0
        self._later: list[RowEntry] = []
        """Rows that the index lacks."""
        self._torn = 0
        self.num_passed_over = 0
        """Entries of the index whose lines are gone or changed, at the end of the file."""
        self._last = _BEFORE_ALL
        """The entry of the last row."""
        self._mended = False
        self.refresh()

    def refresh(self) -> int:
        """Read what is on disk now, and return the number of rows.

        Raises:
            DataError: a line that the index lacks is not a row.
        """
        self._last, self._mended = _BEFORE_ALL, False
        if not self.path.exists() and not self.index_path.exists():
            self._num_indexed, self._later, self._torn, self.num_passed_over = 0, [], 0, 0
            return 0
        size = _size(self.path)
        written = _size(self.index_path) // _ENTRY.size
        known, gone = written, 0
        while known:
            entry = self._indexed(known - 1)
            if entry is not None and self._holds(entry, size):
                self._last = entry
                break
            known -= 1
            gone += entry is not None
        begin, later = self._last.end, self._later
        if not (known == self._num_indexed and later and later[-1].end == size and later[0].start == begin):
            self._num_indexed, self.num_passed_over = known, gone
            self._later = list(self._scan(begin))
        self._last = self._later[-1] if self._later else self._last
        self._torn = size - self._last.end
        return len(self)

    @property
    def is_torn(self) -> bool:
        """Whether a kill cut the last line short; it is not among the rows."""
        return self._torn > 0

    @property
    def last_step(self) -> int:
        """The step of the last row; 0 if there are no rows."""
        return self._last.step

    def __len__(self) -> int:
        return self._num_indexed + len(self._later)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        at = place + len(self) if place < 0 else place
        if not 0 <= at < len(self):
            raise IndexError(place)
        entry = self.entry(at)
        line = _read(self.path, entry.start, entry.length)
        if google_crc32c.value(line) != entry.checksum:
            raise DataError(f"{self.path}: line {at + 1} is not as it was written. {_RESTORE}")
        return self._row(line, at)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows, oldest first, with one in memory at a time."""
        last = self._last.end
        with _opened(self.path) as file:
            at, place = 0, 0
            while at < last and (line := file.readline()):
                at += len(line)
                yield self._row(line, place)
                place += 1

    def of_step(self, step: int) -> Row | None:
        """Return the row of a step, or None."""
        place = self.place_of(step)
        return None if place is None else self[place]

    def known(self, step: int) -> Row:
        """Return the row of a step that must exist.

        Raises:
            DataError: it does not.
        """
        row = self.of_step(step)
        if row is None:
            raise DataError(f"{self.path} has no row of step {step}. Restore it from a copy.")
        return row

    def place_of(self, step: int) -> int | None:
        """Return the place of a step's row, or None."""
        place = self._first_from(step)
        return place if place < len(self) and self.entry(place).step == step else None

    def spread(self, most: int) -> list[Row]:
        """Return at most this many rows, spread evenly, including the first and the last."""
        if len(self) <= most:
            return list(self)
        return [self[round(i * (len(self) - 1) / (most - 1))] for i in range(most)]

    def entry(self, place: int) -> RowEntry:
        """Return the entry of the row at a place, from 0.

        Raises:
            DataError: another process has removed the row.
        """
        found = self._indexed(place) if place < self._num_indexed else None
        if found is None and place < self._num_indexed:
            self._num_indexed, self._mended = 0, False  # an index with a damaged entry is not trusted
            self._later = list(self._scan(0))
            self._last = self._later[-1] if self._later else _BEFORE_ALL
        if found is None:
            if place - self._num_indexed >= len(self._later):
                raise DataError(f"another process has removed line {place + 1} of {self.path}. Read it again.")
            found = self._later[place - self._num_indexed]
        return found

    def problems(self) -> Iterator[str]:
        """Yield the problems: every line is read and compared with the index."""
        self.refresh()  # an earlier read may have found the index damaged, and used the lines since
        if self.num_passed_over:
            yield (
                f"{self.num_passed_over} lines are not as they were written, from line {self._num_indexed + 1} on: "
                "they were cut, changed or taken out"
            )
        with _opened(self.path) as file, _opened(self.index_path) as index:
            for place in range(len(self)):
                indexed = place < self._num_indexed
                entry = _entry(index.read(_ENTRY.size)) if indexed else self._later[place - self._num_indexed]
                if entry is None:
                    yield (
                        f"entry {place + 1} of {self.index_path.name} is damaged. Remove it, and it is made again from "
                        f"the lines: rm {typed(self.index_path)}"
                    )
                    return
                if entry.step != place + 1:
                    yield (
                        f"line {place + 1} is step {entry.step}, expected step {place + 1}: lines are missing, "
                        "repeated or moved"
                    )
                    return
                line = file.readline()
                if len(line) != entry.length or google_crc32c.value(line) != entry.checksum:
                    yield f"line {place + 1} is not as it was written: it was cut, changed or moved"
                    return

    def recheck(self, *, lines: bool = True) -> None:
        """Compare the newest rows with their checksums; an index with a damaged entry is written again from the lines.

        Only the writing process may call this. It looks at a bounded number of rows; `problems` looks at all.

        Args:
            lines: whether the lines are compared, too, and not only the entries of the index.

        Raises:
            DataError: a line has changed since it was written.
        """
        places, indexed = range(max(len(self) - _LOOK_BACK, 0), len(self)), self._num_indexed
        for place in places:
            self.entry(place)
        if self._num_indexed < indexed:
            self.mend()
        for place in places if lines else ():
            self[place]

    def mend(self) -> None:
        """Cut off what a kill or a power loss left at the end, and complete the index.

        Raises:
            DataError: whole lines follow one that has changed: the file was edited or damaged.
        """
        if self._mended:
            return
        if self.num_passed_over and self._later:
            raise DataError(f"{self.path}: line {self._num_indexed + 1} is not as it was written. {_RESTORE}")
        if (self._torn or self.num_passed_over) and self.path.exists():  # a power loss may take the whole file
            os.truncate(self.path, self._last.end)
        if _size(self.index_path) != self._num_indexed * _ENTRY.size:
            os.truncate(self.index_path, self._num_indexed * _ENTRY.size)
        if self._later:
            append_line(self.index_path, b"".join(_packed(entry) for entry in self._later))
        self._num_indexed, self._later = len(self), []
        self._torn = self.num_passed_over = 0
        self._mended = True

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the row of the next step: its line, then its entry in the index.

        Raises:
            OSError: the disk is full; the file is unchanged.
        """
        self.mend()
        self._mended = False  # until both are written
        line, start = line_of(row), self._last.end
        append_line(self.path, line)
        added = RowEntry(row["step"], start, len(line), google_crc32c.value(line))
        try:
            append_line(self.index_path, _packed(added))
        except OSError:
            os.truncate(self.path, start)  # else the next row would follow a line that the writer does not know of
            raise
        self._num_indexed, self._last, self._mended = self._num_indexed + 1, added, True

    def drop_from(self, step: int) -> None:
        """Remove the rows of a step and of all later ones."""
        self.mend()
        place = self._first_from(step)
        if place == len(self):
            return
        start, last = self.entry(place).start, self.entry(place - 1) if place else _BEFORE_ALL
        self.mend()  # in case the index was found to be damaged on the way
        os.truncate(self.path, start)
        os.truncate(self.index_path, place * _ENTRY.size)
        self._num_indexed, self._last = place, last

    def sync(self) -> None:
        """Sync all rows to the disk, so that they survive a power loss."""
        sync_path(self.path)
        sync_path(self.index_path)

    def _first_from(self, step: int) -> int:
        """Return the place of the first row of this step or a later one."""
        if not len(self) or step > self.last_step:
            return len(self)
        likely = min(max(step - 1, 0), len(self) - 1)
        if self.entry(likely).step == step:
            return likely  # rows usually begin with step 1 and have no gaps
        return bisect_left(range(len(self)), step, key=lambda place: self.entry(place).step)

    def _indexed(self, place: int) -> RowEntry | None:
        """Return an entry of the index, or None if it is damaged."""
        return _entry(_read(self.index_path, place * _ENTRY.size, _ENTRY.size))

    def _holds(self, entry: RowEntry, size: int) -> bool:
        """Return whether the file has the line of an entry."""
        if not 0 <= entry.start < entry.end <= size:
            return False
        return google_crc32c.value(_read(self.path, entry.start, entry.length)) == entry.checksum

    def _scan(self, start: int) -> Iterator[RowEntry]:
        """Yield entries of the whole lines from a place in the file on."""
        if not self.path.exists():
            return
        place = self._num_indexed
        with self.path.open("rb") as file:
            file.seek(start)
            while (line := file.readline()).endswith(b"\n"):
                yield RowEntry(self._row(line, place)["step"], start, len(line), google_crc32c.value(line))
                start, place = start + len(line), place + 1

    def _row(self, line: bytes, place: int) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.path}:{place + 1}: this line is not JSON ({error}). {_RESTORE}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{self.path}:{place + 1}: this line has no whole number 'step'. {_RESTORE}")
        return row


class NewRows:
    """Follows the rows of a file while another process writes them.

    A resumed learner may replace rows. The replacements are new rows, too.

    Args:
        rows: its rows, or the file; it need not exist yet. What it holds now counts as seen.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> rows, new = StepRows(path), NewRows(path)
    >>> rows.append({"step": 1})
    >>> new.read(), new.read()
    ([{'step': 1}], [])
    """

    def __init__(self, rows: StepRows | Path) -> None:
        self.rows = StepRows(rows) if isinstance(rows, Path) else rows
        self._num = len(self.rows)
        self._checksums = [
            self.rows.entry(place).checksum for place in range(max(self._num - _LOOK_BACK, 0), self._num)
        ]

    def read(self) -> list[Row]:
        """Return the rows that have not been returned yet, oldest first."""
        total = self.rows.refresh()
        kept = min(self._num, total)
        del self._checksums[len(self._checksums) - (self._num - kept) :]
        while kept and self._checksums and self.rows.entry(kept - 1).checksum != self._checksums[-1]:
            kept -= 1
            self._checksums.pop()
        found = self.rows[kept:]
        self._checksums += [self.rows.entry(place).checksum for place in range(kept, total)]
        del self._checksums[:-_LOOK_BACK]
        self._num = total
        return found


_LOOK_BACK: Final = 4096
"""Rows whose replacement a follower notices (a resumed learner replaces at most those since a checkpoint), and that a
resume compares with their checksums."""

_RESTORE: Final = "The file was edited or damaged: restore it from a copy, or start a new run with --out OTHER_FOLDER."


def _packed(entry: RowEntry) -> bytes:
    return _ENTRY.pack(*entry, google_crc32c.value(_FIELDS.pack(*entry)))


def _entry(content: bytes) -> RowEntry | None:
    """Return the entry that `_packed` packed, or None if it is damaged."""
    if len(content) < _ENTRY.size:
        return None
    entry = RowEntry(*_FIELDS.unpack_from(content))
    return entry if content == _packed(entry) else None


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading; a missing one reads as empty."""
    return path.open("rb") if path.exists() else open(os.devnull, "rb")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, start: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), length, start)


def _plain(value: object) -> object:
    """Return `value` with NaN and infinities as None: JSON cannot express them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def line_of(row: Mapping[str, object]) -> bytes:
    """Return a row as one line; non-finite numbers become `null`."""
    try:
        text = json.dumps(row, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):  # NaN, an infinity, or a mapping that is not a dict
        text = json.dumps(_plain(row), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append bytes with one `write`; if a full disk takes only some of them, none stay.

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
