"""Ragged arrays."""

from __future__ import annotations

import numpy as np
import pytest

from trajectory_store import BatchError, Column, RaggedArray, TrajectoryStore


def test_rows_are_views_in_order():
    """Indexing, negative indexing, iteration and the list agree."""
    ragged = RaggedArray([1, 2, 3, 4], [1, 0, 3])
    assert [r.tolist() for r in ragged] == [[1], [], [2, 3, 4]]
    assert ragged[-1].tolist() == [2, 3, 4]
    assert [r.tolist() for r in ragged.to_list()] == [[1], [], [2, 3, 4]]
    with pytest.raises(IndexError):
        ragged[3]


def test_take_and_from_rows():
    """Rows picked twice and out of order; an empty set of rows."""
    ragged = RaggedArray.from_rows([[1], [], [2, 3]], dtype="int16")
    assert ragged.values.dtype == np.int16
    taken = ragged.take([2, 0, 2])
    assert taken.values.tolist() == [2, 3, 1, 2, 3]
    assert taken.lengths.tolist() == [2, 1, 2]
    assert len(ragged.take([])) == 0
    assert len(RaggedArray.from_rows([])) == 0


@pytest.mark.parametrize(
    ("values", "lengths", "words"),
    [([1, 2], [1], "add up to 1"), ([1], [2, -1], "negative")],
)
def test_wrong_ragged_arrays_are_refused(values, lengths, words):
    """Lengths that do not add up, that are negative, values that are not flat."""
    with pytest.raises(BatchError, match=words):
        RaggedArray(values, lengths)


def test_values_beside_others_keep_the_lengths():
    """Another column of the same rows shares lengths and offsets; a different number of values is refused."""
    ragged = RaggedArray([1, 2, 3], [1, 2])
    other = ragged.beside(np.array([0.5, 1.5, 2.5]))
    assert [row.tolist() for row in other] == [[0.5], [1.5, 2.5]]
    assert other.lengths is ragged.lengths
    with pytest.raises(BatchError, match="add up to 3"):
        ragged.beside(np.zeros(4))


@pytest.mark.parametrize(
    ("given", "dtype", "fits"),
    [
        ("int64", "int32", [-(2**31), 0, 2**31 - 1]),
        ("int64", "uint8", [0, 127, 128, 255]),
        ("int32", "int64", [-(2**31), 2**31 - 1]),
        ("int16", "int8", [-128, 127]),
        ("uint8", "int8", [0, 127]),
        ("int64", "uint64", [0, 2**63 - 1]),
    ],
)
def test_integers_are_stored_in_a_smaller_dtype_where_all_fit(tmp_path, given, dtype, fits):
    """The limits of the column's dtype come back as they were."""
    with TrajectoryStore.create(tmp_path / "s", [Column("n", dtype)]) as store:
        ids = store.append({"n": np.array(fits, given)})
        assert store.read_scalars("n", ids).tolist() == fits


@pytest.mark.parametrize(
    ("given", "dtype", "value"),
    [
        ("int64", "int32", 2**31),
        ("int64", "int32", -(2**31) - 1),
        ("int64", "int32", 2**32),
        ("int64", "uint8", -1),
        ("int64", "uint8", 256),
        ("int16", "int8", -129),
        ("int32", "uint64", -1),
        ("uint8", "int8", 128),
    ],
)
def test_an_integer_beyond_its_column_is_named(tmp_path, given, dtype, value):
    """Nothing is cut off: the value and the dtype are in the error."""
    with TrajectoryStore.create(tmp_path / "s", [Column("n", dtype)]) as store:
        with pytest.raises(BatchError, match=f"{value} does not fit in {dtype}"):
            store.append({"n": np.array([1, value, 2], given)})
        assert len(store) == 0
