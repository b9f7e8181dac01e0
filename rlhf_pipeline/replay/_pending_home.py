"""One writer's folder of waiting trajectories: who owns it, and which of its rows still wait."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlhf_pipeline.errors import RunExistsError
from trajectory_store import RaggedArray, Schema, TrajectoryStore

TIDY_ROWS = 1024
"""A stream is written anew when so many of its rows are gone ..."""

TIDY_ELEMENTS = 1 << 22
"""... or rows with so many tokens, if what is gone is twice what waits."""


class Home:
    """A writer's folder, while this process holds its lock.

    In it are `lock` and streams `g-00000000`, `g-00000001`, ..., trajectory stores of which only the newest counts.

    Args:
        folder: the folder.
        lock: the descriptor of its lock file, locked.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.after: int | None = None
        self._lock = lock
        self._store: TrajectoryStore | None = None
        self._number = -1
        self._waiting = 0
        self._gone = 0
        self._gone_elements = 0
        self._pid = os.getpid()

    # -- ownership ---------------------------------------------------------------------------------------------

    @classmethod
    def make(cls, root: Path, writer: str | None) -> Self:
        """Make the folder of a new writer; it appears with its lock held.

        Raises:
            RunExistsError: another process has made one of this name.
        """
        root.mkdir(exist_ok=True)
        token = os.urandom(6).hex()
        draft = root / f".new-{token}"
        draft.mkdir()
        lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = root / (f"auto-{token}" if writer is None else f"by-{writer}")
        try:
            os.rename(draft, folder)
        except OSError as error:
            os.close(lock)
            _remove(draft)
            if folder.is_dir():
                raise in_use(writer, root) from error
            raise
        return cls(folder, lock)

    @classmethod
    def take(cls, folder: Path) -> Self | None:
        """The folder, if no living process holds it and nobody removed it meanwhile."""
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(folder / "lock").st_ino:
                return cls(folder, lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return None

    def close(self) -> None:
        """Let go of the folder; one in which nothing waits is removed."""
        if self._lock < 0:
            return
        if self._pid == os.getpid():
            empty = self._waiting == 0
            if self._store is not None and not self._store.closed:
                self._store.close()
            if empty:
                _remove(self.folder)
        # In a fork the parent's lock stays, as the file is the same.
        os.close(self._lock)
        self._lock, self._store = -1, None

    # -- rows --------------------------------------------------------------------------------------------------

    def open(self, schema: Schema) -> None:
        """Open the newest stream, if there is one, and clear away what a killed process left."""
        for draft in self.folder.glob(".*"):
            _remove(draft)
        numbers = sorted(int(path.name[2:]) for path in self.folder.glob("g-*"))
        for old in numbers[:-1]:
            _remove(self.folder / _stream_name(old))
        if not numbers:
            return
        self._number = numbers[-1]
        path = self.folder / _stream_name(self._number)
        added = [c for c in schema if c.optional]
        self._store = TrajectoryStore.open(path, "a", add_columns=added)
        waiting = self.open_rows()
        self._waiting, self._gone = len(waiting), len(self._store) - len(waiting)
        if len(waiting):
            self.after = int(self.scalars("pending_after", waiting).min())

    def writable(self, schema: Schema, durability: Any) -> TrajectoryStore:
        """The newest stream, made if there is none."""
        if self._store is None:
            self._store = self._begin(schema, durability, None)
        return self._store

    def count(self, ids: np.ndarray, after: int) -> None:
        """Rows were appended."""
        self._waiting += len(ids)
        self.after = after if self.after is None else min(self.after, after)

    def consume(self, ids: np.ndarray) -> None:
        """Rows no longer wait. The flag is set in place: it takes no disk, and survives `kill -9`."""
        store = self._stream()
        store.update(ids, consumed=1)
        self._waiting -= len(ids)
        self._gone += len(ids)
        self._gone_elements += int(store.lengths("input_ids", ids).sum())

    def tidy(self, schema: Schema) -> dict[int, int]:
        """Write the stream anew without the rows that are gone, if they are many.

        Returns:
            The new id of each waiting row by its old one; empty where nothing was done.
        """
        much = self._gone >= TIDY_ROWS or self._gone_elements >= TIDY_ELEMENTS
        if not much or self._gone < 2 * self._waiting:
            return {}
        store = self._stream()
        waiting, old = self.open_rows(), self.folder / _stream_name(self._number)
        self._store = None
        moved: dict[int, int] = {}
        if len(waiting):
            self._store = self._begin(schema, store.durability, store, waiting)
            moved = dict(zip(waiting.tolist(), self._store.ids().tolist(), strict=True))
        store.close()
        _remove(old)
        self._gone = self._gone_elements = 0
        self.after = int(self.scalars("pending_after", self.open_rows()).min()) if len(waiting) else None
        return moved

    def _begin(
        self, schema: Schema, durability: Any, source: TrajectoryStore | None, ids: np.ndarray | None = None
    ) -> TrajectoryStore:
        """A new stream, with some rows of the former one; it appears whole or not at all."""
        draft = self.folder / f".new-{os.urandom(6).hex()}"
        with TrajectoryStore.create(draft, schema, durability=durability) as made:
            if source is not None and ids is not None:
                made.append_batch(source.read_batch(ids, schema))
        self._number += 1
        path = self.folder / _stream_name(self._number)
        os.rename(draft, path)
        if durability != "process":
            for folder in (self.folder, self.folder.parent, self.folder.parent.parent):
                _sync(folder)
        return TrajectoryStore.open(path, "a")

    def open_rows(self) -> np.ndarray:
        """The ids of the rows that wait, in the order in which they came."""
        if self._store is None:
            return np.zeros(0, np.int64)
        ids = np.asarray(self._store.ids())
        return ids[self._store.read_scalars("consumed", ids) == 0]

    @property
    def schema(self) -> Schema:
        """The columns of the stream."""
        return self._stream().schema

    def scalars(self, name: str, ids: np.ndarray) -> np.ndarray:
        """A column with one value per row."""
        return self._stream().read_scalars(name, ids)

    def ragged(self, name: str, ids: np.ndarray) -> RaggedArray:
        """A column with many values per row."""
        return self._stream().read_ragged(name, ids)

    def present(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Whether a column was given."""
        return self._stream().present(name, ids)

    def read(self, ids: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
        """Some columns, text among them."""
        return self._stream().read(ids, list(names))

    def _stream(self) -> TrajectoryStore:
        store = self._store
        if store is None:
            raise FileNotFoundError(f"{self.folder} holds no stream")  # no caller has ids of rows that are not there
        return store


def in_use(writer: str | None, root: Path) -> RunExistsError:
    """The error of a name that a living process has."""
    return RunExistsError(
        f"the writer {writer!r} of {root.parent} is in use by a living process. Give each collector a name of its "
        "own: TrajectoryReplayBuffer(writer_name=...)."
    )


def take_homes(root: Path, writer: str | None) -> tuple[list[Home], bool]:
    """The folders that this process takes over, and whether one was held by another.

    Args:
        root: the folder of all writers.
        writer: take this writer's only; None takes those of all that had no name.
    """
    if not root.is_dir():
        return [], False
    for left in root.glob(".old-*"):
        _remove(left)
    folders = sorted(root.glob("auto-*")) if writer is None else [root / f"by-{writer}"]
    homes = [(folder, Home.take(folder)) for folder in folders]
    busy = any(home is None and folder.is_dir() for folder, home in homes)
    return [home for _, home in homes if home is not None], busy


def _stream_name(number: int) -> str:
    return f"g-{number:08d}"


def _remove(path: Path) -> None:
    """Remove a folder: it is gone under its name at once."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".old-{os.urandom(6).hex()}")
        try:
            os.rename(path, doomed)
        except FileNotFoundError:
            return
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
