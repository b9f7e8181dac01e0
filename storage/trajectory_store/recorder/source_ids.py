"""Ids of trajectories that several sources write to one store, and the lock between these."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from trajectory_store.errors import StoreBusyError, StoreExistsError, StoreNotFoundError
from trajectory_store.locks import locked, try_lock
from trajectory_store.schema import Schema
from trajectory_store.store import TrajectoryStore

SOURCE_BITS = 40
"""Trajectory and group ids are the number of the source in the store, shifted by this, plus the position in the source.
"""
NAME = "trajectory_id"
_LOCK = ".recorder.lock"


@contextmanager
def store_lock(store: Path, *, shared: bool = False, refusal: str) -> Generator[None]:
    """Hold the lock on the folder of a store: recorders share it, imports and compactions have it alone."""
    folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(folder, shared=shared):
            raise StoreBusyError(refusal)
        yield
    finally:
        os.close(folder)


def alone(store: Path) -> AbstractContextManager[None]:
    """Hold the lock that processes take to write what depends on what is there."""
    return locked(store / _LOCK)


def next_base(store: TrajectoryStore) -> int:
    """Return what to add to places for trajectory and group ids that nothing in the store has."""
    ids = store.ids()
    if not len(ids):
        return 0
    highest = max(int(store.read_scalars(name, ids).max()) for name in (NAME, "group_id"))
    return ((highest >> SOURCE_BITS) + 1) << SOURCE_BITS


def open_or_create(path: Path, schema: Schema, durability: Any) -> TrajectoryStore:
    """Open a store for appending, or make it; other processes may do so, too."""
    with suppress(StoreNotFoundError):
        return TrajectoryStore.open(path, mode="a", durability=durability)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return TrajectoryStore.create(path, schema, durability=durability or "process")
    except StoreExistsError:  # another process was first
        return TrajectoryStore.open(path, mode="a", durability=durability)
