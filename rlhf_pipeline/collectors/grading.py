"""Calling reward functions: side by side, with a deadline, each failure kept to its own trajectories.

The calls of one rollout begin while other completions are still being sampled. Plain and batched functions run in
threads, coroutine functions in one event loop, so no call stops the thread that samples, and signals reach that thread
while calls are waited for. What a call gives belongs to its place, so grades do not depend on which call ends first.

A function that sets signal handlers (a time limit by `SIGALRM`) works in the main thread only. Once a call says so, it
and all later calls of that function are made there, one after the other, while the others go on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
from rlhf_pipeline.errors import RewardError, StopAskedError
from rlhf_pipeline.user_code.arguments import BoundRewards, Form, Sampled
from rlhf_pipeline.user_code.outputs import Result, result_of, results_of

_LOOK_S: Final = 0.05
"""How often the waiting thread looks for a deadline or a request to stop; a call that ends wakes it at once."""
_GRACE_S: Final = 2.0
"""How long calls may go on after a request to stop before the rollout is given up."""
_SAY_AFTER_S: Final = 10.0
"""How long a call is waited for before it is named."""
_MAIN_ONLY: Final = "signal only works in main thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The reward of one completion."""

    reward: float
    """The weighted sum of the rewards; NaN if a call failed or left the trajectory out."""
    error: str | None = None
    """One line about the failure, or None."""
    kind: str = ""
    """Why there is no reward: `timeout`, `grader_error`, `not_applicable` (every function returned None), or what
    `LeftOut` said, such as `truncated`; empty where there is one."""
    values: tuple[float, ...] = ()
    """The result of each reward function; NaN where it did not apply or failed."""
    by: str = ""
    """The name of the function that failed, or left the trajectory out."""
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """The components that a function gave, by its name."""

    retried: tuple[str, ...] = ()
    """The failures of calls that were made again."""

    @property
    def broken(self) -> bool:
        """Whether a call failed, and did not leave the trajectory out on purpose."""
        return self.kind in BROKEN


@dataclass(eq=False, slots=True)
class _Call:
    """One call: a reward function on one completion, or on the members of one group."""

    form: Form
    number: int
    places: tuple[int, ...]
    group: tuple[Sampled, ...]
    started: float | None = None
    said: bool = False
    outcome: list[Result] | BaseException | None = None
    retried: tuple[str, ...] = ()
    """The failures of earlier tries."""


class Grader:
    """Calls the reward functions of a definition, as they are bound to its data.

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
        """Whether a function may leave a completion out; in an evaluation it only does not apply."""
        self.bound = bound
        self.rewards, self.forms = bound.rewards, bound.forms
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.in_main: set[int] = set()
        """The numbers of the functions that work in the main thread only."""
        self.changed = threading.Condition()
        self._waiting: queue.SimpleQueue[tuple[Grading, _Call]] = queue.SimpleQueue()
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None

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
            return [_combined(self, [_first(_run_here(form, (one,))) for form in self.forms]) for one in sampled]
        with Grading(self, None) as grading:
            for place, one in enumerate(sampled):
                grading.add(place, one, ended=True)
            grading.complete(list(members.values()))
            return grading.results()

    def submit(self, grading: Grading, call: _Call) -> None:
        """Let a call run as soon as there is room for it."""
        if call.form.is_async:
            self._submit_async(grading, call)
            return
        self._waiting.put((grading, call))
        if self._threads < self.concurrency:
            self.start_thread()

    def start_thread(self) -> None:
        """Start a thread that runs calls; a hanging call is left to its thread, which ends with the process."""
        self._threads += 1
        threading.Thread(target=self._work, name=f"reward-{self._threads}", daemon=True).start()

    def too_late(self) -> TimeoutError:
        """Return the error of a call that is past its deadline."""
        return TimeoutError(f"no result after {self.timeout_s:g} s (collect.reward_timeout_s)")

    def _work(self) -> None:
        while True:
            grading, call = self._waiting.get()
            if call.number in self.in_main:
                grading.pass_back(call)
                continue
            if grading.given_up:
                continue
            call.started = time.monotonic()
            if not grading.finish(call, _run(call.form, call.group)):
                return  # it was too late, and another thread has taken this one's place

    def _submit_async(self, grading: Grading, call: _Call) -> None:
        if self._loop is None:
            self._loop, self._slots = asyncio.new_event_loop(), asyncio.Semaphore(self.concurrency)
            threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._await(grading, call), self._loop)

    async def _await(self, grading: Grading, call: _Call) -> None:
        assert self._slots is not None
        async with self._slots:
            if grading.given_up:
                return
            call.started = time.monotonic()
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    outcome: list[Result] | BaseException = _read(
                        call.form, call.group, await call.form.call(call.group)
                    )
            except BaseException as error:  # noqa: BLE001 - a call may raise anything; it is recorded, not hidden
                outcome = self.too_late() if limit.expired() else error
            grading.finish(call, outcome)


def _read(form: Form, group: Sequence[Sampled], given: Any) -> list[Result]:
    return results_of(given, len(group)) if form.batched else [result_of(given)]


def _run(form: Form, group: Sequence[Sampled]) -> list[Result] | BaseException:
    """Return what a call gives, or whatever it raises."""
    try:
        given = form.call(group)
        if inspect.isawaitable(given):
            given = asyncio.run(_awaited(given))
        return _read(form, group, given)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
        return error


def _run_here(form: Form, group: Sequence[Sampled]) -> list[Result] | BaseException:
    """Make a call in this thread, in which Ctrl-C may end it."""
    outcome = _run(form, group)
    if isinstance(outcome, KeyboardInterrupt):
        raise outcome
    return outcome


async def _awaited(given: Awaitable[Any]) -> Any:
    return await given


class Grading:
    """The grades of one rollout, or of completions that exist already; made by a `Grader`."""

    def __init__(self, grader: Grader, group_size: int | None) -> None:
        self.given_up = False
        self._grader = grader
        self._group_size = group_size
        self._sampled: dict[int, Sampled] = {}
        self._failed: dict[int, Failure] = {}
        self._calls: dict[tuple[int, tuple[int, ...]], _Call] = {}
        self._open = 0
        self._for_main: list[_Call] = []

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *exc: object) -> None:
        """Give up the calls that have not begun."""
        self.given_up = True

    def add(self, place: int, one: Sampled, *, ended: bool = False) -> None:
        """Take a completion; its calls begin at once, as far as they can."""
        if place in self._sampled and not ended:
            return
        self._sampled[place] = one
        for number, form in enumerate(self._grader.forms):
            if form.takes("finish_reason") and not ended:
                continue
            if not form.batched:
                self._call(number, (place,))
            elif self._group_size is not None:
                self._call_group(number, place, self._group_size)

    def fail(self, place: int, failure: Failure) -> None:
        """Take a trajectory that failed before it had anything to grade; no reward function sees it."""
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
        """Begin the calls of batched functions on these groups, given by the places of their members."""
        for number, form in enumerate(self._grader.forms):
            for members in groups if form.batched else ():
                self._call(number, tuple(members))

    def _call(self, number: int, places: tuple[int, ...]) -> None:
        if (number, places) in self._calls:
            return
        call = _Call(self._grader.forms[number], number, places, tuple(self._sampled[place] for place in places))
        self._calls[number, places] = call
        self._open += 1
        self._grader.submit(self, call)

    def finish(self, call: _Call, outcome: list[Result] | BaseException) -> bool:
        """Take the outcome of a call; return False if it was given up before."""
        if isinstance(outcome, ValueError) and str(outcome).startswith(_MAIN_ONLY):
            self._grader.in_main.add(call.number)
            self.pass_back(call)
            return True
        with self._grader.changed:
            if call.outcome is not None:
                return False
            if self._is_to_retry(call, outcome):
                self._grader.submit(self, call)
                return True
            call.outcome = outcome
            self._open -= 1
            if not self._open or self.given_up:
                self._grader.changed.notify_all()
        return True

    def _is_to_retry(self, call: _Call, outcome: list[Result] | BaseException) -> bool:
        """Return whether a call is to be made again, and note why."""
        if not isinstance(outcome, BaseException) or isinstance(outcome, (LeftOut, KeyboardInterrupt, SystemExit)):
            return False
        if self.given_up or len(call.retried) >= self._grader.retries:
            return False
        call.retried = (*call.retried, describe_error(outcome))
        call.started, call.said = None, False
        return True

    def pass_back(self, call: _Call) -> None:
        """Leave a call to the thread that waits for the grades."""
        with self._grader.changed:
            call.started = None
            self._for_main.append(call)
            self._grader.changed.notify_all()

    def results(self, stop: Callable[[], bool] | None = None, say: Callable[[str], None] | None = None) -> list[Grade]:
        """Wait for all calls and return the grades, by place."""
        stop_at = math.inf
        while self._open:
            with self._grader.changed:
                if self._open and not self._for_main:
                    self._grader.changed.wait(_LOOK_S)
                mine, self._for_main = self._for_main, []
            for call in mine:
                outcome = _run_here(call.form, call.group)
                while self._is_to_retry(call, outcome):
                    outcome = _run_here(call.form, call.group)
                with self._grader.changed:
                    call.outcome = outcome
                    self._open -= 1
            self._look_at_clock(say)
            if stop is not None and stop() and self._open:
                stop_at = min(stop_at, time.monotonic() + _GRACE_S)
                if time.monotonic() >= stop_at:
                    raise StopAskedError(f"a request to stop came while {self._waited_for()} ran")
        by_place: dict[int, dict[int, _Call]] = {}
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

    def _look_at_clock(self, say: Callable[[str], None] | None) -> None:
        """Fail the calls that are past their deadline, and name one that takes long."""
        grader, now = self._grader, time.monotonic()
        for call in self._calls.values():
            if call.outcome is not None or call.started is None:
                continue
            taken = now - call.started
            if grader.timeout_s is not None and taken > grader.timeout_s + (_GRACE_S if call.form.is_async else 0):
                if self.finish(call, grader.too_late()) and not call.form.is_async:
                    grader.start_thread()
            elif taken > _SAY_AFTER_S and not call.said and say is not None:
                call.said = True
                say(f"waiting for {_described(call)}, for {taken:.0f} s now ...")

    def _waited_for(self) -> str:
        running = [call for call in self._calls.values() if call.outcome is None]
        first = min(running, key=lambda call: math.inf if call.started is None else call.started)
        return _described(first) + (f" and {len(running) - 1} more" if len(running) > 1 else "")

    def _grade(self, place: int, calls: Mapping[int, _Call]) -> Grade:
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
    for reward, found in zip(grader.rewards, outcomes, strict=True):
        if isinstance(found, LeftOut) and not grader.leaves_out:
            values.append(math.nan)
            applies = True
            continue
        if not isinstance(found, Result):
            assert found is not None
            values.append(math.nan)
            if not kind:
                error, kind, by = describe_error(found), _kind_of(found), reward.label
            continue
        values.append(math.nan if found.value is None else found.value)
        if found.parts:
            parts[reward.label] = found.parts
    total = weighted_sum(grader.rewards, [None if math.isnan(value) else value for value in values])
    if not kind and total is None and not applies:
        error, kind = "no reward: every function returned None", NOT_APPLICABLE
    total = total or 0.0
    if not kind and not abs(total) <= LARGEST:
        error, kind = f"the reward is {total}; it must be a finite float32", GRADER_ERROR
    given = math.nan if kind else total
    return Grade(reward=given, error=error, kind=kind, values=tuple(values), by=by, parts=parts)


def part_values(
    rewards: Sequence[Reward], grades: Sequence[Grade], of_environment: Iterable[str] = ()
) -> dict[str, list[float]]:
    """Return the components of the results of reward functions by the name they are stored under, [n] each.

    NaN where a result has none; but a reward that an environment did not give to a graded conversation is 0, as in the
    sum of its rewards. They come in alphabetical order.

    Args:
        rewards: of the definition.
        grades: [n].
        of_environment: names of the environment's rewards that earlier conversations were given.
    """
    by_label = {one.label: one for one in rewards}
    each = [
        {
            name: value
            for label, parts in grade.parts.items()
            for part, value in parts.items()
            if (name := part_name(rewards, by_label[label], part)) is not None
        }
        for grade in grades
    ]
    known = set(of_environment)
    for label in {label for grade in grades for label in grade.parts if by_label[label].function is environment_reward}:
        given = {part for grade in grades for part in grade.parts.get(label, ())}
        known |= {name for part in given if (name := part_name(rewards, by_label[label], part)) is not None}
    names = sorted(known.union(*each))
    absent = [dict.fromkeys(known, 0.0) if math.isfinite(grade.reward) else {} for grade in grades]
    return {
        name: [parts.get(name, other.get(name, math.nan)) for parts, other in zip(each, absent, strict=True)]
        for name in names
    }


def _kind_of(error: BaseException) -> str:
    if isinstance(error, LeftOut):
        return error.reason
    return TIMEOUT if isinstance(error, TimeoutError) else GRADER_ERROR


def _described(call: _Call) -> str:
    many = f" and {len(call.places) - 1} more" if len(call.places) > 1 else ""
    prompt = call.group[0].prompt.text
    short = prompt if len(prompt) <= 40 else f"{prompt[:37]}..."
    return f"the reward function {call.form.reward.label} on completion {min(call.places)}{many} (prompt {short!r})"


def check_all_failed(grades: Sequence[Grade], rewards: Sequence[Reward]) -> None:
    """Refuse a rollout in which every call failed."""
    broken = [item for item in grades if item.broken or item.kind == NOT_APPLICABLE]
    if not broken or len(broken) < len(grades):
        return
    if not broken[0].by and broken[0].broken:
        raise RewardError(
            f"the environment failed in all {len(broken)} conversations; the first with {broken[0].error}. This "
            "rollout was not stored; it will be sampled again, token for token. Fix the environment, then type the "
            "same command with --resume."
        )
    reward = next((one for one in rewards if one.label == broken[0].by), rewards[0])
    name = getattr(reward.function, "__qualname__", reward.label)
    raise RewardError(
        f"all {len(broken)} calls of the reward function {name} failed; the first with {broken[0].error}. "
        "This rollout was not stored; it will be sampled again, token for token. "
        "Fix the function, then type the same command with --resume."
    )
