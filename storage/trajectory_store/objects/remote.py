"""Buckets beyond a local folder: obstore's stores, and any zarr `Store`."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from trajectory_store import extras, fork_safety
from trajectory_store.bucket import Bucket, FolderBucket, Traffic, Transient, is_folder, persist
from trajectory_store.errors import ReadFailedError, SchemaError, StoreError, WriteFailedError

IN_FLIGHT = 64
KEYS_PER_REQUEST = 1000
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_NO_BUCKET = "status code: 404"
"""Text in the error of a request if the bucket does not exist; a missing object causes a different error."""
T = TypeVar("T")
R = TypeVar("R")


class Tagged(NamedTuple):
    """An object and the tag of its content; other content has another tag."""

    data: bytes
    tag: str


def open_bucket(target: Any, *, durable: bool) -> Bucket:
    """Return the bucket that a path, a URL, an obstore store or a zarr `Store` names."""
    if is_folder(target):
        return FolderBucket(Path(target), durable=durable)
    if isinstance(target, str):
        scheme, _, rest = target.partition("://")
        if scheme == "file":
            return FolderBucket(Path("/" + rest.lstrip("/")), durable=durable)
        if scheme not in SCHEMES:
            raise SchemaError(
                f"{target} is not a supported URL: a URL must begin with one of {', '.join(SCHEMES)}. For a store in "
                "memory, pass obstore.store.MemoryStore(); for a folder, pass its path."
            )
        return ObstoreBucket(_from_url(target), target)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(cast("object", target)).__mro__}
    if any(name.startswith("zarr.") and name.endswith(".Store") for name in names):
        if any(name.endswith(".LocalStore") for name in names):
            return FolderBucket(Path(target.root), durable=durable)
        if any(name.endswith(".ObjectStore") for name in names):
            return ObstoreBucket(target.store, str(target))
        return ZarrBucket(target)
    if any(name.startswith("obstore.") for name in names):
        return ObstoreBucket(target, str(target))
    raise SchemaError(f"{target!r} is not a path, a URL, an obstore store or a zarr Store.")


def _from_url(url: str) -> Any:
    stores = extras.load("obstore.store", url)
    return stores.from_url(url, retry_config={"max_retries": 0})  # `persist` repeats, and every try is counted


class _Parallel(Bucket):
    """Requests that take a while, several at a time."""

    _first_process: ClassVar[list[int]] = []
    """The process that first used an object store, if any: it has the clients' threads, and a fork does not."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def _check_process(self) -> None:
        """Reject a request that would wait for ever for threads that this fork does not have."""
        if os.getpid() not in self._first_process:
            if self._first_process:
                raise StoreError(
                    f"process {os.getpid()} was forked from process {self._first_process[0]} after that process had "
                    f"used an object store, so the forked process cannot use one ({self.where}). Start such processes "
                    "with multiprocessing.get_context('spawn'), or fork before the first store is opened."
                )
            self._first_process.append(os.getpid())

    def _each(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        self._check_process()
        if len(items) < 2:
            return [call(item) for item in items]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="trajectory-objects")
        return list(self._pool.map(call, items))

    def beside(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Make two kinds of requests at the same time."""
        with ThreadPoolExecutor(1, thread_name_prefix="trajectory-catalog") as pool:
            first_reply = pool.submit(first)
            second()
        first_reply.result()

    def _again(self, call: Callable[[], R], what: str) -> R:
        """Make a request, and repeat it while it fails; it must be safe to repeat."""
        try:
            return persist(call, f"{what} at {self.where}")
        except Transient as error:
            raise ReadFailedError(None, f"{what} failed: {error}", self.where) from error


class ObstoreBucket(_Parallel):
    """Objects behind obstore: S3, Google Cloud Storage, Azure, memory."""

    def __init__(self, store: Any, where: str) -> None:
        super().__init__()
        self.store = store
        self.where = where
        self._counting = threading.RLock()
        fork_safety.guard(self, 5, self._counting)
        self._obs: Any = importlib.import_module("obstore")
        self._errors: Any = importlib.import_module("obstore.exceptions")

    def _call(self, call: Callable[[], R]) -> R:
        self._check_process()
        try:
            return call()
        except FileNotFoundError:
            raise
        except self._errors.NotFoundError as error:
            raise FileNotFoundError(str(error)) from None
        except (self._errors.BaseError, OSError) as error:
            message = str(error).partition("\n")[0]
            refused = isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError))
            if refused or _NO_BUCKET in message:
                raise WriteFailedError(
                    None,
                    f"the object store rejected the request: {message}. Check the address and the credentials",
                    self.where,
                ) from error
            raise Transient(message) from error

    def put_new(self, key: str, data: bytes) -> bool:
        """Put an object unless one with this key exists; a client that repeats may find its own."""
        self._sends(data)
        try:
            self._call(lambda: self._obs.put(self.store, key, data, mode="create", use_multipart=False))
        except Transient as error:
            if isinstance(error.__cause__, self._errors.AlreadyExistsError):
                return False
            raise
        return True

    def put(self, key: str, data: bytes) -> None:
        """Put an object under a key that no other process uses."""

        def once() -> None:
            self._sends(data)
            self._call(lambda: self._obs.put(self.store, key, data))

        self._again(once, f"putting {key}")

    def tagged(self, key: str, tag: str | None = None) -> Tagged | None:
        """Get an object with its tag."""
        options = {} if tag is None else {"if_none_match": tag}

        def once() -> Tagged | None:
            self._count(gets=1)
            try:
                reply = self._obs.get(self.store, key, options=options)
                return Tagged(self._received(bytes(reply.bytes())), str(reply.meta["e_tag"]))
            except self._errors.NotModifiedError:
                return None

        try:
            return self._again(lambda: self._call(once), f"reading {key}")
        except FileNotFoundError:
            return None

    def swap(self, key: str, data: bytes, tag: str | None) -> str | None:
        """Replace an object if it still has a tag; return the new tag, or None if another process was first.

        A failed request may have taken effect, or may do so later; the object's content then shows which call wrote
        it. So no other call may write the same bytes.
        """
        mode: Any = "create" if tag is None else {"e_tag": tag}

        def once() -> str | None:
            try:
                self._sends(data)
                done = self._call(lambda: self._obs.put(self.store, key, data, mode=mode, use_multipart=False))
                return str(done["e_tag"])
            except (Transient, FileNotFoundError) as error:
                stored = self.tagged(key)
                if stored is not None and stored.data == data:
                    return stored.tag
                if (None if stored is None else stored.tag) != tag:
                    return None
                raise Transient(str(error).partition("\n")[0]) from error

        try:
            return persist(once, f"replacing {key} at {self.where}")
        except (Transient, ReadFailedError) as error:
            raise WriteFailedError(
                None, f"replacing {key} failed: {error}. It is unknown whether the object was replaced", self.where
            ) from error

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Get some ranges of bytes of one object, and nothing else of it."""

        def once() -> list[bytes]:
            self._count(gets=len(spans))
            starts, ends = ([span[at] for span in spans] for at in (0, 1))
            parts = self._obs.get_ranges(self.store, key, starts=starts, ends=ends, coalesce=0)
            return [self._received(bytes(part)) for part in parts]

        return self._again(lambda: self._call(once), f"reading {key}")

    def _get(self, key: str) -> bytes:
        self._count(gets=1)
        return self._received(self._call(lambda: bytes(self._obs.get(self.store, key).bytes())))

    def _tail(self, key: str, size: int) -> tuple[bytes, int]:
        self._count(gets=1)

        def get_with_size() -> tuple[bytes, int]:
            reply = self._obs.get(self.store, key, options={"range": {"suffix": size}})
            return bytes(reply.bytes()), int(reply.meta["size"])

        data, whole = self._call(get_with_size)
        return self._received(data), whole

    def _count(self, **more: int) -> None:
        with self._counting:
            self.traffic += Traffic(**more)

    def _sends(self, data: bytes) -> None:
        self._count(puts=1, sent=len(data))

    def _received(self, data: bytes) -> bytes:
        self._count(received=len(data))
        return data

    def keys(self, prefix: str, after: str = "") -> list[str]:
        """List keys; the store is asked to begin the listing after `after`."""
        return sorted(self.tags(prefix, after))

    def tags(self, prefix: str, after: str = "") -> dict[str, str]:
        """List keys with the tags of their contents."""

        def all_pages() -> dict[str, str]:
            self._count(lists=1)
            pages = self._obs.list(self.store, prefix.rpartition("/")[0] or None, offset=after or None)
            tags = {str(item["path"]): str(item["e_tag"]) for page in pages for item in page}
            self._count(lists=len(tags) // KEYS_PER_REQUEST)
            return tags

        tags = self._again(lambda: self._call(all_pages), f"listing {prefix}")
        return {key: tag for key, tag in tags.items() if key.startswith(prefix) and key > after}

    def size(self) -> int:
        """Return the total size of all objects in bytes."""

        def all_pages() -> list[int]:
            return [int(item["size"]) for page in self._obs.list(self.store) for item in page]

        sizes = self._again(lambda: self._call(all_pages), "listing all objects")
        self._count(lists=1 + len(sizes) // KEYS_PER_REQUEST)
        return sum(sizes)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""

        def delete_key(key: str) -> None:
            self._count(deletes=1)
            try:
                self._again(lambda: self._call(lambda: self._obs.delete(self.store, key)), f"deleting {key}")
            except (FileNotFoundError, ReadFailedError):
                return

        self._each(delete_key, list(keys))


def _prototype() -> Any:
    return importlib.import_module("zarr.core.buffer").default_buffer_prototype()


class ZarrBucket(_Parallel):
    """Objects in any zarr `Store`; put-if-absent is as safe as that store makes it."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store
        self.where = str(store)

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            self._check_process()
            return importlib.import_module("zarr.core.sync").sync(work)
        except (StoreError, FileNotFoundError):
            raise
        except (OSError, ValueError, RuntimeError) as error:
            if getattr(self.store, "read_only", False):
                raise WriteFailedError(None, f"the store is open for reading only: {error}", self.where) from error
            raise Transient(str(error).partition("\n")[0]) from error
        finally:
            work.close()  # where it never began

    def _buffer(self, data: bytes) -> Any:
        return _prototype().buffer.from_bytes(data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Put an object unless one exists; return whether the object there has these bytes."""
        self._run(self.store.set_if_not_exists(key, self._buffer(data)))
        return self._get(key) == data

    def put(self, key: str, data: bytes) -> None:
        """Put an object under a key that no other process uses."""
        self._again(lambda: self._run(self.store.set(key, self._buffer(data))), f"putting {key}")

    def _get(self, key: str) -> bytes:
        buffer = self._run(self.store.get(key, _prototype()))
        if buffer is None:
            raise FileNotFoundError(key)
        return buffer.to_bytes()

    def _tail(self, key: str, size: int) -> tuple[bytes, int]:
        whole = self._get(key)
        return whole[-size:], len(whole)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Get some ranges of bytes of one object, which is fetched whole, because most of it is needed."""
        raw = self.get(key)
        if raw is None:
            raise FileNotFoundError(key)
        return [raw[start:stop] for start, stop in spans]

    def keys(self, prefix: str, after: str = "") -> list[str]:
        """List keys."""

        async def every() -> list[str]:
            return [key async for key in self.store.list_prefix(prefix)]

        keys = self._again(lambda: self._run(every()), f"listing {prefix}")
        return sorted(key for key in keys if key > after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        for key in keys:
            self._again(lambda key=key: self._run(self.store.delete(key)), f"deleting {key}")
