from __future__ import annotations

import io
import math
import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data.replay_buffers import LazyStackStorage
from torchrl.envs.transforms import Compose, Transform

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer, TrajectoryWriter
from rlhf_pipeline.buffer.samplers import FreshSampler, PrioritySampler, UniformSampler
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import USES
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.trajectories import Trajectories
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb


class Table:
    """A reference model whose log-prob of a token is a function of the token alone."""

    weight = torch.linspace(-3, -0.1, 50)

    def __init__(self):
        self.scored = 0

    def log_probs(self, input_ids, attention_mask, score_mask):
        """Look the tokens up."""
        self.scored += int(score_mask.sum())
        return torch.where(score_mask & attention_mask, self.weight[input_ids], 0.0)


@pytest.fixture
def make_buffer(tmp_path):
    """Builds buffers over one store and closes them."""
    made = []

    def build(transform=None, name="store", **kwargs):
        rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / name), transform=transform, **kwargs)
        made.append(rb)
        return rb

    yield build
    for rb in made:
        rb.storage.close()


def write_path(group_size=2, coef=0.3, model=None):
    """The stack as it is written."""
    return Compose(MCAdvantage(group_size), KLRewardTransform(coef=coef), RetrieveLogProb(model or Table()))


def test_whole_write_path_against_float64(make_buffer, make_rows, to_form, form):
    """Log-probs, shaped reward, return and advantage of the stack equal a reference by hand in float64."""
    rows = make_rows([4, 7, 3, 6], ref=False, rewards=[1.0, 0.0, -0.5, 2.0])
    rb = make_buffer(write_path())
    assert rb.extend(to_form(rows, form)).tolist() == [0, 1, 2, 3]
    batch = rb.read(rb.trajectories.row_ids())
    shaped = []
    for i, row in enumerate(rows):
        mask = row["masks", "all_assistant_mask"]
        ref = Table.weight.double()[row["tokens", "full"]]
        k1 = torch.where(mask, row["log_probs", "full"].double() - ref, 0.0)
        reward = -0.3 * k1
        reward[-1] += row["task_reward"].double()
        shaped.append(reward)
        n = len(mask)
        torch.testing.assert_close(
            batch[keys.REF_LOG_PROBS][i, :n].double(), torch.where(mask, ref, 0.0), atol=1e-6, rtol=0
        )
        torch.testing.assert_close(batch[keys.REWARD][i, :n].double(), reward, atol=1e-6, rtol=0)
        assert batch[keys.KL_COEF][i].item() == pytest.approx(0.3)
    returns = torch.stack([r.sum() for r in shaped])
    torch.testing.assert_close(batch[keys.RETURN].double(), returns, atol=1e-6, rtol=0)
    for a, b in ((0, 1), (2, 3)):
        pair = returns[[a, b]]
        expected = (pair - pair.mean()) / pair.std()
        for i, value in zip((a, b), expected.tolist(), strict=True):
            mask = batch[keys.ASSISTANT_MASK][i]
            assert batch[keys.ADVANTAGE][i][mask].tolist() == pytest.approx([value] * int(mask.sum()), abs=1e-5)
            assert bool((batch[keys.ADVANTAGE][i][~mask] == 0).all())


@pytest.mark.parametrize("shape", ["steps", "batch of steps"])
def test_conversations_of_several_steps(make_buffer, make_rows, shape):
    """TorchRL's multi-step form goes through the whole write path as one row per conversation."""

    def conversation(reward, cut):
        whole = make_rows([8], ref=False, prompt=2)[0]
        whole["group_id"], whole["trajectory_id"] = torch.tensor(0), torch.tensor(cut)
        first = whole.clone()
        for key in (keys.TOKENS, keys.ASSISTANT_MASK, keys.LOG_PROBS):
            first[key] = first[key][:cut]
        for step, done, value in ((first, False, 0.25), (whole, True, reward)):
            del step["task_reward"]
            step["next", "done"], step["next", "reward"] = torch.tensor([done]), torch.tensor([value])
        return lazy_stack([first, whole])

    rows = [conversation(1.0, 4), conversation(0.0, 5)]
    td = lazy_stack(rows) if shape == "batch of steps" else torch.cat(rows)
    rb = make_buffer(write_path(coef=0.0))
    assert rb.extend(td).tolist() == [0, 1]
    batch = rb.read(rb.trajectories.row_ids())
    assert batch[keys.TASK_REWARD].tolist() == [1.25, 0.25]
    assert batch[keys.ATTENTION_MASK].sum(1).tolist() == [8, 8]
    half = 1 / math.sqrt(2)
    assert batch[keys.ADVANTAGE][:, -1].tolist() == pytest.approx([half, -half], abs=1e-6)


def test_token_level_batch(make_buffer, make_rows, to_form):
    """`[B, T]` whose second dimension is the token, through the whole write path."""
    td = to_form(make_rows([4, 6]), "padded").select(
        keys.TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.LOG_PROBS
    )
    td[keys.GROUP_ID] = torch.zeros(2, 6, dtype=torch.int64)
    td[keys.REWARD] = torch.zeros(2, 6)
    td[keys.REWARD][0, 3] = 1.0
    td.batch_size = [2, 6]
    rb = make_buffer(write_path(coef=0.0))
    assert rb.extend(td).tolist() == [0, 1]
    assert rb.read(rb.trajectories.row_ids())[keys.RETURN].tolist() == [1.0, 0.0]


def test_a_list_of_strings_is_a_column(make_buffer, make_rows, to_form):
    """`set_non_tensor(key, [one per row])` costs a hundredth of a stack of wrapped strings."""
    td = to_form(make_rows([4, 5, 6, 7], group_size=2), "jagged")
    td.set_non_tensor("prompt", ["a", "b", "c", "d"])
    rb = make_buffer(write_path())
    rb.extend(td)
    assert rb.trajectories.read_text("prompt", rb.store.ids()) == ["a", "b", "c", "d"]


def test_delayed_init(tmp_path, make_rows):
    """TorchRL's way to build the transform where it runs."""
    storage = TrajectoryStorage(tmp_path / "store")
    rb = TrajectoryReplayBuffer(storage=storage, transform_factory=lambda: MCAdvantage(2))
    assert rb.store is storage.store
    assert rb.extend(lazy_stack(make_rows([4, 5]))).tolist() == [0, 1]
    storage.close()


def test_another_storage_is_the_one_that_is_written_and_read(tmp_path, make_rows):
    """TorchRL's `set_storage`, and a writer for it: the buffer's own names follow."""
    first, second = TrajectoryStorage(tmp_path / "first"), TrajectoryStorage(tmp_path / "second")
    rb = TrajectoryReplayBuffer(storage=first, transform=MCAdvantage(2), batch_size=2)
    assert rb.set_storage(second) is first
    rb.set_writer(TrajectoryWriter())
    rb.extend(lazy_stack(make_rows([4, 5])))
    assert (len(first), len(second), rb.store is second.store) == (0, 2, True)
    assert sorted(rb.sample_step(0, strategy="fresh")["row_id"].tolist()) == rb.store.ids().tolist()
    for storage in (first, second):
        storage.close()


def test_one_commit_per_extend(make_buffer, make_rows, to_form, form):
    """A rollout is there as a whole or not at all: one call is one commit."""
    rb = make_buffer(write_path())
    rb.extend(to_form(make_rows([4] * 6), form))
    assert len(set(rb.store.ids().tolist())) == 6
    assert rb.store.watermark == 6
    bad = make_rows([4] * 4, first_group=9)
    bad[3] = bad[3].exclude(("log_probs", "full"))
    with pytest.raises(DataError):
        rb.extend(lazy_stack(bad))
    assert rb.store.watermark == 6


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(3, 12), min_size=1, max_size=10),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_forms_and_chunks_agree(tmp_path_factory, make_rows, to_form, lengths, chunks, seed):
    """Whatever the form and however the trajectories are cut into calls, the same rows are stored."""
    rewards = [float((seed + 3 * i) % 5) for i in range(len(lengths))]
    found = []
    for form in ("stack", "jagged", "padded"):
        rows = make_rows(lengths, seed=seed, rewards=rewards)
        rb = TrajectoryReplayBuffer(storage=tmp_path_factory.mktemp("s") / "store", transform=write_path())
        start = 0
        for size in [*chunks, len(rows)]:
            if rows[start : start + size]:
                rb.extend(to_form(rows[start : start + size], form))
            start += size
        assert rb.transform[0].queued_trajectories == len(rows) % 2
        found.append(rb.read(rb.trajectories.row_ids(), text=True) if len(rb) else None)
        rb.storage.close()
    for other in found[1:]:
        assert (other is None) == (found[0] is None)
        if other is not None and found[0] is not None:
            assert list(other["completion"]) == list(found[0]["completion"])
            for key in set(found[0].keys(True, True)) - {keys.CREATED_AT}:
                torch.testing.assert_close(other[key], found[0][key], rtol=0, atol=0, equal_nan=True)


def test_add_writes_one_row_per_trajectory(make_buffer, make_rows):
    """TorchRL stores the completed group as one item."""
    rb = make_buffer(MCAdvantage(2))
    rows = make_rows([4, 5, 6])
    assert rb.add(rows[0]).numel() == 0
    assert rb.add(rows[1]).tolist() == [0, 1]
    assert len(rb) == 2
    plain = make_buffer(name="plain")
    assert plain.add(rows[0]) == 0
    assert plain.add(rows[1]) == 1
    assert plain.storage.get(1)["prompt"] == "prompt 0"


def test_sample_has_the_contract_keys(make_buffer, make_rows, to_form):
    """A padded TensorDict with everything the loss needs, and TorchRL's index."""
    rb = make_buffer(write_path(), batch_size=3)
    rb.extend(to_form(make_rows([4, 7, 3, 6]), "jagged"))
    batch = rb.sample()
    assert batch.batch_size == (3,)
    for key in (keys.TOKENS, keys.ASSISTANT_MASK, keys.ATTENTION_MASK, keys.LOG_PROBS, keys.REF_LOG_PROBS,
                keys.REWARD, keys.KL_PENALTY, keys.ADVANTAGE):  # fmt: skip
        assert batch[key].shape == batch[keys.TOKENS].shape
    for key in (keys.TASK_REWARD, keys.GROUP_ID, keys.POLICY_VERSION, keys.DONE, keys.ROW_ID, keys.DEGENERATE):
        assert batch[key].shape == (3,)
    assert torch.equal(batch["index"], batch[keys.TRAJECTORY_ID])
    assert not any(v.requires_grad for v in batch.values(True, True))


def test_sampling_does_not_run_the_write_path_again(make_buffer, make_rows):
    """TorchRL scores at every sample and writes into the stored items; here the numbers are those of the store."""
    model = Table()
    rb = make_buffer(write_path(model=model), batch_size=4)
    rb.extend(lazy_stack(make_rows([4, 7, 3, 6], ref=False)))
    scored = model.scored
    plain = rb.read(rb.trajectories.row_ids())
    batch = rb.sample()
    assert model.scored == scored
    for i, j in enumerate(batch["index"].tolist()):
        width = batch[keys.TOKENS].shape[1]
        assert torch.equal(batch[keys.REWARD][i], plain[keys.REWARD][j, :width])
        assert torch.equal(batch[keys.ADVANTAGE][i], plain[keys.ADVANTAGE][j, :width])


def test_penalty_only_where_it_counts(make_buffer, make_rows):
    """With coefficient 0 no penalty is derived unless asked for, and the transform leaves the sample alone."""
    rb = make_buffer(write_path(coef=0.0), batch_size=2)
    rb.extend(lazy_stack(make_rows([4, 7], rewards=[1.0, 2.0])))
    batch = rb.sample()
    assert batch.get(keys.KL_PENALTY, None) is None
    rows = rb.trajectories.row_ids()
    assert rb.read(rows)[keys.REWARD].sum(1).tolist() == [1.0, 2.0]
    assert bool((rb.read(rows, keys=[keys.KL_PENALTY])[keys.KL_PENALTY] != 0).any())


def test_seeded_samples(make_buffer, make_rows):
    """`sample` follows the seed; the default draws with replacement as TorchRL does."""
    rows = make_rows([4] * 10)
    draws = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        rb = make_buffer(name=name, seed=seed)
        rb.extend(lazy_stack(rows))
        draws.append([rb.sample(4)["index"].tolist() for _ in range(3)])
    assert draws[0] == draws[1] != draws[2]
    assert len(make_buffer(name="a").sample(50)) == 50


def assert_same(found, wanted):
    assert set(found.keys(True, True)) == set(wanted.keys(True, True))
    for key in wanted.keys(True, True):
        torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=0, equal_nan=True)


def test_sample_step_is_pure(make_buffer, make_rows):
    """The same call gives the same rows, whatever was drawn or written in between."""
    rb = make_buffer(seed=7)
    rb.extend(lazy_stack(make_rows([4] * 8)))
    mark, snapshot = rb.store.watermark, rb.store.snapshot()
    first = rb.sample_step(3, 4)
    rb.extend(lazy_stack(make_rows([5] * 8, first_group=50)))
    rb.sample(2)
    rb.sample_step(4, 4)
    for at in (mark, snapshot):
        assert_same(rb.sample_step(3, 4, at=at), first)
    assert set(rb.select_step(0, 16).tolist()) == set(rb.store.ids().tolist())
    assert rb.view(start=mark).column("group_id").tolist() == [50, 50, 51, 51, 52, 52, 53, 53]


@pytest.mark.parametrize("transform", [None, write_path()], ids=["plain", "write path"])
def test_an_empty_batch_writes_nothing(make_buffer, make_rows, transform):
    """Whatever its keys; groups whose time is up close at it, as at every call."""
    rows = lazy_stack(make_rows([4, 4]))
    rb = make_buffer(transform)
    for empty in (rows[:0], TensorDict(batch_size=[0]), TensorDict(batch_size=[2, 0]), Trajectories(0)):
        assert rb.extend(empty).tolist() == []
    assert len(rb.store) == 0
    clock = iter(range(100))
    late = make_buffer(MCAdvantage(4, min_group_size=2, group_timeout_s=3, clock=lambda: float(next(clock))), "late")
    late.extend(rows)
    while not (closed := late.extend(rows[:0]).tolist()):
        assert next(clock) < 9
    assert closed == [0, 1]


@pytest.mark.parametrize("size", [0, -3])
def test_numbers_of_a_step(make_buffer, make_rows, size):
    """A step is any whole number, of NumPy too, and no other; a batch has a row at least."""
    rb = make_buffer(seed=7)
    rb.extend(lazy_stack(make_rows([4] * 8)))
    drawn = rb.select_step(3, 4).tolist()
    assert rb.select_step(np.int64(3), 4, seed=np.int64(7)).tolist() == drawn
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        rb.select_step(3.5, 4)
    with pytest.raises(DefinitionError, match=f"batch_size is {size}; it must be at least 1, or None"):
        rb.sample_step(3, size)


def test_a_snapshot_draws_with_the_values_of_then(make_buffer, make_rows):
    """What was used, weighed or completed since does not count: the batch is the same, value by value."""
    rb = make_buffer(MCAdvantage(2), seed=7)
    rb.store.add_columns([USES])
    rows = make_rows([4] * 8)
    rb.extend(lazy_stack(rows[:7]))  # the last one waits
    draw = partial(rb.sample_step, 3, strategy=PrioritySampler(max_uses=1))
    at = rb.store.snapshot()
    first = draw(at=at)
    rb.extend(lazy_stack(rows[7:]))
    rb.update_priority([0, 1], [4.0, 5.0])
    rb.store.update(rb.select_step(0, 1), use_count=1)
    assert first.shape == (6,) != draw().shape
    assert_same(draw(at=at), first)


def drawn_elsewhere(path):
    """In another process: what two steps draw."""
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(path, mode="r"), seed=7)
    sys.stdout.write(f"{rb.select_step(5, 6).tolist()} {rb.select_step(6, 6, strategy='priority').tolist()}")


def test_sample_step_in_another_process(make_buffer, make_rows, tmp_path, children):
    """A process that only reads the store draws the same rows."""
    rb = make_buffer(seed=7)
    rb.extend(lazy_stack(make_rows([4] * 20)))
    there = children.call(drawn_elsewhere, tmp_path / "store").succeed()
    here = f"{rb.select_step(5, 6).tolist()} {rb.select_step(6, 6, strategy='priority').tolist()}"
    assert there.strip() == here


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_to_report(tmp_path):
    """No helper process of a buffer outlives it, to warn of semaphores that were not released."""
    code = f"""
    import os
    from rlhf_pipeline import MCAdvantage, TrajectoryReplayBuffer
    rb = TrajectoryReplayBuffer(storage={str(tmp_path / "store")!r}, transform=MCAdvantage(2), batch_size=2)
    os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-9, "")


def test_steps_by_version_and_ledger(make_buffer, make_rows):
    """The fresh strategy with a ledger is pure; without one the store's use counts decide."""
    rb = make_buffer(sampler=FreshSampler(max_staleness=1))
    for version in range(4):
        rows = make_rows([4] * 4, first_group=10 * version)
        for row in rows:
            row["policy_version"] = torch.tensor(version)
        rb.extend(lazy_stack(rows))
    ids = rb.store.ids().tolist()
    assert rb.select_step(0, version=1).tolist() == ids[:16][0:8] + ids[8:16]
    assert rb.select_step(0, version=3).tolist() == ids[8:16]
    assert rb.select_step(0, 2, version=3, uses=ids[8:10]).tolist() == ids[10:12]
    rb.store.add_columns([USES])
    rb.store.update(ids[8:10], use_count=[2, 1])
    assert rb.select_step(0, 2, version=3).tolist() == ids[10:12]
    assert rb.select_step(0, 2, version=3, uses=[]).tolist() == ids[8:10]
    with pytest.raises(DataError, match="step 8"):
        rb.sample_step(8, version=90)


def test_watermark_that_is_not_there_yet(make_buffer, make_rows, tmp_path):
    """A reader catches up with the writer, and says so when it can not."""
    rb = make_buffer()
    rb.extend(lazy_stack(make_rows([4] * 4)))
    reader = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "store", mode="r"))
    rb.extend(lazy_stack(make_rows([4] * 4, first_group=9)))
    assert len(reader) == 4
    assert len(reader.select_step(0, at=8)) == 8
    with pytest.raises(DataError, match="has 8 trajectories, but the step needs 9"):
        reader.select_step(0, at=9)
    assert reader.refresh() == 8
    assert len(reader) == 8
    reader.storage.close()


def test_emptied_buffer(make_buffer, make_rows):
    """`empty` hides what was there from samples and steps alike; the rows stay on disk."""
    rb = make_buffer()
    rb.extend(lazy_stack(make_rows([4] * 4)))
    rb.empty()
    assert len(rb) == 0
    assert rb.extend(lazy_stack(make_rows([4] * 2, first_group=9))).tolist() == [0, 1]
    assert sorted(rb.sample_step(0)[keys.TRAJECTORY_ID].tolist()) == [18, 19]
    assert len(rb.store) == 6


def test_figures_and_repr(make_buffer, make_rows):
    """TorchRL's own figures work on it."""
    rb = make_buffer(MCAdvantage(2), batch_size=2)
    rb.extend(lazy_stack(make_rows([4] * 4)))
    assert rb.write_count == 4
    assert rb.can_sample()
    assert "TrajectoryStorage" in repr(rb)
    assert "len=4" in repr(rb.storage)


def test_ring_in_steps(tmp_path, make_rows):
    """With a limit only the newest trajectories may be drawn."""
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "ring", max_size=4))
    rb.extend(lazy_stack(make_rows([4] * 4)))
    assert rb.extend(lazy_stack(make_rows([4] * 2, first_group=9))).tolist() == [0, 1]
    assert sorted(rb.sample_step(0)[keys.TRAJECTORY_ID].tolist()) == [2, 3, 18, 19]
    with pytest.raises(DataError, match="no longer contains 2 of the 4 trajectories of this step"):
        rb.sample_step(0, at=4)
    rb.storage.close()


def test_cursor_follows_the_store(make_buffer, make_rows):
    """A reopened buffer goes on where the store ends; TorchRL's would overwrite slot 0."""
    rb = make_buffer()
    rb.extend(lazy_stack(make_rows([4] * 3)))
    again = make_buffer()
    assert again.extend(lazy_stack(make_rows([4] * 2, first_group=9))).tolist() == [3, 4]
    rb.refresh()
    assert rb.extend(lazy_stack(make_rows([4], first_group=20))).tolist() == [5]
    again.refresh()
    assert again[5][keys.GROUP_ID].item() == 20


def test_state_dict_resumes_the_run(make_buffer, make_rows):
    """Waiting trajectories, the controller and the cursor come back; rows are on disk anyway."""

    def path():
        controller = AdaptiveKLController(init_kl_coef=0.2, target=0.01, horizon=4)
        return Compose(MCAdvantage(3), KLRewardTransform(controller=controller))

    rows = make_rows([4, 5, 6, 7, 8], group_size=3)
    first = make_buffer(path())
    first.extend(lazy_stack(rows[:4]))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    first.storage.close()  # as its process ends; while it lives, the group that waits is its own
    second = make_buffer(path())
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.transform[1].coef == first.transform[1].coef != 0.2
    assert second.transform[0].queued_trajectories == 1
    last = make_rows([4] * 6, group_size=3)[5]
    assert second.extend(lazy_stack([rows[4], last])).tolist() == [3, 4, 5]
    assert second.storage[:][keys.GROUP_ID].tolist() == [0, 0, 0, 1, 1, 1]
    assert list(second.read(second.trajectories.row_ids(), text=True)["prompt"]) == ["prompt 0"] * 3 + ["prompt 1"] * 3


def test_dumps_and_loads(make_buffer, make_rows, tmp_path):
    """A dump of the whole buffer loads into a new one, waiting trajectories included."""
    rb = make_buffer(MCAdvantage(2), batch_size=2)
    rb.extend(lazy_stack(make_rows([4, 5, 6])))
    rb.dumps(tmp_path / "dump")
    other = make_buffer(MCAdvantage(2), name="other", batch_size=2)
    other.loads(tmp_path / "dump")
    assert len(other) == 2
    assert other.transform[0].queued_trajectories == 1
    assert list(other.read(other.trajectories.row_ids(), text=True)["completion"]) == ["completion 0", "completion 1"]


def test_transform_that_does_not_know_none(make_buffer, make_rows):
    """Compose passes None on to transforms that fail on it; the buffer stops there."""

    class Doubling(Transform):
        def _inv_call(self, tensordict):
            tensordict["task_reward"] = tensordict["task_reward"] * 2
            return tensordict

    rb = make_buffer(Compose(Doubling(), MCAdvantage(2)))
    rows = make_rows([4, 5], rewards=[1.0, 3.0])
    assert rb.extend(lazy_stack(rows[:1])).numel() == 0
    rb.extend(lazy_stack(rows[1:]))
    assert rb.storage[:][keys.TASK_REWARD].tolist() == [2.0, 6.0]


def test_incomplete_trajectory_is_refused_with_and_without_transforms(make_buffer, make_rows):
    """Nothing vanishes."""
    rows = make_rows([4, 5])
    rows[1]["next", "done"] = torch.tensor(False)
    for rb in (make_buffer(), make_buffer(MCAdvantage(2), name="other")):
        with pytest.raises(DataError, match="not complete"):
            rb.extend(lazy_stack(rows))
        assert rb.store.watermark == 0


def test_wrong_use(make_buffer, make_rows, tmp_path):
    """Other storages and other data are refused with a reason."""
    with pytest.raises(DefinitionError, match="LazyStackStorage"):
        TrajectoryReplayBuffer(storage=LazyStackStorage(3))
    with pytest.raises(DataError, match="list"):
        make_buffer().extend(make_rows([4]))
    with pytest.raises(DefinitionError, match="strategy"):
        make_buffer(name="b", sampler="newest")
    with pytest.raises(DefinitionError, match="MCAdvantage"):
        make_buffer(name="c").close_groups()


def test_view_counts_uses(make_buffer, make_rows):
    """A ledger that names a row twice counts it twice; rows it does not know are unused."""
    rb = make_buffer(sampler=UniformSampler(max_uses=2))
    rb.extend(lazy_stack(make_rows([4] * 4)))
    ids = rb.store.ids()
    assert rb.view(uses=np.array([ids[1], ids[1], ids[3], 10**9])).use_count.tolist() == [0, 2, 0, 1]
    assert sorted(rb.select_step(0, uses=[ids[1], ids[1]]).tolist()) == sorted(ids[[0, 2, 3]].tolist())
