"""Objects by key: where the catalog of every store, and the commits of an object store, are kept.

A bucket is a local folder or an object store. Everything rests on one operation, `put_new`: put an object unless one
with this key exists.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from trajectory_store import fs
from trajectory_store.errors import (
    CorruptionError,
    ReadFailedError,
    SchemaError,
    StoreError,
    StoreExistsError,
    WriteFailedError,
)

log = logging.getLogger("trajectory_store")
R = TypeVar("R")
T = TypeVar("T")

PATIENCE: Final = "TRAJECTORY_STORE_PATIENCE_S"
"""The environment variable with the number of seconds for which a failing request is retried."""
_PATIENCE_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 2.0
_FOLDER_TRIES: Final = 12
_LARGEST: Final = 1 << 32
_LARGEST_DOCUMENT: Final = 1 << 26
"""Upper bound on the size of a commit, a record or other metadata, so that a sparse file cannot exhaust memory."""
PARTIAL = ".partial-"
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Transient(Exception):
    """A request failed, and another try may succeed; whether a put arrived is unknown."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests made to an object store, repeats included."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    sent: int = 0
    received: int = 0

    @property
    def requests(self) -> int:
        """All requests."""
        return self.puts + self.gets + self.lists + self.deletes

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(**{name: value + getattr(more, name) for name, value in vars(self).items()})

    def __sub__(self, less: Traffic) -> Traffic:
        return Traffic(**{name: value - getattr(less, name) for name, value in vars(self).items()})


def number_from(variable: str, default: float) -> float:
    """Return the number in an environment variable, or the default if it is not set."""
    text = os.environ.get(variable, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SchemaError(f"{variable} is {text!r}; it must be a number above 0, for example {variable}={default:.15g}")
    return number


def persist(call: Callable[[], R], what: str) -> R:
    """Repeat a request, after growing pauses, until it has failed for `PATIENCE` seconds."""
    began, pause, has_warned = time.monotonic(), _FIRST_PAUSE_S, False
    while True:
        try:
            return call()
        except Transient as error:
            left = began + number_from(PATIENCE, _PATIENCE_S) - time.monotonic()
            if left <= 0:
                raise
            if pause >= _LONGEST_PAUSE_S and not has_warned:
                log.warning("%s failed (%s); retrying for up to %.0f s", what, error, left)
                has_warned = True
        time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def path_in_use(where: str) -> StoreExistsError:
    """Return the error for a path that holds something."""
    return StoreExistsError(
        f"{where} exists and is not empty. Open it with TrajectoryStore.open(path, mode='a'), or choose another path."
    )


def is_folder(path: Any) -> bool:
    """Return whether a path names a local folder, and not a URL or an object."""
    return isinstance(path, os.PathLike) or (isinstance(path, str) and "://" not in path)


class Bucket(ABC):
    """A place for objects."""

    where: str
    can_tear = False
    costly = True
    many = 64
    durable = True
    tail = 1 << 15
    traffic: Traffic = Traffic()

    def make(self, fill: Callable[[Bucket], None]) -> None:
        """Put the first objects of a store."""
        fill(self)

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> bool:
        """Put an object unless one with this key exists; return False if one does."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Put an object under a key that no other process uses."""

    @abstractmethod
    def _get(self, key: str) -> bytes:
        """Get an object; raise FileNotFoundError if there is none, Transient if another try may help."""

    @abstractmethod
    def _tail(self, key: str, size: int) -> tuple[bytes, int]:
        """Get `size` bytes from the end of an object, and the object's size; raise as `_get` does."""

    def _each(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Make several requests."""
        return [call(item) for item in items]

    def _again(self, call: Callable[[], R], what: str) -> R:
        """Make a request that is safe to repeat, and repeat it where that may help."""
        return call()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Get objects at the same time; None for a missing one."""

        def get(key: str) -> bytes | None:
            with suppress(*_ABSENT):
                return self._again(lambda: self._get(key), f"reading {key}")

        return self._each(get, keys)

    def tails(self, keys: Sequence[str], sizes: Sequence[int]) -> list[tuple[bytes, int] | None]:
        """Get bytes from the end of each object, and the object's size; None for a missing one."""

        def get_tail(of: tuple[str, int]) -> tuple[bytes, int] | None:
            with suppress(*_ABSENT):
                return self._again(lambda: self._tail(*of), f"reading {of[0]}")

        return self._each(get_tail, list(zip(keys, sizes, strict=True)))

    def ahead(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Request objects together that will be read soon; return those that are here now."""
        return {key: raw for key, raw in zip(keys, self.get_many(keys), strict=True) if raw is not None}

    def beside(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Make two kinds of requests, at the same time where both wait for replies."""
        first()
        second()

    @abstractmethod
    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Get some ranges of bytes of one object."""

    @abstractmethod
    def keys(self, prefix: str, after: str = "") -> list[str]:
        """Return the keys that begin with `prefix` and sort after `after`, sorted."""

    def keys_of(self, prefixes: Sequence[str]) -> list[list[str]]:
        """List several prefixes at the same time."""
        return self._each(self.keys, prefixes)

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""

    def stamp(self, key: str) -> int | None:
        """Return a number that stays the same until this key, or a later one in its folder, appears.

        None if only a listing can show it.
        """
        return None

    def hold(self, root: bytes) -> None:  # noqa: B027 - elsewhere the catalog's records identify this store
        """Remember which folder this is, so that `check_unmoved` notices another one in its place, or none."""

    def check_unmoved(self) -> None:  # noqa: B027
        """Check that the folder that `hold` remembers is still the one at this path."""

    def lock(self, key: str) -> fs.OpenFile | None:
        """Lock an object until the returned file is closed or the process ends; None where there are no locks."""
        return None

    def is_locked(self, key: str) -> bool | None:
        """Return whether a living process holds the lock of an object, or None if the bucket has no locks."""
        return None

    @contextmanager
    def upkeep_lock(self) -> Generator[bool | None]:
        """Take the upkeep lock: True if held, False if another process has it, None if the bucket has no locks."""
        yield None

    def sweep(self, older_than_s: float) -> None:  # noqa: B027 - elsewhere an object appears whole
        """Remove files that killed processes left half-written."""

    def sync(self, *keys: str) -> None:  # noqa: B027 - a put that was answered is safe elsewhere
        """Wait until objects, or all below a prefix, are on the disk, even if puts do not wait."""

    @property
    def address(self) -> Path | str:
        """The location of the objects: a path for a folder."""
        return self.where

    def is_empty(self) -> bool:
        """Whether there are no objects at all."""
        return not self.keys("")

    def get(self, key: str) -> bytes | None:
        """Get one object, or None."""
        return self.get_many([key])[0]

    def put_once(self, key: str, data: bytes) -> bool:
        """Put an object unless one exists; return whether the object that is there then has these bytes.

        A put that failed or was not answered may still arrive, and a client may repeat one whose reply was lost. So the
        same bytes are put to the same key until an object is there, and that object is read back.
        """

        def once() -> bool:
            if self.put_new(key, data):
                return True
            stored = self.get(key)
            if stored is None:
                raise Transient("an object with this name already exists, but cannot be read")
            return stored == data

        try:
            return persist(once, f"putting {key} to {self.where}")
        except (Transient, ReadFailedError) as error:
            raise WriteFailedError(
                None,
                f"putting {key} failed: {error}. All acknowledged rows are safe. It is unknown whether the "
                "rows of this call are in the store. Append them again: the store first checks whether it "
                "already contains them",
                self.where,
            ) from error


class FolderBucket(Bucket):
    """Objects as files below a local folder."""

    can_tear = True
    costly = False  # reading one scalar of 5,120 rows takes a fifteenth of the time that whole objects take
    many = 1024  # a folder answers quickly, and single columns of single commits can be read
    tail = 1 << 12

    def __init__(self, root: Path, *, durable: bool) -> None:
        self.root = root.absolute()
        self.where = str(self.root)
        self.durable = durable
        self._root_inode: tuple[int, int] | None = None

    def make(self, fill: Callable[[Bucket], None]) -> None:
        """Make the folder of a store: it appears whole or not at all, and is on the disk, whatever puts wait for."""
        path = self.root
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise path_in_use(self.where)
        temporary = path.parent / f".{path.name}.new-{fs.token(6)}"
        with fs.explained(path, "creating the store"):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                fs.mkdir(temporary)
                fill(FolderBucket(temporary, durable=False))  # synced as a whole, before it has its name
                fs.sync_tree(temporary)
                fs.rename(temporary, path)
            except BaseException as error:
                fs.remove_tree(temporary)
                if fs.is_of_system(error) and path.exists():
                    raise path_in_use(self.where) from error
                raise
            fs.sync_path(path.parent)

    def hold(self, root: bytes) -> None:
        """Remember which file the root is; it stays open, so that no other one gets its number.

        A root that is missing, and is known from its copy, is put again.
        """
        if self._root_inode is None:
            if not (self.root / "zarr.json").exists():
                self.put_once("zarr.json", root)
            fd = fs.open_fd(self.root / "zarr.json", os.O_RDONLY)
            weakref.finalize(self, os.close, fd).atexit = False
            status = os.fstat(fd)
            self._root_inode = status.st_dev, status.st_ino

    def check_unmoved(self) -> None:
        """Check that the root is the one that `hold` remembers: one call of stat."""
        if self._root_inode is None:
            return
        try:
            status = os.stat(f"{self.where}/zarr.json")
            inode = status.st_dev, status.st_ino
        except (FileNotFoundError, NotADirectoryError):
            inode = None
        if inode != self._root_inode:
            why = (
                "no longer exists: it was moved or removed"
                if inode is None
                else "is now another store: it was removed and created again"
            )
            raise WriteFailedError(
                errno.ESTALE,
                f"the folder that this process opened {why}. All acknowledged rows were written to the "
                "original folder; the rows of this call were not. Close the store, and open it again at its "
                "current path",
                self.where,
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Put a file atomically: a reader sees all of it or nothing.

        Raises:
            CorruptionError: a folder of the path is a link, which a listing does not follow.
        """
        self.check_unmoved()
        path = self.root / key
        with suppress(FileNotFoundError):
            for folder in accumulate(key.split("/")[:-1], "{}/{}".format):
                fs.check_folder(self.root / folder)
        for attempt in range(_FOLDER_TRIES):
            temporary = path.with_name(f"{PARTIAL}{os.getpid()}-{fs.token(8)}")
            with fs.explained(path, "writing"):
                try:
                    return self._link(path, temporary, data)
                except FileNotFoundError:  # the folder does not exist yet, or upkeep removed it while it was empty
                    if attempt == _FOLDER_TRIES - 1:
                        raise
                    self._make_folder(path.parent)
        raise AssertionError(_FOLDER_TRIES)

    def _link(self, path: Path, temporary: Path, data: bytes) -> bool:
        try:
            fs.write_file(temporary, data)
            if self.durable:
                fs.sync_path(temporary)
            fs.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            with fs.tolerated():
                fs.remove_file(temporary)
        if self.durable:
            try:
                fs.sync_path(path.parent)
            except OSError as error:
                raise fs.unsynced(error, path) from error
        return True

    def put(self, key: str, data: bytes) -> None:
        """Put a file under a name that no other process uses."""
        if not self.put_new(key, data):
            raise WriteFailedError(None, f"writing {key} failed: a file with this name already exists", self.where)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; sync each name if the bucket is durable."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with suppress(FileExistsError):
            fs.mkdir(folder)
        if self.durable:
            fs.sync_path(folder.parent)

    def sync(self, *keys: str) -> None:
        """Sync files, or folders with everything in them, and their names."""
        folders = {folder for key in keys for folder in (self.root / key).parents if folder.is_relative_to(self.root)}
        with fs.explained(self.root, "syncing"):
            for path in [*(self.root / key for key in keys), *sorted(folders, reverse=True)]:
                with suppress(FileNotFoundError):  # replaced: by newer records, or by a merged segment
                    if path.is_dir() and path not in folders:
                        fs.sync_tree(path)
                    else:
                        fs.sync_path(path)

    @property
    def address(self) -> Path:
        """The folder."""
        return self.root

    def is_empty(self) -> bool:
        """Whether the folder is empty or missing."""
        return not self.root.exists() or (self.root.is_dir() and not os.listdir(self.root))

    def _get(self, key: str) -> bytes:
        with self._opened(key) as fd:
            return fs.read_all(fd, _LARGEST if key.endswith(".zip") or "/c/" in key else _LARGEST_DOCUMENT)

    def _tail(self, key: str, size: int) -> tuple[bytes, int]:
        try:
            with self._opened(key) as fd:
                whole = os.fstat(fd).st_size
                size = min(size, whole)
                return os.pread(fd, size, whole - size), whole
        except CorruptionError:  # a link or a pipe is not part of this store
            return b"", 0

    def ahead(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Let the disk read files ahead: the waits overlap, so a cold batch takes three quarters of the time."""
        for key in keys:
            with suppress(CorruptionError), fs.tolerated(), self._opened(key) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        return {}

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of a file."""
        with self._opened(key) as fd:
            return [os.pread(fd, stop - start, start) for start, stop in spans]

    @contextmanager
    def _opened(self, key: str) -> Generator[int]:
        fd = -1
        try:
            fd = fs.open_fd(f"{self.where}/{key}", os.O_RDONLY)
            yield fd
        except OSError as error:
            if isinstance(error, (StoreError, *_ABSENT)) or fs.is_external(error):
                raise
            raise fs.unreadable(error, f"{self.where}/{key}") from error
        finally:
            if fd >= 0:
                os.close(fd)

    def keys(self, prefix: str, after: str = "") -> list[str]:
        """List files, except unfinished ones."""
        folder, _, start = prefix.rpartition("/")
        keys: list[str] = []
        if folder and os.path.islink(self.root / folder):  # a link leads out of the store
            return keys
        try:
            with os.scandir(self.root / folder) as entries:
                names = sorted((entry.name, entry.is_dir()) for entry in entries)
        except _ABSENT:
            return keys
        except OSError as error:
            raise fs.unreadable(error, f"{self.where}/{folder}") from error
        for name, is_folder in names:
            key = f"{folder}/{name}" if folder else name
            if not name.startswith(start) or PARTIAL in name:
                continue
            if is_folder:
                keys += self.keys(f"{key}/", after)
            elif key > after:
                keys.append(key)
        return keys

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders that this leaves empty."""
        folders: set[Path] = set()
        for key in keys:
            path = self.root / key
            with fs.tolerated():
                fs.remove_file(path)
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda f: -len(f.parts)):
            while folder != self.root:
                try:
                    os.rmdir(folder)
                except OSError as error:
                    fs.pass_external(error)
                    break
                folder = folder.parent

    def sweep(self, older_than_s: float) -> None:
        """Remove files that killed processes left half-written."""
        now = fs.now(self.root)
        for folder, _, names in os.walk(self.root):
            for name in names:
                if name.startswith(PARTIAL):
                    path = Path(folder, name)
                    with fs.tolerated():
                        if now - path.lstat().st_mtime > older_than_s:
                            fs.remove_file(path)

    def stamp(self, key: str) -> int | None:
        """Return when the folder last changed, or None if the file exists: two calls of stat."""
        path = f"{self.where}/{key}"
        try:
            changed = os.stat(path.rpartition("/")[0]).st_mtime_ns
        except OSError as error:
            fs.pass_external(error)
            return None
        return None if os.access(path, os.F_OK, follow_symlinks=False) else changed

    def lock(self, key: str) -> fs.OpenFile | None:
        """Lock a file until the returned one is closed or the process ends.

        Without the lock the writer is taken for dead, and writes its next rows elsewhere; so a failure costs nothing.
        """
        with fs.tolerated():
            file = fs.OpenFile(self.root / key, os.O_RDONLY)
            for _ in range(_FOLDER_TRIES):
                is_held = fs.try_lock(file.fd)
                if is_held:
                    return file
                if is_held is None:
                    break
                time.sleep(0.001)  # somebody is looking whether it is locked
        return None

    def is_locked(self, key: str) -> bool | None:
        """Return whether a living process holds the lock of a file."""
        try:
            return fs.is_locked(self.root / key)
        except OSError as error:
            raise fs.unreadable(error, self.root / key) from error

    @contextmanager
    def upkeep_lock(self) -> Generator[bool | None]:
        """Take the lock of the store's own metadata file, which the kernel drops when its holder dies."""
        with fs.locked(self.root / "zarr.json") as mine:
            yield mine  # None where the file system has no locks: claims are used as in an object store
