"""`config.json`: what a run was started with, and what may change when it is resumed. Imports no torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rlhf_pipeline import __version__
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.errors import DefinitionError, MissingPathError, RunExistsError, RunMismatchError
from rlhf_pipeline.files import write_atomically
from rlhf_pipeline.run.inputs import check_inputs, describe_inputs

FILE_NAME: Final = "config.json"

MAY_CHANGE_ON_RESUME: Final = frozenset(
    {
        "description",
        "needs",
        "learn.steps",
        "learn.stop_at_reward",
        "learn.stop_window",
        "learn.checkpoint_every",
        "learn.keep_checkpoints",
        "learn.token_budget",
        "learn.layout",
        "learn.activation_checkpointing",
        "learn.peak_flops",
        "learn.logger",
    }
)
"""Fields that may differ from the recorded definition: they say when to stop and save, and how much fits in memory,
not what is learned. (Another token budget or layout moves the last bits of the gradient.)"""


_BEFORE_THE_RECORD: Final = frozenset({"lock", "setup.lock", "processes", "log.txt", f".{FILE_NAME}.tmp"})
"""What a run makes before its `config.json`: a start that was killed there left no run to resume."""


def make_record(
    pipeline: Pipeline, *, definition: str, overrides: Sequence[tuple[str, str]], seed: int, device: str
) -> dict[str, Any]:
    """Return what `config.json` holds."""
    try:
        json.dumps(to_json(pipeline))
    except TypeError as error:
        raise DefinitionError(
            f"the definition cannot be written down: {error}. Its fields must be dataclasses, functions, text, "
            "numbers, lists or None."
        ) from error
    packages = ("torch", "torchrl", "tensordict", "transformers", "numpy")
    return {
        "format": 1,
        "definition": definition,
        "overrides": [list(pair) for pair in overrides],
        "seed": seed,
        "device": device,
        "pipeline": to_json(pipeline),
        "inputs": describe_inputs(pipeline),
        "versions": {"rlhf-pipeline": __version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
    }


def write_record(run_dir: Path, record: dict[str, Any]) -> None:
    """Write `config.json`, whole or not at all."""
    write_atomically(run_dir / FILE_NAME, json.dumps(record, indent=1).encode())


def is_recorded(run_dir: Path) -> bool:
    """Return True if a run was started here."""
    return (run_dir / FILE_NAME).is_file()


def is_free(run_dir: Path) -> bool:
    """Return True if a new run may be made here: nothing is there, or only what a start that was killed left."""
    if not run_dir.exists():
        return True
    return run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= _BEFORE_THE_RECORD


def check_folder(run_dir: Path, *, resume: bool) -> None:
    """Refuse to start where something is, or to resume where nothing is.

    Raises:
        RunExistsError: the folder exists and is not empty, or is a file.
        MissingPathError: there is no run to resume.
    """
    if resume:
        if not is_recorded(run_dir):
            raise MissingPathError(f"there is no run to resume at {run_dir}. Start one: leave --resume out.")
    elif not is_free(run_dir):
        raise RunExistsError(
            f"the run folder {run_dir} exists. Go on with it: add --resume. Or start another: --out OTHER_FOLDER."
        )


def is_of_several(run_dir: Path) -> bool:
    """Return True if a run is one of several processes: the rollouts that its collectors stored are counted there."""
    return (run_dir / "rollouts").is_dir()


def check_processes(run_dir: Path, *, several: bool) -> None:
    """Refuse to go on in one process with a run of several, and the other way round: they count rollouts differently.

    Raises:
        RunMismatchError: says how to go on.
    """
    if not several and is_of_several(run_dir):
        raise RunMismatchError(
            f"{run_dir} is a run of several processes. Go on with it: add --collectors N, for example --collectors 1."
        )
    if several and (run_dir / "store").is_dir() and not is_of_several(run_dir):
        raise RunMismatchError(
            f"{run_dir} is a run in one process. Go on with it: rlhf-pipeline run --resume --out {run_dir}, or start "
            "another run for several processes in another folder."
        )


def check_unchanged(run_dir: Path, pipeline: Pipeline, seed: int, *, inputs: bool = True) -> None:
    """Refuse to resume under a definition or seed that would learn something else.

    Args:
        run_dir: the run folder; nothing is checked where no run was recorded.
        pipeline: the definition now.
        seed: the seed now.
        inputs: whether the files that the definition names must be as they were, too.

    Raises:
        RunMismatchError: naming every field that differs, or the prompt file or model folder that has changed.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name} was {old!r}, is {new!r}"
        for name, old, new in _differences("", before["pipeline"], to_json(pipeline))
        if name not in MAY_CHANGE_ON_RESUME
    ]
    if before["seed"] != seed:
        changed.append(f"seed was {before['seed']!r}, is {seed!r}")
    if changed:
        raise RunMismatchError(
            f"{run_dir} was started with another definition: {'; '.join(changed)}. "
            "Resume with the recorded one, or start a new run with --out OTHER_FOLDER."
        )
    if inputs:
        check_inputs(run_dir, before.get("inputs", {}), pipeline)


def _differences(prefix: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        # A field that the record does not have is younger than the run, which ran as its default says.
        for name in sorted(old.keys()):
            yield from _differences(f"{prefix}.{name}" if prefix else name, old.get(name), new.get(name))
    elif old != new:
        yield prefix, old, new
