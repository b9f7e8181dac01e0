"""Serves chat completions to programs on localhost: each conversation has a key, and its requests wait for the policy.

There is one server per process. A program sends requests to it, in OpenAI's form; the environment of its conversation
takes them one after the other, and the policy's turns are the responses. The server knows neither tokens nor models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rlhf_pipeline.environments.chat_requests import ChatChoice, ChatError, ChatRequest, ChatResponse, parse

MOST_BYTES: Final = 16 << 20
"""Maximum number of bytes of a request body, and of the waiting requests of one conversation."""
MOST_WAITING: Final = 64
"""Maximum number of waiting samples of one conversation; further requests are rejected."""
BODY_S: Final = 60.0
"""Seconds within which the body of a request must arrive."""
_IDLE_S: Final = 600
"""Seconds after which a connection without a request is closed."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Repeats = Literal["retry", "sample"]


@dataclass(frozen=True, slots=True, eq=False)
class ChatSample:
    """One sample that a request requires."""

    request: ChatRequest
    number: int
    """The index of the sample among the samples of equal requests, starting at 0."""
    exchange: Exchange


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and the response to it."""

    request: ChatRequest
    size: int
    response: Future[ChatResponse] = field(default_factory=Future[ChatResponse])
    choices: dict[int, ChatChoice] = field(default_factory=dict[int, ChatChoice])


class ChatSession:
    """The requests of one conversation; safe for use from several threads.

    Args:
        repeats: whether a request with the body of an earlier one is a retry of it, which receives the same response
            (`retry`), or a new request unless its client marks it as a retry (`sample`).
    """

    def __init__(self, repeats: Repeats = "retry") -> None:
        self.repeats = repeats
        self.num_repeats = 0
        """The number of requests that received the response to an earlier request without being marked as a retry."""
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], ChatSample] = {}
        self._newest: dict[str, Exchange] = {}
        """The newest exchange for each digest of a request body."""
        self._counts: dict[str, int] = {}
        """The number of samples for each digest of a request body."""
        self._open: set[Exchange] = set()
        self._refusal: ChatError | None = None
        self._wake: Callable[[], None] = lambda: None

    # The server's side

    def submit(self, request: ChatRequest, *, key: str, size: int, is_retry: bool) -> Future[ChatResponse]:
        """Accept a request; the result is the response to it, or to an earlier request of which it is a retry.

        Args:
            request: the request.
            key: with which it was sent.
            size: bytes of its body.
            is_retry: its client marks it as a retry.

        Raises:
            ChatError: the conversation has ended, or too many requests wait.
        """
        with self._lock:
            earlier = self._newest.get(request.digest)
            if earlier is not None and (is_retry or self.repeats == "retry"):
                self.num_repeats += not is_retry
                return earlier.response
            if self._refusal is not None:
                raise self._refusal
            num_samples = request.count + sum(pending.request.count for pending in self._open)
            num_bytes = size + sum(pending.size for pending in self._open)
            if num_samples > MOST_WAITING or num_bytes > MOST_BYTES:
                raise ChatError(
                    f"{num_samples} samples and {num_bytes} bytes of this conversation would be queued; the limits "
                    f"are {MOST_WAITING} and {MOST_BYTES}. Send fewer requests at the same time.",
                    code="too_many_requests",
                    status=429,
                )
            exchange = Exchange(request, size)
            first = self._counts.get(request.digest, 0)
            self._counts[request.digest] = first + request.count
            self._newest[request.digest] = exchange
            self._open.add(exchange)
            for number in range(first, first + request.count):
                self._waiting[request.digest, number] = ChatSample(request, number, exchange)
            wake = self._wake
        wake()
        return exchange.response

    # The environment's side

    async def arrives(self, program: asyncio.Future[Any]) -> None:
        """Wait until a request waits, or the program has ended."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._waiting:
                return
            self._wake = functools.partial(complete, loop, arrived)
        await asyncio.wait({arrived, program}, return_when=asyncio.FIRST_COMPLETED)

    def take(self) -> ChatSample | None:
        """Return the next sample to draw; of several, the choice does not depend on which arrived first."""
        with self._lock:
            return self._waiting.pop(min(self._waiting)) if self._waiting else None

    def answer(self, sample: ChatSample, choice: ChatChoice) -> None:
        """Return a sample to the program; the response is sent when it has all of its choices."""
        exchange = sample.exchange
        exchange.choices[sample.number] = choice
        if len(exchange.choices) == exchange.request.count and not exchange.response.done():
            with self._lock:
                self._open.discard(exchange)
            choices = [exchange.choices[number] for number in sorted(exchange.choices)]
            exchange.response.set_result(ChatResponse(request=exchange.request, choices=choices))

    def close(self, refusal: ChatError) -> None:
        """Reject the requests that wait, and all later ones."""
        with self._lock:
            self._refusal = self._refusal or refusal
            exchanges, self._open, self._waiting = self._open, set(), {}
        for exchange in exchanges:
            if not exchange.response.done():
                exchange.response.set_exception(refusal)


def complete(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> None:
    """Complete a future of a loop from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(lambda: None if arrived.done() else arrived.set_result(None))


class ChatServer:
    """The server of a process; see `chat_server`."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        door = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = f"http://127.0.0.1:{door.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, args=(door,), name="chat-server", daemon=True).start()

    def open(self, session: ChatSession, key: str | None = None) -> str:
        """Pass requests with a key to a conversation, and return the key: a new secret if none is given."""
        key = key or f"sk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close(self, keys: Iterable[str]) -> None:
        """Forget keys."""
        for key in keys:
            self._sessions.pop(key, None)

    def _serve(self, door: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(
            self._respond,
            log_level="error",
            log_config=None,
            lifespan="off",
            ws="none",
            interface="asgi3",
            timeout_keep_alive=_IDLE_S,
        )
        asyncio.run(uvicorn.Server(config).serve(sockets=[door]))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        try:
            response = await self._response(scope, receive)
        except ChatError as error:
            # A rejected request stays rejected, so clients need not repeat it.
            head = [(b"x-should-retry", b"false"), (b"connection", b"close")]
            await _send(send, error.status, json.dumps(error.body()), head=head)
            return
        if not isinstance(response, ChatResponse) or not response.request.is_stream:
            body = response.body() if isinstance(response, ChatResponse) else response
            await _send(send, 200, json.dumps(body))
            return
        events = [*map(json.dumps, response.chunks()), "[DONE]"]
        await _send(send, 200, "".join(f"data: {event}\n\n" for event in events), kind=b"text/event-stream")

    async def _response(self, scope: Scope, receive: Receive) -> ChatResponse | dict[str, Any]:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        key, session = self._session_of(headers)
        method_and_path = f"{scope['method']} {scope['path']}"
        if method_and_path == "GET /v1/models":
            return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": ""}]}
        if method_and_path != "POST /v1/chat/completions":
            raise ChatError(
                f"there is no endpoint {method_and_path[:80]!r}; send POST /v1/chat/completions", status=404
            )
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(receive)
        except TimeoutError:
            raise ChatError(f"the body did not arrive within {BODY_S:g} s", status=408) from None
        is_retry = headers.get("x-stainless-retry-count", "0") != "0"
        response = session.submit(parse(body), key=key, size=len(body), is_retry=is_retry)
        return await asyncio.wrap_future(_follow(response))

    def _session_of(self, headers: dict[str, str]) -> tuple[str, ChatSession]:
        """Return the key of a request and its conversation."""
        for key in (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-session-id", "")):
            if (session := self._sessions.get(key)) is not None:
                return key, session
        raise ChatError(
            "there is no conversation with this API key, or the conversation has ended; use the api_key that the "
            "program received",
            code="invalid_api_key",
            status=401,
        )


def _follow(response: Future[ChatResponse]) -> Future[ChatResponse]:
    """Return a future with the same outcome; a client that leaves cancels this one, and not the response."""
    following = Future[ChatResponse]()

    def on_done(done: Future[ChatResponse]) -> None:
        if not following.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            following.set_result(done.result())
        else:
            following.set_exception(error)

    response.add_done_callback(on_done)
    return following


async def _read(receive: Receive) -> bytes:
    """Read the body of a request."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ChatError("the client has disconnected")
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise ChatError(f"the body has more than {MOST_BYTES} bytes", code="request_too_large", status=413)
        if not message.get("more_body"):
            return bytes(body)


async def _send(
    send: Send,
    status: int,
    text: str,
    *,
    kind: bytes = b"application/json",
    head: list[tuple[bytes, bytes]] | None = None,
) -> None:
    body = text.encode()
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), length, *(head or [])]}
    )
    await send({"type": "http.response.body", "body": body})


_SERVER: ChatServer | None = None
"""One per process, so that its address does not depend on which caller starts it."""
_MAKING = threading.Lock()


def chat_server() -> ChatServer:
    """Return the server of this process; a forked process starts a separate one."""
    global _SERVER
    with _MAKING:
        if _SERVER is None:
            _SERVER = ChatServer()
        return _SERVER


def _forget() -> None:
    """In a forked process: the thread of its parent does not exist."""
    global _SERVER, _MAKING
    _SERVER, _MAKING = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
