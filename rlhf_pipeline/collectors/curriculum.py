"""A mixture of prompts whose weights depend on the stored success; see `rlhf_pipeline.data.prompts.Curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.buffer.stored_groups import StoredGroups
from rlhf_pipeline.data.keys import reward_column
from rlhf_pipeline.data.prompts import Curriculum, Mix, Prompt, PromptSource, prompt_at, template_options, turn
from trajectory_store import TrajectoryStore


class FollowedMix:
    """A mixture with a curriculum over the store of its run.

    The weights of an interval of rollouts are a function of the rows of the interval before, so a run that is resumed
    asks for the same prompts, whatever was stored since. A group's id is its prompt's cursor.
    """

    def __init__(self, mix: Mix, curriculum: Curriculum, store: TrajectoryStore, prompts_per_rollout: int) -> None:
        self.mix = mix
        self._curriculum = curriculum
        self._store = store
        self._stored = StoredGroups(store)
        self._size = curriculum.every * prompts_per_rollout
        # Of each interval: the weights, and how many prompts each source gave before it.
        self._intervals = [(mix.base_weights, [0] * len(mix.sources))]

    @property
    def as_chat(self) -> bool:
        """As of the mixture."""
        return self.mix.as_chat

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """As of the mixture."""
        return template_options(self.mix)

    @property
    def sources(self) -> tuple[PromptSource, ...]:
        """The sources of the mixture."""
        return self.mix.sources

    def source_of(self, cursor: int) -> int:
        """Return the number of the source of prompt number `cursor`, from 0."""
        interval, place = divmod(cursor, self._size)
        return turn(self._interval(interval)[0], place)[0]

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt number `cursor`: the next one of the source whose turn it is by the interval's weights."""
        interval, place = divmod(cursor, self._size)
        weights, before = self._interval(interval)
        source, drawn = turn(weights, place)
        return prompt_at(self.mix.sources[source], before[source] + drawn[source], seed)

    def weights(self, rollout: int) -> list[float]:
        """Return the weights by which a rollout's prompts are drawn, one per source."""
        return list(self._interval(rollout // self._curriculum.every)[0])

    def _interval(self, number: int) -> tuple[tuple[float, ...], list[int]]:
        while len(self._intervals) <= number:
            weights, before = self._intervals[-1]
            drawn = turn(weights, self._size)[1]
            sources = np.array([turn(weights, place)[0] for place in range(self._size)])
            success = self._success((len(self._intervals) - 1) * self._size)
            rates = [success[(sources == source) & np.isfinite(success)] for source in range(len(drawn))]
            following = tuple(
                base if not len(of_one) else self._curriculum.weight(base, of_one.tolist())
                for base, of_one in zip(self.mix.base_weights, rates, strict=True)
            )
            self._intervals.append((following, [old + new for old, new in zip(before, drawn, strict=True)]))
        return self._intervals[number]

    def _success(self, first: int) -> np.ndarray:
        """Return the share of right members of each group of the interval from a group on; NaN of none graded."""
        rows = self._stored.rows(first, first + self._size - 1)
        check_rows(self._store, rows)
        rewards, by = self._store.read_scalars("task_reward", rows), self._curriculum.by
        graded, groups = np.isfinite(rewards), self._store.read_scalars("group_id", rows) - first
        if by is not None:
            has_column = reward_column(by) in self._store.schema
            rewards = self._store.read_scalars(reward_column(by), rows) if has_column else np.full(len(rows), np.nan)
        right = np.bincount(groups, graded & (rewards >= self._curriculum.success_at), minlength=self._size)
        counts = np.bincount(groups, graded, minlength=self._size)
        return np.divide(right, counts, out=np.full(self._size, np.nan), where=counts > 0)
