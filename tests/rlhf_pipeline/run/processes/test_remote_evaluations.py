"""Evaluations beside a learner: a collector does them, another one if it is killed, with the rows of one process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline import Evaluate, Pipeline, token_match
from rlhf_pipeline.run.events import EvaluationDone, Event, RolloutDone, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.local_place import LocalPlace
from rlhf_pipeline.run.processes.claims import FolderClaims, RequestedEvaluations
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.processes.weights import Published, publish, read_published, weights_folder
from rlhf_pipeline.run.start import run
from tests.processes import Children
from tests.rlhf_pipeline.run.processes.test_learn import stop_at
from tests.rlhf_pipeline.run.test_evaluation import HELD_OUT, evaluated, figures_of, rows_of
from tests.rlhf_pipeline.small import collect, learn, weights
from trajectory_store import TrajectoryStore

KILLED = "TEST_KILLED_AT_AN_EVALUATION"
"""The variable that names the file of who is killed; a captured path would make it another reward function."""


def of() -> Pipeline:
    """Evaluated, with the best checkpoint kept; the first process at its 30th reward of evaluations may be killed."""
    pipeline = evaluated(learn__keep_checkpoints="1", learn__checkpoint_every="1", collect__reward_concurrency="1")
    calls = 0

    def deadly(prompt, completion, answer):
        nonlocal calls
        calls += len(answer) == 3  # held out
        if KILLED in os.environ and calls == 30:
            with suppress(FileExistsError), open(os.environ[KILLED], "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        return token_match(prompt, completion, answer, {})

    return replace(pipeline, reward=deadly)


def take_part(learns: bool, run_dir: Path, killed: Path | None) -> None:
    if killed is not None:
        os.environ[KILLED] = str(killed)
    (learn if learns else collect)(of(), run_dir=run_dir)


def together(children: Children, run_dir: Path, killed: Path | None = None) -> list[int]:
    """Run a learner and two collectors to the end; return their exit codes, the learner's first."""
    processes = [children.call(take_part, learns, run_dir, killed) for learns in (True, False, False)]
    return [process.wait() for process in processes]


def same_rows(run_dir: Path, other: Path) -> bool:
    """Whether the rows of their evaluations are the same, whatever the order in which collectors stored them."""
    one, several = rows_of(of(), other), rows_of(of(), run_dir)
    order = sorted(range(len(several["group_id"])), key=lambda at: several["policy_version"][at])
    return repr({name: [values[at] for at in order] for name, values in several.items()}) == repr(one)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_and_two_collectors_evaluate_as_one_process_does(tmp_path, children):
    """Rollouts one at a time: the same weights, rows, figures and kept checkpoints; the lines name the step."""
    run(of(), run_dir=tmp_path / "one")
    assert together(children, tmp_path / "several") == [0, 0, 0]
    assert weights(tmp_path / "several") == weights(tmp_path / "one")
    assert same_rows(tmp_path / "several", tmp_path / "one")
    kept = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("one", "several")]
    assert kept[0] == kept[1]
    told = {2 * at: line for at, line in enumerate(figures_of(tmp_path / "one")[1::2], 1)}
    for line in figures_of(tmp_path / "several"):
        step = line.pop("evaluation/step", 0)
        assert not step or line == told[step]
    said = read_published(RunFolder(tmp_path / "several"))
    assert said is not None
    assert (said.finished, said.evaluate) == ("steps", {})


def of_sets() -> Pipeline:
    """Two sets with names, of which one is evaluated less often and decides."""
    pipeline = of()
    assert isinstance(pipeline.evaluate, Evaluate)
    seldom = replace(pipeline.evaluate, every=4, num_prompts=3, best="pass@1", success_at=0.2, at_start=False)
    return replace(pipeline, evaluate={"often": pipeline.evaluate, "seldom": seldom})


def take_part_in_sets(learns: bool, run_dir: Path) -> None:
    (learn if learns else collect)(of_sets(), run_dir=run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_sets_are_evaluated_beside_a_learner_as_in_one_process(tmp_path, children):
    """The same rows of each set, the same kept checkpoints, and figures with the step of each set."""
    run(of_sets(), run_dir=tmp_path / "one")
    for process in [children.call(take_part_in_sets, learns, tmp_path / "two") for learns in (True, False)]:
        process.succeed()
    names = [sorted(path.name for path in (tmp_path / run / "evaluations").iterdir()) for run in ("one", "two")]
    assert names[0] == names[1]
    assert [name.partition("-")[0] for name in names[0]] == ["often", "seldom"]
    for name in names[0]:
        texts = []
        for run_dir in (tmp_path / "one", tmp_path / "two"):
            with TrajectoryStore.open(run_dir / "evaluations" / name) as store:
                rows = store.read(store.ids(), ["policy_version", "trajectory_id", "completion"])
            texts.append(sorted(zip(*(map(str, rows[column]) for column in rows if column != "ids"), strict=True)))
        assert texts[0] == texts[1]
    kept = [sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("one", "two")]
    assert kept[0] == kept[1]
    told = [line for line in figures_of(tmp_path / "two") if "evaluation/seldom/step" in line]
    assert told
    assert {line["evaluation/seldom/step"] % 4 for line in told} == {0}


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_what_a_killed_collector_was_evaluating_is_evaluated_by_the_other(tmp_path, children):
    """Killed in the middle of the rewards of an evaluation: nothing of it is stored, and the rows are the straight."""
    run(of(), run_dir=tmp_path / "one")
    codes = together(children, tmp_path / "several", tmp_path / "killed")
    assert (codes[0], sorted(codes[1:])) == (0, [-signal.SIGKILL, 0])
    assert weights(tmp_path / "several") == weights(tmp_path / "one")
    assert same_rows(tmp_path / "several", tmp_path / "one")


def test_a_learner_that_comes_back_gets_what_was_asked_for(tmp_path):
    """Asked with the weights, evaluated while no learner lives, before any rollout, and reported at its next step."""
    pipeline, run_dir = evaluated(replace(HELD_OUT, every=9), learn__steps="1"), tmp_path / "run"
    learn(pipeline, run_dir=run_dir, on_event=stop_at(RunStarted))
    said = read_published(RunFolder(run_dir))
    assert said is not None
    assert said.evaluate == {0: said.digest}
    done: list[Event] = []
    stop = stop_at(RolloutDone)
    collect(pipeline, run_dir=run_dir, on_event=lambda event: (done.append(event), stop(event)))
    kinds = [type(event) for event in done if isinstance(event, EvaluationDone | RolloutDone)]
    assert kinds == [EvaluationDone, RolloutDone]
    events: list[Event] = []
    learn(pipeline, run_dir=run_dir, on_event=events.append)
    told = [event for event in events if isinstance(event, EvaluationDone | StepDone)]
    assert [type(event) for event in told] == [StepDone]  # it was stored before this start, which therefore knows it
    said = read_published(RunFolder(run_dir))
    assert said is not None
    assert said.evaluate == {}


def test_evaluations_are_claimed_by_step_and_their_weights_stay(tmp_path):
    """Each by one collector, the lowest first; weights that are asked for outlive the three newest."""
    folder = RunFolder(tmp_path)
    asked: dict[int, int] = {}
    for version in range(9):
        asked |= {version: 0} if version == 2 else {}
        published = Published(version=version, next_version=version, rollouts_done=0, evaluate=asked)
        published = publish(folder, published, save=lambda path, n=version: (path / "model").write_text(str(n)))
        asked = published.evaluate
    kept = sorted(path.name[8:16] for path in folder.weights.glob("version-*"))
    assert kept == ["00000002", "00000006", "00000007", "00000008"]
    assert read_published(folder) == published
    assert (weights_folder(folder, replace(published, version=2, digest=asked[2])) / "model").read_text() == "2"
    published, done = replace(published, evaluate={2: 1, 4: 1}), set[int]()
    with process_lock(folder.processes, "first"), process_lock(folder.processes, "second"):
        names = ("first", "second", "third")
        first, second, third = (
            FolderClaims(LocalPlace(folder.path), name, RequestedEvaluations(lambda: done)) for name in names
        )
        assert (first.claim(published), second.claim(published)) == (2, 4)
        second.release(done=False)
        assert (second.claim(published), third.claim(published)) == (4, None)
        done.add(4)
        second.close()
        assert third.claim(published) is None  # the learner still asks: it waits for a rollout
