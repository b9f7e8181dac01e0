"""The state of a learner in several processes: each writes its shards, and any number of processes load them.

`torch.distributed.checkpoint` writes and reads the tensors. The first process creates the folder, and completes it when
all have written. A process that cannot access that folder, on another machine, sends its files to the first process.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.group import collect_files
from rlhf_pipeline.learner.lora import has_unnamed_base
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.optimizer_state import (
    RNG,
    SHARDS,
    make_state_for,
    plain_tensors,
)

_FIRST: Final = f"{RNG}/0"
"""The name of the first process's random generator; each process has one."""


def write_shards(folder: Path, *, policy: Any, optimizer: PolicyOptimizer) -> None:
    """Write this process's shards of the weights and the optimizer; every process of the group must call this.

    Args:
        folder: created by the first process.
        policy: its model's trained parameters are written in float32; its config and tokenizer as well, and the frozen
            model of adapters if no path or name leads to it.
        optimizer: its moments are written by parameter name.
    """
    dist.barrier()
    with nullcontext(folder) if folder.is_dir() else TemporaryDirectory() as place:
        tensors = _tensors(policy.model, optimizer) | {_local_rng(): torch.get_rng_state()}
        save(tensors, checkpoint_id=Path(place) / SHARDS)
        collect_files(None if Path(place) == folder else Path(place) / SHARDS, folder / SHARDS)
    if dist.get_rank() == 0:
        config = getattr(policy.model, "config", None)
        if config is not None:
            config.save_pretrained(folder)
        if policy.tokenizer is not None:
            policy.tokenizer.save_pretrained(folder)


@torch.no_grad()
def read_shards(path: Path, model: nn.Module, optimizer: PolicyOptimizer) -> None:
    """Load what `write_shards` wrote, into one process or into any number of them.

    Args:
        path: the checkpoint.
        model: whole, or in the shards of this process.
        optimizer: of the model's parameters; weights are loaded into its float32 masters if it has them.
    """
    alone = not dist.is_initialized()
    try:
        saved = FileSystemReader(path / SHARDS).read_metadata().state_dict_metadata.keys()
    except (OSError, CheckpointException) as error:
        raise DataError(f"the checkpoint {path} is damaged: its shards cannot be read ({error}).") from error
    make_state_for(optimizer, saved, "optimizer/")
    rng_key = _local_rng()
    rng = rng_key if rng_key in saved else _FIRST  # written by fewer processes
    targets = _tensors(model, optimizer) | {rng: torch.get_rng_state()}
    missing = sorted(targets.keys() ^ {name for name in saved if not name.startswith(RNG) or name == rng})
    if missing:
        raise DataError(
            f"the checkpoint {path} belongs to another model (differing tensors: {len(missing)}, for example "
            f"{missing[0]!r})."
        )
    try:
        with warnings.catch_warnings():
            # A single process is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(targets, checkpoint_id=path / SHARDS, no_dist=alone)
    except (CheckpointException, ValueError, RuntimeError) as error:
        raise DataError(f"the checkpoint {path} is damaged or belongs to another model: {error}") from error
    torch.set_rng_state(targets[rng])
    for name, parameter in model.named_parameters():
        if name in optimizer.masters:
            parameter.copy_(optimizer.masters[name])


def _tensors(model: nn.Module, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, without copies: shards stay shards."""
    complete = not hasattr(model, "peft_config") or has_unnamed_base(model)
    tensors = {
        f"model/{name}": optimizer.stepped.get(name, parameter).detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or complete
    }
    for name, tensor in optimizer.stepped.items():
        for moment, value in optimizer.inner.state.get(tensor, {}).items():
            tensors |= plain_tensors(f"optimizer/{name}/{moment}", value)
    return tensors


def _local_rng() -> str:
    """Return the name of this process's random generator among the tensors."""
    return f"{RNG}/{dist.get_rank() if dist.is_initialized() else 0}"
