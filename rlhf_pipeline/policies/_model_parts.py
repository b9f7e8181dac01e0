"""The trunk and the head of a causal language model, found and checked.

Scoring and sampling apply the head themselves, to the rows that need it. That is right only if the model's own logits
are `trunk(tokens) @ head.weight.T + head.bias`, up to one constant factor. So the parts are compared with the model's
own forward pass once, on a few tokens, and a model that does something else to its logits is refused by name.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.errors import DefinitionError

# Config fields with which models of transformers scale their logits, and whether they multiply or divide by it.
_SCALES = {
    "logit_scale": 1,  # Cohere
    "logits_scaling": -1,  # Granite
    "lm_head_multiplier": 1,  # Falcon-H1
}
_UNSUPPORTED_CACHES = (
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
)


@dataclass(frozen=True)
class ModelParts:
    """What scoring and sampling need of a model.

    Attributes:
        trunk: maps token ids to hidden states `[B, T, H]`, final norm included.
        head: the linear map to the vocabulary.
        scale: logits are `scale * (hidden @ weight.T) + bias`; 1.0 for most models.
        num_layers: decoder layers.
        max_positions: the longest sequence the model was made for; None if its config names none.
        builds_own_mask: the model must build its attention mask from a `[rows, columns]` one in every step, because
            its layers differ in what they may see.
        cache_refusal: why the slot engine cannot drive this model, or None.
    """

    trunk: nn.Module
    head: nn.Linear
    scale: float
    num_layers: int
    max_positions: int | None
    builds_own_mask: bool
    cache_refusal: str | None

    def hidden(self, **inputs: Any) -> Tensor:
        """Run the trunk and return its last hidden state, scaled so that the head gives the model's logits."""
        hidden: Tensor = self.trunk(**inputs).last_hidden_state
        return hidden if self.scale == 1.0 else hidden * self.scale

    def sampling_weight(self) -> Tensor:
        """Return the head's weight in the dtype that `logits` multiplies in, made once per call of the engine.

        float32 and float64 weights as they are; bfloat16 and float16 as they are on CUDA, where a matmul of them can
        write float32, and as float32 elsewhere.
        """
        weight = self.head.weight.detach()
        return weight if weight.is_cuda or weight.dtype == torch.float64 else weight.float()

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits `[N, V]` of hidden states `[N, H]`, float32 (float64 for a float64 model).

        Args:
            hidden: `[N, H]`.
            weight: from `sampling_weight`.
        """
        bias = self.head.bias
        if weight.dtype in (torch.float32, torch.float64):
            bias = None if bias is None else bias.to(weight.dtype)
            return nn.functional.linear(hidden.to(weight.dtype), weight, bias)
        logits = torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias.float())


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _refuse(model: nn.Module, reason: str, advice: str) -> DefinitionError:
    return DefinitionError(f"CausalLMPolicy cannot use {_name(model)}: {reason}. {advice}")


def find_parts(model: nn.Module) -> ModelParts:
    """Find trunk and head of `model` and check them against its own logits.

    Args:
        model: a causal language model of transformers, or one wrapped by peft.

    Raises:
        DefinitionError: the model is of another kind, or its logits are more than a scaled linear map of its hidden
            states (softcapped, for example).
    """
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(core, "config", None)
    if config is None or not hasattr(core, "get_output_embeddings"):
        raise _refuse(model, "it is not a model of transformers", "Pass an AutoModelForCausalLM.")
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(model, "it is an encoder-decoder model", "Pass a decoder-only model.")
    text_config = config.get_text_config(decoder=True)
    named = (getattr(core, name, None) for name in (core.base_model_prefix, "model", "transformer"))
    trunk = next((m for m in named if isinstance(m, nn.Module)), None)
    head = core.get_output_embeddings()
    if trunk is None or head is None:
        raise _refuse(model, "it has no language model head", "Pass an AutoModelForCausalLM.")
    if not isinstance(head, nn.Linear):
        raise _refuse(
            model,
            f"its head is a {type(head).__name__}, not a linear layer",
            "Keep adapters off the head (lm_head), or merge them first.",
        )
    known = inspect.signature(trunk.forward).parameters
    missing = [n for n in ("position_ids", "attention_mask", "past_key_values") if n not in known]
    if missing:
        raise _refuse(
            model,
            f"its forward takes no {' and no '.join(missing)}",
            "Models with recurrent state or ALiBi positions are not supported.",
        )
    cap = getattr(text_config, "final_logit_softcapping", None)
    if cap is not None:
        raise _refuse(
            model,
            f"it caps its logits (final_logit_softcapping={cap}), so they are not linear in the hidden state",
            "Set config.final_logit_softcapping = None, or use a model without it (Gemma 3, Qwen, Llama).",
        )
    scale = 1.0
    for field, power in _SCALES.items():
        value = getattr(text_config, field, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != 1.0:
            scale *= float(value) ** power
    if scale != 1.0 and head.bias is not None:
        raise _refuse(model, "it scales its logits and has a head bias", "Remove one of the two.")
    parts = ModelParts(
        trunk=trunk,
        head=head,
        scale=scale,
        num_layers=int(text_config.num_hidden_layers),
        max_positions=_max_positions(text_config),
        builds_own_mask=_builds_own_mask(text_config),
        cache_refusal=_cache_refusal(text_config),
    )
    _check_logits(model, parts, int(head.weight.shape[0]))
    return parts


def rounding(weight: Tensor, *, fine: float, coarse: float) -> float:
    """Return how far two ways of computing the same may differ, relative to its size, in the precision of a model.

    Args:
        weight: of the model, for its dtype and device.
        fine: for float32 and float64.
        coarse: for half precisions. TensorFloat-32 lies between, a factor of ten below this.
    """
    if weight.dtype not in (torch.float32, torch.float64):
        return coarse
    rounded = weight.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return max(fine, coarse / 10) if rounded else fine


def switch_recomputation(model: nn.Module, enabled: bool, options: dict[str, Any]) -> None:
    """Have transformers recompute the layers of a model that are in training mode, or end that.

    Raises:
        DefinitionError: the model does not support it.
    """
    name = "enable" if enabled else "disable"
    switch: Any = getattr(model, f"activation_checkpointing_{name}", None) or getattr(
        model, f"gradient_checkpointing_{name}", None
    )
    if switch is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise DefinitionError(f"{_name(model)} does not support activation checkpointing. Leave it off.")
    switch(options) if enabled else switch()


def set_recomputation(model: nn.Module, on: bool) -> None:
    """Set the training flag of the decoder layers alone, which is what makes transformers recompute them.

    The modules inside a layer stay in eval mode; dropout that a layer applies by its own flag gets probability 0.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = on
            for field, value in vars(layer).items():
                if on and "dropout" in field and isinstance(value, float):
                    setattr(layer, field, 0.0)


def _max_positions(config: Any) -> int | None:
    value = getattr(config, "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _builds_own_mask(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    uniform = (
        all(kind == "full_attention" for kind in layer_types)
        if layer_types is not None
        else getattr(config, "sliding_window", None) is None
    )
    return (
        not uniform or getattr(config, "_attn_implementation", None) != "sdpa" or bool(getattr(config, "alibi", False))
    )


def _cache_refusal(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) & set(_UNSUPPORTED_CACHES)
    if kinds:
        return f"its layers keep a cache of the kind {', '.join(sorted(kinds))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share their keys and values"
    return None


def _check_logits(model: nn.Module, parts: ModelParts, vocab: int) -> None:
    """Compare head(trunk(x)) with the model's own logits on three tokens."""
    if parts.head.weight.is_meta:
        return
    ids = torch.arange(3, device=parts.head.weight.device).remainder(vocab).unsqueeze(0)
    positions = torch.arange(3, device=ids.device).unsqueeze(0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        own = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
        hidden = parts.hidden(input_ids=ids, position_ids=positions, use_cache=False)[0]
        ours = parts.logits(hidden, parts.sampling_weight())
    model.train(was_training)
    spread = float(own.abs().max()) + 1e-6
    error = float((own - ours).abs().max()) / spread
    if not error <= rounding(parts.head.weight, fine=1e-4, coarse=5e-2):
        raise _refuse(
            model,
            f"its logits differ from head(hidden) by {error:.1%} of their size",
            "It changes its logits in a way that is not known here; use another architecture.",
        )
