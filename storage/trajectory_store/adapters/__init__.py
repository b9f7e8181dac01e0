"""Other trainers, a file each: what their hooks give, as rows of a store. No file imports its trainer at the top."""

from __future__ import annotations

import os
from functools import lru_cache

from trajectory_store.errors import SchemaError
from trajectory_store.recorder import TrajectoryRecorder

VARIABLE = "TRAJECTORY_STORE"


def store_here() -> str:
    """Return the folder that `TRAJECTORY_STORE` names.

    Raises:
        SchemaError: the environment names no store.
    """
    store = os.environ.get(VARIABLE)
    if not store:
        raise SchemaError(f"set {VARIABLE} to the folder of the store.")
    return store


def recorder_here() -> TrajectoryRecorder:
    """Return this process's recorder into the store that `TRAJECTORY_STORE` names, for hooks that are named by a path.

    Raises:
        SchemaError: the environment names no store.
    """
    return _recorder(store_here(), os.getpid())


@lru_cache(maxsize=8)
def _recorder(store: str, process: int) -> TrajectoryRecorder:
    return TrajectoryRecorder(store, rank=0, world_size=1)
