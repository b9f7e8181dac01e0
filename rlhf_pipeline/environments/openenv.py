"""Environments behind OpenEnv's client (`reset`, `step`), which play on a server."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Message, Step, Turn
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.runtime import in_thread


class OpenEnv:
    """Makes environments of OpenEnv clients: each conversation has one, and with it a session of the server's.

        OpenEnv("http://localhost:8000", action=lambda turn: {"letter": turn.text}, show=lambda seen: seen["text"])

    The server must take as many sessions (`max_concurrent_envs`) as a rollout has conversations. Calls are made in
    threads, so a slow server delays no other conversation.
    """

    parallel = True

    def __init__(
        self,
        client: str | Callable[[], Any],
        *,
        action: Callable[[Turn], Any],
        show: Callable[[Any], str | Sequence[Message]],
        arguments: Callable[[Prompt], Mapping[str, Any]] = lambda prompt: {},
        reward: str = "reward",
        has_effects: bool = False,
    ) -> None:
        self.client = client if callable(client) else _generic(client)
        self.action, self.show, self.arguments = action, show, arguments
        self.reward, self.has_effects = reward, has_effects

    @property
    def rewards(self) -> tuple[str, ...]:
        """The name of its reward."""
        return (self.reward,)

    def __call__(self) -> OpenEnvSession:
        """Return a new conversation; the client connects when it is reset."""
        return OpenEnvSession(self, self.client())


class OpenEnvSession:
    """One conversation; made by `OpenEnv`."""

    def __init__(self, settings: OpenEnv, client: Any) -> None:
        self.settings, self.client = settings, client

    async def reset(self, prompt: Prompt, seed: int) -> str | Sequence[Message]:
        """Reset the server's environment and show its first observation."""
        arguments = {"seed": seed % 2**31, **self.settings.arguments(prompt)}
        return self.settings.show((await in_thread("OpenEnv's reset", self.client.reset, arguments)).observation)

    async def step(self, turn: Turn) -> Step:
        """Take the turn's action and show what came of it."""
        reply = await in_thread("OpenEnv's step", self.client.step, {"action": self.settings.action(turn)})
        rewards = {} if reply.reward is None else {self.settings.reward: float(reply.reward)}
        return Step("" if reply.done else self.settings.show(reply.observation), done=reply.done, rewards=rewards)

    def end(self, reason: str) -> Mapping[str, float]:
        """Close the session."""
        self.client.close()
        return {}


def _generic(address: str) -> Callable[[], Any]:
    """Return what makes clients of a server from its address alone."""
    try:
        package = importlib.import_module("openenv.core.generic_client")
    except ImportError as error:
        raise DefinitionError('OpenEnv requires an optional package: pip install "rlhf-pipeline[openenv]"') from error
    return lambda: package.GenericEnvClient(base_url=address)
