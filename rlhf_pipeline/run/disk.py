"""The disk space of a run, whether it suffices for another day, and whether its budget is used. Imports no torch."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlhf_pipeline.errors import RunStorageError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, below
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store.errors import WriteFailedError
from trajectory_store.fs import disk_bytes

_LEAST_FREE: Final = 10**9
_DAY_H: Final = 24.0
_MEASURE_EVERY_S: Final = 60.0
_REMEMBERED: Final = 60
"""The number of measurements from which a rate is computed: one hour."""
_LEAST_S: Final = 120.0
"""A shorter time cannot predict a day."""


def disk_usage(place: Address) -> int:
    """Return the bytes that a folder takes on disk, or the objects at a URL; holes in sparse files do not count."""
    if not isinstance(place, Path):
        from trajectory_store.objects.remote import ObstoreBucket, open_bucket

        bucket = open_bucket(place, durable=False)
        return bucket.size() if isinstance(bucket, ObstoreBucket) else 0
    return disk_bytes(place)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunUsage:
    """The disk space that a run uses, in bytes."""

    growing: int
    """Without checkpoints: a run always keeps `learn.keep_checkpoints` of them, so they do not grow."""
    checkpoints: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.growing + self.checkpoints


def run_usage(run: Address) -> RunUsage:
    """Return what a run takes on disk, at a folder or a URL."""
    checkpoints = disk_usage(below(run, filenames.CHECKPOINTS))
    return RunUsage(growing=disk_usage(run) - checkpoints, checkpoints=checkpoints)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpace:
    """How much a run takes on disk, and how much more it may."""

    free: int
    """Free space on the disk, in bytes."""
    used: int
    """Space that the run uses, in bytes."""
    allowed: int | None
    """`buffer.max_bytes`, the maximum that the run may use; None allows all free space."""

    @property
    def left(self) -> int:
        """Number of bytes until the disk is full or the limit is reached."""
        return self.free if self.allowed is None else min(self.free, max(self.allowed - self.used, 0))

    def warning(self, bytes_per_hour: float | None) -> str | None:
        """Return a sentence if there is hardly space left, or not for a day at this rate; else None.

        >>> DiskSpace(free=6 * 10**9, used=0, allowed=None).warning(5e8)
        '6.0 GB are free, enough for 12 h at the current rate (0.50 GB an hour)'
        >>> DiskSpace(free=10**12, used=9 * 10**9, allowed=10**10).warning(5e8)
        '1.0 GB of buffer.max_bytes are left, enough for 2 h at the current rate (0.50 GB an hour)'
        >>> DiskSpace(free=10**12, used=0, allowed=None).warning(5e8) is None
        True
        """
        hours = self._hours(bytes_per_hour)
        by_budget = self.left < self.free
        if hours >= _DAY_H and self.left > 0 and (by_budget or self.free >= _LEAST_FREE):
            return None
        space = f"{self.left / 1e9:.1f} GB {'of buffer.max_bytes are left' if by_budget else 'are free'}"
        if hours >= _DAY_H:
            return space
        return f"{space}, enough for {hours:.0f} h at the current rate ({(bytes_per_hour or 0.0) / 1e9:.2f} GB an hour)"

    def is_urgent(self, bytes_per_hour: float | None) -> bool:
        """Return whether there is no space left, or not for an hour at this rate.

        >>> [DiskSpace(free=free, used=0, allowed=None).is_urgent(5e8) for free in (10**9, 10**8)]
        [False, True]
        """
        return self.left <= 0 or self._hours(bytes_per_hour) < 1.0

    def _hours(self, bytes_per_hour: float | None) -> float:
        return self.left / bytes_per_hour if bytes_per_hour and bytes_per_hour > 0 else float("inf")


class DiskWatch:
    """Counts what a run takes, warns a day ahead, and stops the run before it takes more than its budget.

    The folder is measured once a minute. In between, what the run has written since then is added: a commit is known at
    once, however many files the folder has. The rate is that of what grows with the run, see `RunUsage`.

    Args:
        folder: the run folder.
        allowed: see `DiskSpace`.
        on_notice: takes a warning.
        written: returns a running count of the bytes of trajectories and lines; only its increase matters.
        clock: seconds, for a test.
    """

    def __init__(
        self,
        folder: Path,
        allowed: int | None,
        on_notice: Callable[[str], None],
        *,
        written: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._allowed = allowed
        self._on_notice = on_notice
        self._written = written
        self._clock = clock
        self._next = clock()
        self._samples: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self._has_warned = False
        self._growing = self._checkpoints = self._newest_checkpoint = 0
        """Bytes at the last measurement: without checkpoints, of all checkpoints, and of the newest checkpoint."""
        self._written_then = self._written_before = written()
        self._most_at_once = 0
        """The maximum number of bytes that were written between two measurements."""

    @property
    def used(self) -> int:
        """The space that the run uses, in bytes: the last measurement and everything written since."""
        return self._growing + self._checkpoints + self._written() - self._written_then

    def look(self) -> None:
        """Compare what the run takes with its budget; call it after each step. Once a minute the folder is measured.

        Raises:
            RunStorageError: the run would take more than it may, with a step like those before and its checkpoint.
        """
        now = self._clock()
        is_due = now >= self._next
        if is_due:
            self._next = now + _MEASURE_EVERY_S
            usage = run_usage(self._folder)
            self._growing, self._checkpoints, self._written_then = usage.growing, usage.checkpoints, self._written()
        used, written = self.used, self._written()
        self._most_at_once = max(self._most_at_once, written - self._written_before)
        self._written_before = written
        reserve = self._most_at_once + self._newest_checkpoint
        if self._allowed is not None and used + reserve > self._allowed:
            raise RunStorageError(
                f"{self._folder} uses {used:,} bytes; one more step and its checkpoint need up to {reserve:,} bytes, "
                f"but buffer.max_bytes is {self._allowed:,}. The run is saved. To continue with a higher limit: "
                f"rlhf-pipeline run --resume --out {typed(self._folder)} --set "
                f"buffer.max_bytes={2 * (used + reserve)}"
            )
        if is_due:
            self._warn(now, used)

    def note_checkpoint(self, path: Path) -> None:
        """Count the checkpoints again, after one was written and others were dropped.

        Args:
            path: of the one that was written.
        """
        self._checkpoints = disk_usage(path.parent)
        self._newest_checkpoint = disk_usage(path)

    def _warn(self, now: float, used: int) -> None:
        space = DiskSpace(free=shutil.disk_usage(self._folder).free, used=used, allowed=self._allowed)
        self._samples.append((now, self._growing))
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        rate = (after - before) / (last - first) * 3600.0 if last - first >= _LEAST_S else None
        warning = space.warning(rate)
        if warning is not None and not self._has_warned:
            self._on_notice(f"the disk: {warning}.")
        self._has_warned = warning is not None


@contextmanager
def named_disk_errors(run: RunFolder) -> Iterator[None]:
    """Turn a bare OSError of the folder's own files into an error that states what is safe and what to do."""
    try:
        yield
    except OSError as error:
        in_store = isinstance(error, WriteFailedError)
        if type(error).__module__ != "builtins" and not in_store:
            raise  # errors of this package and of the store have the next command already
        if not in_store and not _is_about_the_folder(run, error):
            raise
        if isinstance(run.address, Path) and not run.path.is_dir():
            raise RunStorageError(
                f"the run folder {run.address} no longer exists: it was moved or removed while the run was writing to "
                "it. Move it back, or continue the run at its new path: rlhf-pipeline run --resume --out NEW_FOLDER"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
            advice = "Choose a writable folder: --out OTHER_FOLDER."
        else:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = (
                "Every stored trajectory and every finished checkpoint is intact. "
                f"{'Free disk space' if full else 'Fix the problem'}, then repeat the command with --resume."
            )
        raise RunStorageError(f"the run folder {run.address} cannot be written to: {error}. {advice}") from error


def _is_about_the_folder(run: RunFolder, error: OSError) -> bool:
    """Return whether an error is one of writing here: an error of a disk, or one that names a file of the run."""
    if error.filename is None:
        return error.errno is None or error.errno in _OF_A_DISK
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(run.path.absolute())


_OF_A_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE})
"""Error numbers that a write without a file name can raise."""
