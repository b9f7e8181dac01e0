"""Rings: the newest rows stay, disk space comes back, readers that hold maps are not disturbed."""

from __future__ import annotations

import copy
import gc
import os
import shutil

import numpy as np
import pytest

from tests.moments import at_call
from trajectory_store import Column, MissingRowError, Schema, TrajectoryStore, fs, upkeep
from trajectory_store.local_backend import Memmap

from .contract import example_rows, example_schema, same_rows

SCHEMA = Schema([Column("x", "int64", ragged=True), Column("n", "int64", mutable=True)])


def rows(first, count, length=3):
    """Rows that hold their own number."""
    return {"x": [[i] * length for i in range(first, first + count)], "n": list(range(first, first + count))}


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_exactly_the_newest_rows_are_in_the_store(tmp_path, backend):
    """`len` never exceeds the limit, ids are the newest, and the watermark counts everything."""
    options = {"backend": backend, "max_trajectories": 25, "segment_rows": 10}
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, **options) as store:
        reader = TrajectoryStore.open(tmp_path / "s")
        for i in range(0, 200, 5):
            store.append(rows(i, 5))
            wanted = list(range(max(0, i + 5 - 25), i + 5))
            assert store.read_scalars("n").tolist() == wanted
            assert (len(store), store.watermark) == (len(wanted), i + 5)
            reader.refresh()
            assert reader.read_scalars("n").tolist() == wanted
            assert reader.watermark == i + 5
        assert len(store._catalog.segments) <= 5
        reader.close()
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        assert store.watermark == 200
        more = store.append(rows(200, 1))
        assert store.ids()[-1] == more[0]
        report = store.verify()
        assert report.ok
        assert report.trajectories == len(store) <= report.rows
    assert not [p for p in (tmp_path / "s").iterdir() if p.name.startswith(".")]


def test_a_reader_with_maps_keeps_its_view_until_it_refreshes(tmp_path):
    """Rows whose segment was unlinked stay readable through the maps; afterwards they are named as evicted."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=20, segment_rows=10) as store:
        ids = store.append(rows(0, 10))
        reader = TrajectoryStore.open(tmp_path / "s")
        reader.read(ids)
        for i in range(10, 100, 10):
            store.append(rows(i, 10))
        assert not (tmp_path / "s" / "seg-00000000").exists()
        assert reader.read(ids)["n"].tolist() == list(range(10))
        assert reader.read_padded(ids, "x")["x"][9].tolist() == [9, 9, 9]
        reader.refresh()
        with pytest.raises(MissingRowError, match="evicted"):
            reader.read(ids)
        late = TrajectoryStore.open(tmp_path / "s")
        newest = late.ids()[-20:]
        for i in range(100, 200, 10):
            store.append(rows(i, 10))
        with pytest.raises(MissingRowError, match="refresh"):
            late.read(newest)
        late.close()
        reader.close()


def test_disk_space_is_bounded(tmp_path):
    """`max_bytes` removes the oldest segments; what is left reads well."""
    limit = 3_000_000
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, max_bytes=limit, segment_rows=50) as store:
        for i in range(0, 1000, 50):
            store.append(rows(i, 50, length=1000))
        kept = store.read_scalars("n")
        assert 100 <= len(kept) < 1000
        assert kept.tolist() == list(range(1000 - len(kept), 1000))
        assert fs.disk_bytes(tmp_path / "s") < limit + 1_500_000
        assert store.verify().ok


def test_segments_grow_within_the_limits_of_the_store(tmp_path):
    """Each segment is sixteen times the one before; a store with a limit keeps to segments of an eighth of it."""

    def capacities(rolls, **options):
        with TrajectoryStore.create(tmp_path / f"s{list(options.values())}", SCHEMA, **options) as store:
            sizes = []
            for _ in range(rolls):
                store.append(rows(0, 1))
                segment = max(store._catalog.segments.items())[1].meta
                sizes.append((segment.rows_cap, segment.elems_cap["tokens"]))
                store._stream.close()
        return sizes

    ki, mi = 1 << 10, 1 << 20
    grown = [(64, 4 * ki), (ki, 64 * ki), (16 * ki, mi), (256 * ki, 16 * mi), (512 * ki, 64 * mi), (512 * ki, 64 * mi)]
    assert capacities(6) == grown
    assert capacities(2, max_trajectories=80_000) == [(10_000, 4 * ki), (10_000, 64 * ki)]
    assert capacities(2, max_bytes=1 << 30) == [(64, 16 * mi), (ki, 16 * mi)]  # 8 bytes per element
    assert capacities(1, max_bytes=1000) == [(64, 64 * ki)]


def test_the_segment_of_a_living_writer_stays(tmp_path):
    """A slow writer's rows may be old; its segment is not pulled away from under it."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=10, segment_rows=10) as fast:
        slow = TrajectoryStore.open(tmp_path / "s", "a")
        slow.append(rows(1000, 1))
        for i in range(0, 100, 10):
            fast.append(rows(i, 10))
        ids = slow.append(rows(1001, 1))
        fast.refresh()
        assert fast.read(ids)["n"].tolist() == [1001]
        assert fast.read_scalars("n")[-1] == 1001
        slow.close()


def test_a_killed_removal_is_finished_later(tmp_path):
    """Segments that no longer count and whose removal was cut short are counted once and removed by the next writer."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, segment_rows=10) as store:
        for i in range(0, 30, 10):
            store.append(rows(i, 10))
        shutil.copytree(tmp_path / "s" / "seg-00000000", tmp_path / "kept")
        store.compact()
    assert not (tmp_path / "s" / "seg-00000000").exists()
    shutil.copytree(tmp_path / "kept", tmp_path / "s" / "seg-00000000")
    for _ in range(2):
        with TrajectoryStore.open(tmp_path / "s", "a") as store:
            store.refresh()
            assert (len(store), store.watermark) == (30, 30)
            assert store.verify().ok
    assert not (tmp_path / "s" / "seg-00000000").exists()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_what_was_evicted_is_known_however_much_is_evicted_after_it(tmp_path, backend):
    """Folders of the first segments that come back from a backup are not served, and the next writer removes them."""
    path, kept = tmp_path / "s", tmp_path / "kept"
    with TrajectoryStore.create(path, SCHEMA, backend=backend, max_trajectories=20, segment_rows=10) as store:
        for i in range(0, 20, 10):
            store.append(rows(i, 10))
        shutil.copytree(path, kept, ignore=shutil.ignore_patterns("catalog", ".partial-*"))
        for i in range(20, 80, 10):
            store.append(rows(i, 10))
    first = [folder.name for folder in kept.glob("seg-*")]
    assert len(first) >= 2
    before = {name: sorted((path / name).rglob("*")) for name in first}
    for name in first:
        shutil.copytree(kept / name, path / name, dirs_exist_ok=True)
    for _ in range(2):
        with TrajectoryStore.open(path, "a") as store:
            assert store.read_scalars("n").tolist() == list(range(60, 80))
            assert store.watermark == 80
    assert {name: sorted((path / name).rglob("*")) for name in first} == before


def test_compaction_keeps_ids_order_values_and_room(tmp_path):
    """Many small segments become one, updates of the same columns too; readers follow; the disk is given back."""
    with TrajectoryStore.create(tmp_path / "s", example_schema(), segment_rows=6) as store:
        parts = [example_rows(6, seed=seed) for seed in range(20)]
        ids = np.concatenate([store.append(part) for part in parts])
        store.update(ids[5:8], advantage=[1, 2, 3], prompt=["a", "", "c"])
        store.update(ids[50:60], use_count=4)
        reader = TrajectoryStore.open(tmp_path / "s")
        snapshot = reader.snapshot()
        report = store.compact()
        assert report.segments_after == 3 < report.segments_before
        assert report.bytes_after < report.bytes_before
        parts[0]["prompt"][5:] = ["a"]
        parts[1]["prompt"][:2] = ["", "c"]
        for view in (store, reader, TrajectoryStore.open(tmp_path / "s")):
            view.refresh()
            assert view.ids().tolist() == ids.tolist()
            assert view.ids(snapshot).tolist() == ids.tolist()
            for k, part in enumerate(parts):
                same_rows(view, ids[6 * k : 6 * k + 6], part)
            assert view.read_scalars("use_count").sum() == 40
            assert view.present("advantage").sum() == 3
            assert view.verify().ok
        assert store.compact().segments_after == 3
        more = store.append(parts[0])
        assert int(more[0]) > int(ids.max())


def test_a_reader_that_lags_finds_compacted_rows(tmp_path):
    """Reading a column for the first time after its segment was compacted away still works."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, segment_rows=10) as store:
        ids = np.concatenate([store.append(rows(i, 10)) for i in range(0, 50, 10)])
        reader = TrajectoryStore.open(tmp_path / "s")
        reader.read_scalars("n")
        store.compact()
        assert reader.read_padded(ids, "x")["x"][:, 0].tolist() == list(range(50))
        assert reader.ids().tolist() == ids.tolist()
        reader.close()


def test_an_ordinal_that_came_and_went_is_not_claimed(tmp_path, monkeypatch):
    """A writer stopped between listing and renaming does not take the number of a removed segment."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, segment_rows=10)
    store.append(rows(0, 10))
    other = TrajectoryStore.open(tmp_path / "s", "a")
    asleep = [True]

    def write_meanwhile(call):
        if asleep and call.arguments["target"].name.startswith("seg-"):
            asleep.clear()
            store.append(rows(10, 10))
            store.append(rows(20, 10))
            store.compact()

    with at_call(fs.rename, before=write_meanwhile):
        ids = other.append(rows(100, 1))
    assert not asleep
    for view in (store, other, TrajectoryStore.open(tmp_path / "s")):
        view.refresh()
        assert view.read_scalars("n").tolist() == [*range(30), 100]
        assert view.read(ids)["n"].tolist() == [100]
    assert int(ids[0]) >> 32 > 2
    store.close()
    other.close()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_segment_is_as_new_as_its_last_row(tmp_path, backend):
    """A slow writer's old segment gets one more row before it is full: that row stays as long as any of its age."""
    with (
        TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend, max_trajectories=20, segment_rows=9) as slow,
        TrajectoryStore.open(tmp_path / "s", "a") as other,
    ):
        slow.append(rows(0, 5))
        other.append(rows(100, 9))
        other.append(rows(200, 9))
        slow.refresh()
        slow.append(rows(5, 1))
        slow.append(rows(6, 5))  # in a new segment
        wanted = [*range(104, 109), *range(200, 209), *range(5, 11)]
        for view in (slow, other, TrajectoryStore.open(tmp_path / "s")):
            view.refresh()
            assert view.read_scalars("n").tolist() == wanted


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_store_that_nobody_closes_gives_its_files_back(tmp_path, backend):
    """Forgotten by its process, it holds no file and no lock, and its rows are there."""

    def held() -> list[str]:
        with os.scandir("/proc/self/fd") as files:
            links = [os.readlink(file.path) for file in files if os.path.lexists(file.path)]
        return [link for link in links if link.startswith(str(tmp_path))]

    for turn in range(3):
        make = TrajectoryStore.open if turn else TrajectoryStore.create
        store = make(tmp_path / "s", **({"mode": "a"} if turn else {"schema": SCHEMA, "backend": backend}))
        store.update(store.append(rows(3 * turn, 3)), n=range(3 * turn, 3 * turn + 3))
        del store
        gc.collect()
    assert held() == []
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        assert store.read_scalars("n").tolist() == list(range(9))
        assert store.verify().ok


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_which_ids_are_held(tmp_path, backend, limit):
    """Those that `ids()` has: not yet committed, evicted, past the limit in a segment that stays, or never given."""
    made = TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend, max_trajectories=limit, segment_rows=8)
    with made as store, TrajectoryStore.open(tmp_path / "s", "a") as other:
        given = [writer.append(rows(10 * turn, 3)) for turn in range(6) for writer in (store, other)]
        asked = np.concatenate([*given, given[-1] + 1, [-1, 7 << 40], given[0]])
        for again in range(2):
            assert store.holds(asked).tolist() == np.isin(asked, store.ids()).tolist()
            assert store.refresh() == 36 or again
        assert (~store.holds(asked)).sum() > 2
        assert store.holds(np.empty(0, np.int64)).tolist() == []


def test_a_store_can_be_sent_to_another_process(tmp_path):
    """A copy, as a process pool makes one, is opened anew and appends to segments of its own."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        store.append(rows(0, 3))
        other = copy.copy(store)
        other.append(rows(3, 2))
        store.append(rows(5, 1))
        other.refresh()
        assert sorted(other.read_scalars("n").tolist()) == [0, 1, 2, 3, 4, 5]
        other.close()


def test_batch_memory_is_lent_again_only_when_it_is_free(tmp_path):
    """A held view keeps its buffer; a dropped one gives it back."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        ids = store.append(rows(0, 4, length=5000))
        first = store.read_padded(ids, "x")["x"]
        address = first.ctypes.data
        view = first[1, 10:20]
        del first
        second = store.read_padded(ids, "x")["x"]
        assert second.ctypes.data != address
        assert view.tolist() == [1] * 10
        del view, second
        addresses = {store.read_padded(ids, "x")["x"].ctypes.data for _ in range(5)}
        assert len(addresses) == 1


def test_a_segment_is_evicted_while_another_process_ends_it(tmp_path):
    """Whoever opens the store ends the segments of dead writers, and an eviction needs no lock."""
    schema = Schema([Column("n", "int64")])
    dead = TrajectoryStore.create(tmp_path / "s", schema, max_trajectories=4, segment_rows=4)
    dead.append({"n": range(4)})
    with TrajectoryStore.open(tmp_path / "s", "a") as other:
        other.append({"n": range(4, 8)})
        dead._stream.writer.abandon()  # as after a kill
        evicted = []

        def evict(call):
            if call.arguments["segment"].ordinal == 0 and not evicted:
                evicted.append(upkeep.evict(other._catalog, other._root))

        with at_call(Memmap.close_dead, before=evict), TrajectoryStore.open(tmp_path / "s", "a") as store:
            assert evicted == [1]
            assert store["n"].tolist() == [4, 5, 6, 7]
            assert store.verify().ok
