"""The objectives by name: one table for a definition, the loss and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlhf_pipeline.functional import policy_loss as pl
from rlhf_pipeline.functional.kl import clamped_log_ratio

__all__ = ["OBJECTIVES", "ObjectiveEntry", "PolicyTokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """What a policy loss is computed from; every tensor is float `[n]`, one value per token of the loss.

    Attributes:
        log_probs: of the policy, with gradient.
        proximal: of the policy that the ratio is taken against.
        advantage: of the token's trajectory.
        index: int64 `[n]`, the sequence of each token; None where an objective is `per_token`.
        sequences: number of sequences.
        low: lower clip.
        high: upper clip.
        dual_clip: see `policy_loss.clipped_loss`.
        delta: see `policy_loss.clipped_loss`.
        sapo_tau: see `policy_loss.sapo_loss`.
    """

    log_probs: torch.Tensor
    proximal: torch.Tensor
    advantage: torch.Tensor
    index: torch.Tensor | None = None
    sequences: int = 0
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)

    @property
    def log_ratio(self) -> torch.Tensor:
        """`log_probs - proximal`, clamped to +-20, with gradient."""
        return clamped_log_ratio(self.log_probs, self.proximal)


Found = tuple[pl.TokenLoss, torch.Tensor]
"""The loss per token, unweighted, and the log-ratio that it used, from which the effective sample size is computed."""


@dataclass(frozen=True, slots=True)
class ObjectiveEntry:
    """The meaning of an objective's name.

    Attributes:
        loss: from the tokens; with one weight per token, the sum of what it returns is the policy loss.
        per_token: whether each token's loss depends on that token alone, so that the head can form the gradient in
            chunks. Others get all tokens of a sequence at once, with `index`.
    """

    loss: Callable[[PolicyTokens], Found]
    per_token: bool = True


def _grpo(t: PolicyTokens) -> Found:
    log_ratio = t.log_ratio
    return pl.clipped_loss(log_ratio, t.advantage, t.low, t.high, dual_clip=t.dual_clip, delta=t.delta), log_ratio


def _cispo(t: PolicyTokens) -> Found:
    log_ratio = t.log_ratio
    return pl.cispo_loss(t.log_probs, log_ratio, t.advantage, t.low, t.high), log_ratio


def _sapo(t: PolicyTokens) -> Found:
    log_ratio = t.log_ratio
    return pl.sapo_loss(log_ratio, t.advantage, *t.sapo_tau), log_ratio


def _gspo(t: PolicyTokens) -> Found:
    assert t.index is not None
    log_ratio = pl.gspo_log_ratio(t.log_probs, t.proximal, t.index, t.sequences)
    return pl.clipped_loss(log_ratio, t.advantage, t.low, t.high, dual_clip=t.dual_clip, delta=t.delta), log_ratio


def _gmpo(t: PolicyTokens) -> Found:
    assert t.index is not None
    log_ratio = t.log_ratio
    mean, low, high = pl.gmpo_log_ratio(log_ratio, t.advantage, t.index, t.sequences, t.low, t.high)
    return pl.TokenLoss(-mean.exp() * t.advantage, low, high), mean


OBJECTIVES: Final[Mapping[str, ObjectiveEntry]] = {
    "grpo": ObjectiveEntry(_grpo),
    "cispo": ObjectiveEntry(_cispo),
    "sapo": ObjectiveEntry(_sapo),
    "gspo": ObjectiveEntry(_gspo, per_token=False),
    "gmpo": ObjectiveEntry(_gmpo, per_token=False),
}
"""The objectives by name. To add one, add it here and to `config.Objective`."""
