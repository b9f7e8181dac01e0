"""The rows that imports wrote to a store, identified by their content, and which of them a newer version replaces.

A row is identified by the tool's own id, or by a digest of what it contains: never by the path of its file. A file that
was moved, renamed, compressed or rotated therefore adds nothing. Three columns store this:

- `import_key` identifies a trajectory: the tool's id, or source, split, step, tokens or text, and the number of equal
  rows before it in its file.
- `import_version` is a digest of everything else in the row. Another version of a stored trajectory is appended under
  its id and supersedes it.
- `import_unit` names what the tool writes as one file, for tools that replace such files: a complete newer version of a
  unit supersedes the rows that it no longer contains.

Superseded rows stay in the store, marked in the column `superseded`, and are never used for training.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import numpy as np

from rlhf_pipeline.errors import DefinitionError
from trajectory_store import Column, TrajectoryStore
from trajectory_store.recorder.raw_rollout import RawRollout
from trajectory_store.recorder.source_ids import NAME, next_base
from trajectory_store.recorder.standard import SUPERSEDED

KEY: Final = Column("import_key", "str", fill="")
VERSION: Final = Column("import_version", "str", fill="")
UNIT: Final = Column("import_unit", "str", fill="")
GROUP: Final = Column("import_group", "str", fill="")
COLUMNS: Final = (KEY, VERSION, UNIT, GROUP, SUPERSEDED)
_ROWS: Final = 4096
_TOKENS: Final = ("prompt_ids", "completion_ids")
_IDENTITY_FIELDS: Final = frozenset(("identity", "group"))
_SAMPLED: Final = _IDENTITY_FIELDS.union(_TOKENS, ("prompt", "completion"))
"""Fields of a record that its key covers."""


def digest(*parts: Any) -> str:
    """Return 32 hexadecimal characters that represent values, whatever they are made of."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, list) and part and isinstance(part[0], int | float):
            data = np.asarray(part, np.float64).tobytes()
        else:
            data = repr(part).encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


class FileKeys:
    """The identities of the records of one file, in their order."""

    def __init__(self, source: str, tool: str) -> None:
        self._source, self._occurrences = (source, tool), Counter[str]()
        self._groups: dict[int, str] = {}

    def unit(self, record: RawRollout, name: str) -> str:
        """Return the unit of a record: source, tool, split and the tool's name for it; empty if the tool has none."""
        return "/".join((*self._source, "evaluation" if record.evaluation else "train", name)) if name else ""

    def key(self, record: RawRollout, unit: str, *, grows: bool = False) -> str:
        """Return what identifies a record; the k-th of equal records differs from the others.

        So does the k-th with one identity, if it `grows`: its identity is made of its first steps.
        """
        if record.identity is not None and not grows:
            return self.key_of(record.identity)
        if record.identity is not None:
            base = self.key_of(record.identity)
        else:
            content = [value if (value := getattr(record, name)) is None else list(value) for name in _TOKENS]
            if None in content:
                content += [record.prompt, record.completion]
            base = digest(self._source, unit, record.evaluation, record.policy_version, *content)
        self._occurrences[base] += 1
        return digest(base, self._occurrences[base])

    def key_of(self, identity: Hashable) -> str:
        """Return the key of a record that its tool identifies."""
        return digest(self._source, identity)

    def group(self, record: RawRollout, number: int, key: str, unit: str) -> str:
        """Return what identifies the group that has a number in this file; `key` is that of the record.

        A group across files has the name that its rows give it, and one prompt if the tool has one. Any other group
        is identified by its first member, which stays the same when the file grows or moves.
        """
        if number not in self._groups:
            prompt = (record.prompt_ids or record.prompt) if record.one_prompt else ""
            parts = (self._source, "", record.evaluation, record.group, prompt)
            self._groups[number] = digest(*(parts if record.across_files else ("first", unit, key)))
        return self._groups[number]


def version_of(record: RawRollout, *, grows: bool = False) -> str:
    """Return a digest of what a record contains besides what its key covers; of one that `grows`, of its tokens too."""
    covered = _IDENTITY_FIELDS if grows else _SAMPLED
    names = [field.name for field in fields(record) if field.name not in covered]
    values = [getattr(record, name) for name in names]
    return digest(*[dict(value) if isinstance(value, Mapping) else value for value in values])[:16]


class ImportedRows:
    """The rows of a store by their identity; new rows get the next ids.

    Raises:
        DefinitionError: the store has rows that an earlier version imported by the path of their file.
    """

    def __init__(self, store: TrajectoryStore | None) -> None:
        self._store = store
        self._newest: dict[str, int] = {}
        """The position of each key's current version in the lists below, or otherwise of its newest version."""
        self._versions: dict[str, int] = {}
        """The position of each version, by key and version."""
        self._units: dict[str, list[int]] = {}
        self._groups: dict[str, int] = {}
        self._row_ids: list[int] = []
        """In the store; -1 until the row is committed."""
        self._trajectory_ids: list[int] = []
        self._keys: list[str] = []
        self._is_current: list[bool] = []
        self._in_file: set[int] = set()
        self._uncommitted: list[int] = []
        self._replaced: list[int] = []
        """Rows for which a newer version has been read: they are marked in the store with the next commit."""
        self._next_trajectory = self._next_group = 0
        if store is not None:
            self._load(store)

    def _load(self, store: TrajectoryStore) -> None:
        ids = np.asarray(store.ids())
        if not len(ids) or NAME not in store.schema:
            return
        self._next_trajectory = self._next_group = next_base(store)
        has_keys, by_path = KEY.name in store.schema, -1
        for first in range(0, len(ids) if has_keys else 0, _ROWS):
            some = ids[first : first + _ROWS]
            rows: dict[str, Any] = store.read(some, [*(column.name for column in COLUMNS), NAME, "group_id"])
            for i, key in enumerate(rows[KEY.name]):
                trajectory_id = int(rows[NAME][i])
                if not key:
                    by_path = int(some[i]) if by_path < 0 <= trajectory_id else by_path
                    continue
                is_current = not rows[SUPERSEDED.name][i]
                place = self._add(key, rows[VERSION.name][i], rows[UNIT.name][i], trajectory_id, is_current=is_current)
                self._row_ids[place] = int(some[i])
                self._groups.setdefault(rows[GROUP.name][i], int(rows["group_id"][i]))
        if not has_keys:
            by_path = int(ids[0])
        if by_path >= 0 and "meta" in store.schema and _is_by_path(store.read([by_path], ["meta"])["meta"][0]):
            raise DefinitionError(
                f"the rows of {store.path} were imported by an earlier version of rlhf-pipeline, which identified "
                "them by the path of their file. Import into a new folder: --into OTHER_FOLDER."
            )
        if self._row_ids:  # ids continue where the imports of this store ended
            self._next_trajectory = max(self._trajectory_ids) + 1
            self._next_group = max(self._groups.values()) + 1

    def _add(self, key: str, version: str, unit: str, trajectory_id: int, *, is_current: bool = True) -> int:
        """Add a version of a key; one that is current supersedes the one before. Return its place."""
        place, older = len(self._row_ids), self._newest.get(key)
        self._row_ids.append(-1)
        self._trajectory_ids.append(trajectory_id)
        self._is_current.append(is_current)
        self._keys.append(key)
        self._versions[key + version] = place
        if unit:
            self._units.setdefault(unit, []).append(place)
        if is_current or older is None or not self._is_current[older]:  # a file may return to an earlier version
            self._newest[key] = place
        if is_current and older is not None and self._is_current[older]:
            self._is_current[older] = False
            self._replaced.append(older)
        return place

    def begin_file(self) -> None:
        """Start to read a file: `missing` and `restored` compare the store with the rows that follow."""
        self._in_file.clear()

    def find(self, key: str, version: str, unit: str) -> tuple[int, bool]:
        """Return the trajectory id of a record, and whether the store lacks it and it must be appended."""
        place = self._versions.get(key + version)
        is_new = place is None
        if place is None:
            newest = self._newest.get(key)
            trajectory_id = self._next_trajectory if newest is None else self._trajectory_ids[newest]
            self._next_trajectory += newest is None
            place = self._add(key, version, unit, trajectory_id)
            self._uncommitted.append(place)
        self._in_file.add(place)
        return self._trajectory_ids[place], is_new

    def is_outdated(self, key: str, version: str, row: Mapping[str, Any]) -> bool:
        """Return whether an unknown version of a row is an early one: shorter, or as long and without a reward."""
        row_id = self.row_of(key)
        if row_id is None or self._store is None or key + version in self._versions:
            return False
        stored = self._store.read([row_id], ["input_ids", "task_reward"])
        lengths = len(row["input_ids"]), len(stored["input_ids"][0])
        graded = [
            math.isfinite(float(reward)) for reward in (row.get("task_reward", math.nan), stored["task_reward"][0])
        ]
        return (lengths[0], graded[0]) < (lengths[1], graded[1])

    def stored_tokens(self, key: str) -> Any | None:
        """Return the token ids of the newest committed version of a key; None if there is none."""
        row_id = self.row_of(key)
        if row_id is None or self._store is None:
            return None
        return self._store.read([row_id], ["input_ids"])["input_ids"][0]

    def row_of(self, key: str) -> int | None:
        """Return the row of the newest committed version of a key; None if there is none."""
        place = self._newest.get(key)
        return None if place is None or self._row_ids[place] < 0 else self._row_ids[place]

    def group(self, name: str) -> int:
        """Return the id of a group; a new group gets the next one."""
        if name not in self._groups:
            self._groups[name] = self._next_group
            self._next_group += 1
        return self._groups[name]

    def commit(self, row_ids: Sequence[int]) -> None:
        """Note the ids under which the store appended the oldest uncommitted rows."""
        for place, row_id in zip(self._uncommitted, row_ids, strict=False):
            self._row_ids[place] = int(row_id)
        del self._uncommitted[: len(row_ids)]

    def superseded(self) -> list[int]:
        """Return the committed rows whose newer version is committed too, each once."""
        ready = [place for place in self._replaced if self._row_ids[place] >= 0]
        self._replaced = [place for place in self._replaced if self._row_ids[place] < 0]
        return [self._row_ids[place] for place in ready]

    def count(self, unit: str) -> int:
        """Return the number of current rows of a unit."""
        return sum(self._is_current[place] for place in self._units.get(unit, ()))

    def is_newer(self, unit: str) -> bool:
        """Return whether the file is a newer version of its unit: it lacks current rows and has a later one.

        A file that only grows lacks none. A file that lost its end, and a copy of an older version, have no later row.
        """
        missing = [
            place for place in self._units.get(unit, ()) if self._is_current[place] and place not in self._in_file
        ]
        return bool(missing) and max(self._in_file, default=-1) > max(missing)

    def drop_missing(self, unit: str) -> list[int]:
        """Return the current rows of a unit that its file lacks; they are not current from now on."""
        places = [
            place for place in self._units.get(unit, ()) if self._is_current[place] and place not in self._in_file
        ]
        for place in places:
            self._is_current[place] = False
        return [self._row_ids[place] for place in places]

    def restore(self, unit: str) -> list[int]:
        """Return the superseded rows of a unit that its file contains again; they are current from now on."""
        places = [
            place for place in self._units.get(unit, ()) if not self._is_current[place] and place in self._in_file
        ]
        for place in places:
            self._is_current[place] = True
            self._newest[self._keys[place]] = place
        return [self._row_ids[place] for place in places]


def _is_by_path(meta: str) -> bool:
    try:
        return "file" in json.loads(meta)["source"]
    except (ValueError, TypeError, KeyError):
        return False
