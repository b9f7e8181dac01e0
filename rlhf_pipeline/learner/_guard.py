"""The guard against stale trajectories, on the batch of an optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_pipeline.config import Sample
from rlhf_pipeline.learner.step_plan import StepPlan
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.replay.ess_guard import ess_guard


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
        sample: with the limits, `min_ess` set.
        policy: scores the trajectories, without gradient.
        read: gives a micro-batch of the plan.

    Returns:
        The plan with the weights changed, without a gradient where nothing is left to learn from; the mean of what the
        trajectories count; and a sentence per age that does not count in full.
    """
    if sample.min_ess is None or not plan.batches or not (ages > 0).any():
        return plan, 1.0, ""
    parts = [_log_ratio(policy, read(plan, chosen)) for chosen in plan.batches]
    width = max(mask.shape[1] for _, mask in parts)
    log_ratio = torch.cat([pad(ratio, (0, width - ratio.shape[1])) for ratio, _ in parts])
    mask = torch.cat([pad(mask, (0, width - mask.shape[1])) for _, mask in parts])
    order = torch.cat(plan.batches)
    verdict = ess_guard(
        log_ratio, mask, torch.from_numpy(ages)[order], min_ess=sample.min_ess, skip_below=sample.skip_below_ess
    )
    weights = plan.weights.clone()
    weights[order] *= verdict.weights
    weighed = dataclasses.replace(plan, weights=weights)
    # Where nothing has a gradient, the optimizer leaves the weights as they are.
    return weighed.without_gradient() if verdict.skip else weighed, float(verdict.weights.mean()), verdict.message


def _log_ratio(policy: TokenPolicy, batch: LossBatch) -> tuple[Tensor, Tensor]:
    """Return the policy's log-probs minus the behaviour policy's, and the mask of the loss, `[B, T]`."""
    with torch.no_grad():
        own = policy.log_probs(batch.tokens, batch.attention, batch.mask).cpu()
    return own - batch.behaviour, batch.mask
