"""The rows of a store that may be learned from: one rule for training, serving, replay and exports for training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError
from trajectory_store.recorder.standard import EPISODE, EVALUATION, LEFT_OUT, SUPERSEDED, WAITING
from trajectory_store.store import TrajectoryStore

Ints = npt.NDArray[np.int64]
_TRUSTED = "reward_trusted"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnableRows:
    """The selection of `learnable_rows`.

    Attributes:
        row_ids: int64 [n], in the order of arrival, or in that of the ids that were passed.
        num_unscored: rows that are excluded because they have no reward, or none that is trusted.
        num_replaced: rows that are excluded because a later row of the same trajectory replaces them.
    """

    row_ids: Ints
    num_unscored: int
    num_replaced: int


def learnable_rows(store: TrajectoryStore, row_ids: Ints | None = None, *, skip_damaged: bool = False) -> LearnableRows:
    """Select the rows that may be learned from.

    First, every row is compared with its checksums. Then these are excluded: rows of evaluations, rows of files that
    their tool wrote again (`superseded`), rows whose group was never completed, all but the newest row of a
    trajectory, and rows without a reward or with one that is not trusted. An episode of several rows has the reward of
    its last row, and counts only with all of its rows. Which row of a trajectory is the newest is decided in the whole
    store, regardless of `row_ids`: a filter never makes an older row count again.

    Args:
        store: the store.
        row_ids: int64 [n], select from these; None for all.
        skip_damaged: exclude damaged rows, so that the newest intact row of a trajectory counts; otherwise they are an
            error.

    Raises:
        CorruptionError: some rows are damaged.
        SchemaError: the store has no column `task_reward`.

    >>> import tempfile
    >>> from trajectory_store.recorder import TrajectoryRecorder
    >>> with TrajectoryRecorder(tempfile.mkdtemp() + "/store") as recorder:
    ...     rows = {"prompt_ids": [[1]] * 2, "completion_ids": [[2], [3]], "completions": ["", ""]}
    ...     _ = recorder.record(**rows, rewards=[1.0, None])
    ...     _ = recorder.record(**rows, rewards=[1.0, 0.0], evaluation=True)
    ...     learnable_rows(recorder.store).row_ids.tolist()
    [0]
    """
    if "task_reward" not in store.schema:
        raise SchemaError(f"{store.path} has no column task_reward, so none of its rows may be used for training.")
    among = store.intact(skip_damaged=skip_damaged)
    for column, excluded in ((EVALUATION, True), (SUPERSEDED, True), (WAITING, LEFT_OUT)):
        if column.name in store.schema:
            among = among[store.read_scalars(column.name, among) != excluded]
    newest = among[newest_rows(numbered(store, "trajectory_id", among), numbered(store, "group_id", among))]
    newest = newest[_have_all_rows(store, newest)]
    if row_ids is not None:
        among, newest = row_ids[np.isin(row_ids, among)], row_ids[np.isin(row_ids, newest)]
    scored = _are_scored(store, newest)
    return LearnableRows(
        row_ids=newest[scored],
        num_unscored=int(len(newest) - np.count_nonzero(scored)),
        num_replaced=len(among) - len(newest),
    )


def _have_all_rows(store: TrajectoryStore, row_ids: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows are of an episode whose rows are all among these."""
    position, size = (column.name for column in EPISODE[1:])
    if size not in store.schema:
        return np.ones(len(row_ids), bool)
    firsts, sizes = row_ids - store.read_scalars(position, row_ids), store.read_scalars(size, row_ids)
    _, episode, counts = np.unique(firsts, return_inverse=True, return_counts=True)
    return counts[episode] == sizes


def _are_scored(store: TrajectoryStore, row_ids: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows have a trusted reward, as their episode has it: rows of an episode have consecutive ids."""
    position, size = (column.name for column in EPISODE[1:])
    ends = row_ids
    if size in store.schema:
        ends = row_ids - store.read_scalars(position, row_ids) + store.read_scalars(size, row_ids) - 1
    stored = np.asarray(store.holds(ends))
    scored = np.zeros(len(row_ids), bool)
    scored[stored] = np.isfinite(store.read_scalars("task_reward", ends[stored]))
    if _TRUSTED in store.schema:
        scored[stored] &= store.read_scalars(_TRUSTED, ends[stored]).astype(bool)
    return scored


def numbered(store: TrajectoryStore, column: str, row_ids: Ints) -> Ints:
    """Return a column of ids; each row without one (below 0) gets a separate number above the others."""
    if column not in store.schema:
        return np.arange(len(row_ids))
    values = np.array(store.read_scalars(column, row_ids), np.int64)
    without = np.flatnonzero(values < 0)
    values[without] = max(int(values.max(initial=-1)), -1) + 1 + np.arange(len(without))
    return values


def newest_rows(trajectories: Ints, groups: Ints) -> Ints:
    """Return the places to keep, ascending: of a trajectory that was stored again its last place.

    Trajectory numbers may start again in each group, so a trajectory is named by its group, too.

    >>> newest_rows(np.array([0, 1, 0, 0]), np.array([5, 5, 5, 6])).tolist()
    [1, 2, 3]
    """
    if not len(trajectories):
        return np.empty(0, np.int64)
    _, group = np.unique(groups, return_inverse=True)
    _, trajectory = np.unique(trajectories, return_inverse=True)
    pair = group.astype(np.int64) * (int(trajectory.max()) + 1) + trajectory
    _, from_the_end = np.unique(pair[::-1], return_index=True)
    return np.sort(len(pair) - 1 - from_the_end)
