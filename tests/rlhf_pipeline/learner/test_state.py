from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.learner.state import list_checkpoints, load_checkpoint, save_checkpoint


class Holder:
    """A model with tied weights, and `save_pretrained` as a policy has it."""

    def __init__(self, seed: int, size: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(8, size), nn.Linear(size, 8, bias=False))
        self.model[1].weight = self.model[0].weight

    def save_pretrained(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True)
        save_model(self.model, str(Path(folder) / "model.safetensors"))


def optimizer_of(holder: Holder) -> torch.optim.AdamW:
    return torch.optim.AdamW(holder.model.parameters(), lr=0.1)


def train(holder: Holder, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        loss = holder.model(torch.randint(0, 8, (3,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_restored_run_continues_bit_for_bit(tmp_path):
    """Weights, Adam moments and the random generator all come back: 3 + 4 steps equal 7."""
    straight = Holder(0)
    optimizer = optimizer_of(straight)
    train(straight, optimizer, 7)

    first = Holder(0)
    optimizer = optimizer_of(first)
    train(first, optimizer, 3)
    path = save_checkpoint(tmp_path, 3, policy=first, optimizer=optimizer, state={"note": [1, "x"]}, keep=2)

    second = Holder(1)
    optimizer = optimizer_of(second)
    state = load_checkpoint(path, policy=second, optimizer=optimizer)
    assert state == {"step": 3, "note": [1, "x"]}
    train(second, optimizer, 4)
    assert torch.equal(second.model[0].weight, straight.model[0].weight)
    assert second.model[0].weight is second.model[1].weight


def test_only_the_newest_are_kept_and_half_written_ones_are_swept(tmp_path):
    """Old checkpoints go, and what a killed save left behind is not taken for a checkpoint."""
    holder = Holder(0)
    optimizer = optimizer_of(holder)
    (tmp_path / ".step-00000001.tmp").mkdir()
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, policy=holder, optimizer=optimizer, state={}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000004", "step-00000006"]
    assert not list(tmp_path.glob(".step-*"))


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path):
    """If the state cannot be written, the temporary folder goes and the last checkpoint stays."""
    holder = Holder(0)
    optimizer = optimizer_of(holder)
    save_checkpoint(tmp_path, 1, policy=holder, optimizer=optimizer, state={}, keep=2)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 2, policy=holder, optimizer=optimizer, state={"bad": object()}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_missing_file_and_another_model_are_explained(tmp_path):
    """The message names the folder and what to do with it."""
    holder = Holder(0)
    path = save_checkpoint(tmp_path, 1, policy=holder, optimizer=optimizer_of(holder), state={}, keep=2)
    other = Holder(0, size=6)
    with pytest.raises(DataError, match="belongs to another model"):
        load_checkpoint(path, policy=other, optimizer=optimizer_of(other))
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(DataError, match="is damaged"):
        load_checkpoint(path, policy=holder, optimizer=optimizer_of(holder))
    (path / "model.safetensors").write_bytes(whole)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(MissingPathError, match=r"has no optimizer\.safetensors. There is no older one"):
        load_checkpoint(path, policy=holder, optimizer=optimizer_of(holder))
    shutil.rmtree(path)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("content", ["", '{"step": 2', "[]", '{"step": 2}', '{"step": "two", "param_groups": []}'])
def test_a_damaged_state_names_the_checkpoint_before_it(tmp_path, content):
    """A truncated or emptied state.json is said as damage, with the folder to delete and the one that is then used."""
    holder = Holder(0)
    optimizer = optimizer_of(holder)
    save_checkpoint(tmp_path, 1, policy=holder, optimizer=optimizer, state={}, keep=2)
    train(holder, optimizer, 1)
    path = save_checkpoint(tmp_path, 2, policy=holder, optimizer=optimizer, state={}, keep=2)
    (path / "state.json").write_text(content)
    before = holder.model[0].weight.clone()
    with pytest.raises(DataError, match=r"step-00000002 is damaged: .*the one before it, step-00000001"):
        load_checkpoint(path, policy=holder, optimizer=optimizer)
    assert torch.equal(holder.model[0].weight, before)
    shutil.rmtree(path)
    load_checkpoint(tmp_path / "step-00000001", policy=holder, optimizer=optimizer)
