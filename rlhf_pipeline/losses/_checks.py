"""Checks that refuse arguments of `GRPOLoss` that cannot work, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from rlhf_pipeline.config import GRPO, MaskLevel
from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.functional.aggregation import canonical_aggregation
from rlhf_pipeline.losses.loss_batch import MaskingStrategy

__all__ = ["HARMLESS", "REFUSED", "check_arguments"]

REFUSED = {
    "critic_network": "GRPO has no critic; its baseline is the group. Leave it out.",
    "advantage_key": "use set_keys(advantage=...).",
    "value_key": "GRPO has no value network.",
    "separate_losses": "there is no critic to separate from.",
    "functional": "the parameters stay in the actor; there is no functional copy.",
    "gamma": "GRPO has no discount; returns are formed on the write path. Leave it out.",
    "clip_value": "GRPO has no value network to clip. Leave it out.",
}
HARMLESS = {"gamma": (None, 1), "clip_value": (None, False)}


def check_arguments(s: Any, *, token_level: bool) -> None:
    """Refuse arguments that cannot work, with the reason."""
    if s.kl_estimator == "k1":
        raise DefinitionError(
            "kl_estimator='k1' as a loss has an expected gradient of zero, so it would do nothing but add noise. "
            "Put k1 in the reward (KLRewardTransform), or use 'k3+' or 'k2' here."
        )
    choices: list[tuple[str, str, Sequence[str]]] = [
        ("head", s.head, ("auto", "fused", "recompute")),
        ("masking_strategy", s.masking_strategy, get_args(MaskingStrategy)),
        ("reduction", s.reduction, ("mean", "sum", "none")),
        ("icepop_level", s.icepop_level, get_args(MaskLevel)),
        ("padding_side", s.padding_side, ("left", "right")),
    ]
    for name, value, choice_names in choices:
        if value not in choice_names:
            raise DefinitionError(f"unknown {name} {value!r}.{did_you_mean(str(value), choice_names)}")
    if s.aggregation != "none":
        canonical_aggregation(s.aggregation)
    _check_as_declared(s)
    rules: list[tuple[bool, str]] = [
        (
            s.decoupled or (s.tis_cap is None and s.icepop is None),
            "tis_cap and icepop compare proximal with behaviour log-probs; without decoupled=True they are the same "
            "and the correction is 1. Pass decoupled=True and proximal log-probs.",
        ),
        (
            s.head != "fused" or token_level,
            "head='fused' forms the gradient token by token; objective='gspo', 'gmpo' or 'vespo', kl_mask_threshold, "
            "off_policy_threshold and unreduced losses need all log-probs first. Use head='auto'.",
        ),
        (s.samples_mc_entropy >= 1, "samples_mc_entropy must be at least 1."),
    ]
    for holds, message in rules:
        if not holds:
            raise DefinitionError(message)


def _check_as_declared(s: Any) -> None:
    """Refuse what a definition of the same loss would refuse: the rules are those of `config.GRPO`."""
    low, high = s.icepop or (None, None)
    bounds = {} if s.icepop is None else {"icepop": s.icepop_level, "icepop_low": low, "icepop_high": high}
    try:
        GRPO(
            objective=s.objective,
            clip_high=s.clip_epsilon_high,
            entropy_coeff=s.entropy_coeff,
            kl_to_ref_coeff=s.kl_to_ref_coeff or 0.0,
            kl_estimator=s.kl_estimator,
            dual_clip=s.dual_clip,
            delta=s.delta,
            tis_cap=s.tis_cap,
            tis_level=s.tis_level,
            tis_floor=s.tis_floor,
            off_policy_threshold=s.off_policy_threshold,
            top_entropy_quantile=s.top_entropy_quantile,
            clip_cov=s.clip_cov,
            clip_cov_low=s.clip_cov_bounds[0],
            clip_cov_high=s.clip_cov_bounds[1],
            sapo_tau_positive=s.sapo_tau[0],
            sapo_tau_negative=s.sapo_tau[1],
            dppo=s.dppo,
            vespo=s.vespo,
            **bounds,
        )
    except DefinitionError as error:
        raise DefinitionError(str(error).replace("GRPO", "GRPOLoss", 1).replace("clip_high", "clip high")) from None
