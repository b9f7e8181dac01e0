"""Checkpoints: one folder per saved step, whole or absent, with a checksum per file.

    checkpoints/step-00000010/
        the files of `learner.state`    weights, optimizer, random generator, moving reference
        state.json                      step, counters, controllers, write-path state
        files.json                      length and CRC32C of every file above

A checkpoint is built under a temporary name, synced and renamed in, and only then is the oldest removed. A kill at any
moment leaves the earlier checkpoints whole. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.run.files import folder_problem, new_folder, remove_folder, tidy

if TYPE_CHECKING:
    from rlhf_pipeline.learner.learner import Learner

_NAME = re.compile(r"step-(\d{8})")
_STATE = "state.json"


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
    with new_folder(final) as temporary:
        learner.write(temporary)
        content = json.dumps({"step": step, **state}, indent=1)
        (temporary / _STATE).write_text(content, encoding="utf-8")
    drop_checkpoints(folder, step, keep=keep, besides=besides)
    if shards is not None and not shards.leads:
        shards.barrier()
    return final


def drop_checkpoints(folder: Path, step: int, *, keep: int, besides: Collection[int]) -> None:
    """Drop all checkpoints but the newest `keep` up to a step, and those of other steps that are kept `besides`."""
    kept = [path for path in list_checkpoints(folder) if step_of(path) <= step][-keep:]
    for other in list_checkpoints(folder):
        if other not in kept and (
            step_of(other) not in besides or step_of(other) > step
        ):  # too old, or of a later step and skipped when the run was resumed
            remove_folder(other)


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
                skip(f"the checkpoint {message}; it is passed over, and the run goes on from {path.name}.")
            return path
        problems.append(f"{path.name} is damaged: {problem}")
    if problems:
        raise DataError(
            f"no checkpoint in {folder} is whole: {'; '.join(problems)}. Restore one from a copy, or start the run "
            "again with --out OTHER_FOLDER."
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
    """Say what to do without a checkpoint."""
    older = [other.name for other in list_checkpoints(path.parent) if other.name < path.name]
    if older:
        return f"The one before it is {older[-1]}; --resume goes on from the newest that is whole."
    return "There is no older one: restore it from a copy, or start the run again with --out OTHER_FOLDER."
