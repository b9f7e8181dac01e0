"""The loss term by term on the masked tokens, and the diagnostics beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rlhf_pipeline.config import KLEstimator, Level, Objective
from rlhf_pipeline.functional import policy_loss as pl
from rlhf_pipeline.functional.aggregation import token_weights
from rlhf_pipeline.functional.diagnostics import ess_from_sums, row_mean, sequence_weight_sums, weight_sums
from rlhf_pipeline.functional.kl import clamped_log_ratio, kl_loss
from rlhf_pipeline.losses._batch import LossBatch

__all__ = [
    "Head",
    "TermSettings",
    "TokenRows",
    "diagnostics",
    "gather_rows",
    "is_unreduced",
    "term_names",
    "trust_region",
    "weighted_terms",
]

Head = Literal["auto", "fused", "recompute"]


class TermSettings(Protocol):
    """The attributes of `GRPOLoss` that the terms read, as they stand at the time of the call."""

    clip_epsilon_low: float
    clip_epsilon_high: float
    kl_mask_threshold: float | None
    aggregation: str
    reduction: str
    entropy_bonus: bool
    entropy_coeff: float
    kl_to_ref_coeff: float | None
    kl_to_inference_coeff: float | None
    objective: Objective
    kl_estimator: KLEstimator
    kl_importance_weight: bool
    dual_clip: float | None
    delta: float | None
    tis_cap: float | None
    tis_level: Level
    icepop: tuple[float, float] | None
    icepop_level: Level
    max_completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The constants of the loss on the masked tokens, row-major; each [N].

    Attributes:
        index: the trajectory of each token.
        column: its position.
        advantage: its advantage.
        proximal: the log-prob that the ratio is taken against.
        behaviour: the sampler's log-prob.
        ref: the reference log-prob, or None.
        weight: what the token counts.
        policy_weight: the same for the policy term, with the corrections for stale samples.
        sequences: trajectories in the batch.
    """

    index: torch.Tensor
    column: torch.Tensor
    advantage: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    ref: torch.Tensor | None
    weight: torch.Tensor
    policy_weight: torch.Tensor
    sequences: int


def is_unreduced(s: TermSettings) -> bool:
    """Whether the losses stay [B, T]."""
    return s.reduction == "none" or s.aggregation == "none"


def _token_weight(s: TermSettings, batch: LossBatch, dtype: torch.dtype) -> torch.Tensor:
    """The weight of every token, [B, T]."""
    if batch.weight is not None:
        return batch.weight.to(dtype)
    if is_unreduced(s) or s.reduction == "sum":
        return torch.ones_like(batch.mask, dtype=dtype)
    weights = token_weights(
        batch.mask.sum(1), s.aggregation, max_completion_tokens=s.max_completion_tokens, dtype=dtype
    )
    return weights[:, None].expand(batch.mask.shape)


def gather_rows(s: TermSettings, batch: LossBatch) -> TokenRows:
    """Gather the masked tokens and fix what each one counts; float32, or float64 for float64 log-probs.

    Counting the masked tokens is the one synchronisation of a step on CUDA.
    """
    index, column = batch.mask.nonzero(as_tuple=True)
    dtype = torch.promote_types(batch.behaviour.dtype, torch.float32)
    behaviour = batch.behaviour[index, column].to(dtype)
    proximal = behaviour if batch.proximal is None else batch.proximal[index, column].to(dtype)
    sequences = batch.tokens.shape[0]
    weight = _token_weight(s, batch, dtype)[index, column]
    policy_weight = weight
    if s.tis_cap is not None:
        if s.tis_level == "token":
            factor = pl.tis_weight(proximal, behaviour, s.tis_cap)
        else:
            factor = pl.sequence_tis_weight(proximal, behaviour, index, sequences, s.tis_cap)
        policy_weight = policy_weight * factor
    if s.icepop is not None:
        if s.icepop_level == "token":
            keep = pl.icepop_mask(proximal, behaviour, *s.icepop)
        else:
            keep = pl.sequence_icepop_mask(proximal, behaviour, index, sequences, *s.icepop)
        policy_weight = policy_weight * keep
    return TokenRows(
        index=index,
        column=column,
        advantage=batch.advantage[index, column].to(dtype),
        proximal=proximal,
        behaviour=behaviour,
        ref=None if batch.ref is None else batch.ref[index, column].to(dtype),
        weight=weight,
        policy_weight=policy_weight,
        sequences=sequences,
    )


def term_names(s: TermSettings) -> list[str]:
    """The names of the loss terms that are on, in order."""
    names = ["loss_objective"]
    names += ["loss_entropy"] if s.entropy_bonus else []
    names += ["loss_kl_to_ref"] if s.kl_to_ref_coeff else []
    return names + (["loss_kl_to_inference"] if s.kl_to_inference_coeff else [])


def _kl(s: TermSettings, log_probs: torch.Tensor, other: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    bounds = (1 - s.clip_epsilon_low, 1 + s.clip_epsilon_high)
    sampler = behaviour if s.kl_importance_weight else None
    return kl_loss(log_probs, other, s.kl_estimator, behaviour=sampler, bounds=bounds)


def _token_loss(
    s: TermSettings,
    log_probs: torch.Tensor,
    advantage: torch.Tensor,
    proximal: torch.Tensor,
    index: torch.Tensor | None,
    sequences: int,
) -> tuple[pl.TokenLoss, torch.Tensor]:
    """The unweighted policy loss per token, and the log-ratio it used."""
    low, high = s.clip_epsilon_low, s.clip_epsilon_high
    if s.objective == "gspo" and index is not None:
        log_ratio = pl.gspo_log_ratio(log_probs, proximal, index, sequences)
    else:
        log_ratio = clamped_log_ratio(log_probs, proximal)
    if s.objective == "cispo":
        return pl.cispo_loss(log_probs, log_ratio, advantage, low, high), log_ratio
    loss = pl.clipped_loss(log_ratio, advantage, low, high, dual_clip=s.dual_clip, delta=s.delta)
    return loss, log_ratio


def weighted_terms(
    s: TermSettings,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    advantage: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    weight: torch.Tensor,
    policy_weight: torch.Tensor,
    ref: torch.Tensor | None = None,
    *,
    index: torch.Tensor | None = None,
    sequences: int = 0,
) -> list[torch.Tensor]:
    """The loss terms per token, weighted, in the order of `term_names`; each [n].

    Any part of the tokens may be passed, in chunks, unless the objective is `gspo`.
    """
    loss, _ = _token_loss(s, log_probs, advantage, proximal, index, sequences)
    terms = [policy_weight * loss.loss]
    if s.entropy_bonus and entropy is not None:
        terms.append(entropy * (weight * -s.entropy_coeff))
    if s.kl_to_ref_coeff and ref is not None:
        terms.append(_kl(s, log_probs, ref, behaviour) * (weight * s.kl_to_ref_coeff))
    if s.kl_to_inference_coeff:
        terms.append(_kl(s, log_probs, behaviour, behaviour) * (weight * s.kl_to_inference_coeff))
    return terms


def trust_region(s: TermSettings, batch: LossBatch, rows: TokenRows, log_probs: torch.Tensor) -> torch.Tensor:
    """The factor of every token under `kl_mask_threshold`: 0 outside the region.

    Where this batch's own counts made the weights, the tokens that are left carry the whole count.
    """
    threshold = s.kl_mask_threshold or float("inf")
    keep = pl.kl_trust_mask(log_probs - rows.behaviour, threshold).to(log_probs.dtype)
    if batch.weight is not None or is_unreduced(s) or s.reduction == "sum":
        return keep
    left = pl.segment_sum(keep, rows.index, rows.sequences)
    weights = token_weights(left, s.aggregation, max_completion_tokens=s.max_completion_tokens, dtype=rows.weight.dtype)
    return keep * weights[rows.index] / rows.weight


@torch.no_grad()
def diagnostics(
    s: TermSettings, rows: TokenRows, log_probs: torch.Tensor, entropy: torch.Tensor | None
) -> dict[str, Any]:
    """The diagnostics of `GRPOLossOutput`, all of them over the masked tokens, with the sums that they merge from."""
    lp = log_probs.detach()
    loss, log_ratio = _token_loss(s, lp, rows.advantage, rows.proximal, rows.index, rows.sequences)
    low, high = row_mean(loss.clipped_low), row_mean(loss.clipped_high)
    tokens = weight_sums(log_ratio)
    sequences = sequence_weight_sums(lp - rows.proximal, rows.index, rows.sequences)
    found = {
        "clip_fraction": low + high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "kl_approx": row_mean(rows.proximal - lp),
        "ESS": ess_from_sums(*tokens).float(),
        "ess_sequence": ess_from_sums(*sequences).float(),
        "entropy": None if entropy is None else row_mean(entropy),
        "kl_to_ref": None,
        "kl_to_inference": row_mean(kl_loss(lp, rows.behaviour, s.kl_estimator)),
        "sampler_gap": row_mean((lp - rows.behaviour).abs()),
        **dict(zip(("num_tokens", "weight_sum", "weight_square_sum"), tokens, strict=True)),
        **dict(zip(("num_sequences", "sequence_weight_sum", "sequence_weight_square_sum"), sequences, strict=True)),
    }
    if rows.ref is not None:
        known = torch.isfinite(rows.ref).sum()
        found["kl_to_ref"] = kl_loss(lp, rows.ref, s.kl_estimator).sum() / known.clamp_min(1)
        found["num_ref_tokens"] = known.double()
    return found
