"""Reward functions, several of them with weights, and those that are built in.

They take text, return a number and import nothing heavy, so `inspect` can grade a stored trajectory again without
loading a model. `rlhf_pipeline.user_code.arguments` documents which arguments and results a function may have.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, cast

from rlhf_pipeline.data.keys import reward_column
from rlhf_pipeline.data.prompts import JsonValue
from rlhf_pipeline.errors import DefinitionError, plain

RewardFunction = Callable[..., Any]
"""A function that grades completions: plain, batched or `async`; see `rlhf_pipeline.user_code.arguments`."""

_COLUMN = re.compile(r"[A-Za-z](?:[A-Za-z0-9]|_(?!_))*\Z")

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def no_reward(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
    """Raise an error: for definitions that learn from stores, which hold the rewards.

    Raises:
        DefinitionError: always.
    """
    raise DefinitionError("the definition has no reward function, because it learns from the rewards in stores.")


def environment_reward(rewards: Mapping[str, float]) -> float | tuple[float, Mapping[str, float]]:
    """Return the sum of an environment's rewards, with their names; 0 if it gave none, as none was earned.

    >>> environment_reward({"reached": 1.0, "nearer": 0.5}), environment_reward({})
    ((1.5, {'reached': 1.0, 'nearer': 0.5}), 0.0)
    """
    return (sum(rewards.values()), rewards) if rewards else 0.0


def answer_texts(answer: JsonValue) -> list[str]:
    """Return reference answers as texts, as rewards of the text compare them: of a list each, one of which is enough.

    >>> answer_texts(18), answer_texts(["Paris", None, 3]), answer_texts(None)
    (['18'], ['Paris', '3'], [''])
    """
    answers = [
        str(reference) for reference in (answer if isinstance(answer, list) else [answer]) if reference is not None
    ]
    return answers or [""]


def token_match(prompt: str, completion: str, answer: JsonValue, meta: Mapping[str, object]) -> float:
    """Return the share of the answer's characters that the completion has at the same positions, in [0, 1].

    With several answers, the largest share is returned. Characters beyond the answer's length are errors, so additional
    length is not rewarded.

    >>> token_match("12=", "13", "12", {})
    0.5
    >>> token_match("12=", "1299", "12", {})
    0.5
    """
    return max(_in_place(expected, completion) for expected in answer_texts(answer))


def _in_place(expected: str, completion: str) -> float:
    longest = max(len(expected), len(completion))
    return sum(a == b for a, b in zip(expected, completion, strict=False)) / longest if longest else 1.0


def final_number(text: str) -> str | None:
    r"""Return the final number of a solution: the number after the last `####`, or the last number in the text.

    Thousands separators and a trailing `.0` are dropped, so `1,000.00` equals `1000`.

    >>> final_number("so 3 * 4 = <<3*4=12>>12\n#### 12")
    '12'
    >>> final_number("It costs $1,250.50.")
    '1250.5'
    >>> final_number("no idea") is None
    True
    """
    _, marker, tail = text.rpartition("####")
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    number = (numbers[0] if marker else numbers[-1]).replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def final_number_match(prompt: str, completion: str, answer: JsonValue, meta: Mapping[str, object]) -> float:
    """Return 1.0 if the completion's final number equals the answer's, or one of several answers', else 0.0.

    >>> final_number_match("", "A: 18", "16 - 3 - 4 = 9 ... #### 18", {})
    1.0
    """
    number = final_number(completion)
    return float(number is not None and number in map(final_number, answer_texts(answer)))


def exact_match(completion: str, answer: JsonValue) -> float:
    r"""Return 1.0 if the completion equals the answer, or one of several, ignoring surrounding whitespace, else 0.0.

    >>> exact_match(" Paris\n", "Paris"), exact_match("Paris.", "Paris"), exact_match("Paris", ["Lutetia", "Paris"])
    (1.0, 0.0, 1.0)
    """
    return float(completion.strip() in [reference.strip() for reference in answer_texts(answer)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    r"""A reward: 1.0 if a regular expression matches anywhere in the completion, otherwise 0.0.

    Args:
        pattern: a pattern of `re.search`, with `.` matching line ends as well; anchor it with `\A` and `\Z`.

    Raises:
        DefinitionError: the pattern is not a regular expression.

    >>> Matches(pattern=r"\A<think>.*</think>")("<think>4 x 3</think>12")
    1.0
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise DefinitionError(f"Matches.pattern {self.pattern!r} is not a regular expression: {error}.") from error

    def __call__(self, completion: str) -> float:
        """Return 1.0 or 0.0."""
        return float(re.search(self.pattern, completion, re.DOTALL) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftOverlong:
    """A reward: DAPO's soft penalty for completions near the token limit.

    With `l` tokens it is 0 up to `max_tokens - cache`, then falls as `(max_tokens - cache - l) / cache`, and is -1
    above `max_tokens`. Source: arXiv:2503.14476, equation 13.

    Args:
        max_tokens: the length `L_max`; usually `collect.max_new_tokens`, or less.
        cache: the number of tokens `L_cache` before the limit over which the penalty grows.

    Raises:
        DefinitionError: `cache` is not between 1 and `max_tokens`.

    >>> soft = SoftOverlong(max_tokens=10, cache=4)
    >>> [soft(range(length)) for length in (6, 7, 9, 10, 11)]
    [0.0, -0.25, -0.75, -1.0, -1.0]
    """

    max_tokens: int
    cache: int

    def __post_init__(self) -> None:
        if not 1 <= self.cache <= self.max_tokens:
            raise DefinitionError(
                f"SoftOverlong.cache is {self.cache}; it must be between 1 and max_tokens ({self.max_tokens})."
            )

    def __call__(self, token_ids: Sequence[int]) -> float:
        """Return the punishment, in [-1, 0]."""
        over = len(token_ids) - (self.max_tokens - self.cache)
        return -min(max(over / self.cache, 0.0), 1.0) or 0.0


class LeftOut(Exception):
    """Raise it in a reward function to exclude the trajectory from the baseline and the loss.

    Args:
        reason: the kind, stored in the column `failure_reason`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"left out: {reason}")
        self.reason = reason


def mask_truncated(finish_reason: str) -> None:
    """Exclude a completion that was cut off at `collect.max_new_tokens`; otherwise it has no reward.

    The trajectory is stored with `failure_reason="truncated"` and without a reward, and is excluded from its group's
    baseline and from the loss, as in DAPO's overlong filtering (arXiv:2503.14476, section 3.4).

    >>> mask_truncated("stop")
    """
    if finish_reason == "length":
        raise LeftOut("truncated")


def math_verify_match(completion: str, answer: JsonValue) -> float | None:
    """Return 1.0 if math-verify finds the completion equal to the answer, or one of several, else 0.0.

    The reward is None if no answer is mathematical. Needs the extra `math`: `pip install "rlhf-pipeline[math]"`. The
    time limits of math-verify, which need signals, are off: `collect.reward_timeout_s` replaces them.

    Raises:
        DefinitionError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise DefinitionError('math_verify_match needs math-verify: pip install "rlhf-pipeline[math]"') from error
    golds = [gold for reference in answer_texts(answer) if (gold := parse(reference, parsing_timeout=None))]
    if not golds:
        return None
    parsed = parse(completion, parsing_timeout=None)
    return float(any(verify(gold, parsed, timeout_seconds=None) for gold in golds))


def describe_error(error: BaseException) -> str:
    """Return one line about an exception that can be stored and printed, even if its message cannot be read."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its own __str__ is user code as well
        text = "(its message cannot be read)"
    line = plain(" ".join(text.split()).encode("utf-8", "replace").decode())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {line}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


LARGEST: Final = 3.4028234663852886e38
"""The largest float32, the type that rewards are stored in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReward:
    """One of the rewards that an environment gives; `Reward("reached")` makes it."""

    name: str

    def __post_init__(self) -> None:
        if not _COLUMN.match(self.name) or self.name == "trusted":
            raise DefinitionError(
                f"Reward({self.name!r}): a name must consist of letters, digits and single underscores, "
                "and must not be 'trusted'."
            )

    def __call__(self, rewards: Mapping[str, float]) -> float:
        """Return it; 0 if the environment did not give it."""
        return rewards.get(self.name, 0.0)


@dataclass(frozen=True, slots=True)
class Reward:
    """One of several reward functions of a definition.

    The reward of a trajectory is the sum of `weight` times the result over the functions that apply to it: the
    functions that do not return None. Each result is stored in the column `reward_NAME` and has a curve in
    `metrics.jsonl`.

    Args:
        function: the function; or, with an environment, the name of one of its rewards.
        weight: its weight; 0 only records it.
        name: the name of its column; None uses the function's name.
        version: the version of external inputs of the function, such as a file, a prompt for a judge or a server. A run
            that continues with another version reports a changed reward function.

    Raises:
        DefinitionError: the function is not callable, the weight is not finite, the name is not a valid column name, or
            the version is not text.

    >>> Reward(exact_match, weight=0.5).column
    'reward_exact_match'
    """

    function: RewardFunction | str
    _: KW_ONLY
    weight: float = 1.0
    name: str | None = None
    version: str | None = field(default=None, metadata={"recorded": False})

    def __post_init__(self) -> None:
        if self.version is not None and not isinstance(cast(object, self.version), str):
            raise DefinitionError(f'Reward.version is {self.version!r}; it must be text, for example version="3".')
        if isinstance(self.function, str):
            object.__setattr__(self, "function", EnvironmentReward(name=self.function))
        if not callable(self.function):
            raise DefinitionError(f"Reward: {self.function!r} is not a function.")
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not abs(self.weight) < LARGEST:
            raise DefinitionError(f"Reward.weight is {self.weight!r}; it must be a finite number.")
        if self.name is not None and (not _COLUMN.match(self.name) or self.name == "trusted"):
            raise DefinitionError(
                f"Reward.name is {self.name!r}; it must consist of letters, digits and single underscores, and must "
                "not be 'trusted'."
            )

    @property
    def label(self) -> str:
        """The given name, or the function's name as a valid column name."""
        if self.name is not None:
            return self.name
        function: Any = self.function
        if isinstance(function, EnvironmentReward):
            return function.name
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        function_label = as_column(getattr(function, "__name__", type(function).__name__))
        return function_label if function_label is not None and function_label != "lambda" else "function"

    @property
    def column(self) -> str:
        """The name of its column in the store."""
        return reward_column(self.label)


def rewards_of(reward: RewardFunction | Reward | Sequence[RewardFunction | Reward]) -> tuple[Reward, ...]:
    """Return the rewards of a definition, each with its own name.

    >>> [one.label for one in rewards_of([exact_match, Reward(exact_match, name="other"), exact_match])]
    ['exact_match', 'other', 'exact_match_2']
    """
    specified: Any = reward
    many: Sequence[Any] = specified if isinstance(specified, (list, tuple)) else (specified,)
    rewards = [function if isinstance(function, Reward) else Reward(function) for function in many]
    labels = [r.name for r in rewards if r.name is not None]
    if len(set(labels)) < len(labels):
        raise DefinitionError(
            f"two rewards have the same name: {', '.join(labels)}. Give each a different name: Reward(..., name=NAME)."
        )
    labelled: list[Reward] = []
    for unlabelled in rewards:
        label, number = unlabelled.label, 1
        while unlabelled.name is None and label in labels:
            number += 1
            label = f"{unlabelled.label}_{number}"
        labels.append(label)
        labelled.append(replace(unlabelled, name=label))
    return tuple(labelled)


def weighted_sum(rewards: Sequence[Reward], values: Sequence[float | None]) -> float | None:
    """Return the sum of weight times value over the rewards that apply, of a trajectory or of a turn; None if none do.

    >>> weighted_sum(rewards_of([Reward("reached", weight=0.5), Reward("nearer", weight=2.0)]), [1.0, None])
    0.5
    """
    terms = [reward.weight * value for reward, value in zip(rewards, values, strict=True) if value is not None]
    return sum(terms) if terms else None


def of_turn(rewards: Sequence[Reward], gains: Mapping[str, float]) -> float:
    """Return what an environment's rewards of one turn add to the reward of the conversation, weighted and selected.

    A custom function, also one that reads the environment's rewards, counts as a whole at the last turn: it is
    called once, when the conversation is over.

    >>> of_turn(rewards_of([Reward("reached", weight=0.5), Reward("nearer", weight=2.0)]), {"reached": 1.0, "far": 9.0})
    0.5
    """
    every = sum(gains.values())
    values = [
        every
        if reward.function is environment_reward
        else gains.get(reward.function.name, 0.0)
        if isinstance(reward.function, EnvironmentReward)
        else None
        for reward in rewards
    ]
    return weighted_sum(rewards, values) or 0.0


def reward_weights(
    reward: RewardFunction | Reward | Sequence[RewardFunction | Reward], of_environment: Sequence[str] = ()
) -> dict[str, float]:
    """Return the names of the rewards that have a column each, with their weights; empty for one plain function.

    Args:
        reward: of a definition.
        of_environment: the names of its environment's rewards. Where their sum is learned from, each is a reward.

    >>> reward_weights([environment_reward, Reward(exact_match, weight=0.5)], ("reached", "nearer"))
    {'reached': 1.0, 'nearer': 1.0, 'exact_match': 0.5}
    """
    weights: dict[str, float] = {}
    for part in rewards_of(reward):
        names = [*filter(None, map(as_column, of_environment))] if part.function is environment_reward else []
        for name in names or ([part.label] if has_columns(reward) else []):
            weights[name] = weights.get(name, 0.0) + part.weight
    return weights


def part_name(rewards: Sequence[Reward], reward: Reward, part: str) -> str | None:
    """Return the name under which a component of a reward's result is stored, like a reward of weight 0.

    Its own, if the definition has one reward, or it is an environment's; else with the reward's name before it. None
    for one that is the reward itself, or a reward of the definition already, or that cannot name a column.

    >>> alone, both = rewards_of(exact_match), rewards_of([exact_match, token_match])
    >>> part_name(alone, alone[0], "format"), part_name(both, both[1], "format"), part_name(alone, alone[0], "score")
    ('format', 'token_match_format', None)
    """
    column = as_column(part)
    if part in TOTALS or column is None:
        return None
    name = column if len(rewards) == 1 or reward.function is environment_reward else f"{reward.label}_{column}"
    return None if name in [sibling.label for sibling in rewards] else name


def may_have_parts(function: object) -> bool:
    """Return whether a function's results may have components: those of this package are plain numbers."""
    definition: Any = function if hasattr(function, "__module__") else type(function)
    return function is environment_reward or not str(definition.__module__).startswith("rlhf_pipeline.")


TOTALS: Final = ("score", "reward", "rewards")
"""The first of these that is a component of a dict is the reward."""


def as_column(text: str) -> str | None:
    """Return a name as a column may have it, or None."""
    name = re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9_]", "_", text)).strip("_")
    return name if _COLUMN.match(name) and name != "trusted" else None


def has_columns(reward: RewardFunction | Reward | Sequence[RewardFunction | Reward]) -> bool:
    """Return whether the rewards have separate columns; one plain function has `task_reward` alone."""
    return isinstance(reward, (Reward, list, tuple))
