"""The order in which a run steps, saves, evaluates and ends, whatever its source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pipeline import Pipeline
from rlhf_pipeline.run.build import build_models, build_parts
from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.evaluation import Evaluations
from rlhf_pipeline.run.events import Event, RunStarted, StepDone, ignore_events
from rlhf_pipeline.run.folder import RunFolder, Setup
from rlhf_pipeline.run.loop import Loop, Progress, Reason, StepBatch
from rlhf_pipeline.run.signals import StopRequest
from rlhf_pipeline.run.sources import MadeHere
from tests.rlhf_pipeline.small import tiny


class Watched(MadeHere):
    """A source that notes what it is asked for; with `ends`, it has nothing from that step on."""

    ends: int | None = None

    def __init__(self, notes: list[Any], *given: Any) -> None:
        super().__init__(*given)
        self.notes = notes

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        if step == self.ends:
            return None
        self.notes.append(("next", step))
        batch = super().next(step, stop)
        assert batch is not None
        return replace(batch, about={})


class Evaluated(Evaluations):
    """Evaluations that find nothing, keep the first step's weights, and note when they are asked."""

    def __init__(self, notes: list[Any]) -> None:
        super().__init__([], ignore_events)
        self.notes = notes

    def after(self, step: int, stop: StopRequest) -> dict[str, float | int | None]:
        self.notes.append(("evaluate", step))
        return {"evaluation/reward": float(step)}

    def kept(self, step: int) -> set[int]:
        return {1}

    def wait(self, stop: StopRequest) -> bool:
        self.notes.append("wait")
        return True


@contextmanager
def made(pipeline: Pipeline, folder: Path, notes: list[Any], *, evaluated: bool = False) -> Iterator[Loop]:
    """The loop of a run as one process makes it, with notes of what it calls."""
    run, setup = RunFolder(folder), Setup(pipeline=pipeline)
    if not folder.exists():
        folder.mkdir()
        run.record(setup)
    models = build_models(pipeline, seed=0, device="cpu")

    def after(step: int, reason: Reason | None) -> None:
        saved = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run.checkpoints)]
        notes.append(("after", step, reason, max(saved)))

    def heard(event: Event) -> None:
        if isinstance(event, RunStarted):
            notes.append(("started", event.first_step, event.total_steps))
        elif isinstance(event, StepDone):
            notes.append(("done", event.step, run.metrics.last_step))

    with build_parts(pipeline, models, run=run, seed=0) as parts:
        source = Watched(notes, pipeline, parts, ignore_events)
        evaluator = Evaluated(notes) if evaluated else None
        more = {"stop": StopRequest(), "on_event": heard, "after": after, "evaluator": evaluator}
        loop = Loop(setup, run, parts.learner, source, **more)
        loop.restore()
        yield loop


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_saves_before_its_first_step_and_tells_of_each(tmp_path):
    """The untrained weights are saved, a step's line is there when it is told, and the last weights are saved too."""
    notes: list[Any] = []
    with made(tiny(learn__steps="3"), tmp_path / "run", notes) as loop:
        assert loop.run() == "steps"
    assert notes == [
        ("started", 0, 3),
        ("after", 0, None, 0),
        *[("next", 1), ("done", 1, 1), ("after", 1, None, 0)],
        *[("next", 2), ("done", 2, 2), ("after", 2, None, 0)],
        *[("next", 3), ("done", 3, 3), ("after", 3, None, 2)],
        ("after", 3, "steps", 3),
    ]


def test_a_source_that_has_no_more_ends_the_run(tmp_path):
    """Its last step is the run's, if it comes before the definition's; a run that waits in vain is interrupted."""
    notes: list[Any] = []
    with made(tiny(learn__steps="4"), tmp_path / "short", notes) as loop:
        loop.source.last = 2
        shorter = Loop(
            Setup(pipeline=tiny(learn__steps="4")), loop.folder, loop.learner, loop.source,
            stop=loop.stop, on_event=ignore_events,
        )  # fmt: skip
        assert (shorter.total_steps, loop.total_steps) == (2, 4)
        assert (shorter.run(), shorter.progress.step) == ("steps", 2)
    with made(tiny(learn__steps="4"), tmp_path / "cut", notes) as loop:
        loop.source.ends = 4  # type: ignore[attr-defined]
        assert (loop.run(), loop.progress.step) == ("interrupted", 3)
    assert max(saved(tmp_path / "cut")) == "step-00000003"


def test_a_resumed_run_begins_at_its_checkpoint_and_writes_each_line_once(tmp_path):
    """What was evaluated or saved at the start is not done again; steps that are taken again keep their lines."""
    pipeline = tiny(learn__steps="3", learn__checkpoint_every="2")
    with made(pipeline, tmp_path / "run", []) as loop:
        loop.source.ends = 4  # type: ignore[attr-defined]
        loop.run()
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == "step-00000003"
    for file in newest.iterdir():  # as if the run had been killed before it saved
        file.unlink()
    newest.rmdir()
    lines = RunFolder(tmp_path / "run").metrics_file.read_bytes()
    notes: list[Any] = []
    with made(pipeline, tmp_path / "run", notes, evaluated=True) as loop:
        assert loop.run() == "steps"
    assert notes[:4] == [("started", 2, 3), ("after", 2, None, 2), ("next", 3), ("evaluate", 3)]
    assert RunFolder(tmp_path / "run").metrics_file.read_bytes() == lines


def test_evaluations_come_before_the_first_step_and_keep_their_weights(tmp_path):
    """A step's figures are in its line; the best weights are saved whenever they come, and stay to the end."""
    notes: list[Any] = []
    pipeline = tiny(learn__steps="4", learn__checkpoint_every="3", learn__keep_checkpoints="1")
    with made(pipeline, tmp_path / "run", notes, evaluated=True) as loop:
        loop.run()
    assert notes[:5] == [
        *[("started", 0, 4), ("after", 0, None, 0), ("evaluate", 0), ("next", 1), ("evaluate", 1)],
    ]
    assert notes[-2:] == ["wait", ("after", 4, "steps", 4)]
    assert [row["evaluation/reward"] for row in RunFolder(tmp_path / "run").metrics] == [1.0, 2.0, 3.0, 4.0]
    assert saved(tmp_path / "run") == ["step-00000001", "step-00000004"]


def test_the_rows_of_a_checkpoint_are_on_the_disk_before_it(tmp_path, monkeypatch):
    """Store, metrics and ledger are synced, and only then the checkpoint is written that refers to them."""
    order: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path / "run")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with made(tiny(learn__steps="2"), tmp_path / "run", []) as loop:
        loop.run()
    turns = [(of_one, list(names)) for of_one, names in groupby(order, lambda name: name.startswith("/checkpoints"))]
    checkpoints = [place for place, (of_one, _) in enumerate(turns) if of_one]
    assert len(checkpoints) == 2
    rows = turns[checkpoints[1] - 1][1]
    assert all(any(name.startswith(part) for name in rows) for part in ("/store/", "/metrics.jsonl", "/ledger.jsonl"))


def test_the_target_counts_whole_windows_and_only_between_rollouts(tmp_path):
    """Two updates on a rollout: a run whose target is met at once ends after the second, when two rollouts count."""
    met = tiny(learn__steps="6", learn__stop_at_reward="0.0", learn__stop_window="2")
    with made(met, tmp_path / "run", []) as loop:
        assert (loop.run(), loop.progress.step) == ("target", 4)
    with made(tiny(learn__steps="6", learn__stop_at_reward="1.1"), tmp_path / "other", []) as loop:
        assert loop.run() == "steps"


def test_the_progress_of_a_run():
    """The first reward stays, the last is the newest, and the window has so many of the newest."""
    progress = Progress()
    for reward in (0.5, 0.0, 1.0):
        progress.note(reward, window=2)
    assert (progress.first_reward, progress.last_reward, progress.recent_rewards) == (0.5, 1.0, [0.0, 1.0])
    assert [progress.reached(target, 2) for target in (0.5, 0.6, None)] == [True, False, False]
    assert not progress.reached(0.0, 3)


@pytest.mark.parametrize("drawn_before", [0, 5])
def test_what_torch_has_drawn_before_a_run_is_none_of_its_matter(tmp_path, drawn_before):
    """A run's random numbers begin with its seed."""
    torch.manual_seed(99)
    torch.rand(drawn_before)
    with made(tiny(), tmp_path / "run", []):
        assert torch.initial_seed() == 0
