"""The trunk and the head of a causal language model, found and checked.

Scoring and sampling apply the head themselves, to the rows that need it. That is right only if the model's own logits
are `trunk(tokens) @ head.weight.T + head.bias`, up to one constant factor and a soft cap. Soft caps and rotary
embeddings that change with the length are read from the config: a probe of an untrained model does not reveal them.
Anything else shows in one comparison of the parts with the model's own forward pass, with logits as small as they are
and as large as they may become. A model that changes its logits in any other way is refused by name.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.attention_name import implementation_of

# Config fields with which models of transformers scale their logits: 1 multiplies by the field's value, -1 divides.
_SCALES = {
    "logit_scale": 1,  # Cohere
    "logits_scaling": -1,  # Granite
    "lm_head_multiplier": 1,  # Falcon-H1
}
_SOFT_CAPS = ("final_logit_softcapping", "final_logit_soft_cap", "logits_soft_cap", "output_logit_soft_cap")
"""Config fields with which models of transformers cap their logits; Gemma 2 has the first."""
_OTHER_CAPS = re.compile("attn|attention|router|gate|mlp|moe")
_LENGTH_ROPES = ("longrope", "dynamic")
"""Rotary embeddings whose frequencies change, for all tokens of a batch, when its longest row passes a limit."""
_CACHES = ("past_key_values", "cache")
"""What transformers calls the cache of keys and values: the first until 5.23, the second from 5.24 on."""
_PROBE_TOKENS = 64
_PROBE_LOGIT = 60.0
_COMPRESSED = "compressed_sparse_attention"
_CHOOSING = frozenset({_COMPRESSED, "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"})
"""Kinds of layers that attend to `index_topk` tokens or blocks; transformers 5.17 has the last two for the second."""
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers that keep convolution or recurrent states; the hybrid ones keep keys and values as well."""
_KNOWN_CACHES = _RECURRENT | {"full_attention", "sliding_attention", "mlp", "moe"}
"""Kinds of layers whose cache is what the slots hold: a key and a value per token, a state per row, or nothing."""


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model that scoring and sampling use.

    Attributes:
        trunk: maps token ids to hidden states `[B, T, H]`, final norm included.
        head: the linear map to the vocabulary.
        scale: logits are `scale * (hidden @ weight.T) + bias`; 1.0 for most models.
        soft_cap: logits `z` become `soft_cap * tanh(z / soft_cap)`; None for most models.
        num_layers: decoder layers.
        num_states: the most states of one kind that a layer with a recurrence keeps of a row; 0 without such layers.
        max_positions: the longest sequence that the model supports; None if its config names none.
        positions_by: the source of `max_positions` in the config, for messages.
        builds_own_mask: the model must build its attention mask from a `[rows, columns]` mask in every step, because
            its layers differ in what they attend to.
        cache_refusal: why the slot engine cannot drive this model, or None.
        cache_name: what the trunk's `forward` calls its cache of keys and values.
    """

    trunk: nn.Module
    head: nn.Linear
    scale: float
    soft_cap: float | None
    num_layers: int
    num_states: int
    max_positions: int | None
    positions_by: str
    builds_own_mask: bool
    cache_refusal: str | None
    cache_name: str

    def hidden(self, *, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """Run the trunk and return its last hidden state, scaled so that the head gives the model's logits."""
        if cache is not None:
            inputs[self.cache_name] = cache
        hidden: Tensor = self.trunk(**inputs).last_hidden_state
        return hidden if self.scale == 1.0 else hidden * self.scale

    def sampling_weight(self) -> Tensor:
        """Return the head's weight in the dtype that `logits` multiplies in; cast once per call of the engine.

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
            logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias)
        else:
            logits = torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32)
            logits = logits if bias is None else logits.add_(bias.float())
        return logits if self.soft_cap is None else soft_capped(logits, self.soft_cap)


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _refuse(model: nn.Module, reason: str, advice: str) -> DefinitionError:
    return DefinitionError(f"CausalLMPolicy cannot use {_name(model)}: {reason}. {advice}")


def find_parts(model: nn.Module) -> ModelParts:
    """Find trunk and head of `model` and check them against its own logits."""
    _refuse_virtual_tokens(model)
    core: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(core, "config", None)
    if config is None or not hasattr(core, "get_output_embeddings"):
        raise _refuse(model, "it is not a model of transformers", "Pass an AutoModelForCausalLM.")
    refuse_other_directions(model)
    text_config = config.get_text_config(decoder=True)
    named = (getattr(core, name, None) for name in (core.base_model_prefix, "model", "transformer"))
    trunk = next((m for m in named if isinstance(m, nn.Module)), None)
    head = core.get_output_embeddings()
    if trunk is None or head is None:
        raise _refuse(model, "it has no language model head", "Pass an AutoModelForCausalLM.")
    if not isinstance(head, nn.Linear):
        raise _refuse_head(model, head)
    known = inspect.signature(trunk.forward).parameters
    cache_name = next((name for name in _CACHES if name in known), None)
    missing = [name for name in ("position_ids", "attention_mask") if name not in known]
    if cache_name is None:
        missing.append(_CACHES[0])
    if cache_name is None or missing:
        raise _refuse(
            model,
            f"its forward takes no {' and no '.join(missing)}",
            "Models whose layers are all recurrent, and those with ALiBi positions, are not supported.",
        )
    soft_cap = _soft_cap(model, text_config)
    scale = 1.0
    for field, power in _SCALES.items():
        value = getattr(text_config, field, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != 1.0:
            scale *= float(value) ** power
    if scale != 1.0 and head.bias is not None:
        raise _refuse(model, "it scales its logits and has a head bias", "Remove one of the two.")
    max_positions, positions_by = _max_positions(text_config)
    parts = ModelParts(
        trunk=trunk,
        head=head,
        scale=scale,
        soft_cap=soft_cap,
        num_layers=int(text_config.num_hidden_layers),
        num_states=_num_states(text_config),
        max_positions=max_positions,
        positions_by=positions_by,
        builds_own_mask=_builds_own_mask(text_config),
        cache_refusal=_cache_refusal(text_config, _time_step_limits(trunk, text_config)),
        cache_name=cache_name,
    )
    _check_logits(model, parts, int(head.weight.shape[0]))
    return parts


def rounding(weight: Tensor, *, fine: float, coarse: float) -> float:
    """Return the relative difference to tolerate between two computations of the same value in a model's precision.

    Args:
        weight: a weight of the model, for its dtype and device.
        fine: the tolerance for float32 and float64.
        coarse: the tolerance for half precisions; TensorFloat-32 gets a tenth of it.
    """
    if weight.dtype not in (torch.float32, torch.float64):
        return coarse
    rounded = weight.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return max(fine, coarse / 10) if rounded else fine


@contextmanager
def evaluated(module: Any) -> Iterator[None]:
    """Put a module in eval mode (dropout off) and restore each part's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()] if isinstance(module, nn.Module) else []
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def switch_recomputation(model: nn.Module, enabled: bool, options: dict[str, Any]) -> None:
    """Make transformers recompute the layers that are in training mode, or stop doing so."""
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


def recomputes(model: nn.Module) -> bool:
    """Return whether any layer of a model is computed again in the backward pass."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing and layer.training:
            return True
    return False


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(logits / cap)`, computed in place."""
    return logits.div_(cap).tanh_().mul_(cap)


def _refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse peft's prompt tuning and prefix tuning, whose virtual tokens the model itself never sees."""
    configs = getattr(model, "peft_config", None)
    for name, config in (configs or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise _refuse(
                model,
                f"its adapter {name!r} ({type(config).__name__}) puts virtual tokens before the prompt",
                "Use adapters in the layers instead, such as LoRA.",
            )


def refuse_other_directions(model: nn.Module) -> None:
    """Refuse a model of transformers that does not predict each token from those before it."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(model, "it is an encoder-decoder model", "Pass a decoder-only model.")
    if getattr(config, "model_type", None) == "xlnet":
        raise _refuse(model, "it predicts tokens in a permuted order", "Pass a decoder-only model.")


def _refuse_head(model: nn.Module, head: nn.Module) -> DefinitionError:
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    if hasattr(head, "base_layer"):
        return _refuse(
            model,
            f"its head has an adapter ({kind})",
            "Leave the head (lm_head) out of the adapter's target_modules, or call merge_and_unload() first.",
        )
    if "quant" in kind.lower() or callable(getattr(head, "weight", None)):
        return _refuse(
            model,
            f"its head is quantized ({kind}), and so has no weight to learn with",
            "Load the model without quantization, or leave the head out of it.",
        )
    return _refuse(model, f"its head is a {kind}, not a torch.nn.Linear", "Use a model with a linear head.")


def _soft_cap(model: nn.Module, config: Any) -> float | None:
    """Return the cap of the final logits that the config names."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    caps = {name: value for name, value in fields.items() if re.search("soft_?cap", name) and value is not None}
    final = {name: value for name, value in caps.items() if not _OTHER_CAPS.search(name)}
    unknown = sorted(final.keys() - set(_SOFT_CAPS))
    if unknown or len(final) > 1:
        name = (unknown or sorted(final))[0]
        raise _refuse(
            model,
            f"its config has {name}={final[name]}, a cap that is not known here",
            f"Known are {', '.join(_SOFT_CAPS)}, one at a time.",
        )
    return float(next(iter(final.values()))) if final else None


def _max_positions(config: Any) -> tuple[int | None, str]:
    """Return the longest sequence that the model supports, and the config entry that limits it.

    Beyond its limit, a rotary embedding that depends on the longest row of a batch makes a row's scores depend on its
    neighbours, and scores sampled tokens at other frequencies than they were sampled with. Which tokens an indexed
    attention leaves out depends on the length of a batch as well, through the order of equal scores.
    """

    def least(*values: Any) -> int | None:
        return min((int(x) for x in values if isinstance(x, int) and x > 0), default=None)

    most, chosen = least(getattr(config, "max_position_embeddings", None)), getattr(config, "index_topk", None)
    kinds, rates = getattr(config, "layer_types", None) or (), getattr(config, "compress_rates", None) or {}
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    for part in parts:
        kind = part.get("rope_type", part.get("type"))
        if kind in _LENGTH_ROPES:
            given = part.get("original_max_position_embeddings")
            limit = least(given, getattr(config, "original_max_position_embeddings", None), most)
            if limit:
                return limit, f"where its rotary embedding ({kind}) changes with the length of a batch"
    if _COMPRESSED in kinds and isinstance(chosen, int):
        chosen *= rates.get(_COMPRESSED, 1)  # it chooses among blocks of this many tokens
    if not _CHOOSING.isdisjoint(kinds) and least(chosen, most) != most:
        return least(chosen, most), "index_topk, beyond which its attention leaves tokens out"
    return most, "max_position_embeddings"


def _builds_own_mask(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    uniform = (
        all(kind == "full_attention" for kind in layer_types)
        if layer_types is not None
        else getattr(config, "sliding_window", None) is None
    )
    return not uniform or implementation_of(config) != "sdpa" or bool(getattr(config, "alibi", False))


def _num_states(config: Any) -> int:
    recurrent = not _RECURRENT.isdisjoint(getattr(config, "layer_types", None) or ())
    return int(getattr(config, "number_of_conv_states", 1)) if recurrent else 0


def _time_step_limits(trunk: nn.Module, config: Any) -> set[tuple[float, ...]]:
    """Return the limits of the time steps of a trunk's recurrences, after giving them those of the config.

    In transformers, Nemotron-H takes `time_step_min`, a setting for random weights, for its lower limit
    (huggingface/transformers#48989); its published code and vLLM do not.
    """
    found: set[tuple[float, ...]] = set()
    layer: Any
    for layer in trunk.modules():
        if getattr(layer, "time_step_limit", None) is not None:
            own: Any = getattr(config, "time_step_limit", None) or layer.time_step_limit
            layer.time_step_limit = tuple(own)
            found.add(tuple(own))
    return found


def _cache_refusal(config: Any, limits: set[tuple[float, ...]]) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_CACHES
    if kinds:
        return f"its layers keep a cache of the kind {', '.join(sorted(kinds))}"
    if limits - {(0.0, math.inf)}:
        return "its recurrence limits its time steps in whole rows, and not in single steps"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share their keys and values"
    return None


def _largest(values: Tensor) -> float:
    """Return the largest magnitude of the finite values; 0 if there are none."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if values.numel() else 0.0


def _check_logits(model: nn.Module, parts: ModelParts, vocab: int) -> None:
    """Compare head(trunk(x)) with the model's own logits, as they are and with the head's input scaled up.

    Also compare two rows that differ only in their second half: if later tokens change earlier hidden states, the
    scores are not log-probs.
    """
    weight = parts.head.weight
    if weight.is_meta:
        return
    length = min(_PROBE_TOKENS, parts.max_positions or _PROBE_TOKENS)
    row, half = torch.arange(length, device=weight.device), length // 2
    inputs: dict[str, Any] = {
        "input_ids": torch.stack([row, torch.cat([row[:half], row[half:] + 1])]).remainder(vocab),
        "position_ids": row.expand(2, -1),
        "use_cache": False,
    }
    try:
        with evaluated(model), torch.no_grad():
            hidden = parts.hidden(**inputs)
            pairs = [*_logit_pairs(model, parts, inputs, hidden)]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refuse(
            model,
            f"its forward pass of {length} tokens fails in {weight.dtype} ({reason})",
            "Check its config, or load it in another dtype.",
        ) from error
    for own, expected in pairs:
        error = _gap(own, expected)
        if not error <= rounding(weight, fine=1e-4, coarse=5e-2):
            raise _refuse(
                model,
                f"its logits differ from head(hidden) by {error:.1%} of their size",
                "It changes its logits in a way that is not known here; use another architecture.",
            )
    change = _gap(hidden[0, :half], hidden[1, :half])
    if not change <= rounding(weight, fine=1e-5, coarse=1e-2):
        raise _refuse(
            model,
            f"later tokens change its hidden states of earlier ones, by {change:.2%} of their size",
            "Its attention is not causal: set is_decoder in its config if it has that, or pass a decoder-only model.",
        )


def _logit_pairs(
    model: nn.Module, parts: ModelParts, inputs: dict[str, Any], hidden: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's own logits and the logits of its parts, first as they are, then scaled up."""
    hidden, sampling = hidden.flatten(0, 1), parts.sampling_weight()
    ours = parts.logits(hidden, sampling)
    factor = _PROBE_LOGIT / max(_largest(ours), 1e-6)
    seen: list[float] = []

    def scale_up(_head: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(factor)
        return (given[0] * factor, *given[1:])

    yield model(**inputs).logits.flatten(0, 1).float(), ours
    hook = parts.head.register_forward_pre_hook(scale_up)
    try:
        loud = model(**inputs).logits.flatten(0, 1).float()
    finally:
        hook.remove()
    if seen:  # else the model applies its head's weight without calling the head
        yield loud, parts.logits(hidden * factor, sampling)


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the difference of two tensors, relative to the size of the first.

    Diverged weights make both non-finite and pass: the sampler reports them when it sees their logits.
    """
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    return _largest(one - other) / (_largest(one) + 1e-6)
