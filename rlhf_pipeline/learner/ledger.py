"""The ledger: which trajectories enter which optimizer step, written before the step is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_pipeline.jsonl import append_row, keep_rows, read_rows


class Ledger:
    """Appends one row per optimizer step to `ledger.jsonl`.

    After a resume the rows behind the checkpoint are taken off the file, since those steps are taken again, and kept
    in memory: a step that then sees other trajectories than before is reported.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> ledger.record({"step": 1, "row_ids": [4, 5]})
    True
    >>> [row["row_ids"] for row in ledger.rows()]
    [[4, 5]]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[int, list[int]] = {}

    def rewind(self, step: int) -> None:
        """Take rows of steps after `step` off the file, and remember what they said."""
        for row in keep_rows(self.path, lambda row: row["step"] <= step):
            self._before[row["step"]] = row["row_ids"]

    def record(self, row: dict[str, Any]) -> bool:
        """Append a row; return False if an earlier try at this step used other trajectories."""
        append_row(self.path, row)
        before = self._before.pop(row["step"], None)
        return before is None or before == row["row_ids"]

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, oldest first."""
        return read_rows(self.path)
