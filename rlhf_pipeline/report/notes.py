"""A person's notes and labels on trajectories, in a file next to the run; the run itself is not changed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.scans import MatchingRows
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.rows import append_line, line_of

_MOST: Final = 10_000
"""Characters of a note."""
_CONDITION: Final = re.compile(r'\s*(label|noted)\s*(==|=|!=)\s*("(?:[^"\\]|\\.)*"|[^\s"]+)\s*\Z')


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

    def counts(self, rows: MatchingRows) -> list[tuple[str, str, int]]:
        """Return how many of some trajectories have a note, and how many have each label: name, condition, number."""
        notes = self.read()
        noted = np.asarray([int(row) for row in notes], np.int64)
        present = [str(row) for ids in rows.parts() for row in noted[np.isin(noted, ids)].tolist()] if notes else []
        labels = Counter(label for row in present for label in dict.fromkeys(notes[row]["labels"]))
        counted = [("noted", "noted==true", len(present))] if present else []
        for label, num in labels.most_common():
            counted.append((f"label {label}", f"label=={json.dumps(label, ensure_ascii=False)}", num))
        return counted

    def resolved(self, condition: str) -> str:
        """Return a condition on `label` or `noted` as one on the ids of trajectories; any other condition unchanged.

        >>> import tempfile
        >>> notes = Notes(Path(tempfile.mkdtemp()) / "run")
        >>> notes.write("17", {"text": "loops", "labels": ["bad"]})
        >>> notes.resolved('label=="bad"'), notes.resolved("noted==false"), notes.resolved("reward>0")
        ('id in (17,)', 'not id in (17,)', 'reward>0')
        """
        match = _CONDITION.match(condition)
        if match is None:
            return condition
        name, sign, text = match.groups()
        word = json.loads(text) if text.startswith('"') else text
        if name == "noted" and word.lower() not in ("true", "false"):
            raise DefinitionError(f"noted can only be true or false; the condition compares it with {word!r}.")
        rows = [row for row, note in self.read().items() if name == "noted" or word in note["labels"]]
        is_negated = (sign == "!=") != (name == "noted" and word.lower() == "false")
        return f"{'not ' * is_negated}id in ({''.join(f'{row},' for row in rows)})"

    def write(self, row: str, note: Mapping[str, Any]) -> None:
        """Record a note; an empty one removes it.

        Raises:
            DefinitionError: the note cannot be read, is too long, or has no file to be in.
        """
        text, labels = note.get("text"), note.get("labels")
        if not (isinstance(text, str) and isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
            raise DefinitionError("a note must consist of text and a list of labels.")
        if len(text) + sum(map(len, labels)) > _MOST:
            raise DefinitionError(f"a note must have at most {_MOST:,} characters.")
        if self.path is None:
            raise DefinitionError(
                "notes are stored next to a local folder, so a run at a URL cannot have notes. Copy its trajectories "
                "to a folder first: rlhf-pipeline copy RUN --to FOLDER"
            )
        append_line(self.path, line_of({"id": row, "text": text, "labels": labels}))
