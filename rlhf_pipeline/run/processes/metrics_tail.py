"""Following `metrics.jsonl` while another process writes it."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from pathlib import Path
from typing import Any


class MetricsTail:
    """Gives the lines of a `metrics.jsonl` that were written since the last look.

    >>> import tempfile
    >>> from rlhf_pipeline.jsonl import append_row
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> append_row(path, {"step": 1, "task_reward": 0.25})
    >>> tail = MetricsTail(path)
    >>> tail.last_step, tail.new_rows()
    (1, [])
    >>> append_row(path, {"step": 2, "task_reward": 0.5})
    >>> tail.new_rows(), tail.first_reward, tail.last_reward
    ([{'step': 2, 'task_reward': 0.5}], 0.25, 0.5)

    Args:
        path: the file; it need not be there yet. What it holds now counts as seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step = 0
        self.first_reward: float | None = None
        self.last_reward: float | None = None
        self._at = 0
        self._inode = -1
        self._seen = array("L")
        self.new_rows()

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows that have not been given yet, oldest first; also those of steps that are taken otherwise."""
        line_number = len(self._seen)
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # a resumed learner takes lines off by replacing the file
                    self._at, self._inode, line_number = 0, inode, 0
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1  # a line is written with one call; a killed writer may leave half of one
        self._at += whole
        lines = content[:whole].splitlines()
        if len(self._seen) > line_number + len(lines):  # taken off, and not written anew yet
            del self._seen[line_number + len(lines) :]
            self.last_step = json.loads(lines[-1])["step"] if lines else 0
        fresh: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=line_number):
            check = zlib.crc32(line)
            if number < len(self._seen) and self._seen[number] == check:
                continue
            del self._seen[number:]
            self._seen.append(check)
            fresh.append(json.loads(line))
        for row in fresh:
            reward = row.get("task_reward")
            if reward is not None:
                self.first_reward = reward if self.first_reward is None else self.first_reward
                self.last_reward = reward
        if fresh:
            self.last_step = fresh[-1]["step"]
        return fresh
