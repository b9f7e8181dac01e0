"""Processes of a run on the nodes of a Ray cluster: Ray places them, the supervisor restarts those that are lost.

Each has an actor that starts the same command as on one machine, passes signals on to it and reports its state. Nothing
that matters is in Ray: if a node is lost, only the work of a moment is lost.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.address import BESIDE, Address, is_url
from rlhf_pipeline.run.processes.heartbeat import read_heartbeat, write_heartbeat
from rlhf_pipeline.run.processes.launch import HOST, Launcher, Subprocesses
from rlhf_pipeline.run.remote.copies import new_copy

logger = logging.getLogger(__name__)

HERE: Final = "local"
"""The address of a cluster on this machine only, which ends with the run."""
_OLDEST: Final = (2, 50)
_LOOK_S: Final = 0.2
_KILL_S: Final = 10.0
_TAIL_BYTES: Final = 65_536
_OBJECTS_BYTES: Final = 100_000_000
"""The size of Ray's own object store on this machine, which a run does not use."""
_PASSED_ON: Final = ("AWS_", "GOOGLE_", "AZURE_", "RLHF_PIPELINE_", "TRAJECTORY_STORE_", "HF_")
"""Prefixes of the variables that the processes get from the supervisor's environment."""


class Look(NamedTuple):
    """An actor's report on its process."""

    pid: int
    node: str
    code: int | None
    heartbeat: dict[str, Any]
    log: bytes
    """The end of its stderr, once it has ended."""


class Host:
    """The actor of one process."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: str | None) -> None:
        self._name = name
        self._tells = folder is None
        self._folder = new_copy(self) if folder is None else Path(folder)
        self._log = self._folder / f"{name}.log"
        ray: Any = importlib.import_module("ray")
        # It sees only the GPUs that it was given, so its own is the first.
        variables = {BESIDE: str(self._folder), HOST: ray.util.get_node_ip_address(), "LOCAL_RANK": "0"}
        self._process = Subprocesses()(name, [sys.executable, *command[1:]], self._log, {**environment, **variables})
        self._node = str(ray.get_runtime_context().get_node_id())

    def look(self) -> Look:
        """Wait a moment for the end of the process, and report on it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOOK_S)
        code = self._process.poll()
        heartbeat = read_heartbeat(self._folder, self._name) if self._tells else {}
        log = self._log.read_bytes()[-_TAIL_BYTES:] if self._tells and code is not None else b""
        return Look(self._process.pid, self._node, code, heartbeat, log)

    def send(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)


class Placed:
    """A process that Ray places, as its actor last reported it to the supervisor."""

    def __init__(self, ray: Any, actor: Any, name: str, log: Path) -> None:
        self.pid: int | None = None
        self._ray = ray
        self._actor = actor
        self._name = name
        self._log = log
        self._code: int | None = None
        self._pending_look = actor.look.remote()

    def poll(self) -> int | None:
        """Return the exit code, or None; a process whose node is gone counts as killed."""
        if self._code is None and self._ray.wait([self._pending_look], timeout=0)[0]:
            try:
                self._take(self._ray.get(self._pending_look))
                self._pending_look = self._actor.look.remote()
            except self._ray.exceptions.RayError as error:
                logger.warning("%s: its Ray actor was lost: %s", self._name, str(error).partition("\n")[0])
                self._code = -signal.SIGKILL
            if self._code is not None:
                self._ray.kill(self._actor)
        return self._code

    def _take(self, look: Look) -> None:
        if self.pid is None:
            logger.info("%s: process %d on node %s", self._name, look.pid, look.node)
        self.pid = look.pid
        if look.heartbeat:
            write_heartbeat(self._log.with_name(f"{self._name}.json"), look.heartbeat)
        if look.log:
            with self._log.open("ab") as file:
                file.write(look.log)
        self._code = look.code

    def send_signal(self, sig: int, /) -> None:
        """Send the process a signal."""
        self._actor.send.remote(int(sig))

    def kill(self) -> None:
        """Kill the process, and its actor if that does not answer."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 4)
        if self._code is None:
            self._ray.kill(self._actor)

    def wait(self) -> int:
        """Wait until it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_LOOK_S / 4)
        return code


class _Launcher:
    """Starts processes as actors."""

    def __init__(self, ray: Any, run_dir: Address, collector_gpus: float, learner_gpus: float) -> None:
        self._ray = ray
        self._folder_run = not is_url(run_dir)
        self._learner_gpus, self._collector_gpus = learner_gpus, collector_gpus
        self._environment = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
        self._where: Any = "SPREAD"
        if self._folder_run:
            strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
            node = ray.get_runtime_context().get_node_id()
            self._where = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def __call__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Placed:
        """Start a process on a node that Ray chooses."""
        actor = self._ray.remote(Host).options(
            num_cpus=1,
            num_gpus=self._learner_gpus if name.startswith("learner") else self._collector_gpus,
            scheduling_strategy=self._where,
            max_restarts=0,
        )
        folder = str(log.parent.absolute()) if self._folder_run else None
        variables = {**self._environment, **environment}
        return Placed(self._ray, actor.remote(name, list(command), variables, folder), name, log)


@contextmanager
def on_ray(
    address: str, run_dir: Address, *, processes: int, collector_gpus: float, learner_gpus: float
) -> Iterator[Launcher]:
    """Connect to a cluster; the processes started there end with the block."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise DefinitionError("--ray needs the package ray. Install it: pip install 'rlhf-pipeline[ray]'") from error
    if tuple(int(part) for part in str(ray.__version__).split(".")[:2]) < _OLDEST:
        raise DefinitionError(
            f"--ray needs ray 2.50 or newer, but version {ray.__version__} is installed. Upgrade it: pip install "
            "'rlhf-pipeline[ray]'"
        )
    if address.startswith("ray://") and not is_url(run_dir):
        raise DefinitionError(f"the cluster at {address} cannot access the folder {run_dir}: use --out s3://bucket/run")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == HERE:
        cpus = max(os.cpu_count() or 1, processes)
        options |= {"num_cpus": cpus, "object_store_memory": _OBJECTS_BYTES, "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError) as error:
        raise DefinitionError(f"--ray {address}: {error}") from error
    try:
        yield _Launcher(ray, run_dir, collector_gpus, learner_gpus)
    finally:
        ray.shutdown()
