"""What a tool's dump is: how it is recognised, and what becomes of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.exchange.fields import Fields, RawRollout, Row

Read = Callable[[Fields], Iterator[RawRollout | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One kind of file that one writer of a tool makes, from the tool's own source.

    >>> from rlhf_pipeline.exchange.tools import find_tool
    >>> find_tool("auto", dict.fromkeys(["input", "output", "gts", "score", "step"], 1)).name
    'verl'
    """

    name: str
    summary: str
    """What it is, in a few words."""
    signature: frozenset[str]
    """Fields that the writer puts into every row, and all of which must be there."""
    about: str
    """Which field is read as what, for the summary."""
    lacks: tuple[str, ...] = ()
    """What the file does not hold."""
    read: Read
    """Yields the rollouts of one row; None for a part of it that has nothing that a policy sampled."""
    also: Callable[[Row], bool] = lambda row: True
    """A further condition on a row."""
    first_row_tells: Callable[[Fields], Mapping[str, str]] = lambda fields: {}
    """Returns fields by target that the first row tells for all; raises a DefinitionError that asks for one."""
    repeated_but: str = ""
    """The tool may write the rows of one file again into the next, and then only this field differs."""

    def matches(self, row: Row) -> bool:
        """Return True if a row is of this kind."""
        return self.signature <= row.keys() and self.also(row)


def number_in(path: Path, pattern: str) -> int | None:
    """Return the number that the path of a file tells by an expression with one group; None if it does not."""
    found = re.findall(pattern, path.as_posix())
    return int(found[-1]) if found else None


NO_TOKENS = "token ids (the text is encoded by --tokenizer, and may have other tokens than were sampled)"
NO_END = "the end token and why a completion ended"
NO_SCORES = "log-probs"
