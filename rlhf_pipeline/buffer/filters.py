"""Choosing trajectories by conditions: the store's language, and further names for the columns of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.store_errors import as_ours
from trajectory_store import TrajectoryStore

Ids = npt.NDArray[np.int64]

SHORT: Final = {"reward": "task_reward", "version": "policy_version", "group": "group_id", "date": "created_at"}
_BLOCK_ROWS = 1024


@as_ours()
def select(store: TrajectoryStore, conditions: Sequence[str] = (), ids: Ids | None = None) -> Ids:
    """Return the ids of the trajectories that meet all conditions, in their order.

    Args:
        store: an open store.
        conditions: as `TrajectoryStore.where` takes them: a column, `>= <= == = != > < ~` and a value, or an expression
            in Python's words: see `trajectory_store.where.evaluate`. Names are, besides the columns: `id`, that
            of the row; `num_tokens` and `num_completion_tokens` (those of the policy); `reward`, `version`, `group` and
            `date` for task_reward, policy_version, group_id and created_at.
        ids: select from these, [N] int64; None for all, in the order of arrival.

    Raises:
        DefinitionError: a condition is not valid, or has an unknown column.
        MissingRowError: one of `ids` is not in the store.

    >>> import tempfile
    >>> from trajectory_store import Column, Schema
    >>> schema = Schema([Column("input_ids", "int32", ragged=True), Column("task_reward", "float32")])
    >>> with TrajectoryStore.create(tempfile.mkdtemp() + "/store", schema) as store:
    ...     _ = store.append({"input_ids": [[1], [2, 3], [4]], "task_reward": [0.0, 1.0, 1.0]})
    ...     select(store, ["reward>0.5", "num_tokens == 1"]).tolist()
    [2]
    """
    selected = np.asarray(store.ids() if ids is None else ids)
    for condition in conditions:
        selected = store.where(condition, selected, names=NAMES)
    return selected


def meets(store: TrajectoryStore, conditions: Sequence[str], ids: Ids) -> npt.NDArray[np.bool_]:
    """Return which of `ids`, [N] int64, meet all conditions of `select`: [N] bool."""
    return np.isin(ids, select(store, conditions, ids)) if conditions else np.ones(len(ids), bool)


def masks_known(store: TrajectoryStore, ids: Ids) -> npt.NDArray[np.bool_]:
    """Return which trajectories have a mask, [N] bool: of the others it is unknown which tokens the policy sampled.

    A mask of zeros is one: nothing was sampled.
    """
    if "assistant_mask" not in store.schema:
        return np.zeros(len(ids), bool)
    return store.present("assistant_mask", ids)


def num_completion_tokens(store: TrajectoryStore, ids: Ids) -> Ids:
    """Return how many tokens of each trajectory the policy produced, [N]; of an unknown mask, all after the prompt."""
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(ids), _BLOCK_ROWS):  # a mask is as long as the tokens
        rows = ids[first : first + _BLOCK_ROWS]
        rest = store.lengths("input_ids", rows) if "input_ids" in store.schema else np.zeros(len(rows), np.int64)
        if "num_prompt_tokens" in store.schema:
            rest = rest - store.read_scalars("num_prompt_tokens", rows)
        if "assistant_mask" in store.schema:
            mask = store.read_ragged("assistant_mask", rows)
            masked_tokens = np.diff(np.concatenate([[0], np.cumsum(mask.values)])[mask.offsets])
            rest = np.where(masks_known(store, rows), masked_tokens, rest)
        counts.append(rest)
    return np.concatenate(counts)


DERIVED: Final[Mapping[str, Callable[[TrajectoryStore, Ids], Ids]]] = {
    "num_tokens": lambda store, ids: store.lengths("input_ids", ids),
    "num_completion_tokens": num_completion_tokens,
}

NAMES: Final[Mapping[str, str | Callable[[Any, Ids], Ids]]] = {**SHORT, **DERIVED, "id": lambda store, ids: ids}
"""Names that a condition may use in addition to columns."""
