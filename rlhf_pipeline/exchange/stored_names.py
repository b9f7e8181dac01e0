"""What tools call the rows and groups of a store, where the same stand in several of their files."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trajectory_store import TrajectoryStore

_ROWS = 1024


def digest(name: Any) -> str:
    """Return what stands for a name in `meta`: 32 characters, whatever the name is made of."""
    return hashlib.blake2b(repr(name).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class StoredNames:
    """The ids of rows and groups by what their tool calls them; a store is read when the first is asked for."""

    def __init__(self, store: TrajectoryStore | None) -> None:
        self._store = store
        self._rows: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def of(self, identity: str, trajectory_id: int) -> int:
        """Return the trajectory id of an identity: the first that it was given."""
        self._load()
        return self._rows.setdefault(identity, trajectory_id)

    def group(self, name: str, group_id: int) -> int:
        """Return the group id of a name: the first that it was given."""
        self._load()
        return self._groups.setdefault(name, group_id)

    def _load(self) -> None:
        store, self._store = self._store, None
        if store is None or "meta" not in store.schema:
            return
        ids = store.ids()
        for first in range(0, len(ids), _ROWS):
            columns = store.read(ids[first : first + _ROWS], ["meta", "trajectory_id", "group_id"])
            for meta, row, group in zip(columns["meta"], columns["trajectory_id"], columns["group_id"], strict=True):
                source = _source_of(meta)
                if "identity" in source:
                    self._rows.setdefault(source["identity"], int(row))
                if "group" in source:
                    self._groups.setdefault(source["group"], int(group))


def _source_of(meta: str) -> dict[str, Any]:
    if '"identity"' not in meta and '"group"' not in meta:
        return {}
    try:
        source = json.loads(meta)["source"]
    except (ValueError, TypeError, KeyError):
        return {}
    return source if isinstance(source, dict) else {}
