"""Several named rewards in a run: columns, curves, components of a dict, and estimators that take them one by one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlhf_pipeline import (
    Collect,
    Evaluate,
    Learn,
    MCAdvantage,
    Pipeline,
    Prompt,
    Prompts,
    Replay,
    Reward,
    Sample,
    Step,
    TinyPolicy,
    TrajectoryReplayBuffer,
    Turn,
)
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import TURN_REWARDS, TURNS, named_reward
from rlhf_pipeline.config import WritePath
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.functional.test_advantage import gdpo_by_the_paper
from tests.rlhf_pipeline.small import sums_collector, talker
from trajectory_store import TrajectoryStore


def digits(completion: str) -> float:
    """Pay for digits."""
    return float(sum(letter.isdigit() for letter in completion))


def short(completion: str) -> float | None:
    """Pay for brevity; where nothing was said it does not apply."""
    return 1.0 / len(completion) if completion else None


def pipeline(**changes: Any) -> Pipeline:
    """Return two small rollouts."""
    asked = Pipeline(
        name="named",
        policy=TinyPolicy(alphabet="0123456789=ab", hidden_size=8, num_layers=1, num_heads=1),
        prompts=Prompts(rows=[{"question": f"{n}=", "answer": str(n)} for n in range(4)], as_chat=False),
        reward=(digits, Reward(short, weight=0.5)),
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
        learn=Learn(steps=2, checkpoint_every=1),
    )
    return replace(asked, **changes)


def stored(folder: Path) -> dict[str, Any]:
    with TrajectoryStore.open(folder / "store") as store:
        return store.read(store.ids())


def test_a_run_with_gdpo_learns_from_each_reward_in_its_group(tmp_path: Path) -> None:
    """The stored advantages of each rollout are the authors' formula of its named rewards and the weights."""
    run(pipeline(write=WritePath(estimator="gdpo")), run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run")
    for rollout in range(2):
        at = rows["group_id"] // 2 == rollout
        values = np.stack([rows["reward_digits"][at], rows["reward_short"][at]], 1).astype(float)
        want = gdpo_by_the_paper(values.tolist(), rows["group_id"][at].tolist(), (1.0, 0.5))
        assert rows["advantage"][at].tolist() == pytest.approx(want, abs=1e-5)
    total = rows["reward_digits"] + 0.5 * np.nan_to_num(rows["reward_short"])
    np.testing.assert_allclose(rows["task_reward"], total, atol=1e-6)
    with pytest.raises(DefinitionError, match="a penalty in the sum of the rewards, but estimator=gdpo"):
        WritePath(estimator="gdpo", kl_coef=0.1)


def test_a_replay_with_gdpo_reads_the_stored_rewards_one_by_one(tmp_path: Path) -> None:
    """Over all that was gathered; a store without their columns is refused in one sentence."""
    run(pipeline(), run_dir=tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "run" / "store", mode="a") as store:
        store.update(store.ids(), advantage=np.full(len(store), np.nan, np.float32))
    asked = pipeline(
        write=WritePath(estimator="gdpo"),
        replay=Replay(stores=(str(tmp_path / "run"),)),
        sample=Sample(batch_size=16),
        learn=Learn(steps=1),
    )
    run(asked, run_dir=tmp_path / "again")
    rows = stored(tmp_path / "again")
    values = np.stack([rows["reward_digits"], rows["reward_short"]], 1).astype(float)
    want = gdpo_by_the_paper(values.tolist(), rows["group_id"].tolist(), (1.0, 0.5))
    assert rows["advantage"].tolist() == pytest.approx(want, abs=1e-5)
    other = replace(asked, reward=(Reward(digits, name="other"), short))
    with pytest.raises(DataError, match="no column 'reward_other'"):
        run(other, run_dir=tmp_path / "third")


def right_first(returns: Any, groups: Any, lengths: Any, *, rewards: Any, names: Any, weights: Any) -> Any:
    """Compare digits alone, whatever their weight."""
    assert weights == (1.0, 0.5)
    column = rewards[:, names.index("digits")]
    return column - column.mean()


def test_a_function_of_ones_own_sees_the_named_rewards_of_a_run(tmp_path: Path) -> None:
    """By name, in a run as in a test of it."""
    run(pipeline(write=WritePath(estimator=right_first)), run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run")
    for rollout in range(2):
        at = (rows["group_id"] // 2 == rollout) & ~rows["degenerate"]
        digits_of = rows["reward_digits"][rows["group_id"] // 2 == rollout]
        np.testing.assert_allclose(rows["advantage"][at], rows["reward_digits"][at] - digits_of.mean(), atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_members_that_wait_in_a_store_keep_their_named_rewards(tmp_path: Path, apart: bool) -> None:
    """The batch is completed by an update, after another process opened the store, and has the same advantages."""
    values = [[1.0, 0.2], [0.0, 0.9], [1.0, 5.0], [0.0, math.nan]]
    td = TensorDict({"group_id": torch.tensor([0, 0, 1, 1]), "trajectory_id": torch.arange(4)}, batch_size=[4])
    td["reward_a"], td["reward_b"] = torch.tensor(values).unbind(1)
    td["task_reward"] = td["reward_a"] + 0.5 * td["reward_b"].nan_to_num()
    tokens = TensorDict({("tokens", "full"): torch.ones(4, 3, dtype=torch.int64)}, batch_size=[4])
    td.update(tokens)
    td["masks", "all_assistant_mask"] = torch.tensor([[False, True, True]] * 4)
    for part in ([0, 3], [1, 2]) if apart else ([0, 1, 2, 3],):
        advantage = MCAdvantage(2, estimator="gdpo", batch_groups=2, rewards={"a": 1.0, "b": 0.5})
        storage = TrajectoryStorage(tmp_path / "store", extra=[named_reward("a"), named_reward("b")])
        buffer = TrajectoryReplayBuffer(storage=storage, transform=advantage)
        buffer.extend(td[part])
        found = buffer.store.read(buffer.store.ids(), ["trajectory_id", "advantage"])
        storage.close()
    order = np.argsort(found["trajectory_id"])
    want = gdpo_by_the_paper(values, [0, 0, 1, 1], (1.0, 0.5))
    assert found["advantage"][order].tolist() == pytest.approx(want, abs=1e-5)
    with pytest.raises(MissingKeyError, match="the batch has no 'reward_b'"):
        MCAdvantage(2, estimator="gdpo", batch_groups=1, rewards={"a": 1.0, "b": 1.0}).inv(td.exclude("reward_b"))


def scored(completion: str) -> dict[str, float]:
    """Return verl's form: a score and what it is made of; one component only sometimes."""
    parts = {"score": 2.0 * len(completion), "acc": float(completion.isdigit()), "format": 0.5}
    return parts | ({"seldom": 1.0} if "a" in completion else {})


def test_components_of_a_dict_become_columns_with_curves(tmp_path: Path) -> None:
    """Like rewards of weight 0, also where a component comes late; with several rewards their name is before them."""
    run(pipeline(reward=scored), run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run")
    text = rows["completion"]
    assert rows["task_reward"].tolist() == [2.0 * len(one) for one in text]
    assert rows["reward_acc"].tolist() == [float(one.isdigit()) for one in text]
    assert "reward_score" not in rows
    if "reward_seldom" in rows:
        assert np.isfinite(rows["reward_seldom"]).tolist() == ["a" in one for one in text]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    for number, line in enumerate(lines):
        acc = rows["reward_acc"][rows["group_id"] // 2 == number]
        assert line["reward/acc"] == pytest.approx(acc.mean())
        assert line["reward/format"] == 0.5
        assert "reward_failed/acc" not in line
    run(pipeline(reward=(scored, short)), run_dir=tmp_path / "both")
    assert {"reward_scored", "reward_short", "reward_scored_acc", "reward_scored_format"} <= stored(
        tmp_path / "both"
    ).keys()


def test_figures_of_a_stored_rollout_are_those_of_its_sampling(tmp_path: Path) -> None:
    """Names of an environment's rewards are columns of conversations and of turns; a resumed run reads them."""
    storage = TrajectoryStorage(tmp_path / "store", extra=[TURNS, TURN_REWARDS])
    buffer = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(8))
    collector = sums_collector(talker(), buffer, group_size=8)
    first, again = (collector.collect(0, policy_version=0) for _ in range(2))
    assert again.from_store
    names = {name.removeprefix("reward/") for name in first.figures if name.startswith("reward/")}
    assert {f"{kind}_{name}" for name in names for kind in ("reward", "turn_reward")} <= {*storage.store.schema.names}
    assert names
    assert again.figures == pytest.approx(first.figures)


class Lottery:
    """Names its reward only where it is won, and its consolation only in later rollouts."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.number = int(prompt.meta["number"])
        return "a="

    def step(self, turn: Turn) -> Step:
        won = turn.text[:1] in "0123456"
        return Step(done=True, rewards={"right": 1.0} if won and self.number < 2 else {})


def test_a_reward_that_a_conversation_was_not_given_is_zero(tmp_path: Path) -> None:
    """Names that nobody declared: the mean is over all conversations, and 0 where nobody was given what others were."""

    def source(begin: str) -> Prompts:
        rows = [{"question": f"{begin}{n}=", "number": n} for n in range(4)]
        return Prompts(rows=rows, answer_field=None, as_chat=False, shuffle=False)

    asked = pipeline(
        reward=None,
        environment=Lottery,
        prompts=source("a"),
        collect=Collect(prompts_per_rollout=2, group_size=8, max_new_tokens=1),
        evaluate=Evaluate(prompts=source("b"), num_prompts=4, group_size=4, every=2),
    )
    run(asked, run_dir=tmp_path / "run")
    found = stored(tmp_path / "run")
    assert found["reward_right"].tolist() == found["task_reward"].tolist()
    assert 0 < found["task_reward"][:16].mean() < 1
    assert found["task_reward"][16:].max() == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/right"] for line in lines] == [line["task_reward"] for line in lines]
    evaluated = [line for line in lines if line.get("evaluation/reward") is not None]
    assert evaluated
    assert all(line["evaluation/reward/right"] == line["evaluation/reward"] for line in evaluated)
