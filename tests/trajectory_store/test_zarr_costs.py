"""What the zarr backend asks of an object store: round trips, bytes put, objects got."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from trajectory_store import Column, CorruptionError, RaggedArray, Schema, TrajectoryStore, WriteFailedError
from trajectory_store.testing import example_rows, example_schema, same_rows

zarr = pytest.importorskip("zarr")
from trajectory_store._remote import Remote  # noqa: E402
from trajectory_store._zarr_shard import read_sharded  # noqa: E402
from zarr.storage import LocalStore, MemoryStore, WrapperStore  # noqa: E402


class Counting(WrapperStore):
    """Counts waves of overlapping requests, bytes put, and what was got."""

    def __init__(self, store):
        super().__init__(store)
        self.clear()

    def clear(self):
        """Count from 0."""
        self.running = self.waves = self.put_bytes = 0
        self.got = []

    async def _wait(self):
        self.waves += self.running == 0
        self.running += 1
        await asyncio.sleep(0.005)
        self.running -= 1

    async def get(self, key, prototype, byte_range=None):
        """Get and count."""
        await self._wait()
        found = await self._store.get(key, prototype, byte_range)
        if found is not None:
            self.got.append((key, len(found)))
        return found

    async def set(self, key, value):
        """Put and count."""
        self.put_bytes += len(value)
        await self._wait()
        await self._store.set(key, value)

    async def set_if_not_exists(self, key, value):
        """Put and count."""
        self.put_bytes += len(value)
        await self._wait()
        await self._store.set_if_not_exists(key, value)


def token_rows(count, length, seed=0):
    """Random trajectories of 13 bytes per token and one scalar."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length * 3 // 2, count)
    total = int(lengths.sum())
    return {
        "input_ids": RaggedArray(rng.integers(0, 150_000, total, dtype=np.int32), lengths),
        "assistant_mask": RaggedArray(rng.random(total) < 0.5, lengths),
        "log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "ref_log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "task_reward": rng.random(count, dtype=np.float32),
    }


def token_schema():
    """The columns of `token_rows`."""
    names = {"input_ids": "int32", "assistant_mask": "bool", "log_probs": "float32", "ref_log_probs": "float32"}
    return Schema([*(Column(n, d, ragged=True) for n, d in names.items()), Column("task_reward", "float32")])


@pytest.mark.parametrize(("compress", "most"), [(False, 1.05), (True, 0.95)])
def test_a_commit_takes_two_round_trips_and_little_more_than_its_payload(compress, most):
    """64 trajectories of 600 tokens: two waves of requests; everything put, metadata included, over the values."""
    store = Counting(MemoryStore())
    writer = TrajectoryStore.create(store, token_schema(), backend="zarr", compress=compress)
    writer.append(token_rows(64, 600))
    for seed in (1, 2):
        rows = token_rows(64, 600, seed)
        store.clear()
        writer.append(rows)
        payload = 13 * int(rows["input_ids"].lengths.sum()) + 4 * 64
        assert store.waves == 2
        assert store.put_bytes / payload <= most
    writer.close()


def test_a_batch_fetches_the_commits_of_its_rows_once():
    """Other commits stay where they are; rows that come later are fetched beside those that are there."""
    store = Counting(MemoryStore())
    parts = [example_rows(5, seed=seed) for seed in range(6)]
    writer = TrajectoryStore.create(store, example_schema(), backend="zarr")
    ids = np.concatenate([writer.append(part) for part in parts])
    reader = TrajectoryStore.open(store)
    for wanted in ([1], [4], [1, 4], [0, 1, 5], [2, 3]):
        store.clear()
        batch = np.concatenate([ids[5 * k : 5 * k + 5] for k in wanted])
        for name in ("input_ids", "prompt", "task_reward"):
            reader.read(batch, name)
        commits = {int(key.split("/")[1]) for key, _ in store.got}
        assert commits <= set(wanted)
        for k in wanted:
            same_rows(reader, ids[5 * k : 5 * k + 5], parts[k])
    store.clear()
    for k, part in enumerate(parts):
        same_rows(reader, ids[5 * k : 5 * k + 5], part)
    assert not store.got
    writer.append(parts[0])
    reader.refresh()
    assert reader.read(reader.ids()[-1:], "prompt")["prompt"] == parts[0]["prompt"][-1:]
    reader.close()


def test_threads_that_fetch_at_the_same_time_read_the_same(tmp_path):
    """Four threads start on a reader that has nothing yet and compare every row."""
    parts = [example_rows(4, seed=seed) for seed in range(12)]
    with TrajectoryStore.create(tmp_path / "s", example_schema(), backend="zarr") as writer:
        ids = np.concatenate([writer.append(part) for part in parts])
    reader = TrajectoryStore.open(tmp_path / "s")
    wrong = []

    def compare(seed):
        try:
            for k in np.random.default_rng(seed).permutation(12).tolist():
                same_rows(reader, ids[4 * k : 4 * k + 4], parts[k])
        except Exception as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    threads = [threading.Thread(target=compare, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    reader.close()


def test_opening_gets_the_same_objects_for_more_rows():
    """Ten times the rows in as many commits: the same requests, no values, and hardly more bytes."""
    found = []
    for rows in (20, 200):
        memory = MemoryStore()
        writer = TrajectoryStore.create(memory, token_schema(), backend="zarr")
        for seed in range(5):
            writer.append(token_rows(rows, 20, seed))
        writer.close()
        store = Counting(memory)
        with TrajectoryStore.open(store) as reader:
            assert len(reader) == len(reader.ids()) == 5 * rows
        found.append(dict(store.got))
    assert list(found[0]) == list(found[1])
    assert not any("/c/" in key for key in found[1])
    assert sum(found[1].values()) < sum(found[0].values()) + 500


def test_a_zarr_local_store_and_its_folder_are_the_same_store(tmp_path):
    """Rows put through one are read through the other; a store that is read-only refuses."""
    rows = example_rows(6)
    with TrajectoryStore.create(LocalStore(tmp_path / "s"), example_schema(), backend="zarr") as writer:
        ids = writer.append(rows)
    for target in (tmp_path / "s", LocalStore(tmp_path / "s")):
        with TrajectoryStore.open(target) as reader:
            same_rows(reader, ids, rows)
    assert not list((tmp_path / "s").rglob("*.partial"))
    with TrajectoryStore.open(LocalStore(tmp_path / "s", read_only=True), "a") as writer:
        with pytest.raises(WriteFailedError):
            writer.append(rows)
        assert len(writer) == 6


def sharded(folder, values, *, fill=0, codec="zstd", chunk=100, shard=400):
    """An array as compaction writes it, small."""
    array = zarr.create_array(
        folder,
        name="x",
        shape=values.shape,
        dtype=values.dtype,
        chunks=(chunk,),
        shards=(shard,),
        compressors=[
            {"name": codec, "configuration": {"level": 3} if codec == "gzip" else {"level": 3, "checksum": False}}
        ],
        fill_value=fill,
    )
    array[:] = values


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64", "bool", "uint8"])
def test_shards_are_unpacked_as_zarr_does_it(tmp_path, dtype):
    """Several shards, a last one that is not full, chunks and a shard of nothing but fill values."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2 if dtype == "bool" else 200, 1730).astype(dtype)
    values[100:200] = values[800:1200] = 0
    sharded(tmp_path, values)
    np.testing.assert_array_equal(read_sharded(Remote(tmp_path), "x", np.dtype(dtype)), values)


def test_a_fill_that_is_not_a_number_and_a_foreign_codec(tmp_path):
    """NaN chunks come back as NaN; what another program compressed in its own way is left to zarr."""
    values = np.full(950, np.nan, np.float32)
    values[:50] = 1.5
    sharded(tmp_path / "nan", values, fill=float("nan"))
    np.testing.assert_array_equal(read_sharded(Remote(tmp_path / "nan"), "x", values.dtype), values)
    sharded(tmp_path / "gzip", values, codec="gzip")
    assert "gzip" in json.dumps(json.loads((tmp_path / "gzip" / "x" / "zarr.json").read_text())["codecs"])
    np.testing.assert_array_equal(read_sharded(Remote(tmp_path / "gzip"), "x", values.dtype), values)


def test_a_damaged_shard_is_an_error(tmp_path):
    """A flipped bit in the index or in a chunk, a shard cut short: never other values without an error."""
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
    store = TrajectoryStore.create(tmp_path / "s", schema, backend="zarr")
    values = np.arange(4000, dtype=np.int64) % 77
    for part in np.split(values, 2):
        store.append({"x": RaggedArray(part, np.full(20, 100)), "n": np.arange(20)})
    store.compact()
    store.close()
    path = next((tmp_path / "s").glob("data-*")) / "x" / "c" / "0"
    raw = path.read_bytes()
    for damaged in (
        raw[:-30],
        raw[:20] + bytes([raw[20] ^ 8]) + raw[21:],
        raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
        b"",
    ):
        path.write_bytes(damaged)
        with TrajectoryStore.open(tmp_path / "s") as reader:
            with pytest.raises(CorruptionError):
                reader.read_ragged("x")
            assert len(reader.verify().damaged_ids) == 40
    path.write_bytes(raw)
    with TrajectoryStore.open(tmp_path / "s") as reader:
        np.testing.assert_array_equal(reader.read_ragged("x").values, values)
