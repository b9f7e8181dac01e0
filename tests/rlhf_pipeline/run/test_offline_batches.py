"""Batches over gathered trajectories: epochs, shares, and what a step takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline import Replay, Sample
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.offline_batches import Batches, EpochOrder, shares
from trajectory_store import Column, Schema, TrajectoryStore

SCHEMA = Schema(
    [
        Column("input_ids", "int32", ragged=True),
        *(Column(name, "int64") for name in ("source", "group_id", "policy_version", "trajectory_id")),
        *(Column(name, "float32", fill=0.0) for name in ("task_reward", "advantage")),
        Column("priority", "float32", mutable=True, fill=1.0),
    ]
)


def store_of(path, sources, groups, *, versions=None, **more) -> TrajectoryStore:
    store = TrajectoryStore.create(path, SCHEMA)
    n = len(sources)
    versions = [0] * n if versions is None else versions
    own = {
        "source": sources,
        "group_id": groups,
        "policy_version": versions,
        "trajectory_id": list(range(100, 100 + n)),
    }
    store.append({"input_ids": [[1]] * n, **own, **more})
    return store


def batches_of(store, *, sample=None, replay=None, batch_size=4, seed=0, ledger=None) -> Batches:
    return Batches(
        store, replay=replay or Replay(), sample=sample or Sample(), batch_size=batch_size, seed=seed, ledger=ledger
    )


def by_batch(size):
    return lambda place: (place - place % size, place - place % size + size)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.data())
def test_every_trajectory_comes_once_per_epoch_and_never_twice_in_a_batch(sizes, data):
    """Of any groups, in batches of any size: epochs are whole, a batch has no repeats, and is drawn alone as well."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    n = len(groups)
    size = data.draw(st.integers(1, n))
    order = EpochOrder(groups, by_batch(size), seed=3)
    steps = 4 * n // size + 1
    drawn = [order.take(step * size, (step + 1) * size) for step in range(steps)]
    assert all(len(np.unique(rows)) == size for rows in drawn)
    stream = np.concatenate(drawn)
    for epoch in range(len(stream) // n):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    step = data.draw(st.integers(0, steps - 1))
    alone = EpochOrder(groups, by_batch(size), seed=3).take(step * size, (step + 1) * size)
    assert alone.tolist() == drawn[step].tolist()


def test_groups_stay_together_and_each_epoch_has_its_own_order():
    """In an epoch each group's trajectories follow one another; two epochs and two seeds have other orders."""
    groups = np.repeat(np.arange(50), 4)
    order = EpochOrder(groups, by_batch(16), seed=0)
    epochs = [order.take(epoch * 200, (epoch + 1) * 200) for epoch in range(3)]
    for rows in epochs:
        runs = groups[rows].reshape(50, 4)
        assert (runs == runs[:, :1]).all()
    assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()
    assert EpochOrder(groups, by_batch(16), seed=1).take(0, 200).tolist() != epochs[0].tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(0, 300))
def test_shares_add_up_never_shrink_and_stay_within_one_of_the_weights(weights, total):
    """Whatever the weights: the counts are the total, a larger total takes nothing back, and no share is off by two."""
    counts, more = shares(weights, total), shares(weights, total + 1)
    assert counts.sum() == total
    assert (more >= counts).all()
    exact = total * np.asarray(weights) / sum(weights)
    assert (np.abs(counts - exact) < 2).all()


def test_weights_give_each_batch_its_share(tmp_path):
    """3 to 1 in batches of 6: 4 or 5 of the first store, and over any two steps exactly 9 and 3."""
    store = store_of(tmp_path / "store", [0] * 20 + [1] * 12, list(range(32)))
    batches = batches_of(store, replay=Replay(stores=("a", "b"), weights=(3.0, 1.0)), batch_size=6)
    counts = [np.bincount(batches.rows(step)[0] >= 20, minlength=2).tolist() for step in range(1, 9)]
    assert all(count in ([4, 2], [5, 1]) for count in counts)
    assert all(np.add(counts[i], counts[i + 1]).tolist() == [9, 3] for i in range(0, 8, 2))
    store.close()


def test_each_store_is_gone_through_by_itself(tmp_path):
    """With weights, the first eight draws of a store of eight are all of it, whatever the other store does."""
    store = store_of(tmp_path / "store", [0] * 8 + [1] * 20, [0, 0, 1, 1, 2, 2, 3, 3, *range(4, 24)])
    batches = batches_of(store, replay=Replay(stores=("a", "b"), weights=(1.0, 1.0)), batch_size=4)
    drawn = np.concatenate([batches.rows(step)[0] for step in range(1, 5)])
    assert sorted(drawn[drawn < 8].tolist()) == list(range(8))
    assert len(np.unique(drawn[drawn >= 8])) == 8
    again = batches_of(store, replay=Replay(stores=("a", "b"), weights=(1.0, 1.0)), batch_size=4)
    assert again.rows(9)[0].tolist() == batches.rows(9)[0].tolist()
    store.close()


def test_a_store_too_small_for_its_share_is_refused(tmp_path):
    """A store of two cannot give three different trajectories to a batch."""
    store = store_of(tmp_path / "store", [0] * 2 + [1] * 20, list(range(22)))
    with pytest.raises(
        DefinitionError, match=r"store 1 of 2 has too few .* \(2\).* 3 of the 6 trajectories in a batch"
    ):
        batches_of(store, replay=Replay(stores=("a", "b"), weights=(1.0, 1.0)), batch_size=6)
    store.close()


def test_epochs_end_after_their_last_trajectory(tmp_path):
    """2.5 epochs of ten in batches of four: 25 draws in seven steps, the last of one trajectory."""
    store = store_of(tmp_path / "store", [0] * 10, [0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    batches = batches_of(store, replay=Replay(epochs=2.5))
    assert batches.last_step == 7
    rows = [batches.rows(step)[0] for step in range(1, 8)]
    assert [len(found) for found in rows] == [4] * 6 + [1]
    assert set(np.bincount(np.concatenate(rows), minlength=10).tolist()) == {2, 3}
    store.close()


def test_a_batch_is_never_larger_than_the_store(tmp_path):
    """Of three trajectories a batch of four is three, each step an epoch."""
    store = store_of(tmp_path / "store", [0] * 3, [0, 0, 1])
    batches = batches_of(store)
    assert batches.batch_size == 3
    assert [batches.rows(step)[0].tolist() for step in (1, 2)] == [[0, 1, 2], [0, 1, 2]]
    store.close()


@pytest.mark.parametrize("strategy", ["uniform", "recency", "priority", "group", "success", "variance", "mix"])
def test_every_strategy_draws_the_same_again(tmp_path, strategy):
    """A strategy's batch is a function of seed and step; ages are counted from the newest version in the store."""
    versions, groups = list(range(16)), [row // 4 for row in range(16)]
    rewards, scores = [0.0, 1.0] * 8, np.linspace(0.1, 1.0, 16)
    store = store_of(tmp_path / "store", [0] * 16, groups, versions=versions, task_reward=rewards, advantage=scores)
    sample = Sample(strategy=strategy, batch_size=8, tau=4.0)
    batches = batches_of(store, sample=sample)
    drawn = [batches.rows(step) for step in range(1, 6)]
    assert all(len(rows) and (ages == 15 - rows).all() for rows, ages in drawn)
    again = batches_of(store, sample=sample)
    assert [again.rows(step)[0].tolist() for step in (5, 1)] == [drawn[4][0].tolist(), drawn[0][0].tolist()]
    other = batches_of(store, sample=sample, seed=1)
    assert [other.rows(step)[0].tolist() for step in range(1, 6)] != [rows.tolist() for rows, _ in drawn]
    store.close()


def test_the_use_limit_counts_what_the_ledger_says(tmp_path):
    """Uniform draws with one use each are a partition of the store; then there is nothing left."""
    store = store_of(tmp_path / "store", [0] * 12, list(range(12)))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    sample = Sample(strategy="uniform", batch_size=4, max_uses=1)
    batches = batches_of(store, sample=sample, ledger=ledger)
    seen: list[int] = []
    for step in (1, 2, 3):
        rows = batches.rows(step)[0].tolist()
        ledger.record({"step": step, "row_ids": rows, "trajectory_ids": [100 + row for row in rows]})
        seen += rows
    assert sorted(seen) == list(range(12))
    with pytest.raises(DataError, match="none of the 12 trajectories may be used again"):
        batches.rows(4)
    assert batches_of(store, sample=Sample(max_uses=2)).last_step == 6  # in epochs the end is known before
    store.close()


def test_groups_without_spread_that_were_marked_are_passed_over(tmp_path):
    """Priority 0 is never drawn, and does not count for an epoch."""
    store = store_of(tmp_path / "store", [0] * 6, [0, 0, 1, 1, 2, 2], priority=[1, 1, 0, 0, 1, 1])
    batches = batches_of(store, replay=Replay(epochs=1), batch_size=2)
    assert batches.num == 4
    assert batches.last_step == 2
    assert sorted(np.concatenate([batches.rows(step)[0] for step in (1, 2)]).tolist()) == [0, 1, 4, 5]
    store.close()
