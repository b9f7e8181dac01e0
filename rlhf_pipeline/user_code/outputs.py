"""The return values of user code: the forms of docs/rewards.md, read and checked in one place.

A result is a number (of Python, NumPy or torch), None if the function does not apply, a dict of components, or a number
with such a dict. The reward of a dict is its `score` (as in verl), `reward` or `rewards`, or the sum of its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rlhf_pipeline.data.rewards import LARGEST, TOTALS
from rlhf_pipeline.errors import count

DEEPEST: Final = 64
"""Levels of nesting in values that are stored as JSON; deeper values are stored as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one reward function for one completion."""

    value: float | None
    """None if the function does not apply."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The components that the function returned in addition."""


_LOGS: Final = "extra_logs"
"""OpenRLHF's additional metrics, which are not part of the reward."""


def result_of(returned: Any) -> Result:
    """Read what a reward function returned for one completion.

    Raises:
        ValueError: it is not a finite number that fits float32.
        TypeError: it is not a number at all.

    >>> result_of({"accuracy": 1.0, "format": 0.5}).value, result_of({"score": 1, "format": 0.5}).value
    (1.5, 1.0)
    >>> result_of(None).value is None, result_of([0.5]).value
    (True, 0.5)
    """
    if returned is None:
        return Result(value=None)
    if isinstance(returned, Mapping):
        whole = cast("Mapping[str, Any]", returned)
        parts, logged = _numbers(whole), _numbers(whole.get(_LOGS))
        if not parts:
            raise ValueError(f"the dict {_short(returned)} contains no number")
        total = next((parts[name] for name in TOTALS if name in parts), None)
        return Result(value=_number(sum(parts.values()) if total is None else total), parts=logged | parts)
    if isinstance(returned, (list, tuple)):
        several = cast("Sequence[Any]", returned)
        if len(several) == 2 and isinstance(several[1], Mapping):
            first = result_of(several[0])
            return Result(value=first.value, parts={**first.parts, **result_of(several[1]).parts})
        if len(several) == 1:
            return result_of(several[0])
        raise TypeError(f"it returned {len(several)} values for one completion: {_short(returned)}")
    return Result(value=_number(returned))


def results_of(returned: Any, num: int) -> list[Result]:
    """Read what a batched reward function returned for `num` completions."""
    several = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(several, Mapping):  # NeMo's and OpenRLHF's form: a list per component
        columns = cast("Mapping[str, Any]", several)
        logs = columns.get(_LOGS)
        lists = {name: _listed(values) for name, values in columns.items() if name != _LOGS}
        if isinstance(logs, Mapping):  # a figure of the whole batch is each one's
            figures = {name: _listed(values) for name, values in cast("Mapping[str, Any]", logs).items()}
            logs = {name: values if isinstance(values, list) else [values] * num for name, values in figures.items()}
            lists |= {f"{_LOGS}.{name}": values for name, values in logs.items()}
        if any(not isinstance(values, (list, tuple)) or len(values) != num for values in lists.values()):
            raise TypeError(
                f"it returned {_short(returned)} for {count(num, 'completion')}; each entry must be a list with one "
                "value per completion"
            )
        several = [_of_one({name: values[i] for name, values in lists.items()}) for i in range(num)]
    if not isinstance(several, (list, tuple)) or len(cast("list[Any]", several)) != num:
        raise TypeError(
            f"it returned {_short(returned)} for {count(num, 'completion')}; it must return a list with one "
            "value per completion"
        )
    return [result_of(reward) for reward in cast("list[Any]", several)]


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _of_one(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a dict of lists contains for one completion, with OpenRLHF's further figures in a separate dict."""
    logs = {name.removeprefix(f"{_LOGS}."): part for name, part in parts.items() if name.startswith(f"{_LOGS}.")}
    rest = {name: part for name, part in parts.items() if not name.startswith(f"{_LOGS}.")}
    return rest | ({_LOGS: logs} if logs else {})


def _numbers(returned: Any) -> dict[str, float]:
    """Return the numbers of a dict; notes and None are omitted."""
    items = cast("Mapping[Any, Any]", returned).items() if isinstance(returned, Mapping) else ()
    no_number = (str, bytes, Mapping, list, tuple)
    return {str(name): _number(part) for name, part in items if part is not None and not isinstance(part, no_number)}


def _number(returned: Any) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    single = returned.item() if hasattr(returned, "item") else returned
    value = float(single)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the reward is {value}; it must be a finite float32")
    return value


def _short(returned: Any) -> str:
    text = repr(returned)
    return text if len(text) <= 60 else f"{text[:57]}..."


def checked_info(info: object) -> dict[str, Any]:
    """Return the values to store with a trajectory."""
    if not isinstance(info, Mapping):
        raise TypeError(f"info is of type {type(info).__name__}; it must be a mapping of names to values")
    return {str(name): value for name, value in cast("Mapping[Any, Any]", info).items()}


def checked_messages(messages: object, what: str) -> list[dict[str, Any]]:
    """Return separate messages whose contents are text, that of parts joined, and whose other values are JSON.

    >>> checked_messages([{"role": "tool", "content": [{"type": "text", "text": "4"}]}], "the reply")
    [{'role': 'tool', 'content': '4'}]
    """
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"{what} is of type {type(messages).__name__}; it must be text or a list of messages")
    checked: list[dict[str, Any]] = []
    for entry in cast("Sequence[Any]", messages):
        if not isinstance(entry, Mapping) or not isinstance(cast("Mapping[str, Any]", entry).get("role"), str):
            raise TypeError(f"{what} contains {entry!r:.60}; a message must be a mapping with a role")
        message = cast("Mapping[Any, Any]", entry)
        others = {str(name): plain_json(value) for name, value in message.items() if name != "content"}
        checked.append({**others, "content": text_of(message.get("content"), what)})
    return checked


def text_of(content: object, what: str) -> str:
    """Return a message's content as text: parts are joined, a number is written.

    >>> text_of([{"type": "text", "text": "4"}, "2"], "it"), text_of(None, "it"), text_of(7, "it")
    ('42', '', '7')
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (int, float)):
        return str(content)
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, (list, tuple)):
        raise TypeError(
            f"{what} has content of type {type(content).__name__}; it must be text, or a list of text parts"
        )
    texts: list[str] = []
    for part in cast("Sequence[Any]", content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TypeError(f"{what} has a part of type {kind!r:.40}; the policy reads only text")
        texts.append(text)
    return "".join(texts)


def checked_rewards(rewards: object) -> dict[str, float]:
    """Return named rewards as floats.

    >>> checked_rewards({"reached": True})
    {'reached': 1.0}
    """
    if not isinstance(rewards, Mapping):
        raise TypeError(f"rewards are of type {type(rewards).__name__}; they must be a mapping of names to numbers")
    numbers = {str(name): float(value) for name, value in cast("Mapping[str, Any]", rewards).items()}
    for name, value in numbers.items():
        if not abs(value) <= LARGEST:
            raise ValueError(f"the reward {name!r} is {value}; it must be finite and fit in a float32")
    return numbers


def named_rewards(reward: object) -> dict[str, float]:
    """Return a reward by name: a mapping of names, a number as `reward`, or None, which does not apply.

    >>> named_rewards(1), named_rewards({"right": 0.5}), named_rewards(None)
    ({'reward': 1.0}, {'right': 0.5}, {})
    """
    if reward is None:
        return {}
    return checked_rewards(cast("Any", reward) if isinstance(reward, Mapping) else {"reward": reward})


def plain_json(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it: NumPy's and torch's as numbers and lists, what JSON has no form for as text.

    >>> plain_json({1: (2, float("inf")), "a": {3}})
    {'1': [2, 'inf'], 'a': [3]}
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return clean_text(value)
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {clean_text(str(name)): plain_json(part, depth + 1) for name, part in items}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain_json(part, depth + 1) for part in cast("Sequence[Any]", value)]
        if hasattr(value, "tolist"):
            return plain_json(value.tolist(), depth + 1)
    return clean_text(repr(value))


def clean_text(text: str) -> str:
    r"""Return text that UTF-8 can encode: half a surrogate pair, which JSON can contain, becomes a question mark.

    >>> clean_text("a\ud800")
    'a?'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
