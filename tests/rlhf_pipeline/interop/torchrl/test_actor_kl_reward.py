from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torch.distributions import Independent, Normal
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv, check_env_specs

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import ActorKLRewardTransform, KLRewardTransform


class IndependentNormal(Independent):
    """A diagonal normal over the last dimension."""

    def __init__(self, loc, scale):
        super().__init__(Normal(loc, scale), 1)


def make_actor(seed=0):
    """A Gaussian policy from 3 observations to 2 actions."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        Mod(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=IndependentNormal, return_log_prob=True
        ),
    )


class Drift(EnvBase):
    """Observations that move with the action; the reward is 1."""

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded(shape=(3,)))
        self.action_spec = Bounded(low=-10.0, high=10.0, shape=(2,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **kwargs):
        del tensordict, kwargs
        return TensorDict(observation=torch.zeros(3), done=torch.zeros(1, dtype=torch.bool))

    def _step(self, tensordict):
        moved = tensordict["observation"] + tensordict["action"].sum()
        return TensorDict(observation=moved, reward=torch.ones(1), done=torch.zeros(1, dtype=torch.bool))

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def perturb(actor):
    """Move all parameters in place."""
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.3)


def test_constructor_chooses_the_form():
    """A probabilistic TensorDict module gives the general form, which is a KLRewardTransform too."""
    transform = KLRewardTransform(make_actor(), coef=0.1)
    assert type(transform) is ActorKLRewardTransform
    assert isinstance(transform, KLRewardTransform)
    assert type(KLRewardTransform(coef=0.1)) is KLRewardTransform


def test_penalty_against_the_distributions():
    """`reward - coef * (log_prob - frozen log_prob)`, the frozen copy being the actor as it was."""
    actor = make_actor()
    transform = KLRewardTransform(actor, coef=0.5, out_keys=["reward", "kl"])
    before = make_actor()
    perturb(actor)
    td = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    td["next", "reward"] = torch.ones(5, 1)
    expected_kl = actor.get_dist(td).log_prob(td["action"]) - before.get_dist(td.clone()).log_prob(td["action"])
    out = transform(td)
    torch.testing.assert_close(out["next", "kl"], expected_kl[:, None].detach())
    torch.testing.assert_close(out["next", "reward"], 1 - 0.5 * expected_kl[:, None].detach())
    assert not out["next", "reward"].requires_grad
    assert float(expected_kl.detach().abs().max()) > 0.01


def test_requires_grad_keeps_the_graph():
    """The copy's parameters are differentiable when asked for, and only then."""
    frozen = KLRewardTransform(make_actor())
    assert not any(p.requires_grad for p in frozen.parameters())
    transform = KLRewardTransform(make_actor(), requires_grad=True)
    actor = make_actor(1)
    td = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    td["next", "reward"] = torch.ones(5, 1)
    transform(td)["next", "reward"].sum().backward()
    assert all(p.grad is not None for p in transform.parameters())


@pytest.mark.parametrize("out_keys", [None, ["reward_kl"], ["reward_kl", "kl"]])
def test_as_environment_transform(out_keys):
    """The specs hold, and a rollout's reward differs from the raw one after the actor moved."""
    actor = make_actor()
    env = TransformedEnv(Drift(), KLRewardTransform(actor, coef=0.1, out_keys=out_keys))
    perturb(actor)
    with torch.no_grad():
        rollout = env.rollout(4, actor)
    key = ("next", "reward" if out_keys is None else "reward_kl")
    assert rollout[key].shape == (4, 1)
    assert bool((rollout[key] != 1).all())
    if out_keys is not None:
        assert bool((rollout["next", "reward"] == 1).all())


def test_environment_specs():
    """The new keys are declared, and a reset and a step hold what is declared."""
    actor = make_actor()
    env = TransformedEnv(Drift(), KLRewardTransform(actor, out_keys=["reward_kl", "kl"]))
    assert "reward_kl" in env.observation_spec
    assert env.fake_tensordict()["next", "kl"].shape == (1,)
    assert env.reset()["reward_kl"].tolist() == [0.0]
    with torch.no_grad():
        step = env.rollout(2, actor)["next"]
    assert env.observation_spec.is_in(step[0].select("observation", "reward_kl", "kl"))


def test_write_path_passes_unchanged():
    """As in TorchRL this form shapes steps, not stored trajectories."""
    td = TensorDict(a=torch.zeros(2), batch_size=[2])
    transform = KLRewardTransform(make_actor())
    assert transform.inv(td) is td
    assert transform.inv(None) is None


@pytest.mark.parametrize("out_keys", ["reward", "reward_kl"])
def test_the_specs_of_an_environment_hold(out_keys):
    """`check_env_specs` takes random actions, which have no log-prob of the actor."""
    check_env_specs(TransformedEnv(Drift(), KLRewardTransform(make_actor(), out_keys=out_keys)))


def test_errors():
    """Missing action or log-prob, wrong keys, no actor."""
    transform = KLRewardTransform(make_actor())
    step = TensorDict({"observation": torch.zeros(3), ("next", "reward"): torch.zeros(1)})
    with pytest.raises(DataError, match="action"):
        transform(step)
    with pytest.raises(DataError, match="return_log_prob"):
        transform(step.set("action", torch.zeros(2)))
    with pytest.raises(DefinitionError, match="reward key"):
        KLRewardTransform(make_actor(), in_keys=["a", "b"])
    with pytest.raises(DefinitionError, match="actor"):
        ActorKLRewardTransform()
