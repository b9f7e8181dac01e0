"""What a CUDA graph does to a step, on a CPU: the same kernels on the same addresses, and no line of Python.

A capture writes down the kernels of a step with the tensors that they read and write, and leaves all memory as it was.
A replay runs these kernels again. As with a graph, a weight that is in another tensor by now, or a number that was
another at the capture, is not noticed; and a step that reads a value back to the host cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = frozenset({"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"})
"""Methods of a tensor that give its values to the host. Some of them run no kernel on a CPU."""
WAITS = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
)
"""Kernels whose number or shape the host needs."""


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


class HostReads(TorchFunctionMode):
    """Refuses what gives a value to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Runs kernels, and writes them down with their outputs, and memory as it was before the first write to it.

    Args:
        restorable: `undo` will be called.

    Attributes:
        calls: each kernel with its arguments and the tensors that it made.
        before: memory that was written, by address: itself, and a copy of it as it was.
    """

    def __init__(self, *, restorable: bool) -> None:
        super().__init__()
        self.restorable = restorable
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = (
            len(args) > 1
            and isinstance(args[1], list | tuple)
            and any(getattr(x, "dtype", None) == torch.bool for x in args[1])
        )
        if name in WAITS or (name.startswith("index") and masks):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.restorable and func._schema.is_mutable:
            for tensor in inputs:
                storage = tensor.untyped_storage()
                if address(tensor) not in self.before:
                    self.before[address(tensor)] = (storage, storage.clone())
        out = func(*args, **kwargs)
        addresses = {address(tensor) for tensor in inputs}
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and address(leaf) not in addresses]
        self.calls.append((func, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        """Restore the memory that was written."""
        for storage, content in self.before.values():
            storage.copy_(content)


class RecordedSteps:
    """In the place of `CudaGraphs`.

    Attributes:
        captures: how many steps were captured.
        replays: how many times one was replayed.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.after_replay: Callable[[Any], object] = lambda state: None
        """Called with the state of the step after each replay."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Graphs.capture`."""
        kernels = Kernels(restorable=True)
        try:
            with ExitStack() as stack:
                stack.enter_context(HostReads())
                stack.enter_context(kernels)
                step()
        finally:
            kernels.undo()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, targets in kernels.calls:
                out = func(*args, **kwargs)
                fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                if targets:
                    for target, value in zip(targets, fresh, strict=True):
                        target.copy_(value)
            self.after_replay(getattr(step, "__self__", None))

        return replay


def signature(step: Callable[[], None]) -> list[str]:
    """Run a step and return its kernels: names, shapes, strides and numbers, and the addresses of what they write.

    Memory that the step itself allocates has the place of its allocation instead of an address.
    """
    kernels = Kernels(restorable=False)
    with ExitStack() as stack:
        stack.enter_context(HostReads())
        stack.enter_context(kernels)
        step()
    lines, places = [], dict[int, str]()
    for func, args, kwargs, fresh in kernels.calls:
        described = [
            (
                tuple(leaf.shape),
                leaf.stride(),
                leaf.storage_offset(),
                str(leaf.dtype),
                places.get(address(leaf), address(leaf)),
            )
            if isinstance(leaf, Tensor)
            else repr(leaf)
            for leaf in tree_leaves((args, kwargs))
        ]
        for i, tensor in enumerate(fresh):
            places[address(tensor)] = f"allocation {len(lines)}.{i}"
        lines.append(f"{func} {described}")
    return lines
