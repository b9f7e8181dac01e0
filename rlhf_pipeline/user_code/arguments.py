"""The forms that a reward function may have, decided once, by its signature and the columns of the data.

A function takes by name whichever it asks for of

- `prompt`, `completion` (texts), `messages` (the conversation, the completion last), `answer`, `meta`, `token_ids` (the
  sampled ones), `finish_reason`; with an environment `completion` is the last turn, and there are
  `rewards` (the environment's, summed over the turns by name), `turns` (their number), `call_errors` (calls that could
  not be made) and `environment` (the object),
- `prompt_text`: all that the model read before the completion, as its chat template rendered it,
- verl's names for these: `solution_str`, `ground_truth`, `extra_info`, `data_source`,
- any column of the prompt's data: the keys of `meta`.

A function that asks for a plural (`prompts`, `completions`, `completion_ids`, verl's `solution_strs`, OpenRLHF's
`queries` and `labels`, ...) is batched: every argument is a list, with one item for each member of a group, and so is
its result. For prompts that are messages, `prompts` and `completions` are lists of messages, as in TRL; beside
`queries` or `labels` they are text, as in OpenRLHF. `**kwargs` receives the rest, as in TRL.

`answer` is the prompt's answer, or the column of that name where the prompt has none; for a batched function the column
comes first, as in TRL every argument is one. A function none of whose arguments has a name that is known is called by
position, with `(prompt, completion, answer, meta)`; one unknown name beside known ones is rejected.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import Reward, RewardFunction, has_columns, rewards_of
from rlhf_pipeline.errors import DefinitionError, did_you_mean


def own_copy(value: Any) -> Any:
    """Return a value whose dicts, lists and tuples are new at every level; the rest of it is shared.

    A user's function may change what it receives, and no other function sees the change. Copying the values of JSON is
    enough: rows have no others.

    >>> row = {"board": [[0], 1]}
    >>> own_copy(row)["board"][0].append(2)
    >>> row
    {'board': [[0], 1]}
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {name: own_copy(part) if isinstance(part, _CONTAINERS) else part for name, part in items}
    if isinstance(value, (list, tuple)):
        parts = cast("Sequence[Any]", value)
        copied = [own_copy(part) if isinstance(part, _CONTAINERS) else part for part in parts]
        return copied if isinstance(value, list) else tuple(copied)
    return value


_CONTAINERS: Final = (dict, list, tuple, Mapping)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One row in the form that reward functions receive, the same in training, evaluation, `inspect` and imports."""

    prompt: Prompt
    completion: str
    ids: Sequence[int] = ()
    """The tokens of the row, int [T]: prompt, turns and replies."""
    mask: Sequence[bool] = ()
    """Which of them the policy sampled, bool [T]."""
    finish_reason: str = "stop"
    conversation: Sequence[Mapping[str, Any]] | None = None
    """With an environment, all messages; otherwise None."""
    prompt_text: str | None = None
    """The model's input before the completion; None if no reward function uses it."""
    num_asked: int = 1
    """The number of messages in the conversation before the first turn."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """The environment's rewards."""
    turns: int = 1
    call_errors: int = 0
    """The number of tool calls by the policy that could not be executed."""
    environment: Any = None
    """The environment of the conversation, for functions that inspect it, as in TRL; None if it no longer exists."""

    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens of all turns, end tokens included."""
        return [*itertools.compress(self.ids, self.mask)]

    @property
    def prompt_messages(self) -> list[Mapping[str, Any]]:
        """The prompt as messages."""
        if self.conversation is not None:
            return [*self.conversation[: self.num_asked]]
        messages = self.prompt.messages
        return [{"role": "user", "content": self.prompt.text}] if messages is None else [*messages]

    @property
    def completed_messages(self) -> list[Mapping[str, Any]]:
        """The completion as messages."""
        if self.conversation is not None:
            return [*self.conversation[self.num_asked :]]
        return [{"role": "assistant", "content": self.completion}]


def _chat(row: Sampled) -> bool:
    return row.prompt.messages is not None or row.conversation is not None


def _environment(row: Sampled) -> Any:
    if row.environment is None:
        raise LookupError(
            "the environment of a stored conversation no longer exists: only a run can call this function"
        )
    return row.environment


def _prompt_text(row: Sampled) -> str:
    if row.prompt_text is None:
        raise ValueError(
            "the model's input for this completion was not stored, because no reward function used it when the "
            "completion was sampled"
        )
    return row.prompt_text


Getter = Callable[[Sampled], Any]

_STANDARD: Final[dict[str, Getter]] = {
    "prompt": lambda row: row.prompt.text,
    "completion": lambda row: row.completion,
    "messages": lambda row: row.prompt_messages + row.completed_messages,
    "answer": lambda row: row.prompt.meta.get("answer") if row.prompt.answer is None else row.prompt.answer,
    "meta": lambda row: row.prompt.meta,
    "token_ids": lambda row: row.token_ids,
    "finish_reason": lambda row: row.finish_reason,
}
"""Argument names of a function of one completion that take precedence over a column with the same name."""
_MORE: Final[dict[str, Getter]] = {
    "prompt_text": _prompt_text,
    "rewards": lambda row: row.rewards,
    "turns": lambda row: row.turns,
    "call_errors": lambda row: row.call_errors,
    "environment": _environment,
    "solution_str": lambda row: row.completion,
    "ground_truth": _STANDARD["answer"],
    "extra_info": lambda row: row.prompt.meta.get("extra_info", row.prompt.meta),
    "data_source": lambda row: row.prompt.meta.get("data_source", ""),
}
"""Further names, over which a column takes precedence."""
_TRL: Final[dict[str, Getter]] = {
    "prompts": lambda row: row.prompt_messages if _chat(row) else row.prompt.text,
    "completions": lambda row: row.completed_messages if _chat(row) else row.completion,
    "completion_ids": lambda row: row.token_ids,
    "environments": _environment,
}
"""Argument names of a batched function that take precedence over a column with the same name."""
_OPENRLHF: Final[dict[str, Getter]] = {
    "queries": lambda row: _prompt_text(row) + row.completion,
    "labels": _STANDARD["answer"],
}
_BATCHED: Final[dict[str, Getter]] = {
    "solution_strs": _MORE["solution_str"],
    "ground_truths": _MORE["ground_truth"],
    "extra_infos": _MORE["extra_info"],
    "data_sources": _MORE["data_source"],
    **_OPENRLHF,
}
"""Further names that mark a function as batched; a column with the same name takes precedence."""
_AS_TEXT: Final[dict[str, Getter]] = {"prompts": _prompt_text, "completions": _STANDARD["completion"]}
"""Arguments with TRL's names in OpenRLHF's form: the two parts of each of its `queries`, as text."""
_ALL: Final[dict[str, Getter]] = _STANDARD | _MORE | _TRL | _BATCHED
_PLAIN: Final = ("prompt", "completion", "answer", "meta")
_TRL_REST: Final = ("prompts", "completions", "completion_ids", "answer", "finish_reason")
"""The names that TRL's form receives in `**kwargs`, in addition to the columns of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a reward function, bound to its value."""

    name: str
    value: Getter
    optional: bool = False
    """Whether it is omitted if no prompt of the group has the column; the function's default then applies."""
    needed: bool = False
    """Whether the function declares it without a default."""

    def copied(self, row: Sampled) -> Any:
        """Return the value for one row, a separate copy; an environment stays the live object, as in TRL."""
        value = self.value(row)
        return value if value is row.environment else own_copy(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a reward function is called; created only by `form_of`.

    Attributes:
        reward: whose function it is.
        arguments: those that it names, or by position.
        rest: what `**kwargs` receives.
        by_position: it is called with `(prompt, completion, answer, meta)`.
        batched: it is called once for a group, with lists.
        is_async: it is a coroutine function.
        other_columns: `**kwargs` receives columns that were not known when the form was decided; never in a run.
    """

    reward: Reward
    arguments: tuple[Argument, ...]
    rest: tuple[Argument, ...] = ()
    by_position: bool = False
    batched: bool = False
    is_async: bool = False
    other_columns: bool = False

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of its arguments; None if it is called by position."""
        return None if self.by_position else tuple(argument.name for argument in self.arguments)

    def takes(self, *names: str) -> bool:
        """Return whether the function receives one of these arguments."""
        return any(argument.name in names for argument in (*self.arguments, *self.rest))

    def call(self, group: Sequence[Sampled]) -> Any:
        """Call the function on one completion, or on several if it is batched."""
        function: Any = self.reward.function
        if self.by_position:
            return function(*(argument.copied(group[0]) for argument in self.arguments))
        passed = [
            argument
            for argument in (*self.arguments, *self.rest)
            if not argument.optional or any(argument.name in row.prompt.meta for row in group)
        ]
        values = {argument.name: [argument.copied(row) for row in group] for argument in passed}
        if self.other_columns:
            for name in sorted({name for row in group for name in row.prompt.meta} - _bound(function) - values.keys()):
                values[name] = [own_copy(row.prompt.meta.get(name)) for row in group]
        return function(**(values if self.batched else {name: several[0] for name, several in values.items()}))


def form_of(reward: Reward, columns: Sequence[str] | None = None) -> Form:
    """Decide how a reward function is called.

    Args:
        reward: whose function it is.
        columns: the columns of the data, see `columns_of`; None if they are not known, and then an unknown name
            counts as one.

    Raises:
        DefinitionError: it asks for something that there is not.
    """
    function: Any = reward.function
    bound, innermost = _bound(function), function
    while isinstance(innermost, functools.partial):
        innermost = cast("functools.partial[Any]", innermost).func
    is_async = any(map(inspect.iscoroutinefunction, (innermost, getattr(type(innermost), "__call__", None))))  # noqa: B004
    plain = Form(
        reward=reward,
        arguments=tuple(Argument(name=name, value=_STANDARD[name]) for name in _PLAIN),
        by_position=True,
        is_async=is_async,
    )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return plain  # a builtin or an extension type
    parameters = signature.parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in bound]
    names, supplied = [p.name for p in by_name], _ALL.keys() | {*(columns or ())}
    unknown = [p.name for p in by_name if p.default is p.empty and p.name not in supplied]
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_place = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    if not names and not rest and not by_place:
        raise DefinitionError(_refusal(reward, str(signature), [], columns or (), "it takes no arguments"))
    nothing_known = supplied.isdisjoint(names) and (bool(unknown) or (columns is not None and not rest))
    if by_place or nothing_known:
        try:
            signature.bind("", "", None, {})
        except TypeError as error:
            raise DefinitionError(_refusal(reward, str(signature), unknown or names, columns or (), error)) from error
        return plain
    if unknown and columns is not None:
        raise DefinitionError(_refusal(reward, str(signature), unknown, columns, ""))
    batched = any(name in _TRL or (name in _BATCHED and name not in (columns or ())) for name in names)
    first = (_TRL if batched else _STANDARD) | (_AS_TEXT if not _OPENRLHF.keys().isdisjoint(names) else {})
    arguments = [
        Argument(
            name=p.name,
            value=_getter(p.name, first),
            optional=p.default is not p.empty and p.name not in _ALL,
            needed=p.default is p.empty,
        )
        for p in by_name
    ]
    more = dict.fromkeys([*(_TRL_REST if batched else _STANDARD), *sorted(columns or ())]) if rest else {}
    others = [name for name in more if name not in bound and name not in names]
    return Form(
        reward=reward,
        arguments=tuple(arguments),
        rest=tuple(Argument(name=name, value=_getter(name, first)) for name in others),
        batched=batched,
        is_async=is_async,
        other_columns=rest and columns is None,
    )


def _getter(name: str, first: Mapping[str, Getter]) -> Getter:
    """Return what gives an argument: a name of `first`; otherwise a column of the data, or a further name of ours."""
    if name in first:
        return first[name]
    fallback = _ALL.get(name, lambda row: None)
    return lambda row: row.prompt.meta[name] if name in row.prompt.meta else fallback(row)


def _bound(function: Any) -> frozenset[str]:
    """Return the arguments that `functools.partial` has given already."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound_function = cast("functools.partial[Any]", function)
        bound |= bound_function.keywords.keys()
        function = bound_function.func
    return frozenset(bound)


def _refusal(reward: Reward, signature: str, unknown: Sequence[str], columns: Sequence[str], error: object) -> str:
    name = getattr(reward.function, "__qualname__", reward.label)
    why = f"there is no '{unknown[0]}'.{did_you_mean(unknown[0], [*_ALL, *columns])}" if unknown else f"{error}."
    return (
        f"the reward function {name}{signature} cannot be called: {why} It must accept (prompt, completion, "
        "answer, meta), or arguments by name; docs/rewards.md lists the names."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundRewards:
    """The reward functions of a definition, bound to the columns of its data; created by `bind`.

    Attributes:
        forms: how each is called.
        columns: those that they were bound to; None if they are not known.
        has_columns: they have separate columns in the store; one plain function has `task_reward` alone.
    """

    forms: tuple[Form, ...]
    columns: tuple[str, ...] | None
    has_columns: bool

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The reward functions, each with its weight and its name."""
        return tuple(form.reward for form in self.forms)

    def takes(self, *names: str) -> bool:
        """Return whether one of the functions receives one of these arguments."""
        return any(form.takes(*names) for form in self.forms)

    @property
    def takes_prompt_text(self) -> bool:
        """Whether one of them needs the prompt as the model received it, which is then kept with each completion."""
        return self.takes("prompt_text", *_OPENRLHF)

    def missing_from(self, columns: Sequence[str]) -> tuple[Reward, str] | None:
        """Return a function and the column that it needs and that this data lacks, such as held-out prompts."""
        for form in self.forms:
            for argument in form.arguments:
                if argument.needed and argument.name not in columns and argument.name not in _ALL:
                    return form.reward, argument.name
        return None


def bind(
    reward: RewardFunction | Reward | Sequence[RewardFunction | Reward], columns: Sequence[str] | None = None
) -> BoundRewards:
    """Bind the reward functions of a definition to the columns of its data.

    Raises:
        DefinitionError: two have one name, or one asks for something that there is not.

    >>> bound = bind([lambda completion, gold: float(completion == gold), lambda p, c, a, m: 1.0], ["gold"])
    >>> [form.names for form in bound.forms]
    [('completion', 'gold'), None]
    """
    return BoundRewards(
        forms=tuple(form_of(each, columns) for each in rewards_of(reward)),
        columns=None if columns is None else tuple(columns),
        has_columns=has_columns(reward),
    )
