"""Importing what `export` wrote: every column, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._column_values import Values, from_arrow, from_json, take
from rlhf_pipeline.exchange._counts import FileReport, ImportReport
from rlhf_pipeline.exchange._tables import ROWS_PER_READ, Source
from rlhf_pipeline.exchange.target import open_target
from trajectory_store import RaggedArray, Schema, StoreError, TrajectoryStore

NAME = "trajectory_id"


def import_stored(
    source: Source,
    into: Path,
    report: ImportReport,
    file: FileReport,
    durability: Any,
    batch_rows: int,
    on_file: Callable[[FileReport], None] | None,
    on_commit: Callable[[ImportReport], None] | None,
) -> None:
    """Import one export; trajectories whose id is in the store are not imported again.

    Args:
        source: the file or dataset.
        into: folder of the store; made with the columns of the export if it is not there.
        report: filled in.
        file: of this file, filled in.
        durability: of the store.
        batch_rows: at most so many trajectories per commit.
        on_file: called with `file`.
        on_commit: called with `report`.

    Raises:
        DataError: a trajectory of the same id is in the store with other tokens, or a row is broken.
        DefinitionError: the store lacks a column.
    """
    written = source.schema_json()
    schema = trajectory_schema() if written is None else _schema(source, written)
    if written is None:
        file.about = "the columns that this version knows; the export's own list of columns is not beside it"
    report.files.append(file)
    if on_file is not None:
        on_file(file)
    seen: list[npt.NDArray[np.int64]] = []
    with open_target(into, schema, durability=durability) as store:
        _check_types(store, schema)
        there = _There(store)
        for place, values in _batches(source, schema, batch_rows):
            num = len(next(iter(values.values()), ()))
            try:
                old = there.find(values, num)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            file.num_skipped += int(old.sum())
            if not old.all():
                new = take(values, ~old)
                store.append(new)
                file.num_imported += num - int(old.sum())
                _count(report, new, seen)
                if on_commit is not None:
                    on_commit(report)
    report.num_groups += len(np.unique(np.concatenate(seen))) if seen else 0


def _schema(source: Source, written: str) -> Schema:
    try:
        return Schema.from_json(json.loads(written))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StoreError) as error:
        raise DataError(
            f"{source.path}: the list of its columns, which `export` wrote, cannot be read ({type(error).__name__}: "
            f"{error}). Export the store again."
        ) from error


def _batches(source: Source, schema: Schema, batch_rows: int) -> Iterator[tuple[str, Values]]:
    if source.container != "jsonl":
        number = 0
        for batch in source.arrow_batches():
            try:
                yield source.where(number), from_arrow(schema, batch)
            except DataError as error:
                raise DataError(f"{source.where(number)}: {error}") from error
            number += batch.num_rows
        return
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    broken: DataError | None = None
    try:
        for number, row in source.rows():
            rows.append(row)
            numbers.append(number)
            if len(rows) >= min(batch_rows, ROWS_PER_READ):
                yield _from_rows(source, schema, rows, numbers)
                rows, numbers = [], []
    except DataError as error:
        broken = error  # what was read before it is imported first
    if rows:
        yield _from_rows(source, schema, rows, numbers)
    if broken is not None:
        raise broken


def _from_rows(source: Source, schema: Schema, rows: list[dict[str, Any]], numbers: list[int]) -> tuple[str, Values]:
    try:
        return source.where(numbers[0]), from_json(schema, rows)
    except DataError:
        for number, row in zip(numbers, rows, strict=True):  # name the row
            try:
                from_json(schema, [row])
            except DataError as error:
                raise DataError(f"{source.where(number)}: {error}") from error
        raise


class _There:
    """The trajectories of the target, to be found by id; those without an id are found in the order of arrival."""

    def __init__(self, store: TrajectoryStore) -> None:
        self.store = store
        rows = store.ids()
        ids = store.read_scalars(NAME, rows) if NAME in store.schema and len(rows) else np.full(len(rows), -1)
        self._nameless = rows[ids < 0]
        self._next = 0
        order = np.argsort(ids, kind="stable")
        self._ids, self._rows = ids[order], np.asarray(rows)[order]

    def find(self, values: Values, num: int) -> npt.NDArray[np.bool_]:
        """Return which rows of a batch are in the store already, bool `[num]`.

        Raises:
            DataError: one is there with other tokens.
        """
        ids = np.asarray(values.get(NAME, np.full(num, -1)), np.int64)
        old = np.zeros(num, bool)
        for i, named in enumerate(ids.tolist()):
            if named < 0:
                if self._next < len(self._nameless):
                    old[i] = True
                    self._check(values, i, self._nameless[self._next : self._next + 1], "without an id")
                    self._next += 1
                continue
            first, end = np.searchsorted(self._ids, named, "left"), np.searchsorted(self._ids, named, "right")
            if first < end:
                old[i] = True
                self._check(values, i, self._rows[first:end], str(named))
        return old

    def _check(self, values: Values, i: int, rows: Any, name: str) -> None:
        given = values.get("input_ids")
        if not isinstance(given, RaggedArray):
            return
        if not any(np.array_equal(given[i], there) for there in self.store.read(rows, ["input_ids"])["input_ids"]):
            raise DataError(
                f"trajectory {name} is in {self.store.path} with other tokens, so this export is of another store. "
                "Import it into a folder of its own."
            )


def _check_types(store: TrajectoryStore, schema: Schema) -> None:
    for column in schema:
        there = store.schema[column.name]
        if (there.dtype, there.axis) != (column.dtype, column.axis):
            raise DefinitionError(
                f"column '{column.name}' is {column.dtype} in the export and {there.dtype} in {store.path}. "
                "Import it into a folder of its own."
            )


def _count(report: ImportReport, values: Values, seen: list[npt.NDArray[np.int64]]) -> None:
    if "group_id" in values:
        seen.append(np.unique(values["group_id"]))
    if all(name in values for name in ("input_ids", "assistant_mask", "log_probs", "task_reward")):
        report.tally(values)
