"""How a supervisor starts processes: here, or on the nodes of a Ray cluster (`on_ray`). Nothing here imports torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

GROUP: Final = "RLHF_PIPELINE_GROUP"
"""The environment variable with the name of a group of learner processes, another one with each start."""
HOST: Final = "RLHF_PIPELINE_HOST"
"""The environment variable with the address at which the others reach the first of them; this machine without it."""


class Process(Protocol):
    """A process that was started; what `subprocess.Popen` has of it."""

    @property
    def pid(self) -> int | None:
        """Its number where it runs; None while that is not known."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, below 0 the number of the signal that killed it; None while it lives."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    def __call__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process of a run.

        Args:
            name: of the process; its heartbeat comes to be beside its log.
            command: what to execute; `--parent` and the number of the process that it must not outlive are added.
            log: receives what it writes to stderr, at its end at the latest.
            environment: variables of this process alone.
        """
        ...


class Subprocesses:
    """Starts processes on this machine.

    Args:
        environment: theirs; None inherits.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def __call__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own: Ctrl-C reaches the supervisor only, which asks each child once."""
        with log.open("ab") as errors:
            return subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**(os.environ if self._environment is None else self._environment), **environment},
                process_group=0,
            )
