"""Checkpoints: one folder per saved step, whole or absent, without pickle.

    checkpoints/step-00000010/
        config.json, tokenizer files, model.safetensors    a checkpoint folder that `from_pretrained` loads
        adapter_config.json, adapter_model.safetensors     in their place where LoRA adapters are trained
        optimizer.safetensors                              by parameter name: moments, float32 master weights; RNG state
        reference.safetensors                              the reference model, where it moves
        state.json                                         step, counters, controllers, write-path state
        shards/                                            in place of weights and optimizer, where several processes
                                                           saved them (`checkpoint_sharded`)

A checkpoint is built under a temporary name, synced and renamed in. A kill at any moment leaves the earlier
checkpoints whole, and a half-written one is swept away by the next save.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.jsonl import sync_file, sync_folder

_NAME = re.compile(r"step-(\d{8})")
_RNG = "rng/torch"
_MASTER = "master"
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


class SavesPretrained(Protocol):
    """A policy: it holds a model and knows how to write a checkpoint folder."""

    model: nn.Module

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model and its tokenizer."""
        ...


@runtime_checkable
class NamedOptimizer(Protocol):
    """An optimizer that steps other tensors than the model's parameters; `learner.optimizer.PolicyOptimizer`."""

    inner: torch.optim.Optimizer
    stepped: dict[str, Tensor]
    masters: dict[str, Tensor]

    def make_state(self) -> None:
        """Make the moments and change nothing."""
        ...

    def copy_from_parameters(self) -> None:
        """Take the parameters as the masters."""
        ...


Optimizer = torch.optim.Optimizer | NamedOptimizer


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    policy: SavesPretrained,
    optimizer: Optimizer,
    state: dict[str, Any],
    keep: int,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write `folder/step-XXXXXXXX` and drop all but the newest `keep`.

    Args:
        folder: the run's `checkpoints` folder; made if absent.
        step: optimizer steps done.
        policy: its model and tokenizer are written with `save_pretrained`.
        optimizer: its tensors are written by parameter name.
        state: JSON-ready values, given back by `load_checkpoint`.
        keep: how many checkpoints to keep, this one included.
        tensors: more tensors by name, one file `KEY.safetensors` for each key.

    Returns:
        The new checkpoint's folder.

    Raises:
        OSError: the disk is full; earlier checkpoints are as they were.
    """
    with new_checkpoint(folder, step, keep=keep) as temporary:
        policy.save_pretrained(temporary)
        saved, groups = optimizer_tensors(optimizer, policy.model)
        saved[_RNG] = torch.get_rng_state()
        save_file(saved, temporary / "optimizer.safetensors")
        for name, more in (tensors or {}).items():
            copies = {key: value.detach().contiguous().clone() for key, value in more.items()}
            save_file(copies, temporary / f"{name}.safetensors")
        write_state(temporary, step, groups, state)
    return checkpoint_path(folder, step)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def temporary_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is built."""
    return folder / f".{checkpoint_path(folder, step).name}.tmp"


@contextmanager
def new_checkpoint(folder: Path, step: int, *, keep: int) -> Iterator[Path]:
    """Give a temporary folder to build a checkpoint in, and rename it in when it is whole.

    Raises:
        OSError: the disk is full; earlier checkpoints are as they were.
    """
    final, temporary = checkpoint_path(folder, step), temporary_path(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step-*.tmp"):
        shutil.rmtree(left_over)
    try:
        yield temporary
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


def write_state(folder: Path, step: int, groups: list[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Write `state.json` of a checkpoint."""
    content = json.dumps({"step": step, "param_groups": groups, **state}, indent=1)
    (folder / "state.json").write_text(content, encoding="utf-8")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(path: Path, *, policy: SavesPretrained, optimizer: Optimizer) -> dict[str, Any]:
    """Load weights, optimizer and RNG state in place and return the JSON state.

    Raises:
        MissingPathError: a file of the checkpoint is not there.
        DataError: a file is damaged, or the checkpoint belongs to another model.
    """
    state = read_state(path)  # before anything is changed
    if is_sharded(path):
        from rlhf_pipeline.learner.sharded_state import load_shards

        load_shards(path, policy.model, optimizer, state.pop("param_groups"))
        return state
    if not any((path / name).is_file() for name in _WEIGHT_FILES):
        raise MissingPathError(f"the checkpoint {path} has no model.safetensors. {_instead(path)}")
    if not (path / "optimizer.safetensors").is_file():
        raise MissingPathError(f"the checkpoint {path} has no optimizer.safetensors. {_instead(path)}")
    try:
        load_weights(path, policy.model)
        tensors = load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise DataError(f"the checkpoint {path} is damaged: {error}. {_instead(path)}") from error
    except RuntimeError as error:
        raise DataError(f"the checkpoint {path} belongs to another model: {error}") from error
    torch.set_rng_state(tensors.pop(_RNG))
    load_optimizer(optimizer, policy.model, tensors, state.pop("param_groups"))
    return state


def is_sharded(path: Path) -> bool:
    """Return True if a checkpoint was saved by several processes, in shards."""
    return (path / "shards").is_dir()


def read_state(path: Path) -> dict[str, Any]:
    """Return the JSON state of a checkpoint.

    Raises:
        MissingPathError: it has none.
        DataError: it is not JSON, or lacks what every checkpoint has.
    """
    file = path / "state.json"
    if not file.is_file():
        raise MissingPathError(f"the checkpoint {path} has no state.json. {_instead(path)}")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"the checkpoint {path} is damaged: state.json is not JSON ({error}). {_instead(path)}"
        ) from error
    if not (isinstance(state, dict) and isinstance(state.get("step"), int) and "param_groups" in state):
        raise DataError(f"the checkpoint {path} is damaged: state.json lacks step or param_groups. {_instead(path)}")
    return state


def load_tensors(path: Path, name: str) -> dict[str, Tensor] | None:
    """Return the tensors that `save_checkpoint` was given under a name, or None if there are none.

    Raises:
        DataError: the file is damaged.
    """
    file = path / f"{name}.safetensors"
    if not file.is_file():
        return None
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DataError(f"the checkpoint {path} is damaged: {file.name}: {error}. {_instead(path)}") from error


def _instead(path: Path) -> str:
    """Say what to do without a checkpoint."""
    older = [other.name for other in list_checkpoints(path.parent) if other.name < path.name]
    if older:
        return f"Delete that folder to resume from the one before it, {older[-1]}."
    return "There is no older one: restore it from a copy, or start the run again with --out OTHER_FOLDER."


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint folder in place.

    Raises:
        RuntimeError: they are those of another model.
    """
    if hasattr(model, "peft_config"):
        _load_adapters(path, model)
        return
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        _load_into_shards(path, model)
        return
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


@torch.no_grad()
def _load_into_shards(path: Path, model: nn.Module) -> None:
    """Load whole weights into a model that several processes hold in shards."""
    saved = load_file(path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            raise RuntimeError(f"{name} of shape {list(parameter.shape)} is not in it")
        copy_into(parameter, saved[name])


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a tensor, or into this process's shard of one."""
    placements: Any = getattr(target, "placements", None)
    if placements is None:
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded: Any = target
    # Every process has read the whole value, so nothing is sent.
    whole = value.to(device=sharded.device, dtype=sharded.dtype)
    own: Any = distribute_tensor(whole, sharded.device_mesh, placements, src_data_rank=None)
    if isinstance(target, DTensor):
        target.to_local().copy_(own.to_local())


def _load_adapters(path: Path, model: nn.Module) -> None:
    """Load LoRA adapters in place; the frozen weights are those of the definition."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    if not (path / "adapter_model.safetensors").is_file():
        raise RuntimeError("it has no adapters, and policy.lora_rank is set")
    saved = load_file(path / "adapter_model.safetensors")
    wrong = get_peft_model_state_dict(model).keys() ^ saved.keys()
    if wrong:
        raise RuntimeError(f"{len(wrong)} adapters do not fit, {sorted(wrong)[0]!r} among them")
    set_peft_model_state_dict(model, saved)


def parts_of(optimizer: Optimizer, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """Return the torch optimizer and the tensors that it steps, by parameter name."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, dict(model.named_parameters())
    return optimizer.inner, optimizer.stepped


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the optimizer's tensors as `name/moment`, and its groups with parameters by name.

    Moments held in a tensor subclass (8 bits) are taken apart: `name/moment/part`. Master weights are `name/master`.
    """
    inner, named = parts_of(optimizer, model)
    name_of = {id(tensor): name for name, tensor in named.items()}
    tensors: dict[str, Tensor] = {}
    for tensor, values in inner.state.items():
        for key, value in values.items():
            tensors |= {k: v.clone() for k, v in plain_tensors(f"{name_of[id(tensor)]}/{key}", value).items()}
    if not isinstance(optimizer, torch.optim.Optimizer):
        tensors |= {f"{name}/{_MASTER}": m.detach().cpu().clone() for name, m in optimizer.masters.items()}
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
        for group in inner.param_groups
    ]
    return tensors, groups


def plain_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return a value of an optimizer's state as plain tensors by name."""
    if not isinstance(value, Tensor):
        return {name: torch.tensor(value)}
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    if flatten is None or hasattr(value, "placements"):  # a shard stays one
        return {name: value.detach().contiguous()}
    found: dict[str, Tensor] = {}
    for part in flatten()[0]:
        found |= plain_tensors(f"{name}/{part}", getattr(value, part))
    return found


def load_optimizer(
    optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Put back what `optimizer_tensors` returned.

    Raises:
        DataError: the optimizer steps other tensors, or is of another kind.
    """
    inner, named = parts_of(optimizer, model)
    load_groups(inner, groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        _load_masters(optimizer, tensors)
        _fill_state(optimizer, tensors)
        return
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = named[name]
        # Adam keeps its step count on the CPU whatever the device of the parameter.
        on_parameter = value.to(parameter.device) if value.ndim else value
        inner.state[parameter][moment] = on_parameter


def load_groups(inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Load the options of an optimizer's parameter groups.

    Raises:
        DataError: the groups hold other numbers of parameters.
    """
    for group, saved in zip(inner.param_groups, groups, strict=True):
        names = saved.pop("params")
        if len(names) != len(group["params"]):
            raise DataError(f"the checkpoint optimizes {len(names)} parameters; this run has {len(group['params'])}.")
        _update_group(group, saved)


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Load the options of a parameter group; JSON has turned tuples into lists and tensors into numbers."""
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


@torch.no_grad()
def _load_masters(optimizer: NamedOptimizer, tensors: dict[str, Tensor]) -> None:
    optimizer.copy_from_parameters()  # a checkpoint without masters
    for key in [key for key in tensors if key.endswith(f"/{_MASTER}")]:
        value, name = tensors.pop(key), key.removesuffix(f"/{_MASTER}")
        # Where the parameter is float32 itself now, the master has its bits beyond the rounded weight.
        copy_into(optimizer.stepped[name], value)


@torch.no_grad()
def _fill_state(optimizer: NamedOptimizer, tensors: dict[str, Tensor]) -> None:
    """Load moments into a state that has the optimizer's own form."""
    inner = optimizer.inner
    inner.state.clear()
    if not tensors:
        return
    with torch.enable_grad():
        optimizer.make_state()
    wanted = set(tensors)
    for name, tensor in optimizer.stepped.items():
        if not any(key.startswith(f"{name}/") for key in wanted):
            inner.state.pop(tensor, None)  # never had a gradient
            continue
        values = inner.state[tensor]
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
