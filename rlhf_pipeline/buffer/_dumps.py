"""Copies of a store: atomic dumps, and loads into an empty store."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import numpy as np

from rlhf_pipeline.buffer._slot_map import IN_TURN_AT
from rlhf_pipeline.buffer.trajectory_schema import SLOT, WAITING
from rlhf_pipeline.errors import MissingPathError
from trajectory_store import TrajectoryStore
from trajectory_store.new_files import write_atomically
from trajectory_store.recorder.standard import LEFT_OUT

_CHUNK = 1024
_POINTER = "current.json"


def copy_rows(source: TrajectoryStore, target: TrajectoryStore, ids: np.ndarray, *, first_slot: int = 0) -> None:
    """Append rows of one store to another, in the given order; they take the next slots, whatever slots they had.

    Args:
        source: where they are.
        target: where they go.
        ids: int64 `[n]`.
        first_slot: the slot of the first one, in a ring that the rows fill exactly; see `SlotMap`.

    Raises:
        CorruptionError: some rows are damaged; it names them, and nothing is appended.
    """
    ids = source.intact(ids)
    for start in range(0, len(ids), _CHUNK):
        batch = source.read_batch(ids[start : start + _CHUNK], target.schema)
        batch.values.pop(SLOT, None)
        if first_slot and SLOT in target.schema:
            slots = (first_slot + start + np.arange(batch.n_rows)) % len(ids)
            batch.put(target.schema[SLOT], IN_TURN_AT - slots, np.ones(batch.n_rows, bool))
        if WAITING.name in batch.values:  # rows that waited and are complete take the next slots
            waiting = batch.values[WAITING.name]
            batch.values[WAITING.name] = np.where(waiting < LEFT_OUT, -1, waiting)
        target.append_batch(batch)


def dump_store(store: TrajectoryStore, ids: np.ndarray, path: Path, *, first_slot: int) -> None:
    """Write a copy under `path`.

    The copy gets a separate folder, and a pointer file is replaced once it is complete, so a kill at any moment
    leaves either the old dump or the new one.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"store-{uuid.uuid4().hex[:12]}"
    with TrajectoryStore.create(folder, store.schema, durability="power") as target:
        copy_rows(store, target, ids)
    pointer = {"store": folder.name, "rows": len(ids), "first_slot": first_slot}
    write_atomically(path / _POINTER, json.dumps(pointer).encode())
    for old in path.glob("store-*"):
        if old.name != folder.name:
            shutil.rmtree(old, ignore_errors=True)


def find_dump(path: Path) -> tuple[Path, int]:
    """Return the folder of the store in a dump, and the slot of its first row."""
    try:
        pointer = json.loads((path / _POINTER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingPathError(f"there is no complete buffer dump at {path}: {_POINTER} is missing") from error
    return path / pointer["store"], int(pointer["first_slot"])
