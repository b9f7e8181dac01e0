"""Loss aggregation as one weight per trajectory, fixed before batching.

Every mode gives each token of a trajectory the same weight, and the loss of an optimizer step is
`sum over tokens of weight * loss`. The weights come from the counts of the whole step, so packing, order, the
split into micro-batches and the number of ranks cannot change the gradient.
"""

from __future__ import annotations

from typing import Final

import torch

from rlhf_pipeline.errors import DefinitionError, did_you_mean

__all__ = [
    "AGGREGATIONS",
    "canonical_aggregation",
    "contributes",
    "scorable",
    "token_weights",
]

AGGREGATIONS: Final = ("token_mean", "sequence_mean", "group_mean", "sequence_sum", "dr_grpo")
_ALIASES: Final = {"prompt_mean": "sequence_mean", "bnpo": "token_mean"}


def canonical_aggregation(mode: str) -> str:
    """Return the canonical name of a mode: TorchRL's `prompt_mean` is `sequence_mean`, TRL's `bnpo` is `token_mean`.

    >>> canonical_aggregation("prompt_mean")
    'sequence_mean'
    """
    name = _ALIASES.get(mode, mode)
    if name not in AGGREGATIONS:
        modes = [*AGGREGATIONS, *_ALIASES]
        raise DefinitionError(f"unknown aggregation {mode!r}.{did_you_mean(mode, modes)}")
    return name


def token_weights(
    lengths: torch.Tensor,
    mode: str = "token_mean",
    *,
    groups: torch.Tensor | None = None,
    episodes: torch.Tensor | None = None,
    max_completion_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the weight of each token of each trajectory.

    `L` is the number of assistant tokens of a trajectory, and sums run over the whole step:

    * `token_mean` (TRL's `bnpo` with the counts of one batch, its `dapo` with those of the step): `1 / sum L`. DAPO,
      arXiv:2503.14476.
    * `sequence_mean` (TorchRL's `prompt_mean`, which is per sequence and not per prompt): `1 / (trajectories * L)`.
      GRPO, arXiv:2402.03300.
    * `group_mean`: `1 / (groups * sum of L over the trajectory's group)`: the mean over prompts of the mean over all
      tokens of a prompt's group (huggingface/trl#5828). It equals `sequence_mean` only where all groups have the same
      size and all trajectories of a group the same length.
    * `sequence_sum`: `1 / trajectories`.
    * `dr_grpo`: `1 / (trajectories * max_completion_tokens)`. arXiv:2503.20783.

    With `episodes`, the rows of an episode count as one trajectory: `L` is the number of tokens of all its rows, and
    `trajectories` is the number of episodes. So an episode of five rows weighs as much as one of one row with the same
    tokens. Without, each row is a trajectory, and the episode counts as five; `token_mean` and `group_mean` count
    tokens and are the same either way.

    A trajectory with `L = 0` gets weight 0 and is not counted. Tokens without a finite behaviour log-prob
    must not be counted in any length. A group without tokens is not counted either.

    Args:
        lengths: [N], assistant tokens per trajectory, of all trajectories of the step.
        mode: one of `AGGREGATIONS`, `prompt_mean` or `bnpo`.
        groups: int64 [N], the group of each trajectory, any numbers; for `group_mean`. A trajectory with a negative
            number is a group by itself.
        episodes: int64 [N], the episode of each row, any numbers; None counts each row.
        max_completion_tokens: the constant of `dr_grpo`, the limit of the sampler.
        dtype: of the result; the division is float64.

    Returns:
        [N], the weight of every assistant token of each trajectory; times the mask [B, T] it is the
        `loss_weight` that `GRPOLoss` reads.

    >>> token_weights(torch.tensor([3, 1, 0]), "sequence_mean")
    tensor([0.1667, 0.5000, 0.0000])
    >>> token_weights(torch.tensor([3, 1, 2]), "group_mean", groups=torch.tensor([7, 7, 4]))
    tensor([0.1250, 0.1250, 0.2500])
    >>> token_weights(torch.tensor([3, 1, 4]), "sequence_mean", episodes=torch.tensor([7, 7, 4]))
    tensor([0.1250, 0.1250, 0.1250])
    """
    name = canonical_aggregation(mode)
    lengths_N = lengths.double()
    ones_N = torch.ones_like(lengths_N)
    tokens, sequences = lengths_N.sum().clamp_min(1), (lengths > 0).sum().double().clamp_min(1)
    if episodes is not None:
        _, episode_N = episodes.unique(return_inverse=True)
        tokens_E = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
        tokens_E = tokens_E.index_add(0, episode_N, lengths_N)
        lengths_N, sequences = tokens_E[episode_N], (tokens_E > 0).sum().double().clamp_min(1)
    if name == "token_mean":
        weight_N = ones_N / tokens
    elif name == "sequence_mean":
        weight_N = ones_N / (sequences * lengths_N.clamp_min(1))
    elif name == "group_mean":
        group_tokens_N, counted = _group_tokens(lengths.double(), groups)
        weight_N = ones_N / (counted * group_tokens_N.clamp_min(1))
    elif name == "sequence_sum":
        weight_N = ones_N / sequences
    else:
        if max_completion_tokens is None or max_completion_tokens < 1:
            raise DefinitionError(
                f"max_completion_tokens is {max_completion_tokens}; it must be at least 1, because aggregation "
                "'dr_grpo' divides by it. Pass the maximum number of tokens in a completion."
            )
        weight_N = ones_N / (sequences * max_completion_tokens)
    return torch.where(lengths > 0, weight_N, torch.zeros_like(weight_N)).to(dtype)


def _group_tokens(lengths: torch.Tensor, groups: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each trajectory's group, float64 [N], and the number of groups that have a token."""
    if groups is None or groups.shape != lengths.shape:
        shape = "none" if groups is None else f"{list(groups.shape)}"
        raise DefinitionError(
            f"aggregation 'group_mean' needs the group of each trajectory: pass groups of shape [{len(lengths)}]; got "
            f"{shape}."
        )
    alone_N = -1 - torch.arange(len(lengths), device=groups.device)
    _, index_N = torch.where(groups < 0, alone_N, groups.long()).unique(return_inverse=True)
    tokens_G = torch.zeros(len(lengths), dtype=lengths.dtype, device=lengths.device).index_add(0, index_N, lengths)
    return tokens_G[index_N], (tokens_G > 0).sum().double().clamp_min(1)


def contributes(advantages: torch.Tensor, *, kl_loss: bool = False, entropy_bonus: bool = False) -> torch.Tensor:
    """Return which trajectories have a gradient; the others may be omitted from the forward pass.

    All stay in the counts. With a KL loss or an entropy bonus, every trajectory has a gradient.

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


def scorable(
    chosen: torch.Tensor, attention: torch.Tensor, behaviour: torch.Tensor, *compared: torch.Tensor | None
) -> torch.Tensor:
    """Return which of the chosen tokens are in the loss: they need a preceding token and finite log-probs.

    Args:
        chosen: bool [B, T], the tokens that a masking strategy chose.
        attention: bool [B, T], the real tokens.
        behaviour: log-probs [B, T].
        *compared: further log-probs [B, T] that the loss reads, or None.

    Returns:
        bool [B, T].

    >>> real, nan = torch.tensor([[True, True, True]]), float("nan")
    >>> scorable(real, real, torch.tensor([[-1.0, nan, -2.0]]))
    tensor([[False, False,  True]])
    """
    mask_BT = chosen & attention & (attention.cumsum(1) > 1) & torch.isfinite(behaviour)
    for log_probs_BT in compared:
        if log_probs_BT is not None:
            mask_BT = mask_BT & torch.isfinite(log_probs_BT)
    return mask_BT
