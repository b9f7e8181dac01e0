"""Runs user code: one event loop, one pool of threads and one clock per process.

A call has one outcome: what the function returned, what it raised, or a timeout. A `def` runs in a thread of the pool,
an `async def` in the loop; what a `def` returns may be awaitable and ends there. After its deadline a call ends with
a `TimeoutError`, and one rule determines what happens to it: a thread is left behind, a coroutine is cancelled.

Clients that a module shares (`httpx.AsyncClient`, `asyncio.Semaphore`) belong to one event loop, so all coroutines of
user code run in the same one: rewards, environments and tools, in training and in every evaluation.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from rlhf_pipeline.user_code.event_loop import CURRENT, EventLoop
from rlhf_pipeline.user_code.threads import Lane, ThreadPool, Worker, current_worker

TICK_S: Final = 0.05
"""The resolution of deadlines."""
_IDLE_TICKS: Final = 40
"""The clock stops after this number of ticks without a call."""


class Call:
    """One call of user code.

    Args:
        name: of the function, for messages.
        work: makes the call; it may return an awaitable.
        timeout_s: its deadline, in seconds from its start; None waits for ever.
        late: the message of a call that is past its deadline.
        on_end: takes the call when it has ended, in any thread.
        is_async: `work` returns a coroutine, and is called in the event loop.
    """

    __slots__ = (
        *("blocked_before", "blocking_s", "event", "has_ended", "has_place", "in_loop", "is_async", "lane", "late"),
        *("limit",),
        *("name", "on_end", "outcome", "started", "task", "timeout_s", "work", "worker"),
    )

    def __init__(
        self,
        name: str,
        work: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        late: str = "",
        on_end: Callable[[Call], None] | None = None,
        is_async: bool = False,
    ) -> None:
        self.name, self.work, self.timeout_s, self.late = name, work, timeout_s, late
        self.on_end, self.is_async = on_end, is_async
        self.outcome: Any = None
        """The returned value, or the exception with which the call ended."""
        self.has_ended = False
        self.started: float | None = None
        self.event: threading.Event | None = None
        self.lane: Lane | None = None
        self.limit: Limit | None = None
        self.has_place = False
        """Whether it occupies a slot of its limit."""
        self.worker: Worker | None = None
        self.in_loop = False
        self.task: asyncio.Task[None] | None = None
        self.blocked_before = 0.0
        self.blocking_s = 0.0
        """Seconds for which it has blocked the event loop."""


class Limit:
    """Runs at most `size` calls at the same time, in the order in which they were started.

    With a lane and a size of 1 they are made in one thread, one after the other.
    """

    __slots__ = ("lane", "running", "size", "waiting")

    def __init__(self, size: int, lane: Lane | None = None) -> None:
        self.size, self.lane = size, lane
        self.running = 0
        self.waiting: deque[Call] = deque()


class Runtime:
    """See the module; a process has one, `process_runtime()`.

    >>> runtime = Runtime(threads=2)
    >>> calls = [Call("one", lambda: 1), Call("text", lambda: int("x"))]
    >>> runtime.begin(calls)
    >>> [runtime.wait(call) for call in calls]
    [1, ValueError("invalid literal for int() with base 10: 'x'")]
    """

    def __init__(self, threads: int = 256) -> None:
        self.pool = ThreadPool(threads)
        self._lock = threading.Lock()
        self._running: dict[Call, None] = {}
        self._loop: EventLoop | None = None
        self._wakes = threading.Event()
        self._clock_sleeps = True
        self._clock: threading.Thread | None = None
        self._notices: deque[str] = deque()
        self._noticed: set[str] = set()

    # Beginning and ending

    def begin(self, calls: Sequence[Call], *, lane: Lane | None = None, limit: Limit | None = None) -> None:
        """Start calls: within a limit, in the thread of a lane, or immediately."""
        if limit is None:
            for call in calls:
                call.lane = lane
                if call.is_async:
                    self._begin_in_loop(call, call.work)
                else:
                    self.pool.put(functools.partial(self._run, call), lane)
            return
        for call in calls:
            call.limit, call.lane = limit, limit.lane
        with self._lock:
            limit.waiting.extend(calls)
            free = min(limit.size - limit.running, len(calls))
            limit.running += max(free, 0)
        for _ in range(free):
            self._next_of(limit)

    def _next_of(self, limit: Limit) -> None:
        """Fill a free slot of a limit."""
        with self._lock:
            call = _next(limit)
            if call is None:
                return
            if not call.is_async:
                call.has_place = False
                limit.waiting.appendleft(call)
        if call.is_async:
            self._begin_in_loop(call, call.work)
        else:
            self.pool.put(functools.partial(self._run_of, limit), limit.lane)

    def _run_of(self, limit: Limit) -> None:
        """Make the calls of a limit in this thread, as long as there are any."""
        while True:
            with self._lock:
                call = _next(limit)
            if call is None or not self._run(call):
                return
            call.has_place = False

    def _release(self, call: Call) -> None:
        """Pass the slot of a call that did not end in the thread of its limit to the next call."""
        if call.limit is not None and call.has_place:
            call.has_place = False
            self._next_of(call.limit)

    def _run(self, call: Call) -> bool:
        """Make a call in this thread; return False if it was left behind, or continues in the event loop."""
        call.worker = current_worker()
        if not self._start(call):
            return True
        try:
            outcome: Any = call.work()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; it is recorded, not hidden
            outcome = error
        if inspect.isawaitable(outcome):
            self._begin_in_loop(call, functools.partial(_same, outcome))
            return False
        return self._end(call, outcome)

    def _start(self, call: Call) -> bool:
        """Note that a call starts; return False if it was cancelled before."""
        with self._lock:
            if call.has_ended:
                return False
            call.started = time.monotonic()
            self._running[call] = None
            wakes, self._clock_sleeps = self._clock_sleeps, False
        if wakes:
            self._wake_clock()
        return True

    def _end(self, call: Call, outcome: Any) -> bool:
        """Take the first outcome of a call; return whether this is it."""
        with self._lock:
            if call.has_ended:
                return False
            call.has_ended, call.outcome = True, outcome
            self._running.pop(call, None)
            event = call.event
        if event is not None:
            event.set()
        if call.on_end is not None:
            call.on_end(call)
        return True

    def wait(self, call: Call, timeout_s: float | None = None) -> Any:
        """Wait for a call, and return its outcome; `call.has_ended` is whether it has one."""
        with self._lock:
            if call.has_ended:
                return call.outcome
            if call.event is None:
                call.event = threading.Event()
        call.event.wait(timeout_s)
        return call.outcome

    def renew(self, call: Call, timeout_s: float | None) -> None:
        """Restart the deadline of a call with so many seconds; None suspends it."""
        with self._lock:
            if call.started is not None:
                call.started = time.monotonic()
            if self._loop is not None:
                call.blocked_before, call.blocking_s = self._loop.blocked_s, 0.0
            call.timeout_s = timeout_s

    def cancel_unawaited(self, calls: Sequence[Call]) -> None:
        """End calls whose outcome is not awaited."""
        for call in calls:
            call.on_end = None
            if self._end(call, None) and call.started is not None:
                self._abandon(call)
                self._release(call)

    def _abandon(self, call: Call) -> None:
        """Leave a thread behind, or cancel a coroutine."""
        if call.in_loop:
            assert self._loop is not None
            self._loop.cancel(call)
        elif call.worker is not None:
            self.pool.leave_behind(call.worker)

    # The event loop

    def _begin_in_loop(self, call: Call, work: Callable[[], Any]) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(self._report_blocking)
            call.in_loop = True
        self._loop.submit(call, functools.partial(self._awaited, call, work))

    async def _awaited(self, call: Call, work: Callable[[], Any]) -> None:
        assert self._loop is not None
        call.blocked_before = self._loop.blocked_s
        if not self._start(call):
            self._release(call)
            return
        try:
            outcome: Any = work()
            if inspect.isawaitable(outcome):
                outcome = await outcome
        except BaseException as error:  # noqa: BLE001 - see `_run`
            outcome = error
        if self._end(call, outcome):
            self._release(call)

    def _report_blocking(self, call: Call, blocked_s: float) -> None:
        self.notice(
            f"{call.name} blocked the event loop for {blocked_s:.1f} s, and every other coroutine waited. Use "
            "`await`, or make it a plain `def`, which runs in a thread.",
            once=f"blocks {call.name}",
        )

    # The clock

    def _wake_clock(self) -> None:
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick, name="user-code-clock", daemon=True)
            self._clock.start()
        self._wakes.set()

    def _tick(self) -> None:
        idle = 0
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            with self._lock:
                calls = [call for call in self._running if call.timeout_s is not None]
                idle = 0 if self._running else idle + 1
                if idle > _IDLE_TICKS:
                    self._clock_sleeps = True
                    self._wakes.clear()
            for call in calls:
                if self._running_s(call, now) > (call.timeout_s or 0.0):
                    self._fail_late(call)
            if idle > _IDLE_TICKS:
                self._wakes.wait()
                idle = 0

    def _running_s(self, call: Call, now: float) -> float:
        """Return for how long a call has run; the time for which others blocked its loop does not count."""
        taken_s = now - (now if call.started is None else call.started)
        if call.in_loop and self._loop is not None and taken_s > (call.timeout_s or 0.0):
            taken_s -= self._loop.blocked_by_others(call, now)
        return taken_s

    def _fail_late(self, call: Call) -> None:
        if self._end(call, TimeoutError(call.late or f"no result after {call.timeout_s:g} s")):
            self._abandon(call)
            self._release(call)

    # Notices

    def notice(self, sentence: str, *, once: str) -> None:
        """Record a notice for the user, at most one with this name."""
        with self._lock:
            if once not in self._noticed:
                self._noticed.add(once)
                self._notices.append(sentence)

    def take_notices(self) -> list[str]:
        """Return the sentences since the last call."""
        with self._lock:
            notices, self._notices = [*self._notices], deque()
        return notices


def _next(limit: Limit) -> Call | None:
    """Return the next call of a limit that was not cancelled; None frees the place."""
    while limit.waiting:
        call = limit.waiting.popleft()
        if not call.has_ended:
            call.has_place = True
            return call
    limit.running -= 1
    return None


async def _same(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def in_thread(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function from a coroutine: a `def` in the thread of the conversation that the coroutine belongs to.

    One that hangs is left behind when the coroutine is cancelled, at its deadline.
    """
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    loop, outer, runtime = asyncio.get_running_loop(), CURRENT.get(), process_runtime()
    ended: asyncio.Future[None] = loop.create_future()

    def on_end(_: Call) -> None:
        loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

    call = Call(name, functools.partial(function, **arguments), on_end=on_end)
    runtime.begin([call], lane=None if outer is None else outer.lane)
    try:
        await ended
    finally:
        runtime.cancel_unawaited([call])  # nothing, if it has ended
    if isinstance(call.outcome, Exception):
        raise call.outcome
    if isinstance(call.outcome, BaseException):  # SystemExit, too, ends this conversation only
        raise RuntimeError(f"{type(call.outcome).__name__}: {call.outcome}")
    return call.outcome


_RUNTIME: Runtime | None = None
"""One per process, so that all coroutines share a loop."""
_MAKING = threading.Lock()


def process_runtime() -> Runtime:
    """Return the runtime of this process; a forked one makes its own."""
    global _RUNTIME
    with _MAKING:
        if _RUNTIME is None:
            _RUNTIME = Runtime()
        return _RUNTIME


def _forget() -> None:
    """In a forked process: the threads of its parent are not there."""
    global _RUNTIME, _MAKING
    _RUNTIME, _MAKING = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
