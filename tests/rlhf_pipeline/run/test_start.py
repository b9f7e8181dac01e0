from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch

from rlhf_pipeline import (
    token_match,
)
from rlhf_pipeline.buffer.stored_groups import StoredGroups
from rlhf_pipeline.errors import MissingPathError, RewardError, RunExistsError, RunMismatchError
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.build import build_models
from rlhf_pipeline.run.events import Event, Notice, RunFinished, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.moments import at_call
from tests.rlhf_pipeline import small
from tests.rlhf_pipeline.small import weights
from trajectory_store import TrajectoryStore

SWITCH = {"fail": ()}
"""The starts of the completions that the reward function below fails on; a test sets them and sets them back."""


def fragile_reward(prompt, completion, answer, meta):
    if any(completion.startswith(start) for start in SWITCH["fail"]):
        raise ValueError("the grader is down")
    return token_match(prompt, completion, answer, meta)


def always_one(prompt, completion, answer, meta):
    return 1.0


tiny = functools.partial(small.tiny, reward=fragile_reward)


@pytest.fixture
def fail_on():
    def set_failing(*starts: str) -> None:
        SWITCH["fail"] = starts

    yield set_failing
    SWITCH["fail"] = ()


def test_a_run_leaves_everything_it_promises(tmp_path):
    """Metrics, ledger, checkpoints and trajectories agree with each other and with the events."""
    events: list[Event] = []
    finished = run(tiny(), run_dir=tmp_path / "run", on_event=events.append)
    assert finished.reason == "steps"
    assert finished.num_trajectories == 3 * 12
    assert [type(event) for event in events] == [RunStarted, *[StepDone] * 6, RunFinished]

    metrics = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    ledger = list(StepRows(tmp_path / "run" / "ledger.jsonl"))
    assert [row["step"] for row in metrics] == [row["step"] for row in ledger] == [1, 2, 3, 4, 5, 6]
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        assert store.verify().ok
        ids, versions = store.ids(), store.read_scalars("policy_version")
        rewards = store.read_scalars("task_reward")
        rows = store.read(ids[:1], ["prompt", "completion", "meta", "input_ids", "num_prompt_tokens"])
    assert versions.tolist() == [0] * 12 + [2] * 12 + [4] * 12
    for number, row in enumerate(ledger):
        expected = ids[versions == number - number % 2]
        assert sorted(row["row_ids"]) == sorted(expected.tolist())
        assert set(row["ages"]) == {number % 2}
        assert row["ess"] == pytest.approx(metrics[number]["ess"])
    assert [row["use_count"] for row in metrics] == [row["use_count_max"] for row in metrics] == [1, 2, 1, 2, 1, 2]
    assert ["task_reward" not in row for row in metrics] == [False, True] * 3
    documented = {"clip_fraction", "ess", "entropy", "grad_norm", "staleness", "padding_efficiency"}
    assert all(documented <= row.keys() for row in metrics)
    assert metrics[2]["task_reward"] == pytest.approx(rewards[versions == 2].mean())
    meta = json.loads(rows["meta"][0])
    assert rows["prompt"][0] == meta["answer"] + "="
    assert len(rows["input_ids"][0]) > rows["num_prompt_tokens"][0] == 3


def test_the_reference_is_scored_in_the_layout_of_the_update():
    """Both models of a run go through the same code path."""
    models = build_models(tiny(loss__kl_to_ref_coeff="0.1", learn__layout="packed"), seed=0, device="cpu")
    assert models.reference.scoring_layout == "packed"


def test_every_sampled_log_prob_is_what_the_policy_scores(tmp_path):
    """Stored behaviour log-probs equal teacher forcing with the weights that sampled them, within 1e-5."""
    run(tiny(learn__steps="1", learn__epochs="1", collect__temperature="0.7"), run_dir=tmp_path / "run")
    policy = build_models(tiny(collect__temperature="0.7"), seed=0, device="cpu").policy
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        batch = store.read_padded(store.ids(), ["input_ids", "assistant_mask", "log_probs"])
    ids = torch.from_numpy(batch["input_ids"]).long()
    mask = torch.from_numpy(batch["assistant_mask"]).bool()
    attention = torch.arange(ids.shape[1]) < torch.from_numpy(batch["lengths"])[:, None]
    with torch.no_grad():
        scored = policy.log_probs(ids, attention, mask)
    stored = torch.from_numpy(batch["log_probs"])
    assert mask.any()
    assert (scored - stored)[mask].abs().max() < 1e-5
    assert stored[attention & ~mask].isnan().all()


def test_a_resumed_run_equals_the_straight_one(tmp_path):
    """Stopped after any number of steps and resumed, the weights come out byte for byte the same."""
    run(tiny(), run_dir=tmp_path / "straight")
    for first in (1, 3, 4):
        folder = tmp_path / f"stopped-{first}"
        run(tiny(learn__steps=str(first)), run_dir=folder)
        run(tiny(), run_dir=folder, resume=True)
        assert weights(folder) == weights(tmp_path / "straight")
        assert len(StepRows(folder / "ledger.jsonl")) == 6


def test_the_random_numbers_of_a_run_are_its_own(tmp_path):
    """What torch's generator held before a run has no part in what it holds after it, which the checkpoint keeps."""
    states = []
    for before in (1, 2):
        torch.manual_seed(before)
        run(tiny(learn__steps="1"), run_dir=tmp_path / str(before))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_one_failing_reward_call_fails_one_trajectory(tmp_path, fail_on):
    """Failed trajectories are stored with their error, left out of the ledger, and the run goes on."""
    fail_on(*"01234")
    events: list[Event] = []
    finished = run(tiny(), run_dir=tmp_path / "run", on_event=events.append)
    assert finished.steps == 6
    notices = [event.message for event in events if isinstance(event, Notice)]
    assert notices
    assert "the grader is down" in notices[0]
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids, rewards = store.ids(), store.read_scalars("task_reward")
        reasons, meta = store.read_scalars("finish_reason"), store.read_scalars("meta")
        advantages = store.read_scalars("advantage")
    failed = np.isnan(rewards)
    assert len(ids) == 36
    assert 0 < failed.sum() < 36
    assert set(np.asarray(reasons)[failed]) == {"failed"}
    assert all("the grader is down" in json.loads(text)["error"] for text in np.asarray(meta)[failed])
    assert (advantages[failed] == 0).all()
    used = {row_id for row in StepRows(tmp_path / "run" / "ledger.jsonl") for row_id in row["row_ids"]}
    assert used == set(ids[~failed].tolist())


def test_a_reward_function_that_always_raises_loses_nothing(tmp_path, fail_on):
    """The run stops with the cause and the next step; mended and resumed, it equals a run that never failed."""
    run(tiny(), run_dir=tmp_path / "straight")
    run(tiny(learn__steps="2"), run_dir=tmp_path / "run")
    fail_on("")
    with pytest.raises(RewardError, match=r"all 12 calls .* failed; .*the grader is down.*--resume"):
        run(tiny(), run_dir=tmp_path / "run", resume=True)
    fail_on()
    run(tiny(), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_the_kl_penalty_runs_on_the_write_path(tmp_path):
    """With a KL coefficient, reference log-probs and the return are stored, and the controller survives a resume."""
    changes = {"write__kl_coef": "0.5", "write__kl_target": "0.01", "write__kl_horizon": "20"}
    run(tiny(**changes), run_dir=tmp_path / "straight")
    run(tiny(**changes, learn__steps="3"), run_dir=tmp_path / "run")
    run(tiny(**changes), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids()
        rows = store.read(ids, ["log_probs", "ref_log_probs", "assistant_mask", "task_reward", "return", "kl_coef"])
    for index in range(len(ids)):
        mask = rows["assistant_mask"][index].astype(bool)
        k1 = (rows["log_probs"][index][mask] - rows["ref_log_probs"][index][mask]).sum(dtype=np.float64)
        expected = rows["task_reward"][index] - rows["kl_coef"][index] * k1
        assert rows["return"][index] == pytest.approx(expected, abs=1e-5)
    assert len(set(rows["kl_coef"].tolist())) > 1
    metrics = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert metrics[-1]["kl_k1"] != 0


class Killed(BaseException):
    """Ends a run as a kill does, which no handler of errors sees."""


def dies_after(step: int) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == step:
            raise Killed

    return on_event


def test_an_adaptive_coefficient_continues_after_a_kill(tmp_path):
    """Rollouts that were stored after the checkpoint advance the controller again, so the weights come out the same."""
    changes = {"write__kl_coef": "0.5", "write__kl_target": "0.01", "write__kl_horizon": "20"}
    changes |= {"learn__epochs": "1", "learn__checkpoint_every": "4"}
    run(tiny(**changes), run_dir=tmp_path / "straight")
    with pytest.raises(Killed):  # after step 3 and before the first checkpoint behind step 0
        run(tiny(**changes), run_dir=tmp_path / "run", on_event=dies_after(3))
    run(tiny(**changes), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")
    coefs = [[row["kl_coef"] for row in StepRows(tmp_path / n / "metrics.jsonl")] for n in ("run", "straight")]
    assert coefs[0] == coefs[1]
    assert len(set(coefs[0])) > 1


@pytest.mark.parametrize("drops", [False, True], ids=["all groups", "groups without spread are dropped"])
@pytest.mark.parametrize("ring", ["none", "14"], ids=["keeps all", "ring"])
def test_what_was_stored_before_a_kill_is_looked_for_and_nothing_else(tmp_path, drops, ring):
    """Whole rollouts are used again, those that a ring has lost in part are sampled again; new ones are not looked for.

    A rollout is in the store in part where groups of it were dropped, or a ring of 14 holds two of its 12 rows.
    """
    changes = {"buffer__max_trajectories": ring, "learn__epochs": "1", "buffer__max_staleness": "0"}
    changes |= {"learn__checkpoint_every": "6"}
    changes |= {"write__zero_variance": "drop", "loss__entropy_coeff": "0"} if drops else {}
    with at_call(StoredGroups.rows) as searches:
        run(tiny(**changes), run_dir=tmp_path / "straight")
        with pytest.raises(Killed):
            run(tiny(**changes), run_dir=tmp_path / "run", on_event=dies_after(4))
        assert searches == []
        run(tiny(**changes), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")
    assert [search.arguments["first"] // 3 for search in searches] == [0, 1, 2, 3]


@pytest.mark.parametrize(("zero_variance", "strategy"), [("drop", "fresh"), ("mark", "uniform"), ("keep", "variance")])
def test_a_rollout_without_spread_counts_as_a_step(tmp_path, zero_variance, strategy):
    """With nothing to learn from, the step is recorded, a notice says so, and the run goes on."""
    pipeline = small.tiny(reward=always_one, write__zero_variance=zero_variance, sample__strategy=strategy)
    events: list[Event] = []
    finished = run(pipeline, run_dir=tmp_path / "run", on_event=events.append)
    assert finished.steps == 6
    assert any("nothing to learn from" in event.message for event in events if isinstance(event, Notice))
    assert [row["row_ids"] for row in StepRows(tmp_path / "run" / "ledger.jsonl")] == [[]] * 6


def test_groups_without_spread_can_be_dropped(tmp_path, fail_on):
    """With `zero_variance=drop` such groups never reach the store, and a resume does not sample them into it."""
    changes = {"write__zero_variance": "drop", "loss__entropy_coeff": "0"}
    run(tiny(**changes), run_dir=tmp_path / "straight")
    run(tiny(**changes, learn__steps="3"), run_dir=tmp_path / "run")
    run(tiny(**changes), run_dir=tmp_path / "run", resume=True)
    counts = []
    for name in ("straight", "run"):
        with TrajectoryStore.open(tmp_path / name / "store") as store:
            counts.append(sorted(store.read_scalars("trajectory_id").tolist()))
            rewards, groups = store.read_scalars("task_reward"), store.read_scalars("group_id")
            assert all(np.ptp(rewards[groups == group]) > 0 for group in np.unique(groups))
    assert counts[0] == counts[1]


def test_a_signal_finishes_the_step_and_saves(tmp_path):
    """SIGTERM in the middle stops after the step; resumed, the run equals the straight one."""
    run(tiny(), run_dir=tmp_path / "straight")

    def stop_at_three(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    finished = run(tiny(), run_dir=tmp_path / "run", on_event=stop_at_three)
    assert (finished.reason, finished.steps) == ("interrupted", 3)
    run(tiny(), run_dir=tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "straight")


def test_runs_outside_the_main_thread(tmp_path):
    """Python gives other threads no signals; a run there works all the same."""
    results: list[RunFinished] = []
    thread = threading.Thread(target=lambda: results.append(run(tiny(learn__steps="2"), run_dir=tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0].steps == 2


def test_a_target_ends_the_run_early(tmp_path):
    """The mean reward of the last rollouts decides, at the end of a rollout's updates."""
    finished = run(tiny(learn__stop_at_reward="0.0", learn__stop_window="2"), run_dir=tmp_path / "run")
    assert (finished.reason, finished.steps) == ("target", 4)


def test_folders_are_checked(tmp_path):
    """An existing run, a missing run, a changed definition and a run in use each get their own sentence."""
    folder = tmp_path / "run"
    with pytest.raises(MissingPathError, match="there is no run at"):
        run(tiny(), run_dir=folder, resume=True)
    run(tiny(learn__steps="2"), run_dir=folder)
    before = weights(folder)
    with pytest.raises(RunExistsError, match="add --resume"):
        run(tiny(), run_dir=folder)
    with pytest.raises(RunMismatchError, match=r"learn.beta2 was 0.95 and is now 0.5"):
        run(tiny(learn__beta2="0.5"), run_dir=folder, resume=True)
    with pytest.raises(RunMismatchError, match="seed was 0 and is now 1"):
        run(tiny(), run_dir=folder, seed=1, resume=True)
    with RunFolder(folder).lock(), pytest.raises(RunExistsError, match=f"in use by process {os.getpid()}"):
        run(tiny(), run_dir=folder, resume=True)
    assert weights(folder) == before


def test_a_start_that_was_killed_before_its_record_leaves_the_folder_free(tmp_path):
    """With a lock and an empty log and no config.json there is no run, so a new one may begin there."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("lock", "log.txt", ".config.json.tmp"):
        (folder / name).touch()
    assert run(tiny(learn__steps="1"), run_dir=folder).steps == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RunExistsError):
        run(tiny(), run_dir=tmp_path / "mine")


def test_a_model_that_is_not_there_leaves_no_folder(tmp_path):
    """The message names the folder and how to make one; nothing was made."""
    from rlhf_pipeline import PretrainedPolicy

    pipeline = dataclasses.replace(tiny(), policy=PretrainedPolicy(path=str(tmp_path / "nowhere")))
    with pytest.raises(MissingPathError, match="nowhere"):
        run(pipeline, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_figures_of_the_newest_use_of_each_token(tmp_path):
    """Stored log-prob and entropy are those of the weights before the newest step on a row; what is learned is not."""
    settings = {"learn__steps": "2", "learn__checkpoint_every": "1", "learn__keep_checkpoints": "3"}
    run(tiny(**settings), run_dir=tmp_path / "plain")
    run(tiny(**settings, learn__keep_token_figures="true"), run_dir=tmp_path / "run")
    assert weights(tmp_path / "plain") == weights(tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "plain" / "store") as store:
        assert "entropy" not in store.schema
    models = build_models(tiny(), seed=0, device="cpu")
    before = RunFolder.open(tmp_path / "run").saved()[-2]  # of step 1: both steps learn from all rows
    models.policy.model.load_state_dict(safetensors.torch.load_file(before / "model.safetensors"), strict=False)
    model = models.policy.model.double()
    view = View(tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        rows = store.read(store.ids())
    for at, id in enumerate(view.stored.store.ids().tolist()):
        tokens, own = torch.tensor(rows["input_ids"][at]).long(), rows["assistant_mask"][at]
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        log_probs = scores.gather(1, tokens[1:, None])[:, 0].numpy()[own[1:]]
        entropy = -(scores.exp() * scores).sum(-1).numpy()[own[1:]]
        np.testing.assert_allclose(rows["policy_log_probs"][at][own], log_probs, atol=1e-5)
        np.testing.assert_allclose(rows["entropy"][at][own], entropy, atol=1e-5)
        assert np.isnan(rows["entropy"][at][~own]).all()
        shown = view.trajectory(id)
        assert [value is not None for value in shown["entropy"]] == own.tolist()
        assert shown["policy"][-1] == rows["policy_log_probs"][at][-1]
    view.close()
