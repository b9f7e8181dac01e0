"""What a pickle of a store carries, and the rule of row positions, also in another process."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest

from trajectory_store import Column, CorruptionError, Schema, TrajectoryStore

SCHEMA = Schema([Column("tag", "int64"), Column("x", "int32", ragged=True), Column("m", "float32", mutable=True)])
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


def rows(*tags):
    """A batch in which every value follows from the tag."""
    return {"tag": list(tags), "x": [[tag] * 4 for tag in tags]}


def made(path, backend, count=20):
    """Return the ids of a store with one commit per row, closed."""
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as store:
        return [int(store.append(rows(tag))[0]) for tag in range(count)]


def spoil(path, backend, row):
    """Change a byte of the values of a row."""
    if backend == "memmap":
        file, at = path / "seg-00000000" / "tag" / "c" / "0", 8 * row
    else:
        file, at = path / "seg-00000000" / f"{row:08d}.zip", 64
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def tag_at(store, position):
    """Return the tag at a position and the process's length, or the words of the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return len(store), int(store.read(store.positions()[position], ["tag"], checked=True)["tag"][0])
        except CorruptionError as error:
            return len(store), str(error)


@BACKENDS
def test_a_pickle_identifies_what_the_store_holds(tmp_path, backend):
    """It changes with every append, update and removal, and not with a merge or another place in the catalog."""
    path = tmp_path / "s"
    made(path, backend, 4)
    seen = []

    def identity():
        with TrajectoryStore.open(path) as store:
            held = pickle.dumps(store)
        assert pickle.dumps(TrajectoryStore.open(path)) == held
        return held

    with TrajectoryStore.open(path, "a") as store:
        ids = store.ids()
        for change in (
            lambda: store.append(rows(7)),
            lambda: store.update(ids[:2], m=1.0),
            lambda: store.update(ids[:2], m=2.0),
        ):
            seen.append(identity())
            change()
        seen.append(identity())
        store.compact()
        assert identity() == seen[-1]
    assert identity() == seen[-1]
    assert len(set(seen)) == len(seen)
    shutil.copytree(path, tmp_path / "copy")
    made(tmp_path / "new", backend, 4)
    with TrajectoryStore.open(tmp_path / "new") as one, TrajectoryStore.open(tmp_path / "copy") as two:
        assert one._identity()[0] != two._identity()[0]


def test_a_pickle_keeps_the_settings(tmp_path):
    """How files are read, where columns are kept, and how much of them."""
    made(tmp_path / "m", "memmap", 2)
    made(tmp_path / "z", "zarr", 2)
    with TrajectoryStore.open(tmp_path / "m", io="pread") as store, pickle.loads(pickle.dumps(store)) as again:  # noqa: S301
        assert again._catalog.medium.io == "pread"
        assert again["tag"].tolist() == [0, 1]
    opened = TrajectoryStore.open(tmp_path / "z", "a", durability="power", cache_dir=tmp_path, cache_bytes="1MB")
    with opened as store, pickle.loads(pickle.dumps(store)) as again:  # noqa: S301
        assert again._catalog.medium._options == store._catalog.medium._options == (tmp_path, 1_000_000)
        assert (again.mode, again.durability) == ("a", "power")


@BACKENDS
def test_a_view_of_a_snapshot_works_in_a_spawned_worker(tmp_path, backend):
    """It has the rows and the values of then."""
    made(tmp_path / "s", backend, 3)
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        store.update(store.ids(), m=1.0)
        view = store.as_of(store.snapshot())
        store.update(store.ids(), m=2.0)
        store.append(rows(9))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(tag_at, view, 2).result() == (3, 2)
            assert pool.submit(pickle.dumps, view).result() == pickle.dumps(view)
        assert pickle.loads(pickle.dumps(view))["m"].tolist() == [1.0] * 3  # noqa: S301


@BACKENDS
@pytest.mark.filterwarnings("ignore:.*(not returned|does not match):RuntimeWarning")
def test_a_damaged_position_is_an_error_that_names_the_row(tmp_path, backend):
    """Positions stay while damage is found; after a refresh, positions, length, ids and iteration lack the row."""
    path = tmp_path / "s"
    ids = made(path, backend)
    spoil(path, backend, 5)
    with TrajectoryStore.open(path) as store:
        count = len(store)
        found = [tag_at(store, position) for position in range(count)]
        for position, (length, tag) in enumerate(found):
            assert length == count
            assert str(ids[5]) in tag if position == 5 else tag == position
        store.refresh()
        left = [tag for tag in range(20) if tag != 5]
        assert [row["tag"] for row in store] == left
        assert store.ids().tolist() == [ids[tag] for tag in left]
        assert len(store) == 19
        assert [store[position]["tag"] for position in range(19)] == left
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        length, words = pool.submit(tag_at, TrajectoryStore.open(path), 5).result()
        assert length == count
        assert str(ids[5]) in words
