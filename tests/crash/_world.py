"""What the crash tests write, and the judge of what they read back.

A row is a function of its key, and a later value a function of its update's number (the *stamp*; 0 is the row as it
was appended). So whoever reads a row sees by itself whether it is torn, and an outside log of attempts and
acknowledgements is enough to say whether anything was lost, doubled or stale.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store import Column, RaggedArray, Schema

SCHEMA = Schema(
    [
        Column("key", "int64"),
        Column("x", "int32", ragged=True),
        Column("text", "str"),
        Column("score", "float64", mutable=True, fill=0.0),
        Column("uses", "int64", mutable=True),
        Column("ref", "float32", ragged=True, mutable=True, fill=-1.0),
        Column("note", "str", mutable=True, fill="-"),
    ]
)
UPDATED = ("score", "uses", "ref", "note")
MOST_ROWS = 256
"""In one commit. `key = number of the commit * MOST_ROWS + place`; commits and stamps are numbered from 1."""


class TornError(AssertionError):
    """Values of a row that do not belong together."""


def length_of(key: int) -> int:
    """How many tokens the row has; 0 is among them, and now and then several sectors."""
    return key * 7 % 13 if key % 17 else 300


def rows_of(keys: list[int]) -> dict[str, Any]:
    """The batch for `append`."""
    return {
        "key": keys,
        "x": RaggedArray.from_rows([np.full(length_of(key), key % 50_000, np.int32) for key in keys], "int32"),
        "text": [f"{key} " * (key % 5) for key in keys],
    }


def note_of(stamp: int) -> str:
    """The text that an update gives."""
    return f"n{stamp} " + "\u00e9" * (stamp % 50) if stamp else "-"


def values_of(stamp: int, keys: list[int], columns: list[str]) -> dict[str, Any]:
    """The arguments for `update`."""
    values = {
        "score": [float(stamp)] * len(keys),
        "uses": np.full(2 * len(keys), stamp)[::2],
        "ref": [np.full(length_of(key), stamp, np.float32) for key in keys],
        "note": [note_of(stamp)] * len(keys),
    }
    return {name: values[name] for name in columns}


def stamps_of(rows: dict[str, Any]) -> tuple[list[int], dict[str, list[int | None]]]:
    """The keys of rows that were read, and per updated column the stamps (None: an empty row cannot tell).

    Raises:
        TornError: a value is of another row, or half of one update and half of another.
    """
    keys = [int(key) for key in rows["key"]]
    stamps: dict[str, list[int | None]] = {name: [] for name in UPDATED}
    for at, key in enumerate(keys):
        tokens, ref, note = np.asarray(rows["x"][at]), np.asarray(rows["ref"][at]), rows["note"][at]
        stamps["score"].append(int(rows["score"][at]))
        stamps["uses"].append(int(rows["uses"][at]))
        stamps["ref"].append(max(0, int(ref[0])) if len(ref) else None)
        digits = note[1:].split(" ")[0]
        stamps["note"].append(int(digits) if note.startswith("n") and digits.isdecimal() else 0)
        whole = (
            len(tokens) == len(ref) == length_of(key)
            and bool((tokens == key % 50_000).all())
            and rows["text"][at] == f"{key} " * (key % 5)
            and (not len(ref) or bool((ref == (stamps["ref"][at] or -1)).all()))
            and note == note_of(stamps["note"][at] or 0)
        )
        if not whole:
            raise TornError(f"key {key}: {[(name, rows[name][at]) for name in rows]}"[:600])
    return keys, stamps


def read_all(store: Any) -> list[Any]:
    """Everything that a store shows, as the `read` event of the judge: ids, keys, stamps."""
    ids = store.ids()
    keys, stamps = stamps_of(store.read(ids))
    return [ids.tolist(), keys, stamps]


def read_log(path: Path) -> list[list[Any]]:
    """The events of a log that killed processes appended to; half a line does not parse and never happened."""
    events = []
    for line in path.read_bytes().split(b"\n"):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return [event for event in events if isinstance(event, list)]


@dataclass
class Commit:
    """Rows that somebody tried to append."""

    view: str
    count: int
    known: int
    """Rows that the writer had surely seen."""
    look: int
    """Everything acknowledged before this moment the writer had surely seen."""
    acknowledged: int | None = None


@dataclass
class Update:
    """Later values that somebody tried to give."""

    ids: frozenset[int]
    columns: frozenset[str]
    acknowledged: int | None = None


@dataclass
class View:
    """What one open store has surely seen."""

    look: int = -1
    looking: int = -1
    floor: int = 0
    own_rows: int = 0
    stamps: set[int] = field(default_factory=set)
    commits: set[int] = field(default_factory=set)


class Judge:
    """Goes through a log in its order and notes what must not be.

    The log's order is the world's: an attempt is noted before the call, an acknowledgement after it. What was
    acknowledged before a look (`open` or `refresh`) began must be visible after it; what a process has seen stays
    visible to it, a commit or an update as a whole; a value that was written by somebody who had seen another one
    wins over it. All readers agree on one order of rows and of the values of each cell.

    Events, `[view, kind, ...]`: `look`, `saw watermark`, `add? commit count`, `add commit ids`,
    `set? stamp ids columns`, `set stamp`, `read ids keys stamps whole`, `bad kind words`, `err call type words`,
    `did what`.

    Args:
        limit: `max_trajectories` of the store.
        allowed: names of StoreErrors that the medium may raise on any call.
    """

    def __init__(self, limit: int | None = None, allowed: tuple[str, ...] = ()) -> None:
        self.limit = limit
        self.allowed = allowed
        self.problems: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.commits: dict[int, Commit] = {}
        self.updates: dict[int, Update] = {}
        self.views: defaultdict[str, View] = defaultdict(View)
        self._at = 0
        self._tried = self._acked_rows = self._watermark = 0
        self._acks: list[tuple[int, int]] = [(-1, 0)]
        self._cells: defaultdict[int, list[int]] = defaultdict(list)
        self._before: defaultdict[tuple[int, str], set[tuple[int, int]]] = defaultdict(set)
        self._keys: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._ranks: dict[int, int] = {}

    def feed(self, events: list[list[Any]]) -> Judge:
        """Take in events."""
        calls = {"add?": self._add_tried, "add": self._added, "set?": self._set_tried, "set": self._set}
        calls |= {"look": self._look, "saw": self._saw, "read": self._read, "bad": self._bad, "err": self._err}
        calls |= {"did": self._did}
        for name, kind, *rest in events:
            self._at += 1
            calls[kind](name, self.views[name], *rest)
        return self

    def close(self) -> list[tuple[str, str]]:
        """Say what must not be, once all events are in: `(kind, words)`."""
        for (row, column), pairs in self._before.items():
            if _has_cycle(pairs):
                self._note("stale", f"row {row}, column {column}: readers saw an older value win, in {sorted(pairs)}")
        return self.problems

    def _note(self, kind: str, words: str) -> None:
        self.problems.append((kind, words))

    def _look(self, _name: str, view: View) -> None:
        view.looking, view.floor = self._at, self._watermark

    def _saw(self, name: str, view: View, watermark: int) -> None:
        view.look, view.own_rows = view.looking, 0
        least = max(view.floor, self._rows_acknowledged(view.look))
        if not least <= watermark <= self._tried:
            self._note("watermark", f"{name} saw {watermark}; between {least} and {self._tried} is possible")
        self._watermark = max(self._watermark, watermark)

    def _rows_acknowledged(self, moment: int) -> int:
        return self._acks[bisect_left(self._acks, (moment, 0)) - 1][1] if moment > 0 else 0

    def _add_tried(self, name: str, view: View, commit: int, count: int) -> None:
        expected_rows = self._rows_acknowledged(view.look) + view.own_rows
        self.commits[commit] = Commit(name, count, expected_rows, view.look)
        self._tried += count

    def _added(self, _name: str, view: View, commit: int, ids: list[int]) -> None:
        self.commits[commit].acknowledged = self._at
        self._acked_rows += len(ids)
        self._acks.append((self._at, self._acked_rows))
        view.own_rows += len(ids)
        view.commits.add(commit)
        for place, row in enumerate(ids):
            self._same(row, commit * MOST_ROWS + place)
        self.counts["rows"] += len(ids)

    def _same(self, row: int, key: int) -> None:
        if self._keys.setdefault(row, key) != key or self._ids.setdefault(key, row) != row:
            self._note("doubled", f"id {row} key {key}; before id {self._ids.get(key)} key {self._keys.get(row)}")

    def _set_tried(self, _name: str, view: View, stamp: int, ids: list[int], columns: list[str]) -> None:
        update = self.updates[stamp] = Update(frozenset(ids), frozenset(columns))
        for row in ids:
            for other in self._cells[row]:
                if self._visible(view, other):
                    for column in update.columns & self.updates[other].columns:
                        self._before[row, column].add((other, stamp))
            self._cells[row].append(stamp)

    def _set(self, _name: str, view: View, stamp: int) -> None:
        self.updates[stamp].acknowledged = self._at
        view.stamps.add(stamp)
        self.counts["updates"] += 1

    def _visible(self, view: View, stamp: int) -> bool:
        acknowledged = self.updates[stamp].acknowledged
        return stamp in view.stamps or (acknowledged is not None and acknowledged < view.look)

    def _read(
        self, name: str, view: View, ids: list[int], keys: list[int], stamps: dict[str, list[Any]], whole: bool
    ) -> None:
        self.counts["reads"] += 1
        if len(set(ids)) < len(ids) or len(set(keys)) < len(keys):
            self._note("doubled", f"{name} reads {len(ids)} rows, {len(set(keys))} of them different")
        for row, key in zip(ids, keys, strict=True):
            self._same(row, key)
        view.commits.update(key // MOST_ROWS for key in keys)
        unknown = view.commits - self.commits.keys()
        if unknown:
            self._note("torn", f"{name} reads rows of commits that nobody made: {sorted(unknown)[:5]}")
            return
        if whole:
            self._check_rows(name, view, keys)
            self._check_order(name, ids, keys)
        self._check_cells(name, view, ids, stamps)

    def _check_rows(self, name: str, view: View, keys: list[int]) -> None:
        present = set(keys)
        if self.limit is not None and len(keys) > self.limit:
            self._note("order", f"{name} shows {len(keys)} rows of at most {self.limit}")
        for number, commit in self.commits.items():
            is_visible = commit.acknowledged is not None and commit.acknowledged < view.look
            if not is_visible and number not in view.commits:
                continue
            for place in range(commit.count):
                newer = self._tried - commit.known - place - 1
                if number * MOST_ROWS + place not in present and (self.limit is None or newer < self.limit):
                    word = "was acknowledged" if commit.acknowledged is not None else "was seen"
                    self._note("lost", f"{name} lacks key {number * MOST_ROWS + place} of {commit.view}, which {word}")

    def _check_order(self, name: str, ids: list[int], keys: list[int]) -> None:
        shared = [self._ranks[row] for row in ids if row in self._ranks]
        if shared != sorted(shared):
            self._note("order", f"{name} shows the rows in another order than the reader before")
        self._ranks = {row: rank for rank, row in enumerate(ids)}
        newest = float("inf")
        last: dict[str, int] = {}
        for key in reversed(keys):
            commit = self.commits[key // MOST_ROWS]
            if newest < commit.look or last.get(commit.view, key) < key:
                self._note("order", f"{name} shows key {key} before rows that its writer had seen")
            last[commit.view] = key
            if commit.acknowledged is not None:
                newest = min(newest, commit.acknowledged)

    def _check_cells(self, name: str, view: View, ids: list[int], stamps: dict[str, list[Any]]) -> None:
        touched = [(at, row) for at, row in enumerate(ids) if row in self._cells]
        for column, stamped in stamps.items():
            for at, row in enumerate(ids):
                value = stamped[at]
                if not value:
                    continue
                update = self.updates.get(value)
                if update is None or row not in update.ids or column not in update.columns:
                    self._note("torn", f"{name}: row {row}, column {column} reads {value}, which nobody gave it")
                else:
                    view.stamps.add(value)
        for column, stamped in stamps.items():
            for at, row in touched:
                value = stamped[at]
                if value is None:
                    continue
                for other in self._cells[row]:
                    if other == value or column not in self.updates[other].columns or not self._visible(view, other):
                        continue
                    if value == 0:
                        self._note("lost", f"{name}: row {row}, column {column} has not update {other}")
                    self._before[row, column].add((other, value))

    def _bad(self, name: str, _view: View, kind: str, words: str) -> None:
        self._note(kind, f"{name}: {words}")

    def _err(self, name: str, _view: View, call: str, kind: str, words: str) -> None:
        self.counts[f"{kind} in {call}"] += 1
        evicted = kind in ("MissingRowError", "SegmentGoneError") and self.limit is not None
        held = call == "compact" and kind != "CorruptionError"
        folded = kind == "SnapshotGoneError"
        if not (evicted or held or folded or kind in self.allowed):
            self._note("alarm" if kind == "CorruptionError" else "refused", f"{name}: {call}: {kind}: {words}")

    def _did(self, _name: str, _view: View, what: str) -> None:
        self.counts[what] += 1


def _has_cycle(pairs: set[tuple[int, int]]) -> bool:
    """Whether no order satisfies all of "first before second"."""
    nodes = {node for pair in pairs for node in pair}
    while nodes:
        free = nodes - {later for earlier, later in pairs if earlier in nodes}
        if not free:
            return True
        nodes -= free
    return False
