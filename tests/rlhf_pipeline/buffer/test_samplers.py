from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tensordict import lazy_stack

from rlhf_pipeline.buffer._group_samplers import most_varied
from rlhf_pipeline.buffer.samplers import (
    STRATEGIES,
    FreshSampler,
    GroupSampler,
    MixSampler,
    PrioritySampler,
    RecencySampler,
    StoreView,
    SuccessSampler,
    UniformSampler,
    VarianceSampler,
    as_sampler,
)
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import USES
from rlhf_pipeline.errors import DataError, DefinitionError

ALL = [
    FreshSampler(max_staleness=None),
    UniformSampler(),
    PrioritySampler(),
    RecencySampler(),
    GroupSampler(),
    SuccessSampler(extremes=True),
    VarianceSampler(),
    MixSampler(),
]


@pytest.fixture
def storage(tmp_path, make_rows):
    """Twelve trajectories in groups of 2; versions 0, 0, 1, 1, 2, 2, ..."""
    made = TrajectoryStorage(tmp_path / "store")
    rows = make_rows([4] * 12, rewards=[float(i % 3) for i in range(12)])
    for i, row in enumerate(rows):
        row["policy_version"] = torch.tensor(i // 2)
    made.set(torch.arange(12), lazy_stack(rows))
    yield made
    made.close()


def view(storage, **kwargs):
    """All rows."""
    return StoreView(storage.store, storage.row_ids(), **kwargs)


def pick(sampler, storage, n, seed=0, step=0, **kwargs):
    """Positions as a list."""
    return sampler.select(view(storage, **kwargs), n, seed=seed, step=step).tolist()


@pytest.mark.parametrize("sampler", ALL, ids=lambda s: type(s).__name__)
def test_pure_function_of_seed_and_step(storage, sampler):
    """The same arguments give the same rows, whatever was drawn in between; no row comes twice."""
    first = pick(sampler, storage, 6, seed=3, step=9)
    for step in range(5):
        pick(sampler, storage, 6, seed=1, step=step)
    assert pick(sampler, storage, 6, seed=3, step=9) == first
    assert len(set(first)) == 6


@pytest.mark.parametrize("sampler", ALL[1:], ids=lambda s: type(s).__name__)
def test_steps_and_seeds_differ(storage, sampler):
    """Chance depends on both."""
    draws = {tuple(pick(sampler, storage, 6, seed=s, step=t)) for s in range(4) for t in range(4)}
    assert len(draws) > 12


def test_fresh_is_by_version_and_use(storage):
    """Oldest first among those fresh enough and not used up."""
    sampler = FreshSampler(max_staleness=1)
    assert pick(sampler, storage, None, version=5) == [8, 9, 10, 11]
    assert pick(sampler, storage, 3, version=5) == [8, 9, 10]
    storage.store.add_columns([USES])
    storage.update(storage.row_ids([8, 10]), use_count=[1, 1])
    assert pick(sampler, storage, None, version=5) == [9, 11]
    used = np.zeros(12, np.int64)
    used[9] = 1
    assert pick(sampler, storage, None, version=5, uses=used) == [8, 10, 11]
    assert pick(FreshSampler(max_staleness=1, max_uses=2), storage, None, version=5) == [8, 9, 10, 11]
    assert pick(FreshSampler(max_staleness=0, max_uses=2), storage, None, version=4) == [8, 9, 10, 11]  # newer: age 0


def test_limits_hold_for_every_strategy(storage):
    """Staleness, use count and priority 0 keep rows out of all strategies."""
    storage.store.add_columns([USES])
    storage.update(storage.row_ids([10]), use_count=[3])
    storage.update(storage.row_ids([6, 7]), priority=[0.0, 0.0])
    for kind in (FreshSampler, UniformSampler, PrioritySampler, RecencySampler):
        found = pick(kind(max_staleness=3, max_uses=3), storage, None, version=5)
        assert sorted(found) == [4, 5, 8, 9, 11]
    assert sorted(pick(GroupSampler(max_staleness=3, max_uses=3), storage, None, version=5)) == [4, 5, 8, 9]


def test_uniform_frequencies(storage):
    """Every row about as often as any other."""
    counts = np.bincount([i for t in range(3000) for i in pick(UniformSampler(), storage, 3, step=t)], minlength=12)
    expected = 3000 * 3 / 12
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)


def test_priority_frequencies(storage):
    """First picks follow p / sum(p) with the age factor."""
    priority = np.arange(1.0, 13.0)
    storage.update(storage.row_ids(), priority=priority)
    sampler = PrioritySampler(alpha=0.5, tau=2.0)
    rows = view(storage, version=5)
    draws = np.bincount([sampler.select(rows, 1, seed=0, step=t)[0] for t in range(3000)], minlength=12)
    p = np.sqrt(priority + 1e-6) * np.exp(-(5 - np.arange(12) // 2) / 2.0)
    expected = 3000 * p / p.sum()
    assert (np.abs(draws - expected) < 5 * np.sqrt(expected) + 1).all()


def test_a_negative_advantage_counts_by_its_size(storage):
    """What a trajectory is drawn by is how much it teaches, in either direction."""
    size = np.arange(1.0, 13.0)
    storage.store.update(storage.row_ids(), advantage=(size * np.tile([1.0, -1.0], 6)).astype(np.float32))
    rows, sampler = view(storage, version=5), PrioritySampler(column="advantage")
    draws = np.bincount([sampler.select(rows, 1, seed=0, step=t)[0] for t in range(3000)], minlength=12)
    expected = 3000 * size / size.sum()
    assert (np.abs(draws - expected) < 5 * np.sqrt(expected) + 1).all()


def test_recency_prefers_the_new(storage):
    """Chances fall with age and do not depend on the priority."""
    storage.update(storage.row_ids(), priority=np.arange(12.0, 0.0, -1.0))
    rows = view(storage, version=5)
    draws = np.bincount(
        [RecencySampler(tau=1.0).select(rows, 1, seed=0, step=t)[0] // 2 for t in range(3000)], minlength=6
    )
    p = np.exp(-(5.0 - np.arange(6)))
    expected = 3000 * p / p.sum()
    assert (np.abs(draws - expected) < 5 * np.sqrt(expected) + 1).all()


def test_weights_are_those_of_the_rows_that_may_be_drawn(storage):
    """A limit takes rows out of the middle: the age of each that stays is its own."""
    uses = np.arange(12) % 3 == 1
    seen = view(storage, version=6, uses=uses.astype(np.int64))
    sampler = RecencySampler(tau=2.0, max_uses=1)
    allowed = sampler.eligible(seen)
    assert allowed.tolist() == [0, 2, 3, 5, 6, 8, 9, 11]
    ages = 6 - allowed // 2
    np.testing.assert_allclose(sampler.log_weights(seen, allowed), -ages / 2.0)


def test_groups_are_whole(storage, make_rows):
    """Never half a group; ragged groups count by their size."""
    storage.set(torch.tensor([12]), lazy_stack(make_rows([4], first_group=99)))
    groups = view(storage).column("group_id")
    for step in range(20):
        found = pick(GroupSampler(), storage, 5, step=step)
        assert len(found) in (4, 5)
        for group in set(groups[found]):
            assert (groups[found] == group).sum() == (groups == group).sum()
    assert pick(GroupSampler(order="fresh"), storage, 4) == [0, 1, 2, 3]
    assert pick(GroupSampler(order="fresh", group_size=1), storage, 4) == [12]
    assert pick(GroupSampler(group_size=7), storage, 4) == []
    assert len(pick(GroupSampler(), storage, 1, step=1)) >= 1


def test_fresh_groups_come_in_the_order_in_which_they_were_completed(tmp_path, make_rows):
    """One that began first and whose last member came last is the second."""
    made = TrajectoryStorage(tmp_path / "mixed")
    rows = make_rows([4] * 4)
    for row, group in zip(rows, (7, 8, 8, 7), strict=True):
        row["group_id"] = torch.tensor(group)
    made.set(torch.arange(4), lazy_stack(rows))
    assert pick(GroupSampler(order="fresh"), made, 4) == [1, 2, 0, 3]
    made.close()


@pytest.fixture
def graded(tmp_path, make_rows):
    """Groups of four with success rates 0, 1/4, 1/2, 1/2, 3/4 and 1, one version later each."""
    rewards = [0, 0, 0, 0, *(1, 0, 0, 0), *(1, 1, 0, 0), *(0, 0, 1, 1), *(1, 1, 1, 0), *(1, 1, 1, 1)]
    made = TrajectoryStorage(tmp_path / "graded")
    rows = make_rows([4] * 24, group_size=4, rewards=[float(r) for r in rewards])
    for i, row in enumerate(rows):
        row["policy_version"] = torch.tensor(i // 4)
    made.set(torch.arange(24), lazy_stack(rows))
    yield made
    made.close()


def first_groups(sampler, storage, draws=2000, **kwargs):
    """How often each of the six groups comes first; every draw is one whole group."""
    rows = view(storage, **kwargs)
    counts = np.zeros(6)
    for step in range(draws):
        found = sampler.select(rows, 4, seed=1, step=step)
        assert (found // 4 == found[0] // 4).all()
        counts[found[0] // 4] += 1
    return counts


def near(counts, weights):
    """Counts agree with the chances, to five standard deviations."""
    expected = counts.sum() * np.asarray(weights) / np.sum(weights)
    return bool((np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1e-9).all())


def test_success_buckets(graded):
    """Chances by bucket and not by the number of groups in it; groups without a contrast never come."""
    sampler = SuccessSampler(buckets=4, spread=0.25)
    # Middles of the buckets of 1/4, 1/2 (twice) and 3/4: 0.375, 0.625 and 0.875.
    near_middle, far = math.exp(-(0.125**2) / (2 * 0.0625)), math.exp(-(0.375**2) / (2 * 0.0625))
    weights = [0, near_middle, near_middle / 2, near_middle / 2, far, 0]
    assert near(first_groups(sampler, graded), weights)
    even = SuccessSampler(buckets=4, spread=math.inf, extremes=True)
    assert near(first_groups(even, graded), [1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 2])
    hard = SuccessSampler(buckets=4, target=0.0, spread=0.05)
    assert first_groups(hard, graded, 50)[1] == 50
    assert sorted(pick(sampler, graded, None)) == list(range(4, 20))


def test_success_counts_what_was_graded(tmp_path, make_rows):
    """The threshold decides, and a trajectory without a reward is no failure."""
    made = TrajectoryStorage(tmp_path / "odd")
    nan = float("nan")
    made.set(torch.arange(6), lazy_stack(make_rows([4] * 6, rewards=[0.9, nan, 0.9, 0.2, nan, nan])))
    assert sorted(pick(SuccessSampler(), made, None)) == [2, 3]
    assert sorted(pick(SuccessSampler(threshold=0.1, extremes=True), made, None)) == [0, 1, 2, 3]
    assert pick(SuccessSampler(threshold=0.1), made, None) == []
    made.close()


def test_variance_of_groups(graded):
    """Chances follow the variance of the rewards: 3/16 and 1/4; and the age, where asked."""
    assert near(first_groups(VarianceSampler(), graded), [0, 3 / 16, 1 / 4, 1 / 4, 3 / 16, 0])
    aged = [v * math.exp(-(5 - i) / 2.0) for i, v in enumerate([0, 9 / 256, 1 / 16, 1 / 16, 9 / 256, 0])]
    assert near(first_groups(VarianceSampler(alpha=2.0, tau=2.0), graded, version=5), aged)
    assert sorted(pick(VarianceSampler(max_staleness=2), graded, None, version=5)) == list(range(12, 20))


def test_most_varied_members(graded):
    """Of each group only the trajectories that differ most, as a search through all subsets finds them."""
    found = pick(VarianceSampler(members=2), graded, None)
    rewards = view(graded).column("task_reward")[found]
    assert len(found) == 8
    assert sorted(rewards.tolist()) == [0.0] * 4 + [1.0] * 4
    rng = np.random.default_rng(0)
    for _ in range(30):
        values = rng.normal(size=7).round(1)
        for count in (2, 3, 5):
            best = max(np.var(values[list(subset)]) for subset in itertools.combinations(range(7), count))
            assert np.var(values[most_varied(values, count)]) == pytest.approx(best)
    assert most_varied(np.array([np.nan, 1.0, 0.0]), 2).tolist() == [1, 2]


def test_fresh_and_group_replay_in_one_batch(graded):
    """Half by version, half whole groups of replay, as a pure function."""
    sampler = MixSampler(GroupSampler(order="fresh", max_staleness=0), VarianceSampler(), fraction=0.5)
    for step in range(5):
        found = pick(sampler, graded, 8, step=step, version=5)
        assert found[:4] == [20, 21, 22, 23]
        assert len(found) == 8
        assert len({i // 4 for i in found[4:]}) == 1
        assert 1 <= found[4] // 4 <= 4
        assert pick(sampler, graded, 8, step=step, version=5) == found


def test_anchored_takes_a_rollout_whole_and_then_replays(storage):
    """Of every three steps the first is on the newest rollout, the others on what replay draws, within its limits."""
    sampler = as_sampler("anchored", max_staleness=3, steps_per_rollout=3)
    for step in range(6):
        assert pick(sampler, storage, 12, version=3, step=step) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        assert pick(sampler, storage, 4, version=6, step=step) == [8, 9, 10, 11]
        drawn = pick(sampler, storage, 4, version=7, step=step)
        assert drawn == pick(RecencySampler(tau=math.inf, max_staleness=3), storage, 4, version=7, step=step)
        assert {*drawn} <= {8, 9, 10, 11}
    late = np.isin(np.arange(12), [0, 1, 4, 5])
    assert pick(sampler, storage, 12, version=6, newest=late) == [0, 1, 4, 5]
    assert pick(sampler, storage, 4, version=7, step=step, newest=late) == drawn
    with pytest.raises(DefinitionError, match="must be at least 2, because otherwise no step remains for replay"):
        as_sampler("anchored", steps_per_rollout=1)


@pytest.mark.parametrize("fraction", [0.0, 0.05])
def test_a_share_of_no_row_draws_none(graded, fraction):
    """A strategy of groups gives one group at least, but not where the share of the batch rounds to nothing."""
    sampler = MixSampler(GroupSampler(max_staleness=0), UniformSampler(), fraction=fraction)
    assert pick(sampler, graded, 8, step=2, version=5) == pick(UniformSampler(), graded, 8, step=2, version=5)


def test_rows_without_a_group_are_their_own(tmp_path, make_rows):
    """Trajectories that nobody grouped are not one large group."""
    made = TrajectoryStorage(tmp_path / "loose")
    made.set(torch.arange(5), lazy_stack([row.exclude("group_id") for row in make_rows([4] * 5)]))
    assert len(pick(GroupSampler(), made, 3)) == 3
    made.close()


def test_mix_of_fresh_and_replay(storage):
    """A part by version, the rest from what is older, no row twice; a lack of fresh rows is filled up."""
    sampler = MixSampler(FreshSampler(max_staleness=0), UniformSampler(), fraction=0.5)
    for step in range(10):
        found = pick(sampler, storage, 4, step=step, version=5)
        assert found[:2] == [10, 11]
        assert len(set(found)) == 4
    assert len(set(pick(sampler, storage, 4, version=50))) == 4
    with pytest.raises(DefinitionError, match="fraction"):
        MixSampler(fraction=1.5)


def test_importance_weights(storage):
    """`(N p)^-beta` over the largest, with p the chances of the whole view."""
    priority = np.arange(1.0, 13.0)
    storage.update(storage.row_ids(), priority=priority)
    sampler = PrioritySampler(beta=0.5, eps=1e-12, seed=3)
    index, info = sampler.sample(storage, 5)
    expected = (12 * priority[index] / priority.sum()) ** -0.5
    np.testing.assert_allclose(info["_weight"], expected / expected.max(), rtol=1e-5)
    assert UniformSampler().sample(storage, 5)[1] == {}


def test_more_asked_than_there_is(storage):
    """All that is allowed, once."""
    assert sorted(pick(UniformSampler(), storage, 100)) == list(range(12))
    assert sorted(pick(UniformSampler(), storage, None)) == list(range(12))


def test_empty_view(storage):
    """Nothing there is nothing drawn, not an error of numpy."""
    rows = StoreView(storage.store, np.empty(0, np.int64))
    for sampler in ALL:
        assert sampler.select(rows, 3, seed=0, step=0).tolist() == []


def test_as_torchrl_sampler(storage, tmp_path):
    """Slots come back; the number of draws is the state."""
    sampler = UniformSampler(seed=5)
    draws = [sampler.sample(storage, 4)[0].tolist() for _ in range(3)]
    again = UniformSampler()
    again.load_state_dict({**sampler.state_dict(), "draws": 1})
    assert again.sample(storage, 4)[0].tolist() == draws[1]
    sampler.dumps(tmp_path / "sampler")
    third = UniformSampler()
    third.loads(tmp_path / "sampler")
    assert third.sample(storage, 4)[0].tolist() == sampler.sample(storage, 4)[0].tolist()
    stale = FreshSampler(max_staleness=0)
    stale.version = 50
    with pytest.raises(DataError, match="max_staleness=0"):
        stale.sample(storage, 4)


def test_update_priority_reaches_the_store(storage):
    """TorchRL's way to give priorities."""
    sampler = PrioritySampler()
    sampler.update_priority(torch.tensor([1, 2]), torch.tensor([0.5, 0.0]), storage=storage)
    assert storage.store.read_scalars("priority").tolist()[:4] == [1.0, 0.5, 0.0, 1.0]
    with pytest.raises(DefinitionError, match="storage="):
        sampler.update_priority(torch.tensor([1]), 1.0)


def test_arguments():
    """Limits out of range and unknown names are refused with a hint."""
    for wrong in ({"max_staleness": -1}, {"max_uses": 0}):
        with pytest.raises(DefinitionError):
            UniformSampler(**wrong)
    with pytest.raises(DefinitionError, match="tau"):
        RecencySampler(tau=0.0)
    for wrong in ({"buckets": 0}, {"spread": 0.0}, {"tau": 0.0}, {"target": 1.5}):
        with pytest.raises(DefinitionError, match="buckets"):
            SuccessSampler(**wrong)
    for wrong in ({"tau": 0.0}, {"members": 1}):
        with pytest.raises(DefinitionError, match="members"):
            VarianceSampler(**wrong)
    with pytest.raises(DefinitionError, match="order"):
        GroupSampler(order="random")
    with pytest.raises(DefinitionError, match="Did you mean 'uniform'"):
        as_sampler("unifrom")
    with pytest.raises(DefinitionError, match="'uniform' has no option 'tau'"):
        as_sampler("uniform", tau=8.0)
    with pytest.raises(DefinitionError, match="Did you mean 'fresh_fraction'"):
        as_sampler("mix", fresh_fractions=0.5)
    assert type(as_sampler("group", group_size=4)) is GroupSampler
    assert type(as_sampler("success", buckets=3)) is SuccessSampler
    assert type(as_sampler("variance", members=4)) is VarianceSampler


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"consuming", "mix", "staleness"}))
def test_the_seed_is_zero_unless_given(storage, name):
    """By TorchRL's interface a strategy draws what `select` draws with its seed, and that is 0."""
    for sampler, seed in ((as_sampler(name), 0), (as_sampler(name, seed=5), 5), (type(as_sampler(name))(), 0)):
        drawn, _ = sampler.sample(storage, 2)
        assert drawn.tolist() == pick(sampler, storage, 2, seed=seed)
