"""The ledger: which trajectories enter which optimizer step, written before the step is taken."""

from __future__ import annotations

import bisect
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.jsonl import append_row, keep_rows, mend_tail, read_rows


class Ledger:
    """Appends one row per optimizer step to `ledger.jsonl`, and never takes one back without a reason.

    A resumed run takes the steps after its checkpoint again. Their rows are still on file and say what each step
    learned from, however often the run was killed: `planned` gives them back, and a step that repeats its row adds
    none. Only a step that learns from other trajectories than its row says replaces that row and drops the later ones.

    >>> import tempfile
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> ledger.record({"step": 1, "row_ids": [4, 5]}), ledger.record({"step": 1, "row_ids": [4, 5]})
    (True, True)
    >>> [row["row_ids"] for row in ledger.rows()]
    [[4, 5]]
    >>> ledger.record({"step": 1, "row_ids": [6, 7]})
    False
    >>> ledger.planned(1)["row_ids"]
    [6, 7]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        mend_tail(path)
        self._index()

    def planned(self, step: int) -> dict[str, Any] | None:
        """Return the row of a step that was begun before, or None."""
        place = bisect.bisect_left(self._steps, step)
        if place == len(self._steps) or self._steps[place] != step:
            return None
        with self.path.open("rb") as file:
            file.seek(self._starts[place])
            return json.loads(file.readline())

    def record(self, row: dict[str, Any]) -> bool:
        """Write a step's row; return False if an earlier try at this step used other trajectories.

        Rows of one step are the same if they name the same `trajectory_ids`; where a row has none, the same `row_ids`
        (a trajectory that was lost with its ring and sampled again is the same trajectory in another row).
        """
        step, before = row["step"], self.planned(row["step"])
        if before is not None and before["row_ids"] == row["row_ids"]:
            return True
        if before is not None:
            # What was planned after this step was planned from it.
            keep_rows(self.path, lambda kept: kept["step"] < step)
            self._index()
        start = self.path.stat().st_size if self.path.exists() else 0
        append_row(self.path, row)
        self._steps.append(step)
        self._starts.append(start)
        if before is None:
            return True
        named = before.get("trajectory_ids")
        return named is not None and named == row.get("trajectory_ids")

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, oldest first."""
        return read_rows(self.path)

    def each_row(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, oldest first, with one of them in memory at a time."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def _index(self) -> None:
        """Note where each row begins. The rows stay on disk: a run of days has millions of trajectory ids."""
        self._steps, self._starts = array("q"), array("q")
        if not self.path.is_file():
            return
        start = 0
        with self.path.open("rb") as file:
            for line in file:
                head = _STEP.match(line)
                step = int(head[1]) if head else _step_of(line, self.path)
                self._steps.append(step)
                self._starts.append(start)
                start += len(line)


_STEP = re.compile(rb'\{"step":(\d+)[,}]')


def _step_of(line: bytes, path: Path) -> int:
    """Return the step of a row that does not begin with it.

    Raises:
        DataError: the line is no row of a ledger.
    """
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: the line {line[:60]!r} is no row of a ledger. The file was edited or damaged; delete the line "
            "to go on without it."
        ) from error
