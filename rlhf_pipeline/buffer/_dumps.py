"""Copies of a store: atomic dumps, and loads into an empty store."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path

import numpy as np

from rlhf_pipeline.buffer.trajectory_schema import SLOT, WAITING
from rlhf_pipeline.data.keys import LEFT_OUT
from rlhf_pipeline.errors import MissingPathError
from trajectory_store import TrajectoryStore

_CHUNK = 1024
_POINTER = "current.json"


def copy_rows(source: TrajectoryStore, target: TrajectoryStore, ids: np.ndarray) -> None:
    """Append rows of one store to another, in the given order; they take the next slots, whatever slots they had."""
    for start in range(0, len(ids), _CHUNK):
        batch = source.read_batch(ids[start : start + _CHUNK], target.schema)
        batch.values.pop(SLOT, None)
        if WAITING.name in batch.values:  # rows that waited and are complete take the next slots
            waiting = batch.values[WAITING.name]
            batch.values[WAITING.name] = np.where(waiting < LEFT_OUT, -1, waiting)
        target.append_batch(batch)


def dump_store(store: TrajectoryStore, ids: np.ndarray, path: Path) -> None:
    """Write a copy under `path`.

    The copy gets a folder of its own, and a pointer file is replaced once it is complete, so a kill at any moment
    leaves either the old dump or the new one.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"store-{uuid.uuid4().hex[:12]}"
    with TrajectoryStore.create(folder, store.schema, durability="power") as target:
        copy_rows(store, target, ids)
    pointer = path / f"{_POINTER}.{os.getpid()}"
    with pointer.open("w", encoding="utf-8") as file:
        json.dump({"store": folder.name, "rows": len(ids)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer, path / _POINTER)
    for old in path.glob("store-*"):
        if old.name != folder.name:
            shutil.rmtree(old, ignore_errors=True)


def find_dump(path: Path) -> Path:
    """Return the folder of the store in a dump.

    Raises:
        MissingPathError: if there is no complete dump.
    """
    try:
        pointer = json.loads((path / _POINTER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingPathError(f"no complete dump at {path}: {_POINTER} is not there") from error
    return path / pointer["store"]
