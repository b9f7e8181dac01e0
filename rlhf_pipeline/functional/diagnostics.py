"""Figures that show whether a step was healthy, over flat rows: one row per token that counts. No gradient.

Each figure is computed from sums, so the figures of micro-batches merge exactly.
"""

from __future__ import annotations

import torch

from rlhf_pipeline.functional.kl import LOG_RATIO_LIMIT
from rlhf_pipeline.functional.policy_loss import indexed_sum

__all__ = [
    "ess_from_sums",
    "row_mean",
    "sequence_weight_sums",
    "training_flops",
    "weight_sums",
]


def row_mean(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of rows [N], without gradient; 0 if there are no rows. Rows outside a mask do not count.

    >>> row_mean(torch.tensor([True, False])), row_mean(torch.zeros(0))
    (tensor(0.5000), tensor(0.))
    """
    if mask is None:
        return values.detach().sum() / max(values.numel(), 1)
    return torch.where(mask, values.detach(), 0).sum() / mask.sum().clamp_min(1)


def weight_sums(
    log_ratio: torch.Tensor, mask: torch.Tensor | None = None, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `(n, sum w, sum w^2)` of `w = exp(log_ratio)`, float64; sums of micro-batches and ranks may be added.

    >>> weight_sums(torch.tensor([0.0, 0.0]))[1:]
    (tensor(2., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    with torch.no_grad():
        w = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        keep = torch.ones_like(w, dtype=torch.bool) if mask is None else mask
        w = torch.where(keep, w, torch.zeros_like(w))
        return keep.sum(dim).double(), w.sum(dim), w.square().sum(dim)


def sequence_weight_sums(
    log_ratio: torch.Tensor, index: torch.Tensor, segments: int, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same sums over sequences; the weight of a sequence is the product of its tokens' weights.

    Args:
        log_ratio: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences; sequences without a row do not count.
        mask: bool [N], the rows that count; all by default.

    >>> log_ratio = torch.tensor([2.0, 1.5, 1.0]).log()
    >>> [round(x.item(), 6) for x in sequence_weight_sums(log_ratio, torch.tensor([0, 0, 2]), 3)]
    [2.0, 4.0, 10.0]
    """
    with torch.no_grad():
        ones_N = torch.ones_like(log_ratio, dtype=torch.float64) if mask is None else mask.double()
        total_B = indexed_sum(log_ratio.detach().double() * ones_N, index, segments)
        rows_B = indexed_sum(ones_N, index, segments)
        return weight_sums(total_B, rows_B > 0)


def ess_from_sums(count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return `(sum w)^2 / (n sum w^2)`, the effective share of the rows under the weights; 0 if there are no rows.

    >>> ess_from_sums(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0))
    tensor(0.9000)
    """
    return total.square() / (count * squares).clamp_min(torch.finfo(total.dtype).tiny)


def training_flops(
    lengths: torch.Tensor,
    scored: torch.Tensor,
    *,
    trained: int,
    head: int,
    layers: int,
    width: int,
    frozen: int = 0,
    head_is_trained: bool = True,
    backward: bool = True,
) -> float:
    """Count the useful floating-point operations of one forward pass, and of its backward pass.

    Each matmul weight costs 2 per token forward, 2 for the gradient of its input and 2 for its own gradient, which a
    frozen weight does not have. Attention costs `4 * width * T^2` per layer forward, half of it under a causal mask,
    and twice that backward. The head is counted for the scored tokens, where it is computed:

        forward             2 (trained + frozen) * tokens + 2 head * scored + 2 * layers * width * sum T^2
        with backward   (6 trained + 4 frozen) * tokens + (6 or 4) head * scored + 6 * layers * width * sum T^2

    Recomputation (activation checkpointing, a head that forms its logits twice) is not counted.

    Args:
        lengths: [N], real tokens of each sequence.
        scored: [N], tokens of each that the head is applied to.
        trained: matmul weights of the trunk that are trained (an embedding table is not one).
        head: weights of the head.
        layers: attention layers.
        width: attention width, heads times head size.
        frozen: matmul weights of the trunk that are not trained.
        head_is_trained: whether the head's weights have a gradient.
        backward: False counts only the forward pass.

    >>> training_flops(torch.tensor([3, 1]), torch.tensor([3, 1]), trained=8, head=2, layers=1, width=2)
    360.0
    """
    flops_trained, flops_frozen = (6, 4) if backward else (2, 2)
    n = lengths.double()
    trunk = float(flops_trained * trained + flops_frozen * frozen) * n.sum()
    top = float((flops_trained if head_is_trained else flops_frozen) * head) * scored.double().sum()
    attention = float((6 if backward else 2) * layers * width) * n.square().sum()
    return float(trunk + top + attention)
