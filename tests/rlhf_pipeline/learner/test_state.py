from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.state import learner_state, read_state
from rlhf_pipeline.policies.weight_files import load_weights


class Holder:
    """A model with tied weights, and `save_pretrained` as a policy has it."""

    def __init__(self, seed: int, size: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(8, size), nn.Linear(size, 8, bias=False))
        self.model[1].weight = self.model[0].weight

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor]) -> None:
        save_file({"0.weight": state_dict["0.weight"]}, str(Path(folder) / "model.safetensors"))


def optimizer_of(holder: Holder) -> PolicyOptimizer:
    return PolicyOptimizer(holder.model, Learn(lr=0.1))


def train(holder: Holder, optimizer: PolicyOptimizer, steps: int) -> None:
    for _ in range(steps):
        loss = holder.model(torch.randint(0, 8, (3,))).square().mean()
        loss.backward()
        optimizer.step(0.1)


def test_a_restored_run_continues_bit_for_bit(tmp_path):
    """Weights, Adam moments and the random generator all come back: 3 + 4 steps equal 7."""
    straight = Holder(0)
    optimizer = optimizer_of(straight)
    train(straight, optimizer, 7)

    first = Holder(0)
    optimizer = optimizer_of(first)
    train(first, optimizer, 3)
    learner_state(policy=first, optimizer=optimizer, more={}).write(tmp_path)

    second = Holder(1)
    optimizer = optimizer_of(second)
    read_state(tmp_path, policy=second, optimizer=optimizer)
    train(second, optimizer, 4)
    assert torch.equal(second.model[0].weight, straight.model[0].weight)
    assert second.model[0].weight is second.model[1].weight


def test_a_missing_file_and_another_model_are_explained(tmp_path):
    """The message names the folder and what is wrong with it; the model stays as it was where nothing was loaded."""
    holder = Holder(0)
    learner_state(policy=holder, optimizer=optimizer_of(holder), more={}).write(tmp_path)
    other = Holder(0, size=6)
    with pytest.raises(DataError, match="belongs to another model"):
        read_state(tmp_path, policy=other, optimizer=optimizer_of(other))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(DataError, match="is damaged"):
        read_state(tmp_path, policy=holder, optimizer=optimizer_of(holder))
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "optimizer.safetensors").unlink()
    with torch.no_grad():
        holder.model[0].weight.add_(1.0)
    before = holder.model[0].weight.clone()
    with pytest.raises(DataError, match=r"optimizer\.safetensors"):
        read_state(tmp_path, policy=holder, optimizer=optimizer_of(holder))
    assert torch.equal(holder.model[0].weight, before)


@pytest.fixture
def mesh():
    """One process as a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(model: nn.Module, mesh) -> nn.Module:
    """Hold each parameter of a model as shards."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model


def test_whole_weights_load_into_shards(tmp_path, mesh):
    """A checkpoint of one process goes into a model whose parameters are shards; one of another shape is refused."""
    source = nn.Linear(4, 3)
    save_model(source, str(tmp_path / "model.safetensors"))
    target = sharded(nn.Linear(4, 3), mesh)
    load_weights(tmp_path, target)
    assert torch.equal(target.weight.full_tensor(), source.weight)
    assert torch.equal(target.bias.full_tensor(), source.bias)
    with pytest.raises(RuntimeError, match=r"weight of shape \[3, 5\] is not in the file"):
        load_weights(tmp_path, sharded(nn.Linear(5, 3), mesh))
    with pytest.raises(RuntimeError, match=r"0\.weight of shape \[3, 4\] is not in the file"):
        load_weights(tmp_path, sharded(nn.Sequential(nn.Linear(4, 3)), mesh))


def test_adapters_load_and_others_are_refused(tmp_path):
    """Adapters come back by name, the frozen weights stay; adapters of other layers, or none, are refused."""
    peft = pytest.importorskip("peft")

    def adapted(*layers: str) -> nn.Module:
        torch.manual_seed(len(layers))
        base = nn.Sequential()
        base.add_module("a", nn.Linear(4, 4))
        base.add_module("b", nn.Linear(4, 4))
        config = peft.LoraConfig(r=2, target_modules=list(layers), init_lora_weights=False)
        return peft.get_peft_model(base, config)

    source = adapted("a")
    source.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    target = adapted("a")
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    load_weights(tmp_path, target)
    found = {name: parameter for name, parameter in target.named_parameters() if "lora_" in name}
    assert len(found) == 2
    for name, parameter in found.items():
        assert torch.equal(parameter, saved[name.replace(".default", "")]), name
    assert not target.base_model.model.b.weight.any()
    with pytest.raises(RuntimeError, match=r"some adapters do not match, for example .* \(2 in total\)"):
        load_weights(tmp_path, adapted("a", "b"))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="has no adapters"):
        load_weights(tmp_path, target)
