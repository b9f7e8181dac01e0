"""Reading the tool calls of a sampled turn, with transformers' parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.call_formats import CallFormat
from rlhf_pipeline.user_code.outputs import clean_text, plain_json, text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """A sampled turn as a message."""

    message: dict[str, Any]
    calls: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None


def schema_of(tool: Any) -> dict[str, Any]:
    """Return the JSON schema of a tool: its own, or one from the annotations and docstring of a function."""
    if isinstance(tool, Mapping):
        return dict(cast("Mapping[str, Any]", tool))
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers has its own errors for each thing that is missing
        name = getattr(tool, "__name__", type(tool).__name__)
        raise DefinitionError(f"the tool {name} cannot be described to the policy: {error}") from error


class TurnParser:
    """Reads turns in the form of one model.

    Args:
        tokenizer: with a response template, unless transformers has one for the type of model.
        model_type: of the model's config.
        tools: the JSON schemas that the run shows.
        call_format: how the chat template takes calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_type: str | None,
        tools: Sequence[Mapping[str, Any]],
        call_format: CallFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.call_format = call_format or CallFormat()
        self.tools = [dict(tool) for tool in tools]
        self.template: Any = getattr(tokenizer, "response_template", None)
        if self.template is None:
            from transformers.cli.serving.utils import get_response_template

            model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
            self.template = get_response_template(tokenizer, model)
        if self.template is None:
            raise DefinitionError(
                f"the tool-call format of models of type {model_type} is unknown: the tokenizer has no "
                "response_template, and transformers has none for this type. Set tokenizer.response_template and "
                "save the tokenizer (trl.chat_template_utils.add_response_schema supports more types)."
            )

    def parse(self, turn_ids: Sequence[int], before: str, text: str, id_of: Callable[[int], str]) -> ParsedTurn:
        """Read a turn.

        Args:
            turn_ids: its tokens.
            before: the text before it, which may decide how it is read.
            text: the turn as environments see it.
            id_of: returns the id of the call at a position of the turn, where the policy wrote none.
        """
        whole = self.tokenizer.decode(list(turn_ids), skip_special_tokens=False)
        plain = {"role": "assistant", "content": text}
        try:
            parsed: Any = self.tokenizer.parse_response(whole, self.template, prefix=before, tools=self.tools or None)
            message = {"content": "", **plain_json(parsed), "role": "assistant"}
            message["content"] = text_of(message["content"], "the turn")
            calls = [_call(item) for item in message.pop("tool_calls", None) or ()]
        except Exception as error:  # noqa: BLE001 - parsers of several formats read what a policy sampled: anything
            line = " ".join(clean_text(str(error)).split()) or type(error).__name__
            return ParsedTurn(message=plain, error=line[:200])
        calls = [{"id": id_of(position), **call} for position, call in enumerate(calls)]
        if calls:
            # Templates read a name and arguments of each call, whatever the policy omitted.
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        return ParsedTurn(message=self.call_format.message(message), calls=tuple(calls))


def _call(item: Any) -> Mapping[str, Any]:
    """Return name and arguments of a call, and its id if the policy wrote one.

    Raises:
        ValueError: it lacks a name, or its arguments are none.
    """
    call: Any = item.get("function") if isinstance(item, Mapping) else None
    function: Any = call if isinstance(call, Mapping) else {}
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = plain_json(json.loads(arguments))
    arguments = arguments or {}
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"a tool call must have a name and arguments, got {call!a:.100}")
    read = {"name": function["name"], "arguments": dict(cast("Mapping[str, Any]", arguments))}
    sampled_id = item.get("id")
    return {"id": sampled_id, **read} if isinstance(sampled_id, str) and sampled_id else read
