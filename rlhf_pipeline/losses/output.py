"""What `GRPOLoss` returns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.objectives.llm.grpo import GRPOLossOutput as _TorchRLOutput

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.diagnostics import ess_from_sums

__all__ = ["GRPOLossOutput"]

_TERMS = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")
_MEANS = {
    "clip_fraction": "num_tokens",
    "clip_fraction_low": "num_tokens",
    "clip_fraction_high": "num_tokens",
    "kl_approx": "num_tokens",
    "entropy": "num_tokens",
    "kl_to_ref": "num_ref_tokens",
    "kl_to_inference": "num_tokens",
    "sampler_gap": "num_tokens",
}
"""The figures that are means, each with the field that says over how many tokens."""
_ESS = {
    "ESS": ("num_tokens", "weight_sum", "weight_square_sum"),
    "ess_sequence": ("num_sequences", "sequence_weight_sum", "sequence_weight_square_sum"),
}
"""The effective sample sizes, each with the three sums that it is formed from."""
_SUMS = tuple(dict.fromkeys([*_MEANS.values(), *(name for sums in _ESS.values() for name in sums)]))


class GRPOLossOutput(_TorchRLOutput):
    """Loss terms with gradient, and diagnostics without. All scalars, but for losses that are not reduced ([B, T]).

    Every diagnostic is a mean over the tokens that the mask keeps: prompt and padding dilute nothing. In nats where
    a unit applies.

    Attributes:
        loss_objective: the policy loss.
        clip_fraction: share of tokens whose clipped branch is the one taken.
        kl_approx: mean of proximal minus current log-prob.
        ESS: effective sample size of the token ratios, (0, 1]; 0 without a token.
        entropy: mean entropy of the policy, or None where the actor gives none.
        loss_entropy: minus the entropy bonus; None without one.
        loss_kl_to_ref: the KL term against the reference; None without one.
        kl_to_ref: mean KL estimate against the reference; None without reference log-probs.
        loss_kl_to_inference: the KL term against the behaviour policy; None without one.
        kl_to_inference: mean KL estimate against the behaviour policy.
        clip_fraction_low: the share at the lower bound.
        clip_fraction_high: the share at the upper bound.
        ess_sequence: effective sample size of the products of ratios, over sequences.
        num_tokens: tokens that the mask keeps.
        weight_sum: sum of the token ratios.
        weight_square_sum: sum of their squares.
        sampler_gap: mean absolute difference of current and behaviour log-prob.
        num_sequences: trajectories with a token that the mask keeps.
        sequence_weight_sum: sum of the products of ratios.
        sequence_weight_square_sum: sum of their squares.
        num_ref_tokens: tokens of the mask whose reference log-prob is finite; None without reference log-probs.

    >>> out = GRPOLossOutput(*(torch.tensor(x) for x in (0.5, 0.0, 0.0, 1.0)), loss_entropy=torch.tensor(-0.25))
    >>> out.total_loss()
    tensor(0.2500)
    """

    clip_fraction_low: torch.Tensor | None = None
    clip_fraction_high: torch.Tensor | None = None
    ess_sequence: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    weight_sum: torch.Tensor | None = None
    weight_square_sum: torch.Tensor | None = None
    sampler_gap: torch.Tensor | None = None
    num_sequences: torch.Tensor | None = None
    sequence_weight_sum: torch.Tensor | None = None
    sequence_weight_square_sum: torch.Tensor | None = None
    num_ref_tokens: torch.Tensor | None = None

    @property
    def _terms(self) -> dict[str, torch.Tensor]:
        """The loss terms that there are."""
        return {name: value for name in _TERMS if (value := getattr(self, name)) is not None}

    def total_loss(self) -> torch.Tensor:
        """The sum of all loss terms, to call `backward` on."""
        return reduce(add, self._terms.values())

    def mean(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With `reduce=True` the mean of the loss terms, to call `backward` on; else `TensorDict.mean` of every field.

        TorchRL's recipes step on `loss.mean(reduce=True)`. Diagnostics are no part of it, so the step does not depend
        on how many of them there are.
        """
        return TensorDict(self._terms).mean(reduce=True, **kwargs) if reduce else super().mean(*args, **kwargs)

    def sum(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With `reduce=True` the sum of the loss terms, as `total_loss`; else `TensorDict.sum` of every field."""
        return TensorDict(self._terms).sum(reduce=True, **kwargs) if reduce else super().sum(*args, **kwargs)

    @staticmethod
    def field_names() -> tuple[str, ...]:
        """All fields: the losses, then the diagnostics."""
        return (*_TERMS, *GRPOLossOutput.diagnostic_names())

    @staticmethod
    def diagnostic_names() -> tuple[str, ...]:
        """The fields that have no gradient."""
        return (*_MEANS, *_ESS, *_SUMS)

    @classmethod
    def merge(cls, outputs: Sequence[GRPOLossOutput]) -> GRPOLossOutput:
        """One output for several micro-batches, detached, as if they had been one: every figure merges from sums.

        Args:
            outputs: of micro-batches of one step, with losses whose weights were fixed before the split.

        Raises:
            DataError: there is no output.
        """
        if not outputs:
            raise DataError("there is no output to merge: the step had no micro-batch.")
        merged: dict[str, Any] = {}
        for name in (*_TERMS, *_SUMS):
            values = [value.detach() for out in outputs if (value := getattr(out, name)) is not None]
            if values:
                merged[name] = torch.stack(values).sum(0)
        for name, count in _MEANS.items():
            parts = [(v.detach(), getattr(out, count)) for out in outputs if (v := getattr(out, name)) is not None]
            if parts:
                total = torch.stack([value.double() * tokens for value, tokens in parts]).sum(0)
                merged[name] = (total / merged[count].clamp_min(1)).to(parts[0][0].dtype)
        for name, sums in _ESS.items():
            merged[name] = ess_from_sums(*(merged[key] for key in sums)).to(outputs[0].ESS.dtype)
        return cls(**merged)
