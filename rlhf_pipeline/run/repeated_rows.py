"""Whether the trajectories that a run continues with match their checksums. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Return what a run can do if trajectories are damaged that it would learn from after a step.

    Args:
        run: the run folder.
        step: the last step that was taken.
        saved: the step of the newest checkpoint, if there is one.
    """
    try:
        yield
    except CorruptionError as error:
        instead = ""
        if saved is not None:
            again = typed(f"{run.address}@{saved}")
            instead = f", or start a new run from the checkpoint (rlhf-pipeline run --from {again} --out OTHER_FOLDER)"
        raise DataError(
            f"step {step + 1} would use corrupted trajectories, so it is not taken: {error} Restore the "
            f"store from a copy and continue with --resume{instead}. To list all problems: rlhf-pipeline verify "
            f"{typed(run.address)}"
        ) from error


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
    storage.check_new(_oldest(run, step, max_staleness))
    for number in range(step + 1, ledger.last_step + 1):
        rows = np.asarray((ledger.of_step(number) or {"row_ids": []})["row_ids"], np.int64)
        check_rows(store, rows[store.holds(rows)])  # what a power loss took is sampled again


Served = dict[str, tuple[int, int, int]]
"""For each segment, the first id, the last id and the number of the rows from which later steps may choose."""


def served_rows(run: RunFolder, store: TrajectoryStore, step: int, *, max_staleness: int | None) -> Served:
    """Return, for a checkpoint, which rows the steps after it may choose from; arguments as of `check_repeated`."""
    every, since = store.ids(), _oldest(run, step, max_staleness)
    rows = every[max(len(every) - (store.watermark - since), 0) :]
    segments, first, counts = np.unique(rows >> ORDINAL_SHIFT, return_index=True, return_counts=True)
    spans = zip(segments.tolist(), first.tolist(), counts.tolist(), strict=True)
    return {
        str(segment): (int(rows[at]), int(rows[rows >> ORDINAL_SHIFT == segment].max()), count)
        for segment, at, count in spans
    }


def check_served(store: TrajectoryStore, before: Mapping[str, Sequence[int]]) -> None:
    """Raise an error if the store serves fewer rows than when the checkpoint was written, which had synced them.

    Args:
        store: the store.
        before: what `served_rows` returned then; empty if the store evicts.

    Raises:
        CorruptionError: names the segment.
    """
    every = store.ids()
    for segment, (first, last, count) in before.items():
        readable = int(np.count_nonzero((every >= first) & (every <= last)))
        if readable < count:
            problems = store.verify(np.asarray([first, last])).problems
            why = problems[0] if problems else f"segment {int(segment)} contains only {readable:,} of them"
            raise CorruptionError(
                f"{store.path}: {count - readable:,} of the trajectories {first} to {last} cannot be read: {why}."
            )


def _oldest(run: RunFolder, step: int, max_staleness: int | None) -> int:
    """Return the watermark up to which rows are too old for the steps after a step."""
    run.ledger.refresh()  # the learner appends through a separate object
    # Step k writes its row before any trajectory of its weights is stored.
    row = None if max_staleness is None else run.ledger.of_step(step - max_staleness)
    return 0 if row is None else int(row.get("watermark", 0))
