from __future__ import annotations

import logging
import math
import pickle
import tracemalloc

import numpy as np
import obstore.store
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage, append_data
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.data import keys
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, RunMismatchError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from trajectory_store import Column, RaggedArray, Schema, StoreError, TrajectoryStore


@pytest.fixture
def storage(tmp_path):
    """An empty storage."""
    made = TrajectoryStorage(tmp_path / "store")
    yield made
    made.close()


def put(storage, td):
    """Append in turn."""
    storage.set(torch.arange(td.shape[0]).add(storage.next_slot) % storage.max_size, td)


def finished(rows):
    """Rows with an advantage and a KL coefficient, as the write path leaves them."""
    for i, row in enumerate(rows):
        row["advantage"] = torch.tensor(float(i) - 1.5)
        row["kl_coef"] = torch.tensor(0.1 * (i + 1))
    return rows


def test_round_trip_in_every_form(storage, make_rows, to_form, form):
    """What was written is what a padded batch holds, right padded, with masks."""
    rows = make_rows([4, 7, 3])
    put(storage, to_form(rows, form))
    batch = storage.get(torch.tensor([2, 0, 1, 0]))
    assert batch.batch_size == (4,)
    for i, j in enumerate([2, 0, 1, 0]):
        n = rows[j]["tokens", "full"].shape[0]
        assert batch[keys.TOKENS][i].tolist() == rows[j]["tokens", "full"].tolist() + [0] * (7 - n)
        assert batch[keys.ATTENTION_MASK][i].tolist() == [True] * n + [False] * (7 - n)
        mask = rows[j]["masks", "all_assistant_mask"]
        assert batch[keys.ASSISTANT_MASK][i].tolist() == mask.tolist() + [False] * (7 - n)
        for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
            expected = torch.zeros(7)
            expected[:n] = rows[j][key].nan_to_num(0.0)
            assert torch.equal(batch[key][i], expected)
    assert batch[keys.TOKENS].dtype == torch.int64
    assert batch[keys.TASK_REWARD].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert batch[keys.TRAJECTORY_ID].tolist() == [2, 0, 1, 0]
    assert batch[keys.DONE].tolist() == [True] * 4
    assert batch[keys.ROW_ID].tolist() == storage.row_ids([2, 0, 1, 0]).tolist()


def test_columns_of_equal_lengths_share_them(make_rows):
    """So that the store checks and writes one array of offsets."""
    num, data = append_data(lazy_stack(make_rows([4, 5])), trajectory_schema())
    assert num == 2
    ragged = [value for value in data.values() if isinstance(value, RaggedArray)]
    assert len(ragged) > 2
    assert len({id(value.lengths) for value in ragged}) == 1


def test_strings_stay_apart(storage, make_rows, to_form, form):
    """TorchRL's memmap storage gives the first string for every row."""
    rows = make_rows([4, 5, 6], group_size=1)
    rows[1]["prompt"] = "zwei\u0301 \U0001f600"
    rows[2]["completion"] = ""
    put(storage, to_form(rows, form))
    batch = storage.read([2, 1, 0], text=True)
    assert list(batch["prompt"]) == ["prompt 2", "zwei\u0301 \U0001f600", "prompt 0"]
    assert list(batch["completion"]) == ["", "completion 1", "completion 0"]
    assert storage.read_text("prompt", storage.row_ids([0])) == ["prompt 0"]
    assert [storage.get(i)["prompt"] for i in range(3)] == ["prompt 0", "zwei\u0301 \U0001f600", "prompt 2"]
    assert "prompt" not in storage.get([0])


def test_shaped_reward_and_advantage_against_float64(storage, make_rows, to_form, form):
    """Reward, penalty and advantage per token, derived on read, against a reference by hand."""
    rows = finished(make_rows([4, 7, 3], rewards=[1.0, -2.0, 0.5]))
    put(storage, to_form(rows, form))
    batch = storage.get([0, 1, 2])
    for i, row in enumerate(rows):
        n = row["tokens", "full"].shape[0]
        mask = row["masks", "all_assistant_mask"]
        d = row["log_probs", "full"].double() - row["next", "ref_log_probs", "full"].double()
        k1 = torch.where(mask, d, 0.0)
        reward = -0.1 * (i + 1) * k1
        reward[n - 1] += row["task_reward"].double()
        zeros = torch.zeros(7 - n, dtype=torch.float64)
        torch.testing.assert_close(batch[keys.KL_PENALTY][i].double(), torch.cat([k1, zeros]), atol=1e-6, rtol=0)
        torch.testing.assert_close(batch[keys.REWARD][i].double(), torch.cat([reward, zeros]), atol=1e-6, rtol=0)
        advantage = torch.cat([mask * (i - 1.5), zeros])
        assert batch[keys.ADVANTAGE][i].tolist() == advantage.tolist()


def test_several_turns(storage, make_rows, to_form, form):
    """With a user turn inside, the reward sits on the last assistant token and nothing stands on the user's."""
    rows = finished(make_rows([7, 4], rewards=[1.0, 1.0]))
    mask = torch.tensor([False, False, True, False, True, True, False])
    rows[0]["masks", "all_assistant_mask"] = mask
    for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
        rows[0][key] = torch.where(mask, -torch.rand(7), torch.nan)
    put(storage, to_form(rows, form))
    batch = storage.get([0])
    assert batch[keys.ADVANTAGE][0].tolist() == [0, 0, -1.5, 0, -1.5, -1.5, 0]
    assert (batch[keys.REWARD][0] != 0).tolist() == mask.tolist()
    assert batch[keys.REWARD][0, 5] > 0.5
    assert bool((batch[keys.LOG_PROBS][0][~mask] == 0).all())


def test_missing_score_inside_the_mask_stays_visible(storage, make_rows):
    """A NaN that belongs to a response token is not papered over; the reward passes over it."""
    rows = finished(make_rows([5], rewards=[1.0]))
    rows[0]["log_probs", "full"][3] = torch.nan
    put(storage, lazy_stack(rows))
    batch = storage.get([0])
    assert batch[keys.LOG_PROBS][0].isnan().tolist() == [False, False, False, True, False]
    assert bool(batch[keys.REWARD].isfinite().all())


def test_scored_prompt_tokens_are_kept(storage, make_rows):
    """Log-probs outside the mask that do exist are returned."""
    rows = make_rows([5])
    rows[0]["log_probs", "full"] = torch.tensor([torch.nan, -0.5, -0.25, -0.125, -1.0])
    put(storage, lazy_stack(rows))
    assert storage.get([0])[keys.LOG_PROBS][0].tolist() == [0.0, -0.5, -0.25, -0.125, -1.0]


def test_without_reference_or_advantage_the_keys_are_absent(storage, make_rows):
    """Nothing is made up: no reference, no penalty, no advantage; the reward is the task's."""
    put(storage, lazy_stack(make_rows([4, 5], ref=False, rewards=[1.0, 2.0])))
    batch = storage.get([0, 1])
    names = set(batch.keys(True, True))
    assert not names & {keys.REF_LOG_PROBS, keys.KL_PENALTY, keys.ADVANTAGE}
    assert batch[keys.REWARD].tolist() == [[0, 0, 0, 1.0, 0], [0, 0, 0, 0, 2.0]]


def test_failed_reward_does_not_reach_the_batch(storage, make_rows):
    """A NaN task reward is kept as such, and counts as nothing in the reward per token."""
    put(storage, lazy_stack(make_rows([4], rewards=[float("nan")])))
    batch = storage.get([0])
    assert bool(batch[keys.TASK_REWARD].isnan().all())
    assert bool((batch[keys.REWARD] == 0).all())


def test_ways_to_index(storage, make_rows):
    """Lists, arrays, ranges, bools, negatives and one-element tuples mean what they mean elsewhere."""
    put(storage, lazy_stack(make_rows([4, 5, 6, 7])))

    def ids(index):
        return storage.get(index)[keys.TRAJECTORY_ID].tolist()

    assert ids([1, 3]) == ids(np.array([1, 3])) == ids((torch.tensor([1, 3]),)) == ids(range(1, 4, 2)) == [1, 3]
    assert ids([-1, 0]) == [3, 0]
    assert ids(np.array([True, False, False, True])) == [0, 3]
    assert ids([]) == []
    assert storage.get(-1)[keys.TRAJECTORY_ID].item() == 3
    assert storage.get(torch.tensor(2))[keys.TOKENS].shape == (6,)
    assert 3 in storage
    assert 4 not in storage
    assert storage.contains(torch.tensor([0, 9])).tolist() == [True, False]
    for wrong in (4, [4], torch.tensor([-5])):
        with pytest.raises(IndexError, match="4 trajectories"):
            storage.get(wrong)


def test_slice_reads_scalars_only(storage, make_rows):
    """Samplers may scan a storage without touching the tokens."""
    put(storage, lazy_stack(make_rows([4, 5, 6])))
    head = storage.get(slice(0, 2))
    assert torch.equal(storage.read(slice(0, 2))[keys.TOKENS], storage.get([0, 1])[keys.TOKENS])  # when asked
    assert head[keys.TRAJECTORY_ID].tolist() == [0, 1]
    assert not {keys.TOKENS, keys.LOG_PROBS, keys.PROMPT} & set(head.keys(True, True))
    assert storage[:][keys.GROUP_ID].tolist() == [0, 0, 1]


def test_only_some_keys(storage, make_rows):
    """Keys and column names choose what is read; what is derived brings what it needs."""
    put(storage, lazy_stack(finished(make_rows([4, 5]))))
    names = set(storage.read([0, 1], keys=[keys.ADVANTAGE, "group_id"]).keys(True, True))
    assert names == {keys.ADVANTAGE, keys.GROUP_ID, keys.ROW_ID}
    full = storage.get([0, 1])
    for key in (keys.REWARD, keys.KL_PENALTY, keys.ATTENTION_MASK, keys.LOG_PROBS):
        assert torch.equal(storage.read([0, 1], keys=[key])[key], full[key])
    with pytest.raises(StoreError, match="group_id"):
        storage.read([0], keys=["grop_id"])


def test_some_keys_of_a_store_without_coefficients(tmp_path, make_rows):
    """The reward that is asked for comes also where no column holds a KL coefficient."""
    schema = Schema([column for column in trajectory_schema() if column.name != "kl_coef"])
    storage = TrajectoryStorage(tmp_path / "store", schema=schema)
    put(storage, lazy_stack(make_rows([4, 5], rewards=[1.0, 2.0])))
    padded = storage.read([0, 1], keys=[keys.REWARD])
    assert set(padded.keys(True, True)) == {keys.REWARD, keys.ROW_ID}
    assert padded[keys.REWARD].tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 2]]
    storage.close()


def test_reopening_shows_all_rows(tmp_path, make_rows):
    """A new process finds every trajectory, and the next one comes after them."""
    first = TrajectoryStorage(tmp_path / "store")
    put(first, lazy_stack(make_rows([4, 5])))
    first.close()
    second = TrajectoryStorage(tmp_path / "store")
    assert (len(second), second.next_slot) == (2, 2)
    put(second, lazy_stack(make_rows([6], first_group=5)))
    assert second.get([0, 1, 2])[keys.GROUP_ID].tolist() == [0, 0, 5]
    second.close()
    with pytest.raises(StoreError, match="store"):
        TrajectoryStorage(tmp_path / "nothing", mode="r")


def test_zarr_backend(tmp_path, make_rows):
    """The same rows from a store that writes one zarr group per commit, also after reopening."""
    local = TrajectoryStorage(tmp_path / "local")
    remote = TrajectoryStorage(tmp_path / "zarr", backend="zarr")
    for storage in (local, remote):
        put(storage, lazy_stack(finished(make_rows([4, 7, 3]))))
        storage.update(storage.row_ids([1]), priority=[2.0])
    remote.close()
    remote = TrajectoryStorage(tmp_path / "zarr", backend="zarr")
    mine, theirs = local.read([2, 0, 1], text=True), remote.read([2, 0, 1], text=True)
    assert list(theirs["completion"]) == ["completion 2", "completion 0", "completion 1"]
    for key in set(mine.keys(True, True)) - {keys.ROW_ID, keys.CREATED_AT}:
        torch.testing.assert_close(theirs[key], mine[key], rtol=0, atol=0, equal_nan=True)
    local.close()
    remote.close()


def test_ring(tmp_path, make_rows):
    """Slots wrap at `max_size`, in this process and for whoever opens the store."""
    ring = TrajectoryStorage(tmp_path / "store", max_size=3)
    put(ring, lazy_stack(make_rows([4] * 2)))
    put(ring, lazy_stack(make_rows([4] * 2, first_group=10)))
    assert (len(ring), ring.next_slot) == (3, 1)
    expected = [21, 1, 20]
    assert ring.get([0, 1, 2])[keys.TRAJECTORY_ID].tolist() == expected
    other = TrajectoryStorage(tmp_path / "store", max_size=3, mode="r")
    assert other.get([0, 1, 2])[keys.TRAJECTORY_ID].tolist() == expected
    assert other.next_slot == 1
    put(ring, lazy_stack(make_rows([4] * 5, first_group=20)))
    other.refresh()
    assert sorted(ring[:][keys.TRAJECTORY_ID].tolist()) == [42, 43, 44]
    assert other[:][keys.TRAJECTORY_ID].tolist() == ring[:][keys.TRAJECTORY_ID].tolist()
    ring.close()
    other.close()


@pytest.mark.parametrize("zero_variance", ["keep", "mark", "drop"])
def test_a_ring_in_which_groups_wait_has_a_row_in_each_slot(tmp_path, make_rows, zero_variance):
    """Slots mean the rows that the store has and that may be drawn: where they are written, followed and opened."""
    size, draw = 12, np.random.default_rng(0)
    storage = TrajectoryStorage(tmp_path / "store", max_size=size)
    rb = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(2, zero_variance=zero_variance), batch_size=4)
    follower = TrajectoryStorage(tmp_path / "store", mode="r")
    rows = make_rows([3] * 120, rewards=[float(i % 3 > 0) for i in range(120)])
    order = np.argsort(np.arange(len(rows)) + 12 * draw.random(len(rows)), kind="stable")
    for number, some in enumerate(np.array_split(order, 70)):
        slots = rb.extend(lazy_stack([rows[i] for i in some]))
        if number % 20 == 0:
            rb.store.compact()  # what the ring evicted leaves the disk
        follower.refresh()
        fresh = TrajectoryStorage(tmp_path / "store", mode="r")
        drawable = rb.view().ids
        for one in (storage, follower, fresh):
            assert one.max_size == size
            assert sorted(one.row_ids().tolist()) == sorted(drawable.tolist())
        fresh.close()
        assert set(storage.row_ids(slots.reshape(-1)).tolist()) <= set(drawable.tolist())
        if len(rb):
            rb.sample()
    assert rb.store.watermark > len(rb.store) == size
    for one in (storage, follower):
        one.close()


def test_writing_to_a_slot_replaces_it(storage, make_rows, tmp_path):
    """`storage[i] = td` appends a row that the slot means from then on, also after reopening."""
    put(storage, lazy_stack(make_rows([4, 5, 6])))
    storage[1] = make_rows([7], first_group=50)[0]
    assert len(storage) == 3
    assert storage.next_slot == 3
    assert storage.get([0, 1, 2])[keys.GROUP_ID].tolist() == [0, 50, 1]
    again = TrajectoryStorage(tmp_path / "store", mode="r")
    assert again.get([0, 1, 2])[keys.GROUP_ID].tolist() == [0, 50, 1]
    again.close()


def test_mutable_scalars(storage, make_rows, tmp_path):
    """Flags and priorities change: here at once, in another handle after a refresh."""
    put(storage, lazy_stack(make_rows([4, 5, 6])))
    other = TrajectoryStorage(tmp_path / "store", mode="r")
    assert storage.get([0, 1])[keys.PRIORITY].tolist() == [1.0, 1.0]
    ids = storage.row_ids([0, 2])
    storage.update(ids, degenerate=[True, True], priority=torch.tensor([0.5, 0.25]))
    assert storage.get([0, 1, 2])[keys.DEGENERATE].tolist() == [True, False, True]
    other.refresh()
    assert other.get([0, 1, 2])[keys.DEGENERATE].tolist() == [True, False, True]
    assert other.get([0, 1, 2])[keys.PRIORITY].tolist() == [0.5, 1.0, 0.25]
    other.close()


def test_scored_later(storage, make_rows):
    """Reference log-probs that come from elsewhere arrive as an update."""
    rows = make_rows([4, 5], ref=False)
    put(storage, lazy_stack(rows))
    ref = np.array([np.nan, np.nan, -0.5, -0.25], np.float32)
    storage.update(storage.row_ids([0]), ref_log_probs=[ref])
    assert storage.get([0])[keys.REF_LOG_PROBS][0].tolist() == [0.0, 0.0, -0.5, -0.25]


def test_other_writers_appear_after_refresh(storage, make_rows, tmp_path):
    """Two writers, one order: both handles agree on which slot is which row."""
    other = TrajectoryStorage(tmp_path / "store")
    put(storage, lazy_stack(make_rows([4, 5])))
    put(other, lazy_stack(make_rows([6], first_group=7)))
    assert storage.refresh() == 3
    other.refresh()
    assert len(storage) == len(other) == 3
    assert storage.row_ids().tolist() == other.row_ids().tolist()
    put(other, lazy_stack(make_rows([6], first_group=8)))
    storage.refresh()
    put(storage, lazy_stack(make_rows([6], first_group=9)))
    other.refresh()
    assert other[:][keys.GROUP_ID].tolist() == [0, 0, 7, 8, 9]
    other.close()


def test_a_row_takes_eight_bytes_of_memory(tmp_path):
    """One id per row, and no second copy of it, in a storage that follows a long run and adds to it."""
    storage = TrajectoryStorage(tmp_path / "s")
    one = {"input_ids": [[1, 2]], "assistant_mask": [[False, True]], "log_probs": [[0.0, -1.0]]}
    tracemalloc.start()
    try:
        with TrajectoryStore.open(tmp_path / "s", "a") as other:
            rows = {name: RaggedArray(np.repeat(value[0], 20_000), np.full(20_000, 2)) for name, value in one.items()}
            counts = []
            for _ in range(4):
                other.append(rows)
                storage.refresh()
                storage.store.append(one)
                storage.refresh()
                counts.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(storage) == 80_004
    assert storage.row_ids(None).tolist() == storage.store.ids().tolist()
    assert counts[-1] - counts[0] < 2 * 8 * 60_000 + 100_000  # an array of ids has room for as many again


def test_state_dict_on_the_same_path(storage, make_rows):
    """The rows are on disk already: loading looks whether they are all there."""
    put(storage, lazy_stack(make_rows([4, 5])))
    state = storage.state_dict()
    storage.load_state_dict(state)
    assert len(storage) == 2
    with pytest.raises(RunMismatchError, match="has 2 trajectories, but had 9 when the checkpoint was saved"):
        storage.load_state_dict({**state, "watermark": 9})


def test_state_dict_into_another_storage_keeps_strings(storage, make_rows, tmp_path):
    """TorchRL's state_dict loses strings silently."""
    rows = finished(make_rows([4, 5, 6], group_size=1))
    put(storage, lazy_stack(rows))
    other = TrajectoryStorage(tmp_path / "other")
    other.load_state_dict(storage.state_dict())
    mine, theirs = storage.read([0, 1, 2], text=True), other.read([0, 1, 2], text=True)
    assert list(theirs["prompt"]) == ["prompt 0", "prompt 1", "prompt 2"]
    for key in mine.keys(True, True):
        if key != keys.ROW_ID:
            torch.testing.assert_close(theirs[key], mine[key], equal_nan=True)
    with pytest.raises(RunMismatchError, match="contains 3"):
        other.load_state_dict(storage.state_dict())
    other.close()
    with pytest.raises(MissingPathError, match="gone"):
        TrajectoryStorage(tmp_path / "new").load_state_dict({**storage.state_dict(), "path": str(tmp_path / "gone")})


@pytest.mark.parametrize("how", ["state", "dump"])
def test_a_copy_of_a_ring_loses_its_oldest_row_next(tmp_path, make_rows, how):
    """A ring begins somewhere in its slots: a copy has each row at its position, also when it is opened again."""
    first, other = (TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / n, max_size=4)) for n in ("a", "b"))
    first.extend(lazy_stack(make_rows([4] * 6, group_size=1)))
    if how == "state":
        other.load_state_dict(first.state_dict())
    else:
        first.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    assert other.store.read_scalars("group_id").tolist() == [2, 3, 4, 5]
    assert other[:]["group_id"].tolist() == first[:]["group_id"].tolist() == [4, 5, 2, 3]
    other.extend(lazy_stack(make_rows([4], first_group=6)))
    assert other[:]["group_id"].tolist() == [4, 5, 6, 3]
    first.storage.close()
    other.storage.close()
    with TrajectoryStore.open(tmp_path / "b") as store:
        again = TrajectoryStorage(store, max_size=4)
        assert again.get([0, 1, 2, 3])["group_id"].tolist() == [4, 5, 6, 3]


def test_the_state_of_a_store_at_a_url_is_loaded_from_there(tmp_path, make_rows, monkeypatch):
    """The same storage finds its rows, and another one gets a copy of them."""
    bucket = obstore.store.MemoryStore()
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: bucket)
    first = TrajectoryStorage("s3://bucket/store", backend="zarr")
    other = TrajectoryStorage(tmp_path / "other")
    put(first, lazy_stack(make_rows([4, 5])))
    state = first.state_dict()
    assert state["path"] == "s3://bucket/store"
    first.load_state_dict(state)
    other.load_state_dict(state)
    assert torch.equal(other.get([0, 1])[keys.TOKENS], first.get([0, 1])[keys.TOKENS])
    first.close()
    other.close()


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_storage_is_pickled_as_its_store_is(storage, make_rows, tmp_path, monkeypatch, mode):
    """Opened again from another folder, with the mode that the store has: a reader stays one."""
    put(storage, lazy_stack(make_rows([4])))
    folder = storage.store.path
    monkeypatch.chdir(folder.parent)
    packed = pickle.dumps(TrajectoryStorage(TrajectoryStore.open(folder.name, mode=mode)))
    monkeypatch.chdir("/")
    again = pickle.loads(packed)  # noqa: S301
    assert (len(again), again.store.mode) == (1, mode)
    again.close()


def test_dumps_and_loads(storage, make_rows, tmp_path):
    """A dump is a copy in slot order; a second dump replaces the first as a whole."""
    put(storage, lazy_stack(make_rows([4, 5])))
    storage[0] = make_rows([6], first_group=30)[0]
    storage.dumps(tmp_path / "dump")
    put(storage, lazy_stack(make_rows([7], first_group=40)))
    storage.dumps(tmp_path / "dump")
    loaded = TrajectoryStorage(tmp_path / "loaded")
    loaded.loads(tmp_path / "dump")
    assert loaded.get([0, 1, 2])[keys.GROUP_ID].tolist() == [30, 0, 40]
    assert list(loaded.read([0, 1, 2], text=True)["prompt"]) == ["prompt 30", "prompt 0", "prompt 40"]
    assert len(list((tmp_path / "dump").glob("store-*"))) == 1
    loaded.close()
    with pytest.raises(MissingPathError, match="there is no complete buffer dump"):
        TrajectoryStorage(tmp_path / "third").loads(tmp_path / "nowhere")


def test_a_dump_cut_short_is_not_there(storage, make_rows, tmp_path):
    """What a kill in the middle leaves is ignored: the former dump still loads."""
    put(storage, lazy_stack(make_rows([4, 5])))
    storage.dumps(tmp_path / "dump")
    TrajectoryStore.create(tmp_path / "dump" / "store-half", trajectory_schema()).close()
    loaded = TrajectoryStorage(tmp_path / "loaded")
    loaded.loads(tmp_path / "dump")
    assert len(loaded) == 2
    loaded.close()


def test_multi_step_trajectories_become_one_row(storage):
    """The last step holds the conversation; rewards add up, and earlier turns keep their log-probs."""
    nan = float("nan")

    def step(tokens, mask, log_probs, reward, done):
        return TensorDict(
            {
                "tokens": {"full": torch.tensor(tokens)},
                "masks": {"all_assistant_mask": torch.tensor(mask)},
                "log_probs": {"full": torch.tensor(log_probs)},
                "group_id": torch.tensor(4),
                "next": {"reward": torch.tensor([reward]), "done": torch.tensor([done])},
                "prompt": "first" if len(tokens) == 2 else "later",
            }
        )

    td = lazy_stack(
        [
            step([1, 2], [False, True], [nan, -0.5], 0.25, False),
            step([1, 2, 3, 4], [False, True, False, True], [nan, nan, nan, -0.25], 1.0, True),
        ]
    )
    columns_before = len(storage)
    storage.set(torch.tensor([0]), td)
    assert (columns_before, len(storage)) == (0, 1)
    row = storage.get(0)
    assert row[keys.TOKENS].tolist() == [1, 2, 3, 4]
    assert row[keys.LOG_PROBS].tolist() == [0.0, -0.5, 0.0, -0.25]
    assert row[keys.TASK_REWARD].item() == 1.25
    assert row["prompt"] == "first"


def test_prompt_length_and_mask_follow_from_each_other(storage, make_rows):
    """Either of the two is enough."""
    put(storage, lazy_stack([r.exclude("masks") for r in make_rows([5], prompt=3)]))
    put(storage, lazy_stack([r.exclude("num_prompt_tokens") for r in make_rows([5], prompt=3)]))
    batch = storage.get([0, 1])
    assert batch[keys.ASSISTANT_MASK].tolist() == [[False, False, False, True, True]] * 2
    assert batch[keys.NUM_PROMPT_TOKENS].tolist() == [3, 3]


def test_rewards_per_token(tmp_path, make_rows):
    """A store with the column returns them as they were; one without refuses what it could not give back."""
    rows = make_rows([4, 5], ref=False)
    for row in rows:
        del row["task_reward"]
        row["next", "reward"] = torch.arange(row["tokens", "full"].shape[0], dtype=torch.float32)
    with_column = TrajectoryStorage(tmp_path / "with", schema=trajectory_schema(token_rewards=True))
    put(with_column, lazy_stack(rows))
    batch = with_column.get([0, 1])
    assert batch[keys.REWARD].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    assert batch[keys.TASK_REWARD].tolist() == [6.0, 10.0]
    with_column.close()
    without = TrajectoryStorage(tmp_path / "without")
    with pytest.raises(DataError, match="token_rewards=True"):
        put(without, lazy_stack(rows))
    for row in rows:
        row["next", "reward"][:-1] = 0
    put(without, lazy_stack(rows))
    assert without.get([0, 1])[keys.REWARD].tolist() == [[0, 0, 0, 3, 0], [0, 0, 0, 0, 4]]
    without.close()


def test_rewards_that_differ_from_the_task_reward_beside_them_are_refused(storage, make_rows):
    """Without a column only the task reward is kept: the other is taken where it says the same, by token or not."""
    for rewards in ([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 3.0], 3.0, math.nan):
        (row,) = make_rows([4], ref=False)
        row["task_reward"], row["next", "reward"] = torch.tensor(2.0), torch.tensor(rewards)
        with pytest.raises(DataError, match=r"token_rewards=True"):
            put(storage, lazy_stack([row]))
    steps = TensorDict({**make_rows([4], ref=False)[0].expand(2).to_dict()}, batch_size=[2])
    steps["task_reward"], steps["next", "reward"] = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0])
    steps["next", "done"] = torch.tensor([False, True])
    with pytest.raises(DataError, match=r"trajectory 0 is 2, but the rewards under .* sum to 3 without"):
        put(storage, steps)
    for count, rewards in enumerate(([0.0, 0.0, 0.0, 2.0], 2.0), start=1):
        (row,) = make_rows([4], ref=False)
        row["task_reward"], row["next", "reward"] = torch.tensor(2.0), torch.tensor(rewards)
        put(storage, lazy_stack([row]))
        assert len(storage) == count
        assert storage.get([count - 1])[keys.REWARD].tolist() == [[0.0, 0.0, 0.0, 2.0]]


def test_extra_columns(tmp_path, make_rows):
    """Columns of the user's own travel under their name."""
    schema = trajectory_schema([Column("expert", "int16", ragged=True), Column("score", "float64")])
    storage = TrajectoryStorage(tmp_path / "store", schema=schema)
    rows = make_rows([4, 5])
    for i, row in enumerate(rows):
        row["expert"] = torch.full((row["tokens", "full"].shape[0],), i + 1, dtype=torch.int16)
        row["score"] = torch.tensor(i / 3, dtype=torch.float64)
    put(storage, lazy_stack(rows))
    batch = storage.get([0, 1])
    assert batch["expert"].tolist() == [[1, 1, 1, 1, 0], [2] * 5]
    assert batch["score"].tolist() == [0.0, 1 / 3]
    storage.close()


def test_keys_without_a_column_are_named_once(storage, make_rows, caplog):
    """What is not stored is said, once."""
    rows = make_rows([4])
    rows[0]["unheard_of"] = torch.tensor(1.0)
    with caplog.at_level(logging.WARNING, logger="rlhf_pipeline"):
        put(storage, lazy_stack(rows))
        put(storage, lazy_stack(rows))
    assert ["unheard_of" in r.getMessage() for r in caplog.records] == [True]


def test_bfloat16_and_graphs_are_stored_as_numbers(storage, make_rows):
    """Log-probs in bf16 or with a graph are written as plain float32."""
    rows = make_rows([4, 5])
    for row in rows:
        row["log_probs", "full"] = torch.zeros(row["tokens", "full"].shape[0], dtype=torch.bfloat16)
    rows[1]["log_probs", "full"].requires_grad_()
    put(storage, lazy_stack(rows))
    assert storage.get([0])[keys.LOG_PROBS].dtype == torch.float32


def test_padding_to_a_multiple(tmp_path, make_rows):
    """The padded length is rounded up."""
    storage = TrajectoryStorage(tmp_path / "store", pad_to_multiple_of=8)
    put(storage, lazy_stack(make_rows([4, 5])))
    assert storage.get([0, 1])[keys.TOKENS].shape == (2, 8)
    storage.close()


def test_a_batch_stays_as_it_is(storage, make_rows):
    """Later reads never change a batch that somebody holds, and changing a batch does not change the store."""
    put(storage, lazy_stack(finished(make_rows([4, 5, 6, 7]))))
    first = storage.get([0, 1])
    kept = first.clone()
    for _ in range(5):
        storage.get([2, 3])
    for key in kept.keys(True, True):
        torch.testing.assert_close(first[key], kept[key], rtol=0, atol=0, equal_nan=True)
    first[keys.TOKENS].fill_(0)
    assert bool((storage.get([0, 1])[keys.TOKENS] == kept[keys.TOKENS]).all())


def test_refused_data(storage, make_rows):
    """Each message says what was wrong; nothing is written."""
    with pytest.raises(DataError, match="no token ids"):
        storage.set([0], TensorDict(a=torch.zeros(1), batch_size=[1]))
    with pytest.raises(DataError, match="int"):
        storage.set(0, 3)
    with pytest.raises(
        DataError, match=r"the numbers of trajectories \(2\) and slots \(1\) differ; pass one trajectory per slot"
    ):
        storage.set([0], lazy_stack(make_rows([4, 5])))
    with pytest.raises(DataError, match=r"same keys\. Keys in only one of them: 'meta'"):
        storage.set([0, 1], [make_rows([4])[0], make_rows([4])[0].exclude("meta")])
    rows = make_rows([4])
    rows[0]["group_id"] = torch.tensor([1, 2])
    with pytest.raises(DataError, match="one value per trajectory"):
        storage.set([0], lazy_stack(rows))
    with pytest.raises(DataError, match="trajectory 1 of 2 has no tokens"):
        storage.extend(lazy_stack([make_rows([4])[0], make_rows([0], prompt=0)[0]]))
    assert len(storage.store) == 0


def test_arguments_that_contradict(tmp_path):
    """Wrong limits, a store of something else, a schema that an existing store lacks."""
    with pytest.raises(DefinitionError, match="max_size"):
        TrajectoryStorage(tmp_path / "a", max_size=0)
    TrajectoryStore.create(tmp_path / "b", Schema([Column("x", "int32")])).close()
    with pytest.raises(DefinitionError, match="input_ids"):
        TrajectoryStorage(tmp_path / "b")
    TrajectoryStorage(tmp_path / "c").close()
    with pytest.raises(DefinitionError, match="mine"):
        TrajectoryStorage(tmp_path / "c", schema=trajectory_schema([Column("mine", "int32")]))


def test_a_token_with_nothing_before_it_has_no_penalty(storage, make_rows):
    """A trajectory without a prompt: what is read back adds up to what the write path paid."""
    (row,) = make_rows([3], prompt=0)
    row["masks", "all_assistant_mask"][:] = True
    row["log_probs", "full"] = torch.tensor([-1.0, -1.0, -1.0])
    row["next", "ref_log_probs", "full"] = torch.tensor([-5.0, -2.0, -2.0])
    row["task_reward"] = torch.tensor(1.0)
    batch = KLRewardTransform(coef=0.5).inv(lazy_stack([row]))
    storage.extend(batch)
    assert batch[0]["next", "reward"].sum().item() == pytest.approx(0.0)
    read = storage.read([0])
    assert read["next", "reward"][0].tolist() == pytest.approx([0.0, -0.5, 0.5])
    assert read["next", "kl_penalty"][0].tolist() == pytest.approx([0.0, 1.0, 1.0])


def test_a_reference_that_lacks_the_last_token_still_counts(storage, make_rows):
    """One score that is missing does not take the reference of the whole batch away."""
    (row,) = make_rows([4])
    row["next", "ref_log_probs", "full"] = torch.tensor([torch.nan, torch.nan, -1.0, torch.nan])
    storage.extend(lazy_stack([row]))
    assert storage.read([0])["next", "ref_log_probs", "full"][0, 2].item() == -1.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_prompt_tokens", torch.tensor(-1), "is -1; it must be between 0 and 4"),
        ("num_prompt_tokens", torch.tensor(5), "is 5; it must be between 0 and 4"),
        ("advantage", torch.zeros(5), "has 5 values for 4 tokens"),
        (("next", "reward"), torch.zeros(3), "has 3 values for 4 tokens"),
        ("advantage", torch.tensor([0.0, 0.0, 1.0, 2.0]), "differs between the tokens"),
        ("task_reward", torch.tensor(1e39, dtype=torch.float64), r"1e\+39, which is too large"),
        ("prompt", None, "contains None"),
        ("prompt", b"x", "contains b'x'"),
    ],
)
def test_values_that_would_be_stored_as_others_are_refused(storage, make_rows, key, value, message):
    """A count outside the row, values for other tokens, an overflow, text that is none: nothing is written."""
    (row,) = make_rows([4], prompt=2)
    if isinstance(value, torch.Tensor):
        row[key] = value
    else:
        row.set_non_tensor(key, value)
    with pytest.raises(DataError, match=message):
        storage.extend(lazy_stack([row]))
    assert len(storage.store) == 0


def test_priorities_are_finite_not_negative_and_fit(storage, make_rows):
    """A priority that no sampler can use is refused, and the old one stays."""
    put(storage, lazy_stack(make_rows([4, 5])))
    for value in (float("nan"), float("inf"), -1.0, [1.0, 2.0, 3.0]):
        with pytest.raises(DataError, match="priorit"):
            storage.set_priority([0, 1], value)
    assert storage.read([0, 1])["priority"].tolist() == [1.0, 1.0]
