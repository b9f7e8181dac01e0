"""LoRA through peft: train small adapters, and score the reference with the adapters disabled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.loading import quiet_progress
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.policies.weight_files import named_write_errors

BASE: Final = "base"
"""The folder of a checkpoint with the base model of its adapters."""


def add_adapters(policy: TokenPolicy, *, rank: int, alpha: float, targets: str, seed: int) -> None:
    """Freeze a policy's weights and add trainable adapters, in place.

    The adapters' first matrix is drawn with `seed` and their second is zero, so the policy is unchanged until the first
    step. Adapters of a bfloat16 model are float32: they are their own master weights. The head gets none, so its
    weight gradient is never computed.
    """
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DefinitionError(
            f"policy.lora_rank={rank} needs peft, which cannot be imported ({error}). Install it: pip install peft. "
            "Or set policy.lora_rank=0 to train all weights."
        ) from error
    chosen: Any = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
    scale: Any = alpha  # peft annotates it as int, but uses it as any number
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=chosen, lora_dropout=0.0, task_type="CAUSAL_LM")
    model: Any = policy.model
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # peft calls transformers by an older name, which this project cannot change.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        try:
            policy.model = get_peft_model(model, config).eval()
        except ValueError as error:
            names = sorted(
                {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
            )
            raise DefinitionError(
                f"policy.lora_targets={targets!r}: {error} The linear modules of this model are {', '.join(names)}."
            ) from error


def has_unnamed_base(model: Any) -> bool:
    """Return whether a model has adapters of another one that no path or name leads to."""
    config = getattr(model, "peft_config", {}).get("default")
    return config is not None and not config.base_model_name_or_path


def write_unnamed_base(policy: TokenPolicy, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the frozen model of adapters to `folder / BASE` if no path or name leads to it; else do nothing.

    A model made from scratch exists nowhere else, and another version of torch may draw others from its seed. A model
    with a path is named in `adapter_config.json`, and its contents in the run's inputs.

    Args:
        policy: any policy; one without adapters is its own model.
        weights: the model's state dict, or a copy of it.
        folder: of the checkpoint.
    """
    model: Any = policy.model
    if not has_unnamed_base(model):
        return
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name
    }
    with quiet_progress(), named_write_errors(folder):
        cast(Any, model.get_base_model()).save_pretrained(folder / BASE, state_dict=base)


class AdaptersOff:
    """The reference of a LoRA policy: the same model with its adapters disabled, so no second copy is held."""

    def __init__(self, policy: TokenPolicy) -> None:
        self.policy = policy

    @torch.no_grad()
    def log_probs(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None) -> Tensor:
        """Return what `CausalLMPolicy.log_probs` returns for the frozen weights, without gradient."""
        model: Any = self.policy.model
        with model.disable_adapter():
            return self.policy.log_probs(input_ids, attention_mask, score_mask)
