"""Copies of a learner's tensors in host memory, which a thread can write while the learner changes the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_SHARE: Final = 0.5
"""The share of the available host memory that new copies may take; the rest is left to sampling and the page cache."""

Queued = Mapping[torch.device, Any]
"""For each CUDA device, an event after the work that was queued on it."""


class HostCopies:
    """Host memory for one copy of some tensors; the next copy reuses it.

    The copy of a tensor on a GPU is in pinned memory and made on a separate stream, beside the kernels of the thread
    that uses the tensor. Tensors that share memory (a head tied to the embedding) share the memory of their copy.

    >>> copies = HostCopies()
    >>> weight = torch.ones(2)
    >>> copied = copies.of({"weight": weight, "tied": weight})
    >>> _ = weight.fill_(3.0)
    >>> copied["weight"].tolist(), copied["weight"] is copied["tied"]
    ([1.0, 1.0], True)
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    def bytes_missing(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many bytes the copies need beyond the memory that is there from an earlier copy."""
        first, _ = _distinct(tensors)
        return sum(tensor.nbytes for name, tensor in first.items() if not _fits(self._memory.get(name), tensor))

    def fit(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether this machine has host memory for the copies."""
        missing = self.bytes_missing(tensors)
        return missing == 0 or missing <= _SHARE * available_bytes()

    @torch.no_grad()
    def of(self, tensors: Mapping[str, Tensor], queued: Queued | None = None) -> dict[str, Tensor]:
        """Return a copy of each tensor, valid until the next call; any thread may call this.

        Args:
            tensors: nothing may change them before this returns.
            queued: what `queued_work` returned when the tensors had the values to copy; None means now.
        """
        first, same_as = _distinct(tensors)
        before, self._memory = self._memory, {}
        work = queued_work(first.values()) if queued is None else queued
        for device in {tensor.device for tensor in first.values()}:
            with self._beside(device, work.get(device)):
                for name, tensor in first.items():
                    if tensor.device == device:
                        memory = before.pop(name, None)
                        if memory is None or not _fits(memory, tensor):
                            memory = _memory_for(tensor)
                        self._memory[name] = memory.copy_(tensor, non_blocking=tensor.is_cuda)
        return {name: self._memory[same_as[name]] for name in tensors}

    @contextmanager
    def _beside(self, device: torch.device, after: Any) -> Iterator[None]:
        """On a CUDA device, run on a separate stream, after an event, and wait for it at the end."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(after)
            yield
            stream.synchronize()


def queued_work(tensors: Iterable[Tensor]) -> dict[torch.device, Any]:
    """Return an event after the work that this thread has queued so far, for each CUDA device of some tensors."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


def _memory_for(tensor: Tensor) -> Tensor:
    """Return host memory for a copy, which a GPU can fill by itself where the system allows that."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    except RuntimeError:  # the system locks no more memory: copies are slower without
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors without repeats of the same memory, and for each name the first name of its memory."""
    names: dict[object, str] = {}
    same_as: dict[str, str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same_as[name] = names.setdefault(memory if tensor.numel() else name, name)
    return {name: tensors[name] for name in dict.fromkeys(same_as.values())}, same_as


def _fits(memory: Tensor | None, tensor: Tensor) -> bool:
    return memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the host memory that a process may still take, in bytes; infinite where the system does not report it.

    Args:
        proc: where Linux reports the machine's memory.
        groups: where it reports the limit of this process's group (cgroup v2), as in a container.
    """
    room = float("inf")
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = float(line.split()[1]) * 1024.0
    except OSError:
        return room
    try:
        limit, used = ((groups / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (groups / "memory.stat").read_text().splitlines())
        if limit != "max":  # unused pages of files are released first
            room = min(room, float(limit) - float(used) + float(cached.get("inactive_file", 0)))
    except (OSError, ValueError):
        return room
    return room
