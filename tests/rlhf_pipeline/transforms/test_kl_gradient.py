"""The gradients of the KL penalty against the exact KL, on a vocabulary of five tokens, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.functional.kl import kl_k1, kl_k2, kl_k3
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.1, 0.8, -1.0], dtype=torch.float64).log_softmax(-1)
REWARDS = torch.tensor([0.0, 1.0, 0.5, 0.0, 0.2], dtype=torch.float64)


def exact(function):
    """Gradient of a function of the log-probs with respect to the logits."""
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(logits.log_softmax(-1)), logits)
    return gradient


def forward_kl(log_probs):
    """KL(policy || reference)."""
    return (log_probs.exp() * (log_probs - REFERENCE)).sum()


def sampled(count, length, coef, transforms, rewards=REWARDS):
    """Trajectories of the policy, two in a group, through a write path; with tokens `[n, length]`."""
    gen = torch.Generator().manual_seed(0)
    log_probs = LOGITS.log_softmax(-1)
    tokens = torch.multinomial(log_probs.exp(), count * length, replacement=True, generator=gen).reshape(count, length)
    start = torch.zeros(count, 1, dtype=torch.int64)
    nan = torch.full((count, 1), math.nan, dtype=torch.float64)
    td = TensorDict(
        {
            "tokens": {"full": torch.cat([start, tokens], 1)},
            "masks": {
                "all_attention_mask": torch.ones(count, length + 1, dtype=torch.bool),
                "all_assistant_mask": torch.arange(length + 1).expand(count, -1) > 0,
            },
            "log_probs": {"full": torch.cat([nan, log_probs[tokens]], 1)},
            "next": {"ref_log_probs": {"full": torch.cat([nan, REFERENCE[tokens]], 1)}},
            "task_reward": rewards[tokens].sum(1),
            "group_id": torch.arange(count) // 2,
        },
        batch_size=[count],
    )
    for transform in (*transforms, KLRewardTransform(coef=coef))[::-1]:
        td = transform.inv(td)
    return tokens, steps_of(td)


def assert_unbiased(samples, expected):
    """The mean of the samples is within three standard errors, which are small enough to tell."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert bool((error < 0.05 * expected.abs().max()).all())
    assert bool(((samples.mean(0) - expected).abs() < 3 * error).all()), (samples.mean(0), expected, error)


@pytest.mark.parametrize("length", [1, 3])
def test_k1_in_the_reward_is_unbiased(length):
    """Return times score, with no task reward: the gradient of minus the exact KL of the whole sequence."""
    tokens, columns = sampled(60_000, length, 1.0, [], rewards=torch.zeros(5))
    returns = columns["next", "reward"].values.double().reshape(len(tokens), -1).sum(1)
    score = torch.nn.functional.one_hot(tokens, 5).double().sum(1) - length * LOGITS.softmax(-1)
    assert_unbiased(returns[:, None] * score, -length * exact(forward_kl))


def test_k3_as_a_loss_is_biased():
    """Its gradient under the policy's own samples is far from that of the KL, of which it is an estimate."""
    weight = LOGITS.softmax(-1)
    gradient = exact(lambda log_probs: (weight * kl_k3(log_probs, REFERENCE)).sum())
    assert float((gradient - exact(forward_kl)).norm() / exact(forward_kl).norm()) > 0.1


def test_through_the_group_advantage():
    """With the leave-one-out baseline: the gradient of task reward minus coef * KL, for a group of two."""
    tokens, columns = sampled(60_000, 1, 0.4, [MCAdvantage(2, estimator="rloo")])
    advantage = columns["advantage"].values.double().reshape(len(tokens), -1)[:, 1]
    score = torch.nn.functional.one_hot(tokens[:, 0], 5).double() - LOGITS.softmax(-1)
    both = (advantage[:, None] * score).reshape(-1, 2, 5).mean(1)  # members of a group are not independent
    expected = exact(lambda lp: (lp.exp() * REWARDS).sum() - 0.4 * forward_kl(lp))
    assert_unbiased(both, expected)


@pytest.mark.parametrize(
    ("estimator", "gradient_of"),
    [
        (kl_k1, lambda lp: 0.0 * lp.sum()),
        (kl_k2, forward_kl),
        (kl_k3, lambda lp: (REFERENCE.exp() * (REFERENCE - lp)).sum()),
    ],
    ids=["k1: none", "k2: the KL", "k3: the reverse KL"],
)
def test_as_a_loss(estimator, gradient_of):
    """Expected gradients by enumeration: k1 has none, k2 that of the KL, k3 that of KL(reference || policy)."""
    weight = LOGITS.softmax(-1)
    expected = exact(lambda lp: (weight * estimator(lp, REFERENCE)).sum())
    torch.testing.assert_close(expected, exact(gradient_of), atol=1e-12, rtol=0)


def test_the_adaptive_controller_follows_the_measured_kl(tmp_path, make_rows):
    """Three calls of `extend`: each is shaped with the coefficient before it, which then moves by the formula."""
    controller = AdaptiveKLController(init_kl_coef=0.2, target=2.0, horizon=8)
    transform = Compose(MCAdvantage(2), KLRewardTransform(controller=controller))
    rb = TrajectoryReplayBuffer(storage=tmp_path / "store", transform=transform)
    coef, expected = 0.2, []
    for group, gap in enumerate([0.9, 2.0, 0.1]):
        rows = make_rows([4, 6], first_group=group)  # 2 and 4 tokens of completion
        for row in rows:
            row["next", "ref_log_probs", "full"] = row["log_probs", "full"] - gap
        rb.extend(lazy_stack(rows))
        expected += [coef, coef]
        measured = 3 * gap  # mean over the two trajectories of their sums
        coef *= 1 + min(max(measured / 2.0 - 1, -0.2), 0.2) * 2 / 8
        assert controller.coef == pytest.approx(coef, rel=1e-5)
        assert transform[1].stats["kl"] == pytest.approx(measured, rel=1e-5)
    assert rb.store.read_scalars("kl_coef").tolist() == pytest.approx(expected)
    rb.storage.close()
