"""One process at a time takes rows of a store for itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trajectory_store import TrajectoryStore

LOCK = "claims.lock"
"""The file in the store's folder that is locked; it holds nothing and may be deleted while nobody reads."""


@contextmanager
def claiming(store: TrajectoryStore) -> Iterator[None]:
    """Keep out all other processes that claim rows of the store, and the other threads of this one.

    The kernel drops the lock when its holder dies. Where the store is not in a local folder there is no lock, and only
    one process may claim. On a network file system `flock` must reach all of them, as for writers.
    """
    folder = Path(str(store.path))
    if not folder.is_dir():
        yield
        return
    # A descriptor of its own for each claim: processes and threads that share one would share the lock.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
