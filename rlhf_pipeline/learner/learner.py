"""The learner: one optimizer step over fresh trajectories, split into micro-batches that cannot change the gradient."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_pipeline import keys
from rlhf_pipeline.checkpoint import load_checkpoint, load_tensors, save_checkpoint
from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.aggregation import contributes, spread_token_weights, step_counts, token_weights
from rlhf_pipeline.learner.ledger import Ledger
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.reference import MovingReference
from rlhf_pipeline.losses.grpo import GRPOLoss, GRPOLossOutput
from rlhf_pipeline.padding import plan_batches
from rlhf_pipeline.policies.causal_lm import CausalLMPolicy
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer


class Learner:
    """Takes optimizer steps on what the buffer holds.

    A step is a pure function of the weights, the store and the step number: it sees the graded trajectories whose
    policy version is at most `max_staleness` behind, in the order of their ids. Loss weights are fixed from the counts
    of the whole step before it is split, so the token budget changes memory and not the gradient. The step's ledger row
    is on disk before the optimizer moves. The ledger is exact; the column `use_count` is a hint, which counts a step
    that a crash cut short as well.

    Args:
        policy: the policy that learns.
        loss: takes a padded batch with per-token weights.
        buffer: where trajectories are read.
        config: optimizer and token budget.
        max_staleness: largest age, in optimizer steps, of a trajectory that is learned from.
        max_completion_tokens: the limit at sampling; the divisor of the `dr_grpo` aggregation.
        ledger: which trajectories entered which step.
        seed: recorded in the ledger.
        may_be_empty: the write path may drop every group of a rollout; such a step counts and changes nothing.
        reference: moved towards the policy after each step; None where the reference is frozen, or there is none.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from rlhf_pipeline import Collect, Collector, CopyDigits, MCAdvantage, token_match
    >>> from rlhf_pipeline.policies.new_model import scratch_policy
    >>> folder = tempfile.mkdtemp()
    >>> policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    >>> buffer = TrajectoryReplayBuffer(storage=folder + "/store", transform=MCAdvantage(4))
    >>> collector = Collector(
    ...     policy=policy, prompts=CopyDigits(num_digits=2), reward=token_match, buffer=buffer, seed=0,
    ...     config=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
    ... )
    >>> learner = Learner(
    ...     policy=policy, loss=GRPOLoss(policy), buffer=buffer, config=Learn(), max_staleness=0,
    ...     max_completion_tokens=3, ledger=Ledger(Path(folder) / "ledger.jsonl"), seed=0,
    ... )
    >>> rollout = collector.collect(0, policy_version=0)
    >>> learner.step(1)["num_trajectories"], len(learner.ledger.rows())
    (8, 1)
    >>> buffer.trajectories.close()
    """

    def __init__(
        self,
        *,
        policy: CausalLMPolicy,
        loss: GRPOLoss,
        buffer: TrajectoryReplayBuffer,
        config: Learn,
        max_staleness: int,
        max_completion_tokens: int,
        ledger: Ledger,
        seed: int,
        may_be_empty: bool = False,
        reference: MovingReference | None = None,
    ) -> None:
        self.policy = policy
        self.loss = loss
        self.buffer = buffer
        self.config = config
        self.max_staleness = max_staleness
        self.max_completion_tokens = max_completion_tokens
        self.ledger = ledger
        self.seed = seed
        self.may_be_empty = may_be_empty
        self.reference = reference
        if config.activation_checkpointing:
            policy.checkpoint_activations()
        self.optimizer = PolicyOptimizer(policy.model, config)
        self._notices: list[str] = []

    def save(self, folder: Path, step: int, *, state: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint of weights, optimizer and moving reference; see `save_checkpoint`."""
        tensors = {"reference": self.reference.state_tensors()} if self.reference is not None else None
        return save_checkpoint(
            folder, step, policy=self.policy, optimizer=self.optimizer, state=state, keep=keep, tensors=tensors
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Load what `save` wrote and return its state; see `load_checkpoint`.

        Raises:
            DataError: the checkpoint is damaged, or of another model.
        """
        moved = load_tensors(path, "reference")
        state = load_checkpoint(path, policy=self.policy, optimizer=self.optimizer)
        if self.reference is not None and moved is not None:
            self.reference.load_state_tensors(moved)
        return state

    def take_notices(self) -> list[str]:
        """Return what a person should know about the steps since the last call, and forget it."""
        notices, self._notices = self._notices, []
        return notices

    def step(
        self, step: int, *, row_ids: np.ndarray | None = None, ledger_fields: Mapping[str, object] | None = None
    ) -> dict[str, float | int | None]:
        """Take optimizer step number `step` (1-based) and return its metrics.

        Args:
            step: its number; the weights' version before it is `step - 1`.
            row_ids: int64 [n], what to learn from, chosen by the caller; None takes every fresh trajectory.
            ledger_fields: what else the step's ledger row should say, JSON-ready.

        Raises:
            DataError: no graded trajectory is fresh enough.
        """
        started = time.perf_counter()
        version = step - 1
        if row_ids is None:
            row_ids, ages = self._fresh_rows(version)
        else:
            ages = version - self.buffer.store.read_scalars("policy_version", row_ids)
        if len(row_ids) == 0:
            self._notices.append(f"step {step} has nothing to learn from: every group was without spread and dropped.")
        losses, padding_efficiency = self._accumulate_gradient(row_ids)
        gradient_norm = self.optimizer.clip(self.config.max_grad_norm)
        if not torch.isfinite(gradient_norm):
            self.optimizer.zero_grad()
            raise DataError(
                f"the gradient of step {step} is not finite (norm {float(gradient_norm)}, loss {losses['loss']}); "
                "the weights were left as they were. Lower learn.lr or learn.max_grad_norm in a new run, or look at "
                "the trajectories of this step with `rlhf-pipeline show`."
            )
        self._record(step, row_ids, ages, losses["ess"], ledger_fields or {})
        self.optimizer.step(self._learning_rate(step))
        if self.reference is not None:
            self.reference.after_step(step)
        return {
            "policy_version": version,
            "num_trajectories": len(row_ids),
            "watermark": self.buffer.store.watermark,
            **losses,
            "padding_efficiency": padding_efficiency,
            "grad_norm": float(gradient_norm),
            "lr": self._learning_rate(step),
            "staleness": float(ages.mean()) if len(ages) else None,
            "update_s": time.perf_counter() - started,
        }

    def _fresh_rows(self, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the trajectories to learn from, in order, and their ages in optimizer steps."""
        store = self.buffer.store
        versions = store.read_scalars("policy_version")
        ages = version - versions
        # A NaN reward marks a trajectory whose reward call failed: stored, never learned from.
        usable = (ages >= 0) & (ages <= self.max_staleness) & np.isfinite(store.read_scalars("task_reward"))
        if not usable.any() and not self.may_be_empty:
            raise DataError(
                f"no graded trajectory is younger than {self.max_staleness + 1} optimizer steps at policy version "
                f"{version}; the store holds {len(versions)}. Collect first, or raise buffer.max_staleness."
            )
        row_ids = store.ids()[usable]
        # In the order of the trajectories' ids, each once: of one that was sampled again, the newest row.
        _, from_the_end = np.unique(store.read_scalars("trajectory_id")[usable][::-1], return_index=True)
        order = len(row_ids) - 1 - from_the_end
        return row_ids[order], ages[usable][order]

    def _accumulate_gradient(self, row_ids: np.ndarray) -> tuple[dict[str, float | None], float | None]:
        """Run forward and backward over the step's trajectories in micro-batches of similar length.

        Returns:
            The losses and diagnostics of the whole step, and the share of real tokens among the processed ones.
        """
        if len(row_ids) == 0:
            return _as_metrics(None), None
        store, loss = self.buffer.store, self.loss
        total = torch.from_numpy(store.lengths("input_ids", row_ids))
        completion = torch.from_numpy(self._scored_tokens(row_ids))
        weights = token_weights(
            completion,
            loss.aggregation,
            counts=step_counts(completion),
            max_completion_tokens=self.max_completion_tokens,
        )
        advantages = torch.from_numpy(store.read_scalars("advantage", row_ids))
        useful = contributes(
            advantages, kl_loss=loss.kl_to_ref_coeff is not None, entropy_bonus=loss.entropy_bonus
        ).nonzero()[:, 0]
        device = next(self.policy.model.parameters()).device
        outputs: list[GRPOLossOutput] = []
        padded_tokens = 0
        longest = int(total[useful].max()) if len(useful) else 0
        if longest > self.config.token_budget:
            self._notices.append(
                f"a trajectory of {longest} tokens is above learn.token_budget={self.config.token_budget}; it takes a "
                "forward pass of its own."
            )
        for rows in plan_batches(total[useful], max(self.config.token_budget, longest)):
            chosen = useful[rows]
            batch = self.buffer.read(row_ids[chosen.numpy()]).to(device)
            mask = batch[keys.ASSISTANT_MASK]
            batch[keys.LOSS_WEIGHT] = spread_token_weights(weights[chosen].to(device), mask)
            output = loss(batch)
            output.total_loss().backward()
            outputs.append(output)
            padded_tokens += mask.numel()
        store.update(row_ids, use_count=store.read_scalars("use_count", row_ids) + 1)
        if not outputs:  # every group without spread: nothing to learn from, and the step counts all the same
            return _as_metrics(None), None
        return _as_metrics(GRPOLossOutput.merge(outputs)), float(total[useful].sum()) / padded_tokens

    def _scored_tokens(self, row_ids: np.ndarray) -> np.ndarray:
        """Return how many tokens of each trajectory the policy produced and has a finite log-prob of, int64 [n].

        Counted from the mask and not from the prompt's length: a trajectory of several turns has tokens of others in
        between.
        """
        masks = self.buffer.store.read_ragged("assistant_mask", row_ids)
        log_probs = self.buffer.store.read_ragged("log_probs", row_ids)
        ends = np.cumsum(masks.values.astype(bool) & np.isfinite(log_probs.values))
        at_row_ends = np.concatenate([[0], ends])[masks.offsets]
        return np.diff(at_row_ends)

    def _record(
        self, step: int, row_ids: np.ndarray, ages: np.ndarray, ess: float | None, more: Mapping[str, object]
    ) -> None:
        as_before = self.ledger.record(
            {
                "step": step,
                "row_ids": row_ids.tolist(),
                # Rows that were lost with a ring and sampled again are other rows of the same trajectories.
                "trajectory_ids": self.buffer.store.read_scalars("trajectory_id", row_ids).tolist(),
                "watermark": self.buffer.store.watermark,
                "seed": self.seed,
                "ages": ages.tolist(),
                "ess": ess,
                **more,
            }
        )
        if not as_before:
            self._notices.append(
                f"step {step} uses other trajectories than before the restart; the run goes on, but it is not the "
                "one that was interrupted."
            )

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then constant."""
        return (
            self.config.lr * min(1.0, step / self.config.warmup_steps) if self.config.warmup_steps else self.config.lr
        )


def _as_metrics(output: GRPOLossOutput | None) -> dict[str, float | None]:
    """Return what a metrics line holds of the loss; every name is there, None where there is no figure."""
    fields = {name: name for name in ("loss_objective", "clip_fraction", "clip_fraction_low", "clip_fraction_high")}
    fields |= {name: name for name in ("kl_approx", "kl_to_ref", "entropy", "ess_sequence")} | {"ess": "ESS"}
    values = {name: getattr(output, field, None) for name, field in fields.items()}
    loss = output.total_loss() if output is not None else None
    return {name: None if value is None else float(value) for name, value in {"loss": loss, **values}.items()}
