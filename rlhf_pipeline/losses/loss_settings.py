"""The settings of a live loss: the settings of a definition, further settings, and TorchRL's keywords for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_pipeline.config import GRPO
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.errors import DefinitionError, refuse_unknown
from rlhf_pipeline.functional.aggregation import canonical_aggregation
from rlhf_pipeline.functional.objectives import OBJECTIVES, ObjectiveEntry, objective_of
from rlhf_pipeline.losses.loss_batch import MaskingStrategy
from rlhf_pipeline.settings import extended, setting, settings_of

__all__ = ["KEYWORDS", "TORCHRL_DEFAULTS", "LossSettings", "changed", "clip_settings", "loss_settings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings(GRPO):
    """The settings of `GRPOLoss`: the settings of a definition, and further settings of a live loss.

    >>> LossSettings(clip_cov=0.0002).chooses_tokens, LossSettings(objective="gspo").is_token_level
    (True, False)
    """

    entropy_bonus: bool = setting(
        True, help="Add `-entropy_coeff * entropy` to the loss. In a definition: true if `entropy_coeff` is above 0."
    )
    samples_mc_entropy: int = setting(
        1,
        min=1,
        help="Number of samples from which the entropy of a TorchRL distribution is estimated if the entropy has no "
        "closed form. For a language model's head, the entropy is exact and needs no samples.",
    )
    reduction: Literal["mean", "sum", "none"] = setting(
        "mean",
        help="How the token losses are reduced: `mean` (weighted as `aggregation` specifies), `sum` (plain sum over "
        'tokens), or `none` (not reduced: [B, T], weighted only by `"loss_weight"`).',
    )
    kl_mask_threshold: float | None = setting(
        None,
        min=0,
        help="Exclude tokens with `(log pi - log behaviour)^2 / 2` above this value; None or 0 excludes no tokens. "
        'Without `"loss_weight"`, the weights are computed from the counts of the remaining tokens, as in TorchRL; '
        "with it, the weights do not change.",
    )
    kl_to_inference_coeff: float = setting(
        0.0, min=0, help="Weight of the loss term for the KL divergence from the behaviour policy."
    )
    masking_strategy: MaskingStrategy = setting(
        "rlhf",
        help="The tokens that the loss includes. `rlhf`: the tokens of the assistant mask. `sft`: all tokens after the "
        "prompt, whose length is given by `num_prompt_tokens` or by ragged prompt tokens; if neither exists, all "
        "tokens from the first assistant token onwards. `generic`: every token except the first.",
    )
    decoupled: bool = setting(
        False,
        help='Read proximal log-probs from `("prox_log_probs", "full")`; if false, the behaviour log-probs also serve '
        "as proximal log-probs. `tis_cap` and `icepop` compare proximal with behaviour log-probs. In a definition: "
        "true if `tis_cap` or `icepop` is set.",
    )
    max_completion_tokens: int | None = setting(
        None, help='The fixed length by which `dr_grpo` divides; not needed if the batch has `"loss_weight"`.'
    )
    temperature: float | None = setting(
        None,
        above=0,
        help=(
            "Temperature at which log-probs are computed; None uses the temperature of the actor, or 1 if it has none."
        ),
    )
    head: Literal["auto", "fused", "recompute"] = setting(
        "auto",
        help="How the head is evaluated: `fused` (3 matmuls; token-level objectives), `recompute` (4 matmuls; "
        "any objective), or `auto`.",
    )
    chunk_size: int | None = setting(
        None,
        min=1,
        help="Number of rows that the head processes at a time; None selects a number that suits the size of the head.",
    )
    padding_side: Side = setting("right", help="The side on which all ragged tensors are padded.")

    def checked_objective(self) -> ObjectiveEntry:
        """Return the entry of the objective; a custom function is tried on six tokens first."""
        return objective_of(self.objective)

    @property
    def is_token_level(self) -> bool:
        """Whether the loss is a sum over tokens of functions of that token alone."""
        of_sequences = bool(self.kl_mask_threshold) or self.off_policy_threshold is not None
        by_token = not callable(self.objective) and OBJECTIVES[self.objective].per_token
        return by_token and not of_sequences and self.reduction != "none"

    @property
    def active_terms(self) -> tuple[str, ...]:
        """The names of the loss terms, in order."""
        weights = {
            "loss_entropy": self.entropy_bonus,
            "loss_kl_to_ref": self.kl_to_ref_coeff,
            "loss_kl_to_inference": self.kl_to_inference_coeff,
        }
        return ("loss_objective", *(name for name, weight in weights.items() if weight))

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            *GRPO._rules(self),
            (
                self.decoupled or not self.corrects_the_sampler,
                "tis_cap and icepop compare proximal with behaviour log-probs; without decoupled=True they are the "
                "same and the correction is 1. Pass decoupled=True and proximal log-probs.",
            ),
            (
                self.head != "fused" or self.is_token_level,
                "head='fused' computes the gradient token by token; objective='gspo', 'gmpo' or 'vespo', "
                "kl_mask_threshold, off_policy_threshold and unreduced losses need all log-probs first. Use "
                "head='auto'.",
            ),
        ]


TORCHRL_DEFAULTS: Mapping[str, Any] = {
    "clip_epsilon": None,
    "entropy_bonus": True,
    "entropy_coeff": 0.01,
    "reduction": None,
    "kl_to_ref_coeff": None,
    "kl_to_inference_coeff": None,
    "ref_log_prob_padding_side": None,
    "ref_log_prob_padding_value": 0.0,
}
"""TorchRL's keywords that are not settings here or have another default; they apply without a settings object."""

_RENAMED = {
    "clip_epsilon_low": "clip_low",
    "clip_epsilon_high": "clip_high",
    "ref_log_prob_padding_side": "padding_side",
}
_PAIRS = {
    "clip_cov_bounds": ("clip_cov_low", "clip_cov_high"),
    "sapo_tau": ("sapo_tau_positive", "sapo_tau_negative"),
    "icepop": ("icepop_low", "icepop_high"),
}
_NAMES = [item.name for item in settings_of(LossSettings)]
KEYWORDS = frozenset({*_NAMES, *TORCHRL_DEFAULTS, *_RENAMED, *_PAIRS, "icepop_level"})
"""The keyword arguments of `GRPOLoss`: every setting, also in TorchRL's spelling."""

_REFUSED = {
    "critic_network": "GRPO has no critic; its baseline is computed from the group. Omit critic_network.",
    "advantage_key": "use set_keys(advantage=...).",
    "value_key": "GRPO has no value network.",
    "separate_losses": "there is no critic to separate from.",
    "functional": "the parameters remain in the actor; there is no functional copy.",
    "gamma": "GRPO has no discount; returns are computed on the write path. Omit gamma.",
    "clip_value": "GRPO has no value network to clip. Omit clip_value.",
}
_HARMLESS = {"gamma": (None, 1), "clip_value": (None, False)}


def loss_settings(settings: GRPO | None, keywords: Mapping[str, Any]) -> LossSettings:
    """Return the settings of a loss: a definition's settings with changes, or TorchRL's defaults with changes.

    Raises:
        DefinitionError: a keyword is unknown, or its value cannot work; the message gives the reason.
    """
    if settings is None:
        return changed(LossSettings(), {**TORCHRL_DEFAULTS, **keywords})
    if not isinstance(settings, LossSettings):
        bonus, decoupled = settings.entropy_coeff > 0, settings.corrects_the_sampler
        settings = extended(settings, LossSettings, entropy_bonus=bonus, decoupled=decoupled)
    return changed(settings, keywords)


def changed(settings: LossSettings, keywords: Mapping[str, Any]) -> LossSettings:
    """Return settings with changes by keyword; None is the default of a setting that cannot be None.

    >>> changed(LossSettings(), {"clip_epsilon": (0.2, 0.28), "kl_to_ref_coeff": None}).clip_high
    0.28
    """
    unknown = {name: keywords[name] for name in keywords if name not in KEYWORDS}
    refuse_unknown("GRPOLoss", unknown, KEYWORDS, _REFUSED, _HARMLESS)
    fields = {_RENAMED.get(name, name): keywords[name] for name in keywords if name not in unknown}
    fields.pop("ref_log_prob_padding_value", None)  # nothing reads what is padded
    clip = fields.pop("clip_epsilon", None)
    if clip is not None:
        fields |= clip_settings(clip, fields.get("objective", settings.objective))
    level = fields.pop("icepop_level", "token")
    for name, bounds in _PAIRS.items():
        pair = fields.get(name)
        if isinstance(pair, tuple | list) and len(pair) == 2:
            del fields[name]
            fields |= dict(zip(bounds, pair, strict=True)) | ({"icepop": level} if name == "icepop" else {})
        elif name in fields and name not in _NAMES:
            raise DefinitionError(f"{name} is {pair!r}; it must be a pair of numbers.")
    mode = fields.get("aggregation")
    if mode == "none":
        fields |= {"aggregation": settings.aggregation, "reduction": "none"}
    elif mode is not None:
        fields["aggregation"] = canonical_aggregation(mode)
    if fields.get("kl_estimator") == "k1":
        raise DefinitionError(
            "kl_estimator='k1' has an expected gradient of zero in a loss, so it would only add noise. Put k1 in "
            "the reward (KLRewardTransform), or use 'k3+' or 'k2' here."
        )
    return extended(settings, LossSettings, **fields)


def clip_settings(clip_epsilon: float | tuple[float, float], objective: Any = "grpo") -> dict[str, Any]:
    """Return the settings that TorchRL's `clip_epsilon` represents: one number for both sides, or (low, high).

    For `cispo` a low side of 1 is not a lower clip: the ratio is always above `1 - 1`.

    >>> clip_settings(0.2), clip_settings((1.0, 0.28), "cispo")
    ({'clip_low': 0.2, 'clip_high': 0.2}, {'clip_low': None, 'clip_high': 0.28})

    Raises:
        DefinitionError: there are more than two numbers, or one is out of range.
    """
    bounds = clip_epsilon if isinstance(clip_epsilon, tuple | list) else (clip_epsilon, clip_epsilon)
    if len(bounds) != 2:
        raise DefinitionError(f"clip_epsilon must be one number or a pair (low, high); got {bounds}.")
    low = None if objective == "cispo" and bounds[0] == 1 else bounds[0]
    fields: dict[str, Any] = {"clip_low": low, "clip_high": bounds[1]}
    try:
        GRPO(**fields)
    except DefinitionError as error:
        raise DefinitionError(f"clip_epsilon={clip_epsilon}: {error}") from None
    return fields
