"""Rollouts through the write path: what the advantages are, however the trajectories came into the store."""

from __future__ import annotations

import numpy as np
import pytest
from torchrl.envs.transforms import Compose

from rlhf_pipeline import (
    Collect,
    Collector,
    CopyDigits,
    KLRewardTransform,
    MCAdvantage,
    RetrieveLogProb,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import SAMPLED_BY
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.advantage import BATCH_ESTIMATORS
from rlhf_pipeline.policies.engines.protocol import WeightRefresh


def spread(prompt, completion, answer, meta):
    """A reward that differs within groups and between them."""
    return float(sum(map(ord, completion)) % 7) + 3 * prompt.count("1")


def nothing(prompt, completion, answer, meta):
    return 0.0


def collector(folder, *, reward=spread, prompts=4, transform=None, max_new_tokens=4, max_size=None, extra=()):
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0, num_slots=16)
    storage = TrajectoryStorage(folder / "store", max_size=max_size, extra=extra)
    buffer = TrajectoryReplayBuffer(storage=storage, transform=transform)
    config = Collect(prompts_per_rollout=prompts, group_size=4, max_new_tokens=max_new_tokens)
    return Collector(
        policy=policy, prompts=CopyDigits(num_digits=3), reward=reward, buffer=buffer, seed=0, config=config
    )


def advantages(found: Collector) -> np.ndarray:
    """Of each trajectory, the newest row, in the order of trajectories."""
    store = found.buffer.store
    ids = store.ids()
    newest = dict(zip(store.read_scalars("trajectory_id", ids).tolist(), ids.tolist(), strict=True))
    return store.read_scalars("advantage", np.array([newest[key] for key in sorted(newest)]))


@pytest.mark.parametrize("estimator", BATCH_ESTIMATORS)
def test_the_batch_of_an_advantage_is_the_rollout_after_a_resume_too(tmp_path, estimator):
    """After a ring has evicted some groups of a rollout, a resume gives it the advantages of an uncut one."""
    straight = collector(tmp_path / "straight", transform=MCAdvantage(4, estimator=estimator, batch_groups=4))
    straight.collect(0, policy_version=0)
    rest = collector(tmp_path / "cut", transform=MCAdvantage(4, estimator=estimator, batch_groups=4), max_size=23)
    for rollout in (0, 1):
        rest.collect(rollout, policy_version=0)
    assert len(rest.stored.rows(0, 3)) == 7
    assert not rest.collect(0, policy_version=0).from_store
    assert advantages(rest)[:16].tolist() == advantages(straight).tolist()
    again = rest.collect(0, policy_version=0)
    returns = straight.buffer.store.read_scalars("task_reward").astype(np.float64)
    assert (again.from_store, again.num_trajectories, again.task_reward) == (True, 16, pytest.approx(returns.mean()))
    by_group = estimator != "reinforce_pp"
    centred = returns - (returns.reshape(4, 4).mean(1).repeat(4) if by_group else returns.mean())
    if estimator == "gdpo":
        centred /= returns.reshape(4, 4).std(1, ddof=1).repeat(4) + 1e-6
    spread = (returns if estimator == "grpo_batch" else centred).std(ddof=1)
    assert advantages(straight) == pytest.approx(centred / spread, rel=1e-5)
    for one in (straight, rest):
        one.buffer.trajectories.close()


def test_a_batch_that_is_not_a_rollout_is_refused(tmp_path):
    """An estimator over a batch has to be told what the batch is, and a collector has rollouts."""
    with pytest.raises(DefinitionError, match="they need batch_groups"):
        MCAdvantage(4, estimator="reinforce_pp")
    with pytest.raises(DefinitionError, match="other estimators do not use it"):
        MCAdvantage(4, batch_groups=4)
    with pytest.raises(DefinitionError, match="batch_groups=8, but a rollout has 4 groups"):
        collector(tmp_path, transform=MCAdvantage(4, estimator="reinforce_pp", batch_groups=8))


@pytest.mark.parametrize("versions", [[3, 5, 8], [5, 4, 5]])
def test_which_weights_sampled_which_tokens_is_stored(tmp_path, versions, caplog):
    """A trajectory is as old as its oldest token, and has spans only if several versions sampled it.

    The oldest need not be the first: another collector may give a server that both use older weights again.
    """
    coming = iter([*versions[1:], *[versions[-1]] * 100])
    found = collector(tmp_path, max_new_tokens=40, transform=MCAdvantage(4), extra=SAMPLED_BY)
    found.policy.engine.version = versions[0]
    refresh = WeightRefresh(lambda: next(coming), every=4, version=versions[0])
    found.collect(0, policy_version=versions[0], refresh=refresh, digests={of: 100 + of for of in versions})
    store = found.buffer.store
    rows = store.read(store.ids())
    assert set(rows["engine"]) == {"slots"}
    assert set(rows["log_prob_mode"]) == {"processed"}
    assert set(rows["temperature"].tolist()) == {1.0}
    seen = set()
    for i, spans in enumerate(rows["version_spans"]):
        prompt, tokens = int(rows["num_prompt_tokens"][i]), len(rows["input_ids"][i])
        wanted = [[prompt + 4 * n, of] for n, of in enumerate(versions) if prompt + 4 * n < tokens]
        assert spans.tolist() == (wanted if len(wanted) > 1 else [])
        mine = [of for _, of in wanted]
        assert rows["policy_version"][i] == min(mine)
        assert rows["newest_policy_version"][i] == (max(mine) if len(mine) > 1 else -1)
        assert rows["policy_digest"][i] == 100 + min(mine)
        seen.add(len(mine))
    assert {1, 3} <= seen
    found.buffer.trajectories.close()
    plain = collector(tmp_path / "plain", max_new_tokens=40)
    plain.policy.engine.version = 0
    plain.collect(0, policy_version=0)
    assert not caplog.records  # nothing was offered that the store has no columns for
    plain.buffer.trajectories.close()


@pytest.mark.parametrize(("zero_variance", "left"), [("keep", 16), ("drop", 0)])
def test_a_penalty_of_rounding_alone_leaves_groups_without_spread(tmp_path, zero_variance, left):
    """The reference is the policy and every task reward is 0: advantages are 0, and the groups may be dropped."""
    reference = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    transform = Compose(
        MCAdvantage(4, zero_variance=zero_variance), KLRewardTransform(coef=0.2), RetrieveLogProb(reference)
    )
    found = collector(tmp_path, reward=nothing, transform=transform, max_new_tokens=40)
    found.collect(0, policy_version=0)
    store = found.buffer.store
    assert len(store) == left
    if left:
        gap = store.read_ragged("log_probs").values - store.read_ragged("ref_log_probs").values
        assert np.nanmax(np.abs(gap)) > 0  # there is rounding
        assert store.read_scalars("degenerate").all()
        assert not store.read_scalars("advantage").any()
    found.buffer.trajectories.close()


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp_baseline"])
def test_a_rollout_with_dropped_groups_is_stored_once(tmp_path, estimator):
    """Collected again, it has the summary of the first time, and nothing is written.

    By newer weights, the mean of what the first ones sampled is not known any more, and nothing is sampled instead.
    """

    def half(prompt, completion, answer, meta):
        return 1.0 if prompt[0] in "02468" else spread(prompt, completion, answer, meta)

    batch = 4 if estimator in BATCH_ESTIMATORS else None
    transform = MCAdvantage(4, estimator=estimator, batch_groups=batch, zero_variance="drop")
    seen = []
    for _ in range(2):
        found = collector(tmp_path, reward=half, transform=transform)
        rollout = found.collect(0, policy_version=0)
        seen.append((rollout.task_reward, len(found.buffer.store), advantages(found).tolist()))
        found.buffer.trajectories.close()
    assert 0 < seen[0][1] < 16
    assert seen[0] == seen[1]
    for newer in ({"policy_version": 1}, {"policy_version": 0, "digests": {0: 7}}):
        found = collector(tmp_path, reward=half, transform=transform)
        rollout = found.collect(0, **newer)
        assert (rollout.from_store, rollout.num_trajectories, rollout.task_reward) == (True, 16, None)
        assert len(found.buffer.store) == seen[0][1]
        found.buffer.trajectories.close()
