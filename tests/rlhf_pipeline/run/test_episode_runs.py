"""Runs whose episodes have several rows: dynamic sampling, evaluations, replays, and what a run reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import Evaluate, FrozenLake, LakeMaps, Pipeline, Replay, Sample, Step, Turn
from rlhf_pipeline.exchange import copy_store
from rlhf_pipeline.report.check import check_run, check_store
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.start import run
from tests.crash._lakes import small_lake
from tests.rlhf_pipeline.small import changed
from trajectory_store import TrajectoryStore
from trajectory_store.copying import copy_store as copy_rows
from trajectory_store.recorder import TrajectoryRecorder

pytestmark = pytest.mark.slow


class Forgets(FrozenLake):
    """Every second turn shows the newest cells alone: a new row of the episode."""

    def step(self, turn: Turn) -> Step:
        step = super().step(turn)
        if turn.number % 2 or step.done:
            return step
        return dataclasses.replace(step, reply="", history=[{"role": "user", "content": str(step.reply)}])


def definition(**changes: Any) -> Pipeline:
    settings = {"collect__prompts_per_rollout": 3, "collect__group_size": 3, "learn__steps": 2}
    return small_lake(Forgets, **{**settings, **changes})


def rows_of(store: Path) -> dict[str, Any]:
    with TrajectoryStore.open(store) as opened:
        return {"row_id": opened.ids(), **opened.read(opened.ids())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, evaluated after each."""
    folder = tmp_path_factory.mktemp("episodes") / "run"
    held_out = Evaluate(prompts=LakeMaps(held_out=True), every=1, num_prompts=4, group_size=2, temperature=1.0)
    run(dataclasses.replace(definition(), evaluate=held_out), run_dir=folder)
    return folder


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_figures_count_episodes(finished):
    """Rewards, turns, lengths and pass@k are those of episodes; the step and its ledger have all rows."""
    rows = rows_of(finished / "store")
    last = rows["episode_row"] == rows["episode_size"] - 1
    assert (rows["episode_size"] > 1).any()
    turns = np.array([(np.asarray(spans)[:, 1] == 1).sum() for spans in rows["turn_spans"]])
    lengths = np.array([len(ids) for ids in rows["input_ids"]]) - rows["num_prompt_tokens"]
    for rollout, line in enumerate(lines(finished, "metrics.jsonl")[:2]):
        of_rollout = rows["group_id"] // 3 == rollout
        assert (of_rollout & last).sum() == 9
        assert line["task_reward"] == pytest.approx(np.nanmean(rows["task_reward"][of_rollout]), rel=1e-6)
        assert line["turns"] == pytest.approx(turns[of_rollout].sum() / 9)
        assert line["completion_length"] == pytest.approx(lengths[of_rollout].sum() / 9)
        assert line["num_trajectories"] == of_rollout.sum()
        assert line["num_failed"] == 0
    ledger = lines(finished, "ledger.jsonl")
    assert sorted(ledger[0]["row_ids"] + ledger[1]["row_ids"]) == rows["row_id"].tolist()
    assert ledger[0].get("left_out", {}).get("failed", 0) == 0
    (evaluations,) = (finished / "evaluations").iterdir()
    evaluated = rows_of(evaluations)
    ends = evaluated["episode_row"] == evaluated["episode_size"] - 1
    for line in lines(finished, "metrics.jsonl")[:2]:
        at = evaluated["policy_version"] == line["step"]
        assert (ends & at).sum() == 8
        assert line["evaluation/reward"] == pytest.approx(np.nanmean(evaluated["task_reward"][at]), rel=1e-6)
        right = evaluated["task_reward"][ends & at] >= 1.0
        assert line["evaluation/pass@1"] == pytest.approx(right.mean())
        assert line["evaluation/failed"] == 0


def test_a_step_is_taken_again_with_the_same_bits(finished):
    """The learner chooses the same rows of the same episodes, and computes the recorded loss."""
    taken = list(rerun(definition(), plan_rerun(finished, from_step=2), seed=0, device="cpu"))
    assert [step.same_bits and step.ok for step in taken] == [True]


def test_reports_do_not_call_rows_failed(finished):
    """`stats`, `group` and `verify` know that only the last row of an episode has a reward."""
    with contextlib.closing(View(finished)) as view:
        stats, group = view.stats(), view.group(0)
        assert (stats["no_reward"], stats["group_sizes"]) == (0, {3: 6})
        assert (group["num"], group["num_failed"]) == (3, 0)
        assert len(group["rows"]) > 3
        assert view.about()["failed"] == 0
    assert not [finding for finding in check_run(RunFolder.open(finished)) if not finding.ok]


@pytest.mark.parametrize("filters", [(), ("reward>=0",)])
def test_a_replay_gathers_whole_episodes(filters, finished, tmp_path):
    """A filter on the reward takes the other rows of its episodes along; advantages computed again are the run's."""
    source = rows_of(finished / "store")
    replay = Replay(stores=(str(finished / "store"),), epochs=1, filters=filters)
    pipeline = dataclasses.replace(definition(), replay=replay, sample=Sample(batch_size=4))
    run(pipeline, run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "store")
    last = source["episode_row"] == source["episode_size"] - 1
    episodes = {*source["episode_id"][last & (source["task_reward"] >= 0 if filters else True)].tolist()}
    at = np.isin(source["episode_id"], [*episodes])
    assert sorted(rows["source_row"]) == source["row_id"][at].tolist()
    order = np.argsort(rows["source_row"])
    for name in ("input_ids", "episode_row", "episode_size", "advantage", "trajectory_id"):
        for one, other in zip([rows[name][row] for row in order], np.flatnonzero(at), strict=True):
            np.testing.assert_array_equal(one, source[name][other])
    for line in lines(tmp_path / "run", "ledger.jsonl"):
        used = np.isin(rows["row_id"], line["row_ids"])
        named = {*rows["episode_id"][used].tolist()}
        assert np.isin(rows["episode_id"], [*named]).sum() == len(line["row_ids"])
        assert len(named) <= 4


def test_a_copy_keeps_episodes_and_verify_misses_rows(finished, tmp_path):
    """A filter on the reward copies the other rows of its episodes too; a store without some of them is reported."""
    source = rows_of(finished / "store")
    copy_store(finished / "store", tmp_path / "copy", filters=["reward>=0"])
    chosen = source["episode_id"][(source["episode_row"] == source["episode_size"] - 1) & (source["task_reward"] >= 0)]
    assert rows_of(tmp_path / "copy")["trajectory_id"].tolist() == (
        source["trajectory_id"][np.isin(source["episode_id"], chosen)].tolist()
    )
    assert all(finding.ok for finding in check_store(tmp_path / "copy"))
    first = source["row_id"][source["episode_row"] == 0]
    with TrajectoryStore.open(finished / "store") as opened:
        copy_rows(opened, tmp_path / "part", first)
    several = int((source["episode_size"][source["episode_row"] == 0] > 1).sum())
    problems = [finding.text for finding in check_store(tmp_path / "part") if not finding.ok]
    assert "but the adjacent row is missing" in problems[0]
    assert problems[0].startswith(f"{several} conversation")


def test_advantages_of_recorded_episodes(tmp_path):
    """A store without advantages, as a recorder leaves it: rows of an episode get one, by its outcome."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(
            prompt_ids=[[1], [1, 2, 3], [1], [1, 4, 5]],
            completion_ids=[[2], [6], [4], [7]],
            completions=[""] * 4,
            log_probs=[[-1.0]] * 4,
            rewards=[None, 1.0, None, 0.0],
            groups=["q"] * 4,
            episodes=["a", "a", "b", "b"],
            temperature=1.0,
        )
    replay = Replay(stores=(str(tmp_path / "store"),), epochs=1)
    pipeline = changed(definition(), write__estimator="mean", write__kl_coef="0.0")
    run(dataclasses.replace(pipeline, replay=replay, sample=Sample(batch_size=2)), run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "store")
    assert rows["advantage"].tolist() == [0.5, 0.5, -0.5, -0.5]
    (line,) = lines(tmp_path / "run", "ledger.jsonl")
    assert line["row_ids"] == rows["row_id"].tolist()


def test_dynamic_sampling_counts_episodes(tmp_path):
    """Groups are kept by the rewards of their episodes, with all rows."""
    run(definition(collect__dynamic=2, learn__steps=1), run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "store")
    last = rows["episode_row"] == rows["episode_size"] - 1
    assert np.unique(rows["group_id"][last], return_counts=True)[1].tolist() == [3, 3, 3]
    assert (np.bincount(rows["episode_id"]) == rows["episode_size"][last][np.argsort(rows["episode_id"][last])]).all()
    (line,) = lines(tmp_path / "run", "metrics.jsonl")
    assert line["num_trajectories"] == len(rows["row_id"])
