"""Loading the weights of a checkpoint folder into an existing model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

_OS_ERROR = re.compile(r"os error (\d+)")


@contextmanager
def named_write_errors(folder: Path) -> Iterator[None]:
    """Turn the error of safetensors for a file that cannot be written into the OSError that it hides."""
    try:
        yield
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise OSError(f"{folder}: {error}") from error
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(folder)) from error


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint folder in place."""
    if hasattr(model, "peft_config"):
        _load_adapters(path, model)
        return
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        _load_into_shards(path, model)
        return
    try:
        load_model(model, path / "model.safetensors")
    except (RuntimeError, FileNotFoundError):
        # transformers saves some architectures (mixtures of experts) under names other than the module's, and large
        # models as several files; only its own loader reverses that.
        load = getattr(type(model), "from_pretrained", None)
        if load is None:
            raise
        loaded, info = load(path, dtype=next(model.parameters()).dtype, output_loading_info=True)
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
        if wrong:
            raise RuntimeError(f"some weights do not match, for example {wrong[0]!r} ({len(wrong)} in total)") from None
        _check_shapes(model, loaded.state_dict())
        model.load_state_dict(loaded.state_dict())


def _check_shapes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Reject the weights of a model of another size by the first that does not fit."""
    for name, parameter in model.state_dict().items():
        if name in saved and saved[name].shape != parameter.shape:
            raise RuntimeError(
                f"{name} has shape {list(saved[name].shape)} in the file and {list(parameter.shape)} in the model"
            )


@torch.no_grad()
def _load_into_shards(path: Path, model: nn.Module) -> None:
    """Load whole weights into a model that several processes hold in shards."""
    saved = load_file(path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name not in saved or saved[name].shape != parameter.shape:
            raise RuntimeError(f"{name} of shape {list(parameter.shape)} is not in the file")
        copy_into(parameter, saved[name])


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a tensor, or into this process's shard of one."""
    placements: Any = getattr(target, "placements", None)
    if placements is None:
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded: Any = target
    # Every process has read the whole value, so there is nothing to send.
    whole = value.to(device=sharded.device, dtype=sharded.dtype)
    shard: Any = distribute_tensor(whole, sharded.device_mesh, placements, src_data_rank=None)
    if isinstance(target, DTensor):
        target.to_local().copy_(shard.to_local())


def _load_adapters(path: Path, model: nn.Module) -> None:
    """Load LoRA adapters in place; the frozen weights come from the definition."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    if not (path / "adapter_model.safetensors").is_file():
        raise RuntimeError("the checkpoint has no adapters, but policy.lora_rank is set")
    saved = load_file(path / "adapter_model.safetensors")
    wrong = get_peft_model_state_dict(model).keys() ^ saved.keys()
    if wrong:
        raise RuntimeError(f"some adapters do not match, for example {sorted(wrong)[0]!r} ({len(wrong)} in total)")
    set_peft_model_state_dict(model, saved)
