"""The event loop in which the coroutines of user code run: one per process, so that they may share clients.

A coroutine that calls something slow without `await` blocks the loop. How long each one does is measured, so that the
time does not count against the deadlines of others. One that blocks it past its own deadline is cancelled: another
thread continues with the same loop, which stays valid for every client that belongs to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from asyncio.tasks import _leave_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rlhf_pipeline.user_code.runtime import Call

CURRENT: Final[ContextVar[Call | None]] = ContextVar("call of user code", default=None)
"""The call to which a coroutine belongs."""
SLOW_S: Final = 0.02
"""A coroutine that runs longer than this between two `await`s blocks the loop."""
REPORTED_S: Final = 0.4
"""A coroutine that runs this long is reported by name."""


class EventLoop:
    """Runs coroutines in a separate thread.

    Args:
        report: takes a call that blocked the loop, and for how many seconds.
    """

    def __init__(self, report: Callable[[Call, float], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread that runs the loop; any other thread that returns to the loop was replaced."""
        self.loop = _Loop()
        self.loop.set_task_factory(self._task)  # pyright: ignore[reportArgumentType]
        self.running: Call | None = None
        """The call whose coroutine runs now."""
        self.since = 0.0
        self.blocked_s = 0.0
        """Seconds for which coroutines blocked the loop."""
        self._start()

    def _start(self) -> None:
        self._thread = None
        threading.Thread(target=self._serve, name="user-code-loop", daemon=True).start()

    def _serve(self) -> None:
        with self._lock:
            self._thread = threading.get_ident()
        self.loop.changes_thread = True
        self.loop.call_soon(setattr, self.loop, "changes_thread", False)
        self.loop.run_forever()

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Measured(work, CURRENT.get(), self), loop=loop, **kwargs)

    def submit(self, call: Call, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine of a call; `call.task` is its task."""

        def begin() -> None:
            CURRENT.set(call)  # in the context of this callback, which the task copies
            call.task = self.loop.create_task(work())

        self.loop.call_soon_threadsafe(begin)

    def cancel(self, call: Call) -> None:
        """Cancel the coroutine of a call; if it blocks the loop, another thread takes over the loop."""
        if call.task is not None:
            self.loop.call_soon_threadsafe(call.task.cancel)
        with self._lock:
            blocked_s = time.monotonic() - self.since
            if self.running is not call or blocked_s < SLOW_S:
                return
            self.running = None
            self.blocked_s += blocked_s  # not the deadline of other calls
            call.blocking_s += blocked_s
            task = asyncio.current_task(self.loop)
            if task is not None:
                with contextlib.suppress(RuntimeError):  # from Python 3.14 on each thread has a current task of its own
                    _leave_task(self.loop, task)
            self._start()
        self._report(call, blocked_s)

    def blocked_by_others(self, call: Call, now: float) -> float:
        """Return for how many seconds other coroutines have blocked the loop since a call began in it."""
        others_s = self.blocked_s - call.blocked_before - call.blocking_s
        running, since = self.running, self.since
        if running is not None and running is not call and now - since > SLOW_S:
            others_s += now - max(since, call.started or since)
        return others_s

    def enter(self, call: Call | None) -> None:
        """Note that a coroutine continues."""
        self.running, self.since = call, time.monotonic()

    def leave(self, call: Call | None) -> None:
        """Note that it waits or has ended; does not return in a thread that was replaced meanwhile."""
        with self._lock:
            is_current = self._thread == threading.get_ident()
            taken_s = time.monotonic() - self.since
            if is_current:
                self.running = None
                if taken_s > SLOW_S:
                    self.blocked_s += taken_s
                    if call is not None:
                        call.blocking_s += taken_s
        while not is_current:
            threading.Event().wait()
        if call is not None and taken_s > REPORTED_S:
            self._report(call, taken_s)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that a second thread may take over from one that never comes back to it."""

    changes_thread = False

    def is_running(self) -> bool:
        """Return whether the loop runs; not while it changes its thread."""
        return not self.changes_thread and super().is_running()


class _Measured(Coroutine[Any, Any, Any]):
    """A coroutine each of whose stretches between two `await`s is measured."""

    def __init__(self, work: Coroutine[Any, Any, Any], call: Call | None, loop: EventLoop) -> None:
        self._work, self._call, self._loop = work, call, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # libraries look at a coroutine's state

    def send(self, value: Any) -> Any:
        """Continue."""
        self._loop.enter(self._call)
        try:
            return self._work.send(value)
        finally:
            self._loop.leave(self._call)

    def throw(self, *error: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continue with an error."""
        self._loop.enter(self._call)
        try:
            return self._work.throw(*error)
        finally:
            self._loop.leave(self._call)

    def close(self) -> None:
        """End the loop."""
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()
