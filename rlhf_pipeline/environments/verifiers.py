"""Environments of the package `verifiers` (0.4): a task set, agents that solve the tasks, and scoring functions.

An episode there asks a model for each turn, so it is an agent program (see `environments.agent_program`): its requests
reach the policy through the same server, and its rows have the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rlhf_pipeline.data.prompts import Prompt, Prompts
from rlhf_pipeline.environments.agent_program import ProgramConversation
from rlhf_pipeline.environments.chat_requests import ChatError, ChatRequest, ChatResponse
from rlhf_pipeline.environments.chat_server import ChatSession
from rlhf_pipeline.environments.environment import Step
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.runtime import Call, process_runtime


class Verifiers:
    """A verifiers environment, in which the policy plays the agent; its tasks are the prompts.

        lakes = Verifiers("my_lakes", agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
        Pipeline(prompts=lakes.prompts(skip=100), environment=lakes, ...)

    The rewards of a task arrive under their names, times their weights; its metrics are stored as `metrics`. One agent
    plays a conversation: others need their own `client`. An agent that rewrites its messages (compaction,
    sub-agents) begins new rows of the episode.
    """

    parallel = True

    def __init__(self, taskset: str | Mapping[str, Any], *, has_effects: bool = False, **config: Any) -> None:
        self.config = {"taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset), **config}
        self.has_effects = has_effects
        self._tasks: dict[int, Any] = {}
        self._servers = _Servers()

    @functools.cached_property
    def env(self) -> Any:
        """The environment itself."""
        vf = _package()
        return vf.load_environment(vf.resolve_env_config(self.config))

    def prompts(self, **select: Any) -> Prompts:
        """Return the tasks as prompts; a custom reward gets the other fields of a task in `meta`."""
        rows = list[dict[str, Any]]()
        for task in self.env.taskset.select(_package().SelectConfig(**select)):
            data = task.data
            self._tasks[data.idx] = task
            fields = data.model_dump(mode="json", exclude_defaults=True, exclude={"prompt"})
            rows.append({**fields, "question": data.prompt_text or data.name or f"task {data.idx}"})
        answered = bool(rows) and all("answer" in row for row in rows)
        return Prompts(rows=rows, answer_field="answer" if answered else None)

    def close(self) -> None:
        """Stop its servers; at the end of the process they stop by themselves."""
        closing = Call("verifiers", self._servers.stack.aclose, is_async=True)
        process_runtime().begin([closing])
        if isinstance(error := process_runtime().wait(closing), BaseException):
            raise error

    def task_of(self, prompt: Prompt) -> Any:
        """Return the task of a prompt."""
        if prompt.meta.get("idx") not in self._tasks:
            raise DefinitionError("the prompts do not come from this environment: pass prompts=ENVIRONMENT.prompts().")
        return self._tasks[prompt.meta["idx"]]

    async def serve(self) -> None:
        """Start its servers, unless they run; in the event loop of user code."""
        servers = self._servers
        if servers.opening is None:
            servers.opening = asyncio.ensure_future(servers.stack.enter_async_context(self.env.serving()))
        await asyncio.shield(servers.opening)

    def __call__(self) -> ProgramConversation:
        """Return a new conversation."""
        self.env  # noqa: B018 - loaded here, in a thread: it takes seconds
        return _Episode(self).conversation


class _Servers:
    """The servers of an environment, in a separate object: whether they run is not part of its identity."""

    def __init__(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.opening: asyncio.Future[None] | None = None


class _OneAgent(ChatSession):
    """The requests of one agent."""

    agent = ""
    """The id of the agent's trace; empty before its first request."""

    def submit(self, request: ChatRequest, *, key: str, size: int, is_retry: bool) -> Future[ChatResponse]:
        """See `ChatSession.submit`."""
        self.agent = self.agent or key
        if key != self.agent:
            raise ChatError(
                "a second agent uses the policy, but a conversation has only one agent: use a separate client for "
                "the second agent"
            )
        return super().submit(request, key=key, size=size, is_retry=is_retry)


class _Episode:
    """One episode of verifiers."""

    def __init__(self, environment: Verifiers) -> None:
        self.environment, self.session = environment, _OneAgent()
        self.conversation = ProgramConversation(self.play, self.session, on_limit=self.stop)
        self._traces: dict[str, Any] = {}

    async def play(self, base_url: str, api_key: str, prompt: Prompt) -> Step:
        """Run the episode of a prompt's task, and return the rewards and metrics of the agent."""
        vf, task = _package(), self.environment.task_of(prompt)
        await self.environment.serve()
        # Requests of an agent carry the id of its trace. All episodes have one client, so they have no keys.
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="RLHF_PIPELINE_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        episode = await self.environment.env.run_episode(task, context, on_trace=self._on_trace)
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            message = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed without an error"
            raise (TimeoutError if episode.is_timeout else RuntimeError)(message)
        trace = self._traces.get(self.session.agent)
        if trace is None:
            return Step(done=True)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Step(done=True, rewards=rewards, info={"metrics": {**trace.metrics}})

    def stop(self, reason: str) -> None:
        """Mark the agent as stopped: a rejected request is then not a failure, and its episode is scored."""
        if (trace := self._traces.get(self.session.agent)) is not None:
            trace.stop(reason)

    def _on_trace(self, trace: Any) -> None:
        self._traces[trace.id] = trace
        self.conversation.add_key(trace.id)


def _package() -> Any:
    """Import verifiers, which takes a second or two."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise DefinitionError(
            'Verifiers requires an optional package: pip install "rlhf-pipeline[verifiers]"'
        ) from error
