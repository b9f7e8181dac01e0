"""The state of an optimizer by parameter name: its moments and master weights.

Learning rate, betas and weight decay are no state: an optimizer has those of its definition, whatever it had when the
tensors were saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.policies.weight_files import copy_into

SHARDS: Final = "shards"
"""The folder that several processes write together."""

RNG: Final = "rng/torch"
"""The name of the state of torch's random generator among the tensors."""
_MASTER: Final = "master"


def optimizer_tensors(optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    """Return the optimizer's own tensors as `name/moment`, without copies.

    Moments in a tensor subclass (8 bits) are split into parts: `name/moment/part`. Master weights are `name/master`.
    """
    name_of = {id(tensor): name for name, tensor in optimizer.stepped.items()}
    tensors: dict[str, Tensor] = {}
    for tensor, values in optimizer.inner.state.items():
        for key, value in values.items():
            tensors |= plain_tensors(f"{name_of[id(tensor)]}/{key}", value)
    return tensors | {f"{name}/{_MASTER}": master.detach() for name, master in optimizer.masters.items()}


def plain_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return a value of an optimizer's state as plain tensors by name."""
    if not isinstance(value, Tensor):
        return {name: torch.tensor(value)}
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    if flatten is None or hasattr(value, "placements"):  # a shard stays a shard
        return {name: value.detach().contiguous()}
    tensors: dict[str, Tensor] = {}
    for part in flatten()[0]:
        tensors |= plain_tensors(f"{name}/{part}", getattr(value, part))
    return tensors


def load_optimizer(optimizer: PolicyOptimizer, tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` returned."""
    _load_masters(optimizer, tensors)
    _fill_state(optimizer, tensors)


@torch.no_grad()
def _load_masters(optimizer: PolicyOptimizer, tensors: dict[str, Tensor]) -> None:
    optimizer.copy_from_parameters()  # a checkpoint without masters
    for key in [key for key in tensors if key.endswith(f"/{_MASTER}")]:
        value, name = tensors.pop(key), key.removesuffix(f"/{_MASTER}")
        # A parameter that is float32 now takes the master's exact value instead of the rounded weight.
        copy_into(optimizer.stepped[name], value)


def make_state_for(optimizer: PolicyOptimizer, saved: Collection[str], prefix: str = "") -> None:
    """Create moments of the optimizer's own form, to be loaded into, for the tensors that have saved moments."""
    state = optimizer.inner.state
    state.clear()
    if any(name.startswith(prefix) for name in saved):
        with torch.enable_grad():
            optimizer.make_state()
    for name, tensor in optimizer.stepped.items():
        if not any(key.startswith(f"{prefix}{name}/") for key in saved):
            state.pop(tensor, None)  # never had a gradient


@torch.no_grad()
def _fill_state(optimizer: PolicyOptimizer, tensors: dict[str, Tensor]) -> None:
    """Load moments into a state of the optimizer's own form."""
    missing = set(tensors)
    make_state_for(optimizer, missing)
    for name, tensor in optimizer.stepped.items():
        values = optimizer.inner.state.get(tensor, {})
        for moment, value in list(values.items()):
            for key, part in plain_tensors(f"{name}/{moment}", value).items():
                if key not in tensors or tensors[key].shape != part.shape:
                    raise DataError(
                        f"the optimizer state of the checkpoint has no {key} of shape {list(part.shape)}: it was saved "
                        "with another learn.optimizer. Continue with the recorded optimizer."
                    )
                if isinstance(value, Tensor):
                    copy_into(part, tensors[key])
                else:
                    values[moment] = type(value)(tensors[key].item())
                missing.discard(key)
    if missing:
        raise DataError(
            f"the optimizer state of the checkpoint has {sorted(missing)[0]}, which this optimizer lacks: it was saved "
            "with another learn.optimizer. Continue with the recorded optimizer."
        )
