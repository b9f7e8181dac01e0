"""Files that a power loss left empty, and processes that start at the same moment."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.local_place import LocalPlace
from rlhf_pipeline.run.processes.claims import FolderClaims, FreeRollouts, StalenessLimit
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.processes.rollouts import FolderRollouts, make_rollouts
from rlhf_pipeline.run.processes.run_files import at_work
from rlhf_pipeline.run.processes.weights import Published, publish, read_published, reopen, weights_folder

PUBLISHED = Published(version=0, next_version=0, rollouts_done=0)


@pytest.mark.parametrize("content", ["", "\0" * 40, '{"version": 3, "next'], ids=["empty", "zeros", "torn"])
def test_an_unsynced_pointer_after_a_power_loss(tmp_path: Path, content: str):
    """`latest.json` is not synced: where its bytes were lost nothing counts as published, and publishing goes on."""
    run = RunFolder(tmp_path)
    publish(run, PUBLISHED, save=lambda folder: None)
    (run.weights / "latest.json").write_text(content)
    assert read_published(run) is None
    assert publish(run, PUBLISHED, save=lambda folder: None) == read_published(run)


@pytest.mark.parametrize("content", ["", "\0" * 40, '{"rollout": 3'], ids=["empty", "zeros", "torn"])
def test_an_unsynced_note_after_a_power_loss(tmp_path: Path, content: str):
    """The note of a collector that is gone says nothing, whatever is in it."""
    make_rollouts(tmp_path / "rollouts", durability="process")
    with FolderRollouts(tmp_path / "rollouts", adds=True) as rollouts:
        claims = FolderClaims(
            LocalPlace(tmp_path),
            "collector-1",
            FreeRollouts(rollouts, StalenessLimit(steps_per_rollout=1, max_staleness=0)),
        )
        (tmp_path / "claims" / "collector-0.json").write_text(content)
        assert claims.claim(PUBLISHED) == 0
        claims.close()


def test_collectors_that_start_together_get_names_of_their_own(tmp_path: Path):
    """Without a name each of several collectors takes a free one, also where all look at the same moment."""
    num = 6
    begin, all_there = threading.Barrier(num), threading.Barrier(num)
    chosen: list[str] = []
    failed: list[Exception] = []

    def start() -> None:
        begin.wait()
        try:
            with ExitStack() as stack:
                chosen.append(stack.enter_context(at_work(RunFolder(tmp_path), None)).name)
                all_there.wait(15)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            failed.append(error)

    threads = [threading.Thread(target=start) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(chosen) == [f"collector-{number}" for number in range(num)]


def test_a_learner_that_comes_back_takes_the_end_back(tmp_path: Path):
    """Before it imports torch, so that collectors started beside it do not leave; a live learner's word stands."""
    ended = publish(RunFolder(tmp_path), replace(PUBLISHED, finished="steps"), save=lambda path: None)
    with process_lock(tmp_path / "processes", "learner"):
        reopen(RunFolder(tmp_path))
        assert read_published(RunFolder(tmp_path)) == ended
    reopen(RunFolder(tmp_path))
    assert read_published(RunFolder(tmp_path)) == replace(ended, finished=None)


def test_synced_weights_are_the_same_weights(tmp_path: Path):
    """With `sync` the pointer and the folder are what they are without it."""
    run = RunFolder(tmp_path)
    synced, plain = (
        publish(run, PUBLISHED, save=lambda path: (path / "model").write_text("w"), sync=sync) for sync in (True, False)
    )
    assert read_published(run) == synced == plain
    assert (weights_folder(run, synced) / "model").read_text() == "w"
