"""The run folder as the processes of a run share it: made once, by whoever comes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import RunExistsError, RunMismatchError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.claims import ROLLOUTS_SCHEMA
from trajectory_store import StoreNotFoundError, TrajectoryStore

_ROLLOUTS_PER_SEGMENT = 8192


@contextmanager
def shared_run(
    folder: RunFolder,
    pipeline: Pipeline,
    *,
    seed: int,
    device: str,
    definition: str,
    overrides: Sequence[tuple[str, str]],
    record_again: bool = False,
    make_stores: bool = True,
) -> Iterator[None]:
    """Be one of the processes of a run; make the folder, its record and its stores if nobody has yet.

    Args:
        folder: the run folder.
        pipeline: the definition, overrides applied.
        seed: the run's seed.
        device: where models live.
        definition: where the definition came from.
        overrides: the `--set` pairs already applied.
        record_again: write the record of a run that is there again: steps and targets may have changed.
        make_stores: False makes none, and imports no torch.

    Raises:
        RunExistsError: the folder is something else, or a run in one process uses it.
        RunMismatchError: the run was started with another definition or seed, or as a run in one process.
        DataError: parts of the run are missing or damaged.
    """
    if record_again and folder.came_to_nothing and not _is_as_recorded(folder, pipeline, seed):
        with suppress(RunExistsError), folder.lock():  # nobody else is at work on it
            folder.clear()
    with folder.lock(shared=True):
        with folder.setup_lock():
            folder.check_free_or_recorded(resume=folder.is_recorded)
            if folder.is_recorded:
                folder.check_processes(several=True)
                folder.check_unchanged(pipeline, seed)
                folder.check_parts()
            if record_again or not folder.is_recorded:
                folder.record(pipeline, definition=definition, overrides=overrides, seed=seed, device=device)
            if make_stores:
                _make_stores(folder, pipeline)
        yield


def _is_as_recorded(folder: RunFolder, pipeline: Pipeline, seed: int) -> bool:
    try:
        folder.check_unchanged(pipeline, seed)
    except RunMismatchError:
        return False
    return True


def _make_stores(folder: RunFolder, pipeline: Pipeline) -> None:
    from rlhf_pipeline.run.build import open_storage  # needs torch, which a supervisor does without

    try:
        TrajectoryStore.open(folder.rollouts).close()
    except StoreNotFoundError:
        TrajectoryStore.create(
            folder.rollouts,
            ROLLOUTS_SCHEMA,
            durability=pipeline.buffer.durability,
            segment_rows=_ROLLOUTS_PER_SEGMENT,
        ).close()
    # Last: trajectories without `rollouts` beside them are those of a run in one process.
    open_storage(folder, pipeline).close()
