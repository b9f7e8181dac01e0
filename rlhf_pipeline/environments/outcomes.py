"""Every way in which a trajectory can end, and where it is included: the table printed in docs/rewards.md.

Two rules apply. The policy is trained on its own mistakes: it sees the error of a malformed call, and a walk that
reaches no goal has a reward of 0. It is never trained on infrastructure failures: after a timeout, or when a tool or an
environment raises, the reward that the policy would have earned is unknown. An evaluation never excludes a failure
caused by the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STOP: Final = "stop"
"""The environment ended the conversation after a complete turn, or the policy ended its completion."""
LENGTH: Final = "length"
"""A token limit truncated the last turn, or the row cannot fit another turn."""
TURNS: Final = "turns"
"""The maximum number of turns was reached."""
CALLS: Final = "calls"
"""The maximum number of failed calls was reached."""
FAILED: Final = "failed"
"""The infrastructure failed."""

TIMEOUT: Final = "timeout"
TOOL_ERROR: Final = "tool_error"
GRADER_ERROR: Final = "grader_error"
ENGINE: Final = "engine"
NOT_APPLICABLE: Final = "not_applicable"

BROKEN: Final = frozenset({TIMEOUT, TOOL_ERROR, GRADER_ERROR, ENGINE})
"""Kinds of infrastructure failure; the other kinds exclude a trajectory deliberately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One way to end, or to continue after an error."""

    name: str
    what: str
    then: str
    """What happens to the conversation."""
    reward: str = "as returned"
    learned: bool = True
    """Whether it is included in the baseline of its group and in the loss."""
    evaluated: bool = True
    """Whether an evaluation includes it; `evaluation/failed` counts the others."""
    finish_reason: str = ""
    failure: str = ""
    """Stored as `failure_reason`; empty if its reward is trusted."""


_ERROR_REPLY: Final = f"continues with an error message; ends at `collect.max_call_errors` errors (`{CALLS}`)"

OUTCOMES: Final = (
    Outcome(name="won", what="the environment returns done, with rewards", then="ends", finish_reason=STOP),
    Outcome(
        name="lost", what="the environment returns done, without a reward", then="ends", reward="0", finish_reason=STOP
    ),
    Outcome(
        name="turns used up", what="the conversation reaches `collect.max_turns`", then="ends", finish_reason=TURNS
    ),
    Outcome(
        name="turn truncated",
        what="`collect.max_new_tokens` truncates a turn",
        then="the environment receives the turn; the conversation ends if the environment returns done",
        finish_reason=LENGTH,
    ),
    Outcome(
        name="row full",
        what="`collect.max_row_tokens`, or the model's maximum context, is reached",
        then="ends",
        finish_reason=LENGTH,
    ),
    Outcome(
        name="reply too long",
        what="the reply does not fit in the row, or `collect.max_reply_tokens` truncates it and appends a marker",
        then="ends, or continues with the truncated reply",
        finish_reason=LENGTH,
    ),
    Outcome(name="malformed call", what="the call cannot be parsed", then=_ERROR_REPLY, finish_reason=CALLS),
    Outcome(name="unknown call", what="the tool does not exist", then=_ERROR_REPLY, finish_reason=CALLS),
    Outcome(
        name="bad arguments", what="the tool does not accept the arguments", then=_ERROR_REPLY, finish_reason=CALLS
    ),
    Outcome(
        name="tool rejected",
        what="a tool raises an exception that the arguments caused (`ValueError`, `KeyError`, ...)",
        then="continues with the error message",
    ),
    Outcome(
        name="tool raised",
        what="a tool raises any other exception, `step` or `end` raises an exception, or a reply has the wrong type",
        then="ends, or restarts (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TOOL_ERROR,
    ),
    Outcome(
        name="tool timed out",
        what="no reply within `collect.step_timeout_s`",
        then="ends, or restarts (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TIMEOUT,
    ),
    Outcome(
        name="reset failed",
        what="`reset` raises an exception, or returns neither text nor messages",
        then="does not start, or restarts (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TOOL_ERROR,
    ),
    Outcome(
        name="reward raised",
        what="a reward function raises an exception, or returns a value that is not a finite number",
        then="has ended",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=GRADER_ERROR,
    ),
    Outcome(
        name="grader timed out",
        what="no reward within `collect.reward_timeout_s`",
        then="has ended",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TIMEOUT,
    ),
    Outcome(
        name="reward None",
        what="every reward function returns None",
        then="has ended",
        reward="none",
        learned=False,
        evaluated=False,
        failure=NOT_APPLICABLE,
    ),
    Outcome(
        name="excluded",
        what="a reward function raises `LeftOut`, as `mask_truncated` does",
        then="has ended",
        reward="none; in an evaluation, the rewards of the other functions",
        learned=False,
        failure="the reason passed to `LeftOut`",
    ),
    Outcome(
        name="engine aborted",
        what="another client, or a restart of the server, aborts the request",
        then=(
            "restarts (`collect.retries`); when no retries are left, the run ends, "
            "and `--resume` samples the rollout again"
        ),
        reward="from the next attempt",
    ),
)
"""The table."""


def failure_kind(error: BaseException) -> str:
    """Return the kind of a failure of an environment.

    >>> failure_kind(TimeoutError()), failure_kind(OSError("down"))
    ('timeout', 'tool_error')
    """
    return TIMEOUT if isinstance(error, TimeoutError) else TOOL_ERROR


def table() -> str:
    """Return the table in Markdown."""
    head = (
        "outcome",
        "what happens",
        "the conversation",
        "reward",
        "learned from",
        "evaluated",
        "finish reason",
        "failure",
    )
    rows = [
        (
            outcome.name,
            outcome.what,
            outcome.then,
            outcome.reward,
            "yes" if outcome.learned else "no",
            "yes" if outcome.evaluated else "no",
            f"`{outcome.finish_reason}`" if outcome.finish_reason else "",
            f"`{outcome.failure}`" if outcome.failure and " " not in outcome.failure else outcome.failure,
        )
        for outcome in OUTCOMES
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
