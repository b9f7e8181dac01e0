"""Checks of what a run names. They need no torch, so that a mistake costs one second, not ten.

Every check raises the error that the run itself would raise, or a better one.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.config import Pipeline, Replay, TinyPolicy
from rlhf_pipeline.data.prompts import prompt_at
from rlhf_pipeline.errors import DataError, DefinitionError, RunStorageError, did_you_mean
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.bound_rewards import bound_rewards, check_columns, prompts_field
from rlhf_pipeline.run.selection import open_sources, stores_of
from trajectory_store.locks import try_lock

_DEVICES = ("cpu", "cuda", "mps")


def check_writable(out: Address, option: str, *, locks: bool = False) -> None:
    """Test whether a folder can be created and written, leaving nothing behind."""
    if not isinstance(out, Path):
        return  # the first put will show
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise DefinitionError(
            f"{option} {out}: Python encodes file names as {encoding}, which cannot represent this name. "
            f"{'Choose another name.' if encoding == 'utf-8' else 'Enable UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ...'}"
        ) from error
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.NamedTemporaryFile(prefix=".rlhf-pipeline-", dir=existing) as file:
            can_lock = not locks or _keeps_others_out(Path(file.name))
    except OSError as error:
        raise RunStorageError(
            f"{out} cannot be {'written to' if existing == out else 'created'}: {existing}: {error.strerror}. Choose "
            f"a writable folder: {option} OTHER_FOLDER"
        ) from error
    if not can_lock:
        raise RunStorageError(
            f"file locks in {existing} are not visible to other processes, but a run relies on them. Choose a local "
            f"disk: {option} OTHER_FOLDER"
        )


def _keeps_others_out(path: Path) -> bool:
    with path.open("rb") as first, path.open("rb") as second:
        try:
            return try_lock(first) and not try_lock(second)
        except OSError:  # some file systems of a network have no locks
            return False


def check_device(device: str) -> None:
    """Reject a string that cannot be a device's name."""
    kind = device.partition(":")[0]
    if not re.fullmatch(r"[a-z]+(:\d+)?", device) or kind not in _DEVICES:
        hint = did_you_mean(kind, _DEVICES)
        raise DefinitionError(
            f"--device {device}: there is no such device.{hint} "
            "To select one of several devices, add its number, for example cuda:1."
        )


def check_prompts_and_reward(pipeline: Pipeline, seed: int) -> None:
    """Check the prompts, the reward functions' arguments, and that the model knows the characters."""
    prompt = prompt_at(pipeline.prompts, 0, seed)
    check_columns(bound_rewards(pipeline), "prompts", pipeline.prompts)
    if isinstance(pipeline.policy, TinyPolicy) and pipeline.environment is None:
        unknown = sorted(
            set(prompt.text + (prompt.answer if isinstance(prompt.answer, str) else "")) - set(pipeline.policy.alphabet)
        )
        if unknown:
            raise DataError(
                f"the prompt {prompt.text!r} (answer {prompt.answer!r}) has characters that are not in the model's "
                f"alphabet: {' '.join(map(repr, unknown))}. Add them to the definition: TinyPolicy(alphabet=...)."
            )


def check_evaluation(pipeline: Pipeline, name: str, *, apart: bool = True) -> None:
    """Reject a set for evaluations with prompts that are used for training, or that the reward cannot grade."""
    evaluate, field = pipeline.evaluations[name], prompts_field(name)
    evaluate.sampling(pipeline.collect)  # rejects what the engine cannot do
    check_columns(bound_rewards(pipeline), field, evaluate.prompts)
    readers = [getattr(source, "all_prompts", None) for source in (pipeline.prompts, evaluate.prompts)]
    if not apart or readers[0] is None or readers[1] is None:
        return  # one of them makes its prompts, or does not report them
    learned = {prompt.text for prompt in readers[0]()}
    shared = [prompt.text for prompt in readers[1]() if prompt.text in learned]
    if shared:
        raise DefinitionError(
            f"some prompts of {field} are also training prompts, for example {shared[0][:60]!r} ({len(shared):,} in "
            "total). Remove them from the training prompts or from the evaluation prompts: a run must never train on "
            "evaluation prompts."
        )


def check_stores(replay: Replay) -> None:
    """Check that the stores of a definition exist, and that its filters can be parsed."""
    with open_sources(stores_of(replay)) as stores:
        for store in stores:
            select(store, replay.filters, store.ids()[:0])
