"""The trunk and the head of a causal language model, found and checked.

Scoring and sampling apply the head themselves, to the rows that need it. That is right only if the model's own logits
are `trunk(tokens) @ head.weight.T + head.bias`, up to one constant factor and a soft cap, which are measured. Anything
else shows in one comparison of the parts with the model's own forward pass, with logits as small as they are, as large
as they may become, and beyond any cap. A model that changes its logits in any other way is rejected. Rotary embeddings
that change with the length are read from the config: a probe of short rows does not reveal them.
"""

from __future__ import annotations

import dataclasses
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
from rlhf_pipeline.policies.logit_map import LEVELS, fitted_map, numbers_of

_LENGTH_ROPES = ("longrope", "dynamic")
"""Rotary embeddings whose frequencies change, for all tokens of a batch, when its longest row passes a limit."""
_CACHES = ("past_key_values", "cache", "cache_params")
"""The names of the cache of keys and values in transformers: the first until 5.23, the second from 5.24 on. Mamba
models use the third until 5.23."""
_PROBE_TOKENS = 64
_FITTED_TOKENS = 24
"""The number of tokens to whose logits a map is fitted. With 150,000 entries each, more would take a GiB."""
_COMPRESSED = "compressed_sparse_attention"
_CHOOSING = frozenset({_COMPRESSED, "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"})
"""Kinds of layers that attend to `index_topk` tokens or blocks; transformers 5.17 has the last two, not the second."""
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers that keep convolution or recurrent states; the hybrid ones keep keys and values as well."""
_KNOWN_CACHES = _RECURRENT | {"full_attention", "sliding_attention", "mlp", "moe"}
"""Kinds of layers whose cache the slots support: a key and a value per token, a state per row, or nothing."""


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
        takes_positions: False for a model whose layers are all recurrent: it has no positions, and needs no mask in a
            step on its states.
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
    takes_positions: bool = True

    def hidden(self, *, cache: Cache | None = None, **inputs: Any) -> Tensor:
        """Run the trunk and return its last hidden state, scaled so that the head gives the model's logits."""
        if not self.takes_positions:
            inputs.pop("position_ids", None)
            if inputs.get("attention_mask") is not None and inputs["attention_mask"].shape != inputs["input_ids"].shape:
                del inputs["attention_mask"]  # of a step: the columns of earlier tokens
        if cache is not None:
            inputs[self.cache_name] = cache
        hidden: Tensor = self.trunk(**inputs).last_hidden_state
        return hidden if self.scale == 1.0 else hidden * self.scale

    def sampling_weight(self) -> Tensor:
        """Return the head's weight in the dtype that `logits` multiplies in; cast once per call of the engine.

        float32 and float64 weights unchanged; bfloat16 and float16 also unchanged on CUDA, where a matmul of them can
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
        raise _refuse(model, "it is not a transformers model", "Pass an AutoModelForCausalLM.")
    refuse_other_directions(model)
    text_config = config.get_text_config(decoder=True)
    submodules = (getattr(core, name, None) for name in (core.base_model_prefix, "model", "transformer"))
    trunk = next((m for m in submodules if isinstance(m, nn.Module)), None)
    head = core.get_output_embeddings()
    if trunk is None or head is None:
        raise _refuse(model, "it has no language model head", "Pass an AutoModelForCausalLM.")
    if not isinstance(head, nn.Linear):
        raise _refuse_head(model, head)
    parameters = inspect.signature(trunk.forward).parameters
    cache_name = next((name for name in _CACHES if name in parameters), None)
    recurrent_alone = _kinds(text_config) == {"linear_attention"}
    needed = ("attention_mask",) if recurrent_alone else ("position_ids", "attention_mask")
    missing = [name for name in needed if name not in parameters]
    if cache_name is None:
        missing.append(_CACHES[0])
    if cache_name is None or missing:
        reason = f"its forward method accepts no {' and no '.join(missing)}"
        if "state" in parameters:
            reason += ", and its recurrent states are a separate argument, state"
        raise _refuse(
            model,
            reason,
            "Models with ALiBi positions or with states outside a Cache are not supported; use another model.",
        )
    max_positions, positions_by = _max_positions(text_config)
    parts = ModelParts(
        trunk=trunk,
        head=head,
        scale=1.0,
        soft_cap=None,
        num_layers=int(text_config.num_hidden_layers),
        num_states=_num_states(text_config),
        max_positions=max_positions,
        positions_by=positions_by,
        builds_own_mask=_builds_mask(text_config),
        cache_refusal=_cache_refusal(trunk, text_config, parameters[cache_name].annotation),
        cache_name=cache_name,
        takes_positions="position_ids" in parameters,
    )
    return _checked(model, parts, numbers_of(text_config.to_dict()))


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
        raise DefinitionError(f"{_name(model)} does not support activation checkpointing. Disable it.")
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
    """Reject peft's prompt tuning and prefix tuning, whose virtual tokens the model itself never sees."""
    configs = getattr(model, "peft_config", None)
    for name, config in (configs or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise _refuse(
                model,
                f"its adapter {name!r} ({type(config).__name__}) adds virtual tokens before the prompt",
                "Use adapters in the layers instead, such as LoRA.",
            )


def refuse_other_directions(model: nn.Module) -> None:
    """Reject a model of transformers that does not predict each token from those before it."""
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
            "Remove the head (lm_head) from the adapter's target_modules, or call merge_and_unload() first.",
        )
    if "quant" in kind.lower() or callable(getattr(head, "weight", None)):
        return _refuse(
            model,
            f"its head is quantized ({kind}), so it has no trainable weight",
            "Load the model without quantization, or exclude the head from it.",
        )
    return _refuse(model, f"its head is of type {kind}, not torch.nn.Linear", "Use a model with a linear head.")


def _max_positions(config: Any) -> tuple[int | None, str]:
    """Return the longest sequence that the model supports, and the config entry that limits it.

    Beyond its limit, a rotary embedding that depends on the longest row of a batch makes a row's scores depend on its
    neighbours, and scores sampled tokens at other frequencies than they were sampled with. Which tokens an indexed
    attention excludes depends on the length of a batch as well, through the order of equal scores.
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
            original = part.get("original_max_position_embeddings")
            limit = least(original, getattr(config, "original_max_position_embeddings", None), most)
            if limit:
                return limit, f"beyond them, its {kind} rotary embedding changes with the length of a batch"
    if _COMPRESSED in kinds and isinstance(chosen, int):
        chosen *= rates.get(_COMPRESSED, 1)  # it chooses among blocks of this many tokens
    if not _CHOOSING.isdisjoint(kinds) and least(chosen, most) != most:
        return least(chosen, most), "index_topk, beyond which its attention ignores tokens"
    return most, "max_position_embeddings"


def _builds_mask(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    uniform = (
        all(kind == "full_attention" for kind in layer_types)
        if layer_types is not None
        else getattr(config, "sliding_window", None) is None
    )
    return not uniform or implementation_of(config) != "sdpa" or bool(getattr(config, "alibi", False))


def _kinds(config: Any) -> set[str]:
    """Return the kinds of a model's layers, as its config names them."""
    return set(getattr(config, "layer_types", None) or ())


def _num_states(config: Any) -> int:
    recurrent = not _RECURRENT.isdisjoint(_kinds(config))
    return int(getattr(config, "number_of_conv_states", 1)) if recurrent else 0


def time_step_limits(trunk: nn.Module) -> set[tuple[float, ...]]:
    """Return the limits of the time steps of a trunk's recurrences (Mamba 2); empty without any."""
    limits = (getattr(layer, "time_step_limit", None) for layer in trunk.modules())
    return {tuple(limit) for limit in limits if limit is not None}


def _cache_refusal(trunk: nn.Module, config: Any, cache_type: Any) -> str | None:
    """Return why the slots cannot hold what the layers of a model keep, or None."""
    kinds = _kinds(config) - _KNOWN_CACHES
    if kinds:
        return f"its layers keep a cache of type {', '.join(sorted(kinds))}"
    own_cache = re.search(r"\w+Cache\b", str(cache_type))
    if own_cache and own_cache[0] != "DynamicCache":
        return f"it keeps its states in a custom cache, {own_cache[0]}"
    keeper = next((type(part).__name__ for part in trunk.modules() if hasattr(part, "recurrent_states")), None)
    if keeper is not None:
        return f"it keeps the states of one batch of rows in its modules ({keeper})"
    limits = time_step_limits(trunk) - {(0.0, math.inf)}
    if limits:
        low, high = min(limits)
        reason = (
            f"its recurrence limits its time steps ({low} to {high}) for complete rows, but not for single tokens "
            "(huggingface/transformers#48989)"
        )
        if tuple(getattr(config, "time_step_limit", ())) == (0.0, math.inf):
            reason += (
                "; its config has no such limit: load the model by name, or call "
                "rlhf_pipeline.policies.loading.use_config_time_steps(model) first"
            )
        return reason
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share their keys and values"
    return None


def _largest(values: Tensor) -> float:
    """Return the largest magnitude of the finite values; 0 if there are none."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if values.numel() else 0.0


def _checked(model: nn.Module, parts: ModelParts, numbers: list[float]) -> ModelParts:
    """Return the parts with the scale and the soft cap of the model's own logits; reject a model with other changes.

    Also compare two rows that differ only in their second half: if later tokens change earlier hidden states, the
    scores are not log-probs.
    """
    weight = parts.head.weight
    if weight.is_meta:
        return parts
    length = min(_PROBE_TOKENS, parts.max_positions or _PROBE_TOKENS)
    row, half = torch.arange(length, device=weight.device), length // 2
    inputs: dict[str, Any] = {
        "input_ids": torch.stack([row, torch.cat([row[:half], row[half:] + 1])]).remainder(weight.shape[0]),
        "position_ids": row.expand(2, -1),
        "use_cache": False,
    }
    try:
        with evaluated(model), torch.no_grad():
            hidden = parts.hidden(**inputs)
            if not parts.takes_positions:
                del inputs["position_ids"]
            parts, pairs = _with_logit_map(model, parts, inputs, hidden, numbers)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refuse(
            model,
            f"its forward pass over {length} tokens fails in {weight.dtype} ({reason})",
            "Check the model's config, or load the model in another dtype.",
        ) from error
    for model_logits, expected in pairs:
        error = _gap(model_logits, expected)
        if not error <= rounding(weight, fine=1e-4, coarse=5e-2):
            raise _refuse(
                model,
                f"the relative difference between its logits and head(hidden) is {error:.1%}",
                "They may differ only by a constant factor and a soft cap; use another architecture.",
            )
    change = _gap(hidden[0, :half], hidden[1, :half])
    if not change <= rounding(weight, fine=1e-5, coarse=1e-2):
        raise _refuse(
            model,
            f"later tokens change the hidden states of earlier tokens (relative change: {change:.2%})",
            "The model's attention is not causal: if its config has is_decoder, set it to True; otherwise, pass a "
            "decoder-only model.",
        )
    return parts


def _with_logit_map(
    model: nn.Module, parts: ModelParts, inputs: dict[str, Any], hidden: Tensor, numbers: list[float]
) -> tuple[ModelParts, list[tuple[Tensor, Tensor]]]:
    """Return the parts with the fitted scale and cap, and pairs of the model's own logits and theirs to compare.

    Args:
        model: the whole model.
        parts: without scale and cap.
        inputs: of its forward pass, for ids `[B, T]`.
        hidden: the trunk's last hidden states of these, `[B, T, H]`.
        numbers: of its config.
    """
    bias, sampling = parts.head.bias, parts.sampling_weight()
    offset = 0.0 if bias is None else bias.float()
    size = max(_largest(parts.logits(hidden.flatten(0, 1), sampling) - offset), 1e-6)
    most = torch.finfo(hidden.dtype).max / 16 / max(_largest(hidden), size)
    # Every token has a level, in turn, so that one more forward pass shows all of them.
    levels = torch.tensor([min(level / size, most) for level in LEVELS], dtype=hidden.dtype, device=hidden.device)
    factors = levels.repeat(hidden.shape[1] // len(levels) + 1)[: hidden.shape[1], None]
    scaled, model_logits = (
        [tensor[0, first : _FITTED_TOKENS : len(levels)] for first in range(len(levels))]
        for tensor in (hidden * factors, _head_logits(model, parts, inputs, factors))
    )
    linear = [parts.logits(level, sampling) - offset for level in scaled]
    exact = rounding(parts.head.weight, fine=1e-5, coarse=2e-3)
    scale, soft_cap = fitted_map(linear, model_logits, bias, numbers=numbers, exact=exact)
    parts = dataclasses.replace(parts, scale=scale, soft_cap=soft_cap)
    plain = model(**inputs).logits.flatten(0, 1).float()
    if soft_cap is not None:
        del model_logits[-1], scaled[-1]  # beyond the cap, where logits near 0 are all rounding
    pairs = zip([plain, *model_logits], [hidden.flatten(0, 1), *scaled], strict=True)
    return parts, [(logits, parts.logits(states * scale, sampling)) for logits, states in pairs]


def _head_logits(model: nn.Module, parts: ModelParts, inputs: dict[str, Any], factors: Tensor) -> Tensor:
    """Return the model's own logits, `[B, T, V]`, of last hidden states times factors, `[T, 1]`."""
    applied: list[nn.Module] = []

    def before_head(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        applied.append(head)
        return (inputs[0] * factors, *inputs[1:])

    def after_trunk(trunk: nn.Module, _arguments: Any, output: Any) -> Any:
        applied.append(trunk)
        output.last_hidden_state = output.last_hidden_state * factors
        return output

    for register in (
        lambda: parts.head.register_forward_pre_hook(before_head),
        lambda: parts.trunk.register_forward_hook(after_trunk),  # some apply the head's weight without calling it
    ):
        hook = register()
        try:
            logits: Tensor = model(**inputs).logits.float()
        finally:
            hook.remove()
        if applied:
            return logits
    raise ValueError("it calls neither its head nor its trunk as a module")


def _gap(first: Tensor, second: Tensor) -> float:
    """Return the difference of two tensors, relative to the size of the first.

    Diverged weights make both non-finite and pass: the sampler reports them when it sees their logits.
    """
    if not torch.equal(torch.isfinite(first), torch.isfinite(second)):
        return float("inf")
    return _largest(first - second) / (_largest(first) + 1e-6)
