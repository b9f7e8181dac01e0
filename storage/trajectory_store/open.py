"""Making and opening stores: the options checked, the root written or read, the backend started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from trajectory_store.engine import Engine, MemmapEngine
from trajectory_store.errors import ReadOnlyError, SchemaError
from trajectory_store.format import FIRST_ELEMENTS, MAX_ELEMENTS, MAX_ROWS, WHOLE_ELEMENTS, WHOLE_ROWS
from trajectory_store.maps import Io
from trajectory_store.root import RootMeta, add_to_root, create_root, read_root, with_columns
from trajectory_store.schema import Column, Schema
from trajectory_store.writer import DURABILITIES, Durability

Mode = Literal["r", "a"]
Backend = Literal["memmap", "zarr"]


class Opened(NamedTuple):
    """A store that was found or made.

    Attributes:
        path: its folder, or a name for an object store.
        address: what opens it again in another process.
        root: what its zarr.json says.
        mode: `"r"` or `"a"`.
        durability: what an append waits for.
        engine: the backend.
    """

    path: Path
    address: Any
    root: RootMeta
    mode: Mode
    durability: Durability
    engine: Engine


class CacheOptions(NamedTuple):
    """Where the zarr backend keeps columns that were read, and how much of them."""

    folder: str | os.PathLike[str] | None
    max_bytes: int


def create_store(path: Any, schema: Schema | Sequence[Column], options: dict[str, Any], cache: CacheOptions) -> Opened:
    """Make a store; `TrajectoryStore.create` says what the options mean."""
    backend, durability = options["backend"], options["durability"]
    if backend not in ("memmap", "zarr"):
        raise SchemaError(f"backend {backend!r} is not known. Use 'memmap' or 'zarr'.")
    _check_durability(durability)
    for name in ("max_trajectories", "max_bytes", "segment_rows", "segment_elements"):
        value = options[name]
        if value is not None and value < 1:
            raise SchemaError(f"{name}={value} is too small; give at least 1, or None.")
    schema = schema if isinstance(schema, Schema) else Schema(schema)
    _bound_segments(options, schema)
    options["compress"] = options["compress"] and backend == "zarr"
    root = RootMeta(schema=schema, **options)
    if backend == "zarr":
        from trajectory_store._remote import Remote
        from trajectory_store._zarr_engine import create_remote

        remote = Remote(path)
        create_remote(remote, root)
        return Opened(Path(str(path)), path, root, "a", root.durability, _zarr_engine(remote, root, cache))
    folder = Path(path)
    create_root(folder, root)
    engine = MemmapEngine(folder, root, durability, writable=True, io=None)
    return Opened(folder, folder, root, "a", durability, engine)


def _bound_segments(options: dict[str, Any], schema: Schema) -> None:
    """Segments leave as a whole, so one may hold about an eighth of what is kept."""
    whole = options["backend"] == "zarr" or options["preallocate"]
    if options["max_trajectories"] is not None and options["segment_rows"] is None:
        most = WHOLE_ROWS if whole else MAX_ROWS
        options["segment_rows"] = min(max(512, options["max_trajectories"] // 8), most)
    if options["max_bytes"] is not None and options["segment_elements"] is None and schema.axes:
        most = WHOLE_ELEMENTS if whole else MAX_ELEMENTS
        width = max(sum(column.np_dtype.itemsize for column in columns) for columns in schema.axes.values())
        options["segment_elements"] = min(max(FIRST_ELEMENTS, options["max_bytes"] // (8 * width)), most)


def open_store(
    path: Any,
    mode: Mode,
    *,
    durability: Durability | None,
    add_columns: Sequence[Column],
    io: Io | Literal["auto"],
    cache: CacheOptions,
) -> Opened:
    """Find a store; `TrajectoryStore.open` says what the options mean."""
    if mode not in ("r", "a"):
        raise SchemaError(f"mode {mode!r} is not known. Use 'r' to read or 'a' to append.")
    if durability is not None:
        _check_durability(durability)
    if io not in ("auto", "mmap", "pread"):
        raise SchemaError(f"io {io!r} is not known. Use 'auto', 'mmap' or 'pread'.")
    if add_columns and mode != "a":
        raise ReadOnlyError("add_columns changes the store: open it with mode 'a'.")
    if not isinstance(path, (str, os.PathLike)):
        return _open_remote(path, mode, add_columns, cache)
    folder = Path(cast("str", path))
    root = read_root(folder)
    if root.backend == "zarr":
        return _open_remote(folder, mode, add_columns, cache)
    if add_columns:
        root = add_to_root(folder, add_columns)
    level = durability or root.durability
    engine = MemmapEngine(folder, root, level, writable=mode == "a", io=None if io == "auto" else io)
    if mode == "a":
        engine.clean_up()
    return Opened(folder, folder, root, mode, level, engine)


def _open_remote(target: Any, mode: Mode, add_columns: Sequence[Column], cache: CacheOptions) -> Opened:
    from trajectory_store._remote import Remote
    from trajectory_store._zarr_engine import read_remote_root

    remote = Remote(target, read_only=mode == "r")
    root = read_remote_root(remote)
    if add_columns:
        root = with_columns(root, add_columns)
        remote.put_many({"zarr.json": root.to_json()})
    engine = _zarr_engine(remote, root, cache)
    if mode == "a":
        engine.clean_up()
    return Opened(Path(str(target)), target, root, mode, root.durability, engine)


def _zarr_engine(remote: Any, root: RootMeta, cache: CacheOptions) -> Engine:
    from trajectory_store._zarr_engine import ZarrEngine

    folder = None if cache.folder is None else Path(cache.folder)
    return ZarrEngine(remote, root, cache_dir=folder, cache_bytes=cache.max_bytes)


def _check_durability(durability: str) -> None:
    if durability not in DURABILITIES:
        raise SchemaError(f"durability {durability!r} is not known. Use one of {', '.join(DURABILITIES)}.")
