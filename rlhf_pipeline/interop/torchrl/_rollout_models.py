"""A common interface for sampling and scoring with a plain causal language model or a `CausalLMPolicy`."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl._rollout_views import completion_lengths, end_aligned, start_aligned
from rlhf_pipeline.interop.torchrl.wrappers import EnginePolicy, as_policy, is_torchrl_wrapper
from rlhf_pipeline.policies.distortions import OFF, find_distortion
from rlhf_pipeline.policies.loading import as_id_tuple, end_token_ids, padding_id
from rlhf_pipeline.policies.model_parts import evaluated
from rlhf_pipeline.policies.token_policy import TokenPolicy

_TOKENS_PER_PASS = 8192


class Sampling(NamedTuple):
    """The sampling of one call: the temperature (also of the log-probs), whether it is greedy, and the config."""

    temperature: float
    greedy: bool
    config: Any


def device_of(module: Any, default: torch.device) -> torch.device:
    """Return the device of a module's parameters, or `default` if it has none."""
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    return default if first is None else first.device


class RolloutModel:
    """A model that samples completions and scores tokens.

    Args:
        model: a `CausalLMPolicy`, which samples on its slots (a TorchRL wrapper becomes one), or a model with the
            `generate` and `forward` of transformers. If possible, tokens are scored from hidden states, so that
            `[B, T, V]` logits never exist; otherwise from the logits of a few rows at a time.
    """

    def __init__(self, model: Any) -> None:
        if is_torchrl_wrapper(model):
            model = as_policy(model, "RolloutFromModel")
        self.model = model
        self.is_policy = isinstance(model, TokenPolicy | EnginePolicy)
        self.policy: TokenPolicy | EnginePolicy | None = model if self.is_policy else _scorer(model)
        defaults = getattr(model, "generation_config", None)
        self.eos_token_ids = model.eos_token_ids if self.is_policy else end_token_ids(model, None)
        model_padding = getattr(model, "pad_token_id", None)
        self.pad_token_id = padding_id(model, defaults, configured=model_padding, ends=tuple(self.eos_token_ids))
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self.max_positions: int | None = positions if self.policy is None else self.policy.max_positions

    def sampling(self, generation_config: Any, max_new_tokens: int) -> Sampling:
        """Return how to sample, by the generation config if one is given."""
        model_config = getattr(self.model, "generation_config", None)
        config = generation_config
        limit = getattr(config, "max_new_tokens", None)
        if limit not in (None, max_new_tokens):
            raise DefinitionError(
                f"the generation config has max_new_tokens={limit}, but the rollout has {max_new_tokens} steps. "
                f"Create a RolloutFromModel(..., max_new_tokens={limit})."
            )
        ends = getattr(config, "eos_token_id", None)
        if ends is not None and as_id_tuple(ends) != tuple(self.eos_token_ids):
            raise DefinitionError(
                f"the end tokens of the generation config are {as_id_tuple(ends)}, but those of the model are "
                f"{tuple(self.eos_token_ids)}. Set "
                "model.generation_config.eos_token_id before you create the RolloutFromModel."
            )
        distortion = find_distortion(
            lambda name: getattr(config, name, None),
            default_of=None if self.is_policy else lambda name: getattr(model_config, name, None),
        )
        if distortion is not None:
            raise DefinitionError(
                f"the generation config has {distortion.name}={distortion.value}, so the log-probs would not "
                f"match the sampled distribution. Set {distortion.name}={distortion.off}."
            )
        if self.is_policy:
            temperature = getattr(config, "temperature", None)
            temperature = self.model.temperature if temperature is None else temperature
        else:
            temperature = next(
                (t for c in (config, model_config) if (t := getattr(c, "temperature", None)) is not None), 1.0
            )
        greedy = getattr(config, "do_sample", None) is False or temperature == 0
        if not temperature >= 0:
            raise DefinitionError(f"temperature is {temperature}; it must be at least 0.")
        return Sampling(1.0 if greedy else float(temperature), greedy, config)

    def sample(
        self, input_ids: Tensor, mask: Tensor, max_new_tokens: int, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample one completion per row of `[B, P]` prompts.

        Returns:
            (completions int64 `[B, T]`, lengths int64 `[B]`, log-probs float32 `[B, T]` as sampled, or None if the
            sampler does not report them). Padding after a row's length.
        """
        longest = int(mask.sum(1).max()) if len(mask) else 0
        most = self.max_positions
        if most is not None and longest + max_new_tokens > most:
            raise DataError(
                f"a prompt of {longest} tokens plus {max_new_tokens} new tokens exceeds the model's {most} positions. "
                + (
                    f"Drop prompts of more than {most - max_new_tokens} tokens, or lower max_new_tokens."
                    if max_new_tokens < most
                    else f"Lower max_new_tokens below {most}."
                )
            )
        shape = (input_ids.shape[0], max_new_tokens)
        tokens = torch.full(shape, self.pad_token_id, dtype=torch.int64, device=input_ids.device)
        if not len(input_ids):
            return tokens, tokens.new_zeros(0), None
        columns = torch.arange(max_new_tokens, device=input_ids.device)
        if self.is_policy:
            generated = self.model.generate_ragged(
                [row[real].tolist() for row, real in zip(input_ids, mask, strict=True)],
                max_new_tokens=max_new_tokens,
                temperature=0.0 if sampling.greedy else sampling.temperature,
                seed=int(torch.randint(2**62, ()).item()),
            )
            lengths = torch.as_tensor(generated.lengths).to(tokens)
            real = columns < lengths.unsqueeze(1)
            tokens[real] = torch.as_tensor(generated.token_ids).to(tokens)
            log_probs = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
            log_probs[real] = torch.as_tensor(generated.log_probs).to(log_probs)
            return tokens, lengths, log_probs
        ids, real = end_aligned(input_ids, mask, longest, self.pad_token_id)
        device = device_of(self.model, ids.device)
        with evaluated(self.model):
            out = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=real.long().to(device),
                generation_config=self._config(max_new_tokens, sampling),
            )
        new = getattr(out, "sequences", out)[:, longest : longest + max_new_tokens].to(tokens)
        tokens[:, : new.shape[1]] = new
        lengths = completion_lengths(new, self.eos_token_ids) if new.shape[1] else tokens.new_zeros(len(tokens))
        ended = torch.isin(new, tokens.new_tensor(self.eos_token_ids)).any(1)
        if new.shape[1] < max_new_tokens and not ended.all():
            row = int((~ended).nonzero()[0])
            raise DataError(
                f"generate() returned {new.shape[1]} of {max_new_tokens} tokens for row {row}, and none of them is one "
                f"of the end tokens {tuple(self.eos_token_ids)}. Set model.generation_config.eos_token_id to the token "
                "that ends a completion."
            )
        tokens.masked_fill_(columns >= lengths.unsqueeze(1), self.pad_token_id)
        return tokens, lengths, None

    def _config(self, max_new_tokens: int, sampling: Sampling) -> Any:
        from transformers import GenerationConfig

        config = GenerationConfig() if sampling.config is None else copy.deepcopy(sampling.config)
        config.do_sample = not sampling.greedy
        config.temperature = sampling.temperature
        config.max_new_tokens = max_new_tokens
        config.eos_token_id = list(self.eos_token_ids) or None
        config.pad_token_id = self.pad_token_id
        config.return_dict_in_generate = True
        config.output_scores = config.output_logits = False  # these are [B, T, V]; tokens are scored afterwards
        for name, off in OFF.items():
            setattr(config, name, off)
        if sampling.greedy:
            config.top_k = 50  # the default, without effect here; transformers logs a warning about any other
        return config

    def log_probs(self, input_ids: Tensor, mask: Tensor, score_mask: Tensor, temperature: float) -> Tensor:
        """Score tokens given those before them: float32 `[B, W]`, 0 where not scored.

        Args:
            input_ids: int64 `[B, W]`, padded on any side.
            mask: bool `[B, W]`, True at tokens.
            score_mask: bool `[B, W]`, True where a log-prob is wanted; not at the first token of a row.
            temperature: above 0.
        """
        with evaluated(None if self.is_policy else self.model):
            if self.policy is not None:
                scores = self.policy.log_probs(input_ids, mask, score_mask, temperature=temperature)
                return scores.to(input_ids.device)
            ids, real = start_aligned(input_ids, mask, self.pad_token_id)
            rows, columns = score_mask.nonzero(as_tuple=True)
            place = (mask.cumsum(1) - 1)[rows, columns]
            out = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
            device, at_once = device_of(self.model, ids.device), max(1, _TOKENS_PER_PASS // ids.shape[1])
            for start in range(0, len(ids), at_once):
                part = slice(start, start + at_once)
                logits = self.model(input_ids=ids[part].to(device), attention_mask=real[part].long().to(device)).logits
                mine = (rows >= start) & (rows < start + at_once)
                picked = logits.to(ids.device)[rows[mine] - start, place[mine] - 1].float() / temperature
                out[rows[mine], columns[mine]] = labels_log_probs(picked, input_ids[rows[mine], columns[mine]])
        return out


def labels_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `log_softmax(logits)` at the labels, float32 (float64 for float64 logits).

    Args:
        logits: `[..., V]`, any float dtype, already divided by the temperature.
        labels: int64 `[...]`.

    >>> labels_log_probs(torch.zeros(1, 4), torch.tensor([2])).exp().tolist()
    [0.25]
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits, dim=-1, dtype=dtype).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _scorer(model: Any) -> TokenPolicy | None:
    """Return a scoring policy over the same weights, or None if logits do not follow from hidden states."""
    if not isinstance(model, nn.Module):
        return None
    with evaluated(model):
        try:
            return TokenPolicy(model, eos_token_id=[])
        except DefinitionError:
            return None
