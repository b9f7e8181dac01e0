"""Chat templates of model families, and how each family writes calls: those of TRL, of the faults, and published rules.

Not covered, as no template of theirs is in a package here: Command R and A, Llama 4, Hunyuan, Jamba, Seed-OSS, Step 3,
InternLM, Hermes 3 (its calls are those of Qwen 2.5) and Mistral's formats before version 7.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens are written with these characters
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

SHARED: Final = Path(__file__).resolve().parents[4] / "shared" / "faults" / "agents"

_FUNCTION: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's models write calls.

    Attributes:
        template: the name of a file of TRL or of the faults, or the text of a template.
        end: what ends a turn with calls.
        most: the calls that the template shows in a turn; 0 if it shows none and is rejected.
        text: arguments are text in its authors' messages.
        ids: of the calls, as its models or those who serve them write them.
        calls: how its models write the calls of the test, if the template leaves that out.
        response: how a turn is read; None is as TRL reads it.
        like: the template that TRL has this for, if it has none for the family's own.
        tokens: its special tokens, beside the end.
    """

    template: str
    end: str = "<|im_end|>"
    most: int = 2
    text: bool = False
    ids: tuple[str, str] = ("call_1", "call_2")
    calls: str = ""
    response: Mapping[str, Any] | None = None
    like: str = ""
    tokens: str = ""

    def source(self, name: str = "") -> str:
        """Return the text of the template, or of another one of TRL's; skips where its file is not here."""
        name = name or self.template
        if "{" in name:
            return name
        if (file := SHARED / f"{name}.jinja").is_file():
            return file.read_text("utf-8")
        spec = find_spec("trl")
        if spec is None or spec.origin is None:
            pytest.skip("trl is not installed")
        return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def fields(anchor: str, **calls: Any) -> dict[str, Any]:
    """How a turn is read: its calls, and the rest as text."""
    calls = {"repeats": True, "content": "json", "transform": _FUNCTION, **calls}
    return {"start_anchor": anchor, "fields": {"tool_calls": calls, "content": {"content": "text"}}}


LISTED: Final = {
    "repeats": False,
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}
"""Calls that are objects of a list."""

KIMI_K2: Final = """\
{%- macro content(message) -%}{{ message.content or '' }}{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- set name = message.name or message.role -%}
{%- if message.role == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
{%- elif message.role == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>
{%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{{ content(message) }}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>
{%- elif message.role == 'tool' -%}## Return of {{ message.tool_call_id }}
{{ content(message) }}
{%- else -%}{{ content(message) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

MISTRAL_V11: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if tools and loop.index0 == 0 -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.role == 'assistant' -%}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if call.id | length != 9 -%}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif -%}
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor -%}{{ eos_token }}
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id is not defined -%}{{ raise_exception('a result has no id') }}{%- endif -%}
[TOOL_RESULTS][CALL_ID]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}"""

MINIMAX_M2: Final = """\
{%- if tools -%}]~!b[]~b]system
{{ tools | tojson }}[e~[
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}]~b]user
{{ message.content }}[e~[
{% elif message.role == 'assistant' -%}]~b]ai
{{ message.content }}
{%- if message.tool_calls -%}
{{ '' if not message.content else '\\n' }}<minimax:tool_call>
{% for call in message.tool_calls -%}
<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments.items() -%}
<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor -%}</invoke>
{% endfor -%}</minimax:tool_call>
{%- endif -%}[e~[
{% elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}]~b]tool{%- endif %}
<response>{{ message.content }}</response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}[e~[
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}]~b]ai
{% endif -%}"""

GRANITE_4: Final = """\
{%- if tools -%}<|start_of_role|>system<|end_of_role|>{{ tools | tojson }}<|end_of_text|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}<|start_of_role|>user<|end_of_role|>{%- endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}<|end_of_text|>
{% endif -%}
{%- else -%}
<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}<|end_of_text|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_of_role|>assistant<|end_of_role|>{%- endif -%}"""

PHI_4_MINI: Final = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor -%}
{{ '<|assistant|>' if add_generation_prompt else eos_token }}"""

DEEPSEEK: Final = fields(
    "<｜Assistant｜>",
    open_pattern=r"<｜tool▁call▁begin｜>(function<｜tool▁sep｜>)?(?P<name>\w+)(<｜tool▁sep｜>|\n```json\n)",
    close_pattern=r"(\n```)?<｜tool▁call▁end｜>",
)
_HERMES: Final = {
    "open": "<tool_call>\n",
    "close": "\n</tool_call>",
    "transform": {"type": "function", "function": "{content}"},
}
DEEPSEEK_END: Final = "<｜end▁of▁sentence｜>"
GEMMA: Final = "<|turn> <turn|> <|tool_call> <tool_call|> <tool_response|>"

FAMILIES: Final[dict[str, Family]] = {
    **{name: Family(template=name) for name in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")},
    **{
        name: Family(template=name)
        for name in ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super")
    },
    **{
        name: Family(template=name)
        for name in ("nemotron_3_ultra", "nemotron_3_5_lightning", "lfm2_2_5", "lfm2_2_5_v2")
    },
    **{
        name: Family(template=name, end="<|tool_response>", tokens=GEMMA)
        for name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
    },
    "gemma4_v2": Family(template="gemma4_v2", end="<turn|>", tokens=GEMMA),
    "diffusion_gemma": Family(template="diffusion_gemma", end="<|tool_response>", tokens=GEMMA, like="gemma4"),
    "glm4moe": Family(template="glm4moe", end="<|observation|>", tokens="<|user|> <|assistant|>"),
    "llama3_1": Family(template="llama3_1", end="<|eot_id|>", most=1, tokens="<|start_header_id|> <|end_header_id|>"),
    "llama3_2": Family(template="llama3_2", end="<|eot_id|>", most=1, tokens="<|start_header_id|> <|end_header_id|>"),
    "gptoss": Family(template="gptoss", end="<|call|>", most=1, tokens="<|start|> <|message|> <|channel|> <|end|>"),
    "qwen2_5_vl": Family(
        template="qwen2_5_vl",
        calls='<tool_call>\n{"name": "calc", "arguments": {"x": "2+2"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"x": "there"}}\n</tool_call>',
        response=fields("<|im_start|>assistant\n", **_HERMES),
    ),
    "lfm2": Family(
        template="lfm2",
        calls='<|tool_call_start|>[{"name": "calc", "arguments": {"x": "2+2"}}, {"name": "look", "arguments": '
        '{"x": "there"}}]<|tool_call_end|>',
        response=fields("assistant\n", open="<|tool_call_start|>", close="<|tool_call_end|>", **LISTED),
    ),
    "muse_glimmer": Family(
        template="muse_glimmer",
        end="<|eot|>",
        tokens="<|start|> <|message|> <|eom|>",
        response=fields(
            "<|start|>assistant",
            open_pattern=r"(<\|eom\|><\|start\|>assistant)? to=\w+<\|message\|><atem:function_calls>\n"
            r'<atem:invoke name="(?P<name>\w+)">\n',
            close="</atem:invoke>\n</atem:function_calls>",
            content="xml-inline",
            content_args={
                "tag_pattern": r'<atem:parameter name="(?P<key>\w+)">(?P<value>.*?)</atem:parameter>',
                "value_parser": {"name": "text"},
            },
        ),
    ),
    "mistral31": Family(
        template="mistral31",
        end="</s>",
        ids=("abcdefgh1", "abcdefgh2"),
        response=fields(
            "[/INST]",
            open="[TOOL_CALLS] ",
            close="</s>",
            **{**LISTED, "transform": {"id": "{id}", **LISTED["transform"]}},
        ),
    ),
    "mistral_v11": Family(
        template=MISTRAL_V11,
        end="</s>",
        ids=("abcdefgh1", "abcdefgh2"),
        response=fields(
            "[/INST]",
            open_pattern=r"\[TOOL_CALLS\](?P<name>\w+)\[CALL_ID\](?P<id>\w+)\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\]|</s>)",
            transform={"id": "{id}", **_FUNCTION},
        ),
    ),
    "kimi_k2": Family(
        template=KIMI_K2,
        ids=("functions.calc:0", "functions.look:1"),
        response=fields(
            "<|im_assistant|>assistant<|im_middle|>",
            open_pattern=r"<\|tool_call_begin\|>(?P<id>functions\.(?P<name>\w+):\d+)<\|tool_call_argument_begin\|>",
            close="<|tool_call_end|>",
            transform={"id": "{id}", **_FUNCTION},
        ),
    ),
    "deepseekv3": Family(template="deepseekv3", end=DEEPSEEK_END, text=True, response=DEEPSEEK),
    "deepseek_r1_distill": Family(
        template="deepseek_r1_distill",
        end=DEEPSEEK_END,
        calls='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n{"x": "2+2"}\n```'
        '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"x": "there"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        response=DEEPSEEK,
    ),
    "deepseekv31": Family(template="deepseekv31", end=DEEPSEEK_END, text=True, response=DEEPSEEK),
    "minimax_m2": Family(
        template=MINIMAX_M2,
        end="[e~[",
        response=fields(
            "]~b]ai\n",
            open_pattern=r'<invoke name="(?P<name>\w+)">\n',
            close="</invoke>",
            content="xml-inline",
            content_args={
                "tag_pattern": r'<parameter name="(?P<key>\w+)">(?P<value>.*?)</parameter>',
                "value_parser": {"name": "text"},
            },
        ),
    ),
    "granite_4": Family(
        template=GRANITE_4, end="<|end_of_text|>", response=fields("assistant<|end_of_role|>", **_HERMES)
    ),
    "phi_4_mini": Family(
        template=PHI_4_MINI,
        end="<|end|>",
        calls='<|tool_call|>[{"name": "calc", "arguments": {"x": "2+2"}}, {"name": "look", "arguments": '
        '{"x": "there"}}]<|/tool_call|>',
        response=fields("<|assistant|>", open="<|tool_call|>", close="<|/tool_call|>", **LISTED),
    ),
    **{
        name: Family(template=name, most=0)
        for name in ("cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5", "idefics3", "llava_next", "smolvlm")
    },
}
"""By the name of the template. Those with `most=0` have no place for calls or for results."""
