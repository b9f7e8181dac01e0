"""The choice of a layout by what it costs on a kind of device."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.policies.layout_costs import BY_SEGMENT, IN_ONE_KERNEL, MEASURED, LayoutCosts, costs_on, sharing_pays
from rlhf_pipeline.policies.packed import plan_micro_batches

HEAD = torch.zeros(10, 64)


@pytest.mark.parametrize(
    ("costs", "packed", "segments", "pays"),
    [
        (BY_SEGMENT, 900, 167, True),
        (BY_SEGMENT, 900, 168, False),  # 2,100 positions saved at a width of 64, and 168 segments of 800
        (IN_ONE_KERNEL, 2999, 10_000, True),
        (IN_ONE_KERNEL, 3000, 1, False),
        (MEASURED["NVIDIA H200"], 3000, 1, True),
        (MEASURED["NVIDIA H200"], 3750, 1, False),
        (LayoutCosts(position=2.0, segment=0.0), 1499, 1, True),
        (LayoutCosts(position=2.0, segment=0.0), 1500, 1, False),
    ],
)
def test_sharing_pays_where_it_costs_less(costs, packed, segments, pays):
    """Of 3,000 padded positions, by hand."""
    assert sharing_pays(costs, width=64, padded=3000, packed=packed, segments=segments) is pays


def test_a_device_without_an_entry_has_the_rule_of_its_kernel(monkeypatch):
    """The name of the device chooses among entries only where one kernel takes all segments."""
    assert costs_on(HEAD) == BY_SEGMENT
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert costs_on(on_cuda(torch.float32)) == BY_SEGMENT  # no such kernel
    assert costs_on(on_cuda(torch.bfloat16)) == MEASURED["NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert costs_on(on_cuda(torch.bfloat16)) == IN_ONE_KERNEL


class OnCuda(torch.Tensor):
    """A tensor that reports that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]


def on_cuda(dtype: torch.dtype) -> torch.Tensor:
    """The weight of a head on a GPU."""
    return HEAD.to(dtype).as_subclass(OnCuda)


def test_a_plan_follows_the_table(monkeypatch):
    """Rows of 40 and 25 tokens are 80 padded positions or 65 packed ones: each where it costs less."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    arguments = {"prompt_lengths": [2, 2], "group_ids": [0, 1]}
    chosen = [
        plan_micro_batches("auto", [40, 25], 400, **arguments, weight=weight).positions
        for weight in (on_cuda(torch.bfloat16), HEAD)
    ]
    assert chosen == [[65], [80]]
