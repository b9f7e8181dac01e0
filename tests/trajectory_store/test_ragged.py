"""Ragged arrays."""

from __future__ import annotations

import numpy as np
import pytest

from trajectory_store import BatchError, RaggedArray


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
    [([1, 2], [1], "add up to 1"), ([1], [2, -1], "negative"), ([[1]], [1], "2-D")],
)
def test_wrong_ragged_arrays_are_refused(values, lengths, words):
    """Lengths that do not add up, that are negative, values that are not flat."""
    with pytest.raises(BatchError, match=words):
        RaggedArray(values, lengths)
