"""Puts that nobody waits for, done one after another in the order in which they were asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_WAITING = 16
"""Puts that may wait; whoever asks for more waits, too."""


class Outbox:
    """One thread that does what it is given, in order, until something fails; then nothing more is done.

    So what others see is at every moment the beginning of what was done: a process that dies, died a moment earlier.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def add(self, job: Callable[[], None]) -> threading.Event:
        """Do this after all that was added before.

        Returns:
            Set when it was done, or is never done because something failed.

        Raises:
            Exception: what an earlier one raised.
        """
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="puts of a run", daemon=True)
            self._thread.start()
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def flush(self) -> None:
        """Wait until all is done.

        Raises:
            Exception: what one of them raised.
        """
        self._jobs.join()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                if self._failed is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised where the next one is added
                self._failed = error
            finally:
                done.set()
                self._jobs.task_done()
