"""Sampling options that change a token's probability in a way that its log-prob would not reflect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Each with its value when off. Where a field is left open, the checkpoint's value applies (for top_k, 50 by default).
OFF: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "num_beams": 1,
    "num_return_sequences": 1, "min_length": 0, "guidance_scale": 1.0,
}  # fmt: skip
# Options that are off when None or empty, so that a field left open takes the checkpoint's value.
ABSENT = (
    "min_new_tokens", "min_p", "top_h", "bad_words_ids", "force_words_ids", "sequence_bias", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "watermarking_config", "penalty_alpha", "stop_strings", "stop_sequences", "max_time",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


class Distortion(NamedTuple):
    """An option that is on, its value, and the value that turns it off."""

    name: str
    value: Any
    off: Any


def find_distortion(
    value_of: Callable[[str], Any], *, default_of: Callable[[str], Any] | None = None, ignore: tuple[str, ...] = ()
) -> Distortion | None:
    """Return the first option that is on, or None."""
    for name in (*OFF, *ABSENT):
        if name in ignore:
            continue
        value, off = value_of(name), OFF.get(name)
        if value is None and name in ABSENT and default_of is not None:
            value = default_of(name)
        # vLLM turns top_k off with -1.
        if bool(value) if off is None else value not in (None, off) and not (name == "top_k" and value == -1):
            return Distortion(name, value, off)
    return None
