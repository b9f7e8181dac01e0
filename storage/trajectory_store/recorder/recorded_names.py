"""The rows and groups of a store by their names, those of earlier recorders and other processes too."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError
from trajectory_store.recorder.standard import EPISODE, EVALUATION
from trajectory_store.store import TrajectoryStore

LIMIT = 1 << 16
"""The maximum number of rows, and of groups, whose names are kept in memory."""
_BLOCK = 1024
RowName = tuple[str, str]
"""The run, and the name in it."""
GroupName = tuple[str, bool, str]
"""The run, whether the group is of an evaluation, and the name there."""


@dataclass(slots=True)
class Group:
    """A group: its id, and the prompt that all of its episodes begin with.

    `prompt` is a digest; empty where `first_row`, a row of the store, has still to be read, and where neither is known.
    """

    group_id: int
    prompt: bytes = b""
    first_row: int | None = None


@dataclass(slots=True)
class RecordedNames:
    """The recorded names of a store: names of rows, the newest of each, and names of groups."""

    rows: dict[RowName, int] = field(default_factory=dict[RowName, int])
    groups: dict[GroupName, Group] = field(default_factory=dict[GroupName, Group])
    recalled: bool = False

    def recall(self, store: TrajectoryStore) -> None:
        """Read the names that other recorders wrote, of the newest rows."""
        self.recalled = True
        position = EPISODE[1].name
        optional = [name for name in (EVALUATION.name, position) if name in store.schema]
        newest = store.ids()[-LIMIT:]
        for first in range(0, len(newest), _BLOCK):
            some = newest[first : first + _BLOCK]
            columns = store.read(some, ["meta", "group_id", *optional])
            evaluated = columns.get(EVALUATION.name, np.zeros(len(some), bool)).tolist()
            starts = (np.asarray(columns.get(position, np.zeros(len(some), np.int32))) == 0).tolist()
            for i, (row, meta) in enumerate(zip(some.tolist(), columns["meta"], strict=True)):
                source = json.loads(meta).get("source") if '"name"' in meta or '"group"' in meta else None
                if not isinstance(source, dict):
                    continue
                run = source.get("run", "")
                if "name" in source:
                    self.rows[run, source["name"]] = row
                if "group" in source:
                    group = Group(int(columns["group_id"][i]), first_row=row if starts[i] else None)
                    self.groups.setdefault((run, evaluated[i], source["group"]), group)

    def find_groups(
        self,
        store: TrajectoryStore,
        names: Sequence[GroupName],
        row_names: Sequence[int],
        prompts: Sequence[npt.NDArray[np.int32]],
        starts: Sequence[bool],
        *,
        one_prompt: bool,
    ) -> list[Group]:
        """Return the group of each row: one that is known, or a new one, named by the id of its first row.

        Nothing is added here, as the rows are not stored yet: see `add_groups`.

        Args:
            store: where the groups of earlier recorders are.
            names: of the group of each row.
            row_names: the trajectory id of each row, which names a group that begins with it.
            prompts: token ids of the prompt of each row.
            starts: which rows begin an episode; the others have a history for a prompt.
            one_prompt: reject a second prompt under one name.

        Raises:
            BatchError: a group has a different prompt.
        """
        if not self.recalled:
            self.recall(store)
        fresh: dict[GroupName, Group] = {}
        groups = list[Group]()
        for i, name in enumerate(names):
            prompt = _digest(prompts[i]) if starts[i] else b""
            group = self.groups.get(name) or fresh.setdefault(name, Group(row_names[i]))
            groups.append(group)
            if not prompt:
                continue
            if not group.prompt and group.first_row is not None:
                group.prompt = _stored_prompt(store, group.first_row)
            if one_prompt and group.prompt and group.prompt != prompt:
                run, evaluation, of_run = name
                raise BatchError(
                    f"group {of_run!r}{' of an evaluation' if evaluation else ''} of run {run!r} has a different "
                    f"prompt from row {i} of this call, so the members cannot be compared. Use a separate group name "
                    "for each prompt. A training run that starts from scratch needs a new run id: "
                    "TrajectoryRecorder(..., run_id=NAME)."
                )
            group.prompt = group.prompt or prompt
        return groups

    def add_groups(self, names: Sequence[GroupName], groups: Sequence[Group]) -> None:
        """Keep groups whose rows are stored now."""
        self.groups |= zip(names, groups, strict=True)
        while len(self.groups) > LIMIT:
            del self.groups[next(iter(self.groups))]


def group_names(run: str, names: Sequence[Hashable], evaluations: Sequence[bool]) -> list[GroupName]:
    """Return what identifies the group of each row."""
    return [(run, bool(evaluation), str(name)) for name, evaluation in zip(names, evaluations, strict=True)]


def _digest(prompt: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16).digest()


def _stored_prompt(store: TrajectoryStore, row: int) -> bytes:
    columns = store.read(np.array([row]), ["input_ids", "num_prompt_tokens"])
    return _digest(columns["input_ids"][0][: int(columns["num_prompt_tokens"][0])])
