"""Environments of the package `verifiers` (0.4): a task set, agents that play it, and what scores them.

There the environment drives: an episode asks a model, at an address, for each turn. The address is one of ours, where a
request waits for the turn that the policy samples; what the next request has more is the reply. So an episode goes on
turn by turn among the others, and its tokens are those that were sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rlhf_pipeline.data.prompts import Prompt, Prompts
from rlhf_pipeline.environments.environment import Message, Step, Turn
from rlhf_pipeline.errors import DefinitionError

T = TypeVar("T")


class Verifiers:
    """A verifiers environment, in which the policy plays the agent; its tasks are the prompts.

        lakes = Verifiers("my_lakes", agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}})
        Pipeline(prompts=lakes.prompts(skip=100), environment=lakes, ...)

    The rewards of a task arrive under their names, times their weights; its metrics are stored as `metrics`. One agent
    plays a conversation: others need a `client` of their own. An agent that rewrites its messages (compaction,
    sub-agents) fails the conversation.
    """

    parallel = True

    def __init__(self, taskset: str | Mapping[str, Any], *, has_effects: bool = False, **config: Any) -> None:
        self.config = {"taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset), **config}
        self.has_effects = has_effects
        self._tasks: dict[int, Any] = {}

    @functools.cached_property
    def env(self) -> Any:
        """The environment itself."""
        vf = _package()
        return vf.load_environment(vf.resolve_env_config(self.config))

    @functools.cached_property
    def tools(self) -> list[Mapping[str, Any]]:
        """The tools as the agent shows them to its model, from the beginning of the first task."""
        episode = Episode(self._host, {0: next(iter(self.env.taskset))})
        self._host.call(episode.begin(0))
        episode.end("failed")
        return episode.tools

    @functools.cached_property
    def _host(self) -> _Host:
        return _Host(self.env)

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
        self._host.close()

    def __call__(self) -> Episode:
        """Return a new conversation."""
        return Episode(self._host, self._tasks)


class Episode:
    """One conversation; made by `Verifiers`. What begins with an underscore runs in the host's loop."""

    def __init__(self, host: _Host, tasks: Mapping[int, Any]) -> None:
        self.host, self.tasks = host, tasks
        self.tools: list[Mapping[str, Any]] = []
        self._traces: dict[str, Any] = {}
        self._requests: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Mapping[str, Any] | None]]] = asyncio.Queue()
        self._said: list[dict[str, Any]] = []
        self._played: asyncio.Future[Any] | None = None
        self._answer: asyncio.Future[Mapping[str, Any] | None] | None = None
        self._trace: Any = None

    async def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """Begin the prompt's task and return its first messages."""
        if prompt.meta.get("idx") not in self.tasks:
            raise DefinitionError("the prompts are not this environment's: give prompts=NAME.prompts().")
        return await self.host.begun(self.begin(prompt.meta["idx"]))

    async def step(self, turn: Turn) -> Step:
        """Give the agent its turn, and return what its next request has more."""
        return await self.host.begun(self._step(turn))

    def end(self, reason: str) -> Step:
        """End the episode if it goes on, and return its rewards and metrics; one that has ended gave them before."""
        return self.host.call(self._end(reason))

    async def begin(self, index: int) -> Sequence[Message]:
        """Begin a task; runs in the host's loop."""
        self._played = asyncio.ensure_future(
            self.host.env.run_episode(self.tasks[index], self.host.context, on_trace=self._on_trace)
        )
        first = await self._next()
        if first is None:
            await self._rewards()
            raise RuntimeError("the episode was over before its agent asked for a turn")
        return first

    async def ask(self, trace: str, body: dict[str, Any]) -> Mapping[str, Any] | None:
        """Return the policy's answer to a request, or None when there is none any more; runs in the host's loop."""
        self._trace = self._trace or self._traces[trace]
        if self._trace.id != trace:
            raise ValueError("a second agent asks the policy, and a conversation has one: give it a client of its own")
        answer: asyncio.Future[Mapping[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((body, answer))
        return await answer

    def _on_trace(self, trace: Any) -> None:
        self._traces[trace.id] = trace
        self.host.episodes[trace.id] = self

    async def _step(self, turn: Turn) -> Step:
        assert self._answer is not None
        calls = [
            {
                "id": f"call_{turn.number}_{place}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for place, call in enumerate(turn.tool_calls)
        ]
        message = {"role": "assistant", "content": turn.content if calls else turn.text}
        reason = "tool_calls" if calls else turn.finish_reason
        self._answer.set_result(
            {"message": message | ({"tool_calls": calls} if calls else {}), "finish_reason": reason}
        )
        replies = await self._next()
        if replies is not None:
            return Step(replies)
        return await self._scored()

    async def _next(self) -> Sequence[Message] | None:
        """Wait for a request and return the messages that it has more than the last one; None if there is none."""
        assert self._played is not None
        asked = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({asked, self._played}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = not asked.done()
            asked.cancel()  # of one that is done nothing comes
        if over:
            return None
        body, self._answer = asked.result()
        self.tools = body.get("tools") or []
        before, self._said = self._said, [_message(one) for one in body["messages"]]
        told, more = self._said[: len(before)], self._said[len(before) :]
        if told != before or (before and (not more or more[0]["role"] != "assistant")):
            raise RuntimeError("the agent rewrote its messages, and a conversation only grows")
        return more[1:] if before else more

    async def _scored(self) -> Step:
        """Return the rewards and the metrics of an episode that is over."""
        rewards = await self._rewards()
        return Step(
            done=True, rewards=rewards, info={} if self._trace is None else {"metrics": {**self._trace.metrics}}
        )

    async def _rewards(self) -> dict[str, float]:
        """Return the rewards of an episode that is over."""
        assert self._played is not None
        episode = await self._played
        if not episode.ok:
            errors = [*(one for trace in episode.traces for one in trace.errors), *episode.errors]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed without an error"
            raise (TimeoutError if episode.is_timeout else RuntimeError)(said)
        rewards = {} if self._trace is None else self._trace.rewards
        return {name: reward.value for name, reward in rewards.items() if reward is not None}

    async def _end(self, reason: str) -> Step:
        for trace in self._traces:
            self.host.episodes.pop(trace, None)
        if self._played is None or self._played.done():
            return Step(done=True)
        played = None if reason == "failed" else self._trace
        if played is not None:
            played.stop(reason)  # a refused request is then no failure, and what was played is scored
        else:
            self._played.cancel()
        self._requests.put_nowait(({}, self._answer or asyncio.get_running_loop().create_future()))
        while not self._requests.empty():
            if not (answer := self._requests.get_nowait()[1]).done():
                answer.set_result(None)
        await asyncio.wait({self._played})
        return Step(done=True) if played is None else await self._scored()


class _Host:
    """What serves a verifiers environment, in a thread with an event loop: its servers, and the policy's address."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.episodes: dict[str, Episode] = {}
        self.context: Any = None
        self._stack = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._thread.start()
        self.call(self._open())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def begun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and await it in another."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _open(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        door = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        app = Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        serving = asyncio.ensure_future(server.serve(sockets=[door]))
        self._stack.push_async_callback(asyncio.wait, {serving})
        self._stack.callback(setattr, server, "should_exit", True)
        await self._stack.enter_async_context(self.env.serving())
        address = f"http://127.0.0.1:{door.getsockname()[1]}/v1"
        client = _package().EvalClientConfig(base_url=address, api_key_var="RLHF_PIPELINE_NO_KEY")
        self.context = _package().ModelContext(model="policy", client=client)

    def close(self) -> None:
        """Stop the servers and the loop."""
        self.call(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _complete(self, request: Any) -> Any:
        """Answer a request for a turn in OpenAI's form, whole or as a stream of one piece."""
        from starlette.responses import JSONResponse, Response

        trace, body = request.headers.get("x-session-id", ""), await request.json()
        try:
            choice = await self.episodes[trace].ask(trace, body)
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        if choice is None:
            return JSONResponse({"error": {"message": "the conversation is over"}}, 400)
        answer = {"id": trace, "created": 0, "model": "policy"}
        if not body.get("stream"):
            return JSONResponse({**answer, "object": "chat.completion", "choices": [{"index": 0, **choice}]})
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        piece = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}
        said = json.dumps({**answer, "object": "chat.completion.chunk", "choices": [piece]})
        return Response(f"data: {said}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def _package() -> Any:
    """Import verifiers, which takes a second or two."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise DefinitionError('Verifiers needs its package: pip install "rlhf-pipeline[verifiers]"') from error


def _message(wire: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form as templates take it: its content is text."""
    content = wire.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    return {"role": wire["role"], "content": content or ""} | ({"name": wire["name"]} if wire.get("name") else {})
