"""A learner that is started again beside what it had published."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_pipeline.errors import DataError, PipelineError
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.build import build_policy
from rlhf_pipeline.run.checkpoint import checkpoint_path
from rlhf_pipeline.run.events import Event, Notice, RolloutDone, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.collect import load_policy
from rlhf_pipeline.run.processes.heartbeat import read_heartbeat
from rlhf_pipeline.run.processes.rollouts import ROLLOUTS_SCHEMA
from rlhf_pipeline.run.processes.weights import publish, read_published, weights_folder
from tests.rlhf_pipeline.small import collect, learn, tiny
from trajectory_store import TrajectoryStore

FORGED = b"of a step that did not happen"
SETTINGS = {"buffer__max_staleness": "4", "learn__epochs": "1", "learn__steps": "3"}
PIPELINE = tiny(**SETTINGS)


def stop_at(kind: type[Event], number: int = 1) -> Callable[[Event], None]:
    """Send SIGTERM, as a service manager would, at the given occurrence of an event."""
    seen: list[Event] = []

    def look(event: Event) -> None:
        seen.extend([event] if isinstance(event, kind) else [])
        if isinstance(event, kind) and len(seen) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    return look


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run of several processes with three rollouts, two of them learned from."""
    run_dir = tmp_path_factory.mktemp("several") / "run"
    learn(PIPELINE, run_dir=run_dir, on_event=stop_at(RunStarted))
    collect(PIPELINE, run_dir=run_dir, on_event=stop_at(RolloutDone, 3))
    learn(PIPELINE, run_dir=run_dir, on_event=stop_at(StepDone, 2))
    return run_dir


@pytest.fixture
def run(made, tmp_path) -> RunFolder:
    return RunFolder(shutil.copytree(made, tmp_path / "run"))


def published(run: RunFolder) -> tuple[int, bytes]:
    """The version that is out, and its weights."""
    found = read_published(run)
    assert found is not None
    return found.version, (weights_folder(run, found) / "model.safetensors").read_bytes()


def forge(run: RunFolder, save: Callable[[Path], object]) -> None:
    """Publish other weights under the number of those that are out, as a run does that has lost its last steps."""
    said = read_published(run)
    assert said is not None
    publish(run, said, save=save)


@pytest.mark.parametrize("process", ["collector", "collector of a run", "learner"])
def test_a_process_that_waits_reports_it_and_leaves_the_processor(run, tmp_path, children, process):
    """A collector waits for the first weights or for steps, a learner for rollouts; meanwhile it does little."""
    run_dir = run.path if process == "collector of a run" else tmp_path / "new"
    act, name, state, fields = {
        "collector": (collect, "collector-0", "waiting for the first weights", {"version": -1, "rollouts": 0}),
        "collector of a run": (collect, "collector-0", "waiting for the learner", {"version": 2, "rollouts": 4}),
        "learner": (learn, "learner", "waiting for a rollout", {"step": 0}),
    }[process]
    child = children.fork(lambda: act(PIPELINE, run_dir=run_dir))
    beat = child.until(
        lambda: (beat := read_heartbeat(run_dir / "processes", name)).get("state") == state and beat, seconds=60.0
    )
    assert beat | fields == beat
    used_s = processor_s(child.pid)
    time.sleep(0.5)
    assert processor_s(child.pid) - used_s < 0.15


def processor_s(pid: int) -> float:
    """The processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_damaged_weights_are_named_refused_and_published_again(run):
    """One flipped byte: `verify` names the file, a collector does not load it, and a learner that starts mends it."""
    said = read_published(run)
    assert said is not None
    before, folder = published(run), weights_folder(run, said)
    (folder / "model.safetensors").write_bytes(before[1][:-5] + bytes([before[1][-5] ^ 1]) + before[1][-4:])
    problems = [finding.text for finding in check_run(run) if not finding.ok]
    assert any("of step 2: the bytes of model.safetensors differ" in text for text in problems)
    with pytest.raises(DataError, match=r"bytes of .* differ .* learn --run"):
        load_policy(build_policy(PIPELINE, seed=0, device="cpu"), run, said)
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(RunStarted))
    assert published(run) == before
    assert [finding.text for finding in check_run(RunFolder(run.path)) if not finding.ok] == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: shutil.rmtree(run.weights), "none are published, but 2 steps were taken"),
        (lambda run: (run.weights / "latest.json").unlink(), "none are published, but 2 steps were taken"),
        (lambda run: reissue(run, version=50), "the newest, of step 50: the ledger has no such step"),
    ],
    ids=["no folder", "no pointer", "another run's"],
)
def test_weights_that_are_absent_or_of_no_step_are_named_and_published_again(run, damage, said):
    """`verify` does not call a run whole whose collectors have no weights, or those of steps it has not taken."""
    before = published(run)
    damage(run)
    assert [finding.text for finding in check_run(run) if not finding.ok] == [
        f"{said}. The learner publishes them again when it starts"
    ]
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(RunStarted))
    assert published(run) == before
    assert [finding.text for finding in check_run(RunFolder(run.path)) if not finding.ok] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_whose_run_it_is_does_not_matter_to_verify(run):
    """Another user's run, which may only be read, is checked as any other: asking who is alive writes nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(run.path, Path(name) / "run")
        for path in (Path(name), folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        gc.collect()  # semaphores that earlier tests left behind could not be removed by the other user
        os.seteuid(65534)
        try:
            assert [finding.text for finding in check_run(RunFolder(folder)) if not finding.ok] == []
        finally:
            os.seteuid(0)


def reissue(run: RunFolder, *, version: int) -> None:
    """Publish the newest weights again under another number."""
    said = read_published(run)
    assert said is not None
    weights = weights_folder(run, said) / "model.safetensors"
    publish(run, replace(said, version=version), save=lambda new: shutil.copy(weights, new))


def test_weights_of_a_step_that_the_ledger_lacks_are_replaced(run):
    """A power loss took the rows since the checkpoint; the synced weights are ahead of all that is known."""
    before = published(run)
    assert before[0] == 2
    shutil.rmtree(checkpoint_path(run.checkpoints, 2))
    for rows in (run.ledger, run.metrics):
        rows.drop_from(1)
    events: list[Event] = []
    stop = stop_at(RunStarted)
    learn(PIPELINE, run_dir=run.path, on_event=lambda event: (events.append(event), stop(event)))
    assert published(run)[0] == 0
    assert any("the ledger has no row for step 2" in event.message for event in events if isinstance(event, Notice))
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(StepDone, 2))
    assert published(run) == before  # the same rollouts in the same order


def test_weights_of_a_step_that_is_taken_otherwise_are_replaced(run):
    """The ledger's row of a step names trajectories that are gone: what follows is another run than was published."""
    shutil.rmtree(checkpoint_path(run.checkpoints, 2))
    row = run.ledger[1]
    run.ledger.drop_from(2)
    run.ledger.append({**row, "row_ids": [10**9]})
    forge(run, lambda folder: (folder / "model.safetensors").write_bytes(FORGED))
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(StepDone, 2))
    version, weights = published(run)
    assert version == 2
    assert weights != FORGED


def sampled(run: RunFolder, rollout: int) -> list[list[float]]:
    """The log-probs of a rollout's trajectories."""
    with TrajectoryStore.open(run.store_path) as store:
        rows = store.read(store.ids(), ["log_probs", "group_id", "trajectory_id"])
    size = PIPELINE.collect.prompts_per_rollout
    mine = [at for at, group in enumerate(rows["group_id"]) if group // size == rollout]
    return [rows["log_probs"][at].tolist() for at in sorted(mine, key=lambda at: rows["trajectory_id"][at])]


def test_a_collector_takes_up_other_weights_of_a_number_that_it_has(run, tmp_path):
    """What it samples next is what a collector samples that has just been started."""
    other = RunFolder(shutil.copytree(run.path, tmp_path / "other"))
    other_weights = build_policy(PIPELINE, seed=1, device="cpu").save_pretrained
    rollouts: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, RolloutDone):
            rollouts.append(event.rollout)
            assert event.policy_version == 2
            if len(rollouts) == 1:
                forge(run, other_weights)
            else:
                os.kill(os.getpid(), signal.SIGTERM)

    collect(PIPELINE, run_dir=run.path, on_event=look)
    collect(PIPELINE, run_dir=other.path, on_event=stop_at(RolloutDone))
    forge(other, other_weights)
    collect(PIPELINE, run_dir=other.path, on_event=stop_at(RolloutDone))
    assert rollouts == [3, 4]
    assert str(sampled(run, 3)) == str(sampled(other, 3))
    assert str(sampled(run, 4)) == str(sampled(other, 4))


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 3, 2, 1)], ids=["after", "before the step of its number"])
def test_what_weights_of_lost_steps_sampled_is_not_learned_from(run, order):
    """A power loss took the last steps, and others are taken: who has sampled with the lost weights is behind."""
    collect(PIPELINE, run_dir=run.path, on_event=stop_at(RolloutDone))  # rollout 3, with version 2
    shutil.rmtree(checkpoint_path(run.checkpoints, 2))
    for rows in (run.ledger, run.metrics):
        rows.drop_from(2)
    with TrajectoryStore.open(run.rollouts) as rollouts:
        arrived = [rollouts.read(rollouts.ids()[[place]]) for place in order]  # the row of 1 was lost as well
    shutil.rmtree(run.rollouts)
    with TrajectoryStore.create(run.rollouts, ROLLOUTS_SCHEMA) as rollouts:
        for row in arrived:
            rollouts.append(row)
    events: list[Event] = []
    learn(tiny(**SETTINGS | {"learn__steps": "4"}), run_dir=run.path, on_event=events.append)
    taken = [(row["rollout"], len(row["row_ids"])) for row in RunFolder(run.path).ledger]
    assert taken == [(rollout, 0 if rollout == 3 else 12) for rollout in order]
    said = [event.message for event in events if isinstance(event, Notice)]
    assert any(
        "12 of 12 trajectories of rollout 3 were sampled with the weights of lost steps" in text for text in said
    )
    assert [finding.text for finding in check_run(RunFolder(run.path)) if not finding.ok] == []


@pytest.mark.parametrize("strategy", [{"strategy": "anchored"}, {"strategy": "mix", "fresh_fraction": 1.0}])
def test_the_newest_rollout_is_the_one_that_a_step_begins_whatever_its_age(tmp_path, strategy):
    """Of two rollouts by the first weights the second is two versions old when a step begins it: it is used as new."""
    settings = {f"sample__{name}": str(value) for name, value in strategy.items()}
    pipeline = tiny(buffer__max_staleness="5", learn__epochs="2", learn__steps="4", **settings)
    run_dir = tmp_path / "run"
    learn(pipeline, run_dir=run_dir, on_event=stop_at(RunStarted))
    collect(pipeline, run_dir=run_dir, on_event=stop_at(RolloutDone, 2))
    learn(pipeline, run_dir=run_dir)
    step = RunFolder(run_dir).ledger[2]
    with TrajectoryStore.open(run_dir / "store") as store:
        rollouts = store.read_scalars("group_id", step["row_ids"]) // pipeline.collect.prompts_per_rollout
    assert step["ages"] == [2] * 12
    assert rollouts.tolist() == [step["rollout"]] * 12


@pytest.mark.parametrize(("version", "ages"), [(1, [0] * 12), (-4, [])], ids=["newer", "too old"])
def test_rows_with_the_ids_of_lost_ones_are_not_taken_for_them(run, version, ages):
    """A power loss leaves the ledger and takes rows that it names; other weights sample the rollout again."""
    shutil.rmtree(checkpoint_path(run.checkpoints, 2))
    planned = run.ledger[1]
    with TrajectoryStore.open(run.store_path) as store:
        schema, ids = store.schema, store.ids()
        rows = store.read(ids)
    assert planned["ages"] == [1] * 12
    rows["policy_version"][12:24], rows["policy_digest"][12:24] = version, planned["policy_digest"] * (version == 1)
    shutil.rmtree(run.store_path)
    with TrajectoryStore.create(run.store_path, schema) as store:
        assert store.append(rows).tolist() == ids.tolist()
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(StepDone, 2))
    taken = RunFolder(run.path).ledger[1]
    assert (taken["row_ids"], taken["ages"]) == (planned["row_ids"][: len(ages)], ages)


@pytest.mark.filterwarnings("ignore:.*cannot be opened")
@pytest.mark.parametrize("damage", ["emptied", "segment"])
def test_a_run_without_its_rollouts_does_not_go_on(run, damage):
    """Which rollouts are there is part of the run: `verify` names what is wrong with it, and a resume refuses."""
    if damage == "emptied":
        shutil.rmtree(run.rollouts)
        run.rollouts.mkdir()
    else:
        shutil.rmtree(run.rollouts / "seg-00000000")  # the catalog can be found again from the segments
    problems = [finding.text for finding in check_run(run) if not finding.ok]
    assert any("rollouts" in text for text in problems)
    with pytest.raises(PipelineError, match="rollouts"):
        learn(PIPELINE, run_dir=run.path)


def test_a_rollout_whose_row_is_lost_is_waited_for(run):
    """A power loss may leave the ledger and take the row of the rollout that it names: a collector adds it again."""
    shutil.rmtree(checkpoint_path(run.checkpoints, 2))
    lost = run.ledger[1]["rollout"]
    with TrajectoryStore.open(run.rollouts) as rollouts:
        numbers, ids = rollouts.read_scalars("rollout"), rollouts.ids()
        kept, gone = rollouts.read(ids[numbers != lost]), rollouts.read(ids[numbers == lost])
    shutil.rmtree(run.rollouts)
    with TrajectoryStore.create(run.rollouts, ROLLOUTS_SCHEMA) as rollouts:
        rollouts.append(kept)

    def add_it_again() -> None:
        while read_heartbeat(run.processes, "learner").get("state") != "waiting for a rollout":
            time.sleep(0.01)
        with TrajectoryStore.open(run.rollouts, "a") as rollouts:
            rollouts.append(gone)

    collector = threading.Thread(target=add_it_again)
    collector.start()
    learn(PIPELINE, run_dir=run.path, on_event=stop_at(StepDone, 2))
    collector.join()
    assert run.ledger[1]["rollout"] == lost
    assert [finding.text for finding in check_run(RunFolder(run.path)) if not finding.ok] == []


def test_a_mean_reward_that_is_not_known_is_left_out(run):
    """A collector that found dropped groups of another one's rollout cannot say it: the step has none."""
    for step in (1, 2):
        shutil.rmtree(checkpoint_path(run.checkpoints, step), ignore_errors=True)
    with TrajectoryStore.open(run.rollouts) as rollouts:
        schema, batch = rollouts.schema, rollouts.read_batch(rollouts.ids())
    batch.values["task_reward"][-1] = math.nan
    shutil.rmtree(run.rollouts)
    with TrajectoryStore.create(run.rollouts, schema) as rollouts:
        rollouts.append_batch(batch)
    steps: list[StepDone] = []
    learn(PIPELINE, run_dir=run.path, on_event=lambda event: isinstance(event, StepDone) and steps.append(event))
    assert [step.metrics["task_reward"] is None for step in steps] == [False, False, True]
    assert ["task_reward" in row for row in run.metrics] == [True, True, False]


def test_trajectories_that_a_power_loss_took_are_missed(run):
    """The row of a rollout says how many trajectories it had; a step on fewer of them says so."""
    for step in (1, 2):
        shutil.rmtree(checkpoint_path(run.checkpoints, step), ignore_errors=True)
    with TrajectoryStore.open(run.store_path) as store:
        schema, ids = store.schema, store.ids()
        rows = store.read(ids[:-5])
    shutil.rmtree(run.store_path)
    with TrajectoryStore.create(run.store_path, schema) as store:
        assert store.append(rows).tolist() == ids[:-5].tolist()
    events: list[Event] = []
    learn(PIPELINE, run_dir=run.path, on_event=events.append)
    (said,) = [event.message for event in events if isinstance(event, Notice)]
    assert "rollout 2 had 12 trajectories, and 5 of them are missing from the store" in said
    assert [len(row["row_ids"]) for row in run.ledger] == [12, 12, 7]


def test_rollouts_that_their_store_does_not_serve_any_more_are_missed(run):
    """A column of the rollouts is gone: one that waits would be passed over, so the learner stops by name."""
    (file,) = run.rollouts.glob("seg-*/task_reward/c/0")
    file.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store says on opening which rows it does not serve
        with pytest.raises(DataError, match=r"rollouts is damaged: seg-00000000: 3 rows are not returned"):
            learn(PIPELINE, run_dir=run.path)
