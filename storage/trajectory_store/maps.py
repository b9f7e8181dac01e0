"""How the bytes of a file reach a reader: through a shared map, or by positional reads.

Maps are the fast way on a local disk. A network file system may take a page away under a map, which ends
the process with SIGBUS, so there the reader asks for bytes instead and gets an error it can report.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Literal, overload

from trajectory_store import fs
from trajectory_store.errors import CorruptionError, ReadFailedError

Io = Literal["mmap", "pread"]
NETWORK_TYPES = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "ocfs2", "gfs2", "wekafs", "vboxsf", "prl_fs", "davfs"),
    ]
)
ALLOCATING_TYPES = frozenset(["tmpfs", "ramfs"])
"""File systems that take a new page when a hole is read through a map: on a full one, looking at a row that nobody has
written yet ends the process with SIGBUS. A positional read of a hole gives zeros and takes nothing."""

MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that holds a path, or an empty string where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    wanted = os.path.realpath(path)
    best, found = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].encode().decode("unicode_escape")
        inside = wanted == mount or wanted.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, found = len(mount), right.split()[0]
    return found


def choose(path: Path, mounts: Path = MOUNTS) -> Io:
    """`"pread"` where a map may end the process (network, user-space and memory file systems), else `"mmap"`."""
    kind = file_system(path, mounts)
    unsafe = kind in NETWORK_TYPES or kind in ALLOCATING_TYPES or kind.startswith("fuse")
    return "pread" if unsafe else "mmap"


class PreadBytes:
    """A file that is read on demand; slices are bytes, as those of a map are.

    Args:
        path: the file.
        size: bytes that it must have.
        writable: whether `write` will be called.
    """

    def __init__(self, path: Path, size: int, *, writable: bool = False) -> None:
        self._path = path
        self._size = size
        self._fd = fs.open_fd(path, os.O_RDWR if writable else os.O_RDONLY)
        check_size(path, os.fstat(self._fd).st_size, size)
        fs.count_file(self)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, where: slice) -> bytes: ...
    @overload
    def __getitem__(self, where: int) -> int: ...
    def __getitem__(self, where: slice | int) -> bytes | int:
        if isinstance(where, int):
            return self[where : where + 1][0]
        start, stop, _ = where.indices(self._size)
        parts: list[bytes] = []
        while start < stop:
            try:
                part = os.pread(self._fd, stop - start, start)
            except OSError as error:
                raise ReadFailedError(
                    error.errno,
                    f"reading failed: {error.strerror}. Check the mount, then open the store again",
                    str(self._path),
                ) from error
            if not part:
                raise CorruptionError(f"{self._path} ends at byte {start}, before byte {stop}.")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_once(self, nbytes: int, offset: int) -> bytes:
        """What one call gives: fewer bytes, or none, where a slice has to find out why."""
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError:
            return b""

    def write(self, data: bytes, offset: int) -> None:
        """Change a few bytes in place."""
        os.pwrite(self._fd, data, offset)

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)


FORMATS: dict[int, Literal["B", "H", "I", "L"]] = {1: "B", 2: "H", 4: "I", 8: "L"}


class PreadItems:
    """The items of a file that is read on demand; slices are memoryviews of unsigned integers.

    Args:
        raw: the file.
        size: bytes per item.
    """

    def __init__(self, raw: PreadBytes, size: int) -> None:
        self._raw = raw
        self._size = size
        self._format: Literal["B", "H", "I", "L"] = FORMATS[size]

    def __getitem__(self, where: slice) -> memoryview:
        start = where.start * self._size
        wanted = where.stop * self._size - start
        data = self._raw.read_once(wanted, start)
        if len(data) != wanted:
            data = self._raw[start : start + wanted]
        return memoryview(data).cast(self._format)


def check_size(path: Path, found: int, size: int) -> None:
    """Refuse a file that is shorter than its metadata says."""
    if found < size:
        raise CorruptionError(
            f"{path} has {found} bytes, but its metadata says {size}: it was cut short by a copy or a "
            "repair. Restore it from a backup, or run verify to list what is lost."
        )


def _map(fd: int, size: int, access: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, access=access, trackfd=False)
    mapped = mmap.mmap(fd, size, access=access)
    fs.count_file(mapped)
    return mapped


def map_file(path: Path, size: int, *, writable: bool = False) -> memoryview:
    """Map a file of at least `size` bytes.

    Raises:
        FileNotFoundError: the file is gone.
        CorruptionError: the file is shorter than the metadata says.
    """
    fd = fs.open_fd(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        check_size(path, os.fstat(fd).st_size, size)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            return memoryview(_map(fd, size, access))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            fs.make_room()
            return memoryview(_map(fd, size, access))
    finally:
        os.close(fd)


def open_file(path: Path, size: int, io: Io, *, writable: bool = False) -> memoryview | PreadBytes:
    """Open a file in the chosen way."""
    if io == "pread":
        return PreadBytes(path, size, writable=writable)
    return map_file(path, size, writable=writable)
