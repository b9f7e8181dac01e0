"""`TokenPolicy`: a causal language model that generates groups of completions and scores tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.head import Head, token_log_probs
from rlhf_pipeline.policies._scoring import ScoringRows, token_states
from rlhf_pipeline.policies.attention import same_attention_when_recomputed
from rlhf_pipeline.policies.compiled_modules import INDUCTOR, compiled_as_now, compiled_by, prepare_modules
from rlhf_pipeline.policies.engines.protocol import (
    Completion,
    Ended,
    Engine,
    RaggedCompletions,
    Request,
    WeightRefresh,
)
from rlhf_pipeline.policies.engines.sampling import Truncation
from rlhf_pipeline.policies.engines.slots import SlotEngine
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
from rlhf_pipeline.policies.model_source import resolve_source
from rlhf_pipeline.policies.packed import LayoutScorer, TokenRows
from rlhf_pipeline.policies.stop_strings import StopStrings
from rlhf_pipeline.policies.weight_files import named_write_errors

__all__ = ["Completion", "RaggedCompletions", "ScoringRows", "TokenPolicy"]


class TokenPolicy(nn.Module):
    """A policy around any causal language model of transformers.

    It samples completions on KV-cache slots, with the log-prob of every sampled token, and scores given
    tokens from hidden states, so that `[B, T, V]` logits never exist. Dropout stays off: `train()` leaves the model
    in eval mode, because the ratio of a policy with dropout to the same policy without it is noise.

    It works on token ids. `rlhf_pipeline.CausalLMPolicy` is this class with TorchRL's arguments and methods beside it,
    for TensorDicts.

    Args:
        model: a causal language model; one wrapped by peft works as well, with adapters off the head.
        tokenizer: its tokenizer, or None if only token ids are used.
        temperature: the sampling temperature, and the one at which tokens are scored.
        max_new_tokens: the default limit of a completion.
        eos_token_id: the token or tokens that end a completion. None takes those of the generation config (or the
            model's config) and the tokenizer's; an empty list means that only the limit ends a completion.
        pad_token_id: the token that fills padding. None takes the tokenizer's, the config's, the first EOS, or 0. It
            may equal an EOS token: masks distinguish padding from tokens, ids never do.
        num_slots: how many completions are generated in parallel.
        scoring_layout: how scored rows go through the model: "padded", "packed" or "prefix_shared" (see
            `policies.packed`). If the model does not support the layout, rows are padded; `layout_notices` reports it.

    Raises:
        DefinitionError: an argument is out of range, or the model is of a kind that cannot be scored from its hidden
            states (the message gives the reason).

    >>> from rlhf_pipeline import scratch_policy
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
        scoring_layout: str = "padded",
    ) -> None:
        super().__init__()
        if not temperature >= 0:
            raise DefinitionError(f"temperature is {temperature}; it must be at least 0.")
        if max_new_tokens < 1:
            raise DefinitionError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        if num_slots < 1:
            raise DefinitionError(f"num_slots is {num_slots}; it must be at least 1.")
        for name, value in (("model", model), ("tokenizer", tokenizer)):
            if isinstance(value, str):
                raise DefinitionError(
                    f"{name} is the string {value!r}, not an object. Load it: "
                    f"CausalLMPolicy.from_pretrained({value!r}, ...)."
                )
        self.model = model.eval()
        self.tokenizer: Any = tokenizer
        self.temperature = float(temperature)
        self.max_new_tokens = max_new_tokens
        self.num_slots = num_slots
        self.eos_token_ids = end_token_ids(model, tokenizer) if eos_token_id is None else as_id_tuple(eos_token_id)
        self.pad_token_id = padding_id(self.model, self.tokenizer, configured=pad_token_id, ends=self.eos_token_ids)
        self._checkpointing = False
        self._compiler: str | None = None
        self._scorer = LayoutScorer(scoring_layout)
        self._model_and_parts: list[Any] = []
        self._slots: SlotEngine | None = None
        self._engine: Engine | None = None
        _ = self._parts

    @property
    def _parts(self) -> ModelParts:
        """Trunk and head of the model, looked up once per model: `policy.model` may be replaced."""
        if not self._model_and_parts or self._model_and_parts[0] is not self.model:
            # In a list, so that the module tree does not register the same modules twice.
            self._model_and_parts = [self.model, find_parts(self.model)]
        return self._model_and_parts[1]

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load model and tokenizer from a folder, a GGUF file, or from the Hugging Face hub by name.

        Args:
            source: a folder that `save_pretrained` wrote, a GGUF file (dequantized; needs `gguf` and `accelerate`), or
                a hub name. Only a hub name touches the network.
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

    def save_pretrained(self, folder: str | os.PathLike[str], *, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config, weights (safetensors) and tokenizer to `folder`, which `from_pretrained` loads.

        Args:
            folder: made if absent; files of the same names are replaced.
            state_dict: weights to write instead of the model's current ones, such as a copy of its state dict.

        Raises:
            OSError: the folder cannot be written.
        """
        with quiet_progress(), named_write_errors(Path(folder)):
            cast(Any, self.model).save_pretrained(folder, state_dict=state_dict)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    @property
    def device(self) -> torch.device:
        """The device of the head's weight."""
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
        """The number of tokens of the head."""
        return int(self.head_weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model supports, or None if its config names none.

        For a rotary embedding that changes with the length of a batch (LongRoPE, dynamic): the length where it changes.
        """
        return self._parts.max_positions

    @property
    def scoring_layout(self) -> str:
        """How scored rows go through the model; can be set."""
        return self._scorer.layout

    @scoring_layout.setter
    def scoring_layout(self, name: str) -> None:
        if name != self._scorer.layout:
            self._scorer = LayoutScorer(name)

    @property
    def planned_layout(self) -> str:
        """The layout to plan micro-batches for: `scoring_layout`, or `padded` for a model that supports no other."""
        return self._scorer.planned(self._parts)

    def computed_positions(self, batches: Sequence[TokenRows], token_budget: int) -> list[int]:
        """Return how many positions the model computes to score each batch, padding included.

        The first batches with several rows, or a shared prefix, are scored once to check the layout.

        Args:
            batches: `input_ids`, `attention_mask` and `score_mask` of each, as for `log_probs`.
            token_budget: the most positions of a batch that is scored for a check.
        """
        with compiled_by(self._compiler):
            return self._scorer.positions(self._parts, batches, token_budget)

    def layout_notices(self) -> list[str]:
        """Return the reasons why rows were padded in spite of `scoring_layout`, each once; usually empty."""
        return self._scorer.take_notices()

    def take_computed(self) -> dict[str, str]:
        """Return what has determined the last bits of scored rows since the last call, and clear it.

        `layout`, `attention` (its kernel), `dtype` and `compiled`; several of a kind are joined by `+`.
        """
        computed = sorted(self._scorer.take_computed())
        layouts, kernels = (dict.fromkeys(names) for names in zip(*computed, strict=True)) if computed else ({}, {})
        dtype = str(self.head_weight.dtype).removeprefix("torch.")
        compiled = "none" if self._compiler is None else "norms+mlps"
        return {"layout": "+".join(layouts), "attention": "+".join(kernels), "dtype": dtype, "compiled": compiled}

    def train(self, mode: bool = True) -> Self:
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
        context = partial(_same_when_recomputed, config)
        switch_recomputation(self.model, enabled, {"use_reentrant": False, "context_fn": context})
        self._checkpointing = enabled
        self._recompute(enabled)

    def set_scoring(
        self, *, layout: str, compiled: Literal["auto", "on", "off"], backend: str = INDUCTOR
    ) -> str | None:
        """Choose how tokens are scored; a policy and its reference differ in their weights only if this is equal.

        Args:
            layout: as `scoring_layout`.
            compiled: whether `torch.compile` fuses the kernels of norms and MLPs, after a check; `auto`: on CUDA.
                Log-probs and gradients are the same up to rounding, the state dict does not change, and sampling stays
                eager.
            backend: of `torch.compile`.

        Returns:
            Why modules run eagerly that `auto` would compile, or None.

        Raises:
            DefinitionError: there is no such layout; or `compiled` is "on", and the modules fail the check.
        """
        self.scoring_layout = layout
        self._compiler = None
        if compiled == "off" or (compiled == "auto" and self.device.type != "cuda"):
            return None
        problem = prepare_modules(self.model, backend=backend)
        if problem is None:
            self._compiler = backend
            return None
        if compiled == "on":
            raise DefinitionError(f"learn.compile is on, but {problem}. Set learn.compile=off.")
        return f"learn.compile: norms and MLPs run eagerly, because {problem}."

    def _recompute(self, on: bool) -> None:
        set_recomputation(self.model, on)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden state of every token, `[B, T, H]`; zero at padding.

        `hidden[:, t] @ head_weight.T + head_bias`, capped where the policy has a `head_soft_cap`, are the logits of the
        token after column `t`. The result does not depend on the padding side.

        Args:
            input_ids: int64 `[B, T]`; ids at padding are ignored.
            attention_mask: bool `[B, T]`, True at tokens.
        """
        with compiled_by(self._compiler):
            return token_states(self._parts, input_ids, attention_mask)

    def scoring_rows(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None) -> ScoringRows:
        """Return the hidden states that predict the scored tokens, and no others.

        For losses that apply the head themselves. Arguments as in `log_probs`.
        """
        with compiled_by(self._compiler):
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
            input_ids: int64 `[B, T]`, padded on any side; ids at padding are ignored.
            attention_mask: bool `[B, T]`, True at tokens.
            score_mask: bool `[B, T]`, True where a log-prob is wanted; every token when None. The first token of a
                row has no log-prob and padding has none, whatever this mask contains.
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
                "Tokens cannot be scored at temperature 0, where every log-prob is 0 or minus infinity. "
                "Pass temperature=1.0, at which greedy generation reports its log-probs."
            )
        scored = self.scoring_rows(input_ids, attention_mask, score_mask)
        head = Head(self.head_weight, self.head_bias, temperature, self.head_soft_cap)
        scores = token_log_probs(scored.hidden, head, scored.targets, chunk_size=chunk_size)
        out = torch.zeros(input_ids.shape, dtype=torch.float32, device=scores.device)
        return out.index_put((scored.rows, scored.columns), scores.float())

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
        ended: Ended | None = None,
        truncation: Truncation | None = None,
        stop: Sequence[str] = (),
    ) -> RaggedCompletions:
        """Sample `group_size` completions of every prompt.

        The random number behind a token is a pure function of (seed, stream id, member, token index), so a completion
        does not depend on the number of slots, on the order of the prompts, or on the rest of the call, except in the
        last bits of a log-prob, which depend on the batch that a row is computed in.

        Args:
            prompts: token ids, one sequence per prompt, without padding.
            group_size: completions per prompt.
            max_new_tokens: the limit of new tokens: one number, one per prompt, or one per completion (prompt-major).
                The policy's own when None. Prompt and completion together never pass the model's positions.
            temperature: the policy's own when None. sampling temperature; 0 selects the most probable token and reports
                its log-prob at temperature 1.
            seed: any integer.
            stream_ids: one integer per prompt that names its random stream; the prompt's index when None.
            refresh: loads newer weights during sampling.
            ended: takes each completion as it ends; see `Engine.generate`.
            truncation: top-k, top-p and min-p; only with the slot engine, which reports the mass of the support.
            stop: texts that end a completion, at the token that completes one. Every engine has them: the slots on a
                CPU stop there, others continue and are cut there.

        Returns:
            Completions, prompt-major and member-minor, in flat arrays, which a store appends without a loop.

        Raises:
            DataError: a prompt is empty, too long, or has ids outside the vocabulary; or the logits are not finite.
            DefinitionError: an argument is out of range, or slots cannot hold this model's kind of cache.
        """
        if self._checkpointing:
            # Layers that recompute drop the cache.
            self._recompute(False)
        try:
            stops = StopStrings(self.tokenizer, stop) if stop else None
            request = Request(
                prompts=[p.tolist() if isinstance(p, Tensor) else p for p in prompts],
                group_size=group_size,
                max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
                temperature=self.temperature if temperature is None else temperature,
                end_token_ids=self.eos_token_ids,
                seed=seed,
                stream_ids=stream_ids,
                truncation=truncation,
                stops=stops,
            )
            if stops is None:
                return self.engine.generate(request, refresh, ended)
            cut = None if ended is None else _cut_at(stops, ended)
            generated = self.engine.generate(request, refresh, cut)
            return generated.shortened(*stops.cuts(generated.token_ids, generated.lengths))
        finally:
            if self._checkpointing:
                self._recompute(True)

    @property
    def engine(self) -> Engine:
        """The engine that samples: slots in this process with the policy's own weights unless another was set."""
        if self._engine is not None:
            return self._engine
        slots = self._slots
        if slots is None or slots.model is not self.model or slots.num_slots != self.num_slots:
            slots = self._slots = SlotEngine(self._parts, num_slots=self.num_slots, model=self.model)
        return slots

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self._engine = engine


def _cut_at(stops: StopStrings, ended: Ended) -> Ended:
    return lambda index, token_ids: ended(index, token_ids[: stops.length(token_ids)])


def _same_when_recomputed(config: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a checkpointed layer: recomputation uses attention and modules of the forward pass."""
    forward, attention = same_attention_when_recomputed(config)
    return forward, _joint_context(attention, compiled_as_now())


@contextmanager
def _joint_context(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield
