"""Looks at every operator that torch runs, refuses waits for a GPU, and measures how far two results are apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Records the largest tensor that any operator returns, how many matmuls ran, and which operators."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.matmuls = 0
        self.names: set[object] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket)
        self.matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        for z in out if isinstance(out, tuple | list) else (out,):
            if isinstance(z, torch.Tensor):
                self.numel = max(self.numel, z.numel())
        return out


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for a GPU; the debug mode is restored whatever happens."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # torch warns at each change that the mode is a prototype, after it has changed it.
        warnings.filterwarnings("ignore", message=".*ynchronization debug mode", category=UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
