"""Which trajectories of a batch are still worth learning from, by their effective sample size.

Importance weights let a learner use trajectories of an older policy, until a few tokens carry all of the weight. Then
the step is mostly noise, and it is better to reduce its weight or to exclude it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_pipeline.config import Sample
from rlhf_pipeline.data.upload import download
from rlhf_pipeline.functional.diagnostics import ess_from_sums, weight_sums
from rlhf_pipeline.learner.step_plan import StepPlan
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.token_policy import TokenPolicy


@dataclass(frozen=True, slots=True)
class AgeVerdict:
    """The verdict on the trajectories of one age."""

    age: int
    trajectories: int
    ess: float
    weight: float


@dataclass(frozen=True, slots=True)
class EssVerdict:
    """The guard's verdict on a batch.

    Attributes:
        weights: float32 `[B]`, factors for the loss weights of the trajectories.
        ages: one verdict per age, the youngest first.
    """

    weights: Tensor
    ages: tuple[AgeVerdict, ...]

    @property
    def skip(self) -> bool:
        """Whether all trajectories of the batch have weight 0."""
        return not bool((self.weights > 0).any())

    @property
    def message(self) -> str:
        """One sentence per age whose trajectories do not count in full; empty if all do."""
        sentences = []
        for verdict in self.ages:
            if verdict.weight < 1:
                fate = "they are excluded" if verdict.weight == 0 else f"they receive the weight {verdict.weight:.2f}"
                sentences.append(
                    f"Age {verdict.age}: the effective sample size of {verdict.trajectories} trajectories is "
                    f"{verdict.ess:.3f}, {fate}."
                )
        return " ".join(sentences)


def ess_guard(log_ratio: Tensor, mask: Tensor, ages: Tensor, *, min_ess: float, skip_below: float) -> EssVerdict:
    """Weigh the trajectories of a batch by the effective sample size of those of the same age.

    With `w = exp(log_ratio)`, its logarithm clamped to +-20, `ESS = (sum w)^2 / (n * sum w^2)` over the trajectories of
    one age. From `min_ess` on they count in full; below it their weight is `ESS / min_ess`; below `skip_below` it is 0.
    If both limits are equal, the guard only excludes. Ages are judged separately, because fresh trajectories, whose
    weights are all near 1, would hide stale ones. A single token of an age always has an ESS of 1.

    A pure function; the caller logs `message`, multiplies the loss weights, and excludes a batch with `skip`.

    Args:
        log_ratio: `[B, T]`, log-prob of the learner (at the start of the step) minus that of the behaviour policy.
        mask: bool `[B, T]`, the assistant's tokens. A token whose ratio is not finite does not count.
        ages: int64 `[B]`, learner version minus policy version.
        min_ess: limit below which trajectories count less, above 0 and at most 1.
        skip_below: limit below which they do not count, from 0 to `min_ess`.

    Returns:
        The weights, and the verdict on each age.

    >>> log_ratio, mask = torch.tensor([[1.0, 1.0], [1.0, 16.0]]).log(), torch.ones(2, 2, dtype=torch.bool)
    >>> verdict = ess_guard(log_ratio, mask, torch.tensor([0, 4]), min_ess=0.8, skip_below=0.1)
    >>> [round(found.ess, 3) for found in verdict.ages]  # (1 + 16)^2 / (2 * (1 + 256))
    [1.0, 0.562]
    >>> verdict.message
    'Age 4: the effective sample size of 1 trajectories is 0.562, they receive the weight 0.70.'
    """
    with torch.no_grad():
        keep = mask & log_ratio.isfinite()
        of_rows = weight_sums(torch.where(keep, log_ratio, 0.0).double(), keep, dim=1)
        distinct_ages, place = torch.unique(ages.cpu(), return_inverse=True)
        sums = torch.zeros(3, len(distinct_ages), dtype=torch.float64)
        sums.index_add_(1, place, torch.stack(of_rows).cpu())
        ess = ess_from_sums(*sums)
        weight = torch.where(ess < skip_below, 0.0, (ess / min_ess).clamp_max(1.0))
        weight = torch.where(sums[0] > 0, weight, 1.0)  # nothing to judge: no token counts anyway
        verdicts = tuple(
            AgeVerdict(int(age), int(rows), float(e), float(w))
            for age, rows, e, w in zip(
                distinct_ages, place.bincount(minlength=len(distinct_ages)), ess, weight, strict=True
            )
        )
    return EssVerdict(weight[place].float().to(log_ratio.device), verdicts)


def guard(
    plan: StepPlan,
    ages: np.ndarray,
    sample: Sample,
    policy: TokenPolicy,
    read: Callable[[StepPlan, Tensor], LossBatch],
) -> tuple[StepPlan, float, str]:
    """Weigh the trajectories of each age by their effective sample size at the weights before the step.

    Args:
        plan: the step.
        ages: int64 [n], of the plan's rows.
        sample: has the limits.
        policy: scores the trajectories, without gradient.
        read: returns a micro-batch of the plan.
    """
    if sample.min_ess is None or not plan.batches or not (ages > 0).any():
        return plan, 1.0, ""
    batches = [read(plan, chosen) for chosen in plan.batches]
    with torch.no_grad():
        policy_scores = download([policy.log_probs(batch.tokens, batch.attention, batch.mask) for batch in batches])
    width = max(batch.mask.shape[1] for batch in batches)
    pairs = [(scores - batch.behaviour, batch.mask) for scores, batch in zip(policy_scores, batches, strict=True)]
    log_ratio, mask = (
        torch.cat([pad(values, (0, width - values.shape[1])) for values in kind]) for kind in zip(*pairs, strict=True)
    )
    order = torch.cat(plan.batches)
    verdict = ess_guard(
        log_ratio, mask, torch.from_numpy(ages)[order], min_ess=sample.min_ess, skip_below=sample.skip_below_ess
    )
    weights = plan.weights.clone()
    weights[order] *= verdict.weights
    weighed = dataclasses.replace(plan, weights=weights)
    # Without any gradient, the optimizer leaves the weights unchanged.
    return weighed.without_gradient() if verdict.skip else weighed, float(verdict.weights.mean()), verdict.message
