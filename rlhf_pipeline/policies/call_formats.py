"""How a chat template takes tool calls and their results, determined by rendering some before anything is sampled.

Templates differ: arguments are an object or text; calls and results have ids or none; a turn has one call or several.
The form is found with calls of the tools that the run shows, and their results. What the template cannot show is
reported before sampling, so a conversation meets no template error that its own turns did not cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.chat import Message, rendered_prompt, reply_text

_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Mistral's templates accept no other length."""
_QUESTION: Final = {"role": "user", "content": "What is 6 x 7?"}
_RESULTS: Final = ("result-of-the-first-call", "result-of-the-second-call")


def call_id(seed: int, turn: int, position: int) -> str:
    """Return the id of a call whose format has none: nine letters and digits.

    Args:
        seed: of the run.
        turn: the number of the turn, from 1.
        position: of the call in the turn, from 0.

    >>> call_id(0, 1, 0), call_id(0, 1, 0) == call_id(0, 1, 0), call_id(0, 1, 1) == call_id(0, 2, 0)
    ('uvWYZhosH', True, False)
    """
    number = int.from_bytes(hashlib.blake2b(f"call {seed} {turn} {position}".encode(), digest_size=8).digest(), "big")
    return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(_ID_LENGTH))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """The form in which a chat template takes calls.

    Attributes:
        has_text_arguments: arguments are JSON text; otherwise an object.
        most_calls: the most calls of a turn; None sets no limit.
    """

    has_text_arguments: bool = False
    most_calls: int | None = None

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message in this form; one without calls is unchanged."""
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if self.has_text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self.has_text_arguments:
            with contextlib.suppress(ValueError):  # text that is not JSON is left to the template
                arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


def with_call_ids(replies: Sequence[dict[str, Any]], turn: Message) -> list[dict[str, Any]]:
    """Return replies in which each result names the call that it answers, by order.

    >>> turn = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    >>> with_call_ids([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}], turn)[1]["tool_call_id"]
    'b'
    """
    names = iter([call.get("id") for call in turn.get("tool_calls") or ()])
    joined: list[dict[str, Any]] = []
    for reply in replies:
        name = next(names, None) if reply["role"] == "tool" else None
        joined.append({"tool_call_id": name, **reply} if name is not None else reply)
    return joined


def refused_calls(
    call_format: CallFormat,
    codec: Any,
    messages: Sequence[Message],
    turn: Message,
    *,
    tools: Sequence[Any],
    template: Mapping[str, Any],
    ends: Sequence[str],
) -> str | None:
    """Return why the chat template cannot show the calls of a turn, in a sentence; None if it can."""
    calls = turn["tool_calls"]
    if call_format.most_calls is not None and len(calls) > call_format.most_calls:
        return f"the turn has {len(calls)} calls; the chat template shows {call_format.most_calls} in a turn"
    tool_messages = [
        {"role": "tool", "name": call["function"]["name"], "content": content}
        for call, content in zip(calls, itertools.cycle(_RESULTS), strict=False)
    ]
    try:
        reply_text(
            codec, messages, with_call_ids(tool_messages, turn), turn=turn, tools=tools, template=template, ends=ends
        )
    except (DataError, DefinitionError) as error:
        return " ".join(str(error).split())[:200]
    return None


def call_format_of(
    codec: Any, tools: Sequence[Mapping[str, Any]], *, template: Mapping[str, Any] | None = None, ends: Sequence[str]
) -> CallFormat:
    """Return how a chat template takes calls of these tools.

    Args:
        codec: a tokenizer with a chat template.
        tools: the JSON schemas that the run shows.
        template: arguments of the template.
        ends: texts that end a turn of the policy.

    Raises:
        DefinitionError: the template shows no call with its result, no result after a turn without a call, or no reply
            of a user.
    """
    probe = _Probe(codec, tools, template or {}, ends)
    flaws, has_text_arguments = min((probe.flaws(1, as_text=as_text), as_text) for as_text in (False, True))
    if flaws >= _REFUSED:
        raise DefinitionError(
            f"{name_of(codec)} cannot show a tool call and its result ({probe.refusal}); use the template of a model "
            "that can call tools."
        )
    if flaws >= _ESCAPED:
        raise DefinitionError(
            f"{name_of(codec)} escapes the arguments of a tool call twice, whether they are an object or text; correct "
            "the template."
        )
    probe.check_malformed()
    several = probe.flaws(2, as_text=has_text_arguments)
    return CallFormat(has_text_arguments=has_text_arguments, most_calls=1 if several > flaws else None)


def name_of(codec: Any) -> str:
    """Return what a message calls a chat template."""
    name = getattr(codec, "name_or_path", "")
    return f"the chat template of {name}" if name else "the chat template"


_UNSEEN, _PYTHON, _ESCAPED, _REFUSED = 1, 2, 4, 8
"""Flaws of a form of calls, by weight: calls are not written; arguments are written as Python does; they are quoted
twice; the template rejects them."""


class _Probe:
    """Renders calls of a run's tools, to see which form the template takes."""

    def __init__(
        self, codec: Any, tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any], ends: Sequence[str]
    ) -> None:
        self._codec, self._tools, self._template, self._ends = codec, tools, template, ends
        functions = [cast("Mapping[str, Any]", tool.get("function", tool)) for tool in tools]
        self._calls = [
            {"name": function["name"], "arguments": _arguments(function, number)}
            for number, function in enumerate((functions[0], functions[1 % len(functions)]))
        ]
        self.refusal: Exception | None = None
        """The reason why the template rejected the first conversation."""

    def flaws(self, count: int, *, as_text: bool) -> int:
        """Return what is wrong with so many calls whose arguments are text or objects, as a sum of flaws."""
        turn = self._turn(count, CallFormat(has_text_arguments=as_text))
        try:
            head, tail = self._reply(turn, self._tool_messages(turn))
        except (DataError, DefinitionError) as error:
            self.refusal = self.refusal or error
            return _REFUSED
        prompt = rendered_prompt(self._codec, [_QUESTION], tools=self._tools, template=self._template)
        text = (head + tail)[len(prompt) if head.startswith(prompt) else 0 :]
        flaws = 0
        for call in self._calls[:count]:
            names = [*call["arguments"]]
            flaws |= _UNSEEN * any(mark not in text for mark in _marks(call["arguments"]))
            flaws |= _PYTHON * any(f"{{'{name}':" in text for name in names[:1])
            flaws |= _ESCAPED * any(f'\\"{name}\\"' in text for name in names)
        return flaws

    def check_malformed(self) -> None:
        """Check that a turn without a readable call can be answered, by the tool or at least by the user."""
        turn = {"role": "assistant", "content": "It is 42."}
        try:
            self._reply(turn, [{"role": "user", "content": _RESULTS[0]}])
        except (DataError, DefinitionError) as error:
            raise DefinitionError(
                f"{name_of(self._codec)} cannot show a reply to a turn without a call, so it cannot show a reply to a "
                f"malformed call ({error})."
            ) from error

    def answered_call(self, call_format: CallFormat) -> list[dict[str, Any]]:
        """Return a turn with a call, and its result."""
        turn = self._turn(1, call_format)
        return [turn, *self._tool_messages(turn)]

    def _turn(self, count: int, call_format: CallFormat) -> dict[str, Any]:
        calls = [
            {"id": call_id(0, 1, position), "type": "function", "function": call}
            for position, call in enumerate(self._calls[:count])
        ]
        return call_format.message({"role": "assistant", "content": "", "tool_calls": calls})

    def _tool_messages(self, turn: Message) -> list[dict[str, Any]]:
        tool_messages = [
            {"role": "tool", "name": call["name"], "content": content}
            for call, content in zip(self._calls, _RESULTS, strict=True)
        ]
        return with_call_ids(tool_messages[: len(turn["tool_calls"])], turn)

    def _reply(self, turn: Message, replies: Sequence[Message]) -> tuple[str, str]:
        return reply_text(
            self._codec,
            [_QUESTION],
            replies,
            turn=turn,
            tools=self._tools,
            template=self._template,
            ends=self._ends,
        )


def _arguments(function: Mapping[str, Any], call: int) -> dict[str, Any]:
    """Return arguments that a tool's schema allows, those of each call different where that is possible."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {name: _argument(schema, name, call) for name, schema in properties.items()}


def _argument(schema: Any, name: str, call: int) -> Any:
    """Return a value for one argument."""
    schema = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
    if schema.get("enum"):
        return schema["enum"][call % len(schema["enum"])]
    kind: Any = schema.get("type", "string")
    kinds = cast("list[Any]", kind) if isinstance(kind, list) else [kind]
    number = 70_001 + 1_000 * call + sum(map(ord, name)) % 1_000
    values: dict[Any, Any] = {"integer": number, "number": number, "boolean": True, "array": [], "object": {}}
    return values.get(next(iter(kinds), "string"), f"{name}-{number}")


def _marks(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is to be seen of arguments, however a template writes them."""
    for value in arguments.values():
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            yield str(value)


def rewritten_history(
    codec: Any,
    *,
    template: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    call_format: CallFormat | None = None,
    ends: Sequence[str] = (),
) -> str | None:
    """Return how a chat template rewrites earlier turns once later ones follow, in a sentence; None if it does not.

    A row keeps the turns as sampled, so with such a template the policy is trained on conversations that
    the template alone would show otherwise.

    Args:
        codec: a tokenizer with a chat template.
        template: arguments of the template.
        tools: the JSON schemas that the run shows.
        call_format: how the template takes calls of these tools; None if there are none.
        ends: texts that end a turn of the policy.
    """
    schemas, more = list(tools) or None, {"role": "user", "content": "Sure?"}
    texts = {"turns": "It is 42.", "the thinking of turns": "<think>\nSix sevens.\n</think>\n\nIt is 42."}
    with_tools = " where tools are shown" if tools else ""
    try:
        first = rendered_prompt(codec, [_QUESTION], tools=schemas, template=template)
        for what, text in texts.items():
            messages = [_QUESTION, {"role": "assistant", "content": text}, more]
            if not rendered_prompt(codec, messages, tools=schemas, template=template).startswith(first + text):
                return _rewrites(codec, what, with_tools)
        if call_format is not None:
            messages = [_QUESTION, *_Probe(codec, tools, template or {}, ends).answered_call(call_format)]
            before = rendered_prompt(codec, messages, tools=schemas, template=template)
            messages += [{"role": "assistant", "content": "It is 42."}, more]
            if not rendered_prompt(codec, messages, tools=schemas, template=template).startswith(before):
                return _rewrites(codec, "turns with calls", with_tools)
    except DataError as error:
        return f"a conversation of several turns is impossible{with_tools}: {error}"
    return None


def _rewrites(codec: Any, what: str, where: str) -> str:
    return (
        f"{name_of(codec)} rewrites {what} when a later turn follows{where}. Rows keep every turn as it was sampled, "
        "so the policy reads tokens that the template would not show. Serve the model in the same way, or use a "
        "template that keeps earlier turns."
    )
