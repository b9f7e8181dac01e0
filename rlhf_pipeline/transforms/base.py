"""Shared parts of the transforms of the write path.

The work is done on columns; TensorDicts are flattened on entry. Models score ragged trajectories from
stored token ids, sorted by length, within a token budget.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from rlhf_pipeline.data.episodes import last_rows
from rlhf_pipeline.data.keys import ASSISTANT_MASK, EPISODE_SIZE, LOG_PROBS, NUM_PROMPT_TOKENS, TOKENS, Key
from rlhf_pipeline.data.padding import length_mask
from rlhf_pipeline.data.tensordicts import along_one_dimension, attach, put, steps_of
from rlhf_pipeline.data.trajectories import Flat, Trajectories, per_token
from rlhf_pipeline.data.upload import download, upload
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.policies.adapters import policy_of
from rlhf_pipeline.policies.packed import plan_batches
from rlhf_pipeline.policies.token_policy import TokenPolicy


class ColumnTransform(Transform):
    """A transform that adds columns to trajectories and leaves the rest unchanged."""

    @abstractmethod
    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return the columns to add to a batch.

        Args:
            batch: trajectories; it is not changed.
            writing: whether the batch is on the write path, rather than in an environment or read from a store.
        """

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """Return a TensorDict `[n]` ready to be flattened; subclasses may encode histories or text here."""
        return td

    def is_done(self, td: TensorDictBase) -> bool:
        """Return whether a TensorDict has all the columns already, so that it need not be flattened."""
        del td
        return False

    def write(self, batch: Trajectories) -> Trajectories | None:
        """Return the batch with the new columns, before it is stored."""
        return Trajectories(batch.n, batch | self.new_columns(batch, writing=True))

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the batch with the new columns, in its own form; the input is not changed."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None or in_environment(self):
            return tensordict
        return self._fill(tensordict, writing=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the new columns in place, unless the batch has been through the transform already.

        Args:
            tensordict: trajectories in any of the forms of the write path, or a sampled batch.

        Returns:
            The given batch, with the columns in its form.
        """
        if tensordict is None:  # pyright: ignore[reportUnnecessaryComparison]
            return tensordict
        return put(tensordict, self._fill(tensordict, writing=False))

    def _fill(self, td: TensorDictBase, *, writing: bool) -> TensorDictBase:
        if td.batch_dims == 0:
            return self._fill(lazy_stack([td]), writing=writing)[0]  # pyright: ignore[reportReturnType,reportArgumentType]
        if 0 in td.batch_size:
            return td
        rows = along_one_dimension(td)
        if self.is_done(rows):
            return td
        td = self.prepared(rows)
        return attach(td, self.new_columns(steps_of(td), writing=writing))


def outcomes(rows: Trajectories, rewards: Tensor) -> Tensor:
    """Return rewards of rows with 0 in place of NaN where another row of the episode has the outcome, float64 `[n]`."""
    values = rewards.detach().reshape(-1).double()
    if EPISODE_SIZE not in rows:
        return values
    return torch.where(torch.from_numpy(last_rows(rows)) | values.isfinite(), values, 0.0)


def in_environment(transform: Transform) -> bool:
    """Return whether a transform belongs to an environment, whose actions are not trajectories to write."""
    try:
        return transform.container is not None
    except ValueError:  # a Compose without an environment
        return False


def declare_per_token(output_spec: Composite, observed: Sequence[Key], rewards: Sequence[Key] = ()) -> Composite:
    """Declare observations and rewards with one value per token, for an environment that samples whole completions."""
    shape: Any = (*output_spec.shape, -1)
    spec: Any = Unbounded(shape=shape, device=output_spec.device, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    for name, keys in (("full_observation_spec", observed), ("full_reward_spec", rewards)):
        if keys and name not in output_spec.keys():  # noqa: SIM118  # a Composite is not a dict
            output_spec[name] = Composite(shape=output_spec.shape)
        for key in keys:
            output_spec[name, *((key,) if isinstance(key, str) else key)] = spec.clone()
    return output_spec


def in_next(key: Key) -> Key:
    """Return the name of a key inside `next`."""
    if isinstance(key, str) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]


class Scorer(Protocol):
    """Scores tokens, as `CausalLMPolicy` does."""

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None = None) -> Tensor:
        """Return log-probs, float32 `[B, T]`, 0 where not scored."""
        ...


def as_scorer(model: Any, owner: str) -> Scorer:
    """Return the model as a scorer; a transformers model or a wrapper of TorchRL becomes a policy.

    A policy that generates is rejected, as in TorchRL: its call would sample another completion.
    """
    if getattr(model, "generate", False) is True:
        raise DefinitionError(
            f"{owner} scores existing tokens, but the model ({type(model).__name__}) has generate=True. Pass "
            "policy.get_new_version(generate=False), which shares the weights."
        )
    model = policy_of(model, owner)
    if callable(getattr(model, "log_probs", None)):
        return model
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return TokenPolicy(model)
    raise DefinitionError(
        f"{owner} got a model of type {type(model).__name__}, which has no log_probs(input_ids, attention_mask, "
        "score_mask) method. Pass a CausalLMPolicy or a causal language model from transformers."
    )


def scored_positions(batch: Trajectories, like: Flat, assistant_only: bool) -> Tensor:
    """Return which tokens have or get a log-prob, bool, flat."""
    lengths = like.lengths
    if lengths is None:
        raise MissingKeyError(f"the batch has no ragged token column to score: pass {TOKENS!r} for each trajectory")
    starts = lengths.cumsum(0) - lengths
    first = starts[lengths > 0]  # the first token of a row has no log-prob
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
    """Return the assistant's tokens for a batch without an assistant mask."""
    prompt = batch.get(NUM_PROMPT_TOKENS)
    if isinstance(prompt, Flat):
        response = starts + prompt.values.reshape(-1)
        return torch.arange(int(lengths.sum())) >= torch.repeat_interleave(response, lengths)
    scored = per_token(batch, LOG_PROBS, like)
    if scored is not None and bool(scored.values.isnan().any()):
        return scored.values.isfinite()
    raise DataError(
        f"the assistant's tokens cannot be distinguished from the prompt's: pass {ASSISTANT_MASK!r} or "
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
    """Return the log-probs of the scored tokens.

    Args:
        model: the scorer.
        tokens: ragged token ids.
        scored: bool, flat, the tokens to score.
        token_budget: padded tokens of one forward pass; a longer trajectory gets a separate pass.
        fill: value of the other positions.
        device: where the model runs; None uses the model's own device.

    Returns:
        float32, flat, on the tokens' device.
    """
    return placed(start_passes(model, tokens, scored, token_budget=token_budget, device=device), tokens, fill=fill)


@dataclass(slots=True)
class Pass:
    """A forward pass that has been started.

    Attributes:
        rows: the trajectories in it, int64 `[B]`.
        targets: the scored tokens, bool `[B, T]`, on the host.
        scores: their log-probs, float `[B, T]`, where the model is.
    """

    rows: Tensor
    targets: Tensor
    scores: Tensor


def start_passes(
    model: Scorer, tokens: Flat, scored: Tensor, *, token_budget: int, device: torch.device | None = None
) -> list[Pass]:
    """Start the passes that score tokens, without waiting for the device; arguments as in `score`."""
    lengths = tokens.lengths
    if lengths is None:
        raise DataError("token ids must be ragged or padded, one row per trajectory")
    if isinstance(model, TokenPolicy):
        device = None  # it plans its work on the host and moves the inputs itself
    elif device is None:
        device = device_of(model) or tokens.values.device
    starts = lengths.cumsum(0) - lengths
    passes: list[Pass] = []
    for rows in plan_batches(lengths, token_budget):
        real = length_mask(lengths[rows])
        at = torch.where(real, starts[rows, None] + torch.arange(real.shape[1]), 0)  # index of each position in the ids
        targets = scored[at]  # padding points at index 0, which is never scored
        if not bool(targets.any()):
            continue
        ids = torch.where(real, tokens.values[at], 0).to(torch.int64)
        inputs = [ids, real, targets]
        scores = model.log_probs(*(inputs if device is None else upload(inputs, device)))
        passes.append(Pass(rows, targets, scores))
    return passes


def placed(passes: Sequence[Pass], tokens: Flat, *, fill: float) -> Tensor:
    """Return the log-probs of all passes over these trajectories, float32, flat; `fill` where there is none."""
    lengths, home = tokens.lengths, tokens.values.device
    assert lengths is not None
    out = torch.full(tokens.values.shape, fill, dtype=torch.float32, device=home)
    starts = lengths.cumsum(0) - lengths
    scores = [scored_pass.scores for scored_pass in passes]
    # The host prepared each pass while the device computed the one before, and waits once for all.
    scores = download(scores) if home.type == "cpu" else [pass_scores.to(home) for pass_scores in scores]
    for scored_pass, pass_scores in zip(passes, scores, strict=True):
        index = (starts[scored_pass.rows, None] + torch.arange(pass_scores.shape[1]))[scored_pass.targets]
        picked = pass_scores[scored_pass.targets].float()
        out = out.index_put((index,), picked) if picked.requires_grad else out.index_copy_(0, index, picked)
    return out


def device_of(model: Any) -> torch.device | None:
    """Return the device of a module's parameters; None if there are none, or it is not a module."""
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
        return None if parameter is None else parameter.device
    return None
