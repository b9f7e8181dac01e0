"""Checkpoints: one folder per saved step, whole or absent, without pickle.

    checkpoints/step-00000010/
        config.json, tokenizer files, model.safetensors    a checkpoint folder that `from_pretrained` loads
        optimizer.safetensors                              optimizer moments by parameter name, and RNG state
        state.json                                         step, counters, controllers, write-path state

A checkpoint is built under a temporary name, synced and renamed in. A kill at any moment leaves the earlier
checkpoints whole, and a half-written one is swept away by the next save.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.jsonl import sync_file, sync_folder

_NAME = re.compile(r"step-(\d{8})")
_RNG = "rng/torch"


class SavesPretrained(Protocol):
    """A policy: it holds a model and knows how to write a checkpoint folder."""

    model: nn.Module

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model and its tokenizer."""
        ...


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    policy: SavesPretrained,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-XXXXXXXX` and drop all but the newest `keep`.

    Args:
        folder: the run's `checkpoints` folder; made if absent.
        step: optimizer steps done.
        policy: its model and tokenizer are written with `save_pretrained`.
        optimizer: its tensors are written by parameter name.
        state: JSON-ready values, given back by `load_checkpoint`.
        keep: how many checkpoints to keep, this one included.

    Returns:
        The new checkpoint's folder.

    Raises:
        OSError: the disk is full; earlier checkpoints are as they were.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step-*.tmp"):
        shutil.rmtree(left_over)
    try:
        policy.save_pretrained(temporary)
        tensors, groups = _optimizer_tensors(optimizer, policy.model)
        tensors[_RNG] = torch.get_rng_state()
        save_file(tensors, temporary / "optimizer.safetensors")
        content = json.dumps({"step": step, "param_groups": groups, **state}, indent=1)
        (temporary / "state.json").write_text(content, encoding="utf-8")
        for file in temporary.rglob("*"):
            if file.is_file():
                sync_file(file)
        sync_folder(temporary)
    except SafetensorError as error:  # the library's own type hides that the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{temporary}: {error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():  # the same step again, after a resume: equal content, newer files
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(path: Path, *, policy: SavesPretrained, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load weights, optimizer and RNG state in place and return the JSON state.

    Raises:
        MissingPathError: a file of the checkpoint is not there.
        DataError: the checkpoint belongs to another model.
    """
    sharded = (path / "model.safetensors.index.json").is_file()
    for name in (*(() if sharded else ("model.safetensors",)), "optimizer.safetensors", "state.json"):
        if not (path / name).is_file():
            raise MissingPathError(
                f"the checkpoint {path} has no {name}. Delete that folder to resume from the checkpoint before it."
            )
    try:
        _load_weights(path, policy.model)
        tensors = load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise DataError(
            f"the checkpoint {path} is damaged: {error}. Delete that folder to resume from the checkpoint before it."
        ) from error
    except RuntimeError as error:
        raise DataError(f"the checkpoint {path} belongs to another model: {error}") from error
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    torch.set_rng_state(tensors.pop(_RNG))
    _load_optimizer(optimizer, policy.model, tensors, state.pop("param_groups"))
    return state


def _load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint folder in place.

    Raises:
        RuntimeError: they are those of another model.
    """
    try:
        load_model(model, path / "model.safetensors")
    except (RuntimeError, FileNotFoundError):
        # transformers writes some architectures (mixtures of experts) under other names than the module's, and large
        # models as several files; only its own loader undoes that.
        load = getattr(type(model), "from_pretrained", None)
        if load is None:
            raise
        loaded, info = load(path, dtype=next(model.parameters()).dtype, output_loading_info=True)
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} weights do not fit, {wrong[0]!r} among them") from None
        model.load_state_dict(loaded.state_dict())


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the optimizer's tensors as `name/moment`, and its groups with parameters by name."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {
        f"{name_of[id(parameter)]}/{key}": value.detach().contiguous().clone()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return tensors, groups


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    parameters = dict(model.named_parameters())
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        names = saved.pop("params")
        if len(names) != len(group["params"]):
            raise DataError(f"the checkpoint optimizes {len(names)} parameters; this run has {len(group['params'])}.")
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        # Adam keeps its step count on the CPU whatever the device of the parameter.
        on_parameter = value.to(parameter.device) if value.ndim else value
        optimizer.state[parameter][moment] = on_parameter
