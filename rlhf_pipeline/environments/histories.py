"""Which stored turn a list of messages continues; messages are compared by their meaning.

A program sends the whole conversation with each request. The turns of the policy in it were sampled before, so their
tokens are known, if the messages are exactly those that were sent and returned. A turn is therefore found by all
messages up to it, and not by its own text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

Message = Mapping[str, Any]
Place = TypeVar("Place")


def canonical(message: Message) -> str:
    """Return the parts of a message that decide whether it is the same: role, text, calls and the id that it answers.

    Arguments of calls are compared as values, so their text may be written in another way. Names of speakers and
    thinking, which clients do not send back, do not count.

    >>> call = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    >>> one = {"role": "assistant", "content": None, "tool_calls": [call]}
    >>> parsed = {"name": "add", "arguments": {"a": 1, "b": 2}}
    >>> other = {"role": "assistant", "content": "", "tool_calls": [{"id": "a1", "function": parsed}]}
    >>> canonical(one) == canonical(other), canonical({"role": "user", "content": "4 "})
    (True, '["user", "4 ", [], null]')
    """
    calls = [_call(call) for call in cast("Iterable[Any]", message.get("tool_calls") or ())]
    content = message.get("content")
    return json.dumps(
        [message["role"], "" if content is None else content, calls, message.get("tool_call_id")],
        ensure_ascii=False,
        sort_keys=True,
    )


def _call(call: Any) -> list[Any]:
    """Return name, arguments and id of a call."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # text that is not JSON is compared as text
            arguments = json.loads(arguments)
    return [function["name"], arguments or {}, call.get("id")]


@dataclass(frozen=True, slots=True)
class Continued(Generic[Place]):
    """The turn that a list of messages continues."""

    place: Place | None = None
    """The position of the newest returned turn that they continue; None if they do not continue any."""
    count: int = 0
    """The number of messages up to that turn."""
    is_edited: bool = False
    """Whether they contain a returned turn with different text or after different messages."""


@dataclass(slots=True)
class Histories(Generic[Place]):
    """The turns that were returned in one conversation, each by the messages up to it.

    >>> asked, turn = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    >>> histories = Histories[int]()
    >>> histories.add([asked, turn], place=7)
    >>> histories.find([asked, turn, {"role": "user", "content": "Sure?"}])
    Continued(place=7, count=2, is_edited=False)
    >>> histories.find([asked, {"role": "assistant", "content": "4 "}, {"role": "user", "content": "Sure?"}])
    Continued(place=None, count=0, is_edited=True)
    """

    places: dict[str, Place] = field(default_factory=dict[str, Place])
    """The positions, by the digest of the messages up to a turn and of the tools that were shown with them."""
    prompt_digests: set[str] = field(default_factory=set[str])
    """The digests of the messages before turns."""
    turns: set[str] = field(default_factory=set[str])
    """The turns, in canonical form."""
    num_turns: int = 0

    def __len__(self) -> int:
        return self.num_turns

    def add(self, messages: Sequence[Message], place: Place, *, tools: Sequence[Any] = ()) -> None:
        """Note a returned turn, the last of these messages; of equal histories the first one counts."""
        *before, last = _digests(messages, tools)
        self.places.setdefault(last, place)
        self.prompt_digests.update(before[-1:])
        self.turns.add(canonical(messages[-1]))
        self.num_turns += 1

    def find(self, messages: Sequence[Message], *, tools: Sequence[Any] = ()) -> Continued[Place]:
        """Return the newest turn that these messages continue."""
        place, count, digests = None, 0, [*_digests(messages, tools)]
        for number, digest in enumerate(digests, start=1):
            if digest in self.places:
                place, count = self.places[digest], number
        is_edited = any(
            message["role"] == "assistant"
            and (canonical(message) in self.turns or (number > 0 and digests[number - 1] in self.prompt_digests))
            for number, message in enumerate(messages)
            if number >= count
        )
        return Continued(place, count, is_edited)


def _digests(messages: Sequence[Message], tools: Sequence[Any]) -> Iterator[str]:
    """Yield the digest of each beginning of a conversation."""
    state = hashlib.sha256(json.dumps([*tools], sort_keys=True).encode())
    for message in messages:
        state.update(canonical(message).encode("utf-8", "replace") + b"\n")
        yield state.hexdigest()
