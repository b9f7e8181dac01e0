"""The protocol of environments: what begins a conversation, and what answers a turn of the policy.

An environment is a class with two methods; one object answers one conversation:

    class Guess:
        def reset(self, prompt, seed):
            self.number = seed % 100
            return "Guess a number."

        def step(self, turn):
            if turn.text.strip() == str(self.number):
                return Step(done=True, rewards={"right": 1.0})
            return Step("No. Again?")

What it does must follow from the prompt, the seed and the turns, so that a conversation cut by a kill is sampled again
token for token. One with effects outside itself says so with a class attribute, `has_effects = True`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Protocol, cast, runtime_checkable

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.rewards import LARGEST
from rlhf_pipeline.errors import DefinitionError

Message = Mapping[str, Any]

DEEPEST: Final = 64
"""Levels of nesting in what is stored as JSON; deeper values are text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the policy, as its environment sees it."""

    text: str
    """The sampled tokens as text."""
    number: int = 1
    """1 for the first turn of the conversation."""
    finish_reason: str = "stop"
    """`stop`, or `length` for a turn that the limit of tokens ended."""
    content: str = ""
    """The text without what a tool call or thinking takes of it; `text` where nothing was parsed."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The calls that transformers' parser found: a name and `arguments` each. Only with `tools`."""
    call_error: str | None = None
    """Why a call could not be read, in one line, or None."""
    token_ids: Sequence[int] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers.

    >>> Step("Again?", rewards={"close": 0.5}).done
    False
    """

    reply: str | Sequence[Message] = ""
    """Text, which becomes a message of the user where the policy has a chat template, or messages."""
    _: KW_ONLY
    done: bool = False
    """Whether the conversation is over; the reply is then not shown to the policy."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named rewards of this turn; those of one name add up over the conversation."""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that are stored with the trajectory as JSON; a later turn's replace those of the same name."""
    call_errors: int = 0
    """How many calls of the turn could not be made as the policy wrote them, and are told so in the reply; those that
    nobody could read are counted already."""


@runtime_checkable
class Environment(Protocol):
    """Answers one conversation; four further attributes are optional.

    - `end(reason) -> Mapping[str, float]`: called once when the conversation has ended, however it did, for rewards
      that are known only then; it may be `async`; `reason` is `stop`, `length`, `turns`, `calls` or `failed`;
    - `rewards = ("reached", ...)`: the names of its rewards; one that a conversation does not give is 0, and another
      one is an error;
    - `tools`: functions or JSON schemas, for the chat template and for reading calls;
    - `has_effects = True`: it changes something outside itself.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | Sequence[Message] | None:
        """Begin a conversation and return what the policy sees first; None shows it the prompt.

        Args:
            prompt: of the definition's source.
            seed: the same for the members of a group, who must see the same.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Answer a turn.

        A `def` answers in place: the conversation keeps its slot and its cache. An `async def` frees the slot while it
        waits.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a conversation has no reward to trust."""

    kind: str
    """`timeout` or `tool_error`."""
    error: str


def has_effects(environment: Callable[[], Any] | None) -> bool:
    """Return whether an environment changes something outside itself."""
    return bool(getattr(environment, "has_effects", False))


def tools_of(environment: Callable[[], Any] | None) -> list[Any]:
    """Return an environment's tools, functions or JSON schemas; empty without."""
    return [*(getattr(environment, "tools", ()) or ())]


def rewards_of_environment(environment: Callable[[], Any] | None) -> tuple[str, ...] | None:
    """Return the names of rewards that an environment declares; None if it declares none."""
    declared = getattr(environment, "rewards", None)
    if declared is None:
        return None
    names = (declared,) if isinstance(declared, str) else declared
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in names):
        raise DefinitionError(f"an environment's `rewards` are {declared!r:.60}; they must be names: ('reached', ...).")
    return tuple(cast("Sequence[str]", names))


def checked(step: object) -> Step:
    """Return an environment's answer if it is one."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}; it must return a Step")
    if not _is_bool(step.done):
        raise TypeError(f"done is {step.done!r:.60}; it must be True or False")
    reply = step.reply if isinstance(step.reply, str) else checked_messages(step.reply, "the reply")
    return Step(
        reply,
        done=bool(step.done),
        rewards=checked_rewards(step.rewards),
        info=plain_json(checked_info(step.info)),
        call_errors=step.call_errors,
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's, which is not imported here


def checked_info(info: object) -> dict[str, Any]:
    """Return what is to be stored with a trajectory."""
    if not isinstance(info, Mapping):
        raise TypeError(f"info is {type(info).__name__}; it must be a mapping of names to values")
    return {str(name): value for name, value in cast("Mapping[Any, Any]", info).items()}


def checked_messages(messages: object, what: str) -> list[dict[str, Any]]:
    """Return messages whose contents are text, that of parts joined.

    >>> checked_messages([{"role": "tool", "content": [{"type": "text", "text": "4"}]}], "the reply")
    [{'role': 'tool', 'content': '4'}]
    """
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"{what} is {type(messages).__name__}; it must be text or a list of messages")
    found: list[dict[str, Any]] = []
    for one in cast("Sequence[Any]", messages):
        if not isinstance(one, Mapping) or not isinstance(cast("Mapping[str, Any]", one).get("role"), str):
            raise TypeError(f"{what} has {one!r:.60}; a message must be a mapping with a role")
        message = dict(cast("Mapping[str, Any]", one))
        found.append({**message, "content": text_of(message.get("content"), what)})
    return found


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
        raise TypeError(f"{what} has a content of {type(content).__name__}; it must be text, or parts of text")
    texts: list[str] = []
    for part in cast("Sequence[Any]", content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TypeError(f"{what} has a part of type {kind!r:.40}; the policy reads text alone")
        texts.append(text)
    return "".join(texts)


def checked_rewards(rewards: object) -> dict[str, float]:
    """Return named rewards as floats.

    >>> checked_rewards({"reached": True})
    {'reached': 1.0}
    """
    if not isinstance(rewards, Mapping):
        raise TypeError(f"rewards are {type(rewards).__name__}; they must be a mapping of names to numbers")
    found = {str(name): float(value) for name, value in cast("Mapping[str, Any]", rewards).items()}
    for name, value in found.items():
        if not abs(value) <= LARGEST:
            raise ValueError(f"the reward {name!r} is {value}; it must be finite, and fit float32")
    return found


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
    r"""Return text that UTF-8 can hold: half a surrogate pair, which JSON can write, becomes a question mark.

    >>> clean_text("a\ud800")
    'a?'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
