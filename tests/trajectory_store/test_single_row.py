"""A row that is read by itself equals the same row of a batch, and takes few calls."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import Column, CorruptionError, MissingRowError, TrajectoryStore

COLUMNS = [
    Column("tokens", "int32", ragged=True),
    Column("pairs", "float32", ragged=True, shape=(2,), fill=0.5),
    Column("spans", "int64", ragged=True, axis="spans", fill=0),
    Column("score", "float64"),
    Column("flag", "bool", mutable=True, fill=True),
    Column("text", "str", fill="none"),
    Column("blob", "bytes", fill=""),
]


def batch_of(first: int, count: int, *, all_columns: bool) -> dict[str, Any]:
    """Return rows that differ from each other; row 2 of each batch is empty."""
    numbers = range(first, first + count)
    lengths = [0 if i % 5 == 2 else i % 7 + 1 for i in numbers]
    rows: dict[str, Any] = {
        "tokens": [np.arange(i, i + n, dtype=np.int32) for i, n in zip(numbers, lengths, strict=True)],
        "score": [i / 2 for i in numbers],
    }
    if all_columns:
        rows |= {
            "pairs": [np.full((n, 2), i, np.float32) for i, n in zip(numbers, lengths, strict=True)],
            "spans": [np.arange(i % 3) for i in numbers],
            "flag": [i % 2 == 0 for i in numbers],
            "text": [f"é {i}" * (i % 3) for i in numbers],
            "blob": [bytes([i % 256, 0]) for i in numbers],
        }
    return rows


@pytest.fixture(params=["memmap", "zarr"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrajectoryStore]:
    """Yield a store with several segments, some without optional columns, and a writer that goes on."""
    with TrajectoryStore.create(tmp_path / "s", COLUMNS, backend=request.param, segment_rows=12) as writer:
        for i in range(8):
            writer.append(batch_of(5 * i, 5, all_columns=i not in (4, 5, 6)))
        yield writer


def same(one: dict[str, Any], row: dict[str, Any], place: int) -> bool:
    """Return whether the row of a read of one equals that of a batch, in value and in type."""
    for name, values in row.items():
        expected, actual = values[place], one[name][0]
        if type(expected) is not type(actual) or not np.array_equal(np.asarray(expected), np.asarray(actual)):
            return False
        if isinstance(expected, np.ndarray) and (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
            return False
    return list(one) == list(row)


def check_rows(store: TrajectoryStore, columns: list[str] | None = None) -> None:
    """Compare each row, read twice by id and once by place, with all rows read together."""
    ids = store.ids()
    rows = store.read(ids, columns)
    for place, row_id in enumerate(ids.tolist()):
        for _ in range(2):
            assert same(store.read([row_id], columns), rows, place)
        if columns is None:
            assert same({name: [value] for name, value in store[place].items()}, rows, place)
    assert same({name: [value] for name, value in store[-1].items()}, store.read(ids), len(ids) - 1)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_row_equals_that_of_a_batch(store: TrajectoryStore, io: Any):
    """With every kind of column, in segments that lack some, while rows arrive, and after a merge."""
    check_rows(store)
    with TrajectoryStore.open(store.path, io=io) as reader:
        check_rows(reader)
        check_rows(reader, ["text", "score"])
        store.append(batch_of(40, 9, all_columns=True))
        reader.refresh()
        check_rows(reader)
        store.add_columns([Column("late", "float32", ragged=True, fill=1.0), Column("later", "int8", fill=3)])
        reader.refresh()
        check_rows(reader)
        store.update(store.ids()[::3], flag=np.zeros(len(store.ids()[::3]), bool))
        reader.refresh()
        check_rows(reader)
        store.close()
        with TrajectoryStore.open(store.path, mode="a") as owner:
            owner.compact()
        reader.refresh()
        check_rows(reader)


def test_a_row_is_the_callers_own(store: TrajectoryStore):
    """Who changes what was read changes nothing in the store."""
    row_id = int(store.ids()[1])
    for _ in range(3):
        row = store.read([row_id])
        assert row["tokens"][0].tolist() == [1, 2]
        row["tokens"][0][:] = 9
        row["score"][:] = 9


@pytest.mark.filterwarnings("ignore:.*not returned:RuntimeWarning")
def test_a_damaged_row_is_an_error(store: TrajectoryStore):
    """Also after the row before it was read by itself, and named in the error; other rows can be read."""
    ids, path = store.ids().tolist(), Path(str(store.path))
    store.close()
    file = sorted([*path.glob("seg-00000001*/score/c/0"), *path.glob("seg-00000001/*.zip")])[0]
    raw = bytearray(file.read_bytes())
    at = raw.index(np.array([5.0, 5.5, 6.0]).tobytes()) if file.suffix == ".zip" else 0
    raw[at + 1] ^= 1
    file.write_bytes(raw)
    with TrajectoryStore.open(path) as reader:
        damaged = [i for i in ids if _fails(lambda i=i: reader.read([i]))]
        assert damaged == ids[10:15]
        assert [i for i in ids if _fails(lambda i=i: reader.read([i]))] == damaged
        assert reader.read([ids[9]])["score"].tolist() == [4.5]
        with pytest.raises(MissingRowError):
            reader.read([ids[-1] + 1])


def _fails(read: Callable[[], object]) -> bool:
    try:
        read()
    except CorruptionError:
        return True
    return False


def test_a_row_by_id_takes_few_calls(tmp_path: Path):
    """A row of mapped files costs a few calls per column: at most five times what LMDB takes for four columns."""
    for backend in ("memmap", "zarr"):
        TrajectoryStore.create(tmp_path / backend, COLUMNS[:1] + COLUMNS[3:], backend=backend).close()
        with TrajectoryStore.open(tmp_path / backend, "a", io="mmap") as store:  # on tmpfs the default is pread
            ids = store.append(batch_of(0, 5, all_columns=False))
            store.read(ids)
            store.read(ids[:1])
            assert _calls(lambda store=store, ids=ids: store.read(ids[1:2])) < (45 if backend == "memmap" else 75)
            assert _calls(lambda store=store: store[1]) < (60 if backend == "memmap" else 90)


def _calls(read: Callable[[], object]) -> int:
    """Return the calls of Python and C functions that reading takes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    read()
    sys.setprofile(note)
    try:
        read()
    finally:
        sys.setprofile(None)
    return count
