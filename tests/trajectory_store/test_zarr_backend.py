"""The zarr backend: round trips, plain readers, faults of the object store, compaction, the cache."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trajectory_store import (
    Column,
    CorruptionError,
    Schema,
    StoreError,
    StoreExistsError,
    TrajectoryStore,
    WriteFailedError,
)
from trajectory_store.testing import example_rows, example_schema, same_rows

zarr = pytest.importorskip("zarr")
from zarr.storage import LocalStore, MemoryStore, WrapperStore  # noqa: E402


class SlowStore(WrapperStore):
    """Counts round trips: requests that overlap in time are one, and each takes a while."""

    delay = 0.0

    def __init__(self, store):
        super().__init__(store)
        self.waves = 0
        self.running = 0
        self.puts = 0

    async def _wait(self):
        import asyncio

        if self.running == 0:
            self.waves += 1
        self.running += 1
        await asyncio.sleep(0.01)
        self.running -= 1

    async def get(self, key, prototype, byte_range=None):
        """Get after the delay."""
        await self._wait()
        return await self._store.get(key, prototype, byte_range)

    async def set(self, key, value):
        """Put after the delay."""
        self.puts += 1
        await self._wait()
        return await self._store.set(key, value)

    async def set_if_not_exists(self, key, value):
        """Put after the delay."""
        self.puts += 1
        await self._wait()
        return await self._store.set_if_not_exists(key, value)


class FailingStore(WrapperStore):
    """Refuses every put from a given one on."""

    def __init__(self, store):
        super().__init__(store)
        self.left = 10**9

    async def set(self, key, value):
        """Put, or refuse."""
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("connection reset")
        return await self._store.set(key, value)

    async def set_if_not_exists(self, key, value):
        """Put, or refuse."""
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("connection reset")
        return await self._store.set_if_not_exists(key, value)


def test_a_commit_takes_two_round_trips():
    """All arrays at once, then the commit object; a reader without news takes one."""
    slow = SlowStore(MemoryStore())
    store = TrajectoryStore.create(slow, example_schema(), backend="zarr")
    store.append(example_rows(4))
    reader = TrajectoryStore.open(slow)
    for seed in range(3):
        slow.waves = slow.puts = 0
        store.append(example_rows(8, seed=seed))
        assert slow.waves == 2
        assert slow.puts <= 2 * 17 + 1
    reader.refresh()
    slow.waves = 0
    reader.refresh()
    assert slow.waves == 1
    slow.waves = 0
    store.append(example_rows(8))
    reader.refresh()
    assert slow.waves <= 5
    reader.read_padded(reader.ids(), ["input_ids", "log_probs"])
    slow.waves = 0
    reader.read_padded(reader.ids(), ["input_ids", "log_probs"])
    assert slow.waves == 0


def test_plain_zarr_reads_a_commit_and_a_compacted_segment(tmp_path):
    """Both are ordinary Zarr v3 groups; the compacted one is sharded, zstd, with its metadata consolidated."""
    parts = [example_rows(5, seed=seed) for seed in range(3)]
    store = TrajectoryStore.create(tmp_path / "s", example_schema(), backend="zarr")
    ids = np.concatenate([store.append(part) for part in parts])
    group = zarr.open_group(tmp_path / "s", mode="r")["seg-00000000/00000001"]
    np.testing.assert_array_equal(group["input_ids"][:], parts[1]["input_ids"].values)
    np.testing.assert_array_equal(group["tokens.offsets"][:], parts[1]["input_ids"].offsets)
    np.testing.assert_array_equal(group["task_reward"][:], parts[1]["task_reward"])
    assert group["use_count"].compressors
    assert not group["log_probs"].compressors  # random bits stay as they are
    store.patch(ids[:2], advantage=[1.5, 2.5])
    store.update(ids[3:4], use_count=7)
    old_reader = TrajectoryStore.open(tmp_path / "s")
    report = store.compact()
    assert (report.rows, report.segments_after) == (15, 1)
    for reader in (store, old_reader, TrajectoryStore.open(tmp_path / "s")):
        reader.refresh()
        for k, part in enumerate(parts):
            same_rows(reader, ids[5 * k : 5 * k + 5], part)
        assert reader.ids().tolist() == ids.tolist()
        assert reader.read(ids[:3], "advantage")["advantage"][:2].tolist() == [1.5, 2.5]
        assert reader.read(ids[3:5], "use_count")["use_count"].tolist() == [7, 0]
        assert reader.verify().ok
    data = next(p for p in (tmp_path / "s").iterdir() if p.name.startswith("data-"))
    group = zarr.open_group(data, mode="r")
    tokens = np.concatenate([p["input_ids"].values for p in parts])
    np.testing.assert_array_equal(group["input_ids"][:], tokens)
    assert group["input_ids"].shards
    assert group.metadata.consolidated_metadata is not None
    assert [p.name for p in (tmp_path / "s" / "seg-00000000").iterdir()] == ["zarr.json"]
    more = store.append(parts[0])
    same_rows(store, more, parts[0])
    assert not set(more.tolist()) & set(ids.tolist())
    store.close()


def test_a_failing_object_store_loses_nothing():
    """A put refused anywhere in a commit: no row appears, earlier rows stay, the next append works."""
    flaky = FailingStore(MemoryStore())
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
    store = TrajectoryStore.create(flaky, schema, backend="zarr")
    kept = []
    for fails_at in range(8):
        store.append({"x": [[1, 2]], "n": [100 + fails_at]})
        kept.append(100 + fails_at)
        flaky.left = fails_at
        row = {"x": [[fails_at]], "n": [fails_at]}
        if fails_at == 7:
            store.append(row)
        with pytest.raises(WriteFailedError, match="connection reset") as caught:
            store.append(row)
        assert isinstance(caught.value, OSError)
        flaky.left = 10**9
        kept = store.read_scalars("n").tolist()
        assert kept[-1] in (100 + fails_at, fails_at)
    with TrajectoryStore.open(flaky) as reader:
        assert reader.read_scalars("n").tolist() == kept
        assert reader.verify().ok


def test_two_writers_never_share_a_segment():
    """Ids of writers that begin at the same moment differ, and each reads the other's rows."""
    memory = MemoryStore()
    schema = Schema([Column("n", "int64")])
    TrajectoryStore.create(memory, schema, backend="zarr").close()
    stores = [TrajectoryStore.open(memory, "a") for _ in range(3)]
    ids = [store.append({"n": [k]}) for k, store in enumerate(stores) for _ in range(2)]
    assert len({int(i[0]) for i in ids}) == 6
    for store in stores:
        store.refresh()
        assert sorted(store.read_scalars("n").tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(StoreExistsError):
        TrajectoryStore.create(memory, schema, backend="zarr")


def test_an_ordinal_is_never_given_twice():
    """A writer that has not looked for long claims above segments that came and went in between."""
    memory = MemoryStore()
    schema = Schema([Column("n", "int64")])
    store = TrajectoryStore.create(memory, schema, backend="zarr", segment_rows=2)
    late = TrajectoryStore.open(memory, "a")
    for i in range(3):
        store.append({"n": [2 * i, 2 * i + 1]})
    store.compact()
    for i in range(3, 6):
        store.append({"n": [2 * i, 2 * i + 1]})
    store.compact()
    ids = late.append({"n": [100]})
    for view in (store, late, TrajectoryStore.open(memory)):
        view.refresh()
        assert view.read_scalars("n").tolist() == [*range(12), 100]
        assert view.read(ids)["n"].tolist() == [100]


def test_damaged_and_missing_objects_are_named(tmp_path):
    """Verify names the object; a read of it is an error; other columns and commits stay readable."""
    store = TrajectoryStore.create(tmp_path / "s", example_schema(), backend="zarr")
    ids = np.concatenate([store.append(example_rows(5, seed=seed)) for seed in range(3)])
    store.close()
    path = tmp_path / "s" / "seg-00000000" / "00000001" / "log_probs" / "c" / "0"
    raw = bytearray(path.read_bytes())
    for damage in ("flip", "cut", "gone"):
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(raw[:-3] if damage == "cut" else raw[:20] + bytes([raw[20] ^ 4]) + raw[21:])
        with TrajectoryStore.open(tmp_path / "s") as store:
            report = store.verify()
            assert report.damaged_ids.tolist() == ids[5:10].tolist()
            assert "00000001/log_probs" in str(report)
            with pytest.raises(CorruptionError, match="log_probs"):
                store.read(ids, "log_probs")
            assert len(store.read(ids, "input_ids")["input_ids"]) == 15
    commit = tmp_path / "s" / "seg-00000000" / "00000002" / "zarr.json"
    commit.write_text(commit.read_text().replace('"n_rows": 5', '"n_rows": 4'))
    with pytest.warns(RuntimeWarning, match="checksum"):
        store = TrajectoryStore.open(tmp_path / "s")
    assert len(store) == 10
    assert not store.verify().ok
    store.close()


def test_the_oldest_segments_leave():
    """Eviction announces removals; readers keep counting and drop what is gone."""
    memory = MemoryStore()
    schema = Schema([Column("n", "int64")])
    store = TrajectoryStore.create(memory, schema, backend="zarr", max_trajectories=10, segment_rows=4)
    reader = TrajectoryStore.open(memory)
    for i in range(30):
        store.append({"n": [i]})
    reader.refresh()
    for view in (store, reader, TrajectoryStore.open(memory)):
        assert view.read_scalars("n").tolist() == list(range(20, 30))
        assert (len(view), view.watermark) == (10, 30)
    assert len(reader._catalog.segments) <= 4


def test_columns_are_fetched_when_they_are_read():
    """Reading rewards of a remote store does not fetch tokens."""
    seen = []

    class Watching(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            seen.append(key)
            return await self._store.get(key, prototype, byte_range)

    watching = Watching(MemoryStore())
    store = TrajectoryStore.create(watching, example_schema(), backend="zarr")
    for seed in range(4):
        store.append(example_rows(6, seed=seed))
    with TrajectoryStore.open(watching) as reader:
        seen.clear()
        assert len(reader.read_scalars("task_reward")) == 24
        assert {k.split("/")[2] for k in seen if "/c/" in k} == {"task_reward"}


def test_wrong_backends_are_named(tmp_path):
    """An unknown backend says which there are."""
    with pytest.raises(StoreError, match="'memmap' or 'zarr'"):
        TrajectoryStore.create(tmp_path / "s", example_schema(), backend="lance")


def test_opening_follows_many_commits_in_few_round_trips():
    """300 commits are found in a handful of waves, not in 300."""
    memory = MemoryStore()
    store = TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr")
    for i in range(300):
        store.append({"n": [i]})
    slow = SlowStore(memory)
    start = time.perf_counter()
    reader = TrajectoryStore.open(slow)
    assert len(reader) == 300
    assert slow.waves < 30
    assert time.perf_counter() - start < 5
    assert LocalStore is not None
