"""The columns of slots that share rows: each token has one of its own, and rows are about equally full."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_pipeline.policies.engines.slot_columns import FREE, PARKED, Columns, balanced, rows_of


def checked(columns: Columns, stored: np.ndarray) -> None:
    """Each token is in a column of its slot's row with its mark, and no other column is taken."""
    rows, free = len(columns.marks), columns.marks == FREE
    slots = np.arange(len(stored))
    row, column = columns.cells(slots, stored)
    assert row.tolist() == np.repeat(slots % rows, stored).tolist()
    positions = np.concatenate([np.arange(n) for n in stored])
    assert (
        columns.marks[row, column].tolist() == (np.repeat(slots // rows, stored) * columns.window + positions).tolist()
    )
    assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == stored.sum()
    assert (columns.marks[:, 0] == PARKED).all()
    assert free.sum() == columns.marks.size - rows - stored.sum()
    assert free[:, columns.edge :].all()


def test_tokens_keep_their_columns_as_slots_grow_and_end():
    """Any order of growth and ends, up to slots that are as long as can be."""
    rng = np.random.default_rng(0)
    columns, stored = Columns(12, 3, 20), np.zeros(12, dtype=np.int64)
    for _ in range(300):
        for slot in rng.choice(12, rng.integers(0, 4), replace=False).tolist():
            columns.free(slot)
            stored[slot] = 0
        slots = rng.choice(12, rng.integers(1, 13), replace=False)
        before = columns.cells(slots, stored[slots])
        kept, stored[slots] = stored.copy(), np.minimum(19, stored[slots] + rng.integers(0, 9, len(slots)))
        columns.extend(slots, stored[slots])
        for one, other in zip(before, columns.cells(slots, kept[slots]), strict=True):
            assert one.tolist() == other.tolist()
        checked(columns, stored)
    columns.extend(np.arange(12), np.full(12, 19))
    checked(columns, np.full(12, 19))
    assert (columns.marks != FREE).sum() == 3 * (4 * 19 + 1)


def test_the_columns_of_an_ended_slot_are_taken_first():
    """So that a row is no longer than its slots."""
    columns = Columns(4, 2, 10)
    columns.extend(np.arange(4), np.full(4, 4))
    columns.free(0)
    columns.extend(np.array([2]), np.array([8]))
    assert columns.cells(np.array([2]), np.array([8]))[1].tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert columns.ahead(np.array([0, 0, 6, 0]), 3)[2, :2].tolist() == [3, 4]


@pytest.mark.parametrize("members", [1, 2, 4])
def test_rows_are_about_equally_full(members: int):
    """No slot twice, no row beyond its slots, and with several to a row none much fuller than the mean."""
    counts = np.clip(np.exp(np.random.default_rng(1).normal(6, 0.8, 200)), 1, 2048).astype(np.int64)
    rows = 208 // members
    slots, most = balanced(counts, rows, members)
    assert len(set(slots.tolist())) == 200
    assert slots.max() < 208
    assert most == np.bincount(slots % rows, counts).max()
    assert most <= max(counts.max(), 1.2 * counts.sum() / rows)


def test_few_slots_share_no_rows():
    """Rows are shared by two or four where 32 are left and the slots divide; never by more than may."""
    assert [rows_of(n, 4) for n in (1, 32, 63, 64, 100, 128, 129, 130, 256, 260)] == [
        *(1, 32, 63, 32, 50, 32, 129, 65, 64, 65)
    ]
    assert [rows_of(256, most) for most in (1, 2, 4)] == [256, 128, 64]
