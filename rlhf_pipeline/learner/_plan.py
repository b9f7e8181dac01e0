"""What an optimizer step consists of before a model is run: rows, their loss weights, and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.functional.aggregation import contributes, step_counts, token_weights
from rlhf_pipeline.losses.grpo import GRPOLoss
from rlhf_pipeline.policies.packed import plan_micro_batches
from trajectory_store import TrajectoryStore


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimizer step, a pure function of the store and the rows.

    Attributes:
        row_ids: int64 [n], the rows that the step learns from.
        lengths: int64 [n], tokens of each, prompt included.
        scored: int64 [n], tokens of each that the policy produced and has a finite log-prob of.
        weights: float32 [n], what each of those tokens counts in the loss.
        batches: micro-batches, int64 positions in `row_ids`. Rows without a gradient are in none.
        positions: positions that the model computes for each micro-batch.
    """

    row_ids: np.ndarray
    lengths: Tensor
    scored: Tensor
    weights: Tensor
    batches: list[Tensor]
    positions: list[int]

    @property
    def useful(self) -> Tensor:
        """int64, the positions in `row_ids` of all rows that run through the model, in order."""
        return torch.cat(self.batches).sort().values if self.batches else torch.zeros(0, dtype=torch.int64)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that runs through the model."""
        return int(self.lengths[self.useful].max()) if self.batches else 0

    @property
    def padding_efficiency(self) -> float | None:
        """Real tokens over computed positions; above 1 where prompts are shared. None without a micro-batch."""
        return float(self.lengths[self.useful].sum()) / sum(self.positions) if self.batches else None


def plan_step(
    store: TrajectoryStore, row_ids: np.ndarray, *, loss: GRPOLoss, config: Learn, max_completion_tokens: int
) -> StepPlan:
    """Fix the loss weights from the counts of the whole step, then cut it into micro-batches.

    A row longer than the token budget gets a micro-batch of its own size.
    """
    lengths = torch.from_numpy(np.asarray(store.lengths("input_ids", row_ids), dtype=np.int64))
    scored = torch.from_numpy(scored_tokens(store, row_ids))
    weights = token_weights(
        scored, loss.aggregation, counts=step_counts(scored), max_completion_tokens=max_completion_tokens
    )
    useful = contributes(
        torch.from_numpy(store.read_scalars("advantage", row_ids)),
        kl_loss=bool(loss.kl_to_ref_coeff),
        entropy_bonus=loss.entropy_bonus,
    ).nonzero()[:, 0]
    longest = int(lengths[useful].max()) if len(useful) else 0
    at = useful.numpy()
    plan = plan_micro_batches(
        config.layout,
        lengths[useful],
        max(config.token_budget, longest),
        prompt_lengths=torch.from_numpy(store.read_scalars("num_prompt_tokens", row_ids)[at].astype(np.int64)),
        group_ids=torch.from_numpy(store.read_scalars("group_id", row_ids)[at].astype(np.int64)),
    )
    batches = [useful[rows] for rows in plan.rows]
    return StepPlan(
        row_ids=row_ids, lengths=lengths, scored=scored, weights=weights, batches=batches, positions=plan.positions
    )


def scored_tokens(store: TrajectoryStore, row_ids: np.ndarray) -> np.ndarray:
    """Return how many tokens of each trajectory the policy produced and has a finite log-prob of, int64 [n].

    Counted from the mask and not from the prompt's length: a trajectory of several turns has tokens of others in
    between.
    """
    masks = store.read_ragged("assistant_mask", row_ids)
    log_probs = store.read_ragged("log_probs", row_ids)
    ends = np.cumsum(masks.values.astype(bool) & np.isfinite(log_probs.values))
    at_row_ends = np.concatenate([[0], ends])[masks.offsets]
    return np.diff(at_row_ends)
