"""Whether another rollout may start: a pure function, so that collectors sample nothing that would be discarded."""

from __future__ import annotations


def may_start(
    *,
    version: int,
    next_version: int,
    num_waiting: int,
    oldest_in_flight: int | None,
    updates_per_rollout: int,
    max_staleness: int,
) -> bool:
    """Return True if a rollout that starts now cannot make any trajectory too old to learn from.

    The learner takes rollouts in the order of arrival. At worst the new one, or the one in flight with the oldest
    weights, arrives last, after `num_waiting` others. Its last update is then at version
    `next_version + (num_waiting + 1) * updates_per_rollout - 1`; its age is that minus the version of its weights.

    Args:
        version: the version of the newest published weights, with which the new rollout would be sampled.
        next_version: the version at which the learner begins with the next waiting rollout.
        num_waiting: the number of rollouts that are stored and not learned from yet, or in flight.
        oldest_in_flight: the oldest version of the weights of a rollout in flight; None if there is none.
        updates_per_rollout: optimizer steps on each rollout.
        max_staleness: the largest age, in optimizer steps, that the learner accepts.

    >>> strict = dict(version=4, next_version=4, oldest_in_flight=None, updates_per_rollout=1, max_staleness=0)
    >>> may_start(num_waiting=0, **strict), may_start(num_waiting=1, **strict)
    (True, False)
    """
    last_use = next_version + (num_waiting + 1) * updates_per_rollout - 1
    oldest = version if oldest_in_flight is None else min(version, oldest_in_flight)
    return last_use - oldest <= max_staleness
