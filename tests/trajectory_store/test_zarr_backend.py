"""The zarr backend: round trips, plain readers, faults of the object store, compaction, the cache."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.moments import at_call, fails
from trajectory_store import (
    Column,
    CorruptionError,
    NotAStoreError,
    RaggedArray,
    Schema,
    StoreError,
    TrajectoryStore,
    WriteFailedError,
    bucket,
    upkeep,
)
from trajectory_store.bucket import FolderBucket
from trajectory_store.catalog import Catalog
from trajectory_store.columns import ColumnReader
from trajectory_store.errors import ReadFailedError
from trajectory_store.objects import backend, remote
from trajectory_store.objects.archive import BLOCK
from trajectory_store.objects.backend import ObjectMedium
from trajectory_store.root import read_root

from .contract import example_rows, example_schema, same_rows

zarr = pytest.importorskip("zarr")
from zarr.storage import MemoryStore, WrapperStore, ZipStore  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

NAMED = pytest.mark.filterwarnings("ignore:.*not returned:RuntimeWarning")


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


def test_a_commit_is_one_object_and_one_round_trip():
    """A reader without news takes one round trip more than its listing, and a warm batch none."""
    slow = SlowStore(MemoryStore())
    store = TrajectoryStore.create(slow, example_schema(), backend="zarr", segment_rows=1000)
    store.append(example_rows(4))
    reader = TrajectoryStore.open(slow)
    for seed in range(3):
        slow.waves = slow.puts = 0
        store.append(example_rows(8, seed=seed))
        assert slow.puts == 1
        assert slow.waves <= 2  # zarr's put-if-absent says nothing, so whose object it is has to be read back
    slow.waves = 0
    reader.refresh()
    assert slow.waves <= 5
    reader.read_padded(reader.ids(), ["input_ids", "log_probs"])
    slow.waves = 0
    reader.read_padded(reader.ids(), ["input_ids", "log_probs"])
    assert slow.waves == 0


def test_plain_zarr_reads_a_commit_and_a_merged_segment(tmp_path):
    """A commit is a Zarr group in a zip; merged segments are groups of sharded zstd arrays."""
    parts = [example_rows(5, seed=seed) for seed in range(3)]
    store = TrajectoryStore.create(tmp_path / "s", example_schema(), backend="zarr")
    ids = np.concatenate([store.append(part) for part in parts])
    files = sorted((tmp_path / "s" / "seg-00000000").glob("*.zip"))
    assert len(files) == 3
    group = zarr.open_group(ZipStore(files[1], mode="r"), mode="r")
    np.testing.assert_array_equal(group["input_ids"][:], parts[1]["input_ids"].values)
    np.testing.assert_array_equal(group["tokens.offsets"][:], parts[1]["input_ids"].offsets)
    np.testing.assert_array_equal(group["task_reward"][:], parts[1]["task_reward"])
    assert group["input_ids"].compressors
    assert not group["log_probs"].compressors
    store.update(ids[:2], advantage=[1.5, 2.5])
    store.update(ids[3:4], use_count=7)
    old_reader = TrajectoryStore.open(tmp_path / "s")
    report = store.compact()
    assert report.segments_after == 3
    for reader in (store, old_reader, TrajectoryStore.open(tmp_path / "s")):
        reader.refresh()
        for k, part in enumerate(parts):
            same_rows(reader, ids[5 * k : 5 * k + 5], part)
        assert reader.ids().tolist() == ids.tolist()
        assert reader.read(ids[:3], "advantage")["advantage"][:2].tolist() == [1.5, 2.5]
        assert reader.read(ids[3:5], "use_count")["use_count"].tolist() == [7, 0]
        assert reader.verify().ok, str(reader.verify())
    merged = next(s for s in old_reader._catalog.segments.values())
    group = zarr.open_group(tmp_path / "s" / merged.name, mode="r")
    tokens = np.concatenate([p["input_ids"].values for p in parts])
    np.testing.assert_array_equal(group["input_ids"][:], tokens)
    np.testing.assert_array_equal(group["row_id"][:], ids)
    assert group["input_ids"].shards
    assert not (tmp_path / "s" / "seg-00000000").exists()
    more = store.append(parts[0])
    same_rows(store, more, parts[0])
    assert not set(more.tolist()) & set(ids.tolist())
    store.close()


@NAMED
def test_a_batch_of_a_merged_segment_gets_the_chunks_that_it_needs(tmp_path):
    """Few bytes for few rows; a damaged chunk costs the rows in it, and no other read, whoever asked before."""
    schema = Schema([Column("x", "int32", ragged=True), Column("n", "int64")])
    length, count = 20_000, 40
    values = np.random.default_rng(0).integers(0, 1 << 30, (count, length), dtype=np.int32)
    with TrajectoryStore.create(tmp_path / "s", schema, backend="zarr") as store:
        for first in (0, count // 2):
            store.append({"x": list(values[first : first + count // 2]), "n": np.arange(first, first + count // 2)})
        store.compact()
    folder = next((tmp_path / "s").glob("*-merged"))
    got = []

    def add(call):
        got.append(np.diff(call.arguments["spans"]).sum())

    with at_call(FolderBucket.ranges, before=add), TrajectoryStore.open(tmp_path / "s") as store:
        ids = store.ids()
        for row in (3, 39, 0, 3):
            assert (store.read_padded(ids[[row]], "x")["x"][0] == values[row]).all()
        assert sum(got) < values.nbytes / 5
        got.clear()
        assert (store.read_ragged("x").values == values.reshape(-1)).all()
        assert 0 < sum(got) < 1.01 * values.nbytes
    shard = folder / "x" / "c" / "0"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with TrajectoryStore.open(tmp_path / "s") as store:
        held = ColumnReader(store._catalog, ids[:2])
        for _ in range(2):
            with pytest.raises(CorruptionError, match="chunk"):
                store.read(ids[[0, count // 2]])
            assert (store.read(ids[[39]])["x"][0] == values[39]).all()
        assert (held.ragged(schema["x"]).values == values[:2].reshape(-1)).all()
        assert "chunk" in str(store.verify())


def test_a_failing_object_store_loses_nothing(monkeypatch):
    """A put that fails: no row appears twice, earlier rows stay, and appending the same rows again settles it."""
    monkeypatch.setenv(bucket.PATIENCE, "0.01")
    flaky = FailingStore(MemoryStore())
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
    store = TrajectoryStore.create(flaky, schema, backend="zarr", segment_rows=1000)
    store.append({"x": [[1, 2]], "n": [0]})
    for n in range(1, 5):
        row = {"x": [[n] * n], "n": [n]}
        flaky.left = 0
        for _ in range(2):
            with pytest.raises(WriteFailedError, match="Append them again") as caught:
                store.append(row)
        assert isinstance(caught.value, OSError)
        flaky.left = 10**9
        ids = store.append(row)
        assert store.read(ids)["n"].tolist() == [n]
    for view in (store, TrajectoryStore.open(flaky)):
        assert view.read_scalars("n").tolist() == list(range(5))
        assert view.verify().ok


def test_a_lost_reply_is_settled_by_looking_whose_object_is_there(monkeypatch):
    """Puts that arrive without an answer are committed once; other rows after one in doubt come behind it."""
    monkeypatch.setenv(bucket.PATIENCE, "0.01")

    class Deaf(WrapperStore):
        deaf = False

        async def set_if_not_exists(self, key, value):
            await self._store.set_if_not_exists(key, value)
            if self.deaf:
                raise ConnectionError("no reply")

    deaf = Deaf(MemoryStore())
    store = TrajectoryStore.create(deaf, Schema([Column("n", "int64")]), backend="zarr", segment_rows=1000)
    store.append({"n": [0]})
    deaf.deaf = True
    with pytest.raises(WriteFailedError):
        store.append({"n": [1]})
    deaf.deaf = False
    again = store.append({"n": [1]})
    assert store.read(again)["n"].tolist() == [1]
    store.append({"n": [2]})  # it begins a segment: the one in doubt was ended
    deaf.deaf = True
    with pytest.raises(WriteFailedError):
        store.append({"n": [3]})
    deaf.deaf = False
    store.append({"n": [4]})
    for view in (store, TrajectoryStore.open(deaf)):
        assert view.read_scalars("n").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("puts", [1, 2, 3])
def test_a_store_whose_maker_was_killed_between_its_puts(puts):
    """Whoever opens it puts the rest, which follows from the root, and goes on."""
    memory = MemoryStore()
    with TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr"):
        pass
    for key in ("000000000000.copy", "000000000000.rec", "zarr.json")[: 4 - puts]:
        asyncio.run(memory.delete(f"catalog/{key}"))
    with TrajectoryStore.open(memory, "a") as store:
        store.append({"n": [3]})
    with TrajectoryStore.open(memory) as store:
        assert store.read_scalars("n").tolist() == [3]
        assert store.verify().ok, str(store.verify())


def test_a_reader_of_a_store_whose_maker_was_killed_puts_nothing():
    """It has no rows yet, and what is missing is put by the first process that writes."""
    memory = MemoryStore()
    with TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr"):
        pass
    for key in ("000000000000.copy", "000000000000.rec", "zarr.json"):
        asyncio.run(memory.delete(f"catalog/{key}"))
    with TrajectoryStore.open(memory) as reader:
        assert len(reader) == 0
        assert remote.ZarrBucket(memory).keys("") == ["zarr.json"]
        with TrajectoryStore.open(memory, "a") as writer:
            writer.append({"n": [3]})
        reader.refresh()
        assert reader["n"].tolist() == [3]


def test_raw_segments_are_opened_by_a_url_of_their_folder_and_nowhere_else(tmp_path):
    """In an object store there are no files to map."""
    with TrajectoryStore.create(tmp_path / "s", [Column("n", "int64")]) as store:
        store.append({"n": [3]})
    with TrajectoryStore.open(f"file://{tmp_path / 's'}") as store:
        assert store["n"].tolist() == [3]
    memory = MemoryStore()
    remote.ZarrBucket(memory).put("zarr.json", (tmp_path / "s" / "zarr.json").read_bytes())
    with pytest.raises(NotAStoreError, match="need a local folder"):
        TrajectoryStore.open(memory)


@pytest.mark.filterwarnings("ignore:.*no readable record:RuntimeWarning")
def test_a_store_that_lost_its_records_is_found_from_its_segments():
    """Where there are rows, nobody takes the store for an empty one; a writer puts a record that names them again."""
    memory = MemoryStore()
    with TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr") as store:
        store.append({"n": [3]})

    async def lose_records() -> None:
        for key in [key async for key in memory.list_prefix("catalog/") if not key.endswith(".json")]:
            await memory.delete(key)

    asyncio.run(lose_records())
    for mode in ("r", "a"):
        with pytest.warns(RuntimeWarning, match="no record of the catalog lists seg-00000000"):
            store = TrajectoryStore.open(memory, mode)
        assert store.read_scalars("n").tolist() == [3]
        if mode == "a":
            store.append({"n": [4]})
        store.close()
    with TrajectoryStore.open(memory) as store:
        assert store.read_scalars("n").tolist() == [3, 4]


def test_a_writer_that_was_taken_for_dead_continues_elsewhere(monkeypatch):
    """Its segment is ended and merged by another process; its next rows are in a new one, and all are visible."""
    memory, now = MemoryStore(), time.time_ns
    slow = TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr")
    slow.append({"n": [0]})
    slow.append({"n": [1]})
    with monkeypatch.context() as patches, TrajectoryStore.open(memory, "a") as other:
        patches.setattr(time, "time_ns", lambda: now() + int(7200e9))
        other.append({"n": [5]})
        assert other.compact().rows == 3
    ids = slow.append({"n": [2]})
    slow.refresh()
    for view in (slow, TrajectoryStore.open(memory)):
        assert sorted(view.read_scalars("n").tolist()) == [0, 1, 2, 5]
        assert view.read(ids)["n"].tolist() == [2]
        assert view.verify().ok, str(view.verify())


def test_a_segment_ended_by_another_process_where_a_block_ends(monkeypatch):
    """The commit that would say the records of its block says none there; a reader takes each from its own."""
    memory = MemoryStore()
    with TrajectoryStore.create(memory, Schema([Column("n", "int64")]), backend="zarr", segment_rows=500) as store:
        for n in range(BLOCK - 1):
            store.append({"n": [n]})
        with monkeypatch.context() as patches:
            now = time.time_ns
            patches.setattr(time, "time_ns", lambda: now() + int(7200e9))
            bucket = remote.open_bucket(memory, durable=False)
            root = read_root(bucket)
            medium = ObjectMedium(bucket, root, None, 1 << 20)
            assert medium.seal(Catalog(medium, root).segments[0])
        with TrajectoryStore.open(memory) as reader:
            assert reader.read_scalars("n").tolist() == list(range(BLOCK - 1))
            assert reader.verify().ok, str(reader.verify())


def test_a_put_makes_its_folder_again_while_another_process_tidies_up(tmp_path):
    """Whoever sweeps removes empty folders at any moment, also the one that was made just now."""
    puts = bucket.FolderBucket(tmp_path, durable=False)

    def lose(call):
        if call.number < 4:
            os.rmdir(call.arguments["path"])

    with at_call(bucket.fs.mkdir, after=lose) as made:
        assert puts.put_new("seg/a", b"x")
    assert len(made) == 4
    assert puts.get("seg/a") == b"x"


def test_what_cannot_be_read_for_a_moment_is_no_damage(monkeypatch):
    """A look that fails raises; the next one finds the segment, and nothing was called damaged."""
    memory, schema = MemoryStore(), Schema([Column("n", "int64")])
    writer = TrajectoryStore.create(memory, schema, backend="zarr")
    reader = TrajectoryStore.open(memory)
    writer.append({"n": [1]})
    monkeypatch.setenv(bucket.PATIENCE, "1e-9")
    no_answer = fails(bucket.Transient("no answer"))
    with at_call(remote.ZarrBucket._tail, before=no_answer), pytest.raises(ReadFailedError):
        reader.refresh()
    assert reader.refresh() == 1
    assert reader.read_scalars("n").tolist() == [1]
    assert reader.verify().ok, str(reader.verify())


def test_a_link_in_place_of_a_commit_costs_its_segment_only(tmp_path):
    """The rows of the other segments are read as before."""
    TrajectoryStore.create(tmp_path / "s", Schema([Column("n", "int64")]), backend="zarr").close()
    for n in range(3):
        with TrajectoryStore.open(tmp_path / "s", "a") as store:
            store.append({"n": [n]})
    commit = tmp_path / "s" / "seg-00000001" / "00000000.zip"
    commit.rename(tmp_path / "elsewhere")
    commit.symlink_to(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with TrajectoryStore.open(tmp_path / "s") as store:
            assert store.read([0, 2 << 32])["n"].tolist() == [0, 2]
            assert not store.verify().ok


def test_who_lost_the_claim_sweeps_nothing_away(monkeypatch):
    """A process whose claim ran out while it compacted leaves alone what the next one is writing."""
    memory, ahead, real = MemoryStore(), [0], time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead[0])
    schema = Schema([Column("n", "int64")])
    TrajectoryStore.create(memory, schema, backend="zarr").close()

    def append(n):
        with TrajectoryStore.open(memory, "a") as store:
            store.append({"n": [n]})

    for n in range(2):
        append(n)
    first, second = (TrajectoryStore.open(memory, "a") for _ in range(2))
    written, swept = threading.Event(), threading.Event()
    then = threading.Thread(target=second.compact)
    looking = []

    def wait(_):
        if threading.current_thread() is then:
            written.set()
            assert swept.wait(30)

    def lose_the_claim(_):
        if threading.current_thread() is not then and not ahead[0]:
            ahead[0] = int(1000e9)
            append(2)
            then.start()
            assert written.wait(30)
            looking[0].refresh()

    with (
        at_call(upkeep._drop, before=lambda call: looking.append(call.arguments["catalog"])),
        at_call(ObjectMedium.write_merged, after=wait),
        at_call(upkeep._by_columns, before=lose_the_claim),
    ):
        first.compact()
        swept.set()
        then.join()
    with TrajectoryStore.open(memory) as store:
        assert store.read_scalars("n").tolist() == [0, 1, 2]
        assert store.verify().ok, str(store.verify())


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


def test_a_record_of_a_writer_that_slept_does_not_count_where_its_number_was_used_and_removed():
    """Stopped right before a put while others put so many that the old records go: its rows are there all the same."""
    memory = MemoryStore()

    def meanwhile():
        with TrajectoryStore.open(memory, "a") as store:
            for n in range(160):
                store.append({"n": [n]})

    class Stopped(WrapperStore):
        asleep: str | None = None

        async def set_if_not_exists(self, key, value):
            if self.asleep == "" and key.endswith(".rec"):
                self.asleep = key
                await asyncio.to_thread(meanwhile)
                assert not await self._store.exists(key)
            await self._store.set_if_not_exists(key, value)

    stopped = Stopped(memory)
    late = TrajectoryStore.create(stopped, Schema([Column("n", "int64")]), backend="zarr", segment_rows=1)
    stopped.asleep = ""
    ids = late.append({"n": [1000]})
    assert stopped.asleep
    for view in (late, TrajectoryStore.open(memory)):
        view.refresh()
        assert sorted(view.read_scalars("n").tolist()) == [*range(160), 1000]
        assert view.read(ids)["n"].tolist() == [1000]


def test_of_what_one_writer_appended_a_reader_has_no_later_row_without_the_earlier_ones():
    """Between its looks at the commits and at the catalog, a segment gets its last row, and the next one its first."""
    memory, schema = MemoryStore(), Schema([Column("n", "int64")])
    writer = TrajectoryStore.create(memory, schema, backend="zarr", segment_rows=2)
    writer.append({"n": [0]})

    class Between(WrapperStore):
        done: asyncio.Event | None = None

        async def get(self, key, prototype, byte_range=None):
            found = await self._store.get(key, prototype, byte_range)
            if self.done and not self.done.is_set() and key.startswith("seg-"):
                for n in (1, 2):
                    await asyncio.to_thread(writer.append, {"n": [n]})
                self.done.set()
            return found

        async def list_prefix(self, prefix):
            if self.done and prefix.startswith("catalog"):
                await self.done.wait()
            async for key in self._store.list_prefix(prefix):
                yield key

    between = Between(memory)
    reader = TrajectoryStore.open(between)
    between.done = asyncio.Event()
    reader.refresh()
    assert between.done.is_set()
    assert reader.read_scalars("n").tolist() == [0, 1, 2]


@NAMED
def test_damaged_and_missing_objects_are_named(tmp_path):
    """Verify names the object; a read of it is an error; other columns and commits stay readable."""
    store = TrajectoryStore.create(tmp_path / "s", example_schema(), backend="zarr", compress=False)
    ids = np.concatenate([store.append(example_rows(5, seed=seed)) for seed in range(3)])
    store.close()
    path = tmp_path / "s" / "seg-00000000" / "00000001.zip"
    raw = path.read_bytes()
    at = raw.index(example_rows(5, seed=1)["log_probs"].values.tobytes())
    for damage in ("flip", "gone"):
        path.unlink()
        if damage == "flip":
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            store = TrajectoryStore.open(tmp_path / "s")
        report = store.verify()
        assert report.damaged_ids.tolist() == ids[5:10].tolist(), str(report)
        assert "00000001.zip" in str(report)
        with pytest.raises(CorruptionError, match=r"00000001\.zip"):
            store.read(ids, "log_probs")
        assert len(store.read(ids[:5], "log_probs")["log_probs"]) == 5
        assert len(store) == 10  # the rows that can be read
        store.close()


@NAMED
def test_a_damaged_object_costs_the_reads_of_its_rows_only(tmp_path):
    """A read that was begun before another one failed gets its rows, and none that are not there."""
    schema = Schema([Column("n", "int64")])
    path = tmp_path / "s"
    with TrajectoryStore.create(path, schema, backend="zarr") as store:
        ids = np.concatenate([store.append({"n": [n, n]}) for n in (1, 2, 3)])
    damaged = path / "seg-00000000" / "00000001.zip"
    raw = bytearray(damaged.read_bytes())
    raw[70] ^= 1
    damaged.write_bytes(raw)
    with TrajectoryStore.open(path) as store:
        begun = [ColumnReader(store._catalog, ids[part]) for part in (slice(0, 2), slice(4, 6), slice(2, 4))]
        with pytest.raises(CorruptionError):
            store.read_scalars("n", ids)
        assert [reader.scalars(schema["n"]).tolist() for reader in begun[:2]] == [[1, 1], [3, 3]]
        with pytest.raises(CorruptionError):
            begun[2].scalars(schema["n"])


def test_the_order_is_that_of_the_commits_that_are_there(tmp_path):
    """The time of a commit that was torn is not taken for that of the one before it."""
    schema = Schema([Column("a", "int32")])
    with TrajectoryStore.create(tmp_path / "s", schema, backend="zarr") as one:
        first = one.append({"a": [1]})
        with TrajectoryStore.open(tmp_path / "s", mode="a") as two:
            second = two.append({"a": [2]})
        one.append({"a": [3, 4]})
        third = one.append({"a": [5]})
    torn = tmp_path / "s" / "seg-00000000" / "00000001.zip"
    torn.write_bytes(bytes(torn.stat().st_size))
    with pytest.warns(RuntimeWarning, match="rows? (is|are) not returned"):
        store = TrajectoryStore.open(tmp_path / "s")
    with store:
        assert store.ids().tolist() == [*first.tolist(), *second.tolist(), *third.tolist()]
        assert (len(store), store.watermark) == (3, 5)  # two of five rows are damaged


@pytest.mark.parametrize("budget", [1 << 20, 0])
def test_what_was_fetched_stays_within_its_budget(tmp_path, budget):
    """Objects come as a whole, so every array of them counts, and goes when there is no room but for the one in use."""
    names = ("a", "b", "c")
    memory = MemoryStore()
    values = np.random.default_rng(0).integers(0, 1 << 30, (20, 10_000), dtype=np.int32)
    with TrajectoryStore.create(
        memory, Schema([Column(name, "int32", ragged=True) for name in names]), backend="zarr"
    ) as store:
        for row in values:
            store.append({name: RaggedArray(row + k, [1000] * 10) for k, name in enumerate(names)})
    with TrajectoryStore.open(memory, cache_dir=tmp_path, cache_bytes=budget) as store:
        for k, name in [*enumerate(names)] * 2:
            assert (store.read_ragged(name).values == values.reshape(-1) + k).all()
            assert sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file()) <= 1.1 * (
                budget or 1 << 20
            )


def test_a_batch_fetches_no_more_than_its_rows(tmp_path):
    """Reading ahead is for maps: with objects it fetched every commit of the columns, of a large store all of it."""
    schema = Schema([Column("n", "int64"), Column("x", "int64", ragged=True)])
    with TrajectoryStore.create(tmp_path / "s", schema, backend="zarr") as store:
        ids = [store.append({"n": [n], "x": [np.arange(100) + n]})[0] for n in range(20)]
    with TrajectoryStore.open(tmp_path / "s") as store:
        for n in (3, 17, 9):
            found = store.read_padded(ids[n : n + 1])
            assert (found["x"] == np.arange(100) + n).all()
        assert store._catalog.medium._cache._bytes <= 3 * 1000


def test_a_cache_that_somebody_tidied_away_is_fetched_again(tmp_path):
    """Temporary files go when a machine cleans up: never are they read as zeros, or is their loss another error."""
    schema = Schema([Column("n", "int64"), Column("a", "int64", mutable=True), Column("b", "int64", mutable=True)])
    with TrajectoryStore.create(tmp_path / "s", schema, backend="zarr") as store:
        store.update(store.append({"n": range(50)}), a=range(50), b=range(50))
    with TrajectoryStore.open(tmp_path / "s", cache_dir=tmp_path / "cache") as store:
        for name, gone in (("a", "*/*.b"), ("b", "*"), ("n", "*")):
            assert store.read_scalars(name).tolist() == list(range(50))
            for path in (tmp_path / "cache").glob(gone):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with TrajectoryStore.create(tmp_path / "more", schema, backend="zarr") as store:
        ids = [store.append({"n": [n]}) for n in range(1, 4)]
    with TrajectoryStore.open(tmp_path / "more", cache_dir=tmp_path / "other") as store:
        for n in range(1, 4):  # the file that is mapped is not the one to which the next commit is fetched
            assert store.read_scalars("n", ids[n - 1]).tolist() == [n]
            shutil.rmtree(tmp_path / "other")
        assert store.read_scalars("n").tolist() == [1, 2, 3]
    (tmp_path / "file").touch()
    with (
        TrajectoryStore.open(tmp_path / "s", cache_dir=tmp_path / "file") as store,
        pytest.raises(ReadFailedError, match="cache_dir"),
    ):
        store.read_scalars("a")


FORKS = """
import os
from obstore.store import MemoryStore
from trajectory_store import Column, StoreError, TrajectoryStore
store = TrajectoryStore.create(MemoryStore(), [Column("n", "int64")])
for n in range(3):
    store.append({"n": [n]})
child = os.fork()
if not child:
    again = lambda: TrajectoryStore.open(MemoryStore())
    for call in (store.refresh, lambda: store.append({"n": [3]}), lambda: store.read_scalars("n"), store.verify, again):
        try:
            call()
        except StoreError as error:
            assert f"process {os.getpid()} was forked from process {os.getppid()}" in str(error), error
            assert "spawn" in str(error)
        else:
            raise SystemExit(1)
    store.close()
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
store.refresh()
assert store.read_scalars("n").tolist() == [0, 1, 2]
print("refused")
"""


def test_a_fork_of_a_process_that_asked_an_object_store_is_refused():
    """Its client's threads are not in the fork, where a request would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", FORKS],
        env={"PYTHONPATH": str(ROOT / "storage"), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_commits_are_fetched_when_they_are_read():
    """Reading rows of a remote store fetches the commits that hold them, once."""
    seen = []

    class Watching(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            seen.append(key)
            return await self._store.get(key, prototype, byte_range)

    watching = Watching(MemoryStore())
    store = TrajectoryStore.create(watching, example_schema(), backend="zarr")
    ids = np.concatenate([store.append(example_rows(6, seed=seed)) for seed in range(4)])
    with TrajectoryStore.open(watching) as reader:
        seen.clear()
        assert len(reader.read_scalars("task_reward", ids[8:11])) == 3
        assert seen == ["seg-00000000/00000001.zip"]
        reader.read_padded(ids[6:12])
        assert seen == ["seg-00000000/00000001.zip"]


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
    reader = TrajectoryStore.open(slow)
    assert len(reader) == 300
    assert slow.waves < 30


def test_the_environment_limits_the_cache(monkeypatch):
    """Columns that were read first are given back, and fetched again when they are read again."""
    monkeypatch.setenv(backend.CACHE_BYTES, "500")
    memory = MemoryStore()
    writer = TrajectoryStore.create(memory, example_schema(), backend="zarr")
    ids = writer.append(example_rows(64))
    reader = TrajectoryStore.open(memory)
    for _ in range(2):
        np.testing.assert_array_equal(
            reader.read_padded(ids, ["log_probs"])["log_probs"], writer.read_padded(ids, ["log_probs"])["log_probs"]
        )
        reader.read_padded(ids, ["input_ids"])
        assert sum(file.stat().st_blocks for file in reader._catalog.medium._cache.folder.iterdir()) * 512 < 1 << 16
    monkeypatch.setenv(backend.CACHE_BYTES, "much")
    with pytest.raises(StoreError, match="TRAJECTORY_STORE_CACHE_BYTES is 'much'"):
        TrajectoryStore.open(memory)


def test_a_cold_batch_takes_few_round_trips_however_many_segments_it_is_in():
    """What 64 rows need of eight segments is asked for at once; a reader that opens asks for what its listing names."""
    obstore = pytest.importorskip("obstore")

    delay, running, trips, counting = 0.0, 0, 0, threading.Lock()

    def begin(_):
        nonlocal running, trips
        with counting:
            trips += running == 0
            running += 1
        time.sleep(delay)

    def end(_):
        nonlocal running
        with counting:
            running -= 1

    memory = obstore.store.MemoryStore()
    with at_call(remote.ObstoreBucket._call, before=begin, after=end):
        TrajectoryStore.create(memory, example_schema(), backend="zarr").close()
        writers = [TrajectoryStore.open(memory, "a") for _ in range(8)]
        for number in range(3):
            for place, writer in enumerate(writers):
                writer.append(example_rows(4, seed=8 * number + place))
        delay, trips = 0.05, 0
        reader = TrajectoryStore.open(memory)
        assert trips <= 8
        ids = np.random.default_rng(0).permutation(reader.ids())[:64]
        trips = 0
        reader.read_padded(ids, ["input_ids", "log_probs", "task_reward"])
        assert trips <= 2
        reader.refresh()
        before = reader._catalog.medium.bucket.traffic
        writers[0].append(example_rows(4, seed=99))
        reader.refresh()
        reader.read_padded(reader.ids()[-4:], ["input_ids", "log_probs", "task_reward"])
        asked = reader._catalog.medium.bucket.traffic - before
        assert (asked.gets, asked.lists) == (8 + 1, 1), "of each segment the next commit, and of one the one behind it"
