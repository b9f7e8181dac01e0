"""How a supervisor starts processes: here, or on the nodes of a Ray cluster (`on_ray`). Nothing here imports torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from rlhf_pipeline.errors import DefinitionError

GROUP: Final = "RLHF_PIPELINE_GROUP"
"""The environment variable with the name of a group of learner processes, a new one for each start."""
HOST: Final = "RLHF_PIPELINE_HOST"
"""The environment variable with the address of the first process for the others; by default this machine."""

PLACE: Final = "RLHF_PIPELINE_PLACE"
"""The environment variable with the number of a process among the processes of one supervisor on a machine."""


def is_one_of_several() -> bool:
    """Return True in a process that belongs to a group."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    if not size.isdecimal() or not (rank is None or rank.isdecimal()):
        raise DefinitionError(
            "the environment variables WORLD_SIZE and RANK, which torchrun sets, must be numbers; they are "
            f"{size!r} and {rank!r}. To run in one process: unset WORLD_SIZE RANK"
        )
    return int(size) > 1 and rank is not None


class Process(Protocol):
    """A started process, with the methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int | None:
        """Its process id on the machine where it runs; None while that is not known."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number if a signal killed it; None while it is alive."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    def __call__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process of a run."""
        ...


class Subprocesses:
    """Starts processes on this machine, numbered in the order of their first starts."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._places: dict[str, int] = {}

    def __call__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process in its own process group: Ctrl-C reaches only the supervisor, which asks each child once."""
        place = {PLACE: str(self._places.setdefault(name, len(self._places)))}
        with log.open("ab") as errors:
            return subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**(os.environ if self._environment is None else self._environment), **environment, **place},
                process_group=0,
            )
