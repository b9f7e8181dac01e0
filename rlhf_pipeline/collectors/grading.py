"""Calling reward functions so that one bad call costs one trajectory, never the run."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import RewardFunction
from rlhf_pipeline.errors import RewardError, plain

LARGEST: Final = 3.4028234663852886e38
"""The largest float32, the type that rewards are stored in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What a reward function said about one completion."""

    reward: float
    """The reward; NaN if the call failed."""
    error: str | None = None
    """One line about the failure, or None."""


def grade(reward: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Grade]:
    """Grade each completion with its prompt; a call that raises or returns no finite number gives NaN.

    Args:
        reward: `(prompt, completion, answer, meta) -> float`.
        prompts: one per completion.
        completions: decoded text, without special tokens.

    Returns:
        One grade per completion, in order.

    Raises:
        RewardError: every call failed, so the reward function itself is wrong.
    """
    grades = [_grade_one(reward, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    failed = [item.error for item in grades if item.error is not None]
    if failed and len(failed) == len(grades):
        name = getattr(reward, "__qualname__", repr(reward))
        raise RewardError(
            f"all {len(failed)} calls of the reward function {name} failed; the first with {failed[0]}. "
            "This rollout was not stored; it will be sampled again, token for token. "
            "Fix the function, then type the same command with --resume."
        )
    return grades


def _grade_one(reward: RewardFunction, prompt: Prompt, completion: str) -> Grade:
    try:
        value = float(reward(prompt.text, completion, prompt.answer, prompt.meta))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
        return Grade(reward=math.nan, error=describe_error(error))
    if not abs(value) <= LARGEST:
        return Grade(reward=math.nan, error=f"the reward is {value}; it must be a finite float32")
    return Grade(reward=value)


def describe_error(error: BaseException) -> str:
    """Return one line that can be stored and printed, whatever the user's exception says or fails to say."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its own __str__ is user code as well
        text = "(its message cannot be read)"
    line = plain(" ".join(text.split()).encode("utf-8", "replace").decode())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {line} ({frame.filename}:{frame.lineno})"
