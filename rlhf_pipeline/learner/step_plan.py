"""The plan of an optimizer step, made before a model is run: rows, their loss weights, and micro-batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.buffer.samplers import TrajectorySampler, as_sampler, step_generator, strategy_of
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import column_of_key
from rlhf_pipeline.config import Learn, Sample
from rlhf_pipeline.data import keys
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.functional.aggregation import contributes, scorable, token_weights
from rlhf_pipeline.losses.grpo import GRPOLoss
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.packed import plan_micro_batches
from rlhf_pipeline.policies.token_policy import TokenPolicy
from trajectory_store import TrajectoryStore

if TYPE_CHECKING:
    from rlhf_pipeline.learner.distributed import Shards

Ints = npt.NDArray[np.int64]


class ChosenRows(NamedTuple):
    """The trajectories that a step learns from.

    Attributes:
        row_ids: int64 [n].
        ages: int64 [n], in optimizer steps.
        trajectory_ids: int64 [n]; a trajectory that was lost and sampled again keeps its id.
        left_out: how many others could have been learned from by their age, by reason: `failed` has no reward, the
            group of `waiting` is not complete, or closed without it.
    """

    row_ids: np.ndarray
    ages: np.ndarray
    trajectory_ids: np.ndarray
    left_out: Mapping[str, int] = MappingProxyType({})

    def take(self, which: np.ndarray) -> ChosenRows:
        """Return some of them, by their positions or by a mask, `[n]`."""
        return ChosenRows(self.row_ids[which], self.ages[which], self.trajectory_ids[which], self.left_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimizer step, a pure function of the store and the rows.

    Attributes:
        row_ids: int64 [n], the rows that the step learns from.
        advantages: float32 [n].
        lengths: int64 [n], tokens of each, prompt included.
        produced: int64 [n], tokens of each that the policy produced, except a first token, which nothing predicts.
        scored: int64 [n], produced tokens that are in the loss, because the log-probs that it reads are finite.
        groups: int64 [n], the group of each; negative where none is stored.
        episodes: int64 [n], the episode of each, if those of several rows count as one trajectory; otherwise None.
        weights: float32 [n], the weight of each scored token in the loss.
        learns: bool [n], which rows have a gradient.
        batches: micro-batches, int64 positions in `row_ids`, of the rows that have a gradient.
        measured: micro-batches of the other rows, which run forward only, for the step's figures.
        positions: the number of positions that the model computes for each of `batches`.
        parts: the micro-batches that this process has read, by their first position, without their loss weights.
    """

    row_ids: np.ndarray
    advantages: Tensor
    lengths: Tensor
    produced: Tensor
    scored: Tensor
    groups: Tensor
    episodes: Tensor | None
    weights: Tensor
    learns: Tensor
    batches: list[Tensor]
    measured: list[Tensor]
    positions: list[int]
    parts: dict[int, LossBatch]

    def without(self, lost: Tensor, *, loss: GRPOLoss, max_completion_tokens: int) -> StepPlan:
        """Return the same step with fewer tokens in the loss.

        Args:
            lost: int64 [n], how many of each row's scored tokens have no finite log-prob after all.
            loss: as for `plan_step`.
            max_completion_tokens: as for `plan_step`.
        """
        scored = self.scored - lost
        weights = token_weights(
            scored,
            loss.settings.aggregation,
            groups=self.groups,
            episodes=self.episodes,
            max_completion_tokens=max_completion_tokens,
        )
        return dataclasses.replace(self, scored=scored, weights=weights)

    @property
    def teaches(self) -> npt.NDArray[np.bool_]:
        """Which rows change the weights, bool [n]: they have a gradient, and a token with a weight in the loss."""
        return (self.learns & (self.scored > 0) & (self.weights > 0)).numpy()

    def without_gradient(self) -> StepPlan:
        """Return the same step with every row measured and none used for training."""
        learns = torch.zeros_like(self.learns)
        return dataclasses.replace(self, learns=learns, batches=[], measured=[*self.batches, *self.measured])


def check_reduction(loss: GRPOLoss) -> None:
    """Reject a loss whose reduction the fixed weights of a step would override."""
    if loss.settings.reduction != "mean":
        raise DefinitionError(
            "the learner computes the token weights over the complete step, but its loss has "
            f"reduction={loss.settings.reduction!r}. Create the loss with reduction='mean', and choose the "
            "weighting with aggregation: token_mean, sequence_mean, group_mean, sequence_sum or dr_grpo."
        )


def plan_step(
    storage: TrajectoryStorage,
    row_ids: np.ndarray,
    *,
    loss: GRPOLoss,
    token_budget: int,
    max_completion_tokens: int,
    policy: TokenPolicy,
    shards: Shards | None = None,
    complete_episodes: bool = True,
) -> StepPlan:
    """Split a step into micro-batches, read those of this process, and fix the loss weights from all counts.

    No micro-batch computes more than `token_budget` positions; a longer row is one by itself.

    Args:
        storage: where the trajectories are.
        row_ids: int64 [n], the rows that the step learns from.
        loss: a loss that `check_reduction` accepts.
        token_budget: the most positions that a micro-batch computes, padding included.
        max_completion_tokens: the limit at sampling; the divisor of the `dr_grpo` aggregation.
        policy: scores the micro-batches, in its own layout.
        shards: given if several processes share the step.
        complete_episodes: an episode of several rows counts as one trajectory; otherwise each of its rows does.
    """
    store, names = storage.store, loss.tensor_keys
    columns = column_of_key(store.schema)
    lengths = torch.from_numpy(np.asarray(store.lengths("input_ids", row_ids), dtype=np.int64))
    column = columns.get(names.advantage)
    if column is None:
        raise MissingKeyError(
            f"the store at {store.path} has no column for {names.advantage!r}, which MCAdvantage writes."
        )
    advantages = torch.from_numpy(store.read_scalars(column.name, row_ids))
    if bool(advantages.isnan().any()):
        row = int(row_ids[int(advantages.isnan().nonzero()[0])])
        raise MissingKeyError(f"row {row} has no {names.advantage!r}, which MCAdvantage writes.")
    column_keys = [names.action, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, names.sample_log_prob]
    reference = columns.get(names.ref_log_probs)
    if reference is not None and bool(store.present(reference.name, row_ids).any()):
        column_keys.append(names.ref_log_probs)
    if keys.TURN_ADVANTAGES in columns:
        column_keys.append(names.advantage)
    useful = contributes(
        advantages,
        kl_loss=loss.settings.reads_reference or loss.settings.kl_to_inference_coeff > 0,
        entropy_bonus=loss.settings.entropy_bonus,
    )

    prompt_lengths, group_ids = (
        torch.from_numpy(store.read_scalars(name, row_ids).astype(np.int64))
        for name in ("num_prompt_tokens", "group_id")
    )

    episodes = None
    if complete_episodes and keys.EPISODE_ID in columns:
        stored = torch.from_numpy(store.read_scalars(str(keys.EPISODE_ID), row_ids))
        episodes = torch.where(stored < 0, -1 - torch.arange(len(row_ids)), stored)

    def cut(at: Tensor, layout: str) -> list[Tensor]:
        plan = plan_micro_batches(
            layout,
            lengths[at],
            token_budget,
            prompt_lengths=prompt_lengths[at],
            group_ids=group_ids[at],
            weight=policy.head_weight,
        )
        return [at[rows] for rows in plan.rows]

    def read(batches: list[Tensor]) -> dict[int, LossBatch]:
        by_number: dict[int, LossBatch] = {}
        for number in range(len(batches)) if shards is None else shards.share(range(len(batches))):
            if number is not None:
                chosen = batches[number]
                columns = storage.columns(row_ids[chosen.numpy()], column_keys)
                by_number[number] = _micro_batch(columns, advantages[chosen], loss)
        return by_number

    def within_budget(chosen: Tensor) -> tuple[list[Tensor], list[int], dict[int, LossBatch]]:
        """Return micro-batches of these rows, the positions of each, and those that this process has read."""
        at = chosen.nonzero()[:, 0]
        if not len(at):
            return [], [], {}
        batches = cut(at, policy.planned_layout)
        while True:
            parts = read(batches)
            rows_read = [(part.tokens, part.attention, part.candidates) for part in parts.values()]
            computed = policy.computed_positions(rows_read, token_budget)
            positions = torch.zeros(len(batches), dtype=torch.int64)
            positions[[*parts]] = torch.tensor(computed, dtype=torch.int64)
            if shards is not None:
                positions = shards.total(positions)
            over = [n > token_budget and len(rows) > 1 for n, rows in zip(positions.tolist(), batches, strict=True)]
            if not any(over):
                return batches, positions.tolist(), parts
            # Its rows do not have in common what their group promised, or the model has to pad them.
            batches = [
                rows
                for whole, above in zip(batches, over, strict=True)
                for rows in (cut(whole, "padded") if above else [whole])
            ]

    parts: dict[int, LossBatch] = {}
    counts = torch.zeros(2, len(row_ids), dtype=torch.int64)
    (batches, positions, taught), (measured, _, others) = within_budget(useful), within_budget(~useful)
    for some, parts_by_number in ((batches, taught), (measured, others)):
        for number, part in parts_by_number.items():
            parts[int(some[number][0])] = part
            counts[:, some[number]] = torch.stack([part.candidates[:, 1:].sum(1), part.mask.sum(1)])
    produced, scored = counts if shards is None else shards.total(counts)
    return StepPlan(
        row_ids=row_ids,
        advantages=advantages,
        lengths=lengths,
        produced=produced,
        scored=scored,
        groups=group_ids,
        episodes=episodes,
        weights=token_weights(
            scored,
            loss.settings.aggregation,
            groups=group_ids,
            episodes=episodes,
            max_completion_tokens=max_completion_tokens,
        ),
        learns=useful,
        batches=batches,
        measured=measured,
        positions=positions,
        parts=parts,
    )


def _micro_batch(columns: Mapping[keys.Key, Tensor], advantages: Tensor, loss: GRPOLoss) -> LossBatch:
    """Return padded columns as a batch of the loss without weights, which follow from the counts of the whole step.

    By the mask and not by the prompt's length: several turns have tokens of others in between.
    """
    names, produced = loss.tensor_keys, columns[keys.ASSISTANT_MASK]
    attention, behaviour = columns[keys.ATTENTION_MASK], columns[names.sample_log_prob]
    ref = columns.get(names.ref_log_probs)
    mask = scorable(produced, attention, behaviour, ref if loss.settings.reads_reference else None)
    return LossBatch(
        tokens=columns[names.action],
        attention=attention,
        candidates=produced,
        # Without reference log-probs, which a KL term against them needs, no token is in the loss.
        mask=torch.zeros_like(mask) if ref is None and loss.settings.reads_reference else mask,
        behaviour=behaviour,
        advantage=columns.get(names.advantage, advantages[:, None].expand(produced.shape)),
        ref=ref,
    )


def trajectory_names(store: TrajectoryStore, row_ids: np.ndarray) -> np.ndarray:
    """Return numbers that identify trajectories, int64 `[n]`: their ids; if they have none, a negative one per row.

    Args:
        store: where the trajectories are.
        row_ids: int64 [n].
    """
    trajectory_ids = store.read_scalars("trajectory_id", row_ids)
    return np.where(trajectory_ids < 0, np.asarray(row_ids, np.int64) + np.iinfo(np.int64).min, trajectory_ids)


def sampler_of(sample: Sample, *, max_staleness: int | None, steps_per_rollout: int = 1) -> TrajectorySampler:
    """Return the sampler of the strategy that a definition names.

    >>> sampler_of(Sample(strategy="mix", tau=8.0), max_staleness=16)
    MixSampler(max_staleness=None, max_uses=None)
    """
    entry = strategy_of(sample.strategy)
    available = {
        "tau": math.inf if sample.tau is None else sample.tau,
        "alpha": sample.alpha,
        "fresh_fraction": sample.fresh_fraction,
        "steps_per_rollout": steps_per_rollout,
    }
    settings = {name: available[name] for name in entry.settings}
    return as_sampler(sample.strategy, max_staleness=max_staleness, max_uses=sample.max_uses, **settings)


def part_of_rollout(num_rows: int, *, step: int, config: Learn, seed: int) -> Ints:
    """Return which trajectories of the newest rollout a step learns from, as positions, ascending.

    Each of `config.epochs` passes shuffles them again and cuts them into `config.minibatches` parts of equal size, to
    within one, which have no trajectory in common: a function of the arguments, so that a resumed run takes the same.

    Args:
        num_rows: trajectories of the rollout, in the order of their ids.
        step: the optimizer step, from 1.
        config: how many passes and parts.
        seed: of the run.

    >>> config = Learn(epochs=2, minibatches=2)
    >>> [part_of_rollout(4, step=step, config=config, seed=0).tolist() for step in (1, 2, 3, 4)]
    [[1, 2], [0, 3], [0, 3], [1, 2]]
    """
    if config.minibatches == 1:
        return np.arange(num_rows)
    epoch, part = divmod(step - 1, config.minibatches)  # of all epochs so far
    order = step_generator(seed, epoch).permutation(num_rows)
    return np.sort(np.array_split(order, config.minibatches)[part])


class StepLedger(Protocol):
    """Records which trajectories enter which step; see `run.ledger.Ledger`."""

    def planned(self, step: int) -> dict[str, Any] | None:
        """Return the row of a step that was begun before, or None."""
        ...

    def record(self, row: dict[str, Any], *, differs: Callable[[dict[str, Any]], None]) -> bool:
        """Write a step's row; return False if an earlier try at this step used other trajectories.

        Before such an earlier row is replaced, `differs` is called with it.
        """
        ...


class UseCounts:
    """The number of steps that used each trajectory, counted from the ledger, so a crash never counts a step twice.

    Trajectories are identified by their ids: a killed run has the same ids as a straight one, but other row ids.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from rlhf_pipeline.run.ledger import Ledger
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> _ = ledger.record({"step": 1, "row_ids": [0, 1], "trajectory_ids": [4, 5]})
    >>> _ = ledger.record({"step": 2, "row_ids": [1], "trajectory_ids": [5]})
    >>> UseCounts(ledger).before(3, np.array([4, 5, 6])).tolist()
    [1, 2, 0]
    """

    def __init__(self, ledger: StepLedger, *, window: int | None = None) -> None:
        self._ledger = ledger
        self._window = window
        self._ids: Ints = np.empty(0, np.int64)
        self._counts: Ints = np.empty(0, np.int64)
        self._last: Ints = np.empty(0, np.int64)
        """The last step that used each trajectory."""
        self._up_to = 0

    def before(self, step: int, trajectory_ids: Ints) -> Ints:
        """Return how many of the steps before `step` learned from each trajectory, int64 `[n]`."""
        first = 1 if self._window is None else max(step - self._window, 1)
        if self._up_to >= step:
            self._ids = self._counts = self._last = np.empty(0, np.int64)
            self._up_to = 0
        for earlier in range(max(self._up_to + 1, first), step):
            row = self._ledger.planned(earlier)
            if row is not None:
                self._count(np.asarray(row["trajectory_ids"], np.int64), earlier)
        self._up_to = step - 1
        young = self._last >= first
        self._ids, self._counts, self._last = self._ids[young], self._counts[young], self._last[young]
        places = np.searchsorted(self._ids, trajectory_ids)
        is_counted = np.append(self._ids, -1)[places] == trajectory_ids
        return np.where(is_counted, np.append(self._counts, 0)[places], 0)

    def state(self) -> Ints:
        """Return the counts up to the last step queried, int64 `[3, 1 + n]`, for a checkpoint."""
        return np.column_stack([np.full(3, self._up_to), np.stack([self._ids, self._counts, self._last])])

    def load_state(self, state: Ints) -> None:
        """Restore what `state` returned; the ledger is then read from that step on."""
        self._up_to = int(state[0, 0])
        self._ids, self._counts, self._last = state[0, 1:], state[1, 1:], state[2, 1:]

    def _count(self, used: Ints, step: int) -> None:
        new = np.setdiff1d(used, self._ids)
        places = np.searchsorted(self._ids, new)
        self._ids, self._counts = np.insert(self._ids, places, new), np.insert(self._counts, places, 0)
        self._last = np.insert(self._last, places, step)
        at = np.searchsorted(self._ids, used)
        np.add.at(self._counts, at, 1)
        self._last[at] = step
