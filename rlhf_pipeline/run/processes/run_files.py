"""The run folder as the processes of a run share it: made once, by whoever comes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import RunExistsError, RunMismatchError
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.folder import RunFolder, tell
from rlhf_pipeline.run.medium import FolderMedium
from rlhf_pipeline.run.processes.claims import Claims, Flow, FolderClaims
from rlhf_pipeline.run.processes.rollouts import FolderRollouts, Rollouts, make_rollouts
from trajectory_store import TrajectoryStore

if TYPE_CHECKING:
    from rlhf_pipeline.run.remote.medium import BucketMedium


@contextmanager
def shared_run(
    folder: RunFolder,
    pipeline: Pipeline,
    *,
    seed: int,
    device: str,
    definition: str,
    overrides: Sequence[tuple[str, str]],
    on_event: EventHandler,
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
        on_event: told what is different since the last start.
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
                for notice in folder.notices(pipeline, device=device if record_again else None):
                    tell(on_event, notice)
            again = folder.is_recorded
            if (record_again or not again) and not folder.record(
                pipeline, definition=definition, overrides=overrides, seed=seed, device=device
            ):
                folder.check_unchanged(pipeline, seed)  # another machine's process was first
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

    if isinstance(folder.medium, FolderMedium):
        make_rollouts(folder.rollouts, durability=pipeline.buffer.durability)
    else:
        from rlhf_pipeline.run.remote.rollouts import BucketRollouts

        BucketRollouts.begin(cast("BucketMedium", folder.medium).bucket)
    # Last: trajectories without `rollouts` beside them are those of a run in one process.
    open_storage(folder, pipeline, max_size=pipeline.buffer.max_trajectories).close()


def open_rollouts(run: RunFolder, *, adds: bool = False) -> Rollouts:
    """Return which rollouts of a run are stored.

    Args:
        run: a run of several processes.
        adds: whether this process stores rollouts.
    """
    if isinstance(run.medium, FolderMedium):
        return FolderRollouts(TrajectoryStore.open(run.rollouts, "a" if adds else "r"))
    from rlhf_pipeline.run.remote.rollouts import BucketRollouts

    return BucketRollouts(cast("BucketMedium", run.medium).bucket)


def open_claims(run: RunFolder, name: str, rollouts: Rollouts, flow: Flow, store: TrajectoryStore) -> Claims:
    """Return a collector's claims on rollouts.

    Args:
        run: a run of several processes.
        name: the collector's name.
        rollouts: which are stored.
        flow: the limits.
        store: where the collector appends trajectories.
    """
    if isinstance(run.medium, FolderMedium):
        return FolderClaims(run.claims, name, rollouts, flow)
    from rlhf_pipeline.run.remote.rollouts import LeasedClaims

    return LeasedClaims(cast("BucketMedium", run.medium), name, rollouts, flow, store)
