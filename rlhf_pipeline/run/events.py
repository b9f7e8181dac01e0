"""The events that a run reports to its caller, so that the library never writes to a terminal."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """The run folder exists and everything is built; the first rollout comes next."""

    run_dir: Path | str
    num_parameters: int
    first_step: int
    """0 for a new run; the checkpoint's step for a resumed one."""
    total_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One optimizer step is done; `metrics` has all its figures, None where one has no value."""

    step: int
    total_steps: int
    metrics: Mapping[str, float | int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationDone:
    """The weights of one step were evaluated."""

    step: int
    best: bool
    """Whether the figure that selects the best checkpoint is the highest so far."""
    name: str = ""
    """The name of the set of prompts; empty if a definition has only one set."""
    figures: Mapping[str, float | int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutDone:
    """A collector process has stored one rollout."""

    collector: str
    rollout: int
    policy_version: int
    num_trajectories: int
    task_reward: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectorFinished:
    """A collector process ends; everything that it acknowledged is in the store."""

    run_dir: Path | str
    collector: str
    reason: Literal["finished", "interrupted"]
    """`finished`: the learner reported that the run has ended."""
    num_rollouts: int
    num_trajectories: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A message for the user, in one sentence (a failed reward call, a stale batch, a saved checkpoint)."""

    message: str
    level: Literal["info", "warning", "progress"] = "info"
    """`progress`: one of many messages that report progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The run stopped, and everything is saved."""

    run_dir: Path | str
    reason: Literal["target", "steps", "interrupted"]
    steps: int
    seconds: float
    first_reward: float | None
    last_reward: float | None
    num_trajectories: int


Event = RunStarted | StepDone | EvaluationDone | RolloutDone | CollectorFinished | Notice | RunFinished
EventHandler = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The default handler, which ignores every event."""


class RepeatedNotices:
    """Rate-limits a notice that repeats at every step: it is printed at its 1st, 10th, 100th and 1,000th occurrence.

    >>> repeated = RepeatedNotices()
    >>> texts = [repeated.text_of(f"step {step} has nothing to learn from.") for step in range(1, 11)]
    >>> [text for text in texts if text is not None]
    ['step 1 has nothing to learn from.', 'step 10 has nothing to learn from. (10 times so far)']
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def text_of(self, notice: str) -> str | None:
        """Return the text to print for a notice, or None; notices that differ in numbers only are one."""
        kind = _NUMBERS.sub("#", notice)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            return notice
        return f"{notice} ({count:,} times so far)" if str(count).strip("0") == "1" else None


_NUMBERS: Final = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")


def notify(on_event: EventHandler, message: str, *, level: Literal["info", "warning", "progress"] = "warning") -> None:
    """Report a message to the observer and the log."""
    logger.log(logging.WARNING if level == "warning" else logging.INFO, message)
    on_event(Notice(message=message, level=level))
