"""The run folder as the processes of a run share it: made once, by whoever comes first."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.run.folder import (
    check_folder,
    check_processes,
    check_unchanged,
    is_recorded,
    make_record,
    write_record,
)
from rlhf_pipeline.run.locks import run_lock
from rlhf_pipeline.run.processes.claims import ROLLOUTS_SCHEMA
from trajectory_store import StoreNotFoundError, TrajectoryStore

if TYPE_CHECKING:
    from rlhf_pipeline.replay.storage import TrajectoryStorage

_ROLLOUTS_PER_SEGMENT = 8192


@contextmanager
def shared_run(
    run_dir: Path,
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
        run_dir: the run folder.
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
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir, shared=True):
        with (run_dir / "setup.lock").open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            check_folder(run_dir, resume=is_recorded(run_dir))
            check_processes(run_dir, several=True)
            check_unchanged(run_dir, pipeline, seed)
            if record_again or not is_recorded(run_dir):
                write_record(
                    run_dir,
                    make_record(pipeline, definition=definition, overrides=overrides, seed=seed, device=device),
                )
            if make_stores:
                _make_stores(run_dir, pipeline)
        yield


def _make_stores(run_dir: Path, pipeline: Pipeline) -> None:
    try:
        TrajectoryStore.open(run_dir / "rollouts").close()
    except StoreNotFoundError:
        TrajectoryStore.create(
            run_dir / "rollouts",
            ROLLOUTS_SCHEMA,
            durability=pipeline.buffer.durability,
            segment_rows=_ROLLOUTS_PER_SEGMENT,
        ).close()
    # Last: trajectories without `rollouts` beside them are those of a run in one process.
    open_storage(run_dir, pipeline).close()


def open_storage(run_dir: Path, pipeline: Pipeline) -> TrajectoryStorage:
    """Open the run's trajectories, or create the store."""
    from rlhf_pipeline.replay.storage import TrajectoryStorage  # needs torch, which a supervisor does without

    return TrajectoryStorage(
        run_dir / "store",
        max_size=pipeline.buffer.max_trajectories,
        backend=pipeline.buffer.backend,
        durability=pipeline.buffer.durability,
    )
