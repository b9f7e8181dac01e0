"""The run folder as the processes of a run share it: made once, by the first of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DataError, DefinitionError, RunExistsError, RunMismatchError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.completeness import came_to_nothing, check_parts, clear_failed_start
from rlhf_pipeline.run.continuation import (
    check_free_or_recorded,
    check_processes,
    check_unchanged,
    continuation_notices,
)
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.events import EventHandler, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, process_lock
from rlhf_pipeline.run.record import Setup
from trajectory_store import StoreError
from trajectory_store.locks import locked

ALONE_S: Final = 30.0
"""The time for which the learner waits for collectors before it reports that none is alive."""
_LEAVES_IN_S: Final = 10.0
"""The time for which a process that was asked to stop may keep its name."""


@contextmanager
def shared_run(
    folder: RunFolder,
    setup: Setup,
    *,
    on_event: EventHandler,
    leads: bool = False,
    make_stores: bool = True,
) -> Iterator[None]:
    """Take part in a run as one of its processes; make the folder, its record and its stores if they are missing.

    If what this process has begun in a folder turns out to be wrong before anything is stored, it is removed again.

    Args:
        folder: the run folder.
        setup: the settings of this process.
        on_event: receives notices.
        leads: what differs from the record will act for the run, as for a learner and a supervisor; the learner
            records it after its first step.
        make_stores: make the stores.
    """
    pipeline, seed, begins = setup.pipeline, setup.seed, False
    with named_disk_errors(folder):
        if leads and came_to_nothing(folder):
            try:
                check_unchanged(folder, pipeline, seed)
            except RunMismatchError:
                with suppress(RunExistsError), folder.lock():  # no other process is working on it
                    clear_failed_start(folder)
        try:
            with folder.lock(shared=True):
                with locked(folder.path / filenames.SETUP_LOCK):
                    again = folder.record.exists
                    begins = not again
                    check_free_or_recorded(folder, resume=again)
                    if again:
                        check_processes(folder, several=True)
                        check_unchanged(folder, pipeline, seed, overrides=setup.overrides)
                        check_parts(folder)
                        for notice in continuation_notices(folder, pipeline, device=setup.device if leads else None):
                            notify(on_event, notice)
                    if not again and not folder.record.write(setup):
                        begins = False  # another machine's process was first
                        check_unchanged(folder, pipeline, seed)
                    if make_stores:
                        _make_stores(folder, pipeline)
                yield
        except (DataError, DefinitionError):
            if begins and not folder.place.is_remote:  # there, a process that joins may not be seen yet
                with suppress(OSError, StoreError, RunExistsError), folder.lock():
                    clear_failed_start(folder)
            raise


@contextmanager
def at_work(
    run: RunFolder, name: str | None, *, wait_s: float = _LEAVES_IN_S, progress_timeout_s: float | None = None
) -> Iterator[Heartbeat]:
    """Hold a name as its only process; yield its heartbeat.

    Args:
        run: the run folder.
        name: of the process; None takes the first free one of `collector-0`, `collector-1`, ...
        wait_s: how long to wait for another process on this machine to leave, in seconds.
        progress_timeout_s: see `Heartbeat`.
    """
    with ExitStack() as resources:
        if name is not None:
            resources.enter_context(process_lock(run.processes, name, wait_s=wait_s))
            resources.enter_context(run.place.lease(name, wait_s=_LEAVES_IN_S))
        for number in itertools.count() if name is None else ():
            # Tried instead of looked up, because other processes may be starting at the same time.
            with suppress(RunExistsError), ExitStack() as tried:
                tried.enter_context(process_lock(run.processes, f"collector-{number}"))
                tried.enter_context(run.place.lease(f"collector-{number}"))
                resources.push(tried.pop_all())
                name = f"collector-{number}"
                break
        yield resources.enter_context(Heartbeat(run.processes, str(name), progress_timeout_s=progress_timeout_s))


def _make_stores(folder: RunFolder, pipeline: Pipeline) -> None:
    from rlhf_pipeline.run.build import open_storage  # needs torch, which a supervisor does not import
    from rlhf_pipeline.run.evaluation import evaluation_storage

    folder.place.make_rollouts(durability=pipeline.buffer.durability)
    for name in pipeline.evaluations:
        evaluation_storage(folder, pipeline, name).close()
    # Last: a store of trajectories without `rollouts` marks a run in one process.
    open_storage(folder, pipeline, max_size=pipeline.buffer.max_trajectories).close()


def report_if_alone(run: RunFolder, what: str, on_event: EventHandler) -> None:
    """Report that the learner waits for something if no collector is alive."""
    if not run.place.living() - {"learner", "supervisor"}:
        command = f"rlhf-pipeline collect --run {typed(run.address)}"
        notify(on_event, f"the learner waits for {what}, but no collector is alive. Start one: {command}")
