"""Rows are compared with their checksums before anything is chosen by their values. Imports no torch."""

from __future__ import annotations

import numpy as np

from rlhf_pipeline.errors import DataError, typed
from trajectory_store import CorruptionError, TrajectoryStore
from trajectory_store.reads import StoreReads


def check_rows(store: StoreReads, row_ids: np.ndarray) -> None:
    """Verify the stored data of rows against its checksums, each commit once per process and state of its files.

    Code that chooses rows by their values calls this first, and batches are read in the same way: nothing is learned
    from a damaged row, and none is chosen, or passed over, because of one.

    Args:
        store: the store, or the store as of a snapshot.
        row_ids: int64 [n].

    Raises:
        CorruptionError: names the rows and the segment.
    """
    if len(row_ids):
        store.intact(row_ids)


def sound_rows(store: TrajectoryStore, row_ids: np.ndarray | None = None, *, skip: bool) -> np.ndarray:
    """Return the rows that match their checksums, int64 [m], in the same order.

    Args:
        store: the store.
        row_ids: int64 [n]; None for all, those that are known to be damaged among them.
        skip: exclude damaged rows; otherwise they are an error.

    Raises:
        DataError: some are damaged, and they are not to be excluded.
    """
    try:
        return store.intact(row_ids, skip_damaged=skip)
    except CorruptionError as error:
        raise DataError(f"{error} In a shell: rlhf-pipeline verify {typed(store.path)}") from error
