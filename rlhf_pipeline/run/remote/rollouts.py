"""Rollouts of a run in an object store: which are stored, and which collector works on which."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rlhf_pipeline.errors import LeaseLostError
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.processes.claims import ClaimableWork, Claims
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet, StoredRollout
from trajectory_store import TrajectoryStore
from trajectory_store.objects.remote import ObstoreBucket

if TYPE_CHECKING:
    from rlhf_pipeline.run.processes.weights import Published
    from rlhf_pipeline.run.remote.mirror import Mirror

_BEGUN: Final = f"{filenames.ROLLOUTS}/begun"
_PAUSE_S: Final = 0.02
NO_OWNER: Final = ""
"""The owner of released claims."""


class BucketRollouts(Rollouts):
    """One object per rollout, put once; the learner takes the stored ones in the order of their numbers.

    That order wastes no more than the order of arrival: a new rollout takes the lowest free number, and the decision
    that it may start counts all lower ones that are not learned from yet.
    """

    def __init__(self, bucket: ObstoreBucket) -> None:
        self._bucket = bucket
        self._reported = RolloutSet()

    @staticmethod
    def begin(bucket: ObstoreBucket) -> None:
        """Mark the run as one of several processes."""
        bucket.put_once(_BEGUN, b"")

    def add(self, done: StoredRollout) -> None:
        """Put the record; if another collector was first, its record counts and is identical."""
        self._bucket.put_once(_key(done.rollout), json.dumps(asdict(done)).encode())

    def new(self, returned: RolloutSet) -> list[int]:
        """List the rollouts after the known ones."""
        first = max(returned.lowest_missing, self._reported.lowest_missing)
        keys = self._bucket.keys(f"{filenames.ROLLOUTS}/", _key(first - 1) if first else "")
        numbers = [int(key.rpartition("/")[2][:-5]) for key in keys if key.endswith(".json")]
        new_rollouts = [number for number in numbers if number not in returned and number not in self._reported]
        for number in new_rollouts:
            self._reported.add(number)
        return new_rollouts

    def get(self, rollout: int) -> StoredRollout | None:
        """Read a record."""
        raw = self._bucket.get(_key(rollout))
        return None if raw is None else StoredRollout(**json.loads(raw))


class LeasedClaims(Claims):
    """Claims in one object that is replaced by compare-and-swap; a claim counts while its collector's lease is renewed.

    A collector that seems dead may only be stalled. So its claim names the segment of the store that it appends to, and
    a collector that takes the claim over ends that segment first: a commit that was under way is found after that, or
    it is rejected. Before the stalled collector continues in a new segment, it must note the segment in its claim, and
    finds that the claim is gone.
    """

    def __init__(self, mirror: Mirror, name: str, work: ClaimableWork, store: TrajectoryStore) -> None:
        super().__init__(name, work)
        self._mirror = mirror
        self._key = f"{work.place}.json"
        self._store = store
        self._claimed: int | None = None
        store.on_segment(self._note_segment)

    def close(self) -> None:
        """Stop noting segments in claims."""
        self._store.on_segment(None)

    def claim(self, published: Published) -> int | None:
        """Take the lowest free number, or None if it may not start yet."""
        while True:
            claims, tag = self._read()
            living = self._mirror.living() if any(c["life"] != self._mirror.life for c in claims.values()) else set()
            living.discard(self._name)
            # If the owners of all claims are alive, every rollout claimed so far is done or in flight (this process's
            # own are done). That alone rejects most claims, without listing the stored rollouts.
            mine = (self._name, self._mirror.life)
            if all((c["owner"], c["life"]) == mine or c["owner"] in living for c in claims.values()):
                begun = max(map(int, claims), default=-1) + 1
                if self.work.is_refused(published, begun):
                    return None
            self.work.look(published)
            flying = {int(key): claim for key, claim in claims.items() if not self.work.is_done(int(key))}
            at_work = {r: c["version"] for r, c in flying.items() if c["owner"] in living}
            number = self.work.free(published, at_work)
            if number is None:
                return None
            former = flying.get(number, {"segments": []})
            claim = {
                "owner": self._name,
                "life": self._mirror.life,
                "version": published.version,
                "segments": [*former["segments"], *([] if self._store.segment is None else [self._store.segment])],
            }
            if self._replace({**flying, number: claim}, tag):
                break
        for segment in former["segments"]:
            if segment != self._store.segment:
                self._store.fence(segment)
        self.is_first = number not in flying
        self._claimed = number
        return number

    def release(self, *, done: bool) -> None:
        """Release the claim: the work is done, or free for the next try."""
        number, self._claimed = self._claimed, None
        if number is not None and not done:
            self._change(number)

    def _note_segment(self, segment: int) -> None:
        """Note in the claim the segment that is appended to from now on."""
        if self._claimed is not None and not self._change(self._claimed, segment=segment):
            raise LeaseLostError(
                f"{self.work.what} {self._claimed} was taken over by another collector, because this collector was "
                f"stalled for more than {self._mirror.leases.seconds:g} s. The samples of this collector are discarded."
            )

    def _change(self, number: int, *, segment: int | None = None) -> bool:
        """Give this process's claim back, or note a segment; return False if the claim is no longer its own."""
        while True:
            claims, tag = self._read()
            mine = claims.get(str(number))
            if mine is None or mine["life"] != self._mirror.life:
                return False
            if segment is None:  # the next owner looks for stored rows in its segments
                mine["owner"] = NO_OWNER
            else:
                mine["segments"] = [*mine["segments"], segment]
            if self._replace(claims, tag):
                return True

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """Return the claims of all collectors, by number, and the tag that `_replace` needs."""
        current = self._mirror.bucket.tagged(self._key)
        return ({}, None) if current is None else (json.loads(current.data)["claims"], current.tag)

    def _replace(self, claims: dict[Any, Any], tag: str | None) -> bool:
        """Try to write all claims; if another process was first, wait a moment, so that both make progress."""
        # The time makes its content unique, so that its tag is unique, too.
        record = {"by": f"{self._mirror.life} {time.time_ns()}", "claims": claims}
        if self._mirror.bucket.swap(self._key, json.dumps(record).encode(), tag) is not None:
            return True
        time.sleep(_PAUSE_S * random.random())
        return False


def _key(rollout: int) -> str:
    return f"{filenames.ROLLOUTS}/{rollout:012d}.json"
