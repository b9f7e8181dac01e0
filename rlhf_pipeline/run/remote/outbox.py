"""Puts in the background, sent one after another in the order in which they were added."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_WAITING = 16
"""Puts that may be queued; `add` blocks beyond that."""


class Outbox:
    """One thread that runs jobs in order until one fails; the rest are then not run.

    So other processes always see a prefix of the work, as if a process that dies had died a moment earlier.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def add(self, job: Callable[[], None]) -> threading.Event:
        """Run a job after all jobs that were added before it."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="puts of a run", daemon=True)
            self._thread.start()
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def flush(self) -> None:
        """Wait until all jobs have run."""
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
            except BaseException as error:  # noqa: BLE001 - raised where the next job is added
                self._failed = error
            finally:
                done.set()
                self._jobs.task_done()
