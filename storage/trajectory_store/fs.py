"""The few file operations that the store is built on, each with its errors said in words.

Everything that writes goes through this module, so a test can record the order of writes and syncs and
replay every power loss in between.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import resource
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy.typing as npt

from trajectory_store.errors import WriteFailedError

Data = bytes | memoryview | npt.NDArray[Any]
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
MOST_FILES = 1 << 19
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def failed(error: OSError, path: Path | str, doing: str) -> WriteFailedError:
    """Turn an OSError into the store's own, with what it means for the data."""
    if error.errno in _FULL:
        why = "the disk, the quota or the file size limit is exhausted"
        way_out = "Free space (or raise `ulimit -f`), then append again"
    else:
        why = os.strerror(error.errno or 0)
        way_out = "Check the disk, then open the store again"
    message = (
        f"{doing} failed at {path}: {why}. Every row that was acknowledged before is safe and readable; "
        f"these rows are not in the store. {way_out}."
    )
    return WriteFailedError(error.errno, message, str(path))


def raise_file_limit() -> bool:
    """Raise the soft limit of open files to the hard one; every map of a file holds one of them.

    Returns:
        Whether there is more room now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False
    _soft_limit.cache_clear()
    return True


@functools.cache
def _soft_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


class HoldsFiles(Protocol):
    """Something that keeps files open only because opening them again costs time."""

    def drop_maps(self) -> None:
        """Close them."""
        ...


HOLDERS: weakref.WeakSet[HoldsFiles] = weakref.WeakSet()


HELD = [0]


def make_room() -> None:
    """Get away from the limit of open files: raise it, and where that is not possible close idle maps."""
    if not raise_file_limit():
        for holder in list(HOLDERS):
            holder.drop_maps()


def open_fd(path: Path, flags: int) -> int:
    """Open a file; where the process is out of descriptors, room is made first."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        make_room()
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    return fd


def count_file(owner: object) -> None:
    """Count an object that holds a file; where they get near the limit, room is made."""
    HELD[0] += 1
    weakref.finalize(owner, _uncount)
    if HELD[0] >= _soft_limit() // 2:
        make_room()


def _uncount() -> None:
    HELD[0] -= 1


def pwrite(fd: int, data: Data, offset: int) -> None:
    """Write all bytes (items of one byte) at an offset."""
    done = os.pwrite(fd, cast("bytes", data), offset)
    if done == len(data):
        return
    view = memoryview(cast("bytes", data))
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def write_file(path: Path, data: bytes) -> None:
    """Create a small file with this content."""
    fd = open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        pwrite(fd, data, 0)
    finally:
        os.close(fd)


def create_sized(path: Path, size: int, preallocate: bool) -> None:
    """Create a file of a fixed size, sparse or with its blocks reserved."""
    fd = open_fd(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, size)
        if preallocate and size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def mkdir(path: Path) -> None:
    """Create one folder."""
    os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; never onto a folder that holds something."""
    os.rename(source, target)


def datasync(fd: int) -> None:
    """Wait until the content of a file is on the disk."""
    os.fdatasync(fd)


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = open_fd(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Sync every file and folder below and including `root`."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync_path(Path(folder, name))
        sync_path(Path(folder))


def remove_tree(root: Path) -> None:
    """Remove a folder; one that is already gone is fine."""
    import shutil

    shutil.rmtree(root, ignore_errors=True)


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file if nobody holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of a file; the kernel drops it when the process dies."""
    try:
        fd = open_fd(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(fd)
    return False


@contextmanager
def locked(path: Path, *, wait: bool) -> Generator[bool]:
    """Hold the exclusive lock of a file; yields False where another process has it and `wait` is off."""
    fd = open_fd(path, os.O_RDONLY)
    try:
        if wait:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield True
        else:
            yield try_lock(fd)
    finally:
        os.close(fd)


def token(size: int) -> str:
    """Random hexadecimal digits for a name, two per byte."""
    return os.urandom(size).hex()


def random_salt() -> int:
    """A random odd number of 32 bits."""
    return int.from_bytes(os.urandom(4), "little") | 1


@functools.cache
def boot_id() -> str:
    """The name of this boot of the machine, or an empty string where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def disk_bytes(root: Path) -> int:
    """The bytes that a folder takes on the disk (blocks, not apparent size)."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
