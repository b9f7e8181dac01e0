"""A writer writes to the store that it opened, or says so: other folders, other stores, clocks, forks, file systems."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest

from trajectory_store import Column, CorruptionError, StoreError, TrajectoryStore, WriteFailedError

SCHEMA = [Column("tag", "int64"), Column("later", "int64", mutable=True)]
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


@BACKENDS
def test_a_relative_path_means_the_folder_of_that_moment(tmp_path, monkeypatch, backend):
    """A process that changes its folder goes on in the same store, also with new segments and updates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with TrajectoryStore.create("s", SCHEMA, backend=backend) as store:
        ids = store.append({"tag": [0]})
        monkeypatch.chdir(tmp_path / "elsewhere")
        for tag in range(1, 100):
            store.append({"tag": [tag]})
        store.update(ids, later=5)
    assert not list((tmp_path / "elsewhere").iterdir())
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.read_scalars("tag").tolist() == list(range(100))
        assert store.read_scalars("later", ids).tolist() == [5]


@BACKENDS
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_writer_whose_folder_has_gone_acknowledges_nothing(tmp_path, backend, how):
    """It says so at the next append, and makes no folder in the old place."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend)
    store.append({"tag": [0]})
    if how == "moved":
        (tmp_path / "s").rename(tmp_path / "t")
    else:
        shutil.rmtree(tmp_path / "s")
    with pytest.raises(WriteFailedError, match="moved or removed"):
        store.append({"tag": [1]})
    store.close()
    assert not (tmp_path / "s").exists()


@BACKENDS
@pytest.mark.parametrize("then", ["append", "update", "compact", "close"])
def test_a_forgotten_writer_leaves_a_new_store_alone(tmp_path, backend, then):
    """The store was removed and made again at its path: not one row of the new one is lost or hidden."""
    path = tmp_path / "s"
    old = TrajectoryStore.create(path, SCHEMA, backend=backend)
    for tag in range(3):
        with TrajectoryStore.open(path, "a") as other:
            other.append({"tag": [tag]})
    old.refresh()
    ids = old.append({"tag": [9]})
    shutil.rmtree(path)
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as new:
        new.append({"tag": [100, 101]})
        if then == "close":
            old.close()
        else:
            calls = {
                "append": lambda: old.append({"tag": [1]}),
                "update": lambda: old.update(ids, later=1),
                "compact": old.compact,
            }
            with pytest.raises(StoreError):
                calls[then]()
        new.append({"tag": [102]})
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("tag").tolist() == [100, 101, 102]
        assert store.verify().ok, str(store.verify())


@BACKENDS
def test_a_writer_of_a_newer_state_refuses_an_older_copy_in_its_place(tmp_path, backend):
    """Files were put back from a backup below a living process: its next record of the catalog is not put."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as store:
        store.append({"tag": [0]})
    records = {file: file.read_bytes() for file in (path / "catalog").glob("*.rec")}
    writer = TrajectoryStore.open(path, "a")
    ids = writer.append({"tag": [1]})
    for file in (path / "catalog").iterdir():
        if file.name != "zarr.json" and file.with_suffix(".rec") not in records:
            file.unlink()
    with pytest.raises(WriteFailedError, match="restored from a copy"):
        writer.update(ids, later=1)  # begins a segment
    writer.close()
    assert {file: file.read_bytes() for file in (path / "catalog").glob("*.rec")} == records


def test_a_record_of_another_store_does_not_count(tmp_path):
    """One that was copied here by mistake, with a higher number, is named and left out."""
    for name in ("s", "t"):
        with TrajectoryStore.create(tmp_path / name, SCHEMA) as store:
            store.append({"tag": [1]})
    with TrajectoryStore.open(tmp_path / "t", "a") as store:
        store.append({"tag": [2]})
    newest = max((tmp_path / "t/catalog").glob("*.rec"))
    shutil.copy(newest, tmp_path / "s/catalog" / newest.name)
    with pytest.warns(RuntimeWarning, match="a record of another store"):
        store = TrajectoryStore.open(tmp_path / "s", "a")
    with store:
        assert store.read_scalars("tag").tolist() == [1]
        store.append({"tag": [3]})
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.read_scalars("tag").tolist() == [1, 3]
        assert newest.name in str(store.verify())


@BACKENDS
def test_without_locks_a_folder_is_kept_as_a_bucket_is(tmp_path, monkeypatch, backend):
    """Some network file systems refuse flock: upkeep is claimed in the catalog, by one at a time."""
    path = tmp_path / "s"
    TrajectoryStore.create(path, SCHEMA, backend=backend).close()
    for tag in range(3):
        with TrajectoryStore.open(path, "a") as store:
            store.append({"tag": [tag]})

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with TrajectoryStore.open(path, "a") as store:
        journal = store._catalog.journal
        until = time.time_ns() + 60_000_000_000
        assert journal.change(lambda state: replace(state, claim=("somebody", until)))
        assert store.compact().skipped == "another process is compacting the store"
        assert journal.change(lambda state: replace(state, claim=None))
        assert store.compact().segments_after == 1
        assert store.read_scalars("tag").tolist() == [0, 1, 2]


@BACKENDS
@pytest.mark.timeout(60)
def test_a_fork_beside_threads_that_use_the_store(tmp_path, backend):
    """A child reads and appends at once, whatever the other threads of its parent held when it was made."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            store.update(store.append({"tag": [1]}), later=2)
            store.ids()
            time.sleep(0.001)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    ends = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a child that hangs
            signal.alarm(20)
            store.refresh()
            store.append({"tag": [7]})
            store.read(store.ids()[-3:])
            store.close()
            os._exit(0)
        ends.append(os.waitpid(pid, 0)[1])
    stop.set()
    for thread in threads:
        thread.join()
    store.close()
    assert ends == [0] * 3
    with TrajectoryStore.open(tmp_path / "s") as found:
        assert found.read_scalars("tag").tolist().count(7) == 3
        assert found.verify().ok


@BACKENDS
def test_a_clock_beyond_all_bounds_is_refused(tmp_path, monkeypatch, backend):
    """What it would have written could not be read: an error says so, and nothing else is lost."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as store:
        ids = store.append({"tag": [1]})
        with monkeypatch.context() as patches:
            patches.setattr(time, "time_ns", lambda: 1 << 62)
            with pytest.raises(WriteFailedError, match="correct the clock"):
                store.append({"tag": [2]})
            with pytest.raises(WriteFailedError, match="correct the clock"):
                store.update(ids, later=1)
            with pytest.raises(WriteFailedError, match="correct the clock"):
                TrajectoryStore.create(tmp_path / "t", SCHEMA, backend=backend)
        store.append({"tag": [3]})
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("tag").tolist() == [1, 3]
        assert store.verify().ok


@BACKENDS
@pytest.mark.parametrize("size", [3, 1 << 40])
def test_a_stray_record_costs_nothing(tmp_path, backend, size):
    """One with the highest number of all, also a sparse one of a terabyte: named, and appends go on."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as store:
        store.append({"tag": [1]})
    with open(path / "catalog/999999999999.rec", "wb") as file:
        file.truncate(size)
    for tag in (2, 3):
        with pytest.warns(RuntimeWarning, match="999999999999"):
            store = TrajectoryStore.open(path, "a")
        with store:
            store.append({"tag": [tag]})
            assert store.read_scalars("tag").tolist() == list(range(1, tag + 1))
            assert not store.verify().ok


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_damaged_last_offset_costs_the_last_row(tmp_path, io):
    """Eight bytes were zeroed: a checked read loses the commit, an unchecked one only the last row, and no zeros."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, [Column("t", "str"), Column("x", "int32", ragged=True)]) as store:
        ids = store.append({"t": [f"text {n}" for n in range(30)], "x": [[n + 1] * 5 for n in range(30)]})
    for axis in ("t", "tokens"):
        file = path / f"seg-00000000/{axis}.offsets/c/0"
        good = file.read_bytes()
        file.write_bytes(good[: 30 * 8] + bytes(8) + good[31 * 8 :])
        with TrajectoryStore.open(path, io=io) as store:
            assert store.read(ids[:3], checked=False)["t"] == ["text 0", "text 1", "text 2"]
            assert store.read_padded(ids[:3], checked=False)["x"].tolist() == [[n + 1] * 5 for n in range(3)]
            assert [row.tolist() for row in store.read_ragged("x", ids[:3], checked=False).to_list()] == [
                [n + 1] * 5 for n in range(3)
            ]
            with pytest.raises(CorruptionError, match="commit 0 is damaged"):
                store.read(ids[-1:])
        file.write_bytes(good)


def test_an_offset_behind_the_values_is_an_error_of_the_store(tmp_path):
    """One in the middle, within the capacity: its commit is named as damaged when the row before it is met."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, [Column("x", "int32", ragged=True)]) as store:
        ids = store.append({"x": [[1], [2], [3]]})
    file = path / "seg-00000000/tokens.offsets/c/0"
    good = file.read_bytes()
    file.write_bytes(good[: 2 * 8] + (40).to_bytes(8, "little") + good[3 * 8 :])
    with TrajectoryStore.open(path) as store:
        assert store.read(ids[:1], checked=False)["x"][0].tolist() == [1]
        with pytest.raises(CorruptionError, match="commit 0 is damaged"):
            store.read_ragged("x", ids[1:2])


def test_a_damaged_time_is_found_before_it_orders_rows(tmp_path):
    """The sign bit of one time in a merged segment: its block is reported, and costs no row."""
    path = tmp_path / "s"
    TrajectoryStore.create(path, SCHEMA).close()
    for tag in range(4):
        with TrajectoryStore.open(path, "a") as store:
            store.append({"tag": [tag] * 5})
    with TrajectoryStore.open(path, "a") as store:
        store.compact()
    (file,) = path.glob("seg-*-merged/row_time/c/0")
    data = bytearray(file.read_bytes())
    data[7] ^= 0x80
    file.write_bytes(data)
    with TrajectoryStore.open(path, "a") as store:
        with pytest.warns(
            RuntimeWarning, match="20 rows are without a time, so the order is estimated: commit 0 is damaged"
        ):
            assert len(store.ids()) == 20
        assert len(store.append({"tag": [9]})) == 1
        assert store.read_scalars("tag").tolist() == [*(tag for tag in range(4) for _ in range(5)), 9]
        assert not len(store.damaged())
        assert "commit 0" in str(store.verify())


def test_every_record_names_its_store(tmp_path):
    """The uuid of the root, and the nonce of the record before."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA) as store:
        store.append({"tag": [1]})
    root = json.loads((path / "zarr.json").read_bytes())["attributes"]
    bodies = [json.loads(file.read_bytes().split(b"\n")[0][9:]) for file in sorted((path / "catalog").glob("*.rec"))]
    assert {body["store"] for body in bodies} == {root["uuid"]}
    assert [body["previous"] for body in bodies] == ["", *(body["nonce"] for body in bodies[:-1])]
