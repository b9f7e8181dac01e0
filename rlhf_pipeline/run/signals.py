"""SIGINT, SIGTERM and SIGHUP stop a run after its current step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run after its current step: Ctrl-C, `kill`, and a lost terminal or connection."""


class StopRequest:
    """True once a signal has asked the run to stop, or its supervisor has ended."""

    def __init__(self, parent: int | None = None) -> None:
        self.signal_number: int | None = None
        self._parent = parent

    def __bool__(self) -> bool:
        orphaned = self._parent is not None and os.getppid() != self._parent
        return self.signal_number is not None or orphaned


@contextmanager
def stop_on_signals(parent: int | None = None) -> Iterator[StopRequest]:
    """Turn the first of `STOPPING` into a request; a second one interrupts at once.

    A SIGHUP that is ignored, as with `nohup`, stays ignored.

    Outside the main thread Python delivers no signals, so there the request never comes.
    """
    request = StopRequest(parent)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.signal_number is not None:
            raise KeyboardInterrupt
        request.signal_number = number

    asking = [number for number in STOPPING if number != signal.SIGHUP or _heeds_hangup()]
    before = {number: signal.signal(number, ask) for number in asking}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeds_hangup() -> bool:
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
