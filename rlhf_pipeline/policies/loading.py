"""Loading a checkpoint folder, with errors that state what to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from rlhf_pipeline.data.store_errors import as_ours
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.policies.model_source import is_gguf
from trajectory_store.recorder.text_codec import tokenizer_at

_log = logging.getLogger("rlhf_pipeline")
_quiet_lock = threading.Lock()
_quiet: list[bool] = []
"""For each open context of `quiet_progress`, whether progress bars were enabled before it."""


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Disable the progress bars of transformers, which are pointless for a local folder.

    The switch is one for the process: it is restored when the last thread has left the context.
    """
    with _quiet_lock:
        _quiet.append(hf_logging.is_progress_bar_enabled())
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _quiet_lock:
            was_on = _quiet.pop()
            if not _quiet and was_on:
                hf_logging.enable_progress_bar()
            elif was_on:
                _quiet[0] = True


def load_model(source: str, *, local: bool, dtype: torch.dtype | str | None) -> nn.Module:
    """Load a causal language model; a local folder or GGUF file never touches the network."""
    requested: Any = "auto" if dtype is None else dtype
    try:
        with quiet_progress() if local else nullcontext():
            if local and is_gguf(source):
                return _load_gguf(Path(source), requested)
            model: nn.Module = AutoModelForCausalLM.from_pretrained(source, dtype=requested, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if not local and isinstance(error, OSError):
            raise MissingPathError(
                f"{source!r} is not a folder, and the Hugging Face hub has no model with that name "
                f"({_first_line(error)}). Check the spelling, or specify a folder that save_pretrained wrote."
            ) from error
        raise DataError(
            f"{source} cannot be loaded as a causal language model: {_first_line(error)}. "
            "Check that config.json and the weights match."
        ) from error
    except Exception as error:
        # safetensors raises its own class, derived from Exception, for a damaged file.
        if type(error).__name__ != "SafetensorError":
            raise
        raise DataError(
            f"The weights in {source} are damaged: {_first_line(error)}. Copy the checkpoint again."
        ) from error
    if use_config_time_steps(model):
        _log.warning(
            "%s: transformers limits the time steps of its recurrence by time_step_min, a setting for random weights "
            "(huggingface/transformers#48989). The time_step_limit of its config is used instead, as vLLM does.",
            source,
        )
    return model


def use_config_time_steps(model: nn.Module) -> bool:
    """Let the recurrences of a model limit their time steps as its config names it; return whether this changed any.

    For Nemotron-H, whose layers in transformers take `time_step_min`, a setting for random weights, for their lower
    limit. They limit whole rows with it, and not single steps, so no engine can sample with such a model.
    """
    limit: Any = getattr(getattr(model, "config", None), "time_step_limit", None)
    layers = [
        layer
        for layer in model.modules()
        if limit is not None and tuple(getattr(layer, "time_step_limit", None) or limit) != tuple(limit)
    ]
    for layer in layers:
        layer.time_step_limit = tuple(limit)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return bool(layers)


def _load_gguf(path: Path, dtype: Any) -> nn.Module:
    """Load the weights of a GGUF file, dequantized: they are trained, so blocks of small integers are of no use."""
    more: dict[str, Any] = {}
    if (config := getattr(transformers, "GgufConfig", None)) is not None:
        more["quantization_config"] = config(dequantize=True)  # where a kernel is installed the blocks would stay
    more["dtype"] = torch.float32 if dtype == "auto" else dtype  # a file of blocks names no dtype to train with
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(path.parent, gguf_file=path.name, local_files_only=True, **more)
    if hasattr(model.config, "quantization_config"):  # what is saved from here on is a plain folder
        del model.config.quantization_config
    return model


def load_tokenizer(source: str, *, local: bool) -> Any | None:
    """Load the tokenizer beside a model, or return None when the folder has none."""
    with as_ours():
        return tokenizer_at(source, local=local)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype of this name."""
    if not isinstance(dtype, str):
        return dtype
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise DefinitionError(f"dtype {dtype!r} is not a torch dtype. Use 'float32' or 'bfloat16'.")
    return torch_dtype


def as_id_tuple(value: Any) -> tuple[int, ...]:
    """Return token ids given as None, one id or several, as a sorted tuple without repeats."""
    if value is None:
        return ()
    if isinstance(value, Iterable):
        return tuple(sorted({int(v) for v in value}))
    return (int(value),)


def end_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Return every token that ends a completion by the generation config, the model config and the tokenizer."""
    generation = getattr(model, "generation_config", None)
    config = getattr(model, "config", None)
    model_ends = getattr(generation, "eos_token_id", None)
    if model_ends is None:
        model_ends = getattr(config, "eos_token_id", None)
    tokenizer_end = getattr(tokenizer, "eos_token_id", None)
    return tuple(sorted({*as_id_tuple(model_ends), *as_id_tuple(tokenizer_end)}))


def padding_id(model: Any, tokenizer: Any | None, *, configured: int | None, ends: tuple[int, ...]) -> int:
    """Return the padding token: the configured one, the tokenizer's, the model's, the first end token, or 0."""
    candidates = (
        configured,
        getattr(tokenizer, "pad_token_id", None),
        getattr(getattr(model, "config", None), "pad_token_id", None),
        ends[0] if ends else None,
    )
    return int(next((c for c in candidates if c is not None), 0))
