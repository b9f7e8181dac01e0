"""Calling environments: whatever a call does, it costs its own conversation only.

A `def` runs in one thread beside the one that samples, which waits for it, so that a call that hangs can be left
behind. An `async def` runs in an event loop, and its result is asked for later.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

_GRACE_S: Final = 1.0
"""How long past its deadline a coroutine may be before its loop counts as blocked."""
_LOOK_S: Final = 0.5


def too_late(timeout_s: float | None) -> TimeoutError:
    """Return the error of a call that is past its deadline."""
    return TimeoutError(f"no answer after {timeout_s:g} s (collect.step_timeout_s)")


class Caller:
    """Makes calls, some of which may hang.

    >>> caller = Caller(timeout_s=5.0)
    >>> caller.run([lambda: 1, lambda: int("x")])
    [1, ValueError("invalid literal for int() with base 10: 'x'")]
    >>> caller.close()
    """

    def __init__(self, timeout_s: float | None, *, workers: int = 64) -> None:
        self.timeout_s = timeout_s
        self._crew = _Crew(workers)
        self._tickets: dict[int, _Ticket] = {}
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._back: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._begun: dict[int, float] = {}

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make calls one after the other, and return what each returned or raised."""
        outcomes: list[Any] = []
        while len(outcomes) < len(calls):
            job = _Job(calls[len(outcomes) :])
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), name="environment", daemon=True).start()
            self._jobs.put(job)
            done = 0
            while not job.finished.wait(self.timeout_s) and not job.left_behind(done):
                done = len(job.outcomes)  # one has ended since: each has its own deadline
            if job.finished.is_set():
                outcomes += job.outcomes
            else:
                outcomes += [*job.outcomes[:done], too_late(self.timeout_s)]
                self._jobs = None
        return outcomes

    def begin(self, place: int, awaitable: Awaitable[Any]) -> None:
        """Let a coroutine run; `arrived` returns its result under this number."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="environments", daemon=True).start()
        self._begun[place] = time.monotonic()
        asyncio.run_coroutine_threadsafe(self._await(place, self._begun[place], awaitable), self._loop)

    async def _await(self, place: int, begun: float, awaitable: Awaitable[Any]) -> None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                outcome: Any = await awaitable
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
            outcome = too_late(self.timeout_s) if limit.expired() else error
        if self._begun.get(place) == begun:  # otherwise it was given up
            self._back.put((place, outcome))

    def arrived(self, *, wait: bool) -> dict[int, Any]:
        """Return the results that have come since the last call."""
        found: dict[int, Any] = {}
        while self._begun and (not self._back.empty() or (wait and not found)):
            try:
                place, outcome = self._back.get(timeout=_LOOK_S)
            except queue.Empty:
                break
            if self._begun.pop(place, None) is not None:
                found[place] = outcome
        if self.timeout_s is not None:
            last = time.monotonic() - self.timeout_s - _GRACE_S
            for place in [place for place, begun in self._begun.items() if begun < last]:
                del self._begun[place]
                found[place] = too_late(self.timeout_s)
                if self._loop is not None:  # something blocks it; what else waits there has its own deadline
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    self._loop = None
        return found

    def submit(self, place: int, call: Callable[[], Any]) -> None:
        """Let a call run in the thread of this number, or a coroutine that it returns in the loop; see `results`."""
        ticket = self._tickets[place] = _Ticket(call)
        self._crew.put(place, functools.partial(self._run_ticket, ticket))

    def _run_ticket(self, ticket: _Ticket) -> None:
        ticket.begun = time.monotonic()
        try:
            outcome: Any = ticket.call()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
            outcome = error
        if inspect.isawaitable(outcome):
            ticket.begun, ticket.in_loop = time.monotonic(), True
            asyncio.run_coroutine_threadsafe(self._await_ticket(ticket, outcome), self._a_loop())
        else:
            ticket.finish(outcome)

    async def _await_ticket(self, ticket: _Ticket, awaitable: Awaitable[Any]) -> None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                outcome: Any = await awaitable
        except BaseException as error:  # noqa: BLE001 - see above
            outcome = too_late(self.timeout_s) if limit.expired() else error
        ticket.finish(outcome)

    def _a_loop(self) -> asyncio.AbstractEventLoop:
        with self._crew.lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="environments", daemon=True).start()
            return self._loop

    def results(self, places: Sequence[int], go_on: Callable[[], bool] = lambda: True) -> dict[int, Any] | None:
        """Wait for exactly these results; None if `go_on` has said no, which is asked twice a second."""
        for place in places:
            ticket = self._tickets[place]
            while not ticket.done.wait(self._nap(ticket)):
                if not go_on():
                    return None
                if self._is_late(ticket) and ticket.finish(too_late(self.timeout_s)):
                    if not ticket.in_loop:
                        self._crew.leave_behind(place)
                        continue
                    with self._crew.lock:
                        loop, self._loop = self._loop, None
                    if loop is not None:
                        loop.call_soon_threadsafe(loop.stop)
        return {place: self._tickets.pop(place).outcome for place in places}

    def _is_late(self, ticket: _Ticket) -> bool:
        if self.timeout_s is None or ticket.begun is None:
            return False
        return time.monotonic() - ticket.begun > self.timeout_s + ticket.in_loop * _GRACE_S

    def _nap(self, ticket: _Ticket) -> float:
        if self.timeout_s is None or ticket.begun is None:
            return _LOOK_S if self.timeout_s is None else min(_LOOK_S, self.timeout_s)
        left = ticket.begun + self.timeout_s + ticket.in_loop * _GRACE_S - time.monotonic()
        return min(_LOOK_S, max(left, 0.0) + 0.001)

    def is_done(self, place: int) -> bool:
        """Return whether a result is there."""
        return self._tickets[place].done.is_set()

    def close(self) -> None:
        """End the threads that do not hang."""
        self._crew.close()
        if self._jobs is not None:
            self._jobs.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._jobs = self._loop = None


class _Ticket:
    """A call and its outcome."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.begun, self.in_loop, self.outcome = call, None, False, None
        self.begun: float | None
        self.done = threading.Event()
        self._lock = threading.Lock()

    def finish(self, outcome: Any) -> bool:
        """Take the first outcome; return whether this is it."""
        with self._lock:
            if self.done.is_set():
                return False
            self.outcome = outcome
            self.done.set()
            return True


class _Crew:
    """Threads that each serve the same numbers for life, unless one hangs: another one then serves its others."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}

    def put(self, place: int, job: Callable[[], None]) -> None:
        with self.lock:
            self._queue(place % self.size).put(job)

    def _queue(self, at: int) -> queue.SimpleQueue[Callable[[], None] | None]:
        if at not in self._queues:
            self._queues[at] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(at, self._queues[at]), name="environment", daemon=True).start()
        return self._queues[at]

    def leave_behind(self, place: int) -> None:
        with self.lock:
            old = self._queues.pop(place % self.size)
            while not old.empty():
                self._queue(place % self.size).put(old.get())
            old.put(None)

    def _serve(self, at: int, jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()

    def close(self) -> None:
        with self.lock:
            for jobs in self._queues.values():
                jobs.put(None)
            self._queues = {}


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; what is still open then is cancelled."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class _Job:
    """Calls to make, and what they gave so far."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.outcomes: list[Any] = []
        self.finished = threading.Event()
        self._left = False
        self._lock = threading.Lock()

    def left_behind(self, done: int) -> bool:
        """Give the job up if no call has ended since there were `done` outcomes; return whether it is given up."""
        with self._lock:
            self._left = len(self.outcomes) == done and not self.finished.is_set()
            return self._left

    def take(self, outcome: Any) -> bool:
        """Take an outcome; return whether to go on."""
        with self._lock:
            self.outcomes.append(outcome)
            return not self._left


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        for call in job.calls:
            try:
                outcome: Any = call()
            except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
                outcome = error
            if not job.take(outcome):
                return  # another thread has taken this one's place
        job.finished.set()
