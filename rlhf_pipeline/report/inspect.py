"""A run's rewards graded again from the stored text.

The reward functions are bound as during the run and get the same arguments. If the numbers in the
store and in `metrics.jsonl` can be reproduced, the learning curve describes the stored trajectories.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.collectors.grading import Grader
from rlhf_pipeline.config_text import name_of
from rlhf_pipeline.data.episodes import stored_last_rows
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.report.query import Answer, View, finite
from rlhf_pipeline.report.stored import Context, Ids, Stored
from rlhf_pipeline.user_code.arguments import BoundRewards, Sampled

TOLERANCE = 1e-5
"""Rewards are stored as float32; a difference above this is a disagreement."""

_EXAMPLES = 5

Floats = npt.NDArray[np.float64]


def grade(view: View, bind: Callable[[Iterable[str]], BoundRewards]) -> Answer | None:
    """Compare stored and recorded rewards with rewards graded again.

    Args:
        view: the run or store.
        bind: returns the rewards, bound to the columns of the stored rows among others.

    Raises:
        CorruptionError: some rows do not match their checksums, so that other rewards would be meaningless.
    """
    stored = view.stored
    evaluated = stored.scalars("evaluation")
    grader = Grader(
        bind(sorted({name for context in _contexts(stored) for name in context.prompt_meta})),
        leaves_out=evaluated is None or not evaluated.all(),
    )
    before = stored.scalars("task_reward")
    if before is None:
        return None
    before, again, examples = before.astype(np.float64), np.full(len(before), np.nan), list[Answer]()
    different, at = 0, 0
    for ids in stored.blocks():
        check_rows(stored.store, ids)
        part = slice(at, at := at + len(ids))
        grades, errors = grade_again(grader, stored, ids)
        again[part], old = np.where(stored_last_rows(stored.store, ids), grades, np.nan), before[part]
        wrong = np.flatnonzero(~np.isnan(old) & ~np.isclose(grades, old, rtol=TOLERANCE, atol=TOLERANCE))
        different += len(wrong)
        for place in wrong[: _EXAMPLES - len(examples)].tolist():
            rewards = {"stored": finite(old[place]), "now": finite(grades[place])}
            examples.append({"id": int(ids[place]), **rewards, "error": errors.get(place)})
    failed = np.isnan(before)
    curve = _curve(view, np.where(failed, np.nan, again))
    return {
        "agrees": not different and not curve["rollouts_different"],
        "function": ", ".join(name_of(reward.function) for reward in grader.rewards),
        "trajectories": int((~failed).sum()),
        "different": different,
        "failed_before": int((failed & np.isfinite(again)).sum()),
        "first_different": examples,
        **curve,
    }


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
    rows = stored.sampled(ids) if grader.bound.takes("token_ids", "completion_ids") else [([], [])] * len(ids)
    prompts_by_text: dict[tuple[int, str], Prompt] = {}
    sampled = [
        Sampled(
            prompt=prompts_by_text.get((id(context), prompts[i]))
            or prompts_by_text.setdefault(
                (id(context), prompts[i]),
                _prompt(prompts[i], context),
            ),
            ids=rows[i][0],
            mask=rows[i][1],
            finish_reason=reasons[i],
            **{"completion": completions[i], **context.graded},
        )
        for i, context in enumerate(contexts)
    ]
    groups = stored.scalars("group_id", ids)
    grades = grader.grade(sampled, None if groups is None else groups.tolist(), beside=False)
    return (
        np.array([item.reward for item in grades]),
        {i: item.error for i, item in enumerate(grades) if item.error is not None},
    )


def _contexts(stored: Stored) -> Iterator[Context]:
    for ids in stored.blocks():
        yield from stored.contexts(ids)


def _prompt(text: str, context: Context) -> Prompt:
    """Return a prompt as reward functions saw it."""
    fields = {"answer": context.answer, "meta": context.prompt_meta}
    if context.messages is not None:
        with contextlib.suppress(DataError):  # a row of another tool may hold messages that no run would sample from
            return Prompt(text=text, messages=tuple(context.messages), **fields)
    return Prompt(text=text, **fields)


def _curve(view: View, again: Floats) -> dict[str, Any]:
    """Compare each rollout's mean with its line of `metrics.jsonl`; a group's id is its prompt's number in the run.

    Args:
        view: the run or store.
        again: the rewards now, [N]; NaN where there was, or is, none.
    """
    figures = {
        "rollouts": 0,
        "rollouts_different": 0,
        "rollouts_partial": 0,
        "first_rollouts_different": list[Answer](),
    }
    collect = view.run.config.pipeline.get("collect", {}) if view.run is not None else {}
    groups, prompts, group_size = (
        view.stored.scalars("group_id"),
        *map(collect.get, ("prompts_per_rollout", "group_size")),
    )
    if groups is None or not prompts or not group_size or not len(groups):
        return figures
    numbers, place = np.unique(groups // prompts, return_inverse=True)
    counts = np.bincount(place, stored_last_rows(view.stored.store))
    graded = np.isfinite(again)
    with np.errstate(invalid="ignore"):
        means = np.bincount(place, np.where(graded, again, 0.0)) / np.bincount(place, graded)
    for row in view.metrics_rows():
        rollout, recorded = row.get("rollout"), row.get("task_reward")
        if rollout is None or recorded is None:
            continue
        at = min(int(np.searchsorted(numbers, rollout)), len(numbers) - 1)
        if numbers[at] != rollout or counts[at] < prompts * group_size:
            figures["rollouts_partial"] += 1
            continue
        figures["rollouts"] += 1
        if not abs(means[at] - recorded) <= TOLERANCE * max(1.0, abs(recorded)):
            figures["rollouts_different"] += 1
            if len(figures["first_rollouts_different"]) < _EXAMPLES:
                example = {"step": row["step"], "rollout": rollout, "recorded": recorded, "now": finite(means[at])}
                figures["first_rollouts_different"].append(example)
    return figures
