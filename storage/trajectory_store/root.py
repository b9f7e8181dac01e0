"""The root of a store: everything that is fixed when it is created."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trajectory_store import fs
from trajectory_store.bucket import Bucket, path_in_use
from trajectory_store.catalog_log import CATALOG, State, catalog_json, put_first
from trajectory_store.errors import CorruptionError, NotAStoreError, StoreError, StoreNotFoundError
from trajectory_store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    KEY,
    Durability,
    group_json,
    read_intact,
    time_after,
    with_crc,
)
from trajectory_store.schema import Schema

MAX_ROWS = 1 << 19
MAX_ELEMENTS = 1 << 26
"""The maximum size of segments on a local disk. Reading a batch takes longer if its rows are in more segments; a plain
Zarr reader reads each array of a segment completely.
"""

WHOLE_ROWS = 1 << 16
WHOLE_ELEMENTS = 1 << 24
"""The same for segments that are completely reserved on the disk or completely in memory."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """The content of a store's `zarr.json`; it never changes."""

    schema: Schema
    durability: Durability = "process"
    max_trajectories: int | None = None
    max_bytes: int | None = None
    segment_rows: int | None = None
    segment_elements: int | None = None
    preallocate: bool = False
    backend: Literal["memmap", "zarr"] = "memmap"
    compress: bool = False
    uuid: str = field(default_factory=lambda: fs.token(16))
    created_ns: int = field(default_factory=lambda: time_after(0))
    version: int = FORMAT_VERSION

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the store's group."""
        attributes: dict[str, Any] = {"format": FORMAT_NAME, "version": self.version, "role": "store"}
        attributes.update({f.name: getattr(self, f.name) for f in fields(self)}, schema=self.schema.to_json())
        return attributes

    def to_json(self) -> bytes:
        """Return the content of the store's zarr.json."""
        return group_json(with_crc(self.attributes()))

    def catalog_json(self) -> bytes:
        """Return the content of the catalog's zarr.json, which has a copy of all this."""
        return catalog_json(with_crc(self.attributes()))

    @classmethod
    def from_json(cls, where: str, *copies: bytes | None) -> Root:
        """Parse a store's zarr.json, or else the copy of it."""
        attributes = read_intact(copies, where, "store")
        try:
            attributes_by_name: dict[str, Any] = {f.name: attributes[f.name] for f in fields(cls)}
            attributes_by_name["schema"] = Schema.from_json(attributes_by_name["schema"])
            return cls(**attributes_by_name)
        except (KeyError, RecursionError) as error:
            raise CorruptionError(f"{where}: the attribute {error} is missing.") from None

    @property
    def largest(self) -> tuple[int, int]:
        """The number of rows, and of elements per axis, of the largest segments."""
        whole = self.preallocate or self.backend == "zarr"
        return (WHOLE_ROWS, WHOLE_ELEMENTS) if whole else (MAX_ROWS, MAX_ELEMENTS)

    @property
    def first_state(self) -> State:
        """The first record of the catalog; it follows from the root, so every process puts the same bytes."""
        return State(0, self.uuid[:16], "", self.uuid, self.created_ns, 0, self.schema)


def create_root(bucket: Bucket, root: Root) -> None:
    """Put the files of a new store; the process whose root is put creates it."""

    def fill(bucket: Bucket) -> None:
        if not bucket.put_once(KEY, root.to_json()):
            raise path_in_use(bucket.where)
        put_first(bucket, root.catalog_json(), root.first_state)

    bucket.make(fill)


def _is_of(bucket: Bucket, root: Root) -> bool:
    """Return whether a record of the catalog is of the store that this is the root of."""
    keys = [key for key in bucket.keys(f"{CATALOG}/") if not key.endswith(KEY)]
    return any(raw is not None and f'"store":"{root.uuid}"'.encode() in raw for raw in bucket.get_many(keys))


def read_root(bucket: Bucket) -> Root:
    """Read the root of a store."""
    keys, where = (KEY, f"{CATALOG}/{KEY}"), f"{bucket.where}/{KEY}"
    copies = bucket.get_many(keys)
    if copies == [None, None] and not bucket.is_empty():
        copies = bucket.get_many(keys)  # it may have been created between the two requests
        if copies == [None, None]:
            raise NotAStoreError(
                f"{bucket.where} is not a trajectory store: it has no zarr.json. Pass the folder that "
                "TrajectoryStore.create created."
            )
    if copies != [None, None]:
        root = Root.from_json(where, *copies)
        with suppress(StoreError):
            copy = Root.from_json(where, copies[1])
            if copy.uuid != root.uuid and _is_of(bucket, copy) and not _is_of(bucket, root):
                return copy  # the first is a file of another store
        return root
    raise StoreNotFoundError(
        f"there is no trajectory store at {bucket.where}. Check the path, or create one with "
        "TrajectoryStore.create(path, schema)."
    )
