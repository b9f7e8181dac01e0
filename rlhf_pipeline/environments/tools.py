"""Python functions as tools, and classes whose methods are tools (TRL's environments).

A tool is described to the policy by its annotations and its docstring (Google style, `Args:` included), through
transformers' `get_json_schema`, and its calls are read by transformers' parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Environment, Step, Turn, checked_rewards
from rlhf_pipeline.errors import DefinitionError

TOLD: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a tool that the policy is told, as wrong arguments cause them; any other fails the conversation."""


class Tools:
    """An environment of functions: the policy calls them until it answers without a call.

    A `def` runs in a thread of its own, so that one that waits for a network or hangs stops nobody. A call that cannot
    be read, names no tool, has other arguments than the tool takes, or raises one of `TOLD`, is answered with that
    error; whatever else a tool raises, and a result that is neither text nor JSON, fails the conversation.

    Args:
        functions: with annotations and docstrings.
        has_effects: they change something outside the conversation.

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

    def __init__(self, *functions: Callable[..., Any], has_effects: bool = False) -> None:
        if not functions:
            raise DefinitionError("Tools: give it at least one function.")
        self.functions = {_name(function): function for function in functions}
        self.has_effects = has_effects
        for function in functions:
            if not callable(function) or not inspect.getdoc(function):
                raise DefinitionError(f"Tools: {_name(function)} needs a docstring that says what it does.")

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The functions, from whose annotations and docstrings their schemas follow."""
        return [*self.functions.values()]

    def __call__(self) -> Session:
        """Return a new environment."""
        return Session(self.functions)


class MethodTools:
    """An environment from a class in TRL's form: `reset(**row)`, public methods that are tools, `get_reward()`.

    `reset` gets the columns of the prompt's data, with `prompt` and `answer`; what it returns is put after the prompt.
    """

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made
        self.has_effects = bool(getattr(made, "has_effects", False))
        self.names = [
            name
            for name, value in inspect.getmembers(made, callable)
            if not name.startswith("_") and name not in ("reset", "get_reward", "close")
        ]
        if not self.names:
            raise DefinitionError(
                f"the environment {getattr(made, '__name__', made)} has neither a method `step` nor methods that are "
                "tools."
            )

    @functools.cached_property
    def tools(self) -> list[Callable[..., Any]]:
        """The methods of one object, from whose annotations and docstrings their schemas follow."""
        owner = self.made()
        return [getattr(owner, name) for name in self.names]

    def __call__(self) -> Session:
        """Return a new environment."""
        owner = self.made()
        return Session({name: getattr(owner, name) for name in self.names}, owner)


class Session:
    """One conversation with tools; made by `Tools` and `MethodTools`."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], owner: Any = None) -> None:
        self.functions = functions
        self.owner = owner

    def reset(self, prompt: Prompt, seed: int) -> str | Sequence[Mapping[str, Any]] | None:
        """Show the prompt, and after it what the owner of the tools returns."""
        if self.owner is None or not hasattr(self.owner, "reset"):
            return None
        shown = self.owner.reset(**{"prompt": prompt.text, "answer": prompt.answer, **prompt.meta})
        if not shown:
            return None
        if not isinstance(shown, str):
            raise TypeError(f"reset returned {type(shown).__name__}; it must return text or None")
        said = [{"role": "user", "content": prompt.text}] if prompt.messages is None else [*map(dict, prompt.messages)]
        return [*said[:-1], {**said[-1], "content": f"{said[-1]['content']}{shown}"}]

    async def step(self, turn: Turn) -> Step:
        """Make the calls of a turn, one after the other; a turn without a call ends the conversation."""
        if turn.call_error is not None and turn.finish_reason == "stop":
            return Step([{"role": "tool", "content": f"error: {turn.call_error}"}])
        if not turn.tool_calls:
            return Step(done=True)
        replies: list[dict[str, Any]] = []
        for call in turn.tool_calls:
            content = await self._called(str(call["name"]), dict(call["arguments"]))
            replies.append({"role": "tool", "name": call["name"], "content": content})
        return Step(replies)

    def end(self, reason: str) -> Mapping[str, float]:
        """Return the owner's reward, if it has one."""
        if not hasattr(self.owner, "get_reward"):
            return {}
        given = self.owner.get_reward()
        return checked_rewards(given if isinstance(given, Mapping) else {"reward": given})

    async def _called(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what the policy reads of a call."""
        function = self.functions.get(name)
        if function is None:
            return f"error: there is no tool {name!r}; there are {', '.join(sorted(self.functions))}"
        try:
            inspect.signature(function).bind(**arguments)
            result = await result_of(function, arguments)
        except TimeoutError:
            raise
        except TOLD as error:
            return f"error: {type(error).__name__}: {error}"
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"the tool {name} returned {type(result).__name__}: neither text nor JSON") from error


async def result_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a coroutine function, or another one in a thread that may hang without holding up the process's end."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def end_call(outcome: Any, failed: bool) -> None:
        if not future.done():
            (future.set_exception if failed else future.set_result)(outcome)

    def work() -> None:
        try:
            outcome, failed = function(**arguments), False
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; it reaches the one who waits
            outcome, failed = error, True
        except BaseException as error:  # noqa: BLE001 - SystemExit, too, ends this conversation only
            outcome, failed = RuntimeError(f"{type(error).__name__}: {error}"), True
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(end_call, outcome, failed)

    threading.Thread(target=work, name=f"tool-{_name(function)}", daemon=True).start()
    found = await future
    return await found if inspect.isawaitable(found) else found


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def maker_of(environment: Callable[[], Any]) -> Callable[[], Environment]:
    """Return what makes one environment per conversation."""
    if not callable(environment):
        raise DefinitionError(
            f"environment is {type(environment).__name__}; give the class itself, or a function that returns a new "
            "environment for each conversation."
        )
    if inspect.isclass(environment) and not hasattr(environment, "step"):
        return MethodTools(environment)
    needed = [name for name in ("reset", "step") if not hasattr(environment, name)]
    if inspect.isclass(environment) and needed:
        raise DefinitionError(f"the environment {environment.__name__} has no method {needed[0]}.")
    return cast("Callable[[], Environment]", environment)
