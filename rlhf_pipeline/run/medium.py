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
    """Whether this names a place in an object store."""
    return isinstance(place, str) and "://" in place and not place.startswith("file://")


def address_of(text: Address) -> Address:
    """Return what was typed as a folder, or as the URL that it is.

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
    """What a run is kept in, and this process's files of it. Names are relative to the run.

    As it stands, a folder: the files are the run, and locks say which process holds a name. So much of what is asked of
    a medium needs nothing done; one that works on copies overrides it.

    Args:
        path: the folder; it need not exist yet.

    Attributes:
        root: where this process finds and writes files of the run.
        address: the run itself, for people.
        patience_s: the longest pause between two looks while nothing happens, in seconds.
        stores: the names of what is kept in trajectory stores.
    """

    root: Path
    address: Address
    patience_s = 0.1
    stores: Collection[str] = ("store", "rollouts")

    def __init__(self, path: Path) -> None:
        self.root = path
        self.address = path

    def is_blank(self, besides: Collection[str]) -> bool:
        """Whether a run may be made here, as there is nothing that could be one, besides files of these names."""
        if not self.root.exists():
            return True
        return self.root.is_dir() and {path.name for path in self.root.iterdir()} <= set(besides)

    def bring(self, name: str) -> None:
        """Fetch a file or a sealed folder as it is now; the local copy of one that is gone is removed."""

    def keep(self, name: str) -> None:
        """Store a file or a sealed folder that this process has written, and let others see it.

        Others see what one process keeps in the order of its calls.

        Raises:
            LeaseLostError: another process has taken over writing it.
        """

    def keep_first(self, name: str) -> bool:
        """Keep a file unless another process has kept one; returns whether it is ours. A lock guards a folder's."""
        return True

    def keep_log(self, path: Path) -> None:
        """Store the log of this process; a failure to do so is ignored."""

    def drop(self, name: str) -> None:
        """Remove a sealed folder, which this process has removed, for all processes."""

    def forget(self, name: str) -> None:
        """Remove this process's copy of a sealed folder, where the run is kept elsewhere."""

    def outline(self, name: str) -> None:
        """Fetch the names of the sealed folders in a folder; `bring` fetches what is in one."""

    def has(self, name: str) -> bool:
        """Whether there is a file or a folder; at a URL, one that is not empty."""
        return (self.root / name).exists()

    def rows(self, name: str) -> StepRows:
        """Return the rows of a file with one line per step."""
        return StepRows(self.root / name)

    def write_rows(self) -> None:
        """Become the one process that adds lines; an earlier one is refused at its next line."""

    def lease(self, name: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold a name as its only process on any machine; a lock does the same on this machine.

        Args:
            name: of the process.
            wait_s: how long to wait for another one to leave, in seconds.

        Raises:
            RunExistsError: another live process has the name.
        """
        return nullcontext()

    def is_alive(self, name: str) -> bool:
        """Whether a process of this name is at work on the run."""
        return is_alive(self.root / "processes", name)

    def living(self) -> set[str]:
        """Return the names of the processes that are at work on the run."""
        return {file.stem for file in (self.root / "processes").glob("*.lock") if self.is_alive(file.stem)}

    def said(self, name: str) -> dict[str, Any]:
        """Return what a process last reported of itself; empty if it never did."""
        return read_heartbeat(self.root / "processes", name)

    def flush(self) -> None:
        """Wait until everything that this process keeps is stored."""

    def clear(self) -> None:
        """Remove all else that a failed start left, its record last; see `RunFolder.clear`."""

    def ahead(self, read: Callable[[], T]) -> Callable[[], T]:
        """Begin to look for what is wanted later; returns what gives it. A look that costs little waits until then.

        Args:
            read: looks once; what it returns is false where there is nothing yet.
        """
        return read

    def meter(self, store: TrajectoryStore) -> TrafficMeter | None:
        """Count the requests of this process to an object store, from here on; None where the run is a folder.

        Args:
            store: of the run's trajectories, whose requests count too.
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
    """Return what a run is kept in; nothing is asked or made yet.

    Raises:
        StoreError: the place is a URL, and the package that reaches it is not installed.
    """
    if not is_url(place):
        return RunMedium(Path(place))
    from rlhf_pipeline.run.remote.medium import BucketMedium

    return BucketMedium(str(place))
