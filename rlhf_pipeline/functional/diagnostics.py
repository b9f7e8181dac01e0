"""Numbers that tell whether a step was healthy. Nothing here has a gradient."""

from __future__ import annotations

import torch

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.kl import LOG_RATIO_LIMIT, masked_mean
from rlhf_pipeline.functional.policy_loss import segment_sum

__all__ = [
    "clip_fractions",
    "effective_sample_size",
    "ess_from_sums",
    "kl_approx",
    "masked_entropy",
    "mfu",
    "padding_efficiency",
    "sequence_effective_sample_size",
    "training_flops",
    "weight_sums",
]


def weight_sums(
    log_ratio: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(n, sum w, sum w^2)` of `w = exp(log_ratio)`, float64; sums over micro-batches and ranks may be added.

    Args:
        log_ratio: any shape, clamped to +-20 here.
        mask: bool, same shape; all elements by default.

    >>> weight_sums(torch.tensor([0.0, 0.0]))[1:]
    (tensor(2., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    with torch.no_grad():
        w = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        keep = torch.ones_like(w, dtype=torch.bool) if mask is None else mask
        w = torch.where(keep, w, torch.zeros_like(w))
        return keep.sum().double(), w.sum(), w.square().sum()


def ess_from_sums(count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """`(sum w)^2 / (n sum w^2)`; 0 where there is no element.

    >>> ess_from_sums(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0))
    tensor(0.9000)
    """
    return total.square() / (count * squares).clamp_min(torch.finfo(total.dtype).tiny)


def effective_sample_size(log_ratio: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The share of tokens that the weights leave effective, in (0, 1]: 1 when all weights are equal.

    Args:
        log_ratio: log-weights of tokens, any shape.
        mask: bool, same shape.

    >>> effective_sample_size(torch.tensor([1.0, 2.0]).log())
    tensor(0.9000, dtype=torch.float64)
    """
    return ess_from_sums(*weight_sums(log_ratio, mask))


def sequence_effective_sample_size(log_ratio: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    """The same over sequences, the weight of a sequence being the product of its tokens' weights.

    Args:
        log_ratio: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences; those without a row do not count.

    >>> sequence_effective_sample_size(torch.zeros(3), torch.tensor([0, 0, 1]), 3)
    tensor(1., dtype=torch.float64)
    """
    with torch.no_grad():
        total = segment_sum(log_ratio.detach(), index, segments)
        rows = segment_sum(torch.ones_like(total[:1]).expand(index.shape), index, segments)
        return effective_sample_size(total, rows > 0)


def clip_fractions(
    clipped_low: torch.Tensor, clipped_high: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of masked tokens whose low, and whose high bound was the branch taken; any equal shapes.

    >>> low, high = torch.tensor([True, False]), torch.tensor([False, False])
    >>> clip_fractions(low, high, torch.tensor([True, True]))
    (tensor(0.5000), tensor(0.))
    """
    return masked_mean(clipped_low.float(), mask), masked_mean(clipped_high.float(), mask)


def kl_approx(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked mean of `old - current`, in nats.

    >>> kl_approx(torch.tensor([-2.0, 9.0]), torch.tensor([-1.0, 0.0]), torch.tensor([True, False]))
    tensor(1.)
    """
    return masked_mean((old_log_probs - log_probs).detach(), mask)


def masked_entropy(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean entropy over the mask, in nats, without gradient.

    >>> masked_entropy(torch.tensor([1.0, 7.0]), torch.tensor([True, False]))
    tensor(1.)
    """
    return masked_mean(entropy.detach(), mask)


def padding_efficiency(attention_mask: torch.Tensor) -> torch.Tensor:
    """Real tokens over positions of a padded [B, T] batch; 1 for an empty one.

    >>> padding_efficiency(torch.tensor([[True, True], [True, False]]))
    tensor(0.7500)
    """
    if attention_mask.numel() == 0:
        return torch.ones((), device=attention_mask.device)
    return attention_mask.float().mean()


def training_flops(matmul_params: int, layers: int, hidden: int, lengths: torch.Tensor) -> torch.Tensor:
    """Useful floating-point operations of one forward and backward pass.

    `6 * matmul_params * tokens + 12 * layers * hidden * sum(T^2) / 2`: causal attention is counted at half, and
    recomputation not at all.

    Args:
        matmul_params: parameters that enter a matmul per token (the embedding table does not, a head does).
        layers: attention layers.
        hidden: attention width, heads times head size.
        lengths: [N], real tokens per sequence.

    >>> training_flops(10, 1, 2, torch.tensor([3, 1])).item()
    360.0
    """
    n = lengths.double()
    return 6.0 * matmul_params * n.sum() + 6.0 * layers * hidden * n.square().sum()


def mfu(
    matmul_params: int,
    layers: int,
    hidden: int,
    lengths: torch.Tensor,
    *,
    seconds: float,
    peak_flops: float,
) -> float:
    """Model FLOPs utilisation: `training_flops` over what the device could do in that time, 0 to 1.

    Args:
        matmul_params: see `training_flops`.
        layers: attention layers.
        hidden: attention width.
        lengths: [N], real tokens per sequence.
        seconds: wall time of the step.
        peak_flops: operations per second, best measured with a large matmul in the same run.

    Raises:
        DefinitionError: seconds or peak_flops not above 0.

    >>> mfu(10, 1, 2, torch.tensor([3, 1]), seconds=2.0, peak_flops=360.0)
    0.5
    """
    if not (seconds > 0 and peak_flops > 0):
        raise DefinitionError(f"seconds and peak_flops must be above 0; got {seconds} and {peak_flops}.")
    return float(training_flops(matmul_params, layers, hidden, lengths)) / (seconds * peak_flops)
