"""Which group a record is in: decided here, before anything is stored."""

from __future__ import annotations

import hashlib
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store.raw_rollout import RawRollout

_NAME = (
    "Name the field that tells groups apart: --group FIELD (of the prompt, as a dotted path), or how many in turn are "
    "one: --group 8. Or keep them so: --group none"
)


class FileGroups:
    """Numbers the groups of a file."""

    def __init__(self, in_turn: int | None, *, checked: bool) -> None:
        self._numbers: dict[bytes, tuple[int, bytes]] = {}
        """The number and the prompt of each group."""
        self._runs: dict[bytes, int] = {}
        """How many records in turn had a prompt, the last time."""
        self._last: Any = None
        self._length = 0
        self._in_turn, self._checked = in_turn, checked
        self.num_members = self.num_graded = 0

    def number(self, record: RawRollout, row: int) -> int:
        """Return the number of a record's group; `row` is its row in the file."""
        prompt = record.prompt if record.prompt_ids is None else record.prompt_ids
        asked, key = _digest((record.policy_version, prompt)), record.group
        if self._in_turn is not None:
            key = ("in turn", self.num_members // self._in_turn)
        elif key is None:
            if self._last is None or self._last[0] != asked:
                self._end_run(asked)
                self._last = (asked, row)
            self._length += 1
            key = self._last
        self.num_members += 1
        self.num_graded += record.reward == record.reward
        number, before = self._numbers.setdefault(_digest(key), (len(self._numbers), asked))
        if self._checked and record.group is not None and record.one_prompt and before != asked:
            raise DataError(
                "the group of this trajectory has another prompt or version, so its members cannot be compared. If the "
                "field that names groups is right all the same, name it: --group FIELD"
            )
        return number

    def _end_run(self, then: bytes) -> None:
        """Refuse rows that are not in the order of their groups: prompts that come back, now more often, now less."""
        if self._last is not None:
            prompt, length = self._last[0], self._length
            if self._checked and self._runs.setdefault(prompt, length) != length:
                raise DefinitionError(
                    "the rows of one prompt do not stand in turn, and no field says which are one group: "
                    f"{self._runs[prompt]} in turn, and later {length} of the same prompt. {_NAME}"
                )
        self._length = 0

    def check(self) -> None:
        """Refuse groups of one: GRPO learns nothing from them, and would not say so."""
        if self._checked and self.num_graded > 1 and len(self._numbers) == self.num_members:
            raise DefinitionError(
                f"each of its {self.num_members:,} trajectories is a group of its own, so none has another to be "
                f"better than, and GRPO learns nothing. {_NAME}"
            )


def _digest(key: Any) -> bytes:
    """Return what stands for a key, so that the groups of a file cost little memory whatever names them."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
