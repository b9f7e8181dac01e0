"""One completion as other tools write it, before it becomes a row of a store."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_pipeline.errors import DataError

Row = Mapping[str, Any]
"""One row of a file, as JSON or Arrow gives it."""

ONE_ROW = "one row"
"""The group of a rollout whose row holds its whole group."""

LARGEST = 3.4028234663852886e38
"""The largest float32, the type in which rewards and log-probs are stored."""
ROUNDING = 1e-4
"""A log-prob may lie above 0 by this much, where an engine rounds."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One completion of one prompt. Where token ids are given they are kept; text is encoded once, at import."""

    prompt: str | Messages = ""
    """Text or chat messages; empty where only token ids are known."""
    completion: str = ""
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    completion_mask: Sequence[bool] | None = None
    """Which completion tokens the policy produced; None for all of them."""
    log_probs: Sequence[float | None] | None = None
    """Behaviour log-probs, one per completion token; None where unknown."""
    ref_log_probs: Sequence[float | None] | None = None
    reward: float = math.nan
    advantage: float = math.nan
    group: Hashable = None
    """Names the instance of the prompt within its file; None groups consecutive rows with equal prompts."""
    policy_version: int = 0
    finish_reason: str = ""
    answer: str | None = None
    created_at: float = math.nan
    as_chat: bool = True
    """A text prompt goes through the tokenizer's chat template, where it has one."""
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of the row, JSON-ready."""


def is_messages(value: Any) -> bool:
    """Return True for a list of chat messages.

    >>> is_messages([{"role": "user", "content": "hi"}]), is_messages(["hi"])
    (True, False)
    """
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def message_text(message: Mapping[str, Any]) -> str:
    """Return what one chat message says; the text parts of a content that is a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") or "" for part in content if isinstance(part, dict)]
        return "".join(str(part) for part in parts)
    return "" if content is None else str(content)


def text_of(value: str | Messages) -> str:
    r"""Return a prompt or completion as text for people: one message is its content, more are marked by role.

    >>> text_of([{"role": "user", "content": "1+1"}])
    '1+1'
    >>> text_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}])
    '[system]\nBe brief.\n\n[user]\n1+1'
    """
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return message_text(value[0])
    return "\n\n".join(f"[{message.get('role')}]\n{message_text(message)}" for message in value)


def check_text(text: str, name: str) -> str:
    """Return `text` if it can be written as UTF-8.

    Raises:
        DataError: it holds half of a surrogate pair, which JSON can spell and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"field '{name}' holds half of a surrogate pair ({half}), which is not text.") from None
    return text


def as_text(value: Any, name: str) -> str:
    """Return a field as text: a string, or the chat messages of one completion.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        return check_text(value, name)
    if is_messages(value):
        return check_text(text_of(value), name)
    raise DataError(f"field '{name}' must be text or chat messages, got {shown(value)}.")


def as_prompt(value: Any, name: str) -> str | Messages:
    """Return a prompt: text, or chat messages as they are."""
    if is_messages(value):
        check_text(text_of(value), name)
        return value
    return as_text(value, name)


def as_number(value: Any, name: str) -> float:
    """Return a field as a float; True is 1.0 and null is NaN.

    Raises:
        DataError: it is not a number, or one that no float holds.
    """
    if value is None:
        return math.nan
    if isinstance(value, str) and value.strip() in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            raise DataError(f"field '{name}' must be a number of reasonable size, got {shown(value)}.") from None
    raise DataError(f"field '{name}' must be a number, got {shown(value)}.")


def as_reward(value: Any, name: str) -> float:
    """Return a field as a reward or an advantage: a finite float32, or NaN where there is none.

    Raises:
        DataError: it is something else.
    """
    reward = as_number(value, name)
    if not (abs(reward) <= LARGEST or reward != reward):
        raise DataError(
            f"field '{name}' must be finite and at most {LARGEST:.4g} in size (float32), got {shown(value)}. "
            "Write null where there is no reward."
        )
    return reward


def as_int(value: Any, name: str) -> int:
    """Return a field as an int; digits in quotes are taken as the number that they spell.

    Raises:
        DataError: it is not a whole number of 64 bits.
    """
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 30:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"field '{name}' must be a whole number, got {shown(value)}.")
    if not abs(value) <= 2**63 - 1:
        raise DataError(f"field '{name}' must be a whole number of at most {2**63 - 1}, got {shown(value)}.")
    return value


def as_ids(value: Any, name: str) -> list[int]:
    """Return a field as token ids.

    Raises:
        DataError: it is no list of whole numbers from 0 to 2**31 - 1.
    """
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < 2**31 for item in value):
        raise DataError(f"field '{name}' must be a list of token ids, got {shown(value)}.")
    return value


def as_list(value: Any, name: str) -> list[Any]:
    """Return a field that must be a list.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list, got {shown(value)}.")
    return value


def as_mask(value: Any, name: str) -> list[bool]:
    """Return a field as one flag per token.

    Raises:
        DataError: it is not a list.
    """
    return [bool(item) for item in as_list(value, name)]


def as_scores(value: Any, name: str) -> list[float | None]:
    """Return a field as one log-prob per token; None where there is none (null or NaN).

    Raises:
        DataError: it is not a list of numbers, or one of them is no log-prob: above 0, or infinite.
    """
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list of log-probs, got {shown(value)}.")
    scores: list[float | None] = []
    for place, item in enumerate(value):
        if type(item) is float and -LARGEST <= item <= ROUNDING:
            scores.append(item)
            continue
        score = as_number(item, f"{name}[{place}]")
        if score != score:
            scores.append(None)
        elif not -LARGEST <= score <= ROUNDING:
            raise DataError(
                f"field '{name}' must hold log-probs, which are finite and not above 0, got {shown(item)} at place "
                f"{place}. Write null where a token has none."
            )
        else:
            scores.append(score)
    return scores


def as_answer(value: Any) -> str | None:
    """Return a reference answer as text: what is not text becomes JSON."""
    if value is None or isinstance(value, str):
        return None if value is None else check_text(value, "answer")
    return json.dumps(value, ensure_ascii=True, default=str)


def shown(value: Any) -> str:
    """Return a value as an error message shows it: its type, and its beginning.

    >>> shown(3)
    'int 3'
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not spell out integers of more than a few thousand digits
        text = f"of {value.bit_length():,} bits"
    return f"{type(value).__name__} {text[:57] + '...' if len(text) > 60 else text}"


def field_of(row: Any, name: str) -> Any:
    """Return a field that must be there.

    Raises:
        DataError: it is not, or `row` is no object.
    """
    if not isinstance(row, Mapping) or name not in row:
        there = ", ".join(sorted(map(str, row))) if isinstance(row, Mapping) else shown(row)
        raise DataError(f"there is no field '{name}' (here are: {there}).")
    return row[name]
