"""The properties of a tool that `import` uses, and the registry of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.exchange.fields import Fields
from trajectory_store.recorder.raw_rollout import UNKNOWN_VERSION, RawRollout, Row

RawRollouts = Iterator[RawRollout | None]
"""None for a part of a row without tokens that a policy sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One kind of file that one writer of a tool makes, from the tool's own source.

    >>> from rlhf_pipeline.exchange.tools import find_tool
    >>> find_tool("auto", dict.fromkeys(["input", "output", "gts", "score", "step"], 1)).name
    'verl'
    """

    name: str
    summary: str
    """A short description."""
    signature: frozenset[str]
    """Fields that the writer puts into every row; all of them must be present."""
    lacks: tuple[str, ...] = ()
    """The values that the file lacks."""
    read: Callable[[Fields], RawRollouts]
    also: Callable[[Row], bool] = lambda row: True
    """A further condition on a row."""
    first_row_tells: Callable[[Fields], Mapping[str, str]] = lambda fields: {}
    """Returns fields by target that the first row determines for all; raises a DefinitionError that asks for one."""
    unit: Callable[[Fields], str] = lambda fields: ""
    """Identifies the rows that the tool writes as one file and writes again after a restart; empty if it only appends.
    """
    grows: bool = False
    """The tool writes one document for each episode, and writes it again after each step: the longer one is newer."""
    repeated_but: str = ""
    """Whether the tool may write the rows of one file again into the next file; then only this field differs."""

    def matches(self, row: Row) -> bool:
        """Return True if a row is of this kind."""
        return self.signature <= row.keys() and self.also(row)


REGISTERED: list[Tool] = []
NO_TOKENS = "token ids (the text is encoded with --tokenizer, so the tokens may differ from the sampled tokens)"
NO_END = "the end token and the finish reason"
NO_SCORES = "log-probs"


def or_unknown(version: Any) -> Any:
    """Return a version, or the value for an unknown one."""
    return UNKNOWN_VERSION if version is None else version


def tool(name: str, summary: str, fields: str, *lacks: str, **more: Any) -> Callable[[Any], Any]:
    """Register a function that reads a tool's rows: its format, what it is, the fields of each row, what it lacks."""

    def add(read: Callable[[Fields], RawRollouts]) -> Callable[[Fields], RawRollouts]:
        tool = Tool(name=name, summary=summary, signature=frozenset(fields.split()), lacks=lacks, read=read, **more)
        REGISTERED.append(tool)
        return read

    return add
