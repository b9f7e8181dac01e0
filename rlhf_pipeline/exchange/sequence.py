"""A whole sequence of tokens with values per token, cut into prompt and completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange.fields import as_ids, as_list, as_mask


def cut(whole: Mapping[str, Any], *, length: int | None = None) -> dict[str, Any]:
    """Return the targets of a rollout: the completion begins with the first token that was sampled.

    Args:
        whole: `tokens` and `completion_mask`, and values beside them, each one per token of the sequence.
        length: the tokens that are no padding; None for all.

    Returns:
        `prompt_ids`, `completion_ids` and the others from the completion's first token on; where nothing was sampled
        the completion is empty.

    Raises:
        DataError: the lists are not of one length, or hold something else.

    >>> cut({"tokens": [5, 6, 7, 0], "completion_mask": [0, 1, 1, 0], "log_probs": [0, -1, -2, 0]}, length=3)
    {'prompt_ids': [5], 'completion_ids': [6, 7], 'completion_mask': [True, True], 'log_probs': [-1, -2]}
    """
    sizes = {name: len(as_list(values, name)) for name, values in whole.items() if values is not None}
    length = sizes["tokens"] if length is None else length
    if len({*sizes.values()}) > 1 or not 0 <= length <= sizes["tokens"]:
        counted = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise DataError(f"values per token are not one per token: {counted}, length {length}.")
    ids, mask = (
        as_ids(whole["tokens"], "tokens")[:length],
        as_mask(whole["completion_mask"], "completion_mask")[:length],
    )
    start = mask.index(True) if any(mask) else length
    beside = {name: whole[name][start:length] for name in sizes if name not in ("tokens", "completion_mask")}
    return {"prompt_ids": ids[:start], "completion_ids": ids[start:], "completion_mask": mask[start:], **beside}
