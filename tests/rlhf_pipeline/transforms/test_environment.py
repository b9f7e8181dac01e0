"""The KL transforms appended to an environment, as TorchRL documents them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv, check_env_specs

from rlhf_pipeline import KLRewardTransform, RetrieveLogProb, scratch_policy

N, T, PROMPT = 3, 6, 2


class Answers(EnvBase):
    """An action is a whole completion with its log-probs; the reward counts the tokens 7 in it."""

    def __init__(self, keep: float = 0.5) -> None:
        super().__init__(batch_size=[N])
        self.keep = keep
        self.observation_spec = Composite(step=Unbounded(shape=(N, 1)), shape=[N])
        self.action_spec = Composite(
            tokens=Composite(full=Categorical(50, shape=(N, T)), shape=[N]),
            masks=Composite(all_assistant_mask=Binary(T, shape=(N, T), dtype=torch.bool), shape=[N]),
            log_probs=Composite(full=Unbounded(shape=(N, T)), shape=[N]),
            shape=[N],
        )
        self.reward_spec = Unbounded(shape=(N, 1))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict({"step": torch.zeros(N, 1)}, [N])

    def _step(self, tensordict: Any) -> TensorDict:
        reward = (tensordict["tokens", "full"] == 7).float().sum(-1, keepdim=True)
        out = {"step": torch.ones(N, 1), "reward": reward, "done": torch.zeros(N, 1, dtype=torch.bool)}
        return TensorDict(out, [N])

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def act(td: Any) -> Any:
    """A fixed completion after two prompt tokens."""
    td["tokens", "full"] = torch.tensor([[3, 4, 7, 8, 7, 9]]).expand(N, T).clone()
    td["masks", "all_assistant_mask"] = (torch.arange(T) >= PROMPT).expand(N, T).clone()
    td["log_probs", "full"] = torch.full((N, T), -2.0)
    return td


@pytest.fixture(scope="module")
def policy():
    """A tiny random model over the token ids."""
    return scratch_policy("".join(chr(33 + i) for i in range(60)), hidden_size=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize("out_keys", [None, ["reward", "cost"], ["shaped", "cost", "mine"]])
@pytest.mark.parametrize("add", [True, False])
def test_the_penalty_as_a_transform_of_an_environment(policy, out_keys, add):
    """The specs hold, and every step has the shaped reward, the penalty and the reference per token."""
    transform = KLRewardTransform(policy, coef=0.5, out_keys=out_keys, add_to_reward=add)
    env = TransformedEnv(Answers(), transform)
    check_env_specs(env)
    torch.manual_seed(0)
    step = env.rollout(2, act)[:, 0]
    shaped, cost, ref = (out_keys or []) + ["reward", "kl_penalty", ("ref_log_probs", "full")][len(out_keys or []) :]
    said = torch.arange(T) >= PROMPT
    with torch.no_grad():
        want = policy.log_probs(step["tokens", "full"], torch.ones(N, T, dtype=torch.bool))
    k1 = torch.where(said, -2.0 - want, 0.0)
    got = step["next"].get(ref)
    torch.testing.assert_close(got[:, PROMPT:], want[:, PROMPT:])
    torch.testing.assert_close(step["next"].get(cost), k1)
    if not add:
        assert step["next", "reward"].tolist() == [[2.0]] * N
        return
    last = torch.where(torch.arange(T) == T - 1, 2.0, 0.0)
    torch.testing.assert_close(step["next"].get(shaped), last - 0.5 * k1)


def test_scores_as_a_transform_of_an_environment(policy):
    """Reference log-probs of every step, which the penalty then takes as they are."""
    env = TransformedEnv(Answers(), RetrieveLogProb(policy))
    env.append_transform(KLRewardTransform(coef=0.5))
    check_env_specs(env)
    step = env.rollout(1, act)[:, 0]
    alone = TransformedEnv(Answers(), KLRewardTransform(policy, coef=0.5)).rollout(1, act)[:, 0]
    torch.testing.assert_close(step["next", "ref_log_probs", "full"], alone["next", "ref_log_probs", "full"])
    torch.testing.assert_close(step["next", "reward"], alone["next", "reward"])
