"""Accepts TorchRL's own wrappers wherever a policy is accepted, and corrects their faults.

`TransformersWrapper` has a model in this process, so a `CausalLMPolicy` over the same weights takes its place. That
corrects faults of TorchRL 0.14.1:

- it reports log-probs at temperature 1 whatever it samples at; here both are at its temperature;
- it sets the log-prob of the first sampled token to 0;
- with `pad_model_input=False`, tokens attend to, and are scored from, other sequences in the same pack;
- its scores keep the autograd graph;
- it distinguishes padding from tokens by id, so a sampled end token is lost if `pad_token == eos_token`;
- a checkpoint's `top_k` (50 by default) truncates sampling, but not the reported log-probs.

A wrapper around an external engine (`vLLMWrapper`), or around a model that cannot be scored from its hidden states, is
called unchanged; faults that cannot be corrected from outside are rejected, see `EnginePolicy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from torchrl.modules.llm.policies.common import LLMWrapperBase as _TorchRLWrapperBase
from torchrl.modules.llm.policies.transformers_wrapper import TransformersWrapper

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.containers import CONTAINERS, LLMWrapperBase, Masks, Tokens
from rlhf_pipeline.interop.torchrl.policy import CausalLMPolicy
from rlhf_pipeline.policies.adapters import methods_are_of
from rlhf_pipeline.policies.distortions import find_distortion
from rlhf_pipeline.policies.encoding import tokenizer_with_template
from rlhf_pipeline.policies.engines.protocol import RaggedCompletions, Request
from rlhf_pipeline.policies.loading import end_token_ids
from rlhf_pipeline.policies.model_parts import find_parts

__all__ = ["EnginePolicy", "WrapperAdapter", "as_policy", "is_torchrl_wrapper"]

_SCORES = ("forward", "log_probs", "get_dist", "_get_rlhf_dist", "_get_sft_dist", "_get_generic_dist")
_DUCK = ("get_new_version", "input_mode", "generate", "tokens_key", "log_probs_key")


def is_torchrl_wrapper(model: object) -> bool:
    """Return whether a model is a TorchRL wrapper, or shaped like one, and not a policy of this package."""
    if isinstance(model, LLMWrapperBase | type):
        return False
    return isinstance(model, _TorchRLWrapperBase) or all(hasattr(model, name) for name in _DUCK)


def as_policy(model: Any, owner: str = "This") -> CausalLMPolicy | EnginePolicy:
    """Return a policy in place of a TorchRL wrapper, over the same weights.

    Args:
        model: a `TransformersWrapper`, a `vLLMWrapper` or a wrapper shaped like these; a `CausalLMPolicy` is returned
            unchanged, and a causal language model of transformers becomes one.
        owner: the caller's name, for messages.

    Raises:
        DefinitionError: the model is none of these, or it samples in a way that log-probs would not reflect.
    """
    if isinstance(model, CausalLMPolicy | EnginePolicy):
        return model
    if is_torchrl_wrapper(model):
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            return EnginePolicy(model)
        try:
            find_parts(inner)
        except DefinitionError:
            return EnginePolicy(model)  # its logits do not follow from hidden states: scored through the wrapper
        return _over_weights(model, inner)
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return CausalLMPolicy(model)
    raise DefinitionError(
        f"{owner} got an object of type {type(model).__name__}. Pass a CausalLMPolicy, a causal language model from "
        "transformers, or TorchRL's TransformersWrapper or vLLMWrapper."
    )


class WrapperAdapter:
    """Allows the core to use TorchRL's wrappers as policies and actors."""

    def matches(self, model: object) -> bool:
        """Return whether a model is a TorchRL wrapper."""
        return is_torchrl_wrapper(model)

    def policy(self, model: Any, owner: str) -> CausalLMPolicy | EnginePolicy:
        """See `as_policy`."""
        return as_policy(model, owner)

    def actor(self, model: Any) -> CausalLMPolicy | None:
        """Return a policy over the wrapper's weights; None if methods of the wrapper or the model are overridden."""
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            as_policy(model, "GRPOLoss")
            raise DefinitionError(
                f"GRPOLoss got an object of type {type(model).__name__} that wraps an engine, which provides no "
                "gradients. Train a CausalLMPolicy and send its weights to the engine."
            )
        base: Any = getattr(inner, "get_base_model", lambda: inner)()  # inside peft's wrapper
        plain = methods_are_of(model, "torchrl", _SCORES) and methods_are_of(base, "transformers", ("forward",))
        policy = as_policy(model, "GRPOLoss") if plain else None
        return policy if isinstance(policy, CausalLMPolicy) else None


def _temperature(wrapper: Any) -> float:
    """Return the temperature of a wrapper's sampling and log-probs; 0 if it samples greedily."""
    options = getattr(wrapper, "generate_kwargs", None) or {}
    value = options.get("temperature")
    if value is not None and value == 0:
        return 0.0
    if wrapper.generate and isinstance(wrapper, TransformersWrapper):
        defaults = getattr(wrapper.model, "generation_config", None)
        samples = options.get("do_sample")
        if samples is None:
            samples = bool(getattr(defaults, "do_sample", False))
        if not samples:
            return 0.0
        value = getattr(defaults, "temperature", None) if value is None else value
    return 1.0 if value is None else float(value)


def _refuse_distortions(wrapper: Any) -> None:
    options = getattr(wrapper, "generate_kwargs", None) or {}
    # The number of samples is handled separately.
    distortion = find_distortion(options.get, ignore=("num_return_sequences",)) if wrapper.generate else None
    if distortion is not None:
        raise DefinitionError(
            f"{type(wrapper).__name__} samples with {distortion.name}={distortion.value}, so its log-probs do "
            f"not match the sampled distribution. Remove {distortion.name} from its generate_kwargs."
        )


def _over_weights(wrapper: Any, model: nn.Module) -> CausalLMPolicy:
    _refuse_distortions(wrapper)
    options = dict(getattr(wrapper, "generate_kwargs", None) or {})
    ends = options.get("eos_token_id")
    # A scoring wrapper has max_new_tokens=1, which is not a user's setting.
    limit = options.get("max_new_tokens") if wrapper.generate else None
    return CausalLMPolicy(
        model,
        _tokenizer(wrapper),
        temperature=_temperature(wrapper),
        **({} if limit is None else {"max_new_tokens": int(limit)}),
        **({} if ends is None else {"eos_token_id": ends}),
        input_mode=wrapper.input_mode,
        input_key=getattr(wrapper, "input_key", None),
        attention_mask_key=getattr(wrapper, "attention_mask_key", "attention_mask"),
        generate=bool(wrapper.generate),
        return_log_probs=getattr(wrapper, "return_log_probs", None),
        pad_output=bool(wrapper.pad_output),
        inplace=getattr(wrapper, "inplace", None),
        num_samples=getattr(wrapper, "num_samples", None),
        prefer_tokens=bool(getattr(wrapper, "prefer_tokens", False)),
        **{f"{name}_key": getattr(wrapper, f"{name}_key") for name in CONTAINERS},
    )


def _tokenizer(wrapper: Any) -> Any:
    """Return the wrapper's tokenizer, with the chat template that the wrapper names."""
    options = {name: getattr(wrapper, name, None) for name in ("chat_template", "chat_template_name")}
    return tokenizer_with_template(getattr(wrapper, "tokenizer", None), options)


class EnginePolicy:
    """A policy that calls a wrapper unchanged, for example one around an external engine (`vLLMWrapper`).

    It scores and samples by calling the wrapper on ragged token ids, and uses the wrapper's log-probs. So:

    - there is no gradient, and a loss rejects the policy;
    - scores are at temperature 1, like those of TorchRL's wrappers. Sampling at another temperature is rejected, unless
      the engine reports log-probs of the processed distribution
      (`vllm.LLM(..., logprobs_mode="processed_logprobs")`); `temperature` is then used for sampling only, and scoring
      at it is rejected;
    - the engine's generator is used, so `seed` and `stream_ids` have no effect and a rollout is not repeatable;
    - a wrapper that drops tokens equal to the padding id, as `vLLMWrapper` does, is rejected once it drops one: give
      the tokenizer its own padding token.

    Args:
        wrapper: the wrapper. Its `get_new_version` makes the versions that read token ids.

    Attributes:
        temperature: of sampling, from the wrapper's `generate_kwargs`.
        tokenizer: the wrapper's.
        eos_token_ids: the tokens that end a completion.
        max_positions: None; only the engine knows it.

    Raises:
        DefinitionError: the wrapper samples in a way that its log-probs do not reflect.
    """

    max_positions: int | None = None

    def __init__(self, wrapper: Any) -> None:
        _refuse_distortions(wrapper)
        self.wrapper = wrapper
        self.temperature = _temperature(wrapper)
        self.tokenizer = _tokenizer(wrapper)
        self.eos_token_ids = end_token_ids(getattr(wrapper, "model", None), self.tokenizer)
        options = getattr(wrapper, "generate_kwargs", None) or {}
        limit = options.get("max_new_tokens", options.get("max_tokens")) if wrapper.generate else None
        self.max_new_tokens = 64 if limit is None else int(limit)
        self._scorer: Any = None

    def _name(self) -> str:
        return type(self.wrapper).__name__

    @torch.no_grad()
    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        score_mask: Tensor | None = None,
        *,
        temperature: float | None = None,
    ) -> Tensor:
        """Return the engine's log-prob of every scored token, float32 `[B, T]`, 0 elsewhere; without gradient.

        Args:
            input_ids: int64 `[B, T]`, padded on any side.
            attention_mask: bool `[B, T]`, True at tokens.
            score_mask: bool `[B, T]`, True where a log-prob is wanted; every token but the first when None.
            temperature: of the log-probs; the wrapper's when None.

        Raises:
            DefinitionError: the temperature is not 1.
            DataError: the engine returned no log-prob for some token.
        """
        temperature = self.temperature if temperature is None else temperature
        if temperature not in (0.0, 1.0):
            raise DefinitionError(
                f"{self._name()} scores at temperature 1, but {temperature} is needed. Score at that temperature "
                "with a CausalLMPolicy that has the same weights, or sample at temperature 1."
            )
        if self._scorer is None:
            self._scorer = self._version(generate=False, return_log_probs=True, generate_kwargs=None)
        attention = attention_mask.bool()
        scored = attention & (attention.cumsum(1) > 1)
        if score_mask is not None:
            scored &= score_mask.bool()
        out = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        if not len(input_ids):
            return out
        rows = [row[real] for row, real in zip(input_ids, attention, strict=True)]
        for i, scores in enumerate(self._call(self._scorer, rows)[1]):
            out[i, attention[i]] = scores.float().to(out.device)
        bad = scored & ~out.isfinite()
        if bool(bad.any()):
            raise DataError(
                f"{self._name()} returned no finite log-prob for {int(bad.sum())} of {int(scored.sum())} tokens. "
                "Request prompt_logprobs from the engine, or score with a CausalLMPolicy that has the same weights."
            )
        return torch.where(scored, out, 0.0)

    @torch.no_grad()
    def generate_ragged(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int = 1,
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float | None = None,
        seed: int = 0,
        stream_ids: Sequence[int] | None = None,
    ) -> RaggedCompletions:
        """Sample `group_size` completions of every prompt, prompt by prompt.

        Args:
            prompts: token ids.
            group_size: completions of each.
            max_new_tokens: the limit, for all, per prompt, or per completion; the wrapper's when None.
            temperature: of sampling; the wrapper's when None.
            seed: no effect, see above.
            stream_ids: no effect.

        Raises:
            DefinitionError: the log-probs would belong to another distribution than the sampled one.
            DataError: the engine returned tokens without log-probs.
        """
        del seed, stream_ids
        sampling_temperature = self.temperature if temperature is None else float(temperature)
        self._check_sampling(sampling_temperature)
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        request = Request(
            prompts=prompts, group_size=group_size, max_new_tokens=limit, temperature=sampling_temperature
        )
        limits = request.limits()
        options = {"max_new_tokens": int(limits.max(initial=1)), "temperature": sampling_temperature, "top_p": 1.0}
        sampler = self._version(generate=True, return_log_probs=True, generate_kwargs=options)
        rows = [torch.tensor(list(prompts[int(i)]), dtype=torch.int64) for i in request.prompt_of]
        generated = self._call(sampler, rows) if rows else ([], [])
        tokens, scores = ([row[:n] for row, n in zip(part, limits.tolist(), strict=False)] for part in generated)
        ends = torch.tensor(self.eos_token_ids, dtype=torch.int64)
        return RaggedCompletions(
            token_ids=torch.cat(tokens).long().numpy() if rows else np.zeros(0, np.int64),
            log_probs=torch.cat(scores).float().numpy() if rows else np.zeros(0, np.float32),
            lengths=np.array([len(t) for t in tokens], dtype=np.int64),
            prompt_index=request.prompt_of,
            member=request.member_of,
            stopped=np.array([bool(len(t)) and bool((t[-1] == ends).any()) for t in tokens], dtype=bool),
        )

    def _check_sampling(self, temperature: float) -> None:
        if isinstance(getattr(self.wrapper, "model", None), nn.Module):
            raise DefinitionError(
                "TransformersWrapper sets the log-prob of the first sampled token to 0, so ratios would be wrong, and "
                "CausalLMPolicy does not support this model. Sample with another model, or score the samples again."
            )
        engine = getattr(self.wrapper, "model", None)
        for name in ("llm_engine", "model_config", "logprobs_mode"):
            engine = getattr(engine, name, None)
        if temperature not in (0.0, 1.0) and engine != "processed_logprobs":
            raise DefinitionError(
                f"{self._name()} samples at temperature {temperature}, but reports log-probs at temperature 1. Sample "
                "at temperature 1, or "
                'create the engine with logprobs_mode="processed_logprobs".'
            )

    def _version(self, **changes: Any) -> Any:
        return self.wrapper.get_new_version(
            input_mode="tokens",
            input_key=("tokens", "prompt" if changes["generate"] else "full"),
            pad_output=False,
            inplace=False,
            num_samples=None,
            **{f"{name}_key": name for name in CONTAINERS[:3]},
            **changes,
        )

    def _call(self, version: Any, rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return tokens and their log-probs: sampled tokens for prompts, or the tokens of whole rows."""
        part, name = ("prompt", "response") if version.generate else ("full", "full")
        data: list[Any] = []
        for row in rows:
            tokens = Tokens(prompt=row, padded=False) if version.generate else Tokens(full=row, padded=False)
            masks = Masks(all_attention_mask=torch.ones_like(row, dtype=torch.bool), padded=False)
            data.append(TensorDict({"tokens": tokens, "masks": masks}))
        out: Any = version(lazy_stack(data))
        scores = out.get(("log_probs", name), as_list=True)
        if scores is None:
            raise DataError(f"{self._name()} returned no log-probs. Create it with return_log_probs=True.")
        tokens = rows if part == "full" else out.get(("tokens", name), as_list=True)
        tokens, scores = ([v.detach().cpu().reshape(-1) for v in values] for values in (tokens, scores))
        for ids, values in zip(tokens, scores, strict=True):
            if len(ids) != len(values):
                raise DataError(
                    f"{self._name()} returned {len(values)} log-probs for {len(ids)} tokens: it removes tokens equal "
                    "to the padding id. In the tokenizer, set a padding token that no text contains and "
                    "that is not the end token."
                )
        return tokens, scores
