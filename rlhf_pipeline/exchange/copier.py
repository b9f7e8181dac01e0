"""Copying a store into a new one: whole or in part, and from one backend to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange.filters import select
from rlhf_pipeline.exchange.target import appearing_whole, check_absent
from trajectory_store import TrajectoryStore, copy_rows

Backend = Literal["memmap", "zarr"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What a copy wrote."""

    path: Path
    num_trajectories: int
    num_left_out: int
    """Trajectories that a filter left out."""


def copy_store(
    store: str | Path | TrajectoryStore,
    to: str | Path,
    *,
    backend: Backend = "memmap",
    filters: Sequence[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Make a store that holds the trajectories of another one, in the order of arrival, later values folded in.

    The ids of the store are new, `trajectory_id` and every other column are as they were. The target appears whole or
    not at all. With `backend="zarr"` it is sealed: sharded, zstd-compressed groups that plain Zarr reads.

    Args:
        store: an open store, or its folder.
        to: the new folder; must not exist.
        backend: of the new store.
        filters: conditions that a trajectory must meet, see `rlhf_pipeline.exchange.filters.select`.
        on_rows: called with the number of trajectories copied and to copy.

    Raises:
        RunExistsError: the target is there already.
        DefinitionError: a filter cannot be read, or names no column, or nothing meets the filters.
        StoreError: the store cannot be read, its trajectories were evicted meanwhile, or the disk is full.

    >>> import tempfile
    >>> from trajectory_store import Column, Schema, diff
    >>> folder = Path(tempfile.mkdtemp())
    >>> with TrajectoryStore.create(folder / "a", Schema([Column("trajectory_id", "int64")])) as store:
    ...     _ = store.append({"trajectory_id": [7, 8, 9]})
    >>> copy_store(folder / "a", folder / "b", backend="zarr", filters=["trajectory_id>7"]).num_left_out
    1
    >>> with TrajectoryStore.open(folder / "a") as a, TrajectoryStore.open(folder / "b") as b:
    ...     print(diff(a, b, key="trajectory_id"))
    1 trajectories only on the left, first id 0
    """
    if not isinstance(store, TrajectoryStore):
        with TrajectoryStore.open(store if "://" in str(store) else Path(store).expanduser(), mode="r") as opened:
            return copy_store(opened, to, backend=backend, filters=filters, on_rows=on_rows)
    if "://" in str(to):
        raise DefinitionError(f"a copy goes into a folder, and {to} is none: it could not appear whole. --to FOLDER")
    target = Path(to).expanduser()
    check_absent(target)
    num_all = len(store)
    ids = select(store, filters)
    if num_all and not len(ids):
        raise DefinitionError(f"none of the {num_all:,} trajectories in {store.path} meets {' and '.join(filters)}.")
    with appearing_whole(target) as part, TrajectoryStore.create(part, store.schema, backend=backend) as made:
        copy_rows(store, made, ids, on_rows=on_rows)
        if backend == "zarr":
            made.compact()
        else:
            made.flush()
    return CopyReport(path=target, num_trajectories=len(ids), num_left_out=num_all - len(ids))
