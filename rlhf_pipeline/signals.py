"""SIGINT and SIGTERM ask a run to stop after the step it is in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """True once a signal has asked the run to stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one interrupts at once.

    Outside the main thread Python delivers no signals, so there the request never comes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal_number = number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
