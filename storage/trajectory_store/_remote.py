"""Objects in any Zarr store: concurrent gets and puts, put-if-absent, and the codec of a column."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store._errors import CorruptionError, ReadFailedError, StoreError, WriteFailedError
from trajectory_store._layout import array_json
from trajectory_store._record import crc32c
from trajectory_store._schema import Fill

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

IN_FLIGHT = 64
ZSTD_LEVEL = 3
T = TypeVar("T")


class _Codec(Protocol):
    def encode(self, data: Any) -> Any: ...
    def decode(self, data: Any) -> Any: ...


def is_zarr_store(value: object) -> bool:
    """Whether a value is a zarr `Store`; does not import zarr where it is not loaded yet."""
    return any(c.__module__.startswith("zarr.") and c.__name__ == "Store" for c in type(value).__mro__)


class Remote:
    """A zarr store, used synchronously.

    Args:
        target: a zarr `Store`, or the path of a local folder.
        read_only: open a folder without creating it.

    Raises:
        StoreError: zarr is not installed.
    """

    def __init__(self, target: Any, *, read_only: bool = False) -> None:
        try:
            import zarr.core.sync
            from zarr.core.buffer import default_buffer_prototype
            from zarr.storage import LocalStore
        except ImportError as error:
            raise StoreError(
                "backend='zarr' needs the package zarr. Install it with `pip install 'zarr>=3.1'`."
            ) from error
        self._run = zarr.core.sync.sync
        self._prototype = default_buffer_prototype()
        if not is_zarr_store(target):
            target = LocalStore(Path(target), read_only=read_only)
        self.store: ZarrStore = target

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine on zarr's event loop."""
        return self._run(work)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Get objects at the same time; None for those that are not there.

        Raises:
            ReadFailedError: the store failed.
        """
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(key: str) -> bytes | None:
            async with gate:
                found = await self.store.get(key, self._prototype)
                return None if found is None else found.to_bytes()

        async def every() -> list[bytes | None]:
            return list(await asyncio.gather(*(one(k) for k in keys)))

        try:
            return self.run(every())
        except (FileNotFoundError, NotADirectoryError):
            return [None] * len(keys)
        except StoreError:
            raise
        except Exception as error:
            raise ReadFailedError(
                getattr(error, "errno", None), f"reading {keys[0]} failed: {error}", str(self.store)
            ) from error

    def get(self, key: str) -> bytes | None:
        """Get one object."""
        return self.get_many([key])[0]

    def put_many(self, items: Mapping[str, bytes]) -> None:
        """Put objects at the same time.

        Raises:
            WriteFailedError: the store failed; what was acknowledged before is safe.
        """
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(key: str, data: bytes) -> None:
            async with gate:
                await self.store.set(key, self._prototype.buffer.from_bytes(data))

        async def every() -> None:
            await asyncio.gather(*(one(k, v) for k, v in items.items()))

        self._writing(every(), "putting objects")

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Put an object unless there is one with this key."""
        buffer = self._prototype.buffer.from_bytes(data)
        self._writing(self.store.set_if_not_exists(key, buffer), f"putting {key}")

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
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(prefix: str) -> None:
            async with gate:
                await self.store.delete_dir(prefix)

        async def every() -> None:
            await asyncio.gather(*(one(p) for p in prefixes))

        self._writing(every(), "deleting")

    def _writing(self, work: Coroutine[Any, Any, Any], doing: str) -> None:
        try:
            self.run(work)
        except StoreError:
            raise
        except Exception as error:
            raise WriteFailedError(
                getattr(error, "errno", None),
                f"{doing} failed: {error}. Every row that was acknowledged before is safe; these rows are "
                "not in the store. Check the object store, then append again",
                str(self.store),
            ) from error


def zarr_module() -> Any:
    """The zarr package, whose functions have no complete types."""
    return importlib.import_module("zarr")


def _zstd() -> _Codec:
    module: Any = importlib.import_module("numcodecs.zstd")
    return cast("_Codec", module.Zstd(level=ZSTD_LEVEL))


def encode(values: npt.NDArray[Any], *, compress: bool) -> bytes:
    """The chunk of a 1-D array."""
    raw = values.tobytes()
    return bytes(_zstd().encode(raw)) if compress else raw


def decode(raw: bytes, dtype: np.dtype[Any], count: int, crc: int, *, compress: bool, key: str) -> npt.NDArray[Any]:
    """Return the values of a chunk after checking them.

    Raises:
        CorruptionError: the chunk does not hold what was committed.
    """
    try:
        data = bytes(_zstd().decode(raw)) if compress else raw
    except (RuntimeError, ValueError) as error:
        raise CorruptionError(f"object {key} is damaged: it cannot be decompressed ({error}).") from None
    if len(data) != count * dtype.itemsize or crc32c(data) != crc:
        raise CorruptionError(
            f"object {key} is damaged: its {len(data)} bytes do not have the checksum of its commit. Restore "
            "it from a copy, or leave its trajectories out (verify lists them)."
        )
    return np.frombuffer(data, dtype)


def chunk_doc(dtype: np.dtype[Any], count: int, dimension: str, fill: Fill, *, compress: bool) -> bytes:
    """The zarr.json of an array of exactly `count` values in one chunk."""
    return array_json([count], dtype, [dimension], fill, zstd=ZSTD_LEVEL if compress else None)


def joined(parts: Iterable[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Concatenate arrays, none at all included."""
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
