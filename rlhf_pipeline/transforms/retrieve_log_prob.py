"""Reference log-probs, computed once per trajectory: on the write path, or during sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Composite

from rlhf_pipeline.data.keys import LOG_PROBS, NUM_PROMPT_TOKENS, REF_LOG_PROBS, TOKENS, Key
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.data.tensordicts import holds, is_stack, with_full_log_probs
from rlhf_pipeline.data.trajectories import Flat, Trajectories, per_token
from rlhf_pipeline.errors import DefinitionError, EngineError, MissingKeyError
from rlhf_pipeline.policies.encoding import tokenizer_with_template, with_tokens
from rlhf_pipeline.transforms.base import (
    ColumnTransform,
    Pass,
    as_scorer,
    declare_per_token,
    device_of,
    in_next,
    placed,
    scored_positions,
    start_passes,
)

_ENCODING: dict[str, Any] = {
    **{"return_assistant_tokens_mask": True, "tokenize": True, "return_tensors": "pt"},
    **{"padding": False, "add_generation_prompt": False},
}
"""How conversations are encoded: the arguments of a tokenizer's chat template."""


class RetrieveLogProb(ColumnTransform):
    """Writes the log-probs of a reference model for every completed trajectory.

    Works from the stored token ids. Only trajectories without token ids, which exist as chat histories or text, are
    encoded here, and keep the ids and masks; sampled trajectories are never encoded, as that would change them.
    Trajectories are sorted by length and scored within a token budget; only response positions reach the head; no
    autograd graph is kept. A batch that already has the log-probs passes unchanged, so each trajectory is scored once.

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
        tokenizer: for conversations and text, with the chat template that the model names; the model's by default.
        detach: False keeps the graph when called as a forward transform. The write path never does.
        device: where to run the model; None keeps its device.
        padding_side: of rows encoded here for a model with `pad_output`; otherwise the result has the batch's form.
        behaviour_model: fills `("log_probs", "full")` if the collector set none, at the temperature of this model.
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
            raise DefinitionError("RetrieveLogProb needs a reference model: pass either model= or actor=.")
        if token_budget < 1:
            raise DefinitionError(f"token_budget is {token_budget}; it must be at least 1.")
        if log_prob_key is not None and log_prob_key[:1] != ("next",):
            log_prob_key = ("next", log_prob_key) if isinstance(log_prob_key, str) else ("next", *log_prob_key)
        out_key = log_probs_full_key or log_prob_key or REF_LOG_PROBS
        super().__init__(in_keys=[TOKENS], out_keys=[out_key])
        # As in TorchRL's wrappers, rows given as text are returned padded if the model requires it.
        scorer = model if model is not None else actor
        pads = getattr(scorer, "pad_output", False)
        # Kept out of the submodules: a checkpoint of the buffer must not carry the reference's weights.
        self.__dict__["actor"] = scorer
        self.tokenizer_kwargs = {**_ENCODING, **(tokenizer_kwargs or {})}
        self.__dict__["model"] = as_scorer(scorer, "RetrieveLogProb")
        self.__dict__["behaviour_model"] = (
            None if behaviour_model is None else as_scorer(behaviour_model, "RetrieveLogProb")
        )
        if tokenizer is None:
            tokenizer = getattr(self.model, "tokenizer", None)
        else:
            templates = {name: getattr(scorer, name, None) for name in ("chat_template", "chat_template_name")}
            tokenizer = tokenizer_with_template(tokenizer, templates)
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

    @property
    def log_prob_key(self) -> Key:
        """The older name of `log_probs_full_key`."""
        return self.log_probs_full_key

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        whole = next_tensordict if TOKENS in next_tensordict.keys(True) else tensordict
        key = self.log_probs_full_key
        filled = self._fill(whole.exclude("next"), writing=False)
        if not is_stack(filled):
            return next_tensordict.set(in_next(key), filled.get(key))
        rows = next_tensordict.unbind(0)  # the log-probs of a step are ragged
        return lazy_stack(
            [row.set(in_next(key), done.get(key)) for row, done in zip(rows, filled.unbind(0), strict=True)]
        )  # pyright: ignore[reportReturnType]

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        key = in_next(self.log_probs_full_key)
        if tensordict_reset.get(key, None) is None:
            tensordict_reset.set(key, torch.zeros(*tensordict_reset.batch_size, 1))
        return tensordict_reset

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare the log-probs, one per token, that are added to a step of an environment."""
        return declare_per_token(output_spec, [in_next(self.log_probs_full_key)])

    def is_done(self, td: TensorDictBase) -> bool:
        """Return whether a batch already has the log-probs."""
        scored = self.behaviour_model is None or holds(td, LOG_PROBS)
        return scored and holds(td, self._key(td.get("next", None) is not None))

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """Encode trajectories that exist as histories or text only."""
        if not holds(td, TOKENS) and not self.is_done(td):
            return with_tokens(td, self.tokenizer, history_key=self.history_key, padding_side=self.padding_side)
        return with_full_log_probs(td, LOG_PROBS)

    def _key(self, has_next: bool) -> Key:
        """Return the key of the log-probs: in `next` if the batch has one, unless the key begins with `next`."""
        key = self.log_probs_full_key
        inner: tuple[str, ...] = (key,) if isinstance(key, str) else key
        return ("next", *inner) if has_next and inner[0] != "next" else key

    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return the missing log-probs; unscored positions are NaN on the write path, otherwise 0."""
        fill, out = math.nan if writing else 0.0, dict[Key, Flat]()
        with torch.set_grad_enabled(not writing and not self.detach and torch.is_grad_enabled()):
            key = self._key(any(isinstance(name, tuple) and name[0] == "next" for name in batch))
            for name, model in ((LOG_PROBS, self.behaviour_model), (key, self.model)):
                if model is not None and name not in batch:
                    passes, tokens = self.start(batch, model)
                    out[name] = Flat(placed(passes, tokens, fill=fill), tokens.lengths)
        return out

    def start(self, batch: Trajectories, model: Any) -> tuple[list[Pass], Flat]:
        """Start scoring trajectories, without waiting for the device; return the passes, and the token ids."""
        tokens = per_token(batch, TOKENS)
        if tokens is None:
            raise MissingKeyError(f"the batch has no token ids under {TOKENS!r}")
        scored = scored_positions(batch, tokens, self.assistant_only)
        return start_passes(model, tokens, scored, token_budget=self.token_budget, device=self.device), tokens


class ScoringBeside:
    """Scores the completions of one rollout with the reference as they end, while others are still being sampled.

    A pass starts when the token budget of the transform is full. On CUDA passes run on a separate stream: they need
    arithmetic, and decode steps memory. The host waits for all passes at once, in `columns`.

    The two streams share nothing but the reference's weights, which do not change during a rollout: inputs and results
    of a pass are allocated, used and copied to the host on its own stream. So if sampling fails, no wait is needed.
    """

    def __init__(self, retrieve: RetrieveLogProb) -> None:
        self._retrieve = retrieve
        self._waiting: list[tuple[int, int, Tensor]] = []
        self._longest = 0
        self._passes: list[Pass] = []
        device = device_of(retrieve.model)
        self._stream = None if device is None else stream_beside(device)
        if self._stream is not None:
            # The weights may have moved on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def ended(self, index: int, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a completion that has ended, with its prompt's token ids and its position in the rollout."""
        row = torch.tensor([*prompt, *tokens])
        if max(self._longest, len(row)) * (len(self._waiting) + 1) > self._retrieve.token_budget:
            self._start()
        self._waiting.append((index, len(prompt), row))
        self._longest = max(self._longest, len(row))

    def columns(self, batch: Trajectories) -> dict[Key, Flat]:
        """Return the log-probs of the rollout's trajectories, which contain all its completions in sequence."""
        self._start()
        tokens, scored = per_token(batch, TOKENS), sum(len(scored_pass.rows) for scored_pass in self._passes)
        if tokens is None or scored != batch.n:
            raise EngineError(
                f"the engine reported the end of {scored} of {batch.n} completions, so the others have no reference "
                "log-probs, and the rollout was not stored. The engine's `generate` must call `ended` for each "
                "completion."
            )
        with torch.cuda.stream(self._stream):
            values = placed(self._passes, tokens, fill=math.nan)
        return {self._retrieve._key(has_next=True): Flat(values, tokens.lengths)}

    def _start(self) -> None:
        """Start scoring the completions that wait."""
        if not self._waiting:
            return
        indices, prompts, rows = zip(*self._waiting, strict=True)
        self._waiting, self._longest = [], 0
        tokens = Flat(torch.cat(rows), torch.tensor([len(row) for row in rows]))
        batch = Trajectories(len(rows), {TOKENS: tokens, NUM_PROMPT_TOKENS: Flat(torch.tensor(prompts))})
        # The slots are in inference mode, and a model must not keep a tensor of it.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
            for scored_pass in self._retrieve.start(batch, self._retrieve.model)[0]:
                self._passes.append(
                    Pass(torch.tensor(indices)[scored_pass.rows], scored_pass.targets, scored_pass.scores)
                )


@cache
def stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream for passes during decoding; one per device, because freed memory stays with its stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
