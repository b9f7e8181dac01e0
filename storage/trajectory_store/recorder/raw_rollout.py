"""One completion of another tool or trainer, checked: what a row of a store is made of."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError
from trajectory_store.where import seconds_of

Row = Mapping[str, Any]
"""One row of a file, as parsed from JSON or Arrow."""
Messages = Sequence[Mapping[str, Any]]

LARGEST: Final = float(np.finfo(np.float32).max)
"""The largest float32, the type that rewards are stored in."""
ROUNDING = 1e-4
"""A log-prob may exceed 0 by this much, because engines round."""
FAILURES = ("timeout", "tool_error", "grader_error", "truncated", "engine")
CUT = "length"
"""The finish reason of a completion that was cut off before the policy ended it."""
UNKNOWN_VERSION = -1
"""The value of an unknown policy version."""
_LAST_SECOND = 253_402_300_799
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message, in addition to its content, that contain output of the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRollout:
    """One completion of one prompt: what a file's row becomes, whichever tool wrote it.

    Only what the file holds is given; an empty field is unknown, and nothing takes its place.
    """

    prompt: str | Messages = ""
    """Text or chat messages; empty if only token ids are known."""
    completion: str = ""
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    completion_mask: Sequence[bool] | None = None
    """Which completion tokens the policy sampled; None for all of them."""
    mask_known: bool = True
    """False if the completion contains text from an environment that the file does not mark. The completion is then
    excluded from the loss, but its reward contributes to its group.
    """
    log_probs: Sequence[float | None] | None = None
    """Behaviour log-probs, one per completion token; None if unknown."""
    ref_log_probs: Sequence[float | None] | None = None
    reward: float = math.nan
    advantage: float = math.nan
    group: Hashable | None = None
    """Identifies the instance of the prompt within its file; if None, consecutive rows with equal prompts are one
    instance.
    """
    one_prompt: bool = True
    """Whether the members of a named group must have the same prompt."""
    by_prompt: bool = False
    """Whether no id identifies the group: it then consists of the rows of one prompt, as far as the file shows."""
    across_files: bool = False
    """Whether members of the group may also be in other files."""
    identity: Hashable | None = None
    """A value that is equal in every file to which the tool wrote this completion."""
    one_turn: bool = True
    """False if the completion is text that may contain text from an environment, as far as the file shows."""
    evaluation: bool = False
    policy_version: int = UNKNOWN_VERSION
    temperature: float = math.nan
    """The sampling temperature; NaN if the tool does not report it."""
    log_prob_mode: str = ""
    """`processed` or `raw`; empty if the tool does not report it."""
    finish_reason: str = ""
    failure: str = ""
    """One of `FAILURES`: the reward is not trusted and not used for training."""
    answer: str | None = None
    created_at: float = math.nan
    as_chat: bool = True
    """Whether the tokenizer's chat template, if it has one, is applied to a text prompt."""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of the row, JSON-ready."""


# Values of fields: each function returns what a record has, or raises a BatchError that names the field.


def excerpt(value: Any) -> str:
    """Return a value as an error message shows it: its type, and its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python does not spell out integers of more than a few thousand digits
        text = f"of {value.bit_length():,} bits"
    return f"{type(value).__name__} {text[:57] + '...' if len(text) > 60 else text}"


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of one chat message; the text parts of a content that is a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def text_of(value: str | Messages) -> str:
    r"""Return a prompt or completion as text for people: one message is its content, more are marked by role.

    >>> text_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}])
    '[system]\nBe brief.\n\n[user]\n1+1'
    """
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return message_text(value[0])
    return "\n\n".join(f"[{message.get('role')}]\n{message_text(message)}" for message in value)


def check_text(text: str, name: str) -> str:
    """Return `text` if it can be written as UTF-8, which half of a surrogate pair cannot, though JSON can spell it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BatchError(
            f"field '{name}' contains half of a surrogate pair ({half}), which is not valid text."
        ) from None
    return text


def check_is_text(messages: Messages, name: str, *, sampled: bool) -> None:
    """Reject messages with more content than their text, or in the completion of another role: it would be lost."""
    roles = ", ".join(str(message.get("role")) for message in messages)
    if sampled and roles != "assistant":
        raise BatchError(
            f"field '{name}' contains messages ({roles}) but has no token ids; the text does not show which "
            "tokens the policy produced. Export the token ids too."
        )
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [] if content is None else [{"text": content}]
        more = [part for part in parts if not isinstance(part, dict) or not isinstance(part.get("text"), str)]
        more += [{key: message[key]} for key in _BESIDE_CONTENT if sampled and message.get(key)]
        if more:
            raise BatchError(
                f"field '{name}' contains more than text ({excerpt(more[0])}) but has no token ids. This content "
                "would be lost when the text is encoded. Export the token ids too."
            )


def as_prompt(value: Any, name: str) -> str | Messages:
    """Return text, or chat messages, of each the content as one text where it comes in parts."""
    if not isinstance(value, str) and not is_messages(value):
        raise BatchError(f"field '{name}' must be text or chat messages, got {excerpt(value)}.")
    check_text(text_of(value), name)
    if isinstance(value, str):
        return value
    parts = any(isinstance(message.get("content"), list) for message in value)
    return [{**message, "content": message_text(message)} for message in value] if parts else value


def as_number(value: Any, name: str) -> float:
    """Return a float; True is 1.0, null is NaN, and a number in quotes is that number."""
    if value is None:
        return math.nan
    if isinstance(value, (bool, int, float, str)):
        try:
            return float({"true": 1, "false": 0}.get(value.strip().lower(), value) if isinstance(value, str) else value)
        except OverflowError:
            raise BatchError(
                f"field '{name}' must be a number within the range of a float, got {excerpt(value)}."
            ) from None
        except ValueError:
            pass
    raise BatchError(f"field '{name}' must be a number, got {excerpt(value)}.")


def as_reward(value: Any, name: str) -> float:
    """Return a reward or an advantage: a finite float32, or NaN where there is none."""
    if isinstance(value, list):
        raise BatchError(f"field '{name}' must be one reward, got a list of {len(value)}: {excerpt(value)}.")
    reward = as_number(value, name)
    if not (abs(reward) <= LARGEST or reward != reward):
        raise BatchError(
            f"field '{name}' must be finite and at most {LARGEST:.4g} in magnitude (float32), got {excerpt(value)}. "
            "Write null if there is no reward."
        )
    return reward


def as_advantage(value: Any, name: str) -> float:
    """Return an advantage: a number, or the one that all of a list are, apart from nulls."""
    if not isinstance(value, list):
        return as_reward(value, name)
    advantages = {number for number in (as_reward(item, name) for item in value) if number == number}
    if len(advantages) > 1:
        some = ", ".join(f"{number:g}" for number in sorted(advantages)[:3])
        raise BatchError(
            f"field '{name}' differs between tokens ({some}), but a trajectory has one advantage. Ignore the field: "
            "--field advantage=none"
        )
    return advantages.pop() if advantages else math.nan


def as_int(value: Any, name: str) -> int:
    """Return an int of 64 bits; digits in quotes are taken as the number that they spell."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,29}\s*", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BatchError(f"field '{name}' must be a whole number, got {excerpt(value)}.")
    if not abs(value) <= 2**63 - 1:
        raise BatchError(f"field '{name}' must be a whole number of at most {2**63 - 1}, got {excerpt(value)}.")
    return value


def as_time(value: Any, name: str) -> float:
    """Return seconds since 1970: a number, a date and time of Arrow's, or one in text."""
    try:
        seconds = seconds_of(value) if isinstance(value, (str, datetime.datetime)) else as_number(value, name)
    except ValueError:
        raise BatchError(
            f"field '{name}' must be a number of seconds or a date such as 2026-01-31, got {excerpt(value)}."
        ) from None
    if abs(seconds) > _LAST_SECOND:
        raise BatchError(
            f"field '{name}' must be seconds since 1970, got {excerpt(value)}, which is not a date before the year "
            "10000. Convert it to seconds, or ignore the field: --field created_at=none"
        )
    return seconds


def as_temperature(value: Any, name: str) -> float:
    """Return a temperature: a number, not negative; NaN where there is none."""
    heat = as_number(value, name)
    if heat < 0 or heat == math.inf:
        raise BatchError(f"field '{name}' must be a temperature of at least 0, got {excerpt(value)}.")
    return heat


def as_mode(value: Any, name: str) -> str:
    """Return how log-probs were made: of the distribution that was sampled from, or of the model's at 1."""
    if value not in ("processed", "raw", ""):
        raise BatchError(f"field '{name}' must be 'processed' or 'raw', got {excerpt(value)}.")
    return value


def as_flag(value: Any, name: str) -> bool:
    """Return a truth value; None and NaN are False."""
    return as_number(value, name) == 1


def as_failure(value: Any, name: str) -> str:
    """Return the kind of a failure: one of `FAILURES`, or what a tool calls it; empty where there is none.

    >>> as_failure("SandboxTimeout: no answer", "error"), as_failure("truncated", "error"), as_failure("None", "error")
    ('timeout', 'truncated', '')
    """
    if not _is_given_failure(value):
        return ""
    text = str(value).strip().lower()
    return text if text in FAILURES else next((kind for words, kind in _KINDS if re.search(words, text)), "tool_error")


def _is_given_failure(value: Any) -> bool:
    """Return False for a placeholder of a missing value: null, NaN, false, zero, and their spellings in text."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "null", "nan", "false", "0", "no", "ok")
    return bool(value) and value == value


_KINDS = (
    (r"time.?d?.?out", "timeout"),
    (r"truncat|over.?long|context.?length|max.?(new.?)?tokens|too.?long", "truncated"),
    (r"abort|cancel|pending|engine|server|connection|provider", "engine"),
    (r"grad|scor|reward|judge|verif", "grader_error"),
)
_ERRORS = ("error", "errors", "error_message", "exception", "failure", "failure_reason")
"""Fields that contain an exception."""
_FAILED = (
    "failed",
    "is_failed",
    "has_error",
    "is_error",
    "timeout",
    "timed_out",
    "is_timeout",
    "aborted",
    "is_aborted",
)
"""Flags of a failure."""
_CUT = ("truncated", "is_truncated", "overlong", "is_overlong")
"""Flags of a completion that ended too early."""
_STATUS = ("status", "state")
_STATES = frozenset((
    *("failed", "failure", "error", "errored", "crashed", "timeout", "timed_out", "aborted"),
    *("cancelled", "canceled", "incomplete", "truncated"),
))  # fmt: skip
"""States of `_STATUS` that are failures; any other text there describes the task, and has no effect."""
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Timeout|Interrupt|Expired)(?::|\(|\Z)")
"""The class of an exception, at the start of its text."""
_ENDED = {"timeout": "timeout", "timed_out": "timeout"} | dict.fromkeys(
    ("abort", "aborted", "error", "failed", "cancelled", "canceled", "content_filter"), "engine"
)
"""Finish reasons that are failures."""
_CUT_OFF = (
    "length",
    "max_tokens",
    "max_length",
    "model_length",
    "max_new_tokens",
    "token_limit",
    "truncated",
    "overlong",
)


def state_of(row: Row) -> tuple[str, str, str]:
    """Return the field that marks a row as failed or cut off, the reason of its end, and the kind of failure.

    Only exact states count: a flag, an exception's class, a word of `_STATES`. Other text describes the task. Tools do
    not record how they grade completions that a flag such as `truncated` marks, so their reward is not trusted.

    >>> state_of({"status": "failed"}), state_of({"truncated": True}), state_of({"error": 0.25, "status": "success"})
    (('status', '', 'tool_error'), ('truncated', 'length', 'truncated'), ('', '', ''))
    """
    for name in _ERRORS:
        if row.get(name) is True or row.get(name) in FAILURES:
            return name, "", "tool_error" if row[name] is True else row[name]
        error = _exception_of(row.get(name))
        if error is not None:
            return name, "", as_failure(error, name)
    for name in _FAILED:
        if _is_set(row.get(name)):
            return name, "", as_failure(name, name)
    for name in _CUT:
        if _is_set(row.get(name)):
            return name, CUT, "truncated"
    if row.get("reward_trusted") is False:
        return "reward_trusted", "", "grader_error"
    for name in _STATUS:
        state = row.get(name)
        if isinstance(state, str) and state.strip().lower() in _STATES:
            kind = as_failure(state, name)
            return name, CUT if kind == "truncated" else "", kind
    return "", "", ""


def _is_set(flag: Any) -> bool:
    """Return whether a flag is on: true or 1, also as text. Another number measures something."""
    return flag in (True, 1) or (isinstance(flag, str) and flag.strip().lower() in ("true", "1"))


def _exception_of(error: Any) -> str | None:
    """Return an exception's class: of text that starts with it, or of the object that a tool writes for it."""
    if isinstance(error, Mapping):
        return next((kind for part in error.values() if (kind := _exception_of(part)) is not None), None)
    match = _EXCEPTION.match(error.strip()) if isinstance(error, str) else None
    return None if match is None else match[0].rstrip(":(")


def ended(reason: str, failure: str) -> tuple[str, str]:
    """Return why a completion ended and its failure, from what a tool reports: an end that is a failure is one.

    >>> ended("max_tokens", ""), ended("abort", ""), ended("stop", "")
    (('length', ''), ('abort', 'engine'), ('stop', ''))
    """
    word = reason.strip().lower()
    return CUT if word in _CUT_OFF else reason, failure or _ENDED.get(word, "")


def as_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BatchError(f"field '{name}' must be a list, got {excerpt(value)}.")
    return value


def as_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < 2**31 for item in value):
        raise BatchError(f"field '{name}' must be a list of token ids, got {excerpt(value)}.")
    return value


def as_mask(value: Any, name: str) -> list[bool]:
    for place, item in enumerate(as_list(value, name)):
        if item not in (0, 1):
            raise BatchError(
                f"field '{name}' must contain only 0 and 1, or false and true, got {excerpt(item)} at position {place}."
            )
    return [bool(item) for item in value]


def as_scores(value: Any, name: str) -> list[float | None]:
    """Return one log-prob per token, finite and not above 0; None where there is none (null or NaN)."""
    scores: list[float | None] = []
    for place, item in enumerate(as_list(value, name)):
        score = item if type(item) is float else as_number(item, f"{name}[{place}]")
        if not (-LARGEST <= score <= ROUNDING or score != score):
            raise BatchError(
                f"field '{name}' must contain log-probs, which are finite and at most 0, got {excerpt(item)} at "
                f"position {place}. Write null if a token has no log-prob."
            )
        scores.append(None if score != score else score)
    return scores


def as_answer(value: Any, name: str) -> str:
    """Return a reference answer as text: what is not text becomes JSON."""
    return check_text(value, name) if isinstance(value, str) else json.dumps(value, ensure_ascii=True, default=str)


def as_reason(value: Any, name: str) -> str:
    """Return why a completion ended, as text: a word, or a number as vLLM gives for a stop token."""
    if isinstance(value, float) and value != value:
        return ""
    if not isinstance(value, (str, int)):
        raise BatchError(f"field '{name}' must be text, got {excerpt(value)}.")
    return check_text(str(value), name)


VALUES: Mapping[str, Callable[[Any, str], Any]] = {
    "prompt": as_prompt,
    "completion": lambda value, name: text_of(as_prompt(value, name)),
    "prompt_ids": as_ids,
    "completion_ids": as_ids,
    "completion_mask": as_mask,
    "log_probs": as_scores,
    "ref_log_probs": as_scores,
    "reward": as_reward,
    "advantage": as_advantage,
    "policy_version": as_int,
    "finish_reason": as_reason,
    "failure": as_failure,
    "temperature": as_temperature,
    "log_prob_mode": as_mode,
    "evaluation": as_flag,
    "answer": as_answer,
    "created_at": as_time,
}
"""The conversion of a field's value to the value in a record."""


def values_of(
    fields: Mapping[str, Any], names: Mapping[str, str] | None = None, *, for_display: bool = False
) -> dict[str, Any]:
    """Return the given values of a record, checked; values at tokens that the policy did not sample are ignored.

    With `for_display`, messages may contain more than the text that they are encoded by.
    """
    raw = {target: value for target, value in fields.items() if value is not None}
    names = names or {}
    for target in ("prompt", "completion"):
        messages = raw.get(target)
        if is_messages(messages) and f"{target}_ids" not in raw and not for_display:
            check_is_text(messages, names.get(target, target), sampled=target == "completion")
    if "completion_mask" in raw:
        mask = raw["completion_mask"] = as_mask(raw["completion_mask"], names.get("completion_mask", "completion_mask"))
        for target in ("log_probs", "ref_log_probs", "advantage"):
            if isinstance(values := raw.get(target), list) and len(values) == len(mask):
                raw[target] = [value if on else None for value, on in zip(values, mask, strict=True)]
    return {name: convert(raw[name], names.get(name, name)) for name, convert in VALUES.items() if name in raw}


def weighted(scores: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weighted sum of `[n, functions]` rewards as TRL forms it: NaN counts as 0, unless all are NaN.

    >>> weighted(np.array([[1.0, np.nan], [np.nan, np.nan]]), np.array([2.0, 1.0])).tolist()
    [2.0, nan]
    """
    total = np.nansum(scores * weights, axis=1)
    total[np.isnan(scores).all(axis=1)] = np.nan
    return total
