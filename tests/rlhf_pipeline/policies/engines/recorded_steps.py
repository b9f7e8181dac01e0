"""What a CUDA graph does to a step, on a CPU: the same kernels on the same addresses, and no line of Python.

A capture writes down the kernels of a step with the tensors that they read and write, and leaves all memory as it was.
A replay runs these kernels again. As with a graph, a weight that is in another tensor by now, or a number that was
another at the capture, is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Runs kernels, and writes them down with their outputs, and memory as it was before the first write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for tensor in given:
                storage = tensor.untyped_storage()
                if _address(tensor) not in self.before:
                    self.before[_address(tensor)] = (storage, storage.clone())
        out = func(*args, **kwargs)
        known = {_address(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _address(leaf) not in known]
        self.kernels.append((func, args, kwargs, made))
        return out


class RecordedSteps:
    """In the place of `Graphs`.

    Attributes:
        captures: how many steps were captured.
        replays: how many times one was replayed.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Graphs.capture`."""
        with _Recorder() as recorded:
            step()
        for storage, content in recorded.before.values():
            storage.copy_(content)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, made in recorded.kernels:
                out = func(*args, **kwargs)
                fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                if made:
                    for target, value in zip(made, fresh, strict=True):
                        target.copy_(value)

        return replay
