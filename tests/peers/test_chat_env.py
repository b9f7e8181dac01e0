"""TorchRL's `ChatEnv` with its transforms, as an environment of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import SimpleToolTransform

from rlhf_pipeline import Collect, Collector, Prompt, TrajectoryReplayBuffer, TrajectoryStorage, Turn
from rlhf_pipeline.buffer.trajectory_schema import FAILURES, TURNS
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.interop.torchrl import ChatEnvironment
from tests.rlhf_pipeline.small import talker

pytestmark = pytest.mark.peer


class Letters(Transform):
    """Rewards the letters of a turn, and separately the answer in it."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        (said,) = tensordict["history"].full[..., -1].content
        next_tensordict["reward"] = torch.full((1, 1), float(len(said)))
        next_tensordict["right"] = torch.full((1, 1), float(tensordict["answer"][0] in said))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        for name in ("reward", "right"):
            reward_spec[name] = Unbounded(shape=(1, 1))
        return reward_spec


def add(digits: str) -> str:
    """Add up digits."""
    return str(sum(map(int, digits)))


def calculator() -> Any:
    """Calls are digits after a `+`; after three turns the conversation is over."""
    tool = SimpleToolTransform({"add": lambda digits: add(digits)}, tool_call_pattern=r"(\+)(\d+)")
    tool._extract_tool_calls = lambda text: [("add", f'{{"digits": "{text[1:]}"}}')] if text[:1] == "+" else []
    env = ChatEnv().append_transform(Letters()).append_transform(tool)
    return env.append_transform(StepCounter(3))


def test_a_tool_answers_until_a_turn_has_no_call():
    """Query and answer reach the environment; what the tool put after the turn is the reply; rewards keep names."""
    conversation = ChatEnvironment(calculator, rewards=("reward", "right"))()
    shown = conversation.reset(Prompt(text="What is 1+2?", answer="3", meta={"level": 1}), seed=2**40)
    assert shown == [{"role": "user", "content": "What is 1+2?"}]
    called = conversation.step(Turn(text="+12"))
    assert [(one["role"], one["content"]) for one in called.reply] == [("tool", "Tool add executed successfully:\n3")]  # type: ignore[index]
    assert (called.done, called.rewards) == (False, {"reward": 3.0, "right": 0.0})
    last = conversation.step(Turn(text="It is 3"))
    assert (last.done, last.rewards) == (True, {"reward": 7.0, "right": 1.0})


def test_the_environment_ends_a_conversation():
    """`done` of a transform ends it though there is a reply; messages of a prompt keep their roles."""
    conversation = ChatEnvironment(calculator)()
    asked = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"})
    assert conversation.reset(Prompt(messages=asked, answer="3"), seed=0) == [*asked]
    assert [conversation.step(Turn(text="+1")).done for _ in range(3)] == [False, False, True]


def test_conversations_of_a_policy(tmp_path):
    """Turn by turn in the scheduler: sampled tokens alone are masked, and their log-probs are the policy's."""

    class Sums:
        as_chat = True

        def prompt(self, cursor: int, seed: int) -> Prompt:
            return Prompt(text=f"{cursor}+{cursor}", answer=str(2 * cursor))

    class Echo(Transform):
        """Answers every turn with a digit."""

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            from torchrl.data import History

            answer = History(role="user", content="1")[None, None]
            next_tensordict["history"].prompt = next_tensordict["history"].prompt.extend(answer, inplace=False, dim=-1)
            return next_tensordict

    policy = talker()
    storage = TrajectoryStorage(tmp_path / "store", extra=[*FAILURES, TURNS])
    collector = Collector(
        policy=policy,
        prompts=Sums(),
        reward=environment_reward,
        buffer=TrajectoryReplayBuffer(storage=storage),
        config=Collect(prompts_per_rollout=2, group_size=3, max_new_tokens=6, max_turns=3),
        seed=1,
        environment=ChatEnvironment(lambda: ChatEnv().append_transform(Letters()).append_transform(Echo())),
    )
    collector.collect(0, policy_version=0)
    rows = storage.store.read(storage.store.ids())
    storage.close()
    assert not any(rows["failure_reason"])
    for i, row in enumerate(rows["input_ids"]):
        mask = rows["assistant_mask"][i]
        assert np.isfinite(rows["log_probs"][i]).tolist() == mask.tolist()
        assert rows["turn_spans"][i][:, 1].tolist() == [1, 0, 1, 0, 1]
        scores = torch.log_softmax(
            policy.model(input_ids=torch.tensor(row[None], dtype=torch.int64)).logits[0, :-1], -1
        )
        wanted = scores.gather(1, torch.tensor(row[1:, None], dtype=torch.int64))[:, 0].detach().numpy()
        np.testing.assert_allclose(rows["log_probs"][i][1:][mask[1:]], wanted[mask[1:]], rtol=0, atol=1e-5)
        letters = policy.tokenizer.decode(row[mask], skip_special_tokens=True)
        assert rows["task_reward"][i] == len(letters)
