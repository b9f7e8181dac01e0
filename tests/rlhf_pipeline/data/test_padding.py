"""Tests of the ragged and padded forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.data.padding import (
    length_mask,
    pad_flat,
    pad_rows,
)
from rlhf_pipeline.errors import DataError, DefinitionError

VALUES = torch.arange(1, 7)
LENGTHS = torch.tensor([2, 0, 3, 1])


def test_both_sides_by_hand():
    """Right and left padding of rows of 2, 0, 3 and 1 tokens."""
    right = pad_flat(VALUES, LENGTHS, pad_value=-1)
    left = pad_flat(VALUES, LENGTHS, pad_value=-1, side="left")
    assert right.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5], [6, -1, -1]]
    assert left.tolist() == [[-1, 1, 2], [-1, -1, -1], [3, 4, 5], [-1, -1, 6]]


@pytest.mark.parametrize("side", ["left", "right"])
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), max_size=8),
    multiple=st.integers(1, 5),
    trailing=st.integers(0, 2),
)
def test_padding_keeps_every_value(side, lengths, multiple, trailing):
    """The real positions of a padded batch hold the flat values in order, for any ragged rows."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    values = torch.randn((int(sizes.sum()), *([2] * trailing)))
    padded = pad_flat(values, sizes, side=side, multiple_of=multiple)
    assert padded.shape[1] % multiple == 0
    mask = length_mask(sizes, side=side, multiple_of=multiple)
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(padded[mask], values)


def test_rows_of_lists_and_tensors():
    """Python rows are padded with their lengths and dtype; no row gives an empty batch."""
    padded, lengths = pad_rows([[1, 2], torch.tensor([3])], pad_value=7, multiple_of=4)
    assert padded.tolist() == [[1, 2, 7, 7], [3, 7, 7, 7]]
    assert lengths.tolist() == [2, 1]
    assert padded.dtype == torch.int64
    empty, none = pad_rows([], dtype=torch.float32)
    assert empty.shape == (0, 0)
    assert none.shape == (0,)


def test_padding_keeps_gradients():
    """A padded batch passes its gradient back to the flat values."""
    values = torch.ones(6, requires_grad=True)
    pad_flat(values, LENGTHS)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0, 0, 0, 0]


def test_errors_name_the_value_and_the_repair():
    """Wrong inputs say what was seen and what to pass."""
    with pytest.raises(DataError, match="add up to 6"):
        pad_flat(VALUES[:4], LENGTHS)
    with pytest.raises(DataError, match="3 tokens but length is 2"):
        pad_flat(VALUES, LENGTHS, length=2)
    with pytest.raises(DefinitionError, match="side"):
        length_mask(LENGTHS, side="middle")  # type: ignore[arg-type]
