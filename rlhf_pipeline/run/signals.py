"""SIGINT and SIGTERM ask a run to stop after the step it is in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """True once a signal has asked the run to stop, or the process that it must not outlive is gone.

    Args:
        parent: the process id of the supervisor; None if there is none.
    """

    def __init__(self, parent: int | None = None) -> None:
        self.signal_number: int | None = None
        self._parent = parent

    def __bool__(self) -> bool:
        orphaned = self._parent is not None and os.getppid() != self._parent
        return self.signal_number is not None or orphaned


@contextmanager
def stop_on_signals(parent: int | None = None) -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one interrupts at once.

    Outside the main thread Python delivers no signals, so there the request never comes.

    Args:
        parent: also stop when this process, the one that started us, is gone.
    """
    request = StopRequest(parent)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.signal_number is not None:
            raise KeyboardInterrupt
        request.signal_number = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
