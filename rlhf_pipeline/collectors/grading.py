"""Calling reward functions: side by side, with a deadline; a failure affects its own trajectories only.

The calls of one rollout begin while other completions are still being sampled, in the process's runtime for user code.
A result belongs to its place, so grades do not depend on which call ends first.

A function that sets signal handlers (a time limit by `SIGALRM`) works in the main thread only. Once a call has failed
for that reason, it and all later calls of that function are made there, one after the other, while the others continue.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlhf_pipeline.data.rewards import (
    LARGEST,
    LeftOut,
    Reward,
    describe_error,
    environment_reward,
    part_name,
    weighted_sum,
)
from rlhf_pipeline.environments.environment import Failure
from rlhf_pipeline.environments.outcomes import BROKEN, GRADER_ERROR, NOT_APPLICABLE, TIMEOUT
from rlhf_pipeline.errors import RewardError, StopAskedError, count
from rlhf_pipeline.user_code.arguments import BoundRewards, Form, Sampled
from rlhf_pipeline.user_code.outputs import Result, result_of, results_of
from rlhf_pipeline.user_code.runtime import Call, Limit, process_runtime

_LOOK_S: Final = 0.05
"""The interval at which the waiting thread checks for a deadline or a stop request; a call that ends wakes it."""
_GRACE_S: Final = 2.0
"""The time for which calls may continue after a request to stop before the rollout is cancelled."""
_SAY_AFTER_S: Final = 10.0
"""The wait after which a running call is reported."""
_MAIN_ONLY: Final = "signal only works in main thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The reward of one completion."""

    reward: float
    """The weighted sum of the rewards; NaN if a call failed or excluded the trajectory."""
    error: str | None = None
    """One line about the failure, or None."""
    kind: str = ""
    """The reason why there is no reward: `timeout`, `grader_error`, `not_applicable` (every function returned None), or
    the reason in `LeftOut`, such as `truncated`; empty if there is a reward."""
    values: tuple[float, ...] = ()
    """The result of each reward function; NaN if it did not apply or failed."""
    by: str = ""
    """The name of the function that failed, or excluded the trajectory."""
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """The components that each function returned, by the function's name."""

    retried: tuple[str, ...] = ()
    """The failures of calls that were retried."""

    @property
    def broken(self) -> bool:
        """Whether a call failed, rather than excluding the trajectory deliberately."""
        return self.kind in BROKEN


@dataclass(eq=False, slots=True)
class _Graded:
    """The completions of one call of a reward function: one completion, or the members of one group."""

    form: Form
    number: int
    places: tuple[int, ...]
    group: tuple[Sampled, ...]
    call: Call | None = None
    """The newest attempt; None before the first."""
    is_named: bool = False
    outcome: list[Result] | BaseException | None = None
    retried: tuple[str, ...] = ()
    """The failures of earlier attempts."""


class Grader:
    """Calls the reward functions of a definition, bound to its data.

    >>> from rlhf_pipeline.data.prompts import Prompt
    >>> from rlhf_pipeline.user_code.arguments import bind
    >>> from rlhf_pipeline.data.rewards import exact_match
    >>> grader = Grader(bind([exact_match, lambda completions, **columns: [len(text) for text in completions]]))
    >>> grades = grader.grade([Sampled(prompt=Prompt(text="2+2=", answer="4"), completion="4")])
    >>> grades[0].reward, grades[0].values
    (2.0, (1.0, 1.0))
    """

    def __init__(
        self,
        bound: BoundRewards,
        *,
        concurrency: int = 16,
        timeout_s: float | None = None,
        leaves_out: bool = True,
        retries: int = 0,
    ) -> None:
        self.retries = retries
        self.leaves_out = leaves_out
        """Whether a function may exclude a completion; in an evaluation, the function is treated as not applicable."""
        self.bound = bound
        self.rewards, self.forms = bound.rewards, bound.forms
        self.timeout_s = timeout_s
        self.late = "" if timeout_s is None else f"no result after {timeout_s:g} s (collect.reward_timeout_s)"
        self.limits = [Limit(concurrency) for _ in self.forms]
        self.in_main: set[int] = set()
        """The numbers of the functions that work in the main thread only."""

    def begin(self, group_size: int) -> Grading:
        """Begin a rollout."""
        return Grading(self, group_size)

    def grade(
        self, sampled: Sequence[Sampled], groups: Sequence[int] | None = None, *, beside: bool = True
    ) -> list[Grade]:
        """Grade completions that exist already.

        Args:
            sampled: the completions, [n].
            groups: the group of each; batched functions see a group at a time. None means one group.
            beside: False calls plain functions one after the other in this thread, which is quicker for quick ones,
                and without a deadline.
        """
        members: dict[int, list[int]] = {}
        for place in range(len(sampled)):
            members.setdefault(0 if groups is None else int(groups[place]), []).append(place)
        if not beside and not any(form.batched or form.is_async for form in self.forms):
            grades = ([_first(_run_in_this_thread(form, (sample,))) for form in self.forms] for sample in sampled)
            return [_combined(self, each) for each in grades]
        with Grading(self, None) as grading:
            for place, sample in enumerate(sampled):
                grading.add(place, sample, ended=True)
            grading.complete(list(members.values()))
            return grading.results()


def _checked(graded: _Graded, returned: Any) -> list[Result] | BaseException:
    try:
        return _read(graded.form, graded.group, returned)
    except Exception as error:  # noqa: BLE001 - what a call returned may be anything; it fails its own trajectories
        return error


def _read(form: Form, group: Sequence[Sampled], returned: Any) -> list[Result]:
    return results_of(returned, len(group)) if form.batched else [result_of(returned)]


def _run_in_this_thread(form: Form, group: Sequence[Sampled]) -> list[Result] | BaseException:
    """Make a call in this thread, in which Ctrl-C may end it."""
    try:
        returned = form.call(group)
        if inspect.isawaitable(returned):
            runtime, call = process_runtime(), Call(form.reward.label, lambda: returned, is_async=True)
            runtime.begin([call])
            returned = runtime.wait(call)
            if isinstance(returned, BaseException):
                return returned
        return _read(form, group, returned)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
        return error


class Grading:
    """The grades of one rollout, or of completions that exist already; made by a `Grader`."""

    def __init__(self, grader: Grader, group_size: int | None) -> None:
        self._grader = grader
        self._group_size = group_size
        self._sampled: dict[int, Sampled] = {}
        self._failed: dict[int, Failure] = {}
        self._calls: dict[tuple[int, tuple[int, ...]], _Graded] = {}
        self._open = 0
        self._is_over = False
        self._for_main: list[_Graded] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *exc: object) -> None:
        """Cancel the calls that have not ended."""
        self._is_over = True
        if self._open:
            process_runtime().cancel_unawaited([entry.call for entry in self._calls.values() if entry.call is not None])

    def add(self, place: int, sample: Sampled, *, ended: bool = False) -> None:
        """Add a completion; its calls start immediately if possible."""
        if place in self._sampled and not ended:
            return
        self._sampled[place] = sample
        for number, form in enumerate(self._grader.forms):
            if form.takes("finish_reason") and not ended:
                continue
            if not form.batched:
                self._call(number, (place,))
            elif self._group_size is not None:
                self._call_group(number, place, self._group_size)

    def fail(self, place: int, failure: Failure) -> None:
        """Add a trajectory that failed before it could be graded; it is passed to no reward function."""
        self._failed[place] = failure
        for number, form in enumerate(self._grader.forms):
            if form.batched and self._group_size is not None:
                self._call_group(number, place, self._group_size)

    def _call_group(self, number: int, place: int, size: int) -> None:
        """Begin a batched call on the members of a group that have not failed, once all have ended."""
        group = range(place - place % size, place - place % size + size)
        members = tuple(member for member in group if member in self._sampled)
        if members and len(members) + sum(member in self._failed for member in group) == size:
            self._call(number, members)

    def complete(self, groups: Sequence[Sequence[int]]) -> None:
        """Begin the calls of batched functions on these groups, given by the positions of their members."""
        for number, form in enumerate(self._grader.forms):
            for members in groups if form.batched else ():
                self._call(number, tuple(members))

    def _call(self, number: int, places: tuple[int, ...]) -> None:
        if (number, places) in self._calls:
            return
        graded = _Graded(self._grader.forms[number], number, places, tuple(self._sampled[place] for place in places))
        self._calls[number, places] = graded
        with self._changed:
            self._open += 1
        self._submit(graded)

    def _submit(self, graded: _Graded) -> None:
        grader, form, group = self._grader, graded.form, graded.group
        if graded.number in grader.in_main:
            self._pass_back(graded)
            return
        graded.call = Call(
            f"the reward function {form.reward.label}",
            lambda: form.call(group),
            timeout_s=grader.timeout_s,
            late=grader.late,
            on_end=lambda call: self._take(graded, call.outcome),
            is_async=form.is_async,
        )
        process_runtime().begin([graded.call], limit=grader.limits[graded.number])

    def _take(self, graded: _Graded, outcome: Any) -> None:
        """Take the outcome of a call; one that failed is made again at once, as often as that is allowed."""
        if isinstance(outcome, ValueError) and str(outcome).startswith(_MAIN_ONLY):
            self._grader.in_main.add(graded.number)
            self._pass_back(graded)
            return
        if not isinstance(outcome, BaseException):
            outcome = _checked(graded, outcome)
        if self._is_to_retry(graded, outcome):
            self._submit(graded)
            return
        with self._changed:
            graded.outcome = outcome
            self._open -= 1
            if not self._open:
                self._changed.notify_all()

    def _is_to_retry(self, graded: _Graded, outcome: list[Result] | BaseException) -> bool:
        """Return whether a call is to be made again, and note why."""
        if not isinstance(outcome, BaseException) or isinstance(outcome, (LeftOut, KeyboardInterrupt, SystemExit)):
            return False
        if self._is_over or len(graded.retried) >= self._grader.retries:
            return False
        graded.retried = (*graded.retried, describe_error(outcome))
        graded.is_named = False
        return True

    def _pass_back(self, graded: _Graded) -> None:
        """Leave a call to the thread that waits for the grades."""
        with self._changed:
            graded.call = None
            self._for_main.append(graded)
            self._changed.notify_all()

    def results(
        self, stop: Callable[[], bool] | None = None, on_notice: Callable[[str], None] | None = None
    ) -> list[Grade]:
        """Wait for all calls and return the grades, by place."""
        stop_at = math.inf
        while self._open:
            with self._changed:
                if self._open and not self._for_main:
                    self._changed.wait(_LOOK_S)
                mine, self._for_main = self._for_main, []
            for graded in mine:
                outcome = _run_in_this_thread(graded.form, graded.group)
                while self._is_to_retry(graded, outcome):
                    outcome = _run_in_this_thread(graded.form, graded.group)
                with self._changed:
                    graded.outcome = outcome
                    self._open -= 1
            if on_notice is not None:
                self._report_slow_calls(on_notice)
            if stop is not None and stop() and self._open:
                stop_at = min(stop_at, time.monotonic() + _GRACE_S)
                if time.monotonic() >= stop_at:
                    raise StopAskedError(f"a stop was requested while calls were running: {self._waited_for()}")
        by_place: dict[int, dict[int, _Graded]] = {}
        for call in self._calls.values():
            for place in call.places:
                by_place.setdefault(place, {})[call.number] = call
        places = range(len(self._sampled) + len(self._failed))
        return [
            self._failure(self._failed[place]) if place in self._failed else self._grade(place, by_place[place])
            for place in places
        ]

    def _failure(self, failure: Failure) -> Grade:
        values = (math.nan,) * len(self._grader.rewards)
        return Grade(reward=math.nan, error=failure.error, kind=failure.kind, values=values)

    def _report_slow_calls(self, on_notice: Callable[[str], None]) -> None:
        """Name calls that take long."""
        now = time.monotonic()
        for graded in self._calls.values():
            if graded.outcome is None and not graded.is_named and now - _start_of(graded, now) > _SAY_AFTER_S:
                graded.is_named = True
                on_notice(f"still waiting for {_described(graded)} after {now - _start_of(graded, now):.0f} s ...")

    def _waited_for(self) -> str:
        running = [graded for graded in self._calls.values() if graded.outcome is None]
        first = min(running, key=lambda graded: _start_of(graded, math.inf))
        others = len(running) - 1
        return _described(first) + (f", and {count(others, 'other call')}" if others else "")

    def _grade(self, place: int, calls: Mapping[int, _Graded]) -> Grade:
        """Put the results for one completion together."""
        outcomes = [
            call.outcome[call.places.index(place)] if isinstance(call.outcome, list) else call.outcome
            for _, call in sorted(calls.items())
        ]
        retried = tuple(error for _, call in sorted(calls.items()) for error in call.retried)
        return replace(_combined(self._grader, outcomes), retried=retried)


def _first(outcome: list[Result] | BaseException) -> Result | BaseException:
    return outcome[0] if isinstance(outcome, list) else outcome


def _combined(grader: Grader, outcomes: Sequence[Result | BaseException | None]) -> Grade:
    """Return the grade of one completion from what each reward function gave."""
    values, parts = list[float](), dict[str, Mapping[str, float]]()
    error, kind, by, applies = None, "", "", False
    for reward, outcome in zip(grader.rewards, outcomes, strict=True):
        if isinstance(outcome, LeftOut) and not grader.leaves_out:
            values.append(math.nan)
            applies = True
            continue
        if not isinstance(outcome, Result):
            assert outcome is not None
            values.append(math.nan)
            if not kind:
                error, kind, by = describe_error(outcome), _kind_of(outcome), reward.label
            continue
        values.append(math.nan if outcome.value is None else outcome.value)
        if outcome.parts:
            parts[reward.label] = outcome.parts
    total = weighted_sum(grader.rewards, [None if math.isnan(value) else value for value in values])
    if not kind and total is None and not applies:
        error, kind = "no reward: every function returned None", NOT_APPLICABLE
    total = total or 0.0
    if not kind and not abs(total) <= LARGEST:
        error, kind = f"the reward is {total}; it must be a finite float32", GRADER_ERROR
    combined = math.nan if kind else total
    return Grade(reward=combined, error=error, kind=kind, values=tuple(values), by=by, parts=parts)


def part_values(
    rewards: Sequence[Reward], grades: Sequence[Grade], of_environment: Iterable[str] = ()
) -> dict[str, list[float]]:
    """Return the components of the results of reward functions by their stored names, [n] each.

    NaN where a result has none; but a reward that an environment did not give to a graded conversation is 0, as in the
    sum of its rewards. They come in alphabetical order.

    Args:
        rewards: of the definition.
        grades: [n].
        of_environment: names of the environment's rewards that earlier conversations were given.
    """
    by_label = {reward.label: reward for reward in rewards}
    each = [
        {
            name: value
            for label, parts in grade.parts.items()
            for part, value in parts.items()
            if (name := part_name(rewards, by_label[label], part)) is not None
        }
        for grade in grades
    ]
    part_names = set(of_environment)
    for label in {label for grade in grades for label in grade.parts if by_label[label].function is environment_reward}:
        returned_parts = {part for grade in grades for part in grade.parts.get(label, ())}
        part_names |= {
            name for part in returned_parts if (name := part_name(rewards, by_label[label], part)) is not None
        }
    names = sorted(part_names.union(*each))
    absent = [dict.fromkeys(part_names, 0.0) if math.isfinite(grade.reward) else {} for grade in grades]
    return {
        name: [parts.get(name, defaults.get(name, math.nan)) for parts, defaults in zip(each, absent, strict=True)]
        for name in names
    }


def _kind_of(error: BaseException) -> str:
    if isinstance(error, LeftOut):
        return error.reason
    return TIMEOUT if isinstance(error, TimeoutError) else GRADER_ERROR


def _start_of(graded: _Graded, otherwise: float) -> float:
    call = graded.call
    return otherwise if call is None or call.started is None else call.started


def _described(call: _Graded) -> str:
    many = f" and {len(call.places) - 1} more" if len(call.places) > 1 else ""
    prompt = call.group[0].prompt.text
    short = prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
    return f"the reward function {call.form.reward.label} on completion {min(call.places)}{many} (prompt {short!r})"


def check_all_failed(grades: Sequence[Grade], rewards: Sequence[Reward]) -> None:
    """Reject a rollout in which every call failed."""
    broken = [item for item in grades if item.broken or item.kind == NOT_APPLICABLE]
    if not broken or len(broken) < len(grades):
        return
    if not broken[0].by and broken[0].broken:
        raise RewardError(
            f"the environment failed in all {len(broken)} conversations; the first error is {broken[0].error}. This "
            "rollout was not stored; it will be sampled again, token for token. Fix the environment, then repeat "
            "the command with --resume."
        )
    reward = next((reward for reward in rewards if reward.label == broken[0].by), rewards[0])
    name = getattr(reward.function, "__qualname__", reward.label)
    raise RewardError(
        f"all {len(broken)} calls to the reward function {name} failed; the first error is {broken[0].error}. This "
        "rollout was not stored; it will be sampled again, token for token. Fix the function, then repeat the "
        "command with --resume."
    )
