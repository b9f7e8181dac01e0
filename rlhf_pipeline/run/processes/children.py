"""One child of a supervisor: started, watched, killed when it hangs, restarted after growing delays.

A child is one process, or the several of one learner: they start together, and if one is lost, all are restarted.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_pipeline.run.processes.heartbeat import holder, is_alive, is_idle, read_heartbeat
from rlhf_pipeline.run.processes.launch import GROUP, Launcher, Process
from rlhf_pipeline.settings import Settings, setting

logger = logging.getLogger(__name__)

_LOG_BYTES: Final = 1_000_000
"""A child's log that is larger than this at a start is moved to `.log.1`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig(Settings):
    """The number of processes, and when one is restarted, killed or no longer restarted.

    >>> SupervisorConfig(collectors=2).delay_s(1), SupervisorConfig().delay_s(4), SupervisorConfig().delay_s(99)
    (1.0, 8.0, 60.0)
    """

    collectors: int = setting(1, min=1, help="Number of collector processes.")
    learners: int = setting(1, min=1, help="Number of processes that share each step; see `learner.distributed`.")
    first_delay_s: float = setting(
        1.0, min=0, help="Seconds until a process that died is restarted; doubled after each consecutive failure."
    )
    max_delay_s: float = setting(60.0, min=0, help="Maximum delay before a restart, in seconds.")
    max_failures: int = setting(
        5,
        min=1,
        help="Stop the run after this many consecutive failures of a process if the learner completes no step "
        "in the meantime. Progress of the process (a stored rollout or a step) resets the count.",
    )
    start_timeout_s: float = setting(
        300.0,
        min=0,
        help="Kill a process that has not reported within this many seconds of its start. Python imports from a cold "
        "disk are slow.",
    )
    hang_timeout_s: float = setting(
        60.0,
        min=0,
        help="Kill a process whose heartbeat is older than this number of seconds. A thread updates the heartbeat "
        "every two seconds, even during a long rollout or step, so only a frozen or stopped process exceeds the limit.",
    )
    progress_timeout_s: float | None = setting(
        None,
        min=0,
        help="Kill a process that spends more than this many seconds on one rollout or step, for example in a hanging "
        "reward function. None, the default, sets no limit, because the duration depends on the "
        "task.",
    )
    stop_timeout_s: float = setting(
        120.0,
        min=0,
        help="Maximum number of seconds for processes to finish and save after a stop is requested. Any process that "
        "is still running after this time is killed, which loses unfinished work but no acknowledged rows.",
    )

    def delay_s(self, failures: int) -> float:
        """Return how long to wait after this many failures in a row, in seconds."""
        return min(self.first_delay_s * 2.0 ** min(failures - 1, 60), self.max_delay_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a child ended."""

    name: str
    """The name of the process that caused the end."""
    log: Path
    """The log file of that process."""
    code: int
    """The exit code, as in `subprocess`: if negative, minus the number of the signal that killed the process."""
    advanced: bool
    """Whether the process had stored a rollout or taken a step since its start."""
    last_words: str
    """The last line that it wrote to stderr since its start; empty if there is none, or if it was killed."""

    @property
    def how(self) -> str:
        """The end as text, for example `was killed by SIGKILL` or `ended with code 1`."""
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with code {self.code}"


class Child:
    """One process of a run, or a group of them, which a supervisor keeps alive."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        size: int = 1,
        folder: Path,
        config: SupervisorConfig,
        launch: Launcher,
        count: Callable[[Mapping[str, Any]], int],
    ) -> None:
        self.name = name
        self.command = list(command)
        self.names = [name, *(f"{name}-{rank}" for rank in range(1, size))]
        self.config = config
        self.failures = 0
        """The number of consecutive failures."""
        self.is_wanted = True
        """Whether to restart it when it ends."""
        self._folder = folder
        self._launch = launch
        self._count = count
        self._processes: dict[str, Process] = {}
        self._next_start = -math.inf
        self._log_from: dict[str, int] = {}
        self._base = 0
        self._started = 0.0
        self._pulses: dict[str, _Pulse] = {}
        self._lost: tuple[str, int] | None = None
        """The process of the group that failed, and its exit code."""
        self._steps_at_failure: deque[int] = deque(maxlen=config.max_failures)
        self._told_of: int | None = None

    @property
    def lives(self) -> bool:
        """Whether it was started, and its exit has not been taken."""
        return bool(self._processes)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process ids by name; None for a process that is not alive."""
        return {name: None if (process := self._processes.get(name)) is None else process.pid for name in self.names}

    def heartbeat(self, name: str | None = None) -> dict[str, Any]:
        """Return the last heartbeat of the living process; empty until it has one."""
        name = self.name if name is None else name
        heartbeat, pid = read_heartbeat(self._folder, name), self.pids[name]
        return heartbeat if pid is not None and heartbeat.get("pid") == pid else {}

    def start_if_due(self) -> bool:
        """Start it if it is wanted, its delay is over and no process has its name; return True if it was started."""
        if self._processes or not self.is_wanted or time.monotonic() < self._next_start:
            return False
        if is_alive(self._folder, self.name):
            self._wait_for_other()
            return False
        self._told_of = self._lost = None
        self._base = self._count({})
        group = secrets.token_hex(8)
        for rank, name in enumerate(self.names):
            log = self._log_of(name)
            if log.exists() and log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
            self._log_from[name] = log.stat().st_size if log.exists() else 0
            self._pulses[name] = _Pulse()
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(self.names)), GROUP: group}
            environment = place if len(self.names) > 1 else {}
            self._processes[name] = self._launch(name, self.command, log, environment)
            logger.info("%s: started, process %s", name, self._processes[name].pid or "not placed yet")
        self._started = time.monotonic()
        return True

    def take_exit(self) -> Exit | None:
        """Return how it ended, once, if it has ended. Progress since its start resets its count of failures."""
        if not self._processes:
            return None
        first, codes = self._processes[self.name], {name: process.poll() for name, process in self._processes.items()}
        heartbeat = read_heartbeat(self._folder, self.name)
        advanced = heartbeat.get("pid") == first.pid and self._count(heartbeat) > self._base
        if advanced:
            self.failures = 0
            self._steps_at_failure.clear()
        failed = [(code, name) for name, code in codes.items() if code]
        if failed and self._lost is None:
            code, name = min(failed)  # the one that was killed made the others fail
            self._lost = name, code
        if None in codes.values():
            for name, process in self._processes.items() if self._lost is not None else ():
                if codes[name] is None:
                    process.kill()
            return None
        name, code = self._lost or (self.name, 0)
        self._processes = {}
        words = "" if code == -signal.SIGKILL else self._last_words(name)
        return Exit(name=name, log=self._log_of(name), code=code, advanced=advanced, last_words=words)

    def fail(self, steps: int) -> float:
        """Count a failure and return the seconds until the next start."""
        self.failures += 1
        self._steps_at_failure.append(steps)
        return self.rest(self.config.delay_s(self.failures))

    def rest(self, seconds: float) -> float:
        """Restart it in `seconds` at the earliest."""
        self._next_start = time.monotonic() + seconds
        return seconds

    @property
    def is_hopeless(self) -> bool:
        """Whether it has failed `max_failures` times in a row while the run took no step."""
        at = self._steps_at_failure
        return len(at) == self.config.max_failures and at[0] == at[-1]

    def kill_if_hung(self) -> str | None:
        """Kill it if it hangs; return why, or None."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                continue
            heartbeat, config = self.heartbeat(name), self.config
            if not heartbeat:
                silent = time.monotonic() - self._started
                why = f"has had no heartbeat for {silent:.0f} s" if silent > config.start_timeout_s else None
            else:
                why = self._pulses[name].verdict(heartbeat, config)
            if why is not None:
                logger.warning("%s: %s; process %s is killed", name, why, process.pid)
                process.kill()
                return f"{name} {why}" if name != self.name else why
        return None

    def send(self, number: int) -> None:
        """Send a signal, if it is alive; the first process of a group notifies the others."""
        first = self._processes.get(self.name)
        if first is not None and first.poll() is None:
            first.send_signal(number)

    def kill_now(self) -> None:
        """Kill it and wait until it is gone."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes = {}

    def _wait_for_other(self) -> None:
        """Wait for a process of an earlier supervisor to end by itself; kill it if it hangs."""
        heartbeat, pid = read_heartbeat(self._folder, self.name), holder(self._folder, self.name)
        if pid is None:
            return
        if self._told_of != pid:
            self._told_of, self._pulses[self.name] = pid, _Pulse()
            logger.info("%s: process %d already uses the name; waiting until it exits", self.name, pid)
        # The last heartbeat of a dead process is not a reason to kill the one that has its name now.
        why = self._pulses[self.name].verdict(heartbeat, self.config) if heartbeat.get("pid") == pid else None
        if why is not None and is_alive(self._folder, self.name):
            logger.warning("%s: %s; process %d, which uses the name, is killed", self.name, why, pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._pulses[self.name] = _Pulse()

    def _log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _last_words(self, name: str) -> str:
        log = self._log_of(name)
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(max(self._log_from[name], file.seek(0, os.SEEK_END) - 65_536))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class _Pulse:
    """The time for which a heartbeat and its content have been unchanged, by this process's monotonic clock.

    The wall clock may jump, and a jump must not look like a hanging process.
    """

    def __init__(self) -> None:
        self._last_values: dict[str, tuple[Any, float]] = {}

    def verdict(self, heartbeat: Mapping[str, Any], config: SupervisorConfig) -> str | None:
        """Return why its process hangs, or None."""
        silent = self._unchanged_s("time", heartbeat["time"])
        busy = self._unchanged_s("since", heartbeat["since"])
        if silent > config.hang_timeout_s:
            return f"its heartbeat stopped {silent:.0f} s ago ({heartbeat['state']!r})"
        if (
            config.progress_timeout_s is not None
            and not is_idle(str(heartbeat["state"]))
            and busy > config.progress_timeout_s
        ):
            return f"it has been {heartbeat['state']!r} for {busy:.0f} s"
        return None

    def _unchanged_s(self, name: str, value: object) -> float:
        now = time.monotonic()
        if name not in self._last_values or self._last_values[name][0] != value:
            self._last_values[name] = (value, now)
        return now - self._last_values[name][1]


def signal_name(number: int) -> str:
    """Return the name of a signal, for example `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
