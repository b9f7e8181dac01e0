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
from threading import Lock
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.host_copies import HostCopies, queued_work
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
    """The content of a checkpoint of one process: the learner's own tensors, or copies of them.

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

    def changing(self) -> dict[str, Tensor]:
        """Return the tensors that steps change, each with its own name."""
        trained = {f"{_MODEL}/{name}": tensor for name, tensor in self.weights.items() if name not in self.frozen}
        return trained | {
            f"{at}/{name}": tensor for at, tensors in self.files.items() for name, tensor in tensors.items()
        }

    def with_changing(self, copied: Mapping[str, Tensor]) -> LearnerState:
        """Return the same state with other tensors for those of `changing`."""
        return replace(
            self,
            weights={name: copied.get(f"{_MODEL}/{name}", tensor) for name, tensor in self.weights.items()},
            files={file: {name: copied[f"{file}/{name}"] for name in tensors} for file, tensors in self.files.items()},
        )


class StateCopy:
    """A copy of a learner's state in host memory, made once, by the thread that writes it.

    Until it is made, the learner may compute gradients and sample, but not change its state: it calls `settle` before
    that, which waits for the thread, or makes the copy itself if the thread has not begun.

    Args:
        live: the learner's own tensors.
        copies: the memory of the previous copy, which becomes that of this one.
    """

    def __init__(self, live: LearnerState, copies: HostCopies) -> None:
        self._live, self._copies = live, copies
        self._queued = queued_work(live.changing().values())
        self._making = Lock()
        self._copied: LearnerState | None = None
        self._failure: Exception | None = None

    def settle(self) -> None:
        """Make the copy if that has not been done; `state` raises what made that fail."""
        with self._making:
            if self._copied is not None or self._failure is not None:
                return
            try:
                self._copied = self._live.with_changing(self._copies.of(self._live.changing(), self._queued))
            except Exception as error:  # noqa: BLE001 - as above
                self._failure = error

    def state(self) -> LearnerState:
        """Return the copy, made now if that has not been done; valid until the next one is made."""
        self.settle()
        if self._copied is None:
            raise self._failure or AssertionError
        return self._copied


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
        raise DataError(f"{folder} is damaged: {error}. Run `rlhf-pipeline verify` on the run.") from error
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
        raise DataError(f"{file} is damaged: {error}. Run `rlhf-pipeline verify` on the run.") from error
