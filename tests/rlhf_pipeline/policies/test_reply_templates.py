"""Replies under the chat templates that models ship (TRL's copies): a row is what the template renders."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    Collector,
    Prompt,
    Step,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    Turn,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import FAILURES, TURNS
from rlhf_pipeline.data.keys import POLICY_ROLE
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.call_formats import rewritten_history
from rlhf_pipeline.policies.chat import encode_prompt, encode_reply
from rlhf_pipeline.policies.engines.turn_rows import LONG_REPLY

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
    assert row == whole or "rewrites" in str(rewritten_history(tokenizer))
    if by_tool:
        assert row == whole


@pytest.mark.peer
def test_a_template_that_refuses_a_reply_is_one_error():
    """A tool's reply without a call before it: the template's own error, in a sentence."""
    with pytest.raises(DataError, match="the chat template rejects a conversation with the message roles"):
        encode_reply(codec("gptoss"), ASKED, [2], [{"role": "tool", "content": "4"}])


class Asks:
    """Asks again, shortly and at length by turns, and keeps the tokens of each turn as it was told them."""

    SAID = ("No?", "And 4 more than that, please?" + "?" * LONG_REPLY)

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.heard: list[Any] = []

    def step(self, turn: Turn) -> Step:
        self.heard.append([int(token) for token in turn.token_ids])
        return Step(self.SAID[turn.number % 2], rewards={"turns": 1.0}, info={"heard": self.heard})


class Questions:
    """Prompts that are asked through the chat template."""

    as_chat = True

    def prompt(self, cursor: int, seed: int) -> Prompt:
        return Prompt(text=f"What is {cursor}+2?")


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gemma3_text", "gpt2", "gpt_neox"])
def test_stored_conversations_are_those_of_the_model(architecture, name, make_model, oracle, tmp_path):
    """Log-probs of all sampled tokens to 1e-5, NaN and no mask at every other; replies are the template's."""
    tokenizer = codec(name)
    ends = tokenizer.convert_tokens_to_ids([*dict.fromkeys(FAMILIES[name][1])])
    longest = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    model = make_model(architecture, vocab_size=len(tokenizer), **{longest: 2048})
    storage = TrajectoryStorage(tmp_path / "store", extra=[*FAILURES, TURNS])
    collector = Collector(
        policy=CausalLMPolicy(model, tokenizer, eos_token_id=ends, num_slots=5),
        prompts=Questions(),
        reward=environment_reward,
        buffer=TrajectoryReplayBuffer(storage=storage),
        config=Collect(prompts_per_rollout=2, group_size=3, max_new_tokens=30, max_turns=3),
        seed=1,
        environment=Asks,
    )
    collector.collect(0, policy_version=0)
    rows = storage.store.read(storage.store.ids())
    storage.close()
    ended = set()
    for i, ids in enumerate(row.tolist() for row in rows["input_ids"]):
        messages: list[dict[str, str]] = [{"role": "user", "content": f"What is {i // 3}+2?"}]
        cuts = [*rows["turn_spans"][i].tolist(), (len(ids), POLICY_ROLE)]
        parts = [(role, ids[start:end]) for (start, role), (end, _) in itertools.pairwise(cuts)]
        assert ids[: cuts[0][0]] == encode_prompt(tokenizer, messages)
        heard = json.loads(rows["meta"][i])["info"]["heard"]
        assert [part for role, part in parts if role == POLICY_ROLE] == heard
        assert len(heard) == 3
        for number, reply in enumerate(part for role, part in parts if role != POLICY_ROLE):
            messages += [{"role": "assistant", "content": "TURN"}, {"role": "user", "content": Asks.SAID[1 - number]}]
            shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tail, text = shown.rpartition("TURN")[2], tokenizer.decode(reply)
            last = heard[number][-1]
            ended.add(last in ends)
            assert tail in ((text, tokenizer.decode([last]) + text) if last in ends else (text,))
        mask = np.concatenate([[False] * cuts[0][0], *([role == POLICY_ROLE] * len(part) for role, part in parts)])
        assert rows["assistant_mask"][i].tolist() == mask.tolist()
        assert np.isfinite(rows["log_probs"][i]).tolist() == mask.tolist()
        np.testing.assert_allclose(rows["log_probs"][i][mask], oracle(model, ids)[mask], rtol=0, atol=1e-5)
    assert ended == {False, True}
