"""The objectives by name: one table for a definition, the loss and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch

from rlhf_pipeline.config import DPPO, VESPO, MaskLevel
from rlhf_pipeline.errors import DefinitionError, function_name, tried
from rlhf_pipeline.functional import policy_loss as pl
from rlhf_pipeline.functional.kl import clamped_log_ratio

__all__ = ["OBJECTIVES", "ObjectiveEntry", "ObjectiveFunction", "PolicyTokens", "needs_entropy", "objective_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """The inputs of a policy loss; every tensor is float `[n]`, one value per token of the loss.

    Log-probs and entropies are in nats, at the temperature of sampling.

    Attributes:
        log_probs: of the policy, with gradient.
        proximal: of the policy that the ratio is taken against: the trainer's own log-probs, taken before the first
            step that may use the trajectory, where the loss is `decoupled` (`tis_cap`, `icepop`); else `behaviour`.
        behaviour: of the sampler, as stored with the trajectory; without gradient, like `proximal`.
        advantage: of the token's trajectory.
        index: int64 `[n]`, the sequence of each token; None where an objective is `per_token`.
        sequences: number of sequences.
        entropy: of the policy's distribution at each token, with gradient; None unless the objective asks for it,
            see `needs_entropy`.
        mask_level: the level at which the definition masks tokens that policy and sampler disagree on, `loss.icepop`:
            `token`, `sequence` or `product`; None where it masks none.
        low: lower clip.
        high: upper clip.
        dual_clip: see `policy_loss.clipped_loss`.
        delta: see `policy_loss.clipped_loss`.
        sapo_tau: see `policy_loss.sapo_loss`.
        dppo: see `policy_loss.dppo_loss`.
        vespo: see `policy_loss.vespo_loss`.
    """

    log_probs: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    index: torch.Tensor | None = None
    sequences: int = 0
    entropy: torch.Tensor | None = None
    mask_level: MaskLevel | None = None
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    delta: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    dppo: DPPO = field(default_factory=DPPO)
    vespo: VESPO = field(default_factory=VESPO)

    @property
    def log_ratio(self) -> torch.Tensor:
        """`log_probs - proximal`, clamped to +-20, with gradient."""
        return clamped_log_ratio(self.log_probs, self.proximal)

    @property
    def sampler_log_ratio(self) -> torch.Tensor:
        """`log_probs - behaviour`, clamped to +-20, with gradient."""
        return clamped_log_ratio(self.log_probs, self.behaviour)


LossTerms = tuple[pl.TokenLoss, torch.Tensor]
"""The loss per token, unweighted, and the log-ratio that it used, from which the effective sample size is computed."""


ObjectiveFunction = Callable[[PolicyTokens], torch.Tensor | pl.TokenLoss]
"""A custom objective: `(tokens) -> loss per token [n]`, to be minimised, with a gradient to `tokens.log_probs`.

It receives all tokens of the complete sequences of one micro-batch, with `index`; `sequences` may include some without
tokens. Its output is unweighted: the definition's aggregation applies the weights, so a token's loss must not depend on
the other sequences of the micro-batch. A `policy_loss.TokenLoss` also reports the clipped tokens, for `clip_fraction`.
"""

F = TypeVar("F", bound=ObjectiveFunction)


def needs_entropy(objective: F) -> F:
    """Mark a custom objective that reads `tokens.entropy`; a decorator.

    Raises:
        DefinitionError: at the first batch, if the actor gives log-probs only.

    >>> @needs_entropy
    ... def certain_tokens_less(tokens):
    ...     return -tokens.log_probs * tokens.advantage * tokens.entropy.detach()
    >>> objective_of(certain_tokens_less).needs_entropy
    True
    """
    objective.needs_entropy = True  # pyright: ignore[reportFunctionMemberAccess]
    return objective


@dataclass(frozen=True, slots=True)
class ObjectiveEntry:
    """The meaning of an objective's name."""

    loss: Callable[[PolicyTokens], LossTerms]
    per_token: bool = True
    needs_entropy: bool = False


def _grpo(t: PolicyTokens) -> LossTerms:
    log_ratio = t.log_ratio
    return pl.clipped_loss(log_ratio, t.advantage, t.low, t.high, dual_clip=t.dual_clip, delta=t.delta), log_ratio


def _cispo(t: PolicyTokens) -> LossTerms:
    log_ratio = t.log_ratio
    return pl.cispo_loss(t.log_probs, log_ratio, t.advantage, t.low, t.high), log_ratio


def _sapo(t: PolicyTokens) -> LossTerms:
    log_ratio = t.log_ratio
    return pl.sapo_loss(log_ratio, t.advantage, *t.sapo_tau), log_ratio


def _gspo(t: PolicyTokens) -> LossTerms:
    assert t.index is not None
    log_ratio = pl.gspo_log_ratio(t.log_probs, t.proximal, t.index, t.sequences)
    return pl.clipped_loss(log_ratio, t.advantage, t.low, t.high, dual_clip=t.dual_clip, delta=t.delta), log_ratio


def _gmpo(t: PolicyTokens) -> LossTerms:
    assert t.index is not None
    log_ratio = t.log_ratio
    mean, low, high = pl.gmpo_log_ratio(log_ratio, t.advantage, t.index, t.sequences, t.low, t.high)
    return pl.TokenLoss(-mean.exp() * t.advantage, low, high), mean


def _dppo(t: PolicyTokens) -> LossTerms:
    return pl.dppo_loss(t.log_probs, t.behaviour, t.advantage, t.dppo), t.sampler_log_ratio


def _vespo(t: PolicyTokens) -> LossTerms:
    assert t.index is not None
    loss = pl.vespo_loss(t.log_probs, t.behaviour, t.advantage, t.index, t.sequences, t.vespo)
    return loss, t.sampler_log_ratio


OBJECTIVES: Final[Mapping[str, ObjectiveEntry]] = {
    "grpo": ObjectiveEntry(_grpo),
    "cispo": ObjectiveEntry(_cispo),
    "sapo": ObjectiveEntry(_sapo),
    "gspo": ObjectiveEntry(_gspo, per_token=False),
    "gmpo": ObjectiveEntry(_gmpo, per_token=False),
    "dppo": ObjectiveEntry(_dppo),
    "vespo": ObjectiveEntry(_vespo, per_token=False),
}
"""The objectives by name. To add one, add it here and to `config.Objective`; a custom objective needs neither."""


def objective_of(objective: str | ObjectiveFunction) -> ObjectiveEntry:
    """Return the entry of a name, or one for a function, which is tried on six tokens of three sequences first.

    >>> entry = objective_of(lambda tokens: -tokens.log_probs * tokens.advantage)
    >>> entry.loss(_six_tokens())[0].loss.tolist()
    [1.0, -2.0, 3.0, -4.0, 5.0, -6.0]
    """
    if isinstance(objective, str):
        return OBJECTIVES[objective]
    reads_entropy = bool(getattr(objective, "needs_entropy", False))
    name, tokens = function_name(objective), _six_tokens(entropy=reads_entropy)
    contract = "The function must accept functional.objectives.PolicyTokens and return the loss of each token."
    with tried(f"loss.objective {name}", f"six tokens. {contract}"):
        (loss, *_), _ = _terms_of(objective, tokens)
        finite = bool(torch.isfinite(loss).all())
        gradient = (
            torch.autograd.grad(loss.sum(), tokens.log_probs, allow_unused=True)[0] if loss.requires_grad else None
        )
    if not finite or gradient is None or not bool(torch.isfinite(gradient).all()):
        problem = (
            "a loss without a gradient with respect to tokens.log_probs"
            if gradient is None
            else "a loss or a gradient that is not finite"
        )
        raise DefinitionError(f"loss.objective {name} returned {problem} in a test on six tokens.")
    return ObjectiveEntry(lambda tokens: _terms_of(objective, tokens), per_token=False, needs_entropy=reads_entropy)


def _terms_of(function: ObjectiveFunction, tokens: PolicyTokens) -> LossTerms:
    """Return the loss terms of a custom objective in the form of the built-in ones; reject another shape."""
    returned: object = function(tokens)
    loss = returned.loss if isinstance(returned, pl.TokenLoss) else returned
    if not isinstance(loss, torch.Tensor) or loss.shape != tokens.log_probs.shape:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        expected = list(tokens.log_probs.shape)
        raise DefinitionError(
            f"loss.objective {function_name(function)} returned {shape}; it must return a tensor of shape {expected}."
        )
    if isinstance(returned, pl.TokenLoss):
        return returned, tokens.log_ratio
    never = torch.zeros_like(loss, dtype=torch.bool)
    return pl.TokenLoss(loss, never, never), tokens.log_ratio


def _six_tokens(*, entropy: bool = False) -> PolicyTokens:
    """Return tokens of sequences of three, two and one, and of a fourth sequence without any."""
    log_probs = -torch.arange(1.0, 7.0)
    return PolicyTokens(
        log_probs=log_probs.requires_grad_(),
        proximal=log_probs.detach() + torch.tensor([0.0, 0.1, -0.1, 0.3, -0.3, 0.0]),
        behaviour=log_probs.detach() + torch.tensor([0.1, 0.0, -0.1, 0.3, -0.2, 0.0]),
        entropy=torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 2.5]) if entropy else None,
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]),
        index=torch.tensor([0, 0, 0, 1, 1, 2]),
        sequences=4,
    )
