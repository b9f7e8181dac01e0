"""Whatever a policy samples, no run ends and no row is wrong: random turns through the templates that models ship.

The slot engine runs as ever; only which token is drawn is given, so that turns are what a policy might write: calls
cut, nested, doubled, of unknown tools, with arguments of wrong types, special tokens and bytes that are no text. A
sample by default; in full:

    FUZZED_TURNS=2000 pytest -m "" tests/rlhf_pipeline/policies/test_sampled_turns.py
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import CausalLMPolicy, Collect, Collector, Prompt, Tools, TrajectoryReplayBuffer, TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import FAILURES, TURNS
from rlhf_pipeline.data.keys import POLICY_ROLE
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.environments.outcomes import FAILED
from rlhf_pipeline.policies.engines import slots
from tests.rlhf_pipeline.policies import template_families
from tests.rlhf_pipeline.policies.test_reply_templates import FAMILIES, codec
from tests.rlhf_pipeline.policies.test_template_matrix import by_authors, byte_tokenizer

WITH_IDS = ("mistral31", "deepseekv31", "mistral_v11", "kimi_k2")
"""Whose templates need ids of calls, or arguments as text."""
NAMES = ("qwen2_5", "qwen3", "gemma4", "llama3_1", "gptoss", "glm4moe", *WITH_IDS)
NUM_TURNS = int(os.environ.get("FUZZED_TURNS", "48"))
"""For each template."""
LONGEST = 200
PROMPTS, GROUP = 8, 2
VALUES = (
    *("7", "null", "true", "1e999", "NaN", "[1, [2, {}]]", '{"a": {"expression": 1}}', '"\\ud800"', '"\\u0000"', "[]"),
    *('"' + "9" * 60 + '"', "[" * 40, '"<|im_end|>"', '"a\\nb"', '""', "-", "{", '"\u00e9\u4e2d"'),
)
TOOL_NAMES = ("", "find", "reset", "__init__", "<|tool_call>", "calculate.calculate", '"', "\u00fc")


def calculate(expression: str) -> str:
    """Calculate a sum.

    Args:
        expression: for example 12+30
    """
    if len(expression) % 2:
        raise ValueError(f"no sum: {expression}")
    return expression


def byte_codec(name: str) -> Any:
    """A tokenizer of bytes, with the special tokens, the template and the form of calls of a model."""
    if name in WITH_IDS:
        return byte_tokenizer(template_families.FAMILIES[name])
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = codec(name).chat_template
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **ends)
    tokenizer.add_tokens(FAMILIES[name][0].split(), special_tokens=True)
    tokenizer.chat_template = template
    from trl.chat_template_utils import add_response_schema

    return add_response_schema(tokenizer)


def ends_of(name: str) -> tuple[str, str]:
    """What ends a turn that a user, or a tool, answers."""
    return (template_families.FAMILIES[name].end,) * 2 if name in WITH_IDS else FAMILIES[name][1]


class Writer:
    """Writes turns in the form of one model, well and badly."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.ends = tokenizer, ends_of(name)
        self.special = [one.content for one in tokenizer.added_tokens_decoder.values()]
        if name in WITH_IDS:
            _, text, _ = by_authors(tokenizer, template_families.FAMILIES[name], 1)
            self.call = text.replace("calc", "calculate").replace('"x"', '"expression"')
            return
        asked = [{"role": "user", "content": "?"}]
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "2+2"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = {"role": "tool", "name": "calculate", "content": "4", "tool_call_id": "1"}
        first = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*asked, turn, reply], tokenize=False)
        self.call = whole[len(first) :].partition(self.ends[1])[0]
        assert "calculate" in self.call

    def turn(self, draw: random.Random) -> list[int]:
        """One turn as token ids."""
        text = draw.choice((self.call, self.call, self.call, "It is 4.", "<think>\n2+2\n</think>\n\n4" + self.call, ""))
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            at = draw.randint(0, len(text))
            change = draw.randrange(8)
            if change == 0:
                text = text[:at]
            elif change == 1:
                text = text[:at] + self.call + text[at:]
            elif change == 2:
                text = text.replace("calculate", draw.choice(TOOL_NAMES), 1)
            elif change == 3:
                value = draw.choice(VALUES)
                text = text.replace('"2+2"', value, 1) if '"2+2"' in text else text.replace("2+2", value, 1)
            elif change == 4:
                text = text[:at] + draw.choice(self.special) + text[at:]
            elif change == 5:
                text = text.replace("expression", draw.choice(("", "sum", "expression expression")), 1)
            elif change == 6:
                text += text
            else:
                text = text.replace('"arguments": {"expression": "2+2"}', draw.choice(("", '"arguments": "x"')), 1)
        ids = [int(one) for one in self.tokenizer.encode(text, add_special_tokens=False)]
        if draw.random() < 0.3:
            at = draw.randint(0, len(ids))
            ids[at:at] = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        end = self.tokenizer.convert_tokens_to_ids(draw.choice(self.ends))
        return [*ids, end] if draw.random() < 0.85 or not ids else ids


class Sums:
    """Questions."""

    as_chat = True

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one."""
        return Prompt(text=f"{cursor}+2?")


def typed(turns: Sequence[Sequence[Sequence[int]]], then: int) -> Any:
    """What draws the given tokens, with the log-probs that the model gives them, in place of random ones."""

    def sample(self: Any, hidden: torch.Tensor, rows: Any, sampled: Any) -> Any:
        del sampled
        wanted = list[int]()
        for stay in rows.tolist():
            conversation = self.stays[stay]
            row = self.turn_rows[conversation]
            number = sum(role == POLICY_ROLE for _, role in row.turn_spans) - 1
            script, at = turns[conversation][number], len(row.ids) - row.began
            wanted.append(script[at] if at < len(script) else then)
        scores = torch.log_softmax(self.parts.logits(hidden, self.weight).float(), -1)
        found = scores.gather(1, torch.tensor(wanted)[:, None])[:, 0]
        return np.array(wanted, np.int64), found.numpy(), None

    return sample


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_no_turn_ends_a_run_or_spoils_a_row(name, tmp_path, monkeypatch):
    """Every conversation is stored and trusted, its tokens are those given, its log-probs those of the whole row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_codec(name)
    ends = tokenizer.convert_tokens_to_ids([*dict.fromkeys(ends_of(name))])
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16_384, **sizes)).eval()
    policy = CausalLMPolicy(model, tokenizer, eos_token_id=ends, num_slots=PROMPTS * GROUP)
    storage = TrajectoryStorage(tmp_path / "store", extra=[*FAILURES, TURNS])
    collector = Collector(
        policy=policy,
        prompts=Sums(),
        reward=environment_reward,
        buffer=TrajectoryReplayBuffer(storage=storage),
        config=Collect(
            prompts_per_rollout=PROMPTS, group_size=GROUP, max_new_tokens=LONGEST, max_turns=4, max_reply_tokens=300
        ),
        seed=1,
        environment=Tools(calculate),
    )
    writer, num_turns, rollout, reasons, errors = Writer(tokenizer, name), 0, 0, set[str](), 0
    while num_turns < NUM_TURNS:
        draw = random.Random(f"{name} {rollout}")
        turns = [[writer.turn(draw) for _ in range(4)] for _ in range(PROMPTS * GROUP)]
        # 10,000 turns of every kind: no model samples them, and all but the choice of the token is real.
        monkeypatch.setattr(slots._Turns, "_sample", typed(turns, ends[0]))
        collector.collect(rollout, policy_version=0)
        rows = storage.store.read(storage.store.ids()[-PROMPTS * GROUP :])
        assert FAILED not in rows["finish_reason"], [json.loads(meta).get("error") for meta in rows["meta"]]
        reasons |= {*rows["finish_reason"]}
        for place, (ids, said, log_probs, spans, meta) in enumerate(
            zip(*(rows[one] for one in ("input_ids", "assistant_mask", "log_probs", "turn_spans", "meta")), strict=True)
        ):
            given = [one[:LONGEST] for one in turns[place]]
            given = [next((one[: at + 1] for at, id_ in enumerate(one) if id_ in ends), one) for one in given]
            cuts = [*spans.tolist(), (len(ids), POLICY_ROLE)]
            found = [
                ids[start:end].tolist() for (start, role), (end, _) in itertools.pairwise(cuts) if role == POLICY_ROLE
            ]
            num_turns += len(found)
            errors += json.loads(meta).get("call_errors", 0)
            for one, script in zip(found, given, strict=False):
                assert one == script or one == [*script, ends[0]][: len(one)]
            assert np.isfinite(log_probs).tolist() == said.astype(bool).tolist()
            row = torch.tensor(ids[None].astype(np.int64))
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=row).logits[0, :-1].double(), -1).gather(1, row[0, 1:, None])
            mask = said.astype(bool)
            np.testing.assert_allclose(log_probs[mask], scores[:, 0].numpy()[mask[1:]], rtol=0, atol=1e-5)
        rollout += 1
    assert errors > 0
    assert {"stop"} < reasons
    storage.close()
