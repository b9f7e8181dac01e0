from __future__ import annotations

import pytest
import torch
from tensordict import lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE, trajectory_schema
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.trajectories import columns_of, on_device, padded_of, td_of, unjagged
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.transforms.kl_reward import KLRewardTransform
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from tests.rlhf_pipeline.fake_device import CUDA, FakeDevice, OnDevice
from trajectory_store import Column


@pytest.fixture
def make(tmp_path):
    """Storages that are closed again."""
    made = []

    def build(**kwargs):
        made.append(TrajectoryStorage(tmp_path / f"store{len(made)}", **kwargs))
        return made[-1]

    yield build
    for storage in made:
        storage.close()


def same(jagged, padded):
    """Every value of the jagged batch stands in the padded one, and there are no others but padding."""
    mask = padded[keys.ATTENTION_MASK]
    names = set(padded.keys(True, True)) - {keys.ATTENTION_MASK}
    assert set(jagged.keys(True, True)) == names
    for key in names:
        if key in ("prompt", "completion", "meta", "finish_reason"):
            assert list(jagged[key]) == list(padded[key])
        elif jagged[key].is_nested:
            values, offsets = jagged[key].values(), jagged[key].offsets()
            assert offsets.diff().tolist() == mask.sum(1).tolist()
            torch.testing.assert_close(values, padded[key][mask], rtol=0, atol=1e-7, equal_nan=True)
            assert values.dtype == padded[key].dtype
        else:
            torch.testing.assert_close(jagged[key], padded[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ref", [True, False])
@pytest.mark.parametrize("coef", [0.0, 0.3])
@pytest.mark.parametrize("several_turns", [True, False])
def test_jagged_is_padded_without_the_padding(make, make_rows, ref, coef, several_turns):
    """Tokens, masks, log-probs, penalty, reward and advantage agree with the padded layout."""
    storage = make(text=True)
    rows = make_rows([4, 7, 3, 6], ref=ref, rewards=[1.0, -2.0, float("nan"), 0.5])
    rows[3]["log_probs", "full"][4] = torch.nan  # a response token without a score
    if several_turns:
        rows[1]["masks", "all_assistant_mask"] = torch.tensor([False, False, True, False, True, True, False])
    path = [MCAdvantage(2), KLRewardTransform(coef=coef)] if ref else [MCAdvantage(2)]
    rb = TrajectoryReplayBuffer(storage=storage, transform=Compose(*path))
    rb.extend(lazy_stack(rows))
    for index in ([0, 1, 2, 3], [2, 0, 2]):
        same(storage.read(index, layout="jagged"), storage.read(index))
    wanted = [keys.REWARD, keys.ADVANTAGE, "group_id"]
    found = storage.read([1, 0], keys=wanted, layout="jagged", text=False)
    assert set(found.keys(True, True)) == {*wanted, keys.ROW_ID}
    assert len({id(found[key].offsets()) for key in wanted[:2]}) == 1


def test_nothing_computed_is_nothing_returned(make, make_rows):
    """No reference, no advantage, no coefficient: the keys are absent in both layouts."""
    storage = make()
    storage.set(torch.arange(2), lazy_stack(make_rows([4, 5], ref=False)))
    same(storage.read([0, 1], layout="jagged"), storage.read([0, 1]))
    asked = storage.read([0], keys=[keys.ATTENTION_MASK, keys.TOKENS], layout="jagged")
    assert set(asked.keys(True, True)) == {keys.TOKENS, keys.ROW_ID}


def test_jagged_by_default(make, make_rows):
    """A jagged storage gives jagged batches to TorchRL's `sample` and to steps; slices stay scalars."""
    storage = make(layout="jagged")
    rb = TrajectoryReplayBuffer(storage=storage, batch_size=3)
    rb.extend(lazy_stack(make_rows([4, 5, 6, 7])))
    batch = rb.sample()
    assert batch[keys.TOKENS].is_nested
    rows, lengths = batch["index"].tolist(), unjagged(batch[keys.TOKENS]).lengths.tolist()
    assert lengths == [4 + i for i in rows]
    assert rb.sample_step(0, 2)[keys.LOG_PROBS].is_nested
    assert rb.sample_step(0, 2, layout="padded")[keys.TOKENS].shape[0] == 2
    assert keys.TOKENS not in storage[:2].keys(True, True)
    assert storage.read([], layout="jagged").batch_size == (0,)
    other = make()
    other.set(torch.arange(4), storage.read([0, 1, 2, 3], text=True))  # a jagged batch can be written again
    assert torch.equal(other.get([1, 3])[keys.TOKENS], storage.read([1, 3], layout="padded")[keys.TOKENS])
    for wrong in (lambda: make(layout="dense"), lambda: storage.read([0], layout="dense")):
        with pytest.raises(DefinitionError, match="'padded' or 'jagged'"):
            wrong()


def test_columns_of_another_length(make, make_rows):
    """A column on an axis of its own keeps its own lengths."""
    storage = make(schema=trajectory_schema([Column("steps", "float32", ragged=True, axis="steps")]))
    rows = make_rows([4, 5])
    for i, row in enumerate(rows):
        row["steps"] = torch.arange(float(i + 1))
    storage.set(torch.arange(2), lazy_stack(rows))
    batch = storage.read([1, 0], layout="jagged")
    assert batch["steps"].offsets().tolist() == [0, 2, 3]
    assert batch["steps"].values().tolist() == [0.0, 1.0, 0.0]
    assert batch[keys.TOKENS].offsets().tolist() == [0, 5, 9]


def test_version_spans_in_every_form(make, make_rows):
    """Pairs per span come back from a lazy stack, from jagged and padded batches, and from a batch that was read."""
    spans = [[[2, 7], [3, 9]], [], [[1, 5], [4, 6], [5, 7]]]
    rows = make_rows([4, 5, 6])
    for row, own in zip(rows, spans, strict=True):
        row["version_spans"] = torch.tensor(own, dtype=torch.int64).reshape(-1, 2)
    stack = lazy_stack(rows)
    for data in (stack, td_of(columns_of(stack)), padded_of(columns_of(stack))):
        storage = make(extra=PROVENANCE)
        storage.set(torch.arange(3), data)
        assert [found.tolist() for found in storage.store.read([0, 1, 2], ["version_spans"])["version_spans"]] == spans
        batch = storage.read([2, 1], layout="jagged")
        assert [found.tolist() for found in batch["version_spans"].unbind()] == [spans[2], []]
        assert storage.read([0, 1])["version_spans"].tolist() == [spans[0], [[0, 0], [0, 0]]]
        other = make(extra=PROVENANCE)
        other.set(torch.arange(2), batch)
        assert [found.tolist() for found in other.store.read([0, 1], ["version_spans"])["version_spans"]] == [
            spans[2],
            [],
        ]


def test_a_batch_on_a_device(make, make_rows):
    """Every leaf is there with its dtype and shape, without a wait; strings stay."""
    storage = make(text=True)
    storage.set(torch.arange(3), lazy_stack(make_rows([4, 7, 3])))
    batch = storage.read([0, 1, 2])
    with FakeDevice() as seen:
        there = on_device(batch, CUDA)
    assert there.batch_size == batch.batch_size
    for key in batch.keys(True, True):
        if key in ("prompt", "completion", "meta", "finish_reason"):
            assert list(there[key]) == list(batch[key])
        else:
            assert isinstance(there[key], OnDevice)
            torch.testing.assert_close(there[key].held, batch[key], rtol=0, atol=0, equal_nan=True)
    assert seen.total("wait") == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_device_on_the_cpu(make, make_rows, prefetch):
    """Asking for the CPU changes nothing: the same draws, no copies, no pinned memory."""
    rb = TrajectoryReplayBuffer(storage=make(), batch_size=3, device="cpu", prefetch=prefetch, seed=4)
    plain = TrajectoryReplayBuffer(storage=make(), batch_size=3, seed=4)
    for buffer in (rb, plain):
        buffer.extend(lazy_stack(make_rows([4, 5, 6, 7])))
    # Threads that draw ahead may overtake one another.
    drawn = {tuple(batch["index"].tolist()): batch for batch in (plain.sample() for _ in range(3 + prefetch))}
    for _ in range(3):
        mine = rb.sample()
        theirs = drawn[tuple(mine["index"].tolist())]
        assert torch.equal(mine[keys.TOKENS], theirs[keys.TOKENS])
        assert not mine[keys.TOKENS].is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_device_on_cuda(make, make_rows, layout, prefetch):
    """Many batches, all held, all right, while the device is busy."""
    storage = make(layout=layout)
    rb = TrajectoryReplayBuffer(storage=storage, batch_size=16, device="cuda", prefetch=prefetch, seed=4)
    rb.extend(lazy_stack(make_rows([4 + i % 60 for i in range(64)])))
    busy = torch.randn(2048, 2048, device="cuda")
    held = []
    for _ in range(8):
        busy = (busy @ busy).clamp(-1, 1)
        held.append(rb.sample())
    for batch in held:
        want = storage.read(batch["index"].cpu())
        for key in (keys.TOKENS, keys.LOG_PROBS, keys.ASSISTANT_MASK, keys.REWARD, keys.TASK_REWARD, keys.ROW_ID):
            assert batch[key].device.type == "cuda"
            mine, theirs = batch[key].cpu(), want[key]
            if mine.is_nested:
                mine, theirs = mine.values(), theirs.values()
            assert torch.equal(mine, theirs)
    assert rb.sample_step(0, 4)[keys.TOKENS].device.type == "cuda"
