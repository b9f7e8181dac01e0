"""Whether a run has all of its parts, and whether a start left anything to continue from. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_pipeline.errors import DataError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import below
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.choice_record import gathered_counts, has_chosen
from rlhf_pipeline.run.files import remove_folder, tidy
from rlhf_pipeline.run.folder import RunFolder

_BEFORE_THE_RECORD: Final = frozenset(
    {
        filenames.LOCK,
        filenames.SETUP_LOCK,
        filenames.PROCESSES,
        filenames.LOG,
        filenames.SUPERVISOR_LOG,
        filenames.GROUP,
        filenames.SOURCE,
        filenames.INPUTS,
        f".{filenames.CONFIG}.tmp",
    }
)
"""Names that may exist without a run's `config.json`: a start that was killed at that point left no run to resume."""


_FOLDERS: Final = (
    *(filenames.CHECKPOINTS, filenames.STORE, filenames.EVALUATIONS, filenames.ROLLOUTS, filenames.WEIGHTS),
    *(filenames.CLAIMS, filenames.LOGS, filenames.SOURCE, filenames.INPUTS),
)
"""The folders that a start creates."""


def is_free(run: RunFolder) -> bool:
    """Whether a new run may be made here: the place is empty, or holds only what a failed start left."""
    return run.place.is_blank(_BEFORE_THE_RECORD) or came_to_nothing(run)


def came_to_nothing(run: RunFolder) -> bool:
    """Whether a run was started here but has no trajectory, no step, and nothing to continue from."""
    if not run.record.exists or len(run.metrics) or len(run.ledger) or has_chosen(run):
        return False
    if any(step_of(path) for path in run.saved()):
        return False
    # Imported only where a store is opened: NumPy takes longer to import than the rest of a command takes.
    from trajectory_store import StoreError, StoreNotFoundError, TrajectoryStore

    for name in run.place.stores:
        try:
            with TrajectoryStore.open(below(run.address, name)) as store:
                if store.watermark:
                    return False
        except StoreNotFoundError:
            continue
        except StoreError:
            return False
    return True


def clear_failed_start(run: RunFolder) -> None:
    """Remove what a failed start left; does nothing in any other folder."""
    if not came_to_nothing(run):
        return
    for name in _FOLDERS:
        if (run.path / name).exists():
            remove_folder(run.path / name)
    run.place.clear()
    tidy(run.path)
    for file in (run.metrics_file, run.ledger_file, run.choice_table, run.recorded_ledger):
        file.unlink(missing_ok=True)
    run.record.remove()  # last: after a kill before this, it can be called again


def check_parts(run: RunFolder) -> None:
    """Raise an error for a run with missing parts; see `missing_parts`.

    Raises:
        DataError: names what is missing.
    """
    problems = list(missing_parts(run))
    if problems:
        raise DataError(
            f"{run.address} is incomplete: {'; '.join(problems)}. Further steps would not match the earlier ones. "
            "Restore the missing parts from a copy, or start a new run with --out OTHER_FOLDER. To list all "
            f"problems: rlhf-pipeline verify {typed(run.address)}"
        )


def missing_parts(run: RunFolder) -> Iterator[str]:
    """Yield the inconsistencies between store, ledger, metrics and checkpoints, in constant time.

    A checkpoint is written after the ledger, the metrics and the trajectories that it depends on, and the first one
    before the first step. So a checkpoint without them, or steps without a checkpoint, mean that parts are gone.
    """
    saved = [step_of(path) for path in run.saved()]
    newest = max(saved, default=0)
    num_steps = max(len(run.ledger), len(run.metrics))
    for rows in (run.ledger, run.metrics):
        if rows.last_step < newest:
            yield f"{rows.path.name} ends with step {rows.last_step}, but there is a checkpoint of step {newest}"
        elif len(rows) != rows.last_step:
            yield f"{rows.path.name} has {len(rows)} rows up to step {rows.last_step}"
        elif rows.is_moved:
            yield f"the last line of {rows.path.name} fails its checksum or has moved"
    if num_steps and not saved:
        yield f"there is no checkpoint, but {num_steps} steps were taken"
    if num_steps or newest or (saved and run.config.begun_from is None):  # a branch has a checkpoint before a store
        row = run.ledger.of_step(newest)
        stored = (
            (gathered_counts(run) or {"trajectories": 0})["trajectories"] if row is None else row.get("watermark", 0)
        )
        yield from _missing_rows(run, filenames.STORE, stored, "trajectories")
    if (num_steps or saved) and run.is_of_several:
        begun = -(-newest // _steps_per_rollout(run.config.pipeline))
        yield from _missing_rows(run, run.rollouts.name, begun, "rollouts")
    if (num_steps or saved) and run.config.pipeline.get("replay") is not None and not has_chosen(run):
        yield f"there is no {run.choice_file.name}, which records the selected trajectories"
    if len(run.ledger) and "rollout" in run.ledger[-1] and not run.is_of_several and not has_chosen(run):
        yield f"there is no {run.rollouts.name}, which records the rollouts of its collectors"


def _missing_rows(run: RunFolder, name: str, counted: int, what: str) -> Iterator[str]:
    """Yield a problem if a store of the run is missing, or has seen less than the run had stored."""
    from trajectory_store import StoreError, TrajectoryStore

    if name not in run.place.stores:
        return
    try:
        with TrajectoryStore.open(below(run.address, name)) as store:
            if store.watermark < counted:
                yield f"{name} contains only {store.watermark} of the {counted} {what} that the run stored"
            elif name == filenames.ROLLOUTS and len(store.ids()) < store.watermark:  # which keeps every row
                for problem in store.verify().problems[:1]:  # none if a power loss took them
                    yield f"{name} is damaged: {problem.rstrip('.')}"
    except StoreError as error:
        yield f"{name} cannot be read ({str(error).rstrip('.')})" if run.place.has(name) else f"there is no {name}"


def _steps_per_rollout(pipeline: Mapping[str, Any]) -> int:
    """Return `Learn.steps_per_rollout` of a recorded definition."""
    learn = pipeline.get("learn", {})
    return int(learn.get("epochs", 1)) * int(learn.get("minibatches", 1))
