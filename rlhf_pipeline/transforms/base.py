"""What the transforms of the write path share.

TensorDicts are taken apart at the door, the work is on flat columns; and a model scores ragged trajectories by token
budget, sorted by length, from stored token ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from rlhf_pipeline.data.keys import ASSISTANT_MASK, LOG_PROBS, NUM_PROMPT_TOKENS, TOKENS, Key
from rlhf_pipeline.data.padding import length_mask
from rlhf_pipeline.data.trajectories import (
    Flat,
    Trajectories,
    attach,
    columns_of,
    per_token,
    put,
    ragged_tokens,
    token_level,
)
from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.policies.adapters import policy_of
from rlhf_pipeline.policies.packed import plan_batches
from rlhf_pipeline.policies.token_policy import TokenPolicy


class ColumnTransform(Transform):
    """A transform that adds columns to trajectories and leaves the rest as it is."""

    @abstractmethod
    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """The columns that a batch gets.

        Args:
            batch: trajectories; it is not changed.
            writing: whether the batch is on the write path, and not in an environment or read from a store.
        """

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """A TensorDict `[n]` that can be taken apart; a place to encode what is no column yet."""
        return td

    def is_done(self, td: TensorDictBase) -> bool:
        """Whether a TensorDict has all the columns, so that it need not be taken apart."""
        del td
        return False

    def write(self, batch: Trajectories) -> Trajectories | None:
        """The batch on its way to the store, with the new columns."""
        return Trajectories(batch.n, batch | self.new_columns(batch, writing=True))

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The batch with the new columns, in its form; the input is not changed."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None or in_environment(self):
            return tensordict
        return self._fill(tensordict, writing=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the new columns of a batch that has not been through the transform, in the batch itself.

        Args:
            tensordict: trajectories in any of the forms of the write path, or a sampled batch.

        Returns:
            The batch that was passed, with the columns in its form.
        """
        if tensordict is None:  # pyright: ignore[reportUnnecessaryComparison]
            return tensordict
        return put(tensordict, self._fill(tensordict, writing=False))

    def _fill(self, td: TensorDictBase, *, writing: bool) -> TensorDictBase:
        if td.batch_dims == 0:
            return self._fill(lazy_stack([td]), writing=writing)[0]  # pyright: ignore[reportReturnType,reportArgumentType]
        if self.is_done(td):
            return td
        td = token_level(self.prepared(td))
        return attach(td, self.new_columns(ragged_tokens(columns_of(td)), writing=writing))


def in_environment(transform: Transform) -> bool:
    """Whether a transform belongs to an environment, whose actions are no trajectories to write."""
    try:
        return transform.container is not None
    except ValueError:  # a Compose that belongs to none
        return False


def declare_per_token(output_spec: Composite, observed: Sequence[Key], rewards: Sequence[Key] = ()) -> Composite:
    """Declare observations and rewards with one value per token, as an environment that samples whole completions has.

    Args:
        output_spec: of the environment; it is changed.
        observed: keys as they are inside `next`.
        rewards: the same.
    """
    shape: Any = (*output_spec.shape, -1)
    spec: Any = Unbounded(shape=shape, device=output_spec.device, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    for name, keys in (("full_observation_spec", observed), ("full_reward_spec", rewards)):
        if keys and name not in output_spec.keys():  # noqa: SIM118  # a Composite is no dict
            output_spec[name] = Composite(shape=output_spec.shape)
        for key in keys:
            output_spec[name, *((key,) if isinstance(key, str) else key)] = spec.clone()
    return output_spec


def in_next(key: Key) -> Key:
    """A key as a step of an environment calls it inside `next`."""
    if isinstance(key, str) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]


class Scorer(Protocol):
    """What gives log-probs of tokens; `CausalLMPolicy` does."""

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None) -> Tensor:
        """float32 `[B, T]`, 0 where not scored."""
        ...


def as_scorer(model: Any, owner: str) -> Scorer:
    """Return a model with `log_probs`; a transformers model, or a wrapper of TorchRL, is taken as a policy.

    Raises:
        DefinitionError: if the model cannot score tokens.
    """
    model = policy_of(model, owner)
    if callable(getattr(model, "log_probs", None)):
        return model
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return TokenPolicy(model)
    raise DefinitionError(
        f"{owner} got a {type(model).__name__}, which has no log_probs(input_ids, attention_mask, score_mask). "
        "Pass a CausalLMPolicy or a causal language model of transformers."
    )


def scored_positions(batch: Trajectories, like: Flat, assistant_only: bool) -> Tensor:
    """bool, flat: the tokens that have or get a log-prob.

    Raises:
        DataError: if nothing tells the assistant's tokens from the prompt's.
    """
    lengths = like.lengths
    if lengths is None:
        raise MissingKeyError(f"the batch has no ragged token column to score: pass {TOKENS!r} per trajectory")
    starts = lengths.cumsum(0) - lengths
    first = starts[lengths > 0]  # no token has a log-prob without one before it
    mask = per_token(batch, ASSISTANT_MASK, like) if assistant_only else None
    if mask is not None:
        out = mask.values.to(torch.bool, copy=True)
    elif not assistant_only:
        out = torch.ones(int(lengths.sum()), dtype=torch.bool)
    else:
        out = _responses(batch, like, starts, lengths)
    out[first] = False
    return out


def _responses(batch: Trajectories, like: Flat, starts: Tensor, lengths: Tensor) -> Tensor:
    """The assistant's tokens where no mask tells them."""
    prompt = batch.get(NUM_PROMPT_TOKENS)
    if isinstance(prompt, Flat):
        response = starts + prompt.values.reshape(-1)
        return torch.arange(int(lengths.sum())) >= torch.repeat_interleave(response, lengths)
    scored = per_token(batch, LOG_PROBS, like)
    if scored is not None and bool(scored.values.isnan().any()):
        return scored.values.isfinite()
    raise DataError(
        f"nothing tells the assistant's tokens from the prompt's: pass {ASSISTANT_MASK!r} or "
        f"{NUM_PROMPT_TOKENS!r}, or set assistant_only=False"
    )


def score(
    model: Scorer,
    tokens: Flat,
    scored: Tensor,
    *,
    token_budget: int,
    fill: float = float("nan"),
    device: torch.device | None = None,
) -> Tensor:
    """Log-probs of the scored tokens.

    Args:
        model: the scorer.
        tokens: ragged token ids.
        scored: bool, flat, where a log-prob is wanted.
        token_budget: padded tokens of one forward pass; a longer trajectory passes alone.
        fill: value of the other positions.
        device: where the model runs; None asks the model.

    Returns:
        float32, flat, on the tokens' device.
    """
    lengths = tokens.lengths
    if lengths is None:
        raise DataError("token ids must be ragged or padded, one row per trajectory")
    home = tokens.values.device
    if isinstance(model, TokenPolicy):
        device = None  # it decides on the host what it computes, and moves that
    elif device is None:
        device = _device_of(model) or home
    out = torch.full(tokens.values.shape, fill, dtype=torch.float32, device=home)
    starts = lengths.cumsum(0) - lengths
    for rows in plan_batches(lengths, max(token_budget, int(lengths.max()))):
        real = length_mask(lengths[rows])
        at = torch.where(real, starts[rows, None] + torch.arange(real.shape[1]), 0)  # where each place is in the ids
        targets = scored[at]  # padding is at the first place, which is never scored
        if not bool(targets.any()):
            continue
        ids = torch.where(real, tokens.values[at], 0).to(torch.int64)
        given = [ids, real, targets]
        found = model.log_probs(*(given if device is None else upload(given, device))).to(home)
        picked = found[targets].float()
        index = at[targets]
        out = out.index_put((index,), picked) if picked.requires_grad else out.index_copy_(0, index, picked)
    return out


def _device_of(model: Any) -> torch.device | None:
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
        return None if parameter is None else parameter.device
    return None
