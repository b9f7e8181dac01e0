"""The run folder: every path, record, lock, log and check of a run is here. Imports no torch.

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
copy, and a mirror is told what of them is needed, written and gone; see `run.remote.mirror`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import google_crc32c

from rlhf_pipeline import __version__
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.errors import (
    DataError,
    DefinitionError,
    MissingPathError,
    RunExistsError,
    RunMismatchError,
    RunStorageError,
    did_you_mean,
    plain,
    typed,
)
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, address_of, below, is_url
from rlhf_pipeline.run.checkpoint import list_checkpoints, step_of
from rlhf_pipeline.run.config_diff import (
    LAST_BITS,
    acts_differently,
    carries_over,
    changes,
    definition_at,
    is_allowed,
    notice_of,
)
from rlhf_pipeline.run.events import EventHandler, Notice
from rlhf_pipeline.run.files import remove_folder, tidy, write_atomically
from rlhf_pipeline.run.inputs import changed_prompts, check_inputs, describe_inputs, keep_inputs, place
from rlhf_pipeline.run.local_place import LocalPlace
from rlhf_pipeline.run.processes.heartbeat import try_lock
from rlhf_pipeline.run.recorded_code import changed_code, describe_code
from rlhf_pipeline.run.rows import Row, StepRows
from trajectory_store.errors import WriteFailedError

if TYPE_CHECKING:
    from rlhf_pipeline.run.remote.mirror import Mirror

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""The format of `config.json` that this version reads and writes."""
_IDENTITY: Final = "identity"
"""The form in which a run records code: 2, the identities of `user_code.identity`; without it, the hash of its text."""

ALONE: Final = "run"
"""The name of a process that has the run for itself."""

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
"""The folders that a start makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The content of `config.json`: enough to build the same pipeline again."""

    definition: str
    """A built-in name, or `/abs/file.py:function`."""
    overrides: tuple[tuple[str, str], ...]
    seed: int
    device: str
    pipeline: Mapping[str, Any]
    """The definition as plain data, for people to read; a resume loads the definition itself."""
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    """Number of threads and processor: both can move the last bits of a sum."""
    place: Mapping[str, str]
    """Machine, user and path where it was last started; see `run.inputs.place`."""
    begun_from: Mapping[str, Any] | None
    """The `run` and the `step` whose checkpoint it began with, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings with which a process starts or continues a run."""

    pipeline: Pipeline
    """The definition, overrides applied."""
    definition: str = ""
    """Where the definition came from, as in `RunConfig`."""
    overrides: Sequence[tuple[str, str]] = ()
    """The `--set` pairs already applied."""
    seed: int = 0
    """Seeds the model made from scratch, the order of the prompts and every completion or batch."""
    device: str = "cpu"
    """Where models live, for example `cpu` or `cuda`."""


class RunFolder:
    """A run, or the place for one. Files are read on first use, and rows only when needed.

    Args:
        path: the folder, or a URL such as `s3://bucket/run`; it need not exist yet.

    Attributes:
        place: where the run is: a folder, or an object store of which this process has a copy.
        address: where the run is.
        path: where this process has the run's files: the folder itself, or a copy.
        patience_s: the longest pause between two checks while nothing happens, in seconds.

    Raises:
        StoreError: the path is a URL, and the package that it needs is not installed.
    """

    def __init__(self, path: Address) -> None:
        self.place = place_of(path)
        self.address: Address = self.place.address
        self.path, self.patience_s = self.place.root, self.place.patience_s
        self.store_path: Address = below(self.address, filenames.STORE)
        self.checkpoints = self.path / filenames.CHECKPOINTS
        self.metrics_file = self.path / filenames.METRICS
        self.ledger_file = self.path / filenames.LEDGER
        self.config_file = self.path / filenames.CONFIG
        self.log_file = self.path / filenames.LOG
        self.supervisor_log = self.path / filenames.SUPERVISOR_LOG
        self.logger_files = self.path / filenames.LOGS
        self.report_file = self.path / filenames.REPORT
        self.choice_file = self.path / filenames.CHOICE
        self.choice_table = self.path / filenames.CHOICE_TABLE
        self.recorded_ledger = self.path / filenames.RECORDED_LEDGER
        """A copy of the replayed run's ledger, if its store alone does not give the order."""
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
        """What the run was started with.

        Raises:
            MissingPathError: there is no run.
            DataError: `config.json` is damaged or of another format.
        """
        data = self._recorded()
        return RunConfig(
            definition=str(data["definition"]),
            overrides=tuple((str(path), str(text)) for path, text in data.get("overrides", [])),
            seed=int(data.get("seed", 0)),
            device=str(data.get("device", "cpu")),
            pipeline=data.get("pipeline", {}),
            versions=data.get("versions", {}),
            machine=data.get("machine", {}),
            place=data.get("place", {}),
            begun_from=data.get("begun_from"),
        )

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
        """Say which lines of a step are not those that a checkpoint of it has noted, or return None.

        Those of another run differ: the metrics tell when the step was taken.
        """
        now = self.lines_of(step)
        others = [name for name, checksum in noted.items() if now.get(name) != checksum]
        if not others:
            return None
        where = " and ".join(others)
        return f"it was written after another line of step {step} than that of {where}: one is another run's"

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

    def heartbeat_of(self, name: str) -> dict[str, Any]:
        """Return the last report of a process of the run about itself; empty if there is none."""
        return self.place.heartbeat_of(name)

    def is_alive(self, name: str) -> bool:
        """Return whether a process of this name is working on the run."""
        return self.place.is_alive(name)

    def living(self) -> set[str]:
        """Return the names of the processes that are working on the run."""
        return self.place.living()

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
    def is_recorded(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file() or self.bring(self.config_file).is_file()

    @property
    def has_chosen(self) -> bool:
        """Whether a run over stores has recorded its choice of trajectories, which is then final."""
        return self.bring(self.choice_file).is_file()

    def chosen(self) -> dict[str, Any] | None:
        """Return the choice that a run over stores has recorded, or None if it has not chosen.

        Raises:
            DataError: the record has changed since it was written.
        """
        if not self.has_chosen:
            return None
        state: Any = None
        try:
            state = json.loads(self.choice_file.read_bytes())
            whole = state.pop("crc32c") == google_crc32c.value(_canonical(state))
        except (ValueError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise DataError(f"{self.choice_file} is not as it was written. {RESTORE}")
        return state

    def choose(self, state: Mapping[str, Any]) -> None:
        """Record atomically what a run over stores learns from, JSON-ready."""
        checked = {**state, "crc32c": google_crc32c.value(_canonical(state))}
        self.write(self.choice_file, json.dumps(checked).encode())

    def gathered(self) -> dict[str, int] | None:
        """Return the counts of what a run over stores has copied, or None until it has copied its whole choice."""
        return (self.chosen() or {}).get("gathered")

    @property
    def is_of_several(self) -> bool:
        """Whether the run has several processes: then it counts the rollouts that its collectors stored."""
        return self.place.has(filenames.ROLLOUTS)

    @property
    def is_free(self) -> bool:
        """Whether a new run may be made here: the place is empty, or holds only what a failed start left."""
        if self.place.is_remote:
            return not self.is_recorded or self.came_to_nothing
        blank = not self.path.exists() or (
            self.path.is_dir() and {path.name for path in self.path.iterdir()} <= _BEFORE_THE_RECORD
        )
        return blank or self.came_to_nothing

    @property
    def came_to_nothing(self) -> bool:
        """Whether a run was started here but has no trajectory, no step, and nothing to continue from."""
        if not self.is_recorded or len(self.metrics) or len(self.ledger) or self.has_chosen:
            return False
        if any(step_of(path) for path in self.saved()):
            return False
        # Imported only where a store is opened: NumPy takes longer to import than the rest of a command takes.
        from trajectory_store import StoreError, StoreNotFoundError, TrajectoryStore

        for name in (filenames.STORE,) if self.place.is_remote else (filenames.STORE, filenames.ROLLOUTS):
            try:
                with TrajectoryStore.open(below(self.address, name)) as store:
                    if store.watermark:
                        return False
            except StoreNotFoundError:
                continue
            except StoreError:
                return False
        return True

    def clear(self) -> None:
        """Remove what a failed start left; does nothing in any other folder."""
        if not self.came_to_nothing:
            return
        for name in _FOLDERS:
            if (self.path / name).exists():
                remove_folder(self.path / name)
        self.place.clear()
        tidy(self.path)
        for file in (self.metrics_file, self.ledger_file, self.choice_table, self.recorded_ledger):
            file.unlink(missing_ok=True)
        self.config_file.unlink()  # last: after a kill before this, `clear` can be called again

    # Checks

    def check_free_or_recorded(self, *, resume: bool, again: str = "add --resume", option: str = "--out") -> None:
        """Refuse to start where something exists, or to resume where nothing does.

        Args:
            resume: whether to continue a run.
            again: how to continue, for the message.
            option: the option that names the folder, for the message.

        Raises:
            RunExistsError: the folder exists and is not empty, or is a file.
            MissingPathError: there is no run to resume.
        """
        if resume:
            if not self.is_recorded:
                raise not_found(self.address, "run to resume")
            return
        if self.is_free:
            return
        others = (address_of(f"{self.address}-{number}") for number in itertools.count(2))
        free = next(
            candidate
            for candidate in others
            if not (candidate.exists() if isinstance(candidate, Path) else is_run(candidate))
        )
        free = f"{option} {typed(free)}"
        if self.is_recorded:
            _, reward = self.first_and_last_reward()
            state = "" if reward is None else f" ({self.metrics.last_step} steps, last reward {reward:.2f})"
            raise RunExistsError(
                f"{self.address} holds a run already{state}. Go on with it: {again}. "
                f"Or keep it and choose another folder: {free}"
            )
        what = "is not a run; nothing in it is touched" if self.path.is_dir() else "is a file"
        raise RunExistsError(f"{self.address} exists and {what}. Choose another folder: {free}")

    def check_processes(self, *, several: bool) -> None:
        """Refuse to continue a run of several processes in one process, or the reverse: they count differently.

        Raises:
            RunMismatchError: the message says how to continue.
        """
        if not several and self.is_of_several:
            raise RunMismatchError(
                f"{self.address} is a run of several processes. Go on with it: add --collectors N, for example "
                "--collectors 1."
            )
        if several and self.place.has(filenames.STORE) and not self.is_of_several:
            raise RunMismatchError(
                f"{self.address} is a run in one process. Go on with it: "
                f"rlhf-pipeline run --resume --out {typed(self.address)}, or "
                "start another run for several processes in another folder."
            )

    def check_unchanged(
        self, pipeline: Pipeline, seed: int, *, inputs: bool = True, overrides: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Refuse to resume under a definition or seed that would learn something else.

        Args:
            pipeline: the definition now.
            seed: the seed now.
            inputs: whether the files that the definition names must be unchanged, too.
            overrides: the `--set` pairs of the definition, for the command that the message advises.

        Raises:
            RunMismatchError: names every field that differs, or the prompt file or model folder that has changed.
        """
        if not self.is_recorded:
            return
        before = self._recorded()
        by_content = before.get("inputs", {}) if inputs else {}
        differences = [
            change
            for change in changes(before["pipeline"], pipeline)
            if not (is_allowed(change.field) or change.field in by_content)
        ]
        changed, options = list(map(str, differences)), ""
        for path, text in overrides:
            if any(f"{change.field}.".startswith(f"{path}.") for change in differences):
                options += f" --set {typed(f'{path}={text}')}"
        if before["seed"] != seed:
            changed.append(f"seed was {before['seed']!r}, is {seed!r}")
            options += f" --seed {seed}"
        if changed:
            otherwise = (
                self._with_its_weights(options) if all(carries_over(change.field) for change in differences) else None
            )
            raise RunMismatchError(
                f"{self.address} was started with another definition: {'; '.join(changed)}. Go on with the recorded "
                f"one, or {otherwise or 'start a new run with --out OTHER_FOLDER.'}"
            )
        if inputs:
            from_checkpoint = (
                Path(getattr(pipeline.policy, "path", "")).parent == self.checkpoints
            )  # its weights have moved on
            check_inputs(
                self.address,
                by_content if not from_checkpoint else by_content | {"policy.path": {}},
                pipeline,
                definition=before["pipeline"],
                otherwise=self._with_its_weights(options),
            )

    def _with_its_weights(self, options: str = "") -> str | None:
        """Say how to begin another run with the weights of this one; None if it has no checkpoint."""
        saved = self.saved()
        if not saved:
            return None
        source = typed(f"{self.address}@{step_of(saved[-1])}")
        return f"begin a new run with its weights: rlhf-pipeline run --from {source}{options} --out OTHER_FOLDER"

    def notices(self, pipeline: Pipeline, *, device: str | None = None) -> Iterator[str]:
        """Yield notices for the user about the definition with which a run continues; none for a new run.

        Args:
            pipeline: the definition now.
            device: where the learner is now; None for a process that does not learn, whose device does not matter.
        """
        if not self.is_recorded:
            return
        before = self._recorded()
        files = before.get("inputs", {})
        yield from map(str, changed_code(files, pipeline, by_text=self.is_recorded_by_text))
        yield from changed_prompts(files, pipeline)
        if device is None:
            return
        step, differences = self._next_step(), changes(before["pipeline"], pipeline)
        now = describe_inputs(pipeline) if any(change.field in files for change in differences) else {}
        for change in differences:
            if change.field in now and now[change.field] == files.get(change.field):
                continue  # the same file at another place
            if (notice := notice_of(change, before["pipeline"], pipeline, step)) is not None:
                yield notice
        for moved in self.moved_versions(device):
            yield f"{moved}: {LAST_BITS}."

    def moved_versions(self, device: str | None = None) -> Iterator[str]:
        """Yield what has changed since the run was started: package versions, processor, threads, device."""
        now, before = _versions() | _machine() | ({"device": device} if device else {}), self.config
        for name, old in {**before.versions, **before.machine, "device": before.device}.items():
            if str(old) != str(now.get(name, old)):
                again = f" (to keep it: OMP_NUM_THREADS={old})" if name == "threads" else ""
                yield f"{name} was {old}, is {now[name]}{again}"

    def check_parts(self) -> None:
        """Refuse to continue a run with missing parts; see `missing_parts`.

        Raises:
            DataError: names what is missing.
        """
        problems = list(self.missing_parts())
        if problems:
            raise DataError(
                f"{self.address} is not whole: {'; '.join(problems)}. Going on would take steps that do not fit those "
                "before. Restore what is missing from a copy, or start a new run with --out OTHER_FOLDER. All that is "
                f"wrong: rlhf-pipeline verify {typed(self.address)}"
            )

    def missing_parts(self) -> Iterator[str]:
        """Yield the inconsistencies between store, ledger, metrics and checkpoints, in constant time.

        A checkpoint is written after the ledger, the metrics and the trajectories that it depends on, and the first one
        before the first step. So a checkpoint without them, or steps without a checkpoint, mean that parts are gone.
        """
        saved = [step_of(path) for path in self.saved()]
        newest = max(saved, default=0)
        num_steps = max(len(self.ledger), len(self.metrics))
        for rows in (self.ledger, self.metrics):
            if rows.last_step < newest:
                yield f"{rows.path.name} ends with step {rows.last_step}, and there is a checkpoint of step {newest}"
            elif len(rows) != rows.last_step:
                yield f"{rows.path.name} has {len(rows)} rows up to step {rows.last_step}"
            elif rows.is_moved:
                yield f"the last line of {rows.path.name} is not as it was written, or not where"
        if num_steps and not saved:
            yield f"there is no checkpoint, and {num_steps} steps were taken"
        if (
            num_steps or newest or (saved and self.config.begun_from is None)
        ):  # a branch has a checkpoint before a store
            row = self.ledger.of_step(newest)
            stored = (
                (self.gathered() or {"trajectories": 0})["trajectories"] if row is None else row.get("watermark", 0)
            )
            yield from self._missing_rows(filenames.STORE, stored, "trajectories")
        if (num_steps or saved) and self.is_of_several:
            begun = -(-newest // _steps_per_rollout(self.config.pipeline))
            yield from self._missing_rows(self.rollouts.name, begun, "rollouts")
        if (num_steps or saved) and self.config.pipeline.get("replay") is not None and not self.has_chosen:
            yield f"there is no {self.choice_file.name}, which says what it learns from"
        if len(self.ledger) and "rollout" in self.ledger[-1] and not self.is_of_several and not self.has_chosen:
            yield f"there is no {self.rollouts.name}, where its collectors counted"

    def _missing_rows(self, name: str, counted: int, what: str) -> Iterator[str]:
        """Yield a problem if a store of the run is missing, or has seen less than the run had stored."""
        from trajectory_store import StoreError, TrajectoryStore

        if self.place.is_remote and name == filenames.ROLLOUTS:  # not a store: one object each
            return
        try:
            with TrajectoryStore.open(below(self.address, name)) as store:
                if store.watermark < counted:
                    yield f"{name} has seen {store.watermark} {what}, and the run had stored {counted}"
                elif name == filenames.ROLLOUTS and len(store.ids()) < store.watermark:  # which keeps every row
                    for problem in store.verify().problems[:1]:  # none if a power loss took them
                        yield f"{name} is damaged: {problem.rstrip('.')}"
        except StoreError as error:
            yield f"{name} cannot be read ({error})" if self.place.has(name) else f"there is no {name}"

    # Its record

    def changed_from(self, pipeline: Pipeline, step: int) -> bool:
        """Return whether steps from this one on, if any were taken, had settings that gave other figures."""
        before = self._recorded()
        new = [change.to_json() for change in changes(before["pipeline"], pipeline)]
        history = [*before.get("changes", []), {"from_step": self.metrics.last_step + 1, "fields": new}]
        return any(
            acts_differently(definition_at(pipeline, history, number), pipeline, number)
            for number in range(step, self.metrics.last_step + 1)
        )

    def record(
        self, setup: Setup, *, begun_from: Mapping[str, object] | None = None, from_step: int | None = None
    ) -> bool:
        """Write `config.json` atomically; return False if another process has begun the run in the meantime.

        Args:
            setup: the settings of this process.
            begun_from: the run and the step whose checkpoint a new run begins with, if any.
            from_step: the first step that was taken with these settings, if the run goes on with them. They are
                recorded after it: settings that cannot work would stay, and no resume could go on.

        Raises:
            DefinitionError: the definition cannot be recorded.
        """
        again = self.is_recorded
        recorded = self._recorded() if again else {}
        content = {"format": FORMAT, "definition": setup.definition, "overrides": setup.overrides, "seed": setup.seed}
        by_text = again and _IDENTITY not in recorded
        content |= {} if by_text else {_IDENTITY: 2}
        inputs = describe_inputs(setup.pipeline) | describe_code(setup.pipeline, by_text=by_text)
        content |= {"device": setup.device, "inputs": inputs, "versions": _versions()}
        content |= {"machine": {**recorded.get("machine", {}), **_machine()}, "place": place(self.address)}
        begun = begun_from or recorded.get("begun_from")
        content |= {"begun_from": begun} if begun else {}
        first = self._next_step() if from_step is None else from_step
        # A run that has gone back to an earlier checkpoint takes those steps with its later settings.
        history = [{**change, "from_step": min(change["from_step"], first)} for change in recorded.get("changes", [])]
        if again:
            code = changed_code(recorded.get("inputs", {}), setup.pipeline, by_text=by_text)
            new = [change.to_json() for change in (*changes(recorded["pipeline"], setup.pipeline), *code)]
            history += [{"from_step": first, "fields": new}] if new else []
        content |= {"changes": history} if history else {}
        try:
            content |= {"pipeline": to_json(setup.pipeline)}
            plain_content = json.loads(json.dumps(content))
            text = json.dumps({**plain_content, "crc32c": google_crc32c.value(_canonical(plain_content))}, indent=1)
        except TypeError as error:
            raise DefinitionError(
                f"the definition cannot be recorded: {error}. Its fields must be dataclasses, functions, text, "
                "numbers, lists or None."
            ) from error
        for copy in keep_inputs(self.path, setup.definition, setup.pipeline):
            self.keep(copy)
        if again and self.config_file.read_bytes() == text.encode():
            return True
        write_atomically(self.config_file, text.encode())
        if not again:
            return self.place.keep_first(filenames.CONFIG)
        self.keep(self.config_file)
        return True

    @property
    def history(self) -> list[dict[str, Any]]:
        """The changes of the definition since the run began, each with the first step that was taken with it."""
        return self._recorded().get("changes", [])

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """The record of the files that the definition named when the run was started; see `run.inputs`."""
        return self._recorded().get("inputs", {})

    @property
    def is_recorded_by_text(self) -> bool:
        """Whether code is compared by its text alone, in a run that was begun before there were identities."""
        return self.is_recorded and _IDENTITY not in self._recorded()

    def _next_step(self) -> int:
        """Return the first step that a process which continues the run takes."""
        return max((step_of(path) for path in self.saved()), default=0) + 1

    def _recorded(self) -> dict[str, Any]:
        if not self.is_recorded:
            raise not_found(self.address)
        file = self.config_file
        try:
            data: Any = json.loads(file.read_bytes())
        except ValueError as error:
            raise DataError(
                f"{file} is not JSON ({error}). Restore it, or start a new run with another --out."
            ) from error
        if not isinstance(data, dict) or "definition" not in data:
            raise DataError(f"{file} is not the configuration of a run: it names no 'definition'.")
        if data.get("format") != FORMAT:
            raise DataError(
                f"{file} has format {data.get('format')!r}; this version of rlhf-pipeline reads format {FORMAT}. "
                "Read it with the version that wrote it (its 'versions' say which), or upgrade this one."
            )
        if data.pop("crc32c", None) not in (None, google_crc32c.value(_canonical(data))):
            raise DataError(
                f"{file} is not as it was written: it was edited or damaged. Restore it from a copy. If you have "
                "edited it, remove its line with crc32c; settings are changed with --resume --set."
            )
        return data

    # Locks and logs

    @contextmanager
    def lock(
        self, *, shared: bool = False, advice: str = "Stop that first, or choose another folder with --out."
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
        if self.is_alive(ALONE):
            return self.heartbeat_of(ALONE).get("started", 0.0)
        try:
            with (self.path / filenames.LOCK).open(encoding="utf-8") as file:
                return None if try_lock(file, shared=True) else os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None

    @contextmanager
    def _alone(self, advice: str) -> Iterator[None]:
        """Hold the run where others share no lock with this process: at a URL they have leases."""
        with self.lease(ALONE):
            at_work = self.living() - {ALONE}
            if at_work:
                raise RunExistsError(
                    f"the run {self.address} is in use by its own processes ({', '.join(sorted(at_work))}). {advice} "
                    "(At a URL a killed process counts as running until its lease ends.)"
                )
            yield

    def lease(self, name: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold a name on every machine, if the run is at a URL; see `Mirror.lease`."""
        return self.place.lease(name, wait_s=wait_s)

    @contextmanager
    def setup_lock(self) -> Iterator[None]:
        """Hold the lock under which only one process of the run sets up the folder."""
        with (self.path / filenames.SETUP_LOCK).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _holder(self, written: str) -> str:
        beating = sorted(path.stem for path in self.processes.glob("*.json"))
        return f"process {written}" if written else f"its own processes ({', '.join(beating) or 'unknown'})"

    @contextmanager
    def log(self, file: Path | None = None, level: int = logging.WARNING) -> Iterator[None]:
        """Also write the package's log, from a level on, to a file; `log.txt` by default."""
        handler = _QuietHandler(self.log_file if file is None else file, encoding="utf-8")
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package = logging.getLogger("rlhf_pipeline")
        before = package.level
        if not package.isEnabledFor(level):
            package.setLevel(level)
        package.addHandler(handler)
        try:
            yield
        finally:
            package.removeHandler(handler)
            package.setLevel(before)
            handler.close()
            self.place.keep_log(self.log_file if file is None else file)

    @contextmanager
    def named_disk_errors(self) -> Iterator[None]:
        """Turn a bare OSError of the folder's own files into an error that says what is safe and what to do."""
        try:
            yield
        except OSError as error:
            in_store = isinstance(error, WriteFailedError)
            if type(error).__module__ != "builtins" and not in_store:
                raise  # errors of this package and of the store have the next command already
            if not in_store and not self._is_about_the_folder(error):
                raise
            if isinstance(self.address, Path) and not self.path.is_dir():
                raise RunStorageError(
                    f"the run folder {self.address} is gone: it was moved or removed while the run wrote to it. Put it "
                    "back, or go on with it at its new place: rlhf-pipeline run --resume --out NEW_PLACE"
                ) from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
                advice = "Choose a folder that can be written: --out OTHER_FOLDER."
            else:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                advice = (
                    "Every stored trajectory and every finished checkpoint is intact. "
                    f"{'Free some space' if full else 'Fix that'}, then repeat the command with --resume."
                )
            raise RunStorageError(f"the run folder {self.address} cannot be written: {error}. {advice}") from error

    def _is_about_the_folder(self, error: OSError) -> bool:
        """Return whether an error is one of writing here: an error of a disk, or one that names a file of the run."""
        if error.filename is None:
            return error.errno is None or error.errno in _OF_A_DISK
        return Path(os.fsdecode(error.filename)).absolute().is_relative_to(self.path.absolute())


_OF_A_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE})
"""Numbers of errors that a write without a file name can raise."""


def tell(on_event: EventHandler, message: str, *, level: Literal["info", "warning", "progress"] = "warning") -> None:
    """Report a message to the observer and the log."""
    logger.log(logging.WARNING if level == "warning" else logging.INFO, message)
    on_event(Notice(message=message, level=level))


def _canonical(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, sort_keys=True).encode()


RESTORE: Final = "Restore it from a copy, or start the run again with --out OTHER_FOLDER."

_LOOKED_AT: Final = 256
"""Steps at each end of a run that are searched for its first and its last reward."""


def _versions() -> dict[str, str]:
    packages = ("torch", "torchrl", "tensordict", "transformers", "numpy")
    return {"rlhf-pipeline": __version__, "python": platform.python_version()} | {
        name: version(name) for name in packages
    }


def _machine() -> dict[str, Any]:
    """Return what the last bits of a sum depend on; the number of threads only where torch has been imported."""
    torch: Any = sys.modules.get("torch")
    threads = {} if torch is None else {"threads": torch.get_num_threads()}
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = next(line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return {**threads, "processor": name}


def place_of(address: Address) -> LocalPlace | Mirror:
    """Return the place of a run, without a request and without making anything."""
    if not is_url(address):
        return LocalPlace(Path(address))
    from rlhf_pipeline.run.remote.mirror import Mirror

    return Mirror(str(address))


class _QuietHandler(logging.FileHandler):
    """Writes a log that may be cut short: a full disk ends the run elsewhere, in a sentence."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing about a line that could not be written."""


class _PlainFormatter(logging.Formatter):
    """Formats lines that are safe to print to a terminal, whatever names and exceptions they contain."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def is_run(path: Address) -> bool:
    """Return True if a run was started in this folder, or at this URL; a model's folder has a `config.json` too."""
    run = RunFolder(path)
    if not run.is_recorded:
        return False
    with suppress(ValueError):  # one that is damaged is a run's: who opens it says so
        recorded = json.loads(run.config_file.read_bytes())
        return isinstance(recorded, dict) and ("pipeline" in recorded or "format" in recorded)
    return True


def is_store(path: Address) -> bool:
    """Return True if this folder, or this URL, is a trajectory store."""
    return place_of(path).has("zarr.json")


def run_of_store(store: Address) -> Address | None:
    """Return where the run of a store is, or None if the store belongs to no run."""
    if isinstance(store, Path):
        name, parent = store.name, store.resolve().parent
    else:
        parent, _, name = store.rpartition("/")
    return parent if name == filenames.STORE and is_run(parent) else None


def run_of_evaluation(store: Address) -> RunFolder | None:
    """Return the run that a store of evaluations belongs to, or None; its rows are not those of the run's ledger."""
    parent, _, _ = str(store.absolute() if isinstance(store, Path) else store).rpartition("/")
    place, _, name = parent.rpartition("/")
    return RunFolder.open(address_of(place)) if name == filenames.EVALUATIONS and is_run(address_of(place)) else None


def open_run_or_store(path: Address) -> tuple[RunFolder | None, Address]:
    """Return the run at `path`, if it is one, and where its store is."""
    folder = address_of(path)
    if is_run(folder):
        run = RunFolder.open(folder)
        if not is_store(run.store_path) and not run.came_to_nothing and list(run.missing_parts()):
            raise MissingPathError(
                f"the store of the run {folder} is gone: there is none at {run.store_path}, and the run has stored "
                f"trajectories. Restore it from a copy. What else is missing: rlhf-pipeline verify {typed(folder)}"
            )
        if not is_store(run.store_path):
            raise MissingPathError(
                f"the run {folder} has stored nothing yet: there is no store at {run.store_path}. "
                f"If it stopped early, go on with it: rlhf-pipeline run --resume --out {typed(folder)}"
            )
        return run, run.store_path
    if is_store(folder):
        owner = run_of_store(folder)
        return (None if owner is None else RunFolder.open(owner)), folder
    raise not_found(folder, "run or store")


def not_found(path: Address, kind: str = "run") -> MissingPathError:
    """Return an error that names the runs that exist."""
    if not isinstance(path, Path):
        return MissingPathError(
            f"there is no {kind} at {path}. Make one: rlhf-pipeline run copy_digits --out {typed(path)}"
        )
    runs = sorted({*_runs_in(path.parent), *_runs_in(Path("runs"))})
    runs += [at / filenames.STORE for at in (path, path.parent) if is_store(at / filenames.STORE)]
    if not runs:
        hint = " Make one: rlhf-pipeline run copy_digits"
    else:
        near = did_you_mean(str(path), [str(run) for run in runs if run != path])
        hint = near.replace("Known:", "Runs here:") if len(runs) <= 8 else near.split(" Known:")[0]
    what = "is not one" if path.exists() else "does not exist"
    return MissingPathError(f"there is no {kind} at {path}: the folder {what}.{hint}")


def _runs_in(folder: Path) -> list[Path]:
    runs = [RunFolder(config.parent) for config in folder.glob(f"*/{filenames.CONFIG}")]
    return [run.path for run in runs if run.metrics_file.is_file()]


__all__ = [
    "Row",
    "RunConfig",
    "RunFolder",
    "Setup",
    "is_run",
    "is_store",
    "not_found",
    "open_run_or_store",
    "run_of_evaluation",
    "run_of_store",
    "tell",
]


def _steps_per_rollout(pipeline: Mapping[str, Any]) -> int:
    """Return `Learn.steps_per_rollout` of a recorded definition."""
    learn = pipeline.get("learn", {})
    return int(learn.get("epochs", 1)) * int(learn.get("minibatches", 1))
