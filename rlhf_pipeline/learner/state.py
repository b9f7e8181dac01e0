"""The state of a learner as files in a folder, without pickle: weights, optimizer, random generator.

    config.json, tokenizer files, model.safetensors    a checkpoint folder that `from_pretrained` loads
    adapter_config.json, adapter_model.safetensors     instead, if LoRA adapters are trained
    optimizer.safetensors                              by parameter name: moments, float32 master weights; RNG state
    optimizer.json                                     the optimizer's parameter groups
    reference.safetensors                              the reference model, if it moves
    proximal.safetensors                               the proximal policy's log-probs, if the loss reads them
    uses.safetensors                                   how often trajectories were used
    shards/                                            instead of weights and optimizer, if several processes
                                                       write them (`sharded_state`)

`run.checkpoint` completes, checks and finds the folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_pipeline.config import Learn
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.weight_files import copy_into, load_weights, named_write_errors

SHARDS: Final = "shards"
"""The folder that several processes write together."""

RNG: Final = "rng/torch"
"""The name of the state of torch's random generator among the tensors."""
_MASTER: Final = "master"
_GROUPS: Final = "optimizer.json"


def write_state(folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
    """Write weights, optimizer and the state of torch's random generator into a folder.

    Args:
        folder: an empty folder.
        policy: its model and tokenizer are written with `save_pretrained`.
        optimizer: its tensors are written by parameter name.

    Raises:
        OSError: the disk is full.
    """
    policy.save_pretrained(folder)
    saved = optimizer_tensors(optimizer)
    saved[RNG] = torch.get_rng_state()
    with named_write_errors(folder):
        save_file(saved, folder / "optimizer.safetensors")
    write_groups(folder, optimizer)


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `NAME.safetensors`, which `read_tensors` reads.

    Raises:
        OSError: the disk is full.
    """
    copies = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    with named_write_errors(folder):
        save_file(copies, folder / f"{name}.safetensors")


def read_state(folder: Path, *, policy: TokenPolicy, optimizer: PolicyOptimizer) -> None:
    """Load in place what `write_state` or `write_shards` wrote.

    Raises:
        DataError: a file is missing or damaged, or the folder belongs to another model.
    """
    groups = read_groups(folder)  # fails before anything is changed
    if (folder / SHARDS).is_dir():
        from rlhf_pipeline.learner.sharded_state import read_shards

        read_shards(folder, policy.model, optimizer, groups)
        return
    with _named_read_errors(folder):
        load_weights(folder, policy.model)
        tensors = load_file(folder / "optimizer.safetensors")
    generator = tensors.pop(RNG)
    load_optimizer(optimizer, tensors, groups)
    torch.set_rng_state(generator)


def read_weights(folder: Path, *, policy: TokenPolicy, learn: Learn) -> None:
    """Load in place only the weights, to sample with them.

    Args:
        folder: what `write_state` or `write_shards` wrote.
        policy: of the same model.
        learn: the settings of the optimizer, without which shards cannot be read.

    Raises:
        DataError: a file is missing or damaged, or the folder belongs to another model.
    """
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


def optimizer_groups(optimizer: PolicyOptimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, with parameters by name."""
    name_of = {id(tensor): name for name, tensor in optimizer.stepped.items()}
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.inner.param_groups
    ]


def write_groups(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Write the parameter groups of an optimizer."""
    groups = optimizer_groups(optimizer)
    (folder / _GROUPS).write_text(json.dumps(groups, indent=1), encoding="utf-8")


def read_groups(folder: Path) -> list[dict[str, Any]]:
    """Return what `write_groups` wrote.

    Raises:
        DataError: it is missing or not JSON.
    """
    try:
        groups = json.loads((folder / _GROUPS).read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{folder} is damaged: {_GROUPS}: {error}. Run `rlhf-pipeline verify` on its run.") from error
    return groups


def read_tensors(folder: Path, name: str) -> dict[str, Tensor] | None:
    """Return the tensors that `write_tensors` wrote under a name, or None if there are none.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / f"{name}.safetensors"
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged: {error}. Run `rlhf-pipeline verify` on its run.") from error


def optimizer_tensors(optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `name/moment`.

    Moments in a tensor subclass (8 bits) are split into parts: `name/moment/part`. Master weights are `name/master`.
    """
    name_of = {id(tensor): name for name, tensor in optimizer.stepped.items()}
    tensors: dict[str, Tensor] = {}
    for tensor, values in optimizer.inner.state.items():
        for key, value in values.items():
            tensors |= {k: v.clone() for k, v in plain_tensors(f"{name_of[id(tensor)]}/{key}", value).items()}
    return tensors | {f"{name}/{_MASTER}": m.detach().cpu().clone() for name, m in optimizer.masters.items()}


def plain_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return a value of an optimizer's state as plain tensors by name."""
    if not isinstance(value, Tensor):
        return {name: torch.tensor(value)}
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    if flatten is None or hasattr(value, "placements"):  # a shard stays a shard
        return {name: value.detach().contiguous()}
    found: dict[str, Tensor] = {}
    for part in flatten()[0]:
        found |= plain_tensors(f"{name}/{part}", getattr(value, part))
    return found


def load_optimizer(optimizer: PolicyOptimizer, tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
    """Restore what `optimizer_tensors` and `optimizer_groups` returned.

    Raises:
        DataError: the optimizer steps other tensors, or is of another kind.
    """
    load_groups(optimizer.inner, groups)
    _load_masters(optimizer, tensors)
    _fill_state(optimizer, tensors)


def load_groups(inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Load the options of an optimizer's parameter groups.

    Raises:
        DataError: the groups hold other numbers of parameters.
    """
    for group, saved in zip(inner.param_groups, groups, strict=True):
        names = saved.pop("params")
        if len(names) != len(group["params"]):
            raise DataError(f"the checkpoint optimizes {len(names)} parameters; this run has {len(group['params'])}.")
        for key, value in saved.items():  # JSON has turned tuples into lists and tensors into numbers
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


@torch.no_grad()
def _load_masters(optimizer: PolicyOptimizer, tensors: dict[str, Tensor]) -> None:
    optimizer.copy_from_parameters()  # a checkpoint without masters
    for key in [key for key in tensors if key.endswith(f"/{_MASTER}")]:
        value, name = tensors.pop(key), key.removesuffix(f"/{_MASTER}")
        # A parameter that is float32 now takes the master's exact value instead of the rounded weight.
        copy_into(optimizer.stepped[name], value)


def make_state_for(optimizer: PolicyOptimizer, saved: Collection[str], prefix: str = "") -> None:
    """Create moments of the optimizer's own form, to be loaded into, for the tensors that have saved moments.

    Args:
        optimizer: its current state is dropped.
        saved: the saved names; a moment's is `PREFIX` and `name/moment`.
        prefix: the prefix of the optimizer's names.
    """
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
    wanted = set(tensors)
    make_state_for(optimizer, wanted)
    for name, tensor in optimizer.stepped.items():
        values = optimizer.inner.state.get(tensor, {})
        for moment, value in list(values.items()):
            for key, part in plain_tensors(f"{name}/{moment}", value).items():
                if key not in tensors or tensors[key].shape != part.shape:
                    raise DataError(
                        f"the checkpoint's optimizer has no {key} of shape {list(part.shape)}: it was saved under "
                        "another learn.optimizer. Resume with the recorded one."
                    )
                if isinstance(value, Tensor):
                    copy_into(part, tensors[key])
                else:
                    values[moment] = type(value)(tensors[key].item())
                wanted.discard(key)
    if wanted:
        raise DataError(
            f"the checkpoint's optimizer has {sorted(wanted)[0]}, which this one does not: it was saved under another "
            "learn.optimizer. Resume with the recorded one."
        )
