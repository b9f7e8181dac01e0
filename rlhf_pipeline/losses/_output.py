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

_MEANS = (
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_approx",
    "entropy",
    "kl_to_ref",
    "kl_to_inference",
)
_TERMS = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")
_SUMS = (*_TERMS, "num_tokens", "weight_sum", "weight_square_sum")


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

    @classmethod
    def merge(cls, outputs: Sequence[GRPOLossOutput]) -> GRPOLossOutput:
        """One output for several micro-batches, detached: losses added, means weighted by tokens, ESS from its sums.

        `ess_sequence` is weighted by tokens too, which is an approximation.

        Args:
            outputs: of micro-batches of one step, with losses whose weights were fixed before the split.

        Raises:
            DataError: there is no output.
        """
        if not outputs:
            raise DataError("there is no output to merge: the step had no micro-batch.")
        merged: dict[str, Any] = {}
        for name in _SUMS:
            values = [getattr(out, name) for out in outputs]
            if all(value is not None for value in values):
                merged[name] = torch.stack([value.detach() for value in values]).sum(0)
        total = merged["num_tokens"].clamp_min(1)
        for name in (*_MEANS, "ess_sequence"):
            values = [getattr(out, name) for out in outputs]
            if all(value is not None for value in values):
                weighted = [value.detach() * out.num_tokens / total for value, out in zip(values, outputs, strict=True)]
                merged[name] = torch.stack(weighted).sum(0).to(values[0].dtype)
        merged["ESS"] = ess_from_sums(merged["num_tokens"], merged["weight_sum"], merged["weight_square_sum"]).to(
            outputs[0].ESS.dtype
        )
        return cls(**merged)
