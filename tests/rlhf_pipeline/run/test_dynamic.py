"""Dynamic sampling in runs: which prompts are kept, at the bound, after kills, and with collectors of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Evaluate, Pipeline
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.environments.environment import Step, Turn
from rlhf_pipeline.errors import DefinitionError, RunMismatchError
from rlhf_pipeline.functional.advantage import BATCH_ESTIMATORS
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.report.inspect import grade
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.events import Event, EventHandler, Notice, RolloutDone, RunStarted
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from rlhf_pipeline.user_code.arguments import bind
from tests.rlhf_pipeline.small import changed, collect, count_kills, learn, tiny, weights
from trajectory_store import TrajectoryStore

WITH_SPREAD = (0, 1, 9, 10, 11, 14, 19, 20)
KEPT = [[0, 1], [9, 10], [12, 14], [19, 20]]
"""By hand: of rounds of 2 prompts, at most 3 of them, so rollout r has the prompts 6r to 6r + 5. The first is full at
once; the second after all rounds, with 11 to spare; the third has 14 alone and is filled with 12; the last after 2."""
ROUNDS = [1, 3, 3, 2]
DROPPED = [0.0, 1 - 2 / 5, 1 - 2 / 6, 1 - 2 / 3]
COLUMNS = [
    "trajectory_id",
    "group_id",
    "prompt_cursor",
    "prompt",
    "completion",
    "task_reward",
    "advantage",
    "input_ids",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Prompt number `n` is `n=`."""

    as_chat: bool = False

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a number."""
        return Prompt(text=f"{cursor}=", answer=cursor)


def reward_of(prompt: str, completion: str) -> float:
    """A reward that tells completions apart, of some prompts only."""
    if number(prompt) not in WITH_SPREAD:
        return 1.0
    return sum(place * ord(one) for place, one in enumerate(completion, 1)) / 100


class Twice:
    """Asks once more, whatever the policy says."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Show the prompt."""
        return prompt.text

    def step(self, turn: Turn) -> Step:
        """Ask again."""
        return Step(reply="=")


def number(prompt: str) -> int:
    return int(prompt.removesuffix("="))


def dynamic(reward: Callable[..., float] = reward_of, **changes: str) -> Pipeline:
    settings = {
        "collect__prompts_per_rollout": "2",
        "collect__dynamic": "3",
        "learn__steps": "4",
        "learn__epochs": "1",
    }
    return dataclasses.replace(tiny(reward=reward, **{**settings, **changes}), prompts=Numbers())


def rows_of(run_dir: Path) -> dict[str, list[Any]]:
    with TrajectoryStore.open(run_dir / "store", mode="r") as store:
        found = store.read(store.ids(), COLUMNS)
    return {name: [np.asarray(one).tolist() for one in values] for name, values in found.items()}


def prompts_of(run_dir: Path) -> list[list[int]]:
    """The prompts of each rollout, each of which has 4 trajectories."""
    prompts = [number(prompt) for prompt in rows_of(run_dir)["prompt"]]
    assert prompts == np.repeat(prompts[::4], 4).tolist()
    return np.reshape(prompts[::4], (-1, 2)).tolist()


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_groups_that_are_kept_are_those_with_spread(tmp_path):
    """The prompts, groups and figures of each rollout, computed by hand; the bound is told, and `verify` agrees."""
    events: list[Event] = []
    run(dynamic(), run_dir=tmp_path / "run", on_event=events.append)
    assert prompts_of(tmp_path / "run") == KEPT
    rows = rows_of(tmp_path / "run")
    assert rows["group_id"] == np.repeat(np.arange(8), 4).tolist()
    assert rows["trajectory_id"] == list(range(32))
    assert rows["prompt_cursor"] == [number(prompt) for prompt in rows["prompt"]]
    lines = lines_of(tmp_path / "run")
    assert [line["rounds"] for line in lines] == ROUNDS
    assert [line["dropped_groups"] for line in lines] == pytest.approx(DROPPED)
    assert [line["flat_groups"] for line in lines] == [0.0, 0.0, 0.5, 0.0]
    rewards = np.reshape(rows["task_reward"], (4, 8))
    assert [line["task_reward"] for line in lines] == pytest.approx(rewards.mean(1).tolist())
    told = [event.message for event in events if isinstance(event, Notice) and "collect.dynamic" in event.message]
    assert told == [
        "rollout 2: groups with spread in their rewards after 3 rounds (collect.dynamic): 1 of 6; groups without "
        "spread that fill the rollout: 1."
    ]
    record = RunFolder.open(tmp_path / "run")
    assert [finding.text for finding in check_run(record) if not finding.ok] == []
    with closing(View(record.address)) as view:
        check = grade(view, partial(bind, reward_of))
    assert check is not None
    assert (check["rollouts"], check["rollouts_partial"], check["agrees"]) == (4, 0, True)


@pytest.mark.parametrize("estimator", BATCH_ESTIMATORS)
def test_the_batch_of_an_estimator_is_what_is_kept(estimator, tmp_path):
    """Estimators over a batch see a rollout's groups, wherever their prompts are."""
    run(dynamic(write__estimator=estimator, learn__steps="2"), run_dir=tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    for first in (0, 8):
        returns = np.array(rows["task_reward"][first : first + 8], np.float64)
        by_group = estimator != "reinforce_pp"
        centred = returns - (returns.reshape(2, 4).mean(1).repeat(4) if by_group else returns.mean())
        if estimator == "gdpo":
            centred /= returns.reshape(2, 4).std(1, ddof=1).repeat(4) + 1e-6
        spread = (returns if estimator == "grpo_batch" else centred).std(ddof=1)
        assert rows["advantage"][first : first + 8] == pytest.approx(centred / spread, rel=1e-4)


def test_a_write_path_that_drops_groups_leaves_the_bound_with_fewer(tmp_path):
    """With `zero_variance=drop` what fills a rollout is not stored, and a rollout without spread is an empty step."""
    pipeline = dynamic(lambda prompt, completion: reward_of(prompt, completion) if "4" in prompt else 0.0)
    run(changed(pipeline, write__zero_variance="drop", buffer__max_staleness="0"), run_dir=tmp_path / "run")
    assert [number(prompt) for prompt in rows_of(tmp_path / "run")["prompt"]] == [14] * 4
    assert [line["rounds"] for line in lines_of(tmp_path / "run")] == [3] * 4
    assert [line["num_trajectories"] for line in lines_of(tmp_path / "run")] == [0, 0, 4, 0]


def test_one_round_is_a_run_without(tmp_path):
    """Rollouts that are full after one round have the tokens, weights and rows of a run that keeps every group."""
    one = dynamic(lambda prompt, completion: reward_of("0=", completion), learn__steps="1")
    run(one, run_dir=tmp_path / "dynamic")
    run(changed(one, collect__dynamic="1"), run_dir=tmp_path / "plain")
    with TrajectoryStore.open(tmp_path / "plain" / "store", mode="r") as store:
        assert "prompt_cursor" not in store.schema
        tokens = [row.tolist() for row in store.read(store.ids(), ["input_ids"])["input_ids"]]
    assert tokens == rows_of(tmp_path / "dynamic")["input_ids"]
    assert weights(tmp_path / "dynamic") == weights(tmp_path / "plain")
    assert "rounds" not in lines_of(tmp_path / "plain")[0]


def killed_once(run_dir: Path) -> EventHandler:
    """Return what kills its process at the first notice of the bound."""

    def look(event: Event) -> None:
        said = run_dir.parent / "said"
        if isinstance(event, Notice) and "collect.dynamic" in event.message and not said.exists():
            said.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return look


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_kills_in_any_round_change_nothing(tmp_path, children):
    """Killed by a reward in first and later rounds, and once between commit and step: rows, weights and figures."""
    calls = tmp_path / "calls"

    def deadly(prompt, completion):
        count = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(count))
        if count % 21 == 0 and count <= 126:
            os.kill(os.getpid(), signal.SIGKILL)
        return reward_of(prompt, completion)

    pipeline = dynamic(collect__reward_concurrency="1", write__kl_coef="0.1", write__kl_target="0.02")
    run(pipeline, run_dir=tmp_path / "straight")
    killed, again = tmp_path / "killed", dataclasses.replace(pipeline, reward=deadly)
    assert count_kills(children, again, killed, killed_once(killed)) == 7
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "straight")
    assert prompts_of(tmp_path / "killed") == KEPT
    assert weights(tmp_path / "killed") == weights(tmp_path / "straight")
    names = ["rounds", "dropped_groups", "flat_groups", "task_reward", "completion_length", "kl_coef", "grad_norm"]
    killed, straight = (lines_of(tmp_path / name) for name in ("killed", "straight"))
    assert [[line[name] for name in names] for line in killed] == [[line[name] for name in names] for line in straight]


def test_a_resume_with_other_rounds_is_refused(tmp_path):
    """The prompts of a rollout depend on them."""
    run(dynamic(learn__steps="1"), run_dir=tmp_path / "run")
    with pytest.raises(RunMismatchError, match=r"collect\.dynamic was 3 and is now 4"):
        run(dynamic(collect__dynamic="4"), run_dir=tmp_path / "run", resume=True)
    with pytest.raises(DefinitionError, match="selects groups whose rewards differ, but group_size is 1"):
        dynamic(collect__group_size="1", write__estimator="reinforce_pp")


def test_collectors_of_their_own_keep_the_same_prompts(tmp_path):
    """A collector beside a learner; the learner takes whole rollouts, and the record of each has its figures."""
    pipeline = dynamic(buffer__max_staleness="4")

    def stop(event: Event) -> None:
        if isinstance(event, RunStarted) or (isinstance(event, RolloutDone) and event.rollout == 3):
            os.kill(os.getpid(), signal.SIGTERM)

    run_dir = tmp_path / "run"
    learn(pipeline, run_dir=run_dir, on_event=stop)
    collect(pipeline, run_dir=run_dir, on_event=stop)
    learn(pipeline, run_dir=run_dir)
    assert prompts_of(run_dir) == KEPT
    lines = lines_of(run_dir)
    assert [line["rounds"] for line in lines] == ROUNDS
    assert [line["num_trajectories"] for line in lines] == [8] * 4
    assert [finding.text for finding in check_run(RunFolder.open(run_dir)) if not finding.ok] == []


def test_conversations_and_evaluations(tmp_path):
    """Rounds of conversations are joined; an evaluation keeps every prompt."""
    pipeline = dynamic(collect__max_turns="2", learn__steps="2")
    pipeline = dataclasses.replace(
        pipeline, environment=Twice, evaluate=Evaluate(prompts=CopyDigits(num_digits=2), num_prompts=3, every=2)
    )
    run(pipeline, run_dir=tmp_path / "run")
    assert prompts_of(tmp_path / "run") == KEPT[:2]
    lines = lines_of(tmp_path / "run")
    assert [line["turns"] for line in lines] == [2.0, 2.0]
    with TrajectoryStore.open(tmp_path / "run" / "store", mode="r") as store:
        spans = store.read(store.ids(), ["turn_spans"])["turn_spans"]
    assert [len(one) for one in spans] == [3] * 16
    assert lines[1]["evaluation/failed"] == 0
