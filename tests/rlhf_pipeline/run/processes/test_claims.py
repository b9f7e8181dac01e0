from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import obstore.store
import pytest

from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.local_place import LocalPlace
from rlhf_pipeline.run.processes.claims import FolderClaims, FreeRollouts, StalenessLimit
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.processes.rollouts import FolderRollouts, make_rollouts
from rlhf_pipeline.run.processes.weights import Published, publish, read_published, weights_folder
from rlhf_pipeline.run.remote.rollouts import BucketRollouts
from tests.processes import Children
from tests.rlhf_pipeline.small import stored_rollout
from trajectory_store.objects.remote import ObstoreBucket

ROOMY = StalenessLimit(steps_per_rollout=1, max_staleness=9)


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, True),  # used at version 4, sampled with version 4
        ({"num_waiting": 1}, False),  # used at version 5
        ({"num_waiting": 1, "max_staleness": 1}, True),
        ({"steps_per_rollout": 2, "max_staleness": 1}, True),  # last used at version 5
        ({"steps_per_rollout": 2, "num_waiting": 1, "max_staleness": 2}, False),  # last used at version 7
        ({"oldest_in_flight": 3, "num_waiting": 1, "max_staleness": 1}, False),  # the other one would be 2 old
        ({"oldest_in_flight": 3, "num_waiting": 1, "max_staleness": 2}, True),
    ],
)
def test_a_rollout_starts_only_if_nothing_gets_too_old(changes, starts):
    """The oldest trajectory at the last update that may see it, counted by hand."""
    limits = {name: changes.get(name, least) for name, least in (("steps_per_rollout", 1), ("max_staleness", 0))}
    now = {"version": 4, "next_version": 4, "num_waiting": 0, "oldest_in_flight": None}
    assert (
        StalenessLimit(**limits).may_start(**now | {name: changes[name] for name in changes.keys() & now.keys()})
        is starts
    )


@pytest.fixture
def rollouts(tmp_path):
    make_rollouts(tmp_path / "rollouts", durability="process")
    with FolderRollouts(tmp_path / "rollouts", adds=True) as opened:
        yield opened


@pytest.mark.parametrize("reward", [0.25, None])
def test_a_rollout_is_read_as_it_was_recorded(tmp_path, rollouts, reward):
    """A mean reward that is not known is None, as everywhere."""
    done = replace(stored_rollout(0), task_reward=reward)
    rollouts.add(done)
    assert rollouts.get(0) == done
    bucket = ObstoreBucket(obstore.store.MemoryStore(), "memory://run")
    BucketRollouts(bucket).add(done)
    assert BucketRollouts(bucket).get(0) == done


def hold(run_dir: Path) -> None:
    """Claim a rollout, write its number, and keep it."""
    opened = FolderRollouts(run_dir / "rollouts", adds=True)
    claims = FolderClaims(LocalPlace(run_dir), "other", FreeRollouts(opened, ROOMY))
    with process_lock(run_dir / "processes", "other"):
        sys.stdout.write(f"{claims.claim(Published(version=0, next_version=0, rollouts_done=0))}\n")
        time.sleep(600)


def test_what_a_killed_collector_held_comes_next(tmp_path: Path, children: Children, rollouts):
    """While it lives its rollout is passed over; killed, its rollout is the lowest free one again."""
    other = children.call(hold, tmp_path)
    other.until(lambda: "\n" in other.output())
    assert other.output() == "0\n"
    claims = FolderClaims(LocalPlace(tmp_path), "mine", FreeRollouts(rollouts, ROOMY))
    published = Published(version=0, next_version=0, rollouts_done=0)
    assert claims.claim(published) == 1
    rollouts.add(stored_rollout(1))
    claims.release(done=True)
    other.kill()
    assert claims.claim(published) == 0
    rollouts.add(stored_rollout(0))
    claims.release(done=True)
    assert claims.claim(published) == 2
    claims.close()


def test_published_weights_are_whole_and_the_oldest_go(tmp_path):
    """The pointer names a folder that is there; only the newest versions stay."""
    run, folder = RunFolder(tmp_path), tmp_path / "weights"
    assert read_published(run) is None
    for version in range(5):
        said = Published(version=version, next_version=version, rollouts_done=version, write_path={"kl": 0.5})
        out = publish(run, said, save=lambda path: (path / "model").write_text("w"))
        assert read_published(run) == out == replace(said, digest=out.digest)
        assert (weights_folder(run, out) / "model").is_file()
    assert sorted(path.name[:16] for path in folder.iterdir()) == [
        "latest.json",
        "version-00000002",
        "version-00000003",
        "version-00000004",
    ]
    publish(run, replace(said, version=2), save=lambda path: (path / "model").write_text("of another history"))
    assert [path.name[:16] for path in folder.glob("version-*")] == ["version-00000002"]
    assert json.loads((folder / "latest.json").read_text())["finished"] is None


def test_a_rollout_that_is_finished_while_it_is_claimed_is_not_claimed(tmp_path, rollouts):
    """Another collector stores its row, after it was seen to have claimed nothing and before the rows are read."""

    class Slow(FolderClaims):
        def _claimed(self):
            found = super()._claimed()
            with FolderRollouts(tmp_path / "rollouts", adds=True) as other:
                other.add(stored_rollout(0))
            return found

    claims = Slow(LocalPlace(tmp_path), "mine", FreeRollouts(rollouts, ROOMY))
    assert claims.claim(Published(version=0, next_version=0, rollouts_done=0)) == 1
    claims.close()


def test_a_note_of_an_earlier_process_of_the_name_claims_nothing(tmp_path, rollouts):
    """A collector that starts again has not claimed what its predecessor of the same name was killed over."""
    published = Published(version=0, next_version=0, rollouts_done=0)
    with process_lock(tmp_path / "processes", "first"):
        first = FolderClaims(LocalPlace(tmp_path), "first", FreeRollouts(rollouts, ROOMY))
        assert first.claim(published) == 0
        note = tmp_path / "claims" / "first.json"
        assert FolderClaims(LocalPlace(tmp_path), "second", FreeRollouts(rollouts, ROOMY)).claim(published) == 1
        note.write_text(json.dumps({**json.loads(note.read_text()), "pid": 2**22 + 1}))
        assert FolderClaims(LocalPlace(tmp_path), "second", FreeRollouts(rollouts, ROOMY)).claim(published) == 0
