"""What the arguments of a group transform must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.advantage import BATCH_ESTIMATORS

if TYPE_CHECKING:
    from rlhf_pipeline.transforms.mc_advantage import MCAdvantage


def check_arguments(transform: MCAdvantage, *, both: bool) -> None:
    """Refuse what is out of range or contradicts itself.

    Args:
        transform: with its attributes set.
        both: whether the two arguments of the close policy were given together, or neither.

    Raises:
        DefinitionError: with the value seen and the rule.
    """
    size, most, least = transform.grpo_size, transform.candidate_group_size, transform.candidate_selection_min_size
    bounds = transform.keep_return_bounds
    rules = [
        (size >= 1, f"grpo_size is {size}; it must be at least 1."),
        (
            transform.trajectory_return in (None, "sum", "mean", "max"),
            f"trajectory_return is {transform.trajectory_return!r}; it must be 'sum', 'mean', 'max' or None.",
        ),
        (
            transform.zero_variance in ("keep", "drop", "mark"),
            f"zero_variance is {transform.zero_variance!r}; it must be 'keep', 'drop' or 'mark'.",
        ),
        (most >= size, f"candidate_group_size is {most}; it must be at least grpo_size ({size})."),
        (
            size <= least <= most,
            f"candidate_selection_min_size is {least}; it must lie between {size} and {most}.",
        ),
        (
            transform.trajectory_return is not None or (bounds is None and most == size),
            "keep_return_bounds and candidate_group_size choose by return: set trajectory_return.",
        ),
        (
            bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1]),
            f"keep_return_bounds is {bounds}; it must be an increasing pair.",
        ),
        (
            (transform.batch_groups is not None) == (transform.estimator in BATCH_ESTIMATORS),
            f"estimator is {transform.estimator!r} and batch_groups {transform.batch_groups}: "
            f"{' and '.join(BATCH_ESTIMATORS)} divide by the spread of a batch, so they need batch_groups, how many "
            "groups a batch has, for example those of a rollout; the others take none.",
        ),
        (
            transform.batch_groups is None or most == size,
            "candidate_group_size lets a group go on waiting when it could be written, and the groups of a batch are "
            "written together. Leave it out with batch_groups.",
        ),
        (
            transform.batch_groups is None or transform.batch_groups >= 1,
            f"batch_groups is {transform.batch_groups}; it must be at least 1.",
        ),
        (both, "min_group_size and group_timeout_s go together: how many are enough, and after how long."),
        (
            1 <= transform.min_group_size <= size,
            f"min_group_size is {transform.min_group_size}; it must lie between 1 and grpo_size ({size}).",
        ),
        (
            transform.group_timeout_s is None or transform.group_timeout_s >= 0,
            f"group_timeout_s is {transform.group_timeout_s}; it must not be negative.",
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise DefinitionError(message)
