"""Where threads that sample stand between two tokens, so that others may pause them or change the weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets any number of threads sample, and none while it is closed or somebody needs them still."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampling = 0
        self._closed = False
        self._needed_still = 0

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        """Have a copy of what holds a gate get an open one of its own."""
        return Gate, ()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample inside; waits until that is allowed."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Within `sampling`: not sampling inside; the end waits until sampling is allowed again."""
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def close(self) -> None:
        """Keep threads from sampling until `open`; returns when none does."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._sampling == 0)

    def open(self) -> None:
        """Let them go on."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nobody samples inside, and nobody else is inside."""
        with self._changed:
            self._needed_still += 1
            self._changed.wait_for(lambda: self._sampling == 0)
            try:
                yield
            finally:
                self._needed_still -= 1
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed and not self._needed_still)
            self._sampling += 1

    def _leave(self) -> None:
        with self._changed:
            self._sampling -= 1
            self._changed.notify_all()
