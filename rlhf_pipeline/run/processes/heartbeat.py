"""How a process reports its state: a lock that dies with it, and a small file with its current activity."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from rlhf_pipeline.errors import RunExistsError, plain
from trajectory_store.locks import try_lock
from trajectory_store.new_files import write_atomically

logger = logging.getLogger(__name__)

HUNG: Final = 3
"""The exit code of a process that ends itself because it makes no progress; a retry may succeed."""

RENEWAL_S: Final = 2.0
"""Seconds between two renewals of a heartbeat while the state stays the same."""


class Heartbeat:
    """The state of one live process, in `processes/NAME.json`.

    `time` in the file is when the process last showed that it is not stopped or frozen: inside `with`, a thread renews
    it, however long a rollout or a step takes. `since` is when its state last changed: if it hangs, that gets old.

    Args:
        folder: the run's `processes` folder.
        name: of the process.
        progress_timeout_s: end the process with `HUNG` if it has been in one state for longer, in seconds, other than
            while it waits or starts; the process that started it starts it again. None never does.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Heartbeat(folder, "learner") as heartbeat:
    ...     heartbeat.beat("learning", step=3)
    >>> read_heartbeat(folder, "learner")["state"], read_heartbeat(folder, "learner")["step"]
    ('learning', 3)
    """

    def __init__(self, folder: Path, name: str, *, progress_timeout_s: float | None = None) -> None:
        self.name = name
        self._progress_timeout_s = progress_timeout_s
        self.facts: dict[str, Any] = {}
        """Fields that every later beat contains."""
        self._path = folder / f"{name}.json"
        self._started = time.time()
        self._reported: dict[str, Any] = {}
        self._since, self._changed = 0.0, math.inf
        self._written = -math.inf
        """The time at which the file was last written, by the monotonic clock."""
        self._lock = threading.Lock()
        self._leave = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._renewing = threading.Thread(target=self._renew, name=f"heartbeat of {self.name}", daemon=True)
        self._renewing.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._leave.set()
        if self._renewing is not None:
            self._renewing.join()

    def beat(self, state: str, **fields: object) -> None:
        """Report what the process does now. An unchanged state is written at most once a second."""
        fields_now = {"state": state, **fields}
        with self._lock:
            if fields_now == self._reported and time.monotonic() - self._written < 1.0:
                return
            if fields_now != self._reported:
                self._reported, self._since, self._changed = fields_now, time.time(), math.inf
            self._write()
            self._changed = min(self._changed, self._written)

    def beat_step(self, step: int, reason: str | None) -> None:
        """Report a step of a run in one process, and the end of the run; one that was interrupted has not ended."""
        self.beat("running" if reason in (None, "interrupted") else "ended", step=step)

    def _renew(self) -> None:
        while not self._leave.wait(RENEWAL_S):
            with self._lock, suppress(OSError):  # the main thread reports a full disk
                if self._reported and time.monotonic() - self._written >= RENEWAL_S / 2:
                    self._write()
            self._leave_if_hung()

    def _leave_if_hung(self) -> None:
        state, busy = str(self._reported.get("state", "")), time.monotonic() - self._changed
        if self._progress_timeout_s is None or is_idle(state) or busy <= self._progress_timeout_s:
            return
        message = f"{self.name} has been {state!r} for {busy:.0f} s (--progress-timeout) and exits"
        logger.error("%s", message)
        os.write(2, f"rlhf-pipeline: {plain(message)}. Stored trajectories and completed steps are kept.\n".encode())
        os._exit(HUNG)  # the thread that hangs cannot be asked

    def _write(self) -> None:
        process_fields = {"name": self.name, "pid": os.getpid(), "started": self._started, "time": time.time()}
        write_heartbeat(self._path, {**process_fields, "since": self._since, **self.facts, **self._reported})
        self._written = time.monotonic()


def is_idle(state: str) -> bool:
    """Return whether a process in this state need not advance."""
    return state.startswith(("waiting", "starting", "ended"))


class Pause:
    """Sleeps between two checks while there is nothing to do: half of the time waited so far, within bounds.

    Args:
        longest_s: the longest pause, in seconds; the shortest is an eighth of it.
    """

    def __init__(self, longest_s: float = 0.1) -> None:
        self._longest_s = longest_s
        self._since = time.monotonic()

    def sleep(self, wake: threading.Event | None = None) -> None:
        """Sleep, or until an event is set."""
        waited = time.monotonic() - self._since
        seconds = min(max(waited / 2, self._longest_s / 8), self._longest_s)
        (time.sleep if wake is None else wake.wait)(seconds)


def write_heartbeat(path: Path, fields: Mapping[str, Any]) -> None:
    """Replace the heartbeat of a process; not synced, because after a power loss the process is not alive."""
    write_atomically(path, json.dumps(fields).encode(), sync=False)


def read_heartbeat(folder: Path, name: str) -> dict[str, Any]:
    """Return the last heartbeat of a process; empty if there is none."""
    try:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def read_report(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the last heartbeat of a process on this machine with `name`, `seen` and `alive`; None if there is none."""
    heartbeat = read_heartbeat(folder, name)
    if not heartbeat:
        return None
    return {**heartbeat, "name": name, "seen": heartbeat.get("time"), "alive": is_alive(folder, name)}


@contextmanager
def process_lock(folder: Path, name: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a name as its only process; the kernel releases the name when the process dies.

    Args:
        folder: the run's `processes` folder; made if absent.
        name: the name of the process.
        wait_s: how long to wait for another process to leave, in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while not try_lock(file):
            if time.monotonic() >= deadline:
                pid = holder(folder, name) or "unknown"
                raise RunExistsError(
                    f"{folder.parent} already has a process {name}: {pid}. Stop that process first: kill {pid}"
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(folder: Path, name: str) -> int | None:
    """Return the process id in a lock file, which is the holder's if the lock is held; None if there is none."""
    try:
        return int((folder / f"{name}.lock").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def is_alive(folder: Path, name: str) -> bool:
    """Return True if a process of this name holds its lock."""
    path = folder / f"{name}.lock"
    try:
        file = path.open("r+", encoding="utf-8")  # which NFS wants for a lock
    except (FileNotFoundError, NotADirectoryError):  # no process, or no run at all
        return False
    except OSError:  # another user's run, or a disk that may only be read
        file = path.open(encoding="utf-8")
    with file:
        try:
            return not try_lock(file)
        except OSError:  # a disk without locks: `run` and `doctor` report it
            return False
