"""What generation asks of a GPU, found without one: no tensor of another device, and no wait of the host per token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_pipeline.policies.engines.protocol import RaggedCompletions, Request
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.engines.static import LOOK_EVERY, StaticSlots
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.rlhf_pipeline.fake_device import CUDA, FakeDevice, OnDevice, to_device

Make = Callable[..., PreTrainedModel]

LIMITS = [40, 7, 33, 40, 12, 25]
REQUEST = Request(prompts=[[5, 6, 7], [8], [9] * 6], group_size=2, max_new_tokens=LIMITS, temperature=0.7, seed=3)


def on_device(
    model: PreTrainedModel, decode: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[RaggedCompletions, FakeDevice]:
    """Generate with a model that is on the fake device, after a first call that looks at the model."""
    policy = TokenPolicy(copy.deepcopy(model))
    slots = SlotEngine(policy._parts, num_slots=4, decode=decode)  # type: ignore[arg-type]
    slots.generate(Request(prompts=[[5]], max_new_tokens=1))
    to_device(policy.model)
    # There is nothing to capture.
    monkeypatch.setattr("rlhf_pipeline.policies.engines.static.graphs_of", lambda device: None)
    with FakeDevice() as seen:
        return slots.generate(REQUEST), seen


# GPT-2's own code in transformers looks for padding in every prefill, which is two more waits each.
@pytest.mark.parametrize("fewest_rows", [1, 32])
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_the_host_looks_once_in_several_tokens(
    name: str, fewest_rows: int, make_model: Make, monkeypatch: pytest.MonkeyPatch
):
    """The same completions as on the CPU; every wait is that of a look, and no look comes before its time."""
    monkeypatch.setattr("rlhf_pipeline.policies.engines.slot_columns.FEWEST_ROWS", fewest_rows)
    model = make_model(name)
    plain = TokenPolicy(copy.deepcopy(model), num_slots=4, eos_token_id=[]).engine.generate(REQUEST)
    found, seen = on_device(model, "static", monkeypatch)
    assert found.token_ids.tolist() == plain.token_ids.tolist()
    check_looks(seen)


def check_looks(seen: FakeDevice) -> None:
    """Fail where a device is mixed with another, or where the host waits anywhere but at a look."""
    assert seen.total("refused") == 0, seen.events
    waits = [event for event in seen.events if event[0] == "wait"]
    assert len(waits) == 1, waits
    assert waits[0][2].startswith("policies/engines/static.py")
    # Six completions on four slots: 40 steps, and 25 of the one that began last, at the second look.
    assert seen.total("wait") <= -(-(40 + 25) // LOOK_EVERY) + 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda slots: bool(slots.live.any()),
        lambda slots: slots.tokens[0, 0].item(),
        lambda slots: slots.hidden[slots.live],  # a shape that depends on data
        lambda slots: slots.log_probs + torch.zeros(1, LOOK_EVERY),  # made on the host
    ],
    ids=["is anything live", "a token read", "live rows alone", "a tensor of the host"],
)
def test_a_fault_in_each_step_is_found(
    fault: Callable[[StaticSlots], Any], make_model: Make, monkeypatch: pytest.MonkeyPatch
):
    """What the check above keeps away, put into the step of one shape."""
    step = StaticSlots.step
    monkeypatch.setattr(StaticSlots, "step", lambda slots: (fault(slots), step(slots))[1])
    _, seen = on_device(make_model(), "static", monkeypatch)
    with pytest.raises(AssertionError):
        check_looks(seen)


def test_a_look_at_every_token_is_counted(make_model: Make, monkeypatch: pytest.MonkeyPatch):
    """Live rows alone are decoded with more than one wait per token: this is what the check above keeps away."""
    found, seen = on_device(make_model(), "ragged", monkeypatch)
    assert seen.total("refused") == 0, seen.events
    assert seen.total("wait") >= 2 * int(found.lengths.max())


def _there(*values: float) -> Tensor:
    return OnDevice(torch.tensor(values))


HERE, INDEX = torch.tensor([1.0, 2.0]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("refused", lambda x: x + HERE),
        ("refused", lambda x: torch.where(x > 0, x, HERE)),
        ("refused", lambda x: torch.cat((x, HERE))),
        ("refused", lambda x: x[None] @ HERE[:, None]),
        ("refused", lambda x: torch.nn.functional.embedding(INDEX, x[:, None])),
        ("refused", lambda x: HERE[OnDevice(INDEX)]),
        ("refused", lambda x: x.index_put_((OnDevice(INDEX),), HERE)),
        ("refused", lambda x: x.numpy()),
        ("refused", lambda x: HERE.pin_memory().to("cuda", non_blocking=True)),
        ("refused", lambda x: torch.zeros(2, device="cuda")),
        ("wait", lambda x: x[0].item()),
        ("wait", lambda x: bool(x[0] > 0)),
        ("wait", lambda x: x.tolist()),
        ("wait", lambda x: x.cpu()),
        ("wait", lambda x: x.nonzero()),
        ("wait", lambda x: x[x > 1]),
        ("wait", lambda x: HERE.to(x.device)),
        ("wait", lambda x: torch.tensor([1.0], device=x.device)),
        ("wait", lambda x: x.copy_(HERE)),
    ],
)
def test_each_kind_of_fault_is_found(kind: str, fault: Callable[[Tensor], Any]):
    """An operation on tensors of both devices is refused, and what the host waits for is counted."""
    with FakeDevice() as seen:
        x = _there(1.0, 2.0)
        before = seen.total(kind)
        fault(x)
        assert seen.total(kind) == before + 1


def test_what_a_device_allows_is_no_fault():
    """Numbers without a dimension, indices of the host, and copies that nobody waits for."""
    with FakeDevice() as seen:
        x = _there(1.0, 2.0)
        _ = x * torch.tensor(2.0)
        _ = x.clone().masked_fill_(x > 1, 0.0)
        _ = HERE.pin_memory().to(CUDA, non_blocking=True) + x
        _ = torch.zeros(2, device=CUDA) + x
        assert not seen.events
