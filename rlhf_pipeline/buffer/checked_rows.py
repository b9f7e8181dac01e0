"""Rows are compared with their checksums before anything is chosen by their values. Imports no torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from rlhf_pipeline.buffer.trajectory_schema import WAITING
from rlhf_pipeline.errors import DataError, typed
from trajectory_store import CorruptionError, TrajectoryStore
from trajectory_store.reads import StoreReads

_DECISIVE: Final = ("policy_version", "task_reward", "return", "advantage", "priority", WAITING.name)
"""Columns that decide what is learned from, and that may have later values."""


def check_rows(store: StoreReads, row_ids: np.ndarray) -> None:
    """Compare what is stored of rows with its checksums, each commit once per process and state of its files.

    Whoever chooses rows by their values calls this first, and batches are read so anyway: nothing is learned from a
    damaged row, and none is chosen, or passed over, because of one.

    Args:
        store: the store, or the store as of a snapshot.
        row_ids: int64 [n].

    Raises:
        CorruptionError: names the rows and the segment.
    """
    if len(row_ids):
        store.read(row_ids, [name for name in _DECISIVE if name in store.schema], checked=True)


def sound_rows(store: TrajectoryStore, row_ids: np.ndarray, *, skip: bool) -> np.ndarray:
    """Return the rows that are as they were stored, int64 [m], in the same order.

    Args:
        store: the store.
        row_ids: int64 [n].
        skip: leave damaged rows out; otherwise they are an error.

    Raises:
        DataError: some are damaged, and they are not to be left out.
    """
    try:
        check_rows(store, row_ids)
    except CorruptionError as error:
        if not skip:
            raise DataError(
                f"{error} Restore the store from a copy, or leave its damaged trajectories out: --skip-damaged. All "
                f"that is wrong: rlhf-pipeline verify {typed(store.path)}"
            ) from error
        row_ids = row_ids[~np.isin(row_ids, store.verify(row_ids).damaged_ids)]
        check_rows(store, row_ids)
    return row_ids
