"""Copying a store into a new one: whole or in part, and from one backend to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_pipeline.data.episodes import complete_episodes, stored_last_rows
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.exchange.exporter import Backend, ExportReport, chosen
from rlhf_pipeline.exchange.target import check_absent
from trajectory_store import TrajectoryStore
from trajectory_store.copying import copy_store as copy_intact
from trajectory_store.new_files import new_file


def copy_store(
    store: str | Path | TrajectoryStore,
    to: str | Path,
    *,
    backend: Backend = "memmap",
    filters: Sequence[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
    skip_damaged: bool = False,
) -> ExportReport:
    """Create a store with the trajectories of another store, in the order of arrival, with their latest values.

    The ids of the store are new; `trajectory_id` and all other columns are unchanged. The target is either complete or
    absent. With `backend="zarr"` it is sealed: it consists of sharded, zstd-compressed groups that any Zarr
    library can read.

    Args:
        store: an open store, or its folder.
        to: the new folder, which must not exist.
        backend: of the new store.
        filters: conditions that a trajectory must meet, see `rlhf_pipeline.buffer.filters.select`; for an episode, the
            last row determines the result for all of its rows.
        on_rows: called with the number of trajectories copied and the total number.
        skip_damaged: exclude trajectories that do not match their checksums; otherwise they are an error.

    Raises:
        DataError: some trajectories are damaged.
        RunExistsError: the target exists.
        DefinitionError: a filter is not valid or has an unknown column, or no row meets the filters.
        StoreError: the store cannot be read, its trajectories were evicted during the copy, or the disk is full.
    """
    if "://" in str(to):
        raise DefinitionError(
            f"the target of a copy must be a folder, but {to} is a URL, and copying to a URL would not be atomic. "
            "Specify a folder: --to FOLDER"
        )
    target = Path(to).expanduser()
    check_absent(target)
    with chosen(store, filters, skip_damaged=skip_damaged) as (opened, ids, left_out):
        if filters:
            num_chosen = len(ids)
            ids, _ = complete_episodes(opened, ids[stored_last_rows(opened, ids)])
            left_out += num_chosen - len(ids)
        with new_file(target, exclusive=False, parents=True) as part:
            copy_intact(opened, part, ids, backend=backend, on_rows=on_rows)
        columns = opened.schema.names
    return ExportReport(path=target, kind=backend, num_trajectories=len(ids), num_left_out=left_out, columns=columns)
