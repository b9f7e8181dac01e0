"""Groups that wait as rows of a store: every moment at which a process may die, and processes that share a store."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose, Transform

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.data import keys
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from rlhf_pipeline.transforms.waiting_rows import RowUpdate
from tests.moments import at_call, fails
from tests.rlhf_pipeline.small import Clock
from trajectory_store import Column, Schema, StoreError, TrajectoryStore
from trajectory_store.recorder.standard import LEFT_OUT


@pytest.fixture
def open_buffer(tmp_path):
    """Opens buffers over one store. Nothing is locked or kept beside it, so a new one is what follows a kill."""
    made = []

    def build(transform, **kwargs):
        rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store"), transform=transform, **kwargs)
        made.append(rb)
        return rb

    yield build
    for rb in made:
        rb.storage.close()


def advantages(rb):
    """Advantage of each row that may be drawn by trajectory id, as stored."""
    rb.refresh()
    rows = rb.trajectories.mapped_rows()
    ids = rb.store.read_scalars("trajectory_id", rows).tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, rb.store.read_scalars("advantage", rows).tolist(), strict=True))


def stored(rb, name):
    """One column by trajectory id."""
    ids = rb.store.ids()
    return dict(
        zip(rb.store.read_scalars("trajectory_id", ids).tolist(), rb.store.read(ids, [name])[name], strict=True)
    )


def path(size=3):
    """The part of the write path that needs no model."""
    return Compose(MCAdvantage(size), KLRewardTransform(coef=0.3))


def test_every_group_continues_after_a_kill(open_buffer, make_rows, to_form, form, tmp_path):
    """Members before and after the kill make the group that an undisturbed buffer makes, bit for bit."""
    rows = make_rows([4, 5, 6, 7, 8, 9], group_size=3, rewards=[0.0, 1.0, 2.0, 5.0, 0.1, 8.0])
    straight = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "straight"), transform=path())
    rb = open_buffer(path())
    for buffer in (straight, rb):
        assert buffer.extend(to_form([rows[i] for i in (0, 3, 1)], form)).numel() == 0
        assert len(buffer) == 0
        assert len(buffer.store) == 3
    again = open_buffer(path())
    assert sorted(again.waiting()) == [0, 1, 3]
    assert again.transform[0].queued_groups == 2
    for buffer in (straight, again):
        assert buffer.extend(to_form([rows[i] for i in (4, 2)], form)).numel() == 3
        assert buffer.extend(to_form([rows[5]], form)).numel() == 3
        assert len(buffer) == 6
    assert advantages(again) == advantages(straight)
    for name in ("return", "kl_coef", "task_reward", "prompt", "meta", "finish_reason"):
        assert stored(again, name) == stored(straight, name)
    for name in ("input_ids", "log_probs", "ref_log_probs"):
        for trajectory, value in stored(again, name).items():
            assert value.tobytes() == stored(straight, name)[trajectory].tobytes()
    straight.storage.close()


def test_whole_and_waiting_groups_give_the_same(open_buffer, make_rows, tmp_path):
    """One trajectory per call or all in one: the same advantages, returns and flags, bit for bit.

    One has no token of the assistant, and the advantage of its own nevertheless.
    """
    lengths = [2 if i == 5 else 4 + i % 5 for i in range(12)]
    rows = make_rows(lengths, group_size=4, rewards=[float(i * i % 7) for i in range(12)])
    together = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "together"), transform=path(4))
    together.extend(lazy_stack(rows))
    rb = open_buffer(path(4))
    for i in np.random.default_rng(0).permutation(12).tolist():
        rb.extend(lazy_stack([rows[i]]))
    for name in ("advantage", "return", "degenerate", "kl_coef"):
        assert stored(rb, name) == stored(together, name)
    assert stored(rb, "advantage")[5] > 0
    together.storage.close()


def test_killed_between_the_commit_and_the_update(open_buffer, make_rows):
    """All members are rows and none has its advantage: the next process gives it to them, without another call."""
    rows = make_rows([4, 5, 6], group_size=2, rewards=[0.0, 1.0, 0.0])
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0], rows[2]]))
    with at_call(TrajectoryStorage.update_waiting, before=fails(SystemExit())), pytest.raises(SystemExit):
        rb.extend(lazy_stack([rows[1]]))
    assert np.isnan(rb.store.read_scalars("advantage")).all()
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [2]
    half = 1 / math.sqrt(2)
    assert advantages(again) == {0: pytest.approx(-half), 1: pytest.approx(half)}


def test_samplers_and_readers_pass_over_what_waits(open_buffer, make_rows):
    """`sample`, `sample_step` and `len` do not know a row that waits; another process sees it when it is ready."""
    rows = make_rows([4] * 5, group_size=2)
    rb = open_buffer(MCAdvantage(2), batch_size=8)
    rb.extend(lazy_stack([rows[0], rows[2], rows[3]]))
    reader = open_buffer(MCAdvantage(2), batch_size=8)
    for buffer in (rb, reader):
        assert len(buffer) == 2
        assert set(buffer.sample()[keys.TRAJECTORY_ID].tolist()) <= {2, 3}
        assert sorted(buffer.sample_step(0)[keys.TRAJECTORY_ID].tolist()) == [2, 3]
    rb.extend(lazy_stack([rows[1]]))
    assert len(reader) == 2
    reader.refresh()
    for buffer in (rb, reader, open_buffer(None)):
        assert buffer.storage[:][keys.TRAJECTORY_ID].tolist() == [2, 3, 0, 1]
        assert sorted(buffer.sample_step(0, 9)[keys.TRAJECTORY_ID].tolist()) == [0, 1, 2, 3]
    rb.extend(lazy_stack(make_rows([4, 4], first_group=9)))
    assert open_buffer(None).storage[:][keys.TRAJECTORY_ID].tolist() == [2, 3, 0, 1, 18, 19]


def test_a_member_that_waits_is_not_taken_again(open_buffer, make_rows):
    """Sent again after a kill, by this process or another one, a member is refused with what came beside it."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 1.0, 2.0, 3.0])
    open_buffer(MCAdvantage(2)).extend(lazy_stack([rows[0]]))
    for _ in range(2):
        rb = open_buffer(MCAdvantage(2))
        with pytest.raises(DataError, match="trajectory_id 0 arrived twice in group 0"):
            rb.extend(lazy_stack([rows[0], rows[2]]))
        assert rb.waiting() == [0]
        assert len(rb.store) == 1
    rb.extend(lazy_stack(rows[1:]))
    assert sorted(advantages(rb)) == [0, 1, 2, 3]


@pytest.mark.parametrize("together", [True, False])
def test_a_member_that_is_sent_again_begins_no_group(open_buffer, make_rows, together):
    """Its group has closed with it: it is refused with what came beside it; a group that comes whole is one."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 1.0, 2.0, 3.0])
    for part in [rows[:2]] if together else [rows[:1], rows[1:2]]:
        open_buffer(MCAdvantage(2)).extend(lazy_stack(part))
    rb = open_buffer(MCAdvantage(2))
    with pytest.raises(
        DataError, match="trajectory_id 1 arrived again in group 0, which is closed and already contains it"
    ):
        rb.extend(lazy_stack([rows[2], rows[1]]))
    assert (rb.waiting(), len(rb.store)) == ([], 2)
    rb.extend(lazy_stack(rows[2:3]))
    assert rb.waiting() == [2]
    rb.extend(lazy_stack(rows[3:]))
    assert sorted(advantages(rb)) == [0, 1, 2, 3]
    assert rb.extend(lazy_stack(rows[:2])).tolist() == [4, 5]


def test_killed_before_the_commit(open_buffer, make_rows):
    """The member that would have completed the group was never acknowledged; the others still wait."""
    rows = make_rows([4, 5], group_size=2)

    class Dies(Transform):
        def _inv_call(self, tensordict):
            if tensordict["trajectory_id"].max() > 0:
                raise SystemExit
            return tensordict

    rb = open_buffer(Compose(Dies(), MCAdvantage(2)))
    rb.extend(lazy_stack([rows[0]]))
    with pytest.raises(SystemExit):
        rb.extend(lazy_stack([rows[1]]))
    assert rb.waiting() == [0]
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [0]
    assert again.extend(lazy_stack([rows[1]])).numel() == 2


def test_a_failed_write_takes_nothing(open_buffer, make_rows):
    """The store refuses: the group waits as before, what came with the call is forgotten, and the call works again."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 1.0, 2.0, 3.0])
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0]]))
    before = rb.transform[0].get_stats()
    with at_call(TrajectoryStore.append, before=fails(StoreError("full"))), pytest.raises(StoreError):
        rb.extend(lazy_stack([rows[1], rows[2]]))
    assert rb.waiting() == [0]
    after = rb.transform[0].get_stats()
    assert after["completed_trajectories"] == before["completed_trajectories"] == 1
    assert rb.extend(lazy_stack([rows[1], rows[2]])).numel() == 2
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [2]
    assert again.extend(lazy_stack([rows[3]])).numel() == 2


def test_an_error_after_the_commit_writes_nothing_twice(open_buffer, make_rows):
    """The rows are there although the call failed (a sync that came back with an error): the group is completed."""
    rows = make_rows([4, 5], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0]]))
    with at_call(TrajectoryStore.append, after=fails(StoreError("sync"))), pytest.raises(StoreError):
        rb.extend(lazy_stack([rows[1]]))
    assert rb.waiting() == []
    assert sorted(advantages(rb)) == [0, 1]


def test_failures_survive(open_buffer, make_rows):
    """A reported failure counts after a kill, from the moment at which a member of its group is stored."""
    rows = make_rows([4, 5, 6, 7], group_size=3, rewards=[0.0, 2.0, 1.0, 5.0])
    rb = open_buffer(MCAdvantage(3))
    rb.extend(lazy_stack([rows[0]]))
    rb.report_failed(0)
    rb.report_failed(1)
    rb.extend(lazy_stack([rows[3]]))
    again = open_buffer(MCAdvantage(3))
    assert again.waiting() == [0, 3]
    assert again.extend(lazy_stack([rows[1]])).numel() == 2
    half = 1 / math.sqrt(2)
    assert list(advantages(again).values()) == pytest.approx([-half, half])
    assert again.report_failed(1).numel() == 1
    assert open_buffer(MCAdvantage(3)).waiting() == []


def test_dropped_groups_do_not_come_back(open_buffer, make_rows):
    """A group without spread whose members waited keeps its rows, and nobody draws them or waits for them."""
    rows = make_rows([4, 5], group_size=2, rewards=[1.0, 1.0])
    rb = open_buffer(MCAdvantage(2, zero_variance="drop"))
    rb.extend(lazy_stack([rows[0]]))
    assert rb.extend(lazy_stack([rows[1]])).numel() == 0
    for buffer in (rb, open_buffer(MCAdvantage(2))):
        assert buffer.waiting() == []
        assert len(buffer) == 0
        assert len(buffer.view()) == 0
        assert buffer.store.read_scalars("waiting").tolist() == [LEFT_OUT] * 2


def test_marked_groups_have_no_priority(open_buffer, make_rows):
    """`zero_variance="mark"` sets the priority of rows that waited to 0, as of groups that came whole."""
    rb = open_buffer(MCAdvantage(2, zero_variance="mark"))
    for row in make_rows([4] * 4, rewards=[1.0, 1.0, 0.0, 1.0]):
        rb.extend(lazy_stack([row]))
    assert rb.store.read_scalars("priority").tolist() == [0.0, 0.0, 1.0, 1.0]
    assert sorted(rb.sample_step(0)[keys.TRAJECTORY_ID].tolist()) == [2, 3]


def test_groups_out_of_bounds(open_buffer, make_rows):
    """A group whose mean return is out of bounds is left out: members that waited stay on disk and are never drawn."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 0.0, 0.0, 1.0])
    rb = open_buffer(MCAdvantage(2, keep_return_bounds=(0.1, 0.9)))
    for part, num in ((rows[:1], 0), (rows[1:3], 0), (rows[3:], 2)):
        assert rb.extend(lazy_stack(part)).numel() == num
    assert rb.extend(lazy_stack(make_rows([4, 5], first_group=7, rewards=[1.0, 1.0]))).numel() == 0
    assert stored(rb, "waiting")[0] == LEFT_OUT
    assert len(rb.store) == 3
    assert sorted(advantages(open_buffer(None))) == [2, 3]


def test_a_group_that_is_complete_when_it_is_found(open_buffer, make_rows):
    """The new process wants smaller groups: the next call writes what is complete."""
    rows = make_rows([4, 5, 6], group_size=4)
    rb = open_buffer(MCAdvantage(4))
    rb.extend(lazy_stack(rows[:2]))
    again = open_buffer(MCAdvantage(2))
    other = make_rows([5], first_group=9)[0]
    assert again.extend(lazy_stack([other])).numel() == 2
    assert sorted(advantages(again)) == [0, 1]


@pytest.mark.parametrize("identity", ["string", "tensor", "ragged"])
def test_any_identity(open_buffer, make_rows, identity):
    """Strings and token ids name a group after a crash as before."""
    rows = make_rows([4, 5, 6, 7])
    for i, row in enumerate(rows):
        group = i % 2
        row["who"] = {
            "string": f"prompt {group}",
            "tensor": torch.tensor([group, 7]),
            "ragged": torch.arange(3 + group),
        }[identity]
    rb = open_buffer(MCAdvantage(2, group_key="who"))
    rb.extend(lazy_stack(rows[:2]))
    again = open_buffer(MCAdvantage(2, group_key="who"))
    assert again.transform[0].queued_groups == 2
    assert again.extend(lazy_stack(rows[2:])).numel() == 4
    assert set(advantages(again)) == {0, 1, 2, 3}


def test_steps_of_a_conversation(open_buffer):
    """Where the return is not the sum, the steps of a trajectory wait one by one and come back together."""

    def conversation(number, rewards):
        steps = []
        for i, reward in enumerate(rewards):
            size = 3 + 2 * i
            steps.append(
                TensorDict(
                    {
                        "tokens": {"full": torch.arange(size)},
                        "masks": {"all_assistant_mask": torch.arange(size) >= 2},
                        "log_probs": {"full": torch.full((size,), -1.0)},
                        "group_id": torch.tensor(0),
                        "trajectory_id": torch.tensor(number),
                        "next": {"reward": torch.tensor([reward]), "done": torch.tensor([i == len(rewards) - 1])},
                    }
                )
            )
        return lazy_stack(steps)

    rb = open_buffer(MCAdvantage(2, trajectory_return="max"))
    rb.extend(conversation(0, [0.5, 1.0, 0.0]))
    again = open_buffer(MCAdvantage(2, trajectory_return="max"))
    assert again.waiting() == [0]
    assert again.extend(conversation(1, [3.0, 0.0])).numel() == 2
    assert again.store.read_scalars("return").tolist() == [1.0, 3.0]
    assert sorted(advantages(again)) == [0, 1]
    assert again.store.read_scalars("task_reward").tolist() == [1.5, 3.0]
    assert again.store.lengths("input_ids").tolist() == [7, 5]


def test_extra_columns_and_token_rewards(tmp_path, make_rows):
    """Columns that the user added wait with the rest, required ones and rewards per token too."""
    schema = trajectory_schema([Column("top_k", "int32", ragged=True), Column("score", "float64")], token_rewards=True)
    rows = make_rows([4, 5])
    for i, row in enumerate(rows):
        row["top_k"] = torch.arange(row["tokens", "full"].numel(), dtype=torch.int32)
        row["score"] = torch.tensor(0.1 + i, dtype=torch.float64)
        row["next", "reward"] = torch.arange(row["tokens", "full"].numel()) * 0.1
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "s", schema=schema), transform=MCAdvantage(2))
    rb.extend(lazy_stack(rows[:1]))
    rb.storage.close()
    again = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "s"), transform=MCAdvantage(2))
    assert again.extend(lazy_stack(rows[1:])).numel() == 2
    found = again.store.read(again.store.ids(), ["top_k", "score", "reward"])
    assert [v.tolist() for v in found["top_k"]] == [list(range(4)), list(range(5))]
    assert found["score"].tolist() == [0.1, 1.1]
    torch.testing.assert_close(torch.from_numpy(found["reward"][0]), torch.arange(4) * 0.1)
    again.storage.close()


def test_rewards_whitened_step_by_step(tmp_path, make_rows):
    """With `trajectory_return=None` and an advantage per token, members that waited get what a whole group gets."""
    columns = [c for c in trajectory_schema(token_rewards=True) if c.name != "advantage"]
    schema = Schema([*columns, Column("advantage", "float32", ragged=True, mutable=True, fill=math.nan)])
    rows = make_rows([4, 6, 5])
    for i, row in enumerate(rows):
        row["next", "reward"] = torch.arange(row["tokens", "full"].numel()) * (0.5 + i)
        row["group_id"] = torch.tensor(0)
    found = []
    for name, calls in (("whole", [rows]), ("waiting", [[rows[1]], [rows[0], rows[2]]])):
        storage = TrajectoryStorage(tmp_path / name, schema=schema)
        rb = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(3, trajectory_return=None))
        for call in calls:
            rb.extend(lazy_stack(call))
        found.append({trajectory: value.tolist() for trajectory, value in stored(rb, "advantage").items()})
        rb.storage.close()
    assert found[0].keys() == found[1].keys()
    for trajectory, value in found[0].items():
        assert found[1][trajectory] == pytest.approx(value, abs=1e-6)


def test_columns_that_a_complete_group_updates_must_be_mutable(tmp_path):
    """A store whose rows could wait and never be completed is refused at once, with the names of the columns."""
    given = {"advantage": Column("advantage", "float32", fill=0.0), "degenerate": Column("degenerate", "bool")}
    schema = Schema([given.get(column.name, column) for column in trajectory_schema()])
    storage = TrajectoryStorage(tmp_path / "s", schema=schema)
    with pytest.raises(
        DefinitionError, match=r"receive degenerate, advantage when their group is complete: .*mutable=True"
    ):
        TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(2))
    storage.close()


def test_processes_share_the_groups(open_buffer, make_rows):
    """Members that two processes write make one group; whichever brings the last one completes it."""
    rows = make_rows([4] * 6, group_size=3, rewards=[0.0, 1.0, 2.0, 3.0, 5.0, 7.0])
    first, second = open_buffer(MCAdvantage(3)), open_buffer(MCAdvantage(3))
    first.extend(lazy_stack([rows[0], rows[3]]))
    second.extend(lazy_stack([rows[1]]))
    assert sorted(second.waiting()) == [0, 1, 3]
    assert first.extend(lazy_stack([rows[2]])).numel() == 3
    assert second.waiting() == [3]
    second.extend(lazy_stack([rows[4]]))
    assert second.extend(lazy_stack([rows[5]])).numel() == 3
    assert sorted(advantages(first)) == sorted(advantages(second)) == list(range(6))
    spread = math.sqrt(sum((x - 5) ** 2 for x in (3, 5, 7)) / 2)
    assert advantages(first)[3] == pytest.approx(-2 / spread, abs=1e-5)


@pytest.mark.parametrize("method", ["append", "update"])
def test_another_thread_sees_a_group_that_waits_or_one_that_is_complete(open_buffer, make_rows, monkeypatch, method):
    """One that draws or looks while a member is stored or its group completed: no row has two slots or no advantage."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 1.0, 2.0, 3.0])
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(rows[:3]))
    store, drawn = rb.store, list[list[int]]()

    def look() -> None:
        if method == "update":
            rb.refresh()
        drawn.append(sorted(rb.select_step(0, strategy="uniform").tolist()))

    def look_beside(call):
        if call.arguments["self"] is store:
            threads.append(threading.Thread(target=look))
            threads[-1].start()
            threads[-1].join(0.5)

    threads = list[threading.Thread]()
    with at_call(getattr(TrajectoryStore, method), after=look_beside):
        rb.extend(lazy_stack(rows[3:]))
    for thread in threads:
        thread.join()
    assert sorted(rb.trajectories.mapped_rows().tolist()) == [0, 1, 2, 3]
    assert drawn in ([[0, 1]], [[0, 1, 2, 3]])


def test_processes_that_write_at_once(open_buffer, make_rows):
    """Three writers with members of the same groups, all the time: every group is completed once, with all of them."""
    groups, writers = 12, 3
    rows = make_rows([4] * groups * writers, group_size=writers, rewards=[float(i * 5 % 7) for i in range(36)])
    buffers = [open_buffer(MCAdvantage(writers)) for _ in range(writers)]

    def write(number):
        for group in range(groups):
            buffers[number].extend(lazy_stack([rows[writers * group + number]]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = open_buffer(MCAdvantage(writers))
    assert last.waiting() == []
    assert sum(b.transform[0].get_stats()["written_groups"] for b in [*buffers, last]) == groups
    alone = {}
    for group in range(groups):
        members = lazy_stack(rows[writers * group : writers * (group + 1)])
        out = MCAdvantage(writers).inv(members)
        alone |= {int(row["trajectory_id"]): float(row["advantage"]) for row in out.unbind(0)}
    assert advantages(last) == alone


def test_a_buffer_that_only_reads_takes_nothing(open_buffer, make_rows):
    """A learner's buffer has the same write path and never uses it; the group waits for whoever writes."""
    rows = make_rows([4, 5, 6], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(rows))
    learner = open_buffer(MCAdvantage(2), batch_size=2)
    assert learner.sample().batch_size == (2,)
    assert learner.sample_step(0).batch_size == (2,)
    assert open_buffer(MCAdvantage(2)).waiting() == [2]


def test_whole_groups_wait_for_nothing(open_buffer, make_rows):
    """Where every call brings whole groups there is one commit per call, no update and no look at the store."""
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4] * 2)))
    with at_call(TrajectoryStore.update) as updates, at_call(TrajectoryStore.refresh) as looks:
        rb.extend(lazy_stack(make_rows([4] * 8, first_group=3)))
    assert not [*updates, *looks]
    assert set(rb.store.read_scalars("waiting").tolist()) == {-1}


def test_a_ring_may_drop_what_waits(tmp_path, make_rows):
    """A member that a ring dropped has not arrived; rows that are gone when their values come are passed over."""
    storage = TrajectoryStorage(tmp_path / "store", max_size=4)
    rb = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(2))
    old = make_rows([4, 5], first_group=500, rewards=[0.0, 2.0])
    rb.extend(lazy_stack(old[:1]))
    for group in range(40):
        rb.extend(lazy_stack(make_rows([600, 700], first_group=group, rewards=[0.0, 1.0])))
    assert rb.extend(lazy_stack(old[1:])).numel() == 0
    assert rb.waiting() == [1001]
    (row,) = storage.waits
    later = RowUpdate(np.array([row, 10**12]), {"advantage": np.array([3.0, 4.0], np.float32)}, complete=True)
    assert len(storage.update_waiting(later)) == 1
    assert rb.store.read_scalars("advantage", [row]).tolist() == [3.0]
    storage.close()


def test_zarr_backend(tmp_path, make_rows):
    """In a store of the zarr backend groups wait the same way."""

    def build():
        return TrajectoryReplayBuffer(
            storage=TrajectoryStorage(tmp_path / "store", backend="zarr"), transform=MCAdvantage(2)
        )

    rows = make_rows([4, 5])
    rb = build()
    rb.extend(lazy_stack(rows[:1]))
    rb.storage.close()
    again = build()
    assert again.waiting() == [0]
    assert again.extend(lazy_stack(rows[1:])).numel() == 2
    again.storage.close()


def test_an_older_store_gains_the_columns(tmp_path, make_rows):
    """A store without `waiting` gets it when it is opened for writing; given as an object, groups wait in memory."""
    old = Schema([c for c in trajectory_schema() if c.name not in ("waiting", "failed_members")])
    TrajectoryStore.create(tmp_path / "store", old).close()
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store"), transform=MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    assert len(rb.store) == 1
    rb.storage.close()
    given = TrajectoryStore.create(tmp_path / "given", old)
    rb = TrajectoryReplayBuffer(storage=given, transform=MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    assert rb.waiting() == [0]
    assert len(given) == 0
    with pytest.raises(DataError, match="were waiting in memory"):
        TrajectoryReplayBuffer(storage=tmp_path / "store", transform=MCAdvantage(2)).load_state_dict(rb.state_dict())
    rb.storage.close()


def test_what_the_transform_alone_cannot_do(open_buffer, make_rows):
    """Groups that wait in a store are closed by the buffer, and never forgotten."""
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    transform = rb.transform[0]
    for call in (transform.close, transform.close_overdue, lambda: transform.report_failed(0)):
        with pytest.raises(DefinitionError, match=r"Call TrajectoryReplayBuffer\.\w+ instead"):
            call()
    with pytest.raises(DefinitionError, match="close_groups"):
        transform.clear_queues()
    assert rb.close_groups().numel() == 1


def test_timeouts_count_over_a_kill(open_buffer, make_rows):
    """A group's time runs from its first member, whichever process saw it."""
    clock = Clock()
    policy = {"min_group_size": 2, "group_timeout_s": 10.0, "clock": clock}
    rows = make_rows([4, 5, 6], group_size=3, rewards=[0.0, 1.0, 5.0])
    rb = open_buffer(MCAdvantage(3, **policy))
    rb.extend(lazy_stack(rows[:2]))
    clock.now += 11
    again = open_buffer(MCAdvantage(3, **policy))
    assert again.close_overdue().numel() == 2
    assert again.extend(lazy_stack(rows[2:])).numel() == 0
    stats = again.transform[0].get_stats()
    assert (stats["early_closed_groups"], stats["late_trajectories"]) == (1, 1)
    assert again.waiting() == []


def test_state_dict_of_the_same_store_is_older_than_its_rows(open_buffer, make_rows):
    """Loading a checkpoint brings nothing back that has been completed since."""
    rows = make_rows([4, 5], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(rows[:1]))
    state = rb.state_dict()
    rb.extend(lazy_stack(rows[1:]))
    rb.storage.close()
    again = open_buffer(MCAdvantage(2))
    again.load_state_dict(state)
    assert again.waiting() == []
    assert len(again) == 2


@pytest.mark.crash
def test_a_process_that_is_killed(tmp_path):
    """The real thing, once: SIGKILL while a trajectory waits."""
    script = """
    import os, signal, sys, torch
    from tensordict import TensorDict, lazy_stack
    from rlhf_pipeline import MCAdvantage, TrajectoryReplayBuffer
    rb = TrajectoryReplayBuffer(storage=sys.argv[1], transform=MCAdvantage(2))
    row = TensorDict({"tokens": {"full": torch.arange(4)}, "num_prompt_tokens": torch.tensor(2),
        "trajectory_id": torch.tensor(5), "group_id": torch.tensor(1), "task_reward": torch.tensor(1.0)})
    rb.extend(lazy_stack([row]))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "s")], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    rb = TrajectoryReplayBuffer(storage=tmp_path / "s", transform=MCAdvantage(2))
    assert rb.waiting(keys.TRAJECTORY_ID) == [5]
    rb.storage.close()


def test_a_nested_advantage_key_reaches_its_column(open_buffer, make_rows):
    """Groups that waited have their advantage where those that came whole have it, and `waiting` finds nested keys."""
    storage = TrajectoryStorage(open_buffer(None).storage.store.path, extra={("agent", "advantage"): "float32"})
    rb = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(2, advantage_key=("agent", "advantage")))
    rows = make_rows([4, 5])
    for i, row in enumerate(rows):
        row["group_id"], row["task_reward"] = torch.tensor(3), torch.tensor(float(i))
    rb.extend(lazy_stack(rows[:1]))
    assert len(rb.waiting(("agent", "advantage"))) == 1
    rb.extend(lazy_stack(rows[1:]))
    stored = rb.read(rb.trajectories.mapped_rows())["agent", "advantage"]
    assert stored.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    storage.close()
