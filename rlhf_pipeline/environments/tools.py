"""Python functions as tools, and classes whose methods are tools (TRL's environments).

A tool is described to the policy by its annotations and its docstring (Google style, `Args:` included), through
transformers' `get_json_schema`, and its calls are read by transformers' parser.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Step, Turn, rewards_of_environment
from rlhf_pipeline.environments.outcomes import FAILED, STOP
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.arguments import own_copy
from rlhf_pipeline.user_code.generators import SeededGenerators
from rlhf_pipeline.user_code.outputs import named_rewards, text_of
from rlhf_pipeline.user_code.runtime import in_thread

ARGUMENT_ERRORS: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError, re.error, SyntaxError),
    *(TypeError, ValueError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError),
)
"""Errors of a tool that are reported to the policy, because arguments cause them; any other fails the conversation."""
RESERVED: Final = frozenset({"reset", "get_reward", "close"})
"""Methods of a class in TRL's form that are not tools."""


class Tools:
    """An environment of functions: the policy calls them until it answers without a call.

    A `def` runs in the thread of its conversation, so a call that waits for a network or hangs delays no other. A call
    that cannot be parsed, calls an unknown tool, has wrong arguments, or raises one of `ARGUMENT_ERRORS`, is
    answered with that error; any other exception, and a result that is not text, text parts or JSON, fails
    the conversation.

    Args:
        functions: with annotations and docstrings.
        has_effects: they change something outside the conversation.
        told: further errors that arguments cause, such as those of a database about a query.

    Raises:
        DefinitionError: a function lacks an annotation or a docstring.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: one
    ...         b: the other
    ...     '''
    ...     return a + b
    >>> Tools(add).tools[0](1, 2)
    3
    """

    parallel = True

    def __init__(
        self,
        *functions: Callable[..., Any],
        has_effects: bool = False,
        told: Sequence[type[Exception]] = (),
    ) -> None:
        if not functions:
            raise DefinitionError("Tools needs at least one function.")
        self.functions = {_name(function): function for function in functions}
        self.has_effects = has_effects
        self.told = (*ARGUMENT_ERRORS, *told)
        for function in functions:
            if not callable(function) or not inspect.getdoc(function):
                raise DefinitionError(f"Tools: {_name(function)} needs a docstring that describes it.")

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The functions, whose annotations and docstrings determine their schemas."""
        return [*self.functions.values()]

    def __call__(self) -> Session:
        """Return a new environment."""
        return Session(self.functions, reported=self.told)


class MethodTools:
    """An environment from a class in TRL's form: `reset(**row)`, public methods that are tools, `get_reward()`.

    `reset` gets the columns of the prompt's data that it asks for, with `prompt` (messages, where it is messages),
    `answer`, and `seed` if it names that; what it returns is put after the prompt. The generators of `random` and NumPy
    are seeded for it, `async` or not, so that members of a group that draw a task draw the same. `get_reward` may be
    `async`, and return a number, None, or a mapping of names to numbers; a class attribute `told` names further errors
    of tools that are reported to the policy.

    Args:
        made: returns a new object.
        kind: its class, where `made` is not the class itself.
    """

    parallel = True

    def __init__(self, maker: Callable[[], Any], kind: type | None = None) -> None:
        self.maker = maker
        self.kind: Any = maker if kind is None else kind
        self.has_effects = bool(getattr(self.kind, "has_effects", False))
        self.rewards = rewards_of_environment(self.kind)
        self.told = (*ARGUMENT_ERRORS, *getattr(self.kind, "told", ()))
        self.names = [
            name
            for name, _ in inspect.getmembers(self.kind, inspect.isroutine)
            if not name.startswith("_") and name not in RESERVED
        ]
        if not self.names:
            raise DefinitionError(
                f"the environment {getattr(self.kind, '__name__', self.kind)} has neither a `step` method nor methods "
                "that are tools."
            )

    @functools.cached_property
    def tools(self) -> list[Callable[..., Any]]:
        """The methods of one object, whose annotations and docstrings determine their schemas."""
        owner = self.maker()
        return [getattr(owner, name) for name in self.names]

    def __call__(self) -> Session:
        """Return a new environment."""
        owner = self.maker()
        return Session({name: getattr(owner, name) for name in self.names}, owner, reported=self.told)


class Session:
    """One conversation with tools; made by `Tools` and `MethodTools`."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        owner: Any = None,
        *,
        reported: tuple[type[BaseException], ...] = ARGUMENT_ERRORS,
    ) -> None:
        self.functions, self.reported = functions, reported
        self.owner = owner

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Show the prompt, followed by the text that the owner of the tools returns."""
        if self.owner is None or not hasattr(self.owner, "reset"):
            return None
        row = {"prompt": prompt.text if prompt.messages is None else [*map(dict, prompt.messages)]}
        row |= {"answer": prompt.answer, **prompt.meta}
        parameters = inspect.signature(self.owner.reset).parameters
        if "seed" in parameters:
            row = {"seed": seed, **row}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: row[name] for name in parameters if name in row}
        generators = SeededGenerators(seed)
        with generators:
            returned = self.owner.reset(**row)
        return (
            _awaited_messages(prompt, generators.drive(returned))
            if inspect.isawaitable(returned)
            else _messages(prompt, returned)
        )

    async def step(self, turn: Turn) -> Step:
        """Make the calls of a turn, one after the other; a turn without a call ends the conversation."""
        if turn.call_error is not None and turn.finish_reason == STOP:
            return Step([{"role": "tool", "content": f"error: {turn.call_error}"}])
        if not turn.tool_calls:
            return Step(done=True)
        replies, call_errors = list[dict[str, Any]](), 0
        for call in turn.tool_calls:
            content, is_valid = await self._call(str(call["name"]), own_copy(call["arguments"]))
            replies.append({"role": "tool", "name": call["name"], "content": content})
            call_errors += not is_valid
        return Step(replies, call_errors=call_errors)

    def end(self, reason: str) -> Any:
        """Return the owner's reward, if it has one and the conversation is one to reward."""
        if not hasattr(self.owner, "get_reward") or reason == FAILED:
            return {}
        returned = self.owner.get_reward()
        return _awaited_rewards(returned) if inspect.isawaitable(returned) else named_rewards(returned)

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return what the policy reads of a call, and whether it could be made."""
        function = self.functions.get(name)
        if function is None:
            return f"error: there is no tool {name!a:.80}; there are {', '.join(sorted(self.functions))}", False
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {type(error).__name__}: {error}", False
        try:
            result = await in_thread(f"the tool {name}", function, arguments)
        except TimeoutError:
            raise
        except self.reported as error:
            return f"error: {type(error).__name__}: {error}", True
        return _as_text(name, result), True


def _as_text(name: str, result: Any) -> str:
    """Return a tool's result as the policy reads it."""
    if isinstance(result, str):
        return result
    parts = cast("list[Any]", result) if isinstance(result, list) else []
    if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
        return text_of(parts, f"the result of the tool {name}")
    plain: Any = cast("Any", result).tolist() if hasattr(result, "tolist") else result  # of NumPy or torch
    try:
        return json.dumps(plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RuntimeError(
            f"the tool {name} returned {type(result).__name__}, which is neither text nor JSON"
        ) from error


def _messages(prompt: Prompt, returned: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the prompt with what `reset` returned after it; None for the prompt alone."""
    if returned is None or returned == "":
        return None
    if not isinstance(returned, (str, list)):
        raise TypeError(f"reset returned {type(returned).__name__}; it must return text, a list of text parts, or None")
    messages = [{"role": "user", "content": prompt.text}] if prompt.messages is None else [*map(dict, prompt.messages)]
    prompt_text = text_of(messages[-1]["content"], "the prompt")
    whole = (prompt_text if prompt_text.strip() else "") + text_of(cast("Any", returned), "what reset returned")
    return [*messages[:-1], {**messages[-1], "content": whole}]


async def _awaited_messages(prompt: Prompt, returned: Awaitable[Any]) -> Sequence[Mapping[str, Any]] | None:
    return _messages(prompt, await returned)


async def _awaited_rewards(returned: Awaitable[Any]) -> dict[str, float]:
    return named_rewards(await returned)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
