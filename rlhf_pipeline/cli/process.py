"""Shared by `run`, `collect` and `learn`: torch, signals and exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from rlhf_pipeline.cli import torchrun
from rlhf_pipeline.cli.output import can_draw, warn
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.errors import RewardError, RunExistsError, RunStorageError
from rlhf_pipeline.report.formatting import duration
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import below
from rlhf_pipeline.run.events import CollectorFinished, RunFinished
from rlhf_pipeline.run.processes.launch import Launcher
from rlhf_pipeline.run.signals import STOPPING

if TYPE_CHECKING:
    from rlhf_pipeline.run.run import Run

TRY_AGAIN: Final = 3
"""The exit code of `collect` and `learn` after a failure that may succeed on a retry: a full disk, a reward service."""


def conduct(
    run: Run,
    what: str,
    *,
    args: argparse.Namespace,
    launching: AbstractContextManager[Launcher | None] = nullcontext(),  # noqa: B008 - it has no state
    then: Callable[[RunView], int] = lambda view: 0,
) -> int:
    """Do a run, its learner or a collector, and print the result and the next commands."""
    from rlhf_pipeline.cli.summary import finish
    from rlhf_pipeline.report.prometheus import metrics_served
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.start import start
    from trajectory_store import StoreError

    alone, began, signals = run.supervised is None, time.perf_counter(), list[int]()
    parent = torchrun.parent(getattr(args, "parent", None))
    view = view_of_stdout(filenames.LOG if alone else filenames.SUPERVISOR_LOG)
    imports = "importing torch" if alone else "they import torch"
    view.echo(f"{run.pipeline.name}: {what}, seed {run.seed}, on {run.device}; {imports} ...")

    def work() -> RunFinished | CollectorFinished:
        if alone:
            torchrun.import_torch(run.device)
            from rlhf_pipeline import definitions  # help does without
            from rlhf_pipeline.run.processes.collect import collect

            definitions.share_with_workers()
            view.echo(f"imported torch ({duration(time.perf_counter() - began)}); building the model and the store ...")
            if run.joins == "collect":
                return collect(run, name=args.name, parent=parent, on_event=view)
        with launching as launch:
            return start(torchrun.joined(run), parent=parent, launch=launch, on_event=view)

    port = getattr(args, "metrics_port", None)
    serving = nullcontext() if port is None else metrics_served(run.run_dir, port, args.metrics_host)
    try:
        with recorded_signals(signals), serving:
            finished = work()
    except KeyboardInterrupt:
        if run.joins == "collect":
            view.echo(
                f"stopped immediately. Another collector takes over the rollout. To restart this one: {run.again}"
            )
        elif run.resume or is_run(run.run_dir):
            view.echo(f"stopped immediately. Continue from the last checkpoint: {run.again}")
        else:
            view.echo("stopped before the run began; nothing was written.")
        return stopped_code(signals)
    except (RewardError, RunExistsError, RunStorageError, StoreError) as error:
        if run.joins is None or args.debug:
            raise
        warn(f"rlhf-pipeline: {error}")
        return TRY_AGAIN
    finally:
        view.close()
        torchrun.leave()
    if getattr(args, "parent", None) is None:
        finish(finished, run, view)
    if not alone:
        view.echo(f"the log of the processes: {below(run.run_dir, filenames.SUPERVISOR_LOG)}")
    return stopped_code(signals) if finished.reason == "interrupted" else then(view)


def view_of_stdout(log_name: str = filenames.LOG) -> RunView:
    """Return a view that draws a run in place in a terminal, and prints lines elsewhere."""
    return RunView(sys.stdout, live=can_draw(sys.stdout), log_name=log_name)


def stopped_code(signals: list[int]) -> int:
    """Return the exit code of a process that a signal stopped: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (signals[-1] if signals else signal.SIGINT)


@contextmanager
def recorded_signals(signals: list[int]) -> Iterator[None]:
    """Record which signals arrive, whatever handles them: the exit code depends on them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        try:
            arrived = os.read(reading, 4096)
        except BlockingIOError:
            arrived = b""
        signals += [signum for signum in arrived if signum in STOPPING]
        os.close(reading)
        os.close(writing)
