"""A durable, ragged, memory-mapped and Zarr-backed store of trajectories. No torch.

Names are imported on first use, so that `trajectory-store --help` answers at once.

>>> from trajectory_store import Column, Schema, TrajectoryStore
>>> Schema([Column("input_ids", "int32", ragged=True)]).axes["tokens"][0].name
'input_ids'
"""

from __future__ import annotations

TYPE_CHECKING = False  # as of typing, whose import would take longer than all else that help needs
if TYPE_CHECKING:
    from trajectory_store.arrival import Arrivals
    from trajectory_store.compare import StoreDiff, diff
    from trajectory_store.copying import copy_rows
    from trajectory_store.errors import (
        BatchError,
        CorruptionError,
        FormatVersionError,
        MissingPackageError,
        MissingRowError,
        NotAStoreError,
        PlaceError,
        ReadFailedError,
        ReadOnlyError,
        SchemaError,
        SnapshotGoneError,
        StoreBusyError,
        StoreClosedError,
        StoreError,
        StoreExistsError,
        StoreNotFoundError,
        TokenizerNotFoundError,
        UnknownColumnError,
        UnsyncedError,
        WriteFailedError,
    )
    from trajectory_store.pool import BufferPool
    from trajectory_store.ragged import RaggedArray
    from trajectory_store.recorder import TrajectoryRecorder
    from trajectory_store.schema import Column, Schema
    from trajectory_store.snapshot import Snapshot
    from trajectory_store.store import TrajectoryStore
    from trajectory_store.upkeep import CompactReport
    from trajectory_store.verify import VerifyReport

__version__ = "0.1.0"

_HOMES = {
    "arrival": ("Arrivals",),
    "compare": ("StoreDiff", "diff"),
    "copying": ("copy_rows",),
    "errors": (
        "BatchError",
        "CorruptionError",
        "FormatVersionError",
        "MissingPackageError",
        "MissingRowError",
        "NotAStoreError",
        "PlaceError",
        "ReadFailedError",
        "ReadOnlyError",
        "SchemaError",
        "SnapshotGoneError",
        "StoreBusyError",
        "StoreClosedError",
        "StoreError",
        "StoreExistsError",
        "StoreNotFoundError",
        "TokenizerNotFoundError",
        "UnknownColumnError",
        "UnsyncedError",
        "WriteFailedError",
    ),
    "pool": ("BufferPool",),
    "ragged": ("RaggedArray",),
    "recorder": ("TrajectoryRecorder",),
    "schema": (
        "Column",
        "Schema",
    ),
    "snapshot": ("Snapshot",),
    "store": ("TrajectoryStore",),
    "upkeep": ("CompactReport",),
    "verify": ("VerifyReport",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "TrajectoryStore",
    "TrajectoryRecorder",
    "Schema",
    "Column",
    "RaggedArray",
    "BufferPool",
    "Snapshot",
    "Arrivals",
    "VerifyReport",
    "CompactReport",
    "StoreDiff",
    "copy_rows",
    "diff",
    "StoreError",
    "SchemaError",
    "UnknownColumnError",
    "TokenizerNotFoundError",
    "BatchError",
    "StoreNotFoundError",
    "StoreExistsError",
    "NotAStoreError",
    "FormatVersionError",
    "StoreBusyError",
    "StoreClosedError",
    "ReadOnlyError",
    "MissingRowError",
    "PlaceError",
    "SnapshotGoneError",
    "WriteFailedError",
    "UnsyncedError",
    "ReadFailedError",
    "CorruptionError",
    "MissingPackageError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'trajectory_store' has no attribute {name!r}")
    import importlib

    public_object = getattr(importlib.import_module(f"trajectory_store.{_HOME[name]}"), name)
    globals()[name] = public_object
    return public_object


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
