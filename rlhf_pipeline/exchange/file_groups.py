"""Which group a record is in: decided here, before anything is stored."""

from __future__ import annotations

import hashlib
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store.recorder.raw_rollout import RawRollout

_NAME = (
    "Name the field that tells groups apart: --group FIELD (of the prompt, as a dotted path), or how many in turn are "
    "one: --group 8"
)


class FileGroups:
    """Numbers the groups of a file.

    A group is what its rows name; else the rows of one prompt and version that stand together, or, where `by_prompt`,
    all rows of one prompt and version. `in_turn`: so many rows in turn are one, whatever they name.
    """

    def __init__(self, in_turn: int | None = None, *, by_prompt: bool = False, checked: bool) -> None:
        self._numbers: dict[bytes, tuple[int, bytes]] = {}
        """The number and the prompt of each group."""
        self._seen: set[bytes] = set()
        """The prompts of rows that name no group."""
        self._last: Any = None
        self._in_turn, self._by_prompt, self._checked = in_turn, by_prompt, checked
        self.num_members = self.num_graded = 0
        self._in_other_files = False
        self._num_learned, self._learned = 0, set[int]()
        """How many members are not evaluations, which are compared with nobody, and their groups."""

    def number(self, record: RawRollout, row: int) -> int:
        """Return the number of a record's group; `row` is its row in the file."""
        prompt = record.prompt if record.prompt_ids is None else record.prompt_ids
        prompt_key, key = _digest((record.policy_version, prompt)), record.group
        if self._in_turn is not None:
            key = ("in turn", self.num_members // self._in_turn)
        elif self._by_prompt:
            key = prompt_key
        elif key is None:
            if self._last is None or self._last[0] != prompt_key:
                if self._checked and prompt_key in self._seen:
                    fields = f" (the rows have {', '.join(sorted(record.meta))})" if record.meta else ""
                    raise DefinitionError(
                        "a prompt comes back after others, and no field says whether its rows are one group. "
                        f"{_NAME}{fields}. If all rows of a prompt are one group: --group-by prompt. Or keep them so: "
                        "--group none"
                    )
                self._seen.add(prompt_key)
                self._last = (prompt_key, row)
            key = self._last
        self.num_members += 1
        number, before = self._numbers.setdefault(_digest(key), (len(self._numbers), prompt_key))
        if self._checked and record.group is not None and record.one_prompt and before != prompt_key:
            raise DataError(
                "the group of this trajectory has another prompt or version, so its members cannot be compared. If the "
                "field that names groups is right all the same, name it: --group FIELD"
            )
        self._in_other_files |= record.across_files and record.identity is not None
        if not record.evaluation:
            self.num_graded += record.reward == record.reward
            self._num_learned += 1
            self._learned.add(number)
        return number

    def check(self) -> None:
        """Refuse groups of one: GRPO learns nothing from them, and would not say so."""
        if self._in_other_files:  # a chunk of a stream may end within its groups
            return
        if self._checked and self.num_graded > 1 and len(self._learned) == self._num_learned:
            raise DefinitionError(
                f"each of its {self._num_learned:,} trajectories is a group of its own, so none has another to be "
                f"better than, and GRPO learns nothing. {_NAME}. Or keep them so: --group none"
            )


def _digest(key: Any) -> bytes:
    """Return what stands for a key, so that the groups of a file cost little memory whatever names them."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
