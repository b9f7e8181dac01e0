"""What a process says of itself: a lock that dies with it, and a small file that says what it does."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlhf_pipeline.errors import RunExistsError


class Heartbeat:
    """The state of one live process, in `processes/NAME.json`.

    Args:
        folder: the run's `processes` folder.
        name: `learner`, `supervisor`, `collector-0`, ...
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._path = folder / f"{name}.json"
        self._started = time.time()
        self._said: dict[str, Any] = {}

    def beat(self, state: str, **fields: object) -> None:
        """Say what the process does now. Waiting in one state is written at most once a second."""
        now = time.time()
        said = {"state": state, **fields}
        if {**self._said, "time": 0} == {**said, "time": 0} and now - self._said["time"] < 1.0:
            return
        self._said = {**said, "time": now}
        content = {"name": self.name, "pid": os.getpid(), "started": self._started, **self._said}
        # Not synced: after a power loss nobody is alive whom it could speak of.
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(self._path)


class Pause:
    """Sleeps between two looks while there is nothing to do, longer each time, up to a tenth of a second."""

    def __init__(self) -> None:
        self._seconds = 0.005

    def sleep(self) -> None:
        """Sleep."""
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, 0.1)


def read_heartbeat(folder: Path, name: str) -> dict[str, Any]:
    """Return the last thing a process said; empty if it never did."""
    try:
        return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


@contextmanager
def process_lock(folder: Path, name: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Be the one process of this name; the kernel lets go when it dies.

    Args:
        folder: the run's `processes` folder; made if absent.
        name: the process.
        wait_s: how long to wait for another one to leave, in seconds.

    Raises:
        RunExistsError: another live process has the name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while not try_lock(file):
            if time.monotonic() >= deadline:
                pid = read_heartbeat(folder, name).get("pid", "unknown")
                raise RunExistsError(
                    f"{folder.parent} has a {name} already: process {pid}. Stop that one first: kill {pid}"
                )
            time.sleep(0.05)
        yield


def is_alive(folder: Path, name: str) -> bool:
    """Return True if a process of this name holds its lock."""
    try:
        with (folder / f"{name}.lock").open("r+", encoding="utf-8") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def try_lock(file: IO[str]) -> bool:
    """Take the exclusive lock of an open file, or return False at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
