"""Groups that wait on disk: every moment at which a process may die, and every writer that may take over."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose, Transform

from rlhf_pipeline import keys
from rlhf_pipeline.errors import DefinitionError, RunExistsError
from rlhf_pipeline.replay import _pending_home
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.replay.schema import trajectory_schema
from rlhf_pipeline.replay.storage import TrajectoryStorage
from rlhf_pipeline.transforms.kl_reward import KLRewardTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from trajectory_store import Column, Schema, StoreError, TrajectoryStore


class Clock:
    """Time that stands until it is moved."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def open_buffer(tmp_path):
    """Opens buffers over one store; `crash` lets go of everything as the kernel does for a killed process."""
    made = []

    def build(transform, **kwargs):
        rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store"), transform=transform, **kwargs)
        made.append(rb)
        return rb

    yield build
    for rb in made:
        rb.storage.close()


def crash(rb):
    """Drop the locks of a buffer without tidying up."""
    log = rb._group_transform()[1].log
    for home in log._homes:
        os.close(home._lock)
        home._lock = -1
    log._homes = []


def advantages(rb):
    """Advantage of each row by trajectory id, as stored."""
    store = rb.store
    ids = store.read_scalars("trajectory_id").tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, store.read_scalars("advantage").tolist(), strict=True))


def streams(tmp_path):
    """The streams on disk."""
    return sorted((tmp_path / "store" / "pending").glob("*/g-*"))


def path(size=3):
    """The part of the write path that needs no model."""
    return Compose(MCAdvantage(size), KLRewardTransform(coef=0.3))


def test_every_group_goes_on_after_a_crash(open_buffer, make_rows, to_form, form, tmp_path):
    """Members before and after the crash make the group that an undisturbed buffer makes, bit for bit."""
    rows = make_rows([4, 5, 6, 7, 8, 9], group_size=3, rewards=[0.0, 1.0, 2.0, 5.0, 0.1, 8.0])
    straight = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "straight"), transform=path())
    rb = open_buffer(path())
    for buffer in (straight, rb):
        assert buffer.extend(to_form([rows[i] for i in (0, 3, 1)], form)).numel() == 0
    crash(rb)
    again = open_buffer(path())
    assert sorted(again.waiting()) == [0, 1, 3]
    assert again.transform[0].queued_groups == 2
    for buffer in (straight, again):
        assert buffer.extend(to_form([rows[i] for i in (4, 2)], form)).numel() == 3
        assert buffer.extend(to_form([rows[5]], form)).numel() == 3
    assert advantages(again) == advantages(straight)
    for name in ("return", "kl_coef", "task_reward", "prompt", "meta", "finish_reason"):
        assert again.store.read_scalars(name).tolist() == straight.store.read_scalars(name).tolist()
    for name in ("input_ids", "log_probs", "ref_log_probs"):
        for left, right in zip(*(b.store.read(b.store.ids(), [name])[name] for b in (again, straight)), strict=True):
            assert left.tobytes() == right.tobytes()
    straight.storage.close()
    again.storage.close()
    assert streams(tmp_path) == []


def test_killed_between_the_commit_and_the_flag(open_buffer, make_rows):
    """The main store has the group, the stream still shows its members as waiting: they are not written again."""
    rows = make_rows([4, 5, 6], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0], rows[2]]))
    log = rb._group_transform()[1].log
    log.drop = lambda tickets: None
    assert rb.extend(lazy_stack([rows[1]])).numel() == 2
    crash(rb)
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [2]
    assert sorted(advantages(again)) == [0, 1]


def test_killed_before_the_commit(open_buffer, make_rows):
    """The member that would have completed the group was never acknowledged; the others still wait."""
    rows = make_rows([4, 5], group_size=2)

    class Dies(Transform):
        def _inv_call(self, tensordict):
            raise SystemExit

    rb = open_buffer(Compose(Dies(), MCAdvantage(2)))
    rb.extend(lazy_stack([rows[0]]))
    with pytest.raises(SystemExit):
        rb.extend(lazy_stack([rows[1]]))
    assert rb.waiting() == [0]
    crash(rb)
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [0]
    assert again.extend(lazy_stack([rows[1]])).numel() == 2


def test_a_failed_write_takes_nothing(open_buffer, make_rows, monkeypatch):
    """The store refuses: the group waits as before, what came with the call is forgotten, and the call works again."""
    rows = make_rows([4, 5, 6, 7], group_size=2, rewards=[0.0, 1.0, 2.0, 3.0])
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0]]))
    before = rb._group_transform()[1].get_stats()

    def refuse(data):
        raise StoreError("full")

    with monkeypatch.context() as patch:
        patch.setattr(rb.store, "append", refuse)
        with pytest.raises(StoreError):
            rb.extend(lazy_stack([rows[1], rows[2]]))
    assert rb.waiting() == [0]
    after = rb._group_transform()[1].get_stats()
    assert after["completed_trajectories"] == before["completed_trajectories"] == 1
    assert rb.extend(lazy_stack([rows[1], rows[2]])).numel() == 2
    crash(rb)
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [2]
    assert again.extend(lazy_stack([rows[3]])).numel() == 2


def test_an_error_after_the_commit_writes_nothing_twice(open_buffer, make_rows, monkeypatch):
    """The rows are there although the call failed (a sync that came back with an error): the group stays written."""
    rows = make_rows([4, 5], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack([rows[0]]))
    append = rb.store.append

    def append_and_fail(data):
        append(data)
        raise StoreError("sync")

    with monkeypatch.context() as patch:
        patch.setattr(rb.store, "append", append_and_fail)
        with pytest.raises(StoreError):
            rb.extend(lazy_stack([rows[1]]))
    assert rb.waiting() == []
    assert sorted(advantages(rb)) == [0, 1]


def test_failures_survive(open_buffer, make_rows):
    """A reported failure counts after the crash, also where it came before any trajectory."""
    rows = make_rows([4, 5, 6, 7], group_size=3, rewards=[0.0, 2.0, 1.0, 5.0])
    rb = open_buffer(MCAdvantage(3))
    rb.extend(lazy_stack([rows[0]]))
    rb.report_failed(0)
    rb.report_failed(1, 2)
    crash(rb)
    again = open_buffer(MCAdvantage(3))
    assert again.waiting() == [0]
    assert again.extend(lazy_stack([rows[1]])).numel() == 2
    half = 1 / math.sqrt(2)
    assert list(advantages(again).values()) == pytest.approx([-half, half])
    assert again.extend(lazy_stack([rows[3]])).numel() == 1
    again.report_failed(7, 3)
    crash(again)
    assert open_buffer(MCAdvantage(3)).waiting() == []


def test_dropped_groups_do_not_come_back(open_buffer, make_rows):
    """A group without spread that is left out has no row in the main store, and still it is gone."""
    rows = make_rows([4, 5], group_size=2, rewards=[1.0, 1.0])
    rb = open_buffer(MCAdvantage(2, zero_variance="drop"))
    rb.extend(lazy_stack([rows[0]]))
    assert rb.extend(lazy_stack([rows[1]])).numel() == 0
    crash(rb)
    assert open_buffer(MCAdvantage(2)).waiting() == []


def test_a_group_that_is_complete_when_it_is_found(open_buffer, make_rows):
    """The new process wants smaller groups: the next call writes what is complete."""
    rows = make_rows([4, 5, 6], group_size=4)
    rb = open_buffer(MCAdvantage(4))
    rb.extend(lazy_stack(rows[:2]))
    crash(rb)
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
    crash(rb)
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
    crash(rb)
    again = open_buffer(MCAdvantage(2, trajectory_return="max"))
    assert again.waiting() == [0]
    assert again.extend(conversation(1, [3.0, 0.0])).numel() == 2
    assert again.store.read_scalars("return").tolist() == [1.0, 3.0]
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
    rb.report_failed(5)
    crash(rb)
    rb.storage.close()
    again = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "s"), transform=MCAdvantage(2))
    assert again.extend(lazy_stack(rows[1:])).numel() == 2
    found = again.store.read(again.store.ids(), ["top_k", "score", "reward"])
    assert [v.tolist() for v in found["top_k"]] == [list(range(4)), list(range(5))]
    assert found["score"].tolist() == [0.1, 1.1]
    torch.testing.assert_close(torch.from_numpy(found["reward"][0]), torch.arange(4) * 0.1)
    again.storage.close()


def test_two_writers_keep_their_own(open_buffer, make_rows):
    """A living process keeps its groups; a dead one's go to the first that asks, once."""
    rows = make_rows([4] * 6, group_size=2)
    first, second = open_buffer(MCAdvantage(2)), open_buffer(MCAdvantage(2))
    first.extend(lazy_stack([rows[0]]))
    second.extend(lazy_stack([rows[2]]))
    assert (first.waiting(), second.waiting()) == ([0], [2])
    crash(first)
    third, fourth = open_buffer(MCAdvantage(2)), open_buffer(MCAdvantage(2))
    assert (third.waiting(), fourth.waiting(), second.waiting()) == ([0], [], [2])
    third.extend(lazy_stack([rows[4]]))
    crash(third)
    crash(second)
    fifth = open_buffer(MCAdvantage(2))
    assert sorted(fifth.waiting()) == [0, 2, 4]
    assert fifth.extend(lazy_stack([rows[1], rows[3], rows[5]])).numel() == 6


def test_named_writers(open_buffer, make_rows):
    """A name is taken by one living process; its groups wait for a process of the same name."""
    rows = make_rows([4, 5])
    rb = open_buffer(MCAdvantage(2), writer_name="collector-0")
    rb.extend(lazy_stack(rows[:1]))
    with pytest.raises(RunExistsError, match="collector-0"):
        open_buffer(MCAdvantage(2), writer_name="collector-0").waiting()
    crash(rb)
    assert open_buffer(MCAdvantage(2)).waiting() == []
    again = open_buffer(MCAdvantage(2), writer_name="collector-0")
    assert again.waiting() == [0]
    with pytest.raises(DefinitionError, match="letter or digit"):
        open_buffer(MCAdvantage(2), writer_name="../evil")


def test_a_buffer_that_only_reads_takes_nothing(open_buffer, make_rows):
    """A learner's buffer has the same write path and never uses it: the collector's groups stay the collector's."""
    rows = make_rows([4, 5, 6], group_size=2)
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(rows))
    crash(rb)
    learner = open_buffer(MCAdvantage(2), batch_size=2)
    assert learner.sample().batch_size == (2,)
    assert learner.sample_step(0).batch_size == (2,)
    assert open_buffer(MCAdvantage(2)).waiting() == [2]


def test_disk_does_not_grow(open_buffer, make_rows, tmp_path, monkeypatch):
    """Streams are written anew without what is gone, and what waits stays, over a crash as well."""
    monkeypatch.setattr(_pending_home, "TIDY_ROWS", 8)
    rb = open_buffer(MCAdvantage(2))
    straggler = make_rows([4], first_group=1000)[0]
    rb.extend(lazy_stack([straggler]))
    sizes = []
    for group in range(30):
        rows = make_rows([5, 6], first_group=group)
        rb.extend(lazy_stack(rows[:1]))
        rb.extend(lazy_stack(rows[1:]))
        (stream,) = streams(tmp_path)
        with TrajectoryStore.open(stream) as store:
            sizes.append(len(store))
    assert max(sizes) <= 10
    assert rb.waiting() == [2000]
    crash(rb)
    again = open_buffer(MCAdvantage(2))
    assert again.waiting() == [2000]
    assert len(advantages(again)) == 60
    partner = make_rows([4, 7], first_group=1000)[1]
    assert again.extend(lazy_stack([partner])).numel() == 2


def test_whole_groups_touch_no_stream(open_buffer, make_rows, tmp_path):
    """Where every call brings whole groups nothing waits, so nothing is written twice."""
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4] * 8)))
    assert not (tmp_path / "store" / "pending").exists()
    assert set(rb.store.read_scalars("pending_id").tolist()) == {-1}


def test_the_stream_is_a_store(open_buffer, make_rows, tmp_path):
    """What waits can be read and verified as any store, while it waits."""
    rb = open_buffer(MCAdvantage(3))
    rb.extend(lazy_stack(make_rows([4, 5], group_size=3)))
    (stream,) = streams(tmp_path)
    with TrajectoryStore.open(stream) as store:
        assert store.verify().ok
        assert store.read_scalars("trajectory_id").tolist() == [0, 1]
        assert store.read_scalars("consumed").tolist() == [0, 0]


@pytest.mark.parametrize("durability", ["power", "group"])
def test_other_durabilities(tmp_path, make_rows, durability):
    """The stream has the durability of the store."""
    storage = TrajectoryStorage(tmp_path / "store", durability=durability)
    rb = TrajectoryReplayBuffer(storage=storage, transform=MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    (stream,) = streams(tmp_path)
    with TrajectoryStore.open(stream) as store:
        assert store.durability == durability
    storage.close()


def test_zarr_backend(tmp_path, make_rows):
    """Beside a store of the zarr backend in a local folder groups wait the same way."""

    def build():
        return TrajectoryReplayBuffer(
            storage=TrajectoryStorage(tmp_path / "store", backend="zarr"), transform=MCAdvantage(2)
        )

    rows = make_rows([4, 5])
    rb = build()
    rb.extend(lazy_stack(rows[:1]))
    crash(rb)
    rb.storage.close()
    again = build()
    assert again.waiting() == [0]
    assert again.extend(lazy_stack(rows[1:])).numel() == 2
    again.storage.close()


def test_an_older_store_gains_the_column(tmp_path, make_rows):
    """A store without `pending_id` gets it when it is opened for writing; given as an object it keeps its schema."""
    old = Schema([c for c in trajectory_schema() if c.name != "pending_id"])
    TrajectoryStore.create(tmp_path / "store", old).close()
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store"), transform=MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    assert len(streams(tmp_path)) == 1
    rb.storage.close()
    given = TrajectoryStore.create(tmp_path / "given", old)
    rb = TrajectoryReplayBuffer(storage=given, transform=MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    assert not (tmp_path / "given" / "pending").exists()
    assert rb.waiting() == [0]
    rb.storage.close()


def test_timeouts_count_over_a_crash(open_buffer, make_rows):
    """A group's time runs from its first member, whichever process saw it."""
    clock = Clock()
    policy = {"min_group_size": 2, "group_timeout_s": 10.0, "clock": clock}
    rows = make_rows([4, 5, 6], group_size=3, rewards=[0.0, 1.0, 5.0])
    rb = open_buffer(MCAdvantage(3, **policy))
    rb.extend(lazy_stack(rows[:2]))
    crash(rb)
    clock.now += 11
    again = open_buffer(MCAdvantage(3, **policy))
    assert again.close_overdue().numel() == 2
    assert again.extend(lazy_stack(rows[2:])).numel() == 0
    stats = again.transform[0].get_stats()
    assert (stats["early_closed_groups"], stats["late_trajectories"]) == (1, 1)
    assert again.waiting() == []


def test_state_dict_of_the_same_store_is_older_than_the_stream(open_buffer, make_rows):
    """Loading a checkpoint brings nothing back that has been written since."""
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


def test_clearing_the_queues_clears_the_disk(open_buffer, make_rows):
    """Forgotten means forgotten after a crash too."""
    rb = open_buffer(MCAdvantage(2))
    rb.extend(lazy_stack(make_rows([4])))
    rb.transform[0].clear_queues()
    crash(rb)
    assert open_buffer(MCAdvantage(2)).waiting() == []


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
