"""`CausalLMPolicy`: a causal language model that generates groups of completions and scores tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.functional.head import token_log_probs
from rlhf_pipeline.policies._packed_attention import same_attention_when_recomputed
from rlhf_pipeline.policies._scoring import ScoringRows, token_states
from rlhf_pipeline.policies._td_policy import TensorDictPolicy
from rlhf_pipeline.policies.distribution import TokenDistribution
from rlhf_pipeline.policies.encoding import tokenizer_with_template
from rlhf_pipeline.policies.engines.protocol import Completion, Engine, RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.folder import resolve_source
from rlhf_pipeline.policies.loading import (
    as_dtype,
    as_id_tuple,
    end_token_ids,
    load_model,
    load_tokenizer,
    padding_id,
    quiet_progress,
)
from rlhf_pipeline.policies.model_parts import ModelParts, find_parts, set_recomputation, switch_recomputation
from rlhf_pipeline.policies.packed import LayoutScorer
from rlhf_pipeline.policies.token_batches import Key

__all__ = ["CausalLMPolicy", "Completion", "RaggedCompletions", "ScoringRows"]


class CausalLMPolicy(TensorDictPolicy):
    """A policy around any causal language model of transformers.

    It samples completions on KV-cache slots, with the log-prob of every token as it is sampled, and scores given
    tokens from hidden states, so that `[B, T, V]` logits never exist. Dropout stays off: `train()` leaves the model
    in eval mode, because a ratio between a policy with dropout and the same policy without it is noise.

    Args:
        model: a causal language model; one wrapped by peft works as well, with adapters off the head.
        tokenizer: its tokenizer, or None for work on token ids only.
        temperature: the sampling temperature, and the one at which tokens are scored.
        max_new_tokens: the default limit of a completion.
        eos_token_id: the token or tokens that end a completion. None takes those of the generation config (or the
            model's config) and the tokenizer's; an empty list means that only the limit ends a completion.
        pad_token_id: the token that fills padding. None takes the tokenizer's, the config's, the first EOS, or 0. It
            may equal an EOS token: masks tell padding from tokens, ids never do.
        num_slots: how many completions are generated side by side.
        input_mode: what `forward` reads: "tokens", "text" or "history"; TorchRL's names from here on.
        input_key: where it reads; `(tokens_key, "prompt")` or `(tokens_key, "full")` by default, and likewise.
        attention_mask_key: where the attention mask of tokens is, if there is none among the masks.
        generate: whether `forward` samples; it scores when False.
        generate_kwargs: `max_new_tokens`, `temperature`, `num_return_sequences`, `do_sample`, `seed` of that sampling.
        tokenizer_kwargs: `chat_template` or `chat_template_name`; what would change the tokens otherwise is refused.
        chat_template_name: one of TorchRL's chat templates, in place of the tokenizer's.
        chat_template: a chat template, in place of the tokenizer's.
        return_log_probs: whether sampling returns log-probs; True when None.
        pad_output: whether what is sampled comes padded.
        inplace: True writes into the input, False into a copy, "empty" into a new TensorDict.
        num_samples: completions per prompt; adds a batch dimension.
        prefer_tokens: with histories, go on from the token ids under `(tokens_key, "prompt")` where there are some
            (what was sampled in earlier turns stays as it was), and encode only the messages after them.
        layout: None or `torch.strided`; rows come as a lazy stack.
        device: where to put the model; left where it is when None.
        tokens_key: likewise `masks_key`, `log_probs_key`, `text_key`, `history_key`: where the containers go.
        scoring_layout: how scored rows go through the model: "padded", "packed" or "prefix_shared" (see
            `policies.packed`). Where the model does not allow the last two, rows are padded and `layout_notices`
            says so.

    Raises:
        DefinitionError: an argument is out of range, or the model is of a kind that cannot be scored from its hidden
            states (the message says why).

    >>> from rlhf_pipeline.policies.new_model import scratch_policy
    >>> policy = scratch_policy("01=", hidden_size=16, num_layers=1, num_heads=2, seed=0, max_new_tokens=3)
    >>> prompt = policy.tokenizer.encode("01=")
    >>> group = policy.generate_groups([prompt], group_size=2, seed=0)
    >>> [c.member for c in group], all(len(c.token_ids) <= 3 for c in group)
    ([0, 1], True)
    >>> ids = torch.tensor([prompt + group[0].token_ids])
    >>> scored = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool))
    >>> bool((scored[0, 3:] - group[0].log_probs).abs().max() < 1e-5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None = None,
        *,
        temperature: float = 1.0,
        max_new_tokens: int = 64,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        num_slots: int = 64,
        input_mode: str = "tokens",
        input_key: Key | None = None,
        attention_mask_key: Key = "attention_mask",
        generate: bool = False,
        generate_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        pad_output: bool = False,
        inplace: bool | str | None = None,
        num_samples: int | None = None,
        prefer_tokens: bool = False,
        layout: torch.layout | None = None,
        device: torch.device | str | None = None,
        tokens_key: Key = "tokens",
        masks_key: Key = "masks",
        log_probs_key: Key = "log_probs",
        text_key: Key = "text",
        history_key: Key = "history",
        scoring_layout: str = "padded",
    ) -> None:
        super().__init__()  # pyright: ignore[reportCallIssue]
        if not temperature >= 0:
            raise DefinitionError(f"temperature is {temperature}; it must be at least 0.")
        if max_new_tokens < 1:
            raise DefinitionError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        if num_slots < 1:
            raise DefinitionError(f"num_slots is {num_slots}; it must be at least 1.")
        for name, value in (("model", model), ("tokenizer", tokenizer)):
            if isinstance(value, str):
                raise DefinitionError(
                    f"{name} is the name {value!r}. Load it: CausalLMPolicy.from_pretrained({value!r}, ...)."
                )
        self.model = (model if device is None else model.to(device)).eval()
        templates = {"chat_template": chat_template, "chat_template_name": chat_template_name}
        self.tokenizer: Any = tokenizer_with_template(tokenizer, {**(tokenizer_kwargs or {}), **templates})
        self.temperature = float(temperature)
        self.max_new_tokens = max_new_tokens
        self.num_slots = num_slots
        self.eos_token_ids = end_token_ids(model, tokenizer) if eos_token_id is None else as_id_tuple(eos_token_id)
        self.pad_token_id = padding_id(self.model, self.tokenizer, given=pad_token_id, ends=self.eos_token_ids)
        self._set_wrapper_options(
            input_mode=input_mode,
            input_key=input_key,
            generate=generate,
            generate_kwargs=generate_kwargs,
            return_log_probs=return_log_probs,
            pad_output=pad_output,
            inplace=inplace,
            num_samples=num_samples,
            prefer_tokens=prefer_tokens,
            layout=layout,
            keys={
                "tokens_key": tokens_key,
                "masks_key": masks_key,
                "log_probs_key": log_probs_key,
                "text_key": text_key,
                "history_key": history_key,
                "attention_mask_key": attention_mask_key,
            },
        )
        self._checkpointing = False
        self._scorer = LayoutScorer(scoring_layout)
        self._found: list[Any] = []
        self._slots: SlotEngine | None = None
        self._engine: Engine | None = None
        _ = self._parts

    @property
    def _parts(self) -> ModelParts:
        """Trunk and head of the model, looked up once per model: `policy.model` may be replaced."""
        if not self._found or self._found[0] is not self.model:
            # In a list, so that the module tree does not register the same modules twice.
            self._found = [self.model, find_parts(self.model)]
        return self._found[1]

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> CausalLMPolicy:
        """Load model and tokenizer from a folder, or from the Hugging Face hub by name.

        Args:
            source: a folder that `save_pretrained` wrote, or a hub name. A folder never touches the network.
            device: where to put the model; left on the CPU when None.
            dtype: for example `torch.float32` or "bfloat16"; None keeps the checkpoint's own.
            **kwargs: the keyword arguments of the constructor.

        Raises:
            MissingPathError: there is no such folder, and no such model on the hub.
            DataError: the folder is not a checkpoint of a causal language model.
        """
        name, local = resolve_source(source)
        model = load_model(name, local=local, dtype=as_dtype(dtype))
        tokenizer = load_tokenizer(name, local=local)
        return cls(model if device is None else model.to(device), tokenizer, **kwargs)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config, weights (safetensors) and tokenizer to `folder`, which `from_pretrained` loads.

        Args:
            folder: made if absent; files of the same names are replaced.
        """
        with quiet_progress():
            cast(Any, self.model).save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def get_new_version(self, **kwargs: Any) -> CausalLMPolicy:
        """Return a policy over the same model and tokenizer with some arguments changed.

        The weights are shared: a version that scores follows what a version that is trained learns.

        Args:
            **kwargs: keyword arguments of the constructor.

        >>> from rlhf_pipeline.policies.new_model import scratch_policy
        >>> policy = scratch_policy("ab", hidden_size=8, num_heads=2)
        >>> sampler = policy.get_new_version(generate=True, temperature=0.7)
        >>> sampler.head_weight is policy.head_weight, sampler.temperature, policy.temperature
        (True, 0.7, 1.0)
        """
        options: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": self.eos_token_ids,
            "pad_token_id": self.pad_token_id,
            "num_slots": self.num_slots,
            "input_mode": self.input_mode,
            "generate": self.generate,
            "generate_kwargs": self.generate_kwargs,
            "return_log_probs": self.return_log_probs,
            "pad_output": self.pad_output,
            "inplace": self.inplace,
            "num_samples": self.num_samples,
            "prefer_tokens": self.prefer_tokens,
            "attention_mask_key": self.attention_mask_key,
            "scoring_layout": self.scoring_layout,
            **self._container_key_options(),
        }
        if "generate" not in kwargs and "input_mode" not in kwargs:
            options["input_key"] = self.input_key
        if kwargs.get("device") not in (None, self.device):
            raise DefinitionError(
                f"A new version shares its weights with this one, which are on {self.device}. Move the policy, or make "
                "a CausalLMPolicy over a copy of the model."
            )
        known = ("model", "input_key", "device", "layout", "tokenizer_kwargs", "chat_template_name", "chat_template")
        for name in kwargs:
            if name not in options and name not in known:
                raise DefinitionError(f"CausalLMPolicy has no argument {name!r}." + did_you_mean(name, options))
        other = type(self)(**{"model": self.model, **options, **kwargs})
        if self._checkpointing and other.model is self.model:
            other._checkpointing = True
            other._recompute(True)
        return other

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where the head's weight is."""
        return self.head_weight.device

    # The head and the trunk

    @property
    def head_weight(self) -> Tensor:
        """The head's weight `[V, H]`, the parameter itself (tied to the embedding where the model ties them)."""
        return self._parts.head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias `[V]`, or None."""
        return self._parts.head.bias

    @property
    def head_soft_cap(self) -> float | None:
        """The soft cap `c` of the logits, `c * tanh(z / c)` (Gemma 2), or None."""
        return self._parts.soft_cap

    @property
    def vocab_size(self) -> int:
        """How many tokens the head knows."""
        return int(self.head_weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model is right for, or None where its config names none.

        For a rotary embedding that changes with the length of a batch (LongRoPE, dynamic), where it does so.
        """
        return self._parts.max_positions

    @property
    def scoring_layout(self) -> str:
        """How scored rows go through the model; set it to change it."""
        return self._scorer.layout

    @scoring_layout.setter
    def scoring_layout(self, name: str) -> None:
        if name != self._scorer.layout:
            self._scorer = LayoutScorer(name)

    def layout_notices(self) -> list[str]:
        """Return why rows were padded in spite of `scoring_layout`, each reason once; empty most of the time."""
        return self._scorer.take_notices()

    def train(self, mode: bool = True) -> CausalLMPolicy:
        """Set the mode of the policy; the model inside stays in eval mode, so dropout stays off."""
        super().train(mode)
        self.model.eval()
        self._recompute(mode and self._checkpointing)
        return self

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Recompute each decoder layer in the backward pass instead of keeping its activations.

        Transformers does this only for layers in training mode, which would switch dropout on. Here only the layers'
        own flag is set, with their dropout probabilities at 0, and only outside generation.

        Args:
            enabled: False goes back to keeping activations.

        Raises:
            DefinitionError: the model does not support it.
        """
        config = getattr(self._parts.trunk, "config", None)
        context = partial(same_attention_when_recomputed, config)
        switch_recomputation(self.model, enabled, {"use_reentrant": False, "context_fn": context})
        self._checkpointing = enabled
        self._recompute(enabled)

    def _recompute(self, on: bool) -> None:
        set_recomputation(self.model, on)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden state of every token, `[B, T, H]`; zero at padding.

        `hidden[:, t] @ head_weight.T + head_bias`, capped where the policy has a `head_soft_cap`, are the logits of the
        token after column `t`. Tokens are brought to
        the left before the forward pass, so the result is the same for any padding side.

        Args:
            input_ids: int64 `[B, T]`; what stands at padding does not matter.
            attention_mask: bool `[B, T]`, True at tokens.
        """
        return token_states(self._parts, input_ids, attention_mask)

    def scoring_rows(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None) -> ScoringRows:
        """Return the hidden states that predict the scored tokens, and no others.

        For losses that apply the head themselves. Arguments as in `log_probs`.
        """
        return self._scorer.rows(self._parts, input_ids, attention_mask, score_mask)

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        score_mask: Tensor | None = None,
        *,
        temperature: float | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Return the log-prob of every scored token given the tokens before it.

        Args:
            input_ids: int64 `[B, T]`, padded on any side; what stands at padding does not matter.
            attention_mask: bool `[B, T]`, True at tokens.
            score_mask: bool `[B, T]`, True where a log-prob is wanted; every token when None. The first token of a
                row has no log-prob and padding has none, whatever this mask says.
            temperature: logits are divided by it; the policy's own when None.
            chunk_size: rows per pass through the head; the default suits the vocabulary.

        Returns:
            float32 `[B, T]` in nats, 0 where not scored; differentiable in the model's parameters.

        Raises:
            DefinitionError: shapes differ, or the temperature is 0, at which no finite log-probs exist.
        """
        temperature = self.temperature if temperature is None else temperature
        if temperature == 0:
            raise DefinitionError(
                "Tokens cannot be scored at temperature 0, where a log-prob is 0 or minus infinity. "
                "Pass temperature=1.0, at which greedy generation reports its log-probs."
            )
        found = self.scoring_rows(input_ids, attention_mask, score_mask)
        scores = token_log_probs(
            found.hidden,
            self.head_weight,
            found.targets,
            temperature=temperature,
            bias=self.head_bias,
            soft_cap=self.head_soft_cap,
            chunk_size=chunk_size,
        )
        out = torch.zeros(input_ids.shape, dtype=torch.float32, device=scores.device)
        return out.index_put((found.rows, found.columns), scores.float())

    def token_distribution(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> TokenDistribution:
        """Return the distribution of the masked tokens given those before them, at the policy's temperature.

        First tokens and padding have none and leave the mask. See `get_dist` for TensorDicts.
        """
        found = self.scoring_rows(input_ids, attention_mask, mask)
        scored = torch.zeros(input_ids.shape, dtype=torch.bool, device=found.rows.device)
        scored[found.rows, found.columns] = True
        temperature = self.temperature if self.temperature > 0 else 1.0
        return TokenDistribution(
            found.hidden, self.head_weight, self.head_bias, scored, temperature, soft_cap=self.head_soft_cap
        )

    # Generation

    def generate_groups(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
        """Sample `group_size` completions of every prompt: `generate_ragged` with one object per completion.

        Args:
            prompts: token ids, one sequence per prompt, without padding.
            **options: the keyword arguments of `generate_ragged`.
        """
        return list(self.generate_ragged(prompts, **options))

    def generate_ragged(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int = 1,
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float | None = None,
        seed: int,
        stream_ids: Sequence[int] | None = None,
        refresh: WeightRefresh | None = None,
    ) -> RaggedCompletions:
        """Sample `group_size` completions of every prompt.

        The random number behind a token is a pure function of (seed, stream id, member, token index), so what is
        sampled does not depend on the number of slots, on the order of the prompts, or on what else is in the call,
        up to the last bits of a log-prob, which follow the batch that a row is computed in.

        Args:
            prompts: token ids, one sequence per prompt, without padding.
            group_size: completions per prompt.
            max_new_tokens: the limit of new tokens: one number, one per prompt, or one per completion (prompt-major).
                The policy's own when None. Prompt and completion together never pass the model's positions.
            temperature: the policy's own when None. 0 takes the most probable token and reports its log-prob at
                temperature 1.
            seed: any integer.
            stream_ids: one integer per prompt that names its random stream; the prompt's index when None.
            refresh: takes up newer weights on the way.

        Returns:
            Completions, prompt-major and member-minor, in flat arrays: what a store appends without a loop.

        Raises:
            DataError: a prompt is empty, too long, or has ids outside the vocabulary; or the logits are not finite.
            DefinitionError: an argument is out of range, or slots cannot hold this model's kind of cache.
        """
        if self._checkpointing:
            # A layer that recomputes drops the cache.
            self._recompute(False)
        try:
            request = Request(
                prompts=[p.tolist() if isinstance(p, Tensor) else p for p in prompts],
                group_size=group_size,
                max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
                temperature=self.temperature if temperature is None else temperature,
                end_token_ids=self.eos_token_ids,
                seed=seed,
                stream_ids=stream_ids,
            )
            return self.engine.generate(request, refresh)
        finally:
            if self._checkpointing:
                self._recompute(True)

    @property
    def engine(self) -> Engine:
        """What samples: slots in this process with the policy's own weights, or the engine that was set here."""
        if self._engine is not None:
            return self._engine
        slots = self._slots
        if slots is None or slots.model is not self.model or slots.num_slots != self.num_slots:
            slots = self._slots = SlotEngine(self._parts, num_slots=self.num_slots, model=self.model)
        return slots

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self._engine = engine
