"""Where a run is kept: a folder, or an object store and local copies of what this process needs. Imports no torch.

A process works on files below `RunMedium.root`, wherever the run is kept. Call `bring` before reading what another
process may have written, and `keep` after writing a file or folder that other processes, or the next start of this one,
will need. For a folder both do nothing: the files are the run. For an object store see `run.remote`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.processes.heartbeat import is_alive, read_heartbeat
from rlhf_pipeline.run.rows import StepRows
from trajectory_store.bucket import Bucket, Traffic

if TYPE_CHECKING:
    from trajectory_store import TrajectoryStore

T = TypeVar("T")

BESIDE: Final = "RLHF_PIPELINE_BESIDE"
"""The environment variable with the folder in which a supervisor on this machine looks for locks and heartbeats."""

Address = Path | str
"""A folder, or a URL such as `s3://bucket/run`."""


def is_url(place: Address) -> bool:
    """Return whether this names a place in an object store."""
    return isinstance(place, str) and "://" in place and not place.startswith("file://")


def address_of(text: Address) -> Address:
    """Return a typed address as a URL, or as the path of a folder.

    >>> address_of("s3://bucket/run/"), address_of("runs/mine")
    ('s3://bucket/run', PosixPath('runs/mine'))
    """
    if isinstance(text, str) and is_url(text):
        return text.rstrip("/")
    return Path(str(text).removeprefix("file://")).expanduser()


def below(place: Address, name: str) -> Address:
    """Return the address of something in a folder, or below a URL."""
    return place / name if isinstance(place, Path) else f"{place}/{name}"


class RunMedium:
    """The medium of a run, and this process's files of it. Names are relative to the run.

    This class is for a folder: the files are the run, and locks say which process holds a name. So many methods have
    nothing to do; a medium that works on copies overrides them.

    Args:
        path: the folder; it need not exist yet.

    Attributes:
        root: where this process reads and writes files of the run.
        address: the run itself, for messages.
        patience_s: the longest pause between two checks while nothing happens, in seconds.
        stores: the names of the parts that are trajectory stores.
    """

    root: Path
    address: Address
    patience_s = 0.1
    stores: Collection[str] = (filenames.STORE, filenames.ROLLOUTS)

    def __init__(self, path: Path) -> None:
        self.root = path
        self.address = path

    def is_blank(self, besides: Collection[str]) -> bool:
        """Return whether a run may be made here, because there is nothing besides files of these names."""
        if not self.root.exists():
            return True
        return self.root.is_dir() and {path.name for path in self.root.iterdir()} <= set(besides)

    def bring(self, name: str) -> None:
        """Fetch the current state of a file or a sealed folder; remove the local copy of a file that is gone."""

    def keep(self, name: str) -> None:
        """Store a file or a sealed folder that this process has written, so that other processes see it.

        They see the files of one process in the order of its calls.

        Raises:
            LeaseLostError: another process has taken over writing it.
        """

    def keep_first(self, name: str) -> bool:
        """Keep a file unless another process has kept one; return whether it was kept. In a folder a lock guards it."""
        return True

    def keep_log(self, path: Path) -> None:
        """Store the log of this process; a failure to do so is ignored."""

    def drop(self, name: str) -> None:
        """Remove a sealed folder for all processes, after this process has removed its own."""

    def forget(self, name: str) -> None:
        """Remove this process's copy of a sealed folder, if the run is kept elsewhere."""

    def outline(self, name: str) -> None:
        """Fetch the names of the sealed folders in a folder; `bring` fetches their content."""

    def has(self, name: str) -> bool:
        """Return whether a file or a folder exists; at a URL, a folder must not be empty."""
        return (self.root / name).exists()

    def inside(self, name: str) -> list[str]:
        """Return the names of the folders in a folder, sorted; none if there is no such folder."""
        return sorted(path.name for path in (self.root / name).glob("*/"))

    def rows(self, name: str) -> StepRows:
        """Return the rows of a file with one line per step."""
        return StepRows(self.root / name)

    def write_rows(self) -> None:
        """Take over as the only writer of lines; an earlier writer's next line is refused."""

    def lease(self, name: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold a name as its only process on any machine; a lock does the same on this machine.

        Args:
            name: of the process.
            wait_s: how long to wait for another process to leave, in seconds.

        Raises:
            RunExistsError: another live process has the name.
        """
        return nullcontext()

    def is_alive(self, name: str) -> bool:
        """Return whether a process of this name is working on the run."""
        return is_alive(self.root / filenames.PROCESSES, name)

    def living(self) -> set[str]:
        """Return the names of the processes that are working on the run."""
        return {file.stem for file in (self.root / filenames.PROCESSES).glob("*.lock") if self.is_alive(file.stem)}

    def said(self, name: str) -> dict[str, Any]:
        """Return the last report of a process about itself; empty if there is none."""
        return read_heartbeat(self.root / filenames.PROCESSES, name)

    def flush(self) -> None:
        """Wait until everything that this process keeps is stored."""

    def clear(self) -> None:
        """Remove everything else that a failed start left, its record last; see `RunFolder.clear`."""

    def ahead(self, read: Callable[[], T]) -> Callable[[], T]:
        """Start a read whose result is needed later; return a function that waits for it. Here it reads only then.

        Args:
            read: reads once; its result is false if there is nothing yet.
        """
        return read

    def meter(self, store: TrajectoryStore) -> TrafficMeter | None:
        """Return a counter of this process's requests to an object store from here on; None if the run is a folder.

        Args:
            store: of the run's trajectories; its requests count too.
        """
        return None


class TrafficMeter:
    """Counts the requests of a process to an object store between two calls.

    Args:
        bucket: of the run.
        store: of its trajectories.
    """

    def __init__(self, bucket: Bucket, store: TrajectoryStore) -> None:
        self._bucket = bucket
        self._store = store
        self._before = Traffic()

    def since_last(self) -> dict[str, int]:
        """Return requests and bytes since the last call, for a line of metrics."""
        now = self._bucket.traffic + self._store.traffic
        new, self._before = now - self._before, now
        return {"requests": new.requests, "bytes_sent": new.sent, "bytes_received": new.received}


def open_medium(place: Address) -> RunMedium:
    """Return the medium of a run, without a request and without creating anything.

    Raises:
        StoreError: the place is a URL, and the package that it needs is not installed.
    """
    if not is_url(place):
        return RunMedium(Path(place))
    from rlhf_pipeline.run.remote.medium import BucketMedium

    return BucketMedium(str(place))
