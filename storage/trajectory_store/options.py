"""The arguments of `create` and `open`: checked, and converted to a bucket and a medium."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np

from trajectory_store.backend import Medium
from trajectory_store.bucket import Bucket, FolderBucket, is_folder
from trajectory_store.errors import NotAStoreError, SchemaError
from trajectory_store.file_access import Io
from trajectory_store.format import DURABILITIES
from trajectory_store.local_backend import Memmap
from trajectory_store.root import Root
from trajectory_store.writer import FIRST_ELEMENTS

Backend = Literal["memmap", "zarr"]


_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{binary}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for binary, base in (("", 1000), ("I", 1024))
}


def size_of(name: str, value: int | str | None, least: int = 1) -> int | None:
    """Return a number of bytes given as a number or as text.

    >>> size_of("max_bytes", "1GB"), size_of("max_bytes", "1.5 MiB")
    (1000000000, 1572864)
    """
    if not isinstance(value, str):
        return count_of(name, value, 1 << 62, least)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise SchemaError(
            f"{name}={value!r} is not a size. Specify a number of bytes, or text such as '20GB' or '512MiB'."
        )
    return count_of(name, int(float(match[1]) * _UNITS[match[2].upper()]), 1 << 62, least)


def count_of(name: str, value: object, most: int, least: int = 1) -> int | None:
    """Return a whole number within its bounds, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SchemaError(f"{name}={value!r} is not valid; it must be a whole number of at least {least}, or None.")
    if value < least:
        raise SchemaError(f"{name}={value} is too small; it must be at least {least}, or None.")
    if value > most:
        raise SchemaError(f"{name}={value} is too large; it must be at most {most}.")
    return int(cast("int", value))


def check_durability(durability: str) -> None:
    """Reject an unknown durability."""
    if durability not in DURABILITIES:
        raise SchemaError(f"durability {durability!r} is unknown. Use one of {', '.join(DURABILITIES)}.")


def backend_of(path: Any, backend: Backend | None) -> Backend:
    """Return the backend for a path: raw segments need a folder."""
    if backend not in ("memmap", "zarr", None):
        raise SchemaError(f"backend {backend!r} is unknown. Use 'memmap' or 'zarr'.")
    if is_folder(path):
        return backend or "memmap"
    if backend == "memmap":
        raise SchemaError(f"backend='memmap' needs a local folder; {path!r} is not one. Use backend='zarr'.")
    return "zarr"


def bucket_of(path: Any) -> Bucket:
    """Return the bucket that a path, a URL, an obstore store or a zarr `Store` names."""
    if is_folder(path):
        return FolderBucket(Path(path).expanduser(), durable=False)
    from trajectory_store.objects.remote import open_bucket

    return open_bucket(path, durable=False)


def medium_of(
    bucket: Bucket, root: Root, io: Io | None, cache_dir: str | os.PathLike[str] | None, cache_bytes: int | None
) -> Medium:
    """Return the medium of a store in a bucket."""
    if root.backend == "zarr":
        from trajectory_store.objects.backend import ObjectMedium

        return ObjectMedium(bucket, root, cache_dir, cache_bytes)
    if isinstance(bucket, FolderBucket):
        return Memmap(bucket, io)
    raise NotAStoreError(
        f"{bucket.where} is a copy of a store with raw segments, which need a local folder. Copy it to a local "
        "folder to open it."
    )


def bounded(root: Root) -> Root:
    """Bound the segments of a store with limits: they are evicted whole, so one holds about an eighth of the rows."""
    rows, elements = root.largest
    if root.max_trajectories is not None and root.segment_rows is None:
        root = replace(root, segment_rows=min(max(512, root.max_trajectories // 8), rows))
    if root.max_bytes is not None and root.segment_elements is None and root.schema.axes:
        width = max(sum(c.np_dtype.itemsize * c.width for c in columns) for columns in root.schema.axes.values())
        least = max(FIRST_ELEMENTS, 1 << 16)
        root = replace(root, segment_elements=min(max(least, root.max_bytes // (8 * width)), elements))
    return root
