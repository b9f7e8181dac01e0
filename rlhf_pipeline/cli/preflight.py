"""Checks that need no torch, so that a mistake costs one second, not ten.

Every check raises the error that the run itself would raise, or a better one.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.config import Pipeline, PretrainedPolicy, Replay, TinyPolicy
from rlhf_pipeline.data.prompts import Prompt, prompt_at
from rlhf_pipeline.data.reward_forms import form_of
from rlhf_pipeline.data.rewards import rewards_of
from rlhf_pipeline.errors import (
    DataError,
    DefinitionError,
    RunStorageError,
    did_you_mean,
)
from rlhf_pipeline.policies.model_source import resolve_source
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.choice import stores_of
from rlhf_pipeline.run.folder import RunFolder

_DEVICES = ("cpu", "cuda", "mps")


def check_new_folder(out: Address, command: str, *, option: str = "--out") -> None:
    """Refuse a run folder that holds something; an empty one, or one left by a killed start, is fine.

    Args:
        out: the new run's folder.
        command: the command line up to the definition, for the hint.
        option: the option that names the folder.

    Raises:
        RunExistsError: there is a run or something else; the message says how to continue, and names a free folder.
        RunStorageError: the folder cannot be created or written.
    """
    RunFolder(out).check_free_or_recorded(resume=False, again=f"{command} --resume", option=option)
    check_writable(out, option)


def check_resumable(out: Address) -> None:
    """Refuse to resume if there is no run.

    Raises:
        MissingPathError: there is no run at `out`; the message names existing runs.
        RunStorageError: the folder cannot be written.
    """
    RunFolder(out).check_free_or_recorded(resume=True)
    check_writable(out, "--out")


def check_writable(out: Address, option: str) -> None:
    """Test whether a folder can be created and written, leaving nothing behind.

    Raises:
        DefinitionError: its name cannot be passed to the libraries that write into it.
        RunStorageError: the folder cannot be created or written.
    """
    if not isinstance(out, Path):
        return  # the first put will show
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
    """Refuse a string that cannot be a device's name.

    Raises:
        DefinitionError: the name does not have the form `cuda` or `cuda:1`.
    """
    kind = device.partition(":")[0]
    if not re.fullmatch(r"[a-z]+(:\d+)?", device) or kind not in _DEVICES:
        hint = did_you_mean(kind, _DEVICES)
        raise DefinitionError(f"--device {device}: there is no such device.{hint} A number may follow: cuda:1.")


def check_processes(pipeline: Pipeline) -> None:
    """Refuse a definition that separate collector and learner processes cannot run.

    Raises:
        DefinitionError: the definition collects nothing, or updates a reference model that other processes hold.
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
    """Check everything that a definition names: the model's folder, the prompts, the reward function's arguments.

    Raises:
        MissingPathError: the model folder or the prompt file does not exist.
        DataError: a prompt file is broken, or has characters that the model does not know.
        DefinitionError: the prompt source or the reward function does not have the required form.
    """
    if isinstance(pipeline.policy, PretrainedPolicy):
        resolve_source(pipeline.policy.path)
    if pipeline.evaluate is not None:
        check_evaluation(pipeline)
    if pipeline.replay is not None:
        return  # nothing is sampled or graded
    prompt = first_prompt(pipeline, seed)
    check_reward(pipeline, prompt)
    if isinstance(pipeline.policy, TinyPolicy) and pipeline.environment is None:
        unknown = sorted(
            set(prompt.text + (prompt.answer if isinstance(prompt.answer, str) else "")) - set(pipeline.policy.alphabet)
        )
        if unknown:
            raise DataError(
                f"the prompt {prompt.text!r} (answer {prompt.answer!r}) has characters that the model does not know: "
                f"{' '.join(map(repr, unknown))}. Add them to the definition: TinyPolicy(alphabet=...)."
            )


def check_evaluation(pipeline: Pipeline, *, apart: bool = True) -> None:
    """Refuse an evaluation on prompts that are learned from, or whose prompts the reward cannot grade.

    Args:
        pipeline: the definition; its `evaluate` is set.
        apart: whether the definition's own prompts are learned from.

    Raises:
        DefinitionError: prompts are in both sources, or a reward function asks for something that there is not.
        PipelineError: the source reports an error in its data.
    """
    assert pipeline.evaluate is not None
    held_out = pipeline.evaluate.prompts
    check_reward(pipeline, prompt_at(held_out, 0, 0))
    both = [getattr(source, "all_prompts", None) for source in (pipeline.prompts, held_out)]
    if not apart or both[0] is None or both[1] is None:
        return  # one of them makes its prompts, or does not tell them
    learned = {prompt.text for prompt in both[0]()}
    shared = [prompt.text for prompt in both[1]() if prompt.text in learned]
    if shared:
        raise DefinitionError(
            f"evaluate.prompts has {len(shared)} prompts that the run learns from, the first is {shared[0][:60]!r}. "
            "Take them out of one of the two files: an evaluation is on prompts that are never learned from."
        )


def check_stores(replay: Replay) -> None:
    """Check that the stores of a definition exist, and that its filters can be parsed.

    Raises:
        DefinitionError: no store is named, or a filter cannot be parsed.
        MissingPathError: a store does not exist; the message names existing runs.
    """
    for store in stores_of(replay):
        with Stored(store) as stored:
            select(stored.store, replay.filters, stored.ids()[:0])


def check_reward(pipeline: Pipeline, prompt: Prompt | None = None) -> None:
    """Refuse a reward function that asks for arguments that there are not.

    Args:
        pipeline: the definition.
        prompt: its first, whose `meta` names the columns that a function may ask for; None accepts any.

    Raises:
        DefinitionError: its arguments do not match.
    """
    for reward in rewards_of(pipeline.reward):
        form_of(reward, None if prompt is None else list(prompt.meta))


def first_prompt(pipeline: Pipeline, seed: int) -> Prompt:
    """Return the run's first prompt; reading it checks the whole prompt file.

    Raises:
        DefinitionError: the source raises another error, or does not return a prompt.
        PipelineError: the source reports an error in its data.
    """
    return prompt_at(pipeline.prompts, 0, seed)
