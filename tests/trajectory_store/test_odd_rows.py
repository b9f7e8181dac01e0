"""Rows in forms that other tools give: optional columns of one axis, large integers, masks, odd names and places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trajectory_store import BatchError, Column, RaggedArray, SchemaError, StoreExistsError, TrajectoryStore


def test_optional_columns_of_an_axis_come_back_from_arrow(tmp_path: Path):
    """A null is as long as whichever column of its axis has a value in that row, in tables and Parquet files."""
    pytest.importorskip("pyarrow", reason="tables need pyarrow")
    columns = [Column(name, "int32", ragged=True, fill=-1) for name in ("x", "y", "z")]
    with TrajectoryStore.create(tmp_path / "a", columns) as store:
        ids = store.append([{"x": [1, 2, 3]}, {"y": [4, 5]}, {"z": [6]}, {"x": [7], "z": [8]}, {}])
        store.to_parquet(tmp_path / "rows.parquet")
        again = store.append(store.to_arrow())
        with TrajectoryStore.from_parquet(tmp_path / "b", tmp_path / "rows.parquet") as copy:
            for name in ("x", "y", "z"):
                rows, present = store.read_ragged(name, ids), store.present(name, ids)
                for other, places in ((store, again), (copy, copy.ids())):
                    assert [row.tolist() for row in other.read_ragged(name, places)] == [row.tolist() for row in rows]
                    assert other.present(name, places).tolist() == present.tolist()


def test_a_draw_without_a_seed_is_a_new_one(tmp_path: Path):
    """A loop over `sample(n)` draws other rows each time; the same seed draws the same rows."""
    with TrajectoryStore.create(tmp_path / "store", [Column("x", "int64")]) as store:
        store.append({"x": np.arange(1000)})
        assert len({tuple(store.sample(5).tolist()) for _ in range(20)}) > 10
        assert store.sample(5, seed=3).tolist() == store.sample(5, 3).tolist()


def test_uint64_takes_all_its_integers(tmp_path: Path):
    """Python integers from 2^63 to 2^64 - 1 are stored; what does not fit is named."""
    columns = [Column("x", "uint64", fill=0), Column("r", "uint64", ragged=True, fill=0)]
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        ids = store.append([{"x": 2**64 - 1, "r": [1, 2**63]}, {"x": 1, "r": []}, {}])
        store.append({"x": [0, 2**63 + 1], "r": [[2**63], [5, 2**64 - 1]]})
        assert store.read(ids)["x"].tolist() == [2**64 - 1, 1, 0]
        assert store.read_scalars("x").tolist() == [2**64 - 1, 1, 0, 0, 2**63 + 1]
        assert store.read_ragged("r").values.tolist() == [1, 2**63, 2**63, 5, 2**64 - 1]
        for wrong in (2**64, -1):
            with pytest.raises(BatchError, match=f"{wrong} does not fit in uint64"):
                store.append({"x": [wrong, 2**63]})


def test_masked_values_are_no_values(tmp_path: Path):
    """A masked scalar is a row without a value; within a row, where every element needs one, it is an error."""
    columns = [Column("x", "int64", fill=0), Column("r", "int64", ragged=True, fill=0)]
    with TrajectoryStore.create(tmp_path / "store", columns) as store:
        ids = store.append({"x": np.ma.masked_array([7, 8, 9], [True, False, False])})
        assert store.read(ids)["x"].tolist() == [0, 8, 9]
        assert store.present("x", ids).tolist() == [False, True, True]
        masked = np.ma.masked_array([7, 8], [True, False])
        with pytest.raises(BatchError, match="masked"):
            store.append({"r": [masked]})
        with pytest.raises(BatchError, match="masked"):
            RaggedArray(masked, [2])


def test_odd_data_frames_are_refused_by_name(tmp_path: Path):
    """An infinite value of a whole number and a column that appears twice are errors of the batch."""
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    with TrajectoryStore.create(tmp_path / "store", [Column("x", "int64", fill=0)]) as store:
        with pytest.raises(BatchError, match="'x'"):
            store.append(pandas.DataFrame({"x": [1.0, np.inf]}))
        with pytest.raises(BatchError, match="'x' appears twice"):
            store.append(pandas.DataFrame([[1, 2]], columns=["x", "x"]))
        assert len(store) == 0


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names fit a file system, `~` is the home folder, and a copy is not made within the store that it copies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for wrong in (lambda: Column("a" * 129, "int64"), lambda: Column("a", "int64", ragged=True, axis="b" * 252)):
        with pytest.raises(SchemaError, match="at most 128"):
            wrong()
    with TrajectoryStore.create("~/store", [Column("a" * 128, "str"), Column("x", "int64")]) as store:
        store.append({"a" * 128: ["text"], "x": [1]})
        store.copy("~/copy")
        with pytest.raises(StoreExistsError, match="folder of the store"):
            store.copy(tmp_path / "store" / "copy")
    assert TrajectoryStore.open("~/copy").path == tmp_path / "copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "store"]
