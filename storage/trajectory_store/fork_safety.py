"""Locks and forks: a child inherits no lock that another thread held, and no state that was half-changed.

A call that an exception ends leaves no lock behind.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from typing import Protocol

PATIENCE_S = 60.0
"""The time for which a fork waits for calls in other threads to end; after that, it continues without them."""


class Lock(Protocol):
    """The locks of `threading`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


_locks: weakref.WeakKeyDictionary[object, tuple[int, tuple[Lock, ...]]] = weakref.WeakKeyDictionary()
_locks_before_fork: list[Lock] = []


def guard(owner: object, rank: int, *locks: Lock) -> None:
    """Hold these locks, all of them RLocks, during every fork, for as long as their owner lives."""
    _locks[owner] = rank, locks


def release_locks() -> None:
    """Release the locks that this thread holds, at the end of a call that holds none.

    An exception that arrives in the last line of a `with` block skips the release.
    """
    for _, locks in list(_locks.values()):
        for lock in locks:
            with suppress(RuntimeError):  # this thread does not hold it
                while True:
                    lock.release()


def _before() -> None:
    """Take all locks in the order in which calls take them; if that does not get on, give all back and try again."""
    until, patience = time.monotonic() + PATIENCE_S, 0.05
    while time.monotonic() < until:
        locks = _all_locks()
        for lock in locks:
            if not lock.acquire(timeout=patience):
                break
            _locks_before_fork.append(lock)
        else:
            if _all_locks() == locks:  # no new one, which another thread may hold
                return
        _release()
        patience *= 1.5


def _all_locks() -> list[Lock]:
    return [lock for _, locks in sorted(_locks.values(), key=lambda guarded: guarded[0]) for lock in locks]


def _release() -> None:
    while _locks_before_fork:
        _locks_before_fork.pop().release()


os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_release)
