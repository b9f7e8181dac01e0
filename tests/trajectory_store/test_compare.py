"""Copying between stores and backends, and comparing them."""

from __future__ import annotations

import numpy as np
import pytest

from trajectory_store import Column, Schema, SchemaError, TrajectoryStore, copy_rows, diff
from trajectory_store.testing import example_rows, example_schema


@pytest.fixture
def source(tmp_path):
    """A store with patches, updates and columns left out."""
    with TrajectoryStore.create(tmp_path / "source", example_schema(), segment_rows=9) as store:
        ids = np.concatenate([store.append(example_rows(5, seed=s)) for s in range(5)])
        store.patch(ids[3:5], advantage=[1.0, 2.0], meta=["a", "b"])
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
        other.patch(ids[4:5], task_reward=[99.0])
        other.patch(ids[6:8], prompt=["x", "y"])
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
