"""Reward functions: `(prompt, completion, answer, meta) -> float`.

They see text, return one number, and import nothing heavy, so a stored trajectory can be graded again by `inspect`
without loading a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rlhf_pipeline.errors import DefinitionError

RewardFunction = Callable[[str, str, str | None, Mapping[str, object]], float]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def no_reward(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Refuse: for definitions that learn from stores, where the rewards are stored.

    Raises:
        DefinitionError: always.
    """
    raise DefinitionError("the definition has no reward function; it learns from stores, whose rewards are stored.")


def token_match(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Return the share of the answer's characters that stand at the right place, in [0, 1].

    Characters past the answer's length count as wrong, so running on is not rewarded.

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
    r"""Return the final number of a solution: the one after the last `####`, else the last in the text.

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


def final_number_match(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Return 1.0 if the completion's final number equals the answer's, else 0.0.

    >>> final_number_match("", "A: 18", "16 - 3 - 4 = 9 ... #### 18", {})
    1.0
    """
    given = final_number(completion)
    return float(given is not None and given == final_number(answer or ""))
