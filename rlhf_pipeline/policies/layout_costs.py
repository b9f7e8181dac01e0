"""What the layouts of a step cost on a kind of device: `auto` chooses from this table.

The choice is a function of the lengths alone, never of the time that a step took, so that a resumed run chooses as the
one before it. `benchmarks/fit_layout_costs.py` measures a device and prints its entry.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlhf_pipeline.policies._packed_attention import one_kernel_for_segments


class LayoutCosts(NamedTuple):
    """Costs in positions of padded rows.

    Attributes:
        position: of a position of packed rows.
        segment: of a segment of the packed axis, times the width of the model.
    """

    position: float
    segment: float


BY_SEGMENT: Final = LayoutCosts(position=1.0, segment=800.0)
"""Used if each segment is a separate attention call.

Measured forward and backward on one core with 4 layers: per layer, a segment costs 110 us at any width, and a position
9 us at a width of 64 and 75 us at 256.
"""
IN_ONE_KERNEL: Final = LayoutCosts(position=1.0, segment=0.0)
"""Used if one kernel processes all segments, on a device without an entry."""
MEASURED: Final[dict[str, LayoutCosts]] = {
    # The shape of Qwen2-0.5B in bfloat16, 57,762 padded positions in 0.968 s, 52,995 packed ones in 0.711 s and 38,421
    # with shared prompts in 0.516 s (benchmarks/results/gpu_check_h200.json).
    "NVIDIA H200": LayoutCosts(position=0.80, segment=0.0),
}
"""By the name of a CUDA device, if one kernel processes all segments."""


def costs_on(weight: Tensor) -> LayoutCosts:
    """Return the costs for a model, by the dtype and the device of its head's weight."""
    if not (weight.is_cuda and one_kernel_for_segments(weight)):
        return BY_SEGMENT
    return MEASURED.get(torch.cuda.get_device_name(weight.device), IN_ONE_KERNEL)


def sharing_pays(costs: LayoutCosts, *, width: int, padded: int, packed: int, segments: int) -> bool:
    """Return whether rows without padding cost less than padded rows.

    Args:
        costs: of the device.
        width: of the model.
        padded: positions of the padded rows.
        packed: positions without padding, common prefixes counted once.
        segments: stretches of the packed axis.

    >>> [sharing_pays(BY_SEGMENT, width=64, padded=3000, packed=900, segments=n) for n in (100, 300)]
    [True, False]
    """
    return (padded - packed * costs.position) * width > costs.segment * segments
