"""Every way in which a trajectory can end, and what it counts for: the one table, printed in docs/rewards.md.

Two rules are behind it. What a policy does is learned from: a malformed call is told to it, a walk that reaches
nothing has a reward of 0. What the world does is not: after a timeout, or when a tool or an environment raises, nobody
can say what the policy would have earned. An evaluation leaves out nothing that a policy lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STOP: Final = "stop"
"""The environment ended the conversation after a whole turn; without one, the policy ended its completion."""
LENGTH: Final = "length"
"""A limit of tokens cut the last turn, or left no room for another one."""
TURNS: Final = "turns"
"""The limit of turns was reached."""
CALLS: Final = "calls"
"""The limit of calls that could not be made was reached."""
FAILED: Final = "failed"
"""The world failed."""

TIMEOUT: Final = "timeout"
TOOL_ERROR: Final = "tool_error"
GRADER_ERROR: Final = "grader_error"
ENGINE: Final = "engine"
NOT_APPLICABLE: Final = "not_applicable"

BROKEN: Final = frozenset({TIMEOUT, TOOL_ERROR, GRADER_ERROR, ENGINE})
"""Kinds of failure of the world; others leave a trajectory out on purpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One way to end, or to go on after something went wrong."""

    name: str
    what: str
    then: str
    """What becomes of the conversation."""
    reward: str = "as given"
    learned: bool = True
    """Whether it counts in the baseline of its group and in the loss."""
    evaluated: bool = True
    """Whether an evaluation counts it; what it does not is in `evaluation/failed`."""
    finish_reason: str = ""
    failure: str = ""
    """Stored as `failure_reason`; empty if its reward is trusted."""


_TOLD: Final = f"told; the last of `collect.max_call_errors` ends it (`{CALLS}`)"

OUTCOMES: Final = (
    Outcome(name="won", what="the environment says done, with rewards", then="ends", finish_reason=STOP),
    Outcome(name="lost", what="done, and no reward was given", then="ends", reward="0", finish_reason=STOP),
    Outcome(name="turns used up", what="`collect.max_turns` turns", then="ends", finish_reason=TURNS),
    Outcome(
        name="turn cut",
        what="`collect.max_new_tokens` ends a turn",
        then="the environment sees it; if it says done, ends",
        finish_reason=LENGTH,
    ),
    Outcome(
        name="row full",
        what="`collect.max_row_tokens`, or the model's context",
        then="ends",
        finish_reason=LENGTH,
    ),
    Outcome(
        name="reply too long",
        what="more tokens than the row has left; `collect.max_reply_tokens` cuts it, with a mark",
        then="ends; a cut one is told",
        finish_reason=LENGTH,
    ),
    Outcome(name="malformed call", what="nobody can read it", then=_TOLD, finish_reason=CALLS),
    Outcome(name="unknown call", what="there is no such tool", then=_TOLD, finish_reason=CALLS),
    Outcome(name="bad arguments", what="a tool does not take them", then=_TOLD, finish_reason=CALLS),
    Outcome(
        name="tool refused",
        what="a tool raises an error that arguments cause (`ValueError`, `KeyError`, ...)",
        then="told",
    ),
    Outcome(
        name="tool raised",
        what="any other error of a tool, of `step` or of `end`, or an answer that is none",
        then="ends, or begins again (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TOOL_ERROR,
    ),
    Outcome(
        name="tool timed out",
        what="no answer within `collect.step_timeout_s`",
        then="ends, or begins again (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TIMEOUT,
    ),
    Outcome(
        name="reset wrong",
        what="`reset` raises, or shows nothing that the policy can read",
        then="does not begin, or begins again (`collect.retries`)",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=TOOL_ERROR,
    ),
    Outcome(
        name="reward raised",
        what="a reward function raises, or returns no finite number",
        then="has ended",
        reward="none",
        learned=False,
        evaluated=False,
        finish_reason=FAILED,
        failure=GRADER_ERROR,
    ),
    Outcome(
        name="grader late",
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
        what="every reward function returned None: none applies",
        then="has ended",
        reward="none",
        learned=False,
        evaluated=False,
        failure=NOT_APPLICABLE,
    ),
    Outcome(
        name="left out",
        what="a reward function raises `LeftOut`, as `mask_truncated` does",
        then="has ended",
        reward="none; in an evaluation, of the other functions",
        learned=False,
        failure="as it says",
    ),
    Outcome(
        name="engine aborted",
        what="another client, or a restart, ended it",
        then="begins again (`collect.retries`); otherwise the run ends, and `--resume` samples the rollout again",
        reward="of the next try",
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
    head = ("", "what happens", "the conversation", "reward", "learned from", "evaluated", "finish reason", "failure")
    rows = [
        (
            one.name,
            one.what,
            one.then,
            one.reward,
            "yes" if one.learned else "no",
            "yes" if one.evaluated else "no",
            f"`{one.finish_reason}`" if one.finish_reason else "",
            f"`{one.failure}`" if one.failure and " " not in one.failure else one.failure,
        )
        for one in OUTCOMES
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
