"""Checksums of blocks: what a read compares and fetches, and which rows one damaged byte costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.damage import flip
from trajectory_store import Column, CorruptionError, RaggedArray, TrajectoryStore

pytest.importorskip("zarr")
OLDER = Path(__file__).parent / "data" / "older_zarr_store.zip"
"""Written when a commit had one checksum per array, and a merged segment inner chunks of 32,768 elements."""
VERSION_5 = Path(__file__).parent / "data" / "version_5_stores.tar.xz"
"""The same rows on both backends, written when blocks were counted from where each commit began."""

ROWS, TOKENS = 4096, 900
TOKEN_COLUMNS = {"input_ids": "int32", "mask": "bool", "log_probs": "float32"}

READ = """
import sys
import numpy as np
from trajectory_store import TrajectoryStore
from trajectory_store.bucket import FolderBucket

count = {}
for name in ("ranges", "tails", "get_many"):
    def counted(self, *args, _read=getattr(FolderBucket, name)):
        found = _read(self, *args)
        key = args[0] if isinstance(args[0], str) else ",".join(args[0])
        array = key.partition("/")[2].partition("/")[0]
        for raw in found:
            raw = raw[0] if isinstance(raw, tuple) else raw
            count[array] = count.get(array, 0) + len(raw or b"")
        return found
    setattr(FolderBucket, name, counted)
with TrajectoryStore.open(sys.argv[1]) as store:
    ids = store.ids()
    if sys.argv[2] == "batch":
        count.clear()
        some = np.random.default_rng(0).choice(ids, 64, replace=False)
        batch = store.read(some, ["input_ids", "mask", "log_probs"])
        returned = sum(row.nbytes for rows in batch.values() for row in rows)
        print(sum(count.values()) / returned)
    else:
        count.clear()
        assert len(store.where("reward >= 0")) == len(ids)
        print(sorted(array for array, size in count.items() if size))
"""


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged store of objects with tokens that do not compress well."""
    path, rng = tmp_path_factory.mktemp("merged") / "s", np.random.default_rng(0)
    columns = [Column(name, dtype, ragged=True) for name, dtype in TOKEN_COLUMNS.items()]
    with TrajectoryStore.create(path, [*columns, Column("reward", "float32")], backend="zarr") as store:
        for _ in range(4):
            lengths = rng.integers(TOKENS // 2, 3 * TOKENS // 2, ROWS // 4)
            flat = {
                "input_ids": rng.integers(0, 150_000, lengths.sum()).astype(np.int32),
                "mask": np.repeat(rng.integers(0, 2, len(lengths)), lengths).astype(bool),
                "log_probs": -rng.exponential(1.0, lengths.sum()).astype(np.float32),
            }
            rows = {name: RaggedArray(values, lengths) for name, values in flat.items()}
            store.append(rows | {"reward": rng.random(len(lengths)).astype(np.float32)})
        store.compact()
    return path


def read_in_a_process(path: Path, what: str) -> str:
    """Run `READ` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), what], capture_output=True, text=True, check=False, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_a_cold_batch_reads_little_more_than_it_returns(merged: Path):
    """64 random rows of a merged store of objects: at most four bytes, checksums and places included, for each."""
    assert float(read_in_a_process(merged, "batch")) <= 4


def test_a_condition_on_one_column_reads_that_column(merged: Path):
    """And the stored checksums of its chunks."""
    assert read_in_a_process(merged, "where") == "['checks', 'reward']"


def test_a_store_of_an_older_writer_is_read(tmp_path: Path):
    """Rows, later values and checks are as they were; one damaged byte costs the rows of the array in its commit."""
    path = tmp_path / "s"
    with zipfile.ZipFile(OLDER) as archive:
        archive.extractall(path)
    with TrajectoryStore.open(path) as store:
        ids, later = store.ids(), {0: 100.0, 1: 101.0, 30: 102.0, 31: 103.0}
        rows = store.read(ids)
        assert rows["tag"].tolist() == list(range(50))
        assert [row.tolist() for row in rows["x"]] == [
            [tag] * (3 if tag < 10 else 4000 if tag < 30 else 3000) for tag in range(50)
        ]
        assert rows["score"].tolist() == [later.get(tag, tag / 2) for tag in range(50)]
        assert store.verify().ok, str(store.verify())
    shutil.copytree(path, tmp_path / "t")
    flip(next((tmp_path / "t").glob("seg-00000003-merged/x/c/0")), 20)
    flip(tmp_path / "t" / "seg-00000005" / "00000000.zip", 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TrajectoryStore.open(tmp_path / "t") as store:
            damaged = store.damaged()
            assert damaged.tolist() == store.verify().damaged_ids.tolist() == [*ids[:19].tolist(), *ids[30:].tolist()]
            with pytest.raises(CorruptionError):
                store.read(ids[:1], ["x"])
            assert store.read(ids[20:30])["tag"].tolist() == list(range(20, 30))
    with TrajectoryStore.open(path, "a") as store:  # a merge writes the present form
        store.compact()
        assert store.read(ids)["score"].tolist() == rows["score"].tolist()
        assert store.verify().ok


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_store_of_version_5_is_read_and_extended(tmp_path: Path, backend: str):
    """Each segment has blocks by the rule of its own version: one damaged byte costs the rows of its block."""
    shutil.unpack_archive(VERSION_5, tmp_path, filter="data")
    path = tmp_path / backend
    scores = {0: 100.0, 1: 101.0, 30: 102.0, 31: 103.0}
    with TrajectoryStore.open(path, "a") as store:
        assert store.verify().ok, str(store.verify())
        ids = store.append({"tag": np.arange(50, 60), "x": [np.full(3000, tag, np.int32) for tag in range(50, 60)]})
        assert len(ids) == 10
    versions = [json.loads((path / f"seg-0000000{n}/zarr.json").read_text())["attributes"]["version"] for n in (5, 7)]
    assert versions == [5, 6]
    with TrajectoryStore.open(path) as store:
        rows, ids = store.read(store.ids()), store.ids()
        assert rows["tag"].tolist() == list(range(60))
        lengths = [3] * 10 + [4000] * 20 + [3000] * 30
        assert [row.tolist() for row in rows["x"]] == [[tag] * n for tag, n in enumerate(lengths)]
        assert rows["score"].tolist() == [scores.get(tag, tag / 2 if tag < 50 else 0.0) for tag in range(60)]
        assert store.verify().ok, str(store.verify())
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    if backend == "memmap":  # the third block of the commit, with the end of its first row
        flip(copy / "seg-00000005" / "x" / "c" / "0", 7 * 12_000 + 9_000)
    else:  # the only block of tags
        flip(copy / "seg-00000005" / "00000001.zip", 64)
    damaged = ids[37:39] if backend == "memmap" else ids[37:50]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TrajectoryStore.open(copy) as store:
            assert store.damaged().tolist() == store.verify().damaged_ids.tolist() == damaged.tolist()
    with TrajectoryStore.open(path, "a") as store:
        store.compact()
        again = store.read(ids)
        assert [row.tolist() for row in again["x"]] == [row.tolist() for row in rows["x"]]
        assert again["score"].tolist() == rows["score"].tolist()
        assert store.verify().ok, str(store.verify())


@pytest.mark.parametrize("place", [200, 3000, 21_000])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
@pytest.mark.parametrize("count", [100, 500])
def test_blocks_end_where_those_of_the_array_do(tmp_path: Path, backend: str, place: int, count: int):
    """A commit that begins in the middle of a page: the same byte costs the same rows on both backends.

    A block is a page; four where the commit wrote at most half a MiB to the column.
    """
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1 << 31, 500, dtype=np.int32) for _ in range(count)]
    sizes = {"segment_rows": 1000, "segment_elements": 1 << 20}
    with TrajectoryStore.create(tmp_path / "s", [Column("x", "int32", ragged=True)], backend=backend, **sizes) as store:
        ids = np.r_[store.append({"x": rows[:37]}), store.append({"x": rows[37:]})]
    if backend == "memmap":
        flip(next(tmp_path.glob("s/seg-*/x/c/0")), 37 * 2000 + place)
    else:
        file = next(tmp_path.glob("s/seg-*/00000001.zip"))
        flip(file, file.read_bytes().index(rows[37].tobytes()) + place)
    size = 4096 if (count - 37) * 2000 > 1 << 19 else 16_384
    first = (37 * 2000 + place) // size * size
    damaged = [row for row in range(37, count) if row * 2000 < first + size and (row + 1) * 2000 > first]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TrajectoryStore.open(tmp_path / "s") as store:
            intact = [row for row in range(count) if row not in damaged]
            for mine, row in zip(store.read(ids[intact])["x"], intact, strict=True):
                np.testing.assert_array_equal(mine, rows[row])
            assert store.damaged().tolist() == store.verify().damaged_ids.tolist() == ids[damaged].tolist()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_damaged_byte_costs_the_rows_of_its_block(tmp_path: Path, backend: str, merge: bool):
    """Not the other rows of its commit, whichever method reads; and no other column."""
    path = tmp_path / "s"
    with TrajectoryStore.create(
        path, [Column("n", "int64"), Column("x", "int32", ragged=True)], backend=backend
    ) as store:
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, 1 << 31, 500, dtype=np.int32) for _ in range(100)]
        ids = store.append({"n": np.arange(100), "x": rows})
    if merge:
        with TrajectoryStore.open(path, "a") as store:
            store.append({"n": [100], "x": [rows[0]]})
        with TrajectoryStore.open(path, "a") as store:
            assert store.compact().segments_after == 1
    files = "seg-*/x/c/0" if backend == "memmap" or merge else "seg-*/*0.zip"
    flip(next(path.glob(files)), 40_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TrajectoryStore.open(path) as store:
            assert store.read(ids, ["n"])["n"].tolist() == list(range(100))
            kept = [row["n"] for row in store]
            assert store.ids().tolist() == [row for row in ids.tolist() if row in kept] + [1 << 32] * merge
            lost = sorted(set(range(100)) - set(kept))
            assert lost == store.damaged().tolist() == store.verify().damaged_ids.tolist()
            assert lost == list(range(lost[0], lost[-1] + 1))
            assert len(lost) <= (4 if backend == "memmap" and merge else 10)
            for row in lost:
                with pytest.raises(CorruptionError, match=f"trajectory {row} "):
                    store.read([row])
            others = [row for row in range(100) if row not in lost]
            for mine, right in zip(store.read(others)["x"], others, strict=True):
                np.testing.assert_array_equal(mine, rows[right])
