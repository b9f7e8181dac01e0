"""A disk that refuses, a fork, threads: nothing acknowledged is lost and the message says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import trajectory_store
from tests.moments import at_call, fails
from trajectory_store import Column, Schema, StoreError, TrajectoryStore, UnsyncedError, WriteFailedError, fs
from trajectory_store.batch import prepare

STORAGE = Path(trajectory_store.__file__).resolve().parents[1]
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])

LIMITED = """
import resource, sys
from trajectory_store import Column, Schema, StoreError, TrajectoryStore, WriteFailedError
path, limit = sys.argv[1], int(sys.argv[2])
schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
store = TrajectoryStore.create(path, schema, segment_rows=1000, segment_elements=40_000)
kept = []
if limit > 1000:
    store.append({"x": [[0] * 100], "n": [0]})
    kept.append(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    for i in range(len(kept), 1000):
        store.append({"x": [[i] * 100], "n": [i]})
        kept.append(i)
except WriteFailedError as error:
    assert isinstance(error, OSError) and isinstance(error, StoreError)
    assert error.errno == 27 and "safe and readable" in str(error) and "ulimit" in str(error), error
else:
    raise SystemExit("the limit was not met")
assert store.read_scalars("n").tolist() == kept and store.verify().ok
print(len(kept))
"""


def test_a_file_size_limit_is_an_error_and_loses_nothing(tmp_path):
    """EFBIG in the middle of appends, or when the next segment is made: the store stays readable."""
    env = {**os.environ, "PYTHONPATH": str(STORAGE)}
    for limit in (100_000, 200_123, 1_000):
        path = tmp_path / str(limit)
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(path), str(limit)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        with TrajectoryStore.open(path, "a") as store:
            assert len(store) == int(done.stdout)
            store.append({"x": [[1]], "n": [1]})
            assert store.verify().ok


def test_a_full_disk_is_an_error_and_the_writer_continues_afterwards(tmp_path, monkeypatch):
    """ENOSPC at every single write of a commit: no row appears, earlier rows stay, a retry works."""
    real = os.pwrite
    state = {"left": -1}

    def full(fd, data, offset):
        if state["left"] == 0:
            state["left"] = -1
            real(fd, bytes(data)[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        state["left"] -= 1
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64"), Column("t", "str")])
    store = TrajectoryStore.create(tmp_path / "s", schema)
    kept = []
    len_of_commit = 6  # three columns, two offsets arrays, the record
    for fails_at in range(len_of_commit):
        row = {"x": [np.arange(50)], "n": [fails_at], "t": ["text"]}
        state["left"] = fails_at
        with pytest.raises(WriteFailedError, match="Free space") as caught:
            store.append(row)
        assert caught.value.errno == errno.ENOSPC
        state["left"] = -1
        assert store.read_scalars("n").tolist() == kept
        store.append(row)
        kept.append(fails_at)
    assert store.verify().ok
    store.close()
    with TrajectoryStore.open(tmp_path / "s") as reader:
        assert reader.read_scalars("n").tolist() == kept
        assert reader.verify().ok


class Syncs:
    """Counts the syncs of files and folders, and lets one of them fail."""

    def __init__(self, monkeypatch):
        self.left = 10**9
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))

    def failing(self, real):
        def sync(fd):
            self.left -= 1
            if self.left < 0:
                self.left = 10**9
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        return sync

    def fails(self, at, write):
        """Let sync number `at` fail during a write; returns the error, or None if the write needed fewer syncs."""
        self.left = at
        try:
            write()
        except WriteFailedError as error:
            return error
        finally:
            self.left, failed = 10**9, self.left != at
        assert failed, "nothing was synced"
        return None


@BACKENDS
@pytest.mark.parametrize("durability", ["power", "group"])
@pytest.mark.parametrize("begins", [False, True])
def test_a_sync_that_fails_reports_what_is_in_the_store(tmp_path, monkeypatch, backend, durability, begins):
    """EIO of every single sync of an append and of an update: whoever does what the error says has each row once."""
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64"), Column("later", "int64", mutable=True)])
    store = TrajectoryStore.create(path := tmp_path / "s", schema, backend=backend, durability=durability)
    syncs, kept, told = Syncs(monkeypatch), [], set()
    for what in ("append", "update"):
        at = 0
        while True:
            if begins:  # in a new store a new segment is synced as well, and its record in the catalog
                store.close()
                path, kept = tmp_path / f"{what}-{at}", [(1000, 0)] if what == "update" else []
                with TrajectoryStore.create(path, schema, backend=backend, durability=durability) as made:
                    for row, _ in kept:
                        made.append({"x": [[1]], "n": [row]})
                store = TrajectoryStore.open(path, "a")
            else:
                store.append({"x": [[1]], "n": [1000]})
                store.update(store.ids()[-1:], later=1)
                kept.append((1000, 1))
            number = 100 * at
            if what == "append":
                kept.append((number, 0))
                write = partial(store.append, {"x": [[1, 2]], "n": [number]})
            else:
                kept[-1] = (kept[-1][0], number)
                write = partial(store.update, store.ids()[-1:], later=number)
            error = syncs.fails(at, write)
            store.refresh()
            if isinstance(error, UnsyncedError):
                assert "are in the store" in str(error)
            elif error is not None:
                assert "not in the store" in str(error)
                write()
            told.add(type(error))
            for view in (store, TrajectoryStore.open(path)):
                found = view.read(view.ids(), ["n", "later"])
                assert [*zip(found["n"].tolist(), found["later"].tolist(), strict=True)] == kept, (what, at, error)
            if error is None:
                break
            at += 1
        assert at > 1
    assert UnsyncedError in told
    assert store.verify().ok, str(store.verify())
    store.close()


def test_after_a_failed_sync_no_other_thread_reports_success(tmp_path, monkeypatch):
    """The kernel reports an error once, and takes the pages for clean: a second sync would succeed."""
    schema = Schema([Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "s", schema, durability="group") as store:
        store.append({"n": [0]})
        writer = store._stream.writer
        writer.commit(prepare(schema, {"n": [1]}), 0, 0)
        Syncs(monkeypatch).left = 0
        for _ in range(2):
            with pytest.raises(OSError, match="Errno 5"):
                writer.wait_durable(2)
        with pytest.raises(UnsyncedError):
            store.append({"n": [2]})
        store.append({"n": [3]})
        assert store.read_scalars("n").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["flush", "sync"])
def test_a_flush_that_fails_says_that_the_rows_are_there(tmp_path, monkeypatch, name):
    """Also for a writer that promised no syncs."""
    with TrajectoryStore.create(tmp_path / "s", Schema([Column("n", "int64")])) as store:
        store.append({"n": [0]})
        assert isinstance(Syncs(monkeypatch).fails(0, getattr(store, name)), UnsyncedError)
        assert store.read_scalars("n").tolist() == [0]
        with pytest.raises(UnsyncedError):
            store.flush()


def test_a_sync_changes_nothing_that_is_seen(tmp_path):
    """What another process appends is seen at the next refresh, as a thread beside the store's user needs it."""
    with (
        TrajectoryStore.create(tmp_path / "s", Schema([Column("n", "int64")])) as store,
        TrajectoryStore.open(tmp_path / "s", mode="a") as other,
    ):
        store.append({"n": [0]})
        other.append({"n": [1, 2]})
        with at_call(fs.sync_path) as syncs:
            store.sync()
        assert (store.watermark, "n" in {sync.arguments["path"].name for sync in syncs}) == (1, True)
        store.flush()
        assert store.watermark == 3


@pytest.mark.parametrize("durability", ["process", "power"])
def test_what_a_full_disk_refused_does_not_come_later(tmp_path, durability):
    """An object that could not be written is not put again beside the next rows."""
    store = TrajectoryStore.create(
        tmp_path / "s", Schema([Column("n", "int64")]), backend="zarr", durability=durability
    )
    store.append({"n": [0]})
    full = fails(OSError(errno.ENOSPC, "No space left on device"))
    with at_call(fs.write_file, before=full), pytest.raises(WriteFailedError, match="not in the store"):
        store.append({"n": [1]})
    store.append({"n": [1, 2]})
    for view in (store, TrajectoryStore.open(tmp_path / "s")):
        assert view.read_scalars("n").tolist() == [0, 1, 2]
    store.close()


def test_a_failure_after_the_commit_does_not_look_like_one_of_it(tmp_path, monkeypatch):
    """Where the mark of what was acknowledged, or eviction, meets an error, the rows are in: append gives their ids."""
    schema = Schema([Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "s", schema, max_trajectories=4, segment_rows=2) as store:
        for i in range(5):
            store.append({"n": [2 * i, 2 * i + 1]})
        segments = len(list((tmp_path / "s").glob("seg-*")))
        real = {name: getattr(os, name) for name in ("pwrite", "link")}
        links = []

        def no_mark(fd, data, offset):
            if isinstance(data, bytes) and len(data) == 16 and data[0]:
                raise OSError(errno.EIO, "Input/output error")
            return real["pwrite"](fd, data, offset)

        def one_record(source, target, **options):
            links.append(target)
            if len(links) > 2:  # a record and its copy name the new segment, the next one removes another
                raise OSError(errno.ENOSPC, "No space left on device")
            real["link"](source, target, **options)

        monkeypatch.setattr(os, "pwrite", no_mark)
        monkeypatch.setattr(os, "link", one_record)
        ids = store.append({"n": [10, 11]})
        assert len(links) > 2
        monkeypatch.undo()
        assert store.read(ids)["n"].tolist() == [10, 11]
        assert store.read_scalars("n").tolist() == [8, 9, 10, 11]
        store.append({"n": [12, 13]})  # what was not removed then is removed now
        assert len(list((tmp_path / "s").glob("seg-*"))) == segments
        assert store.verify().ok


def test_a_path_that_cannot_be_made(tmp_path):
    """A file in the way of the folder is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        TrajectoryStore.create(tmp_path / "file" / "store", Schema([Column("n", "int64")]))
    with pytest.raises(StoreError, match="file"):
        TrajectoryStore.create(tmp_path / "file", Schema([Column("n", "int64")]))
    with pytest.raises(StoreError, match=r"zarr\.json"):
        TrajectoryStore.open(tmp_path / "file")


def test_threads_share_a_writer(tmp_path):
    """Appends of several threads are all there, each commit whole."""
    for durability in ("process", "power", "group"):
        path = tmp_path / durability
        schema = Schema([Column("n", "int64")])
        with TrajectoryStore.create(path, schema, durability=durability, segment_rows=50) as store:

            def work(k, store=store):
                for i in range(15):
                    ids = store.append({"n": [100 * k + i] * 3})
                    assert store.read(ids)["n"].tolist() == [100 * k + i] * 3

            threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            values = store.read_scalars("n").reshape(-1, 3)
            assert len(values) == 60
            assert (values == values[:, :1]).all()
            assert store.verify().ok


def in_a_fork(work, meanwhile=lambda: None):
    """Run something in a forked child, something else here, and wait for the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    meanwhile()
    assert os.waitpid(child, 0)[1] == 0


@BACKENDS
def test_a_forked_child_writes_its_own_segment(tmp_path, backend):
    """After a fork, parent and child append side by side and see each other's rows."""
    schema = Schema([Column("n", "int64")])
    store = TrajectoryStore.create(tmp_path / "s", schema, backend=backend)
    store.append({"n": [0]})
    ready, tell = os.pipe()

    def work():
        store.append({"n": [10]})
        os.read(ready, 1)
        store.append({"n": [11]})
        store.refresh()
        assert sorted(store.read_scalars("n").tolist()) == [0, 1, 10, 11]

    def meanwhile():
        store.append({"n": [1]})
        os.write(tell, b".")

    in_a_fork(work, meanwhile)
    store.refresh()
    assert sorted(store.read_scalars("n").tolist()) == [0, 1, 10, 11]
    assert store.verify().ok
    store.close()


@BACKENDS
@pytest.mark.parametrize("ends", [False, True])
def test_a_forked_child_takes_nothing_from_its_parent(tmp_path, backend, ends):
    """What the child reads, drops from its cache and closes is its own: the parent reads on as before."""
    schema = Schema(
        [Column("n", "int64"), Column("a", "int64", mutable=True, fill=0), Column("b", "int64", mutable=True, fill=0)]
    )
    with TrajectoryStore.create(tmp_path / "s", schema, backend=backend) as store:
        store.update(store.append({"n": range(50)}), a=range(50), b=range(50))
    store = TrajectoryStore.open(tmp_path / "s", cache_bytes=1300)
    assert store.read_scalars("a").tolist() == list(range(50))  # and b with it: an update is fetched whole

    def work():
        assert store.read_scalars("n").tolist() == list(range(50))
        if ends:
            store.close()

    in_a_fork(work)
    assert store.read_scalars("b").tolist() == list(range(50))
    store.close()


def test_folders_of_killed_makers_are_swept(tmp_path):
    """A half-made segment is invisible, and a later writer removes it once it is old."""
    schema = Schema([Column("n", "int64")])
    TrajectoryStore.create(tmp_path / "s", schema).close()
    half = tmp_path / "s" / ".new-1-abc"
    (half / "commits").mkdir(parents=True)
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        assert len(store) == 0
    assert half.exists()
    os.utime(half, (1, 1))
    TrajectoryStore.open(tmp_path / "s", "a").close()
    assert not half.exists()


@BACKENDS
def test_threads_flush_at_the_same_time(tmp_path, backend):
    """One waits for the other: a sync that goes on is not one that failed."""
    with TrajectoryStore.create(tmp_path / "s", Schema([Column("n", "int64")]), backend=backend) as store:
        store.append({"n": [0, 1]})
        with at_call(fs.sync_path, before=lambda _: time.sleep(0.005)), ThreadPoolExecutor(3) as pool:
            assert [done.result() for done in [pool.submit(store.flush) for _ in range(3)]] == [None] * 3
