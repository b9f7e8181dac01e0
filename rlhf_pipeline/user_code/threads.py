"""The threads in which user code runs."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_HERE: Final = threading.local()


class Lane:
    """Work that one thread does, one job after the other: a conversation, whose libraries may be tied to a thread."""

    __slots__ = ("worker",)

    def __init__(self) -> None:
        self.worker: Worker | None = None


class Worker:
    """One thread of a pool."""

    __slots__ = ("is_left_behind", "jobs", "lanes", "pending")

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], object], Lane | None] | None] = queue.SimpleQueue()
        self.pending = 0
        """The number of jobs that wait or run."""
        self.lanes = 0
        """The number of lanes whose work it does."""
        self.is_left_behind = False


def current_worker() -> Worker | None:
    """Return the worker whose thread this is."""
    return getattr(_HERE, "worker", None)


class ThreadPool:
    """At most `size` threads, none of which waits for the work of another thread.

    A thread in which a call hangs is left behind: another one takes its place and its other work, and it ends by itself
    if the call ever returns. Such threads do not count.

    >>> pool, ended = ThreadPool(2), threading.Event()
    >>> pool.put(ended.set)
    >>> ended.wait(5.0)
    True
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._free: list[Worker] = []
        """The workers without work and without a lane."""
        self._backlog: deque[Callable[[], object]] = deque()

    def put(self, job: Callable[[], object], lane: Lane | None = None) -> None:
        """Run a job as soon as a thread is free, or in the thread of its lane."""
        with self._lock:
            if lane is not None:
                worker = self._in_lane(lane)
            else:
                worker = self._new_or_free() or next(
                    (candidate for candidate in self._workers if not candidate.pending), None
                )
            if worker is None:
                self._backlog.append(job)
                return
            worker.pending += 1
            worker.jobs.put((job, lane))

    def _in_lane(self, lane: Lane) -> Worker:
        if lane.worker is None or lane.worker.is_left_behind:
            worker = self._new_or_free() or min(self._workers, key=lambda worker: (worker.lanes, worker.pending))
            worker.lanes += 1
            lane.worker = worker
        return lane.worker

    def _new_or_free(self) -> Worker | None:
        if self._free:
            return self._free.pop()
        if len(self._workers) >= self.size:
            return None
        worker = Worker()
        self._workers.append(worker)
        threading.Thread(target=self._serve, args=(worker,), name="user-code", daemon=True).start()
        return worker

    def close(self, lane: Lane) -> None:
        """Give the thread of a lane back; work that is in it is still done."""
        with self._lock:
            worker, lane.worker = lane.worker, None
            if worker is not None and not worker.is_left_behind:
                worker.lanes -= 1
                self._free_if_idle(worker)

    def _free_if_idle(self, worker: Worker) -> None:
        if not worker.pending and not worker.lanes:
            self._free.append(worker)

    def leave_behind(self, worker: Worker) -> None:
        """Cancel a thread whose call hangs, and reassign its other work."""
        with self._lock:
            if worker.is_left_behind:
                return
            worker.is_left_behind = True
            self._workers.remove(worker)
            passed_on: list[tuple[Callable[[], object], Lane | None]] = []
            while not worker.jobs.empty():
                job = worker.jobs.get()
                passed_on += [] if job is None else [job]
            backlog = [self._backlog.popleft()] if self._backlog else []  # there is room for one more thread
        for job, lane in passed_on:
            self.put(job, lane)
        for job in backlog:
            self.put(job)

    def _serve(self, worker: Worker) -> None:
        _HERE.worker = worker
        while (job := worker.jobs.get()) is not None:
            job[0]()
            del job
            with self._lock:
                if worker.is_left_behind:
                    return
                worker.pending -= 1
                if not worker.pending and self._backlog:
                    worker.pending += 1
                    worker.jobs.put((self._backlog.popleft(), None))
                else:
                    self._free_if_idle(worker)
