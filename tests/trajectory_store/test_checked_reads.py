"""Reads that compare commits with their checksums: damage is an error that names the rows, and never a value."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import trajectory_store
from tests.damage import flip, flip_first
from tests.moments import at_call
from trajectory_store import Column, CorruptionError, TrajectoryStore
from trajectory_store.local_segment import LocalSegment

SCHEMA = [Column("tag", "int64"), Column("x", "int32", ragged=True), Column("score", "float32", mutable=True)]
FILES = {  # of a store of memmap, by what the bit is flipped in
    "scalar": "seg-00000000*/tag/c/0",
    "ragged": "seg-00000000*/x/c/0",
    "update": "seg-00000002*/score/c/0",
    "merged": "seg-00000003-merged/x/c/0",
    "merged update": "seg-00000004-merged/score/c/0",
}
LOADED = pytest.mark.parametrize("length", [4, 4000], ids=["loaded", "mapped"])


def make(path: Path, length: int = 4, backend: str = "memmap", *, merged: bool = False) -> list[np.ndarray]:
    """Eight commits of ten rows; the rows of the second one have a later score."""
    with TrajectoryStore.create(path, SCHEMA, backend=backend, segment_rows=40) as store:
        ids = [
            store.append({"tag": np.arange(10) + 10 * k, "x": [[k] * length] * 10, "score": np.zeros(10)})
            for k in range(8)
        ]
        store.update(ids[1], score=np.ones(10))
    if merged:
        with TrajectoryStore.open(path, "a") as store:
            store.compact()
    return ids


@LOADED
@pytest.mark.parametrize("where", list(FILES))
def test_a_flipped_bit_is_an_error_that_names_rows_and_segment(tmp_path, where, length):
    """A new reader and one that had read the right values see it, and believe the file once it is put back."""
    ids = make(tmp_path / "s", length, merged="merged" in where)
    every = np.concatenate(ids)
    (file,) = (tmp_path / "s").glob(FILES[where])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = TrajectoryStore.open(tmp_path / "s")
        right = before.read(every, checked=True)
        time.sleep(0.02)  # times of files have a resolution of some milliseconds
        raw = flip(file, 20)
        before.refresh()  # by itself it looks at the files now and then
        name = file.relative_to(tmp_path / "s").parts[0]
        for store in (before, TrajectoryStore.open(tmp_path / "s")):
            for read in (store.read, store.read_padded, store.read_batch):
                with pytest.raises(CorruptionError, match=rf"trajector(y|ies) \d+.*{name}"):
                    read(every, checked=True)
            if where in ("scalar", "ragged"):
                np.testing.assert_array_equal(store.read(ids[5], checked=True)["tag"], right["tag"][50:60])
        file.write_bytes(raw)
        before.refresh()
        after = before.read(every, checked=True)
    for name in right:
        np.testing.assert_array_equal(np.stack(after[name]), np.stack(right[name]))


def test_checked_reads_look_at_the_files_now_and_then(tmp_path, monkeypatch):
    """A file that changes under an open reader is compared again without a refresh, and few reads ask."""
    ids = np.concatenate(make(tmp_path / "s"))
    time.sleep(0.06)
    store, stopped = TrajectoryStore.open(tmp_path / "s"), time.perf_counter()
    with monkeypatch.context() as clock, at_call(LocalSegment.has_changed) as looks:
        clock.setattr(time, "perf_counter", lambda: stopped)
        for _ in range(30):
            store.read(ids, checked=True)
    assert len(looks) == 3, "segments, looked at once"
    time.sleep(0.6)  # longer than nothing is asked
    flip(next((tmp_path / "s").glob(FILES["scalar"])), 20)
    with pytest.raises(CorruptionError):
        store.read(ids, checked=True)


def test_what_this_process_writes_makes_no_read_look_at_all_files(tmp_path, monkeypatch):
    """A learner appends and updates between its batches: files are looked at when a segment begins."""
    ids = np.concatenate(make(tmp_path / "s"))
    time.sleep(0.06)
    stopped = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: stopped)
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        for k in range(5):
            with at_call(LocalSegment.has_changed) as looks:
                new = store.append({"tag": [100 + k], "x": [[k]]})
                store.update(new, score=1.0)
                assert store.read(np.append(ids, new))["tag"][-1] == 100 + k
            assert len(looks) == (0 if k else 5)  # three old segments and two new ones


def test_each_commit_is_compared_once(tmp_path):
    """What was compared is not compared again while its files are the same; new commits are."""
    make(tmp_path / "s")
    store = TrajectoryStore.open(tmp_path / "s", "a")
    segment = store._catalog.segments[0]
    compared, holds = [], segment._holds
    segment._holds = lambda record: compared.append(record.seq) or holds(record)
    time.sleep(0.06)
    for _ in range(3):
        store.read(store.ids()[10:40], checked=True)
    assert sorted(compared) == [0, 1, 2, 3]  # where the first row begins is where the last one of commit 0 ends
    store.read(store.ids(), checked=True)
    assert sorted(compared) == [0, 1, 2, 3]


def calls_of(read) -> int:
    """Count the calls of functions of the store."""
    folder, calls = str(Path(trajectory_store.__file__).parent), []

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        read()
    finally:
        sys.setprofile(before)
    return len(calls)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [20, 20, 20], [1, 20, 1]], ids=["small", "large", "mixed"])
@pytest.mark.parametrize("state", ["plain", "updated", "merged"])
def test_once_all_was_compared_a_checked_read_has_the_steps_of_an_unchecked_one(tmp_path, monkeypatch, sizes, state):
    """Small commits are compared as a whole and large ones by array: both end in one verdict, which costs two calls."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA) as store:
        for k, n in enumerate(sizes):
            ids = store.append({"tag": [k] * n, "x": [[k] * 2000] * n, "score": [0.0] * n})
        if state == "updated":
            store.update(ids, score=[1.0] * len(ids))
    if state == "merged":
        with TrajectoryStore.open(path, "a") as store:
            store.compact()
    time.sleep(0.2)  # the state of files that are newer is not certain
    with TrajectoryStore.open(path) as store:
        every = store.ids()
        store.read(every)
        stopped = time.perf_counter()
        monkeypatch.setattr(time, "perf_counter", lambda: stopped)  # files are not looked at meanwhile
        for read in (store.read, store.read_padded):
            read(every[:3])
            steps = {checked: calls_of(lambda: read(every[:3], checked=checked)) for checked in (True, False)}  # noqa: B023
            assert steps[True] == steps[False] + 2, steps


@LOADED
def test_after_a_read_of_all_values_their_presence_is_still_to_be_compared(tmp_path, length):
    """A read of values does not return whether they were given, and damage of that costs it nothing."""
    ids = make(tmp_path / "s", length)
    flip(tmp_path / "s" / "seg-00000000" / "present" / "c" / "0", 8 * 5)
    with TrajectoryStore.open(tmp_path / "s") as store:
        for _ in range(2):
            assert store.read(np.concatenate(ids))["tag"].tolist() == list(range(80))
        with pytest.raises(CorruptionError, match=r"trajector(y|ies) \d+.*seg-00000000"):
            store.present("score", ids[0])
    with TrajectoryStore.open(tmp_path / "s") as store:
        store.read(np.concatenate(ids))
        assert 5 in store.damaged()
        assert 5 not in store.intact(skip_damaged=True)


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_rows_that_arrive_while_reading_are_checked_too(tmp_path, backend):
    """A reader that follows a writer compares what is new, and serves the same values as without."""
    make(tmp_path / "s", backend=backend)
    reader = TrajectoryStore.open(tmp_path / "s")
    with TrajectoryStore.open(tmp_path / "s", "a") as writer:
        for k in range(3):
            new = writer.append({"tag": [100 + k], "x": [[k, k]]})
            writer.update(new, score=float(k))
            reader.refresh()
            found = reader.read(new, checked=True)
            assert (found["tag"].tolist(), found["score"].tolist()) == ([100 + k], [float(k)])


def flip_later(path: Path, backend: str, column: str, *, merged: bool) -> tuple[Path, bytes]:
    """Flip a bit of the first later value of a column; return the file, and what was there."""
    segment = max(path.glob("seg-*-merged" if merged else "seg-*"))
    return flip_first(segment, column, is_archived=backend == "zarr" and not merged)


@pytest.mark.parametrize("added", [False, True], ids=["updated", "added"])
@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_damaged_later_value_costs_its_rows(tmp_path, backend, merged, added):
    """A read of all rows omits them with a warning, a read by id names them, and the right file brings them back."""
    path, column = tmp_path / "s", "added" if added else "score"
    with TrajectoryStore.create(path, SCHEMA, backend=backend, segment_rows=40, compress=False) as store:
        ids = [
            store.append({"tag": np.arange(10) + 10 * k, "x": [[k] * 4] * 10, "score": [0.0] * 10}) for k in range(8)
        ]
        store.add_columns([Column("added", "int64", fill=0, mutable=True)])
        store.update(ids[1], **{column: [1] * 10})
    if merged:
        with TrajectoryStore.open(path, "a") as store:
            store.update(ids[1], **{column: [1] * 10})  # a segment alone is not merged
        with TrajectoryStore.open(path, "a") as store:
            store.compact()
    every, rest = np.concatenate(ids), np.concatenate([ids[0], *ids[2:]])
    file, raw = flip_later(path, backend, column, merged=merged)
    with TrajectoryStore.open(path) as store:
        with pytest.warns(RuntimeWarning, match=f"{file.relative_to(path).parts[0]}: 10 later values are not returned"):
            assert store.read_scalars(column).tolist() == [0] * 70
        assert store.ids().tolist() == rest.tolist()
        assert store.damaged().tolist() == ids[1].tolist() == store.verify().damaged_ids.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for read in (
            lambda store: store.where(f"{column} == 0"),
            lambda store: np.concatenate([batch["ids"] for batch in store.batches(7, [column])]),
            lambda store: every[[row["tag"] for row in store]],
            lambda store: store.intact(skip_damaged=True),
        ):
            with TrajectoryStore.open(path) as store:
                assert read(store).tolist() == rest.tolist()
        store = TrajectoryStore.open(path)
        for read in (store.read, store.read_padded):
            assert read(rest)[column].tolist() == [0] * 70
            for asked_ids in (ids[1][:1], every):
                with pytest.raises(CorruptionError, match=rf"trajector(y|ies) {ids[1][0]}.*later value.*seg-0000000"):
                    read(asked_ids)
        time.sleep(0.06)
        file.write_bytes(raw)
        store.refresh()
        assert store.read_scalars(column).tolist() == [0] * 10 + [1] * 10 + [0] * 60
        assert store.ids().tolist() == every.tolist()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_intact_compares_what_no_read_has_fetched(tmp_path, backend):
    """After a read of one column, damage in another one is reported, or its rows are excluded."""
    ids = make(tmp_path / "s", backend=backend)
    flip_first(tmp_path / "s" / "seg-00000000", "x", is_archived=backend == "zarr")
    for among in (None, np.concatenate(ids)):
        with TrajectoryStore.open(tmp_path / "s") as store:
            assert len(store.read_scalars("score")) == 80  # its later values are fetched too
            with pytest.raises(CorruptionError, match=r"trajectories 0, .*seg-00000000"):
                store.intact(among)
            assert store.intact(among, skip_damaged=True).tolist() == np.concatenate(ids[1:]).tolist()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_checked_read_mistakes_no_merge_for_damage(tmp_path, backend):
    """The files of the segments that the reader knows are gone before it opens them: their rows are elsewhere."""
    store = TrajectoryStore.create(
        tmp_path / "s", [Column("n", "int64"), Column("x", "int32", ragged=True)], backend=backend
    )
    ids = [int(store.append({"n": [n], "x": [[n] * 3]})[0]) for n in range(3)]
    with TrajectoryStore.open(tmp_path / "s", "a") as other, TrajectoryStore.open(tmp_path / "s") as reader:
        other.append({"n": [3], "x": [[]]})
        assert reader.ids().tolist() == ids
        store.close()
        assert other.compact().rows == 4
        assert reader.read(ids, checked=True)["n"].tolist() == [0, 1, 2]
        assert reader.ids().tolist()[:3] == ids


def test_a_length_is_known_while_segments_are_merged(tmp_path):
    """Their logs are gone before the reader looks at them."""
    with TrajectoryStore.create(tmp_path / "s", [Column("n", "int64")]) as store:
        store.append({"n": [1, 2]})
    with TrajectoryStore.open(tmp_path / "s", "a") as other:
        other.append({"n": [3]})
        with TrajectoryStore.open(tmp_path / "s") as reader:
            other.compact()
            assert len(reader) == 3
