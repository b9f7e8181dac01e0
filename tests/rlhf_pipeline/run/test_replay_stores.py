"""Whole runs that learn from stores alone: a finished run comes out again, and any such run twice the same."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_pipeline import Replay
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, DefinitionError, RunMismatchError
from rlhf_pipeline.exchange import TrajectoryRecorder, import_files
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.report.diff_steps import compare_figures, compare_weights
from rlhf_pipeline.run.build import build_policy
from rlhf_pipeline.run.choice_record import gathered_counts
from rlhf_pipeline.run.events import Event, Notice, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.damage import flip_value
from tests.moments import at_call
from tests.rlhf_pipeline.small import changed, make_store, offline, tiny, weights
from trajectory_store import TrajectoryStore, copy_rows

SAME = ("loss", "grad_norm", "entropy", "kl_approx", "clip_fraction", "advantage_std", "kl_k1", "staleness_max", "lr")


def ledger_of(run_dir: Path, name: str) -> list[list[int]]:
    return [row[name] for row in StepRows(run_dir / "ledger.jsonl")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"write__kl_coef": "0.1", "write__estimator": "grpo", "loss__aggregation": "sequence_mean"},
        {"learn__epochs": "1", "buffer__max_staleness": "3", "loss__kl_to_ref_coeff": "0.1"},
        {"sample__strategy": "uniform", "sample__batch_size": "6", "buffer__max_staleness": "3"},
        {"sample__strategy": "anchored", "learn__epochs": "3", "buffer__max_staleness": "5"},
        {"write__zero_variance": "drop"},
        {"write__zero_variance": "mark", "sample__strategy": "uniform", "collect__prompts_per_rollout": "1"},
        {"policy__lora_rank": "4", "learn__layout": "packed", "sample__min_ess": "0.99", "buffer__max_staleness": "3"},
        {"buffer__backend": "zarr", "buffer__max_staleness": "2", "learn__epochs": "3"},
    ],
    ids=[
        "plain",
        "kl-in-the-reward",
        "stale-and-kl-in-the-loss",
        "uniform",
        "anchored",
        "dropped-groups",
        "steps-without-anything",
        "adapters-and-guard",
        "zarr",
    ],
)
def test_a_finished_run_comes_out_again_from_its_store_alone(tmp_path, changes):
    """Losses, gradient norms, rewards and the final weights are the run's, bit for bit; its folder is not read."""
    pipeline = tiny(**changes)
    run(pipeline, run_dir=tmp_path / "run", seed=3)
    (tmp_path / "run" / "store").rename(tmp_path / "store")
    replay = dataclasses.replace(pipeline, replay=Replay(stores=(str(tmp_path / "store"),), recorded_order=True))
    finished = run(replay, run_dir=tmp_path / "again", seed=3)
    assert (finished.reason, finished.steps) == ("steps", 6)
    recorded, again = (list(StepRows(tmp_path / name / "metrics.jsonl")) for name in ("run", "again"))
    assert [[row.get(name) for name in SAME] for row in again] == [[row.get(name) for name in SAME] for row in recorded]
    if pipeline.write.zero_variance != "drop":  # else the rewards of dropped groups are in no store
        assert [row.get("task_reward") for row in again] == [row.get("task_reward") for row in recorded]
    assert ledger_of(tmp_path / "again", "trajectory_ids") == ledger_of(tmp_path / "run", "trajectory_ids")
    assert weights(tmp_path / "again") == weights(tmp_path / "run")
    runs = RunFolder.open(tmp_path / "run"), RunFolder.open(tmp_path / "again")
    found = compare_figures(*runs, without=["task_reward"])
    assert (found.same, found.num_both, compare_weights(*runs)) == (True, 6, (6, True))


def test_a_replay_scores_at_the_temperature_of_sampling(tmp_path):
    """Sampled at 0.5, replayed by a definition of 1: the run's weights, and a notice; at two, a filter is asked for."""
    hot = tiny(learn__keep_checkpoints="9")
    cold = changed(hot, collect__temperature="0.5")
    run(cold, run_dir=tmp_path / "cold", seed=3)
    run(hot, run_dir=tmp_path / "hot", seed=3)
    events: list[Event] = []
    stores = str(tmp_path / "cold" / "store"), str(tmp_path / "hot" / "store")
    same = dataclasses.replace(hot, replay=Replay(stores=stores[:1], recorded_order=True))
    run(same, run_dir=tmp_path / "again", seed=3, on_event=events.append)
    assert any(
        "sampled at temperature 0.5, and are scored at this temperature" in e.message
        for e in events
        if isinstance(e, Notice)
    )
    assert weights(tmp_path / "again") == weights(tmp_path / "cold")
    plan = plan_rerun(tmp_path / "again", from_step=1)
    assert all(step.ok and step.same_bits for step in rerun(same, plan, seed=3, device="cpu"))
    mixed = dataclasses.replace(hot, replay=Replay(stores=stores))
    with pytest.raises(DataError, match=r"temperatures 0.5 and 1, .*--set replay.filters='temperature==1'"):
        run(mixed, run_dir=tmp_path / "mixed", seed=3)
    assert not (tmp_path / "mixed").exists()
    one = dataclasses.replace(hot, replay=Replay(stores=stores, filters=("temperature==0.5",)))
    assert run(one, run_dir=tmp_path / "one", seed=3).num_trajectories == 36


def test_one_seed_gives_one_result_and_another_seed_other_batches(tmp_path):
    """Two replays with one seed: the same weights, byte for byte; with another seed, other batches."""
    pipeline = offline(make_store(tmp_path / "store", groups=(4,) * 6, lacks=("log_probs", "advantage")))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(pipeline, run_dir=tmp_path / name, seed=seed)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    batches = {name: ledger_of(tmp_path / name, "row_ids") for name in ("a", "b", "c")}
    assert batches["a"] == batches["b"] != batches["c"]


def test_ages_are_counted_from_the_newest_version_in_the_stores(tmp_path):
    """Offline the weights have no version that the stores know: the newest trajectory is the youngest."""
    store = make_store(tmp_path / "store", groups=(4, 4), versions=[10, 11, 12, 13, 14, 15, 16, 17])
    run(offline(store, steps=1), run_dir=tmp_path / "run")
    (row,) = list(StepRows(tmp_path / "run" / "ledger.jsonl"))
    assert row["ages"] == [7, 6, 5, 4, 3, 2, 1, 0]
    (line,) = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert (line["staleness"], line["staleness_max"]) == (3.5, 7)


def test_stale_trajectories_are_weighed_by_their_effective_sample_size(tmp_path):
    """The guard of the definition works on stored experience: log-probs of no policy are far off, and it says so."""
    store = make_store(tmp_path / "store", groups=(4,) * 3, versions=list(range(12)))
    events: list[Event] = []
    pipeline = offline(store, steps=1, sample__min_ess="0.999", sample__skip_below_ess="0.0")
    run(pipeline, run_dir=tmp_path / "run", on_event=events.append)
    (line,) = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert 0 < line["ess_weight"] < 1


def test_a_replay_continues_where_it_stopped(tmp_path):
    """Stopped after every second step by lowering the limit, and resumed though the store has grown: the same end."""
    store = make_store(tmp_path / "store", groups=(4,) * 4, lacks=("log_probs",))
    run(offline(store, steps=6), run_dir=tmp_path / "straight")
    run(offline(store, steps=2), run_dir=tmp_path / "parts")
    with TrajectoryStore.open(store, "a") as source:
        copy_rows(source, source, source.ids()[:4])
    run(offline(store, steps=4), run_dir=tmp_path / "parts", resume=True)
    store.rename(tmp_path / "gone")
    events: list[Event] = []
    run(offline(store, steps=6), run_dir=tmp_path / "parts", resume=True, on_event=events.append)
    assert weights(tmp_path / "parts") == weights(tmp_path / "straight")
    assert [event.first_step for event in events if isinstance(event, RunStarted)] == [4]
    assert [event.step for event in events if isinstance(event, StepDone)] == [5, 6]
    with pytest.raises(RunMismatchError, match=r"replay.filters was \[\] and is now \["):
        run(offline(store, replay={"filters": ("reward>0",)}), run_dir=tmp_path / "parts", resume=True)


def test_a_signal_while_trajectories_are_gathered_begins_no_learner(tmp_path):
    """The rest is gathered by the resume, which gives the weights of a straight run."""
    stores = [make_store(tmp_path / f"store-{seed}", seed=seed) for seed in (0, 1)]
    run(offline(*stores), run_dir=tmp_path / "straight")
    events: list[Event] = []
    with at_call(TrajectoryStore.append_batch, before=lambda _: os.kill(os.getpid(), signal.SIGTERM)):
        finished = run(offline(*stores), run_dir=tmp_path / "run", on_event=events.append)
    assert events == [finished]
    assert (finished.reason, finished.steps, finished.num_trajectories) == ("interrupted", 0, 12)
    run(offline(*stores), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_what_was_gathered_is_reported_and_recorded(tmp_path):
    """One notice with every count; the sources in gather.json, and their paths in config.json."""
    rewards = [0.0, float("nan"), 1.0, 1.0]
    store = make_store(tmp_path / "store", groups=(4,), lacks=("log_probs", "advantage"), rewards=rewards)
    events: list[Event] = []
    run(offline(store, steps=1), run_dir=tmp_path / "run", on_event=events.append)
    (said,) = [event.message for event in events if isinstance(event, Notice)]
    assert said == (
        "gathered 3 trajectories of 1 store; 3 received behaviour log-probs from the initial policy; 3 received an "
        "advantage; "
        "1 have no reward and were skipped"
    )
    (source,) = json.loads((tmp_path / "run" / "gather.json").read_text())["sources"]
    assert (source["path"], source["num_stored"], source["num_chosen"]) == (str(store), 4, 3)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["inputs"]["replay.stores"] == {str(store): str(store)}


def test_rewards_that_are_all_equal_are_said_at_once(tmp_path):
    """At the first step: nothing can be learned from rewards that do not differ within a group."""
    for name, rewards in (("flat", [1.0] * 4), ("spread", [0.0, 1.0, 1.0, 1.0])):
        store = make_store(tmp_path / name, groups=(4,), lacks=("advantage",), rewards=rewards)
        events: list[Event] = []
        run(offline(store, steps=1), run_dir=tmp_path / f"{name}-run", on_event=events.append)
        said = [event.message for event in events if isinstance(event, Notice) and event.level == "warning"]
        assert [message.partition(",")[0] for message in said] == ["step 1: every advantage is 0"] * (name == "flat")


def test_a_row_whose_words_nobody_knows_counts_for_its_group_only(tmp_path):
    """Nothing of a row without a mask is learned; its reward is in its group's mean, and a step of it alone runs."""
    rows = [{"prompt_ids": [1, 2], "completion_ids": [3, i], "reward": float(i == 4)} for i in (4, 5, 6)]
    rows[2] |= {"completion_mask": [0, 0]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_files([tmp_path / "rows.jsonl"], tmp_path / "store")
    for size in (3, 1):
        events: list[Event] = []
        pipeline = changed(offline(tmp_path / "store", steps=3), sample__batch_size=str(size))
        run(pipeline, run_dir=tmp_path / f"run{size}", on_event=events.append)
        assert len([event for event in events if isinstance(event, StepDone)]) == 3
    with TrajectoryStore.open(tmp_path / "run3" / "store") as store:
        advantages = store.read_scalars("advantage")
    assert advantages[0] > 0 > advantages[1] == advantages[2]


def test_what_was_recorded_at_another_temperature_replays_with_ratio_one(tmp_path):
    """A recorder stores the temperature of sampling, and the policy that sampled scores its own samples as it did."""
    pipeline = offline(tmp_path / "store", steps=1, batch=16)
    policy = build_policy(pipeline, seed=0, device="cpu")
    tokens, scores = torch.tensor([[2, 3]] * 16), torch.empty(16, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            line = torch.log_softmax(policy.model(tokens).logits[:, -1].float() / 0.5, -1)
            chosen = torch.multinomial(line.exp(), 1)
            tokens, scores = torch.cat([tokens, chosen], 1), torch.cat([scores, line.gather(1, chosen)], 1)
    with TrajectoryRecorder(tmp_path / "store", group_size=16) as recorder:
        recorder.record(
            prompt_ids=[[2, 3]] * 16,
            completion_ids=tokens[:, 2:].tolist(),
            completions=[""] * 16,
            log_probs=scores.tolist(),
            rewards=[float(i % 2) for i in range(16)],
            temperature=0.5,
            policy_version=0,
        )
    run(pipeline, run_dir=tmp_path / "run")
    (line,) = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert (line["clip_fraction"], round(line["ess"], 4)) == (0.0, 1.0)
    assert abs(line["kl_approx"]) < 1e-6


def test_log_probs_of_an_unknown_temperature_are_asked_about(tmp_path):
    """A ratio to them needs the temperature that they are at; rows without log-probs need none, and a given one is."""
    rows = [{"prompt_ids": [1, 2], "completion_ids": [3, i], "reward": float(i == 4)} for i in (4, 5, 6)]
    for name, more in (("none", {}), ("unknown", {"log_probs": [-1.0, -2.0]}), ("half", {"log_probs": [-1, -2]})):
        given = [row | more | ({"temperature": 0.5} if name == "half" else {}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        import_files([tmp_path / f"{name}.jsonl"], tmp_path / name)
    for name in ("none", "half"):
        run(offline(tmp_path / name, steps=1), run_dir=tmp_path / f"{name}-run")
    with pytest.raises(DefinitionError, match=r"unknown has log-probs.*--set collect\.temperature=1$"):
        run(offline(tmp_path / "unknown", steps=1), run_dir=tmp_path / "asked")
    assert not (tmp_path / "asked").exists()
    run(offline(tmp_path / "unknown", steps=1, collect__temperature="0.7"), run_dir=tmp_path / "said")


@pytest.mark.parametrize("name", ["gather.json", "gather.npy"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-7]),
        lambda file: file.write_bytes(file.read_bytes()[:60] + b"7" + file.read_bytes()[61:]),
    ],
    ids=["gone", "emptied", "cut", "changed"],
)
def test_what_was_chosen_is_checked(tmp_path, name, damage):
    """What was chosen is read as it was written, or `verify` and a resume name the file; nothing is chosen again."""
    pipeline, run_dir = offline(make_store(tmp_path / "store"), steps=2), tmp_path / "run"
    run(pipeline, run_dir=run_dir)
    damage(run_dir / name)
    problems = [finding.text for finding in check_run(RunFolder.open(run_dir)) if not finding.ok]
    assert any(name in text for text in problems)
    with pytest.raises(DataError, match=name):
        run(pipeline, run_dir=run_dir, resume=True)


def test_recorded_order_without_the_first_versions_is_refused(tmp_path):
    """The versions that a step needs were evicted, or filtered out: it names the step, what there is, and a way out."""
    store = make_store(tmp_path / "store", groups=(4,), versions=[5, 5, 6, 6])
    pipeline = offline(store, batch=0, replay={"recorded_order": True})
    with pytest.raises(
        DataError, match=r"step 1 uses trajectories of policy versions 0 to 0.* versions 5 to 6"
    ) as refused:
        run(pipeline, run_dir=tmp_path / "run")
    # What was gathered is in the folder by then, so the other order needs another one.
    assert "--out OTHER_FOLDER --set replay.recorded_order=false" in str(refused.value)
    assert run(changed(pipeline, replay__recorded_order="false"), run_dir=tmp_path / "other").steps


def test_the_ledger_is_followed_where_rollouts_were_taken_as_they_arrived(tmp_path):
    """With collectors of their own a run's steps name rollouts: the replay takes the same rows, in the same order."""
    pipeline = tiny(learn__epochs="1", buffer__max_staleness="3")
    run(pipeline, run_dir=tmp_path / "run")
    rows = list(StepRows(tmp_path / "run" / "ledger.jsonl"))
    arrived = [0, 2, 1, 3, 5, 4]
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids().tolist()
    wanted = [list(range(12 * rollout + 11, 12 * rollout - 1, -1)) for rollout in arrived]
    for row, rollout, places in zip(rows, arrived, wanted, strict=True):
        row |= {"rollout": rollout, "row_ids": [ids[place] for place in places], "trajectory_ids": []}
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    replay = Replay(stores=(str(tmp_path / "run"),), recorded_order=True)
    run(dataclasses.replace(pipeline, replay=replay), run_dir=tmp_path / "again")
    assert [ids[0] // 12 for ids in ledger_of(tmp_path / "again", "trajectory_ids")] == arrived
    assert ledger_of(tmp_path / "again", "trajectory_ids") == wanted
    assert ledger_of(tmp_path / "again", "ages")[1] == [-1] * 12
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        means = store.read_scalars("task_reward").reshape(6, 12).mean(axis=1, dtype=np.float64)
    lines = list(StepRows(tmp_path / "again" / "metrics.jsonl"))
    assert [line["task_reward"] for line in lines] == [means[rollout] for rollout in arrived]
    rows[3]["row_ids"][5] = 10**6
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="the selection lacks 1 of the 12 trajectories that step 4"):
        run(dataclasses.replace(pipeline, replay=replay), run_dir=tmp_path / "broken")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_collectors_of_its_own_comes_out_again(tmp_path, monkeypatch, capsys, children):
    """Two collectors and a learner in processes of their own: losses and weights are the run's, bit for bit."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4"]
    out = ["--run", "runs/long"]
    words = ["collect", "long_running", *out, "--set", "learn.steps=10", *sizes]
    collectors = [children.run(*words, "--name", name) for name in ("collector-0", "collector-1")]
    collectors[0].until(lambda: RunFolder("runs/long").record.exists)
    assert main(["learn", *out]) == 0
    for collector in collectors:
        collector.succeed()
    assert main(["replay", "runs/long"]) == 0
    said = capsys.readouterr().out
    assert "of 10 steps are bitwise equal; the weights after step 10 are byte-identical." in said


@pytest.fixture
def small_run(tmp_path, monkeypatch, capsys):
    """`copy_digits`, three steps of eight trajectories, in runs/small."""
    monkeypatch.chdir(tmp_path)
    sizes = ["--set", "collect.group_size=4", "--set", "collect.prompts_per_rollout=2"]
    assert main(["run", "copy_digits", "--out", "runs/small", "--steps", "3", "--seed", "5", *sizes]) == 0
    capsys.readouterr()
    return tmp_path / "runs" / "small"


def test_the_command_repeats_a_run_and_reports_it(small_run, capsys):
    """Definition, changes and seed are the run's; a changed figure is found; the folder is looked at like any other."""
    assert main(["replay", "runs/small"]) == 0
    out = capsys.readouterr().out
    assert (
        "loss, reward and gradient norm of 3 steps are bitwise equal; the weights after step 3 are byte-identical"
        in out
    )
    assert "3 steps" in out
    assert "24 trajectories of 1 store; 1.00 uses of each" in out
    config = json.loads(Path("runs/small-replay/config.json").read_text())
    assert (config["definition"], config["seed"]) == ("copy_digits", 5)
    for command in (["inspect", "--grade"], ["verify"], ["show"], ["report"], ["replay", "--from-step", "1"]):
        assert main([command[0], "runs/small-replay", *command[1:]]) == 0
    assert main(["replay", "runs/small", "--out", "runs/faster", "--set", "learn.lr=1e-3"]) == 0
    assert "a difference is expected, because of these changes: learn.lr" in capsys.readouterr().out
    assert main(["replay", "runs/small"]) == 2
    assert "runs/small-replay already contains a run" in capsys.readouterr().err
    rows = list(StepRows(small_run / "metrics.jsonl"))
    rows[1]["loss"] += 1e-6
    (small_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", "runs/small", "--out", "runs/other"]) == 1
    assert (
        "the loss differs from step 2 on, in 1 of 3 steps; the largest relative difference is"
        in capsys.readouterr().out
    )


def test_the_command_learns_from_several_stores(small_run, capsys):
    """Filters, weights, epochs and steps; a resume; each batch drawn again and taken again from a checkpoint."""
    command = ["replay", "runs/small", "runs/small-replay/store", "--out", "runs/mix", "--seed", "1"]
    assert main(["replay", "runs/small"]) == 0
    options = ["--weight", "1", "--weight", "3", "--filter", "version<=1", "--set", "sample.batch_size=8"]
    assert main([*command, *options, "--steps", "2", "--set", "learn.keep_checkpoints=9"]) == 0
    capsys.readouterr()
    assert main([*command, "--resume", "--steps", "5"]) == 0
    assert "5 steps" in capsys.readouterr().out
    with TrajectoryStore.open(Path("runs/mix/store")) as own:
        assert int(own.read_scalars("policy_version").max()) == 1
        for rows in ledger_of(Path("runs/mix"), "row_ids"):
            assert np.bincount(own.read_scalars("source", rows)).tolist() == [2, 6]
    assert main(["replay", "runs/mix", "--from-step", "1"]) == 0
    assert "bitwise equal to the record: 5 steps." in capsys.readouterr().out
    assert main(["replay", "runs/small", "--out", "runs/e", "--epochs", "0.5", "--set", "sample.batch_size=4"]) == 0
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["replay"], "specify the stores to learn from"),
        (["replay", "runs/smal"], "Did you mean"),
        (["replay", "runs/small", "--filter", "rewrad>1"], "Did you mean 'reward'"),
        (["replay", "runs/small", "--filter", "reward>5"], "24 stored, 0 after 'reward>5'"),
        (["replay", "runs/small", "--weight", "1", "--weight", "2"], "one value per store: expected 1, got 2"),
        (["replay", "runs/small/store"], "there is no model folder at model"),
        (["replay", "runs/small", "--resume", "--out", "runs/none"], "there is no replay to continue"),
        (["replay", "runs/small", "--from-step", "1", "--epochs", "2"], "--epochs cannot be combined with --from-step"),
        (["run", "offline_replay"], "there is no model folder at model"),
    ],
)
def test_mistakes_are_answered(small_run, capsys, typed, words):
    """Each with what to type instead, and no folder is left behind."""
    assert main(typed) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs/small-replay").exists()


@pytest.mark.parametrize("column", ["advantage", "input_ids", "task_reward", "assistant_mask"])
def test_a_damaged_trajectory_is_not_learned_from_and_is_left_out_on_request(tmp_path, monkeypatch, capsys, column):
    """Replay, export and copy refuse it by name; with `--skip-damaged` its commit is left out, and counted."""
    monkeypatch.chdir(tmp_path)
    make_store(Path("whole"), groups=(4, 4, 4), seed=3)
    make_store(Path("store"), groups=(4, 4, 4), seed=3)
    flip_value(Path("store"), column, 5)  # of the second commit
    small = ["--set", "policy.hidden_size=16", "--set", "sample.batch_size=4", "--steps", "2"]
    commands = {
        "replay": ["replay", "store", "--definition", "copy_digits", *small, "--out"],
        "export": ["export", "store", "--to"],
        "copy": ["copy", "store", "--to"],
    }
    named = {"replay": "run", "export": "rows.jsonl", "copy": "copied"}
    for command, words in commands.items():
        assert main([*words, named[command]]) == 2
        said = capsys.readouterr().err
        assert "store: trajectories 4, 5, 6, 7 cannot be read: seg-00000000: commit 1 is damaged" in said
        assert "--skip-damaged" in said
        assert main([*words, named[command], "--skip-damaged"]) == 0
        said = capsys.readouterr().out
        assert ("4 are damaged and were skipped" if command == "replay" else "8 trajectories, 4 excluded") in said
    assert gathered_counts(RunFolder(tmp_path / "run"))["trajectories"] == 8
    with TrajectoryStore.open("copied") as copied, TrajectoryStore.open("whole") as whole:
        kept = whole.ids()[[0, 1, 2, 3, 8, 9, 10, 11]]
        assert copied.read_scalars("advantage").tolist() == whole.read_scalars("advantage", kept).tolist()
