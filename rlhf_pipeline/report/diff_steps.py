"""Comparison of the definitions and the optimizer steps of two runs."""

from __future__ import annotations

import filecmp
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf_pipeline.config_text import flat_fields
from rlhf_pipeline.report.query import Answer
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import Row, StepRows

STEP_VALUES = {"loss": "loss", "task_reward": "reward", "grad_norm": "gradient norm"}
"""The metrics by which two steps are compared, each with its name as text."""
_NOT_COMPARED = frozenset({"format", "overrides"})  # the effect of overrides shows in the pipeline


@dataclass(slots=True)
class StepDifference:
    """The differences in one aspect of the optimizer steps."""

    what: str
    """`batch`, `loss`, `reward` or `gradient norm`."""
    first_step: int = 0
    num_steps: int = 0
    """The number of steps that differ in this aspect."""
    num_both: int = 0
    """The number of steps that both runs have taken."""
    left: Any = None
    """The values at the first step that differs; for a batch, the numbers of trajectories."""
    right: Any = None
    largest: float = 0.0
    """The largest difference between two values, relative to the larger of the two; 0.0 for a batch."""

    def note(self, step: int, left: Any, right: Any, *, differs: bool) -> None:
        """Count a step."""
        self.num_both += 1
        if not differs:
            return
        if not self.num_steps:
            self.first_step, self.left, self.right = step, left, right
        self.num_steps += 1
        if isinstance(left, float) and isinstance(right, float):
            self.largest = max(self.largest, abs(left - right) / max(abs(left), abs(right)))


@dataclass(kw_only=True, slots=True)
class StepsDifference:
    """The differences between the optimizer steps of two runs."""

    only_left: tuple[int, int, int] | None = None
    """The first and the last step that only the left run has taken, and their number."""
    only_right: tuple[int, int, int] | None = None
    num_both: int = 0
    """The number of steps that both runs have taken."""
    differences: list[StepDifference] = field(default_factory=list[StepDifference])

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return self.only_left is None and self.only_right is None and not self.differences


def compare_configs(left: RunFolder, right: RunFolder) -> list[Answer]:
    """Return the fields of `config.json` that differ: `name`, `left`, `right`; None if a side lacks it."""
    mine, theirs = (dict(flat_fields(run.record.read())) for run in (left, right))
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [
        {"name": name, "left": mine.get(name), "right": theirs.get(name)}
        for name in names
        if name.split(".")[0] not in _NOT_COMPARED and mine.get(name) != theirs.get(name)
    ]


def compare_steps(left: RunFolder, right: RunFolder) -> StepsDifference:
    """Compare ledgers and metrics step by step, with a few lines in memory at a time."""
    batch, common_steps = StepDifference("batch"), min(left.metrics.last_step, right.metrics.last_step)
    for step, mine, theirs in _joined(left.ledger, right.ledger):
        sizes = [None if row is None else len(row.get("row_ids", ())) for row in (mine, theirs)]
        if mine is not None and theirs is not None:
            batch.note(step, *sizes, differs=_batch(mine, theirs) != _batch(theirs, mine))
        elif step <= common_steps:  # both took the step, and one ledger lacks its batch
            batch.note(step, *sizes, differs=True)
    difference = compare_figures(left, right)
    difference.differences = _in_order([batch, *difference.differences])
    return difference


def compare_figures(left: RunFolder, right: RunFolder, *, without: Collection[str] = ()) -> StepsDifference:
    """Compare only the figures of the steps, because runs on different stores have different row ids."""
    difference = StepsDifference()
    values = {name: StepDifference(what) for name, what in STEP_VALUES.items() if name not in without}
    for step, mine, theirs in _joined(left.metrics, right.metrics):
        if mine is None:
            difference.only_right = _extended(difference.only_right, step)
        elif theirs is None:
            difference.only_left = _extended(difference.only_left, step)
        else:
            difference.num_both += 1
            for name, difference_of in values.items():
                difference_of.note(step, mine.get(name), theirs.get(name), differs=mine.get(name) != theirs.get(name))
    difference.differences = _in_order(values.values())
    return difference


def compare_weights(left: RunFolder, right: RunFolder) -> tuple[int, bool] | None:
    """Return the newest step with a checkpoint in both runs, and whether its weights are equal, byte for byte."""
    names = {path.name for path in left.saved()} & {path.name for path in right.saved()}
    for name in sorted(names, reverse=True):
        for file in ("model.safetensors", "adapter_model.safetensors"):
            a, b = (run.bring(run.checkpoints / name) / file for run in (left, right))
            if a.is_file() and b.is_file():
                return step_of(a.parent), filecmp.cmp(a, b, shallow=False)
    return None


def _in_order(differences: Iterable[StepDifference]) -> list[StepDifference]:
    """Return the aspects that differ, ordered by their first steps."""
    return sorted((aspect for aspect in differences if aspect.num_steps), key=lambda aspect: aspect.first_step)


def _batch(row: Row, paired: Row) -> Any:
    """Return the batch's identity: trajectory ids if both rows have them, because row ids depend on the store."""
    have_ids = "trajectory_ids" in row and "trajectory_ids" in paired
    return row.get("trajectory_ids" if have_ids else "row_ids")


def _extended(span: tuple[int, int, int] | None, step: int) -> tuple[int, int, int]:
    return (step, step, 1) if span is None else (span[0], step, span[2] + 1)


def _joined(left: StepRows, right: StepRows) -> Iterator[tuple[int, Row | None, Row | None]]:
    """Yield the rows of two files by step, with None for a side that lacks the step."""
    mine, theirs = iter(left), iter(right)
    a, b = next(mine, None), next(theirs, None)
    while a is not None or b is not None:
        step = min(row["step"] for row in (a, b) if row is not None)
        is_mine, is_theirs = a is not None and a["step"] == step, b is not None and b["step"] == step
        yield step, a if is_mine else None, b if is_theirs else None
        a = next(mine, None) if is_mine else a
        b = next(theirs, None) if is_theirs else b
