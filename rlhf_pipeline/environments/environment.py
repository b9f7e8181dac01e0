"""The protocol of environments, which begin conversations and answer the policy's turns.

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
token for token. One with effects outside itself declares them with a class attribute, `has_effects = True`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.outputs import checked_info, checked_messages, checked_rewards, plain_json

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the policy, as passed to its environment."""

    text: str
    """The sampled tokens as text."""
    number: int = 1
    """1 for the first turn of the conversation."""
    finish_reason: str = "stop"
    """`stop`, or `length` for a turn that the limit of tokens ended."""
    content: str = ""
    """The text without tool calls and thinking; equal to `text` if nothing was parsed."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The calls that the parser of transformers found, each with `id`, `name` and `arguments`. Only with `tools`."""
    call_error: str | None = None
    """The reason why a call could not be parsed, in one line, or None."""
    token_ids: Sequence[int] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    >>> Step("Again?", rewards={"close": 0.5}).done
    False
    """

    reply: str | Sequence[Message] = ""
    """Text or messages. Text becomes a user message if the policy has a chat template."""
    _: KW_ONLY
    done: bool = False
    """Whether the conversation is over; the reply is then not shown to the policy."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named rewards of this turn; rewards with the same name are summed over the conversation."""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that are stored with the trajectory as JSON; later values replace earlier ones with the same name."""
    history: Sequence[Message] | None = None
    """Instead of a reply: all messages that the policy sees next, for example a compacted history, or the input of a
    sub-agent or a judge that shares the policy. If the messages continue a turn of the policy, the stored tokens up to
    that turn are used: its row continues, or a new row begins with these tokens if the row has already continued
    differently. Other messages begin a new row of the episode."""
    tools: Sequence[Any] | None = None
    """With a history: the tools that the policy sees; None shows the environment's tools."""
    variant: str = ""
    """With a history: a different variant draws a different sample for the same messages."""
    row: int | None = None
    """The index of the row of the episode that the reply continues, starting at 0, in the order in which the rows
    began. None continues the row of the turn. With `done`, the row to which the outcome applies."""
    call_errors: int = 0
    """The number of the turn's calls that could not be made as the policy wrote them and that the reply reports.
    Calls that could not be parsed are already counted."""


@runtime_checkable
class Environment(Protocol):
    """Answers one conversation; five further attributes are optional.

    - `end(reason) -> Mapping[str, float] | Step`: called once when the conversation has ended for any reason, for
      rewards that are known only then, and with a `Step` for its `info`; it may be `async`; `reason` is `stop`,
      `length`, `turns`, `calls` or `failed`;
    - `rewards = ("reached", ...)`: the names of its rewards; a reward that a conversation does not give is 0, and any
      other one is an error;
    - `tools`: functions or JSON schemas, for the chat template and for reading calls;
    - `has_effects = True`: it changes something outside itself;
    - `parallel = True`: its objects may be used in several threads at once, one thread for each of them, so calls of
      different conversations run side by side.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | Sequence[Message] | Step | None:
        """Begin a conversation and return the first text or messages for the policy; None passes the prompt.

        A `Step` with a history may show tools, and other messages to each member of a group.

        Args:
            prompt: a prompt of the definition's source.
            seed: the same for the members of a group, who must see the same.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Answer a turn.

        A `def` answers in place: the conversation keeps its slot and its cache. An `async def`, and with `parallel` a
        `def`, runs beside sampling: its reply is due `collect.reply_after` token steps after the turn.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The reason why a conversation has no trusted reward."""

    kind: str
    """`timeout` or `tool_error`."""
    error: str


def is_parallel(environment: object) -> bool:
    """Return whether an environment's calls may run concurrently, each conversation's in a separate thread.

    It has `parallel = True`, or its `step` is a coroutine function. Other calls are made one after the other, because
    generators, counters and libraries of a module may not be made for several threads.
    """
    return getattr(environment, "parallel", False) is True or inspect.iscoroutinefunction(
        getattr(environment, "step", None)
    )


def has_effects(environment: Callable[[], Any] | None) -> bool:
    """Return whether an environment changes something outside itself."""
    return bool(getattr(environment, "has_effects", False))


def tools_of(environment: Callable[[], Any] | None) -> list[Any]:
    """Return an environment's tools, functions or JSON schemas; empty without."""
    tools: Any = getattr(environment, "tools", None) or ()
    if not isinstance(tools, Iterable) or isinstance(tools, (str, bytes)):
        raise DefinitionError(
            f"an environment's `tools` is of type {type(tools).__name__}; it must be a list of functions or JSON "
            "schemas. If the list is computed, make it a property of the class."
            if callable(tools)
            else f"an environment's `tools` is {tools!r:.60}; it must be a list of functions or JSON schemas."
        )
    return [*cast("Iterable[Any]", tools)]


def rewards_of_environment(environment: Callable[[], Any] | None) -> tuple[str, ...] | None:
    """Return the names of rewards that an environment declares; None if it declares none."""
    declared = getattr(environment, "rewards", None)
    if declared is None:
        return None
    names = (declared,) if isinstance(declared, str) else declared
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise DefinitionError(
            f"`rewards` of the environment is {declared!r:.60}; it must be a tuple of names, for example ('reached',)."
        )
    return tuple(cast("Sequence[str]", names))


def checked(step: object) -> Step:
    """Return an environment's answer if it is one."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}; it must return a Step")
    if not _is_bool(step.done):
        raise TypeError(f"done is {step.done!r:.60}; it must be True or False")
    reply = step.reply if isinstance(step.reply, str) else checked_messages(step.reply, "the reply")
    if step.history is not None and (len(reply) or step.row is not None):
        raise TypeError(
            "a step with a history must not have a reply or a row; the history contains all messages, including the "
            "reply"
        )
    if step.row is not None and (not isinstance(step.row, int) or step.row < 0):
        raise TypeError(f"row is {step.row!r:.60}; it must be the index of a row of the episode, starting at 0")
    return Step(
        reply,
        done=bool(step.done),
        history=None if step.history is None else checked_messages(step.history, "the history"),
        tools=step.tools,
        variant=step.variant,
        row=step.row,
        rewards=checked_rewards(step.rewards),
        info=plain_json(checked_info(step.info)),
        call_errors=step.call_errors,
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's, which is not imported here
