"""Reward functions: `(prompt, completion, answer, meta) -> float`.

They take text, return one number and import nothing heavy, so `inspect` can grade a stored trajectory again without
loading a model.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_pipeline.data.prompts import JsonValue, Prompt
from rlhf_pipeline.errors import DefinitionError, RewardError, plain

RewardFunction = Callable[[str, str, str | None, Mapping[str, object]], float]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def no_reward(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Refuse: for definitions that learn from stores, which hold the rewards.

    Raises:
        DefinitionError: always.
    """
    raise DefinitionError("the definition has no reward function; it learns from stores, whose rewards are stored.")


def token_match(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Return the share of the answer's characters that are in the right place, in [0, 1].

    Characters beyond the answer's length count as wrong, so running on is not rewarded.

    >>> token_match("12=", "13", "12", {})
    0.5
    >>> token_match("12=", "1299", "12", {})
    0.5
    """
    expected = answer or ""
    longest = max(len(expected), len(completion))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(expected, completion, strict=False)) / longest


def final_number(text: str) -> str | None:
    r"""Return the final number of a solution: the one after the last `####`, or the last one in the text.

    Thousands separators and a trailing `.0` are dropped, so `1,000.00` equals `1000`.

    >>> final_number("so 3 * 4 = <<3*4=12>>12\n#### 12")
    '12'
    >>> final_number("It costs $1,250.50.")
    '1250.5'
    >>> final_number("no idea") is None
    True
    """
    _, marker, tail = text.rpartition("####")
    found = _NUMBER.findall(tail)
    if not found:
        return None
    number = (found[0] if marker else found[-1]).replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def final_number_match(prompt: str, completion: str, answer: JsonValue, meta: Mapping[str, object]) -> float:
    """Return 1.0 if the completion's final number equals the answer's, or one of several answers', else 0.0.

    >>> final_number_match("", "A: 18", "16 - 3 - 4 = 9 ... #### 18", {})
    1.0
    """
    given = final_number(completion)
    answers = answer if isinstance(answer, list) else [answer]
    return float(given is not None and given in [final_number(str(item)) for item in answers if item is not None])


LARGEST: Final = 3.4028234663852886e38
"""The largest float32, the type that rewards are stored in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The result of a reward function for one completion."""

    reward: float
    """The reward; NaN if the call failed."""
    error: str | None = None
    """One line about the failure, or None."""


def grade(reward: RewardFunction, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Grade]:
    """Grade each completion with its prompt; a call that raises or does not return a finite number gives NaN.

    Args:
        reward: `(prompt, completion, answer, meta) -> float`.
        prompts: one per completion.
        completions: decoded text, without special tokens.

    Returns:
        One grade per completion, in order.

    Raises:
        RewardError: every call failed, so the reward function itself is wrong.
    """
    grades = [
        called(reward, prompt.text, text, prompt.answer, prompt.meta)
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    failed = [item.error for item in grades if item.error is not None]
    if failed and len(failed) == len(grades):
        name = getattr(reward, "__qualname__", repr(reward))
        raise RewardError(
            f"all {len(failed)} calls of the reward function {name} failed; the first with {failed[0]}. "
            "This rollout was not stored; it will be sampled again, token for token. "
            "Fix the function, then type the same command with --resume."
        )
    return grades


def called(
    reward: RewardFunction, prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]
) -> Grade:
    """Return the grade of one completion: its reward, or NaN and one line about the failure."""
    try:
        value = float(reward(prompt, completion, answer, meta))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
        return Grade(reward=math.nan, error=describe_error(error))
    if not abs(value) <= LARGEST:
        return Grade(reward=math.nan, error=f"the reward is {value}; it must be a finite float32")
    return Grade(reward=value)


def describe_error(error: BaseException) -> str:
    """Return one line about an exception that can be stored and printed, even if its message cannot be read."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its own __str__ is user code as well
        text = "(its message cannot be read)"
    line = plain(" ".join(text.split()).encode("utf-8", "replace").decode())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {line} ({frame.filename}:{frame.lineno})"
