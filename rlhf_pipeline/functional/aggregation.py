"""Loss aggregation as one weight per trajectory, fixed before batching.

Every mode gives each token of a trajectory the same weight, and the loss of an optimizer step is
`sum over tokens of weight * loss`. The weights come from the counts of the whole step, so packing, order, the
split into micro-batches and the number of ranks cannot change the gradient.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from rlhf_pipeline.errors import DefinitionError, did_you_mean

__all__ = [
    "AGGREGATIONS",
    "StepCounts",
    "canonical_aggregation",
    "contributes",
    "spread_token_weights",
    "step_counts",
    "token_weights",
]

AGGREGATIONS: Final = ("token_mean", "sequence_mean", "sequence_sum", "dr_grpo")
_ALIASES: Final = {"prompt_mean": "sequence_mean", "bnpo": "token_mean"}


class StepCounts(NamedTuple):
    """The counts of a whole optimizer step; sum the two numbers over ranks before use.

    Attributes:
        tokens: assistant tokens, scalar tensor or number.
        sequences: trajectories with at least one assistant token, scalar tensor or number.
    """

    tokens: torch.Tensor | float
    sequences: torch.Tensor | float


def canonical_aggregation(mode: str) -> str:
    """The mode's own name: `prompt_mean` is TorchRL's name of `sequence_mean`, `bnpo` TRL's of `token_mean`.

    Raises:
        DefinitionError: unknown mode.

    >>> canonical_aggregation("prompt_mean")
    'sequence_mean'
    """
    name = _ALIASES.get(mode, mode)
    if name not in AGGREGATIONS:
        known = [*AGGREGATIONS, *_ALIASES]
        raise DefinitionError(f"unknown aggregation {mode!r}.{did_you_mean(mode, known)}")
    return name


def step_counts(lengths: torch.Tensor) -> StepCounts:
    """Count the tokens and the non-empty trajectories of a step.

    Args:
        lengths: [N], assistant tokens per trajectory.

    Returns:
        Two float64 scalars on the device of `lengths`, without a synchronisation.

    >>> step_counts(torch.tensor([3, 0, 1]))
    StepCounts(tokens=tensor(4., dtype=torch.float64), sequences=tensor(2., dtype=torch.float64))
    """
    return StepCounts(lengths.sum().double(), (lengths > 0).sum().double())


def token_weights(
    lengths: torch.Tensor,
    mode: str = "token_mean",
    *,
    counts: StepCounts | None = None,
    max_completion_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight of each token of each trajectory.

    With `L` the assistant tokens of a trajectory and the sums over the whole step:

    * `token_mean` (TRL's `bnpo` by the counts of one batch, its `dapo` by those of the step): `1 / sum L`. DAPO,
      arXiv:2503.14476.
    * `sequence_mean` (TorchRL's `prompt_mean`): `1 / (trajectories * L)`. GRPO, arXiv:2402.03300.
    * `sequence_sum`: `1 / trajectories`.
    * `dr_grpo`: `1 / (trajectories * max_completion_tokens)`. arXiv:2503.20783.

    A trajectory with `L = 0` gets weight 0 and counts for nothing. Tokens without a finite behaviour log-prob
    belong in no length.

    Args:
        lengths: [N], assistant tokens per trajectory, of this batch or of the whole step.
        mode: one of `AGGREGATIONS`, `prompt_mean` or `bnpo`.
        counts: counts of the whole step; those of `lengths` by default.
        max_completion_tokens: the constant of `dr_grpo`, the limit of the sampler.
        dtype: of the result; the division is float64.

    Returns:
        [N], the weight that every assistant token of trajectory `i` carries.

    Raises:
        DefinitionError: unknown mode, or `dr_grpo` without `max_completion_tokens`.

    >>> token_weights(torch.tensor([3, 1, 0]), "sequence_mean")
    tensor([0.1667, 0.5000, 0.0000])
    """
    name = canonical_aggregation(mode)
    tokens, sequences = step_counts(lengths) if counts is None else counts
    n = lengths.double()
    full = torch.ones_like(n)
    tokens = torch.as_tensor(tokens, dtype=torch.float64, device=n.device).clamp_min(1)
    sequences = torch.as_tensor(sequences, dtype=torch.float64, device=n.device).clamp_min(1)
    if name == "token_mean":
        weight = full / tokens
    elif name == "sequence_mean":
        weight = full / (sequences * n.clamp_min(1))
    elif name == "sequence_sum":
        weight = full / sequences
    else:
        if max_completion_tokens is None or max_completion_tokens < 1:
            raise DefinitionError(
                "aggregation 'dr_grpo' divides by a constant: pass max_completion_tokens, the "
                f"sampler's limit of new tokens; got {max_completion_tokens}."
            )
        weight = full / (sequences * max_completion_tokens)
    return torch.where(lengths > 0, weight, torch.zeros_like(weight)).to(dtype)


def spread_token_weights(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put the weight of each trajectory on its tokens.

    Args:
        weights: [B], from `token_weights`.
        mask: bool [B, T], the assistant tokens.

    Returns:
        [B, T], 0 outside the mask: the `loss_weight` that `GRPOLoss` reads.

    >>> spread_token_weights(torch.tensor([0.5]), torch.tensor([[False, True, True]]))
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    return weights[:, None] * mask


def contributes(advantages: torch.Tensor, *, kl_loss: bool = False, entropy_bonus: bool = False) -> torch.Tensor:
    """Which trajectories have a gradient at all; the others may be left out of the forward pass.

    They stay in the counts. With a KL loss or an entropy bonus every trajectory has a gradient.

    Args:
        advantages: [N].
        kl_loss: whether the loss has a KL term, against the reference or against the behaviour policy.
        entropy_bonus: whether the loss has an entropy term.

    Returns:
        bool [N].

    >>> contributes(torch.tensor([0.0, -1.0]))
    tensor([False,  True])
    """
    if kl_loss or entropy_bonus:
        return torch.ones_like(advantages, dtype=torch.bool)
    return advantages != 0
