"""Objects in any Zarr store: concurrent gets and puts, put-if-absent, and the codec of a column."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.errors import CorruptionError, ReadFailedError, StoreError, WriteFailedError
from trajectory_store.format import array_json
from trajectory_store.record import crc32c
from trajectory_store.schema import Fill

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

IN_FLIGHT = 64
COMMIT_LEVEL = 1
"""zstd level of a commit; tests/benchmarks/bench_store_codec.py is why."""
SEALED_LEVEL = 3
"""zstd level of a compacted segment."""
FETCH = 256
WORTH = 0.85
"""A chunk that zstd does not make smaller than this stays as it is: reading it back is then a copy."""
T = TypeVar("T")
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class _Codec(Protocol):
    def encode(self, data: Any) -> Any: ...
    def decode(self, data: Any, out: Any = None) -> Any: ...


def is_zarr_store(value: object) -> bool:
    """Whether a value is a zarr `Store`; does not import zarr where it is not loaded yet."""
    return any(c.__module__.startswith("zarr.") and c.__name__ == "Store" for c in type(value).__mro__)


class Remote:
    """A zarr store, used synchronously.

    The objects of a local folder are its files, laid out as zarr's `LocalStore` does it; they are read and put
    directly, which takes a tenth of the time of a request through an event loop. zarr itself is imported when
    something else needs it.

    Args:
        target: a zarr `Store`, or the path of a local folder.
        read_only: open a folder without creating it.
    """

    def __init__(self, target: Any, *, read_only: bool = False) -> None:
        self._store: ZarrStore | None = None
        self._folder: Path | None = None
        self._read_only = read_only
        if not is_zarr_store(target):
            self._folder = Path(target)
            return
        self._store = target
        kind = cast("object", target).__class__
        if kind.__module__.startswith("zarr.storage") and kind.__name__ == "LocalStore":
            self._folder, self._read_only = Path(target.root), bool(target.read_only)

    @property
    def store(self) -> ZarrStore:
        """The zarr store.

        Raises:
            StoreError: zarr is not installed.
        """
        if self._store is None:
            try:
                from zarr.storage import LocalStore
            except ImportError as error:
                raise StoreError(
                    "backend='zarr' needs the package zarr. Install it with `pip install 'zarr>=3.1'`."
                ) from error
            self._store = LocalStore(cast("Path", self._folder), read_only=self._read_only)
        return self._store

    @property
    def where(self) -> str:
        """The address, for messages."""
        return str(self._folder if self._folder is not None else self._store)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine on zarr's event loop."""
        import zarr.core.sync

        return zarr.core.sync.sync(work)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Get objects at the same time; None for those that are not there.

        Raises:
            ReadFailedError: the store failed.
        """
        try:
            if self._folder is not None:
                return _read_files(self._folder, keys)
            return self.run(self._get_all(self.store, keys))
        except _ABSENT:
            return [None] * len(keys)
        except StoreError:
            raise
        except Exception as error:
            raise ReadFailedError(
                getattr(error, "errno", None), f"reading {keys[0]} failed: {error}", self.where
            ) from error

    async def _get_all(self, store: ZarrStore, keys: Sequence[str]) -> list[bytes | None]:
        from zarr.core.buffer import default_buffer_prototype

        gate, prototype = asyncio.Semaphore(IN_FLIGHT), default_buffer_prototype()

        async def one(key: str) -> bytes | None:
            async with gate:
                found = await store.get(key, prototype)
                return None if found is None else found.to_bytes()

        return list(await asyncio.gather(*(one(k) for k in keys)))

    def stream(self, keys: Sequence[str]) -> Iterator[bytes | memoryview | None]:
        """Get objects one after the other, many on their way at the same time; each is valid until the next.

        Raises:
            ReadFailedError: the store failed.
        """
        if self._folder is None:
            for first in range(0, len(keys), FETCH):
                yield from self.get_many(keys[first : first + FETCH])
            return
        try:
            yield from _stream_files(self._folder, keys)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise ReadFailedError(error.errno, f"reading {keys[0]} failed: {error}", self.where) from error

    def get(self, key: str) -> bytes | None:
        """Get one object."""
        return self.get_many([key])[0]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """Put objects at the same time.

        Raises:
            WriteFailedError: the store failed; what was acknowledged before is safe.
        """
        folder = self._writable_folder()
        with self._failing("putting objects"):
            if folder is None:
                self.run(self._put_all(self.store, items))
                return
            for key, data in items.items():
                _put_file(folder / key, data, absent=False)

    async def _put_all(self, store: ZarrStore, items: Mapping[str, bytes]) -> None:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(key: str, data: bytes) -> None:
            async with gate:
                await store.set(key, self._buffer(data))

        await asyncio.gather(*(one(k, v) for k, v in items.items()))

    def _buffer(self, data: bytes) -> Any:
        from zarr.core.buffer import default_buffer_prototype

        return default_buffer_prototype().buffer.from_bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Put an object unless there is one with this key."""
        folder = self._writable_folder()
        with self._failing(f"putting {key}"):
            if folder is None:
                self.run(self.store.set_if_not_exists(key, self._buffer(data)))
            else:
                _put_file(folder / key, data, absent=True)

    def _writable_folder(self) -> Path | None:
        """The folder to put files into; a store that refuses puts is left to say so itself."""
        return None if self._read_only else self._folder

    def claim(self, key: str, data: bytes) -> bool:
        """Put an object that no other process has put; returns whether it is ours."""
        self.put_if_absent(key, data)
        return self.get(key) == data

    def children(self, prefix: str) -> list[str]:
        """The names directly below a prefix."""

        async def every() -> list[str]:
            return [name async for name in self.store.list_dir(prefix)]

        return self.run(every())

    def delete_folders(self, prefixes: Sequence[str]) -> None:
        """Delete every object below some prefixes, at the same time."""
        store, gate = self.store, asyncio.Semaphore(IN_FLIGHT)

        async def one(prefix: str) -> None:
            async with gate:
                await store.delete_dir(prefix)

        async def every() -> None:
            await asyncio.gather(*(one(p) for p in prefixes))

        with self._failing("deleting"):
            self.run(every())

    @contextmanager
    def _failing(self, doing: str) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise WriteFailedError(
                getattr(error, "errno", None),
                f"{doing} failed: {error}. Every row that was acknowledged before is safe; these rows are "
                "not in the store. Check the object store, then append again",
                self.where,
            ) from error


def _open_files(root: str, keys: Sequence[str], files: list[int]) -> None:
    """Open files, -1 for one that is not there, and ask the disk for all before the first is waited for."""
    for key in keys:
        try:
            files.append(os.open(f"{root}/{key}", os.O_RDONLY | os.O_CLOEXEC))
        except _ABSENT:
            files.append(-1)
            continue
        os.posix_fadvise(files[-1], 0, 0, os.POSIX_FADV_WILLNEED)


def _close_files(files: list[int]) -> None:
    for fd in files:
        if fd >= 0:
            os.close(fd)


def _read_files(folder: Path, keys: Sequence[str]) -> list[bytes | None]:
    out: list[bytes | None] = []
    for first in range(0, len(keys), IN_FLIGHT):
        files: list[int] = []
        try:
            _open_files(str(folder), keys[first : first + IN_FLIGHT], files)
            out += [None if fd < 0 else _read_all(fd) for fd in files]
        finally:
            _close_files(files)
    return out


def _stream_files(folder: Path, keys: Sequence[str]) -> Iterator[memoryview | None]:
    """The contents of files one after the other, in memory that the next one reuses."""
    memory = bytearray(1 << 16)
    for first in range(0, len(keys), IN_FLIGHT):
        files: list[int] = []
        try:
            _open_files(str(folder), keys[first : first + IN_FLIGHT], files)
            for fd in files:
                if fd < 0:
                    yield None
                    continue
                size = os.fstat(fd).st_size
                if size > len(memory):
                    memory = bytearray(2 * size)
                view, done = memoryview(memory)[:size], 0
                while done < size and (count := os.readv(fd, [view[done:]])):
                    done += count
                yield view[:done]
        finally:
            _close_files(files)


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _put_file(path: Path, data: bytes, *, absent: bool) -> None:
    """Put a file in one step: a reader sees all of it or nothing."""
    temporary = f"{path}.{fs.token(8)}.partial"
    try:
        try:
            fs.write_file(Path(temporary), data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            fs.write_file(Path(temporary), data)
        if not absent:
            os.replace(temporary, path)
            return
        with suppress(FileExistsError):
            os.link(temporary, path)
        os.unlink(temporary)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def zarr_module() -> Any:
    """The zarr package, whose functions have no complete types."""
    return importlib.import_module("zarr")


@functools.cache
def zstd(level: int = COMMIT_LEVEL) -> _Codec:
    """The codec; decoding does not depend on the level."""
    module: Any = importlib.import_module("numcodecs.zstd")
    return cast("_Codec", module.Zstd(level=level))


def encode(values: npt.NDArray[Any], *, compress: bool) -> tuple[bytes, bool]:
    """The chunk of a 1-D array, and whether it is compressed."""
    if compress:
        packed = bytes(zstd().encode(values))
        if len(packed) <= WORTH * values.nbytes:
            return packed, True
    return values.tobytes(), False


def decode(raw: bytes | memoryview, scratch: npt.NDArray[np.uint8], crc: int, *, key: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a chunk's values after checking them: the object's own, or unpacked into `scratch`.

    Args:
        raw: the object. One as long as its values holds them as they are; any other is a zstd frame.
        scratch: `[n]` uint8, as long as the values.
        crc: the CRC32C that the commit gives.
        key: its name, for messages.

    Raises:
        CorruptionError: the chunk does not hold what was committed.
    """
    if len(raw) == len(scratch):
        plain = np.frombuffer(raw, np.uint8)
        if crc32c(plain) == crc:
            return plain
    try:
        zstd().decode(raw, scratch)
    except (RuntimeError, ValueError) as error:
        raise CorruptionError(f"object {key} is damaged: it cannot be decompressed ({error}).") from None
    if crc32c(scratch) != crc:
        raise CorruptionError(
            f"object {key} is damaged: its {len(scratch)} bytes do not have the checksum of its commit. Restore "
            "it from a copy, or leave its trajectories out (verify lists them)."
        )
    return scratch


def chunk_doc(dtype: np.dtype[Any], count: int, dimension: str, fill: Fill, *, compress: bool) -> bytes:
    """The zarr.json of an array of exactly `count` values in one chunk."""
    level = COMMIT_LEVEL if compress else None
    if not count:
        return array_json([0], dtype, [dimension], fill, zstd=level)
    key = (dtype.str, dimension, repr(fill), level)
    found = _DOCS.get(key)
    if found is None:  # writing JSON takes longer than putting the object
        found = _DOCS[key] = array_json([_COUNT], dtype, [dimension], fill, zstd=level)
    return found.replace(str(_COUNT).encode(), str(count).encode())


_COUNT = 987_654_321_987_654
_DOCS: dict[tuple[str, str, str, int | None], bytes] = {}
