"""The forms that a reward function may have, decided by its signature before anything is sampled.

A function takes by name whichever it asks for of

- `prompt`, `completion` (texts), `messages` (the conversation, the completion last), `answer`, `meta`, `token_ids` (the
  sampled ones), `finish_reason` (`stop` or `length`); with an environment `completion` is the last turn, and there are
  `rewards` (the environment's, summed over the turns by name), `turns` (their number) and `environment` (the object),
- verl's names for these: `solution_str`, `ground_truth`, `extra_info`, `data_source`,
- any column of the prompt's data: the keys of `meta`.

A function that asks for a plural (`prompts`, `completions`, `completion_ids`, verl's `solution_strs`, ...) is batched:
every argument is a list, with one item for each member of a group, and so is its result. For prompts that are messages,
`prompts` and `completions` are lists of messages, as in TRL. `**kwargs` receives the rest, as in TRL. Four positional
arguments of other names are `(prompt, completion, answer, meta)`.

A result is a number (of Python, NumPy or torch), None if the function does not apply, a dict of components, or a number
with such a dict. The reward of a dict is its `score` (as in verl) or `reward`, or the sum of its values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import LARGEST, Reward
from rlhf_pipeline.errors import DefinitionError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One completion, as reward functions see it."""

    prompt: Prompt
    completion: str
    token_ids: Sequence[int] = ()
    """The sampled tokens, the end token included."""
    finish_reason: str = "stop"
    conversation: Sequence[Mapping[str, Any]] | None = None
    """With an environment, all messages; else None."""
    num_asked: int = 1
    """The messages of the conversation before the first turn."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """The environment's rewards."""
    turns: int = 1
    environment: Any = None
    """The object that answered the conversation, for functions that look into it, as TRL's do; None if it is gone."""

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The prompt as messages."""
        if self.conversation is not None:
            return [dict(one) for one in self.conversation[: self.num_asked]]
        given = self.prompt.messages
        return [{"role": "user", "content": self.prompt.text}] if given is None else [dict(one) for one in given]

    @property
    def completed_messages(self) -> list[dict[str, Any]]:
        """The completion as messages."""
        if self.conversation is not None:
            return [dict(one) for one in self.conversation[self.num_asked :]]
        return [{"role": "assistant", "content": self.completion}]


def _chat(one: Sampled) -> bool:
    return one.prompt.messages is not None or one.conversation is not None


_ONE: Final[dict[str, Callable[[Sampled], Any]]] = {
    "prompt": lambda one: one.prompt.text,
    "completion": lambda one: one.completion,
    "messages": lambda one: one.asked + one.completed_messages,
    "answer": lambda one: one.prompt.answer,
    "meta": lambda one: one.prompt.meta,
    "token_ids": lambda one: list(one.token_ids),
    "finish_reason": lambda one: one.finish_reason,
}
_ENVIRONMENT: Final[dict[str, Callable[[Sampled], Any]]] = {
    "rewards": lambda one: dict(one.rewards),
    "turns": lambda one: one.turns,
    "environment": lambda one: one.environment,
}
_VERL: Final[dict[str, Callable[[Sampled], Any]]] = {
    "solution_str": lambda one: one.completion,
    "ground_truth": lambda one: one.prompt.answer,
    "extra_info": lambda one: one.prompt.meta.get("extra_info", one.prompt.meta),
    "data_source": lambda one: one.prompt.meta.get("data_source", ""),
}
_MANY: Final[dict[str, Callable[[Sampled], Any]]] = {
    "prompts": lambda one: one.asked if _chat(one) else one.prompt.text,
    "completions": lambda one: one.completed_messages if _chat(one) else one.completion,
    "completion_ids": lambda one: list(one.token_ids),
    "environments": lambda one: one.environment,
    "solution_strs": _VERL["solution_str"],
    "ground_truths": _VERL["ground_truth"],
    "extra_infos": _VERL["extra_info"],
    "data_sources": _VERL["data_source"],
}
_PLAIN: Final = ("prompt", "completion", "answer", "meta")
_KNOWN: Final = _ONE | _ENVIRONMENT | _VERL | _MANY
_TRL_REST: Final = ("prompts", "completions", "completion_ids", "answer", "finish_reason")
"""What TRL's form receives in `**kwargs`, beside the columns of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a reward function is called."""

    reward: Reward
    names: tuple[str, ...] | None
    rest: bool = False
    batched: bool = False
    is_async: bool = False
    bound: frozenset[str] = frozenset()

    def takes(self, *names: str) -> bool:
        """Return whether the function receives one of these arguments."""
        return self.names is not None and (self.rest or any(name in self.names for name in names))

    def call(self, group: Sequence[Sampled]) -> Any:
        """Call the function on one completion, or on several if it is batched."""
        function: Any = self.reward.function
        first = group[0]
        if self.names is None:
            return function(first.prompt.text, first.completion, first.prompt.answer, first.prompt.meta)
        wanted = [name for name in self.names if name in _KNOWN or any(name in one.prompt.meta for one in group)]
        if self.rest:
            columns = sorted({name for one in group for name in one.prompt.meta} - self.bound)
            wanted = [*dict.fromkeys([*wanted, *(_TRL_REST if self.batched else _ONE), *columns])]
        values = {name: [_value(name, one) for one in group] for name in wanted}
        return function(**(values if self.batched else {name: several[0] for name, several in values.items()}))


def _value(name: str, one: Sampled) -> Any:
    """Return an argument: of the names above; a column of the data otherwise, or first where a name is not our own."""
    if name in one.prompt.meta and name not in _ONE and name not in _MANY:
        return one.prompt.meta[name]
    return _KNOWN[name](one) if name in _KNOWN else None


def form_of(reward: Reward, columns: Sequence[str] | None = None) -> Form:
    """Decide how a reward function is called."""
    function: Any = reward.function
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        given = cast("functools.partial[Any]", function)
        bound |= given.keywords.keys()
        function = given.func
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(type(function), "__call__", None))))  # noqa: B004
    try:
        signature = inspect.signature(cast("Any", reward.function))
    except (TypeError, ValueError):
        return Form(reward=reward, names=None, is_async=is_async)  # a builtin or an extension type
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in bound]
    needed = [p.name for p in named if p.default is p.empty]
    by_place = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    unknown = [name for name in needed if name not in _KNOWN and name not in (columns or ())]
    if by_place or unknown:
        try:
            signature.bind("", "", None, {})
        except TypeError as error:
            if by_place or columns is not None:
                raise DefinitionError(_refusal(reward, str(signature), unknown, columns or (), error)) from error
        else:
            return Form(reward=reward, names=None, is_async=is_async)
    names = tuple(p.name for p in named)
    if names == _PLAIN and len(parameters) == len(_PLAIN) and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in named):
        return Form(reward=reward, names=None, is_async=is_async)  # the same by place, and quicker
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    batched = any(name in _MANY for name in names)
    if not names and not rest:
        raise DefinitionError(_refusal(reward, str(signature), [], columns or (), "it asks for nothing"))
    return Form(reward=reward, names=names, rest=rest, batched=batched, is_async=is_async, bound=frozenset(bound))


def _refusal(reward: Reward, signature: str, unknown: Sequence[str], columns: Sequence[str], error: object) -> str:
    name = getattr(reward.function, "__qualname__", reward.label)
    why = f"there is no '{unknown[0]}'.{did_you_mean(unknown[0], [*_KNOWN, *columns])}" if unknown else f"{error}."
    return (
        f"the reward function {name}{signature} cannot be called: {why} It takes (prompt, completion, answer, meta), "
        "or by name what it asks for; docs/rewards.md has the list."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one reward function for one completion."""

    value: float | None
    """None if the function does not apply."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The components that it gave beside."""


def result_of(given: Any) -> Result:
    """Read what a reward function returned for one completion.

    Raises:
        ValueError: it is no finite number that fits float32.
        TypeError: it is no number at all.

    >>> result_of({"accuracy": 1.0, "format": 0.5}).value, result_of({"score": 1, "format": 0.5}).value
    (1.5, 1.0)
    >>> result_of(None).value is None, result_of([0.5]).value
    (True, 0.5)
    """
    if given is None:
        return Result(value=None)
    if isinstance(given, Mapping):
        items = cast("Mapping[Any, Any]", given).items()
        parts = {str(name): _number(part) for name, part in items if part is not None and _numeric(part)}
        if not parts:
            raise ValueError(f"the dict {_short(given)} has no number")
        total = next((parts[name] for name in ("score", "reward") if name in parts), None)
        return Result(value=_number(sum(parts.values()) if total is None else total), parts=parts)
    if isinstance(given, (list, tuple)):
        several = cast("Sequence[Any]", given)
        if len(several) == 2 and isinstance(several[1], Mapping):
            first = result_of(several[0])
            return Result(value=first.value, parts={**first.parts, **result_of(several[1]).parts})
        if len(several) == 1:
            return result_of(several[0])
        raise TypeError(f"it returned {len(several)} values for one completion: {_short(given)}")
    return Result(value=_number(given))


def results_of(given: Any, count: int) -> list[Result]:
    """Read what a batched reward function returned for `count` completions."""
    several = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(several, Mapping):  # NeMo's and OpenRLHF's form: a list per component
        columns = cast("Mapping[str, Any]", several)
        lists = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in columns.items()}
        if any(not isinstance(values, (list, tuple)) or len(values) != count for values in lists.values()):
            raise TypeError(f"it returned {_short(given)} for {count} completions; it must be a list with one for each")
        several = [{name: values[i] for name, values in lists.items()} for i in range(count)]
    if not isinstance(several, (list, tuple)) or len(cast("list[Any]", several)) != count:
        raise TypeError(f"it returned {_short(given)} for {count} completions; it must be a list with one for each")
    return [result_of(one) for one in cast("list[Any]", several)]


def _numeric(part: Any) -> bool:
    return not isinstance(part, (str, bytes, Mapping, list, tuple))


def _number(given: Any) -> float:
    """Return a number of Python, NumPy or torch as a float."""
    single = given.item() if hasattr(given, "item") else given
    value = float(single)
    if not abs(value) <= LARGEST:
        raise ValueError(f"the reward is {value}; it must be a finite float32")
    return value


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."
