"""The state of a learner as files in a folder, without pickle: weights, optimizer, random generator.

    config.json, tokenizer files, model.safetensors    a checkpoint folder that `from_pretrained` loads
    adapter_config.json, adapter_model.safetensors     instead, if LoRA adapters are trained
    base/                                              the model of the adapters, if it was made from scratch
    optimizer.safetensors                              by parameter name: moments, float32 master weights; RNG state
    reference.safetensors                              the reference model, if it moves
    proximal.safetensors                               the proximal policy's log-probs, if the loss reads them
    uses.safetensors                                   how often trajectories were used
    shards/                                            instead of weights and optimizer, if several processes
                                                       write them (`sharded_state`)

`run.checkpoint` completes, checks and finds the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.host_copies import HostCopies
from rlhf_pipeline.learner.lora import write_unnamed_base
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.optimizer_state import (
    RNG,
    SHARDS,
    load_optimizer,
    optimizer_tensors,
)
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.weight_files import load_weights, named_write_errors

_MODEL: Final = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerState:
    """What a checkpoint of one process holds: the learner's own tensors, or copies of them.

    Attributes:
        policy: has the config and the tokenizer, which no step changes.
        weights: the model's state dict.
        frozen: names of the weights that no step changes; a copy refers to them.
        files: the tensors of each other file, by its name without the suffix.
    """

    policy: TokenPolicy
    weights: Mapping[str, Tensor]
    frozen: Collection[str]
    files: Mapping[str, Mapping[str, Tensor]]

    def write(self, folder: Path) -> None:
        """Write everything into an existing folder."""
        self.policy.save_pretrained(folder, state_dict=dict(self.weights))
        write_unnamed_base(self.policy, self.weights, folder)
        write_tensors(folder, self.files)

    def copied(self, copies: HostCopies) -> LearnerState | None:
        """Return the same state in host memory, which later steps do not change; None if there is too little memory.

        Args:
            copies: the memory of the previous copy, which becomes that of this one.
        """
        changing = {name: tensor for name, tensor in self.weights.items() if name not in self.frozen}
        live = {f"{_MODEL}/{name}": tensor for name, tensor in changing.items()}
        live |= {f"{file}/{name}": tensor for file, tensors in self.files.items() for name, tensor in tensors.items()}
        if not copies.fit(live):
            return None
        copied = copies.of(live)
        return replace(
            self,
            weights={name: copied.get(f"{_MODEL}/{name}", tensor) for name, tensor in self.weights.items()},
            files={file: {name: copied[f"{file}/{name}"] for name in tensors} for file, tensors in self.files.items()},
        )


def write_tensors(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write tensors to files, each by its name without the suffix; `read_tensors` reads one of them."""
    for name, tensors in files.items():
        with named_write_errors(folder):
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, _file(folder, name))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def learner_state(
    *, policy: TokenPolicy, optimizer: PolicyOptimizer, more: Mapping[str, Mapping[str, Tensor]]
) -> LearnerState:
    """Return the state of a learner in one process, without copies.

    Args:
        policy: its weights are saved.
        optimizer: its moments and master weights are saved, with the state of torch's random generator.
        more: the tensors of further files.
    """
    model = policy.model
    return LearnerState(
        policy=policy,
        weights=model.state_dict(),
        frozen={name for name, tensor in model.named_parameters(remove_duplicate=False) if not tensor.requires_grad},
        files={"optimizer": {**optimizer_tensors(optimizer), RNG: torch.get_rng_state()}, **more},
    )


def read_state(folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
    """Load in place what `LearnerState.write` or `write_shards` wrote."""
    if (folder / SHARDS).is_dir():
        from rlhf_pipeline.learner.sharded_state import read_shards  # imports torch.distributed.checkpoint

        read_shards(folder, policy.model, optimizer)
        return
    with _named_read_errors(folder):
        tensors = load_file(_file(folder, "optimizer"))  # first: if it is gone, nothing has changed
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
    """Return the tensors of one file of `write_tensors`, or None if there is no such file."""
    file = _file(folder, name)
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged: {error}. Run `rlhf-pipeline verify` on its run.") from error
