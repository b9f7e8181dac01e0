"""How a loss gets log-probs from an actor: from hidden states and a head if possible, else from scores or logits."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import nn

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.functional.head import Head, entropy_of
from rlhf_pipeline.losses.loss_batch import LossBatch, MaskingStrategy
from rlhf_pipeline.policies.adapters import actor_of, methods_are_of
from rlhf_pipeline.policies.model_parts import refuse_other_directions, rounding
from rlhf_pipeline.policies.token_policy import TokenPolicy

_PROBE_TOKENS = 8

__all__ = ["Actor", "HeadRows", "Scores", "adapt_actor"]


class HeadRows(NamedTuple):
    """The states that predict the masked tokens, row-major, and the head to apply to them.

    Attributes:
        hidden: [N, H].
        head: with the temperature of sampling.
    """

    hidden: torch.Tensor
    head: Head


class Scores(NamedTuple):
    """Log-probs of the masked tokens, row-major.

    Attributes:
        log_probs: [N], with gradient.
        entropy: [N] or None.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


class Actor(Protocol):
    """A way to score with an actor; one of the classes below."""

    def rows(self, batch: LossBatch, *, entropy: bool) -> HeadRows | Scores:
        """Return the inputs for scoring the masked tokens."""
        ...


def _temperature(actor: Any, fixed: float | None) -> float:
    """Return the temperature of scoring; a greedy policy (0) is scored at 1."""
    value = getattr(actor, "temperature", None) if fixed is None else fixed
    return float(value) if isinstance(value, int | float) and value > 0 else 1.0


class _Policy:
    """An actor with `hidden_states` and `head_weight`, and optionally `head_bias` and `scoring_rows`."""

    def __init__(self, actor: Any, temperature: float | None) -> None:
        self.actor, self.temperature = actor, temperature

    def rows(self, batch: LossBatch, *, entropy: bool) -> HeadRows:
        if hasattr(self.actor, "scoring_rows"):
            hidden = self.actor.scoring_rows(batch.tokens, batch.attention, batch.mask).hidden
        else:
            batch = _where(self.actor, batch)
            states = self.actor.hidden_states(batch.tokens, batch.attention)
            column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
            last_attended = torch.where(batch.attention, column, torch.zeros_like(column)).cummax(1).values
            row, at = batch.mask.nonzero(as_tuple=True)
            hidden = states[row, last_attended[row, at - 1]]
        bias, cap = getattr(self.actor, "head_bias", None), getattr(self.actor, "head_soft_cap", None)
        return HeadRows(hidden, Head(self.actor.head_weight, bias, _temperature(self.actor, self.temperature), cap))


class _Scorer:
    """An actor with `log_probs(input_ids, attention_mask, score_mask) -> [B, T]`; it gives no entropy."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def rows(self, batch: LossBatch, *, entropy: bool) -> Scores:
        if entropy:
            raise DefinitionError(
                f"entropy_bonus=True needs an entropy, but {type(self.actor).__name__} returns only log-probs. Pass "
                "entropy_bonus=False, or add hidden_states and head_weight to the actor."
            )
        batch = _where(self.actor, batch)
        scores = self.actor.log_probs(batch.tokens, batch.attention, batch.mask)
        return Scores(_fitting(scores, batch, "log-probs")[batch.mask], None)


class _Logits:
    """A module that maps (input_ids, attention_mask, position_ids) to logits [B, T, V] of the *next* token.

    Tokens are moved to the left first: with all padding after them, no token sees any, even in a model without
    positions or with recurrence.
    """

    def __init__(self, actor: Any, temperature: float | None) -> None:
        self.actor, self.temperature = actor, temperature
        self._takes_positions = _takes(actor, "position_ids")

    def rows(self, batch: LossBatch, *, entropy: bool) -> Scores:
        batch = _where(self.actor, batch)
        place = batch.attention.cumsum(1) - 1
        width = max(int(place[:, -1].max()) + 1, 1) if place.numel() else 1
        ids = batch.tokens.new_zeros(len(batch.tokens), width)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        row, at = batch.attention.nonzero(as_tuple=True)
        ids[row, place[row, at]] = batch.tokens[row, at]
        mask[row, place[row, at]] = True
        logits = self._logits(ids, mask)
        row, at = batch.mask.nonzero(as_tuple=True)
        chosen = logits[row, place[row, at] - 1].float() / _temperature(self.actor, self.temperature)
        log_p = torch.log_softmax(chosen, -1)
        picked = log_p.gather(1, batch.tokens[row, at, None].long())[:, 0]
        return Scores(picked, entropy_of(log_p) if entropy else None)

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        out = self.actor(**inputs)
        logits = getattr(out, "logits", out)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise DataError(
                f"{type(self.actor).__name__} returned {type(logits).__name__}; GRPOLoss needs logits of shape [B, T, "
                "V]."
            )
        if logits.shape[:2] != ids.shape:
            raise DataError(
                f"{type(self.actor).__name__} returned logits of shape {list(logits.shape)} for tokens of shape "
                f"{list(ids.shape)}; GRPOLoss needs one row of logits per token. Adapters that add virtual tokens "
                "before the prompt are not supported."
            )
        return logits

    def check_causal(self) -> None:
        """Reject a model whose logits of a token change with the tokens after it."""
        head = self.actor.get_output_embeddings()
        device = next(self.actor.parameters()).device
        ids = torch.arange(_PROBE_TOKENS, device=device).remainder(head.weight.shape[0] if head is not None else 2)
        ids = ids.expand(2, -1).clone()
        ids[1, -1] = 0 if int(ids[0, -1]) else 1
        was_training = self.actor.training
        self.actor.eval()
        with torch.no_grad():
            original, altered = self._logits(ids, torch.ones_like(ids, dtype=torch.bool))[:, :-1].float()
        self.actor.train(was_training)
        allowed = rounding(next(self.actor.parameters()), fine=1e-5, coarse=1e-2) * original.abs().max()
        if not bool(((original - altered).abs() <= allowed).all()):
            raise DefinitionError(
                f"{type(self.actor).__name__} is not causal: the last token changes the logits of earlier tokens. "
                "Pass a decoder, or set config.is_decoder = True if the config has that field."
            )


def _where(actor: Any, batch: LossBatch) -> LossBatch:
    """Return a batch on the device of the actor's parameters; unchanged if it has none."""
    parameter = next(actor.parameters(), None) if isinstance(actor, nn.Module) else None
    return batch if parameter is None else batch.to(parameter.device)


def _takes(actor: Any, argument: str) -> bool:
    """Return whether an actor's forward has an argument of this name, or takes any keyword."""
    try:
        parameters = inspect.signature(actor.forward if isinstance(actor, nn.Module) else actor).parameters
    except (TypeError, ValueError):
        return True
    return argument in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


class _Distribution:
    """A TorchRL actor, which gives a distribution aligned with the tokens."""

    def __init__(self, actor: Any, strategy: MaskingStrategy, samples: int) -> None:
        self.actor, self.samples = actor, samples
        self.make = getattr(actor, f"_get_{strategy}_dist", None)
        takes = inspect.signature(actor.get_dist).parameters
        self.options = {"logits_key": "logits"} if "logits_key" in takes else {}

    def rows(self, batch: LossBatch, *, entropy: bool) -> Scores:
        batch = _where(self.actor, batch)
        td = batch.source
        if td is None:
            masks = {"all_assistant_mask": batch.mask, "all_attention_mask": batch.attention}
            td = TensorDict({"tokens": {"full": batch.tokens}, "masks": masks}, [len(batch.tokens)])
        if self.make is not None:
            dist: Any = self.make(td)
        else:
            dist = self.actor.get_dist(td, **self.options)
        log_probs = _fitting(dist.log_prob(batch.tokens), batch, "log-probs")
        entropies = None
        if entropy:
            entropies = _fitting(self._entropy(dist), batch, "entropies")[batch.mask]
        return Scores(log_probs[batch.mask].float(), entropies)

    def _entropy(self, dist: Any) -> torch.Tensor:
        """Return the exact entropy, or a Monte-Carlo estimate from `samples_mc_entropy` samples."""
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
            f"the actor's {what} have shape {list(values.shape)}, but the tokens have shape "
            f"{list(batch.tokens.shape)}. TorchRL's wrappers pad on the left: pass padding_side='left', or use "
            "pad_output=True."
        )
    return values


def adapt_actor(actor: Any, *, temperature: float | None, strategy: MaskingStrategy, samples: int) -> Actor:
    """Choose how to score with an actor. Its own methods take precedence; a faster one must give the same result.

    1. `hidden_states` and `head_weight` (`CausalLMPolicy`): the head is applied in chunks.
    2. A transformers model, or TorchRL's wrapper around one, whose forward pass is not overridden: as 1, on the
       model, at the wrapper's temperature.
    3. `log_probs(input_ids, attention_mask, score_mask)`.
    4. TorchRL's `get_dist(tensordict)`: full logits.
    5. A module that returns logits [B, T, V].
    """
    policy = _fast_policy(actor, temperature)
    if policy is not None:
        return _Policy(policy, temperature)
    if hasattr(actor, "log_probs") and callable(actor.log_probs):
        return _Scorer(actor)
    if hasattr(actor, "get_dist"):
        return _Distribution(actor, strategy, samples)
    if callable(actor):
        adapted = _Logits(actor, temperature)
        if isinstance(actor, nn.Module) and hasattr(actor, "get_output_embeddings") and hasattr(actor, "config"):
            refuse_other_directions(actor)
            adapted.check_causal()
        return adapted
    raise DefinitionError(
        f"actor_network is of type {type(actor).__name__}; GRPOLoss needs hidden_states and head_weight "
        "(CausalLMPolicy), a transformers model, log_probs(...), get_dist(...), or a module that returns logits."
    )


def _fast_policy(actor: Any, temperature: float | None) -> Any | None:
    """Return a policy that gives the actor's hidden states and head, or None if the actor must be called itself."""
    is_policy, policy = actor_of(actor)
    if is_policy:
        return policy
    if hasattr(actor, "hidden_states") and hasattr(actor, "head_weight"):
        plain = not isinstance(actor, TokenPolicy) or methods_are_of(actor, "rlhf_pipeline", _SCORES)
        return actor if plain else None
    is_model = isinstance(actor, nn.Module) and hasattr(actor, "get_output_embeddings")
    if is_model and methods_are_of(_base(actor), "transformers", ("forward",)):
        try:
            return TokenPolicy(actor, temperature=_temperature(actor, temperature))
        except DefinitionError:
            return None  # Its logits are not a plain head on hidden states, so score through the logits.
    return None


_SCORES = ("forward", "log_probs", "get_dist", "_get_rlhf_dist", "_get_sft_dist", "_get_generic_dist")


def _base(model: Any) -> Any:
    """The model inside peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
