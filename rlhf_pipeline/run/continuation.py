"""Whether a run may begin or continue with a definition, and the messages about it. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import RunExistsError, RunMismatchError, count, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import address_of
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.completeness import is_free
from rlhf_pipeline.run.config_diff import LAST_BITS, carries_over, changes, is_allowed, notice_of
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.inputs import changed_prompts, check_inputs, describe_inputs
from rlhf_pipeline.run.lookup import is_run
from rlhf_pipeline.run.place import not_found
from rlhf_pipeline.run.record import machine, package_versions
from rlhf_pipeline.run.recorded_code import changed_code


def check_free_or_recorded(run: RunFolder, *, resume: bool, again: str = "add --resume", option: str = "--out") -> None:
    """Raise an error for a start where a run exists, or a resume where none does.

    Args:
        run: the run, or the place for one.
        resume: whether to continue a run.
        again: how to continue, for the message.
        option: the option that names the folder, for the message.

    Raises:
        RunExistsError: the folder exists and is not empty, or is a file.
        MissingPathError: there is no run to resume.
    """
    if resume:
        if not run.record.exists:
            raise not_found(run.address)
        return
    if is_free(run):
        return
    others = (address_of(f"{run.address}-{number}") for number in itertools.count(2))
    free = next(
        candidate
        for candidate in others
        if not (candidate.exists() if isinstance(candidate, Path) else is_run(candidate))
    )
    free = f"{option} {typed(free)}"
    if run.record.exists:
        _, reward = run.first_and_last_reward()
        steps = count(run.metrics.last_step, "step")
        state = "" if reward is None else f" ({steps}, last reward {reward:.2f})"
        raise RunExistsError(
            f"{run.address} already contains a run{state}. To continue it: {again}. To keep it, choose another "
            f"folder: {free}"
        )
    what = "is not a run, so it was not changed" if run.path.is_dir() else "is a file"
    raise RunExistsError(f"{run.address} exists, but {what}. Choose another folder: {free}")


def check_processes(run: RunFolder, *, several: bool) -> None:
    """Reject continuing a run of several processes in one process, or the reverse: they count differently.

    Raises:
        RunMismatchError: the message states how to continue.
    """
    if not several and run.is_of_several:
        raise RunMismatchError(
            f"{run.address} is a run with several processes. To continue it, add --collectors N, for example "
            "--collectors 1."
        )
    if several and run.place.has(filenames.STORE) and not run.is_of_several:
        raise RunMismatchError(
            f"{run.address} is a run in one process. To continue it: rlhf-pipeline run --resume --out "
            f"{typed(run.address)}. Or start a new run with several processes in another folder."
        )


def check_unchanged(
    run: RunFolder, pipeline: Pipeline, seed: int, *, inputs: bool = True, overrides: Sequence[tuple[str, str]] = ()
) -> None:
    """Raise an error for a resume with a definition or seed that would change the results.

    Args:
        run: the run, or the place for one.
        pipeline: the definition now.
        seed: the seed now.
        inputs: whether the files that the definition names must be unchanged, too.
        overrides: the `--set` pairs of the definition, for the command that the message advises.

    Raises:
        RunMismatchError: names every field that differs, or the prompt file or model folder that has changed.
    """
    if not run.record.exists:
        return
    before = run.record.read()
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
        changed.append(f"seed was {before['seed']!r} and is now {seed!r}")
        options += f" --seed {seed}"
    if changed:
        otherwise = (
            _with_its_weights(run, options) if all(carries_over(change.field) for change in differences) else None
        )
        raise RunMismatchError(
            f"{run.address} was started with another definition: {'; '.join(changed)}. Continue with the recorded "
            f"definition, or {otherwise or 'start a new run with --out OTHER_FOLDER.'}"
        )
    if inputs:
        from_checkpoint = (
            Path(getattr(pipeline.policy, "path", "")).parent == run.checkpoints
        )  # its weights have moved on
        check_inputs(
            run.address,
            by_content if not from_checkpoint else by_content | {"policy.path": {}},
            pipeline,
            definition=before["pipeline"],
            otherwise=_with_its_weights(run, options),
        )


def _with_its_weights(run: RunFolder, options: str = "") -> str | None:
    """Return how to begin another run with the weights of this one; None if it has no checkpoint."""
    saved = run.saved()
    if not saved:
        return None
    source = typed(f"{run.address}@{step_of(saved[-1])}")
    return f"start a new run with its weights: rlhf-pipeline run --from {source}{options} --out OTHER_FOLDER"


def continuation_notices(run: RunFolder, pipeline: Pipeline, *, device: str | None = None) -> Iterator[str]:
    """Yield notices for the user about the definition with which a run continues; none for a new run.

    Args:
        run: the run, or the place for one.
        pipeline: the definition now.
        device: where the learner is now; None for a process that does not learn, whose device does not matter.
    """
    if not run.record.exists:
        return
    before = run.record.read()
    files = before.get("inputs", {})
    yield from map(str, changed_code(files, pipeline, by_text=run.record.is_by_text))
    yield from changed_prompts(files, pipeline)
    if device is None:
        return
    step, differences = run.next_step, changes(before["pipeline"], pipeline)
    now = describe_inputs(pipeline) if any(change.field in files for change in differences) else {}
    for change in differences:
        if change.field in now and now[change.field] == files.get(change.field):
            continue  # the same file at another place
        if (notice := notice_of(change, before["pipeline"], pipeline, step)) is not None:
            yield notice
    for moved in moved_versions(run, device):
        yield f"{moved}: {LAST_BITS}."


def moved_versions(run: RunFolder, device: str | None = None) -> Iterator[str]:
    """Yield what has changed since the run was started: package versions, processor, threads, device."""
    now, before = package_versions() | machine() | ({"device": device} if device else {}), run.config
    for name, old in {**before.versions, **before.machine, "device": before.device}.items():
        if str(old) != str(now.get(name, old)):
            again = f" (to keep it: OMP_NUM_THREADS={old})" if name == "threads" else ""
            yield f"{name} was {old} and is now {now[name]}{again}"
