"""Replies under the chat templates that models ship (TRL's copies): a row is what the template renders."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.chat import encode_prompt, encode_reply, rewrites_history

FAMILIES: dict[str, tuple[str, tuple[str, str]]] = {
    "qwen2_5": ("<|im_start|> <|im_end|>", ("<|im_end|>", "<|im_end|>")),
    "qwen3": ("<|im_start|> <|im_end|>", ("<|im_end|>", "<|im_end|>")),
    "llama3_1": ("<|start_header_id|> <|end_header_id|> <|eot_id|>", ("<|eot_id|>", "<|eot_id|>")),
    "gemma4": ("<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response>", ("<turn|>", "<|tool_response>")),
    "gptoss": ("<|start|> <|message|> <|channel|> <|end|> <|return|> <|call|>", ("<|return|>", "<|call|>")),
    "glm4moe": ("<|user|> <|assistant|> <|observation|>", ("<|user|>", "<|observation|>")),
    "lfm2": ("<|im_start|> <|im_end|>", ("<|im_end|>", "<|im_end|>")),
}
"""By template: its special tokens, and what ends a turn that a user, or a tool, answers."""

CALL = {"type": "function", "function": {"name": "calc", "arguments": {"expression": "2+2"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculate.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "a sum"}}},
    },
}
ASKED = [{"role": "user", "content": "What is 2+2?"}]


def codec(name: str) -> Any:
    """A tokenizer with a character for each token and a template of TRL's."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = scratch_policy(alphabet, hidden_size=16, num_layers=1, num_heads=2).tokenizer
    tokenizer.add_tokens(FAMILIES[name][0].split(), special_tokens=True)
    tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    return tokenizer


@pytest.mark.peer
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answered_by", ["user", "tool"])
def test_a_row_is_what_the_template_renders(name, answered_by):
    """Prompt, sampled turn and reply are the template's text; or the template is named as one that rewrites turns."""
    tokenizer, by_tool = codec(name), answered_by == "tool"
    end, tools = FAMILIES[name][1][by_tool], [TOOL] if by_tool else None
    turn = {"role": "assistant", "content": "4"} | ({"content": "", "tool_calls": [CALL]} if by_tool else {})
    reply = {"role": answered_by, "content": "4?"} | ({"name": "calc", "tool_call_id": "1"} if by_tool else {})
    first = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, tools=tools)
    whole = tokenizer.apply_chat_template(
        [*ASKED, turn, reply], tokenize=False, add_generation_prompt=True, tools=tools
    )
    said = whole[len(first) :].partition(end)[0] + end if by_tool else f"4{end}"
    sampled = tokenizer.encode(said, add_special_tokens=False)
    ends = tokenizer.convert_tokens_to_ids([*FAMILIES[name][1]])
    after = encode_reply(tokenizer, ASKED, sampled, [reply], turn=turn, tools=tools, end_token_ids=ends)
    row = tokenizer.decode(encode_prompt(tokenizer, ASKED, tools=tools) + sampled + after)
    assert row == whole or "rewrites" in str(rewrites_history(tokenizer))
    if by_tool:
        assert row == whole


@pytest.mark.peer
def test_a_template_that_refuses_a_reply_is_one_error():
    """A tool's reply without a call before it: the template's own error, in a sentence."""
    with pytest.raises(DataError, match="the chat template refuses the messages"):
        encode_reply(codec("gptoss"), ASKED, [2], [{"role": "tool", "content": "4"}])
