"""Agent programs: code that sends chat requests to an address on its own initiative, and returns a reward.

An environment responds to the policy; a program asks it. Each request carries the whole conversation as the program
knows it, which `Conversations` compares with the turns that were returned (`environments.histories`): it continues a
row, or begins one. The turn that the policy samples is the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.chat_requests import ChatChoice, ChatError
from rlhf_pipeline.environments.chat_server import ChatSample, ChatSession, Repeats, chat_server, complete
from rlhf_pipeline.environments.environment import Step, Turn
from rlhf_pipeline.environments.outcomes import FAILED
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.event_loop import CURRENT
from rlhf_pipeline.user_code.outputs import named_rewards, plain_json
from rlhf_pipeline.user_code.runtime import Call, process_runtime

OUTPUT_BYTES: Final = 1 << 16
"""The number of bytes that are read from the end of a command's output."""
SETTLE_S: Final = 0.002
"""Seconds to wait for requests that were sent together, so that their order of arrival has no effect."""


class AgentProgram:
    """An environment in which a program calls the policy: any code that uses OpenAI's chat completions.

    Args:
        run: `async def run(base_url, api_key, prompt)` that returns the reward: a number, named rewards, None (0), or a
            `Step` with rewards and info. A `def` runs in a thread. A command, as a list of arguments, receives the
            address and the key in `OPENAI_BASE_URL` and `OPENAI_API_KEY` and the prompt as JSON on its standard input;
            the last line of its output is the reward, a number or a JSON object.
        has_effects: it changes something outside itself, or depends on more than its prompt and the responses.
        repeats: whether a request that is equal to an earlier one of the conversation receives the same response
            (`retry`), or a new sample unless its client marks it as a retry (`sample`), as the `openai` client does.

    Raises:
        DefinitionError: `run` is neither a function nor a command.

    >>> async def run(base_url, api_key, prompt):
    ...     return 1.0
    >>> AgentProgram(run).repeats
    'retry'
    """

    parallel = True

    def __init__(
        self,
        run: Callable[[str, str, Prompt], Any] | Sequence[str],
        *,
        has_effects: bool = False,
        repeats: Repeats = "retry",
    ) -> None:
        if repeats not in ("retry", "sample"):
            raise DefinitionError(f"AgentProgram: repeats is {repeats!r}; it must be 'retry' or 'sample'.")
        if not callable(run) and not _is_command(run):
            raise DefinitionError(
                f"AgentProgram: run is {run!r:.60}; it must be a function run(base_url, api_key, prompt), or a command "
                'as a list of arguments: ["python", "agent.py"].'
            )
        self.run, self.has_effects = run, has_effects
        self.repeats: Repeats = repeats

    def __call__(self) -> ProgramConversation:
        """Return a new conversation."""
        play = self.run if callable(self.run) else functools.partial(run_command, tuple(self.run))
        return ProgramConversation(play, ChatSession(self.repeats))


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that has started.

    Attributes:
        call: of its function. It is a call by itself, so that one that blocks the event loop is found.
        ended: complete when it has ended.
        keys: with which it reaches its conversation.
    """

    call: Call
    ended: asyncio.Future[None]
    keys: list[str]


class ProgramConversation:
    """One run of a program, which is one episode: each sample that it requests is a step.

    Args:
        play: runs the program: a coroutine function, or a function, which runs in a thread.
        session: its requests.
        on_limit: called with the reason when its conversation has reached a limit, before its requests are rejected.
    """

    def __init__(
        self,
        play: Callable[[str, str, Prompt], Any],
        session: ChatSession,
        *,
        on_limit: Callable[[str], None] | None = None,
    ) -> None:
        self.session = session
        self._play, self._on_limit = play, on_limit
        self._program: _Program | None = None
        self._sample: ChatSample | None = None
        self._has_rewards = False

    async def reset(self, prompt: Prompt, seed: int) -> Step:
        """Start the program, and return the conversation of its first request."""
        loop, server = asyncio.get_running_loop(), chat_server()
        ended: asyncio.Future[None] = loop.create_future()
        key = server.open(self.session)
        call = Call(
            "the program",
            functools.partial(self._play, server.address, key, prompt),
            on_end=lambda _: complete(loop, ended),
            is_async=inspect.iscoroutinefunction(self._play),
        )
        self._program = program = _Program(call, ended, [key])
        weakref.finalize(self, _stop, self.session, program)
        _let_go_on(program)
        process_runtime().begin([call])
        first = await self._next(program)
        if first.done:
            raise RuntimeError("the program ended before its first request")
        return first

    async def step(self, turn: Turn) -> Step:
        """Return a turn to the program, and return the conversation of its next request, or the rewards."""
        program, sample = self._program, self._sample
        if program is None or sample is None:
            raise RuntimeError("no request is waiting for this turn")
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in turn.tool_calls
        ]
        message = {"content": turn.content, "tool_calls": calls}
        reason = "tool_calls" if calls else turn.finish_reason
        _let_go_on(program)
        self.session.answer(
            sample, ChatChoice(message=message, finish_reason=reason, completion_tokens=len(turn.token_ids))
        )
        return await self._next(program)

    async def end(self, reason: str) -> Step:
        """End the program if it still runs, and return its rewards, unless they were returned before."""
        program = self._program
        if program is None:
            return Step(done=True)
        if self.session.num_repeats:
            process_runtime().notice(
                "an agent program repeated an earlier request and received the same response, because equal requests "
                "are treated as retries. To draw another sample, set `n` or `seed`, or "
                'AgentProgram(run, repeats="sample").',
                once="repeated requests",
            )
        try:
            if self._has_rewards or reason == FAILED:
                return Step(done=True)
            if self._on_limit is not None:
                self._on_limit(reason)
            _let_go_on(program)
            self.session.close(ChatError(f"the conversation has ended: {reason}", code="conversation_ended"))
            await program.ended
            # An error of a program whose request was rejected is not a failure: the policy has used up its turns.
            return Step(done=True) if isinstance(program.call.outcome, BaseException) else self._rewards(program)
        finally:
            _stop(self.session, program)

    def add_key(self, key: str) -> None:
        """Also accept requests with another key for this conversation."""
        if self._program is not None:
            self._program.keys.append(chat_server().open(self.session, key))

    async def _next(self, program: _Program) -> Step:
        """Wait for a request, or for the end of the program."""
        try:
            await self.session.arrives(program.ended)
            await asyncio.sleep(SETTLE_S)
        except asyncio.CancelledError:
            _stop(self.session, program)
            raise
        sample = self._sample = None if program.ended.done() else self.session.take()
        if sample is None:
            return self._rewards(program)
        request = sample.request
        if request.ignored:
            process_runtime().notice(
                f"an agent program sets {', '.join(request.ignored)}, which is ignored: the definition sets how the "
                "policy is sampled (docs/environments.md).",
                once="ignored parameters",
            )
        process_runtime().renew(program.call, None)  # it waits for the policy
        return Step(history=request.messages, tools=request.tools, variant=request.variant)

    def _rewards(self, program: _Program) -> Step:
        """Return the rewards of a program that has ended, or raise its error."""
        self._has_rewards, outcome = True, program.call.outcome
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, BaseException):  # SystemExit, too, ends this conversation alone
            raise RuntimeError(f"{type(outcome).__name__}: {outcome}")
        if isinstance(outcome, Step):
            return Step(done=True, rewards=outcome.rewards, info=outcome.info)
        return Step(done=True, rewards=named_rewards(outcome))


def _let_go_on(program: _Program) -> None:
    """Give a program as much time as the call that waits for it has."""
    outer = CURRENT.get()
    if outer is not None:
        program.call.late = outer.late
        process_runtime().renew(program.call, outer.timeout_s)


def _stop(session: ChatSession, program: _Program) -> None:
    """End a program: forget its keys, reject its requests, cancel its coroutine or leave its thread behind."""
    chat_server().close(program.keys)
    session.close(ChatError("the conversation has ended", code="conversation_ended"))
    process_runtime().cancel_unawaited([program.call])


def _is_command(run: object) -> bool:
    parts = cast("Sequence[Any]", run) if isinstance(run, (list, tuple)) else ()
    return bool(parts) and all(isinstance(part, str) for part in parts)


async def run_command(command: Sequence[str], base_url: str, api_key: str, prompt: Prompt) -> Any:
    """Run a command as an agent program, and return the last line of its output: a number, or a JSON object.

    Raises:
        RuntimeError: it ended with another status than 0, or its output ends in another way.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        start_new_session=True,
    )
    stdin, stdout, stderr = (cast("Any", pipe) for pipe in (process.stdin, process.stdout, process.stderr))
    prompt_line = json.dumps(plain_json(asdict(prompt)), ensure_ascii=False) + "\n"
    try:
        _, output, errors = await asyncio.gather(_write(stdin, prompt_line.encode()), _tail(stdout), _tail(stderr))
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if status:
        raise RuntimeError(f"{command[0]} exited with status {status}: {_last_line(errors)[:200] or 'no message'}")
    line = _last_line(output)
    try:
        reward = json.loads(line)
    except ValueError:
        reward = line
    if isinstance(reward, (str, list)):
        raise RuntimeError(
            f"the output of {command[0]} ends with {line[:100]!r}; the last line must be the reward: a number, or a "
            "JSON object that maps names to numbers"
        )
    return reward


async def _write(pipe: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the command does not read its input
        pipe.write(text)
        await pipe.drain()
    pipe.close()


async def _tail(pipe: asyncio.StreamReader) -> bytes:
    """Return the end of an output."""
    tail = b""
    while piece := await pipe.read(OUTPUT_BYTES):
        tail = (tail + piece)[-OUTPUT_BYTES:]
    return tail


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
