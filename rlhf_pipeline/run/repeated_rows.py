"""Whether the trajectories that a run goes on with are as they were stored. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.errors import DataError, typed
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import CorruptionError, TrajectoryStore
from trajectory_store.format import ORDINAL_SHIFT

if TYPE_CHECKING:
    from rlhf_pipeline.buffer.storage import TrajectoryStorage


@contextmanager
def named_damage(run: RunFolder, step: int, saved: int | None) -> Iterator[None]:
    """Say what a run can do if trajectories are damaged that it would learn from after a step.

    Args:
        run: the run folder.
        step: the last step that was taken.
        saved: the step of the newest checkpoint, if there is one.
    """
    try:
        yield
    except CorruptionError as error:
        said = (
            f"step {step + 1} would learn from trajectories that cannot be trusted, so it is not taken: {error} "
            "Restore the store from a copy and go on with --resume; all that is wrong: "
            f"rlhf-pipeline verify {typed(run.address)}"
        )
        if saved is not None:
            again = typed(f"{run.address}@{saved}")
            said += f" Or begin a new run with the checkpoint: rlhf-pipeline run --from {again} --out OTHER_FOLDER"
        raise DataError(said) from error


def check_repeated(run: RunFolder, storage: TrajectoryStorage, step: int, *, max_staleness: int | None) -> None:
    """Check the trajectories that steps after a checkpoint may choose from, and those that the ledger names for them.

    Args:
        run: the run folder.
        storage: its trajectories. What they stored later is checked as it arrives.
        step: of the checkpoint.
        max_staleness: largest age, in steps, of a trajectory to learn from; None sets no limit.

    Raises:
        CorruptionError: names the rows and the segment.
    """
    store, ledger = storage.store, run.ledger
    ledger.refresh()
    # Step k writes its row before any trajectory of its own weights is stored.
    oldest = None if max_staleness is None else ledger.of_step(step - max_staleness)
    since = 0 if oldest is None else int(oldest.get("watermark", 0))
    storage.check_new(since)
    for number in range(step + 1, ledger.last_step + 1):
        rows = np.asarray((ledger.of_step(number) or {"row_ids": []})["row_ids"], np.int64)
        check_rows(store, rows[store.holds(rows)])  # what a power loss took is sampled again
    _check_served(store, since, int((ledger.of_step(step) or {}).get("watermark", 0)))


def _check_served(store: TrajectoryStore, since: int, until: int) -> None:
    """Refuse if rows between two watermarks are damaged so that the store does not serve them at all.

    A power loss takes no row of before a checkpoint, and those after it are sampled again.
    """
    every = store.ids()
    if len(every) == store.watermark:
        return
    rows = every[max(len(every) - (store.watermark - since), 0) : max(len(every) - (store.watermark - until), 0)]
    report = store.verify(rows)
    for row in np.setdiff1d(report.damaged_ids, every).tolist() if report.problems else ():
        beside = rows[rows >> ORDINAL_SHIFT == row >> ORDINAL_SHIFT]
        if len(beside) and beside.min() < row < beside.max():
            raise CorruptionError(f"{store.path}: trajectory {row} cannot be read: {report.problems[0]}.")
