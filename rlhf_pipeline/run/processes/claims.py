"""Which collector collects which rollout: every rollout once, whatever process is killed at whatever time.

Three facts, each kept where it cannot be wrong:

- *done*: a row in the `rollouts` store, written after the trajectories are committed. A crash between the two leaves
  trajectories without their row; the next collector that claims the rollout finds them in the store and adds the row.
- *in flight*: a note of its collector, `claims/NAME.json`, which counts while the process that wrote it has that name:
  the kernel drops the lock of the name with its process.
- *order*: claims are made under one lock and always take the lowest rollout that is neither done nor in flight, so
  the rollout of a dead collector is the next to be claimed.

For an object store, where the kernel drops nothing, see `run.remote.rollouts`.
"""

from __future__ import annotations

import fcntl
import json
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.files import write_atomically
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import holder
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet
from rlhf_pipeline.run.processes.weights import Published


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """The limits that decide whether another rollout may start, so that collectors sample nothing to be discarded.

    Attributes:
        updates_per_rollout: optimizer steps on each rollout.
        max_staleness: the largest age, in optimizer steps, that the learner accepts.
    """

    updates_per_rollout: int
    max_staleness: int

    def may_start(self, *, version: int, next_version: int, num_waiting: int, oldest_in_flight: int | None) -> bool:
        """Return True if a rollout that starts now cannot make any trajectory too old to learn from.

        The learner takes rollouts in the order of arrival. At worst the new one, or the one in flight with the oldest
        weights, arrives last, after `num_waiting` others. Its last update is then at version
        `next_version + (num_waiting + 1) * updates_per_rollout - 1`; its age is that minus the version of its weights.

        Args:
            version: the version of the newest published weights, with which the new rollout would be sampled.
            next_version: the version at which the learner begins with the next waiting rollout.
            num_waiting: the number of rollouts that are stored and not learned from yet, or in flight.
            oldest_in_flight: the oldest version of the weights of a rollout in flight; None if there is none.

        >>> strict, now = Flow(updates_per_rollout=1, max_staleness=0), dict(version=4, next_version=4)
        >>> [strict.may_start(num_waiting=n, oldest_in_flight=None, **now) for n in (0, 1)]
        [True, False]
        """
        last_use = next_version + (num_waiting + 1) * self.updates_per_rollout - 1
        oldest = version if oldest_in_flight is None else min(version, oldest_in_flight)
        return last_use - oldest <= self.max_staleness


class Claims(ABC):
    """One collector's claims on rollouts.

    Args:
        name: the collector's name.
        rollouts: the stored rollouts.
        flow: the limits.

    Attributes:
        is_first: no collector had claimed the rollout before, so none of its trajectories can be in the store.
    """

    is_first = False

    def __init__(self, name: str, rollouts: Rollouts, flow: Flow) -> None:
        self._name = name
        self._rollouts = rollouts
        self._flow = flow
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
        """Return whether another rollout may start beside those done or in flight, which `begun` counts.

        It would be sampled with the `published` weights; `oldest` is the version of the oldest weights in flight.
        """
        return self._flow.may_start(
            version=published.version,
            next_version=published.next_version,
            num_waiting=begun - published.rollouts_done,
            oldest_in_flight=oldest,
        )


class FolderClaims(Claims):
    """Claims of a run in a folder.

    Args:
        run: the run folder.
        name: the collector's name, which this process holds.
        rollouts: the stored rollouts.
        flow: the limits.
    """

    def __init__(self, run: RunFolder, name: str, rollouts: Rollouts, flow: Flow) -> None:
        super().__init__(name, rollouts, flow)
        self._run = run
        run.claims.mkdir(parents=True, exist_ok=True)
        self._note = run.claims / f"{name}.json"

    def close(self) -> None:
        """Release the claim."""
        self._note.unlink(missing_ok=True)

    def claim(self, published: Published) -> int | None:
        """Take the lowest free rollout, or None if it may not start yet."""
        with (self._run.claims / filenames.LOCK).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            claimed = self._claimed()
            done = self._read_done()  # after the claims: if that of a finished rollout is gone, its record is here
            in_flight = {rollout: version for rollout, version in claimed.items() if rollout not in done}
            rollout = lowest_free(done, in_flight)
            if not self._may_start(published, len(done) + len(in_flight), min(in_flight.values(), default=None)):
                return None
            note = {"rollout": rollout, "version": published.version, "pid": os.getpid()}
            # Not synced: a power loss that takes its bytes ends its writer, too.
            write_atomically(self._note, json.dumps(note).encode(), sync=False)
            return rollout

    def release(self, *, done: bool) -> None:
        """Release the claim: the rollout is done, or free for the next try."""
        self.close()

    def _claimed(self) -> dict[int, int]:
        """Return the rollouts that live collectors have claimed, each with the version of its weights."""
        found: dict[int, int] = {}
        for file in self._run.claims.glob("*.json"):
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                note = json.loads(file.read_bytes())
                if note["pid"] == holder(self._run.processes, file.stem) and self._run.is_alive(file.stem):
                    found[note["rollout"]] = note["version"]
        return found


def lowest_free(done: RolloutSet, in_flight: dict[int, int]) -> int:
    """Return the lowest rollout that is neither done nor in flight."""
    lowest = done.lowest_missing
    while lowest in in_flight or lowest in done:
        lowest += 1
    return lowest
