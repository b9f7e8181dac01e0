"""Simulated power losses: every write since the last sync may be there or not, sector by sector.

The file operations of a writer are recorded. For a moment in that record, a state of the disk is drawn: what
was synced is there; of what was not, each 512-byte sector, each file size and each folder entry is there
or not by the toss of a coin, which is more hostile than any journal. The default run draws a few hundred states;
set `STORE_STATES=1500` for the long one.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore, fs

STATES = int(os.environ.get("STORE_STATES", "240"))
SECTOR = 512
SCHEMA = Schema(
    [
        Column("x", "int64", ragged=True),
        Column("y", "float32", ragged=True),
        Column("key", "int64"),
        Column("text", "str"),
        Column("uses", "int32", mutable=True),
    ]
)


class Recorder:
    """Wraps the file operations of the store and notes them in order."""

    def __init__(self, monkeypatch, root):
        self.events: list[tuple] = []
        self.root = root.stat().st_ino
        for name in ("pwrite", "write_file", "create_sized", "mkdir", "rename", "datasync", "sync_path"):
            monkeypatch.setattr(fs, name, self.wrap(name, getattr(fs, name)))

    def wrap(self, name, real):
        """Do the operation, then note it."""

        def call(*arguments, **options):
            source = os.stat(arguments[0]).st_ino if name == "rename" else None
            result = real(*arguments, **options)
            getattr(self, name)(source, *arguments, **options)
            return result

        return call

    def entry(self, path, inode, kind, before=None):
        """A name in a folder."""
        path = Path(path)
        self.events.append(("entry", path.parent.stat().st_ino, path.name, inode, kind, before))

    def pwrite(self, _, fd, data, offset):
        """Bytes."""
        self.events.append(("write", os.fstat(fd).st_ino, bytes(data), offset))

    def write_file(self, _, path, data):
        """A new file; its content was noted as a write."""
        self.entry(path, os.stat(path).st_ino, "file")

    def create_sized(self, _, path, size, preallocate):
        """A new file of a size."""
        inode = os.stat(path).st_ino
        self.events.append(("size", inode, size))
        self.entry(path, inode, "file")

    def mkdir(self, _, path):
        """A new folder."""
        self.entry(path, os.stat(path).st_ino, "folder")

    def rename(self, inode, source, target):
        """A name moves."""
        source = Path(source)
        before = (source.parent.stat().st_ino, source.name)
        self.entry(target, inode, "folder" if Path(target).is_dir() else "file", before)

    def datasync(self, _, fd):
        """Everything of a file so far is safe."""
        self.events.append(("sync", os.fstat(fd).st_ino))

    def sync_path(self, _, path):
        """Everything of a file or folder so far is safe."""
        self.events.append(("sync", os.stat(path).st_ino))

    def acknowledge(self, keys):
        """The writer was told that these rows are safe."""
        self.events.append(("ack", keys))


def draw_disk(events, root, coin):
    """What is on the disk after a power loss at the end of these events."""
    last_sync = {}
    for at, event in enumerate(events):
        if event[0] == "sync":
            last_sync[event[1]] = at
    size, data, names = {}, {}, {root: {}}
    for at, event in enumerate(events):
        kind, inode = event[0], event[1]
        if kind == "size":
            if last_sync.get(inode, -1) > at or coin():
                size[inode] = event[2]
        elif kind == "write":
            _, _, payload, offset = event
            safe = last_sync.get(inode, -1) > at
            file = data.setdefault(inode, {})
            place = 0
            while place < len(payload):
                sector = (offset + place) // SECTOR
                end = min(len(payload), (sector + 1) * SECTOR - offset)
                if safe or coin():
                    file[offset + place] = payload[place:end]
                    size[inode] = max(size.get(inode, 0), offset + end)
                place = end
        elif kind == "entry":
            _, folder, name, child, what, before = event
            if last_sync.get(folder, -1) > at or coin():
                if before is not None:
                    names.setdefault(before[0], {}).pop(before[1], None)
                names.setdefault(folder, {})[name] = (child, what)
    return size, data, names


def build(target, inode, disk):
    """Make the folder that the disk describes."""
    size, data, names = disk
    target.mkdir(exist_ok=True)
    for name, (child, what) in names.get(inode, {}).items():
        path = target / name
        if what == "folder":
            build(path, child, disk)
            continue
        with open(path, "wb") as file:
            file.truncate(size.get(child, 0))
            for offset, payload in data.get(child, {}).items():
                file.seek(offset)
                file.write(payload)
            file.truncate(size.get(child, 0))


def row_of(key):
    """The row that belongs to a key."""
    length = key * 7 % 90
    return {
        "x": np.arange(length) + key,
        "y": (np.arange(length) * 3 + key).astype(np.float32),
        "key": key,
        "text": f"{key} " * (key % 9),
    }


def append(store, keys):
    """Append the rows of these keys in one commit."""
    rows = [row_of(key) for key in keys]
    data = {name: [row[name] for row in rows] for name in ("key", "text")}
    data["x"] = RaggedArray.from_rows([row["x"] for row in rows], "int64")
    data["y"] = RaggedArray.from_rows([row["y"] for row in rows], "float32")
    return store.append(data)


def check(store):
    """Every visible row is whole; returns the keys."""
    rows = store.read(store.ids())
    for key, x, y, text in zip(rows["key"].tolist(), rows["x"], rows["y"], rows["text"], strict=True):
        wanted = row_of(key)
        assert np.array_equal(x, wanted["x"])
        assert np.array_equal(y, wanted["y"])
        assert text == wanted["text"]
    return rows["key"].tolist()


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["power", "group", "process"])
def test_power_losses(tmp_path, monkeypatch, durability):
    """Acknowledged rows are there (power, group), visible rows are whole (always), appends go on."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="power-", dir=memory if os.access(memory, os.W_OK) else tmp_path))
    try:
        run_power_losses(base, monkeypatch, durability)
    finally:
        shutil.rmtree(base)


def run_power_losses(base, monkeypatch, durability):
    """Record one writer, then draw states."""
    origin = base / "origin"
    TrajectoryStore.create(origin, SCHEMA, durability=durability, segment_rows=14, segment_elements=900).close()
    pristine = shutil.copytree(origin, base / "pristine")
    with monkeypatch.context() as patches:
        recorder = Recorder(patches, origin)
        key = 0
        for _ in range(2):
            store = TrajectoryStore.open(origin, "a")
            for count in (1, 5, 2, 9, 3, 12, 1, 4):
                keys = list(range(key, key + count))
                append(store, keys)
                recorder.acknowledge(keys)
                key += count
            store.close()
    events = recorder.events
    renames = [i for i, e in enumerate(events) if e[0] == "entry" and e[5] is not None]
    assert len(renames) >= 6
    monkeypatch.setattr(fs, "boot_id", lambda: "the next boot")
    lost_most = 0
    for state in range(STATES // 3):
        rng = random.Random(state)
        moment = rng.choice(renames) + rng.randrange(-3, 4) if state % 3 == 0 else rng.randrange(len(events) + 1)
        chance = rng.choice([0.1, 0.5, 0.9])
        past = events[: max(0, moment)]
        disk = draw_disk(past, recorder.root, lambda rng=rng, chance=chance: rng.random() < chance)
        target = base / f"state{state}"
        shutil.copytree(pristine, target)
        build(target, recorder.root, disk)
        acknowledged = [k for e in past if e[0] == "ack" for k in e[1]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if durability == "process" else "error", RuntimeWarning)
            with TrajectoryStore.open(target, "a") as store:
                keys = check(store)
                if durability == "process":
                    lost_most = max(lost_most, len(set(acknowledged) - set(keys)))
                else:
                    assert set(acknowledged) <= set(keys), (state, moment)
                assert len(set(keys)) == len(keys)
                ids = append(store, [1000, 1001])
                assert check(store) == [*keys, 1000, 1001]
                if durability == "power":
                    assert store.verify().ok, str(store.verify())
            with TrajectoryStore.open(target) as store:
                assert check(store) == [*keys, 1000, 1001]
                assert store.ids()[-2:].tolist() == ids.tolist()
        shutil.rmtree(target)
    if durability == "process":
        assert lost_most > 0, "the simulation never lost an unsynced row, so it proves nothing"
