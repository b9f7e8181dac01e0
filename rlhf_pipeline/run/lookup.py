"""Which run or store a path means. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.errors import MissingPathError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, absolute, address_of
from rlhf_pipeline.run.completeness import came_to_nothing, missing_parts
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.place import is_store, not_found


def is_run(path: Address) -> bool:
    """Return True if a run was started in this folder, or at this URL; a model's folder has a `config.json` too."""
    return RunFolder(path).record.is_of_run


def run_of_store(store: Address) -> Address | None:
    """Return where the run of a store is, or None if the store belongs to no run."""
    if isinstance(store, Path):
        name, parent = store.name, store.resolve().parent
    else:
        parent, _, name = store.rpartition("/")
    return parent if name == filenames.STORE and is_run(parent) else None


def run_of_evaluation(store: Address) -> RunFolder | None:
    """Return the run that a store of evaluations belongs to, or None; its rows are not those of the run's ledger."""
    parent, _, _ = str(absolute(store)).rpartition("/")
    place, _, name = parent.rpartition("/")
    return RunFolder.open(address_of(place)) if name == filenames.EVALUATIONS and is_run(address_of(place)) else None


def open_run_or_store(path: Address) -> tuple[RunFolder | None, Address]:
    """Return the run at `path`, if it is one, and where its store is."""
    folder = address_of(path)
    if is_run(folder):
        run = RunFolder.open(folder)
        if not is_store(run.store_path) and not came_to_nothing(run) and list(missing_parts(run)):
            raise MissingPathError(
                f"the store of the run {folder} is missing: the run has stored trajectories, but there is no store at "
                f"{run.store_path}. Restore it from a copy. To list other missing parts: rlhf-pipeline verify "
                f"{typed(folder)}"
            )
        if not is_store(run.store_path):
            raise MissingPathError(
                f"the run {folder} has not stored any trajectories yet: there is no store at {run.store_path}. If "
                f"the run stopped early, continue it: rlhf-pipeline run --resume --out {typed(folder)}"
            )
        return run, run.store_path
    if is_store(folder):
        owner = run_of_store(folder)
        return (None if owner is None else RunFolder.open(owner)), folder
    raise not_found(folder, "run or store")
