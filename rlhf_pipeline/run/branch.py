"""A new run that begins with the weights of another run's checkpoint. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, RunMismatchError, typed
from rlhf_pipeline.run.address import address_of, resolved
from rlhf_pipeline.run.checkpoint import checkpoint_path, step_of
from rlhf_pipeline.run.completeness import clear_failed_start
from rlhf_pipeline.run.config_diff import carries_over, changes
from rlhf_pipeline.run.continuation import check_free_or_recorded
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.files import MANIFEST, folder_problem, new_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import is_run
from rlhf_pipeline.run.record import Setup

_LEFT_BEHIND = frozenset({MANIFEST, "state.json", "uses.safetensors", "proximal.safetensors"})
"""Files that count the steps and trajectories of the first run and have no meaning in the new run."""


def checkpoint_named(text: str) -> tuple[RunFolder, Path]:
    """Return the run and the checkpoint that `RUN` or `RUN@STEP` names, by default the newest whole one."""
    place, at, number = text.rpartition("@")
    is_step = bool(at) and number.isdecimal() and not is_run(address_of(text))  # a folder may be named `x@3`
    step = int(number) if is_step else None
    run = RunFolder.open(address_of(place if step is not None else text))
    return run, checkpoint_of(run, step, form="--from {run}@{step}")


def checkpoint_of(run: RunFolder, requested: int | None, *, form: str) -> Path:
    """Return the checkpoint of a step, by default the newest."""
    saved = {step_of(path): path for path in run.saved()}
    if not saved:
        raise MissingPathError(f"the run {run.address} has no checkpoint yet, so a new run cannot start from it.")
    step = max(saved) if requested is None else requested
    if step not in saved:
        steps = ", ".join(map(str, sorted(saved)))
        single = len(saved) == 1
        available = f"only a checkpoint of step {steps}" if single else f"checkpoints of steps {steps}"
        raise MissingPathError(
            f"the run {run.address} has no checkpoint of step {step}; it has {available} "
            "(learn.keep_checkpoints limits the number of checkpoints). "
            f"{'Use it' if single else 'Choose one'}: {form.format(run=typed(run.address), step=max(saved))}"
        )
    path = run.bring(saved[step])
    problem = folder_problem(path)
    if problem is not None:
        others = sorted(set(saved) - {step})
        hint = f" Choose another: {form.format(run=typed(run.address), step=others[-1])}" if others else ""
        raise DataError(f"the checkpoint {path} is damaged: {problem}.{hint}")
    return path


def begin_from(run: RunFolder, checkpoint: Path, out: RunFolder, setup: Setup) -> None:
    """Make a run folder whose step 0 is a checkpoint of another run; it is then continued like any run.

    Weights (or LoRA adapters), the optimizer's moments, the random generator and a moving reference are taken over.
    Steps, prompts, ledger, use counts and KL controllers begin again. A kill at any moment leaves no run, or a complete
    one.

    Raises:
        RunMismatchError: the definition has another model or optimizer than the checkpoint.
    """
    for change in changes(run.config.pipeline, setup.pipeline):
        if not carries_over(change.field):
            raise RunMismatchError(
                f"{change}: the model and the optimizer in the checkpoint {checkpoint} match the old value. Do not "
                f"change {change.field}, or start a new run without --from."
            )
    if not isinstance(out.address, Path):
        raise DefinitionError(
            f"--from starts a run only in a folder, not at {out.address}. Choose a folder: --out FOLDER"
        )
    with named_disk_errors(out), out.lock():
        check_free_or_recorded(out, resume=False)
        clear_failed_start(out)
        with new_folder(checkpoint_path(out.checkpoints, 0)) as temporary:
            for path in checkpoint.iterdir():
                if path.name in _LEFT_BEHIND:
                    continue
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, temporary / path.name)
            state = {"step": 0, "progress": {}, "source": {}}
            (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        where = str(resolved(run.address))
        out.record.write(setup, begun_from={"run": where, "step": step_of(checkpoint)})
