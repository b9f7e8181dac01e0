"""The targets of an exchange: new files that appear complete; a store, its existing rows and the next ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.data.store_errors import as_ours
from rlhf_pipeline.errors import DataError, DefinitionError, RunExistsError
from trajectory_store import Column, Schema, TrajectoryStore
from trajectory_store.recorder.source_ids import NAME, open_or_create, store_lock

_SAME = ("input_ids", "assistant_mask", "log_probs", "task_reward", "policy_version", "group_id")
"""The columns that identify a trajectory, which no later value changes."""


def check_absent(*paths: Path) -> None:
    """Raise an error if the target exists."""
    for path in paths:
        if path.exists():
            raise RunExistsError(f"{path} already exists. Remove it, or choose another path with --to.")


@contextmanager
def open_target(path: Path, schema: Schema, *, durability: Any = None) -> Iterator[TrajectoryStore]:
    """Open a store for exclusive use by an import; create it if it does not exist."""
    store = open_or_create(path, schema, durability)
    refusal = f"another import is writing to {path}. Wait for it, or choose another store."
    try:
        with ExitStack() as stack:
            with as_ours():
                stack.enter_context(store_lock(path, refusal=refusal))
            store.refresh()
            lacking = [column for column in schema if column.name not in store.schema]
            fixed = ", ".join(column.name for column in lacking if not column.optional)
            if fixed:
                raise DefinitionError(
                    f"the store at {path} lacks columns that the import writes: {fixed}. Choose a new folder."
                )
            if lacking:
                store.close()
                store = TrajectoryStore.open(path, mode="a", durability=durability, add_columns=lacking)
            yield store
    finally:
        store.close()


def check_columns(store: TrajectoryStore, schema: Schema) -> None:
    """Reject columns of an export that are not those of their name in a store."""
    for column in schema:
        stored = store.schema[column.name]
        if (stored.dtype, stored.axis, stored.shape) != (column.dtype, column.axis, column.shape):
            raise DefinitionError(
                f"column '{column.name}' has {_form(column)} in the export, but {_form(stored)} in {store.path}. "
                "Import the exported rows into a separate folder."
            )


def _form(column: Column) -> str:
    form = f"dtype {column.dtype} and shape {list(column.shape)}"
    return f"{form} (on the axis '{column.axis}')" if column.axis else form


class ExistingRows:
    """The trajectories that a store held before an import, each to be found once by its id.

    The k-th row of an id in a file is the k-th of that id in the store: rows without an id all have -1, and those of a
    training that was resumed occur twice under one.
    """

    def __init__(self, store: TrajectoryStore) -> None:
        self.store = store
        rows = np.asarray(store.ids())
        names = store.read_scalars(NAME, rows) if NAME in store.schema and len(rows) else np.full(len(rows), -1)
        order = np.argsort(names, kind="stable")
        self._names, self._rows = names[order], rows[order]
        self._num_matched = np.zeros(len(rows), np.int64)
        """At the first row of an id: the number of rows with that id."""

    def find(self, wheres: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Return which rows are in the store."""
        ids = [int(row.get(NAME, -1)) for row in rows]
        spans = zip(np.searchsorted(self._names, ids), np.searchsorted(self._names, ids, "right"), strict=True)
        is_stored: list[bool] = []
        pairs: list[tuple[int, int]] = []
        for i, (first, end) in enumerate(spans):
            place = first + self._num_matched[first] if first < end else end
            is_stored.append(place < end)
            if place < end:
                pairs.append((i, place))
                self._num_matched[first] += 1
        names = [name for name in _SAME if name in self.store.schema]
        stored = self.store.read(self._rows[[place for _, place in pairs]], names) if pairs else {}
        for k, (i, _) in enumerate(pairs):
            for name in names:
                if name in rows[i] and _differ(rows[i][name], stored[name][k]):
                    raise DataError(
                        f"{wheres[i]}: this trajectory is already in {self.store.path}, with a different value of "
                        f"{name}. The file has changed since an earlier import, is read with other options, or has "
                        "another origin. Import the file into another store; to keep both versions in this store, "
                        "import a copy of the file under another name."
                    )
        return is_stored


def _differ(imported: Any, stored: Any) -> bool:
    imported, stored = np.asarray(imported), np.asarray(stored)
    if imported.shape != stored.shape:
        return True
    if stored.dtype.kind == "f":
        imported = imported.astype(stored.dtype)
        return bool(((imported != stored) & ~np.isnan(imported)).any())
    return bool((imported != stored).any())
