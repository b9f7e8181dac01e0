"""Estimators of the KL divergence from single log-probs.

Here `d = log pi(token) - log ref(token)` for tokens drawn from `pi`. http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch

from rlhf_pipeline.config import KLEstimator

__all__ = ["LOG_RATIO_LIMIT", "KLEstimator", "clamped_log_ratio", "kl_figures", "kl_k1", "kl_k2", "kl_k3", "kl_loss"]


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before an exponential."""


def clamped_log_ratio(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return `log_probs - other`, clamped to +-20 so that its exponential stays finite; the shapes must be equal.

    >>> clamped_log_ratio(torch.tensor([-1.0, -50.0]), torch.tensor([-2.0, 0.0]))
    tensor([  1., -20.])
    """
    return (log_probs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """`d`: unbiased, high variance; the form for rewards. As a loss its expected gradient is zero.

    Args:
        log_probs: any shape.
        ref_log_probs: the same shape.

    Returns:
        The estimate per token, in nats, same shape.

    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.5000])
    """
    return log_probs - ref_log_probs


def kl_k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """`d^2 / 2`: biased as a value, but its gradient is the gradient of the KL on-policy.

    Args:
        log_probs: any shape.
        ref_log_probs: the same shape.

    Returns:
        The estimate per token, in nats, same shape.

    >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1250])
    """
    return (log_probs - ref_log_probs).square() / 2


def kl_k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """`exp(-d) - 1 + d`: unbiased as a value, low variance, never negative; biased as a gradient.

    `d` is clamped to +-20.

    Args:
        log_probs: any shape.
        ref_log_probs: the same shape.

    Returns:
        The estimate per token, in nats, same shape.

    >>> kl_k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    d = clamped_log_ratio(log_probs, ref_log_probs)
    return torch.expm1(-d) + d


def kl_loss(
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    estimator: KLEstimator = "k3+",
    *,
    behaviour: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a KL term for a loss, per token; 0 where the other log-prob is not finite.

    * `k2`: `d^2 / 2`; on-policy its gradient is the gradient of the KL.
    * `k3+`: the value of k3, the gradient of k2.
    * `k3`: `exp(-d) - 1 + d`; the gradient is biased.

    For tokens that another policy sampled, `behaviour` corrects with `w = pi / behaviour`, whole: a bound on it would
    omit the correction where it is needed. Under the policy's own
    expectation, the gradients of `k2` and `k3+` are right, so their weight is a constant, `stopgrad(w)`; the value of
    `k3` is right, so its weight is differentiated too (the form of DeepSeek-V3.2). The expected gradient of all
    three is then that of the KL.

    >>> kl_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, float("nan")]), "k2")
    tensor([0.1250, 0.0000])
    """
    has_reference = torch.isfinite(reference)
    reference = torch.where(has_reference, reference, log_probs.detach())
    weight = None if behaviour is None else clamped_log_ratio(log_probs, behaviour).exp()
    if estimator == "k3":
        value = kl_k3(log_probs, reference)
    else:
        value = kl_k2(log_probs, reference)
        if estimator == "k3+":
            value = value + (kl_k3(log_probs, reference) - value).detach()
        weight = None if weight is None else weight.detach()
    if weight is not None:
        value = value * weight
    return torch.where(has_reference, value, torch.zeros_like(value))


def kl_figures(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> dict[str, float]:
    """Return the means of k1, k2 and k3 over tokens, in nats, computed in float64; 0 if there are no tokens.

    Args:
        log_probs: [N], of the tokens that count.
        ref_log_probs: [N].

    >>> kl_figures(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.0]))
    {'k1': 0.25, 'k2': 0.0625, 'k3': 0.05326532985631...}
    """
    lp, lr = log_probs.detach().double(), ref_log_probs.detach().double()
    estimators = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
    return {name: float(f(lp, lr).mean()) if lp.numel() else 0.0 for name, f in estimators.items()}
