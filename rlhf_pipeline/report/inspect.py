"""What a run has stored, counted; and its rewards, graded again from the stored text.

The reward function sees exactly what it saw during the run (prompt, completion, answer, meta). If the numbers in the
store and in `metrics.jsonl` can be reproduced, the learning curve describes the trajectories that are stored.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config_text import name_of
from rlhf_pipeline.data.rewards import RewardFunction
from rlhf_pipeline.report.stored import Context, Stored
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.medium import Address

TOLERANCE = 1e-5
"""Rewards are stored as float32; a difference above this is a disagreement."""

_EXAMPLES = 5
_BARS = 8

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """One stored reward that was not reproduced."""

    id: int
    stored: float | None
    graded_again: float | None
    """None if the call failed."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutDisagreement:
    """One point of the curve that the stored trajectories do not reproduce."""

    step: int
    rollout: int
    recorded: float | None
    graded_again: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCheck:
    """Stored and recorded rewards against rewards graded again."""

    function: str
    num_trajectories: int
    num_different: int
    """Trajectories whose stored reward differs from the function's now."""
    num_failed_before: int
    """Trajectories whose call failed during the run and succeeds now; not counted as different."""
    first_different: tuple[Disagreement, ...]
    num_rollouts: int
    """Rollouts that are whole in the store and have a line in `metrics.jsonl`."""
    num_rollouts_different: int
    first_rollouts_different: tuple[RolloutDisagreement, ...]
    num_rollouts_partial: int
    """Rollouts that are recorded but not whole in the store (dropped groups, evicted segments)."""

    @property
    def agrees(self) -> bool:
        """True if every reward and every point of the curve was reproduced."""
        return self.num_different == 0 and self.num_rollouts_different == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What is in a store, and in the run around it if there is one."""

    path: str
    definition: str | None
    num_steps: int | None
    num_trajectories: int
    num_groups: int
    group_sizes: dict[int, int]
    """Number of groups by size."""
    num_prompt_tokens: int
    num_completion_tokens: int
    completion_lengths: tuple[tuple[int, int, int], ...]
    """Histogram: least length, greatest length, trajectories."""
    policy_versions: tuple[int, int, int] | None
    """First, last, and how many."""
    finish_reasons: dict[str, int]
    num_failed: int
    first_failed_id: int | None
    mean_reward: float | None
    first_reward: float | None
    """The first and the last point of the curve."""
    last_reward: float | None
    size_bytes: int
    reward_check: RewardCheck | None
    not_checked: str | None
    """Why there is no reward check."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready data."""
        data = asdict(self)
        if self.reward_check is not None:
            data["reward_check"]["agrees"] = self.reward_check.agrees
        return data


def inspect_store(
    stored: Stored, *, run: RunFolder | None, reward: RewardFunction | None, why_no_reward: str | None = None
) -> Inspection:
    """Count what a store holds, and grade it again with the reward function.

    Args:
        stored: the open store.
        run: the run that it belongs to, if any.
        reward: the definition's reward function; None leaves the check out.
        why_no_reward: what to say then.

    Raises:
        StoreError: the store is damaged.
        DataError: a file of the run, or the stored `meta`, is damaged.
    """
    ids = stored.ids()
    num = len(ids)
    groups = stored.scalars("group_id")
    versions = stored.scalars("policy_version")
    rewards = stored.scalars("task_reward")
    lengths = stored.lengths("input_ids") if "input_ids" in stored.columns else np.zeros(num, np.int64)
    prompt_lengths = stored.scalars("num_prompt_tokens")
    prompt_tokens = np.zeros(num, np.int64) if prompt_lengths is None else prompt_lengths.astype(np.int64)
    graded = np.empty(0) if rewards is None else rewards[np.isfinite(rewards)].astype(np.float64)
    sizes = distinct(groups)[1] if groups is not None else np.empty(0, np.int64)
    first_reward, last_reward = run.first_and_last("task_reward") if run is not None else (None, None)
    reasons, first_failed = Counter[str](), None
    for part in stored.blocks(ids):
        texts = stored.texts("finish_reason", ids[part])
        reasons.update(texts)
        if first_failed is None and "failed" in texts:
            first_failed = int(ids[part][texts.index("failed")])
    check = None
    if reward is not None and rewards is not None:
        check = check_rewards(stored, ids, rewards.astype(np.float64), groups, reward, run)
    return Inspection(
        path=str(run.address if run is not None else stored.path),
        definition=run.config.definition if run is not None else None,
        num_steps=len(run.metrics) if run is not None else None,
        num_trajectories=num,
        num_groups=len(sizes),
        group_sizes=dict(sorted(Counter(sizes.tolist()).items())),
        num_prompt_tokens=int(prompt_tokens.sum()),
        num_completion_tokens=int((lengths - prompt_tokens).sum()),
        completion_lengths=histogram(lengths - prompt_tokens),
        policy_versions=_first_last_count(versions) if versions is not None and num else None,
        finish_reasons={name: reasons[name] for name, _ in reasons.most_common() if name},
        num_failed=reasons["failed"],
        first_failed_id=first_failed,
        mean_reward=float(graded.mean()) if len(graded) else None,
        first_reward=first_reward,
        last_reward=last_reward,
        size_bytes=disk_usage(stored.path),
        reward_check=check,
        not_checked=None if check is not None else why_no_reward or "the store has no column task_reward",
    )


def check_rewards(
    stored: Stored,
    ids: npt.NDArray[np.int64],
    rewards: Floats,
    groups: npt.NDArray[Any] | None,
    reward: RewardFunction,
    run: RunFolder | None,
) -> RewardCheck:
    """Grade every stored trajectory again and compare, one by one and per rollout.

    Args:
        stored: the open store.
        ids: all trajectories, [N] int64.
        rewards: their stored rewards, [N]; NaN where the call failed.
        groups: their group ids, [N], or None.
        reward: the definition's reward function.
        run: the run with its `metrics.jsonl`, or None to compare with the store only.
    """
    again = np.empty(len(ids))
    num_different, failed_before, examples = 0, 0, list[Disagreement]()
    for part in stored.blocks(ids):
        some, before = ids[part], rewards[part]
        texts = stored.texts("prompt", some), stored.texts("completion", some)
        found, errors = grade_again(reward, *texts, stored.contexts(some))
        failed = np.isnan(before)
        different = np.flatnonzero(~failed & ~np.isclose(found, before, rtol=TOLERANCE, atol=TOLERANCE))
        num_different += len(different)
        failed_before += int((failed & np.isfinite(found)).sum())
        examples += [
            Disagreement(
                id=int(some[place]),
                stored=_or_none(float(before[place])),
                graded_again=_or_none(float(found[place])),
                error=errors.get(place),
            )
            for place in different[: _EXAMPLES - len(examples)].tolist()
        ]
        again[part] = np.where(failed, np.nan, found)
    whole, partial, num_wrong, wrong = 0, 0, 0, list[RolloutDisagreement]()
    if run is not None and groups is not None:
        whole, partial, num_wrong, wrong = _check_curve(run, groups, again)
    return RewardCheck(
        function=name_of(reward),
        num_trajectories=len(ids),
        num_different=num_different,
        num_failed_before=failed_before,
        first_different=tuple(examples),
        num_rollouts=whole,
        num_rollouts_different=num_wrong,
        first_rollouts_different=tuple(wrong),
        num_rollouts_partial=partial,
    )


def grade_again(
    reward: RewardFunction, prompts: Sequence[str], completions: Sequence[str], contexts: Sequence[Context]
) -> tuple[Floats, dict[int, str]]:
    """Call the reward function on each trajectory; a call that raises gives NaN, as in a run.

    Returns:
        The rewards [N], and the errors by place.
    """
    again = np.empty(len(prompts))
    errors: dict[int, str] = {}
    for place, (prompt, completion, context) in enumerate(zip(prompts, completions, contexts, strict=True)):
        try:
            value = float(reward(prompt, completion, context.answer, context.prompt_meta))
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is reported
            errors[place] = f"{type(error).__name__}: {error}"
            value = math.nan
        again[place] = value if math.isfinite(value) else math.nan
    return again, errors


def _check_curve(
    run: RunFolder, groups: npt.NDArray[Any], again: Floats
) -> tuple[int, int, int, list[RolloutDisagreement]]:
    """Compare each rollout's mean with its line of `metrics.jsonl`; a group's id is its prompt's number in the run.

    Returns:
        How many rollouts are there whole and in part, how many differ, and the first of these.
    """
    collect = run.config.pipeline.get("collect", {})
    prompts, group_size = collect.get("prompts_per_rollout"), collect.get("group_size")
    if not prompts or not group_size or not len(groups):
        return 0, 0, 0, []
    numbers, counts, means = _rollout_means(groups // prompts, again)
    whole, partial, num_wrong = 0, 0, 0
    wrong: list[RolloutDisagreement] = []
    for row in run.metrics:
        rollout, recorded = row.get("rollout"), row.get("task_reward")
        if rollout is None or recorded is None:
            continue
        place = min(int(np.searchsorted(numbers, rollout)), len(numbers) - 1)
        if numbers[place] != rollout or counts[place] < prompts * group_size:
            partial += 1
            continue
        whole += 1
        mean = float(means[place])
        if not abs(mean - recorded) <= TOLERANCE * max(1.0, abs(recorded)):
            num_wrong += 1
            if num_wrong <= _EXAMPLES:
                now = _or_none(mean)
                wrong.append(
                    RolloutDisagreement(step=row["step"], rollout=rollout, recorded=recorded, graded_again=now)
                )
    return whole, partial, num_wrong, wrong


def _rollout_means(rollouts: npt.NDArray[Any], rewards: Floats) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Floats]:
    """Return the rollouts, ascending, each with its number of trajectories and its mean reward without failed ones."""
    numbers, counts = distinct(rollouts)
    places = np.searchsorted(numbers, rollouts)
    known = np.isfinite(rewards)
    sums = np.bincount(places, np.where(known, rewards, 0.0), minlength=len(numbers))
    graded = np.bincount(places, known, minlength=len(numbers))
    with np.errstate(invalid="ignore"):
        return numbers, counts, sums / graded


def distinct(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the distinct values, ascending, and how often each occurs.

    `np.unique` does the same and imports 10 ms of numpy.ma on the way.

    >>> [part.tolist() for part in distinct(np.array([7, 3, 7]))]
    [[3, 7], [1, 2]]
    """
    ordered = np.sort(values)
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ordered) else np.empty(0, int)
    return ordered[first], np.diff(first, append=len(ordered))


def histogram(lengths: npt.NDArray[np.int64]) -> tuple[tuple[int, int, int], ...]:
    """Return at most eight buckets of equal width as `(least, greatest, how many)`.

    >>> histogram(np.array([1, 1, 2, 4]))
    ((1, 1, 2), (2, 2, 1), (3, 3, 0), (4, 4, 1))
    """
    if not len(lengths):
        return ()
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BARS)
    counts = np.bincount((lengths - low) // width)
    starts = range(low, high + 1, width)
    return tuple(
        (start, min(start + width - 1, high), int(num)) for start, num in zip(starts, counts.tolist(), strict=True)
    )


def disk_usage(folder: Address) -> int:
    """Return the bytes that a folder takes on disk, or the objects at a URL; sparse files count as what they hold."""
    if not isinstance(folder, Path):
        from trajectory_store.objects.remote import ObstoreBucket, open_bucket

        bucket = open_bucket(folder, durable=False)
        return bucket.size() if isinstance(bucket, ObstoreBucket) else 0
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # evicted a moment ago
                total += os.stat(os.path.join(parent, name)).st_blocks * 512
    return total


def _first_last_count(versions: npt.NDArray[Any]) -> tuple[int, int, int]:
    known, _ = distinct(versions)
    return int(known[0]), int(known[-1]), len(known)


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
