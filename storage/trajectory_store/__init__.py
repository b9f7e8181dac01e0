"""A durable, ragged, memory-mapped and Zarr-backed store of trajectories. No torch.

>>> from trajectory_store import Column, Schema, TrajectoryStore
>>> Schema([Column("input_ids", "int32", ragged=True)]).axes["tokens"][0].name
'input_ids'
"""

from trajectory_store.compare import StoreDiff, copy_rows, diff
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
from trajectory_store.schema import Column, Schema
from trajectory_store.snapshot import Snapshot
from trajectory_store.store import TrajectoryStore
from trajectory_store.upkeep import CompactReport
from trajectory_store.verify_report import VerifyReport

__all__ = [
    "TrajectoryStore",
    "Schema",
    "Column",
    "RaggedArray",
    "BufferPool",
    "Snapshot",
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
