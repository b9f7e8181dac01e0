from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from rlhf_pipeline import Learn
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.optimizer_state import load_optimizer, optimizer_tensors


def model_of(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)).to(dtype)
    model[1].weight = model[0].weight  # tied, as most small language models are
    return model


def train(model: nn.Module, optimizer: PolicyOptimizer, steps: range, lr: float = 1e-3, parts: int = 2) -> None:
    for step in steps:
        for part in range(parts):
            generator = torch.Generator().manual_seed(100 * step + part)
            ids = torch.randint(0, 8, (5,), generator=generator)
            model(ids).float().log_softmax(-1)[:, 0].sum().neg().backward()
        optimizer.clip(1.0)
        optimizer.step(lr)


def test_float32_is_plain_adamw(tmp_path):
    """For float32 parameters there are no masters, and the bits are those of AdamW with torch's own clipping."""
    ours, theirs = model_of(torch.float32), model_of(torch.float32)
    optimizer = PolicyOptimizer(ours, Learn(lr=1e-2, weight_decay=0.1))
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        train(ours, optimizer, range(step, step + 1), lr=1e-2)
        for part in range(2):
            ids = torch.randint(0, 8, (5,), generator=torch.Generator().manual_seed(100 * step + part))
            theirs(ids).float().log_softmax(-1)[:, 0].sum().neg().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert optimizer.masters == {}
    assert torch.equal(ours[0].weight, theirs[0].weight)


def test_small_updates_add_up_in_bfloat16():
    """At a learning rate of 1e-4 a bfloat16 weight near 1 never moves by itself; its master moves all the time."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer = PolicyOptimizer(model, Learn())
    seen = []
    for _ in range(100):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-4)
        seen.append(model.weight.item())
    assert optimizer.masters["weight"].item() == pytest.approx(0.99, abs=1e-4)
    assert seen[5] == 1.0  # six updates are below half a unit in the last place
    assert model.weight.item() == pytest.approx(0.99, abs=2**-8)
    assert torch.equal(model.weight, optimizer.masters["weight"].bfloat16())


def test_gradients_of_micro_batches_are_summed_in_float32():
    """Sixteen gradients of 1/256 beside one of 1 are lost in bfloat16, and not here; the bfloat16 copies are freed."""
    weight = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))])
    optimizer = PolicyOptimizer(weight, Learn())
    for value in [1.0] + [2.0**-9] * 16:
        (weight[0] * value).sum().backward()
        assert weight[0].grad is None
    (gradient,) = optimizer.gradients()
    assert gradient.item() == 1.0 + 16 * 2.0**-9
    assert optimizer.clip(0.5).item() == pytest.approx(1.03125)
    assert optimizer.gradients()[0].item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"offload_optimizer": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(dtype, options):
    """Masters and moments come back: 3 + 4 steps equal 7, on the host or beside the weights."""
    config = Learn(lr=1e-3, **options)
    straight = model_of(dtype)
    train(straight, PolicyOptimizer(straight, config), range(7))

    first = model_of(dtype)
    optimizer = PolicyOptimizer(first, config)
    train(first, optimizer, range(3))
    tensors = optimizer_tensors(optimizer)
    second = model_of(dtype, seed=1)
    second.load_state_dict(first.state_dict())
    resumed = PolicyOptimizer(second, config)
    load_optimizer(resumed, tensors)
    train(second, resumed, range(3, 7))
    assert torch.equal(second[0].weight, straight[0].weight)
    assert second[0].weight is second[1].weight


def test_a_parameter_without_a_gradient_stays_without_moments():
    """One of two layers is never used: its moments are neither saved nor expected, and 2 + 2 steps equal 4."""

    def made(seed: int = 0) -> nn.Module:
        model = model_of(torch.float32, seed)
        model[1].unused = nn.Linear(2, 2)
        return model

    straight, first, second = made(), made(), made(seed=1)
    train(straight, PolicyOptimizer(straight, Learn()), range(4))
    optimizer, resumed = PolicyOptimizer(first, Learn()), PolicyOptimizer(second, Learn())
    train(first, optimizer, range(2))
    tensors = optimizer_tensors(optimizer)
    assert {key.rpartition("/")[0] for key in tensors} == {"0.weight"}
    second.load_state_dict(first.state_dict())
    load_optimizer(resumed, tensors)
    train(second, resumed, range(2, 4))
    assert torch.equal(second[0].weight, straight[0].weight)
    assert len(resumed.inner.state) == 1


def test_a_checkpoint_before_the_first_step_has_no_moments():
    """Loading it leaves the optimizer as it was made: the first step is still a first step."""
    model = model_of(torch.float32)
    optimizer = PolicyOptimizer(model, Learn())
    tensors = optimizer_tensors(optimizer)
    assert tensors == {}
    load_optimizer(optimizer, tensors)
    assert len(optimizer.inner.state) == 0


def test_moments_of_another_optimizer_are_refused():
    """A checkpoint of an optimizer with other moments says so instead of being half loaded."""
    model = model_of(torch.float32)
    optimizer = PolicyOptimizer(model, Learn())
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer)
    renamed = {key.replace("exp_avg_sq", "state2"): value for key, value in tensors.items()}
    with pytest.raises(DataError, match=r"saved with another learn\.optimizer"):
        load_optimizer(optimizer, renamed)


def test_a_missing_library_is_named(monkeypatch):
    """Without torchao and bitsandbytes the message has the command that installs one."""
    for name in ("torchao", "torchao.optim", "bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DefinitionError, match="pip install torchao"):
        PolicyOptimizer(model_of(torch.float32), Learn(optimizer="adamw_8bit"))


def test_nothing_to_train_is_refused():
    """A frozen model is a mistake, not an optimizer without parameters."""
    with pytest.raises(DefinitionError, match="no trainable parameters"):
        PolicyOptimizer(model_of(torch.float32).requires_grad_(False), Learn())


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library compiles its step and warns about its own use of torch
def test_moments_in_eight_bits_are_saved_and_restored():
    """With torchao the moments take 8 bits, and 2 + 2 steps equal 4 bit for bit."""
    pytest.importorskip("torchao.optim")
    config = Learn(lr=1e-2, optimizer="adamw_8bit")

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(128, 64, bias=False)

    def step(model: nn.Module, optimizer: PolicyOptimizer, number: int) -> None:
        torch.manual_seed(number)
        model(torch.randn(3, 128)).square().sum().backward()
        optimizer.step(1e-2)

    straight = make(0)
    optimizer = PolicyOptimizer(straight, config)
    for number in range(4):
        step(straight, optimizer, number)
    first = make(0)
    optimizer = PolicyOptimizer(first, config)
    for number in range(2):
        step(first, optimizer, number)
    tensors = optimizer_tensors(optimizer)
    moments = [value for key, value in tensors.items() if value.numel() == 128 * 64]
    assert len(moments) == 2
    assert {value.dtype for value in moments} == {torch.uint8}
    second = make(1)
    second.load_state_dict(first.state_dict())
    resumed = PolicyOptimizer(second, config)
    load_optimizer(resumed, tensors)
    for number in range(2, 4):
        step(second, resumed, number)
    assert torch.equal(straight.weight, second.weight)


def test_norms_biases_and_positions_do_not_decay():
    """With gradients of zero only the matrices shrink, and those of bfloat16 by their masters."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.ModuleDict({"wpe": nn.Embedding(4, 6), "up": nn.Linear(6, 8), "norm": nn.LayerNorm(8)}).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = PolicyOptimizer(model, Learn(lr=0.1, weight_decay=0.5))
        sum(parameter.sum() * 0.0 for parameter in model.parameters()).backward()
        optimizer.step(0.1)
        found = {name: parameter.float().unique().tolist() for name, parameter in model.named_parameters()}
        shrunk = found.pop("up.weight")
        assert shrunk == pytest.approx([0.95], rel=1e-2)
        assert sorted(found) == ["norm.bias", "norm.weight", "up.bias", "wpe.weight"]
        assert all(values == [1.0] for values in found.values())


def test_an_optimizer_with_groups_goes_through_a_checkpoint(tmp_path):
    """Moments and decay of each group are those of a run that went on."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
        return model, PolicyOptimizer(model, Learn(lr=1e-2, weight_decay=0.1))

    straight, killed, resumed = make(), make(), make()
    train(*straight, range(4))
    train(*killed, range(2))
    tensors = optimizer_tensors(killed[1])
    resumed[0].load_state_dict(killed[0].state_dict())
    load_optimizer(resumed[1], tensors)
    train(*resumed, range(2, 4))
    for a, b in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule, rates):
    """Two steps of warm-up and four after it, by hand; an end of its own does not move with the number of steps."""
    config = Learn(lr=1.0, steps=6, warmup_steps=2, lr_schedule=schedule)
    assert [config.learning_rate(step) for step in range(1, 7)] == pytest.approx(rates, abs=1e-6)
    longer = Learn(lr=1.0, steps=60, warmup_steps=2, lr_schedule=schedule, lr_decay_steps=7)
    assert [longer.learning_rate(step) for step in range(1, 7)] == pytest.approx(rates, abs=1e-6)
    assert longer.learning_rate(50) == (1.0 if schedule == "constant" else 0.0)
    if schedule != "constant":
        with pytest.raises(DefinitionError, match="Set lr_decay_steps to a larger"):
            Learn(lr_schedule=schedule, warmup_steps=9, lr_decay_steps=5)
