"""The forms in which a definition specifies its environment, and the function that creates one per conversation.

A class with `reset` and `step`, a class in TRL's form, tools, a function that returns a new object of either class, or
several of these by name, from which a column of the prompt's data chooses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import (
    Environment,
    has_effects,
    is_parallel,
    rewards_of_environment,
    tools_of,
)
from rlhf_pipeline.environments.tools import MethodTools, Tools
from rlhf_pipeline.errors import DefinitionError

COLUMN: Final = "environment"
"""The column that specifies a prompt's environment, as in TRL."""

Maker = Callable[[], Environment]


class Environments:
    """Several environments in one run; a column of a prompt's data selects the one that answers it.

    Each prompt is shown the tools of its own environment alone, and `reset` does not get the column.

    Args:
        choices: what a definition may name as its environment, by name.
        column: of the prompts' data.

    Raises:
        DefinitionError: there is none, or one is not an environment.
    """

    def __init__(self, choices: Mapping[str, Any], *, column: str = COLUMN) -> None:
        if not choices:
            raise DefinitionError("environment is an empty dict; it must map at least one name to an environment.")
        self.choices = dict(choices)
        self.makers = {name: maker_of(choice) for name, choice in choices.items()}
        self.column = column

    @property
    def has_effects(self) -> bool:
        """Whether one of them changes something outside itself."""
        return any(map(has_effects, self.makers.values()))

    @property
    def rewards(self) -> tuple[str, ...] | None:
        """The names of their rewards, if all of them declare rewards."""
        declared = [rewards_of_environment(maker) for maker in self.makers.values()]
        if None in declared:
            return None
        return (*dict.fromkeys(name for names in declared for name in names or ()),)

    def of(self, prompt: Prompt) -> str:
        """Return the name of a prompt's environment."""
        name = prompt.meta.get(self.column)
        if name not in self.makers:
            raise DefinitionError(
                f"a prompt has {self.column}={name!r}, but the environments are {', '.join(self.makers)}. Each "
                f"prompt needs one of these names in the column {self.column!r} of its data."
            )
        return cast(str, name)

    def __call__(self) -> Environment:
        """Raise an error: which one is made depends on the prompt."""
        raise DefinitionError("the environment depends on the prompt.")


class Factory:
    """A function that makes environments; its attributes are read from a first environment, which is discarded."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @functools.cached_property
    def form(self) -> Any:
        """The function with the attributes of the environments that it makes, or the tools of a class in TRL's form."""
        kind: Any = self.make
        while isinstance(kind, functools.partial):
            kind = cast("functools.partial[Any]", kind).func
        if not inspect.isclass(kind):
            try:
                kind = type(self.make())
            except Exception as error:  # whatever a user's function raises is about the definition
                raise DefinitionError(f"the environment cannot be created: {type(error).__name__}: {error}") from error
        return kind if hasattr(kind, "step") else MethodTools(self.make, kind)

    @property
    def tools(self) -> list[Any]:
        """The tools of the first environment."""
        return tools_of(self.form)

    @property
    def parallel(self) -> bool:
        """The value of the first one."""
        return getattr(self.make, "parallel", False) is True or is_parallel(self.form)

    @property
    def has_effects(self) -> bool:
        """The value of the first one."""
        return bool(getattr(self.make, "has_effects", False)) or has_effects(self.form)

    @property
    def rewards(self) -> tuple[str, ...] | None:
        """The value of the first one."""
        return rewards_of_environment(self.form)

    def __call__(self) -> Environment:
        """Return a new environment."""
        return self.form() if isinstance(self.form, MethodTools) else self.make()


def maker_of(environment: Any) -> Maker:
    """Return the function that makes one environment per conversation."""
    if isinstance(environment, Mapping):
        return Environments(cast("Mapping[str, Any]", environment))
    if not callable(environment):
        raise DefinitionError(
            f"environment is an object of type {type(environment).__name__}; pass the environment class, a function "
            "that returns a new environment for each conversation, or a dict that maps names to such classes or "
            "functions."
        )
    if inspect.isclass(environment) and not hasattr(environment, "step"):
        return MethodTools(environment)
    if inspect.isclass(environment) and not hasattr(environment, "reset"):
        raise DefinitionError(f"the environment {environment.__name__} has no reset method.")
    if inspect.isroutine(environment) or isinstance(environment, functools.partial):
        return Factory(cast("Callable[[], Any]", environment))
    return cast(Maker, environment)


def code_of(environment: Any) -> Iterator[Any]:
    """Yield the functions and classes that form a definition's environment."""
    if isinstance(environment, Environments):
        environment = environment.choices
    if isinstance(environment, Mapping):
        for choice in cast("Mapping[str, Any]", environment).values():
            yield from code_of(choice)
    elif isinstance(environment, Tools):
        yield from environment.functions.values()
    else:
        yield environment
