"""Damage is found before rows are chosen by their values."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_pipeline.buffer.checked_rows import check_rows, sound_rows
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError
from tests.damage import flip_value
from trajectory_store import Column, CorruptionError, TrajectoryStore


def make(path, schema=None):
    """A store of three commits of two rows, and its ids."""
    with TrajectoryStore.create(path, schema or trajectory_schema()) as store:
        for first in range(0, 6, 2):
            store.append({"input_ids": [[first, 1], [first + 1]], "task_reward": [first, first + 1.0]})
        return store.ids()


@pytest.mark.parametrize("column", ["task_reward", "input_ids"])
def test_a_damaged_commit_is_an_error_that_names_its_rows(tmp_path, column):
    """Whichever column is damaged; rows of other commits, and none at all, are taken."""
    ids = make(tmp_path / "s")
    flip_value(tmp_path / "s", column, 2)
    with TrajectoryStore.open(tmp_path / "s") as store:
        check_rows(store, ids[[0, 1, 4, 5]])
        check_rows(store, ids[:0])
        for rows in (ids, ids[3:4]):
            with pytest.raises(CorruptionError):
                check_rows(store, rows)
        with pytest.raises(CorruptionError):
            check_rows(store.as_of(store.snapshot()), ids)


def test_damaged_rows_are_left_out_only_if_that_was_asked_for(tmp_path):
    """The order stays; otherwise the error names the option and the command that says all that is wrong."""
    ids = make(tmp_path / "a store")
    with TrajectoryStore.open(tmp_path / "a store") as store:
        assert sound_rows(store, ids, skip=False).tolist() == ids.tolist()
    flip_value(tmp_path / "a store", "task_reward", 2)
    with TrajectoryStore.open(tmp_path / "a store") as store:
        wanted = np.concatenate([ids[::-1], ids[:1]])
        assert sound_rows(store, wanted, skip=True).tolist() == ids[[5, 4, 1, 0, 0]].tolist()
        with pytest.raises(DataError, match=r"--skip-damaged.*rlhf-pipeline verify '.*a store'"):
            sound_rows(store, wanted, skip=False)


def test_a_damaged_later_value_damages_its_row(tmp_path):
    """An advantage that an update gave decides what is learned from as one of the row itself."""
    ids = make(tmp_path / "s")
    with TrajectoryStore.open(tmp_path / "s", "a") as store:
        store.update(ids[:1], advantage=[0.5])
        store.update(ids[3:4], advantage=[0.25])
    (file,) = (tmp_path / "s").glob("seg-*/advantage/c/0")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with TrajectoryStore.open(tmp_path / "s") as store:
        check_rows(store, ids[1:])
        with pytest.raises(CorruptionError):
            check_rows(store, ids)
        assert sound_rows(store, ids, skip=True).tolist() == ids[1:].tolist()


def test_a_store_that_lacks_the_columns_is_checked_by_those_that_it_has(tmp_path):
    """Stores of other origins have some of them."""
    ids = make(tmp_path / "s", [Column("input_ids", "int32", ragged=True), Column("task_reward", "float32")])
    flip_value(tmp_path / "s", "task_reward", 5)
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert sound_rows(store, ids, skip=True).tolist() == ids[:4].tolist()
