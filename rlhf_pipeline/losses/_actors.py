"""How a loss gets log-probs from an actor: hidden states and a head where it can, scores or logits elsewhere."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import nn

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.losses._batch import LossBatch, MaskingStrategy
from rlhf_pipeline.policies.causal_lm import CausalLMPolicy
from rlhf_pipeline.policies.torchrl_wrappers import as_policy, is_torchrl_wrapper

__all__ = ["Actor", "HeadRows", "Scores", "adapt_actor"]


class HeadRows(NamedTuple):
    """The states that predict the masked tokens, row-major, with the head to apply to them.

    Attributes:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        temperature: of sampling.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float


class Scores(NamedTuple):
    """Log-probs of the masked tokens, row-major.

    Attributes:
        log_probs: [N], with gradient.
        entropy: [N] or None.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


class Actor(Protocol):
    """One of the ways below."""

    def rows(self, batch: LossBatch, td: TensorDictBase, *, entropy: bool) -> HeadRows | Scores: ...


def _temperature(actor: Any, given: float | None) -> float:
    """The temperature of scoring; a greedy policy (0) is scored at 1."""
    value = getattr(actor, "temperature", None) if given is None else given
    return float(value) if isinstance(value, int | float) and value > 0 else 1.0


class _Policy:
    """An actor with `hidden_states`, `head_weight`, `head_bias`, and `scoring_rows` if it has that."""

    def __init__(self, actor: Any, temperature: float | None) -> None:
        self.actor, self.temperature = actor, temperature

    def rows(self, batch: LossBatch, td: TensorDictBase, *, entropy: bool) -> HeadRows:
        if hasattr(self.actor, "scoring_rows"):
            hidden = self.actor.scoring_rows(batch.tokens, batch.attention, batch.mask).hidden
        else:
            states = self.actor.hidden_states(batch.tokens, batch.attention)
            column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            seen = torch.where(batch.attention, column, torch.zeros_like(column)).cummax(1).values
            row, at = batch.mask.nonzero(as_tuple=True)
            hidden = states[row, seen[row, at - 1]]
        bias = getattr(self.actor, "head_bias", None)
        return HeadRows(hidden, self.actor.head_weight, bias, _temperature(self.actor, self.temperature))


class _Scorer:
    """An actor with `log_probs(input_ids, attention_mask, score_mask) -> [B, T]`; it gives no entropy."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def rows(self, batch: LossBatch, td: TensorDictBase, *, entropy: bool) -> Scores:
        if entropy:
            raise DefinitionError(
                f"entropy_bonus=True needs an entropy, and {type(self.actor).__name__} gives log-probs only. Pass "
                "entropy_bonus=False, or give the actor hidden_states and head_weight."
            )
        scores = self.actor.log_probs(batch.tokens, batch.attention, batch.mask)
        return Scores(_fitting(scores, batch, "log-probs")[batch.mask], None)


class _Logits:
    """A module that maps (input_ids, attention_mask, position_ids) to logits [B, T, V] of the *next* token."""

    def __init__(self, actor: Any, temperature: float | None) -> None:
        self.actor, self.temperature = actor, temperature

    def rows(self, batch: LossBatch, td: TensorDictBase, *, entropy: bool) -> Scores:
        positions = (batch.attention.cumsum(1) - 1).clamp_min(0)
        out = self.actor(input_ids=batch.tokens, attention_mask=batch.attention, position_ids=positions)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise DataError(
                f"{type(self.actor).__name__} gave {type(logits).__name__}; GRPOLoss needs logits [B, T, V]."
            )
        row, at = batch.mask.nonzero(as_tuple=True)
        column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        seen = torch.where(batch.attention, column, torch.zeros_like(column)).cummax(1).values
        chosen = logits[row, seen[row, at - 1]].float() / _temperature(self.actor, self.temperature)
        log_p = torch.log_softmax(chosen, -1)
        picked = log_p.gather(1, batch.tokens[row, at, None].long())[:, 0]
        return Scores(picked, -(log_p.exp() * log_p).sum(-1) if entropy else None)


class _Distribution:
    """A TorchRL actor: a distribution over the tokens, aligned with them."""

    def __init__(self, actor: Any, strategy: MaskingStrategy, samples: int) -> None:
        self.actor, self.samples = actor, samples
        self.make = getattr(actor, f"_get_{strategy}_dist", None)
        takes = inspect.signature(actor.get_dist).parameters
        self.options = {"logits_key": "logits"} if "logits_key" in takes else {}

    def rows(self, batch: LossBatch, td: TensorDictBase, *, entropy: bool) -> Scores:
        if self.make is not None:
            dist: Any = self.make(td)
        else:
            dist = self.actor.get_dist(td, **self.options)
        log_probs = _fitting(dist.log_prob(batch.tokens), batch, "log-probs")
        found = None
        if entropy:
            found = _fitting(self._entropy(dist), batch, "entropies")[batch.mask]
        return Scores(log_probs[batch.mask].float(), found)

    def _entropy(self, dist: Any) -> torch.Tensor:
        """The exact entropy, or a Monte-Carlo estimate of `samples_mc_entropy` samples."""
        try:
            return dist.entropy()
        except NotImplementedError:
            sample = dist.sample((self.samples,))
            return -torch.stack([dist.log_prob(s) for s in sample]).mean(0)


def _fitting(values: torch.Tensor, batch: LossBatch, what: str) -> torch.Tensor:
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values.squeeze(-1)
    if values.shape != batch.tokens.shape:
        raise DataError(
            f"the actor's {what} have shape {list(values.shape)} but the tokens have {list(batch.tokens.shape)}. "
            "TorchRL's wrappers pad on the left: pass padding_side='left', or use pad_output=True."
        )
    return values


def adapt_actor(actor: Any, *, temperature: float | None, strategy: MaskingStrategy, samples: int) -> Actor:
    """Choose how to score with an actor, best first.

    1. `hidden_states` and `head_weight` (`CausalLMPolicy`): the head is applied in chunks.
    2. A transformers model, or a TorchRL wrapper around one: as 1, on the model inside, at the wrapper's temperature.
    3. `log_probs(input_ids, attention_mask, score_mask)`.
    4. TorchRL's `get_dist(tensordict)`: full logits.
    5. A module that returns logits [B, T, V].

    Raises:
        DefinitionError: none of these.
    """
    if is_torchrl_wrapper(actor):
        policy = as_policy(actor, "GRPOLoss")
        if isinstance(policy, CausalLMPolicy):
            return _Policy(policy, temperature)
        if not isinstance(actor.model, nn.Module):
            raise DefinitionError(
                f"GRPOLoss got a {type(actor).__name__} around an engine that gives no gradients. Train a "
                "CausalLMPolicy and send its weights to the engine."
            )
    elif hasattr(actor, "hidden_states") and hasattr(actor, "head_weight"):
        return _Policy(actor, temperature)
    for model in (actor, getattr(actor, "model", None)):
        if isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings"):
            try:
                return _Policy(CausalLMPolicy(model, temperature=_temperature(actor, temperature)), temperature)
            except DefinitionError:
                break  # Its logits are not a plain head on hidden states: score it through them.
    if hasattr(actor, "log_probs") and callable(actor.log_probs):
        return _Scorer(actor)
    if hasattr(actor, "get_dist"):
        return _Distribution(actor, strategy, samples)
    if callable(actor):
        return _Logits(actor, temperature)
    raise DefinitionError(
        f"actor_network is a {type(actor).__name__}; GRPOLoss needs hidden_states and head_weight (CausalLMPolicy), "
        "a transformers model, log_probs(...), get_dist(...), or a module that returns logits."
    )
