"""Looks at every operator that torch runs; and how far two results are apart."""

from __future__ import annotations

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


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
