"""The few file operations that the store is built on, with explained errors.

Every write goes through this module, so a test can record the order of writes and syncs and
replay every power loss in between. Only regular files are opened, and links are never followed.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt

from trajectory_store import locks
from trajectory_store.errors import CorruptionError, ReadFailedError, StoreError, UnsyncedError, WriteFailedError

Data = bytes | memoryview | npt.NDArray[Any]
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def failed(error: OSError, path: Path | str, doing: str) -> WriteFailedError:
    """Turn an OSError into a WriteFailedError that states what it means for the data; one from outside is raised."""
    pass_external(error)
    if error.errno in _FULL:
        why = "the disk is full, or the quota or the file size limit is exhausted"
        way_out = "Free space (or raise `ulimit -f`), then append again"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        why = "too many files are open"
        way_out = "Raise `ulimit -n`, then append again"
    else:
        why = os.strerror(error.errno or 0)
        way_out = "Check the disk, then open the store again"
    message = (
        f"{doing} failed at {path}: {why}. All acknowledged rows are safe and readable; the rows of this call are not "
        f"in the store. {way_out}."
    )
    return WriteFailedError(error.errno, message, str(path))


def unsynced(error: OSError, path: Path | str) -> UnsyncedError:
    """Turn the OSError of a sync into an UnsyncedError that states what is in the store; raise one from outside."""
    pass_external(error)
    message = (
        f"syncing failed at {path}: {os.strerror(error.errno or 0)}. The written rows or values are in the store "
        "and readable, but may not be on the disk: a power loss may remove them. Do not append or update them "
        "again. Check the disk; after a power loss run verify(), which reports lost rows."
    )
    return UnsyncedError(error.errno, message, str(path))


def unreadable(error: OSError, path: Path | str) -> StoreError:
    """Turn an OSError into a ReadFailedError that gives the reason and what to do; errors of the store are returned.

    An exception from outside is raised.
    """
    pass_external(error)
    if isinstance(error, StoreError):
        return error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        why = "too many files are open. Raise `ulimit -n`, or run compact"
    elif error.errno == errno.ENOMEM:
        why = "the address space or memory is exhausted. Raise `ulimit -v`, or free memory"
    else:
        why = f"reading failed: {os.strerror(error.errno or 0)}. Check the disk, then open the store again"
    return ReadFailedError(error.errno, why, str(path))


@contextmanager
def explained(path: Path | str, doing: str) -> Generator[None]:
    """Turn an OSError of the operating system into the error of `failed`; errors of the store pass unchanged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise failed(error, path, doing) from error


def is_external(error: BaseException | None) -> bool:
    """Return whether an exception came from outside, although it is an OSError: that of an alarm or a time limit.

    The operating system numbers its errors. An exception from outside is unrelated to the file, and is never swallowed.
    """
    own_errors = (StoreError, FileNotFoundError)  # the second is raised without a number for an object that is missing
    return isinstance(error, OSError) and error.errno is None and not isinstance(error, own_errors)


def is_of_system(error: BaseException) -> bool:
    """Return whether the operating system, or the store on its word, raised an exception."""
    return isinstance(error, OSError) and not is_external(error)


def pass_external(error: BaseException) -> None:
    """Raise an exception from outside."""
    if is_external(error):
        raise error


class tolerated:
    """Suppresses the errors of the operating system and of the store in a block, and no exception from outside."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and is_of_system(error)


class OpenFile:
    """An open file that is closed when nothing refers to it, so that an exception at any line leaves no lock behind."""

    fd = -1

    def __init__(self, path: Path | str, flags: int) -> None:
        self.fd = open_fd(path, flags)

    def close(self) -> None:
        """Close it, if it is open."""
        self.fd = -1 if self.fd < 0 else os.close(self.fd) or -1  # one line: it is never closed twice

    def __del__(self) -> None:
        self.close()


def open_fd(path: Path | str, flags: int) -> int:
    """Open a regular file."""
    try:
        fd = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptionError(
                f"{path} is a link or a pipe, not a regular file. Restore the original file."
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptionError(f"{path} is not a regular file. Restore the original file.")
    return fd


def read_file(path: Path | str, most: int = 1 << 26) -> bytes:
    """Read a regular file of at most so many bytes."""
    fd = open_fd(path, os.O_RDONLY)
    try:
        return read_all(fd, most)
    finally:
        os.close(fd)


def read_all(fd: int, most: int = 1 << 26) -> bytes:
    """Read an open file from its start, and no more than `most` bytes: what is longer is none of the store's."""
    size = min(os.fstat(fd).st_size, most)
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def read_part(path: Path | str, start: int, count: int) -> bytes:
    """Read some bytes of a regular file; fewer where it ends before."""
    fd = open_fd(path, os.O_RDONLY)
    try:
        return os.pread(fd, count, start)
    finally:
        os.close(fd)


def check_folder(path: Path | str) -> None:
    """Reject a folder that is a link."""
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise CorruptionError(f"{path} is a link, not a folder. Restore the original folder.")


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


def link(source: Path, target: Path) -> None:
    """Give a file a second name, which must be free."""
    os.link(source, target, follow_symlinks=False)


def remove_file(path: Path) -> None:
    """Remove a file; a missing one is not an error."""
    path.unlink(missing_ok=True)


def datasync(fd: int) -> None:
    """Wait until the content of a file is on the disk."""
    os.fdatasync(fd)


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
    """Remove a folder; a missing one is not an error."""
    import shutil

    shutil.rmtree(root, ignore_errors=True)


def try_lock(fd: int) -> bool | None:
    """Try to take the exclusive lock of an open file: False if another process holds it, None if there are no locks."""
    try:
        return locks.try_lock(fd)
    except OSError as error:
        if error.errno not in locks.UNSUPPORTED:
            raise
        return None


@contextmanager
def short_lock(fd: int, path: Path, patience_s: float = 10.0) -> Generator[None]:
    """Hold the lock of an open file that others hold for microseconds; where there are no locks, continue without.

    Raises:
        WriteFailedError: a process holds it all the time; it may have been stopped just then.
    """
    until = time.monotonic() + patience_s
    while (is_locked_here := try_lock(fd)) is False:
        if time.monotonic() > until:
            why = f"another process has held its lock for {patience_s:.0f} s; stop that process and retry"
            raise WriteFailedError(errno.EAGAIN, why, path)
        time.sleep(0.0005)
    try:
        yield
    finally:
        if is_locked_here:
            locks.unlock(fd)


def is_locked(path: Path) -> bool | None:
    """Return whether a living process holds the lock of a file, or None if there are no locks.

    The kernel drops a lock when its holder dies.
    """
    try:
        fd = open_fd(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not locks.try_lock(fd, shared=True)
    except OSError as error:
        if error.errno not in locks.UNSUPPORTED:
            raise
        return None
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Generator[bool | None]:
    """Hold the exclusive lock of a file; yield False if another process has it, None if there are no locks."""
    fd = open_fd(path, os.O_RDONLY)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def now(folder: Path) -> float:
    """Return the file system's time in s; the clocks of processes and machines may differ from it."""
    path = folder / f".partial-{token(8)}"
    write_file(path, b"")
    try:
        return path.lstat().st_mtime
    finally:
        remove_file(path)


def token(size: int) -> str:
    """Random hexadecimal digits for a name, two per byte."""
    return os.urandom(size).hex()


def random_salt() -> int:
    """A random odd number of 32 bits."""
    return int.from_bytes(os.urandom(4), "little") | 1


def disk_bytes(root: Path) -> int:
    """Return the disk space of a folder in bytes (blocks, not apparent size)."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
