"""Tests of the padded form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.data.padding import length_mask, pad_rows, under_mask
from rlhf_pipeline.errors import DefinitionError


@pytest.mark.parametrize("side", ["left", "right"])
@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 7), max_size=8), trailing=st.integers(0, 2))
def test_padding_keeps_every_value(side, lengths, trailing):
    """The real positions of a padded batch hold the values in order, the others the fill, for any ragged rows."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    values = torch.randn((int(sizes.sum()), *([2] * trailing)))
    mask = length_mask(sizes, side=side)
    padded, found = pad_rows(values.split(lengths), pad_value=7, side=side)
    assert torch.equal(found, sizes)
    assert mask.sum(1).tolist() == lengths
    if lengths:
        assert torch.equal(padded[mask], values)
        assert bool((padded[~mask] == 7).all())


def test_rows_of_lists_and_tensors():
    """On either side, with their lengths and dtype; no row gives an empty batch."""
    rows = [[1, 2], torch.tensor([3]), []]
    assert pad_rows(rows[:2], pad_value=7, side="left")[0].tolist() == [[1, 2], [7, 3]]
    padded, lengths = pad_rows(rows, pad_value=7, dtype=torch.int64)
    assert padded.tolist() == [[1, 2], [3, 7], [7, 7]]
    assert lengths.tolist() == [2, 1, 0]
    assert padded.dtype == torch.int64
    empty, none = pad_rows([], dtype=torch.float32)
    assert empty.shape == (0, 0)
    assert none.shape == (0,)


def test_padding_keeps_gradients():
    """A padded batch passes its gradient back to the values."""
    values = torch.ones(3, requires_grad=True)
    under_mask(torch.tensor([[True, True], [False, True]]), values)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 0]


def test_a_side_there_is_not():
    """The error names it."""
    with pytest.raises(DefinitionError, match="'middle'"):
        length_mask(torch.tensor([1]), side="middle")  # type: ignore[arg-type]
