"""One completion as other tools write it down, before it is a row of a store."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_pipeline.errors import DataError

ONE_ROW = "one row"
"""The group of a rollout whose row holds its whole group."""

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
    """Which completion tokens the policy produced; None for all (no tool output or later user turn among them)."""
    log_probs: Sequence[float | None] | None = None
    """Behaviour log-probs, one per completion token; None where unknown."""
    ref_log_probs: Sequence[float | None] | None = None
    reward: float = math.nan
    advantage: float = math.nan
    group: Hashable = None
    """Names the instance of the prompt within its file; None: rows in turn with equal prompts are one group."""
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


def as_text(value: Any, name: str) -> str:
    """Return a field as text: a string, or the chat messages of one completion.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"field '{name}' holds half of a surrogate pair, which is no text.") from None
        return value
    if is_messages(value):
        return text_of(value)
    raise DataError(f"field '{name}' must be text or chat messages, got {shown(value)}.")


def as_prompt(value: Any, name: str) -> str | Messages:
    """Return a prompt: text, or chat messages as they are."""
    if is_messages(value):
        return value
    return as_text(value, name)


def as_number(value: Any, name: str) -> float:
    """Return a field as a float; True is 1.0 and null is NaN.

    Raises:
        DataError: it is no number.
    """
    if value is None:
        return math.nan
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, str) and value.strip() in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"):
        return float(value)
    raise DataError(f"field '{name}' must be a number, got {shown(value)}.")


def as_int(value: Any, name: str) -> int:
    """Return a field as an int.

    Raises:
        DataError: it is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
        raise DataError(f"field '{name}' must be a whole number, got {shown(value)}.")
    return int(value)


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


def as_scores(value: Any, name: str) -> list[float | None]:
    """Return a field as one log-prob per token; null where there is none.

    Raises:
        DataError: it is no list of numbers.
    """
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list of log-probs, got {shown(value)}.")
    for item in value:
        if item is not None and (isinstance(item, bool) or not isinstance(item, (int, float))):
            raise DataError(f"field '{name}' must be a list of log-probs, got {shown(item)} in it.")
    return value


def as_answer(value: Any) -> str | None:
    """Return a reference answer as text: what is not text becomes JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def shown(value: Any) -> str:
    """Return a value as an error message shows it: its type, and its beginning.

    >>> shown(3)
    'int 3'
    """
    text = repr(value)
    return f"{type(value).__name__} {text[:57] + '...' if len(text) > 60 else text}"
