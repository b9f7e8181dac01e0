"""Who collects which rollout: every rollout once, whoever is killed when.

Three facts, each kept where it cannot be wrong:

- *done*: a row in the `rollouts` store, written after the trajectories are committed. A crash between the two leaves
  trajectories without their row; whoever claims that rollout next finds them in the main store and adds the row.
- *in flight*: an exclusive lock on byte `r` of the file `claims/rollouts`. The kernel drops it with its process.
- *order*: claims are made under one lock and always take the lowest rollout that is neither done nor in flight, so
  what a dead collector left is the next thing that anyone takes up.

In an object store, where nothing is dropped with a process, they are `run.remote.rollouts`.
"""

from __future__ import annotations

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.run.processes.admission import may_start
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet
from rlhf_pipeline.run.processes.weights import Published


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """The limits that decide whether another rollout may start."""

    updates_per_rollout: int
    max_staleness: int


class Claims(ABC):
    """One collector's claims on rollouts.

    Args:
        name: the collector's name.
        rollouts: which are stored.
        flow: the limits.

    Attributes:
        is_first: nobody had claimed the rollout before, so that nothing of it can be in the store.
    """

    is_first = False

    def __init__(self, name: str, rollouts: Rollouts, flow: Flow) -> None:
        self._name = name
        self._rollouts = rollouts
        self._flow = flow
        self._held: int | None = None
        self._done = RolloutSet()

    @abstractmethod
    def claim(self, published: Published) -> int | None:
        """Take the lowest free rollout, or None if it may not start yet."""

    @abstractmethod
    def release(self, *, done: bool) -> None:
        """Release the claim.

        Args:
            done: whether the rollout is recorded as stored; else it is free for the next try.
        """

    @abstractmethod
    def close(self) -> None:
        """Release every claim."""

    def _read_done(self) -> RolloutSet:
        """Return the rollouts that are done."""
        for rollout in self._rollouts.new(self._done):
            self._done.add(rollout)
        return self._done

    def _may_start(self, published: Published, begun: int, oldest: int | None) -> bool:
        """Whether another rollout may start beside those that are done or in flight.

        Args:
            published: the newest weights, with which it would be sampled.
            begun: how many these are.
            oldest: the version of the oldest weights in flight.
        """
        return may_start(
            version=published.version,
            next_version=published.next_version,
            num_waiting=begun - published.rollouts_done,
            oldest_in_flight=oldest,
            updates_per_rollout=self._flow.updates_per_rollout,
            max_staleness=self._flow.max_staleness,
        )


class FolderClaims(Claims):
    """Claims of a run in a folder. One object per process: the byte locks belong to the process.

    Args:
        folder: the run's `claims` folder; made if absent.
        name: the collector's name.
        rollouts: which are stored.
        flow: the limits.
    """

    def __init__(self, folder: Path, name: str, rollouts: Rollouts, flow: Flow) -> None:
        super().__init__(name, rollouts, flow)
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        # Closing any descriptor of this file would drop every lock that this process holds on it: one for life.
        self._bytes = os.open(self._folder / "rollouts", os.O_RDWR | os.O_CREAT, 0o644)

    def close(self) -> None:
        """Release every claim."""
        os.close(self._bytes)

    def claim(self, published: Published) -> int | None:
        """Take the lowest free rollout, or None if it may not start yet."""
        with self._alone():
            while True:
                done = self._read_done()
                in_flight = self._in_flight(done)
                rollout = lowest_free(done, in_flight)
                if not self._may_start(published, len(done) + len(in_flight), min(in_flight.values(), default=None)):
                    return None
                fcntl.lockf(self._bytes, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rollout)
                # Whoever worked on it may have finished it after `done` was read and before its lock was asked for.
                if rollout not in self._read_done():
                    break
                fcntl.lockf(self._bytes, fcntl.LOCK_UN, 1, rollout)
            self._held = rollout
            # Only read together with the lock: what a dead collector wrote here says nothing.
            note = self._folder / f".{self._name}.tmp"
            note.write_text(json.dumps({"rollout": rollout, "version": published.version}), encoding="utf-8")
            note.replace(self._folder / f"{self._name}.json")
            return rollout

    def release(self, *, done: bool) -> None:
        """Release the claim: the rollout is done, or free for the next try."""
        if self._held is not None:
            fcntl.lockf(self._bytes, fcntl.LOCK_UN, 1, self._held)
            self._held = None

    def _in_flight(self, done: RolloutSet) -> dict[int, int]:
        """Return the rollouts that live collectors work on, each with the version of its weights."""
        flying: dict[int, int] = {}
        for file in self._folder.glob("*.json"):
            try:
                note = json.loads(file.read_text(encoding="utf-8"))
                rollout = note["rollout"]
            except (ValueError, TypeError):
                continue  # not synced: a power loss may have taken its bytes, and its writer with them
            # A rollout whose row is there is no longer in flight, although its collector may not have released it yet.
            if rollout not in done and self._is_locked(rollout):
                flying[rollout] = note["version"]
        return flying

    def _is_locked(self, rollout: int) -> bool:
        if rollout == self._held:
            return True
        try:
            fcntl.lockf(self._bytes, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rollout)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self._bytes, fcntl.LOCK_UN, 1, rollout)
        return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / "lock").open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def lowest_free(done: RolloutSet, in_flight: dict[int, int]) -> int:
    """Return the smallest rollout that is in neither."""
    lowest = done.lowest_missing
    while lowest in in_flight or lowest in done:
        lowest += 1
    return lowest
