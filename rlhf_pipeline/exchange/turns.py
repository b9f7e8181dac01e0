"""Whether a completion's text holds words of an environment, which no policy sampled."""

from __future__ import annotations

import re

from rlhf_pipeline.errors import DataError

_MARKS = re.compile(
    r"<tool_response>|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|turn>|<information>|<observation>"
    r"|\n(?:user|tool|observation|environment)\n(?:.*\n)*?(?:assistant|model)\n"
)
"""Beginnings of turns as chat templates and environments write them, with special tokens and without."""


def check_one_turn(text: str, *, one_turn: bool, known: bool = False) -> None:
    """Refuse a completion whose text may hold words of an environment: they would count as sampled.

    Args:
        text: the completion.
        one_turn: the user says that there are none.
        known: the tool's row says that there may be some, whatever the text.

    Raises:
        DataError: there may be.
    """
    if one_turn:
        return
    found = None if known else _MARKS.search(text)
    if known or found is not None:
        seen = f"it has {found[0].strip().splitlines()[0]!r}" if found is not None else "its environment takes turns"
        raise DataError(
            f"the completion may hold words of an environment ({seen}), and the file does not tell which words were "
            "sampled. Export token ids with a mask, skip such rows with --skip-bad N, or say that there are none: "
            "--one-turn"
        )
