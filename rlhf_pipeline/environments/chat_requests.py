"""Requests for chat completions in OpenAI's form: which parameters count, and the forms of responses and errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rlhf_pipeline.user_code.outputs import checked_messages, plain_json

MOST_CHOICES: Final = 16
"""The largest `n` of a request."""
ROLES: Final = frozenset({"system", "user", "assistant", "tool"})

HONOURED: Final = "honoured"
IGNORED: Final = "ignored"
REJECTED: Final = "rejected"


class ChatError(Exception):
    """An error that a client receives.

    Args:
        message: what is wrong, and what to do.
        param: the parameter that it is about.
        code: a name that programs can compare.
        status: of HTTP.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API returns it.

        >>> ChatError("n is 99", param="n").body()["error"]["type"]
        'invalid_request_error'
        """
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """How one parameter of a request is treated."""

    name: str
    treatment: str
    """`honoured`, `ignored` or `rejected`."""
    rule: str
    """The details of the treatment, for the table of docs/environments.md."""
    accepts: Callable[[Any], bool] = lambda value: True
    """Whether a value is accepted; a rejected parameter accepts the values that have no effect."""


def _is_off(value: Any) -> bool:
    """Return whether a value switches its parameter off."""
    return value is None or value is False or value == 0 or value in ([], {}, "")


def _is_auto(value: Any) -> bool:
    return value is None or value in ("auto", "none")


def _is_plain_text(value: Any) -> bool:
    return value is None or value == {"type": "text"} or value == ["text"]


def _is_true(value: Any) -> bool:
    return value is None or value is True


PARAMETERS: Final = (
    Parameter(
        name="messages",
        treatment=HONOURED,
        rule="text, or a list of text parts; images, audio and files are rejected. `developer` is treated as `system`",
    ),
    Parameter(name="model", treatment=IGNORED, rule="any name is accepted; the response repeats it"),
    Parameter(name="tools", treatment=HONOURED, rule="functions; the chat template presents them to the policy"),
    Parameter(
        name="tool_choice",
        treatment=HONOURED,
        rule="`auto` and `none` are accepted; with `none`, the policy does not receive the tools. `required` and a "
        "named function are rejected",
        accepts=_is_auto,
    ),
    Parameter(
        name="parallel_tool_calls",
        treatment=REJECTED,
        rule="`true`, the default, is accepted, because a policy may write several calls",
        accepts=_is_true,
    ),
    Parameter(name="n", treatment=HONOURED, rule=f"1 to {MOST_CHOICES} samples; each sample is a row"),
    Parameter(
        name="seed",
        treatment=HONOURED,
        rule="a different seed draws a different sample; the sample also depends on the seed of the run",
    ),
    Parameter(name="stream", treatment=HONOURED, rule="the finished text is sent in chunks"),
    Parameter(name="stream_options", treatment=HONOURED, rule="`include_usage` is supported"),
    Parameter(
        name="temperature",
        treatment=IGNORED,
        rule="`collect.temperature` applies; the stored log-probs are computed at this temperature",
    ),
    Parameter(name="top_p", treatment=IGNORED, rule="`collect.top_p` applies"),
    Parameter(
        name="max_tokens",
        treatment=IGNORED,
        rule="`collect.max_new_tokens` is the limit; the `finish_reason` of a truncated completion is `length`",
    ),
    Parameter(name="max_completion_tokens", treatment=IGNORED, rule="see `max_tokens`"),
    Parameter(name="stop", treatment=REJECTED, rule="set `collect.stop`", accepts=_is_off),
    Parameter(
        name="response_format",
        treatment=REJECTED,
        rule='`{"type": "text"}` is accepted; sampling is not constrained',
        accepts=_is_plain_text,
    ),
    Parameter(
        name="logprobs",
        treatment=REJECTED,
        rule="`false` is accepted; log-probs are stored with the row",
        accepts=_is_off,
    ),
    Parameter(name="top_logprobs", treatment=REJECTED, rule="log-probs are stored with the row", accepts=_is_off),
    Parameter(
        name="presence_penalty", treatment=REJECTED, rule="it would change log-probs; 0 is accepted", accepts=_is_off
    ),
    Parameter(
        name="frequency_penalty", treatment=REJECTED, rule="it would change log-probs; 0 is accepted", accepts=_is_off
    ),
    Parameter(name="logit_bias", treatment=REJECTED, rule="it would change log-probs", accepts=_is_off),
    Parameter(name="functions", treatment=REJECTED, rule="use `tools`", accepts=_is_off),
    Parameter(name="function_call", treatment=REJECTED, rule="use `tool_choice`", accepts=_is_auto),
    Parameter(name="modalities", treatment=REJECTED, rule='`["text"]` is accepted', accepts=_is_plain_text),
    Parameter(name="audio", treatment=REJECTED, rule="the policy generates only text", accepts=_is_off),
    Parameter(name="prediction", treatment=REJECTED, rule="the policy generates only text", accepts=_is_off),
    Parameter(name="web_search_options", treatment=REJECTED, rule="the policy generates only text", accepts=_is_off),
    *(
        Parameter(name=name, treatment=IGNORED, rule=rule)
        for name, rule in (
            ("user", "a label without effect"),
            ("metadata", "a label without effect"),
            ("store", "every row is stored"),
            ("service_tier", "there is only one tier"),
            ("safety_identifier", "a label without effect"),
            ("prompt_cache_key", "a label without effect"),
            ("prompt_cache_retention", "a label without effect"),
            ("reasoning_effort", "the policy does not receive it"),
            ("verbosity", "the policy does not receive it"),
        )
    ),
)
"""The recognised parameters; any other parameter is rejected."""
_BY_NAME: Final = {parameter.name: parameter for parameter in PARAMETERS}
_SAMPLING: Final = ("temperature", "top_p", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One request, checked.

    Attributes:
        messages: as templates read them: contents are text, arguments of calls are parsed.
        tools: the tools to show.
        count: the number of samples.
        model: the name that the response repeats.
        is_stream: the response is sent in chunks.
        has_usage: a stream ends with the numbers of tokens.
        digest: of the whole body; a request with an equal one is a retry.
        variant: of the seed; another one draws another sample.
        ignored: the parameters of sampling that are ignored.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    count: int = 1
    model: str = "policy"
    is_stream: bool = False
    has_usage: bool = False
    digest: str = ""
    variant: str = ""
    ignored: tuple[str, ...] = ()


def parse(body: bytes) -> ChatRequest:
    """Check the body of a request.

    Raises:
        ChatError: it is not JSON, or has a parameter that is rejected.
    """
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ChatError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ChatError("the body is not a JSON object")
    present = {name: value for name, value in cast("dict[str, Any]", fields).items() if value is not None}
    for name, value in present.items():
        parameter = _BY_NAME.get(name)
        if parameter is None:
            raise ChatError(f"unrecognized request argument: {name}", param=name, code="unknown_parameter")
        if not parameter.accepts(value):
            raise ChatError(
                f"{name}={json.dumps(value)[:60]} is not supported: {parameter.rule}",
                param=name,
                code="unsupported_value",
            )
    count = present.get("n", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_CHOICES:
        raise ChatError(
            f"n is {count!r:.20}; it must be between 1 and {MOST_CHOICES}", param="n", code="unsupported_value"
        )
    options = present.get("stream_options")
    return ChatRequest(
        messages=_messages(present.get("messages")),
        tools=() if present.get("tool_choice") == "none" else _tools(present.get("tools", [])),
        count=count,
        model=str(present.get("model", "policy")),
        is_stream=present.get("stream") is True,
        has_usage=isinstance(options, Mapping) and cast("Mapping[str, Any]", options).get("include_usage") is True,
        digest=_digest(present),
        variant=json.dumps(present["seed"]) if "seed" in present else "",
        ignored=tuple(name for name in _SAMPLING if name in present),
    )


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _messages(sent: Any) -> tuple[dict[str, Any], ...]:
    """Return messages as templates read them."""
    if not isinstance(sent, list) or not sent:
        raise ChatError("messages must be a list with at least one message", param="messages")
    try:
        messages = checked_messages(sent, "messages")
        return tuple(_message(message, messages[:place]) for place, message in enumerate(messages))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ChatError(f"messages cannot be read: {error}", param="messages", code="invalid_value") from error


def _message(message: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one message; a tool's gets the name of the call that it answers."""
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ROLES:
        raise ValueError(f"the role {message['role']!r:.40} is not one of {', '.join(sorted(ROLES))}, developer")
    parsed: dict[str, Any] = {"role": role, "content": message["content"]}
    if message.get("tool_calls"):
        parsed["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if message.get("function_call"):
        raise ValueError("function_call is not supported: use tool_calls")
    if role == "tool" and message.get("tool_call_id"):
        parsed["tool_call_id"] = message["tool_call_id"]
        names = [
            call["function"]["name"]
            for earlier in before
            for call in earlier.get("tool_calls") or ()
            if call.get("id") == message["tool_call_id"]
        ]
        parsed |= {"name": names[-1]} if names else {}
    if message.get("name"):
        parsed["name"] = str(message["name"])
    return parsed


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with parsed arguments."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        arguments = plain_json(json.loads(arguments)) if arguments.strip() else {}
    function = {"name": str(call["function"]["name"]), "arguments": arguments or {}}
    return {"type": "function", "function": function} | ({"id": str(call["id"])} if call.get("id") else {})


def _tools(sent: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools to show."""
    tools = cast("list[Any]", sent) if isinstance(sent, list) else [None]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(cast("Any", function).get("name"), str):
            raise ChatError("each tool must have the type 'function' and a function that has a name", param="tools")
    return tuple(plain_json(tool) for tool in tools)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatChoice:
    """One sampled message."""

    message: Mapping[str, Any]
    """In the form of `Turn`: text, and calls with parsed arguments and ids."""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatResponse:
    """The response to one request."""

    request: ChatRequest
    choices: Sequence[ChatChoice] = field(default_factory=list[ChatChoice])

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.request.digest[:24]}", "created": 0, "model": self.request.model}

    @property
    def _usage(self) -> dict[str, int]:
        prompt = max((choice.prompt_tokens for choice in self.choices), default=0)
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def body(self) -> dict[str, Any]:
        """Return the response as one JSON object."""
        choices = [
            {"index": place, "message": _wire(choice.message), "finish_reason": choice.finish_reason, "logprobs": None}
            for place, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage}

    def chunks(self) -> list[dict[str, Any]]:
        """Return the response as the chunks of a stream: each choice as a role, its text and calls, and its end."""
        pieces: list[dict[str, Any]] = []
        for place, choice in enumerate(self.choices):
            message = _wire(choice.message)
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]
            deltas = [{"role": "assistant", "content": message["content"]}]
            deltas += [{"tool_calls": [call]} for call in calls]
            pieces += [{"index": place, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
            pieces.append({"index": place, "delta": {}, "finish_reason": choice.finish_reason, "logprobs": None})
        chunks = [{**self._head, "object": "chat.completion.chunk", "choices": [piece]} for piece in pieces]
        if self.request.has_usage:
            chunks.append({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})
        return chunks


def _wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI's API returns it: arguments of calls are text."""
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or ()
    ]
    return wire | ({"tool_calls": calls} if calls else {})


def parameter_table() -> str:
    """Return the table of parameters in Markdown."""
    head = ["| parameter | treatment | details |", "|---|---|---|"]
    return "\n".join(
        head + [f"| `{parameter.name}` | {parameter.treatment} | {parameter.rule} |" for parameter in PARAMETERS]
    )
