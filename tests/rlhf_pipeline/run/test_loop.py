"""The loop of every run: when it stops, what it saves, and what it tells, whatever its batches come from."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from threading import Event as Gate
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import Pipeline
from rlhf_pipeline.errors import RunStorageError, StopAskedError
from rlhf_pipeline.learner.host_copies import HostCopies
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.state import LearnerState
from rlhf_pipeline.run.build import build_models, build_parts
from rlhf_pipeline.run.checkpoint import list_checkpoints, step_of
from rlhf_pipeline.run.disk import DiskWatch
from rlhf_pipeline.run.events import Event, EventHandler, Notice, RunStarted, StepDone, ignore_events
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.loop import Loop, Progress, Source, StepBatch
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.signals import StopRequest
from rlhf_pipeline.run.sources import LocalRollouts
from tests.moments import Call, at_call, fails
from tests.rlhf_pipeline.small import leave_memory, tiny, weights

PIPELINE = tiny(collect__prompts_per_rollout="2", learn__steps="5", learn__checkpoint_every="2", learn__epochs="1")
"""Five steps of a rollout each; checkpoints of steps 0, 2, 4 and the last."""


class Told(Source):
    """Rollouts made here, with what a test changes of a step's batch."""

    def __init__(self, made: Source, change: Callable[[int, StepBatch], StepBatch | None]) -> None:
        self._made = made
        self._change = change
        self.samples_again = made.samples_again

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        found = self._made.next(step, stop)
        assert found is not None
        return self._change(step, found)

    def begins(self, step: int) -> bool:
        return self._made.begins(step)

    def state(self) -> dict[str, Any]:
        return self._made.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._made.load_state(state)


class Looked:
    """Evaluations that are due after every step; what they give is the test's."""

    def __init__(
        self, figures: Callable[[int], dict[str, float]], *, kept: tuple[int, ...] = (), ends: bool = True
    ) -> None:
        self._figures, self._kept, self._ends = figures, set(kept), ends

    def after(self, step: int, stop: StopRequest) -> dict[str, float]:
        return self._figures(step)

    def retained_steps(self, step: int) -> set[int]:
        return self._kept

    def wait(self, stop: StopRequest) -> bool:
        return self._ends

    def sync(self) -> None: ...


@contextmanager
def loop_in(
    folder: Path,
    pipeline: Pipeline = PIPELINE,
    *,
    change: Callable[[int, StepBatch], StepBatch | None] = lambda step, batch: batch,
    last: int | None = None,
    on_event: EventHandler = ignore_events,
    **options: Any,
) -> Iterator[Loop]:
    """Yield the loop of a run that is begun, or gone on with."""
    run, setup = RunFolder(folder), Setup(pipeline=pipeline)
    run.path.mkdir(exist_ok=True)
    if not run.record.exists:
        run.record.write(setup)
    with build_parts(pipeline, build_models(pipeline, seed=0, device="cpu"), run=run, seed=0) as parts:
        source = Told(LocalRollouts(pipeline, parts, on_event), change)
        source.last = last
        loop = Loop(setup, run, parts.learner, source, stop=StopRequest(), on_event=on_event, **options)
        loop.restore()
        yield loop


def saved(folder: Path) -> list[int]:
    """The steps whose checkpoints are there."""
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def lines(folder: Path) -> list[int]:
    """The steps that have a line of metrics; the ledger has the same."""
    run = RunFolder(folder)
    found = [row["step"] for row in run.metrics]
    assert found == [row["step"] for row in run.ledger]
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with loop_in(folder) as loop:
        assert loop.run() == "steps"
    return folder


def test_each_step_is_reported_once_with_the_line_that_is_on_disk(tmp_path):
    """The start, then every step as soon as its line is written; `after` hears the number of steps, and the end."""
    heard: list[Event] = []
    said: list[tuple[int, str | None]] = []

    def hear(event: Event) -> None:
        heard.append(event)
        if isinstance(event, StepDone):
            written = RunFolder(tmp_path / "run").metrics[-1]
            assert written == {name: value for name, value in event.metrics.items() if value == value is not None}

    with loop_in(tmp_path / "run", on_event=hear, after=lambda step, reason: said.append((step, reason))) as loop:
        assert loop.run() == "steps"
        finished = loop.finished("steps", 40)
    assert isinstance(heard[0], RunStarted)
    assert (heard[0].first_step, heard[0].total_steps) == (0, 5)
    assert [event.step for event in heard if isinstance(event, StepDone)] == [1, 2, 3, 4, 5]
    assert said == [(0, None), (1, None), (2, None), (3, None), (4, None), (5, None), (5, "steps")]
    rewards = [row["task_reward"] for row in RunFolder(tmp_path / "run").metrics]
    assert (finished.steps, finished.first_reward, finished.last_reward) == (5, rewards[0], rewards[-1])


def test_a_signal_ends_after_the_step_with_a_checkpoint(straight, tmp_path):
    """Step 3 is finished and saved though no checkpoint is due, and the run that goes on ends like the straight one."""
    said: list[tuple[int, str | None]] = []

    def ask(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            loop.stop.signal_number = 15

    with loop_in(tmp_path / "run", on_event=ask, after=lambda *told: said.append(told)) as loop:
        assert loop.run() == "interrupted"
    assert said[-1] == (3, "interrupted")
    assert lines(tmp_path / "run") == [1, 2, 3]
    assert saved(tmp_path / "run")[-1] == 3
    with loop_in(tmp_path / "run") as loop:
        assert loop.progress.step == 3
        assert loop.run() == "steps"
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert weights(tmp_path / "run") == weights(straight)


def test_a_signal_during_the_last_step_leaves_a_finished_run(tmp_path):
    """There is nothing to go on with, so it is not called interrupted."""

    def ask(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            loop.stop.signal_number = 15

    with loop_in(tmp_path / "run", last=2, on_event=ask) as loop:
        assert loop.run() == "steps"
    assert lines(tmp_path / "run") == [1, 2]


def test_a_signal_while_there_is_no_batch_ends_before_the_step(tmp_path):
    """A source that gives none takes no step, and what was learned so far is saved."""
    with loop_in(tmp_path / "run", change=lambda step, batch: batch if step < 4 else None) as loop:
        assert loop.run() == "interrupted"
    assert lines(tmp_path / "run") == [1, 2, 3]
    assert saved(tmp_path / "run")[-1] == 3


def test_the_target_is_the_mean_of_the_last_rollouts_and_stops_between_them(tmp_path):
    """0.5, 1.0, 0.8 reach 0.9 over two rollouts; of two steps a rollout the second is taken first."""
    rewards = {1: 0.5, 3: 1.0, 5: 0.8}

    def reward(step: int, batch: StepBatch) -> StepBatch:
        assert (batch.task_reward is None) is (step not in rewards)
        return StepBatch(task_reward=rewards.get(step), about=batch.about)

    pipeline = tiny(learn__steps="9", learn__stop_at_reward="0.9", learn__stop_window="2")
    with loop_in(tmp_path / "run", pipeline, change=reward) as loop:
        assert loop.run() == "target"
        assert loop.progress.recent_rewards == [1.0, 0.8]
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert saved(tmp_path / "run")[-1] == 6
    with loop_in(tmp_path / "run", pipeline) as loop:
        assert loop.run() == "target"  # it is still reached: no step more
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_a_source_that_ends_ends_the_run(tmp_path):
    """Its last step is the run's, if that is less than `learn.steps`."""
    with loop_in(tmp_path / "run", last=3) as loop:
        assert loop.total_steps == 3
        assert loop.run() == "steps"
    assert lines(tmp_path / "run") == [1, 2, 3]


def test_a_step_without_rows_counts_and_moves_nothing(tmp_path):
    """It has a line in ledger and metrics, and the weights stay as they were, bit for bit."""
    none = np.zeros(0, np.int64)

    def empty(step: int, batch: StepBatch) -> StepBatch:
        return batch if step < 3 else StepBatch(task_reward=batch.task_reward, row_ids=none, ages=none)

    pipeline = tiny(
        collect__prompts_per_rollout="2", learn__steps="4", learn__checkpoint_every="2", learn__epochs="1",
        learn__keep_checkpoints="9",
    )  # fmt: skip
    with loop_in(tmp_path / "run", pipeline, change=empty) as loop:
        assert loop.run() == "steps"
    run = RunFolder(tmp_path / "run")
    assert [len(row["row_ids"]) for row in run.ledger] == [8, 16, 0, 0]
    assert lines(run.path) == [1, 2, 3, 4]
    two, four = ((run.checkpoints / f"step-{step:08d}" / "model.safetensors").read_bytes() for step in (2, 4))
    assert two == four


def test_checkpoints_are_those_that_are_due_and_those_of_the_best_weights(tmp_path):
    """Every second one and the last, of which two are kept; an evaluator keeps others beside them."""
    figures = Looked(lambda step: {"evaluation/reward": step / 8}, kept=(1,))
    pipeline = tiny(
        collect__prompts_per_rollout="2", learn__steps="5", learn__checkpoint_every="2", learn__epochs="1",
        learn__keep_checkpoints="2",
    )  # fmt: skip
    with loop_in(tmp_path / "run", pipeline, evaluator=figures) as loop:
        assert loop.run() == "steps"
    assert saved(tmp_path / "run") == [1, 4, 5]
    found = [row["evaluation/reward"] for row in RunFolder(tmp_path / "run").metrics]
    assert found == [step / 8 for step in (1, 2, 3, 4, 5)]


def test_the_last_evaluations_decide_which_checkpoints_stay(tmp_path):
    """Those of the evaluations that the run waited for at its end: a checkpoint that is not the best any more goes."""

    class Late(Looked):
        def wait(self, stop: StopRequest) -> bool:
            assert saved(tmp_path / "run") == [1, 3, 4, 5]
            self._kept = {1}
            return True

    pipeline = tiny(
        collect__prompts_per_rollout="2", learn__steps="5", learn__checkpoint_every="2", learn__epochs="1",
        learn__keep_checkpoints="2",
    )  # fmt: skip
    with loop_in(tmp_path / "run", pipeline, evaluator=Late(lambda step: {}, kept=(1, 3))) as loop:
        assert loop.run() == "steps"
    assert saved(tmp_path / "run") == [1, 4, 5]


def test_a_signal_during_an_evaluation_leaves_its_step_without_a_line(straight, tmp_path):
    """The step is taken again by the run that goes on, with the same weights, and has one line."""
    heard: list[Event] = []

    def given_up(step: int) -> dict[str, float]:
        if step == 4:
            raise StopAskedError("a signal")
        return {}

    with loop_in(tmp_path / "run", evaluator=Looked(given_up), on_event=heard.append) as loop:
        assert loop.run() == "interrupted"
    assert any("the evaluation was cancelled" in event.message for event in heard if isinstance(event, Notice))
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics] == [1, 2, 3]
    with loop_in(tmp_path / "run", evaluator=Looked(lambda step: {})) as loop:
        assert loop.run() == "steps"
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert weights(tmp_path / "run") == weights(straight)


def test_evaluations_that_a_signal_leaves_undone_leave_the_run_unfinished(tmp_path):
    """All steps are taken, but the run was interrupted."""
    with loop_in(tmp_path / "run", evaluator=Looked(lambda step: {}, ends=False)) as loop:
        assert loop.run() == "interrupted"
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_used_up_budget_saves_the_last_step_first(tmp_path):
    """The error reaches the user, and the step before it is not lost."""
    used_up = fails(RunStorageError("it takes more than it may"), number=4)
    with loop_in(tmp_path / "run") as loop, at_call(DiskWatch.look, before=used_up), pytest.raises(RunStorageError):
        loop.run()
    assert lines(tmp_path / "run") == [1, 2, 3]
    assert saved(tmp_path / "run")[-1] == 3


def test_steps_after_a_crash_are_taken_again_on_the_lines_that_are_there(straight, tmp_path):
    """A failure in step 4 leaves the checkpoint of step 2: step 3 is taken again, and its line stays the first one."""

    def fail(step: int, batch: StepBatch) -> StepBatch:
        if step == 4:
            raise OSError("gone")
        return batch

    with loop_in(tmp_path / "run", change=fail) as loop, pytest.raises(OSError, match="gone"):
        loop.run()
    before = RunFolder(tmp_path / "run").metrics[:]
    assert saved(tmp_path / "run")[-1] == 2
    with loop_in(tmp_path / "run") as loop:
        assert loop.progress.step == 2
        assert loop.run() == "steps"
    assert RunFolder(tmp_path / "run").metrics[:3] == before
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert weights(tmp_path / "run") == weights(straight)


def test_a_ring_continues_although_it_has_evicted_what_its_checkpoint_had(tmp_path):
    """It holds one rollout, and a failure in step 4 leaves the checkpoint of step 2: what had to go is not missed."""
    pipeline = tiny(
        collect__prompts_per_rollout="2", learn__steps="5", learn__checkpoint_every="2", learn__epochs="1",
        buffer__max_trajectories="8",
    )  # fmt: skip

    def fail(step: int, batch: StepBatch) -> StepBatch:
        if step == 4:
            raise OSError("gone")
        return batch

    with loop_in(tmp_path / "run", pipeline, change=fail) as loop, pytest.raises(OSError, match="gone"):
        loop.run()
    for name in ("run", "straight"):
        with loop_in(tmp_path / name, pipeline) as loop:
            assert loop.progress.step == (2 if name == "run" else 0)
            assert loop.run() == "steps"
    assert lines(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_equal_warnings_of_many_steps_are_said_once(tmp_path):
    """And again when there are ten of them."""
    heard: list[Event] = []
    none = np.zeros(0, np.int64)
    pipeline = tiny(collect__prompts_per_rollout="2", collect__group_size="2", learn__steps="10", learn__epochs="1")

    def empty(step: int, batch: StepBatch) -> StepBatch:
        return StepBatch(task_reward=None, row_ids=none, ages=none)

    with loop_in(tmp_path / "run", pipeline, change=empty, on_event=heard.append) as loop:
        loop.run()
    said = [event.message for event in heard if isinstance(event, Notice)]
    assert len(said) == 2, said
    assert said[1].endswith("(10 times so far)")


def test_the_untrained_weights_are_saved_and_evaluated_before_the_first_step(tmp_path):
    """So that a run killed in its first steps can go on; one that goes on does neither again."""
    told: list[tuple[str, int]] = []

    def looked(step: int) -> dict[str, float]:
        told.append(("evaluated", step))
        return {}

    def chosen(step: int, batch: StepBatch) -> StepBatch | None:
        if step < 3:  # later, the checkpoint of step 2 may be unfinished
            told.append(("newest", max(saved(tmp_path / "run"))))
        return batch if step < 3 else None

    for _ in range(2):
        with loop_in(tmp_path / "run", change=chosen, evaluator=Looked(looked)) as loop:
            loop.run()
    assert told == [("evaluated", 0), ("newest", 0), ("evaluated", 1), ("newest", 0), ("evaluated", 2)]
    assert saved(tmp_path / "run") == [0, 2]


def test_the_rows_of_a_checkpoint_are_on_the_disk_before_it(tmp_path, monkeypatch):
    """Stores, metrics, ledger and the names of new files are synced, and only then the checkpoint is written."""
    order: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path / "run")))
        sync(descriptor)

    class Kept(Looked):
        def sync(self) -> None:
            order.append("its store")

    monkeypatch.setattr(os, "fsync", noted)
    with loop_in(tmp_path / "run", last=2, evaluator=Kept(lambda step: {})) as loop:
        loop.run()
    turns = [(of_one, list(names)) for of_one, names in groupby(order, lambda name: name.startswith("/checkpoints"))]
    checkpoints = [place for place, (of_one, _) in enumerate(turns) if of_one]
    assert len(checkpoints) == 2
    rows = turns[checkpoints[1] - 1][1]
    assert any(name.startswith("/store/") for name in rows)
    assert {"/metrics.jsonl", "/ledger.jsonl", "", "its store"} <= set(rows)


def test_the_progress_of_a_run():
    """The first reward stays, the last is the newest, and the window has so many of the newest, or is not full yet.

    A run that goes on with a smaller window looks at the newest of what it has.
    """
    progress = Progress()
    for reward in (0.5, 0.0, 1.0):
        progress.note(reward, window=2)
    assert (progress.first_reward, progress.last_reward, progress.recent_rewards) == (0.5, 1.0, [0.0, 1.0])
    assert [progress.reached(target, 2) for target in (0.5, 0.6, None)] == [True, False, False]
    assert not progress.reached(0.0, 3)
    assert progress.reached(1.0, 1)


def test_what_torch_has_drawn_before_a_run_is_none_of_its_matter(tmp_path):
    """A run's random numbers begin with its seed."""
    torch.manual_seed(99)
    with loop_in(tmp_path / "run"):
        assert torch.initial_seed() == 0


def held_writes(before: Callable[[Path], object]) -> AbstractContextManager[list[Call]]:
    """Call a function in the thread that writes a checkpoint, before each write."""
    return at_call(LearnerState.write, before=lambda call: before(call.arguments["folder"]))


KEPT = replace(PIPELINE, learn=replace(PIPELINE.learn, keep_checkpoints=9))
PIPELINE_OF_ONE = replace(PIPELINE, learn=replace(PIPELINE.learn, keep_checkpoints=1))


def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path):
    """Step 3 ends before the checkpoint of step 2 is written, which has the state of step 2 all the same."""
    with loop_in(tmp_path / "straight", KEPT) as loop:
        loop.run()
    may_write, seen = Gate(), list[list[int]]()

    def after(step: int, reason: str | None) -> None:
        if step == 3:
            seen.append(saved(tmp_path / "run"))
            may_write.set()

    held = held_writes(lambda folder: "00000002" not in folder.name or may_write.wait(60))
    with loop_in(tmp_path / "run", KEPT, after=after) as loop, held:
        assert loop.run() == "steps"
    assert seen == [[0]]
    assert saved(tmp_path / "run") == [0, 2, 4, 5]
    for step in (2, 4, 5):
        for file in ("model.safetensors", "optimizer.safetensors", "uses.safetensors"):
            mine, theirs = (tmp_path / name / f"checkpoints/step-{step:08d}" / file for name in ("run", "straight"))
            assert mine.read_bytes() == theirs.read_bytes(), (step, file)


def test_the_weights_change_only_after_they_were_copied(tmp_path):
    """The copy of step 2 begins when the gradient of step 3 is computed, and the weights wait for it."""
    with loop_in(tmp_path / "straight", KEPT) as loop:
        loop.run()
    waits = Gate()

    def late(_: Call) -> None:
        if loop.progress.step == 2:
            assert waits.wait(60)
            time.sleep(0.2)

    def settle(call: Call) -> None:
        if loop.progress.step == 2 and call.arguments["self"]._copy is not None:
            waits.set()

    with loop_in(tmp_path / "run", KEPT) as loop:
        moments = at_call(HostCopies.of, before=late), at_call(Learner._settle_copy, before=settle)
        with moments[0], moments[1]:
            assert loop.run() == "steps"
    assert waits.is_set()
    for step in (2, 5):
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, theirs = (tmp_path / name / f"checkpoints/step-{step:08d}" / file for name in ("run", "straight"))
            assert mine.read_bytes() == theirs.read_bytes(), (step, file)


def failing(folder: Path, *, ignore_errors: bool = False) -> None:
    """As on a disk that has become read-only."""
    if not ignore_errors:
        raise OSError(30, "Read-only file system", str(folder))


def test_old_checkpoints_that_cannot_be_removed_stop_the_run(tmp_path, monkeypatch):
    """Their files are removed in the thread; the error names them, and a resumed run removes them."""
    with monkeypatch.context() as patch, loop_in(tmp_path / "run", PIPELINE_OF_ONE) as loop:
        patch.setattr(shutil, "rmtree", failing)
        with pytest.raises(OSError, match=r"old checkpoints \(step-00000000\) were not removed: Read-only"):
            loop.run()
    assert (tmp_path / "run/checkpoints/.step-00000000.gone").is_dir()
    with loop_in(tmp_path / "run", PIPELINE_OF_ONE) as loop:
        assert loop.run() == "steps"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(28, "No space left on device"), r"checkpoint of step 2 was not written: No space left on device"),
        (RuntimeError("no such tensor"), r"checkpoint of step 2 was not written: RuntimeError: no such tensor"),
    ],
    ids=["full", "other"],
)
def test_a_checkpoint_that_fails_stops_the_run_before_its_next_step(tmp_path, failure, expected):
    """The error names the checkpoint, the earlier one is there, and a resumed run ends like the straight one."""

    def fail(folder: Path) -> None:
        if "00000002" in folder.name:
            raise failure

    def after(step: int, reason: str | None) -> None:
        if step == 3:
            loop._writer.wait()

    with loop_in(tmp_path / "straight") as loop:
        loop.run()
    with loop_in(tmp_path / "run", after=after) as loop, held_writes(fail), pytest.raises(OSError, match=expected):
        loop.run()
    assert len(lines(tmp_path / "run")) <= 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000000"]
    with loop_in(tmp_path / "run") as loop:
        assert loop.run() == "steps"
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    """Nothing writes to a run folder after the run has ended, and what was begun is there."""

    def fail(step: int, batch: StepBatch) -> StepBatch:
        if step == 3:
            raise OSError("gone")
        return batch

    with loop_in(tmp_path / "run", change=fail) as loop:
        with held_writes(lambda folder: time.sleep(0.3)), pytest.raises(OSError, match="gone"):
            loop.run()
        assert not loop._writer.is_writing
    assert saved(tmp_path / "run")[-1] == 2


def test_without_memory_for_a_copy_the_run_waits_for_its_checkpoints(tmp_path, monkeypatch):
    """It says so once, and its weights are the same."""
    heard: list[Event] = []
    with loop_in(tmp_path / "straight") as loop:
        loop.run()
    leave_memory(monkeypatch, 0.0)
    with loop_in(tmp_path / "run", on_event=heard.append) as loop:
        loop.run()
    told = [event.message for event in heard if isinstance(event, Notice) and "checkpoint" in event.message]
    assert len(told) == 1
    assert "too little free memory" in told[0]
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, False),
        ({"buffer__max_staleness": "1"}, True),
        ({"learn__epochs": "2", "learn__checkpoint_every": "2"}, False),
        ({"learn__epochs": "2", "learn__checkpoint_every": "3"}, True),
    ],
    ids=["newest", "older", "between", "within"],
)
def test_a_ring_evicts_nothing_that_an_earlier_checkpoint_needs(tmp_path, changes, waits):
    """The run waits where steps after the earlier checkpoint learn from rollouts that are not sampled again."""
    ring = {"collect__prompts_per_rollout": "2", "learn__epochs": "1", "buffer__max_trajectories": "16"}
    with loop_in(tmp_path / "run", tiny(**{**ring, "buffer__max_staleness": "0", **changes})) as loop:
        loop.progress.step = int(changes.get("learn__checkpoint_every", "1"))
        loop._save()
        assert (loop._saved == loop.progress.step) is waits
        loop._finish_checkpoint()
        assert loop._saved == loop.progress.step
