"""The run folder: the paths, rows, processes and locks of a run. Imports no torch.

    config.json                  what the run was started with
    definition/, inputs/         copies of the definition's source and of the prompts, see `run.inputs`
    store/                       trajectories
    ledger.jsonl                 which trajectories entered which optimizer step
    metrics.jsonl                one line per step
    checkpoints/                 sealed folders, see `run.checkpoint`
    log.txt, logs/               the log of the package; the files of `learn.logger`
    report.html                  for people to read
    gather.json, gather.npy      of a run over stores: what it learns from; recorded_ledger.jsonl: in which order
    rollouts/, weights/, claims/, processes/, supervisor.log    of a run of several processes, see `run.processes`
    group.json                   where the processes of a supervised learner meet
    lock, setup.lock             which process uses the folder

Their names are in `run.filenames`, and no other module spells them. If the run is at a URL, they are this process's
copy, and a mirror is notified what of them is needed, written and gone; see `run.remote.mirror`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from rlhf_pipeline.errors import RunExistsError
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, below
from rlhf_pipeline.run.checkpoint import list_checkpoints, step_of
from rlhf_pipeline.run.place import place_of
from rlhf_pipeline.run.record import RunConfig, RunRecord
from rlhf_pipeline.run.rows import StepRows
from trajectory_store.locks import try_lock
from trajectory_store.new_files import write_atomically

logger = logging.getLogger(__name__)

ALONE: Final = "run"
"""The name of a process that uses the run exclusively."""


class RunFolder:
    """A run, or the place for one. Files are read on first use, and rows only when needed.

    Args:
        path: the folder, or a URL such as `s3://bucket/run`; it need not exist yet.

    Attributes:
        place: where the run is: a folder, or an object store of which this process has a copy.
        record: what the run was started with, and what has changed since.
        address: where the run is.
        path: where this process has the run's files: the folder itself, or a copy.
        patience_s: the longest pause between two checks while nothing happens, in seconds.

    Raises:
        StoreError: the path is a URL, and the package that it needs is not installed.
    """

    def __init__(self, path: Address) -> None:
        self.place = place_of(path)
        self.address: Address = self.place.address
        self.record = RunRecord(self.place)
        self.path, self.patience_s = self.place.root, self.place.patience_s
        self.store_path: Address = below(self.address, filenames.STORE)
        self.checkpoints = self.path / filenames.CHECKPOINTS
        self.metrics_file = self.path / filenames.METRICS
        self.ledger_file = self.path / filenames.LEDGER
        self.log_file = self.path / filenames.LOG
        self.supervisor_log = self.path / filenames.SUPERVISOR_LOG
        self.logger_files = self.path / filenames.LOGS
        self.report_file = self.path / filenames.REPORT
        self.choice_file = self.path / filenames.CHOICE
        self.choice_table = self.path / filenames.CHOICE_TABLE
        self.recorded_ledger = self.path / filenames.RECORDED_LEDGER
        """A copy of the replayed run's ledger, if its store alone does not determine the order."""
        self.rollouts = self.path / filenames.ROLLOUTS
        self.weights = self.path / filenames.WEIGHTS
        self.claims = self.path / filenames.CLAIMS
        self.processes = self.path / filenames.PROCESSES
        self.group_file = self.path / filenames.GROUP

    @classmethod
    def open(cls, path: Address) -> RunFolder:
        """Return the run at a path.

        Raises:
            MissingPathError: there is no run.
            DataError: `config.json` is damaged or of another format.
        """
        run = cls(path)
        _ = run.config
        return run

    # Its content

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration with which the run was started.

        Raises:
            MissingPathError: there is no run.
            DataError: `config.json` is damaged or of another format.
        """
        return self.record.config()

    @functools.cached_property
    def metrics(self) -> StepRows:
        """One row per optimizer step, in order."""
        return self.rows(self.metrics_file)

    @functools.cached_property
    def ledger(self) -> StepRows:
        """Which trajectories entered which optimizer step, in order."""
        return self.rows(self.ledger_file)

    def rows(self, file: Path) -> StepRows:
        """Return the current rows of `metrics_file` or `ledger_file`."""
        return self.place.rows(file.name)

    def lines_of(self, step: int) -> dict[str, int]:
        """Return the checksums of a step's lines of ledger and metrics, by file; none of a step that was not taken."""
        checksums = {file.name: self.rows(file).checksum_of(step) for file in (self.ledger_file, self.metrics_file)}
        return {name: checksum for name, checksum in checksums.items() if checksum is not None}

    def lines_problem(self, step: int, noted: Mapping[str, int]) -> str | None:
        """Return which lines of a step differ from those that its checkpoint noted, or None.

        The lines of another run differ: the metrics record when the step was taken.
        """
        now = self.lines_of(step)
        changed_files = [name for name, checksum in noted.items() if now.get(name) != checksum]
        if not changed_files:
            return None
        where = " and ".join(changed_files)
        return f"the line for step {step} in {where} belongs to another run"

    def saved(self) -> list[Path]:
        """Return the checkpoints, whole or not, oldest first; at a URL only their names are here until `bring`."""
        self.inside(self.checkpoints)
        return list_checkpoints(self.checkpoints)

    def inside(self, folder: Path) -> list[str]:
        """Return the names of the folders in a folder of the run, sorted; none if there is no such folder."""
        self.place.outline(folder.name)
        return sorted(path.name for path in folder.glob("*/"))

    def bring(self, path: Path) -> Path:
        """Fetch the current state of a file or folder of the run; return its path."""
        self.place.bring(path.relative_to(self.path).as_posix())
        return path

    def write(self, path: Path, content: bytes) -> None:
        """Write a file of the run atomically, and keep it."""
        write_atomically(path, content)
        self.keep(path)

    def keep(self, path: Path) -> None:
        """Keep a file or folder of the run that this process has written: at a URL, store it there.

        Other processes see the files of one process in the order of its calls.

        Raises:
            LeaseLostError: another process has taken over writing it.
        """
        self.place.keep(path.relative_to(self.path).as_posix())

    def drop(self, path: Path) -> None:
        """Remove a sealed folder for all processes, after this process has removed its own."""
        self.place.drop(path.relative_to(self.path).as_posix())

    def flush(self) -> None:
        """Wait until everything that this process keeps is stored."""
        self.place.flush()

    def first_and_last_reward(self) -> tuple[float | None, float | None]:
        """Return the first and the last mean task reward among the first and the last steps."""
        ends = (self.metrics[:_LOOKED_AT], reversed(self.metrics[-_LOOKED_AT:]))
        rewards = ((row.get("task_reward") for row in rows) for rows in ends)
        first, last = (next((float(reward) for reward in column if reward is not None), None) for column in rewards)
        return first, last

    # Its state

    @property
    def is_of_several(self) -> bool:
        """Whether the run has several processes: then it counts the rollouts that its collectors stored."""
        return self.place.has(filenames.ROLLOUTS)

    @property
    def next_step(self) -> int:
        """The first step that a process which continues the run takes."""
        return max((step_of(path) for path in self.saved()), default=0) + 1

    # Locks and logs

    @contextmanager
    def lock(
        self, *, shared: bool = False, advice: str = "Stop that process first, or choose another folder with --out."
    ) -> Iterator[None]:
        """Hold the folder's lock, which the kernel drops with its process; the folder is made if absent.

        Args:
            shared: share the lock with other processes of the run, as collectors and learner do; this excludes only a
                process that takes the lock exclusively.
            advice: what to do if the lock is taken, for the message.

        Raises:
            RunExistsError: another live process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / filenames.LOCK).open("a+", encoding="utf-8") as file:
            if not try_lock(file, shared=shared):
                file.seek(0)
                holder = self._holder(file.read().strip())
                raise RunExistsError(f"the run {self.address} is in use by {holder}. {advice}")
            if not shared:
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            with nullcontext() if shared else self._alone(advice):
                yield

    def in_use_since(self) -> float | None:
        """Return since when one process has the run for itself, in seconds since 1970; None if none has."""
        if self.place.is_alive(ALONE):
            return self.place.heartbeat_of(ALONE).get("started", 0.0)
        try:
            with (self.path / filenames.LOCK).open(encoding="utf-8") as file:
                return None if try_lock(file, shared=True) else os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None

    @contextmanager
    def _alone(self, advice: str) -> Iterator[None]:
        """Hold the run where others share no lock with this process: at a URL they have leases."""
        with self.place.lease(ALONE):
            at_work = self.place.living() - {ALONE}
            if at_work:
                raise RunExistsError(
                    f"the run {self.address} is in use by its own processes ({', '.join(sorted(at_work))}). {advice} "
                    "(At a URL, a killed process is treated as running until its lease expires.)"
                )
            yield

    def _holder(self, written: str) -> str:
        beating = sorted(path.stem for path in self.processes.glob("*.json"))
        return f"process {written}" if written else f"its own processes ({', '.join(beating) or 'unknown'})"


_LOOKED_AT: Final = 256
"""The number of steps at each end of a run that are searched for its first and its last reward."""
