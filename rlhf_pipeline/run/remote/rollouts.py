"""Rollouts of a run in an object store: which are stored, and who works on which."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict
from typing import Any, Final

from rlhf_pipeline.errors import LeaseLostError
from rlhf_pipeline.run.processes.claims import Claims, Flow, lowest_free
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet, StoredRollout
from rlhf_pipeline.run.processes.weights import Published
from rlhf_pipeline.run.remote.medium import CLAIMS, BucketMedium
from trajectory_store import TrajectoryStore
from trajectory_store.objects.remote import ObstoreBucket

FOLDER: Final = "rollouts"
_BEGUN: Final = f"{FOLDER}/begun"
_PAUSE_S: Final = 0.02
NOBODY: Final = ""
"""Whose claims are that were given back."""


class BucketRollouts(Rollouts):
    """One object per rollout, put once; they are learned from in the order of their numbers, as far as they are there.

    That order wastes nothing that the order of arrival would not: a rollout that starts takes the lowest free number,
    and all lower ones that are not learned from were counted when it was decided that it may start.

    Args:
        bucket: where the run is.
    """

    def __init__(self, bucket: ObstoreBucket) -> None:
        self._bucket = bucket
        self._told = RolloutSet()

    @staticmethod
    def begin(bucket: ObstoreBucket) -> None:
        """Say that the run is one of several processes."""
        bucket.settle(_BEGUN, b"")

    def add(self, done: StoredRollout) -> None:
        """Put the record; where another collector was faster, that one's counts, and says the same."""
        self._bucket.settle(_key(done.rollout), json.dumps(asdict(done)).encode())

    def new(self, known: RolloutSet) -> list[int]:
        """List what is there behind all that is known."""
        first = max(known.lowest_missing, self._told.lowest_missing)
        keys = self._bucket.keys(f"{FOLDER}/", _key(first - 1) if first else "")
        numbers = [int(key.rpartition("/")[2][:-5]) for key in keys if key.endswith(".json")]
        found = [number for number in numbers if number not in known and number not in self._told]
        for number in found:
            self._told.add(number)
        return found

    def get(self, rollout: int) -> StoredRollout | None:
        """Read a record."""
        raw = self._bucket.get(_key(rollout))
        return None if raw is None else StoredRollout(**json.loads(raw))


class LeasedClaims(Claims):
    """Claims in one object that is replaced by compare-and-swap; one counts while its collector's lease is renewed.

    A collector that is taken for dead may only have stood still. So its claim names the segment of the store that it
    appends to, and whoever takes the claim over ends that segment first: a commit that was on its way is there by then,
    and is found, or is refused. Before it goes on in a new segment, a collector notes that one in its claim, and finds
    that the claim is gone.

    Args:
        medium: of the run.
        name: the collector's name.
        rollouts: which are stored.
        flow: the limits.
        store: where this collector appends trajectories.
    """

    def __init__(self, medium: BucketMedium, name: str, rollouts: Rollouts, flow: Flow, store: TrajectoryStore) -> None:
        super().__init__(name, rollouts, flow)
        self._medium = medium
        self._store = store
        self._held: int | None = None
        store.on_segment(self._note_segment)

    def close(self) -> None:
        """Append without claims."""
        self._store.on_segment(None)

    def claim(self, published: Published) -> int | None:
        """Take the lowest free rollout, or None if it may not start yet."""
        while True:
            claims, tag = self._read()
            living = self._medium.living() if any(c["life"] != self._medium.life for c in claims.values()) else set()
            living.discard(self._name)
            # If the owners of all claims are alive, every rollout claimed so far is done or at work (this process's own
            # are done). That alone refuses most claims, without listing what is stored.
            mine = (self._name, self._medium.life)
            if all((c["owner"], c["life"]) == mine or c["owner"] in living for c in claims.values()):
                begun = max(map(int, claims), default=-1) + 1
                if not self._may_start(published, begun, None):
                    return None
            done = self._read_done()
            flying = {int(key): claim for key, claim in claims.items() if int(key) not in done}
            at_work = {r: c["version"] for r, c in flying.items() if c["owner"] in living}
            rollout = lowest_free(done, at_work)
            if not self._may_start(published, len(done) + len(at_work), min(at_work.values(), default=None)):
                return None
            former = flying.get(rollout, {"segments": []})
            claim = {
                "owner": self._name,
                "life": self._medium.life,
                "version": published.version,
                "segments": [*former["segments"], *([] if self._store.segment is None else [self._store.segment])],
            }
            if self._replace({**flying, rollout: claim}, tag):
                break
        for segment in former["segments"]:
            if segment != self._store.segment:
                self._store.fence(segment)
        self.is_first = rollout not in flying
        self._held = rollout
        return rollout

    def release(self, *, done: bool) -> None:
        """Release the claim: the rollout is done, which its record says, or free for the next try."""
        rollout, self._held = self._held, None
        if rollout is not None and not done:
            self._change(rollout)

    def _note_segment(self, segment: int) -> None:
        """Say which segment is appended to from now on.

        Raises:
            LeaseLostError: another collector has taken the rollout over.
        """
        if self._held is not None and not self._change(self._held, segment=segment):
            raise LeaseLostError(
                f"rollout {self._held} was taken over by another collector: this one stood still for more than "
                f"{self._medium.leases.seconds:g} s. What it had sampled is dropped."
            )

    def _change(self, rollout: int, *, segment: int | None = None) -> bool:
        """Give this process's claim back, or note a segment; returns False where it is no longer its own."""
        while True:
            claims, tag = self._read()
            mine = claims.get(str(rollout))
            if mine is None or mine["life"] != self._medium.life:
                return False
            if segment is None:  # what it has stored is looked for there by the next one
                mine["owner"] = NOBODY
            else:
                mine["segments"] = [*mine["segments"], segment]
            if self._replace(claims, tag):
                return True

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """The claims of all collectors, by rollout, and the tag that `_replace` wants."""
        found = self._medium.bucket.tagged(CLAIMS)
        return ({}, None) if found is None else (json.loads(found.data)["claims"], found.tag)

    def _replace(self, claims: dict[Any, Any], tag: str | None) -> bool:
        """Try to write all claims; after another process was first, wait a moment, so that both get on."""
        # The time makes it another content than any before, so that its tag is its own.
        said = {"by": f"{self._medium.life} {time.time_ns()}", "claims": claims}
        if self._medium.bucket.swap(CLAIMS, json.dumps(said).encode(), tag) is not None:
            return True
        time.sleep(_PAUSE_S * random.random())
        return False


def _key(rollout: int) -> str:
    return f"{FOLDER}/{rollout:012d}.json"
