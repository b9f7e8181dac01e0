"""The learner on several devices: FSDP2 under torchrun, data parallel over micro-batches.

    torchrun --nproc-per-node 2 my_learner.py

Every process makes the same policy, calls `shard_policy`, and passes the result to `Learner(shards=...)`. Each reads
the same plan of the step from the store and runs its share of the micro-batches. The loss weights are those of the
whole step, and gradients are summed, never averaged. So the loss curve is that of one process, up to the order of
summation. Only the first process writes ledger and use counts. Checkpoints are written in shards and load on any number
of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.learner.group import group_device, send
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.sharded_state import write_shards
from rlhf_pipeline.losses.grpo import GRPOLossOutput
from rlhf_pipeline.policies.token_policy import TokenPolicy

T = TypeVar("T")


class _Root(nn.Module):
    """The module that FSDP wraps: inside its forward, the embedding and the head are complete.

    The policy calls the trunk and reads the head's weight by itself, so the model's own forward is never called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        return call()


class Shards:
    """A policy whose parameters are sharded over the processes of a group; made by `shard_policy`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._leads = False
        self._mirror: nn.Module | None = None
        self._mirrors = False

    @property
    def leads(self) -> bool:
        """Whether this process directs the other processes of the group."""
        return self._leads

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes what only one process may write."""
        return self.rank == 0

    def lead(self, mirror: nn.Module | None) -> None:
        """Let the first process lead; the others `follow` it. Every process must call this.

        The first process's learner then announces each step, checkpoint and load to the others. After each step and
        load, the whole weights are copied to `mirror`, for sampling.
        """
        self._leads, self._mirror, self._mirrors = self.is_first, mirror, True

    def broadcast(self, what: str, **more: Any) -> None:
        """Send the next operation to the following processes; does nothing in a process that does not lead."""
        if self._leads:
            send({"what": what, **more})

    @torch.no_grad()
    def refresh_mirror(self) -> None:
        """Copy the whole weights to the model that samples; every process must call this."""
        if not self._mirrors:
            return
        copies = dict(self._mirror.named_parameters()) if self._mirror is not None else {}
        for name, parameter in self._root.model.named_parameters():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            whole = parameter.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
            if name in copies:
                copies[name].copy_(whole)

    def check(self, config: Learn) -> None:
        """Reject options that do not work with shards."""
        refused = {
            f"learn.layout={config.layout}": config.layout not in ("auto", "padded"),
            "learn.compile=on": config.compile == "on",
            f"learn.optimizer={config.optimizer}": config.optimizer != "adamw",
            "learn.offload_optimizer=true": config.offload_optimizer,
            f"learn.reference_every={config.reference_every}": config.reference_every > 0,
        }
        for name, is_set in refused.items():
            if is_set:
                field = name.partition("=")[0]
                raise DefinitionError(
                    f"{name} does not support several processes. Keep the default of {field} under torchrun."
                )

    def run(self, call: Callable[[], T]) -> T:
        """Run a call with the embedding and the head gathered; every process must make equally many.

        A result that needs a gradient must be a tensor, or a tuple or list with tensors.
        """
        returned = self._root(call)
        if not torch.is_grad_enabled():
            # There is no backward pass to do it. Left whole, they would be used unchanged after the next step.
            self._root.reshard()  # pyright: ignore[reportCallIssue]
        return returned

    def share(self, numbers: Iterable[int]) -> list[int | None]:
        """Return which of these micro-batches this process runs; a micro-batch always belongs to the same process.

        All processes run equally many, because they gather weights together: None represents an empty one.
        """
        runs: list[list[int]] = [[] for _ in range(self.world_size)]
        for number in numbers:
            runs[number % self.world_size].append(number)
        share = runs[self.rank]
        return [*share, *[None] * (max(map(len, runs)) - len(share))]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, on the host; every process must call this."""
        total = values.to(group_device())
        dist.all_reduce(total)
        return total.cpu()

    def gather(self, outputs: dict[int, GRPOLossOutput], batches: int) -> list[GRPOLossOutput]:
        """Return the outputs of all processes in the order of the micro-batches; without gradient."""
        device, names = group_device(), GRPOLossOutput.field_names()
        table = torch.zeros(batches, len(names), dtype=torch.float64, device=device)
        is_present = torch.zeros_like(table)
        for number, output in outputs.items():
            for column, name in enumerate(names):
                value = getattr(output, name)
                if value is not None:
                    table[number, column], is_present[number, column] = value.detach().double(), 1.0
        dist.all_reduce(table)
        dist.all_reduce(is_present)
        rows = []
        for values, flags in zip(table.cpu(), is_present.cpu(), strict=True):
            fields: dict[str, Any] = {name: v for name, v, flag in zip(names, values, flags, strict=True) if flag}
            rows.append(GRPOLossOutput(**fields))
        return rows

    def exchange(self, rows_by_place: dict[int, torch.Tensor], places: list[int]) -> dict[int, torch.Tensor]:
        """Return the float32 vectors of all processes by their numbers; every process must call this."""
        sizes = torch.tensor(
            [len(rows_by_place[at]) if at in rows_by_place else 0 for at in places], device=group_device()
        )
        dist.all_reduce(sizes)
        empty = [torch.zeros(size) for size in sizes.tolist()]
        rows = [
            rows_by_place[at].float().cpu() if at in rows_by_place else row
            for at, row in zip(places, empty, strict=True)
        ]
        flat = torch.cat(rows).to(group_device())
        dist.all_reduce(flat)  # a value and zeros, so nothing is rounded
        return dict(zip(places, flat.cpu().split(sizes.tolist()), strict=True))

    def write(self, folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
        """Write weights and optimizer in shards; every process must call this. See `write_shards`."""
        write_shards(folder, policy=policy, optimizer=optimizer)

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier()


def shard_policy(policy: TokenPolicy) -> Shards:
    """Shard a policy's parameters over the process group, in place, before its learner is made.

    Every process holds a part of each float32 parameter, which is the master weight, and of the optimizer's moments.
    Layers are gathered as they are needed, in bfloat16 if the policy was in bfloat16, and gradients are summed in
    float32.
    """
    if not dist.is_initialized():
        raise DefinitionError(
            "there is no process group to shard over. Start the program with `torchrun --nproc-per-node N` and call "
            'torch.distributed.init_process_group("gloo" on CPUs, "nccl" on GPUs) first.'
        )
    model: Any = policy.model
    computed_in = policy.head_weight.dtype
    kind = policy.device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    model.float()
    precision = MixedPrecisionPolicy(
        param_dtype=None if computed_in == torch.float32 else computed_in,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # position tables stay in float32
    )
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    root: Any = fully_shard(_Root(model), mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss weights hold the counts of the whole step: gradients are summed.
            module.set_gradient_divide_factor(1.0)
            if kind == "cpu":
                module.set_force_sum_reduction_for_comms(True)
    return Shards(root)
