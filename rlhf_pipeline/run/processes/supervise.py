"""The supervisor: collectors and a learner as child processes, kept alive until the run has ended.

It imports no torch and holds no state outside the run folder: if killed, it is started again with `--resume`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from rlhf_pipeline.errors import DataError, ProcessFailedError, typed
from rlhf_pipeline.run.address import BESIDE, Address, absolute
from rlhf_pipeline.run.completeness import came_to_nothing
from rlhf_pipeline.run.events import EventHandler, Notice, RunFinished, RunStarted, StepDone, ignore_events
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.log_file import write_log
from rlhf_pipeline.run.processes.children import Child, Exit, SupervisorConfig
from rlhf_pipeline.run.processes.heartbeat import Heartbeat
from rlhf_pipeline.run.processes.launch import Launcher, Subprocesses
from rlhf_pipeline.run.processes.run_files import at_work, shared_run
from rlhf_pipeline.run.processes.weights import read_published, reopen
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.rows import NewRows
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import StopRequest, stop_on_signals
from trajectory_store import StoreError, StoreNotFoundError, TrajectoryStore

__all__ = ["Supervisor", "SupervisorConfig", "supervise"]

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_USAGE_ERROR = 2
"""The exit code of a command with wrong arguments or settings; another try would fail in the same way."""


def supervise(
    job: Run, config: SupervisorConfig, *, launch: Launcher | None = None, on_event: EventHandler = ignore_events
) -> RunFinished:
    """Run a pipeline with collectors and learner in separate processes, and restart processes that die.

    Args:
        job: the run; its folder is created if it does not exist, and continued if it does. The child processes load
            the definition from where it came from.
        config: the number of processes, and the timeouts.
        launch: starts the processes; None starts them on this machine.
        on_event: receives the start, every step, notices about processes, and the end.

    Raises:
        RunExistsError: the run has a live supervisor, or the folder is something else.
        RunMismatchError: the run was started with another definition or seed, or as a run in one process.
        ProcessFailedError: a process cannot be kept alive. The others were stopped, and saved.
    """
    started, run_dir = time.perf_counter(), job.run_dir
    run = RunFolder(run_dir)
    with (
        stop_on_signals() as stop,
        shared_run(run, job, on_event=on_event, leads=True, make_stores=False),
        at_work(run, "supervisor", wait_s=0.0) as heartbeat,
        write_log(run, run.supervisor_log, logging.INFO),
    ):
        heartbeat.facts = {"collectors": config.collectors, "learners": config.learners}
        heartbeat.beat("starting")
        logger.info(
            "supervisor: started, process %d, %d collectors, a learner of %d processes",
            os.getpid(),
            config.collectors,
            config.learners,
        )
        reopen(run)
        supervisor = Supervisor(
            run_dir,
            commands(run_dir, config.collectors, job),
            config,
            total_steps=job.pipeline.learn.steps,
            heartbeat=heartbeat,
            launch=launch,
            on_event=on_event,
        )
        reason = supervisor.work(stop)
        run.metrics.refresh()
        first_reward, last_reward = run.first_and_last_reward()
        finished = RunFinished(
            run_dir=run_dir,
            reason=reason,
            steps=run.metrics.last_step,
            seconds=time.perf_counter() - started,
            first_reward=first_reward,
            last_reward=last_reward,
            num_trajectories=_num_trajectories(run_dir),
        )
        heartbeat.beat("ended", reason=reason, step=finished.steps)
        logger.info("supervisor: ended (%s) after step %d", reason, finished.steps)
    on_event(finished)
    return finished


def commands(run_dir: Address, collectors: int, setup: Setup) -> dict[str, list[str]]:
    """Return the command of each process of a supervised run, by name, the learner first.

    Each receives the supervisor's arguments: the record has a change only after the first step with it.
    """
    base = [sys.executable, "-m", "rlhf_pipeline"]
    end = [setup.definition] if setup.definition else []
    end += ["--trust", "--run", str(absolute(run_dir))]
    end += ["--device", setup.device, *(part for path, text in setup.overrides for part in ("--set", f"{path}={text}"))]
    names = [f"collector-{number}" for number in range(collectors)]
    return {"learner": [*base, "learn", *end]} | {name: [*base, "collect", "--name", name, *end] for name in names}


def share_cores(num_processes: int) -> dict[str, str]:
    """Return the environment of a child: the cores are divided among the processes, unless the user has set it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // num_processes)), **os.environ}


class Supervisor:
    """Keeps the processes of one run alive until its learner publishes the end."""

    def __init__(
        self,
        run_dir: Address,
        commands: Mapping[str, Sequence[str]],
        config: SupervisorConfig,
        *,
        total_steps: int,
        heartbeat: Heartbeat,
        launch: Launcher | None = None,
        on_event: EventHandler = ignore_events,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.total_steps = total_steps
        self.run = RunFolder(run_dir)
        self.metrics = NewRows(self.run.rows(self.run.metrics_file))
        self.heartbeat = heartbeat
        self.on_event = on_event
        folder = self.run.processes
        num_processes = len(commands) - 1 + config.learners
        launch = launch or Subprocesses({**share_cores(num_processes), BESIDE: str(folder.absolute())})
        folder.mkdir(parents=True, exist_ok=True)
        self.children = {
            name: Child(
                name,
                command,
                size=config.learners if name == "learner" else 1,
                folder=folder,
                config=config,
                launch=launch,
                count=self._steps_taken if name == "learner" else _rollouts_stored,
            )
            for name, command in commands.items()
        }
        self._has_begun = False
        self._has_advanced: set[str] = set()

    def work(self, stop: StopRequest) -> Literal["target", "steps", "interrupted"]:
        """Watch until the run has ended or a signal asks to stop; return why it ended."""
        try:
            while (reason := self._finished()) is None and not stop:
                self._tick()
                time.sleep(_TICK_S)
            if reason is None:
                logger.info("supervisor: asked all processes to stop")
                self._report(
                    "all processes are finishing their rollout or step and saving. Press Ctrl-C again to kill them.",
                    "info",
                )
            self._wind_down(signal.SIGTERM if reason is None else None)
        except ProcessFailedError as error:
            logger.error("supervisor: stopping: %s", error)
            self._wind_down(signal.SIGTERM)
            raise ProcessFailedError(f"{error} {self._next_command()}") from None
        finally:
            for child in self.children.values():
                if child.lives:
                    logger.warning("%s: process %s is killed", child.name, child.pids[child.name])
                    child.kill_now()
        return self._published_end() or "interrupted"

    def _tick(self) -> None:
        self._watch_run()
        for child in self.children.values():
            if child.start_if_due():
                continue
            why = child.kill_if_hung()
            if why is not None:
                self._report(f"{child.name} hangs ({why}); it is killed and restarted.")
            ended = child.take_exit()
            if ended is not None:
                self._on_exit(child, ended)
        processes = {name: pid for child in self.children.values() for name, pid in child.pids.items()}
        self.heartbeat.beat("running", step=self.metrics.rows.last_step, processes=processes)

    def _on_exit(self, child: Child, ended: Exit) -> None:
        """Decide whether and when to restart a process that ended."""
        if ended.advanced:
            self._has_advanced.add(child.name)
        end = self._published_end()
        if end is not None and (child.name == "learner" or ended.code == 0):
            logger.info("%s: %s; the run has ended (%s)", child.name, ended.how, end)
            child.is_wanted = False
            return
        if ended.code == 0:
            child.rest(self.config.first_delay_s)
            logger.info("%s: ended although the run continues; it is restarted", child.name)
            return
        if ended.code == _USAGE_ERROR and child.name not in self._has_advanced:
            raise ProcessFailedError(f"{ended.name} cannot start. {self._advice(ended)}")
        delay = child.fail(self.metrics.rows.last_step)
        if child.is_hopeless:
            raise ProcessFailedError(
                f"{ended.name} {ended.how}; it has failed {child.failures} times in a row without progress. "
                f"{self._advice(ended)}"
            )
        again = "it is" if len(child.names) == 1 else "the learner's processes are"
        message = f"{ended.name} {ended.how}; {again} restarted in {delay:g} s"
        words = f": {ended.last_words}" if ended.last_words else ""
        logger.warning("%s (consecutive failures: %d)%s", message, child.failures, words)
        self._report(f"{message}.")

    def _advice(self, ended: Exit) -> str:
        last_words = f"Last line of stderr: {ended.last_words}\n" if ended.last_words else ""
        return f"{last_words}See {ended.log} for details."

    def _next_command(self) -> str:
        with suppress(StoreError, DataError):
            if came_to_nothing(RunFolder(self.run_dir)):
                return "Nothing was stored: fix the problem, then repeat the command."
        again = f"rlhf-pipeline run --resume --out {typed(self.run_dir)}"
        return f"Stored trajectories and completed steps are kept: fix the problem, then continue: {again}"

    def _wind_down(self, number: int | None) -> None:
        """Wait until all processes have left, except those that hang or take too long."""
        for child in self.children.values():
            child.is_wanted = False
            if number is not None:
                child.send(number)
        deadline = time.monotonic() + self.config.stop_timeout_s
        while any(child.lives for child in self.children.values()) and time.monotonic() < deadline:
            self._watch_run()
            for child in self.children.values():
                child.kill_if_hung()
                ended = child.take_exit()
                if ended is not None:
                    logger.info("%s: %s", child.name, ended.how)
            self.heartbeat.beat("stopping", step=self.metrics.rows.last_step)
            time.sleep(_TICK_S / 2)
        self._watch_run()

    def _finished(self) -> Literal["target", "steps"] | None:
        """Return why the run has ended, once its learner has left; None while it continues."""
        return None if self.children["learner"].is_wanted else self._published_end()

    def _published_end(self) -> Literal["target", "steps"] | None:
        published = read_published(self.run)
        finished: Any = published.finished if published is not None else None
        return finished

    def _watch_run(self) -> None:
        """Report the start and the steps that the learner has written since the last call."""
        heartbeat = self.children["learner"].heartbeat()
        if not self._has_begun and "num_parameters" in heartbeat:
            self._has_begun = True
            self.on_event(
                RunStarted(
                    run_dir=self.run_dir,
                    num_parameters=heartbeat["num_parameters"],
                    first_step=heartbeat["first_step"],
                    total_steps=self.total_steps,
                )
            )
        for row in self.metrics.read():
            self.on_event(StepDone(step=row["step"], total_steps=self.total_steps, metrics=row))

    def _report(self, message: str, level: Literal["info", "warning"] = "warning") -> None:
        self.on_event(Notice(message=message, level=level))

    def _steps_taken(self, _heartbeat: Mapping[str, Any]) -> int:
        return self.metrics.rows.last_step


def _rollouts_stored(heartbeat: Mapping[str, Any]) -> int:
    return heartbeat.get("rollouts", 0)


def _num_trajectories(run_dir: Address) -> int:
    try:
        with TrajectoryStore.open(RunFolder(run_dir).store_path) as store:
            return len(store)
    except StoreNotFoundError:
        return 0
