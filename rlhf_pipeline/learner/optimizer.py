"""The optimizer of the learner: float32 master weights, moments in 8 bits or on the host, all of it in checkpoints.

A bfloat16 weight cannot take an update below 1/256 of itself, and RL's updates are smaller. So for a model held in
bfloat16 the optimizer keeps each weight in float32, sums the gradients of the micro-batches in float32, steps on those
and rounds the result back. The alternative, float32 parameters under autocast, needs about as much memory (2 bytes of
cast weights against 2 bytes of rounded ones), but reads twice the bytes per decoded token or casts every weight again
in every step, and it samples and scores with two different sets of weights. Here the sampler, the reference and the
learner all use the same bfloat16 weights.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf_pipeline.config import Learn
from rlhf_pipeline.data.upload import download, upload
from rlhf_pipeline.errors import DefinitionError

_EIGHT_BIT = (("torchao.optim", "AdamW8bit"), ("bitsandbytes.optim", "AdamW8bit"))


class PolicyOptimizer:
    """AdamW over the trainable parameters of a model.

    Gradients are summed in float32 whatever the parameters are: for a bfloat16 parameter a hook moves each
    micro-batch's gradient into a float32 buffer as soon as it is complete, and frees it.

    Attributes:
        inner: the torch optimizer.
        stepped: the tensor that `inner` steps, by parameter name: the parameter or its master.
        masters: the float32 master, by name, of each parameter that is not its own master. Saved in checkpoints.

    >>> model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> _ = model.weight.data.fill_(1.0)
    >>> optimizer = PolicyOptimizer(model, Learn(lr=1e-3))
    >>> for _ in range(4):
    ...     model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    ...     optimizer.step(1e-3)
    >>> round(optimizer.masters["weight"].item(), 4), model.weight.item()
    (0.996, 0.99609375)
    """

    def __init__(self, model: nn.Module, config: Learn) -> None:
        self.trainable_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.trainable_parameters:
            raise DefinitionError("the model has no trainable parameters: requires_grad is False for all parameters.")
        self._on_host = config.offload_optimizer
        self.masters: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        for name, parameter in self.trainable_parameters.items():
            home = torch.device("cpu") if self._on_host else parameter.device
            if parameter.dtype in (torch.float32, torch.float64) and parameter.device == home:
                continue
            master = parameter.detach().to(device=home, dtype=torch.float32, copy=True)
            self.masters[name] = master.requires_grad_()
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self._gradients, name))
        self.stepped: dict[str, Tensor] = {
            name: self.masters.get(name, p) for name, p in self.trainable_parameters.items()
        }
        self.inner = _make(self._groups(), config)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameters in one group with weight decay and one without, whatever the decay is."""
        kinds: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, tensor in self.stepped.items():
            kinds[decays(name, tensor)].append(tensor)
        groups = [{"params": kinds[True]}, {"params": kinds[False], "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def gradients(self) -> list[Tensor]:
        """Return the gradients since the last step, on the parameters' devices; float32 for those with a master."""
        gradients = [
            self._gradients.get(name) if name in self.masters else p.grad
            for name, p in self.trainable_parameters.items()
        ]
        return [gradient for gradient in gradients if gradient is not None]

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before that, float32 []."""
        gradients = self.gradients()
        norm: Any = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        if hasattr(norm, "full_tensor"):  # of gradients in shards, over all processes
            norm = norm.full_tensor()
        # Like clip_grad_norm_: scaled by 1 if nothing needs clipping, without a synchronisation on a GPU.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # One kernel for many tensors; a shard's own part is scaled.
        with torch.no_grad():
            local_parts = [g.to_local() if hasattr(g, "to_local") else g for g in cast(list[Any], gradients)]
        if local_parts:
            torch._foreach_mul_(local_parts, scale.to(local_parts[0].device))  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def step(self, lr: float) -> None:
        """Take one step at this learning rate, round the masters back to the parameters, and drop the gradients."""
        for group in self.inner.param_groups:
            _set_lr(group, lr)
        gradients = list(self._gradients.values())
        if self._on_host:
            gradients = download(gradients)
        by_name = dict(zip(self._gradients, gradients, strict=True))
        for name, master in self.masters.items():
            master.grad = by_name.get(name)
        self.inner.step()
        if self.masters:
            self.copy_to_parameters()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.inner.zero_grad(set_to_none=True)
        self._gradients.clear()
        for parameter in self.trainable_parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Round the masters to their parameters; there must be at least one."""
        parameters: list[Tensor] = [self.trainable_parameters[name] for name in self.masters]
        masters = list(self.masters.values())
        if self._on_host:
            pairs = zip(parameters, masters, strict=True)
            masters = [upload([master.to(parameter.dtype)], parameter.device)[0] for parameter, master in pairs]
        torch._foreach_copy_(parameters, masters)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Copy the parameters to the masters, after loading weights without masters."""
        for name, master in self.masters.items():
            master.copy_(self.trainable_parameters[name])

    def make_state(self) -> None:
        """Create the moments as a first step does, without other changes, so that a checkpoint can be loaded."""
        options = [(float(group["lr"]), group["weight_decay"]) for group in self.inner.param_groups]
        for group in self.inner.param_groups:
            _set_lr(group, 0.0)
            group["weight_decay"] = 0.0
        for tensor in self.stepped.values():
            tensor.grad = torch.zeros_like(tensor)
        self.inner.step()
        self.zero_grad()
        for group, (lr, weight_decay) in zip(self.inner.param_groups, options, strict=True):
            _set_lr(group, lr)
            group["weight_decay"] = weight_decay


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):  # compiled optimizers keep it in a tensor
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _move_gradient(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Add a finished gradient to its float32 sum and free it."""
    if parameter.grad is None:
        return
    if name in gradients:
        gradients[name].add_(parameter.grad)
    else:
        gradients[name] = parameter.grad.float()
    parameter.grad = None


_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb\w*)(\.|$)")


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter has weight decay: norms, biases and position embeddings have none.

    >>> decays("layers.0.mlp.up.weight", torch.zeros(2, 2)), decays("layers.0.norm.weight", torch.zeros(2))
    (True, False)
    """
    if parameter.ndim < 2 or _POSITIONS.search(name):
        return False
    return not name.endswith(("bias", "_bias"))


def _make(groups: list[dict[str, Any]], config: Learn) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw_8bit":
        return _eight_bit()(groups, **options)
    if config.offload_optimizer or all(tensor.is_cuda for group in groups for tensor in group["params"]):
        options["fused"] = True  # one kernel per step; on the host, the vectorised implementation
    return torch.optim.AdamW(groups, **options)


def _eight_bit() -> Callable[..., torch.optim.Optimizer]:
    for module, name in _EIGHT_BIT:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    raise DefinitionError(
        "learn.optimizer=adamw_8bit needs torchao or bitsandbytes, but neither can be imported. Install one: pip "
        "install torchao. Or keep learn.optimizer=adamw; --set learn.offload_optimizer=true saves more GPU memory "
        "and needs no package."
    )
