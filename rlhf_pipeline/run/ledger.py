"""The ledger: which trajectories enter which optimizer step, written before the step is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_pipeline.run.rows import StepRows


def _is_allowed(earlier: dict[str, Any]) -> None:
    """Allow a step to replace its earlier row."""


class Ledger:
    """Appends one row per optimizer step to `ledger.jsonl`; a row is replaced only if its step changes.

    A resumed run takes the steps after its checkpoint again. Their rows are still in the file and record what each step
    learned from, however often the run was killed: `planned` returns them, and a step that repeats its row adds none.
    Only a step that learns from other trajectories than its row records replaces that row and drops the later ones.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> ledger.record({"step": 1, "row_ids": [4, 5]}), ledger.record({"step": 1, "row_ids": [4, 5]})
    (True, True)
    >>> [row["row_ids"] for row in ledger.rows]
    [[4, 5]]
    >>> ledger.record({"step": 1, "row_ids": [6, 7]})
    False
    >>> ledger.planned(1)["row_ids"]
    [6, 7]
    """

    def __init__(self, rows: StepRows | Path, *, metrics: StepRows | None = None) -> None:
        self.rows = StepRows(rows) if isinstance(rows, Path) else rows
        """All rows, oldest first."""
        self.metrics = metrics

    def planned(self, step: int) -> dict[str, Any] | None:
        """Return the row of a step that was begun before, or None."""
        return self.rows.of_step(step)

    def record(self, row: dict[str, Any], *, differs: Callable[[dict[str, Any]], None] = _is_allowed) -> bool:
        """Write a step's row; return False if an earlier try at this step used other trajectories.

        Two rows of a step are the same if they name the same `trajectory_ids`, or, without these, the same `row_ids`
        (a trajectory that was evicted and sampled again is the same trajectory in another row). If both have `ages`,
        these must be the same, too: lost trajectories that other weights sampled again may have the same ids.
        """
        step = row["step"]
        # A power loss may take the ledger's rows and leave the metrics of the same steps, which are dropped below.
        if step > self.rows.last_step and (self.metrics is None or step > self.metrics.last_step):
            self.rows.append(row)
            return True
        before = self.planned(step)
        as_old = before is not None and before.get("ages", row.get("ages")) == row.get("ages", before.get("ages"))
        if before is not None and as_old and before["row_ids"] == row["row_ids"]:
            return True
        recorded_ids = None if before is None else before.get("trajectory_ids")
        as_old &= recorded_ids is not None and recorded_ids == row.get("trajectory_ids")
        if before is not None and not as_old:
            differs(before)
        # Later rows were planned from this one.
        if self.metrics is not None:
            self.metrics.drop_from(step)
        self.rows.drop_from(step)
        self.rows.append(row)
        return before is None or as_old
