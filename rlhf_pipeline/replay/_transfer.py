"""Batches to an accelerator through pinned memory: one copy per batch, beside the computation."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from rlhf_pipeline.data.trajectories import entries_of, is_jagged, unchecked
from rlhf_pipeline.errors import DefinitionError

_ALIGN = 64


@dataclass(slots=True)
class _Slot:
    """Pinned bytes, and the event after which they may be written again."""

    memory: torch.Tensor
    copied: Any = None


class DeviceRing:
    """Sends batches to a device.

    On CUDA all dense leaves of a batch go into one pinned buffer and from there in one asynchronous copy on a stream
    of its own; the caller's stream waits for it, the caller does not. `slots` buffers take turns, so a batch can be
    gathered while the one before it is still being copied. On any other device this is `batch.to(device)`, and nothing
    at all where the batch is there already.

    Args:
        device: where batches go.
        slots: pinned buffers, at least 1.

    Raises:
        DefinitionError: if `slots` is below 1.

    >>> batch = TensorDict({"a": torch.arange(3)}, batch_size=[3])
    >>> DeviceRing("cpu")(batch) is batch
    True
    """

    def __init__(self, device: str | torch.device, slots: int = 2) -> None:
        if slots < 1:
            raise DefinitionError(f"a ring needs at least 1 buffer, got {slots}.")
        self.device = torch.device(device)
        self.slots = int(slots)
        self._ring: list[_Slot] = []
        self._next = 0
        self._stream: Any = None
        self._lock = threading.Lock()

    def __call__(self, batch: TensorDict) -> TensorDict:
        """The batch on the device; it stays valid for as long as anything holds it."""
        if self.device.type != "cuda":
            moved: Any = batch if self.device.type == "cpu" else batch.to(self.device)
            return moved
        places, size = plan(batch)
        with self._lock, torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            slot = self._slot(size)
            pack(places, slot.memory)
            user = torch.cuda.current_stream()
            with torch.cuda.stream(self._stream):
                arrived = slot.memory[:size].to(self.device, non_blocking=True)
                slot.copied = torch.cuda.Event()
                slot.copied.record()
            user.wait_stream(self._stream)
            arrived.record_stream(user)
        return unpack(batch, places, arrived)

    def _slot(self, size: int) -> _Slot:
        """The next buffer, at least so large, once its last copy is done."""
        if len(self._ring) < self.slots:
            self._ring.append(_Slot(torch.empty(0, dtype=torch.uint8)))
        slot = self._ring[self._next]
        self._next = (self._next + 1) % self.slots
        if slot.copied is not None:
            slot.copied.synchronize()
        if slot.memory.numel() < size:
            slot.memory = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        return slot

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "slots": self.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"], state["slots"])


Places = dict[int, tuple[int, torch.Tensor]]


def plan(batch: TensorDict) -> tuple[Places, int]:
    """Where each dense leaf goes, by its id, and how many bytes that makes."""
    places: Places = {}
    size = 0
    for leaf in batch.values(True, True):
        if isinstance(leaf, torch.Tensor) and not is_jagged(leaf) and leaf.numel():
            places[id(leaf)] = size, leaf
            size += -(-leaf.numel() * leaf.element_size() // _ALIGN) * _ALIGN
    return places, size


def pack(places: Places, memory: torch.Tensor) -> None:
    """Copy the leaves into the bytes, uint8 `[size]`."""
    for start, leaf in places.values():
        _view(memory, start, leaf).copy_(leaf)


def unpack(batch: TensorDict, places: Places, memory: torch.Tensor) -> TensorDict:
    """The same TensorDict with leaves that are views of the bytes; the others are moved one by one."""
    items: dict[str, Any] = {}
    for name, leaf in entries_of(batch).items():
        if type(leaf) is TensorDict:
            items[name] = unpack(leaf, places, memory)
        elif isinstance(leaf, torch.Tensor):
            place = places.get(id(leaf))
            items[name] = leaf.to(memory.device) if place is None else _view(memory, place[0], leaf)
        else:
            items[name] = leaf
    return unchecked(items, batch.batch_size, device=memory.device)


def _view(memory: torch.Tensor, start: int, leaf: torch.Tensor) -> torch.Tensor:
    return memory[start : start + leaf.numel() * leaf.element_size()].view(leaf.dtype).view(leaf.shape)
