"""Hidden states of padded batches, for any padding side.

Tokens are brought to the left before the forward pass. With all padding on the right no token sees any of it, so no
attention mask is needed, the fast causal kernels apply, no row is fully masked, and the positions of every row are
`0, 1, 2, ...`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.model_parts import ModelParts


class ScoringRows(NamedTuple):
    """The hidden states that predict the scored tokens, and where those tokens are.

    Attributes:
        hidden: `[N, H]`, for each scored token the last hidden state of the token before it; differentiable.
        targets: the scored tokens, int64 `[N]`.
        rows: the batch row of each, int64 `[N]`.
        columns: the column of each, int64 `[N]`.
    """

    hidden: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor


def token_states(parts: ModelParts, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the last hidden state of every token where the token stands, `[B, T, H]`; zero at padding."""
    mask = _checked_mask(parts, input_ids, attention_mask)
    hidden, positions = _run_trunk(parts, input_ids, mask)
    gathered = hidden.gather(1, positions.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
    return gathered.masked_fill(~mask[..., None], 0.0)


def predicting_rows(
    parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
) -> ScoringRows:
    """Return the hidden states that predict the scored tokens: each real token but the first of its row."""
    mask, _, scored = scored_positions(parts, input_ids, attention_mask, score_mask)
    hidden, positions = _run_trunk(parts, input_ids, mask)
    rows, columns = scored.nonzero(as_tuple=True)
    before = positions[rows, columns] - 1
    return ScoringRows(hidden[rows, before], input_ids.to(mask.device)[rows, columns], rows, columns)


def scored_positions(
    parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the checked attention mask, each token's place in its row, and which tokens are scored; all `[B, T]`."""
    mask = _checked_mask(parts, input_ids, attention_mask)
    positions = mask.cumsum(1) - 1
    scored = mask & (positions >= 1)
    if score_mask is not None:
        if score_mask.shape != mask.shape:
            raise DefinitionError(
                f"score_mask must have the shape of input_ids, {list(mask.shape)}; got {list(score_mask.shape)}."
            )
        scored = scored & score_mask.to(device=mask.device, dtype=torch.bool)
    return mask, positions, scored


def _run_trunk(parts: ModelParts, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (hidden states `[B, W, H]` of the tokens brought to the left, their positions `[B, T]`).

    W is the length of the longest row.
    """
    positions = mask.cumsum(1) - 1
    width = max(1, int(positions[:, -1].max()) + 1) if mask.numel() else 1
    # One row at least: some models cannot run on an empty batch.
    ids = torch.zeros((max(1, mask.shape[0]), width), dtype=torch.int64, device=mask.device)
    rows, columns = mask.nonzero(as_tuple=True)
    ids[rows, positions[rows, columns]] = input_ids.to(mask.device)[rows, columns].long()
    hidden = parts.hidden(
        input_ids=ids,
        position_ids=torch.arange(width, device=mask.device).expand(len(ids), -1),
        use_cache=False,
    )
    return hidden, positions


def _checked_mask(parts: ModelParts, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    if input_ids.ndim != 2:
        raise DefinitionError(f"input_ids must be [B, T]; got {list(input_ids.shape)}.")
    if attention_mask.shape != input_ids.shape:
        raise DefinitionError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}; got "
            f"{list(attention_mask.shape)}."
        )
    most = parts.max_positions
    mask = attention_mask.to(device=parts.head.weight.device, dtype=torch.bool)
    if most is not None and input_ids.shape[1] > most and bool((mask.sum(1) > most).any()):
        raise DefinitionError(
            f"A row has {int(mask.sum(1).max())} tokens; the model has {most} positions ({parts.positions_by}). "
            "Leave such trajectories out."
        )
    return mask
