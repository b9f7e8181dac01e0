"""Estimators of the KL divergence from single log-probs, and masked means.

With `d = log pi(token) - log ref(token)` for tokens drawn from `pi`. http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch

__all__ = ["LOG_RATIO_LIMIT", "clamped_log_ratio", "kl_k1", "kl_k2", "kl_k3", "masked_mean"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before an exponential."""


def clamped_log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`log_probs - other`, clamped to +-20 so that its exponential stays finite; any equal shapes.

    >>> clamped_log_ratio(torch.tensor([-1.0, -50.0]), torch.tensor([-2.0, 0.0]))
    tensor([  1., -20.])
    """
    return (log_probs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """The mean of `values` where `mask` is True; 0 where nothing is, whatever stands at masked positions.

    Args:
        values: any shape.
        mask: bool, the same shape.
        dim: dimensions to reduce; all by default.

    Returns:
        The mean; NaN or infinity at a masked position does not reach it.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    kept = torch.where(mask, values, torch.zeros_like(values))
    if dim is None:
        return kept.sum() / mask.sum().clamp_min(1)
    return kept.sum(dim) / mask.sum(dim).clamp_min(1)
