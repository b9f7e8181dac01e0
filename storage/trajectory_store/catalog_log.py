"""The catalog of a store: a numbered chain of small records, each of which lists the segments that count.

A record is put if absent, so two processes never write the same number; the one that comes second reads the other's
record and tries again. A record is the whole state: the segments that count, rows removed for good, the schema. So a
segment that is not named does not count, whatever the folder holds, and one that is named and missing is damage. Each
record is kept in two objects before anything rests on it, so one that is damaged or missing costs nothing.
"""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trajectory_store import fs
from trajectory_store.bucket import Bucket
from trajectory_store.errors import CorruptionError, UnsyncedError, WriteFailedError
from trajectory_store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    KEY,
    KINDS,
    MAX_ORDINAL,
    MAX_SALT,
    ROW_MASK,
    Kind,
    array_json,
    checked_int,
    crc32c,
    segment_name,
    time_after,
)
from trajectory_store.schema import Schema

CATALOG = "catalog"
RETAINED_RECORDS = 64
"""Number of records kept behind the newest, so that a process that missed some of them notices."""


@dataclass(frozen=True)
class Entry:
    """A segment that counts."""

    ordinal: int
    kind: Kind
    salt: int
    merged: bool = False
    rows: int | None = None
    owners: tuple[tuple[int, int], ...] = ()
    accepted: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """The folder of the segment."""
        return segment_name(self.ordinal, merged=self.merged)

    @functools.cached_property
    def sources(self) -> list[int]:
        """The ordinals of the segments whose rows it holds."""
        return [o for first, last in self.owners for o in range(first, last + 1)] or [self.ordinal]


@dataclass(frozen=True)
class State:
    """One record of the catalog."""

    number: int
    nonce: str
    previous: str
    store: str
    time_ns: int
    next_ordinal: int
    schema: Schema
    rows_gone: int = 0
    entries: tuple[Entry, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    claim: tuple[str, int] | None = None

    def with_entry(self, entry: Entry) -> State:
        """Return this state with one more segment."""
        kept_entries = [e for e in self.entries if e.ordinal != entry.ordinal]
        entries = tuple(sorted([*kept_entries, entry], key=lambda e: e.ordinal))
        return replace(self, entries=entries, next_ordinal=max(self.next_ordinal, entry.ordinal + 1))

    def without(self, ordinals: Collection[int]) -> State:
        """Return this state without some segments, whose rows are in another one."""
        return replace(self, entries=tuple(e for e in self.entries if e.ordinal not in ordinals))

    def dropped(self, ordinals: Collection[int], rows_gone: int = 0) -> State:
        """Return this state without some segments, whose rows are gone for good."""
        gone = {o for e in self.entries if e.ordinal in ordinals for o in e.sources}
        gone |= {o for first, last in self.gone for o in range(first, last + 1)}
        return replace(self.without(ordinals), rows_gone=self.rows_gone + rows_gone, gone=runs_of(sorted(gone)))

    def was_removed(self, ordinal: int) -> bool:
        """Return whether the rows of a segment were removed for good."""
        return any(first <= ordinal <= last for first, last in self.gone)

    def to_bytes(self) -> bytes:
        """Return the content of each of the two objects of the record: one line."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "role": "catalog",
            "number": self.number,
            "nonce": self.nonce,
            "previous": self.previous,
            "store": self.store,
            "time_ns": self.time_ns,
            "next_ordinal": self.next_ordinal,
            "rows_gone": self.rows_gone,
            "claim": self.claim,
            "segments": [[e.ordinal, e.kind, e.salt, e.merged, e.rows, e.owners, e.accepted] for e in self.entries],
            "gone": self.gone,
            "schema": self.schema.to_json(),
        }
        line = json.dumps(body, separators=(",", ":")).encode()
        return b"%08x %s\n" % (crc32c(line), line)

    @classmethod
    def from_bytes(cls, raw: bytes, number: int, store: str, where: str) -> State:
        """Parse an object of a record."""
        state = _parse(raw, number)
        if state is None:
            raise CorruptionError(f"{where} is damaged: it does not match its checksum.")
        if state.store != store:
            raise CorruptionError(f"{where} is a record of another store ({state.store}; this store is {store}).")
        return state


def _parse(raw: bytes, number: int) -> State | None:
    try:
        line = raw[9:-1]
        if raw[:9] + raw[-1:] != b"%08x \n" % crc32c(line):
            return None
        body: Any = json.loads(line)
        following = checked_int(body["next_ordinal"], MAX_ORDINAL + 1)
        claim = body["claim"]
        return State(
            number=checked_int(body["number"], number, number),
            nonce=str(body["nonce"]),
            previous=str(body["previous"]),
            store=str(body["store"]),
            time_ns=checked_int(body["time_ns"]),
            next_ordinal=following,
            rows_gone=checked_int(body["rows_gone"]),
            entries=tuple(_parse_entry(fields, following) for fields in body["segments"]),
            gone=tuple((checked_int(a, b), checked_int(b, following - 1)) for a, b in body["gone"]),
            claim=None if claim is None else (str(claim[0]), checked_int(claim[1])),
            schema=Schema.from_json(body["schema"]),
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _parse_entry(fields: Any, following: int) -> Entry:
    ordinal, kind, salt, merged, rows, owners, accepted = fields
    if kind not in KINDS or type(merged) is not bool:
        raise ValueError(kind, merged)
    runs = tuple((checked_int(first, last), checked_int(last, following - 1)) for first, last in owners)
    rows = None if rows is None else checked_int(rows)
    losses = tuple((checked_int(first, last), checked_int(last, ROW_MASK)) for first, last in accepted)
    return Entry(checked_int(ordinal, following - 1), kind, checked_int(salt, MAX_SALT), merged, rows, runs, losses)


@functools.lru_cache(maxsize=16)
def record_keys(number: int) -> tuple[str, str]:
    """The keys of a record's two objects; the first is put first, and only if there is none."""
    return f"{CATALOG}/{number:012d}.rec", f"{CATALOG}/{number:012d}.copy"


def number_of(key: str) -> int | None:
    """The number of the record that an object belongs to, or None if the key names something else."""
    name = key.rpartition("/")[2]
    stem, dot, end = name.partition(".")
    return int(stem) if dot and end in ("rec", "copy") and stem.isdigit() and len(stem) == 12 else None


def catalog_json(root: Mapping[str, Any]) -> bytes:
    """The zarr.json of the folder of catalog records: an empty array, so that Zarr readers ignore the records.

    Its attributes are the second copy of those of the root.
    """
    return array_json([0], np.dtype("uint8"), ["records"], attributes=root)


def put_first(bucket: Bucket, document: bytes, first: State) -> None:
    """Put the first record, which follows from the root: every process puts the same bytes."""
    bucket.put_once(f"{CATALOG}/{KEY}", document)
    for key in record_keys(0):
        bucket.put_once(key, first.to_bytes())


class Journal:
    """Reads and extends the chain of records."""

    state: State

    def __init__(self, bucket: Bucket, document: bytes, first: State) -> None:
        self._bucket = bucket
        self._document = document
        self._store = first.store
        self.top = -1
        self.lost = False
        """Whether no record can be read, and the store has segments."""
        self._stamp: int | None = None
        self.problems: list[str] = []
        if not self.catch_up():
            self.state = first  # the creator was killed, or is slower than this process, or all records are lost
            self.lost = bool(set(bucket.keys("")) - {KEY, f"{CATALOG}/{KEY}", *record_keys(0)})
            if self.lost:
                foreign = [words for words in self.problems if "record of another store" in words]
                if foreign and bucket.get(f"{CATALOG}/{KEY}") != document:  # the store was removed and made again
                    raise CorruptionError(foreign[0])
                self.problems.append(
                    f"{bucket.where}/{CATALOG} has no readable record: the state is reconstructed from the segments"
                )

    @property
    def is_sound(self) -> bool:
        """Whether the newest record that is known of could be read; nothing is removed on the word of an older one."""
        return not self.lost and self.top <= self.state.number

    def catch_up(self) -> bool:
        """Read the newest record if it is newer than `state`; return whether it is."""
        stamp = self._bucket.stamp(record_keys(self.top + 1)[0])
        if stamp is not None and stamp == self._stamp:
            return False
        newer = self._read_newest()
        self._stamp = stamp  # only now: if reading failed, the next call reads again
        return newer

    def _numbers(self, after: int = -1) -> list[int]:
        """Return the numbers of the existing records above `after`, ascending."""
        keys = self._bucket.keys(f"{CATALOG}/", f"{CATALOG}/" if after < 0 else max(record_keys(after)))
        return sorted({number for key in keys if (number := number_of(key)) is not None})

    def _read(self, number: int) -> State | None:
        """Return a record from the first of its objects that is good, or None if both are gone."""
        wrong: list[CorruptionError] = []
        for key in record_keys(number):
            raw = self._bucket.get(key)
            try:
                if raw is not None:
                    state = State.from_bytes(raw, number, self._store, f"{self._bucket.where}/{key}")
                    self.problems += [str(error) for error in wrong if str(error) not in self.problems]
                    return state
            except CorruptionError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]
        return None

    def _read_newest(self) -> bool:
        unreadable: list[int] = []
        for number in reversed(self._numbers(self.top)):
            try:
                state = self._read(number)
            except CorruptionError as error:
                self.problems += [str(error)] * (str(error) not in self.problems)
                unreadable.append(number)
                continue
            if state is None:  # removed since it was listed, so there are newer ones
                return self._read_newest()
            self.state, self.lost = state, False
            self.top = self._after(number, unreadable)
            return True
        self.top = self._after(self.top, unreadable)
        return False

    def _after(self, top: int, unreadable: Sequence[int]) -> int:
        """Return the number that is taken last: that of a damaged record counts, but not a stray one's far above."""
        for number in sorted(unreadable):
            if number <= top + RETAINED_RECORDS:
                top = max(top, number)
        return top

    def change(self, step: Callable[[State], State | None], newest_ns: int = 0) -> State | None:
        """Add a record."""
        while True:
            if not self.catch_up() and self.top < 0:
                put_first(self._bucket, self._document, self.state)
                continue
            before = self.state
            next_state = step(before)
            if next_state is None:
                return None
            number = self.top + 1
            if not self._follows(before):
                continue
            now = time_after(max(before.time_ns, newest_ns))
            state = replace(next_state, number=number, nonce=fs.token(8), previous=before.nonce, time_ns=now)
            if self._bucket.put_once(record_keys(number)[0], state.to_bytes()) and self._counts(state):
                self.state, self.top, self.lost = state, number, False
                self._put_copy()
                self._prune(number)
                return state

    def put_copy(self) -> None:
        """Put the second object of the newest record, if its writer was killed before it could.

        Before it is there, nothing is committed or removed on the record's word.
        """
        if self._bucket.get(record_keys(self.state.number)[1]) is None:
            self._put_copy()

    def _put_copy(self) -> None:
        try:
            self._bucket.put_once(record_keys(self.state.number)[1], self.state.to_bytes())
        except WriteFailedError as error:
            raise UnsyncedError(
                error.errno, f"the copy of a record could not be written: {error}", self._bucket.where
            ) from error

    def _follows(self, before: State) -> bool:
        """Return whether the record that this process followed is still there; False if a newer one was put since."""
        self._bucket.check_unmoved()
        try:
            record = self._read(before.number)
            nonce = "" if record is None else record.nonce
        except CorruptionError as error:
            record, nonce = before, "" if "another store" in str(error) else before.nonce
        if record is None and self.catch_up():
            return False
        if nonce != before.nonce:
            raise WriteFailedError(
                errno.ESTALE,
                f"record {before.number} of the catalog is not the record that this process read before: the store "
                "was removed and created again, or restored from a copy. Nothing was written; open the store "
                "again",
                self._bucket.where,
            )
        return True

    def sync(self) -> None:
        """Wait until the newest record is safe; after that, segments that it no longer names may be removed."""
        self.put_copy()
        self._bucket.sync(*record_keys(self.state.number))

    def _counts(self, state: State) -> bool:
        """Whether the number was free because it was never used, and not because its record was removed long ago."""
        for number in self._numbers(state.number):
            try:
                record = self._read(number)
                if record is not None:
                    return (number, record.previous) == (state.number + 1, state.nonce)
            except CorruptionError:  # a stray one, or damaged: one that can be read decides
                if number == state.number + 1:
                    return False
        return True

    def _prune(self, number: int) -> None:
        """Remove old records; more than `RETAINED_RECORDS` are left, because another process may be listing them now.

        Copies of records that newer ones follow are of no use.
        """
        if number % (RETAINED_RECORDS // 4) == 0:
            numbers = self._numbers()
            useless = [record_keys(n)[1] for n in numbers if n < number - RETAINED_RECORDS // 4]
            old = [record_keys(n)[0] for n in numbers if n < number - 2 * RETAINED_RECORDS]
            self._bucket.delete([*old, *useless])

    def missing(self) -> list[str]:
        """Return the missing and the damaged objects of records as text, for `verify`."""
        numbers = self._numbers()
        newest = max(numbers, default=-1)  # records far behind it may be gone, or left by a process that slept
        expected = set(numbers) | set(range(max(0, newest - RETAINED_RECORDS), newest))
        keys = [key for number in sorted(expected) for key in record_keys(number)]
        problems = list(self.problems)
        for key, raw in zip(keys, self._bucket.get_many(keys), strict=True):
            number, where = number_of(key) or 0, f"{self._bucket.where}/{key}"
            try:
                if raw is None and newest - RETAINED_RECORDS <= number and key == record_keys(number)[0]:
                    problems.append(f"{where} is missing")  # a copy may never have been put: its writer was killed
                elif raw is not None:
                    State.from_bytes(raw, number, self._store, where)
            except CorruptionError as error:
                problems.append(str(error))
        return list(dict.fromkeys(problems))


def runs_of(ordinals: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return sorted numbers as runs `(first, last)`.

    >>> runs_of([1, 2, 3, 7])
    ((1, 3), (7, 7))
    """
    out: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if out and out[-1][1] + 1 == ordinal:
            out[-1] = (out[-1][0], ordinal)
        else:
            out.append((ordinal, ordinal))
    return tuple(out)


def owners_of(entries: Sequence[Entry]) -> tuple[tuple[int, int], ...]:
    """Return the ordinals whose rows some segments hold, as runs."""
    return runs_of(sorted({ordinal for entry in entries for ordinal in entry.sources}))
