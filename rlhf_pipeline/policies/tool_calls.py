"""Reading the tool calls of a sampled turn, with transformers' parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from rlhf_pipeline.errors import DefinitionError


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
        try:
            found = self.tokenizer.parse_response(whole, self.template, prefix=before, tools=self.tools or None)
        except (ValueError, TypeError, LookupError) as error:
            line = " ".join(str(error).split())
            return ParsedTurn(message={"role": "assistant", "content": text}, error=line[:200])
        message = {"role": "assistant", "content": "", **cast("dict[str, Any]", found)}
        calls: list[Mapping[str, Any]] = []
        for item in message.get("tool_calls") or ():
            call: Any = item.get("function") if isinstance(item, Mapping) else None
            given: Any = call if isinstance(call, Mapping) else {}
            arguments = given.get("arguments") or {}
            if not isinstance(given.get("name"), str) or not isinstance(arguments, Mapping):
                error = f"a call is {call!r:.100}; it must have a name and arguments"
                return ParsedTurn(message={"role": "assistant", "content": text}, error=error)
            calls.append({"name": given["name"], "arguments": dict(arguments)})
        return ParsedTurn(message=message, calls=tuple(calls))
