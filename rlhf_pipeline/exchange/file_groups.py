"""Which group a record is in: decided here, before anything is stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store.recorder.raw_rollout import RawRollout

_NAME = (
    "Specify the field that identifies the group (--group FIELD; a dotted path selects a nested field), or the number "
    "of consecutive rows per group (--group 8)"
)


class FileGroups:
    """Numbers the groups of a file.

    A group is what its rows name; else the rows of one prompt and version that are adjacent, or, where `by_prompt`,
    all rows of one prompt and version. `in_turn`: so many rows in turn are one, whatever they name.
    """

    def __init__(self, in_turn: int | None = None, *, by_prompt: bool = False, checked: bool) -> None:
        self._numbers: dict[bytes, tuple[int, bytes]] = {}
        """The number and the prompt of each group."""
        self._ungrouped_prompts: set[bytes] = set()
        """The prompts of rows without a group id."""
        self._last: Any = None
        self._in_turn, self._by_prompt, self._checked = in_turn, by_prompt, checked
        self.num_members = self.num_graded = 0
        self._in_other_files = False
        self._scores: dict[int, list[tuple[float, float]]] = {}
        """The reward and stored advantage of each member of a group without an id, in the order of the file."""
        self._num_learned, self._learned = 0, set[int]()
        """The number of members that are not evaluations (evaluations are not compared), and their groups."""

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
                if self._checked and prompt_key in self._ungrouped_prompts:
                    fields = f" (fields of the rows: {', '.join(sorted(record.meta))})" if record.meta else ""
                    raise DefinitionError(
                        f"a prompt reappears after other prompts, and no field identifies its group{fields}. "
                        f"{_NAME}. If all rows of a prompt form one group: --group-by prompt. If each "
                        "series of consecutive rows with the same prompt is a group: --group none"
                    )
                self._ungrouped_prompts.add(prompt_key)
                self._last = (prompt_key, row)
            key = self._last
        self.num_members += 1
        number, before = self._numbers.setdefault(_digest(key), (len(self._numbers), prompt_key))
        if self._checked and record.group is not None and record.one_prompt and before != prompt_key:
            raise DataError(
                "the group of this trajectory has members with other prompts or versions, so its members "
                "cannot be compared. "
                "If the field that identifies groups is correct, confirm it: --group FIELD"
            )
        self._in_other_files |= record.across_files and record.identity is not None
        if self._checked and not self._by_prompt and record.by_prompt and not record.evaluation:
            self._scores.setdefault(number, []).append((record.reward, record.advantage))
        if not record.evaluation:
            self.num_graded += record.reward == record.reward
            self._num_learned += 1
            self._learned.add(number)
        return number

    def _check_advantages(self) -> None:
        wrong = [members for members in self._scores.values() if _contradicts(members)]
        if not wrong:
            return
        size = _consecutive_size(self._scores.values())
        advice = (
            f"They agree with groups of {size} consecutive rows: --group {size}." if size is not None else f"{_NAME}."
        )
        raise DefinitionError(
            f"the stored advantages contradict the grouping by prompt in {len(wrong):,} of {len(self._scores):,} "
            f"groups: within a group, advantages must be centred, and equal for equal rewards. {advice} If the tool's "
            "advantages are not relative to a group, confirm the groups: --group-by prompt"
        )

    def check(self) -> None:
        """Reject groups that stored advantages contradict, and groups of one, from which GRPO learns nothing."""
        self._check_advantages()
        if self._in_other_files:  # a chunk of a stream may end within its groups
            return
        if self._checked and self.num_graded > 1 and len(self._learned) == self._num_learned:
            raise DefinitionError(
                f"each of the {self._num_learned:,} trajectories is a separate group, so no rewards can be "
                f"compared, and GRPO would learn nothing. {_NAME}. To keep the groups unchanged: --group none"
            )


def _contradicts(members: Sequence[tuple[float, float]]) -> bool:
    """Return whether advantages cannot be those of one group: not centred, or different for equal rewards.

    A group-relative advantage is `(reward - mean) / scale` (GRPO, arXiv:2402.03300, section 4.1.2), so its mean is 0
    and equal rewards have equal advantages. Advantages are often rounded to 4 decimals.
    """
    advantages = [advantage for _, advantage in members]
    if len(members) < 2 or not all(math.isfinite(value) for pair in members for value in pair):
        return False
    tolerance = 1e-3 * max(1.0, *map(abs, advantages))
    by_reward: dict[float, float] = {}
    differ = any(abs(by_reward.setdefault(reward, advantage) - advantage) > tolerance for reward, advantage in members)
    return differ or abs(math.fsum(advantages)) / len(members) > tolerance


def _consecutive_size(groups: Iterable[Sequence[tuple[float, float]]]) -> int | None:
    """Return the smallest number of consecutive members that are groups by their advantages; None if there is none."""
    everything = list(groups)
    for size in range(2, max(map(len, everything)) + 1):
        parts = [group[at : at + size] for group in everything for at in range(0, len(group), size)]
        if all(len(part) == size and not _contradicts(part) for part in parts):
            return size
    return None


def _digest(key: Any) -> bytes:
    """Return a short representation of a key, so that the groups of a file cost little memory whatever names them."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
