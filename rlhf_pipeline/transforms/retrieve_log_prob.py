"""Reference log-probs, computed once per trajectory on the write path."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite

from rlhf_pipeline.data.keys import LOG_PROBS, REF_LOG_PROBS, TOKENS, Key
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.data.trajectories import Flat, Trajectories, holds, per_token
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.policies.encoding import tokenizer_with_template, with_tokens
from rlhf_pipeline.transforms.base import (
    ColumnTransform,
    as_scorer,
    declare_per_token,
    in_next,
    score,
    scored_positions,
)


class RetrieveLogProb(ColumnTransform):
    """Writes the log-probs of a reference model for every completed trajectory.

    Works from the stored token ids. Only trajectories without token ids, which exist as chat histories or text, are
    encoded here, and keep the ids and masks; sampled trajectories are never encoded, as that would change them.
    Trajectories are sorted by length and scored within a token budget; only response positions reach the head; no
    autograd graph is kept. A batch that has the log-probs already passes unchanged, so each trajectory is scored once.

    Positions without a score are NaN on the write path and 0 when called as a forward transform.

    Args:
        model: the reference, a `CausalLMPolicy` or anything with
            `log_probs(input_ids [B, T], attention_mask [B, T], score_mask [B, T]) -> [B, T]`.
        actor: the older name of `model`.
        log_probs_full_key: key of the result; `("next", "ref_log_probs", "full")` by default. As in TorchRL, a key
            that does not begin with `next` is in `next` where the batch has one.
        log_prob_key: the older name of `log_probs_full_key`; always in `next`.
        history_key: key of conversations without token ids; `("history", "full")` by default.
        assistant_only: score the assistant's tokens only. False scores every token but the first.
        tokenizer_kwargs: `chat_template` or `chat_template_name` for conversations; no other option changes tokens.
        tokenizer: for conversations and text; the model's by default.
        detach: False keeps the graph when called as a forward transform. The write path never does.
        device: where to run the model; None leaves it where it is.
        padding_side: of rows encoded here for a model with `pad_output`; otherwise the result has the batch's form.
        behaviour_model: fills `("log_probs", "full")` where the collector set none, at its own temperature.
        token_budget: padded tokens of one forward pass.

    Raises:
        DefinitionError: if no model or two models are given, or the model cannot score tokens.

    >>> import torch
    >>> from tensordict import TensorDict, lazy_stack
    >>> class Uniform:
    ...     def log_probs(self, input_ids, attention_mask, score_mask):
    ...         return torch.where(score_mask, -1.0, 0.0)
    >>> tokens, mask = torch.tensor([5, 6, 7]), torch.tensor([False, True, True])
    >>> row = TensorDict({"tokens": {"full": tokens}, "masks": {"all_assistant_mask": mask}})
    >>> RetrieveLogProb(Uniform()).inv(lazy_stack([row]))[0]["next", "ref_log_probs", "full"]
    tensor([nan, -1., -1.])
    """

    on_write_path = True
    """See `KLRewardTransform`."""

    def __init__(
        self,
        model: Any = None,
        *,
        actor: Any = None,
        log_probs_full_key: Key | None = None,
        log_prob_key: Key | None = None,
        history_key: Key | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: dict[str, Any] | None = None,
        tokenizer: Any = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        padding_side: Side = "left",
        behaviour_model: Any = None,
        token_budget: int = 16_384,
    ) -> None:
        if (model is None) == (actor is None):
            raise DefinitionError("RetrieveLogProb needs a reference model: pass model=, or actor=, not both.")
        if token_budget < 1:
            raise DefinitionError(f"token_budget is {token_budget}; it must be at least 1.")
        if log_prob_key is not None and log_prob_key[:1] != ("next",):
            log_prob_key = ("next", log_prob_key) if isinstance(log_prob_key, str) else ("next", *log_prob_key)
        out_key = log_probs_full_key or log_prob_key or REF_LOG_PROBS
        super().__init__(in_keys=[TOKENS], out_keys=[out_key])
        # As in TorchRL's wrappers, rows given as text are returned padded if the model says so.
        pads = getattr(model if model is not None else actor, "pad_output", False)
        # Kept out of the submodules: a checkpoint of the buffer must not carry the reference's weights.
        self.__dict__["model"] = as_scorer(model if model is not None else actor, "RetrieveLogProb")
        self.__dict__["behaviour_model"] = (
            None if behaviour_model is None else as_scorer(behaviour_model, "RetrieveLogProb")
        )
        tokenizer = getattr(self.model, "tokenizer", None) if tokenizer is None else tokenizer
        self.__dict__["tokenizer"] = tokenizer_with_template(tokenizer, tokenizer_kwargs)
        self.padding_side: Side | None = padding_side if pads else None
        self.history_key: Key = ("history", "full") if history_key is None else history_key
        self.log_probs_full_key: Key = out_key
        self.assistant_only = assistant_only
        self.detach = detach
        self.device = None if device is None else torch.device(device)
        if self.device is not None and isinstance(self.model, torch.nn.Module):
            self.model.to(self.device)
        self.token_budget = int(token_budget)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        whole = next_tensordict if TOKENS in next_tensordict.keys(True) else tensordict
        key = self.log_probs_full_key
        filled = self._fill(whole.exclude("next"), writing=False)
        return next_tensordict.set(in_next(key), filled.get(key))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        key = in_next(self.log_probs_full_key)
        if tensordict_reset.get(key, None) is None:
            tensordict_reset.set(key, torch.zeros(*tensordict_reset.batch_size, 1))
        return tensordict_reset

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare the log-probs, one per token, that are added to a step of an environment."""
        return declare_per_token(output_spec, [in_next(self.log_probs_full_key)])

    def is_done(self, td: TensorDictBase) -> bool:
        """Return whether a batch has the log-probs already."""
        scored = self.behaviour_model is None or holds(td, LOG_PROBS)
        return scored and holds(td, self._key(td.get("next", None) is not None))

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """Encode trajectories that exist as histories or text only."""
        if not holds(td, TOKENS) and not self.is_done(td):
            return with_tokens(td, self.tokenizer, history_key=self.history_key, padding_side=self.padding_side)
        return td

    def _key(self, has_next: bool) -> Key:
        """Return the key of the log-probs: in `next` if the batch has one, unless the key begins with `next`."""
        key = self.log_probs_full_key
        inner: tuple[str, ...] = (key,) if isinstance(key, str) else key
        return ("next", *inner) if has_next and inner[0] != "next" else key

    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return the missing log-probs; unscored positions are NaN on the write path, otherwise 0."""
        fill, out = math.nan if writing else 0.0, dict[Key, Flat]()
        with torch.set_grad_enabled(not writing and not self.detach and torch.is_grad_enabled()):
            if self.behaviour_model is not None and LOG_PROBS not in batch:
                out[LOG_PROBS] = self._scores(batch, self.behaviour_model, fill)
            key = self._key(any(isinstance(name, tuple) and name[0] == "next" for name in batch))
            if key not in batch:
                out[key] = self._scores(batch, self.model, fill)
        return out

    def _scores(self, batch: Trajectories, model: Any, fill: float) -> Flat:
        tokens = per_token(batch, TOKENS)
        if tokens is None:
            raise MissingKeyError(f"the batch has no token ids under {TOKENS!r}")
        scored = scored_positions(batch, tokens, self.assistant_only)
        values = score(model, tokens, scored, token_budget=self.token_budget, fill=fill, device=self.device)
        return Flat(values, tokens.lengths)
