"""How the bytes of a file reach a reader: through a shared map, by positional reads, or loaded whole.

Maps are fastest on a local disk. A network file system may lose a page behind a map, which ends the process with
SIGBUS; there positional reads give an error that can be reported. A small file that no longer changes is loaded,
which costs neither a map nor a fault per page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.errors import CorruptionError

Io = Literal["mmap", "pread"]
NETWORK_TYPES = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "ocfs2", "gfs2", "wekafs", "vboxsf", "prl_fs", "davfs"),
    ]
)
ALLOCATING_TYPES = frozenset(["tmpfs", "ramfs"])
"""File systems that allocate a page when a hole is read through a map: if such a file system is full, reading a row
that is not yet written ends the process with SIGBUS. A positional read of a hole returns zeros and allocates nothing.
"""

MOUNTS = Path("/proc/self/mountinfo")
AHEAD = 1 << 16
"""From this many adjacent bytes on, the kernel is asked to read ahead."""
LOADED = 1 << 16
"""Finished files of up to this many bytes are loaded instead of mapped."""


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that holds a path, or an empty string if the system does not report it."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    real_path = os.path.realpath(path)
    best, mount_type = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].encode().decode("unicode_escape")
        inside = real_path == mount or real_path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, mount_type = len(mount), right.split()[0]
    return mount_type


def choose(path: Path, mounts: Path = MOUNTS) -> Io:
    """Return `"pread"` where a map may end the process (network, user-space, memory file systems), else `"mmap"`."""
    kind = file_system(path, mounts)
    unsafe = kind in NETWORK_TYPES or kind in ALLOCATING_TYPES or kind.startswith("fuse")
    return "pread" if unsafe else "mmap"


class PreadBytes:
    """A file that is read on demand; slices are bytes."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._fd = fs.open_fd(path, os.O_RDONLY)
        check_size(path, os.fstat(self._fd).st_size, size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(self._size)
        return self.read(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """Read a range of bytes. One call mostly gives them all; otherwise a loop gets the rest or raises the error."""
        try:
            data = os.pread(self._fd, stop - start, start)
        except OSError as error:
            fs.pass_external(error)
            data = b""
        return data if len(data) == stop - start else read_range(self._fd, start, stop, self._path)

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)


FORMATS: dict[int, Literal["B", "H", "I", "L"]] = {1: "B", 2: "H", 4: "I", 8: "L"}


class PreadItems:
    """The items of a file that is read on demand; slices are memoryviews of unsigned integers."""

    def __init__(self, raw: PreadBytes, size: int) -> None:
        self._raw = raw
        self._size = size
        self._format: Literal["B", "H", "I", "L"] = FORMATS[size]

    def __getitem__(self, where: slice) -> memoryview:
        return memoryview(self._raw.read(where.start * self._size, where.stop * self._size)).cast(self._format)


def read_range(fd: int, start: int, stop: int, path: Path) -> bytes:
    """Read bytes `start` to `stop` of an open file."""
    data = b""
    while start + len(data) < stop:
        try:
            part = os.pread(fd, stop - start - len(data), start + len(data))
        except OSError as error:
            raise fs.unreadable(error, path) from error
        if not part:
            raise CorruptionError(f"{path} ends at byte {start + len(data)}; it must contain at least {stop} bytes.")
        data = data + part if data else part
    return data


def check_size(path: Path, actual: int, size: int) -> None:
    """Reject a file that is shorter than its metadata records."""
    if actual < size:
        raise CorruptionError(
            f"{path} has {actual} bytes, but its metadata specifies {size}: a copy or a repair truncated it. "
            "Restore it from a backup, or run verify to list the lost rows."
        )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def _map(fd: int, size: int) -> memoryview | None:
    """Map a file for reading, or return None if there is no room. Python's own `mmap` keeps a descriptor per map.

    Rows are read at random, so the kernel does not read ahead around each: that may be megabytes per row.
    """
    address = cast("int | None", _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0))
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        if number in (errno.ENOMEM, errno.EAGAIN, errno.ENODEV):
            return None
        raise OSError(number, os.strerror(number))
    _libc.madvise(address, size, mmap.MADV_RANDOM)  # who reads many adjacent bytes asks for them
    block = (ctypes.c_ubyte * size).from_address(address)
    array: npt.NDArray[np.uint8] = np.frombuffer(cast("bytearray", block), np.uint8)
    array.flags.writeable = False
    weakref.finalize(block, _libc.munmap, address, size).atexit = False
    return memoryview(cast("bytes", array))


def will_need(view: object, start: int, end: int) -> None:
    """Ask the kernel for the pages of a range of bytes of a map."""
    array = view.obj if isinstance(view, memoryview) else None
    if isinstance(array, np.ndarray) and end <= array.nbytes:
        start &= -mmap.PAGESIZE
        _libc.madvise(cast("npt.NDArray[Any]", array).ctypes.data + start, end - start, mmap.MADV_WILLNEED)


def open_file(path: Path, size: int, io: Io, *, used: int | None = None) -> memoryview | PreadBytes:
    """Open a file of at least `size` bytes in the chosen way."""
    if used is not None and used <= LOADED:
        fd = fs.open_fd(path, os.O_RDONLY)
        try:
            check_size(path, os.fstat(fd).st_size, size)
            return memoryview(read_range(fd, 0, used, path))
        finally:
            os.close(fd)
    if io == "pread" or not size:
        return PreadBytes(path, size)
    fd = fs.open_fd(path, os.O_RDONLY)
    try:
        check_size(path, os.fstat(fd).st_size, size)
        mapped = _map(fd, size)
    finally:
        os.close(fd)
    return PreadBytes(path, size) if mapped is None else mapped
