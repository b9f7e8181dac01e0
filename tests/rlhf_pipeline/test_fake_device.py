"""The stand-in for a device finds each kind of fault that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rlhf_pipeline.fake_device import CUDA, FakeDevice, OnDevice


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
