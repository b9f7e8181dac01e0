"""Teach a model made from scratch to call a tool and to copy what it answers: CPU only, nothing downloaded."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_pipeline import GRPO, Collect, Evaluate, Learn, Pipeline, Prompt, Reward, TinyPolicy, WritePath, token_match

LETTERS = "abcdefgh"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys of two letters, one in four held out, each time with another value of three letters."""

    held_out: bool = False
    as_chat: bool = True

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a key, and its value as the answer."""
        draw = random.Random(f"keys {self.held_out} {seed} {cursor}")
        keys = [
            a + b for i, a in enumerate(LETTERS) for j, b in enumerate(LETTERS) if ((i + j) % 4 == 0) == self.held_out
        ]
        return Prompt(text=draw.choice(keys), answer="".join(draw.choices(LETTERS, k=3)))


class Table:
    """Knows the value of the conversation's key. Nobody else does, so an answer without a call is a guess."""

    def reset(self, prompt: str, answer: str) -> None:
        """Note what is asked for."""
        self.key, self.value, self.called = prompt, answer, 0.0

    def lookup(self, key: str) -> str:
        """Look a key up.

        Args:
            key: two letters
        """
        self.called = max(self.called, token_match("", key, self.key, {}))
        return self.value if key == self.key else ""

    def get_reward(self) -> dict[str, float]:
        """Return how much of the key was in a call."""
        return {"called": self.called}


def answered(completion: str, answer: str, rewards: Mapping[str, float]) -> float:
    """Return how much of the value is in the answer; neither a guess without a call nor another call is one."""
    return token_match("", completion, answer, {}) if rewards["called"] == 1 and "?" not in completion else 0.0


def lookup_tool() -> Pipeline:
    """A conversation reads `ab=`, `?ab` (the call), `407=`, `407` (the answer); three tokens a turn."""
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "{content}"}}}
    return Pipeline(
        name="lookup_tool",
        description="call a tool and copy its answer; a 0.1 M parameter model made from scratch, on a CPU",
        policy=TinyPolicy(
            alphabet=f"{LETTERS}?=",
            chat_template="{% for m in messages %}{{ m.content }}"
            "{% for call in m.tool_calls or [] %}?{{ call.function.arguments.key }}{% endfor %}"
            "{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}",
            response_template={
                "start_anchor": "=",
                "fields": {
                    "content": {},
                    "tool_calls": {"open": "?", "close": "<|im_end|>", "repeats": True, "transform": call},
                },
            },
        ),
        prompts=Keys(),
        environment=Table,
        reward=(Reward("called"), Reward(answered)),
        collect=Collect(prompts_per_rollout=16, group_size=16, max_new_tokens=3, max_turns=2, num_slots=256),
        write=WritePath(estimator="dr_grpo"),
        loss=GRPO(entropy_coeff=0.02),
        evaluate=Evaluate(prompts=Keys(held_out=True), every=40, num_prompts=128, group_size=2, success_at=2.0),
        learn=Learn(steps=600, lr=2e-3, checkpoint_every=40, stop_at_reward=1.95, stop_window=3),
    )
