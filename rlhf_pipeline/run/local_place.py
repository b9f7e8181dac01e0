"""A run in a folder: its files are the run, so there is nothing to fetch, to send or to lease; see `remote.mirror`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.processes.heartbeat import is_alive, read_heartbeat
from rlhf_pipeline.run.rows import StepRows

if TYPE_CHECKING:
    from rlhf_pipeline.run.processes.claims import ClaimableWork, Claims
    from rlhf_pipeline.run.processes.rollouts import Rollouts

T = TypeVar("T")


class LocalPlace:
    """The counterpart of `Mirror` for a folder."""

    patience_s = 0.1
    is_remote = False
    stores: Final = (filenames.STORE, filenames.ROLLOUTS)
    """The parts of a run that are stores of rows."""

    def __init__(self, path: Path) -> None:
        self.address = self.root = path

    def bring(self, name: str) -> None:
        """The file is here."""

    def keep(self, name: str) -> None:
        """The file is where it belongs."""

    def keep_first(self, name: str) -> bool:
        """No other machine writes here."""
        return True

    def keep_log(self, path: Path) -> None:
        """The log is where it belongs."""

    def drop(self, name: str) -> None:
        """The folder is gone already."""

    def outline(self, name: str) -> None:
        """All folders are here."""

    def is_blank(self, ignored: Container[str]) -> bool:
        """Return whether there is nothing here but files and folders of these names."""
        root = self.root
        return not root.exists() or (root.is_dir() and all(path.name in ignored for path in root.iterdir()))

    def backend(self, setting: Literal["memmap", "zarr"]) -> Literal["memmap", "zarr"]:
        """Return the medium of new stores: that of the definition."""
        return setting

    def has(self, name: str) -> bool:
        """Return whether there is a file or folder of this name."""
        return (self.root / name).exists()

    def clear(self) -> None:
        """All that there is was removed by name."""

    def rows(self, name: str) -> StepRows:
        """Return the current rows of a file."""
        return StepRows(self.root / name)

    def write_rows(self) -> None:
        """The folder's lock keeps other writers away."""

    def make_rollouts(self, *, durability: Any) -> None:
        """Make the store of rollouts, unless it exists."""
        from rlhf_pipeline.run.processes.rollouts import make_rollouts  # needs NumPy, which other commands do not

        make_rollouts(self.root / filenames.ROLLOUTS, durability=durability)

    def rollouts(self, *, adds: bool = False) -> Rollouts:
        """Return the stored rollouts of the run."""
        from rlhf_pipeline.run.processes.rollouts import FolderRollouts

        return FolderRollouts(self.root / filenames.ROLLOUTS, adds=adds)

    def claims(self, name: str, work: ClaimableWork, store: object) -> Claims:
        """Return a collector's claims on work."""
        from rlhf_pipeline.run.processes.claims import FolderClaims

        return FolderClaims(self, name, work)

    def lease(self, name: str, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """The lock of the name is enough on one machine."""
        return nullcontext()

    def is_alive(self, name: str) -> bool:
        """Return whether a process holds the name's lock."""
        return is_alive(self.root / filenames.PROCESSES, name)

    def living(self) -> set[str]:
        """Return the names whose locks are held."""
        return {file.stem for file in (self.root / filenames.PROCESSES).glob("*.lock") if self.is_alive(file.stem)}

    def heartbeat_of(self, name: str) -> dict[str, Any]:
        """Return the last report of a process; empty if there is none."""
        return read_heartbeat(self.root / filenames.PROCESSES, name)

    def remove_copy(self, folder: Path) -> None:
        """The folder is no copy."""

    def traffic(self, store: object) -> Mapping[str, int]:
        """Nothing is sent."""
        return {}

    def ahead(self, read: Callable[[], T]) -> Callable[[], T]:
        """A read of a folder is quick: it is made when its result is asked for."""
        return read

    def flush(self) -> None:
        """Nothing is on its way."""
