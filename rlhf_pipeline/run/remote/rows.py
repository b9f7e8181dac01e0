"""Lines that one process writes and any number of processes follow, as numbered parts that are put once.

A part is a line of JSON (its writer, length and checksum, and the step from which earlier lines no longer count) and
the lines themselves. Every `BLOCK` parts are also put together as one object, for processes that begin to read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import google_crc32c

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.remote.leases import replaced
from rlhf_pipeline.run.remote.outbox import Outbox
from rlhf_pipeline.run.rows import StepRows, append_line
from trajectory_store.objects.remote import ObstoreBucket

BLOCK: Final = 256
_LOOK_EVERY_S: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The content of one part."""

    lines: bytes
    cut: int | None
    """If set, the lines of this step and of later steps are removed before the new lines are added."""


class LineLog:
    """The parts of one file."""

    def __init__(self, bucket: ObstoreBucket, name: str, writer: str, outbox: Outbox) -> None:
        self._bucket = bucket
        self._name = name
        self._writer = writer
        self._outbox = outbox
        self._next = 0
        self._block: list[bytes] = []
        """Parts since the last block."""
        self._looked = -1e9
        self.is_writing = False

    def new(self) -> list[Part]:
        """Return the parts that are new since the last call; within a second after it, none, without a request."""
        if self.is_writing or time.monotonic() - self._looked < _LOOK_EVERY_S:
            return []
        self._looked = time.monotonic()
        blocks = self._blocks() if not self._next else []
        after = self._key(self._next - 1) if self._next else ""
        keys = self._bucket.keys(f"{self._name}/parts/", after)
        for key, raw in zip(keys, self._bucket.get_many(keys), strict=True):
            if raw is None or key != self._key(self._next):
                raise DataError(f"{self._bucket.where}/{self._key(self._next)} is missing. {_RESTORE}")
            blocks.append(raw)
            self._took(raw)
        return [part for raw in blocks for part in self._parts(raw)]

    def begin(self) -> list[Part]:
        """Take over as writer: the previous writer's next part is rejected. Return the new parts before that."""
        parts: list[Part] = []
        while not self.is_writing:
            self._looked = -1e9
            parts += self.new()
            opening = self._pack(Part(lines=b"", cut=None))
            if self._bucket.put_once(self._key(self._next), opening):
                self._took(opening)
                self.is_writing = True
        return parts

    def add(self, part: Part) -> None:
        """Put a part after all others."""
        if not self.is_writing:
            raise AssertionError(f"{self._name} is read-only until its writer starts")
        self._outbox.add(lambda: self._put(self._pack(part)))

    def _put(self, raw: bytes) -> None:
        key = self._key(self._next)
        if not self._bucket.put_once(key, raw):
            raise replaced(f"{self._bucket.where}/{key}")
        self._took(raw)
        if len(self._block) == BLOCK:
            self._bucket.put_once(f"{self._name}/blocks/{self._next // BLOCK - 1:08d}", b"".join(self._block))
            self._block = []

    def _took(self, raw: bytes) -> None:
        if self._next % BLOCK == 0:
            self._block = []
        self._next += 1
        self._block.append(raw)

    def _blocks(self) -> list[bytes]:
        keys = self._bucket.keys(f"{self._name}/blocks/")
        blocks = [raw for raw in self._bucket.get_many(keys) if raw is not None]
        self._next = BLOCK * len(blocks)
        return blocks

    def _key(self, number: int) -> str:
        return f"{self._name}/parts/{number:012d}"

    def _pack(self, part: Part) -> bytes:
        head = {"writer": self._writer, "bytes": len(part.lines), "crc32c": google_crc32c.value(part.lines)}
        return json.dumps({**head, "cut": part.cut}).encode() + b"\n" + part.lines

    def _parts(self, raw: bytes) -> Iterator[Part]:
        while raw:
            line, _, rest = raw.partition(b"\n")
            try:
                head: dict[str, Any] = json.loads(line)
                lines, raw = rest[: head["bytes"]], rest[head["bytes"] :]
                whole = google_crc32c.value(lines) == head["crc32c"]
            except (ValueError, KeyError, TypeError):
                whole, lines, head = False, b"", {}
            if not whole:
                raise DataError(f"{self._bucket.where}/{self._name}: a part fails its checksum. {_RESTORE}")
            yield Part(lines=lines, cut=head["cut"])


class SharedRows(StepRows):
    """The rows of a file that is kept in parts; the file itself is this process's copy."""

    def __init__(self, path: Path, log: LineLog, owner: object = None) -> None:
        self._log = log
        self._owner = owner
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)

    def refresh(self) -> int:
        """Read the new rows, and return the number of rows."""
        self._take(self._log.new())
        return super().refresh()

    def begin(self) -> None:
        """Take over as the only writer of rows."""
        if not self._log.is_writing:
            self._take(self._log.begin())

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step."""
        self._log.add(Part(lines=self._append(row), cut=None))

    def drop_from(self, step: int) -> None:
        """Remove the rows of a step and of all later ones."""
        if self.last_step >= step:
            super().drop_from(step)
            self._log.add(Part(lines=b"", cut=step))

    def recheck(self) -> None:
        """Do nothing: a part is checked when it is read."""

    def sync(self) -> None:
        """Do nothing: rows are sent in the order in which they were added, before anything that depends on them."""

    def _take(self, parts: list[Part]) -> None:
        """Apply parts to the copy."""
        lines: list[bytes] = []
        for part in parts:
            if part.cut is not None:
                self._write(lines)
                lines = []
                super().drop_from(part.cut)
            lines.append(part.lines)
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        if any(lines):
            append_line(self.path, b"".join(lines))
            super().refresh()


_RESTORE: Final = "Restore the run from a copy, or start a new run with --out OTHER_FOLDER."
