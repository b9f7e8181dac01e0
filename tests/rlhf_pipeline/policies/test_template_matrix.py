"""Calls and results under the chat templates of many families: a row is what the authors' template renders."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline import Collect, Prompt, Step, Tools, Turn
from rlhf_pipeline.collectors.conversations import Conversation, Conversations
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.call_formats import rewritten_history
from rlhf_pipeline.policies.engines.protocol import Ended, RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.tool_calls import schema_of
from tests.rlhf_pipeline.policies.template_families import FAMILIES, KIMI_K2, MISTRAL_V11, Family, fields


def calc(x: str) -> str:
    """Calculate.

    Args:
        x: a sum
    """
    return f"the sum of {x}"


def look(x: str) -> str:
    """Look.

    Args:
        x: a place
    """
    return f"seen {x}"


ASKED = {"role": "user", "content": "What is 2+2?"}
CALLS = (("calc", {"x": "2+2"}, "the sum of 2+2"), ("look", {"x": "there"}, "seen there"))
TOOLS = [schema_of(calc), schema_of(look)]


def byte_tokenizer(family: Family) -> Any:
    """A tokenizer of bytes, with the special tokens and the template of a family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=family.end, pad_token="<pad>", bos_token="<s>"
    )
    tokenizer.add_tokens([family.end, *family.tokens.split()], special_tokens=True)
    tokenizer.chat_template = family.source()
    if family.response is None and family.most:
        from trl.chat_template_utils import add_response_schema

        tokenizer.chat_template = family.source(family.like)
        add_response_schema(tokenizer)
        tokenizer.chat_template = family.source()
        return tokenizer
    tokenizer.response_template = dict(family.response or fields(""))
    return tokenizer


class Scripted:
    """An engine whose turns are given."""

    name, version = "scripted", 0

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = turns

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """Return the next turn."""
        ids, none = np.array(self.turns.pop(0), np.int64), np.zeros(1, np.int64)
        return RaggedCompletions(ids, np.zeros(len(ids), np.float32), np.array([len(ids)]), none, none, none == 0)


def conversation(tokenizer: Any, *turns: str, environment: Any = None) -> Conversation:
    """A conversation with the two tools in which the policy writes these turns, each with its end."""
    end = tokenizer.eos_token_id
    script = [[*tokenizer.encode(turn, add_special_tokens=False), end] for turn in turns]
    policy: Any = SimpleNamespace(
        engine=Scripted(script),
        tokenizer=tokenizer,
        model=None,
        eos_token_ids=[end],
        pad_token_id=tokenizer.pad_token_id,
        max_positions=20_000,
    )
    config = Collect(prompts_per_rollout=1, group_size=1, max_new_tokens=5_000, max_turns=len(turns))
    runner = Conversations(
        environment or Tools(calc, look),
        policy=policy,
        config=config,
        temperature=1.0,
        seed=0,
        as_chat=True,
        template={},
    )
    (found,) = runner.run([Prompt(text=str(ASKED["content"]))], [0])
    return found


def by_authors(tokenizer: Any, family: Family, count: int) -> tuple[str, str, str]:
    """Prompt, turn with calls and results as the template writes them; calls are in the authors' form."""
    turn: dict[str, Any] = {"role": "assistant", "content": family.calls}
    if not family.calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(given) if family.text else given}}
            for name, given, _ in CALLS[:count]
        ]
    results = [{"role": "tool", "name": name, "content": result} for name, _, result in CALLS[:count]]
    for call, result, number in zip(turn.get("tool_calls") or (), results, family.ids, strict=False):
        call["id"] = result["tool_call_id"] = number
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": TOOLS}
    first = tokenizer.apply_chat_template([ASKED], **options)
    whole = tokenizer.apply_chat_template([ASKED, turn, *results], **options)
    start = next((at for at, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), len(first))
    stop = whole.index(family.end, start)
    return whole[:start], whole[start:stop], whole[stop + len(family.end) :]


def cases() -> list[Any]:
    """The families; those of TRL's and of the faults' files are peers."""
    return [
        pytest.param(name, marks=[] if "{" in family.template else [pytest.mark.peer])
        for name, family in FAMILIES.items()
    ]


@pytest.mark.parametrize("name", cases())
def test_two_calls_with_results_are_what_the_authors_render(name: str):
    """Or one sentence: a template without calls is rejected, and a turn with more calls than it shows is answered."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family)
    if not family.most:
        with pytest.raises(
            DefinitionError, match=r"^the chat template cannot show a tool call and its result \(.+\); "
        ) as told:
            conversation(tokenizer, "")
        assert "\n" not in str(told.value)
        return
    first, turn, after = by_authors(tokenizer, family, family.most)
    found = conversation(tokenizer, turn, "It is 4.")
    assert found.failure is None
    assert found.row is not None
    assert found.fallback_replies == found.call_errors == 0
    assert [message["role"] for message in found.messages] == [
        "user",
        "assistant",
        *["tool"] * family.most,
        "assistant",
    ]
    row = tokenizer.decode(found.row.ids)
    ended = f"It is 4.{family.end}"
    assert row.endswith(f"{turn}{family.end}{after}{ended}")
    rewrites = rewritten_history(tokenizer, tools=TOOLS, ends=[family.end])
    assert row == f"{first}{turn}{family.end}{after}{ended}" or (rewrites is not None and "rewrites" in rewrites)
    if family.most == 1:
        two = conversation(tokenizer, turn + family.end + turn, "")
        assert two.failure is None
        assert two.call_errors == 1
        sent = str(two.messages[2]["content"])
        assert re.fullmatch(r"error: the turn has 2 calls; the chat template shows 1 in a turn", sent)


@pytest.mark.parametrize(
    ("family", "turn", "result"),
    [
        (
            FAMILIES["kimi_k2"],
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:7<|tool_call_argument_begin|>"
            '{"x": "there"}<|tool_call_end|><|tool_calls_section_end|>',
            "## Return of functions.look:7\nseen there<|im_end|>",
        ),
        (
            FAMILIES["mistral_v11"],
            '[TOOL_CALLS]look[CALL_ID]9chars123[ARGS]{"x": "there"}',
            "[TOOL_RESULTS][CALL_ID]9chars123[TOOL_CONTENT]seen there[/TOOL_RESULTS]",
        ),
    ],
    ids=["kimi_k2", "mistral_v11"],
)
def test_a_call_keeps_the_id_that_the_policy_sampled(family: Family, turn: str, result: str):
    """Its result names it."""
    tokenizer = byte_tokenizer(family)
    found = conversation(tokenizer, turn, "So.")
    assert found.row is not None
    assert result in tokenizer.decode(found.row.ids)


def test_a_call_without_an_id_gets_one_that_can_be_repeated():
    """Nine letters and digits of seed, turn and position, where the policy writes none and the template needs one."""
    response = fields(
        "[/INST]", open_pattern=r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", close_pattern=r"(?=\[TOOL_CALLS\]|</s>)"
    )
    tokenizer = byte_tokenizer(Family(template=MISTRAL_V11, end="</s>", response=response))
    turn = '[TOOL_CALLS]calc[ARGS]{"x": "2"}[TOOL_CALLS]look[ARGS]{"x": "there"}'
    rows = [conversation(tokenizer, turn, turn, "So.") for _ in range(2)]
    ids = [re.findall(r"\[CALL_ID\](\w{9})\[TOOL_CONTENT\]", tokenizer.decode(one.row.ids)) for one in rows if one.row]
    assert len(set(ids[0])) == 4
    assert ids[0] == ids[1]
    assert [one.fallback_replies for one in rows] == [0, 0]
    calls = [call["id"] for message in rows[0].messages for call in message.get("tool_calls") or ()]
    assert calls == ids[0]


def test_a_reply_is_the_users_only_where_a_call_is_malformed():
    """And counted. A call that the template cannot show is malformed: its tool is not called."""
    tokenizer = byte_tokenizer(FAMILIES["mistral_v11"])
    good = '[TOOL_CALLS]look[CALL_ID]9chars123[ARGS]{"x": "there"}'
    found = conversation(
        tokenizer, good, '[TOOL_CALLS]look[CALL_ID]9chars123[ARGS]{"x": ', good.replace("9", "99"), good, ""
    )
    assert found.failure is None
    assert [message["role"] for message in found.messages][2:9:2] == ["tool", "user", "user", "tool"]
    assert "length 9" in found.messages[6]["content"]
    assert found.fallback_replies == found.call_errors == 2


class Summary:
    """Shows a history with a call, whose arguments are text or an object."""

    tools: ClassVar = [calc, look]
    arguments: ClassVar[Any]

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""

    def step(self, turn: Turn) -> Step:
        """Replace the history."""
        call = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": self.arguments}}
        result = {"role": "tool", "name": "calc", "content": CALLS[0][2], "tool_call_id": "call_1"}
        return Step(history=[ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, result])


@pytest.mark.parametrize("name", ["granite_4", pytest.param("deepseekv31", marks=pytest.mark.peer)])
@pytest.mark.parametrize("arguments", [CALLS[0][1], json.dumps(CALLS[0][1])], ids=["object", "text"])
def test_a_history_of_an_environment_is_shown_in_the_form_of_the_template(name: str, arguments: Any):
    """Whether it has the arguments of calls as an object or, as OpenAI's clients, as text."""
    tokenizer = byte_tokenizer(FAMILIES[name])
    environment = type("Compacts", (Summary,), {"arguments": arguments})
    found = conversation(tokenizer, "Hm.", "It is 4.", environment=environment)
    assert found.failure is None
    assert found.row is not None
    first, turn, after = by_authors(tokenizer, FAMILIES[name], 1)
    end = FAMILIES[name].end
    assert tokenizer.decode(found.row.ids) == f"{first}{turn}{end}{after}It is 4.{end}"


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_template_that_rewrites_history_where_tools_are_shown_is_named(with_tools: bool):
    """The tools of the run are shown, as in its prompts."""
    rewrites = KIMI_K2.replace("{%- if tools -%}", "{%- if tools and messages | length > 2 -%}")
    tokenizer = byte_tokenizer(Family(template=rewrites, response=FAMILIES["kimi_k2"].response))
    tokenizer.name_or_path = "moonshotai/Kimi-K2"
    sentence = rewritten_history(tokenizer, tools=TOOLS if with_tools else [], ends=["<|im_end|>"])
    assert (sentence is not None) == with_tools
    if sentence is not None:
        assert sentence.startswith("the chat template of moonshotai/Kimi-K2 rewrites turns")
        assert "where tools are shown" in sentence
