"""Texts that end a completion, found in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import DefinitionError


class StopStrings:
    """Ends completions at the token that completes one of some texts.

    The token ids stay the sampler's own, up to that token; whether its text is shown to a reward is another matter, see
    `without`.

    >>> from rlhf_pipeline import scratch_policy
    >>> stops = StopStrings(scratch_policy("0123456789=+").tokenizer, ["=1", "++"])
    >>> ids = stops.tokenizer.encode("12=13+")
    >>> stops.length(ids), stops.ends(ids[:4]), stops.without("12=1")
    (4, True, '12')
    """

    def __init__(self, tokenizer: Any | None, texts: Sequence[str]) -> None:
        if tokenizer is None:
            raise DefinitionError("stop strings need a tokenizer, but the policy has none.")
        if not texts or not all(texts):
            raise DefinitionError(
                f"the stop strings are {list(texts)}; there must be at least one, and none may be empty."
            )
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        # A token is at least one byte, except for a few that end a character.
        self._reach = max(len(text.encode()) for text in texts) + 4

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether a text is complete within the last tokens."""
        text = self._text(token_ids[-self._reach :])
        return any(stop in text for stop in self.texts)

    def length(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens up to the first one that completes a text; all of them if none does."""
        text = self._text(token_ids)
        if not any(stop in text for stop in self.texts):
            return len(token_ids)
        return next((n for n in range(1, len(token_ids)) if self.ends(token_ids[:n])), len(token_ids))

    def cuts(
        self, token_ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the lengths of completions cut there, int64 `[N]`, and which end with a text, bool `[N]`.

        Args:
            token_ids: of all completions, `[sum(lengths)]`.
            lengths: int64 `[N]`.
        """
        parts = np.split(token_ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
        cut = [part[: self.length(part.tolist())].tolist() for part in parts]
        return np.array([len(ids) for ids in cut], np.int64), np.array([self.ends(ids) for ids in cut], np.bool_)

    def without(self, text: str) -> str:
        """Return a completion's text up to the first of the texts."""
        return text[: min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=len(text))]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
