"""Checkpoints: one folder per saved step, whole or absent, with a checksum per file.

    checkpoints/step-00000010/
        the files of `learner.state`    weights, optimizer, random generator, moving reference
        state.json                      step, counters, controllers, write-path state
        files.json                      length and CRC32C of every file above

A checkpoint is built under a temporary name, synced and renamed in, and only then is the oldest removed. A kill at any
moment leaves the earlier checkpoints whole. A run writes its checkpoints in a thread, see `CheckpointWriter`. Imports
no torch.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import DataError, MissingPathError, RunStorageError
from rlhf_pipeline.run.files import folder_problem, new_folder, remove_folder, tidy, unname_folder

if TYPE_CHECKING:
    from rlhf_pipeline.learner.learner import Learner

_NAME = re.compile(r"step-(\d{8})")
_STATE = "state.json"
_PREVIOUS = "The previous one is intact: continue from it with --resume."
_UNUSED = "The newest one is intact: continue from it with --resume."


def save_checkpoint(
    folder: Path, step: int, learner: Learner, *, state: Mapping[str, Any], keep: int, besides: Collection[int] = ()
) -> Path:
    """Write `folder/step-XXXXXXXX`, then drop all but the newest `keep`.

    If several processes learn in shards, each must call this.
    """
    final, shards = checkpoint_path(folder, step), learner.shards
    if shards is not None and not shards.is_first:
        learner.write(folder / f".{final.name}.tmp")
        shards.barrier()
        return final
    _write(final, learner.write, _content(step, state))
    drop_checkpoints(folder, step, keep=keep, besides=besides)
    if shards is not None and not shards.leads:
        shards.barrier()
    return final


def _content(step: int, state: Mapping[str, Any]) -> str:
    return json.dumps({"step": step, **state}, indent=1)


def _write(final: Path, write: Callable[[Path], None], content: str) -> None:
    with new_folder(final) as temporary:
        write(temporary)
        (temporary / _STATE).write_text(content, encoding="utf-8")


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread while the run takes its next steps, one at a time.

    `begin` starts the thread. It copies the learner's state, which the learner does not change before that, syncs what
    the checkpoint refers to, and writes. Only when `finish` has returned a checkpoint does it count: the loop then
    deletes older ones, copies it to the bucket and names it in errors. A checkpoint that a kill interrupts leaves the
    previous one, which `newest_checkpoint` finds.

    Where no copy can be made (too little memory, or several processes that hold the state in shards), `begin` writes
    the checkpoint itself.

    Args:
        folder: of the checkpoints.
        learner: its state is saved.
        on_notice: receives the notice that the run waits for its checkpoints.
    """

    def __init__(self, folder: Path, learner: Learner, *, on_notice: Callable[[str], None]) -> None:
        self._folder = folder
        self._learner = learner
        self._on_notice = on_notice
        self._has_reported = False
        self._step: int | None = None
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def begin(self, step: int, state: Mapping[str, Any], *, sync: Callable[[], None]) -> None:
        """Begin to copy and write the state; an earlier checkpoint must be finished.

        Args:
            step: the last step that was taken.
            state: of the rest of the run; it is copied at once.
            sync: called before anything is written, in the thread: waits until what the checkpoint refers to is on the
                disk.
        """
        self.finish()
        final, content = checkpoint_path(self._folder, step), _content(step, state)
        self._step = step
        copy = self._learner.begin_copy()

        def write() -> None:
            write_state = self._learner.write if copy is None else copy.state().write
            sync()
            _write(final, write_state, content)

        if copy is None:
            self._report_wait()
            self._attempt(write, f"the checkpoint of step {step} was not written", _PREVIOUS)
        else:
            self._start(write, f"the checkpoint of step {step} was not written", _PREVIOUS)

    def remove(self, checkpoints: Sequence[Path]) -> None:
        """Remove checkpoints: their names at once, their files in the thread."""
        self.finish()
        unnamed = [unname_folder(path) for path in checkpoints]
        if unnamed:
            names = ", ".join(path.name for path in checkpoints)
            self._start(
                lambda: [shutil.rmtree(path) for path in unnamed],
                f"old checkpoints ({names}) were not removed",
                _UNUSED,
            )

    @property
    def is_writing(self) -> bool:
        """Whether the thread is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> int | None:
        """Wait for the checkpoint that was begun; return its step, or None if there is none to finish.

        Raises:
            RunStorageError: it could not be written, or older ones could not be removed. The others are intact.
            OSError: the same, for a reason that a run folder explains (a full disk).
        """
        self.wait()
        step, self._step = self._step, None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return step

    def wait(self) -> None:
        """Wait until the thread has ended, whatever its result."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self, act: Callable[[], object], problem: str, advice: str) -> None:
        self._thread = Thread(target=self._attempt, args=(act, problem, advice), name="checkpoint", daemon=True)
        self._thread.start()

    def _attempt(self, act: Callable[[], object], problem: str, advice: str) -> None:
        """Act, and keep an error, which `finish` raises in the loop's thread."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as above
            if isinstance(error, OSError) and type(error).__module__ == "builtins":
                self._failure = OSError(error.errno, f"{problem}: {error.strerror or error}", error.filename)
            else:
                self._failure = RunStorageError(f"{problem}: {type(error).__name__}: {error}. {advice}")
            self._failure.__cause__ = error

    def _report_wait(self) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        why = (
            "this machine has too little free memory for a copy of the learner's state"
            if self._learner.shards is None
            else "the learner's state is sharded over several processes"
        )
        self._on_notice(f"the run waits for each checkpoint, because {why}.")


def drop_checkpoints(folder: Path, step: int, *, keep: int, besides: Collection[int]) -> None:
    """Remove `outdated_checkpoints`."""
    for path in outdated_checkpoints(folder, step, keep=keep, besides=besides):
        remove_folder(path)


def outdated_checkpoints(folder: Path, step: int, *, keep: int, besides: Collection[int]) -> list[Path]:
    """Return all checkpoints but the newest `keep` up to a step, and those of other steps that are kept `besides`."""
    every = list_checkpoints(folder)
    newest = [path for path in every if step_of(path) <= step][-keep:]
    # Too old, or of a later step and skipped when the run was resumed.
    return [path for path in every if path not in newest and (step_of(path) not in besides or step_of(path) > step)]


def load_checkpoint(path: Path, learner: Learner, *, checked: bool = False) -> dict[str, Any]:
    """Load in place what `save_checkpoint` wrote, and return its state with `step`.

    Args:
        path: the checkpoint.
        learner: receives its weights, optimizer and random generator.
        checked: `newest_checkpoint` has just compared the checksums.

    Raises:
        DataError: the checkpoint is damaged, or belongs to another model.
    """
    problem = None if checked else folder_problem(path)
    if problem is not None:
        raise DataError(f"the checkpoint {path} is damaged: {problem}. {_instead(path)}")
    state = read_checkpoint_state(path)
    learner.read(path)
    return state


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def newest_checkpoint(
    folder: Path,
    *,
    skip: Callable[[str], None] = lambda message: None,
    bring: Callable[[Path], object] = lambda path: None,
) -> Path | None:
    """Return the newest whole checkpoint, or None if there are no checkpoints.

    Leftovers of a killed save are cleaned up.
    """
    if not folder.is_dir():
        return None
    tidy(folder)
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        bring(path)
        problem = folder_problem(path)
        if problem is None:
            for message in problems:
                skip(f"the checkpoint {message}; it is skipped, and the run continues from {path.name}.")
            return path
        problems.append(f"{path.name} is damaged: {problem}")
    if problems:
        raise DataError(
            f"no checkpoint in {folder} is intact: {'; '.join(problems)}. Restore one from a copy, or start a new "
            "run with --out OTHER_FOLDER."
        )
    return None


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """Return the state that `save_checkpoint` was given, and `step`."""
    try:
        state = json.loads((path / _STATE).read_bytes())
    except FileNotFoundError as error:
        raise MissingPathError(f"the checkpoint {path} has no {_STATE}. {_instead(path)}") from error
    except ValueError as error:
        raise DataError(
            f"the checkpoint {path} is damaged: {_STATE} is not JSON ({error}). {_instead(path)}"
        ) from error
    if not (isinstance(state, dict) and isinstance(state.get("step"), int)):
        raise DataError(f"the checkpoint {path} is damaged: {_STATE} has no step. {_instead(path)}")
    return state


def _instead(path: Path) -> str:
    """Return what to do without a checkpoint."""
    older = [sibling.name for sibling in list_checkpoints(path.parent) if sibling.name < path.name]
    if older:
        return f"The previous one is {older[-1]}; --resume continues from the newest intact checkpoint."
    return "There is no older checkpoint: restore this one from a copy, or start the run again with --out OTHER_FOLDER."
