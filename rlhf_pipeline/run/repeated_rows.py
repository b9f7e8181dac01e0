"""Whether the trajectories that a resumed run learns from again are as they were stored. Imports no torch."""

from __future__ import annotations

import numpy as np

from rlhf_pipeline.errors import DataError, typed
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import TrajectoryStore


def check_repeated(run: RunFolder, store: TrajectoryStore, step: int) -> None:
    """Check the checksums of the trajectories that steps after a checkpoint use again.

    These are the rows that the ledger names for later steps, and those stored since the checkpoint.
    """
    ledger = run.ledger
    ledger.refresh()
    at_checkpoint = ledger.of_step(step)
    every, seen = np.asarray(store.ids()), 0 if at_checkpoint is None else int(at_checkpoint.get("watermark", 0))
    since = every[max(len(every) - (store.watermark - seen), 0) :]
    later = {number: ledger.of_step(number) for number in range(step + 1, ledger.last_step + 1)}
    used = {number: np.asarray(row["row_ids"], np.int64) for number, row in later.items() if row is not None}
    wanted = np.unique(np.concatenate([since, *used.values()]))
    if not len(wanted):
        return
    report = store.verify(wanted)
    damaged = np.intersect1d(report.damaged_ids, wanted)
    damaged = damaged[np.isin(damaged, every)]  # what a power loss took is sampled again
    if not len(damaged):
        return
    steps = [number for number, rows in used.items() if np.isin(damaged, rows).any()]
    whose = f"; step {steps[0]} learned from them" if steps else ""
    again = typed(f"{run.address}@{step}")
    raise DataError(
        f"{len(damaged):,} of the trajectories that steps after {step} learn from again cannot be trusted: "
        f"{store.path} does not hold id {int(damaged[0])} as it was stored{whose}. {report.problems[0]}. Restore the "
        f"store from a copy; all that is wrong: rlhf-pipeline verify {typed(run.address)}. Or begin a new run with the "
        f"checkpoint: rlhf-pipeline run --from {again} --out OTHER_FOLDER"
    )
