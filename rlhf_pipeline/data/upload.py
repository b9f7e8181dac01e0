"""Copies between the host and a device: uploads do not wait, downloads wait once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 64


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host to a device, through pinned memory in one copy that the host does not wait for.

    >>> upload([torch.arange(2), torch.tensor([True])], torch.device("cpu"))
    [tensor([0, 1]), tensor([True])]
    """
    if device.type == "cpu":
        return list(tensors)
    places: list[int | None] = []
    size = 0
    for tensor in tensors:
        places.append(None if tensor.is_cuda else size)
        if not tensor.is_cuda:
            size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    memory = torch.empty(size, dtype=torch.uint8).pin_memory()
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None:
            _view(memory, place, tensor).copy_(tensor)
    # The pinned memory returns to torch's pool, which does not reuse it before the copy is complete.
    on_device = memory.to(device, non_blocking=True)
    return [
        tensor.to(device) if place is None else _view(on_device, place, tensor)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the host, waiting once for each device that they are on."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # which need not be the current one
    return copies


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    return memory[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
