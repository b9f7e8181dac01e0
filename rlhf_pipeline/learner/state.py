"""The state of a learner as files in a folder, without pickle: weights, optimizer, random generator.

    config.json, tokenizer files, model.safetensors    a checkpoint folder that `from_pretrained` loads
    adapter_config.json, adapter_model.safetensors     instead, if LoRA adapters are trained
    optimizer.safetensors                              by parameter name: moments, float32 master weights; RNG state
    reference.safetensors                              the reference model, if it moves
    proximal.safetensors                               the proximal policy's log-probs, if the loss reads them
    uses.safetensors                                   how often trajectories were used
    shards/                                            instead of weights and optimizer, if several processes
                                                       write them (`sharded_state`)

`run.checkpoint` completes, checks and finds the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.optimizer_state import (
    RNG,
    SHARDS,
    load_optimizer,
    optimizer_tensors,
)
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.weight_files import load_weights, named_write_errors


def write_state(folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
    """Write weights, optimizer and the state of torch's random generator into a folder."""
    policy.save_pretrained(folder)
    saved = optimizer_tensors(optimizer)
    saved[RNG] = torch.get_rng_state()
    with named_write_errors(folder):
        save_file(saved, folder / "optimizer.safetensors")


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `NAME.safetensors`, which `read_tensors` reads."""
    copies = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    with named_write_errors(folder):
        save_file(copies, folder / f"{name}.safetensors")


def read_state(folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
    """Load in place what `write_state` or `write_shards` wrote."""
    if (folder / SHARDS).is_dir():
        from rlhf_pipeline.learner.sharded_state import read_shards  # imports torch.distributed.checkpoint

        read_shards(folder, policy.model, optimizer)
        return
    with _named_read_errors(folder):
        tensors = load_file(folder / "optimizer.safetensors")  # first: if it is gone, nothing has changed
        load_weights(folder, policy.model)
    generator = tensors.pop(RNG)
    load_optimizer(optimizer, tensors)
    torch.set_rng_state(generator)


def read_weights(folder: Path, *, policy: TokenPolicy, learn: Learn) -> None:
    """Load in place only the weights, to sample with them."""
    if (folder / SHARDS).is_dir():
        read_state(folder, policy=policy, optimizer=PolicyOptimizer(policy.model, learn))
        return
    with _named_read_errors(folder):
        load_weights(folder, policy.model)


@contextmanager
def _named_read_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, FileNotFoundError) as error:
        raise DataError(f"{folder} is damaged: {error}. Run `rlhf-pipeline verify` on its run.") from error
    except RuntimeError as error:
        raise DataError(f"the checkpoint {folder} belongs to another model: {error}") from error


def read_tensors(folder: Path, name: str) -> dict[str, Tensor] | None:
    """Return the tensors that `write_tensors` wrote under a name, or None if there are none."""
    file = folder / f"{name}.safetensors"
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged: {error}. Run `rlhf-pipeline verify` on its run.") from error
