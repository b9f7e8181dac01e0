"""Copy the chosen trajectories into the run's own store; missing values are computed on the way.

A group in which every trajectory has an advantage and log-probs is copied bit for bit. Any other goes through the
write path whole: missing behaviour and reference log-probs are computed with the initial policy, then the KL penalty,
then the advantage over the members that were chosen.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_pipeline.buffer.trajectory_schema import INTERNAL, SLOT, USES, WAITING, trajectory_schema
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.data.episodes import complete_episodes, episode_bounds, stored_last_rows
from rlhf_pipeline.data.keys import (
    ASSISTANT_MASK,
    EPISODE_ID,
    EPISODE_ROW,
    EPISODE_SIZE,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    REWARD_COLUMN,
    TASK_REWARD,
    TURN_ADVANTAGES,
    TURN_REWARDS,
    TURN_SPANS,
    Key,
    column_name,
    reward_column,
)
from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.advantage import (
    NamedRewards,
    group_advantage,
)
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.events import EventHandler, notify
from rlhf_pipeline.run.selection import Choice, Limits, check_vocabulary, open_sources
from rlhf_pipeline.transforms.advantage_settings import estimator_entry
from rlhf_pipeline.transforms.base import score
from rlhf_pipeline.transforms.groups import graded_groups, scores_of
from rlhf_pipeline.transforms.kl_reward import KLReward
from trajectory_store import Column, CorruptionError, MissingRowError, Schema, TrajectoryStore

if TYPE_CHECKING:
    from trajectory_store.batch import Batch

SOURCE: Final = Column("source", "int32", fill=-1)
"""The number of the store that contains the trajectory, starting at 0."""
SOURCE_ROW: Final = Column("source_row", "int64", fill=-1)
"""The id of its row in that store."""

COMPUTED: Final = Column("computed", "int8", fill=0)
"""The values that gathering computed, as a sum: 1 behaviour log-probs, 2 reference log-probs, 4 the advantage."""
_ADVANTAGE: Final = 4

_SOURCE_COLUMNS: Final = (SOURCE, SOURCE_ROW, COMPUTED)
_SAY_EVERY_S: Final = 5.0
_SCORING_BUDGET: Final = 16_384

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(kw_only=True)
class GatherCounts:
    """Counts of what was gathered."""

    trajectories: int = 0
    behaviour_scored: int = 0
    reference_scored: int = 0
    advantages: int = 0
    dropped: int = 0


def gather_schema(choice: Choice) -> Schema:
    """Return the columns of the run's store: the usual ones, further ones of the sources, and a row's origin."""
    columns = {column.name: column for column in trajectory_schema()}
    first_stores: dict[str, str] = {}
    computed = INTERNAL | {column.name for column in (*_SOURCE_COLUMNS, USES)}
    with open_sources([source.path for source in choice.sources]) as stores:
        for store in stores:
            for column in store.schema:
                name = column.name
                if name in computed:
                    continue
                expected, path = columns.get(name, column), str(store.path)
                if name in first_stores and (expected.dtype, expected.axis) != (column.dtype, column.axis):
                    raise DataError(
                        f"the column '{name}' contains {_kind(expected)} in {first_stores[name]} and {_kind(column)} "
                        f"in {path}. Learn from only one of the stores, or export one and import it again."
                    )
                if expected.axis != column.axis:
                    raise DataError(
                        f"the column '{name}' of {path} contains {_kind(column)}; learning requires {_kind(expected)}."
                    )
                if name not in first_stores and (name not in columns or expected.dtype != column.dtype):
                    columns[name] = _optional(column, mutable=expected.mutable)
                first_stores.setdefault(name, path)
    return Schema([*columns.values(), *_SOURCE_COLUMNS])


def _kind(column: Column) -> str:
    per = "token" if column.axis else "trajectory"
    return "text" if column.is_text else f"one {column.dtype} value per {per}"


def _optional(column: Column, *, mutable: bool) -> Column:
    """Return a column that rows of stores without it can omit, and that the run may update if `mutable`."""
    if column.name == "input_ids":
        return column
    return dataclasses.replace(column, fill=column.fill_value, mutable=mutable)


class Gatherer:
    """Fills the run's store, one commit per batch; continues where an earlier try stopped."""

    def __init__(
        self,
        pipeline: Pipeline,
        policy: TokenPolicy,
        choice: Choice,
        target: TrajectoryStore,
        *,
        limits: Limits,
        on_event: EventHandler,
    ) -> None:
        self.pipeline = pipeline
        self.policy = policy
        self.choice = choice
        self.target = target
        self.limits = limits
        self.on_event = on_event
        self._entry = estimator_entry(pipeline.write)

    def run(self, stop: Callable[[], bool]) -> GatherCounts | None:
        """Gather what is still missing."""
        ends = self.choice.ends.tolist()
        starts = [0, *ends[:-1]]
        done, total = self._num_done(), len(self.choice)
        next_word = time.monotonic() + _SAY_EVERY_S
        with open_sources([source.path for source in self.choice.sources]) as stores:
            for start, end in zip(starts, ends, strict=True):
                if end <= done:
                    continue
                batch = self._batch(stores[int(self.choice.source[start])], start, end)
                if batch.n_rows:
                    self.target.append_batch(batch)
                if stop() and end < total:
                    return None
                if time.monotonic() >= next_word:
                    next_word = time.monotonic() + _SAY_EVERY_S
                    notify(self.on_event, f"gathered {end:,} of {total:,} trajectories ...", level="progress")
        if self._entry.by_batch:
            self._normalise()
        return self._counts()

    def _normalise(self) -> None:
        """Normalise the advantages computed here by the spread of all of them, instead of that of their commit."""
        ids = self.target.ids()
        computed = (self.target.read_scalars(COMPUTED.name) & _ADVANTAGE) > 0
        ids = ids[computed & stored_last_rows(self.target)]
        if not len(ids):
            return
        returns, groups = (torch.from_numpy(self.target.read_scalars(name, ids)) for name in ("return", "group_id"))
        # A group found to have no spread stays so, whatever the differences of its returns.
        flat = torch.from_numpy(self.target.read_scalars("degenerate", ids).astype(bool))
        rounding = torch.where(flat, math.inf, 0.0)
        normalised = group_advantage(
            returns,
            groups,
            self._entry,
            task_rewards=torch.zeros_like(returns),
            rounding=rounding,
            named=self._named_rewards({name: self.target.read_scalars(name, ids) for name in self._reward_columns()}),
        )
        ids, place = complete_episodes(self.target, ids)
        new = {
            "advantage": normalised.advantages.numpy()[place],
            "degenerate": normalised.degenerate.numpy()[place],
        }
        if any(not np.array_equal(self.target.read_scalars(name, ids), values) for name, values in new.items()):
            self.target.update(ids, **new)

    def _reward_columns(self) -> list[str]:
        """Return the columns of the rewards that the estimator takes one by one."""
        return [reward_column(name) for name in self.pipeline.reward_weights] if self._entry.by_reward else []

    def _named_rewards(self, columns: Mapping[str, npt.NDArray[Any]]) -> NamedRewards | None:
        """Return the rewards of rows one by one, if the estimator takes them."""
        weights = self.pipeline.reward_weights if self._entry.by_reward else {}
        if not weights:
            return None
        if missing := [name for name in self._reward_columns() if name not in columns]:
            raise DataError(
                f"write.estimator needs the named rewards, but the stores have no column {missing[0]!r}. Only the "
                "sum of the rewards was stored: set write.estimator=grpo."
            )
        values = [torch.from_numpy(np.array(columns[name], np.float64)) for name in self._reward_columns()]
        return NamedRewards(torch.stack(values, 1), tuple(weights), tuple(weights.values()))

    def _num_done(self) -> int:
        """Return how many of the chosen rows earlier tries have processed: those up to the last one in the store."""
        ids = self.target.ids()
        if not len(ids):
            return 0
        last = ids[-1:]
        source, row = (int(self.target.read_scalars(column.name, last)[0]) for column in (SOURCE, SOURCE_ROW))
        at = np.flatnonzero((self.choice.source == source) & (self.choice.row == row))
        if not len(at):
            raise DataError(
                f"the store at {self.target.path} contains a trajectory that was not selected (row {row} of source "
                f"{source}). Another process has written to the store; start a new run with --out OTHER_FOLDER."
            )
        return int(self.choice.ends[np.searchsorted(self.choice.ends, int(at[0]), "right")])

    def _counts(self) -> GatherCounts:
        """Count from the store, so that an interrupted gathering counts the same."""
        counts = GatherCounts(trajectories=len(self.target), dropped=len(self.choice) - len(self.target))
        if not len(self.target):
            raise DataError(
                "the rewards in each group are all equal, and write.zero_variance=drop excludes such groups: there is "
                "nothing to learn from. Select other trajectories, or set write.zero_variance=keep."
            )
        flags = self.target.read_scalars(COMPUTED.name)
        for bit, name in enumerate(("behaviour_scored", "reference_scored", "advantages")):
            setattr(counts, name, int(np.count_nonzero(flags & (1 << bit))))
        return counts

    def _batch(self, source: TrajectoryStore, start: int, end: int) -> Batch:
        choice, schema = self.choice, self.target.schema
        rows = choice.row[start:end]
        try:
            batch = source.read_batch(rows, schema).fitted(schema)
        except MissingRowError as error:
            raise DataError(
                f"{source.path} no longer contains some of the trajectories that this run selected: they were "
                "evicted. Start a new run with --out OTHER_FOLDER to learn from the remaining ones."
            ) from error
        except CorruptionError as error:
            raise DataError(
                f"{source.path} was damaged after this run had selected trajectories from it: {error} Restore the "
                "store from a copy, or start a new run with --skip-damaged and --out OTHER_FOLDER."
            ) from error
        values = batch.values
        check_vocabulary(values["input_ids"], self.limits, str(source.path))
        n = len(rows)
        fixed: dict[str, npt.NDArray[Any]] = {
            SOURCE.name: choice.source[start:end],
            SOURCE_ROW.name: rows,
            "trajectory_id": choice.trajectory_id[start:end],
            "group_id": choice.group_id[start:end],
            SLOT: np.full(n, -1),
            WAITING.name: np.full(n, -1),
            COMPUTED.name: np.zeros(n),
        }
        if str(EPISODE_ID) in schema:
            first = np.arange(n) - values[str(EPISODE_ROW)]
            names = fixed["trajectory_id"][first.astype(np.int64)]
            fixed[str(EPISODE_ID)] = np.where(values[str(EPISODE_SIZE)] > 1, names, -1)
        everywhere = np.ones(n, bool)
        for name, constant in fixed.items():
            batch.put(schema[name], constant, everywhere)
        keep = self._complete(batch, schema)
        return batch if keep.all() else batch.rows(keep, schema)

    def _complete(self, batch: Batch, schema: Schema) -> Bools:
        """Compute the missing values of rows, in place; return which rows stay."""
        values, lengths = batch.values, batch.lengths[_axis(schema)]
        mask = values["assistant_mask"].astype(bool)
        mask = _without_first(mask, lengths)
        speaks = _any(mask, lengths)
        no_behaviour = speaks & ~_any(mask & np.isfinite(values["log_probs"]), lengths)
        no_reference = np.zeros(batch.n_rows, bool)
        if self.pipeline.needs_reference:
            no_reference = speaks & ~_any(mask & np.isfinite(values["ref_log_probs"]), lengths)
        lacks = no_behaviour | no_reference | ~np.isfinite(values["advantage"])
        keep = np.ones(batch.n_rows, bool)
        if not lacks.any():
            return keep
        _, codes = np.unique(values["group_id"], return_inverse=True)
        whole = np.bincount(codes, lacks)[codes] > 0  # all members of a group in which any lacks something
        scored = self._scores(batch, mask, no_behaviour | no_reference, lengths)
        for name, rows in (("log_probs", no_behaviour), ("ref_log_probs", no_reference)):
            if rows.any():
                at = np.repeat(rows, lengths)
                batch.put(schema[name], np.where(at, scored, values[name]), rows)
        self._grade(batch, schema, mask, whole, codes)
        flags = no_behaviour * 1 + no_reference * 2 + whole * _ADVANTAGE
        batch.put(schema[COMPUTED.name], flags, whole)
        degenerate = values["degenerate"].astype(bool) & whole
        if self._entry.of_batch:
            degenerate[:] = False  # its baseline is the whole set, which may have spread even if a group has none
        if self.pipeline.write.drops_groups:
            keep = ~degenerate
        elif self.pipeline.write.marks_groups and degenerate.any():
            batch.put(schema["priority"], np.where(degenerate, 0.0, values["priority"]), degenerate)
        return keep

    def _scores(self, batch: Batch, mask: Bools, rows: Bools, lengths: Ints) -> npt.NDArray[np.float32]:
        """Return log-probs of the initial policy, which is also the reference; NaN for other tokens than these."""
        tokens = Flat(torch.from_numpy(batch.values["input_ids"].astype(np.int64)), torch.from_numpy(lengths))
        to_score = torch.from_numpy(mask & np.repeat(rows, lengths))
        if not bool(to_score.any()):
            return np.full(len(mask), np.nan, np.float32)
        with torch.no_grad():
            scores = score(self.policy, tokens, to_score, token_budget=_SCORING_BUDGET)
        return scores.numpy()

    def _grade(self, batch: Batch, schema: Schema, mask: Bools, whole: Bools, codes: npt.NDArray[Any]) -> None:
        """Compute returns and advantages of these groups."""
        values, lengths = batch.values, torch.from_numpy(batch.lengths[_axis(schema)])
        columns: dict[Key, Flat] = {
            LOG_PROBS: Flat(torch.from_numpy(np.array(values["log_probs"], np.float32)), lengths),
            ASSISTANT_MASK: Flat(torch.from_numpy(values["assistant_mask"].astype(bool)), lengths),
            TASK_REWARD: Flat(torch.from_numpy(np.array(values["task_reward"], np.float32))),
        }
        rewards = self._token_rewards(batch, mask)
        if rewards is not None:
            columns[REWARD] = rewards
        n, coef = batch.n_rows, self.pipeline.write.kl_coef
        if coef > 0:
            columns[REF_LOG_PROBS] = Flat(torch.from_numpy(np.array(values["ref_log_probs"], np.float32)), lengths)
            columns |= KLReward(coef=coef).new_columns(Trajectories(n, columns), writing=False)
        columns |= _episode_columns(batch, schema)
        eps, at = torch.finfo(self.policy.head_weight.dtype).eps, np.flatnonzero(whole)
        reward, rows = columns.get(REWARD, columns[TASK_REWARD]), Trajectories(n, columns)
        bounds = np.array(episode_bounds(rows), np.int64)
        ends, sizes = bounds[1:] - 1, np.diff(bounds)
        members = np.flatnonzero(whole[ends])
        how, rewards, name = self.pipeline.write, None, column_name(TURN_ADVANTAGES)
        scores = scores_of(rows, reward, bounds.tolist(), None, eps, how.episode_return).take(torch.from_numpy(members))
        counts = batch.lengths[str(schema[name].axis)] if name in schema else np.zeros(n, np.int64)
        if self._entry.by_turn:
            of_episodes = np.add.reduceat(counts, bounds[:-1]) if len(ends) < n else counts
            each = np.split(values.get(column_name(TURN_REWARDS), np.empty(0)), of_episodes.cumsum()[:-1])
            rewards = [each[member].tolist() for member in members.tolist()]
        by_reward = {name: values[name][ends[members]] for name in values if name.startswith("reward_")}
        graded = graded_groups(
            scores,
            torch.from_numpy(codes[ends[members]].astype(np.int64)),
            how,
            None,
            turns=rewards,
            named_rewards=self._named_rewards(by_reward),
        )
        if len(ends) < n:
            turns = torch.from_numpy(counts[at]) if name in schema else None
            graded = graded.by_row(torch.from_numpy(sizes[members]), turns)
        if name in schema:
            turns = np.array(values[name])
            turns[np.repeat(whole, counts)] = (
                np.repeat(graded.advantages, counts[at]) if graded.turns is None else torch.cat(graded.turns)
            )
            batch.put(schema[name], turns, whole)
        for name, new in (
            ("advantage", graded.advantages.numpy()),
            ("return", graded.returns.double().numpy() if len(ends) < n else scores.returns.numpy()),
            ("degenerate", graded.degenerate.numpy()),
            *([("kl_coef", np.full(len(at), coef))] if coef > 0 else []),
        ):
            whole_column = np.array(values[name])
            whole_column[at] = new
            batch.put(schema[name], whole_column, whole)

    def _token_rewards(self, batch: Batch, mask: Bools) -> Flat | None:
        """Return rewards per token, or None if no store has them; rows without them have the task reward at the end."""
        if REWARD_COLUMN not in batch.values:
            return None
        lengths = batch.lengths[_axis(self.target.schema)]
        rewards = np.array(batch.values[REWARD_COLUMN], np.float32)
        complete = ~_any(~np.isfinite(rewards), lengths)
        if not complete.any():
            return None
        place = np.where(mask, np.arange(len(mask)), -1)
        ends = np.cumsum(lengths)
        last = np.maximum.reduceat(place, (ends - lengths)[lengths > 0])
        missing = ~complete[lengths > 0] & (last >= 0)
        rewards[np.repeat(~complete, lengths)] = 0.0
        rewards[last[missing]] = batch.values["task_reward"][lengths > 0][missing]
        return Flat(torch.from_numpy(rewards), torch.from_numpy(lengths))


def _episode_columns(batch: Batch, schema: Schema) -> dict[Key, Flat]:
    """Return the columns that episodes of several rows are scored by, as far as the stores have them."""
    values: dict[str, Any] = dict(batch.values)
    if str(EPISODE_SIZE) not in values:
        return {}
    columns: dict[Key, Flat] = {
        key: Flat(torch.from_numpy(np.array(values[str(key)], np.int64)))
        for key in (EPISODE_ID, EPISODE_ROW, EPISODE_SIZE)
    }
    for key in (TURN_REWARDS, TURN_SPANS):
        name = column_name(key)
        if name in values:
            lengths = torch.from_numpy(batch.lengths[str(schema[name].axis)])
            columns[key] = Flat(torch.from_numpy(np.array(values[name])), lengths)
    return columns


def _axis(schema: Schema) -> str:
    axis = schema["input_ids"].axis
    if axis is None:
        raise DataError("the column 'input_ids' has one number per trajectory; it must be ragged.")
    return axis


def _any(flags: Bools, lengths: Ints) -> Bools:
    """Return per row whether any of its elements is set."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), flags, minlength=len(lengths)) > 0


def _without_first(mask: Bools, lengths: Ints) -> Bools:
    """Return the mask without each row's first token, which has no log-prob."""
    out = mask.copy()
    out[(np.cumsum(lengths) - lengths)[lengths > 0]] = False
    return out
