"""Figures about one rollout for `metrics.jsonl`: lengths, rewards within groups, each reward, failures by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.trajectory_schema import reward_names
from rlhf_pipeline.data.episodes import stored_last_rows, totals
from rlhf_pipeline.data.keys import POLICY_ROLE, reward_column
from rlhf_pipeline.environments.outcomes import BROKEN, LENGTH
from rlhf_pipeline.functional.advantage import FLOAT32_RESOLUTION
from trajectory_store import TrajectoryStore

Figures = dict[str, float | int | None]


def spread_groups(rewards: npt.NDArray[np.floating], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the groups whose rewards are not all equal but for rounding, ascending, int64 `[k]`.

    Args:
        rewards: [n]; NaN for a trajectory without, which does not count.
        groups: int64 [n], the group of each.

    >>> spread_groups(np.array([0.0, 1.0, 1.0, 1.0, 0.0, np.nan]), np.array([7, 7, 8, 8, 9, 9])).tolist()
    [7]
    """
    finite = np.isfinite(rewards)
    numbers, place = np.unique(groups[finite], return_inverse=True)
    low, high = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(low, place, rewards[finite])
    np.maximum.at(high, place, rewards[finite])
    return numbers[high - low > FLOAT32_RESOLUTION * np.maximum(np.abs(high), np.abs(low))]


def rollout_figures(
    *,
    lengths: npt.NDArray[np.int64],
    cut_off: npt.NDArray[np.bool_],
    rewards: npt.NDArray[np.floating],
    groups: npt.NDArray[np.int64],
    kinds: Sequence[str],
    values: Mapping[str, npt.NDArray[np.floating]],
    parts: Container[str] = (),
    turns: npt.NDArray[np.int64] | None = None,
) -> Figures:
    """Return the figures of `n` trajectories, all unshaped and unweighted.

    Args:
        lengths: [n], tokens after the prompt.
        cut_off: [n], whether the limit of tokens ended a completion.
        rewards: [n], NaN for a trajectory without.
        groups: [n], the group of each.
        kinds: [n], the kind of failure of each, or empty.
        values: [n] for each reward and component that has a column, by its name; NaN where it did not apply or failed.
        parts: which of them are components: without a figure where none was given, and not called, so never failed.
        turns: [n], the policy's turns in each conversation; None without an environment.

    >>> found = rollout_figures(
    ...     lengths=np.array([3, 5, 4, 4]), cut_off=np.array([0, 1, 0, 0], bool), groups=np.array([0, 0, 1, 1]),
    ...     rewards=np.array([0.0, 1.0, 1.0, np.nan]), kinds=["", "", "", "timeout"], values={},
    ... )
    >>> found["completion_length"], found["cut_off"], found["reward_std_in_group"], found["flat_groups"]
    (4.0, 0.25, 0.25, 0.5)
    """
    figures: Figures = {
        "completion_length": float(lengths.mean()) if len(lengths) else None,
        "completion_length_max": int(lengths.max()) if len(lengths) else None,
        "cut_off": float(cut_off.mean()) if len(cut_off) else None,
    }
    if turns is not None:
        figures["turns"] = float(turns.mean()) if len(turns) else None
    finite = np.isfinite(rewards)
    of_groups = [rewards[finite & (groups == group)].astype(np.float64) for group in np.unique(groups[finite])]
    figures["reward_std_in_group"] = (
        float(np.mean([group_rewards.std() for group_rewards in of_groups])) if of_groups else None
    )
    spread = len(spread_groups(rewards, groups))
    figures["flat_groups"] = (len(of_groups) - spread) / len(of_groups) if of_groups else None
    broken = np.isin(np.asarray(kinds, dtype=str), list(BROKEN))
    for name, of_one in values.items():
        applies = np.isfinite(of_one)
        if name in parts:
            figures |= {f"reward/{name}": float(of_one[applies].mean(dtype=np.float64))} if applies.any() else {}
            continue
        figures[f"reward/{name}"] = float(of_one[applies].mean(dtype=np.float64)) if applies.any() else None
        figures[f"reward_failed/{name}"] = int((broken & ~applies).sum())
    figures |= {f"failed/{kind}": number for kind, number in sorted(Counter(kinds).items()) if kind}
    return figures


def stored_figures(store: TrajectoryStore, rows: npt.NDArray[np.int64], names: Sequence[str]) -> Figures:
    """Return the figures of stored trajectories; these are the names of the definition's rewards."""
    read, last, every = store.read_scalars, stored_last_rows(store, rows), rows
    rows = rows[last]
    stored = [name for name in names if reward_column(name) in store.schema]
    stored += sorted({*reward_names(store.schema)} - {*stored})
    rewards = read("task_reward", rows)
    kinds = list(store.read(rows, ["failure_reason"])["failure_reason"]) if "failure_reason" in store.schema else []
    kinds = [kind or ("grader_error" if lacks else "") for kind, lacks in zip_longest(kinds, np.isnan(rewards))]
    return rollout_figures(
        lengths=totals(np.asarray(store.lengths("input_ids", every)) - read("num_prompt_tokens", every), last),
        cut_off=np.array([reason == LENGTH for reason in store.read(rows, ["finish_reason"])["finish_reason"]], bool),
        rewards=rewards,
        groups=read("group_id", rows),
        kinds=kinds,
        values={name: read(reward_column(name), rows) for name in stored},
        parts={*stored} - {*names},
        turns=totals(_turns(store, every), last) if "turn_spans" in store.schema else None,
    )


def _turns(store: TrajectoryStore, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many turns of the policy each stored conversation has, int64 [n]."""
    spans = store.read(rows, ["turn_spans"])["turn_spans"]
    return np.array([int((np.asarray(row_spans)[:, 1] == POLICY_ROLE).sum()) for row_spans in spans], np.int64)
