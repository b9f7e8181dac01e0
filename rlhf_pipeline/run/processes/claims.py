"""Which collector does which work: every rollout once, whatever process is killed at whatever time.

Three facts, each kept where it cannot be wrong:

- *done*: a row in the `rollouts` store, written after the trajectories are committed. A crash between the two leaves
  trajectories without their row; the next collector that claims the rollout finds them in the store and adds the row.
- *in flight*: a note of its collector, `claims/NAME.json`, which counts while the process that wrote it has that name:
  the kernel drops the lock of the name with its process.
- *order*: claims are made under one lock and always take the lowest rollout that is neither done nor in flight, so
  the rollout of a dead collector is the next to be claimed.

Evaluations of published weights are claimed in the same way, by step; one is done when its rows are stored, or when the
learner, which reads them, no longer asks for it.

For an object store, where the kernel drops nothing, see `run.remote.rollouts`.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.processes.heartbeat import holder
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet
from trajectory_store.locks import locked
from trajectory_store.new_files import write_atomically

if TYPE_CHECKING:
    from rlhf_pipeline.run.local_place import LocalPlace
    from rlhf_pipeline.run.processes.weights import Published


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessLimit:
    """The limits that decide whether another rollout may start, so that collectors sample nothing to be discarded.

    Attributes:
        steps_per_rollout: optimizer steps on each rollout.
        max_staleness: the largest age, in optimizer steps, that the learner accepts.
    """

    steps_per_rollout: int
    max_staleness: int

    def may_start(self, *, version: int, next_version: int, num_waiting: int, oldest_in_flight: int | None) -> bool:
        """Return True if a rollout that starts now cannot make any trajectory too old to learn from.

        The learner takes rollouts in the order of arrival. At worst the new one, or the one in flight with the oldest
        weights, arrives last, after `num_waiting` others. Its last update is then at version
        `next_version + (num_waiting + 1) * steps_per_rollout - 1`; its age is that minus the version of its weights.

        Args:
            version: the version of the newest published weights, with which the new rollout would be sampled.
            next_version: the version at which the learner begins with the next waiting rollout.
            num_waiting: the number of rollouts that are stored and not learned from yet, or in flight.
            oldest_in_flight: the oldest version of the weights of a rollout in flight; None if there is none.

        >>> strict, now = StalenessLimit(steps_per_rollout=1, max_staleness=0), dict(version=4, next_version=4)
        >>> [strict.may_start(num_waiting=n, oldest_in_flight=None, **now) for n in (0, 1)]
        [True, False]
        """
        last_use = next_version + (num_waiting + 1) * self.steps_per_rollout - 1
        oldest = version if oldest_in_flight is None else min(version, oldest_in_flight)
        return last_use - oldest <= self.max_staleness


class ClaimableWork(ABC):
    """Numbered work that collectors share."""

    place: ClassVar[str]
    what: ClassVar[str]

    @abstractmethod
    def look(self, published: Published) -> None:
        """Find out what is done by now."""

    @abstractmethod
    def is_done(self, number: int) -> bool:
        """Return whether a piece was done at the last look."""

    @abstractmethod
    def free(self, published: Published, in_flight: Mapping[int, int]) -> int | None:
        """Return the lowest number that is neither done nor in flight, or None if it may not start yet."""

    def is_refused(self, published: Published, begun: int) -> bool:
        """Return whether nothing may start if all numbers below this one are done or in flight, without a look."""
        return False


class FreeRollouts(ClaimableWork):
    """The rollouts that are not stored."""

    place = filenames.CLAIMS
    what = "rollout"

    def __init__(self, rollouts: Rollouts, flow: StalenessLimit) -> None:
        self._rollouts = rollouts
        self._flow = flow
        self._done = RolloutSet()

    def look(self, published: Published) -> None:
        """Read the records that are new."""
        for rollout in self._rollouts.new(self._done):
            self._done.add(rollout)

    def is_done(self, number: int) -> bool:
        """Return whether the rollout has a record."""
        return number in self._done

    def free(self, published: Published, in_flight: Mapping[int, int]) -> int | None:
        """Return the lowest free rollout if none can get too old by it."""
        begun, oldest = len(self._done) + len(in_flight), min(in_flight.values(), default=None)
        return lowest_free(self._done, in_flight) if self._may_start(published, begun, oldest) else None

    def is_refused(self, published: Published, begun: int) -> bool:
        """Return whether so many rollouts are enough for now."""
        return not self._may_start(published, begun, None)

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


class RequestedEvaluations(ClaimableWork):
    """The steps whose weights the learner asks to evaluate."""

    place = f"{filenames.CLAIMS}/{filenames.EVALUATIONS}"
    what = "the evaluation of step"

    def __init__(self, stored: Callable[[], Container[int]]) -> None:
        self._stored = stored
        self._done: Container[int] = ()
        self._requested: set[int] = set()
        self._version = -1

    def look(self, published: Published) -> None:
        """Read which evaluations are new; the learner may not have seen them, as it waits for a rollout."""
        self._done = self._stored()
        self._requested, self._version = {*published.evaluate}, published.version

    def is_done(self, number: int) -> bool:
        """Return whether it is stored or no longer asked for; a later step is one that this process has not seen."""
        return number in self._done or (number <= self._version and number not in self._requested)

    def free(self, published: Published, in_flight: Mapping[int, int]) -> int | None:
        """Return the first step on which no collector works."""
        return min((step for step in self._requested - in_flight.keys() if step not in self._done), default=None)


class Claims(ABC):
    """One collector's claims on work."""

    is_first = False

    def __init__(self, name: str, work: ClaimableWork) -> None:
        self._name = name
        self.work = work

    @abstractmethod
    def claim(self, published: Published) -> int | None:
        """Take the lowest free number, or None if it may not start yet."""

    @abstractmethod
    def release(self, *, done: bool) -> None:
        """Release the claim."""

    @abstractmethod
    def close(self) -> None:
        """Release every claim."""


class FolderClaims(Claims):
    """Claims of a run in a folder."""

    def __init__(self, place: LocalPlace, name: str, work: ClaimableWork) -> None:
        super().__init__(name, work)
        self._place = place
        self._folder = place.root / work.place
        self._folder.mkdir(parents=True, exist_ok=True)
        self._note = self._folder / f"{name}.json"

    def close(self) -> None:
        """Release the claim."""
        self._note.unlink(missing_ok=True)

    def claim(self, published: Published) -> int | None:
        """Take the lowest free number, or None if it may not start yet."""
        with locked(self._folder / filenames.LOCK):
            claimed = self._claimed()
            self.work.look(published)  # after the claims: if that of a finished rollout is gone, its record is here
            in_flight = {number: version for number, version in claimed.items() if not self.work.is_done(number)}
            number = self.work.free(published, in_flight)
            if number is None:
                return None
            note = {"rollout": number, "version": published.version, "pid": os.getpid()}
            # Not synced: a power loss that takes its bytes ends its writer, too.
            write_atomically(self._note, json.dumps(note).encode(), sync=False)
            return number

    def release(self, *, done: bool) -> None:
        """Release the claim: the work is done, or free for the next try."""
        self.close()

    def _claimed(self) -> dict[int, int]:
        """Return what live collectors have claimed, each with the version of the newest weights then."""
        versions: dict[int, int] = {}
        for file in self._folder.glob("*.json"):
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                note = json.loads(file.read_bytes())
                processes = self._place.root / filenames.PROCESSES
                if note["pid"] == holder(processes, file.stem) and self._place.is_alive(file.stem):
                    versions[note["rollout"]] = note["version"]
        return versions


def lowest_free(done: RolloutSet, in_flight: Mapping[int, int]) -> int:
    """Return the lowest rollout that is neither done nor in flight."""
    lowest = done.lowest_missing
    while lowest in in_flight or lowest in done:
        lowest += 1
    return lowest
