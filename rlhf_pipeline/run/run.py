"""One run: what it is, and all that is wrong with it. Nothing here imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_pipeline.config import PretrainedPolicy
from rlhf_pipeline.errors import DefinitionError, PipelineError, RunExistsError
from rlhf_pipeline.policies.model_source import resolve_source
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.choice_record import has_chosen
from rlhf_pipeline.run.completeness import check_parts, clear_failed_start
from rlhf_pipeline.run.continuation import (
    check_free_or_recorded,
    check_processes,
    check_unchanged,
    continuation_notices,
)
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.events import EventHandler, notify
from rlhf_pipeline.run.folder import ALONE, RunFolder
from rlhf_pipeline.run.log_file import write_log
from rlhf_pipeline.run.loggers import check_logger
from rlhf_pipeline.run.preflight import (
    check_device,
    check_evaluation,
    check_prompts_and_reward,
    check_stores,
    check_writable,
)
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, process_lock
from rlhf_pipeline.run.processes.launch import is_one_of_several
from rlhf_pipeline.run.record import Setup
from trajectory_store import StoreError

if TYPE_CHECKING:
    from rlhf_pipeline.run.processes.children import SupervisorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Setup):
    """The settings of a run; every way to start a run creates this object first."""

    run_dir: Address
    """The run folder."""
    resume: bool = False
    """Continue from the newest checkpoint there. If false, the folder must not contain a run; a folder from a failed
    start is reused."""
    joins: Literal["collect", "learn"] | None = None
    """The role of this process in a run of several processes; None if it uses the run exclusively."""
    supervised: SupervisorConfig | None = None
    """The collectors and the learner under a supervisor; None runs everything in this process."""
    progress_timeout_s: float | None = None
    """The maximum time that this process may spend in one rollout or step before it exits; None sets no limit."""
    command: str = ""
    """The command that starts this run, without `--resume`; empty if a program starts it."""

    @property
    def again(self) -> str:
        """The command that continues this run."""
        return self.command if self.joins else f"{self.command} --resume" if self.command else "add --resume"

    def check(self) -> list[PipelineError | StoreError]:
        """Return everything that is wrong, as far as that shows without torch, and change nothing."""
        problems: dict[str, PipelineError | StoreError] = {}
        for holds in self._checks():
            try:
                holds()
            except (PipelineError, StoreError) as error:
                problems.setdefault(str(error), error)
        return list(problems.values())

    def checked(self) -> Run:
        """Return this run if nothing is wrong with it."""
        problems = self.check()
        if problems:
            problems[0].args = ("\n".join(map(str, problems)),)
            raise problems[0]
        return self

    @contextmanager
    def begun(self, folder: RunFolder, on_event: EventHandler) -> Iterator[Heartbeat]:
        """Hold the folder for this process alone, with its record written; it is made if absent.

        Yields the heartbeat, which shows others that it is alive and what it does.
        """
        with (
            named_disk_errors(folder),
            folder.lock(),
            write_log(folder),
            process_lock(folder.processes, ALONE),
            Heartbeat(folder.processes, ALONE, progress_timeout_s=self.progress_timeout_s) as heartbeat,
        ):
            heartbeat.beat("starting")
            # Again under the lock: another process may have been faster.
            check_free_or_recorded(folder, resume=self.resume)
            if not self.resume:
                clear_failed_start(folder)
            for notice in continuation_notices(folder, self.pipeline, device=self.device):
                notify(on_event, notice)
            if not self.resume:  # else once the first step is taken; see `Loop`
                folder.record.write(self)
            yield heartbeat
            folder.flush()

    def _checks(self) -> Iterator[Callable[[], object]]:
        """Yield the checks, each independent of the others, in the order in which their errors are reported."""
        pipeline, option = self.pipeline, "--run" if self.joins else "--out"
        yield self._check_folder
        yield lambda: check_writable(self.run_dir, option, locks=True)
        yield lambda: check_device(self.device)
        yield self._check_processes
        if self.joins != "collect" and not is_one_of_several():  # a group looks once it can notify its other processes
            yield lambda: check_logger(pipeline.learn.logger)
        if isinstance(policy := pipeline.policy, PretrainedPolicy):
            yield lambda: resolve_source(policy.path)
        for name in pipeline.evaluations:
            yield functools.partial(check_evaluation, pipeline, name)
        if (replay := pipeline.replay) is None:
            yield lambda: check_prompts_and_reward(pipeline, self.seed)
        elif not (self.resume and has_chosen(RunFolder(self.run_dir))):
            yield lambda: check_stores(replay)

    def _check_folder(self) -> None:
        folder = RunFolder(self.run_dir)
        option = "--run" if self.joins else "--out"
        if not folder.place.is_remote and folder.place.is_alive(
            ALONE
        ):  # reported again under the lock, but that is after torch
            pid = folder.place.heartbeat_of(ALONE).get("pid", "unknown")
            advice = "Stop that process first, or choose another folder with --out."
            raise RunExistsError(f"the run {self.run_dir} is in use by process {pid}. {advice}")
        check_free_or_recorded(folder, resume=self.resume, again=self.again, option=option)
        if self.resume:
            several = self.joins is not None or self.supervised is not None
            check_processes(folder, several=several)
            check_unchanged(folder, self.pipeline, self.seed, overrides=self.overrides)
            if not several:  # those look again while no other process sets the folder up
                check_parts(folder)

    def _check_processes(self) -> None:
        replay, together = self.pipeline.replay is not None, is_one_of_several()
        if self.supervised is not None and together:
            raise DefinitionError("--collectors and torchrun cannot be combined yet; omit one of them.")
        if replay and together:
            raise DefinitionError("learning from stores needs a single process: start the run without torchrun.")
        if self.joins is None and self.supervised is None:
            return
        if replay:
            raise DefinitionError(
                "this definition learns from existing stores (replay), so it uses no collectors. Run it in one "
                "process: `rlhf-pipeline run`, without --collectors."
            )
        if self.pipeline.learn.reference_every:
            raise DefinitionError(
                "learn.reference_every updates the reference only in a run with one process; with collectors, the "
                "reference is frozen. Omit --collectors, or set learn.reference_every=0."
            )
        if self.pipeline.curriculum is not None:
            raise DefinitionError(
                "a curriculum needs every earlier rollout in the store, but collectors sample several rollouts at the "
                "same time. Collect in one process (`rlhf-pipeline run` without --collectors), or "
                "remove the curriculum."
            )
