"""Simulated power losses: every write since the last sync may be there or not, sector by sector.

The file operations of two writers that append, update and compact are recorded. For a moment in that record, a state
of the disk is drawn: what was synced is there; of what was not, each 512-byte sector, each file size, each folder entry
and each removal is there or not by the toss of a coin, which is more hostile than any journal: a commit's record may be
there without its data. What a reader sees of it is judged against what was acknowledged until then. The
default run draws a few hundred states; set `STORE_STATES=1500` for the long one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trajectory_store import CorruptionError, StoreError, TrajectoryStore, fs
from trajectory_store.format import MAGIC

from ._world import MOST_ROWS, SCHEMA, UPDATED, Judge, read_all, rows_of, stamps_of, values_of

STATES = int(os.environ.get("STORE_STATES", "240"))
SECTOR = 512
RECORDED = ("pwrite", "write_file", "create_sized", "mkdir", "rename", "link", "remove_file", "remove_tree")
SYNCS = ("datasync", "sync_path")


class Recorder:
    """Wraps the file operations of the store and notes them in order; files are numbered, as inodes are used again."""

    def __init__(self, monkeypatch, root):
        self.events: list[tuple] = []
        self.files: dict[tuple[int, int], int] = {_inode(root.stat()): 0}
        self.inside = threading.local()
        self.last = 0
        self.sync_s = 0.0
        for name in (*RECORDED, *SYNCS):
            if hasattr(fs, name):
                # The one place that knows the order in which the store's file operations began and ended.
                monkeypatch.setattr(fs, name, self.wrap(name, getattr(fs, name)))

    def wrap(self, name, real):
        """Note the operation when it is done, a sync with the moment at which it began, a removal before it is done."""

        def call(*arguments, **options):
            began = len(self.events)
            if name.startswith("remove"):
                getattr(self, name)(*arguments)
            if name in SYNCS:
                time.sleep(self.sync_s)
            inside, self.inside.name = getattr(self.inside, "name", None), name
            try:
                result = real(*arguments, **options)
            finally:
                self.inside.name = inside
            if name in SYNCS:
                self.events.append(("sync", self.file(arguments[0]), began))
            elif name in ("rename", "link"):
                self.moved(name, *arguments)
            elif not name.startswith("remove") and inside != "write_file":
                getattr(self, name)(*arguments, **options)
            return result

        return call

    def file(self, where):
        """The number of a file, by descriptor or path."""
        status = os.fstat(where) if isinstance(where, int) else os.stat(where)
        return self.files.setdefault(_inode(status), self.next_number())

    def next_number(self):
        """A number that no file has had."""
        self.last += 1
        return self.last

    def entry(self, path, kind, before=None):
        """A name in a folder."""
        path = Path(path)
        if before is None and kind != "link":
            self.files[_inode(os.stat(path))] = self.next_number()
        self.events.append(("entry", self.file(path.parent), path.name, self.file(path), path.is_dir(), before))

    def pwrite(self, fd, data, offset):
        """Bytes."""
        self.events.append(("write", self.file(fd), bytes(data), offset))

    def write_file(self, path, data):
        """A new file."""
        self.entry(path, "new")
        self.events.append(("write", self.file(path), bytes(data), 0))

    def create_sized(self, path, size, *_, **__):
        """A new file of a size."""
        self.entry(path, "new")
        self.events.append(("size", self.file(path), size))

    def mkdir(self, path):
        """A new folder."""
        self.entry(path, "new")

    def moved(self, name, source, target):
        """A name moves, or is there twice."""
        source = Path(source)
        before = (self.file(source.parent), source.name) if name == "rename" else None
        self.entry(target, name, before)

    def remove_file(self, path):
        """A name goes."""
        if os.path.lexists(path):
            self.events.append(("gone", self.file(Path(path).parent), Path(path).name))

    def remove_tree(self, path):
        """Each name below goes, on its own, then that of the folder."""
        for folder, inner, names in os.walk(path, topdown=False):
            for name in (*names, *inner):
                self.events.append(("gone", self.file(folder), name))
        self.remove_file(path)

    def log(self, view, kind, *rest):
        """What the judge is told."""
        self.events.append(("log", [view, kind, *rest]))


def _inode(status):
    return status.st_dev, status.st_ino


def draw_disk(events, coin, settled=0):
    """What is on the disk after a power loss at the end of these events, the first of which are long past."""
    synced = {}
    for event in events:
        if event[0] == "sync":
            synced[event[1]] = max(synced.get(event[1], -1), event[2])
    size, data, names = {}, {}, {0: {}}
    for at, event in enumerate(events):
        kind, file = event[:2]
        if kind in ("sync", "log"):
            continue
        safe = at < settled or synced.get(file, -1) > at
        if kind == "size" and (safe or coin()):
            size[file] = event[2]
        elif kind == "write":
            _, _, payload, offset = event
            place = 0
            while place < len(payload):
                sector = (offset + place) // SECTOR
                end = min(len(payload), (sector + 1) * SECTOR - offset)
                if safe or coin():
                    data.setdefault(file, {})[offset + place] = payload[place:end]
                    size[file] = max(size.get(file, 0), offset + end)
                place = end
        elif kind == "entry" and (safe or coin()):
            _, folder, name, child, is_folder, before = event
            if before is not None:
                names.setdefault(before[0], {}).pop(before[1], None)
            names.setdefault(folder, {})[name] = (child, is_folder)
        elif kind == "gone" and (safe or coin()):
            names.get(file, {}).pop(event[2], None)
    return size, data, names


def build(target, disk, number=0):
    """Make the folder that the disk describes."""
    size, data, names = disk
    target.mkdir(exist_ok=True)
    for name, (child, is_folder) in names.get(number, {}).items():
        if is_folder:
            build(target / name, disk, child)
            continue
        with open(target / name, "wb") as file:
            for offset, payload in data.get(child, {}).items():
                file.seek(offset)
                file.write(payload)
            file.truncate(size.get(child, 0))


def tree(root):
    """Every file below, with what is in it."""
    return {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}


class Writer:
    """A store that tells the recorder what it tries and what was acknowledged."""

    def __init__(self, name, path, recorder):
        self.view = self.name = name
        self.path, self.recorder = path, recorder
        self.number = int(name) << 12
        self.lives = 0
        self.open()

    def log(self, kind, *rest):
        """A line for the judge."""
        self.recorder.log(self.view, kind, *rest)

    def open(self):
        """A new life."""
        self.lives += 1
        self.view = f"{self.name}.{self.lives}"
        self.log("look")
        self.store = TrajectoryStore.open(self.path, "a")
        self.log("saw", self.store.watermark)

    def refresh(self):
        """Take in what the other one wrote."""
        self.log("look")
        self.log("saw", self.store.refresh())

    def append(self, count):
        """Rows in one commit."""
        self.number += 1
        self.log("add?", self.number, count)
        keys = list(range(self.number * MOST_ROWS, self.number * MOST_ROWS + count))
        self.log("add", self.number, self.store.append(rows_of(keys)).tolist())

    def append_at_once(self, *counts):
        """Several commits from as many threads, to the judge as many writers; syncs are slow, so commits share them."""

        def append(number, count):
            keys = list(range(number * MOST_ROWS, number * MOST_ROWS + count))
            self.recorder.log(f"{self.view}.{number}", "add?", number, count)
            self.recorder.log(f"{self.view}.{number}", "add", number, self.store.append(rows_of(keys)).tolist())

        self.recorder.sync_s = 0.001
        first, self.number = self.number + 1, self.number + len(counts)
        with ThreadPoolExecutor(len(counts)) as pool:
            list(pool.map(append, range(first, first + len(counts)), counts))
        self.recorder.sync_s = 0.0

    def update(self, step, *columns):
        """Later values for every so many rows."""
        ids = self.store.ids()[::step]
        keys = stamps_of(self.store.read(ids))[0]
        self.number += 1
        self.log("set?", self.number, ids.tolist(), columns)
        self.store.update(ids, **values_of(self.number, keys, list(columns)))
        self.log("set", self.number)


def two_writers(path, recorder):
    """Appends, also from several threads, updates, a compaction with both open, one with one closed, restarts."""
    one, two = Writer("1", path, recorder), Writer("2", path, recorder)
    for count in (1, 5, 2):
        one.append(count)
    two.refresh()
    two.update(2, "score", "note")
    two.append(9)
    two.append_at_once(1, 2, 1, 1)
    one.refresh()
    one.update(3, "ref", "uses", "score")
    one.store.close()
    two.refresh()
    two.store.compact()
    two.append(3)
    two.update(2, *UPDATED)
    one.open()
    one.append(12)
    one.update(4, "note")
    two.refresh()
    two.update(5, "score")
    two.store.close()
    one.refresh()
    one.store.compact()
    one.append(4)
    one.append_at_once(2, 1, 3)
    one.update(1, "uses")
    one.store.close()


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder in memory, where there is one; what readers of objects fetch goes there, too."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="power-", dir=memory if os.access(memory, os.W_OK) else tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["power", "group", "process"])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_power_losses(base, monkeypatch, backend, durability):
    """Acknowledged rows and updates are there (power, group), visible rows are whole (always), appends go on."""
    run_power_losses(base, monkeypatch, backend, durability)


def run_power_losses(base, monkeypatch, backend, durability):
    """Record the writers, then draw states."""
    origin = base / "origin"
    origin.mkdir()
    with monkeypatch.context() as patches:
        recorder = Recorder(patches, origin)
        sizes = {"segment_rows": 14, "segment_elements": 900}
        TrajectoryStore.create(origin / "s", SCHEMA, backend=backend, durability=durability, **sizes).close()
        created = len(recorder.events)
        two_writers(origin / "s", recorder)
    events = recorder.events
    build(base / "whole", draw_disk(events, lambda: True))
    assert tree(base / "whole") == tree(origin), "some writes did not go through trajectory_store.fs"
    turns = [i for i, e in enumerate(events) if e[0] in ("entry", "gone", "log") and i >= created]
    records = [i for i, e in enumerate(events) if e[0] == "write" and e[2].startswith(MAGIC)]
    lost = 0
    for state in range(max(1, STATES // 6)):
        rng = random.Random(state)
        moment = rng.randrange(created, len(events) + 1)
        if state % 3 == 1:
            moment = min(len(events), max(created, rng.choice(turns) + rng.randrange(-1, 3)))
        elif state % 3 == 2 and records:  # after a commit's record, while its files are synced
            moment = min(len(events), rng.choice(records) + rng.randrange(1, 8))
        chance = rng.choice([0.0, 0.1, 0.5, 0.9])
        past = events[:moment]
        # What the system has written back by itself meanwhile is safe whatever was promised.
        settled = rng.randrange(created, moment + 1) if rng.random() < 0.5 else created
        target = base / f"state{state}"
        build(target, draw_disk(past, lambda rng=rng, chance=chance: rng.random() < chance, settled))
        what = f"{backend}, {durability}, state {state}, moment {moment} of {len(events)}, {events[moment - 1][:3]}"
        lost += check(target / "s", past, len(past) if durability != "process" else settled, what)
        shutil.rmtree(target)
    if durability == "process":
        assert lost > 0, "the simulation never lost an unsynced row, so it proves nothing"


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_what_was_flushed_is_on_the_disk(base, monkeypatch, backend):
    """Of every segment, also of another writer, with all names and the store itself, though nothing was promised."""
    origin = base / "origin"
    origin.mkdir()
    with monkeypatch.context() as patches:
        recorder = Recorder(patches, origin)
        TrajectoryStore.create(origin / "s", SCHEMA, backend=backend, segment_rows=14, segment_elements=900).close()
        one, two = Writer("1", origin / "s", recorder), Writer("2", origin / "s", recorder)
        for count in (9, 9, 9, 3):
            one.append(count)
            two.append(1)
            one.update(2, "score", "note")
        two.store.close()
        one.store.flush()
        flushed, wanted = len(recorder.events), read_all(one.store)
        one.append(2)
        one.store.flush()
        twice, more = len(recorder.events), read_all(one.store)
        one.store.close()
    for moment, expected in ((flushed, wanted), (twice, more)):
        path = base / str(moment)
        build(path, draw_disk(recorder.events[:moment], lambda: False))
        with TrajectoryStore.open(path / "s") as store:
            assert read_all(store) == expected
            assert store.verify().ok


def readable(store, promised):
    """What can be read; where no sync was promised, a row may be named as damaged, and is read unchecked."""
    try:
        return read_all(store)
    except CorruptionError:
        if promised:
            raise
    ids, keys, stamps = [], [], {name: [] for name in UPDATED}
    with TrajectoryStore.open(store.path) as reader:  # it has met no torn update, which hides its rows
        for row in reader.ids().tolist():
            with contextlib.suppress(CorruptionError):
                key, stamp = stamps_of(reader.read([row], checked=False))  # a torn update may be one of any row
                ids.append(row)
                keys += key
                for name in UPDATED:
                    stamps[name] += stamp[name]
    assert set(ids) - set(store.ids().tolist()) <= set(store.verify().damaged_ids.tolist())
    return [ids, keys, stamps]


def check(path, past, safe, what):
    """Judge what a reader sees, then append and update; returns how many acknowledged rows are not there.

    What was acknowledged among the first `safe` events was promised to last.
    """
    told = [(at, event[1]) for at, event in enumerate(past) if event[0] == "log"]
    promised = safe == len(past)
    judge = Judge().feed([event for at, event in told if at < safe or event[1] in ("add?", "set?")])
    acknowledged = sum(len(event[3]) for _, event in told if event[1] == "add")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if promised else "ignore", RuntimeWarning)
        try:
            with TrajectoryStore.open(path, "a") as store:
                found = readable(store, promised)
                judge.feed([["after", "look"], ["after", "saw", store.watermark], ["after", "read", *found, True]])
                served = [row for row in found[0] if store.holds([row])[0]][:5]
                ids = store.append(rows_of([1, 2, 3]))
                store.update([*served, *ids], score=7.0)
                if promised:
                    assert store.verify().ok, f"{what}: {store.verify()}"
            with TrajectoryStore.open(path) as store:
                again = readable(store, promised)
                assert again[1] == [*found[1], 1, 2, 3], what
            with TrajectoryStore.open(path) as store:
                scores = store.read_scalars("score", [*served, *ids], checked=promised)
                assert scores.tolist() == [7.0] * (len(served) + 3)
        except StoreError as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    problems = judge.close()
    assert not problems, f"{what}: {problems[:5]}"
    return acknowledged - len(found[0])
