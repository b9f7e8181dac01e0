"""A CUDA device that is none, for checks of sampling and learning.

Tensors say that they are on it and hold CPU data; what a real one would make of a call is written down: operations
that it refuses, and times at which the host waits for it. Streams are queues that wait for each other only where told,
and memory belongs to the stream that it was allocated on: a tensor that another one uses is refused, and of weights
those that it may find half-written. To C++ the tensors are on the CPU, since a build without CUDA
holds no others; values are real, so code that branches on them runs as it would.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen  # registers its kernels
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

CUDA = torch.device("cuda", 1)
"""Not the current device of a process, which is number 0: a call that names no number means another one."""

# Kernels whose result's shape or value the host needs.
_WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim")
# Kernels that take tensors of both devices: the rest mix with scalars alone.
_MIXES = ("copy_", "_foreach_copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
_active: list[FakeDevice] = []
_pinned = WeakTensorKeyDictionary()
_plain_apply = BackwardCFunction.apply


def _addmm(bias: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, **scales: Any) -> Tensor:
    return torch.addmm(bias.to(dtype), a.to(dtype), b.to(dtype), **scales)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, scale: float | None, grad: Any = None
) -> Any:
    """Attention of segments of `[N, heads, D]`, causal from the last key back, in float32; its gradients if asked."""
    out, gradients = torch.zeros_like(query), [torch.zeros_like(x) for x in (query, key, value)]
    groups, factor = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    for a, b, c, d in zip(*(x[i:].tolist() for x in (bounds_q, bounds_k) for i in (0, 1)), strict=False):
        q, k, v = (x.transpose(0, 1).float() for x in (query[a:b], key[c:d], value[c:d]))
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        p = ((q @ k.mT) * factor).masked_fill(~sees, -torch.inf).softmax(-1)
        out[a:b] = (p @ v).transpose(0, 1)
        if grad is None:
            continue
        g = grad[a:b].transpose(0, 1).float()
        of_scores = p * (g @ v.mT - (g * (p @ v)).sum(-1, keepdim=True)) * factor
        parts = (of_scores @ k, of_scores.mT @ q, p.mT @ g)
        for target, part, (x, y) in zip(gradients, parts, ((a, b), (c, d), (c, d)), strict=True):
            target[x:y] = part.unflatten(0, (target.shape[1], -1)).sum(1).transpose(0, 1)
    return out if grad is None else tuple(gradients)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, *rest: Any, **named: Any) -> Any:
    arguments = (
        dict(zip(("max_q", "max_k", "is_causal", "scale", "window_size", "enable_gqa"), rest, strict=False)) | named
    )
    assert (arguments["is_causal"], list(arguments["window_size"])) == (True, [-1, 0]), arguments
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    assert q.shape[-1] % 8 == 0, q.shape
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert all(x.is_contiguous() for x in (q, k, v))
    assert (arguments["max_q"], arguments["max_k"]) == (int(bounds_q.diff().max()), int(bounds_k.diff().max())), (
        arguments
    )
    assert (bounds_q[-1], bounds_k[-1]) == (len(q), len(k))
    out = _attended(q, k, v, bounds_q, bounds_k, arguments["scale"])
    return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **named: Any
) -> Any:
    bounds_q, bounds_k, _, _, _, _, *last = rest
    return _attended(q, k, v, bounds_q, bounds_k, last[0] if last else named.get("scale"), grad=grad)


# Kernels that torch has for CUDA alone.
_CPU_FORMS = {
    torch.ops.aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
    torch.ops.aten.mm.dtype_out: lambda a, b, dtype, *, out: out.copy_(torch.mm(a.to(dtype), b.to(dtype))),
    torch.ops.aten.addmm.dtype: _addmm,
    torch.ops.aten.addmm.dtype_out: lambda *args, out, **scales: out.copy_(_addmm(*args, **scales)),
    torch.ops.torch_attn._varlen_attn.default: _varlen,
    torch.ops.torch_attn._varlen_attn_backward.default: _varlen_backward,
}


class FakeStream:
    """Counts its kernels, and how many of every other stream's come before its next one."""

    current: FakeStream
    every: list[FakeStream] = []  # noqa: RUF012

    def __init__(self, device: Any = CUDA) -> None:
        if torch.device(device) != CUDA:
            note("refused", f"a stream of {device}")
        self.kernels = 0
        self.after: dict[FakeStream, int] = {}
        FakeStream.every.append(self)

    def wait_stream(self, other: FakeStream) -> None:
        for stream, count in {**other.after, other: other.kernels}.items():
            self.after[stream] = max(count, self.after.get(stream, 0))

    def uses(self, what: str, tensors: list[OnDevice], written: list[OnDevice]) -> None:
        """Queue a kernel."""
        self.kernels += 1
        for tensor in tensors:
            if tensor.stream is not self and not tensor.is_weight:
                note("refused", f"{what} of a tensor of another stream")
            self._comes_after(f"{what} of what another stream may still write", [tensor.written])
            tensor.read[self] = self.kernels
        for tensor in written:
            self._comes_after(f"{what} into what another stream may still read", list(tensor.read.items()))
            tensor.written, tensor.read = (self, self.kernels), {}

    def _comes_after(self, fault: str, uses: list[tuple[FakeStream, int]]) -> None:
        if any(by is not self and count > self.after.get(by, 0) for by, count in uses):
            note("refused", fault)

    @staticmethod
    @contextmanager
    def made_current(stream: FakeStream | None) -> Iterator[None]:
        before = FakeStream.current
        FakeStream.current = stream or before
        try:
            yield
        finally:
            FakeStream.current = before


FakeStream.current = FakeStream()


class OnDevice(Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    held: Tensor
    stream: FakeStream
    written: tuple[FakeStream, int]
    read: dict[FakeStream, int]
    is_weight: bool

    @staticmethod
    def __new__(cls, real: Tensor, requires_grad: bool = False) -> OnDevice:
        tensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="cpu",
            requires_grad=requires_grad,
        )
        tensor.held = real
        tensor.stream, tensor.is_weight = FakeStream.current, False
        tensor.written, tensor.read = (tensor.stream, tensor.stream.kernels), {}
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __array__(self, *_: Any, **__: Any) -> Any:
        note("refused", "numpy")
        return self.held.detach().numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.ndim]
        indexed = name.startswith(("index", "_index_put"))
        # Indices may be on the host; what is indexed, and the values put there, may not.
        wrong = indexed and any(x is y for x in host for y in (args[0], *args[2:3]))
        if host and (name not in _MIXES or wrong):
            note("refused", name)
        elif host and (indexed or name in ("copy_", "_foreach_copy_")):
            note("wait", f"{name} of a host tensor")
        by_mask = indexed and any(isinstance(i, Tensor) and i.dtype is torch.bool for i in tree_leaves(args[1]))
        if name in _WAITS or by_mask or func is torch.ops.aten.repeat_interleave.Tensor:
            note("wait", name)
        on_device = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        FakeStream.current.uses(name, on_device, [t for t in on_device[:1] if t is args[0] and name.endswith("_")])
        if func in _CPU_FORMS:
            for watch in _active:
                watch.kernels[name.rpartition("::")[2]] += 1
        out = _CPU_FORMS.get(func, func)(*_real(args), **_real(kwargs))
        if name == "copy_" and not isinstance(args[0], OnDevice):
            return args[0]
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, OnDevice, out))


def _real(tree: Any) -> Any:
    return tree_map_only(OnDevice, lambda x: x.held, tree)


def to_device(module: nn.Module) -> nn.Module:
    """Put the parameters and buffers of a module there, in place; tied ones stay tied."""
    FakeStream.current.kernels += 1
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    moved_tensor = moved.setdefault(id(tensor), OnDevice(tensor.detach().clone(), tensor.requires_grad))
                    moved_tensor._is_param = isinstance(tensor, nn.Parameter)  # type: ignore[attr-defined]
                    moved_tensor.is_weight = True  # type: ignore[attr-defined]
                    store[name] = moved_tensor  # type: ignore[assignment]
    return module


def note(kind: str, what: str) -> None:
    """Write down what the device would do, with the line of the project, or of the test, that asked for it."""
    for watch in _active:
        frame: Any = sys._getframe(1)
        while frame is not None and (
            "fake_device" in frame.f_code.co_filename or "rlhf_pipeline/" not in frame.f_code.co_filename
        ):
            frame = frame.f_back
        place = "?" if frame is None else f"{frame.f_code.co_filename.rpartition('rlhf_pipeline/')[2]}:{frame.f_lineno}"
        watch.events[kind, what, place] += 1


class FakeDevice(TorchFunctionMode):
    """Takes calls that name the device while it is active.

    Attributes:
        events: how often what happened where: ("refused" or "wait", what, file:line).
        kernels: how often which kernel ran that torch has for CUDA alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: Counter[tuple[str, str, str]] = Counter()
        self.kernels: Counter[str] = Counter()
        self._unread = False

    def total(self, kind: str) -> int:
        """How many events there were of a kind."""
        return sum(count for (event, _, _), count in self.events.items() if event == kind)

    def __enter__(self) -> FakeDevice:
        _active.append(self)
        self._stack = ExitStack()

        def no_inference_mode(on: bool) -> Any:  # a wrapper cannot be made an inference tensor
            return torch.no_grad() if on else torch.enable_grad()

        for name, replacement in (
            ("_C._InferenceMode", no_inference_mode),
            ("cuda.synchronize", self._synchronized),
            ("cuda.Stream", FakeStream),
            ("cuda.stream", FakeStream.made_current),
            ("cuda.current_stream", lambda device=None: FakeStream.current),
            ("cuda.reset_peak_memory_stats", lambda *_: None),
            ("cuda.max_memory_allocated", lambda *_: 0),
            ("cuda.get_device_name", lambda *_: "none"),
            # The backward pass runs functions in Python without the modes that are on: this one is put back.
            ("autograd.function.BackwardCFunction.apply", lambda node, *grads: self._again(_plain_apply, node, *grads)),
        ):
            self._stack.enter_context(mock.patch(f"torch.{name}", replacement))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        _active.remove(self)
        if self._unread:
            self.events["refused", "nobody waited for a copy to the host", "?"] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, Tensor) and name in ("to", "cuda", "cpu"):
            return self._moved(name, first, list(args[1:]), kwargs)
        if name == "pin_memory":
            _pinned[first] = True
            return first
        if isinstance(first, OnDevice) and name in ("tolist", "numpy"):
            note("wait" if name == "tolist" else "refused", name)
            return getattr(first.held.detach(), name)()
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        is_cuda = torch.device(device).type == "cuda"
        if is_cuda and torch.device(device) != CUDA:
            note("refused", f"{name} on {device}")
        if is_cuda and name in ("tensor", "as_tensor") and not isinstance(first, OnDevice):
            note("wait", f"torch.{name}")
        out = func(*args, **{**kwargs, "device": "cpu"})
        return OnDevice(out) if is_cuda and not isinstance(out, OnDevice) else out

    def _synchronized(self, device: Any = None) -> None:
        note("wait", "synchronize")
        if device is None or torch.device(device) != CUDA:
            note("refused", "synchronize of another device")
        self._unread = False
        for stream in FakeStream.every:
            stream.after = {stream_before: stream_before.kernels for stream_before in FakeStream.every}

    def _again(self, function: Any, *args: Any) -> Any:
        super().__enter__()
        try:
            return function(*args)
        finally:
            super().__exit__(None, None, None)

    def _moved(self, name: str, tensor: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = {"cuda": CUDA, "cpu": torch.device("cpu")}.get(name, kwargs.pop("device", None))
        if name == "to" and rest and isinstance(rest[0], str | torch.device):
            target = rest.pop(0)
        target = tensor.device if target is None else torch.device(target)
        if target.type == "cuda" and target != CUDA:
            note("refused", f"{name} to {target}")
        # A copy that blocks ends with a synchronisation of the stream: the host waits for all that was launched before.
        # So may one from memory that is not pinned.
        waits = not kwargs.pop("non_blocking", False) or (target.type == "cuda" and tensor not in _pinned)
        if target.type == "cuda" and not isinstance(tensor, OnDevice):
            if waits:
                note("wait", "a blocking copy to the device")
            tensor = OnDevice(tensor.detach().clone())
        elif target.type == "cpu" and isinstance(tensor, OnDevice):
            FakeStream.current.uses("a copy to the host", [tensor], [])
            if waits:
                note("wait", "a copy to the host")
            self._unread = not waits
            tensor = tensor.held.detach().clone()
        return tensor.to(*rest, **kwargs) if rest or kwargs.get("dtype") else tensor
