"""One decode step of the slots: draw the next token of each row from its hidden state, then run it through the trunk.

Both halves take tensors and return tensors, and no shape, address or branch in them depends on a value in a tensor. On
a CPU the host is between the two halves: it reads the tokens, and finished rows are never fed. On CUDA
`device_steps` puts them together, several times between two reads of the host, and replays them as one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_pipeline.policies.attention import grouped_queries, steps_attended_by
from rlhf_pipeline.policies.attention_name import implementation_of
from rlhf_pipeline.policies.engines.sampling import Truncation, drawn
from rlhf_pipeline.policies.engines.slot_cache import SlotCache
from rlhf_pipeline.policies.model_parts import ModelParts

MaskForm = Literal["columns", "full", "near", "by_kind"]
"""The form of the mask that a trunk accepts: columns, from which it builds its masks; or prepared masks of a step, for
complete rows, for the sliding window, or in a dict by kind of layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """How the layers of a trunk attend in a step.

    Attributes:
        form: of the mask.
        grouped: the heads that share keys are queries of one call, where transformers would copy the keys per head.
    """

    form: MaskForm
    grouped: bool = False


class DecodeStep:
    """The two halves of a step over the rows and columns that a cache has opened.

    Args:
        parts: trunk and head of the model.
        cache: of the slots.
        masking: how layers attend; None takes the way that `parts` names.
        temperature: of sampling.
        truncation: which tokens may be drawn; None for all.
    """

    def __init__(
        self,
        parts: ModelParts,
        cache: SlotCache,
        masking: Masking | None = None,
        *,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
    ) -> None:
        self.parts, self.cache = parts, cache
        self.masking = masking or Masking(form="columns" if parts.builds_own_mask else "full")
        self.temperature, self.truncation = temperature, truncation
        self.weight = parts.sampling_weight()
        self.config = text_config(parts)
        self.sliding = sliding_window(self.config)
        self.adds_masks = implementation_of(self.config) == "eager"

    def draw(self, hidden: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw a token per row.

        Args:
            hidden: last hidden states, `[rows, H]`.
            uniform: a number in [0, 1) per row, float64 `[rows]`.

        Returns:
            `(tokens int64 [rows], log_probs float32 [rows], log_mass float32 [rows])`; the last is None without
            truncation.
        """
        # Autocast would round the logits to half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            return drawn(self.parts.logits(hidden, self.weight), uniform, self.temperature, self.truncation)

    def feed(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Run a token per row through the trunk and return the last hidden states, `[rows, H]`.

        Args:
            tokens: int64 `[rows]`.
            lengths: the tokens of each row in the cache, int64 `[rows]`, which are the positions of the new ones.
        """
        if self.masking.grouped:
            with steps_attended_by(self.config, grouped_queries):
                return self._fed(tokens.unsqueeze(1), lengths.unsqueeze(1))
        return self._fed(tokens.unsqueeze(1), lengths.unsqueeze(1))

    def _fed(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.parts.hidden(
            input_ids=tokens,
            position_ids=lengths,
            attention_mask=self._mask(lengths),
            cache=self.cache,
            use_cache=True,
        )
        return hidden[:, 0]

    def _mask(self, lengths: Tensor) -> Any:
        form = self.masking.form
        if form == "columns":
            return self.cache.visible(lengths)
        full = None if form == "near" else self._prepared_step(lengths)
        if form == "full":
            return full
        near = self._prepared_step(lengths if self.sliding is None else lengths.clamp(max=self.sliding - 1))
        return near if form == "near" else {"full_attention": full, "sliding_attention": near}

    def _prepared_step(self, lengths: Tensor) -> Tensor:
        """Return a mask `[rows, 1, 1, columns]`: bool, or numbers to add where the model's own attention adds them."""
        mask = self.cache.visible(lengths[:, :, None, None])
        if not self.adds_masks:
            return mask
        dtype = self.parts.head.weight.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def text_config(parts: ModelParts) -> Any:
    """Return the config of the language model in a trunk."""
    config: Any = parts.trunk.config
    return config.get_text_config(decoder=True)


def sliding_window(config: Any) -> int | None:
    """Return how many tokens a layer with a sliding window sees, the newest included; None without such layers."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
