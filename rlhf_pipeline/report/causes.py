"""Failures by cause: messages that differ only in numbers, quoted values and addresses are one cause."""

from __future__ import annotations

import re
from array import array
from typing import Any, Final

import numpy as np

from rlhf_pipeline.report.stored import Ids, Stored

Answer = dict[str, Any]

MOST_CAUSES: Final = 50
_QUOTED: Final = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|`[^`\n]*`")
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")
_LONGEST: Final = 160
_BLOCK_ROWS = 4096


def cause_of(text: str) -> str:
    """Return the cause of a message: its first line without the variable parts.

    >>> cause_of("ValueError: could not convert 'abc' to 3.5 at 0x7f00"), cause_of("timeout after 31 s"), cause_of("")
    ('ValueError: could not convert … to # at #', 'timeout after # s', 'without a reason')
    """
    line = next((line.strip() for line in text.splitlines() if line.strip()), "without a reason")
    return _NUMBER.sub("#", _QUOTED.sub("…", line))[:_LONGEST]


class Causes:
    """Counts the causes of failed trajectories. While the store grows, counted trajectories are not read again."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        """The number assigned to each cause."""
        self._ids, self._codes = array("q"), array("i")
        """The trajectories, ascending, and the number of the cause of each."""

    def update(self, stored: Stored, ids: Ids) -> None:
        """Count the failed trajectories of a store, ascending ids; those counted before are not read again."""
        if len(self._ids) and (not len(ids) or ids[0] != self._ids[0]):  # some were evicted
            self._names.clear()
            del self._ids[:], self._codes[:]
        new = ids[len(self._ids) :]
        for first in range(0, len(new), _BLOCK_ROWS):
            some = new[first : first + _BLOCK_ROWS]
            causes = [cause_of(text) for text in messages(stored, some)]
            self._ids.extend(some.tolist())
            self._codes.extend(self._names.setdefault(cause, len(self._names)) for cause in causes)

    def answer(self) -> list[Answer]:
        """Return the most frequent causes: `cause`, `num` of trajectories, and `newest`, one of them."""
        codes, names = np.asarray(self._codes), list(self._names)
        nums, newest = np.bincount(codes, minlength=len(names)), np.zeros(len(names), np.int64)
        newest[codes] = self._ids  # the last one stays
        order = np.argsort(-nums, kind="stable")[:MOST_CAUSES]
        return [{"cause": names[at], "num": int(nums[at]), "newest": str(newest[at])} for at in order.tolist()]

    @property
    def num(self) -> int:
        """The number of causes."""
        return len(self._names)

    def of(self, cause: str) -> Ids:
        """Return the trajectories of a cause, ascending."""
        return np.asarray(self._ids, np.int64)[np.asarray(self._codes) == self._names.get(cause, -1)]


def messages(stored: Stored, ids: Ids) -> list[str]:
    """Return why trajectories failed: the error of the call, else the reason, else how they ended."""
    reasons, ends = stored.texts("failure_reason", ids), stored.texts("finish_reason", ids)
    errors = [context.error for context in stored.contexts(ids)]
    return [error or reason or end for error, reason, end in zip(errors, reasons, ends, strict=True)]
