"""Hidden states of padded batches, for any padding side.

The host decides what the model computes: which tokens, in which layout, and which hidden states predict which tokens.
All of it reaches the device in one copy, so the host never waits for the device to learn a shape.

Tokens are moved to the left before the forward pass. With all padding on the right, no token sees any of it: no
attention mask is needed, the fast causal kernels apply, no row is fully masked, and the positions of every row are
`0, 1, 2, ...`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.engines.slot_cache import PrefillCache
from rlhf_pipeline.policies.model_parts import ModelParts, recomputes

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A checked batch on the host.

    Attributes:
        ids: int64 `[B, T]`.
        real: bool `[B, T]`, True at tokens.
        places: int64 `[B, T]`, each token's index in its row; padding has the index of the token before it, or -1.
        scored: bool `[B, T]`, True at scored tokens; never at the first token of a row.
    """

    ids: Int64Array
    real: BoolArray
    places: Int64Array
    scored: BoolArray

    def left_aligned(self, used: Int64Array) -> Int64Array:
        """Return the first `used` tokens of each row from column 0 on, int64 `[B, most used]`, followed by 0.

        The result has at least one row and one token: some models cannot run on an empty batch.
        """
        ids = np.zeros((max(1, len(self.ids)), int(used.max(initial=1))), dtype=np.int64)
        rows, columns = np.nonzero(self.real & (self.places < used[:, None]))
        ids[rows, self.places[rows, columns]] = self.ids[rows, columns]
        return ids

    def select(self, rows: Int64Array) -> HostBatch:
        """Return the given rows."""
        return HostBatch(self.ids[rows], self.real[rows], self.places[rows], self.scored[rows])


def host_batch(
    parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None
) -> HostBatch:
    """Check a batch and copy it to the host, waiting at most once for the device."""
    if input_ids.ndim != 2:
        raise DefinitionError(f"input_ids must have shape [B, T]; got {list(input_ids.shape)}.")
    for name, mask in (("attention_mask", attention_mask), ("score_mask", score_mask)):
        if mask is not None and mask.shape != input_ids.shape:
            raise DefinitionError(
                f"{name} must have the shape of input_ids, {list(input_ids.shape)}; got {list(mask.shape)}."
            )
    if input_ids.is_cuda:
        inputs = (input_ids, attention_mask, attention_mask if score_mask is None else score_mask)
        stacked = torch.stack([tensor.to(input_ids.device, torch.int64, non_blocking=True) for tensor in inputs])
        input_ids, attention_mask, score_mask = stacked.cpu()
    real = attention_mask.cpu().numpy().astype(np.bool_)
    places = real.cumsum(1, dtype=np.int64) - 1
    most, longest = parts.max_positions, int(places[:, -1].max(initial=-1)) + 1 if places.size else 0
    if most is not None and longest > most:
        raise DefinitionError(
            f"A row has {longest} tokens; the model has {most} positions ({parts.positions_by}). Exclude "
            f"trajectories with more than {most} tokens."
        )
    scored = real & (places >= 1)
    if score_mask is not None:
        scored &= score_mask.cpu().numpy().astype(np.bool_)
    return HostBatch(input_ids.numpy().astype(np.int64), real, places, scored)


def token_states(parts: ModelParts, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the last hidden state of every token at the token's position, `[B, T, H]`; zero at padding."""
    batch = host_batch(parts, input_ids, attention_mask)
    ids = batch.left_aligned(batch.real.sum(1))
    first = np.arange(len(batch.ids), dtype=np.int64) * ids.shape[1]
    at = torch.from_numpy(first[:, None] + batch.places.clip(0))
    on_device = upload([torch.from_numpy(ids), at, torch.from_numpy(batch.real)], parts.head.weight.device)
    hidden = hidden_of_rows(parts, on_device[0]).flatten(0, 1)
    return hidden[on_device[1]].masked_fill(~on_device[2][..., None], 0.0)


def predicting_rows(parts: ModelParts, batch: HostBatch) -> ScoringRows:
    """Return the hidden states that predict the scored tokens: each real token but the first of its row."""
    ids = batch.left_aligned(batch.real.sum(1))
    rows, columns = np.nonzero(batch.scored)
    predicting = rows * ids.shape[1] + batch.places[rows, columns] - 1
    arrays = (ids, predicting, batch.ids[rows, columns], rows, columns)
    on_device = upload([*map(torch.from_numpy, arrays)], parts.head.weight.device)
    hidden = hidden_of_rows(parts, on_device[0]).flatten(0, 1)
    return ScoringRows(hidden.index_select(0, on_device[1]), *on_device[2:])


def hidden_of_rows(parts: ModelParts, ids: Tensor, positions: Tensor | None = None, **inputs: Any) -> Tensor:
    """Run rows through the trunk from their first token on, and return its last hidden state.

    Without a cache, transformers searches the positions for packed sequences, and the host waits for the answer. So a
    cache is passed, except to layers that are recomputed, which allow none, and to those with states, which would
    compute and copy their last ones for it.
    """
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    if parts.cache_refusal is None and not parts.num_states and not recomputes(parts.trunk):
        inputs["cache"] = PrefillCache(parts.num_layers)
    return parts.hidden(input_ids=ids, position_ids=positions, use_cache=False, **inputs)
