"""What the tests of damage share: a store to damage, all that it says, and what a damaged one may say."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store import Column, Schema, StoreError, TrajectoryStore

SCHEMA = Schema(
    [
        Column("tag", "int64"),
        Column("x", "int32", ragged=True),
        Column("mask", "bool", ragged=True),
        Column("ref", "float32", ragged=True, mutable=True, fill=-1.0),
        Column("text", "str", mutable=True),
        Column("priority", "float64", mutable=True, fill=1.0),
    ]
)


def rows(tags: list[int]) -> dict[str, Any]:
    """A batch in which every value follows from the tag and none is 0."""
    return {
        "tag": [tag + 1 for tag in tags],
        "x": [np.arange(1, 2 + tag % 5) + tag for tag in tags],
        "mask": [[True] * (1 + tag % 5) for tag in tags],
        "text": [f"row {tag} " + "\u00e9" * (tag % 7) for tag in tags],
    }


def session(path: Path, tags: list[int], updated: list[int] | None = None) -> list[int]:
    """Append in a session of its own, and update rows that are there: every kind of column."""
    with TrajectoryStore.open(path, "a") as store:
        ids = store.append(rows(tags)).tolist()
        if updated:
            lengths = store.lengths("x", updated).tolist()
            store.update(updated, priority=[1234.5 + row % 97 for row in updated])
            store.update(updated, text=[f"later {row}" for row in updated], ref=[[2.5] * n for n in lengths])
    return ids


def in_memory() -> str | None:
    """A folder in memory for the many copies, where there is one: disks of shared machines are slow."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else None


def make(
    path: Path, backend: str, *, sessions: int = 4, count: int = 5, compact_after: int = 0, **options: Any
) -> Path:
    """A closed store: rows of several sessions, from the third on with updates, a compaction in between if asked."""
    sizes = {"segment_rows": 16, "segment_elements": 160}  # small files, as each case copies them all
    TrajectoryStore.create(path, SCHEMA, backend=backend, **{**sizes, **options}).close()
    ids: list[int] = []
    for number in range(sessions):
        tags = list(range(number * count, (number + 1) * count))
        ids += session(path, tags, ids[:: max(1, len(ids) // 4)] if number >= 2 else None)
        if number + 1 == compact_after:
            with TrajectoryStore.open(path, "a") as store:
                store.compact()
    return path


def everything(store: TrajectoryStore) -> dict[str, Any]:
    """All that a reader can ask a store, in values that compare."""
    ids = store.ids()
    readings: dict[str, Any] = {"ids": ids.tolist(), "watermark": store.watermark, "len": len(store)}
    for name, values in store.read(ids).items():
        readings[name] = [np.asarray(value).tolist() for value in values]
    for name, values in store.read_padded(ids).items():
        readings[f"padded {name}"] = np.asarray(values).tolist()
    for column in store.schema:
        if column.axis is None:
            readings[f"scalars {column.name}"] = store.read_scalars(column.name).tolist()
        else:
            readings[f"lengths {column.name}"] = store.lengths(column.name).tolist()
        readings[f"present {column.name}"] = store.present(column.name).tolist()
    return readings


def outcome(path: Path, wanted: dict[str, Any], what: str) -> str:
    """What a damaged store says: `refused`, `reported`, or `intact` where every answer is the same as before.

    Anything else fails: another answer beside a `verify` that says all is well, or an error that is no StoreError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            with TrajectoryStore.open(path) as store:
                report = store.verify()
                try:
                    readings = everything(store)
                except StoreError as error:
                    readings = {"error": str(error)}
                if not report.ok:
                    return "reported"
                wrong = [name for name in {**wanted, **readings} if readings.get(name) != wanted.get(name)]
                assert not wrong, f"{what}: verify says {report}, but {wrong[0]} is {readings.get(wrong[0])}"
                return "intact"
        except StoreError:
            return "refused"
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def files(path: Path) -> list[Path]:
    """Every file, by name."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def folders(path: Path) -> list[Path]:
    """Every folder below, by name."""
    return sorted(folder for folder in path.rglob("*") if folder.is_dir())
