"""A person's notes and labels on trajectories, in a file beside the run; the run itself is not changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.rows import append_line, line_of

_MOST: Final = 10_000
"""Characters of a note."""


class Notes:
    """The notes on one run or store. Each change is a line; the last one on a trajectory counts.

    Args:
        address: the run or store; one at a URL has no notes.

    >>> import tempfile
    >>> notes = Notes(Path(tempfile.mkdtemp()) / "run")
    >>> notes.write("17", {"text": "loops", "labels": ["bad"]})
    >>> notes.read(), notes.path.name
    ({'17': {'text': 'loops', 'labels': ['bad']}}, 'run.notes.jsonl')
    """

    def __init__(self, address: Address) -> None:
        self.path = address.with_name(f"{address.name}.notes.jsonl") if isinstance(address, Path) else None

    def read(self) -> dict[str, Any]:
        """Return the note on each trajectory that has one, by id: `text` and `labels`."""
        notes: dict[str, Any] = {}
        if self.path is None or not self.path.is_file():
            return notes
        for line in self.path.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            notes[note["id"]] = {"text": note["text"], "labels": note["labels"]}
        return {row: note for row, note in notes.items() if note["text"] or note["labels"]}

    def write(self, row: str, note: Mapping[str, Any]) -> None:
        """Record a note; an empty one removes it.

        Raises:
            DefinitionError: the note cannot be read, is too long, or has no file to be in.
        """
        text, labels = note.get("text"), note.get("labels")
        if not (isinstance(text, str) and isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
            raise DefinitionError("a note is a text and a list of labels.")
        if len(text) + sum(map(len, labels)) > _MOST:
            raise DefinitionError(f"a note has at most {_MOST:,} characters.")
        if self.path is None:
            raise DefinitionError(
                "notes are kept beside a folder; a run at a URL has none. Copy it: rlhf-pipeline copy"
            )
        append_line(self.path, line_of({"id": row, "text": text, "labels": labels}))
