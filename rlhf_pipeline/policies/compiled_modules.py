"""Norms and MLPs compiled by `torch.compile` where tokens are scored; sampling runs the same modules eagerly.

More than 40 % of a step's time on a GPU went to elementwise kernels (`docs/gpu.md`). Whole layers are not compiled:
their attention takes segments of a packed batch and reads context variables, which would compile again for each batch.
Norms and MLPs are functions of their input alone. They are compiled once for all lengths, and the layers of a model
share the code of a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from types import MethodType
from typing import Final

import torch
from torch import Tensor, nn

from rlhf_pipeline.policies.model_parts import rounding

INDUCTOR: Final = "inductor"
_backend: ContextVar[str | None] = ContextVar("backend", default=None)
_ROWS: Final = 24
"""The number of rows of the inputs with which modules are checked."""
_HALF_PRECISION: Final = 0.03
"""The largest difference to tolerate in half precision, relative to the largest value: a few units in the last place.

Eager kernels round each product of a gate to the model's dtype, a fused kernel only the last one.
"""


@contextmanager
def compiled_by(backend: str | None) -> Iterator[None]:
    """Let the modules of `prepare_modules` run compiled within the context, in this thread; None runs them eagerly."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def compiled_as_now() -> AbstractContextManager[None]:
    """Return a context, for any thread, in which modules are compiled with the current settings."""
    return compiled_by(_backend.get())


def prepare_modules(model: nn.Module, *, backend: str = INDUCTOR) -> str | None:
    """Let the norms and the MLPs of a model be compiled within `compiled_by`, after a check of one of each kind.

    The modules stay what they are, with the same state dict. A kind is a class with the shapes of its parameters; its
    check compares the output and all gradients of an input with the eager ones.

    Args:
        model: on its device.
        backend: of `torch.compile`.

    Returns:
        Why nothing is compiled, or None.
    """
    modules = [module for module in model.modules() if _is_plain(module) and (_is_norm(module) or _is_mlp(module))]
    kinds = {(type(module), *(tuple(p.shape) for p in module.parameters())): module for module in modules}
    if not kinds:
        return "the model has no norms or MLPs of a supported form"
    for module in kinds.values():
        problem = _problem(module, backend)
        if problem is not None:
            return f"{type(module).__name__} {problem}"
    for module in modules:
        module.forward = MethodType(_forward, module)
    return None


def _forward(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    (hidden,) = (*args, *kwargs.values())
    backend, rows = _backend.get(), hidden.numel() // hidden.shape[-1]
    if backend is None or rows < 2:  # torch compiles sizes of 0 and 1 apart
        return type(module).forward(module, hidden)
    # As rows, so that padded batches and packed ones run the same code.
    flat = hidden.reshape(rows, -1)
    # The code of a view depends on the shape of its base.
    out = _compiled(type(module).forward, backend)(module, flat if flat.requires_grad else flat.data)
    return out.view(*hidden.shape[:-1], -1)


@cache
def _compiled(forward: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """Return the compiled form of a class's forward; dynamic, so that other lengths need no other code."""
    return torch.compile(forward, backend=backend, dynamic=True)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the last dimension and contains no modules."""
    weights = dict(module.named_parameters())
    is_vector = set(weights) <= {"weight", "bias"} and "weight" in weights and weights["weight"].ndim == 1
    return is_vector and type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module is made of plain linear maps and activations; adapters and experts are not."""
    parts = list(module.children())
    linear = [part for part in parts if type(part) is nn.Linear]
    non_linear = [part for part in parts if type(part) is not nn.Linear]
    is_flat = not any(list(part.parameters()) or list(part.children()) for part in non_linear)
    return type(module).__name__.endswith("MLP") and len(linear) >= 2 and is_flat


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module runs its class's forward, of one argument; torch does not compile its own classes."""
    forward = vars(module).get("forward", module.forward)
    is_own = getattr(forward, "__func__", None) in (type(module).forward, _forward)
    is_own &= not type(module).__module__.startswith("torch.")
    return is_own and len(inspect.signature(type(module).forward).parameters) == 2


def _problem(module: nn.Module, backend: str) -> str | None:
    """Compare a module's compiled form with the eager one; return what differs, or None."""
    weights = list(module.parameters())
    width = next((part.in_features for part in module.modules() if isinstance(part, nn.Linear)), weights[0].shape[-1])
    drawn = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0))
    inputs = drawn.to(weights[0].device, weights[0].dtype).requires_grad_()
    with torch.enable_grad():
        expected = _outputs(type(module).forward, module, inputs)
        try:
            compiled = _outputs(_compiled(type(module).forward, backend), module, inputs)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the module runs without it
            return f"cannot be compiled ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})"
    allowed = rounding(weights[0], fine=1e-5, coarse=_HALF_PRECISION)
    for name, computed, reference in zip(
        ("output", "input gradient", *_gradients(module)), compiled, expected, strict=True
    ):
        error = float((computed - reference).abs().max() / reference.abs().max().clamp(min=1e-12))
        if not error <= allowed:
            return f"differs when compiled: {name} by {error:.1e} (rounding explains at most {allowed:.1e})"
    return None


def _gradients(module: nn.Module) -> list[str]:
    return [f"gradient of {name}" for name, weight in module.named_parameters() if weight.requires_grad]


def _outputs(forward: Callable[..., Tensor], module: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return the output of a module, and the gradients of its weighted sum."""
    output = forward(module, inputs)
    sources = [inputs, *(weight for weight in module.parameters() if weight.requires_grad)]
    slope = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view_as(output).to(output.dtype)
    return [part.float() for part in (output.detach(), *torch.autograd.grad(output, sources, slope))]
