"""Copying a store: its files with their ids, while other processes write to it, or its rows into another store."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from trajectory_store.bucket import FolderBucket
from trajectory_store.catalog_log import Journal, State, number_of, record_keys
from trajectory_store.errors import CorruptionError, SchemaError, StoreExistsError, WriteFailedError
from trajectory_store.new_files import new_file, sync_path
from trajectory_store.options import Backend
from trajectory_store.ragged import Int64Array
from trajectory_store.root import Root

if TYPE_CHECKING:
    from trajectory_store.store import TrajectoryStore

_FIRST: Final = ("commits/acknowledged", "commits/c/0/0")
"""Files that record how much of the other files is valid. They are copied first, so that the copy contains all that
they list.
"""
_ROUNDS: Final = 50
_CLOCK_S: Final = 2.0
"""A file that was changed this close to the time at which it was copied is copied again."""
_CHUNK: Final = 1 << 22

CHUNK_ROWS: Final = 1024
CHUNK_ELEMENTS: Final = 1 << 22
"""Elements of one column that are copied or compared at once, unless a single row has more."""


# Files


def copy_folder(source: Path, target: Path, root: Root) -> None:
    """Copy a store, so that the copy holds what was committed when the copying began; later commits may be in it.

    A round copies the catalog, then the segments that it names, and of a segment first the commit records, so that
    the copy never counts what it does not have. If the catalog has moved on meanwhile, the next round copies what has
    changed since. Ids are kept. Holes in files stay holes.
    """
    if target.absolute().resolve().is_relative_to(source.resolve()):
        raise StoreExistsError(f"{target} is inside the folder of the store. Choose another path for the copy.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreExistsError(f"{target} already exists. Choose another path for the copy.")
    with new_file(target, sync=True, parents=True) as building:
        journal = Journal(FolderBucket(source, durable=False), root.catalog_json(), root.first_state)
        _copy_rounds(source, building, journal)
        for path in building.rglob("*"):
            sync_path(path)


def _copy_rounds(source: Path, building: Path, journal: Journal) -> None:
    """Copy a store's files, in rounds, until the catalog does not change during one."""
    unchanged_before = 0.0
    for _ in range(_ROUNDS):
        began = time.time()
        journal.catch_up()
        if not journal.is_sound:  # the copy would lack what only this one names
            raise CorruptionError(journal.problems[-1])
        with contextlib.suppress(FileNotFoundError):  # an upkeep has removed a segment: the next round has its heir
            _copy_round(source, building, journal.state, unchanged_before)
            if not journal.catch_up() and journal.top == journal.state.number:
                break
        unchanged_before = began - _CLOCK_S
    else:
        raise WriteFailedError(
            f"{source} could not be copied: its catalog changed during each of {_ROUNDS} rounds. Pause its writers."
        )


def _copy_round(source: Path, building: Path, state: State, unchanged_before: float) -> None:
    """Bring a copy up to a record of the catalog; files that are older than `unchanged_before` are there already."""
    segments = {entry.name for entry in state.entries}
    shutil.rmtree(building / "catalog", ignore_errors=True)
    (building / "catalog").mkdir(parents=True)
    for folder in building.glob("seg-*"):
        if folder.name not in segments:
            shutil.rmtree(folder)
    numbers = {path: number_of(path.name) for path in (source / "catalog").iterdir()}
    earlier_records = [path for path, number in numbers.items() if number is not None and number < state.number]
    for path in [source / "zarr.json", source / "catalog" / "zarr.json", *earlier_records]:
        with contextlib.suppress(FileNotFoundError):  # history may be removed at any time
            _copy_file(path, building / path.relative_to(source))
    for key in record_keys(state.number):  # its writer may not have put the second one yet
        (building / key).write_bytes(state.to_bytes())
    for name in sorted(segments):
        if not (source / name).is_dir():
            raise FileNotFoundError(source / name)
        for file in _in_order(source / name):
            target_file = building / file.relative_to(source)
            if not target_file.exists() or file.stat().st_mtime >= unchanged_before:
                _copy_file(file, target_file)


def _in_order(folder: Path) -> Iterator[Path]:
    """Yield the files of a segment: those that record how much counts first, objects by ascending number."""
    first = [folder / name for name in _FIRST if (folder / name).is_file()]
    yield from first
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and path not in first)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file; what was never written stays a hole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        writer.truncate(size)
        at = 0
        while at < size:
            try:
                begin = os.lseek(reader.fileno(), at, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            end = os.lseek(reader.fileno(), begin, os.SEEK_HOLE)
            for place in range(begin, end, _CHUNK):
                os.pwrite(writer.fileno(), os.pread(reader.fileno(), min(_CHUNK, end - place), place), place)
            at = end


# Rows


def copy_rows(
    source: TrajectoryStore,
    target: TrajectoryStore,
    ids: npt.ArrayLike | None = None,
    *,
    batch_rows: int = CHUNK_ROWS,
    on_rows: Callable[[int, int], None] | None = None,
    skip_damaged: bool = False,
) -> Int64Array:
    """Append the rows of one store to another, in order, with their latest values.

    The target records which values were given and which are fills. Columns that only the target has are filled.

    Args:
        source: the store from which rows are copied.
        target: a store open for appending; every column of the source must be in it, with the same dtype.
        ids: the rows; None for all in the order of arrival.
        batch_rows: maximum number of rows per commit; fewer if rows are long.
        on_rows: called with the number of rows copied so far and the total.
        skip_damaged: exclude damaged rows; otherwise they are an error, and nothing is appended.

    Returns:
        `[n]` int64: the ids in the target, in the order of `ids`.

    Raises:
        SchemaError: the target lacks a column, or has it with another dtype.
        CorruptionError: some rows are damaged; the error lists them.
    """
    for column in source.schema:
        counterpart = target.schema.find(column.name)
        if counterpart is None or (counterpart.dtype, counterpart.axis) != (column.dtype, column.axis):
            raise SchemaError(
                f"column '{column.name}' ({column.dtype}, axis {column.axis}) has no counterpart in the target. "
                "Create the target with the source's schema, or open it with add_columns=[...]."
            )
    for column in target.schema:
        if column.name not in source.schema and not column.optional:
            raise SchemaError(f"the source has no column '{column.name}', and the target has no fill value for it.")
    intact_ids = source.intact(ids, skip_damaged=skip_damaged)
    parts: list[Int64Array] = []
    for first in range(0, len(intact_ids), batch_rows):
        chunk = intact_ids[first : first + batch_rows]
        parts += [
            target.append_batch(source.read_batch(chunk[part], target.schema))
            for part in parts_of(_most_elements(source, chunk))
        ]
        if on_rows is not None:
            on_rows(first + len(chunk), len(intact_ids))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def copy_store(
    source: TrajectoryStore,
    target: str | Path,
    ids: npt.ArrayLike | None = None,
    *,
    backend: Backend | None = None,
    on_rows: Callable[[int, int], None] | None = None,
    skip_damaged: bool = False,
) -> int:
    """Make a store of the rows of another one, in order, with separate ids; return their number.

    Args:
        source: the store from which rows are copied.
        target: a folder that does not exist or is empty, or a URL.
        ids: as of `copy_rows`.
        backend: of the new store; None as `create` has it.
        on_rows: as of `copy_rows`.
        skip_damaged: as of `copy_rows`; without it, nothing is made.

    Raises:
        CorruptionError: some rows are damaged; the error lists them.
        StoreExistsError: the target holds something.
    """
    intact_ids = source.intact(ids, skip_damaged=skip_damaged)
    with type(source).create(target, source.schema, backend=backend) as new_store:
        copy_rows(source, new_store, intact_ids, on_rows=on_rows)
        new_store.compact()
        new_store.flush()
    return len(intact_ids)


def _most_elements(store: TrajectoryStore, ids: Int64Array) -> Int64Array:
    """Return the elements of each row's longest axis: `[n]` int64."""
    lengths = [store.lengths(columns[0].name, ids) for columns in store.schema.axes.values()]
    return np.max(lengths, axis=0) if lengths else np.ones(len(ids), np.int64)


def parts_of(lengths: Int64Array) -> Iterator[slice]:
    """Yield runs of rows that hold about `CHUNK_ELEMENTS` elements, at least one row each."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + CHUNK_ELEMENTS, side="right")), first + 1)
        yield slice(first, last)
        first = last
