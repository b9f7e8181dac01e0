"""Advantages of turns: in memory, in a store, and as the loss of a run sees them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlhf_pipeline import (
    GRPOLoss,
    Learn,
    Learner,
    MCAdvantage,
    Pipeline,
    Reward,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    WritePath,
    definitions,
)
from rlhf_pipeline.buffer.trajectory_schema import TURN_FIGURES, TURNS, trajectory_schema
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.run.start import run
from rlhf_pipeline.transforms.groups import MemberScores, graded_groups
from tests.rlhf_pipeline.functional.test_advantage import turns_by_the_formula
from tests.rlhf_pipeline.small import sums_collector, talker
from trajectory_store import TrajectoryStore

TALKS = ([0.0, 1.0], [2.0, 0.0], [5.0])
"""Rewards of the turns of one group. Its first turns (0, 2, 5) are compared with each other, and its second turns,
(1, 0, 0): the third member has ended and earns nothing more."""
FIRST = [(value - 7 / 3) / math.sqrt((49 + 1 + 64) / 9 / 2) for value in (0.0, 2.0, 5.0)]
SECOND = [(value - 1 / 3) / math.sqrt((4 + 1 + 1) / 9 / 2) for value in (1.0, 0.0, 0.0)]
WANT = ([FIRST[0] + 0.5 * SECOND[0], SECOND[0]], [FIRST[1] + 0.5 * SECOND[1], SECOND[1]], [FIRST[2] + 0.5 * SECOND[2]])
"""Their advantages by hand, with a discount of a half."""


def batch(members: range = range(3)) -> TensorDict:
    """Conversations of two tokens of a prompt, two per turn and one per reply."""
    rows = []
    for member in members:
        num = len(TALKS[member])
        starts = [2 + 3 * turn for turn in range(num)]
        length = starts[-1] + 2
        spans = [pair for start in starts for pair in ((start, 1), (start + 2, 0))][:-1]
        mask = torch.zeros(length, dtype=torch.bool)
        for start in starts:
            mask[start : start + 2] = True
        row = {
            ("tokens", "full"): torch.arange(length),
            ("masks", "all_assistant_mask"): mask,
            ("log_probs", "full"): torch.where(mask, -1.0, 0.0),
            "turn_spans": torch.tensor(spans),
            "turn_rewards": torch.tensor(TALKS[member]),
            "task_reward": torch.tensor(sum(TALKS[member])),
            "group_id": torch.tensor(4),
            "trajectory_id": torch.tensor(12 + member),
        }
        rows.append(TensorDict({}, []))
        for key, value in row.items():
            rows[-1].set(key, value)
    return TensorDict.lazy_stack(rows)


def transform(**changes: object) -> MCAdvantage:
    return MCAdvantage(3, estimator="turn_grpo", turn_discount=0.5, **changes)  # type: ignore[arg-type]


def test_hand_computed_turns_in_memory():
    """Each turn has its advantage, and a trajectory that of its turn furthest from 0; members may come apart."""
    mc = transform()
    assert mc.inv(batch(range(2))) is None
    out = mc.inv(batch(range(2, 3)))
    assert out is not None
    for row, want in zip(out.unbind(0), WANT, strict=True):
        assert row["turn_advantages"].tolist() == pytest.approx(want, abs=1e-6)
        assert float(row["advantage"].reshape(-1)[-1]) == pytest.approx(max(want, key=abs), abs=1e-6)


def test_a_member_that_failed_is_compared_up_to_its_last_turn():
    """What an environment gave for the turn in which it failed counts for nobody, and nothing is learned from it."""
    returns, none = torch.tensor([1.0, 1.0, math.nan], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    scores = MemberScores(returns, torch.full((3,), 4), returns, none)
    graded = graded_groups(
        scores,
        torch.zeros(3, dtype=torch.int64),
        WritePath(estimator="turn_grpo"),
        None,
        turns=[[1.0, 0.0], [0.0, 1.0], [0.0, 9.0]],
    )
    first, second = math.sqrt(1 / 3), math.sqrt(1 / 2)  # 1, 0, 0 in the first turn; 0, 1 in the second, of two members
    want = [[2 * first - second, -second], [second - first, second], [0.0, 0.0]]
    assert graded.turns is not None
    for turns, expected in zip(graded.turns, want, strict=True):
        assert turns.tolist() == pytest.approx(expected, abs=1e-6)
    assert graded.degenerate.tolist() == [False, False, True]


@pytest.mark.parametrize("apart", [False, True])
def test_a_store_gives_each_token_the_advantage_of_its_turn(tmp_path, apart):
    """Written at once, or completed by an update after another process opened the store."""
    schema = trajectory_schema([TURNS, *TURN_FIGURES])
    for part in (range(2), range(2, 3)) if apart else (range(3),):
        buffer = TrajectoryReplayBuffer(
            storage=TrajectoryStorage(tmp_path / "store", schema=schema), transform=transform()
        )
        buffer.extend(batch(part))
        if not apart or part.stop == 3:
            found = buffer.read(buffer.store.ids())
            for i, want in enumerate(WANT):
                by_token = [0.0, 0.0, *(value for one in want for value in (one, one, 0.0))][:-1]
                assert found["advantage"][i, : len(by_token)].tolist() == pytest.approx(by_token, abs=1e-6)
                assert not found["advantage"][i, len(by_token) :].any()
        buffer.trajectories.close()


def test_a_group_has_spread_if_any_turn_has(tmp_path):
    """A member without an advantage stays in such a group; a group in which no turn differs is left out as a whole."""
    rewards = {4: ([1.0, 0.5], [1.0, 1.5], [1.0]), 5: ([1.0, 0.0], [1.0], [1.0, 0.0])}
    rows = []
    for group, members in rewards.items():
        for row, turns in zip(batch().unbind(0), members, strict=True):
            rows.append(row.clone().update({"group_id": torch.tensor(group), "turn_rewards": torch.tensor(turns)}))
            rows[-1]["task_reward"] = torch.tensor(sum(turns))
    out = transform(zero_variance="drop").inv(TensorDict.lazy_stack(rows))
    assert out is not None
    assert [int(row["group_id"]) for row in out.unbind(0)] == [4, 4, 4]
    spread = statistics.stdev([0.5, 1.5, 0.0])
    assert [float(row["advantage"].reshape(-1)[-1]) for row in out.unbind(0)] == pytest.approx(
        [(0.5 - 2 / 3) / spread, (1.5 - 2 / 3) / spread, 0.5 * (0.0 - 2 / 3) / spread]
    )


@pytest.mark.parametrize("apart", [False, True])
def test_a_trajectory_without_rewards_of_turns_is_one_turn(tmp_path, apart):
    """Its return is compared with the first turns of the others, at once and where members wait in a store."""
    schema, rows = trajectory_schema([TURNS, *TURN_FIGURES]), [*batch().unbind(0)]
    rows[2]["turn_rewards"] = torch.zeros(0)
    buffer = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store", schema=schema), transform=transform())
    for part in (rows[:1], rows[1:]) if apart else (rows,):
        buffer.extend(TensorDict.lazy_stack(part))
    found = buffer.store.read(buffer.store.ids())
    assert [one.tolist() for one in found["turn_advantages"]] == [
        pytest.approx(one, abs=1e-6) for one in [*WANT[:2], []]
    ]
    assert found["advantage"].tolist() == pytest.approx([max(want, key=abs) for want in WANT], abs=1e-6)
    buffer.trajectories.close()


def test_what_does_not_fit_is_refused():
    """A batch without rewards of turns, a discount out of range, and a penalty in the reward of the whole."""
    with pytest.raises(MissingKeyError, match="compares turns, but the batch has no 'turn_rewards'"):
        transform().inv(batch().exclude("turn_rewards"))
    with pytest.raises(DefinitionError, match="turn_discount is 2"):
        MCAdvantage(3, estimator="turn_grpo", turn_discount=2.0)
    with pytest.raises(DefinitionError, match=r"Set write.kl_coef=0 and loss.kl_to_ref_coeff"):
        WritePath(estimator="turn_grpo", kl_coef=0.1)


def brief(completion: str, rewards: dict[str, float]) -> float:
    """Read the environment's rewards: it counts as a whole, at the last turn."""
    return 0.25 * len(completion) - sum(rewards.values())


SELECTIONS = [
    ((environment_reward, Reward("nearer", weight=0.5), brief), {"reached": 1.0, "nearer": 1.5}),
    ((Reward("reached"), Reward("nearer", weight=0.3)), {"reached": 1.0, "nearer": 0.3}),
    ((Reward("nearer", weight=-2.0, name="away"),), {"nearer": -2.0}),
]
"""Rewards of a definition, and what they make each of the environment's count."""


def lake(reward: tuple[object, ...]) -> Pipeline:
    """Two steps on small rollouts of the frozen lake, turn by turn."""
    found = definitions.find("frozen_lake").pipeline(
        [
            ("collect.prompts_per_rollout", "4"),
            ("collect.group_size", "4"),
            ("policy.hidden_size", "16"),
            ("learn.lr_schedule", "constant"),
            ("learn.steps", "2"),
            ("learn.epochs", "1"),
            ("sample.strategy", "fresh"),
            ("write.estimator", "turn_grpo"),
            ("write.turn_discount", "0.5"),
        ]
    )
    return dataclasses.replace(found, evaluate=None, reward=reward)


@pytest.mark.parametrize(("reward", "weights"), SELECTIONS)
def test_a_run_learns_from_turns(tmp_path, reward, weights):
    """Turns are worth the selected rewards by their weights, the rest counts at the last; advantages by the formula."""
    run(lake(reward), run_dir=tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        rows = store.read(store.ids())
    assert len(rows["turn_rewards"]) == 32
    for spans, turns, advantages, total, meta in zip(
        *(rows[name] for name in ("turn_spans", "turn_rewards", "turn_advantages", "task_reward", "meta")), strict=True
    ):
        given = json.loads(meta)["turn_rewards"]
        assert len(turns) == len(advantages) == (spans[:, 1] == 1).sum() == len(given)
        weighted = [sum(weight * one[name] for name, weight in weights.items()) for one in given]
        assert turns[:-1].tolist() == pytest.approx(weighted[:-1], abs=1e-6)
        assert brief in reward or turns[-1] == pytest.approx(weighted[-1], abs=1e-5)
        assert turns.sum() == pytest.approx(total, abs=1e-5)
    for number, meta in enumerate(map(json.loads, rows["meta"])):  # and each by its name, without weights
        for name in ("reached", "nearer"):
            each = [one.get(name, 0.0) for one in meta["turn_rewards"]]
            assert rows[f"turn_reward_{name}"][number].tolist() == pytest.approx(each)
            if name in weights and len(weights) > 1:
                assert rows[f"reward_{name}"][number] == pytest.approx(sum(each), abs=1e-6)
    talks = [
        (group, turns.astype(float).tolist())
        for group, turns in zip(rows["group_id"].tolist(), rows["turn_rewards"], strict=True)
    ]
    for number, found in enumerate(rows["turn_advantages"]):
        want = [turns_by_the_formula(talks, k, number, 0.5) for k in range(len(found))]
        assert found.tolist() == pytest.approx(want, abs=1e-4)
    furthest = [float(one[np.abs(one).argmax()]) for one in rows["turn_advantages"]]
    assert rows["advantage"].tolist() == pytest.approx(furthest)


def test_the_loss_has_the_advantage_of_each_turn(tmp_path):
    """On policy every ratio is 1: the loss of a step is the mean of minus the advantages over the sampled tokens."""
    policy = talker()
    buffer = TrajectoryReplayBuffer(
        storage=TrajectoryStorage(tmp_path / "store", extra=[TURNS, *TURN_FIGURES]),
        transform=MCAdvantage(8, estimator="turn_grpo"),
    )
    sums_collector(policy, buffer, group_size=8).collect(0, policy_version=0)
    rows = buffer.store.read(buffer.store.ids())
    assert any(len({*np.round(one, 6).tolist()}) > 1 for one in rows["turn_advantages"])
    total, num = 0.0, 0
    for row, spans, advantages in zip(*(rows[n] for n in ("input_ids", "turn_spans", "turn_advantages")), strict=True):
        tokens = np.diff([*spans[:, 0], len(row)])[spans[:, 1] == 1]
        total, num = total - float(tokens @ advantages), num + int(tokens.sum())
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy, entropy_bonus=False),
        buffer=buffer,
        config=Learn(lr=1e-3, token_budget=400),
        max_staleness=0,
        max_completion_tokens=24,
        ledger=None,
        seed=0,
    )
    assert learner.step(1)["loss"] == pytest.approx(total / num, abs=1e-5)
    assert abs(total / num) > 1e-3
