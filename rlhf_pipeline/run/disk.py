"""What a run takes on disk, whether there is room for a day more, and whether its budget is used. Imports no torch."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlhf_pipeline.errors import RunStorageError, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, below
from trajectory_store.fs import disk_bytes

_LEAST_FREE: Final = 10**9
_DAY_H: Final = 24.0
_LOOK_EVERY_S: Final = 60.0
_REMEMBERED: Final = 60
"""Looks that a rate is taken from: those of an hour."""
_LEAST_S: Final = 120.0
"""A shorter time says nothing about a day."""


def disk_usage(place: Address) -> int:
    """Return the bytes that a folder takes on disk, or the objects at a URL; holes in sparse files do not count."""
    if not isinstance(place, Path):
        from trajectory_store.objects.remote import ObstoreBucket, open_bucket

        bucket = open_bucket(place, durable=False)
        return bucket.size() if isinstance(bucket, ObstoreBucket) else 0
    return disk_bytes(place)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunUsage:
    """The bytes that a run takes on disk."""

    total: int
    growing: int
    """Without checkpoints: `learn.keep_checkpoints` of them stay, however long a run goes on, so they are no rate."""


def run_usage(run: Address) -> RunUsage:
    """Return what a run takes on disk, at a folder or a URL."""
    total = disk_usage(run)
    return RunUsage(total=total, growing=total - disk_usage(below(run, filenames.CHECKPOINTS)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much a run takes on disk, and how much more it may."""

    free: int
    """Bytes that are free on the disk."""
    used: int
    """Bytes that the run takes."""
    allowed: int | None
    """`buffer.max_bytes`, the most that it may take; None for all that is free."""

    @property
    def left(self) -> int:
        """Bytes until the disk is full or the budget used up."""
        return self.free if self.allowed is None else min(self.free, max(self.allowed - self.used, 0))

    def warning(self, bytes_per_hour: float | None) -> str | None:
        """Return a sentence if there is hardly room left, or not for a day at this rate; else None.

        >>> Room(free=6 * 10**9, used=0, allowed=None).warning(5e8)
        '6.0 GB are free, at the present rate (0.50 GB an hour) for 12 h'
        >>> Room(free=10**12, used=9 * 10**9, allowed=10**10).warning(5e8)
        '1.0 GB of buffer.max_bytes are left, at the present rate (0.50 GB an hour) for 2 h'
        >>> Room(free=10**12, used=0, allowed=None).warning(5e8) is None
        True
        """
        hours = self.left / bytes_per_hour if bytes_per_hour and bytes_per_hour > 0 else float("inf")
        by_budget = self.left < self.free
        if hours >= _DAY_H and (by_budget or self.free >= _LEAST_FREE):
            return None
        space = f"{self.left / 1e9:.1f} GB {'of buffer.max_bytes are left' if by_budget else 'are free'}"
        if hours >= _DAY_H:
            return space
        return f"{space}, at the present rate ({(bytes_per_hour or 0.0) / 1e9:.2f} GB an hour) for {hours:.0f} h"


class DiskWatch:
    """Looks now and then at the room of a run; says once that a day is left, and stops it where its budget is used up.

    The rate is that of what grows with the run, see `RunUsage`.

    Args:
        folder: the run folder.
        allowed: see `Room`.
        say: takes a warning.
        clock: seconds, for a test.
    """

    def __init__(
        self,
        folder: Path,
        allowed: int | None,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._allowed = allowed
        self._say = say
        self._clock = clock
        self._next = clock()
        self._seen: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self._has_warned = False

    def look(self) -> None:
        """Look, if the last look is a minute ago.

        Raises:
            RunStorageError: the run takes more than it may.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _LOOK_EVERY_S
        usage = run_usage(self._folder)
        room = Room(free=shutil.disk_usage(self._folder).free, used=usage.total, allowed=self._allowed)
        if room.allowed is not None and room.used > room.allowed:
            raise RunStorageError(
                f"{self._folder} takes {room.used:,} bytes, and buffer.max_bytes is {room.allowed:,}. Everything is "
                f"saved. Go on with more: rlhf-pipeline run --resume --out {typed(self._folder)} "
                f"--set buffer.max_bytes={2 * room.used}"
            )
        self._seen.append((now, usage.growing))
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        rate = (after - before) / (last - first) * 3600.0 if last - first >= _LEAST_S else None
        warning = room.warning(rate)
        if warning is not None and not self._has_warned:
            self._say(f"the disk: {warning}.")
        self._has_warned = warning is not None
