from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchrl.data.llm.utils import KLControllerBase

from rlhf_pipeline.errors import DefinitionError, RunMismatchError
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController, ConstantKLController


def test_constant_stays_and_sets_the_model():
    """The coefficient does not move, and the model is kept equal to it."""
    model = SimpleNamespace(kl_coef=None)
    controller = ConstantKLController(kl_coef=0.25, model=model)
    assert controller.update([100.0]) == 0.25
    assert model.kl_coef == 0.25


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 0.5)),  # error 0.1, half a horizon
        (60.0, 0.1 * (1 + 0.2 * 0.5)),  # clipped from above
        (-60.0, 0.1 * (1 - 0.2 * 0.5)),  # clipped from below
    ],
)
def test_adaptive_update(kl, expected):
    """The update of Ziegler et al., by hand."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=8)
    assert controller.update([kl] * 4) == pytest.approx(expected, abs=1e-15)


def test_adaptive_takes_tensors_and_stays_a_float():
    """TorchRL's turns into a tensor."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=2.0, horizon=4)
    value = controller.update(torch.tensor([1.0, 3.0, float("nan")], requires_grad=True))
    assert type(value) is float
    assert value == pytest.approx(0.1)


def test_adaptive_never_turns_negative():
    """A batch of many horizons with too little KL shrinks the coefficient by a fifth, no more."""
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=2)
    assert controller.update([0.0] * 1000) == pytest.approx(0.08)


@pytest.mark.parametrize(
    "wrong", [{"init_kl_coef": 0.0}, {"target": 0.0}, {"horizon": 0}, {"init_kl_coef": float("nan")}]
)
def test_adaptive_refuses(wrong):
    """A zero coefficient would stay zero for ever."""
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        AdaptiveKLController(**{"init_kl_coef": 0.1, "target": 6.0, "horizon": 10, **wrong})


def test_adaptive_needs_values():
    """No silent update without a measurement."""
    with pytest.raises(DefinitionError, match="measured KL"):
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10).update(None)


def test_model_without_the_attribute():
    """The message names the model's type."""
    with pytest.raises(DefinitionError, match="object"):
        ConstantKLController(kl_coef=0.1, model=object())


def test_state_round_trip():
    """The state is plain numbers; a foreign state is refused."""
    first = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    first.update([12.0] * 5)
    second = AdaptiveKLController(init_kl_coef=0.7, target=6.0, horizon=10)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef
    with pytest.raises(RunMismatchError, match="coef"):
        second.load_state_dict({"beta": 1.0})


def test_they_are_torchrls_controllers():
    """`isinstance` with TorchRL's base class holds, so what takes its controllers takes these."""
    for controller in (
        ConstantKLController(kl_coef=0.1),
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10),
    ):
        assert isinstance(controller, KLControllerBase)
