"""TorchRL's containers, and its wrapper base class with public distribution methods.

`Tokens`, `Masks`, `ChatHistory`, `LogProbs` and `Text` are TorchRL's own classes, so TensorDicts are interchangeable.
`LLMWrapperBase` is TorchRL's base class with the four masks as public methods that are right for left, right and no
padding; TorchRL's private names call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch import distributions as D
from torchrl.modules.llm.policies.common import ChatHistory, LogProbs, Masks, Text, Tokens
from torchrl.modules.llm.policies.common import LLMWrapperBase as _TorchRLWrapperBase

from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.errors import DataError, MissingKeyError, UnsupportedError
from rlhf_pipeline.interop.torchrl.distribution import LogProbDistribution
from rlhf_pipeline.policies.token_batches import Key, TokenBatch, leaf, pad_like, prompt_lengths, read_ids

__all__ = ["CONTAINERS", "ChatHistory", "LLMWrapperBase", "LogProbDistribution", "LogProbs", "Masks", "Text", "Tokens"]

CONTAINERS = ("tokens", "masks", "log_probs", "text", "history")
"""The values that a policy reads and writes; the option `NAME_key` sets the key of each."""


def _calls(name: str) -> Callable[..., D.Distribution]:
    """Return a method that calls the method of this name, so that overrides take effect."""

    def method(self: LLMWrapperBase, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> D.Distribution:
        return getattr(self, name)(tensordict, *args, **kwargs)

    return method


class LLMWrapperBase(_TorchRLWrapperBase):
    """The base of a language model policy over TensorDicts.

    A subclass implements `token_distribution`, `forward` and `get_new_version`. Distributions are aligned with the
    tokens: position `t` is the distribution of token `t`. A padded batch keeps its layout, on whichever side its
    padding is on; ragged rows are padded on `padding_side`, left by TorchRL's convention.

    Attributes:
        generate: whether `forward` samples (True) or scores (False).
        input_mode: "tokens", "text" or "history".
        pad_output: whether sampled results are padded.
        tokens_key: key of `Tokens`; likewise `masks_key`, `log_probs_key`, `text_key`, `history_key`.
        attention_mask_key: key of the attention mask of token input if there is none among the masks.
    """

    generate: bool = False
    pad_output: bool = False
    input_mode: str = "tokens"
    tokens_key: Key = "tokens"
    masks_key: Key = "masks"
    log_probs_key: Key = "log_probs"
    text_key: Key = "text"
    history_key: Key = "history"
    inplace: Any = True
    attention_mask_key: Key = "attention_mask"
    layout: torch.layout | None = None
    num_samples: int | None = None
    _min_batch_size: int | None = None
    _max_batch_size: int | None = None

    def token_distribution(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor) -> D.Distribution:
        """Return the distribution of the tokens of a padded batch.

        Args:
            input_ids: int64 `[B, T]`.
            attention_mask: bool `[B, T]`.
            mask: bool `[B, T]`, the positions to include.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement token_distribution.")

    def read_batch(self, tensordict: TensorDictBase, padding_side: Side = "left") -> TokenBatch:
        """Read the complete sequences of a TensorDict as a padded batch.

        Raises:
            DataError: there are no token ids.
        """
        batch = read_ids(tensordict, _sub(self.tokens_key, "full"), self._mask_key(tensordict), padding_side)
        if batch is None:
            names = sorted(str(k) for k in tensordict.keys(include_nested=True, leaves_only=True))
            raise MissingKeyError(
                f"The TensorDict has no {_sub(self.tokens_key, 'full')!r} (its keys: {', '.join(names) or 'none'}). "
                "Write the token ids of the prompt and the completion under this key, either ragged or with shape "
                "[B, T]."
            )
        return batch

    @property
    def _attention_key(self) -> Key:
        return _sub(self.masks_key, "all_attention_mask")

    def _mask_key(self, tensordict: TensorDictBase) -> Key:
        return self._attention_key if leaf(tensordict, self._attention_key) is not None else self.attention_mask_key

    @property
    def _assistant_key(self) -> Key:
        return _sub(self.masks_key, "all_assistant_mask")

    def _must_score(self, method: str) -> None:
        if self.generate:
            raise UnsupportedError(
                f"{method} scores existing tokens, but this policy generates. Use "
                "policy.get_new_version(generate=False), which shares the model."
            )

    def get_dist(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        logits_key: Key = "logits",
        mask_key: Key | None = None,
        as_padded_tensor: bool | None = None,
        as_nested_tensor: bool | None = None,
        padding_value: float | None = None,
        padding_side: Side = "left",
        layout: torch.layout | None = None,
        **further: Any,
    ) -> D.Distribution:
        """Return the distribution of every token, or of the tokens of the mask under `mask_key`.

        Args:
            tensordict: tokens `[B, T]` with masks, or ragged.
            tensordict_out: logits are written here under `logits_key` if given; nothing is written otherwise.
            logits_key: see `tensordict_out`.
            mask_key: a bool leaf aligned with the tokens; the attention mask when None.
            padding_side: the side on which ragged rows are padded.
            as_padded_tensor: no effect: a distribution is over a padded batch.
            as_nested_tensor: True is rejected.
            padding_value: no effect: masks distinguish padding from tokens, values do not.
            layout: `torch.jagged` is rejected.
            **further: no effect, as in TorchRL.

        Raises:
            DataError: tokens or mask are missing or do not match.
            DefinitionError: the policy is set to generate, or a nested distribution is requested.
        """
        self._must_score("get_dist")
        del as_padded_tensor, padding_value, further
        if as_nested_tensor or layout == torch.jagged:
            raise UnsupportedError(
                "A distribution over nested tensors has no working log_prob. Omit as_nested_tensor and layout: "
                "ragged rows are padded on padding_side, and masked."
            )
        batch = self.read_batch(tensordict, padding_side)
        mask = batch.attention_mask
        if mask_key is not None:
            mask = mask & pad_like(leaf(tensordict, mask_key), batch, repr(mask_key)).bool()
        dist = self.token_distribution(batch.input_ids, batch.attention_mask, mask)
        if tensordict_out is not None:
            tensordict_out.set(logits_key, getattr(dist, "logits"))  # noqa: B009
        return dist

    def get_generic_dist(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: Key | None = None,
        logits_key: Key = "logits",
        padding_side: Side = "left",
        **options: Any,
    ) -> D.Distribution:
        """Return the distribution of the tokens of the attention mask, or of the mask under `attention_mask_key`."""
        del logits_key
        return self.get_dist(tensordict, mask_key=attention_mask_key, padding_side=padding_side, **options)

    def get_rlhf_dist(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: Key | None = None,
        logits_key: Key = "logits",
        padding_side: Side = "left",
        **options: Any,
    ) -> D.Distribution:
        """Return the distribution of the assistant's tokens: the tokens that a policy produced, over all turns."""
        del logits_key
        key = self._assistant_key if assistant_mask_key is None else assistant_mask_key
        return self.get_dist(tensordict, mask_key=key, padding_side=padding_side, **options)

    def get_sft_dist(
        self,
        tensordict: TensorDictBase,
        tokens_key: Key | None = None,
        logits_key: Key = "logits",
        assistant_mask_key: Key | None = None,
        attention_mask_key: Key | None = None,
        padding_side: Side = "left",
        **further: Any,
    ) -> D.Distribution:
        """Return the distribution of everything after the prompt.

        The prompt's length comes from "num_prompt_tokens", a ragged prompt, the assistant's first token, or a padded
        prompt that is the first columns of the tokens, in this order.

        Args:
            tensordict: tokens `[B, T]` with masks, or ragged.
            tokens_key: of the prompts.
            assistant_mask_key: of the assistant's mask.
            attention_mask_key: of a mask that excludes further tokens.
            logits_key: no effect: nothing is written.
            padding_side: the side on which ragged rows are padded.
            **further: no effect, as in TorchRL.

        Raises:
            DataError: the prompts' lengths are unknown.
        """
        self._must_score("get_sft_dist")
        del logits_key, further
        batch = self.read_batch(tensordict, padding_side)
        prompt_key = _sub(self.tokens_key, "prompt") if tokens_key is None else tokens_key
        assistant_key = self._assistant_key if assistant_mask_key is None else assistant_mask_key
        lengths = prompt_lengths(tensordict, batch, prompt_key, assistant_key)
        if lengths is None:
            raise DataError(
                "The lengths of the prompts are unknown. The TensorDict must contain num_prompt_tokens [B], ragged "
                f"prompts under {prompt_key!r}, or a mask of the assistant's tokens under {assistant_key!r}."
            )
        index = batch.attention_mask.cumsum(1) - 1
        mask = batch.attention_mask & (index >= lengths[:, None])
        if attention_mask_key is not None:
            mask &= pad_like(leaf(tensordict, attention_mask_key), batch, repr(attention_mask_key)).bool()
        return self.token_distribution(batch.input_ids, batch.attention_mask, mask)

    def get_dist_with_custom_mask(
        self,
        tensordict: TensorDictBase,
        mask: Tensor,
        logits_key: Key = "logits",
        padding_side: Side = "left",
        **further: Any,
    ) -> D.Distribution:
        """Return the distribution of the tokens of a mask.

        Args:
            tensordict: tokens `[B, T]` with masks, or ragged.
            mask: bool `[B, T]`, aligned with the padded tokens.
            logits_key: no effect: nothing is written.
            padding_side: the side on which ragged rows are padded.
            **further: no effect, as in TorchRL.

        Raises:
            DataError: the mask's shape differs from the tokens'.
        """
        self._must_score("get_dist_with_custom_mask")
        del logits_key, further
        batch = self.read_batch(tensordict, padding_side)
        scored = pad_like(mask, batch, "mask").bool()
        return self.token_distribution(batch.input_ids, batch.attention_mask, scored & batch.attention_mask)

    # TorchRL's own names, which its losses call.
    _get_sft_dist = _get_dist_with_prompt_mask = _calls("get_sft_dist")
    _get_rlhf_dist = _get_dist_with_assistant_mask = _calls("get_rlhf_dist")
    _get_generic_dist = _get_dist_with_attention_mask = _calls("get_generic_dist")
    _get_dist_with_custom_mask = _calls("get_dist_with_custom_mask")

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Score the tokens of `data` and return the log-probs of the responses.

        Args:
            data: the input of `forward`.
            **get_kwargs: passed to `TensorDict.get`, for example `as_padded_tensor=True`.

        Returns:
            `("log_probs", "response")` if the prompts' lengths are known, otherwise `("log_probs", "full")`, which is
            aligned with the tokens.
        """
        self._must_score("log_prob")
        scored: Any = self(data)
        response = scored.get(_sub(self.log_probs_key, "response"), None, **get_kwargs)
        return scored.get(_sub(self.log_probs_key, "full"), **get_kwargs) if response is None else response


def _sub(key: Key, name: str) -> tuple[str, ...]:
    return (key, name) if isinstance(key, str) else (*key, name)
