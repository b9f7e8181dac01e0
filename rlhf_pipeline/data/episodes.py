"""Episodes of several rows: which rows of a batch or a store are of one conversation, and where each ends.

The rows of an episode come one after the other, in the order of their `episode_row`, and the last one has the outcome.
Without the columns, every row is an episode. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.keys import EPISODE_ID, EPISODE_ROW, EPISODE_SIZE
from rlhf_pipeline.errors import DataError, typed
from trajectory_store.reads import StoreReads

if TYPE_CHECKING:
    from rlhf_pipeline.data.trajectories import Trajectories

Ints = npt.NDArray[np.int64]

ROW_BITS: Final = 44
"""The bit of a trajectory id at which the position in the episode begins."""


def row_names(episodes: Ints, positions: Ints) -> Ints:
    """Return trajectory ids of rows, int64 `[n]`: the episode's for its first row, and no two alike.

    Args:
        episodes: int64 [n], the id of each row's episode, from 0.
        positions: int64 [n], its position there, from 0.

    Raises:
        DataError: an id or a position is too large for the two to fit in one number.

    >>> row_names(np.array([5, 5, 6]), np.array([0, 1, 0])).tolist()
    [5, 17592186044421, 6]
    """
    if positions.any() and (int(episodes.max()) >> ROW_BITS or int(positions.max()) >> (62 - ROW_BITS)):
        raise DataError(
            f"if episodes have several rows, episode ids must be below 2**{ROW_BITS} and row indices below "
            f"{1 << (62 - ROW_BITS)}; the largest are {int(episodes.max())} and {int(positions.max())}."
        )
    return episodes + (positions.astype(np.int64) << ROW_BITS)


def last_rows(rows: Trajectories) -> npt.NDArray[np.bool_]:
    """Return which rows of a batch are the last of their episode, bool `[n]`."""
    if EPISODE_SIZE not in rows:
        return np.ones(rows.n, np.bool_)
    return rows.numbers(EPISODE_ROW) == rows.numbers(EPISODE_SIZE) - 1


def episode_bounds(rows: Trajectories) -> list[int]:
    """Return where the episodes of a batch begin, and its end: `k + 1` numbers.

    Raises:
        DataError: an episode lacks a row, or its rows are not one after the other.
    """
    last = last_rows(rows)
    bounds = [0, *(np.flatnonzero(last) + 1).tolist()]
    if last.all():
        return bounds
    position, size = rows.numbers(EPISODE_ROW), rows.numbers(EPISODE_SIZE)
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    alike = np.repeat(position[bounds[:-1]] == 0, np.diff(bounds))
    in_turn = bounds[-1] == rows.n and alike.all() and (position == np.arange(rows.n) - starts).all()
    if not in_turn or (EPISODE_ID in rows and (np.diff(rows.numbers(EPISODE_ID))[~last[:-1]] != 0).any()):
        raise DataError(
            f"the {rows.n} rows do not form complete episodes: {EPISODE_ROW} is {position[:8].tolist()}, and "
            f"{EPISODE_SIZE} is {size[:8].tolist()}. Pass all rows of an episode in one call, consecutively."
        )
    return bounds


def stored_last_rows(store: StoreReads, ids: Ints | None = None, *, checked: bool = True) -> npt.NDArray[np.bool_]:
    """Return which rows of a store are the last of their episode, bool `[n]`.

    Args:
        store: to read.
        ids: int64 [n], row ids; None reads all.
        checked: as for `TrajectoryStore.read_scalars`.
    """
    if EPISODE_SIZE not in store.schema:
        return np.ones(len(store) if ids is None else len(ids), np.bool_)
    position, size = (store.read_scalars(str(name), ids, checked=checked) for name in (EPISODE_ROW, EPISODE_SIZE))
    return position == size - 1


def episode_names(store: StoreReads, ids: Ints, names: Ints, *, checked: bool = True) -> Ints:
    """Return what identifies the episode of each row, int64 `[n]`: its id, or the row's own name.

    Args:
        store: to read.
        ids: int64 [n], row ids.
        names: int64 [n], what identifies rows that are episodes by themselves.
        checked: as for `TrajectoryStore.read_scalars`.
    """
    if EPISODE_ID not in store.schema:
        return names
    episodes = store.read_scalars(str(EPISODE_ID), ids, checked=checked)
    return np.where(episodes < 0, names, episodes)


def complete_episodes(store: StoreReads, ids: Ints) -> tuple[Ints, Ints]:
    """Return the rows of all episodes of which these are rows, and for each the position of its episode in `ids`.

    Args:
        store: to read.
        ids: int64 [n], row ids; an episode that several of them are of comes once, at the first.

    Raises:
        DataError: the store lacks a row of an episode.
    """
    if EPISODE_SIZE not in store.schema or not len(ids):
        return ids, np.arange(len(ids))
    position, size = (store.read_scalars(str(name), ids).astype(np.int64) for name in (EPISODE_ROW, EPISODE_SIZE))
    firsts, place = np.unique(ids - position, return_index=True)
    place = np.sort(place)
    firsts, sizes = (ids - position)[place], size[place]
    row_ids = np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    if len(row_ids) > len(ids):
        _check(store, row_ids, np.repeat(place, sizes), ids)
    return row_ids, np.repeat(place, sizes)


def _check(store: StoreReads, row_ids: Ints, place: Ints, ids: Ints) -> None:
    """Reject episodes of which the store lacks a row."""
    is_stored = np.asarray(store.holds(row_ids))
    if not is_stored.all():
        lacking = int(np.flatnonzero(~is_stored)[0])
        episodes = store.read_scalars(str(EPISODE_ID), ids)
        raise DataError(
            f"row {int(row_ids[lacking])} of episode {int(episodes[place[lacking]])} is not in {store.path}, but an "
            "episode is used for training only if all of its rows are present. Check the store: rlhf-pipeline verify "
            f"{typed(store.path)}"
        )


def totals(values: npt.NDArray[Any], last: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return the sum of the rows of each episode.

    >>> totals(np.array([1, 2, 4]), np.array([False, True, True])).tolist()
    [3, 4]
    """
    ends = np.flatnonzero(last)
    if len(ends) == len(last):
        return values
    return np.add.reduceat(values, np.concatenate([[0], ends[:-1] + 1])) if len(ends) else values[:0]
