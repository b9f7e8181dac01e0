"""Batches whose rows are spread over many segments, against plain lists."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import FrameType

import numpy as np
import pytest

from tests.moments import at_call
from trajectory_store import Column, MissingRowError, Schema, TrajectoryStore
from trajectory_store.columns import ColumnReader
from trajectory_store.local_segment import LocalSegment

from .contract import example_rows, example_schema, same_rows

TOKENS = Column("tokens_of", "int32", ragged=True)
LATER = Column("score", "float32", ragged=True, fill=-2.0)
LATER_SCALAR = Column("level", "int16", fill=7)


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A store of eight segments; the first four are older than two of its columns."""
    rows = [[100 * i + k for k in range(i % 5)] for i in range(32)]
    path = tmp_path_factory.mktemp("reads") / "s"
    with TrajectoryStore.create(path, Schema([TOKENS, Column("n", "int64")]), segment_rows=4) as store:
        for first in range(0, 16, 4):
            store.append({"tokens_of": rows[first : first + 4], "n": range(first, first + 4)})
    with TrajectoryStore.open(path, "a", add_columns=[LATER, LATER_SCALAR]) as store:
        for first in range(16, 32, 4):
            part = rows[first : first + 4]
            scores = [[0.5 * x for x in row] for row in part]
            level = range(first, first + 4)
            store.append({"tokens_of": part, "score": scores, "n": range(first, first + 4), "level": level})
    return path, rows


def wanted(rows, picked, width, pad, side, value):
    """The matrix that a list of lists gives."""
    out = []
    for i in picked:
        row = [value(i, x) for x in rows[i]]
        rest = [pad] * (width - len(row))
        out.append(row + rest if side == "right" else rest + row)
    return out


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "picked", [[30, 2, 17, 2, 9, 31, 0, 24], [3, 4, 4, 5, 3], [0, 0], [], [*range(32)], [*range(31, -1, -1)]]
)
def test_a_batch_over_many_segments(spread, io, side, picked):
    """Rows come back in the order asked for; older segments give the fill of younger columns."""
    path, rows = spread
    width = -(-max((len(rows[i]) for i in picked), default=0) // 3) * 3
    with TrajectoryStore.open(path, io=io) as store:
        ids = store.ids()[picked]
        for _ in range(2):  # the second time from what was looked up
            batch = store.read_padded(ids, side=side, pad_value={"score": 9.5}, pad_to_multiple_of=3)
            assert batch["tokens_of"].tolist() == wanted(rows, picked, width, 0, side, lambda i, x: x)
            scores = wanted(rows, picked, width, 9.5, side, lambda i, x: 0.5 * x if i >= 16 else -2.0)
            assert batch["score"].tolist() == scores
            assert batch["n"].tolist() == picked
            assert batch["level"].tolist() == [i if i >= 16 else 7 for i in picked]
            assert batch["lengths"].tolist() == [len(rows[i]) for i in picked]
        ragged = store.read_ragged("tokens_of", ids)
        assert [row.tolist() for row in ragged] == [rows[i] for i in picked]


@pytest.mark.parametrize("pad", [0, -1, False, 2.5, -0.0, float("nan")])
def test_every_kind_of_pad_value(spread, pad):
    """Zero, negative zero, NaN and others are written as they are."""
    path, _ = spread
    with TrajectoryStore.open(path) as store:
        score = store.read_padded(store.ids()[[16, 19]], ["score"], pad_value=pad)["score"]
    beside = score[0, 1:]
    expected = np.full_like(beside, pad)
    assert np.array_equal(beside.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_ids_that_a_merged_segment_never_gave(tmp_path, backend):
    """An id beyond, between or before the rows of a merged segment is a row that is missing, and nothing else."""
    schema = Schema([Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "s", schema, backend=backend):
        pass
    given: list[int] = []
    for first in range(0, 9, 3):
        with TrajectoryStore.open(tmp_path / "s", "a") as store:
            given += store.append({"n": range(first, first + 3)}).tolist()
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        assert store.compact().segments_after == 1
        assert store.read_scalars("n", given).tolist() == list(range(9))
        for last in given[2::3]:
            with pytest.raises(MissingRowError, match=str(last + 1)):
                store.read([given[0], last + 1])
        with pytest.raises(MissingRowError):
            store.read([given[0] - 1])


def test_a_condition_sees_the_same_rows_in_every_column(tmp_path):
    """Where the store looks again between two columns, the condition is asked of the rows that were there before."""
    with TrajectoryStore.create(tmp_path / "s", Schema([Column("a", "int64"), Column("b", "int64")])) as store:
        ids = store.append({"a": [0, 1, 2], "b": [2, 1, 0]})

        def append(call):
            if call.number == 2:
                with TrajectoryStore.open(tmp_path / "s", "a") as other:
                    other.append({"a": [9], "b": [0]})
                store.refresh()

        with at_call(ColumnReader.scalars, before=append):
            assert store.where("a > b").tolist() == ids[[2]].tolist()
        assert len(store) == 4
        assert store.where("a > b").tolist() == store.ids()[[2, 3]].tolist()


def test_a_pass_over_a_store_releases_what_it_leaves(tmp_path):
    """Read in batches without maps, forty segments leave no more behind in memory than the last of them."""
    schema, rows, segments = Schema([Column("text", "str"), Column("n", "int64")]), 4096, 40
    with TrajectoryStore.create(tmp_path / "s", schema, segment_rows=rows) as store:
        for first in range(0, segments * rows, rows):
            store.append({"text": ["x"] * rows, "n": range(first, first + rows)})
    with TrajectoryStore.open(tmp_path / "s", io="pread") as store:
        ids = store.ids()
        tracemalloc.start()
        try:
            found = sum(int(batch["n"].sum()) for batch in store.batches(1024, ["text", "n"], ids))
            left, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found == segments * rows * (segments * rows - 1) // 2
    assert left < 4 * 16 * rows  # 16 bytes per row; of all segments it would be ten times as much


def test_an_arrow_table(spread):
    """A value that was filled in is null, and the row before it ends where it ended."""
    pytest.importorskip("pyarrow", reason="Arrow needs pyarrow")
    path, rows = spread
    with TrajectoryStore.open(path) as store:
        picked = [18, 3, 19, 2]
        found = store.to_arrow(["tokens_of", "score", "level"], store.ids()[picked]).to_pydict()
    assert found["tokens_of"] == [rows[i] for i in picked]
    assert found["score"] == [[0.5 * x for x in rows[i]] if i >= 16 else None for i in picked]
    assert found["level"] == [i if i >= 16 else None for i in picked]


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_threads_that_fetch_at_the_same_time_read_the_same(tmp_path, backend):
    """Four threads start on a reader that has read nothing yet, in orders of their own, and compare every row."""
    parts = [example_rows(4, seed=seed) for seed in range(12)]
    with TrajectoryStore.create(tmp_path / "s", example_schema(), backend=backend, segment_rows=8) as writer:
        ids = [writer.append(part) for part in parts]
    with TrajectoryStore.open(tmp_path / "s") as reader, ThreadPoolExecutor(4) as pool:
        start = Barrier(4)

        def compare(seed: int) -> int:
            start.wait()
            for k in np.random.default_rng(seed).permutation(12).tolist():
                same_rows(reader, ids[k], parts[k])
            return seed

        assert list(pool.map(compare, range(4))) == [0, 1, 2, 3]


def test_records_that_another_thread_closes_are_read(tmp_path):
    """A thread may close the records of a finished segment at any line at which another one opens them."""
    with TrajectoryStore.create(tmp_path / "s", example_schema()) as writer:
        writer.append(example_rows(4, seed=0))
    with TrajectoryStore.open(tmp_path / "s") as reader:
        (segment,) = reader._catalog.row_segments()
        assert isinstance(segment, LocalSegment)
        opening = LocalSegment.__dict__["log"].fget.__code__

        def close(frame: FrameType, event: str, _argument: object):
            if event == "line":
                segment.close_log()
            return close

        before = sys.gettrace()
        sys.settrace(lambda frame, _event, _argument: close if frame.f_code is opening else None)
        try:
            records = segment.log
        finally:
            sys.settrace(before)
        assert [record.n_rows for record in (records.get(0),) if record is not None] == [4]
