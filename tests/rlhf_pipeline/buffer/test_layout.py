from __future__ import annotations

import pytest
import torch
from tensordict import lazy_stack

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import on_device, padded_of, steps_of, td_of
from tests.rlhf_pipeline.fake_device import CUDA, FakeDevice, OnDevice


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


def test_version_spans_in_every_form(make, make_rows):
    """Pairs per span come back from a lazy stack, and from jagged and padded batches."""
    spans = [[[2, 7], [3, 9]], [], [[1, 5], [4, 6], [5, 7]]]
    rows = make_rows([4, 5, 6])
    for row, own in zip(rows, spans, strict=True):
        row["version_spans"] = torch.tensor(own, dtype=torch.int64).reshape(-1, 2)
    stack = lazy_stack(rows)
    for data in (stack, td_of(steps_of(stack)), padded_of(steps_of(stack))):
        storage = make(extra=PROVENANCE)
        storage.set(torch.arange(3), data)
        assert [found.tolist() for found in storage.store.read([0, 1, 2], ["version_spans"])["version_spans"]] == spans
        assert storage.read([0, 1])["version_spans"].tolist() == [spans[0], [[0, 0], [0, 0]]]


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
def test_device_on_cuda(make, make_rows, prefetch):
    """Many batches, all held, all right, while the device is busy."""
    storage = make()
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
            assert torch.equal(batch[key].cpu(), want[key])
    assert rb.sample_step(0, 4)[keys.TOKENS].device.type == "cuda"
