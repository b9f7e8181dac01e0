"""What an exchange writes to: new files that appear whole; a store, what is in it already, and the next ids."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError, DefinitionError, RunExistsError
from rlhf_pipeline.exchange._completion import Rollout
from trajectory_store import Schema, StoreExistsError, StoreNotFoundError, TrajectoryStore

Ids = npt.NDArray[np.int64]
SOURCE_BITS = 40
"""Trajectory and group ids are the number of the file in the store, shifted by this, plus the place in the file."""


def check_absent(*paths: Path) -> None:
    """Refuse to write where something is.

    Raises:
        RunExistsError: something is there.
    """
    for path in paths:
        if path.exists():
            raise RunExistsError(f"{path} exists already. Name another with --to, or remove it.")


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Give a path to write a file or a folder at; it becomes `target` at the end, or is removed after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)


@contextmanager
def held(store: Path, *, shared: bool = False, refusal: str) -> Iterator[None]:
    """Hold the lock on the folder of a store: recorders share it, imports and compactions have it alone.

    Raises:
        RunExistsError: somebody else holds it; says `refusal`.
    """
    folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunExistsError(refusal) from error
        yield
    finally:
        os.close(folder)


def next_base(store: TrajectoryStore) -> int:
    """Return what to add to places for trajectory and group ids that nothing in the store has."""
    ids = store.ids()
    if not len(ids):
        return 0
    highest = max(int(store.read_scalars(name, ids).max()) for name in ("trajectory_id", "group_id"))
    return ((highest >> SOURCE_BITS) + 1) << SOURCE_BITS


def open_or_create(path: Path, schema: Schema, durability: Any) -> TrajectoryStore:
    """Open a store for appending, or make it; other processes may do so, too.

    Raises:
        StoreError: the folder holds something else.
    """
    with suppress(StoreNotFoundError):
        return TrajectoryStore.open(path, mode="a", durability=durability)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return TrajectoryStore.create(path, schema, durability=durability or "process")
    except StoreExistsError:  # another process was first
        return TrajectoryStore.open(path, mode="a", durability=durability)


@contextmanager
def open_target(path: Path, schema: Schema | None = None, *, durability: Any = None) -> Iterator[TrajectoryStore]:
    """Open a store for exclusive use by an import; create it if it does not exist.

    Args:
        path: folder of the store.
        schema: columns of a new store, the default ones if None; an existing store gets those that it lacks.
        durability: of the store, see `TrajectoryStore.create`.

    Raises:
        RunExistsError: another import is writing to it.
        DefinitionError: the store lacks a column that cannot be added.
        StoreError: the folder holds something else.
    """
    wanted = trajectory_schema() if schema is None else schema
    store = open_or_create(path, wanted, durability)
    refusal = f"another import is writing to {path}. Wait for it, or name another store."
    try:
        with held(path, refusal=refusal):
            store.refresh()
            lacking = [column for column in wanted if column.name not in store.schema]
            if lacking:
                fixed = ", ".join(column.name for column in lacking if not column.optional)
                if fixed:
                    raise DefinitionError(
                        f"the store at {path} has no column {fixed}, which the import writes. Name a new folder."
                    )
                store.close()
                store = TrajectoryStore.open(path, mode="a", durability=durability, add_columns=lacking)
            yield store
    finally:
        store.close()


class Files:
    """The files that a store was imported from, each with the number that its ids are made of.

    Args:
        store: the target, as it is before the import.
    """

    def __init__(self, store: TrajectoryStore) -> None:
        self.store = store
        self._ids = np.asarray(store.ids())
        self._named = store.read_scalars("trajectory_id", self._ids) if len(self._ids) else np.empty(0, np.int64)
        numbers, firsts = np.unique(self._named >> SOURCE_BITS, return_index=True)
        metas = store.read(self._ids[firsts], ["meta"])["meta"] if len(firsts) else []
        files = [(source_of(meta), number) for meta, number in zip(metas, numbers.tolist(), strict=True)]
        self._numbers = {file: number for file, number in files if file is not None and number >= 0}
        self._next = next_base(store) >> SOURCE_BITS

    def known(self, path: Path) -> Known:
        """Return what the store holds of a file; a new file gets the next number."""
        number = self._numbers.get(str(path))
        if number is None:
            number = self._numbers[str(path)] = self._next
            self._next += 1
        mine = self._named >> SOURCE_BITS == number
        base = number << SOURCE_BITS
        return Known(self.store, base, self._named[mine] - base, self._ids[mine])


class Known:
    """What a store holds of one file.

    Args:
        store: the target.
        base: added to places in the file to give trajectory and group ids.
        places: `[n]` int64, the places in the file of the rows that are there.
        rows: `[n]` int64, their ids in the store.

    Attributes:
        num: places 0 to `num - 1` were imported before.
    """

    def __init__(self, store: TrajectoryStore, base: int, places: Ids, rows: Ids) -> None:
        self.store = store
        self.base = base
        order = np.argsort(places, kind="stable")
        self._places, self._rows = places[order], rows[order]
        self.num = int(self._places[-1]) + 1 if len(places) else 0

    def check_same(self, places: Sequence[int], rollouts: Sequence[Rollout], wheres: Sequence[str]) -> None:
        """Check that rows imported before are unchanged in the file; evicted rows are skipped.

        Raises:
            DataError: one does not.
        """
        wanted = np.asarray(places, np.int64)
        at = np.searchsorted(self._places, wanted)
        there = np.flatnonzero(self._places[np.minimum(at, len(self._places) - 1)] == wanted)
        stored = self.store.read(
            self._rows[at[there]], ["input_ids", "num_prompt_tokens", "task_reward", "completion", "meta"]
        )
        for i, place in enumerate(there.tolist()):
            rollout = rollouts[place]
            ids = stored["input_ids"][i][int(stored["num_prompt_tokens"][i]) :]
            if rollout.completion_ids is not None:
                same = np.array_equal(ids, rollout.completion_ids)
            else:
                same = stored["completion"][i] == rollout.completion
            if not same or not np.array_equal(stored["task_reward"][i], np.float32(rollout.reward), equal_nan=True):
                raise DataError(
                    f"{wheres[place]}: an earlier import read another {'reward' if same else 'completion'} here: the "
                    "file has changed, or is now read in another way. Import it into another store, or from a copy "
                    "with another name to have both."
                )


def source_of(meta: str) -> str | None:
    """Return the file that a row was imported from, by its `meta`; None for other rows."""
    try:
        source = json.loads(meta).get("source")
    except (ValueError, AttributeError):
        return None
    return source.get("file") if isinstance(source, dict) else None
