"""Reading the tool calls of a sampled turn, with transformers' parser."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, cast

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.user_code.outputs import clean_text, plain_json, text_of

_LETTERS: Final = string.ascii_letters + string.digits
_ID_LETTERS: Final = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """A sampled turn as a message."""

    message: dict[str, Any]
    calls: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None


def schema_of(tool: Any) -> dict[str, Any]:
    """Return the JSON schema of a tool: its own, or what annotations and docstring of a function say."""
    if isinstance(tool, Mapping):
        return dict(cast("Mapping[str, Any]", tool))
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers has errors of its own for each thing that is missing
        name = getattr(tool, "__name__", type(tool).__name__)
        raise DefinitionError(f"the tool {name} cannot be described to the policy: {error}") from error


class TurnParser:
    """Reads turns in the form of one model."""

    def __init__(self, tokenizer: Any, model_type: str | None, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools]
        self.template: Any = getattr(tokenizer, "response_template", None)
        if self.template is None:
            from transformers.cli.serving.utils import get_response_template

            model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
            self.template = get_response_template(tokenizer, model)
        if self.template is None:
            raise DefinitionError(
                f"nothing says how a model of type {model_type} writes tool calls: its tokenizer has no "
                "response_template, and transformers has none for this type. Set tokenizer.response_template and save "
                "the tokenizer (trl.chat_template_utils.add_response_schema knows more types)."
            )

    def parse(self, turn_ids: Sequence[int], before: str, text: str) -> ParsedTurn:
        """Read a turn."""
        whole = self.tokenizer.decode(list(turn_ids), skip_special_tokens=False)
        plain = {"role": "assistant", "content": text}
        try:
            found: Any = self.tokenizer.parse_response(whole, self.template, prefix=before, tools=self.tools or None)
            message = {"content": "", **plain_json(found), "role": "assistant"}
            message["content"] = text_of(message["content"], "the turn")
            calls = [_call(item) for item in message.pop("tool_calls", None) or ()]
        except Exception as error:  # noqa: BLE001 - parsers of several formats read what a policy sampled: anything
            line = " ".join(clean_text(str(error)).split()) or type(error).__name__
            return ParsedTurn(message=plain, error=line[:200])
        if calls:
            # Templates read a name and arguments of each call, whatever the policy left out.
            message["tool_calls"] = [{"type": "function", "function": dict(call)} for call in calls]
        return ParsedTurn(message=message, calls=tuple(calls))


def with_ids(turn: ParsedTurn, name: str) -> ParsedTurn:
    """Return a turn whose calls have ids: nine letters and digits each, which the strictest templates accept.

    Args:
        turn: the turn.
        name: of the turn; the ids follow from it and from the places of the calls.
    """
    if not turn.calls:
        return turn
    ids = [_call_id(f"{name}/{place}") for place in range(len(turn.calls))]
    calls = tuple({"id": number, **call} for number, call in zip(ids, turn.calls, strict=True))
    written = [{**call, "id": number} for number, call in zip(ids, turn.message["tool_calls"], strict=True)]
    return replace(turn, message={**turn.message, "tool_calls": written}, calls=calls)


def _call_id(name: str) -> str:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return "".join(_LETTERS[number // len(_LETTERS) ** power % len(_LETTERS)] for power in range(_ID_LETTERS))


def _call(item: Any) -> Mapping[str, Any]:
    """Return name and arguments of a call.

    Raises:
        ValueError: it lacks a name, or its arguments are none.
    """
    call: Any = item.get("function") if isinstance(item, Mapping) else None
    given: Any = call if isinstance(call, Mapping) else {}
    arguments: Any = given.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = plain_json(json.loads(arguments))
    arguments = arguments or {}
    if not isinstance(given.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"a call is {call!a:.100}; it must have a name and arguments")
    return {"name": given["name"], "arguments": dict(cast("Mapping[str, Any]", arguments))}
