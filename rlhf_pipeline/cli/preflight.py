"""Checks that need no torch, so that a mistake costs one second and not ten.

Every check raises the error that the run itself would end with, or a better one.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from pathlib import Path

from rlhf_pipeline.config import Pipeline, PretrainedPolicy, Replay, TinyPolicy
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import (
    DataError,
    DefinitionError,
    PipelineError,
    RunStorageError,
    did_you_mean,
)
from rlhf_pipeline.exchange.filters import select
from rlhf_pipeline.policies.model_source import resolve_source
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.run.choice import stores_of
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.medium import Address

_DEVICES = ("cpu", "cuda", "mps")


def check_new_folder(out: Address, command: str, *, option: str = "--out") -> None:
    """Refuse a run folder that holds something; an empty one, or one of a start that was killed, is fine.

    Args:
        out: where the run is to go.
        command: what was typed up to the definition, for the hint.
        option: the one that names the folder.

    Raises:
        RunExistsError: there is a run or something else; says how to go on with it, and names a free folder.
        RunStorageError: the folder cannot be made or written.
    """
    RunFolder(out).check_free_or_recorded(resume=False, again=f"{command} --resume", option=option)
    check_writable(out, option)


def check_resumable(out: Address) -> None:
    """Refuse to resume where there is no run.

    Raises:
        MissingPathError: no run at `out`; names the runs that are there.
        RunStorageError: the folder cannot be written.
    """
    RunFolder(out).check_free_or_recorded(resume=True)
    check_writable(out, "--out")


def check_writable(out: Address, option: str) -> None:
    """Test whether a folder can be made and written, and leave nothing behind.

    Raises:
        DefinitionError: its name cannot be handed to the libraries that write into it.
        RunStorageError: it cannot.
    """
    if not isinstance(out, Path):
        return  # the first put tells
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise DefinitionError(
            f"{option} {out}: Python reads file names as {encoding} here, which does not know this one. "
            f"{'Name another.' if encoding == 'utf-8' else 'Turn on its UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ...'}"
        ) from error
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-pipeline-", dir=there):
            pass
    except OSError as error:
        raise RunStorageError(
            f"{out} cannot be {'written' if there == out else 'made'}: {there}: {error.strerror}. "
            f"Choose a folder that can be written: {option} OTHER_FOLDER"
        ) from error


def check_device(device: str) -> None:
    """Refuse a string that cannot be the name of a device.

    Raises:
        DefinitionError: the name does not have the form `cuda` or `cuda:1`.
    """
    kind = device.partition(":")[0]
    if not re.fullmatch(r"[a-z]+(:\d+)?", device) or kind not in _DEVICES:
        hint = did_you_mean(kind, _DEVICES)
        raise DefinitionError(f"--device {device}: there is no such device.{hint} A number may follow: cuda:1.")


def check_processes(pipeline: Pipeline) -> None:
    """Refuse a definition that collectors and a learner in processes of their own cannot run.

    Raises:
        DefinitionError: it collects nothing, or moves a reference model that other processes hold.
    """
    if pipeline.replay is not None:
        raise DefinitionError(
            "this definition learns from existing stores (replay), so there is nothing to collect. "
            "Run it in one process: `rlhf-pipeline run`, without --collectors."
        )
    if pipeline.learn.reference_every:
        raise DefinitionError(
            "learn.reference_every moves the reference model of a run in one process; collectors keep the frozen one. "
            "Leave --collectors out, or set learn.reference_every=0."
        )


def check_pipeline(pipeline: Pipeline, seed: int) -> None:
    """Check everything a definition names: the model's folder, the prompts, the reward function's arguments.

    Raises:
        MissingPathError: the model folder or the prompt file is not there.
        DataError: a prompt file is broken, or holds what the model cannot read.
        DefinitionError: the prompt source or the reward function does not have the required form.
    """
    if isinstance(pipeline.policy, PretrainedPolicy):
        resolve_source(pipeline.policy.path)
    if pipeline.replay is not None:
        return  # nothing is sampled or graded
    check_reward(pipeline)
    prompt = first_prompt(pipeline, seed)
    if isinstance(pipeline.policy, TinyPolicy):
        unknown = sorted(set(prompt.text + (prompt.answer or "")) - set(pipeline.policy.alphabet))
        if unknown:
            raise DataError(
                f"the prompt {prompt.text!r} (answer {prompt.answer!r}) has characters that the model does not know: "
                f"{' '.join(map(repr, unknown))}. Add them to the definition: TinyPolicy(alphabet=...)."
            )


def check_stores(replay: Replay) -> None:
    """Check that the stores which a definition learns from are there, and that its filters can be read.

    Raises:
        DefinitionError: no store is named, or a filter cannot be read.
        MissingPathError: a store is not there; names the runs that are.
    """
    for store in stores_of(replay):
        with Stored(store) as stored:
            select(stored.store, replay.filters, stored.ids()[:0])


def check_reward(pipeline: Pipeline) -> None:
    """Refuse a reward function that cannot be called with `(prompt, completion, answer, meta)`.

    Raises:
        DefinitionError: its arguments do not fit.
    """
    try:
        signature = inspect.signature(pipeline.reward)
    except (TypeError, ValueError):
        return  # a builtin or an extension type; it is called as it is
    try:
        signature.bind("", "", None, {})
    except TypeError as error:
        name = getattr(pipeline.reward, "__qualname__", repr(pipeline.reward))
        raise DefinitionError(
            f"the reward function {name}{signature} cannot be called ({error}). "
            "It must take (prompt, completion, answer, meta) and return a number."
        ) from error


def first_prompt(pipeline: Pipeline, seed: int) -> Prompt:
    """Return the run's first prompt; reading it checks a prompt file as a whole.

    Raises:
        DefinitionError: the source raises something of its own or returns something else.
        PipelineError: what the source says is wrong with its data.
    """
    source = type(pipeline.prompts).__name__
    try:
        prompt = pipeline.prompts.prompt(0, seed)
    except PipelineError:
        raise
    except Exception as error:
        raise DefinitionError(
            f"prompts: {source}.prompt(0, {seed}) raised {type(error).__name__}: {error}. "
            "A prompt source has a method prompt(cursor, seed) that returns a Prompt."
        ) from error
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"prompts: {source}.prompt(0, {seed}) returned {type(prompt).__name__}; it must return a "
            "rlhf_pipeline.Prompt(text=..., answer=..., meta=...)."
        )
    return prompt
