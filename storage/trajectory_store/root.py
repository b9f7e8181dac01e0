"""The root folder of a store: creating it, and reading what it says."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trajectory_store import fs
from trajectory_store.errors import (
    CorruptionError,
    NotAStoreError,
    SchemaError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from trajectory_store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    array_json,
    group_json,
    read_attributes,
)
from trajectory_store.local import REMOVED, REMOVED_CAP, removed_path
from trajectory_store.record import RECORD_SIZE
from trajectory_store.schema import Column, Schema
from trajectory_store.writer import Durability


@dataclass(frozen=True)
class RootMeta:
    """What the `zarr.json` of a store says.

    Attributes:
        schema: the columns that a new segment gets.
        durability: the default of its writers.
        max_trajectories: rows kept, or None.
        max_bytes: disk space kept, or None.
        segment_rows: rows of a full segment, or None for the growing default.
        segment_elements: elements per axis of a full segment, or None.
        preallocate: reserve blocks when a segment is made.
        backend: `memmap` for raw segments, `zarr` for a group per commit.
        compress: zstd for the chunks of the zarr backend.
    """

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
    salt: int = field(default_factory=lambda: fs.random_salt())
    created_ns: int = field(default_factory=time.time_ns)

    def to_json(self) -> bytes:
        """The content of the store's zarr.json."""
        attributes: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "role": "store",
            "schema": self.schema.to_json(),
        }
        for name in _PLAIN:
            attributes[name] = getattr(self, name)
        return group_json(attributes)

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], path: Path) -> RootMeta:
        """Rebuild from the attributes of zarr.json."""
        try:
            plain = {name: attributes[name] for name in _PLAIN}
            return cls(schema=Schema.from_json(attributes["schema"]), **plain)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptionError(f"{path}: the attribute {error} is missing or damaged.") from None


_PLAIN = (
    *("durability", "max_trajectories", "max_bytes", "segment_rows", "segment_elements"),
    *("backend", "compress"),
    *("preallocate", "uuid", "salt", "created_ns"),
)


def create_root(path: Path, meta: RootMeta) -> None:
    """Make the folder of a new store; it appears whole or not at all.

    Raises:
        StoreExistsError: the path holds something.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise _taken(path)
    temporary = path.parent / f".{path.name}.new-{fs.token(6)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (temporary, temporary / REMOVED, temporary / REMOVED / "c"):
            fs.mkdir(folder)
        fs.mkdir(temporary / REMOVED / "c" / "0")
        shape = [REMOVED_CAP, RECORD_SIZE]
        doc = array_json(shape, np.dtype("uint8"), ["removals", "bytes"])
        fs.write_file(temporary / REMOVED / "zarr.json", doc)
        fs.create_sized(removed_path(temporary), REMOVED_CAP * RECORD_SIZE, preallocate=False)
        fs.write_file(temporary / "zarr.json", meta.to_json())
        if meta.durability != "process":
            fs.sync_tree(temporary)
        try:
            fs.rename(temporary, path)
        except OSError as error:
            if path.exists():
                raise _taken(path) from error
            raise
        if meta.durability != "process":
            fs.sync_path(path.parent)
    except OSError as error:
        fs.remove_tree(temporary)
        if isinstance(error, StoreError):
            raise
        raise fs.failed(error, path, "creating the store") from error


def add_to_root(path: Path, columns: Sequence[Column]) -> RootMeta:
    """Add columns to the schema that new segments get; columns that are there already are checked."""
    read_root(path)
    with fs.locked(removed_path(path), wait=True):
        before = read_root(path)
        root = with_columns(before, columns)
        if root is not before:
            rewrite_root(path, root)
        return root


def with_columns(root: RootMeta, columns: Sequence[Column]) -> RootMeta:
    """The metadata with more columns; the same object where all of them are there already."""
    new: list[Column] = []
    for column in columns:
        if column.name not in root.schema:
            new.append(column)
        elif root.schema[column.name].to_json() != column.to_json():
            raise SchemaError(
                f"the store has a column '{column.name}' already, defined as {root.schema[column.name]}. "
                "Choose another name."
            )
    return replace(root, schema=root.schema.with_columns(new)) if new else root


def rewrite_root(path: Path, meta: RootMeta) -> None:
    """Replace the store's zarr.json in one step."""
    temporary = path / f".zarr.json.{os.getpid()}-{fs.token(4)}"
    try:
        fs.write_file(temporary, meta.to_json())
        fs.sync_path(temporary)
        fs.rename(temporary, path / "zarr.json")
        fs.sync_path(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise fs.failed(error, path, "rewriting the store's metadata") from error


def read_root(path: Path) -> RootMeta:
    """Read what a store says about itself.

    Raises:
        StoreNotFoundError: nothing is at the path.
        NotAStoreError: something else is at the path.
        FormatVersionError: another version of the format wrote it.
    """
    if not path.exists():
        raise StoreNotFoundError(
            f"there is no trajectory store at {path}. Check the path, or make one with "
            "TrajectoryStore.create(path, schema)."
        )
    try:
        raw = (path / "zarr.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotAStoreError(
            f"{path} holds no trajectory store: it has no zarr.json. Give the folder that TrajectoryStore.create made."
        ) from None
    attributes = read_attributes(raw, path / "zarr.json", "store")
    return RootMeta.from_attributes(attributes, path / "zarr.json")


def _taken(path: Path) -> StoreExistsError:
    return StoreExistsError(
        f"{path} exists and is not empty. Open it with TrajectoryStore.open(path, mode='a'), or choose another path."
    )
