"""Counts of a run's trajectories, and its rewards graded again from the stored text.

The reward function gets the same arguments as during the run (prompt, completion, answer, meta). If the numbers in the
store and in `metrics.jsonl` can be reproduced, the learning curve describes the stored trajectories.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import num_completion_tokens
from rlhf_pipeline.collectors.grading import Grader
from rlhf_pipeline.config_text import name_of
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.reward_forms import Sampled
from rlhf_pipeline.data.rewards import Reward, RewardFunction
from rlhf_pipeline.report.stored import Ids, Stored, disk_usage
from rlhf_pipeline.run.folder import RunFolder

TOLERANCE = 1e-5
"""Rewards are stored as float32; a difference above this is a disagreement."""

_EXAMPLES = 5
_BARS = 8
_MOST_APART = 65_536
"""Numbers that a tally buffers before it merges them."""

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


@dataclass(kw_only=True, slots=True)
class RewardCheck:
    """Comparison of stored and recorded rewards with rewards graded again."""

    function: str
    num_trajectories: int = 0
    """Trajectories with a stored reward; others are not compared."""
    num_different: int = 0
    """Trajectories whose stored reward differs from the function's result now."""
    num_failed_before: int = 0
    """Trajectories without a stored reward, usually because the call failed, that get one now."""
    first_different: list[Disagreement] = field(default_factory=list[Disagreement])
    num_rollouts: int = 0
    """Rollouts that are complete in the store and have a line in `metrics.jsonl`."""
    num_rollouts_different: int = 0
    first_rollouts_different: list[RolloutDisagreement] = field(default_factory=list[RolloutDisagreement])
    num_rollouts_partial: int = 0
    """Rollouts that are recorded but incomplete in the store (dropped groups, evicted segments)."""

    @property
    def agrees(self) -> bool:
        """True if every reward and every point of the curve was reproduced."""
        return self.num_different == 0 and self.num_rollouts_different == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The contents of a store, and of its run if it has one."""

    path: str
    definition: str | None
    num_steps: int | None
    num_trajectories: int
    num_groups: int
    group_sizes: dict[int, int]
    """Number of groups by size."""
    num_prompt_tokens: int | None
    """None if the store does not say where prompts end."""
    num_completion_tokens: int
    completion_lengths: tuple[tuple[int, int, int], ...]
    """Histogram: smallest length, largest length, trajectories."""
    policy_versions: tuple[int, int, int] | None
    """First, last, and their number."""
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
    stored: Stored,
    *,
    run: RunFolder | None,
    reward: RewardFunction | Reward | Sequence[RewardFunction | Reward] | None,
    why_no_reward: str | None = None,
) -> Inspection:
    """Count a store's trajectories, and grade them again with the reward function.

    Args:
        stored: the open store.
        run: the run that it belongs to, if any.
        reward: the definition's reward function; None skips the check.
        why_no_reward: why there is no reward function.

    Raises:
        StoreError: the store is damaged.
        DataError: a file of the run, or the stored `meta`, is damaged.
    """
    versions, lengths, groups = Tally(), Tally(), Tally(sums=2)
    rewarded = "task_reward" in stored.columns
    grader = None if reward is None else Grader(reward)
    functions = ", ".join(name_of(one.function) for one in grader.rewards) if grader is not None else ""
    check = RewardCheck(function=functions) if grader is not None and rewarded else None
    prompt_tokens, graded, total = 0, 0, 0.0
    reasons, first_failed = Counter[str](), None
    for rows in stored.blocks():
        texts = stored.texts("finish_reason", rows)
        reasons.update(texts)
        if first_failed is None and "failed" in texts:
            first_failed = int(rows[texts.index("failed")])
        if (prompts := stored.scalars("num_prompt_tokens", rows)) is not None:
            prompt_tokens += int(prompts.sum(dtype=np.int64))
        lengths.add(num_completion_tokens(stored.store, rows))
        if (policies := stored.scalars("policy_version", rows)) is not None:
            versions.add(policies)
        rewards = stored.scalars("task_reward", rows) if rewarded else None
        again = np.full(len(rows), np.nan)
        if rewards is not None:
            known = rewards[np.isfinite(rewards)].astype(np.float64)
            graded, total = graded + len(known), total + float(known.sum())
            if check is not None and grader is not None:
                again = _grade(check, stored, grader, rows, rewards.astype(np.float64))
        if (numbers := stored.scalars("group_id", rows)) is not None:
            counts = np.isfinite(again)
            groups.add(numbers, np.where(counts, again, 0.0), counts)
    completions, (times,) = lengths.found()
    num = int(times.sum())
    known_versions, _ = versions.found()
    group_ids, of_groups = groups.found()
    first_reward, last_reward = run.first_and_last_reward() if run is not None else (None, None)
    if check is not None and run is not None:
        _check_curve(check, run, group_ids, of_groups)
    return Inspection(
        path=str(run.address if run is not None else stored.path),
        definition=run.config.definition if run is not None else None,
        num_steps=len(run.metrics) if run is not None else None,
        num_trajectories=num,
        num_groups=len(group_ids),
        group_sizes=dict(sorted(Counter(of_groups[0].astype(np.int64).tolist()).items())),
        num_prompt_tokens=prompt_tokens if "num_prompt_tokens" in stored.columns else None,
        num_completion_tokens=int((completions * times).sum()),
        completion_lengths=histogram(completions, times.astype(np.int64)),
        policy_versions=(int(known_versions[0]), int(known_versions[-1]), len(known_versions))
        if len(known_versions)
        else None,
        finish_reasons={name: reasons[name] for name, _ in reasons.most_common() if name},
        num_failed=reasons["failed"],
        first_failed_id=first_failed,
        mean_reward=total / graded if graded else None,
        first_reward=first_reward,
        last_reward=last_reward,
        size_bytes=disk_usage(stored.path),
        reward_check=check,
        not_checked=None if check is not None else why_no_reward or "the store has no column task_reward",
    )


def _grade(check: RewardCheck, stored: Stored, grader: Grader, ids: Ids, before: Floats) -> Floats:
    """Grade trajectories again, and record in the check how they differ from `before`, their stored rewards.

    Returns the function's results now, [n]; NaN where it failed now or, as `before` says with NaN, during the run.
    """
    found, errors = grade_again(grader, stored, ids)
    failed = np.isnan(before)
    different = np.flatnonzero(~failed & ~np.isclose(found, before, rtol=TOLERANCE, atol=TOLERANCE))
    check.num_trajectories += int((~failed).sum())
    check.num_different += len(different)
    check.num_failed_before += int((failed & np.isfinite(found)).sum())
    check.first_different += [
        Disagreement(
            id=int(ids[place]),
            stored=_or_none(float(before[place])),
            graded_again=_or_none(float(found[place])),
            error=errors.get(place),
        )
        for place in different[: _EXAMPLES - len(check.first_different)].tolist()
    ]
    return np.where(failed, np.nan, found)


def grade_again(grader: Grader, stored: Stored, ids: Ids) -> tuple[Floats, dict[int, str]]:
    """Grade stored trajectories as a run does; a call that fails gives NaN.

    Args:
        grader: calls the reward functions; batched ones see the stored members of a group.
        stored: the open store.
        ids: int64 [N], the trajectories.

    Returns:
        The rewards [N], and the errors by index.
    """
    prompts, completions = stored.texts("prompt", ids), stored.texts("completion", ids)
    reasons, contexts = stored.texts("finish_reason", ids), stored.contexts(ids)
    wanted = any(form.takes("token_ids", "completion_ids") for form in grader.forms)
    tokens = stored.rows("input_ids", ids) if wanted else None
    starts = stored.scalars("num_prompt_tokens", ids)
    known: dict[tuple[int, str], Prompt] = {}
    sampled = [
        Sampled(
            prompt=known.get((id(context), prompts[i]))
            or known.setdefault(
                (id(context), prompts[i]),
                Prompt(text=prompts[i], answer=context.answer, meta=context.prompt_meta),
            ),
            token_ids=[] if tokens is None or starts is None else tokens[i][int(starts[i]) :].tolist(),
            finish_reason=reasons[i],
            **{"completion": completions[i], **context.conversation},
        )
        for i, context in enumerate(contexts)
    ]
    groups = stored.scalars("group_id", ids)
    grades = grader.grade(sampled, None if groups is None else groups.tolist(), beside=False)
    return (
        np.array([item.reward for item in grades]),
        {i: item.error for i, item in enumerate(grades) if item.error is not None},
    )


def _check_curve(check: RewardCheck, run: RunFolder, groups: Ids, of_groups: Floats) -> None:
    """Compare each rollout's mean with its line of `metrics.jsonl`; a group's id is its prompt's number in the run.

    `of_groups`, [3, G], has per group the number of trajectories, the sum of their rewards now, and how many have one.
    """
    collect = run.config.pipeline.get("collect", {})
    prompts, group_size = collect.get("prompts_per_rollout"), collect.get("group_size")
    if not prompts or not group_size or not len(groups):
        return
    numbers, (counts, sums, graded) = _reduced(groups // prompts, of_groups)
    with np.errstate(invalid="ignore"):
        means = sums / graded
    for row in run.metrics:
        rollout, recorded = row.get("rollout"), row.get("task_reward")
        if rollout is None or recorded is None:
            continue
        place = min(int(np.searchsorted(numbers, rollout)), len(numbers) - 1)
        if numbers[place] != rollout or counts[place] < prompts * group_size:
            check.num_rollouts_partial += 1
            continue
        check.num_rollouts += 1
        mean = float(means[place])
        if not abs(mean - recorded) <= TOLERANCE * max(1.0, abs(recorded)):
            check.num_rollouts_different += 1
            if len(check.first_rollouts_different) < _EXAMPLES:
                check.first_rollouts_different.append(
                    RolloutDisagreement(
                        step=row["step"], rollout=rollout, recorded=recorded, graded_again=_or_none(mean)
                    )
                )


class Tally:
    """Counts of distinct numbers and sums of the values given with each, in memory proportional to the distinct ones.

    Args:
        sums: how many values are given with each number.

    >>> tally = Tally(sums=1)
    >>> tally.add(np.array([7, 3, 7]), np.array([0.5, 1.0, 2.0]))
    >>> [part.tolist() for part in tally.found()]
    [[3, 7], [[1.0, 2.0], [1.0, 2.5]]]
    """

    def __init__(self, *, sums: int = 0) -> None:
        self._parts = [(np.empty(0, np.int64), np.empty((1 + sums, 0)))]

    def add(self, numbers: npt.NDArray[Any], *values: npt.NDArray[Any]) -> None:
        """Count numbers, [n], and sum the values given with them, [n] each."""
        self._parts.append(_reduced(numbers, np.array([np.ones(len(numbers)), *values])))
        if sum(len(part) for part, _ in self._parts[1:]) > max(len(self._parts[0][0]) // 2, _MOST_APART):
            self.found()

    def found(self) -> tuple[Ids, Floats]:
        """Return the numbers, ascending, [k], and the count and the sums of each, [1 + sums, k]."""
        if len(self._parts) > 1:
            numbers, values = zip(*self._parts, strict=True)
            self._parts = [_reduced(np.concatenate(numbers), np.concatenate(values, axis=1))]
        return self._parts[0]


def _reduced(numbers: npt.NDArray[Any], values: Floats) -> tuple[Ids, Floats]:
    """Return the distinct numbers, ascending, with the sums of their values, [s, n].

    `np.unique` would do the first half, but imports numpy.ma, which takes 10 ms.
    """
    if (numbers[1:] > numbers[:-1]).all():  # the order of arrival in most runs
        return numbers.astype(np.int64), values
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    first = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    return numbers[first].astype(np.int64), np.array([np.add.reduceat(row[order], first) for row in values])


def histogram(lengths: Ids, counts: Ids) -> tuple[tuple[int, int, int], ...]:
    """Return at most eight buckets of equal width as `(smallest, largest, how many)`.

    Args:
        lengths: the distinct lengths, ascending, [k].
        counts: how often each occurs, [k].

    >>> histogram(np.array([1, 2, 4]), np.array([2, 1, 1]))
    ((1, 1, 2), (2, 2, 1), (3, 3, 0), (4, 4, 1))
    """
    if not len(lengths):
        return ()
    low, high = int(lengths[0]), int(lengths[-1])
    width = -(-(high - low + 1) // _BARS)
    sums = np.bincount((lengths - low) // width, counts).astype(np.int64)
    starts = range(low, high + 1, width)
    return tuple(
        (start, min(start + width - 1, high), int(num)) for start, num in zip(starts, sums.tolist(), strict=True)
    )


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
