"""Token losses of the policy gradient: clipped, CISPO, SAPO, GSPO, GMPO, DPPO, VESPO; corrections for stale samples.

All per-token tensors have one shape, [N] rows or [B, T]. `log_ratio` is `log pi - log proximal`, already
clamped (`kl.clamped_log_ratio`), with the gradient of the current policy. Losses are per token, unweighted:
`aggregation.token_weights` gives the weights. Log-probs are in nats. Where sequences have a part in a formula, the end
of a name gives a shape: `_N` is one value per row, `_B` one per sequence.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from rlhf_pipeline.config import DPPO, VESPO
from rlhf_pipeline.functional.kl import LOG_RATIO_LIMIT, clamped_log_ratio

__all__ = [
    "TokenLoss",
    "cispo_loss",
    "clipped_loss",
    "dppo_loss",
    "gspo_log_ratio",
    "gmpo_log_ratio",
    "icepop_weight",
    "kl_trust_mask",
    "off_policy_mask",
    "indexed_sum",
    "sapo_loss",
    "sequence_icepop_weight",
    "sequence_mean_log_ratio",
    "sequence_tis_weight",
    "tis_weight",
    "vespo_loss",
]


class TokenLoss(NamedTuple):
    """A token loss and where it was clipped."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def clipped_loss(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    low: float = 0.2,
    high: float = 0.2,
    *,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> TokenLoss:
    """`-min(w A, clip(w, 1 - low, 1 + high) A)` with `w = exp(log_ratio)`: PPO, GRPO, DAPO.

    Args:
        log_ratio: per token; the sequence form of GSPO comes from `gspo_log_ratio`.
        advantage: per token, same shape.
        low: lower clip.
        high: upper clip.
        dual_clip: `c > 1`; where `A < 0` the loss is at most `-c A`. arXiv:1912.09729.
        delta: bound on `w` in the unclipped branch, above `1 + high` (two-sided clipping).

    Returns:
        The loss per token, and where the clipped branch was taken.

    >>> loss = clipped_loss(torch.tensor([1.5, 0.5]).log(), torch.tensor([1.0, 1.0]))
    >>> loss.loss
    tensor([-1.2000, -0.5000])
    >>> loss.clipped_high
    tensor([ True, False])
    """
    ratio = log_ratio.exp()
    clipped = torch.clamp(ratio, min=1.0 - low, max=1.0 + high)
    free = ratio if delta is None else ratio.clamp(max=delta)
    gain = torch.minimum(free * advantage, clipped * advantage)
    if dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual_clip * advantage), gain)
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - low) & (advantage < 0)
        clipped_high = (ratio > 1.0 + high) & (advantage > 0)
    return TokenLoss(-gain, clipped_low, clipped_high)


def cispo_loss(
    log_probs: torch.Tensor,
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    low: float = 0.2,
    high: float = 0.2,
) -> TokenLoss:
    """`-stopgrad(clip(w, 1 - low, 1 + high)) A log pi`: a clipped token keeps its gradient. arXiv:2506.13585.

    The paper has no lower clip, which is `low=1`.

    >>> lp = torch.tensor([-1.0], requires_grad=True)
    >>> cispo_loss(lp, torch.tensor([0.5]), torch.tensor([1.0])).loss.backward()
    >>> lp.grad
    tensor([-1.2000])
    """
    ratio = log_ratio.detach().exp()
    weight = torch.clamp(ratio, min=1.0 - low, max=1.0 + high)
    return TokenLoss(-weight * advantage * log_probs, ratio < 1.0 - low, ratio > 1.0 + high)


def sapo_loss(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """`-(4 / tau) sigmoid(tau (w - 1)) A` with `w = exp(log_ratio)`: SAPO's smooth gate. arXiv:2511.20347.

    `tau` is one temperature where `A > 0` and another elsewhere. At `w = 1` value and gradient per `w` are `2 A / tau`
    and `A`; further away the gradient fades, `4 p (1 - p) A` with `p = sigmoid(tau (w - 1))`, and never stops at once.

    >>> log_ratio = torch.zeros(1, requires_grad=True)
    >>> sapo_loss(log_ratio, torch.tensor([3.0])).loss.backward()
    >>> log_ratio.grad
    tensor([-3.])
    """
    tau = torch.full_like(log_ratio, temperature_negative).masked_fill(advantage > 0, temperature_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    none = torch.zeros_like(log_ratio, dtype=torch.bool)
    return TokenLoss(-gate * advantage, none, none)


def dppo_loss(
    log_probs: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, region: DPPO | None = None
) -> TokenLoss:
    """`-M stopgrad(min(r, c)) A log pi`: tokens outside a trust region around the sampler have no loss (DPPO).

    With `r = pi / mu`, `pi = exp(log_probs)` and `mu = exp(behaviour)`, the divergence of the two outcomes {sampled
    token, any other} is, by `region.divergence`,

        tv    |pi - mu|
        kl    mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

    and `M = 0` where `A > 0`, `r > 1` and it is above `high`, or `A < 0`, `r < 1` and it is above `low`; with
    `mask="both"` the sign of `A` does not count. Source: arXiv:2602.04879, equations 11 to 14; verl's `dppo_tv` and
    `dppo_kl`, prime-rl for `both`. The mask has no gradient, and a masked token keeps its place in the counts. PPO's
    clip of `r` at the same bounds has this gradient, too; only its value differs.

    Args:
        log_probs: of the policy, with gradient.
        behaviour: of the sampler, at the same temperature, same shape.
        advantage: per token, same shape.
        region: the settings; the defaults where None.

    Returns:
        The loss per token, and where the mask took it: `clipped_low` where the policy is below the sampler,
        `clipped_high` where it is above.

    >>> lp = torch.tensor([0.5, 0.9, 0.1]).log().requires_grad_()
    >>> loss = dppo_loss(lp, torch.tensor([0.4, 0.6, 0.6]).log(), torch.tensor([1.0, 1.0, 1.0]))
    >>> loss.loss.sum().backward()
    >>> lp.grad
    tensor([-1.2500, -0.0000, -0.1667])
    >>> loss.clipped_high
    tensor([False,  True, False])
    """
    region = DPPO() if region is None else region
    low, high = region.bounds
    with torch.no_grad():
        lp, lb = log_probs.detach(), behaviour
        pi, mu = lp.exp(), lb.exp()
        if region.divergence == "tv":
            divergence = (pi - mu).abs()
        else:
            # Formed from log-probs: for a token that is nearly certain, `1 - pi` has no digits left in float32.
            rest_pi, rest_mu = -torch.expm1(lp.clamp(max=0)), -torch.expm1(lb.clamp(max=0))
            tiny = torch.finfo(lp.dtype).tiny
            tail = rest_mu * (rest_mu.clamp_min(tiny).log() - rest_pi.clamp_min(tiny).log())
            divergence = mu * (lb - lp) + tail
        below, above = (lp < lb) & (divergence > low), (lp > lb) & (divergence > high)
        if region.mask == "harmful":
            below, above = below & (advantage < 0), above & (advantage > 0)
        ratio = clamped_log_ratio(lp, lb).exp().clamp(max=math.inf if region.ratio_cap is None else region.ratio_cap)
        weight = ratio.masked_fill(below | above, 0.0)
    return TokenLoss(-weight * advantage * log_probs, below, above)


_SMALLEST_WEIGHT: Final = math.log(1e-8)
"""The lower bound of the logarithm of VESPO's importance weight."""


def vespo_loss(
    log_probs: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    index: torch.Tensor,
    segments: int,
    shape: VESPO | None = None,
) -> TokenLoss:
    """`-stopgrad(phi(w)) A log pi`: a smooth function of the importance weight of the complete sequence (VESPO).

    `w = exp(sum of log_probs - behaviour over the sequence)`, its logarithm clamped to `[log 1e-8, 20]`, and
    `phi(w) = exp(scale + power log w - scale w)`, so `phi(1) = 1`: the weight of a sequence fades as `w` leaves 1,
    with one pair of settings where `A >= 0` and one where `A < 0`. Source: arXiv:2602.10693; TRL's `vespo`. `w`
    compares policy and sampler, so it includes what `tis_cap` corrects in other losses.

    Args:
        log_probs: [N], with gradient.
        behaviour: [N], of the sampler, at the same temperature.
        advantage: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.
        shape: the settings; the defaults where None.

    >>> lp = torch.tensor([-1.0, -1.0, -2.0]).requires_grad_()
    >>> behaviour, advantage = torch.tensor([-1.5, -0.5, -2.5]), torch.tensor([1.0, 1.0, -1.0])
    >>> vespo_loss(lp, behaviour, advantage, torch.tensor([0, 0, 1]), 2).loss.sum().backward()
    >>> lp.grad  # w is 1 in the first sequence and exp(0.5) in the second
    tensor([-1.0000, -1.0000,  1.2245])
    """
    shape = VESPO() if shape is None else shape
    with torch.no_grad():
        log_w_B = indexed_sum(log_probs.detach() - behaviour, index, segments)
        log_w_N = log_w_B.clamp(_SMALLEST_WEIGHT, LOG_RATIO_LIMIT)[index]
        positive_N = advantage >= 0
        power_N = torch.full_like(log_w_N, shape.power_negative).masked_fill(positive_N, shape.power_positive)
        scale_N = torch.full_like(log_w_N, shape.scale_negative).masked_fill(positive_N, shape.scale_positive)
        phi_N = (scale_N + power_N * log_w_N - scale_N * log_w_N.exp()).exp()
        never = torch.zeros_like(positive_N)
    return TokenLoss(-phi_N * advantage * log_probs, never, never)


def indexed_sum(values: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    """Sum rows by sequence, differentiable.

    Args:
        values: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.

    >>> indexed_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3)
    tensor([3., 0., 4.])
    """
    return values.new_zeros(segments).index_add(0, index, values)


def sequence_mean_log_ratio(log_ratio: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    """Return the mean log-ratio of each sequence, `log s` of GSPO; 0 for a sequence without rows.

    Args:
        log_ratio: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.

    >>> sequence_mean_log_ratio(torch.tensor([0.2, 0.4, 1.0]), torch.tensor([0, 0, 1]), 2)
    tensor([0.3000, 1.0000])
    """
    rows_B = indexed_sum(torch.ones_like(log_ratio), index, segments)
    return indexed_sum(log_ratio, index, segments) / rows_B.clamp_min(1)


def gspo_log_ratio(log_probs: torch.Tensor, proximal: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    """Return `stopgrad(log s_i) + log pi - stopgrad(log pi)`: the sequence ratio for every token. arXiv:2507.18071.

    The value is the sequence ratio's logarithm, clamped to +-20; each token has its own gradient, and with one
    weight per sequence their sum is the gradient through `s_i`.

    Args:
        log_probs: [N], with gradient.
        proximal: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.

    Returns:
        [N].

    >>> lp, lo = torch.tensor([-1.0, -2.0]), torch.tensor([-1.2, -2.4])
    >>> gspo_log_ratio(lp, lo, torch.tensor([0, 0]), 1)
    tensor([0.3000, 0.3000])
    """
    mean_B = sequence_mean_log_ratio(log_probs.detach() - proximal, index, segments)
    level_N = mean_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[index]
    return level_N + (log_probs - log_probs.detach())


def gmpo_log_ratio(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    index: torch.Tensor,
    segments: int,
    low: float = 0.4,
    high: float = 0.4,
) -> TokenLoss:
    """Return the logarithm of GMPO's geometric mean of clipped ratios, for every token. arXiv:2507.20673.

    With `l = log_ratio`, the mean over a sequence is that of `min(l, high)` where `A > 0` and of `max(l, -low)`
    elsewhere: the clip is per token, one-sided and of the logarithm (`exp(-0.4)` to `exp(0.4)` in the paper). The value
    is the sequence's for each token and each has its own gradient, as in `gspo_log_ratio`; with one weight per sequence
    their sum is the gradient through the mean. The loss `-exp(mean) A` is the paper's with `sequence_mean`.

    Args:
        log_ratio: [N], with gradient.
        advantage: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.
        low: lower clip.
        high: upper clip.

    >>> log_ratio, advantage = torch.tensor([0.2, 0.8]), torch.ones(2)
    >>> gmpo_log_ratio(log_ratio, advantage, torch.tensor([0, 0]), 1)[0]
    tensor([0.3000, 0.3000])
    """
    clipped_N = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    level_N = sequence_mean_log_ratio(clipped_N.detach(), index, segments)[index]
    with torch.no_grad():
        low_N = (log_ratio < -low) & (advantage < 0)
        high_N = (log_ratio > high) & (advantage > 0)
    return TokenLoss(level_N + (clipped_N - clipped_N.detach()), low_N, high_N)


def tis_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float, floor: float | None = None) -> torch.Tensor:
    """Return `min(exp(proximal - behaviour), cap)` (truncated importance sampling), without gradient.

    >>> tis_weight(torch.tensor([0.0, -1.0]), torch.tensor([-5.0, -1.0]), 2.0)
    tensor([2., 1.])
    """
    return clamped_log_ratio(proximal.detach(), behaviour).exp().clamp(min=floor, max=cap)


def sequence_tis_weight(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    index: torch.Tensor,
    segments: int,
    cap: float,
    floor: float | None = None,
) -> torch.Tensor:
    """Return `min(exp(sum of proximal - behaviour over the sequence), cap)` for every row, without gradient; all [N].

    >>> lo, lb = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.2])
    >>> sequence_tis_weight(lo, lb, torch.tensor([0, 0]), 1, 10.0)
    tensor([2.0138, 2.0138])
    """
    total_B = indexed_sum(proximal.detach() - behaviour, index, segments)
    return total_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(min=floor, max=cap)[index]


def icepop_weight(proximal: torch.Tensor, behaviour: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return `k = exp(proximal - behaviour)` where it is inside [low, high], else 0 (IcePop), without gradient.

    Source: arXiv:2510.18855; TRL calls it `token_mask`.

    >>> icepop_weight(torch.tensor([0.5, -3.0]), torch.tensor([0.0, 0.0]), 0.5, 5.0)
    tensor([1.6487, 0.0000])
    """
    ratio = clamped_log_ratio(proximal.detach(), behaviour).exp()
    return ratio * ((ratio >= low) & (ratio <= high))


def sequence_icepop_weight(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    index: torch.Tensor,
    segments: int,
    low: float,
    high: float,
    *,
    product: bool = False,
) -> torch.Tensor:
    """Return the same for a sequence's mean ratio, geometric, or for the product of its ratios; one value per row, [N].

    The product is TRL's `sequence_mask`.

    >>> lo, lb, index = torch.tensor([0.2, 0.4, -3.0]), torch.zeros(3), torch.tensor([0, 0, 1])
    >>> sequence_icepop_weight(lo, lb, index, 2, 0.5, 5.0)
    tensor([1.3499, 1.3499, 0.0000])
    >>> sequence_icepop_weight(lo, lb, index, 2, 0.5, 5.0, product=True)
    tensor([1.8221, 1.8221, 0.0000])
    """
    of_sequence = indexed_sum if product else sequence_mean_log_ratio
    level_B = of_sequence(proximal.detach() - behaviour, index, segments)
    ratio_B = level_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (ratio_B * ((ratio_B >= low) & (ratio_B <= high)))[index]


def kl_trust_mask(log_ratio: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return which tokens stay in a trust region: `log_ratio^2 / 2 <= threshold` (TorchRL's `kl_mask_threshold`).

    >>> kl_trust_mask(torch.tensor([0.1, 1.0]), 0.1)
    tensor([ True, False])
    """
    return log_ratio.detach().square() / 2 <= threshold


def off_policy_mask(
    log_probs: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    index: torch.Tensor,
    segments: int,
    threshold: float,
) -> torch.Tensor:
    """Return which rows stay: all but sequences of negative advantage that the policy has moved away from.

    A sequence goes if `A < 0` and the mean of `behaviour - log_probs` over its tokens is above the threshold.
    DeepSeek-V3.2, arXiv:2512.02556; TRL's `off_policy_mask_threshold`. A log-prob of -inf carries no information.

    Args:
        log_probs: [N], of the current policy.
        behaviour: [N].
        advantage: [N].
        index: int64 [N], the sequence of each row.
        segments: number of sequences.
        threshold: in nats per token.

    Returns:
        bool [N].

    >>> lb, advantage = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, 1.0])
    >>> off_policy_mask(torch.tensor([-2.0, -1.5, -9.0]), lb, advantage, torch.tensor([0, 0, 1]), 2, 0.5)
    tensor([False, False,  True])
    """
    gap_N = (behaviour - log_probs.detach()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    mean_B = sequence_mean_log_ratio(gap_N, index, segments)
    return (advantage >= 0) | (mean_B[index] <= threshold)
