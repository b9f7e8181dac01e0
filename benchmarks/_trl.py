"""TRL's GRPOTrainer for the benchmarks: built around a tiny model, driven from outside or as a whole.

`pip install --no-deps trl==1.16.0 accelerate` beside the project's own requirements and `datasets`.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

BETA = 0.04


def constant_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward that costs nothing and differs between the members of a group."""
    return [float(i % 2) for i in range(len(completions))]


def trainer(
    model: Any,  # a model, or the folder of one, which TRL then loads again as the reference
    tokenizer: Any,
    *,
    prompts: Sequence[str] = ("0",),
    batch: int = 8,
    group: int = 8,
    accumulate: int = 1,
    max_new_tokens: int = 64,
    loss_type: str = "dapo",
    steps: int = 1,
    reward: Callable[..., list[float]] = constant_reward,
    **options: Any,
) -> Any:
    """A GRPOTrainer on the CPU in float32, with a KL term, and nothing that costs time beside the step.

    A model that has no folder gets no reference model: pass reference log-probs to `loss_of`. TRL's default
    recomputes activations; that is switched off here, in its favour.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tempfile.mkdtemp()
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "num_generations": group,
        "max_completion_length": max_new_tokens,
        "max_steps": steps,
        "beta": BETA if isinstance(model, str) else 0.0,
        "loss_type": loss_type,
        "use_bias_correction_kl": False,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
        )
    made.beta = BETA
    return made


def layout(
    prompts: Sequence[torch.Tensor],
    completions: Sequence[torch.Tensor],
    advantages: torch.Tensor,
    old: Sequence[torch.Tensor],
    ref: Sequence[torch.Tensor],
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """What TRL's trainer makes of a generation batch: prompts left padded, completions right padded, to its longest."""
    from trl.trainer.utils import pad as trl_pad

    def both(rows: Sequence[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        ones = [torch.ones_like(row) for row in rows]
        return (
            trl_pad(list(rows), padding_value=pad, padding_side=side),
            trl_pad(ones, padding_value=0, padding_side=side),
        )

    prompt_ids, prompt_mask = both(prompts, "left")
    completion_ids, completion_mask = both(completions, "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "old_per_token_logps": trl_pad(list(old), padding_value=0.0, padding_side="right"),
        "ref_per_token_logps": trl_pad(list(ref), padding_value=0.0, padding_side="right"),
        "num_items_in_batch": completion_mask.sum(),
    }


def split(inputs: dict[str, torch.Tensor], parts: int) -> list[dict[str, Any]]:
    """The trainer's own cut of a generation batch into micro-batches."""
    from trl.trainer.utils import split_tensor_dict

    return split_tensor_dict(inputs, parts)  # pyright: ignore[reportArgumentType]


def loss_of(trainer: Any, inputs: dict[str, torch.Tensor], *, micro_batches: int = 1) -> torch.Tensor:
    """The trainer's own loss of one micro-batch, with gradient."""
    trainer.current_gradient_accumulation_steps = micro_batches
    trainer.args.steps_per_generation = micro_batches
    return trainer._compute_loss(trainer.model, inputs)
