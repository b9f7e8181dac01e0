"""Locks between processes: the kernel releases one when its holder ends, however that happens. Imports no NumPy.

No other module of the store or of the pipeline locks a file (`tests/test_files_and_locks.py`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""The error numbers of a file system without locks."""


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Take the lock of an open file, or return False at once if another process holds it.

    Raises:
        OSError: the file system has no locks, see `UNSUPPORTED`.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int | IO[Any]) -> None:
    """Release the lock of an open file, which stays open."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, *, required: bool = True) -> Generator[None]:
    """Wait for the lock of a folder, or of a file, which is created if absent; hold it.

    Threads exclude each other, too: each opens the file for itself.

    Args:
        path: the folder or file.
        required: otherwise continue without a lock where the file system has none.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if required or error.errno not in UNSUPPORTED:
                raise
        yield
    finally:
        os.close(descriptor)
