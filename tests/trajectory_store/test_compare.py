"""Copying between stores and backends, and comparing them."""

from __future__ import annotations

import numpy as np
import pytest

from trajectory_store import Column, Schema, SchemaError, TrajectoryStore, copy_rows, diff

from .contract import example_rows, example_schema


@pytest.fixture
def source(tmp_path):
    """A store with patches, updates and columns left out."""
    with TrajectoryStore.create(tmp_path / "source", example_schema(), segment_rows=9) as store:
        ids = np.concatenate([store.append(example_rows(5, seed=s)) for s in range(5)])
        store.update(ids[3:5], advantage=[1.0, 2.0], meta=["a", "b"])
        store.update(ids[:4], use_count=3)
        yield store


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_copy_holds_the_same(tmp_path, source, backend):
    """Values, mutable values, presence and order survive a copy to either backend and back."""
    schema = source.schema
    with (
        TrajectoryStore.create(tmp_path / "copy", schema, backend=backend) as copy,
        TrajectoryStore.create(tmp_path / "back", schema) as back,
    ):
        ids = copy_rows(source, copy, batch_rows=7)
        assert ids.tolist() == copy.ids().tolist()
        copy_rows(copy, back)
        for store in (copy, back):
            found = diff(source, store)
            assert found.same, str(found)
            assert store.present("advantage").tolist() == source.present("advantage").tolist()
            assert store.verify().ok


def test_differences_are_named(tmp_path, source):
    """Changed values, missing rows and other columns, paired by position or by a key."""
    schema = Schema([*source.schema.columns, Column("extra", "int8", fill=1)])
    with TrajectoryStore.create(tmp_path / "other", schema) as other:
        ids = copy_rows(source, other, source.ids()[:20])
        other.update(ids[4:5], task_reward=[99.0])
        other.update(ids[6:8], prompt=["x", "y"])
        found = diff(source, other)
        assert not found.same
        assert found.only_left.tolist() == source.ids()[20:].tolist()
        assert found.changed["task_reward"].tolist() == [[source.ids()[4], ids[4]]]
        assert len(found.changed["prompt"]) == 2
        assert found.columns_right == ["extra"]
        assert "column 'task_reward' differs in 1" in str(found)
        with pytest.raises(SchemaError, match="appears twice"):
            diff(source, other, key="group_id")
    unique = Schema([Column("name", "str"), Column("n", "int64")])
    with (
        TrajectoryStore.create(tmp_path / "a", unique) as a,
        TrajectoryStore.create(tmp_path / "b", unique) as b,
    ):
        a.append({"name": ["x", "y", "z"], "n": [1, 2, 3]})
        left = a.ids()
        right = b.append({"name": ["z", "x", "w"], "n": [3, 5, 0]})
        found = diff(a, b, key="name")
        assert found.only_left.tolist() == [left[1]]
        assert found.only_right.tolist() == [right[2]]
        assert found.changed["n"].tolist() == [[left[0], right[1]]]


def test_a_target_that_does_not_fit_is_refused(tmp_path, source):
    """A missing column and a column without a fill are named."""
    target = TrajectoryStore.create(tmp_path / "t", Schema([Column("input_ids", "int32", ragged=True)]))
    with pytest.raises(SchemaError, match="assistant_mask"):
        copy_rows(source, target)
    target.close()
    schema = Schema([*source.schema.columns, Column("extra", "int8")])
    with TrajectoryStore.create(tmp_path / "u", schema) as target, pytest.raises(SchemaError, match="extra"):
        copy_rows(source, target)


def test_values_are_compared_where_rows_are_long_or_empty(tmp_path, monkeypatch):
    """Empty rows, other lengths, one other value at either end, and a row that is longer than a part."""
    # Parts of four million elements would need gigabytes for as many of them.
    monkeypatch.setattr("trajectory_store.copying.CHUNK_ELEMENTS", 4)
    schema = Schema([Column("x", "float32", ragged=True), Column("n", "int64"), Column("t", "str")])
    rows = [[], [1.0, 2.0], [], [float("nan")] * 9, [3.0], [4.0, 5.0, 6.0], [], [7.0]]
    other = [[], [1.0, 2.5], [], [float("nan")] * 9, [3.0, 0.0], [4.5, 5.0, 6.0], [], [7.0]]
    with (
        TrajectoryStore.create(tmp_path / "a", schema) as a,
        TrajectoryStore.create(tmp_path / "b", schema) as b,
    ):
        a.append({"x": rows, "n": range(8), "t": ["", "b", "cc", "d", "e", "f", "g", "h"]})
        b.append({"x": other[::-1], "n": range(7, -1, -1), "t": ["h", "G", "f", "e", "d", "ccc", "b", ""]})
        seen: list[tuple[int, int]] = []
        found = diff(a, b, key="n", on_rows=lambda done, total: seen.append((done, total)))
        assert found.changed["x"].tolist() == [[1, 6], [4, 3], [5, 2]]
        assert found.changed["t"].tolist() == [[2, 5], [6, 1]]
        assert (found.num_pairs, seen) == (8, [(8, 8)])
        assert list(diff(a, b, key="n", ignore=["x"]).changed) == ["t"]
        assert copy_rows(a, b, on_rows=lambda done, total: seen.append((done, total))).tolist() == list(range(8, 16))
        assert seen[-1] == (8, 8)
        assert diff(a, b).only_right.tolist() == list(range(8, 16))


def test_columns_of_another_kind(tmp_path):
    """A column that is ragged here and scalar there is a difference, and the others are compared."""
    one, two = (
        Schema([Column("n", "int64"), Column("x", "int32", ragged=True)]),
        Schema([Column("n", "int64"), Column("x", "int32")]),
    )
    with TrajectoryStore.create(tmp_path / "a", one) as a, TrajectoryStore.create(tmp_path / "b", two) as b:
        a.append({"n": [1, 2], "x": [[1], [2]]})
        b.append({"n": [1, 3], "x": [1, 2]})
        found = diff(a, b)
        assert (found.redefined, list(found.changed)) == (["x"], ["n"])
        assert "columns with a different definition: x" in str(found)
        assert diff(a, b, ignore=["x", "n"]).same


def test_empty_stores_are_paired_by_a_key(tmp_path):
    """A key works where one side, or both, hold nothing."""
    schema = Schema([Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "a", schema) as a, TrajectoryStore.create(tmp_path / "b", schema) as b:
        assert diff(a, b, key="n").same
        a.append({"n": [1, 2]})
        assert diff(a, b, key="n").only_left.tolist() == [0, 1]
        assert diff(b, a, key="n").only_right.tolist() == [0, 1]
